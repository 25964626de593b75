"""NaN and infinities: where the first of them is, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class NotFinite:
    """The first tensor, in the order of the step, that holds NaN or infinities; the same on every rank but for counts.

    Attributes:
        rank: which holds it, the lowest if several do.
        tensor: its name.
        values: of this rank's tensor of that name that are not finite.
        size: of this rank's tensor.
    """

    rank: int
    tensor: str
    values: int
    size: int

    def __str__(self) -> str:
        return f"{self.values:,} of {self.size:,} values of {self.tensor} are not finite"


def first_not_finite(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> NotFinite | None:
    """All ranks call this together; None if everything is finite everywhere.

    Args:
        tensors: in the order of the step; the same names on every rank, values and sizes may differ.
        device: of the process group.
    """
    named = [(name, x.detach()) for name, x in tensors]
    if not named:
        return None
    is_group = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
    # One number says which tensor and which rank; the smallest is the first.
    codes = torch.arange(len(named), device=device) * world_size + rank
    finite = torch.stack([x.isfinite().all().to(device) for _, x in named])
    first = codes.masked_fill(finite, torch.iinfo(torch.int64).max).amin()
    if is_group:
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
    code = int(first)
    if code == torch.iinfo(torch.int64).max:
        return None
    name, x = named[code // world_size]
    return NotFinite(code % world_size, name, int((~x.isfinite()).sum()), x.numel())


def named_embeddings(a: Tensor, b: Tensor, objective: str) -> list[tuple[str, Tensor]]:
    """Both sides of the batch under the names that a report gives them."""
    names = ("image", "text") if objective == "clip" else ("first view", "second view")
    return [(f"{name} embeddings", side) for name, side in zip(names, (a, b), strict=True)]


def named_gradients(model: nn.Module, gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """This rank's gradients, in the order of the model's parameters."""
    for name, parameter in model.named_parameters():
        if parameter in gradients:
            yield f"the gradient of {name}", gradients[parameter]


def training_state(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """What training has changed: weights, and all that the optimizer keeps of this rank's part."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    optimizer = engine.basic_optimizer
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield f"the optimizer's weights (group {number})", parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield f"the optimizer's {key} (group {number})", value
