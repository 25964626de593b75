"""Weighted (query, key) pairs, sorted by key, and their sums as embedding bags: no R x k x D tensor, no atomics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a gradient worked on at once: a bag of all rows would be another tensor of the size of the gradient.
BAG_ROWS = 8192


class SortedPairs:
    """Pairs of R queries with their k keys, by key and then by query."""

    def __init__(self, indices: Tensor, weights: Tensor) -> None:
        """
        Args:
            indices: (R, k) int64 numbers of keys; negative ones are no pairs.
            weights: (R, k) float.
        """
        columns = indices.flatten()
        # Numbers this large are not looked at; 32 bits sort faster.
        self.columns, self.order = columns.clamp(max=2**31 - 1).to(torch.int32).sort(stable=True)
        self.weights, self.k = weights.flatten(), indices.shape[1]

    def add_to_keys(self, total: Tensor, q: Tensor, first: int = 0) -> None:
        """total_j += sum_i weights_ij q_i for the keys from number ``first`` on.

        Args:
            total: (C, D) float32 at least: bf16 sums over thousands of pairs would lose the small ones.
            q: (R, D) float.
        """
        ends = self._edges(first, len(total))
        rows = q.to(total.dtype)
        for part in row_parts(len(total)):
            begin, end = int(ends[part.start]), int(ends[part.stop])
            if begin == end:
                continue
            some = self.order[begin:end]
            total[part] += F.embedding_bag(
                some // self.k,
                rows,
                ends[part] - begin,
                per_sample_weights=self.weights[some].to(total.dtype),
                mode="sum",
            )

    def add_to_queries(self, total: Tensor, keys: Tensor, first: int = 0) -> None:
        """total_i += sum_j weights_ij keys_j over the keys from number ``first`` on.

        Args:
            total: (R, D) float32 at least.
            keys: (C, D) float.
        """
        ends = self._edges(first, len(keys))
        begin, end = int(ends[0]), int(ends[-1])
        if begin == end:
            return
        some = self.order[begin:end]
        rows, by_row = (some // self.k).sort(stable=True)
        columns = (self.columns[begin:end] - first)[by_row].long()
        weights = self.weights[some[by_row]].to(total.dtype)
        starts = torch.searchsorted(rows, torch.arange(len(total) + 1, device=rows.device))
        table = keys.to(total.dtype)
        for part in row_parts(len(total)):
            begin, end = int(starts[part.start]), int(starts[part.stop])
            if begin == end:
                continue
            total[part] += F.embedding_bag(
                columns[begin:end],
                table,
                starts[part] - begin,
                per_sample_weights=weights[begin:end],
                mode="sum",
            )

    def _edges(self, first: int, count: int) -> Tensor:
        numbers = torch.arange(first, first + count + 1, device=self.columns.device, dtype=self.columns.dtype)
        return torch.searchsorted(self.columns, numbers)


def row_parts(length: int) -> list[slice]:
    """Slices of BAG_ROWS rows."""
    return [slice(start, min(start + BAG_ROWS, length)) for start in range(0, length, BAG_ROWS)]
