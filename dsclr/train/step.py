"""One optimizer step over a contrastive batch of any size, in micro-batches (GradCache, Gao et al. 2021)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor, nn

from dsclr.config import Config
from dsclr.data import BatchLike
from dsclr.losses import Keys, Loss, LossOutput, SharedKeys, backward_of_collected, build_loss, streams_keys
from dsclr.memory import is_out_of_memory, measured, peak_bytes, release
from dsclr.models.leaves import separate_leaves
from dsclr.models.memo import Memo
from dsclr.models.statistics import capture_statistics, frozen_statistics
from dsclr.negatives import EXCHANGES, Bank, Exchange, ShardedBank
from dsclr.ops.shared import SharedRows
from dsclr.retention import Retention
from dsclr.rng import RandomState
from dsclr.train.engine import deliver_gradients, loss_scale, plain_grad_norm
from dsclr.train.finite import NotFinite, first_not_finite, named_embeddings, named_gradients
from dsclr.train.masters import clamp_master, master_value
from dsclr.train.timing import StepClock
from dsclr.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """A step that fits no smaller; the message says what did not fit and what to do."""


class _DoesNotFit(Exception):
    """Some rank ran out of memory; all ranks raise this together.

    Attributes:
        kept_rows: rows whose graph was kept, the most of any rank.
        kept_hidden: whether the frozen blocks' output was kept beside them.
    """

    def __init__(self, phase: str, kept_rows: int, kept_hidden: bool) -> None:
        super().__init__(phase)
        self.phase, self.kept_rows, self.kept_hidden = phase, kept_rows, kept_hidden


@dataclass(frozen=True)
class StepResult:
    """Attributes:
    loss: mean over all ranks; NaN if the step was skipped before the loss.
    metrics: of the loss, this rank's; micro_batch_size, and retained: the part of the rows whose graph was kept.
    grad_norm: global norm before clipping; NaN if skipped.
    applied: False when the weights did not change.
    not_finite: why the step was skipped, unless the optimizer did that for itself (fp16).
    """

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    applied: bool
    not_finite: NotFinite | None = None


@dataclass
class _Chunk:
    """Rows [start, end) of the batch between the two passes.

    Attributes:
        random_state: before the forward.
        outputs: with their graph if it is kept, without otherwise.
        memo: what the second forward starts from.
    """

    start: int
    end: int
    random_state: RandomState
    outputs: tuple[Tensor, Tensor]
    memo: Memo | None


@dataclass(frozen=True)
class _LossResult:
    value: Tensor
    metrics: dict[str, Tensor | float]
    rows: SharedRows | None
    log_scale_grad: Tensor | None


@dataclass
class ContrastiveStep:
    """Forward, loss on all embeddings, then the embeddings' gradients back through the encoder chunk by chunk.

    The chunks only bound memory: loss, gradients and update are those of the whole batch at once. As many chunks as
    ``retention`` allows keep their graph for the backward; the others are run again, one tower after the other, from
    the same random numbers, so that dropout drops the same. What does not train is not run again where that is cheap
    (:class:`Memo`).

    The engine sees one backward a step, which hands it the summed gradients. Until then nothing of it has changed, so
    a step that runs out of memory is done again from its start: on all ranks together, from the same rows and random
    numbers, with half the micro-batch, which stays halved. Chunks of another size draw dropout in another order;
    without dropout the update is the same.

    Args:
        engine: a DeepSpeedEngine around a ContrastiveModel.
        loss_fn: of :mod:`dsclr.losses`.
        exchange: of :mod:`dsclr.negatives`; None: a rank's keys are its own rows.
        micro_batch_size: rows a chunk; halved when memory runs out.
        device: where the engine lives.
        max_logit_scale: the multiplicative scale is clamped to this after every step.
        bank: further keys; every step's keys are added to it.
        retention: of graphs; None: none is kept beyond the first pass.

    Attributes:
        recoveries: how often a step was done again.
        clock: told of the phases in which this rank works alone.
    """

    engine: Any
    loss_fn: Loss
    exchange: Exchange | None
    micro_batch_size: int
    device: torch.device
    max_logit_scale: float
    bank: Bank | None = None
    retention: Retention | None = None
    recoveries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.device)
        self._retention = self.retention or Retention(0, self.device)
        # Made beforehand: there must be room for it when there is room for nothing else.
        self._flags = torch.zeros(3, device=self.device)
        self._kept_rows, self._kept_hidden = 0, False
        self._phase = ""
        if self.exchange is not None:
            self.exchange.transport.agree = partial(self._agree, False)
            if isinstance(self.bank, ShardedBank):
                # One transport: ranks agree before the bank's visits too, and its bytes are counted.
                self.bank.exchange.transport = self.exchange.transport

    def __call__(self, batch: BatchLike, number: int = 0) -> StepResult:
        """
        Args:
            batch: this rank's rows.
            number: of the step, from which the bank's rows age.

        Raises:
            OutOfMemory: one row at a time does not fit, or the loss does not.
        """
        start = RandomState.capture(self.device)
        restore_statistics = capture_statistics(self.engine.module)
        while True:
            try:
                result = self._attempt(batch, number)
                if result.not_finite is not None:
                    restore_statistics()
                return result
            except _DoesNotFit as failure:
                failed = failure.phase, failure.kept_rows, failure.kept_hidden
            # Only here, behind the handler: the traceback holds on to the tensors of the attempt.
            release(self.device)
            self._shrink(*failed, batch.rows, number)
            start.restore(self.device)
            restore_statistics()

    def _attempt(self, batch: BatchLike, number: int) -> StepResult:
        self._kept_rows, self._kept_hidden = 0, False
        log_scale = self.engine.module.logit_scale
        with separate_leaves(self.engine.module) as leaves:
            chunks = self._together("encoder forward", lambda: self._forward(batch))
            with _no_way_back(number, "embeddings of all rows", "lower train_batch_size"):
                a = torch.cat([chunk.outputs[0].detach() for chunk in chunks]).requires_grad_()
                b = torch.cat([chunk.outputs[1].detach() for chunk in chunks]).requires_grad_()
            bad = first_not_finite(named_embeddings(a, b, self.engine.module.objective), self.device)
            if bad is not None:
                return StepResult(math.nan, {}, math.nan, applied=False, not_finite=bad)
            loss = self._loss(batch, a, b, log_scale, number)
            embeddings = (_gradient(a), _gradient(b))
            gradients = self._together("encoder backward", lambda: self._backward(batch, chunks, embeddings, leaves))
        if loss.log_scale_grad is not None:
            gradients[log_scale] = loss.log_scale_grad
        bad = self._not_finite(loss.value, gradients)
        if bad is not None:
            return StepResult(self._mean_over_ranks(loss.value), {}, math.nan, applied=False, not_finite=bad)

        skipped_before = self.engine.skipped_steps
        advice = "adapt fewer weights (dsclr.model.lora), use zero_optimization.stage 2, or set dsclr.step.retain to 0"
        with _no_way_back(number, "optimizer's step", advice):
            deliver_gradients(self.engine, gradients)
            plain_norm = plain_grad_norm(self.engine)
            self.engine.step()
        if log_scale.requires_grad:
            clamp_master(log_scale, math.log(self.max_logit_scale))
        if self.bank is not None:
            with _no_way_back(number, "memory bank", "lower dsclr.negatives.bank.size"):
                self.bank.add(a, b, batch.ids.to(self.device), number, loss.rows)
        metrics = {name: float(value) for name, value in loss.metrics.items()}
        metrics.update(micro_batch_size=min(self.micro_batch_size, batch.rows), retained=self._kept_rows / batch.rows)
        self._retention.observe_step(peak_bytes(self.device), self._kept_rows)
        applied = self.engine.skipped_steps == skipped_before
        return StepResult(self._mean_over_ranks(loss.value), metrics, self._grad_norm(plain_norm), applied)

    def _loss(self, batch: BatchLike, a: Tensor, b: Tensor, log_scale: nn.Parameter, number: int) -> _LossResult:
        """The loss of all rows; leaves its gradients at a and b, those of other ranks included."""
        # The optimizer's fp32 value: a bf16 copy is only good to 1 %.
        log_scale_value = master_value(log_scale).requires_grad_(log_scale.requires_grad)
        ids = batch.ids.to(self.device, non_blocking=True)
        metrics: dict[str, Tensor | float] = {} if self.bank is None else dict(self.bank.metrics(number))
        sent = 0 if self.exchange is None else self.exchange.transport.bytes_sent

        def loss() -> tuple[LossOutput, SharedRows | None]:
            scale = log_scale_value.exp()
            if self.exchange is None:
                keys = Keys(a, b, ids, () if self.bank is None else self.bank.keys(number))
                output, rows = self.loss_fn(a, b, scale, ids, keys), None
                output.loss.backward()
            elif streams_keys(self.loss_fn):
                output, rows = self._streamed(self.exchange, a, b, scale, ids, number)
                output.loss.backward()
            else:
                bank = () if self.bank is None else self.bank.keys(number)
                output, rows = backward_of_collected(self.loss_fn, self.exchange, a, b, scale, ids, bank)
            return output, rows

        output, rows = self._together("loss", loss, alone=self.exchange is None)
        if self.exchange is not None:
            metrics["negatives_bytes_sent"] = self.exchange.transport.bytes_sent - sent
        metrics.update(output.metrics)
        grad = log_scale_value.grad
        return _LossResult(output.loss.detach(), metrics, rows, None if grad is None else grad.view_as(log_scale))

    def _streamed(
        self, exchange: Exchange, a: Tensor, b: Tensor, scale: Tensor, ids: Tensor, number: int
    ) -> tuple[LossOutput, SharedRows | None]:
        """The loss over keys of all ranks as they arrive."""
        rows, bank, bank_rows = None, None, 0
        if self.bank is not None:
            bank, bank_rows = self.bank.parts(number)
            if self.bank.wants_all_rows:
                rows = exchange.share(a.detach(), b.detach(), ids)
        return self.loss_fn(a, b, scale, ids, SharedKeys(exchange, rows, bank, bank_rows)), rows

    def _forward(self, batch: BatchLike) -> list[_Chunk]:
        """The first pass, with the graphs of the first chunks."""
        rows, retention = batch.rows, self._retention
        chunks: list[_Chunk] = []
        for start in range(0, rows, self.micro_batch_size):
            end = min(start + self.micro_batch_size, rows)
            # Asked for each chunk: measuring the first one may decide.
            keep = len(chunks) < retention.kept_chunks(rows, self.micro_batch_size) or retention.wants_measurement
            memo = None if keep else Memo(keep_hidden=retention.keeps_hidden(rows))
            random_state = RandomState.capture(self.device)
            if keep and retention.wants_measurement:
                outputs = self._measure(batch, start, end)
                if not retention.kept_chunks(rows, self.micro_batch_size):
                    keep, outputs = False, (outputs[0].detach(), outputs[1].detach())
            else:
                with torch.set_grad_enabled(keep):
                    outputs = self._encode(batch, start, end, memo)
            if keep:
                self._kept_rows += end - start
            if memo is not None and memo.hidden:
                self._kept_hidden = True
                retention.observe_hidden(end - start, memo.hidden_bytes)
            chunks.append(_Chunk(start, end, random_state, outputs, memo))
        return chunks

    def _measure(self, batch: BatchLike, start: int, end: int) -> tuple[Tensor, Tensor]:
        with measured(self.device) as use, torch.enable_grad():
            outputs = self._encode(batch, start, end, None)
        self._retention.observe_graph(end - start, use.kept_bytes)
        return outputs

    def _backward(
        self,
        batch: BatchLike,
        chunks: list[_Chunk],
        embeddings: tuple[Tensor, Tensor],
        leaves: dict[nn.Parameter, nn.Parameter],
    ) -> dict[nn.Parameter, Tensor]:
        """The second pass: fp32 gradients of the parameters, summed over the chunks in their order."""
        scale = loss_scale(self.engine)
        gradients: dict[nn.Parameter, Tensor] = {}
        with frozen_statistics(self.engine.module):
            while chunks:
                chunk = chunks.pop(0)
                for sides in self._with_graph(batch, chunk):
                    # A side that does not train has no graph.
                    trained = {i: z for i, z in sides.items() if z.requires_grad}
                    if trained:
                        rows = slice(chunk.start, chunk.end)
                        torch.autograd.backward(list(trained.values()), [embeddings[i][rows] * scale for i in trained])
                    _add_gradients(gradients, leaves, scale)
        return gradients

    def _with_graph(self, batch: BatchLike, chunk: _Chunk) -> Iterator[dict[int, Tensor]]:
        """The chunk's embeddings with their graph: the one that was kept, or made again tower by tower."""
        if any(z.requires_grad for z in chunk.outputs):
            yield dict(enumerate(chunk.outputs))
            return
        chunk.random_state.restore(self.device)
        towers = self.engine.module.by_tower(*self._inputs(batch, chunk.start, chunk.end), chunk.memo)
        while True:
            # Around the forward only: a backward does not belong under autocast.
            with autocast_if_enabled(self.engine):
                sides = next(towers, None)
            if sides is None:
                return
            yield sides
            del sides

    def _encode(self, batch: BatchLike, start: int, end: int, memo: Memo | None) -> tuple[Tensor, Tensor]:
        # Not through the engine: its hooks belong to a backward of its own.
        with autocast_if_enabled(self.engine):
            return self.engine.module(*self._inputs(batch, start, end), memo)

    def _inputs(self, batch: BatchLike, start: int, end: int) -> tuple[Tensor, Tensor]:
        a, b = (x.to(self.device, non_blocking=True) for x in batch.chunk(start, end))
        return a, b

    def _together(self, phase: str, work: Callable[[], T], alone: bool = True) -> T:
        """A phase that all ranks give up if it does not fit one of them.

        Args:
            alone: no rank waits for another within the work, so that it counts as this rank's own time.
        """
        result: T | None = None
        failed = False
        self._phase = phase
        try:
            with self.clock.working() if alone else nullcontext():
                result = work()
        except _DoesNotFit:
            # Of another rank: agreed upon before an exchange within the work.
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
            logger.debug("out of memory: %s", error)
        self._agree(failed)
        return result  # type: ignore[return-value]

    def _agree(self, failed: bool) -> None:
        """All ranks come here together; all raise if one of them failed."""
        self._flags.copy_(torch.tensor([failed, self._kept_rows, self._kept_hidden], dtype=torch.float32))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        if bool(self._flags[0]):
            raise _DoesNotFit(self._phase, int(self._flags[1]), bool(self._flags[2]))

    def _shrink(self, phase: str, kept_rows: int, kept_hidden: bool, rows: int, number: int) -> None:
        """Less memory for the next attempt. All ranks decide alike, see :class:`_DoesNotFit`."""
        before = min(self.micro_batch_size, rows)
        nothing_kept = not kept_rows and not kept_hidden
        if phase == "loss" and (nothing_kept or rows == 1):
            raise OutOfMemory(
                f"step {number + 1}: out of memory in the {phase} on {rows} rows a rank, with no graph kept beside it: "
                "lower dsclr.loss.block_size or dsclr.loss.k, use topk or exact instead of dense, a smaller "
                "dsclr.negatives.bank, or lower train_batch_size"
            )
        if before == 1 and (nothing_kept or rows == 1):
            raise OutOfMemory(
                f"step {number + 1}: out of memory in the {phase} with a micro-batch of 1 row: switch on "
                '"activation_checkpointing": {}, use bf16, a smaller model or another card'
            )
        self.recoveries += 1
        # The frozen blocks' output goes first: it is there to save time only, as graphs are. The loss needs none of the
        # chunk's memory, unless the only chunk's graph stands beside it.
        only_hidden = kept_hidden and not kept_rows
        if before == rows or (phase != "loss" and not only_hidden):
            self.micro_batch_size = max(1, (before + 1) // 2)
        if phase == "loss" or only_hidden:
            self._retention.drop()
        else:
            self._retention.shrink(kept_rows)
        logger.warning(
            "step %d: out of memory in the %s; done again from its start with micro-batches of %d rows (%d before) and "
            "%s of graphs kept; the result is the same",
            number + 1,
            phase,
            self.micro_batch_size,
            before,
            "what fits" if self._retention.budget is None else f"at most {format_bytes(self._retention.budget)}",
        )

    def _not_finite(self, loss: Tensor, gradients: dict[nn.Parameter, Tensor]) -> NotFinite | None:
        """What must not reach the optimizer; an overflow of fp16 may: DeepSpeed skips it and lowers its scale."""
        named = [("the loss", loss)]
        if not self.engine.fp16_enabled():
            named += named_gradients(self.engine.module, gradients)
        return first_not_finite(named, self.device)

    def _mean_over_ranks(self, loss: Tensor) -> float:
        mean = loss.detach().to(torch.float64 if self.device.type == "cpu" else torch.float32)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        return float(mean)

    def _grad_norm(self, plain_norm: float) -> float:
        norm = self.engine.get_global_grad_norm()
        return plain_norm if norm is None else float(norm)


def _add_gradients(
    gradients: dict[nn.Parameter, Tensor], leaves: dict[nn.Parameter, nn.Parameter], scale: float
) -> None:
    """Move the leaves' gradients, unscaled, to the sums in float32."""
    for parameter, leaf in leaves.items():
        if leaf.grad is None:
            continue
        if parameter in gradients:
            gradients[parameter].add_(leaf.grad, alpha=1 / scale)
        else:
            gradients[parameter] = leaf.grad.float() / scale if scale != 1 else leaf.grad.float()
        leaf.grad = None


@contextmanager
def _no_way_back(number: int, what: str, advice: str) -> Iterator[None]:
    """Where ranks wait for each other, one that runs out of memory cannot ask the others to begin again."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"step {number + 1}: no memory for the {what}: {advice}") from error
        raise


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def build_step(
    config: Config,
    engine: Any,
    device: torch.device,
    bank: Bank | None = None,
    retention: Retention | None = None,
) -> ContrastiveStep:
    """The step of a run.

    Args:
        config: with batch keys filled in.
        engine, device, bank, retention: see :class:`ContrastiveStep`.
    """
    ours = config.dsclr
    scheme = EXCHANGES.get(ours.negatives.across_ranks)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return ContrastiveStep(
        engine,
        build_loss(ours.loss, ours.objective),
        None if scheme is None or alone else scheme(),
        config.micro_batch_size,
        device,
        ours.model.logit_scale.max,
        bank,
        retention,
    )
