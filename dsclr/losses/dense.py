"""InfoNCE over the whole similarity matrix: the oracle, and the right choice while the matrix is small."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.losses.base import Keys, LossOutput, check_margin, check_objective, directions, similarity_metrics


class DenseInfoNCE:
    """L_i = -scale s_ip + log(exp(scale s_ip) + sum over valid negatives j of exp(scale s_ij)).

    With the objective "clip" the mean of both directions (Radford et al. 2021), with "simclr" NT-Xent
    (Chen et al. 2020). Keys with the id of the row are no negatives. Memory grows with N x M.
    """

    def __init__(self, objective: str = "clip", *, false_negative_margin: float | None = None) -> None:
        """
        Args:
            objective: "clip" or "simclr".
            false_negative_margin: negatives more similar than the row's positive by more than this (cosine) are left
                out.
        """
        self.objective = check_objective(objective)
        self.false_negative_margin = check_margin(false_negative_margin)

    def __call__(
        self, a: Tensor, b: Tensor, logit_scale: Tensor, ids: Tensor | None = None, keys: Keys | None = None
    ) -> LossOutput:
        """See :class:`dsclr.losses.Loss`."""
        losses, positives, hardest = [], [], []
        for d in directions(a, b, ids, keys, self.objective, self.false_negative_margin):
            all_keys, key_ids = d.joined()
            same = d.q_ids[:, None] == key_ids[None, :]
            scores = (d.q @ all_keys.T).to(d.positive.dtype)
            if d.limit is not None:
                same |= scores.detach() > d.limit[:, None]
            # Scale, then mask: -inf times the scale would have a NaN gradient of the scale.
            logits = (scores * logit_scale).masked_fill(same, -torch.inf)
            positive = d.positive * logit_scale
            normaliser = torch.logsumexp(torch.cat([positive[:, None], logits], dim=1), dim=1)
            losses.append(normaliser - positive)
            positives.append(d.positive)
            hardest.append(scores.detach().masked_fill(same, -torch.inf).amax(dim=1))
        return LossOutput(torch.cat(losses).mean(), similarity_metrics(torch.cat(positives), torch.cat(hardest)))
