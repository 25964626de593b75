"""A memory bank's state from what ranks saved of it, and a rank's part of it, for any number of ranks.

A state holds ``a``, ``b``, ``ids`` and ``steps`` by slot and ``next``, the slot to fill. Of a sharded bank each rank
has a part with whole steps of ``rows_a_step`` rows; the whole is ordered by step, then by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def whole_bank(parts: Sequence[State | None]) -> State | None:
    """The bank that one process would have.

    Args:
        parts: saved by rank; None where another saved the same.

    Returns:
        None: each rank had a bank of its own.
    """
    saved = [part for part in parts if part is not None]
    if len(saved) == 1:
        return saved[0]
    if any("rows_a_step" not in part for part in saved):
        return None
    rows = max(1, saved[0]["rows_a_step"])

    def together(name: str) -> Tensor:
        return torch.stack([part[name].unflatten(0, (-1, rows)) for part in saved], dim=1).flatten(0, 2)

    return {**_each(saved[0], together), "next": saved[0]["next"] * len(saved)}


def part_of_bank(whole: State, rank: int, world_size: int) -> State | None:
    """A rank's part; None: the steps in it do not divide."""
    steps = whole["steps"]
    rows = int((steps == steps.max()).sum())
    if len(steps) % rows or rows % world_size:
        return None

    def own(name: str) -> Tensor:
        return whole[name].unflatten(0, (-1, world_size, rows // world_size))[:, rank].flatten(0, 1)

    rows_a_step = 0 if whole["a"] is None else rows // world_size
    return {**_each(whole, own), "next": whole["next"] // world_size, "rows_a_step": rows_a_step}


def _each(state: State, made: Callable[[str], Tensor]) -> State:
    """a, b and ids are None in an empty bank."""
    return {name: None if state[name] is None else made(name) for name in ("a", "b", "ids", "steps")}
