"""What tools/bench_step.py measures: a training step of this package, of others, and the encoder alone.

The steps of others are ports of their schemes, with open_clip's ClipLoss; ours takes the full softmax ("exact"), which
is the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from dsclr.config import Config
from dsclr.data import Batch
from dsclr.models import ContrastiveModel, build_model, enable_activation_checkpointing
from dsclr.retention import Retention
from dsclr.train.engine import build_engine, engine_config
from dsclr.train.step import ContrastiveStep, build_step

# Small, so that nothing measured drifts; learning is not what is measured.
LEARNING_RATE = 1e-6
# Bytes for graphs that no step fills.
EVERYTHING = 1 << 60
# What float32 leaves of sums in another order: of a tensor's gradient, and of the largest one.
TOLERANCE, FLOOR = 1e-4, 1e-6
CHECKED_MICRO, CHECKED_CHUNKS = 2, 2

# Takes one optimizer step, but for the encoder alone, which only fills gradients.
Scheme = Callable[[Batch], Any]


@dataclass(frozen=True)
class Setup:
    """Attributes:
    model: an open_clip name or a JSON file.
    rank: of LoRA; 0: every weight trains.
    micro: rows of a micro-batch.
    checkpointing: of activations.
    precision: "fp32" or "bf16".
    """

    model: str
    rank: int
    micro: int
    checkpointing: bool
    precision: str

    def config(self, rows: int, retain: int = 0) -> Config:
        """A run of so many rows a step under ZeRO 2."""
        lora = {"rank": self.rank, "alpha": 2 * self.rank} if self.rank else None
        raw: dict[str, Any] = {
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": min(self.micro, rows),
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {"stage": 2},
            "tensorboard": {"enabled": False},
            "dsclr": {
                "run": {"max_steps": 1},
                "model": {"name": self.model, "lora": lora},
                "loss": {"name": "exact"},
                "step": {"retain": retain},
            },
        }
        if self.precision == "bf16":
            raw["bf16"] = {"enabled": True}
        if self.checkpointing:
            raw["activation_checkpointing"] = {}
        return Config(raw).with_world_size(1)


def make_model(setup: Setup, device: torch.device) -> ContrastiveModel:
    """In training mode, with random weights in the run's precision, adapters included."""
    config = setup.config(setup.micro)
    torch.manual_seed(0)
    model = build_model(config.dsclr.model, config.dsclr.objective).to(device)
    # Fresh adapters have B = 0, for which half of the gradients are zero.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    enable_activation_checkpointing(model, config.raw)
    return model.to(torch.bfloat16 if setup.precision == "bf16" else torch.float32).train()


def make_batch(model: ContrastiveModel, rows: int) -> Batch:
    """Random images and token ids in the host's memory, pinned where a device reads them."""
    generator = torch.Generator().manual_seed(rows)
    text = (model.model_cfg or {})["text_cfg"]
    length, vocabulary = text.get("context_length", 77), text.get("vocab_size", 49408)
    images = torch.randint(0, 256, (rows, 3, *model.settings.image_size), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(1, vocabulary - 1, (rows, length), generator=generator)
    tokens[:, -1] = vocabulary - 1  # the largest id is where the text tower reads
    parts = images, tokens, torch.arange(rows)
    return Batch(*(x.pin_memory() if model.logit_scale.is_cuda else x for x in parts))


def make_engine(setup: Setup, model: ContrastiveModel) -> Any:
    engine = build_engine(model, engine_config(setup.config(setup.micro), 1, "", model.logit_scale.device))
    model.train()
    return engine


def make_step(setup: Setup, engine: Any, retention: Retention) -> ContrastiveStep:
    return build_step(setup.config(setup.micro), engine, retention.device, retention=retention)


def other_schemes(model: ContrastiveModel, micro: int) -> dict[str, Scheme]:
    """The encoder alone and the steps of others on one model, with one optimizer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def step(backward: Callable[[Batch], None]) -> Scheme:
        def run(batch: Batch) -> None:
            optimizer.zero_grad()
            backward(batch)
            optimizer.step()

        return run

    # Never a multiple of an embedding, whose gradients would vanish into denormal numbers.
    directions = torch.randn(2, micro, (model.model_cfg or {})["embed_dim"], device=model.logit_scale.device)

    def encoder(forwards: int) -> Scheme:
        def run(batch: Batch) -> None:
            optimizer.zero_grad()
            encoder_alone(model, batch, micro, forwards, lambda rows: directions[:, : rows.stop - rows.start])

        return run

    return {
        "forward_backward": encoder(1),
        "two_forwards_backward": encoder(2),
        "plain": step(lambda batch: plain(model, batch)),
        "accum_freq": step(lambda batch: accum_freq(model, batch, micro)),
        "gradcache": step(lambda batch: gradcache(model, batch, micro)),
    }


def encoder_alone(
    model: ContrastiveModel, batch: Batch, micro: int, forwards: int, gradients: Callable[[slice], Tensor]
) -> None:
    """Forward and backward of every micro-batch; with two forwards, the first of each has no graph and comes before.

    Args:
        gradients: rows of the batch -> (2, rows, D) gradients of their embeddings.
    """
    chunks = _chunks(batch.rows, micro)
    for rows in chunks if forwards == 2 else []:
        with torch.no_grad():
            model(*_on_device(model, batch, rows))
    for rows in chunks:
        torch.autograd.backward(model(*_on_device(model, batch, rows)), list(gradients(rows).unbind()))


def plain(model: ContrastiveModel, batch: Batch) -> None:
    """All rows at once."""
    a, b = model(*_on_device(model, batch, slice(0, batch.rows)))
    ClipLoss()(a, b, model.logit_scale.exp()).backward()


def accum_freq(model: ContrastiveModel, batch: Batch, micro: int) -> None:
    """open_clip's --accum-freq (3.3, ``train_one_epoch``): every micro-batch's loss is that of all rows.

    Features of all rows without a graph, then for each micro-batch its forward again, its features among the others',
    the whole loss and its backward. Inputs stay on the device, as there. The gradient of logit_scale comes out once for
    each micro-batch, as there too.
    """
    inputs = [_on_device(model, batch, rows) for rows in _chunks(batch.rows, micro)]
    with torch.no_grad():
        features = [model(*x) for x in inputs]
    loss_fn = ClipLoss()
    for j, x in enumerate(inputs):
        among = [*features[:j], model(*x), *features[j + 1 :]]
        a, b = (torch.cat([pair[side] for pair in among]) for side in (0, 1))
        loss_fn(a, b, model.logit_scale.exp()).backward()


def gradcache(model: ContrastiveModel, batch: Batch, micro: int) -> None:
    """The GradCache package (Gao et al. 2021, ``cache_step``) with the towers as its two models, one after the other.

    It keeps no graph, replays random numbers with a fork of them, and goes back through a dot product.
    """
    towers = (model.encode_image, model.encode_text)
    chunks = _chunks(batch.rows, micro)
    inputs = [[_on_device(model, batch, rows)[side] for rows in chunks] for side in (0, 1)]
    states: list[list[_RandomContext]] = [[], []]
    reps = []
    for encode, xs, own in zip(towers, inputs, states, strict=True):
        parts = []
        with torch.no_grad():
            for x in xs:
                own.append(_RandomContext(x))
                parts.append(encode(x))
        reps.append(torch.cat(parts).requires_grad_())
    ClipLoss()(*reps, model.logit_scale.exp()).backward()
    for encode, xs, own, rep in zip(towers, inputs, states, reps, strict=True):
        for x, state, gradient in zip(xs, own, _gradient(rep).split(micro), strict=True):
            with state.replayed():
                part = encode(x)
            torch.dot(part.float().flatten(), gradient.float().flatten()).backward()


class _RandomContext:
    def __init__(self, x: Tensor) -> None:
        self.host = torch.get_rng_state()
        self.devices, self.states = get_device_states(x)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.host)
            set_device_states(self.devices, self.states)
            yield


def _chunks(rows: int, micro: int) -> list[slice]:
    return [slice(start, min(start + micro, rows)) for start in range(0, rows, micro)]


def _on_device(model: ContrastiveModel, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
    a, b = (x.to(model.logit_scale.device, non_blocking=True) for x in batch.chunk(rows.start, rows.stop))
    return a, b


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def check_agreement(setup: Setup, device: torch.device) -> dict[str, float]:
    """Every scheme's parameter gradients against those of the plain step, on a few rows, in float32.

    Returns:
        The largest error of each scheme, in units of what is allowed.

    Raises:
        SystemExit: one is beyond rounding: it would not be the same step that is compared.
    """
    setup = replace(setup, micro=CHECKED_MICRO, precision="fp32")
    model = make_model(setup, device)
    batch = make_batch(model, CHECKED_MICRO * CHECKED_CHUNKS)
    expected = _gradients_of(model, lambda: plain(model, batch))
    embedding_gradients = _embedding_gradients(model, batch)

    def alone(forwards: int) -> dict[str, Tensor]:
        def run() -> None:
            encoder_alone(model, batch, setup.micro, forwards, lambda rows: embedding_gradients[:, rows])

        # All but the loss's own parameter.
        return {**_gradients_of(model, run), **_scale(expected, 1)}

    once_a_chunk = _gradients_of(model, lambda: accum_freq(model, batch, setup.micro))
    got = {
        "forward_backward": alone(1),
        "two_forwards_backward": alone(2),
        "accum_freq": {**once_a_chunk, **_scale(once_a_chunk, CHECKED_CHUNKS)},
        "gradcache": _gradients_of(model, lambda: gradcache(model, batch, setup.micro)),
    }
    engine = make_engine(setup, model)
    for name, retain in (("step_none_kept", 0), ("step_all_kept", EVERYTHING)):
        got[name] = _engine_gradients(engine, make_step(setup, engine, Retention(retain, device)), batch)
    errors = {name: _error(gradients, expected) for name, gradients in got.items()}
    for name, error in errors.items():
        if not error <= 1:
            raise SystemExit(f"{name} does not compute the plain step's gradients: {error:.2g} times what is allowed")
    return errors


def _gradients_of(model: ContrastiveModel, backward: Callable[[], None]) -> dict[str, Tensor]:
    model.zero_grad()
    backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _embedding_gradients(model: ContrastiveModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        sides = model(*_on_device(model, batch, slice(0, batch.rows)))
    leaves = [z.requires_grad_() for z in sides]
    ClipLoss()(*leaves, model.logit_scale.detach().exp()).backward()
    return torch.stack([_gradient(z) for z in leaves])


def _scale(gradients: dict[str, Tensor], divisor: int) -> dict[str, Tensor]:
    return {name: gradient / divisor for name, gradient in gradients.items() if name.endswith("logit_scale")}


def _engine_gradients(engine: Any, step: ContrastiveStep, batch: Batch) -> dict[str, Tensor]:
    """As the optimizer would get them."""
    found: dict[str, Tensor] = {}

    def read() -> None:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                found[name] = safe_get_full_grad(parameter).detach().reshape_as(parameter).double()

    stock, engine.step = engine.step, read
    step(batch)
    engine.step = stock
    return found


def _error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if got.keys() != expected.keys():
        return float("inf")
    largest = max(float(g.norm()) for g in expected.values())
    return max(
        float((got[name] - right).norm()) / (TOLERANCE * float(right.norm()) + FLOOR * largest)
        for name, right in expected.items()
    )
