"""InfoNCE of chosen (query, key) pairs, with a backward that touches only those pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsclr.ops.topk import TopK


def sparse_scores(q: Tensor, keys: Tensor, topk: TopK, further: Sequence[Tensor] = ()) -> Tensor:
    """The scores q_i . keys_j of a TopK selection, as a function of q and keys.

    The forward returns ``topk.values``. The backward visits the N x k pairs as sparse-dense products
    (embedding bags): dL/dq_i = sum_j g_ij keys_j, and dL/dkeys_j = sum_i g_ij q_i over the pairs sorted
    by key. No N x k x D tensor and no atomics: bitwise repeatable.

    Args:
        q: (N, D) float.
        keys: (M, D) float.
        topk: selected from these q and keys; padding (-1) receives no gradient.
        further: constant keys, (M_1, D), (M_2, D), ..., whose indices follow those of ``keys``.

    Returns:
        (N, k), dtype of ``topk.values``; -inf where padded.
    """
    return _SparseScores.apply(q, keys, topk.values, topk.indices, tuple(further))


class _SparseScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, indices: Tensor, further: tuple[Tensor, ...]
    ) -> Tensor:
        ctx.save_for_backward(q, keys, indices)
        ctx.further = further
        # A view of an input would make autograd treat the scores as that input.
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        q, keys, indices = ctx.saved_tensors
        grad_q = _query_gradient(q, (keys, *ctx.further), indices, grad) if ctx.needs_input_grad[0] else None
        grad_keys = _key_gradient(q, keys, indices, grad) if ctx.needs_input_grad[1] else None
        return grad_q, grad_keys, None, None, None


def sparse_infonce(
    q: Tensor, keys: Tensor, positive: Tensor, scale: Tensor, topk: TopK, further: Sequence[Tensor] = ()
) -> Tensor:
    """Sum over rows of n_i - scale p_i, n_i = log(exp(scale p_i) + sum over the kept j of exp(scale q_i . keys_j)).

    With ``topk.lse`` (over all valid keys, at this scale) n_i is the log of exp(scale p_i) + exp(lse_i), while
    gradients still flow to the kept scores and the positive only, by their weights in that sum.

    The same as a log-sum-exp over :func:`sparse_scores`, but between forward and backward it holds one float and one
    index a pair.

    Args:
        q, keys, further: as in :func:`sparse_scores`.
        positive: (N,) score p_i of every row with its positive.
        scale: one element, positive.
        topk: selected from these keys.

    Returns:
        0-dim, float32 at least; differentiable once in q, keys, positive and scale.
    """
    wide = topk.values.dtype
    with torch.no_grad():
        s, p = scale.detach().reshape(()).to(wide), positive.detach().to(wide)
        # -inf, where padded, stays -inf: the scale is positive.
        logits = topk.values * s
        rest = torch.logsumexp(logits, 1) if topk.lse is None else topk.lse
        normaliser = torch.logaddexp(rest, s * p)
        weights = logits.sub_(normaliser[:, None]).exp_()
        missing = (s * p - normaliser).exp_().sub_(1)
        kept = (weights * topk.values.clamp(min=torch.finfo(wide).min)).sum()
        saved = _Saved(weights, topk.indices, missing, kept + (missing * p).sum(), s, tuple(further))
        loss = (normaliser - s * p).sum()
    return _SparseInfoNCE.apply(loss, q, keys, positive, scale, saved)


@dataclass(frozen=True)
class _Saved:
    """What the backward needs: d loss / d logit of the kept pairs and the positives, and d loss / d scale."""

    weights: Tensor
    indices: Tensor
    missing: Tensor
    grad_scale: Tensor
    scale: Tensor
    further: tuple[Tensor, ...]


class _SparseInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, q: Tensor, keys: Tensor, positive: Tensor, scale: Tensor, saved: _Saved
    ) -> Tensor:
        ctx.save_for_backward(q, keys, positive, scale)
        ctx.saved = saved
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, positive, scale = ctx.saved_tensors
        saved: _Saved = ctx.saved
        factor = grad * saved.scale
        _, needs_q, needs_keys, needs_positive, needs_scale, _ = ctx.needs_input_grad
        # The factor goes to the results: scaled weights would be another N x k.
        segments = (keys, *saved.further)
        return (
            None,
            _query_gradient(q, segments, saved.indices, saved.weights, factor) if needs_q else None,
            _key_gradient(q, keys, saved.indices, saved.weights, factor) if needs_keys else None,
            (saved.missing * factor).to(positive.dtype) if needs_positive else None,
            (saved.grad_scale * grad).reshape(scale.shape).to(scale.dtype) if needs_scale else None,
            None,
        )


def _query_gradient(
    q: Tensor, segments: Sequence[Tensor], indices: Tensor, weights: Tensor, factor: Tensor | None = None
) -> Tensor:
    """(N, D) factor * sum_j weights_ij keys_j, the keys in several segments; -1 is no key."""
    # bags add up in float32 at least: bf16 sums over thousands of pairs would lose the small ones
    dtype = torch.promote_types(q.dtype, torch.float32)
    total: Tensor | None = None
    first = 0
    for rows in segments:
        if len(rows):
            inside = (indices >= first) & (indices < first + len(rows))
            part = F.embedding_bag(
                (indices - first).clamp_(0, len(rows) - 1),
                rows.to(dtype),
                per_sample_weights=torch.where(inside, weights, 0.0).to(dtype),
                mode="sum",
            )
            total = part if total is None else total.add_(part)
        first += len(rows)
    total = torch.zeros_like(q, dtype=dtype) if total is None else total
    return (total if factor is None else total.mul_(factor)).to(q.dtype)


def _key_gradient(q: Tensor, keys: Tensor, indices: Tensor, weights: Tensor, factor: Tensor | None = None) -> Tensor:
    """(M, D) factor * sum_i weights_ij q_i over the pairs sorted by key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    inside = (indices >= 0) & (indices < len(keys))
    pairs = inside.flatten().nonzero()[:, 0]
    if len(keys) < 2**31 and indices.numel() < 2**31:
        pairs = pairs.to(torch.int32)
    columns, order = indices.flatten()[pairs].to(pairs.dtype).sort(stable=True)
    pairs = pairs[order]
    del order
    offsets = torch.searchsorted(columns, torch.arange(len(keys), device=q.device, dtype=columns.dtype))
    del columns
    total = F.embedding_bag(
        pairs // indices.shape[1],
        q.to(dtype),
        offsets.to(pairs.dtype),
        per_sample_weights=weights.flatten()[pairs].to(dtype),
        mode="sum",
    )
    return (total if factor is None else total.mul_(factor)).to(keys.dtype)
