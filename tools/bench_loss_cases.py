"""What tools/bench_loss.py measures: forward and backward of the losses of this package and of others.

A step takes (a, b, scale) and forms loss and gradients. Symmetric steps average a against b and b against a (N rows
each); steps of one direction take N queries and M keys, key i the positive of query i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsclr.losses import DenseInfoNCE, ExactInfoNCE, Loss, TopKInfoNCE
from dsclr.ops import Kept, TopK, sparse_infonce, topk_scan
from dsclr.ops.native import Backend
from dsclr.ops.streamed import streamed_infonce

# Rows of a mini-batch of the cached stage: the library's default, and one as high as the tiles of the others.
MINI_BATCHES = (32, 1024)
INFCL_TILE = 1024
# Of the largest entry: logits of 50 in float32 are good to some 1e-6, and their exponentials no better.
TOLERANCE = 1e-5


class Outcome(NamedTuple):
    """Attributes:
    a, b: gradients, in parts that follow each other.
    scale: its gradient; None where the loss takes it for a constant.
    """

    loss: Tensor
    a: Sequence[Tensor]
    b: Sequence[Tensor]
    scale: Tensor | None


Step = Callable[[Tensor, Tensor, Tensor], Outcome]
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def unit(rows: int, dim: int, seed: int, device: str | torch.device) -> Tensor:
    """(rows, dim) random unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device)


def class_sorted(rows: int, dim: int, seed: int, classes: int, device: str | torch.device) -> Tensor:
    """(rows, dim) unit vectors, sorted by class; cosines are about 0.5 within a class and 0 across."""
    centre = unit(classes, dim, 0, device)
    label = torch.arange(rows, device=device) * classes // rows
    return F.normalize(centre[label] + unit(rows, dim, seed, device), dim=1)


def all_steps(k: int) -> dict[str, Step]:
    """Every step under the name of its case."""
    return {
        **{f"{name}_forward_backward": step for name, step in one_direction_steps(k).items()},
        **{f"symmetric_{name}": step for name, step in symmetric_steps(k).items()},
    }


def symmetric_steps(
    k: int, mini_batches: Sequence[int] = MINI_BATCHES, infcl_tile: int = INFCL_TILE
) -> dict[str, Step]:
    ours: dict[str, Loss] = {
        "topk": TopKInfoNCE(k),
        "topk_torch": TopKInfoNCE(k, backend="torch"),
        "exact": ExactInfoNCE(),
        "dense": DenseInfoNCE(),
    }

    def cached(mini_batch: int) -> Step:
        return lambda a, b, scale: cached_loss_stage(a, b, float(scale.detach()), mini_batch)

    return {
        **{name: _differentiated(_only_loss(loss)) for name, loss in ours.items()},
        "clip_loss": _differentiated(_clip_loss),
        **{f"cached_stage_{size}": cached(size) for size in mini_batches},
        "infcl": _differentiated(lambda a, b, scale: infcl_loss(a, b, scale, infcl_tile)),
    }


def one_direction_steps(k: int) -> dict[str, Step]:
    def topk(backend: Backend) -> Step:
        def scan(q: Tensor, keys: Tensor) -> TopK:
            q_ids, key_ids = _ids(q), _ids(keys)
            return topk_scan(q.detach(), keys.detach(), k, q_ids=q_ids, key_ids=key_ids, backend=backend)

        return _with_own_keys(
            lambda q, own, keys, scale: sparse_infonce(q, own, (q * own).sum(1), [Kept(q, keys, scan(q, keys))], scale)
        )

    steps = {
        "topk": topk("auto"),
        "topk_torch": topk("torch"),
        "exact": _with_own_keys(
            lambda q, own, keys, scale: streamed_infonce(q, keys, (q * own).sum(1), scale, _ids(q), _ids(keys))
        ),
        "dense": _differentiated(lambda q, keys, scale: F.cross_entropy((q * scale) @ keys.T, _ids(q))),
    }
    if hasattr(F, "linear_cross_entropy"):
        # Without options it forms all logits.
        steps["linear_cross_entropy"] = _differentiated(
            lambda q, keys, scale: F.linear_cross_entropy(q * scale, keys, _ids(q))
        )
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        chunked = torch.nn.LinearCrossEntropyOptions()
        steps["linear_cross_entropy_chunked"] = _differentiated(
            lambda q, keys, scale: F.linear_cross_entropy(q * scale, keys, _ids(q), options=chunked)
        )
    return steps


def sparse_step(top: TopK) -> Step:
    """The loss of one direction with its k negatives already found."""
    return _with_own_keys(
        lambda q, own, keys, scale: sparse_infonce(q, own, (q * own).sum(1), [Kept(q, keys, top)], scale)
    )


def cached_loss_stage(a: Tensor, b: Tensor, scale: float, mini_batch: int) -> Outcome:
    """The loss stage of sentence-transformers' CachedMultipleNegativesRankingLoss (6.2), made symmetric.

    It mirrors ``calculate_loss`` with directions query_to_doc and doc_to_query and partition_mode "per_direction", what
    the library names for a symmetric loss: cached embeddings in mini-batches that become leaves, rows of a mini-batch
    against all, log-sum-exp in both directions, a backward per mini-batch into the cache. The scale is a constant there
    and here. Scores are dot products: the library's default would normalise the embeddings again for each mini-batch.
    """
    reps = [[part.detach().requires_grad_() for part in x.split(mini_batch)] for x in (a, b)]
    queries, docs = torch.cat(reps[0]), torch.cat(reps[1])
    loss = torch.zeros((), device=a.device)
    for rows in _ids(a).split(mini_batch):
        to_docs = queries[rows] @ docs.T * scale
        to_queries = (queries @ docs[rows].T).T * scale
        positive = to_docs[torch.arange(len(rows), device=a.device), rows]
        normaliser = (torch.logsumexp(to_docs, 1) + torch.logsumexp(to_queries, 1)) / 2
        part = (normaliser - positive).mean() * len(rows) / len(a)
        part.backward()
        loss += part.detach()
    grads_a, grads_b = ([x.grad for x in parts if x.grad is not None] for parts in reps)
    return Outcome(loss, grads_a, grads_b, None)


def infcl_loss(a: Tensor, b: Tensor, scale: Tensor, tile: int = INFCL_TILE) -> Tensor:
    """Inf-CL (Cheng et al. 2024) in one process: both directions by themselves, each tile by tile."""

    def one(q: Tensor, keys: Tensor) -> Tensor:
        q = scale * q
        return _TiledLogSumExp.apply(q, keys, tile) - (q * keys).sum(1)

    return (one(a, b) + one(b, a)).mean() / 2


class _TiledLogSumExp(torch.autograd.Function):
    """Log-sum-exp of every row of q @ keys.T, with a tile as the largest temporary.

    Forward: for each block of rows a running log-sum-exp over the blocks of columns. Backward: the tiles again, their
    softmax from the saved log-sum-exp, and from it the gradients of both. Inf-CL's kernels do that in on-chip memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, tile: int) -> Tensor:
        lse = torch.full_like(q[:, 0], -torch.inf)
        for rows, lse_rows in zip(q.split(tile), lse.split(tile), strict=True):
            for columns in keys.split(tile):
                scores = rows @ columns.T
                top = torch.maximum(lse_rows, scores.amax(1))
                total = scores.sub_(top[:, None]).exp_().sum(1)
                lse_rows.copy_(total.add_((lse_rows - top).exp_()).log_().add_(top))
        ctx.save_for_backward(q, keys, lse)
        ctx.tile = tile
        return lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, keys, lse = ctx.saved_tensors
        grad_q, grad_keys = torch.zeros_like(q), torch.zeros_like(keys)
        by_rows = (x.split(ctx.tile) for x in (q, grad_q, lse, grad))
        for rows, grad_rows, lse_rows, factor in zip(*by_rows, strict=True):
            for columns, grad_columns in zip(keys.split(ctx.tile), grad_keys.split(ctx.tile), strict=True):
                weights = (rows @ columns.T).sub_(lse_rows[:, None]).exp_().mul_(factor[:, None])
                grad_rows.addmm_(weights, columns)
                grad_columns.addmm_(weights.T, rows)
        return grad_q, grad_keys, None


def check_agreement(device: str) -> dict[str, float]:
    """Every step against the dense loss in float64, on a problem of several tiles and mini-batches, k = all negatives.

    Returns:
        The largest relative error of each step's loss and gradients.

    Raises:
        SystemExit: one is beyond float32 rounding: it would not be the same loss that is compared.
    """
    n, m, dim = 96, 160, 32
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    q, b, keys = (unit(rows, dim, seed, device).requires_grad_() for seed, rows in enumerate((n, n, m)))
    errors = {}
    problems = (
        ("symmetric_{}", symmetric_steps(m, (20, n), 40), b),
        ("{}_forward_backward", one_direction_steps(m), keys),
    )
    for title, steps, other in problems:
        expected = steps["dense"](*(x.detach().double().requires_grad_() for x in (q, other, scale)))
        for name, step in steps.items():
            errors[title.format(name)] = error = _error(step(q, other, scale), expected)
            if not error <= TOLERANCE:
                raise SystemExit(f"{title.format(name)} is not the dense loss: relative error {error:.2e}")
    return errors


def _error(got: Outcome, expected: Outcome) -> float:
    pairs = [
        (got.loss, expected.loss),
        (torch.cat(list(got.a)), expected.a[0]),
        (torch.cat(list(got.b)), expected.b[0]),
    ]
    if got.scale is not None and expected.scale is not None:
        pairs.append((got.scale, expected.scale))
    return max(float((x - y).abs().amax() / y.abs().amax()) for x, y in pairs)


def _ids(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _only_loss(loss: Loss) -> LossFunction:
    return lambda a, b, scale: loss(a, b, scale).loss


def _clip_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    # Here, for it brings all of open_clip into a process that may only measure something else.
    from open_clip.loss import ClipLoss

    return ClipLoss()(a, b, scale)


def _differentiated(loss_fn: LossFunction) -> Step:
    def step(a: Tensor, b: Tensor, scale: Tensor) -> Outcome:
        loss = loss_fn(a, b, scale)
        grad_a, grad_b, grad_scale = torch.autograd.grad(loss, (a, b, scale))
        return Outcome(loss.detach(), [grad_a], [grad_b], grad_scale)

    return step


def _with_own_keys(loss_fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Step:
    """A step of a loss that takes (q, own, keys, scale), own the keys that are the queries' positives.

    They have a gradient of their own, as the local rows have among the keys of all ranks: the backward of a slice of
    the keys would fill a gradient as long as all of them.
    """

    def step(q: Tensor, keys: Tensor, scale: Tensor) -> Outcome:
        own = keys[: len(q)].detach().requires_grad_()
        loss = loss_fn(q, own, keys, scale)
        grad_q, grad_own, grad_keys, grad_scale = torch.autograd.grad(loss, (q, own, keys, scale))
        grad_keys[: len(q)] += grad_own
        return Outcome(loss.detach(), [grad_q], [grad_keys], grad_scale)

    return step
