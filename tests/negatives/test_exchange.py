"""Losses over the rows of all ranks are those of one process on the concatenated rows."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsclr.losses import DenseInfoNCE, ExactInfoNCE, Keys, SharedKeys, TopKInfoNCE
from dsclr.negatives import GatherExchange, MemoryBank, RingExchange, ShardedBank
from tests.oracle import dense_loss
from tests.train.steps import spawn

DIM = 6
ROWS = 10
SCALE = 7.0
# 7 does not divide 10, so the last part of a gather is shorter.
EXCHANGES: dict[str, Any] = {"gather": lambda: GatherExchange(chunk=7), "ring": RingExchange}
LOSSES: dict[str, Any] = {
    "exact": lambda objective: ExactInfoNCE(objective),
    "exact, margin": lambda objective: ExactInfoNCE(objective, false_negative_margin=0.2),
    "topk of 1": lambda objective: TopKInfoNCE(1, 4, objective),
    "topk": lambda objective: TopKInfoNCE(7, 4, objective),
    "topk of more than there are": lambda objective: TopKInfoNCE(1000, 4, objective),
    "topk, tail": lambda objective: TopKInfoNCE(5, 4, objective, tail="lse"),
    "topk, margin": lambda objective: TopKInfoNCE(5, 4, objective, false_negative_margin=0.2),
}
# Every loss without a bank, and every kind of bank with two of them.
CASES = [
    case
    for case in itertools.product(EXCHANGES, LOSSES, ("clip", "simclr"), ("none", "same", "sharded"))
    if case[3] == "none" or case[1] in ("exact, margin", "topk, tail")
]
# Rows of a rank, in bfloat16, and all their negatives.
HALF_ROWS, HALF_SCALE = 32, 20.0
HALF_CASES = list(itertools.product(EXCHANGES, ("exact", "topk of more than there are"), ("clip", "simclr")))


def rows(number: int, world_size: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, ids) of all ranks: some ids and some rows stand on several ranks, so scores tie."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(number, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    b[number - 3] = b[2]
    a[number - 3] = a[2]
    a, b = (torch.nn.functional.normalize(x, dim=1) for x in (a, b))
    ids = torch.arange(number) + 100 * seed
    ids[number - 1] = ids[0]
    ids[number - 2] = ids[0]
    return a, b, ids


def bank_rows(world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    steps = [rows(ROWS * world_size, world_size, seed) for seed in (4, 5, 6)]
    steps[-1][2][0] = 300  # a copy of a row of the batch
    return steps


def filled(bank: Any, own: slice, world_size: int) -> Any:
    for step, (a, b, ids) in enumerate(bank_rows(world_size)):
        bank.add(a[own], b[own], ids[own], step)
    return bank


def of_rank(world, cases):
    """Loss, gradients and metrics of each case on this rank, and what it says to ranks of unequal batches."""
    size = world.world_size
    a, b, ids = rows(ROWS * size, size)
    own = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
    results: list[Any] = []
    ways: set[tuple[str, bool]] = set()
    for name, loss, objective, kind in cases:
        exchange = EXCHANGES[name]()
        bank: Any = None
        if kind == "same":
            bank = filled(MemoryBank(2 * ROWS * size), slice(None), size)
        elif kind == "sharded":
            bank = filled(ShardedBank(2 * ROWS * size, None, RingExchange()), own, size)
        parts, count = (None, 0) if bank is None else bank.parts(3)
        local_a, local_b = a[own].clone().requires_grad_(), b[own].clone().requires_grad_()
        scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
        keys = SharedKeys(exchange, None, parts, count)
        output = LOSSES[loss](objective)(local_a, local_b, scale, ids[own], keys)
        output.loss.backward()
        metrics = {key: torch.tensor(float(value), dtype=torch.float64) for key, value in output.metrics.items()}
        ways.add((name, exchange.transport.rows_chosen > 0))
        results.append((output.loss.detach(), local_a.grad, local_b.grad, scale.grad, metrics))
    # Gradients of keys went back in both ways, as chosen rows and with a visit.
    assert ways == set(itertools.product(EXCHANGES, (False, True)))
    return results, refused(world.rank), in_half(world), {name: largest_tensor(name, world.rank) for name in EXCHANGES}


def half_rows(number: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    a, b = (torch.nn.functional.normalize(torch.randn(number, 32, generator=generator), dim=1) for _ in range(2))
    return a.bfloat16(), b.bfloat16(), torch.arange(number)


def in_half(world: Any) -> list[Any]:
    """Loss and gradients of bfloat16 rows."""
    own = slice(world.rank * HALF_ROWS, (world.rank + 1) * HALF_ROWS)
    a, b, ids = (x[own] for x in half_rows(HALF_ROWS * world.world_size))
    results = []
    for name, loss, objective in HALF_CASES:
        local_a, local_b = a.clone().requires_grad_(), b.clone().requires_grad_()
        scale = torch.tensor(HALF_SCALE, requires_grad=True)
        value = LOSSES[loss](objective)(local_a, local_b, scale, ids, SharedKeys(EXCHANGES[name]())).loss
        value.backward()
        results.append((value.detach(), local_a.grad, local_b.grad, scale.grad))
    return results


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return made


def largest_tensor(name: str, rank: int) -> int:
    """Of a loss of wide rows, in rows."""
    width = 64
    a, b = torch.randn(2, ROWS, width, generator=torch.Generator().manual_seed(rank)).unbind()
    with Largest() as largest:
        for loss in (ExactInfoNCE(), TopKInfoNCE(3, 4)):
            exchange = EXCHANGES[name]()
            local_a, local_b = a.clone().requires_grad_(), b.clone().requires_grad_()
            ids = torch.arange(ROWS) + ROWS * rank
            loss(local_a, local_b, torch.tensor(SCALE), ids, SharedKeys(exchange)).loss.backward()
    return largest.elements // width


def refused(rank: int) -> list[str]:
    """What a rank hears whose rows are more than those of the one before."""
    messages = []
    for exchange in EXCHANGES.values():
        with pytest.raises(ValueError, match="same number of rows") as raised:
            exchange().share(torch.zeros(3 + rank, DIM))
        messages.append(str(raised.value))
    return messages


def reference(world_size: int, loss: str, objective: str, kind: str) -> tuple[Any, ...]:
    a, b, ids = rows(ROWS * world_size, world_size)
    bank = () if kind == "none" else filled(MemoryBank(2 * ROWS * world_size), slice(None), world_size).keys(3)
    a, b = a.requires_grad_(), b.requires_grad_()
    scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
    output = LOSSES[loss](objective)(a, b, scale, ids, Keys(a, b, ids, bank))
    output.loss.backward()
    return output.loss.detach(), a.grad, b.grad, scale.grad, output.metrics


def half_dense_loss(a: Tensor, b: Tensor, scale: Tensor, ids: Tensor, objective: str) -> Tensor:
    return DenseInfoNCE(objective)(a, b, scale, ids).loss


def assert_as_near_as_dense(case: tuple[str, ...], of_ranks: list[Any]) -> None:
    """The error of bfloat16 is at most twice that of the dense loss in bfloat16, on one process.

    Besides, a scalar may have the rounding of one number: dense may be right by chance.
    """
    objective = case[-1]
    a, b, ids = half_rows(HALF_ROWS * len(of_ranks))
    known = []
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        x, y = (side.to(dtype).requires_grad_() for side in (a, b))
        scale = torch.tensor(HALF_SCALE, dtype=wide, requires_grad=True)
        loss = dense_loss if dtype == torch.float64 else half_dense_loss
        value = loss(x, y, scale, ids, objective)
        value.backward()
        known.append((value.detach(), x.grad, y.grad, scale.grad))
    losses, grads_a, grads_b, scales = zip(*of_ranks, strict=True)
    found = (
        torch.stack(losses).mean(),
        torch.cat([x.double() for x in grads_a]) / len(of_ranks),
        torch.cat([x.double() for x in grads_b]) / len(of_ranks),
        torch.stack(scales).mean(),
    )
    for ours, right, dense in zip(found, *known, strict=True):
        error, of_dense = (ours.double() - right).norm(), (dense.double() - right).norm()
        assert error <= 2 * of_dense + 2**-8 * right.norm() * (right.ndim == 0), f"{case}: {error} for {of_dense}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_have_the_loss_and_gradients_of_one_process(world_size):
    ranks, messages, half, largest = zip(*spawn(world_size, of_rank, CASES), strict=True)
    # Own rows and those of two ranks are what a ring may hold; what is gathered comes in parts of 7 rows a rank.
    assert all(rows["ring"] <= 2 * ROWS for rows in largest)
    assert world_size < 3 or all(rows["gather"] > 2 * ROWS for rows in largest)
    assert all("they have 3, 4" in message for of_one in messages for message in of_one)
    for case, *of_ranks in zip(HALF_CASES, *half, strict=True):
        assert_as_near_as_dense(case, of_ranks)
    for number, (_, loss, objective, kind) in enumerate(CASES):
        name = str(CASES[number])
        value, grad_a, grad_b, grad_scale, metrics = reference(world_size, loss, objective, kind)
        of_ranks = [rank[number] for rank in ranks]
        close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
        losses, a, b, scales, rank_metrics = zip(*of_ranks, strict=True)
        # As the engine does: parameter gradients are averaged, and a rank's loss is the mean over its own rows.
        torch.testing.assert_close(torch.stack(losses).mean(), value, msg=partial("{} loss: {}".format, name), **close)
        for found, right in ((a, grad_a), (b, grad_b)):
            torch.testing.assert_close(
                torch.cat(found) / world_size, right, msg=partial("{} gradient: {}".format, name), **close
            )
        torch.testing.assert_close(
            torch.stack(scales).mean(), grad_scale, msg=partial("{} scale: {}".format, name), **close
        )
        assert metrics.keys() == rank_metrics[0].keys()
        for key in ("positive_similarity", "hardest_negative_similarity", "bank_share", "captured_mass"):
            # Of a sample of rows, captured_mass is another number where there are more rows than a sample.
            if key in metrics and not (key == "captured_mass" and "tail" not in loss):
                mean = torch.stack([m[key] for m in rank_metrics]).mean()
                torch.testing.assert_close(
                    mean,
                    torch.tensor(float(metrics[key]), dtype=torch.float64),
                    msg=partial("{} {}: {}".format, name, key),
                    **close,
                )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_reference_is_the_dense_loss(loss):
    """Where all negatives count."""
    if "topk" in loss and "more" not in loss:
        pytest.skip("of some negatives only: tests/losses compares those with the oracle")
    a, b, ids = rows(20, 2)
    dense = DenseInfoNCE("clip", false_negative_margin=0.2 if "margin" in loss else None)
    scale = torch.tensor(SCALE, dtype=torch.float64)
    torch.testing.assert_close(LOSSES[loss]("clip")(a, b, scale, ids).loss, dense(a, b, scale, ids).loss)
