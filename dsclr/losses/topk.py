"""InfoNCE over the k hardest negatives of every row (budgeted hard-negative selection, Xu 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.losses.base import Keys, LossOutput, check_objective, directions, similarity_metrics
from dsclr.ops import ScanStats, sparse_scores, topk_scan


class TopKInfoNCE:
    """L_i = -scale s_ip + log(exp(scale s_ip) + sum over the k largest valid s_ij of exp(scale s_ij)).

    The similarities are scanned in column blocks (:func:`dsclr.ops.topk_scan`), so memory is linear in N;
    the gradient touches the kept pairs only. A row with fewer than k valid negatives uses those it has.
    """

    def __init__(self, k: int = 64, block_size: int | None = None, objective: str = "clip") -> None:
        """
        Args:
            k: hard negatives kept per row.
            block_size: keys per column block; None: the scan's default.
            objective: "clip" or "simclr".
        """
        if k < 1:
            raise ValueError(f"k = {k}, at least 1 is needed")
        self.k = k
        self.block_size = block_size
        self.objective = check_objective(objective)

    def __call__(
        self, a: Tensor, b: Tensor, logit_scale: Tensor, ids: Tensor | None = None, keys: Keys | None = None
    ) -> LossOutput:
        """See :class:`dsclr.losses.Loss`. Further metrics: skip_rate and selection_work of the scan."""
        losses, positives, hardest = [], [], []
        stats = ScanStats(0, 0, 0, 0)
        for d in directions(a, b, ids, keys, self.objective):
            top = topk_scan(
                d.q.detach(),
                d.keys.detach(),
                self.k,
                q_ids=d.q_ids,
                key_ids=d.key_ids,
                block_size=self.block_size,
            )
            stats = stats + top.stats
            # Scale, then mask (the padding is zero until masked): see the gradient of the scale in DenseInfoNCE.
            padded = top.indices < 0
            scores = sparse_scores(d.q, d.keys, top).masked_fill(padded, 0.0)
            logits = (scores * logit_scale).masked_fill(padded, -torch.inf)
            positive = d.positive * logit_scale
            normaliser = torch.logsumexp(torch.cat([positive[:, None], logits], dim=1), dim=1)
            losses.append(normaliser - positive)
            positives.append(d.positive)
            hardest.append(top.values[:, 0])
        metrics = similarity_metrics(torch.cat(positives), torch.cat(hardest))
        metrics.update(skip_rate=stats.skip_rate, selection_work=stats.selection_work)
        return LossOutput(torch.cat(losses).mean(), metrics)
