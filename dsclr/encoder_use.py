"""What the encoder takes of memory: measured on two small micro-batches and extended in proportion."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from dsclr.memory import measured
from dsclr.models import ContrastiveModel
from dsclr.models.leaves import separate_leaves
from dsclr.models.memo import Memo
from dsclr.models.statistics import frozen_statistics

# Rows of the two measured micro-batches: a batch normalisation needs two.
MEASURED_ROWS = (2, 4)

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Line:
    """Bytes of a micro-batch: fixed + per_row * rows."""

    fixed: float
    per_row: float

    def __call__(self, rows: int) -> int:
        return int(max(0.0, self.fixed + self.per_row * rows))

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_row * factor)


@dataclass(frozen=True)
class EncoderUse:
    """What the encoder takes beyond its weights, measured.

    Attributes:
        graph: kept by a forward with a graph.
        forward_peak: the most during a forward without one.
        backward_peak: the most during forward and backward, gradients of the parameters left out.
        recompute_peak: the same, one tower after the other.
        hidden: what the frozen blocks' output takes.
    """

    graph: Line
    forward_peak: Line
    backward_peak: Line
    recompute_peak: Line
    hidden: Line

    def __mul__(self, factor: float) -> EncoderUse:
        return EncoderUse(*(getattr(self, part.name) * factor for part in fields(self)))


def measure_encoder(
    model: ContrastiveModel, rows_of: Callable[[int], tuple[Tensor, Tensor]], autocast: Autocast = nullcontext
) -> EncoderUse:
    """Run two small micro-batches, forward and backward; the gradients of the parameters are not touched.

    Args:
        model: on its device, in the precision of the run.
        rows_of: number of rows -> inputs of that many.
        autocast: makes the context in which the forward runs.
    """
    with frozen_statistics(model):
        points = [_measure_rows(model, rows_of(rows), autocast) for rows in MEASURED_ROWS]
    return EncoderUse(*(_line(one, other) for one, other in zip(*points, strict=True)))


def _line(one: int, other: int) -> Line:
    slope = max(0.0, (other - one) / (MEASURED_ROWS[1] - MEASURED_ROWS[0]))
    return Line(one - slope * MEASURED_ROWS[0], slope)


def _measure_rows(
    model: ContrastiveModel, inputs: tuple[Tensor, Tensor], autocast: Autocast
) -> tuple[int, int, int, int, int]:
    device = model.logit_scale.device
    a, b = (x.to(device) for x in inputs)
    with separate_leaves(model) as leaves, autocast():
        memo = Memo(keep_hidden=True)
        with measured(device) as forward, torch.no_grad():
            outputs = model(a, b, memo)
        hidden = memo.hidden_bytes
        del outputs, memo
        # Gradients of parameters are counted by themselves: they grow while activations go.
        for leaf in leaves.values():
            leaf.register_post_accumulate_grad_hook(_forget_gradient)
        # A vocabulary's gradient is as large for one row as for a thousand and comes when the activations are gone: in
        # two small micro-batches it would be the peak, and nothing could be told of a large one.
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.requires_grad_(False)
        with measured(device) as backward:
            with measured(device) as graph:
                outputs = model(a, b)
            _backward(outputs)
        del outputs
        with measured(device) as recompute:
            for sides in model.by_tower(a, b):
                _backward(sides.values())
                del sides
    del leaves
    gc.collect()
    return (
        graph.kept_bytes,
        forward.peak_bytes - hidden,
        max(backward.peak_bytes, graph.peak_bytes),
        recompute.peak_bytes,
        hidden,
    )


def _backward(outputs: Iterable[Tensor]) -> None:
    ends = [z for z in outputs if z.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(z) for z in ends])


def _forget_gradient(leaf: Tensor) -> None:
    leaf.grad = None
