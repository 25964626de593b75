"""Differentiable scores of chosen (query, key) pairs, with a backward that touches only those pairs."""

from __future__ import annotations

from collections.abc import Sequence
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
        # bags add up in float32 at least: bf16 sums over thousands of pairs would lose the small ones
        dtype = torch.promote_types(q.dtype, torch.float32)
        grad_q = grad_keys = None
        if ctx.needs_input_grad[0]:
            grad_q = torch.zeros_like(q, dtype=dtype)
            first = 0
            for segment in (keys, *ctx.further):
                if len(segment):
                    grad_q += _weighted_rows(segment, indices - first, grad, dtype)
                first += len(segment)
            grad_q = grad_q.to(q.dtype)
        if ctx.needs_input_grad[1]:
            inside = (indices >= 0) & (indices < len(keys))
            pairs = inside.flatten().nonzero()[:, 0]
            columns, order = indices.flatten()[pairs].sort(stable=True)
            pairs = pairs[order]
            offsets = torch.searchsorted(columns, torch.arange(len(keys), device=q.device))
            grad_keys = F.embedding_bag(
                pairs // indices.shape[1],
                q.to(dtype),
                offsets,
                per_sample_weights=grad.flatten()[pairs].to(dtype),
                mode="sum",
            ).to(keys.dtype)
        return grad_q, grad_keys, None, None, None


def _weighted_rows(rows: Tensor, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, D) sum_j weights_ij rows[indices_ij] over the indices that are in range."""
    inside = (indices >= 0) & (indices < len(rows))
    return F.embedding_bag(
        indices.clamp(0, len(rows) - 1),
        rows.to(dtype),
        per_sample_weights=torch.where(inside, weights, 0.0).to(dtype),
        mode="sum",
    )
