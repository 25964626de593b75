"""Exact top-k of a similarity matrix that is never held: tiles, ids mask, thresholds, exact rescoring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsclr.ops.collect import COLLECTORS, Problem
from dsclr.ops.masks import SameIds
from dsclr.ops.native import Backend, choose_backend
from dsclr.ops.precision import as_written
from dsclr.ops.products import Precision, Products, make_products
from dsclr.ops.stats import ScanStats
from dsclr.ops.tail import TailSum

DEFAULT_BLOCK_SIZE = 1024
# Rows are independent, so a tile of rows bounds the memory whatever N is.
ROW_TILE = 2048


@dataclass(frozen=True)
class TopK:
    """The k largest valid scores of every query.

    Attributes:
        values: (N, k) float32 (float64 for float64 inputs), descending; -inf where fewer than k keys are valid.
            Each is the exact product of the rows, summed in float64 and rounded once.
        indices: (N, k) int64 into the keys; -1 where values is -inf. Equal values stand by rising index.
        stats: what the scan did.
        lse: (N,) log of the sum of exp(lse_scale s_ij) over all valid keys, not only the k kept; None if not asked for.
    """

    values: Tensor
    indices: Tensor
    stats: ScanStats
    lse: Tensor | None = None


@torch.no_grad()
@as_written
def topk_scan(
    q: Tensor,
    keys: Tensor,
    k: int,
    *,
    q_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    block_size: int | None = None,
    limit: Tensor | None = None,
    initial: TopK | None = None,
    key_offset: int = 0,
    lse_scale: Tensor | None = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> TopK:
    """Exact k largest q . key per query, scanning the keys in blocks of columns.

    Tiles of scores come from fast matrix products; whatever can belong to a row's top k, given a proven bound of
    their error, is kept and rescored exactly (:mod:`dsclr.ops.collect`). Ties go to the lowest key index. The result
    does not depend on block size, order of the keys' segments, threads, backend or precision.

    Args:
        q: (N, D) float.
        keys: (M, D), same dtype and device as q.
        k: kept per query, at least 1; may exceed M.
        q_ids: (N,) int64. A key whose id equals the query's is masked. Needs key_ids.
        key_ids: (M,) int64.
        block_size: keys per column block, 1,024 if None.
        limit: (N,) float; scores above their query's limit are left out and counted. None: no limit.
        initial: the result for other keys, which these continue.
        key_offset: index of the first key, for keys that are a segment of more.
        lse_scale: one element; also sum up exp(lse_scale s_ij) over all valid keys. Products are then at least float32.
        backend: "torch", "native" (C++, CPU only) or "auto".
        precision: of the products: "input", "bf16" (float32 inputs rounded for the products), "fp32" (half-precision
            inputs widened) or "auto" (bf16 where the processor is faster at it). The top k is the same.

    Returns:
        TopK, without a graph; its stats add to those of ``initial``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or embeddings that are not finite.
    """
    _check(q, keys, k, q_ids, key_ids, block_size)
    _check_more(q, k, limit, initial, lse_scale)
    if not len(keys):
        return initial or _nothing(q, k, lse_scale is not None)
    q, keys = q.contiguous(), keys.contiguous()
    products = make_products(q, keys, precision if lse_scale is None else "fp32")
    block = block_size or DEFAULT_BLOCK_SIZE
    collector = COLLECTORS[choose_backend(backend, q.device, q.dtype)]
    whole = _problem(products, k, q_ids, key_ids, limit, key_offset, initial)
    tail = None if lse_scale is None else TailSum(whole, lse_scale, None if initial is None else initial.lse)
    counts, parts = ScanStats(), []
    buffer = _buffer(products, min(len(q), ROW_TILE), min(len(keys), block))
    for rows in _slices(len(q), ROW_TILE):
        running = collector(whole.rows(rows), counts)
        for columns in _slices(len(keys), block):
            tile = products.tile(rows, columns, buffer)
            running.visit(tile, False, 0, columns.start)
            if tail is not None:
                tail.visit(tile, False, rows.start, columns.start)
        parts.append(running.finish())
    return _result(parts, counts, q, k, initial, tail)


@torch.no_grad()
@as_written
def topk_scan_pair(
    a: Tensor,
    b: Tensor,
    k: int,
    *,
    ids: Tensor | None = None,
    block_size: int | None = None,
    limit: Tensor | None = None,
    lse_scale: Tensor | None = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> tuple[TopK, TopK]:
    """:func:`topk_scan` of a over b and of b over a; every tile is computed once and serves both.

    Args:
        a, b: (N, D) float, of one dtype.
        ids: (N,) int64, of the rows of both.
        limit: (N,) float, of the rows of both.

    Returns:
        The same as ``topk_scan(a, b, ...)`` and ``topk_scan(b, a, ...)``; statistics count square blocks.
    """
    _check(a, b, k, ids, ids, block_size)
    _check_more(a, k, limit, None)
    if len(a) != len(b):
        raise ValueError(f"a and b must have the same number of rows: got {len(a)} and {len(b)}")
    a, b = a.contiguous(), b.contiguous()
    products = make_products(a, b, precision if lse_scale is None else "fp32")
    ids, limit = _plain(ids, limit, products)
    # The bound of a tile entry as a score of b's row.
    margin = torch.full_like(products.margin, float(products.margin.amax()) if len(a) else 0.0)
    block = block_size or DEFAULT_BLOCK_SIZE
    collector = COLLECTORS[choose_backend(backend, a.device, a.dtype)]
    by_row = _problem(products, k, ids, ids, limit, 0, None)
    by_column = Problem(b, a, k, _room(k, products), 2 * margin, ids, ids, by_row.same, limit)
    tails = () if lse_scale is None else (TailSum(by_row, lse_scale), TailSum(by_column, lse_scale))
    row_counts, column_counts = ScanStats(), ScanStats()
    columns_running = collector(by_column, column_counts)
    parts = []
    buffer = _buffer(products, min(len(a), block), min(len(b), block))
    for rows in _slices(len(a), block):
        running = collector(by_row.rows(rows), row_counts)
        for columns in _slices(len(b), block):
            tile = products.tile(rows, columns, buffer)
            running.visit(tile, False, 0, columns.start)
            columns_running.visit(tile, True, columns.start, rows.start)
            if tails:
                tails[0].visit(tile, False, rows.start, columns.start)
                tails[1].visit(tile, True, columns.start, rows.start)
        parts.append(running.finish())
    return (
        _result(parts, row_counts, a, k, None, tails[0] if tails else None),
        _result([columns_running.finish()], column_counts, b, k, None, tails[1] if tails else None),
    )


@torch.no_grad()
@as_written
def topk_scan_self(
    z: Tensor,
    k: int,
    *,
    ids: Tensor | None = None,
    block_size: int | None = None,
    limit: Tensor | None = None,
    lse_scale: Tensor | None = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> TopK:
    """:func:`topk_scan` of z over itself from the upper triangle of tiles. Without ids, a row is its own best key.

    Args:
        z: (N, D) float.
        ids, limit: (N,) int64 and float.
    """
    _check(z, z, k, ids, ids, block_size)
    _check_more(z, k, limit, None)
    z = z.contiguous()
    products = make_products(z, z, precision if lse_scale is None else "fp32")
    ids, limit = _plain(ids, limit, products)
    margin = torch.full_like(products.margin, float(products.margin.amax()) if len(z) else 0.0)
    block = block_size or DEFAULT_BLOCK_SIZE
    counts = ScanStats()
    same = None if ids is None else SameIds(ids, ids)
    problem = Problem(z, z, k, _room(k, products), 2 * margin, ids, ids, same, limit)
    tail = None if lse_scale is None else TailSum(problem, lse_scale)
    running = COLLECTORS[choose_backend(backend, z.device, z.dtype)](problem, counts)
    buffer = _buffer(products, min(len(z), block), min(len(z), block))
    for rows in _slices(len(z), block):
        for columns in _slices(len(z), block):
            if columns.start < rows.start:
                continue
            tile = products.tile(rows, columns, buffer)
            for visitor in (running, tail):
                if visitor is None:
                    continue
                visitor.visit(tile, False, rows.start, columns.start)
                if columns.start > rows.start:
                    visitor.visit(tile, True, columns.start, rows.start)
    return _result([running.finish()], counts, z, k, None, tail)


def expected_skip_rate(k: int, block_size: int, keys: int) -> float:
    """Mean skip rate of a scan over keys in random order.

    In random order the k best of t blocks avoid the t-th with chance (1 - 1/t)^k; the mean over t = 1 .. T = keys
    / block_size is returned, which for many blocks tends to e^-x - x E1(x), x = k block_size / keys. It depends on
    ranks only: training changes it as far as the order of the keys goes with their similarity.
    """
    blocks = math.ceil(keys / block_size)
    if blocks == 0:
        return math.nan
    skipped = 0.0
    for t in range(1, blocks + 1):
        end = min(t * block_size, keys)
        width = end - (t - 1) * block_size
        # Until k keys were seen every row is alive.
        skipped += (1 - width / end) ** k if end - width >= k else 0.0
    return skipped / blocks


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _buffer(products: Products, rows: int, columns: int) -> Tensor:
    # One buffer for all tiles: on a CPU fresh memory for each would cost page faults.
    return products.q.new_empty(rows * columns, dtype=products.dtype)


def _problem(
    products: Products,
    k: int,
    q_ids: Tensor | None,
    key_ids: Tensor | None,
    limit: Tensor | None,
    offset: int,
    initial: TopK | None,
) -> Problem:
    q_ids, limit = _plain(q_ids, limit, products)
    key_ids, _ = _plain(key_ids, None, products)
    values, indices = (None, None) if initial is None else (initial.values.contiguous(), initial.indices.contiguous())
    keep, margin = _room(k, products), 2 * products.margin
    same = None if q_ids is None or key_ids is None else SameIds(q_ids, key_ids)
    return Problem(products.q, products.keys, k, keep, margin, q_ids, key_ids, same, limit, offset, values, indices)


def _plain(ids: Tensor | None, limit: Tensor | None, products: Products) -> tuple[Tensor | None, Tensor | None]:
    # The C++ scan reads both by position.
    return (
        None if ids is None else ids.contiguous(),
        None if limit is None else limit.to(products.margin.dtype).contiguous(),
    )


def _room(k: int, products: Products) -> int:
    # Half-precision products leave about as many candidates within the margin as there are above it.
    half = products.dtype in (torch.bfloat16, torch.float16)
    return 2 * k + 32 if half else k + max(16, k // 4)


def _result(
    parts: list[tuple[Tensor, Tensor]],
    counts: ScanStats,
    q: Tensor,
    k: int,
    initial: TopK | None,
    tail: TailSum | None,
) -> TopK:
    stats = counts if initial is None else initial.stats + counts
    lse = None if tail is None else tail.lse
    if not parts:
        return _nothing(q, k, lse is not None)
    return TopK(torch.cat([v for v, _ in parts]), torch.cat([i for _, i in parts]), stats, lse)


def _nothing(q: Tensor, k: int, with_lse: bool) -> TopK:
    values = q.new_full((len(q), k), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    indices = torch.full((len(q), k), -1, dtype=torch.int64, device=q.device)
    return TopK(values, indices, ScanStats(), torch.full_like(values[:, 0], -torch.inf) if with_lse else None)


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


def _check_more(q: Tensor, k: int, limit: Tensor | None, initial: TopK | None, lse_scale: Tensor | None = None) -> None:
    if limit is not None and (limit.shape != (len(q),) or not limit.is_floating_point()):
        raise ValueError(f"limit must be ({len(q)},) float: got {tuple(limit.shape)} {limit.dtype}")
    if initial is None:
        return
    dtype = torch.promote_types(q.dtype, torch.float32)
    if initial.values.shape != (len(q), k) or initial.values.dtype != dtype:
        raise ValueError(
            f"initial must hold ({len(q)}, {k}) values of {dtype}: got {tuple(initial.values.shape)} "
            f"of {initial.values.dtype}"
        )
    if (initial.lse is None) != (lse_scale is None):
        raise ValueError("initial and lse_scale go together: give lse_scale to the scans of all segments or to none")
