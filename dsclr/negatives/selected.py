"""Only the rows that were chosen: asked for at their owners, and their gradients sent back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsclr.negatives.transport import Transport


class SelectedRows:
    """See :class:`dsclr.ops.shared.Selection`."""

    def __init__(self, transport: Transport, numbers: Tensor, rows: int) -> None:
        """
        Args:
            numbers: (U,) global numbers, rising, each once.
            rows: N of every rank.
        """
        self.transport = transport
        ranks = torch.arange(transport.world_size + 1, device=numbers.device)
        edges = torch.searchsorted(numbers, ranks * rows)
        counts = edges.diff()
        self.asked = counts.tolist()
        self.owed = transport.all_to_all(counts).tolist()
        self.wanted = transport.all_to_all(numbers % rows, self.asked, self.owed)

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
    transport: Transport, numbers: Sequence[Tensor], rows: int, selected_bytes: int, visit_bytes: int
) -> list[SelectedRows] | None:
    """The selections, or None on all ranks if they send more than a visit.

    Args:
        numbers: sets of global numbers, rising, each once.
        rows: N of every rank.
        selected_bytes: what a selected row of another rank costs. visit_bytes: what the visit costs a rank.
    """
    first, end = transport.rank * rows, (transport.rank + 1) * rows
    others = sum(len(x) - int(((x >= first) & (x < end)).sum()) for x in numbers)
    counts = numbers[0].new_empty(transport.world_size)
    transport.agree()
    transport.gather(counts, numbers[0].new_tensor([others])).wait()
    if int(counts.sum()) * selected_bytes >= visit_bytes * transport.world_size:
        transport.rows_chosen = 0
        return None
    transport.rows_chosen = others
    return [SelectedRows(transport, x, rows) for x in numbers]
