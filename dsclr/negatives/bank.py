"""A FIFO queue of embeddings of earlier batches, as further negatives (the queue of MoCo, He et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsclr.config import BankConfig
from dsclr.losses import Keys
from dsclr.losses.base import BankRows, BankWork
from dsclr.negatives.exchange import RingExchange
from dsclr.negatives.saved_bank import part_of_bank, whole_bank
from dsclr.ops.shared import SharedRows, Visit


class MemoryBank:
    """The newest ``size`` rows of earlier steps, detached, with their ids and the step they come from.

    The embeddings age: they are of the weights of their step. Rows older than ``max_age`` steps are not handed out. A
    stored copy of a row in the current batch shares its id and is therefore never a negative of it.
    """

    # Of all ranks where they see each other's rows: every rank then holds the same bank.
    wants_all_rows = True

    def __init__(self, size: int, max_age: int | None = None, shared: bool = False) -> None:
        """
        Args:
            size: rows kept, at least 1.
            max_age: in steps; None: any age.
            shared: all ranks add the same rows, those of all of them.

        Raises:
            ValueError: out of range.
        """
        if size < 1:
            raise ValueError(f"size = {size}, at least 1 is needed")
        if max_age is not None and max_age < 1:
            raise ValueError(f"max_age = {max_age}, at least 1 is needed")
        self.size, self.max_age, self.shared = size, max_age, shared
        # Slots are filled in a circle; the oldest row is overwritten first. Allocated with the first rows.
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self._ids: Tensor | None = None
        self._steps = torch.full((size,), -1, dtype=torch.int64)
        self._next = 0

    def add(self, a: Tensor, b: Tensor, ids: Tensor, step: int, rows: SharedRows | None = None) -> None:
        """Store the rows of a step; of more than ``size``, the last.

        Args:
            a, b: (N, D) embeddings.
            ids: (N,) int64.
            step: number of the step they come from, rising.
            rows: (a, b, ids) of all ranks, which are stored instead.

        Raises:
            ValueError: another width or dtype than before.
        """
        if rows is not None:
            a, b, ids = rows.collect()
        a, b, ids = (x.detach()[-self.size :] for x in (a, b, ids))
        if self._a is None or self._b is None or self._ids is None:
            self._a, self._b = a.new_zeros((self.size, a.shape[1])), b.new_zeros((self.size, b.shape[1]))
            self._ids = ids.new_zeros(self.size)
        if a.shape[1] != self._a.shape[1] or a.dtype != self._a.dtype:
            raise ValueError(
                f"the memory bank holds rows of width {self._a.shape[1]}, {self._a.dtype}: got {a.shape[1]}, {a.dtype}"
            )
        first = min(len(ids), self.size - self._next)
        for start, some in ((self._next, slice(0, first)), (0, slice(first, None))):
            slots = slice(start, start + len(ids[some]))
            self._a[slots], self._b[slots], self._ids[slots] = a[some], b[some], ids[some]
            self._steps[slots] = step
        self._next = (self._next + len(ids)) % self.size

    def keys(self, step: int) -> tuple[Keys, ...]:
        """The rows young enough at ``step``, oldest first, as at most two views of the store."""
        if self._a is None or self._b is None or self._ids is None:
            return ()
        oldest = 0 if self.max_age is None else max(0, step - self.max_age)
        parts = []
        for start, end in ((self._next, self.size), (0, self._next)):
            # Within each part of the circle steps rise, and slots that were never filled (-1) come first.
            start += int(torch.searchsorted(self._steps[start:end], oldest))
            if start < end:
                parts.append(Keys(self._a[start:end], self._b[start:end], self._ids[start:end]))
        return tuple(parts)

    def parts(self, step: int) -> tuple[BankRows | None, int]:
        """The same one after the other, for :class:`dsclr.losses.SharedKeys`, and their number."""
        keys = self.keys(step)

        def each(work: BankWork) -> None:
            first = 0
            for part in keys:
                work(part.a, part.b, part.ids, first)
                first += len(part.ids)

        return (each if keys else None), sum(len(part.ids) for part in keys)

    def metrics(self, step: int) -> dict[str, float]:
        """bank_rows: handed out at ``step``; bank_age: their mean age in steps."""
        oldest = 0 if self.max_age is None else max(0, step - self.max_age)
        steps = self._steps[self._steps >= oldest]
        age = float((step - steps).double().mean()) if len(steps) else 0.0
        return {"bank_rows": float(len(steps)), "bank_age": age}

    def state_dict(self) -> dict[str, Any]:
        """Everything, for a checkpoint; the tensors are the store itself."""
        return {
            "a": self._a,
            "b": self._b,
            "ids": self._ids,
            "steps": self._steps,
            "next": self._next,
        }

    def part(self, rank: int) -> dict[str, Any] | None:
        """What a rank saves; None: what it holds is saved by another."""
        return None if self.shared and rank > 0 else self.state_dict()

    def joined(self, parts: Sequence[dict[str, Any] | None], rank: int, world_size: int) -> dict[str, Any] | None:
        """A rank's state from what the ranks of an earlier process saved, which may be more or fewer.

        Args:
            parts: of :meth:`part`, by rank.
            rank, world_size: of this process.

        Returns:
            For :meth:`load_state_dict`; None: these parts cannot be shared out so.
        """
        whole = whole_bank(parts)
        if whole is None and not self.shared and len(parts) == world_size:
            return parts[rank]
        return whole

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from a state.

        Raises:
            ValueError: of a bank of another size.
        """
        _check_size(len(state["steps"]), self.size)
        # Copied: a state may be mapped from a file that is deleted some day.
        self._a, self._b, self._ids = (
            None if x is None else x.to(device, copy=True) for x in (state["a"], state["b"], state["ids"])
        )
        self._steps, self._next = state["steps"].clone(), state["next"]


class ShardedBank:
    """The bank of all ranks in parts: each holds its own rows of the newest steps, and the parts visit the others.

    With ``size`` a multiple of the batch of all ranks it is the bank that one process would have.
    """

    wants_all_rows = False

    def __init__(self, size: int, max_age: int | None, exchange: RingExchange) -> None:
        """
        Args:
            size: rows of all ranks; divides by their number.
            max_age: in steps; None: any age.
            exchange: the ring.
        """
        self.exchange = exchange
        self.own = MemoryBank(size // exchange.transport.world_size, max_age)
        self._rows_a_step = 0

    def add(self, a: Tensor, b: Tensor, ids: Tensor, step: int, rows: SharedRows | None = None) -> None:
        """See :meth:`MemoryBank.add`; a rank's own rows."""
        self._rows_a_step = len(ids)
        self.own.add(a, b, ids, step)

    def keys(self, step: int) -> tuple[Keys, ...]:
        """The rows of all ranks at once, for losses that need them so."""
        parts, _ = self.parts(step)
        found: list[tuple[int, Keys]] = []
        if parts is not None:
            parts(lambda a, b, ids, first: found.append((first, Keys(a.clone(), b.clone(), ids.clone()))))
        return tuple(keys for _, keys in sorted(found, key=lambda part: part[0]))

    def parts(self, step: int) -> tuple[BankRows | None, int]:
        """See :meth:`MemoryBank.parts`; a collective when called."""
        own, world_size = self.own.keys(step), self.exchange.transport.world_size
        rows = self._rows_a_step

        def each(work: BankWork) -> None:
            start = 0
            for part in own:
                shared = self.exchange.share(part.a, part.b, part.ids)

                def visit(some: Visit, start: int = start) -> tuple[Tensor, ...]:
                    # Numbered as in one process: by step, then by rank.
                    for first in range(0, len(some.rows[0]), rows):
                        a, b, ids = (x[first : first + rows] for x in some.rows)
                        work(a, b, ids, (start + first) * world_size + some.owner * rows)
                    return ()

                shared.visit(visit)
                start += len(part.ids)

        return (each if own else None), sum(len(part.ids) for part in own) * world_size

    def metrics(self, step: int) -> dict[str, float]:
        """See :meth:`MemoryBank.metrics`; of all ranks."""
        own = self.own.metrics(step)
        return {**own, "bank_rows": own["bank_rows"] * self.exchange.transport.world_size}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part."""
        return {**self.own.state_dict(), "rows_a_step": self._rows_a_step}

    def part(self, rank: int) -> dict[str, Any] | None:
        """See :meth:`MemoryBank.part`."""
        return self.state_dict()

    def joined(self, parts: Sequence[dict[str, Any] | None], rank: int, world_size: int) -> dict[str, Any] | None:
        """See :meth:`MemoryBank.joined`; the bank of all ranks is dealt anew."""
        whole = whole_bank(parts)
        return None if whole is None else part_of_bank(whole, rank, world_size)

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """See :meth:`MemoryBank.load_state_dict`; this rank's part."""
        world_size = self.exchange.transport.world_size
        _check_size(len(state["steps"]) * world_size, self.own.size * world_size)
        own = dict(state)
        self._rows_a_step = own.pop("rows_a_step")
        self.own.load_state_dict(own, device)


def _check_size(saved: int, size: int) -> None:
    if saved != size:
        raise ValueError(f"the saved memory bank has {saved} rows, this one {size}")


Bank = MemoryBank | ShardedBank


def build_bank(cfg: BankConfig | None, world_size: int, across_ranks: str) -> Bank | None:
    """The bank of ``dsclr.negatives.bank``."""
    if cfg is None:
        return None
    if cfg.sharded and world_size > 1:
        return ShardedBank(cfg.size, cfg.max_age, RingExchange())
    return MemoryBank(cfg.size, cfg.max_age, shared=world_size == 1 or across_ranks != "off")
