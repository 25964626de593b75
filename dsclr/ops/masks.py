"""Pairs of rows and keys that share an id, found by sorting instead of comparing every row with every key."""

from __future__ import annotations

import torch
from torch import Tensor


class SameIds:
    """Marks, in tiles of a similarity matrix, the pairs whose ids are equal.

    Args:
        q_ids: (N,) int64. key_ids: (M,) int64.
    """

    def __init__(self, q_ids: Tensor, key_ids: Tensor) -> None:
        self.q_ids, self.key_ids = q_ids, key_ids
        ordered, self.order = key_ids.sort()
        self.first = torch.searchsorted(ordered, q_ids)
        self.count = torch.searchsorted(ordered, q_ids, right=True) - self.first

    def part(self, rows: slice) -> SameIds:
        """The same for some of the rows."""
        some = object.__new__(SameIds)
        some.q_ids, some.key_ids, some.order = self.q_ids[rows], self.key_ids, self.order
        some.first, some.count = self.first[rows], self.count[rows]
        return some

    def fill_(self, tile: Tensor, rows: slice, columns: slice, value: float) -> Tensor:
        """Write ``value`` into the pairs with equal ids.

        Args:
            tile: (R, C), the rows ``rows`` and keys ``columns`` of the matrix; may be a transposed view.

        Returns:
            ``tile``.
        """
        count, first = self.count[rows], self.first[rows]
        pairs = int(count.sum())
        if pairs > tile.numel() // 8:
            # So many are equal that comparing is cheaper than listing.
            return tile.masked_fill_(self.q_ids[rows, None] == self.key_ids[None, columns], value)
        row = torch.arange(len(count), device=count.device).repeat_interleave(count, output_size=pairs)
        place = torch.arange(pairs, device=count.device) - (count.cumsum(0) - count)[row]
        column = self.order[first[row] + place] - columns.start
        inside = (column >= 0) & (column < tile.shape[1])
        tile[row[inside], column[inside]] = value
        return tile
