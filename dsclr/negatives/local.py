"""The rank's own rows are its keys."""

from __future__ import annotations

from torch import Tensor

from dsclr.losses import Keys


def local_keys(a: Tensor, b: Tensor, ids: Tensor) -> Keys:
    """a, b: (N, D) embeddings; ids: (N,) int64."""
    return Keys(a, b, ids)
