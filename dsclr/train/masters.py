"""Where the optimizer keeps a parameter: its float32 value and its state, under every ZeRO stage and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

# The attribute of a parameter, beside those that DeepSpeed gives it.
_PLACE = "dsclr_place"


@dataclass(frozen=True)
class Place:
    """Where this rank's optimizer keeps (its part of) a parameter.

    Attributes:
        holder: the float32 tensor that the optimizer steps: the parameter itself, a copy of it, or a flat tensor of
            many parameters; on the host under offload. None: this rank keeps no part of it.
        start: of the part within the holder, in elements.
        offset: of the part within the parameter, in elements.
        length: of the part.
        group: process group over which the parts are spread; None: every rank keeps all of it.
    """

    holder: Tensor | None
    start: int
    offset: int
    length: int
    group: Any = None

    def part(self, of: Tensor) -> Tensor:
        """The parameter's part of a tensor with the holder's elements, as a flat view."""
        return of.detach().view(-1).narrow(0, self.start, self.length)

    def whole(self, of: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
        """All of a parameter from the ranks' parts, float32 on every rank; a collective where they are spread.

        Args:
            of: with the holder's elements; None where there is no holder.
        """
        if self.group is None:
            assert of is not None
            return self.part(of).to(device, torch.float32, copy=True).view(shape)
        value = torch.zeros(shape, dtype=torch.float32, device=device)
        if of is not None:
            value.view(-1).narrow(0, self.offset, self.length).copy_(self.part(of))
        # Each element comes from one rank and the others add zero: nothing is rounded.
        dist.all_reduce(value, group=self.group)
        return value

    def put(self, into: Tensor, value: Tensor) -> None:
        """Write this rank's part of a parameter's value into a tensor with the holder's elements."""
        self.part(into).copy_(value.reshape(-1).narrow(0, self.offset, self.length))


def find_places(engine: Any) -> None:
    """Note at every trained parameter where the optimizer keeps it; before anything else of this module.

    At stage 0 in bf16 DeepSpeed takes an optimizer step on zero gradients when it starts, which would decay the weights
    and count as a step: that is undone.
    """
    wrapper, base = engine.optimizer, engine.basic_optimizer
    if isinstance(wrapper, (FP16_UnfusedOptimizer, FP16_Optimizer)):
        for parameter, place in _copies(wrapper):
            setattr(parameter, _PLACE, place)
            assert place.holder is not None
            place.put(place.holder, parameter.detach())
        base.state.clear()
        return
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        place = Place(parameter, 0, 0, parameter.numel())
        if wrapper is not base:
            mapping = parameter._hp_mapping
            place = Place(None, 0, 0, 0, parameter._dp_group)
            if mapping is not None:
                (holder,) = base.param_groups[mapping.param_group_index]["params"]
                within, own = mapping.hp_fragment_address, mapping.lp_fragment_address
                place = Place(holder, within.start, own.start, own.numel, parameter._dp_group)
        setattr(parameter, _PLACE, place)


def _copies(wrapper: Any) -> Iterator[tuple[nn.Parameter, Place]]:
    """Of stage 0 in bf16: a float32 copy of each parameter, or with a fused optimizer a flat one of each group."""
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for parameters, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            for parameter, copy in zip(parameters, copies, strict=True):
                yield parameter, Place(copy, 0, 0, copy.numel())
        return
    for parameters, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            yield parameter, Place(flat, start, 0, parameter.numel())
            start += parameter.numel()


def place_of(parameter: nn.Parameter) -> Place:
    """Of a trained parameter, after :func:`find_places`."""
    place: Place = getattr(parameter, _PLACE)
    return place


def master_value(parameter: nn.Parameter) -> Tensor:
    """The fp32 value the optimizer keeps of a parameter, whole on every rank (a collective under ZeRO).

    Of a parameter that does not train, its own value.
    """
    if not parameter.requires_grad:
        return parameter.detach().float().clone()
    place = place_of(parameter)
    return place.whole(place.holder, parameter.shape, parameter.device)


def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a trained parameter where the optimizer keeps it and where the model reads it."""
    place = place_of(parameter)
    if place.holder is not None:
        place.put(place.holder, value)
    with torch.no_grad():
        parameter.copy_(value)


def clamp_master(parameter: nn.Parameter, maximum: float) -> None:
    """Clamp a parameter where the optimizer keeps it; clamping the bf16 copy alone would be overwritten."""
    value = master_value(parameter)
    if bool((value > maximum).any()):
        set_master(parameter, value.clamp_(max=maximum))
