"""InfoNCE of chosen (query, key) pairs, with a backward that touches only those pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsclr.ops.precision import as_written
from dsclr.ops.topk import TopK

# Rows of a gradient worked on at once.
BAG_ROWS = 8192


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
        grad_q = grad_keys = None
        wide = torch.promote_types(q.dtype, torch.float32)
        if ctx.needs_input_grad[0]:
            grad_q = torch.zeros_like(q, dtype=wide)
            _add_query_gradient(grad_q, (keys, *ctx.further), indices, grad)
        if ctx.needs_input_grad[1]:
            grad_keys = torch.zeros_like(keys, dtype=wide)
            _add_key_gradient(grad_keys, q, indices, grad)
        return (
            None if grad_q is None else grad_q.to(q.dtype),
            None if grad_keys is None else grad_keys.to(keys.dtype),
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class Kept:
    """Queries with the keys that were kept for them.

    Attributes:
        q: (R, D) float; R is N, the number of pairs, or a multiple: then the pairs' positives in turn.
        keys: (M, D). further: constant keys whose indices follow.
        topk: selected from these.
    """

    q: Tensor
    keys: Tensor
    topk: TopK
    further: tuple[Tensor, ...] = ()


@as_written
def sparse_infonce(a: Tensor, b: Tensor, parts: Sequence[Kept], scale: Tensor) -> Tensor:
    """Mean over queries of n_i - scale p_i, n_i = log(exp(scale p_i) + sum over kept j of exp(scale q_i . keys_j)).

    With ``topk.lse`` (over all valid keys, at this scale) n_i is the log of exp(scale p_i) + exp(lse_i), while
    gradients still flow to the kept scores and the positive only, by their weights in that sum.

    Between forward and backward one float and one index a pair are held, and each input has one gradient, whatever
    number of roles it plays.

    Args:
        a, b: (N, D) the pairs; p_i = a_i . b_i.
        parts: one a direction.
        scale: one element, positive.

    Returns:
        0-dim, float32 at least; differentiable once in a, b, every q and keys, and scale.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    rows = sum(len(part.q) for part in parts)
    with torch.no_grad():
        s = scale.detach().reshape(()).to(wide)
        positive = torch.linalg.vecdot(a.to(wide), b.to(wide))
        loss, grad_scale = torch.zeros_like(s), torch.zeros_like(s)
        missing_of_pairs = torch.zeros_like(positive)
        weights = []
        for part in parts:
            values, p = part.topk.values, positive.repeat(len(part.q) // max(1, len(a)))
            # -inf, where padded, stays -inf: the scale is positive.
            logits = values * s
            rest = torch.logsumexp(logits, 1) if part.topk.lse is None else part.topk.lse
            normaliser = torch.logaddexp(rest, s * p)
            logits.sub_(normaliser[:, None]).exp_()
            missing = (s * p - normaliser).exp_().sub_(1)
            loss += (normaliser - s * p).sum() / rows
            grad_scale += ((logits * values.clamp(min=-torch.finfo(wide).max)).sum() + (missing * p).sum()) / rows
            missing_of_pairs += missing.view(-1, len(a)).sum(0) / rows
            weights.append(logits)
    tensors: list[Tensor] = []
    slots = [(_slot(tensors, part.q), _slot(tensors, part.keys)) for part in parts]
    pair = (_slot(tensors, a), _slot(tensors, b))
    saved = _Saved(tuple(parts), tuple(weights), tuple(slots), pair, missing_of_pairs, grad_scale, s, rows)
    return _SparseInfoNCE.apply(loss, saved, scale, *tensors)


def _slot(tensors: list[Tensor], x: Tensor) -> int:
    """Place of a tensor in the list; the same tensor has one place."""
    for place, y in enumerate(tensors):
        if x is y:
            return place
    tensors.append(x)
    return len(tensors) - 1


@dataclass(frozen=True)
class _Saved:
    """What the backward needs, besides the inputs.

    Attributes:
        weights: (R, k) per part, of the kept scores in the softmax.
        slots: places of each part's q and keys among the inputs. pair: of a and b.
        missing: (N,) d loss / d (scale p_i).
    """

    parts: tuple[Kept, ...]
    weights: tuple[Tensor, ...]
    slots: tuple[tuple[int, int], ...]
    pair: tuple[int, int]
    missing: Tensor
    grad_scale: Tensor
    scale: Tensor
    rows: int


class _SparseInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, saved: _Saved, scale: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *tensors)
        ctx.indices = [part.topk.indices for part in saved.parts]
        ctx.further = [part.further for part in saved.parts]
        # The parts hold inputs, which only save_for_backward may.
        ctx.saved = replace(saved, parts=())
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, *tensors = ctx.saved_tensors
        saved: _Saved = ctx.saved
        wanted = ctx.needs_input_grad[3:]
        wide = saved.scale.dtype
        totals = [torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(tensors, wanted, strict=True)]
        for (q_slot, keys_slot), weights, indices, further in zip(
            saved.slots, saved.weights, ctx.indices, ctx.further, strict=True
        ):
            q, keys = tensors[q_slot], tensors[keys_slot]
            grad_q, grad_keys = totals[q_slot], totals[keys_slot]
            if grad_q is not None:
                _add_query_gradient(grad_q, (keys, *further), indices, weights)
            if grad_keys is not None:
                _add_key_gradient(grad_keys, q, indices, weights)
        # The factor goes to the results: scaled weights would be another R x k.
        factor = grad * saved.scale
        for total in totals:
            if total is not None:
                total.mul_(factor / saved.rows)
        for slot, other in (saved.pair, saved.pair[::-1]):
            total = totals[slot]
            if total is not None:
                total.addcmul_(tensors[other].to(wide), (saved.missing * factor)[:, None])
        grad_scale = (saved.grad_scale * grad).reshape(scale.shape).to(scale.dtype) if ctx.needs_input_grad[2] else None
        grads = (None if x is None else x.to(t.dtype) for x, t in zip(totals, tensors, strict=True))
        return None, None, grad_scale, *grads


def _add_query_gradient(total: Tensor, segments: Sequence[Tensor], indices: Tensor, weights: Tensor) -> None:
    """total_i += sum_j weights_ij keys_j, the keys in several segments; -1 is no key.

    Args:
        total: (N, D) float32 at least: bf16 sums over thousands of pairs would lose the small ones.
    """
    first = 0
    for keys in segments:
        last = first + len(keys)
        rows = keys.to(total.dtype)
        for part in _parts(len(total)) if len(keys) else ():
            some = indices[part]
            total[part] += F.embedding_bag(
                (some - first).clamp_(0, len(keys) - 1),
                rows,
                per_sample_weights=torch.where((some >= first) & (some < last), weights[part], 0.0).to(total.dtype),
                mode="sum",
            )
        first = last


def _add_key_gradient(total: Tensor, q: Tensor, indices: Tensor, weights: Tensor) -> None:
    """total_j += sum_i weights_ij q_i over the pairs sorted by key; indices beyond the keys are not looked at.

    Args:
        total: (M, D) float32 at least.
    """
    columns = indices.flatten()
    if len(total) < 2**31:
        columns = columns.clamp(max=2**31 - 1).to(torch.int32)
    columns, pairs = columns.sort(stable=True)
    ends = torch.searchsorted(columns, torch.arange(len(total) + 1, device=q.device, dtype=columns.dtype))
    del columns
    rows, weights, k = q.to(total.dtype), weights.flatten(), indices.shape[1]
    for part in _parts(len(total)):
        first, last = int(ends[part.start]), int(ends[part.stop])
        some = pairs[first:last]
        total[part] += F.embedding_bag(
            some // k,
            rows,
            ends[part] - first,
            per_sample_weights=weights[some].to(total.dtype),
            mode="sum",
        )


def _parts(length: int) -> list[slice]:
    # A bag of all rows at once would be another tensor of the size of the gradient.
    return [slice(start, min(start + BAG_ROWS, length)) for start in range(0, length, BAG_ROWS)]
