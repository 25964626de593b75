"""The rows of all ranks on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsclr.negatives.selected import SelectedRows, select
from dsclr.negatives.transport import Transport
from dsclr.ops.shared import Back, Merge, Visit, Work, merge_


@dataclass
class _Arriving:
    """A part of every rank's rows.

    Attributes:
        whole: (W, C, ...) tensors. handles: of their transfers.
    """

    start: int
    whole: list[Tensor]
    handles: list[Any]

    def arrived(self) -> list[Tensor]:
        while self.handles:
            self.handles.pop().wait()
        return self.whole


class GatheredRows:
    """See :class:`dsclr.ops.shared.SharedRows`. The transfers begin at once."""

    holds = True

    def __init__(self, transport: Transport, own: Sequence[Tensor], chunk: int) -> None:
        """
        Args:
            own: tensors of N rows each, N the same on every rank.
            chunk: rows of every rank in a transfer.
        """
        self.transport, self.own, self.chunk = transport, tuple(x.detach().contiguous() for x in own), chunk
        self.rank, self.world_size = transport.rank, transport.world_size
        self._parts = self._gather(self.own)

    def visit(self, work: Work, more: Sequence[Tensor] = (), back: Sequence[Back] = ()) -> tuple[Tensor, ...]:
        more = tuple(x.detach().contiguous() for x in more)
        collected = [
            [x.start.new_empty((self.world_size, len(part.whole[0][0]), *x.start.shape[1:])) for x in back]
            for part in self._parts
        ]
        totals = [x.start.contiguous() for x in back]
        further = self._gather(more) if more else [None] * len(self._parts)
        if not more:
            self.transport.agree()
        failure: Exception | None = None

        def contributions(owner: int, start: int, rows: list[Tensor]) -> Sequence[Tensor]:
            nonlocal failure
            if failure is None:
                try:
                    return work(Visit(owner, start, tuple(rows)))
                except Exception as error:
                    # The other ranks wait for this one's contributions and get some.
                    failure = error
            return [x.start.new_zeros((len(rows[0]), *x.start.shape[1:])) for x in back]

        for total, x, contribution in zip(totals, back, contributions(self.rank, 0, [*self.own, *more]), strict=True):
            merge_(total, contribution.to(total.dtype), x.merge)
        for part, extra, buffers in zip(self._parts, further, collected, strict=True):
            whole = [*part.arrived(), *(extra.arrived() if extra is not None else ())]
            for distance in range(1, self.world_size):
                owner = (self.rank + distance) % self.world_size
                given = contributions(owner, part.start, [x[owner] for x in whole])
                for buffer, contribution in zip(buffers, given, strict=True):
                    buffer[owner] = contribution
            for total, x, buffer in zip(totals, back, buffers, strict=True):
                self._merge_others(total[part.start : part.start + buffer.shape[1]], buffer, x.merge)
        if failure is not None:
            raise failure
        return tuple(totals)

    def collect(self) -> tuple[Tensor, ...]:
        parts = [part.arrived() for part in self._parts]
        return tuple(torch.cat(column, dim=1).flatten(0, 1) for column in zip(*parts, strict=True))

    def select(self, numbers: Sequence[Tensor], row_bytes: int, back_bytes: int) -> list[SelectedRows] | None:
        rows = len(self.own[0])
        visit = rows * (self.world_size - 1) * len(numbers) * back_bytes
        return select(self.transport, numbers, rows, numbers[0].itemsize + back_bytes, visit)

    def _gather(self, own: Sequence[Tensor]) -> list[_Arriving]:
        rows = len(own[0])
        parts = []
        for start in range(0, rows, self.chunk):
            length = min(self.chunk, rows - start)
            parts.append(_Arriving(start, [x.new_empty((self.world_size, length, *x.shape[1:])) for x in own], []))
        # Memory first: a rank that has none must not leave the others within a transfer.
        self.transport.agree()
        for part in parts:
            for x, whole in zip(own, part.whole, strict=True):
                part.handles.append(self.transport.gather(whole, x[part.start : part.start + whole.shape[1]]))
        return parts

    def _merge_others(self, total: Tensor, parts: Tensor, merge: Merge) -> None:
        """total: (C, ...) of this rank's rows; parts: (W, C, ...) for the rows of every rank, this one's unset."""
        if merge == "sum":
            parts[self.rank] = 0
            merge_(total, self.transport.reduce_scatter(parts), merge)
        else:
            parts[self.rank] = -torch.inf
            merge_(total, torch.logsumexp(self.transport.all_to_all(parts), 0), merge)
