"""Full-softmax InfoNCE of a similarity matrix that is never held (Inf-CL 2024, within one process).

Gradients are formed with the loss, tile by tile, in the forward. One direction costs three matrix products
(scores, dq, dkeys); both directions of a symmetric problem cost four, as one tile serves both; a matrix of z against
itself is visited in its upper triangle only. Memory is linear in the number of rows and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsclr.ops.masks import SameIds
from dsclr.ops.native import choose_backend, native_ops
from dsclr.ops.precision import as_written

# Scores in a tile: enough for fast matrix products, little memory (64 MiB in fp32).
TILE_SCORES = 1 << 24


@as_written
def streamed_infonce(
    q: Tensor,
    keys: Tensor,
    positive: Tensor,
    scale: Tensor,
    q_ids: Tensor,
    key_ids: Tensor,
    limit: Tensor | None = None,
) -> Tensor:
    """Mean over rows of n_i - scale p_i, n_i = log(exp(scale p_i) + sum over valid j of exp(scale q_i . keys_j)).

    Args:
        q: (N, D) float.
        keys: (M, D), dtype of q. No gradient is formed for keys that need none.
        positive: (N,) score p_i of every row with its positive.
        scale: one element.
        q_ids, key_ids: (N,), (M,) int64; pairs with equal ids are no negatives.
        limit: (N,) scores above it are no negatives; None: no limit.

    Returns:
        0-dim, float32 at least; differentiable once in q, keys, positive and scale.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    inputs = (q, keys, positive, scale)
    with torch.no_grad():
        s, p = scale.detach().to(wide).reshape(()), positive.detach().to(wide)
        normaliser = torch.empty_like(p)
        graph, keys_graph = needed(*inputs), needed(keys)
        grad_q = torch.empty_like(q, dtype=wide)
        grad_keys = torch.zeros_like(keys, dtype=wide)
        tiles = _Tiles(q, keys, s, SameIds(q_ids, key_ids), limit)
        for rows in row_tiles(len(q), len(keys)):
            # exp(logits - top) serves the sum and, rescaled by row, the softmax.
            weights, top, total = _exponentials(tiles.scores(rows), s)
            normaliser[rows] = torch.logaddexp(top + total.log(), s * p[rows])
            if graph:
                rescale = (top - normaliser[rows]).exp()[:, None]
                weights = weights.to(q.dtype)
                grad_q[rows] = (weights @ keys).to(wide) * rescale
                if keys_graph:
                    add_product(grad_keys, weights.T, (q[rows] * rescale).to(q.dtype))
        loss = (normaliser - s * p).mean()
        if not graph:
            return loss
        missing = (s * p - normaliser).exp() - 1
        grad_scale = ((q * grad_q).sum() + (missing * p).sum()) / len(q)
        factor = s / len(q)
        grads = (grad_q * factor, grad_keys * factor, missing * factor, grad_scale)
    return attach_gradients(loss, inputs, grads)


@as_written
def streamed_symmetric_infonce(a: Tensor, b: Tensor, positive: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """The mean of :func:`streamed_infonce` of a against b and of b against a, each tile computed for both.

    Args:
        a, b: (N, D) float.
        positive: (N,) score of a_i with b_i.
        scale: one element.
        ids: (N,) int64.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    inputs = (a, b, positive, scale)
    with torch.no_grad():
        s, p = scale.detach().to(wide).reshape(()), positive.detach().to(wide)
        by_row, by_column = torch.empty_like(p), s * p
        tiles = _Tiles(a, b, s, SameIds(ids, ids))
        for rows in row_tiles(len(a), len(b)):
            logits = tiles.logits(rows)
            by_row[rows] = torch.logaddexp(logsumexp(logits, 1), s * p[rows])
            by_column = torch.logaddexp(by_column, logsumexp(logits, 0))
        loss = (by_row + by_column - 2 * s * p).mean() / 2
        if not needed(*inputs):
            return loss
        grad_a = torch.empty_like(a, dtype=wide)
        grad_b = torch.zeros_like(b, dtype=wide)
        for rows in row_tiles(len(a), len(b)):
            logits = tiles.logits(rows)
            weights = (logits - by_row[rows, None]).exp_()
            weights += logits.sub_(by_column).exp_()
            weights = weights.to(a.dtype)
            grad_a[rows] = (weights @ b).to(wide)
            add_product(grad_b, weights.T, a[rows])
        missing = (s * p - by_row).exp() + (s * p - by_column).exp() - 2
        grad_scale = ((a * grad_a).sum() + (missing * p).sum()) / (2 * len(a))
        factor = s / (2 * len(a))
        grads = (grad_a * factor, grad_b * factor, missing * factor, grad_scale)
    return attach_gradients(loss, inputs, grads)


@as_written
def streamed_self_infonce(z: Tensor, positive: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """:func:`streamed_infonce` of z against itself, from the upper triangle of the matrix.

    Args:
        z: (R, D) float.
        positive: (R,) score of every row with its positive.
        scale: one element.
        ids: (R,) int64.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    inputs = (z, positive, scale)
    with torch.no_grad():
        s, p = scale.detach().to(wide).reshape(()), positive.detach().to(wide)
        normaliser = s * p
        tiles = _Tiles(z, z, s, SameIds(ids, ids))
        for rows in row_tiles(len(z), len(z)):
            logits = tiles.logits(rows, rows.start)
            normaliser[rows] = torch.logaddexp(normaliser[rows], logsumexp(logits, 1))
            right = logits[:, rows.stop - rows.start :]
            normaliser[rows.stop :] = torch.logaddexp(normaliser[rows.stop :], logsumexp(right, 0))
        loss = (normaliser - s * p).mean()
        if not needed(*inputs):
            return loss
        grad_z = torch.zeros_like(z, dtype=wide)
        for rows in row_tiles(len(z), len(z)):
            logits = tiles.logits(rows, rows.start)
            weights = (logits - normaliser[rows, None]).exp_()
            weights += logits.sub_(normaliser[rows.start :]).exp_()
            weights = weights.to(z.dtype)
            grad_z[rows] += (weights @ z[rows.start :]).to(wide)
            add_product(grad_z[rows.stop :], weights[:, rows.stop - rows.start :].T, z[rows])
        missing = (s * p - normaliser).exp() - 1
        # The weights hold every pair from both of its rows, the loss from one.
        grad_scale = ((z * grad_z).sum() / 2 + (missing * p).sum()) / len(z)
        factor = s / len(z)
        grads = (grad_z * factor, missing * factor, grad_scale)
    return attach_gradients(loss, inputs, grads)


def needed(*inputs: Tensor) -> bool:
    return any(x.requires_grad for x in inputs)


def row_tiles(rows: int, columns: int) -> Iterator[slice]:
    height = max(16, TILE_SCORES // max(columns, 1))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


@dataclass(frozen=True)
class _Tiles:
    """Scores and logits of some rows with the keys; masked pairs are -inf. The scale is positive.

    Attributes:
        q: (N, D). keys: (M, D). scale: 0-dim, its dtype is the logits'.
        same: pairs that are no negatives. limit: (N,) scores above it are no negatives either.
    """

    q: Tensor
    keys: Tensor
    scale: Tensor
    same: SameIds
    limit: Tensor | None = None

    def scores(self, rows: slice, first_key: int = 0) -> Tensor:
        """(R, M - first_key), before the scale; -inf where masked."""
        columns = slice(first_key, len(self.keys))
        scores = (self.q[rows] @ self.keys[columns].T).to(self.scale.dtype)
        if self.limit is not None:
            scores.masked_fill_(scores > self.limit[rows, None], -torch.inf)
        return self.same.fill_(scores, rows, columns, -torch.inf)

    def logits(self, rows: slice, first_key: int = 0) -> Tensor:
        """(R, M - first_key)."""
        return self.scores(rows, first_key).mul_(self.scale)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in total's dtype and without a temporary where it is also theirs."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += (left @ right).to(total.dtype)


def _exponentials(scores: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scale s_ij - top_i) in the place of the scores, top_i = scale max_j s_ij, and its sum by row."""
    if scores.dtype == torch.float32 and choose_backend("auto", scores.device, scores.dtype) == "native":
        top, total = native_ops().exp_rows(scores, float(scale))
        return scores, top, total
    logits = scores.mul_(scale)
    top = _finite_max(logits, 1)
    weights = logits.sub_(top[:, None]).exp_()
    return weights, top, weights.sum(1)


def _finite_max(logits: Tensor, dim: int) -> Tensor:
    """Maximum along dim; 0 where everything is masked, so that exp(-inf - max) is 0 and not NaN."""
    if not logits.numel():
        return logits.new_zeros(logits.shape[1 - dim])
    top = logits.amax(dim)
    return top.masked_fill_(top == -torch.inf, 0.0)


def logsumexp(logits: Tensor, dim: int) -> Tensor:
    top = _finite_max(logits, dim)
    return (logits - top.unsqueeze(dim)).exp_().sum(dim).log() + top


def attach_gradients(loss: Tensor, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Tensor:
    """The loss as a function of its inputs with these gradients."""
    shaped = (grad.reshape(x.shape) for x, grad in zip(inputs, grads, strict=True))
    return _WithGradients.apply(loss, len(inputs), *inputs, *shaped)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        ctx.dtypes = [x.dtype for x in tensors[:count]]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2 : 2 + len(grads)]
        # Rounded to the inputs' dtype after the factor, which a loss scaler chose so that fp16 holds the product.
        scaled = (
            (g * grad.to(g.dtype)).to(dtype) if want else None
            for g, dtype, want in zip(grads, ctx.dtypes, wanted, strict=True)
        )
        return None, None, *scaled, *(None for _ in grads)
