"""Exact top-k of a similarity matrix that is never held: column blocks, ids mask, row-max skipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_BLOCK_SIZE = 1024
# Rows are independent, so a tile of rows bounds the memory whatever N is.
ROW_TILE = 8192


@dataclass(frozen=True)
class ScanStats:
    """What a scan did. A row is seen once per column block.

    Attributes:
        rows_seen: (row, block) pairs visited.
        rows_skipped: of those, pairs whose block maximum did not beat the row's k-th value.
        scores_selected: scores that went through a selection.
        scores_total: scores computed, N x M.
    """

    rows_seen: int
    rows_skipped: int
    scores_selected: int
    scores_total: int

    @property
    def skip_rate(self) -> float:
        return self.rows_skipped / max(self.rows_seen, 1)

    @property
    def selection_work(self) -> float:
        """Part of the scores that a selection had to look at."""
        return self.scores_selected / max(self.scores_total, 1)

    def __add__(self, other: ScanStats) -> ScanStats:
        return ScanStats(
            self.rows_seen + other.rows_seen,
            self.rows_skipped + other.rows_skipped,
            self.scores_selected + other.scores_selected,
            self.scores_total + other.scores_total,
        )


@dataclass(frozen=True)
class TopK:
    """The k largest valid scores of every query.

    Attributes:
        values: (N, k) float32 (float64 for float64 inputs), descending; -inf where fewer than k keys are valid.
        indices: (N, k) int64 into the keys; -1 where values is -inf. Equal values stand by rising index.
        stats: what the scan did.
    """

    values: Tensor
    indices: Tensor
    stats: ScanStats


@torch.no_grad()
def topk_scan(
    q: Tensor,
    keys: Tensor,
    k: int,
    *,
    q_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    block_size: int | None = None,
) -> TopK:
    """Exact k largest q . key per query, scanning the keys in blocks of columns.

    A (row, block) pair is skipped when the block's maximum is not above the row's current k-th value
    (row-max pruning, Xu 2026): no score in it can enter. Ties go to the lowest key index, so the result
    does not depend on the block size.

    Args:
        q: (N, D) float.
        keys: (M, D), same dtype and device as q.
        k: kept per query, at least 1; may exceed M.
        q_ids: (N,) int64. A key whose id equals the query's is masked. Needs key_ids.
        key_ids: (M,) int64.
        block_size: keys per column block, 1,024 if None.

    Returns:
        TopK, without a graph.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or NaN scores.
    """
    _check(q, keys, k, q_ids, key_ids, block_size)
    block = block_size or DEFAULT_BLOCK_SIZE
    parts = [
        _scan_rows(q[start : start + ROW_TILE], keys, k, block, _rows(q_ids, start), key_ids)
        for start in range(0, len(q), ROW_TILE)
    ]
    if not parts:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        shape = (0, k)
        empty = ScanStats(0, 0, 0, 0)
        return TopK(q.new_empty(shape, dtype=dtype), q.new_empty(shape, dtype=torch.int64), empty)
    stats = parts[0].stats
    for part in parts[1:]:
        stats = stats + part.stats
    return TopK(torch.cat([p.values for p in parts]), torch.cat([p.indices for p in parts]), stats)


def _rows(ids: Tensor | None, start: int) -> Tensor | None:
    return None if ids is None else ids[start : start + ROW_TILE]


def _check(
    q: Tensor, keys: Tensor, k: int, q_ids: Tensor | None, key_ids: Tensor | None, block_size: int | None
) -> None:
    if q.ndim != 2 or keys.ndim != 2 or q.shape[1] != keys.shape[1]:
        raise ValueError(f"q must be (N, D) and keys (M, D): got {tuple(q.shape)} and {tuple(keys.shape)}")
    if q.dtype != keys.dtype or not q.is_floating_point():
        raise ValueError(f"q and keys must have one floating dtype: got {q.dtype} and {keys.dtype}")
    if q.device != keys.device:
        raise ValueError(f"q is on {q.device}, keys on {keys.device}")
    if k < 1:
        raise ValueError(f"k = {k}, at least 1 is needed")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size = {block_size}, at least 1 is needed")
    if (q_ids is None) != (key_ids is None):
        raise ValueError("q_ids and key_ids go together: give both or neither")
    for name, ids, tensor in (("q_ids", q_ids, q), ("key_ids", key_ids, keys)):
        if ids is not None and (ids.shape != (len(tensor),) or ids.dtype != torch.int64):
            raise ValueError(f"{name} must be ({len(tensor)},) int64: got {tuple(ids.shape)} {ids.dtype}")


def _scan_rows(q: Tensor, keys: Tensor, k: int, block: int, q_ids: Tensor | None, key_ids: Tensor | None) -> TopK:
    rows, columns = len(q), len(keys)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    values = torch.full((rows, k), -torch.inf, dtype=dtype, device=q.device)
    indices = torch.full((rows, k), -1, dtype=torch.int64, device=q.device)
    kth = values[:, -1].clone()
    seen = skipped = selected = 0
    for start in range(0, columns, block):
        tile = (q @ keys[start : start + block].T).to(dtype)
        if q_ids is not None and key_ids is not None:
            tile.masked_fill_(q_ids[:, None] == key_ids[None, start : start + block], -torch.inf)
        row_max = tile.amax(dim=1)
        if row_max.isnan().any():
            raise ValueError("NaN scores in topk_scan: the embeddings contain NaN or Inf")
        alive = (row_max > kth).nonzero()[:, 0]
        seen += rows
        skipped += rows - len(alive)
        selected += len(alive) * tile.shape[1]
        if len(alive):
            column_ids = torch.arange(start, start + tile.shape[1], device=q.device)
            merged_values = torch.cat([values[alive], tile[alive]], dim=1)
            merged_indices = torch.cat([indices[alive], column_ids.expand(len(alive), -1)], dim=1)
            top, where = _stable_topk(merged_values, k)
            values[alive] = top
            indices[alive] = merged_indices.gather(1, where)
            kth[alive] = top[:, -1]
    indices.masked_fill_(values == -torch.inf, -1)
    return TopK(values, indices, ScanStats(seen, skipped, selected, rows * columns))


def _stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
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
