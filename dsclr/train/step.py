"""One optimizer step over a contrastive batch of any size, in micro-batches (GradCache, Gao et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsclr.data import Batch
from dsclr.losses import Keys, Loss
from dsclr.negatives import MemoryBank
from dsclr.train.engine import clamp_master, master_value

KeySource = Callable[[Tensor, Tensor, Tensor], Keys]


@dataclass(frozen=True)
class StepResult:
    """Attributes:
    loss: mean over all ranks; NaN if the step was skipped before the loss.
    metrics: of the loss, this rank's.
    grad_norm: global norm before clipping; NaN if skipped.
    applied: False when the weights did not change.
    """

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    applied: bool


@dataclass
class ContrastiveStep:
    """Forward without a graph, loss on all embeddings, then forward and backward chunk by chunk.

    The chunks only bound memory: loss, gradients and update are those of the whole batch at once. Every chunk's
    second forward replays the random numbers of its first, so dropout drops the same. A batch that is one
    chunk is run once.

    Args:
        engine: a DeepSpeedEngine around a ContrastiveModel.
        loss_fn: of :mod:`dsclr.losses`.
        key_source: of :mod:`dsclr.negatives`.
        micro_batch_size: rows a chunk.
        device: where the engine lives.
        max_logit_scale: the multiplicative scale is clamped to this after every step.
        bank: further keys; every step's keys are added to it.
    """

    engine: Any
    loss_fn: Loss
    key_source: KeySource
    micro_batch_size: int
    device: torch.device
    max_logit_scale: float
    bank: MemoryBank | None = None

    def __call__(self, batch: Batch, number: int = 0) -> StepResult:
        """
        Args:
            batch: this rank's rows.
            number: of the step, from which the bank's rows age.
        """
        chunks = [
            (start, min(start + self.micro_batch_size, len(batch.ids)))
            for start in range(0, len(batch.ids), self.micro_batch_size)
        ]
        graphs: list[tuple[Tensor, Tensor]] = []
        random_states: list[RandomState] = []
        with torch.set_grad_enabled(len(chunks) == 1):
            for start, end in chunks:
                random_states.append(RandomState.capture(self.device))
                graphs.append(self._encode(batch, start, end))
        a = torch.cat([za.detach() for za, _ in graphs]).requires_grad_()
        b = torch.cat([zb.detach() for _, zb in graphs]).requires_grad_()
        if not self._finite_everywhere(a, b):
            return StepResult(math.nan, {}, math.nan, applied=False)

        log_scale = self.engine.module.logit_scale
        # The optimizer's fp32 value: a bf16 copy is only good to 1 %.
        log_scale_value = master_value(log_scale).requires_grad_(log_scale.requires_grad)
        ids = batch.ids.to(self.device, non_blocking=True)
        keys = self.key_source(a, b, ids)
        metrics = {}
        if self.bank is not None:
            keys = replace(keys, bank=self.bank.keys(number))
            metrics = self.bank.metrics(number)
        output = self.loss_fn(a, b, log_scale_value.exp(), ids, keys)
        output.loss.backward()
        grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in (a, b)]

        for index, (start, end) in enumerate(chunks):
            last = index == len(chunks) - 1
            if len(chunks) > 1:
                random_states[index].restore(self.device)
                za, zb = self._encode(batch, start, end)
            else:
                za, zb = graphs[0]
            surrogate = (za * grads[0][start:end]).sum() + (zb * grads[1][start:end]).sum()
            if last and log_scale_value.grad is not None:
                surrogate = surrogate + (log_scale.float() * log_scale_value.grad).sum()
            # Without this boundary DeepSpeed would keep the last chunk's gradient only.
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.backward(surrogate, scale_wrt_gas=False)
        skipped_before = self.engine.skipped_steps
        self.engine.step()
        applied = self.engine.skipped_steps == skipped_before
        if log_scale.requires_grad:
            clamp_master(log_scale, math.log(self.max_logit_scale))
        if self.bank is not None:
            self.bank.add(keys.a, keys.b, keys.ids, number)
        metrics.update((name, float(value)) for name, value in output.metrics.items())
        return StepResult(self._mean_over_ranks(output.loss), metrics, self._grad_norm(), applied)

    def _encode(self, batch: Batch, start: int, end: int) -> tuple[Tensor, Tensor]:
        a = batch.a[start:end].to(self.device, non_blocking=True)
        b = batch.b[start:end].to(self.device, non_blocking=True)
        return self.engine(a, b)

    def _finite_everywhere(self, a: Tensor, b: Tensor) -> bool:
        """Whether all embeddings are finite, agreed between the ranks so that none waits for another."""
        finite = (a.isfinite().all() & b.isfinite().all()).to(torch.float32)
        if dist.is_initialized():
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def _mean_over_ranks(self, loss: Tensor) -> float:
        mean = loss.detach().to(torch.float64 if self.device.type == "cpu" else torch.float32)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        return float(mean)

    def _grad_norm(self) -> float:
        norm = self.engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)


@dataclass(frozen=True)
class RandomState:
    """torch's random numbers on the host and on the device."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)
