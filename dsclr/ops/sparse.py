"""InfoNCE of chosen (query, key) pairs, with a backward that touches only those pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsclr.ops.pairs import SortedPairs, row_parts
from dsclr.ops.precision import as_written
from dsclr.ops.topk import TopK


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
def sparse_infonce(a: Tensor, b: Tensor, positive: Tensor, parts: Sequence[Kept], scale: Tensor) -> Tensor:
    """Mean over queries of n_i - scale p_i, n_i = log(exp(scale p_i) + sum over kept j of exp(scale q_i . keys_j)).

    With ``topk.lse`` (over all valid keys, at this scale) n_i is the log of exp(scale p_i) + exp(lse_i), while
    gradients still flow to the kept scores and the positive only, by their weights in that sum.

    The backward visits the kept pairs as sparse-dense products (embedding bags), those of the keys sorted by key: no
    N x k x D tensor and no atomics, so it is bitwise repeatable. Between forward and backward one float and one index
    a pair are held, and each input has one gradient, whatever number of roles it plays.

    Args:
        a, b: (N, D) the pairs; p_i = a_i . b_i.
        positive: (N,) p_i in float32 at least. Its gradient goes to a and b; a graph of its own is not followed.
        parts: one a direction.
        scale: one element, positive.

    Returns:
        0-dim, float32 at least; differentiable once in a, b, every q and keys, and scale.
    """
    wide = positive.dtype
    rows = sum(len(part.q) for part in parts)
    with torch.no_grad():
        s = scale.detach().reshape(()).to(wide)
        positive = positive.detach()
        loss, grad_scale = torch.zeros_like(s), torch.zeros_like(s)
        missing_of_pairs = torch.zeros_like(positive)
        weights = []
        for part in parts:
            p = positive.repeat(len(part.q) // len(positive))
            softmax = softmax_of_kept(part.topk, p, s)
            loss += softmax.losses.sum() / rows
            grad_scale += softmax.grad_scale / rows
            missing_of_pairs += softmax.missing.view(-1, len(positive)).sum(0) / rows
            weights.append(softmax.weights)
    tensors: list[Tensor] = []
    slots = [(_slot(tensors, part.q), _slot(tensors, part.keys)) for part in parts]
    pair = (_slot(tensors, a), _slot(tensors, b))
    kept = [
        _KeptWeights(part.topk.indices, part.further, logits, *slot)
        for part, logits, slot in zip(parts, weights, slots, strict=True)
    ]
    saved = _Saved(kept, pair, missing_of_pairs, grad_scale, s, rows)
    return _SparseInfoNCE.apply(loss, saved, scale, *tensors)


@dataclass(frozen=True)
class KeptSoftmax:
    """The loss of queries over the keys that were kept for them.

    Attributes:
        losses: (R,) n_i - scale p_i.
        weights: (R, k) of the kept keys in the softmax; 0 where there are fewer.
        missing: (R,) d losses / d (scale p_i).
        grad_scale: 0-dim, d (sum of losses) / d scale.
    """

    losses: Tensor
    weights: Tensor
    missing: Tensor
    grad_scale: Tensor


def softmax_of_kept(topk: TopK, positive: Tensor, scale: Tensor) -> KeptSoftmax:
    """
    Args:
        positive: (R,) p_i. scale: 0-dim; both in the dtype of the top k's values.
    """
    # -inf, where padded, stays -inf: the scale is positive.
    weights = topk.values * scale
    rest = torch.logsumexp(weights, 1) if topk.lse is None else topk.lse
    normaliser = torch.logaddexp(rest, scale * positive)
    weights.sub_(normaliser[:, None]).exp_()
    missing = (scale * positive - normaliser).exp_().sub_(1)
    finite = topk.values.clamp(min=-torch.finfo(scale.dtype).max)
    grad_scale = (weights * finite).sum() + (missing * positive).sum()
    return KeptSoftmax(normaliser - scale * positive, weights, missing, grad_scale)


def _slot(tensors: list[Tensor], x: Tensor) -> int:
    """Place of a tensor in the list; the same tensor has one place."""
    for place, y in enumerate(tensors):
        if x is y:
            return place
    tensors.append(x)
    return len(tensors) - 1


@dataclass(frozen=True)
class _KeptWeights:
    """Of one part: which keys, their weights (R, k) in the softmax, and the places of q and keys among the inputs."""

    indices: Tensor
    further: tuple[Tensor, ...]
    weights: Tensor
    q: int
    keys: int


@dataclass(frozen=True)
class _Saved:
    """What the backward needs, besides the inputs.

    Attributes:
        pair: places of a and b among the inputs.
        missing: (N,) d loss / d (scale p_i).
    """

    kept: list[_KeptWeights]
    pair: tuple[int, int]
    missing: Tensor
    grad_scale: Tensor
    scale: Tensor
    rows: int


class _SparseInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, saved: _Saved, scale: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *tensors)
        ctx.saved = saved
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, *tensors = ctx.saved_tensors
        saved: _Saved = ctx.saved
        wanted = ctx.needs_input_grad[3:]
        wide = saved.scale.dtype
        totals = [torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(tensors, wanted, strict=True)]
        for part in saved.kept:
            q, keys = tensors[part.q], tensors[part.keys]
            grad_q, grad_keys = totals[part.q], totals[part.keys]
            if grad_q is not None:
                _add_query_gradient(grad_q, (keys, *part.further), part.indices, part.weights)
            if grad_keys is not None:
                SortedPairs(part.indices, part.weights).add_to_keys(grad_keys, q)
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
        for part in row_parts(len(total)) if len(keys) else ():
            some = indices[part]
            total[part] += F.embedding_bag(
                (some - first).clamp_(0, len(keys) - 1),
                rows,
                per_sample_weights=torch.where((some >= first) & (some < last), weights[part], 0.0).to(total.dtype),
                mode="sum",
            )
        first = last
