"""Dense fp64 references, written from the formulas and sharing no code with the package."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_topk(q: Tensor, keys: Tensor, k: int, q_ids: Tensor | None, key_ids: Tensor | None):
    """Values (N, k) and indices (N, k) by a full stable sort: descending, ties to the lowest index."""
    scores = q.double() @ keys.double().T
    if q_ids is not None and key_ids is not None:
        scores[q_ids[:, None] == key_ids[None, :]] = -torch.inf
    pad = max(0, k - scores.shape[1])
    scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    values, indices = values[:, :k], indices[:, :k].clone()
    indices[values == -torch.inf] = -1
    return values, indices


def dense_loss(a: Tensor, b: Tensor, scale: Tensor, ids: Tensor, objective: str, k: int | None = None) -> Tensor:
    """InfoNCE row by row in the inputs' dtype; k None: all negatives."""
    if objective == "clip":
        problems = [(a, b, ids, ids, (a * b).sum(1)), (b, a, ids, ids, (a * b).sum(1))]
    else:
        z, both = torch.cat([a, b]), torch.cat([ids, ids])
        problems = [(z, z, both, both, torch.cat([(a * b).sum(1)] * 2))]
    rows = []
    for q, keys, q_ids, key_ids, positive in problems:
        for i in range(len(q)):
            negatives = (keys @ q[i])[key_ids != q_ids[i]]
            if k is not None and len(negatives) > k:
                negatives = negatives[negatives.argsort(descending=True, stable=True)[:k]]
            logits = torch.cat([positive[i : i + 1], negatives]) * scale
            rows.append(torch.logsumexp(logits, 0) - positive[i] * scale)
    return torch.stack(rows).mean()
