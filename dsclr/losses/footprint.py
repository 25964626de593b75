"""Memory that the losses take beyond their inputs and the gradients of those, as formulas of their buffers."""

from __future__ import annotations

from dsclr.config import LossConfig
from dsclr.ops.streamed import TILE_SCORES
from dsclr.ops.topk import DEFAULT_BLOCK_SIZE, ROW_TILE

# float32 matrices of scores alive at once, measured with tools/bench_loss.py.
DENSE_MATRICES = 10
CLIP_LOSS_MATRICES = 5


def loss_bytes(cfg: LossConfig, rows: int, keys: int, dim: int, objective: str) -> int | None:
    """Of a rank's loss, forward and backward.

    Args:
        rows: N of the rank (pairs).
        keys: M, pairs of all ranks and the bank.
        dim: D.
        objective: "clip" or "simclr".

    Returns:
        Bytes; None for a loss that is not this package's.
    """
    if objective == "simclr":
        rows, keys = 2 * rows, 2 * keys
    if cfg.name == "topk" and cfg.k != "all":
        return topk_bytes(rows, keys, min(cfg.k, keys), cfg.block_size)
    if cfg.name in ("topk", "exact"):
        return exact_bytes(rows, keys, dim)
    return dense_bytes(rows, keys) if cfg.name == "dense" else None


def topk_bytes(rows: int, keys: int, k: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Results of both directions and the parts one of them is joined from, candidates of the other, a tile."""
    results = 3 * 12 * rows * k
    candidates = 8 * rows * (k + max(16, k // 4) + max(32, k // 2))
    return results + candidates + 4 * min(rows, ROW_TILE) * min(keys, block_size)


def exact_bytes(rows: int, keys: int, dim: int) -> int:
    """Three tiles at work, or two of them while the gradients are multiplied by the loss's factor."""
    tile = 4 * min(rows * keys, max(TILE_SCORES, 16 * keys))
    return max(3 * tile, 2 * tile + 4 * (rows + keys) * dim)


def dense_bytes(rows: int, keys: int, matrices: int = DENSE_MATRICES) -> int:
    """So many float32 matrices of all scores."""
    return 4 * matrices * rows * keys
