"""Differentiable scores of chosen (query, key) pairs, with a backward that touches only those pairs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsclr.ops.topk import TopK


def sparse_scores(q: Tensor, keys: Tensor, topk: TopK) -> Tensor:
    """The scores q_i . keys_j of a TopK selection, as a function of q and keys.

    The forward returns ``topk.values``. The backward visits the N x k pairs as sparse-dense products
    (embedding bags): dL/dq_i = sum_j g_ij keys_j, and dL/dkeys_j = sum_i g_ij q_i over the pairs sorted
    by key. No N x k x D tensor and no atomics: bitwise repeatable.

    Args:
        q: (N, D) float.
        keys: (M, D) float.
        topk: selected from these q and keys; padding (-1) receives no gradient.

    Returns:
        (N, k), dtype of ``topk.values``; -inf where padded.
    """
    return _SparseScores.apply(q, keys, topk.values, topk.indices)


class _SparseScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(q, keys, indices)
        # A view of an input would make autograd treat the scores as that input.
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        q, keys, indices = ctx.saved_tensors
        present = indices >= 0
        weights = torch.where(present, grad, 0.0)
        # bags add up in float32 at least: bf16 sums over thousands of pairs would lose the small ones
        dtype = torch.promote_types(q.dtype, torch.float32)
        grad_q = grad_keys = None
        if ctx.needs_input_grad[0]:
            grad_q = F.embedding_bag(
                indices.clamp(min=0), keys.to(dtype), per_sample_weights=weights.to(dtype), mode="sum"
            ).to(q.dtype)
        if ctx.needs_input_grad[1]:
            pairs = present.flatten().nonzero()[:, 0]
            columns, order = indices.flatten()[pairs].sort(stable=True)
            pairs = pairs[order]
            offsets = torch.searchsorted(columns, torch.arange(len(keys), device=q.device))
            grad_keys = F.embedding_bag(
                pairs // indices.shape[1],
                q.to(dtype),
                offsets,
                per_sample_weights=weights.flatten()[pairs].to(dtype),
                mode="sum",
            ).to(keys.dtype)
        return grad_q, grad_keys, None, None
