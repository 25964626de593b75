"""Only the rows that were chosen: asked for at their owners, and their gradients sent back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsclr.negatives.transport import Transport


class SelectedRows:
    """See :class:`dsclr.ops.shared.Selection`."""

    def __init__(
        self, transport: Transport, numbers: Tensor, rows: int, asked: Sequence[int], owed: Sequence[int]
    ) -> None:
        """
        Args:
            numbers: (U,) global numbers, rising, each once.
            rows: N of every rank.
            asked: how many this rank wants of each rank. owed: how many each rank wants of this one.
        """
        self.transport, self.asked, self.owed = transport, asked, owed
        self.wanted = transport.all_to_all(numbers % rows, asked, owed)

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sent = [x[self.wanted] for x in tensors]
        self.transport.agree()
        return tuple(self.transport.all_to_all(x, self.owed, self.asked) for x in sent)

    def give_back(self, contribution: Tensor, rows: int) -> Tensor:
        self.transport.agree()
        received = self.transport.all_to_all(contribution, self.asked, self.owed)
        total = received.new_zeros((rows, *received.shape[1:]))
        # One rank after the other: a row is at most once in each part, so the order of the sum is fixed.
        for numbers, part in zip(self.wanted.split(self.owed), received.split(self.owed), strict=True):
            total[numbers] += part
        return total


def select(
    transport: Transport,
    numbers: Sequence[Tensor],
    rows: int,
    selected_bytes: int,
    visit_bytes: int,
    most_rows: int | None = None,
) -> list[SelectedRows] | None:
    """The selections, or None on all ranks if they send more than a visit, or some rank would hold too many rows.

    Args:
        numbers: sets of global numbers, rising, each once.
        rows: N of every rank.
        selected_bytes: what a selected row of another rank costs. visit_bytes: what the visit costs a rank.
        most_rows: that a rank may ask for, or be asked for, in a set; None: any number.
    """
    rank, world_size = transport.rank, transport.world_size
    edges = torch.arange(world_size + 1, device=numbers[0].device) * rows
    own = torch.stack([torch.searchsorted(x, edges).diff() for x in numbers])
    transport.agree()
    # By rank that asks, set, and rank that is asked.
    everyone = own.new_empty((world_size, *own.shape))
    transport.gather(everyone, own).wait()
    others = int(everyone.sum() - everyone.diagonal(dim1=0, dim2=2).sum())
    most = max(int(everyone.sum(2).max()), int(everyone.sum(0).max()))
    if others * selected_bytes >= visit_bytes * world_size or (most_rows is not None and most > most_rows):
        transport.rows_chosen = 0
        return None
    transport.rows_chosen = int(own.sum() - own[:, rank].sum())
    return [
        SelectedRows(transport, x, rows, everyone[rank, i].tolist(), everyone[:, i, rank].tolist())
        for i, x in enumerate(numbers)
    ]
