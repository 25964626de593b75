"""What a run will need of memory, part by part, and which settings fit a card.

The encoder is measured on two small micro-batches and extended in proportion; everything else follows from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsclr.config import Config, ConfigError
from dsclr.data.tasks import ROWS_PER_TASK
from dsclr.encoder_use import MEASURED_ROWS, Autocast, EncoderUse, measure_encoder
from dsclr.losses.footprint import CLIP_LOSS_MATRICES, dense_bytes, loss_bytes
from dsclr.models import ContrastiveModel, disable_activation_checkpointing, enable_activation_checkpointing
from dsclr.models.statistics import frozen_statistics
from dsclr.retention import DEVICE_SHARE, HOST_SHARE, keeps_hidden, kept_chunks
from dsclr.rng import RandomState
from dsclr.units import format_bytes

# A GPU works below its speed on smaller micro-batches; they are proposed only if nothing else fits.
SMALLEST_EFFICIENT = 32
# Forwards a row that a larger micro-batch may cost.
NEARLY = 0.05
# Of a weight.
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Bytes of optimizer state a parameter, in float32.
_OPTIMIZER_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "onebitadam": 8, "sgd": 0, "lion": 4, "adagrad": 4, "muon": 4}


@dataclass(frozen=True)
class Setting:
    """Attributes:
    rows: N, of a rank.
    micro_batch_size: rows of a chunk.
    checkpointing: whether activations are checkpointed.
    kept: chunks whose graph is kept.
    hidden: whether the frozen blocks' output is kept of the rows that are run again.
    """

    rows: int
    micro_batch_size: int
    checkpointing: bool
    kept: int
    hidden: bool = False

    @property
    def chunks(self) -> int:
        return math.ceil(self.rows / self.micro_batch_size)

    @property
    def forwards(self) -> float:
        """Forwards a row, the checkpointed one in the backward included: 1 is the least, 3 the most."""
        kept = min(1.0, self.kept * self.micro_batch_size / self.rows)
        return 1 + (1 - kept) + self.checkpointing


@dataclass(frozen=True)
class Forecast:
    """Bytes on the device of one rank (and on the host) at the step's four peaks.

    Attributes:
        setting: what they are for.
        parts: name -> bytes, at the time of the highest peak or not (the parts do not all live at once).
        phases: name -> what lives then, name -> bytes.
        host: name -> bytes on the host.
        unknown: what is not in the numbers.
    """

    setting: Setting
    parts: dict[str, int]
    phases: dict[str, dict[str, int]]
    host: dict[str, int]
    unknown: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.phase_bytes(self.peak_phase)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phase_bytes)

    def phase_bytes(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": {**asdict(self.setting), "forwards": self.setting.forwards},
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "parts": self.parts,
            "peak_parts": self.phases[self.peak_phase],
            "phases": {phase: self.phase_bytes(phase) for phase in self.phases},
            "host": self.host,
            "not_counted": list(self.unknown),
        }


@dataclass(frozen=True)
class Planner:
    """Forecasts for one configuration and any batch.

    Attributes:
        config: with batch keys filled in.
        world_size: ranks.
        uses: checkpointing on or off -> what the encoder takes; one of them may be missing.
        parameters, trainable: numbers of elements.
        model_bytes: of all parameters and buffers.
        element_bytes: of a trainable parameter.
        dim: D of the embeddings.
        image_bytes: of a sample's images on the host.
    """

    config: Config
    world_size: int
    uses: dict[bool, EncoderUse]
    parameters: int
    trainable: int
    model_bytes: int
    element_bytes: int
    dim: int
    image_bytes: int

    def configured(self, device_bytes: int, on_host: bool = False) -> Setting:
        """The setting of the configuration; where dsclr.step.retain is "auto", on a device of so many bytes.

        Args:
            on_host: the bytes are a host's, of which less is filled.
        """
        rows = self.config.train_batch_size // self.world_size
        micro = min(self.config.micro_batch_size, rows)
        base = Setting(rows, micro, "activation_checkpointing" in self.config.raw, 1)
        retain = self.config.dsclr.step.retain
        if base.chunks == 1:
            return base
        if retain == "auto":
            if not on_host:
                return self.with_most_kept(base, device_bytes)
            retain = int(HOST_SHARE * device_bytes)
        return self._with_budget(base, retain)

    def with_most_kept(self, setting: Setting, device_bytes: int) -> Setting:
        """With the graphs of as many chunks as fit the device, one at least."""
        one = replace(setting, kept=1)
        spare = int(DEVICE_SHARE * device_bytes) - self.forecast(one).peak_bytes
        graph = self.uses[setting.checkpointing].graph(setting.micro_batch_size)
        return self._with_budget(setting, graph + spare) if spare > 0 and setting.chunks > 1 else one

    def _with_budget(self, setting: Setting, retain: int) -> Setting:
        """As :class:`dsclr.retention.Retention` spends so many bytes."""
        use, rows, micro = self.uses[setting.checkpointing], setting.rows, setting.micro_batch_size
        graph_bytes, hidden_bytes = use.graph(micro) / micro, use.hidden(rows) / rows
        kept = kept_chunks(retain, rows, micro, graph_bytes, hidden_bytes)
        return replace(setting, kept=kept, hidden=keeps_hidden(retain, rows, hidden_bytes))

    def forecast(self, setting: Setting) -> Forecast:
        """The four times of a step at which memory peaks: all its forwards, its loss, its backwards, the optimizer."""
        ours, zero = self.config.dsclr, self.config.zero_stage
        shards = self.world_size if zero >= 1 or self.config.precision == "bf16" else 1
        has_master = zero >= 1 or self.config.precision != "fp32"
        state = _OPTIMIZER_BYTES.get(self.config.raw["optimizer"]["type"].lower())
        parts = {
            "parameters": self.model_bytes,
            "fp32 master weights": 4 * self.trainable // shards if has_master else 0,
            "optimizer state": (8 if state is None else state) * self.trainable // shards,
        }
        across = ours.negatives.across_ranks if self.world_size > 1 else "off"
        keys = setting.rows * (self.world_size if across != "off" else 1)
        pair = 2 * 4 * self.dim
        bank, holders = 0, 1
        if ours.negatives.bank is not None:
            bank = ours.negatives.bank.size
            holders = self.world_size if ours.negatives.bank.sharded else 1
        # A part of another rank comes while one is worked on.
        parts["memory bank"] = (bank // holders) * (pair + 8) * (3 if holders > 1 else 1)
        resident = dict(parts)
        # The chunks' own, one tensor of all, and its gradient. Of other ranks: gathered keys, their gradients, and what
        # arrives of these; in a ring two ranks' keys and three ranks' gradients.
        others = {"off": 0, "gather": 3 * pair * keys, "ring": 5 * pair * setting.rows}[across]
        embeddings = 3 * pair * setting.rows + others
        # Keys of other ranks are scanned rank by rank.
        at_once = setting.rows if across != "off" and ours.loss.name in ("topk", "exact") else keys + bank
        loss = loss_bytes(ours.loss, setting.rows, at_once, self.dim, ours.objective)
        use, micro = self.uses[setting.checkpointing], setting.micro_batch_size
        graph, backward_peak, recompute_peak = use.graph(micro), use.backward_peak(micro), use.recompute_peak(micro)
        kept = setting.kept * graph
        hidden = use.hidden(max(0, setting.rows - setting.kept * micro)) if setting.hidden else 0
        # Summed in float32; handed over in the engine's own precision, in its bucket, and to the optimizer in float32.
        summed, handed = 4 * self.trainable, (3 * self.element_bytes + 4) * self.trainable
        backward = self._backward(setting, graph, backward_peak, recompute_peak)
        parts.update(
            {
                "graphs kept": kept,
                "frozen blocks' output": hidden,
                "a micro-batch at work": recompute_peak if setting.kept < setting.chunks else backward_peak,
                "embeddings and their gradients": embeddings,
                "loss": loss or 0,
                "gradients": summed + handed,
            }
        )
        # With every graph kept no forward runs without one.
        forward = use.forward_peak(micro) if setting.kept < setting.chunks else backward_peak - graph
        held = {**resident, "graphs kept": kept, "frozen blocks' output": hidden}
        phases = {
            "encoder forward": {**held, "a micro-batch at work": forward, "embeddings": pair * setting.rows},
            "loss": {**held, "embeddings and their gradients": embeddings, "loss": loss or 0},
            "encoder backward": {
                **resident,
                "frozen blocks' output": hidden,
                "embeddings and their gradients": embeddings,
                "graphs, a micro-batch at work and gradients": backward,
            },
            "optimizer": {**resident, "embeddings and their gradients": embeddings, "gradients": summed + handed},
        }
        unknown = [
            "what the driver and libraries take on a GPU (some 0.5 GB); on a CPU the process itself with its libraries "
            "(some 1 GB, in the metrics' peak_bytes) and holes in the heap"
        ]
        if loss is None:
            unknown.append(f"the buffers of {ours.loss.name}")
        if state is None:
            unknown.append(f"the state of {self.config.raw['optimizer']['type']} (taken for Adam's)")
        return Forecast(setting, parts, phases, self._host(setting), tuple(unknown))

    def _backward(self, setting: Setting, graph: int, peak: int, recompute_peak: int) -> int:
        """The most during the backwards: graphs go one after the other, gradients come.

        Args:
            graph, peak, recompute_peak: of a micro-batch.
        """
        kept, at_work = setting.kept, peak - graph
        own, summed = self.element_bytes * self.trainable, 4 * self.trainable
        times = [0]
        if kept:
            # The first one has no sum beside it, at its end its own gradients only (and their copy in float32).
            times += [kept * graph + at_work, (kept - 1) * graph + own + (summed if self.element_bytes < 4 else 0)]
        if kept > 1:
            times.append((kept - 1) * graph + at_work + summed)
        if setting.chunks > 1:
            times.append(max(kept - 2, 0) * graph + summed + own)
        if kept < setting.chunks:
            times.append(recompute_peak + summed)
        return max(times)

    def _host(self, setting: Setting) -> dict[str, int]:
        ours = self.config.dsclr
        images = setting.rows * self.image_bytes
        workers = ours.data.workers if ours.data.workers is not None else 1
        prefetched = max(1, workers) * ours.data.prefetch * ROWS_PER_TASK * self.image_bytes
        where = {
            "keep": {"images in memory": images},
            "spill": {"images on disk": images},
            "reread": {"images in memory": 0},
        }[ours.step.host_images]
        return {**where, f"prefetched (dsclr.data.prefetch x {max(1, workers)} workers)": prefetched}

    def dense(self, rows: int) -> dict[str, int]:
        """What the same rows take where the encoder runs all at once, without checkpointing, under the dense loss."""
        use = self.uses[False] if False in self.uses else self.uses[True]
        keys = rows * (self.world_size if self.config.dsclr.negatives.across_ranks != "off" else 1)
        factor = 4 if self.config.dsclr.objective == "simclr" else 1
        return {
            "one similarity matrix": factor * 4 * rows * keys,
            "ClipLoss": factor * dense_bytes(rows, keys, CLIP_LOSS_MATRICES),
            "activations": use.backward_peak(rows),
        }

    def fits(self, setting: Setting, device_bytes: int) -> bool:
        return self.forecast(setting).peak_bytes <= DEVICE_SHARE * device_bytes

    def best(self, rows: int, device_bytes: int) -> Forecast | None:
        """The setting with the largest micro-batch among those of ``rows`` rows a rank with nearly the fewest forwards.

        Nearly: a twentieth of a forward a row more at most, for which a larger micro-batch makes up. None: not even a
        micro-batch of one row fits.
        """
        fitting = [s for s in self._settings(rows, device_bytes) if self.fits(s, device_bytes)]
        efficient = [s for s in fitting if s.micro_batch_size >= min(SMALLEST_EFFICIENT, rows)] or fitting
        if not efficient:
            return None
        nearly_fewest = min(s.forwards for s in efficient) + NEARLY
        best = min(
            (s for s in efficient if s.forwards <= nearly_fewest), key=lambda s: (-s.micro_batch_size, s.forwards)
        )
        return self.forecast(best)

    def _settings(self, rows: int, device_bytes: int) -> Iterable[Setting]:
        for checkpointing in self.uses:
            for micro in _divisors(rows):
                base = self._plain(rows, micro, checkpointing)
                yield base
                yield self.with_most_kept(base, device_bytes)

    def least_device_bytes(self, rows: int) -> int:
        """Of the smallest card on which ``rows`` rows a rank fit, one at a time."""
        peaks = [self.forecast(self._plain(rows, 1, checkpointing)).peak_bytes for checkpointing in self.uses]
        return math.ceil(min(peaks) / DEVICE_SHARE)

    def largest_micro_batch(self, rows: int, checkpointing: bool, device_bytes: int) -> int | None:
        """That divides ``rows``, with no graph kept."""
        sizes = [m for m in _divisors(rows) if self.fits(self._plain(rows, m, checkpointing), device_bytes)]
        return max(sizes, default=None)

    def largest_rows(self, micro: int, checkpointing: bool, device_bytes: int) -> int:
        """Rows a rank in micro-batches of ``micro``, no graph kept; 0 if none fit. Up to 2^24."""
        low, high = 0, 2**24 // micro
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(self._plain(middle * micro, micro, checkpointing), device_bytes):
                low = middle
            else:
                high = middle - 1
        return low * micro

    @staticmethod
    def _plain(rows: int, micro: int, checkpointing: bool) -> Setting:
        return Setting(rows, micro, checkpointing, 1 if micro == rows else 0)


def _divisors(rows: int) -> list[int]:
    small = [m for m in range(1, math.isqrt(rows) + 1) if rows % m == 0]
    return sorted({*small, *(rows // m for m in small)})


def make_planner(
    config: Config,
    world_size: int,
    model: ContrastiveModel,
    tokenizer: Any,
    *,
    both: bool = True,
    autocast: Autocast = nullcontext,
) -> Planner:
    """Measure a model for a plan. Neither its gradients nor the random numbers change.

    Args:
        config: with batch keys filled in.
        model: on its device, in training mode. In another precision than the run's, what is measured is scaled to the
            run's: a CPU without instructions for bf16 would take minutes for a large model in it.
        tokenizer: of the model; None under "simclr".
        both: measure with and without activation checkpointing; False: as the configuration says.
        autocast: makes the context in which the model runs.

    Raises:
        ConfigError: no parameter trains.
    """
    height, width = model.settings.image_size
    device = model.logit_scale.device

    def images(rows: int) -> Tensor:
        return torch.randint(0, 256, (rows, 3, height, width), dtype=torch.uint8, device=device)

    def rows_of(rows: int) -> tuple[Tensor, Tensor]:
        return images(rows), images(rows) if tokenizer is None else tokenizer(["a photo"] * rows).to(device)

    state = RandomState.capture(device)
    # Libraries allocate their workspaces at the first call.
    with torch.no_grad(), autocast(), frozen_statistics(model):
        dim = model(*rows_of(MEASURED_ROWS[0]))[0].shape[1]
    configured = "activation_checkpointing" in config.raw
    uses = {configured: measure_encoder(model, rows_of, autocast)}
    if both:
        other = _measure_other(config, model, configured, lambda: measure_encoder(model, rows_of, autocast))
        if other is not None:
            uses[not configured] = other
    state.restore(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("nothing to train: adapt or unlock a tower, or let dsclr.model.logit_scale.learnable be true")
    element_bytes = ELEMENT_BYTES[config.precision]
    scale = element_bytes / trainable[0].element_size()
    sides = 2 if tokenizer is None else 1
    return Planner(
        config=config,
        world_size=world_size,
        uses={on: use * scale for on, use in uses.items()},
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trainable),
        model_bytes=int(scale * sum(x.nbytes for x in (*model.parameters(), *model.buffers()))),
        element_bytes=element_bytes,
        dim=dim,
        image_bytes=sides * 3 * height * width,
    )


def _measure_other(
    config: Config, model: ContrastiveModel, configured: bool, measure: Callable[[], EncoderUse]
) -> EncoderUse | None:
    """With activation checkpointing where the run has none, and the other way round; None where a model cannot."""
    try:
        if configured:
            disable_activation_checkpointing(model)
        else:
            enable_activation_checkpointing(model, {"activation_checkpointing": {}})
        return measure()
    except ConfigError:
        return None
    finally:
        if configured:
            enable_activation_checkpointing(model, config.raw)
        else:
            disable_activation_checkpointing(model)


def summary(forecast: Forecast, device_bytes: int) -> str:
    """One line: peak, its phase and the largest parts of what lives then."""
    largest = sorted(forecast.phases[forecast.peak_phase].items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    peak, whole = format_bytes(forecast.peak_bytes), format_bytes(device_bytes)
    return f"{peak} of {whole} a rank at the {forecast.peak_phase} ({parts})"
