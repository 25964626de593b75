"""InfoNCE over all negatives without the similarity matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.losses.base import Keys, LossOutput, check_objective, directions
from dsclr.ops.streamed import streamed_infonce, streamed_self_infonce, streamed_symmetric_infonce


class ExactInfoNCE:
    """The loss of :class:`dsclr.losses.DenseInfoNCE`, streamed: same value and gradients, memory linear in N.

    Gradients are formed in the forward, tile by tile (Inf-CL 2024); where the rows are their own keys, both
    directions ("clip") or both halves of the matrix ("simclr") come from one tile.
    """

    def __init__(self, objective: str = "clip") -> None:
        self.objective = check_objective(objective)

    def __call__(
        self, a: Tensor, b: Tensor, logit_scale: Tensor, ids: Tensor | None = None, keys: Keys | None = None
    ) -> LossOutput:
        """See :class:`dsclr.losses.Loss`."""
        problems = directions(a, b, ids, keys, self.objective)
        own = keys is None or (keys.a is a and keys.b is b)
        first = problems[0]
        if not own:
            parts = [streamed_infonce(d.q, d.keys, d.positive, logit_scale, d.q_ids, d.key_ids) for d in problems]
            loss = torch.stack(parts).mean()
        elif self.objective == "clip":
            loss = streamed_symmetric_infonce(a, b, first.positive, logit_scale, first.q_ids)
        else:
            loss = streamed_self_infonce(first.q, first.positive, logit_scale, first.q_ids)
        return LossOutput(loss, {"positive_similarity": first.positive.detach().mean()})
