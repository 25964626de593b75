"""A loss that needs the rows of all ranks at once, among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.losses.base import Keys, Loss, LossOutput
from dsclr.ops.shared import Back, Exchange, SharedRows, Visit


def backward_of_collected(
    loss_fn: Loss,
    exchange: Exchange,
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor,
    ids: Tensor,
    bank: tuple[Keys, ...] = (),
) -> tuple[LossOutput, SharedRows]:
    """Collect the keys of all ranks, form the loss, and leave the gradient of all ranks' losses at a and b.

    Args:
        a, b: (N, D) leaves. logit_scale: gets its gradient too.
        ids: (N,) int64.

    Returns:
        The loss without a graph, and the rows.
    """
    rows = exchange.share(a.detach(), b.detach(), ids)
    all_a, all_b, all_ids = rows.collect()
    output = loss_fn(a, b, logit_scale, ids, Keys(all_a.requires_grad_(), all_b.requires_grad_(), all_ids, bank))
    output.loss.backward()
    of_keys = [torch.zeros_like(x) if x.grad is None else x.grad for x in (all_a, all_b)]

    def give(some: Visit) -> list[Tensor]:
        first = some.owner * len(a) + some.start
        return [grad[first : first + len(some.rows[0])] for grad in of_keys]

    for own, grad in zip((a, b), rows.visit(give, back=[Back(torch.zeros_like(x)) for x in (a, b)]), strict=True):
        own.grad = grad if own.grad is None else own.grad + grad
    return LossOutput(output.loss.detach(), output.metrics), rows
