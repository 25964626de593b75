"""InfoNCE over all negatives without the similarity matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.losses.base import (
    Keys,
    LossOutput,
    SharedKeys,
    are_own_keys,
    check_margin,
    check_objective,
    check_scale,
    directions,
)
from dsclr.ops.streamed import streamed_infonce, streamed_self_infonce, streamed_symmetric_infonce
from dsclr.ops.streamed_shared import shared_self_infonce, shared_symmetric_infonce


class ExactInfoNCE:
    """The loss of :class:`dsclr.losses.DenseInfoNCE`, streamed: same value and gradients, memory linear in N.

    Gradients are formed in the forward, tile by tile (Inf-CL 2024); where the rows are their own keys, both
    directions ("clip") or both halves of the matrix ("simclr") come from one tile.
    """

    streams_keys = True

    def __init__(self, objective: str = "clip", *, false_negative_margin: float | None = None) -> None:
        """
        Args:
            objective: "clip" or "simclr".
            false_negative_margin: negatives more similar than the row's positive by more than this (cosine) are left
                out. Each direction then takes tiles of its own.
        """
        self.objective = check_objective(objective)
        self.false_negative_margin = check_margin(false_negative_margin)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        logit_scale: Tensor,
        ids: Tensor | None = None,
        keys: Keys | SharedKeys | None = None,
    ) -> LossOutput:
        """See :class:`dsclr.losses.Loss`."""
        check_scale(logit_scale)
        problems = directions(a, b, ids, keys, self.objective, self.false_negative_margin)
        first = problems[0]
        if isinstance(keys, SharedKeys):
            own = slice(0, len(a))
            limit = None if first.limit is None else first.limit[own]
            shared = shared_symmetric_infonce if self.objective == "clip" else shared_self_infonce
            bank = {} if keys.bank is None else {"bank": keys.bank}
            loss = shared(a, b, first.positive[own], logit_scale, first.q_ids[own], keys.exchange, limit=limit, **bank)
        elif not are_own_keys(a, b, keys) or first.bank or first.limit is not None:
            parts = []
            for d in problems:
                all_keys, key_ids = d.joined()
                parts.append(streamed_infonce(d.q, all_keys, d.positive, logit_scale, d.q_ids, key_ids, d.limit))
            loss = torch.stack(parts).mean()
        elif self.objective == "clip":
            loss = streamed_symmetric_infonce(a, b, first.positive, logit_scale, first.q_ids)
        else:
            loss = streamed_self_infonce(first.q, first.positive, logit_scale, first.q_ids)
        return LossOutput(loss, {"positive_similarity": first.positive.detach().mean()})
