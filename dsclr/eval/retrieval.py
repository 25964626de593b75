"""Image-text retrieval: recall at k in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsclr.eval.features import Features

ROWS = 4096


def retrieval_recall(features: Features, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Part of the queries with a match among the k nearest of the other modality.

    Everything with the query's id is a match. Of equal similarities the non-matching come first, so a collapsed
    model does not look good.

    Returns:
        "image_to_text_R@1", ..., "text_to_image_R@10", each in [0, 1].
    """
    results = {}
    for name, queries, keys in (
        ("image_to_text", features.image, features.text),
        ("text_to_image", features.text, features.image),
    ):
        rank = match_rank(queries, keys, features.ids)
        results.update({f"{name}_R@{k}": float((rank < k).double().mean()) for k in ks})
    return results


def match_rank(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """(N,) int64: how many non-matching keys are at least as near as the nearest match."""
    ranks = []
    for start in range(0, len(queries), ROWS):
        scores = queries[start : start + ROWS] @ keys.T
        match = ids[start : start + ROWS, None] == ids[None, :]
        best = scores.masked_fill(~match, -torch.inf).amax(1, keepdim=True)
        ranks.append(((scores >= best) & ~match).sum(1))
    return torch.cat(ranks)
