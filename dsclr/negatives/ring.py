"""Rows that go around a ring of ranks, so that none holds more than its own and those that are passing by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsclr.negatives.selected import SelectedRows, select
from dsclr.negatives.transport import Transport, wait
from dsclr.ops.shared import Back, Visit, Work, merge_


class RingRows:
    """See :class:`dsclr.ops.shared.SharedRows`; the scheme of Inf-CL (2024).

    While a rank works on a block, the next one arrives. What goes back to the owners travels with the blocks, one step
    behind, and is merged in the order of the ring.
    """

    holds = False

    def __init__(self, transport: Transport, own: Sequence[Tensor]) -> None:
        """
        Args:
            own: tensors of N rows each, N the same on every rank.
        """
        self.transport, self.own = transport, tuple(x.detach().contiguous() for x in own)
        self.rank, self.world_size = transport.rank, transport.world_size

    def visit(self, work: Work, more: Sequence[Tensor] = (), back: Sequence[Back] = ()) -> tuple[Tensor, ...]:
        steps = self.world_size
        here = [*self.own, *(x.detach().contiguous() for x in more)]
        # Own rows are not written to, so two sets of buffers serve the rows that pass by.
        spare = [[torch.empty_like(x) for x in here] for _ in range(min(2, steps - 1))]
        carried = [x.start.contiguous() for x in back]
        arriving = [[torch.empty_like(x) for x in carried] for _ in range(min(2, steps))]
        self.transport.agree()
        failure: Exception | None = None
        coming: list[Any] = []
        for step in range(steps):
            rows_coming: list[Any] = []
            if step < steps - 1:
                rows_coming = self.transport.pass_on(here, spare[step % 2])
            contributions: Sequence[Tensor] = ()
            if failure is None:
                try:
                    contributions = work(Visit((self.rank - step) % steps, 0, tuple(here)))
                except Exception as error:
                    # The other ranks wait for the blocks and get them.
                    failure = error
            wait(coming)
            for x, contribution, part in zip(back, contributions, carried, strict=failure is None):
                merge_(part, contribution.to(part.dtype), x.merge)
            coming = self.transport.pass_on(carried, arriving[step % 2])
            carried = arriving[step % 2]
            wait(rows_coming)
            if step < steps - 1:
                here = spare[step % 2]
        wait(coming)
        if failure is not None:
            raise failure
        return tuple(carried)

    def collect(self) -> tuple[Tensor, ...]:
        whole = [x.new_empty((self.world_size, *x.shape)) for x in self.own]

        def keep(visit: Visit) -> tuple[Tensor, ...]:
            for x, rows in zip(whole, visit.rows, strict=True):
                x[visit.owner] = rows
            return ()

        self.visit(keep)
        return tuple(x.flatten(0, 1) for x in whole)

    def select(self, numbers: Sequence[Tensor], row_bytes: int, back_bytes: int) -> list[SelectedRows] | None:
        rows = len(self.own[0])
        around = sum(x[:1].nbytes for x in self.own)
        visit = rows * ((self.world_size - 1) * around + self.world_size * len(numbers) * back_bytes)
        # No more of them than pass by in a visit: a batch that needs a ring may not fit otherwise.
        return select(self.transport, numbers, rows, numbers[0].itemsize + row_bytes + back_bytes, visit, 2 * rows)
