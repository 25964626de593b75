"""Collect, from tiles of approximate scores, everything that can belong to a row's exact top k.

Every tile entry is within E_i of the exact score (:mod:`dsclr.ops.products`). If k valid entries of row i are at
least t, the exact k-th score is at least t - E_i, so an entry below t - 2 E_i cannot belong to the top k. A row
therefore keeps the entries at or above ``kth - 2 E_i``, kth being its running k-th entry, and at the end computes
their exact scores (float64 sums of exact products, rounded once) and takes the top k of those, ties to the lowest
index. The result does not depend on the order of the tiles, their size, the number of threads or what multiplied
them.

A row has room for ``keep`` entries. What did not fit is remembered by its largest value; if that could have
mattered (more than ``keep - k`` entries within the margin of the k-th, as among many duplicates), the row is done
again without approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsclr.ops.masks import SameIds
from dsclr.ops.native import native_ops
from dsclr.ops.stats import ScanStats

# Elements of a temporary of the exact parts (32 MiB in float64).
CHUNK = 1 << 22


@dataclass(frozen=True)
class Problem:
    """Rows that look for their k largest scores among keys.

    Attributes:
        q: (N, D). keys: (M, D).
        k: entries wanted.
        keep: candidates a row has room for, more than k.
        margin: (N,) twice the error bound of a tile entry.
        q_ids, key_ids: (N,), (M,) int64 or None; equal ids are no candidates.
        same: the pairs of equal ids; None without ids.
        limit: (N,) or None: scores above it are no candidates.
        offset: index of the first key.
        values, indices: (N, k) result of earlier keys, or None.
    """

    q: Tensor
    keys: Tensor
    k: int
    keep: int
    margin: Tensor
    q_ids: Tensor | None = None
    key_ids: Tensor | None = None
    same: SameIds | None = None
    limit: Tensor | None = None
    offset: int = 0
    values: Tensor | None = None
    indices: Tensor | None = None

    def rows(self, part: slice) -> Problem:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part]

        return Problem(
            self.q[part],
            self.keys,
            self.k,
            self.keep,
            self.margin[part],
            cut(self.q_ids),
            self.key_ids,
            None if self.same is None else self.same.part(part),
            cut(self.limit),
            self.offset,
            cut(self.values),
            cut(self.indices),
        )


class TorchCollector:
    """The collection in PyTorch operations, for any device."""

    def __init__(self, problem: Problem, counts: ScanStats) -> None:
        self.problem, self.counts = problem, counts
        rows, k, self.keep = len(problem.q), problem.k, problem.keep
        wide = problem.margin.dtype
        self.values = problem.q.new_full((rows, self.keep), -torch.inf, dtype=wide)
        self.keys = torch.zeros((rows, self.keep), dtype=torch.int64, device=problem.q.device)
        if problem.values is not None:
            self.values[:, :k] = problem.values
            self.keys[:, :k] = -1 - torch.arange(k, device=problem.q.device)
        self.kth = self.values[:, k - 1].clone()
        self.dropped = torch.full_like(self.kth, -torch.inf)

    def visit(self, tile: Tensor, by_column: bool, first_row: int, first_key: int) -> None:
        """Look at a tile whose rows (columns if ``by_column``) are this collector's rows from ``first_row`` on.

        Args:
            tile: (R, C) contiguous scores.
            first_key: key of the tile's first column (row if ``by_column``).
        """
        p, counts = self.problem, self.counts
        scores = (tile.T if by_column else tile).to(self.values.dtype, copy=True)
        rows = slice(first_row, first_row + scores.shape[0])
        columns = slice(first_key, first_key + scores.shape[1])
        kth, margin = self.kth[rows], p.margin[rows]
        if p.same is not None:
            p.same.fill_(scores, rows, columns, -torch.inf)
        if p.limit is not None:
            over = scores > (p.limit[rows] + margin)[:, None]
            counts.scores_over_limit += int(over.sum())
            scores.masked_fill_(over, -torch.inf)
        row_max = scores.amax(1)
        counts.rows_seen += len(scores)
        counts.rows_skipped += int((row_max <= kth).sum())
        counts.scores_total += scores.numel()
        threshold = kth - margin
        alive = ((row_max >= threshold) & (row_max > -torch.inf)).nonzero()[:, 0]
        if not len(alive):
            return
        scores, threshold = scores[alive], threshold[alive]
        values, keys, selected = _hits(scores, threshold, self.keep + 1)
        counts.scores_selected += selected
        alive = alive + first_row
        values = torch.cat([self.values[alive], values], 1)
        keys = torch.cat([self.keys[alive], keys + first_key], 1)
        width = min(self.keep + 1, values.shape[1])
        top, where = values.topk(width, dim=1)
        if width > self.keep:
            self.dropped[alive] = torch.maximum(self.dropped[alive], top[:, self.keep])
        self.values[alive] = top[:, : self.keep]
        self.keys[alive] = keys.gather(1, where[:, : self.keep])
        self.kth[alive] = top[:, p.k - 1]

    def finish(self) -> tuple[Tensor, Tensor]:
        """Exact values (N, k), descending, and global indices (N, k); -inf and -1 where there are too few."""
        p = self.problem
        if not len(p.q):
            return self.values[:, : p.k], self.keys[:, : p.k]
        threshold = self.kth - p.margin
        removed = torch.zeros_like(threshold, dtype=torch.bool)
        values, indices = [], []
        height = max(1, CHUNK // (self.keep * max(p.q.shape[1], 1)))
        for start in range(0, len(p.q), height):
            part = slice(start, start + height)
            keys = self.keys[part]
            earlier = keys < 0
            exact = torch.einsum(
                "nd,ncd->nc", p.q[part].to(torch.float64), p.keys[keys.clamp(min=0)].to(torch.float64)
            ).to(self.values.dtype)
            index = keys + p.offset
            if p.values is not None and p.indices is not None:
                slots = (-1 - keys).clamp(min=0)
                exact = torch.where(earlier, p.values[part].gather(1, slots), exact)
                index = torch.where(earlier, p.indices[part].gather(1, slots), index)
            absent = self.values[part] < threshold[part, None]
            absent |= self.values[part] == -torch.inf
            if p.limit is not None:
                over = ~absent & ~earlier & (exact > p.limit[part, None])
                removed[part] = over.any(1)
                self.counts.scores_over_limit += int(over.sum())
                absent |= over
            top = best(exact.masked_fill(absent, -torch.inf), index, p.k)
            values.append(top[0])
            indices.append(top[1])
        redo = removed | ((self.dropped >= threshold) & (self.dropped > -torch.inf))
        return _redone(p, torch.cat(values), torch.cat(indices), redo, self.counts)


def _hits(scores: Tensor, threshold: Tensor, most: int) -> tuple[Tensor, Tensor, int]:
    """Entries at or above the row's threshold, at most the ``most`` largest of a row, in columns filled with -inf.

    Returns:
        values (R, H), columns (R, H) int64, and how many entries were looked at.
    """
    hits = scores >= threshold[:, None]
    each = hits.sum(1)
    widest = int(each.max())
    if widest > most:
        top, where = scores.topk(most, dim=1)
        return top, where, scores.numel()
    rows, columns = hits.nonzero(as_tuple=True)
    slots = torch.arange(len(rows), device=rows.device) - (each.cumsum(0) - each)[rows]
    values = scores.new_full((len(scores), widest), -torch.inf)
    keys = torch.zeros((len(scores), widest), dtype=torch.int64, device=scores.device)
    values[rows, slots] = scores[rows, columns]
    keys[rows, slots] = columns
    return values, keys, len(rows)


class NativeCollector:
    """The collection in C++, for CPU tensors; what :class:`TorchCollector` does."""

    def __init__(self, problem: Problem, counts: ScanStats) -> None:
        self.problem, self.counts = problem, counts
        rows, k = len(problem.q), problem.k
        # Room to gather before the next selection.
        self.entries = torch.empty((rows, problem.keep + max(32, k // 2)), dtype=torch.int64)
        self.count = torch.zeros(rows, dtype=torch.int32)
        # running k-th, threshold and largest dropped entry
        self.bounds = torch.full((3, rows), -torch.inf, dtype=torch.float32)
        if problem.values is not None:
            slots = (-1 - torch.arange(k, dtype=torch.int32)).expand(rows, k)
            seeds = torch.stack([problem.values.view(torch.int32), slots], 2)
            self.entries[:, :k] = seeds.view(torch.int64)[..., 0]
            self.count.fill_(k)
            self.bounds[0] = problem.values[:, -1]
            self.bounds[1] = self.bounds[0] - problem.margin

    def visit(self, tile: Tensor, by_column: bool, first_row: int, first_key: int) -> None:
        p, counts = self.problem, self.counts
        tile = tile if tile.dtype in (torch.float32, torch.bfloat16) else tile.float()
        skipped, selected, over = native_ops().visit(
            tile,
            by_column,
            self.entries,
            self.count,
            self.bounds,
            p.margin,
            p.limit,
            p.q_ids,
            p.key_ids,
            first_row,
            first_key,
            p.k,
            p.keep,
        )
        counts.rows_seen += tile.shape[1 if by_column else 0]
        counts.rows_skipped += skipped
        counts.scores_selected += selected
        counts.scores_total += tile.numel()
        counts.scores_over_limit += over

    def finish(self) -> tuple[Tensor, Tensor]:
        p = self.problem
        values, indices, redo, over = native_ops().finish(
            p.q,
            p.keys,
            self.entries,
            self.count,
            self.bounds,
            p.margin,
            p.limit,
            p.k,
            p.keep,
            p.offset,
            p.values,
            p.indices,
        )
        self.counts.scores_over_limit += over
        return _redone(p, values, indices, redo, self.counts)


Collector = TorchCollector | NativeCollector
COLLECTORS: dict[str, Callable[[Problem, ScanStats], Collector]] = {"torch": TorchCollector, "native": NativeCollector}


def best(values: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, descending, equal values by rising index; -1 stands where the value is -inf.

    Args:
        values, indices: (R, C) with C >= k, indices distinct where values are finite.
    """
    indices, order = indices.sort(dim=1, stable=True)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    values, indices = values[:, :k], indices.gather(1, order[:, :k])
    return values.contiguous(), indices.masked_fill(values == -torch.inf, -1)


def _redone(p: Problem, values: Tensor, indices: Tensor, redo: Tensor, counts: ScanStats) -> tuple[Tensor, Tensor]:
    """The result with the rows that ``redo`` marks searched without approximation."""
    rows = redo.nonzero()[:, 0]
    counts.rows_redone += len(rows)
    for some in rows.split(1024):
        values[some], indices[some] = _without_approximation(p, some)
    return values, indices


def _without_approximation(p: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    q = p.q[rows].to(torch.float64)
    wide = p.margin.dtype
    if p.values is not None and p.indices is not None:
        values, indices = p.values[rows], p.indices[rows]
    else:
        values = q.new_full((len(rows), p.k), -torch.inf, dtype=wide)
        indices = torch.full((len(rows), p.k), -1, dtype=torch.int64, device=q.device)
    width = max(p.k, CHUNK // max(len(rows), p.q.shape[1], 1))
    for start in range(0, len(p.keys), width):
        columns = slice(start, min(start + width, len(p.keys)))
        scores = (q @ p.keys[columns].to(torch.float64).T).to(wide)
        if p.q_ids is not None and p.key_ids is not None:
            scores.masked_fill_(p.q_ids[rows, None] == p.key_ids[None, columns], -torch.inf)
        if p.limit is not None:
            scores.masked_fill_(scores > p.limit[rows, None], -torch.inf)
        top, where = stable_topk(scores, min(p.k, scores.shape[1]))
        values, indices = best(torch.cat([values, top], 1), torch.cat([indices, where + (start + p.offset)], 1), p.k)
    return values, indices


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, equal values by rising position (torch.topk leaves ties open).

    Args:
        x: (R, C) with C >= k.

    Returns:
        values (R, k) descending and positions (R, k) int64.
    """
    threshold = x.topk(k, dim=1).values[:, -1:]
    tied = ((x >= threshold).sum(1) > k) & (threshold[:, 0] > -torch.inf)
    where = x.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    if tied.any():
        # Only here does the choice among equal values matter; a stable sort of these few rows settles it.
        order = x[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
        where[tied] = order.sort(dim=1).values
    # Positions rise, so a stable sort by value keeps equal values in order of position.
    values, order = x.gather(1, where).sort(dim=1, descending=True, stable=True)
    return values, where.gather(1, order)
