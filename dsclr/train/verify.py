"""One step of a run, scaled down, against the same loss computed densely in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from dsclr.config import Config, LossConfig
from dsclr.data import build_train_loader
from dsclr.losses import Keys, build_loss
from dsclr.models import ContrastiveModel, build_model, enable_activation_checkpointing
from dsclr.retention import Retention
from dsclr.rng import RandomState
from dsclr.train.engine import build_engine, engine_config
from dsclr.train.run_plan import Plan
from dsclr.train.runtime import Runtime
from dsclr.train.step import build_step

CHUNKS = 3
MOST_MICRO_BATCH = 8
# Relative, of a tensor's gradient in float32. In bf16 the bound is twice the error of the dense computation in bf16.
TOLERANCE = 1e-4
# A tensor whose gradient is this much smaller than the largest one is known only to the rounding of the whole.
FLOOR = 1e-6


@dataclass(frozen=True)
class Compared:
    """A trainable tensor's gradient.

    Attributes:
        norm: of the dense gradient.
        error: norm of the difference.
        allowed: what the error may be.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Verification:
    """Attributes:
    what: the scaled-down step in words.
    loss, dense_loss: of both computations.
    compared: one entry per trainable tensor; on the first rank only.
    agrees: on every rank.
    """

    what: str
    loss: float
    dense_loss: float
    compared: list[Compared]
    agrees: bool

    def table(self, most: int = 24) -> str:
        """Markdown: the tensors that agree least."""
        worst = sorted(self.compared, key=lambda c: -c.error / max(c.allowed, 1e-300))
        lines = [self.what, "", "| tensor | shape | norm | relative error | allowed | |", "|---|---|---|---|---|---|"]
        for c in worst[:most]:
            norm = max(c.norm, 1e-300)
            shape = " x ".join(map(str, c.shape))
            verdict = "" if c.agrees else "DIFFERS"
            lines.append(
                f"| {c.name} | {shape} | {c.norm:.3e} | {c.error / norm:.1e} | {c.allowed / norm:.1e} | {verdict} |"
            )
        if len(worst) > most:
            lines.append(f"| {len(worst) - most} more, each closer to its bound than these | | | | | |")
        wrong = sum(not c.agrees for c in self.compared)
        verdict = f"all {len(worst)} gradients agree" if self.agrees else f"{wrong} of {len(worst)} gradients differ"
        if not math.isfinite(self.loss):
            verdict = "the step has no gradients: the embeddings are not finite, look at the weights it starts from"
        lines += ["", f"loss {self.loss:.7f}, dense {self.dense_loss:.7f}; {verdict}"]
        return "\n".join(lines)


def scaled_down(config: Config, world_size: int) -> Config:
    """The configuration with a batch of a few small micro-batches, and a k and blocks that mean something in it.

    Args:
        config: with batch keys filled in.
    """
    rows = config.train_batch_size // world_size
    micro = max(1, min(config.micro_batch_size, MOST_MICRO_BATCH, rows // CHUNKS))
    rows = min(rows, CHUNKS * micro)
    raw = copy.deepcopy(config.raw)
    raw.update(train_batch_size=rows * world_size, train_micro_batch_size_per_gpu=micro)
    raw.pop("gradient_accumulation_steps", None)
    ours = raw.setdefault("dsclr", {})
    # Not tested by a first step: the bank is empty in it.
    ours.get("negatives", {}).pop("bank", None)
    loss = ours.setdefault("loss", {})
    keys = rows * (world_size if config.dsclr.negatives.across_ranks != "off" else 1)
    loss["block_size"] = max(1, min(config.dsclr.loss.block_size, keys // 3))
    if config.dsclr.loss.k != "all":
        loss["k"] = max(1, min(config.dsclr.loss.k, keys // 3))
    return Config(raw, config.source).with_world_size(world_size)


def verify(plan: Plan, runtime: Runtime) -> Verification:
    """Take one step of a plan's configuration and compare every gradient; nothing is written.

    The rows are the run's first. Adapters start from small random weights instead of zeros, so that no gradient
    vanishes. The engine's gradients are read after its reduction and before clipping.

    Raises:
        ConfigError, dsclr.data.BadDataError: as in a run.
    """
    config = scaled_down(plan.config, runtime.world_size)
    ours = config.dsclr
    torch.manual_seed(ours.run.seed)
    model = build_model(ours.model, ours.objective).to(runtime.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    reference = copy.deepcopy(model)
    enable_activation_checkpointing(model, config.raw)
    engine = build_engine(model, engine_config(config, 1, "", runtime.device) | {"tensorboard": {"enabled": False}})
    model.train()
    rows = config.train_batch_size // runtime.world_size
    loader = build_train_loader(
        ours.data,
        plan.dataset,
        rows,
        rank=runtime.rank,
        world_size=runtime.world_size,
        local_ranks=runtime.local_world_size,
    )
    batch = next(iter(loader))
    loader.close()

    torch.manual_seed(ours.run.seed + 1 + runtime.rank)
    state = RandomState.capture(runtime.device)
    # Room for one graph: one micro-batch is kept, the others are run again, so that both ways are taken.
    retention = Retention(1, runtime.device)
    retention.graph_bytes = 1 / config.micro_batch_size
    step = build_step(config, engine, runtime.device, retention=retention)
    gradients: dict[str, Tensor] = {}

    def read_gradients() -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = safe_get_full_grad(parameter)
                gradients[name] = torch.zeros_like(parameter) if grad is None else grad.detach().reshape_as(parameter)

    engine.step = read_gradients
    loss = step(batch).loss

    a, b = batch.chunk(0, batch.rows)
    everyone: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(everyone, (a, b, batch.ids, state))
    compared: list[Compared] = []
    exact: dict[str, Tensor] = {}
    dense_loss = float("nan")
    if runtime.is_main:
        dense = _Dense(config, engine, everyone, runtime.device)
        exact, dense_loss = dense.gradients(copy.deepcopy(reference).float(), exact=True)
        rounded = exact
        if config.precision != "fp32" or engine.torch_autocast_enabled():
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision]
            rounded, _ = dense.gradients(reference.to(dtype), exact=False)
        largest = max(float(g.norm()) for g in exact.values())
        for name, grad in gradients.items():
            right = exact[name]
            allowed = TOLERANCE * float(right.norm()) + FLOOR * largest + 2 * float((rounded[name] - right).norm())
            error = float((grad.double() - right).norm())
            compared.append(Compared(name, tuple(grad.shape), float(right.norm()), error, allowed))
    # Embeddings that are not finite end a step before it has gradients.
    verdict = [len(compared) == len(exact) and all(c.agrees for c in compared) if runtime.is_main else True]
    dist.broadcast_object_list(verdict, src=0)
    return Verification(_words(config, runtime), loss, dense_loss, compared, bool(verdict[0]))


def _words(config: Config, runtime: Runtime) -> str:
    loss = config.dsclr.loss
    kept = f", k = {loss.k}, blocks of {loss.block_size}" if loss.name == "topk" else ""
    return (
        f"one step of {config.train_batch_size} rows on {runtime.world_size} rank(s) in micro-batches of "
        f"{config.micro_batch_size}, {config.precision}, ZeRO {config.zero_stage}, loss {loss.name}{kept}, against the "
        "dense loss in one process"
    )


@dataclass(frozen=True)
class _Dense:
    """The step without engine, micro-batches' second pass, scan and sparse backward.

    Attributes:
        everyone: of each rank, (a, b, ids) and the random numbers it starts from.
    """

    config: Config
    engine: Any
    everyone: Sequence[tuple[Tensor, Tensor, Tensor, RandomState]]
    device: torch.device

    def gradients(self, model: ContrastiveModel, exact: bool) -> tuple[dict[str, Tensor], float]:
        """(name -> float64 gradient, loss). exact: not under the engine's autocast."""
        model.train()
        micro = self.config.micro_batch_size
        a, b, ids = [], [], []
        for rows_a, rows_b, rows_ids, state in self.everyone:
            state.restore(self.device)
            for start in range(0, len(rows_ids), micro):
                rows = slice(start, start + micro)
                inputs = rows_a[rows].to(self.device), rows_b[rows].to(self.device)
                if exact:
                    za, zb = model(*inputs)
                else:
                    with autocast_if_enabled(self.engine):
                        za, zb = model(*inputs)
                a.append(za)
                b.append(zb)
            ids.append(rows_ids.to(self.device))
        loss = self._loss(torch.cat(a), torch.cat(b), model.logit_scale.float(), torch.cat(ids))
        loss.backward()
        return {n: _gradient(p) for n, p in model.named_parameters() if p.requires_grad}, float(loss.detach())

    def _loss(self, a: Tensor, b: Tensor, log_scale: Tensor, ids: Tensor) -> Tensor:
        cfg, objective = self.config.dsclr.loss, self.config.dsclr.objective
        scale = log_scale.exp().reshape(())
        if self.config.dsclr.negatives.across_ranks != "off":
            return _dense_loss(cfg, objective, a, b, scale, ids)
        parts = [x.chunk(len(self.everyone)) for x in (a, b, ids)]
        own = [_dense_loss(cfg, objective, pa, pb, scale, pids) for pa, pb, pids in zip(*parts, strict=True)]
        return torch.stack(own).mean()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).double() if parameter.grad is None else parameter.grad.double()


def _dense_loss(cfg: LossConfig, objective: str, a: Tensor, b: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """The configured loss from the whole matrix in float64; a loss that is not this package's as it is."""
    if cfg.name not in ("topk", "exact", "dense"):
        return build_loss(cfg, objective)(a, b, scale, ids, Keys(a, b, ids)).loss
    a, b, scale = a.double(), b.double(), scale.double()
    positive = (a * b).sum(1)
    if objective == "clip":
        directions = [(a, b, ids, positive), (b, a, ids, positive)]
    else:
        z = torch.cat([a, b])
        directions = [(z, z, torch.cat([ids, ids]), torch.cat([positive, positive]))]
    losses = []
    for q, keys, q_ids, own in directions:
        scores = q @ keys.T
        left_out = q_ids[:, None] == q_ids[None, :]
        if cfg.false_negative_margin is not None:
            left_out = left_out | (scores.detach() > own.detach()[:, None] + cfg.false_negative_margin)
        logits = (scores * scale).masked_fill(left_out, -torch.inf)
        if cfg.name == "topk" and cfg.k != "all":
            kept = logits.detach().topk(min(cfg.k, logits.shape[1]), dim=1).indices
            if cfg.tail == "none":
                logits = logits.gather(1, kept)
            else:
                logits = logits.detach().scatter(1, kept, logits.gather(1, kept))
        losses.append(torch.logsumexp(torch.cat([(own * scale)[:, None], logits], 1), 1) - own * scale)
    return torch.cat(losses).mean()
