"""The full softmax over the rows of all ranks, which pass by twice (Inf-CL 2024, around the cards).

The first visit gives the normalisers, the second the gradients. Where both directions are wanted, one tile serves both:
only one side travels, with its normalisers and gradients, at four matrix products and three rows' bytes instead of six
and four.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsclr.ops.masks import SameIds
from dsclr.ops.precision import as_written
from dsclr.ops.shared import Back, Exchange, SharedRows, Visit
from dsclr.ops.streamed import add_product, attach_gradients, logsumexp, needed, row_tiles

# Calls its argument with (a, b, ids, first) of each part of a memory bank.
EachBankPart = Callable[[Callable[[Tensor, Tensor, Tensor, int], None]], None]


def _no_bank(work: Callable[[Tensor, Tensor, Tensor, int], None]) -> None:
    return None


@as_written
def shared_symmetric_infonce(
    a: Tensor,
    b: Tensor,
    positive: Tensor,
    scale: Tensor,
    ids: Tensor,
    exchange: Exchange,
    bank: EachBankPart = _no_bank,
    limit: Tensor | None = None,
) -> Tensor:
    """:func:`dsclr.ops.streamed.streamed_symmetric_infonce` of this rank's rows against the rows of all ranks.

    Args:
        a, b: (N, D) float, N the same on all ranks.
        positive: (N,) score of a_i with b_i, float32 at least; its gradient goes to a and b.
        scale: one element, the same on all ranks.
        ids: (N,) int64.
        exchange: brings b to the other ranks.
        bank: further constant keys.
        limit: (N,) negatives of pair i above it are left out.

    Returns:
        0-dim: the mean over this rank's rows and both directions. Backward gives a and b the gradient of the sum of all
        ranks' losses; that of scale is right in the sum over ranks.
    """
    wide = positive.dtype
    inputs = (a, b, scale)
    with torch.no_grad():
        s, p = scale.detach().to(wide).reshape(()), positive.detach()
        own_a, own_b = a.detach(), b.detach()
        rows = exchange.share(own_b, ids, *(() if limit is None else (limit,)))
        by_row = s * p

        def normalisers(some: Visit) -> tuple[Tensor, ...]:
            keys, key_ids, *key_limit = some.rows
            by_column = torch.full((len(keys),), -torch.inf, dtype=wide, device=keys.device)
            same = SameIds(ids, key_ids)
            for tile in row_tiles(len(a), len(keys)):
                as_rows, as_columns = _logits(own_a, keys, s, same, tile, limit, *key_limit)
                by_row[tile] = torch.logaddexp(by_row[tile], logsumexp(as_rows, 1))
                torch.logaddexp(by_column, logsumexp(as_columns, 0), out=by_column)
            return (by_column,)

        (by_column,) = rows.visit(normalisers, back=[Back(s * p, "logsumexp")])

        def bank_normalisers(bank_a: Tensor, bank_b: Tensor, bank_ids: Tensor, first: int) -> None:
            same = SameIds(ids, bank_ids)
            _add_to_normaliser(by_row, own_a, bank_b, s, same, limit)
            _add_to_normaliser(by_column, own_b, bank_a, s, same, limit)

        bank(bank_normalisers)
        loss = (by_row + by_column - 2 * s * p).mean() / 2
        if not needed(*inputs):
            return loss
        grad_a = torch.zeros_like(a, dtype=wide)

        def gradients(some: Visit) -> tuple[Tensor, ...]:
            keys, key_ids, *key_limit, key_normaliser = some.rows
            grad_keys = torch.zeros_like(keys, dtype=wide)
            same = SameIds(ids, key_ids)
            for tile in row_tiles(len(a), len(keys)):
                as_rows, as_columns = _logits(own_a, keys, s, same, tile, limit, *key_limit)
                weights = (as_rows - by_row[tile, None]).exp_()
                weights += as_columns.sub_(key_normaliser).exp_()
                weights = weights.to(a.dtype)
                grad_a[tile] += (weights @ keys).to(wide)
                add_product(grad_keys, weights.T, own_a[tile])
            return (grad_keys,)

        (grad_b,) = rows.visit(gradients, more=[by_column], back=[Back(torch.zeros_like(b, dtype=wide))])
        missing = (s * p - by_row).exp() + (s * p - by_column).exp() - 2
        # Of all scores of this rank's a, in both directions; those of the bank are added below.
        grad_scale = (own_a * grad_a).sum() + (missing * p).sum()

        def bank_gradients(bank_a: Tensor, bank_b: Tensor, bank_ids: Tensor, first: int) -> None:
            nonlocal grad_scale
            same = SameIds(ids, bank_ids)
            for q, keys, normaliser, grad in ((own_a, bank_b, by_row, grad_a), (own_b, bank_a, by_column, grad_b)):
                grad_scale += _add_bank_gradient(grad, q, keys, normaliser, s, same, limit)

        bank(bank_gradients)
        factor = s / (2 * len(a))
        for grad, other in ((grad_a, own_b), (grad_b, own_a)):
            grad.addcmul_(other.to(wide), missing[:, None]).mul_(factor)
    return attach_gradients(loss, inputs, (grad_a, grad_b, grad_scale / (2 * len(a))))


@as_written
def shared_self_infonce(
    a: Tensor,
    b: Tensor,
    positive: Tensor,
    scale: Tensor,
    ids: Tensor,
    exchange: Exchange,
    bank: EachBankPart = _no_bank,
    limit: Tensor | None = None,
) -> Tensor:
    """:func:`dsclr.ops.streamed.streamed_self_infonce` of Z = [a; b] against Z of all ranks.

    The matrix of all ranks is its own transpose, so a rank finds the whole gradient of its rows itself and nothing but
    rows and normalisers travels. See :func:`shared_symmetric_infonce`.
    """
    wide = positive.dtype
    inputs = (a, b, scale)
    with torch.no_grad():
        s, p = scale.detach().to(wide).reshape(()), positive.detach().repeat(2)
        z, z_ids = torch.cat([a.detach(), b.detach()]), ids.repeat(2)
        z_limit = None if limit is None else limit.repeat(2)
        rows: SharedRows = exchange.share(a.detach(), b.detach(), ids, *(() if limit is None else (limit,)))
        normaliser = s * p

        def normalisers(some: Visit) -> tuple[Tensor, ...]:
            for keys, key_ids, *_ in _both_views(some):
                _add_to_normaliser(normaliser, z, keys, s, SameIds(z_ids, key_ids), z_limit)
            return ()

        def bank_normalisers(bank_a: Tensor, bank_b: Tensor, bank_ids: Tensor, first: int) -> None:
            same = SameIds(z_ids, bank_ids)
            for keys in (bank_a, bank_b):
                _add_to_normaliser(normaliser, z, keys, s, same, z_limit)

        rows.visit(normalisers)
        bank(bank_normalisers)
        loss = (normaliser - s * p).mean()
        if not needed(*inputs):
            return loss
        grad_z = torch.zeros_like(z, dtype=wide)

        def gradients(some: Visit) -> tuple[Tensor, ...]:
            for keys, key_ids, *key_limit, key_normaliser in _both_views(some):
                same = SameIds(z_ids, key_ids)
                for tile in row_tiles(len(z), len(keys)):
                    as_rows, as_columns = _logits(z, keys, s, same, tile, z_limit, *key_limit)
                    weights = (as_rows - normaliser[tile, None]).exp_()
                    weights += as_columns.sub_(key_normaliser).exp_()
                    grad_z[tile] += (weights.to(z.dtype) @ keys).to(wide)
            return ()

        rows.visit(gradients, more=list(normaliser.chunk(2)))
        missing = (s * p - normaliser).exp() - 1
        # The weights hold every pair from both of its rows, the loss from one.
        grad_scale = (z * grad_z).sum() / 2 + (missing * p).sum()

        def bank_gradients(bank_a: Tensor, bank_b: Tensor, bank_ids: Tensor, first: int) -> None:
            nonlocal grad_scale
            same = SameIds(z_ids, bank_ids)
            for keys in (bank_a, bank_b):
                grad_scale += _add_bank_gradient(grad_z, z, keys, normaliser, s, same, z_limit)

        bank(bank_gradients)
        grad_a, grad_b = grad_z.chunk(2)
        of_pairs = missing.view(2, -1).sum(0)[:, None]
        factor = s / len(z)
        grads = (
            grad_a.addcmul(b.detach().to(wide), of_pairs).mul_(factor),
            grad_b.addcmul(a.detach().to(wide), of_pairs).mul_(factor),
            grad_scale / len(z),
        )
    return attach_gradients(loss, inputs, grads)


def _both_views(some: Visit) -> list[tuple[Tensor, ...]]:
    """(keys, ids, limit if there is one, the view's normaliser if it travels) of either view."""
    a, b, ids, *more = some.rows
    if len(more) < 2:
        return [(a, ids, *more), (b, ids, *more)]
    *limit, of_a, of_b = more
    return [(a, ids, *limit, of_a), (b, ids, *limit, of_b)]


def _add_to_normaliser(
    total: Tensor, q: Tensor, keys: Tensor, scale: Tensor, same: SameIds, limit: Tensor | None
) -> None:
    """total_i = log(exp(total_i) + sum over valid j of exp(scale q_i . keys_j)), in place."""
    for tile in row_tiles(len(q), len(keys)):
        logits, _ = _logits(q, keys, scale, same, tile, limit)
        total[tile] = torch.logaddexp(total[tile], logsumexp(logits, 1))


def _add_bank_gradient(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    normaliser: Tensor,
    scale: Tensor,
    same: SameIds,
    limit: Tensor | None,
) -> Tensor:
    """Add the softmax's mean of constant keys to every query's gradient; the sum of their products with the queries."""
    of_scale = torch.zeros_like(scale)
    for tile in row_tiles(len(q), len(keys)):
        logits, _ = _logits(q, keys, scale, same, tile, limit)
        found = (logits.sub_(normaliser[tile, None]).exp_().to(q.dtype) @ keys).to(grad.dtype)
        grad[tile] += found
        of_scale += (q[tile] * found).sum()
    return of_scale


def _logits(
    q: Tensor,
    keys: Tensor,
    scale: Tensor,
    same: SameIds,
    rows: slice,
    limit: Tensor | None = None,
    key_limit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(R, C) logits of some queries, and the same as logits of the keys; -inf where masked.

    Args:
        limit, key_limit: (N,), (C,) scores above it are no negatives of the query, of the key.

    Returns:
        Two tensors; with limits each has its own mask, without they may be written to one after the other.
    """
    scores = (q[rows] @ keys.T).to(scale.dtype)
    same.fill_(scores, rows, slice(0, len(keys)), -torch.inf)
    as_columns = scores if key_limit is None else scores.masked_fill(scores > key_limit, -torch.inf).mul_(scale)
    if limit is not None:
        scores.masked_fill_(scores > limit[rows, None], -torch.inf)
    scores.mul_(scale)
    return scores, as_columns
