"""Several ranks take the steps of one process on the concatenated batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dsclr.config import Config
from dsclr.data import Batch
from tests.train.steps import (
    LORA,
    ROWS,
    assert_same_step,
    engine_step,
    make_batch,
    make_config,
    plain_step,
    spawn,
)

TOPK = {"name": "topk", "k": 5, "block_size": 4}
# The reference of one step is dense; k says how many negatives it takes.
EXACT, DENSE = {"name": "exact", "k": 10**6}, {"name": "dense", "k": 10**6}
MARGIN = {**TOPK, "false_negative_margin": 0.5}
BANK = {"size": 2 * ROWS}
# across_ranks, objective, loss, bank, ZeRO stage, micro-batches a rank
TWO_RANKS = [
    ("gather", "clip", TOPK, None, 2, 2),
    ("ring", "clip", EXACT, None, 1, 3),
    ("gather", "simclr", EXACT, {**BANK, "sharded": True}, 2, 3),
    ("ring", "simclr", DENSE, BANK, 0, 1),
    ("gather", "clip", MARGIN, {**BANK, "max_age": 1}, 0, 3),
]
FOUR_RANKS = [("ring", "clip", TOPK, BANK, 2, 3)]
# Every way between ranks with every loss, objective and bank; stages and micro-batches so that each meets all others.
PRODUCT = [
    (*case, number % 3, (1, 3)[number // 3 % 2])
    for number, case in enumerate(
        itertools.product(
            ("gather", "ring"), ("clip", "simclr"), (TOPK, EXACT, DENSE), (None, BANK, {**BANK, "sharded": True})
        )
    )
]
HALF = [
    ("ring", "clip", TOPK, None, 2, 3),
    ("gather", "simclr", EXACT, {**BANK, "sharded": True}, 0, 1),
]


def rank_config(folder: Any, case: tuple[Any, ...], world_size: int) -> Config:
    across, objective, loss, bank, stage, chunks = case
    return make_config(
        folder,
        {"lora": {**LORA, "towers": ["image", "text"] if objective == "clip" else ["image"]}},
        train_micro_batch_size_per_gpu=ROWS // world_size // chunks,
        zero_optimization={"stage": stage},
        dsclr={"objective": objective, "loss": loss, "negatives": {"across_ranks": across, "bank": bank}},
    )


def rank_batch(objective: str) -> Batch:
    """Ids that repeat, and a sample that stands on two ranks under two ids: its scores tie."""
    batch = make_batch(objective)
    batch.a[-1], batch.b[-1] = batch.a[1], batch.b[1]
    return batch


def steps_of_rank(world: Any, cases: list[tuple[Config, Batch]]) -> list[Any]:
    return [[engine_step(world, config, batch, steps) for steps in (1, 5)] for config, batch in cases]


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_ranks_equal_one_process(world, tmp_path, world_size, cases):
    runs = [(rank_config(tmp_path, case, world_size), rank_batch(case[1])) for case in cases]
    ranks = spawn(world_size, steps_of_rank, runs)
    for number, (case, (config, batch)) in enumerate(zip(cases, runs, strict=True)):
        references = [plain_step(config, batch) if case[2] is not MARGIN else engine_step(world, config, batch)]
        references.append(engine_step(world, config, batch, 5))
        for rank in ranks:
            for result, reference, tolerance in zip(rank[number], references, (2e-5, 2e-4), strict=True):
                assert_same_step(result, reference, tolerance)
            assert rank[number][0]["metrics"]["negatives_bytes_sent"] > 0
            assert rank[number][0]["grad_norm"] == pytest.approx(references[0]["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_combination_of_ranks_equals_one_process(world, tmp_path, world_size, part):
    test_ranks_equal_one_process(world, tmp_path, world_size, PRODUCT[part::6])


def updates(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: after - result["before"][name] for name, after in result["after"].items()}


def test_ranks_in_bf16_are_as_near_to_fp32_as_one_process(world, tmp_path):
    runs, references = [], []
    for case in HALF:
        config, batch = rank_config(tmp_path, case, 2), rank_batch(case[1])
        half = Config({**config.raw, "bf16": {"enabled": True}})
        runs.append((half, batch))
        references.append([[updates(engine_step(world, c, batch, n)) for c in (config, half)] for n in (1, 5)])
    for of_rank in spawn(2, steps_of_rank, runs):
        for case, results, reference in zip(HALF, of_rank, references, strict=True):
            for result, (right, alone) in zip(results, reference, strict=True):
                for name, found in updates(result).items():
                    # Besides, what rounding one number to bf16 can take from it: one process may be right by chance.
                    bound = 2 * (alone[name] - right[name]).norm() + 2**-8 * right[name].norm()
                    assert (found - right[name]).norm() <= bound, f"{case}: {name}"


class RunsOutOnce:
    """A loss that has no memory for the n-th part of the keys, or of a sharded bank, on one rank."""

    def __init__(self, rank: int, call: int, of_bank: bool) -> None:
        self.rank, self.call, self.of_bank = rank, call, of_bank

    def __call__(self, step: Any) -> None:
        exchange, calls = step.bank.exchange if self.of_bank else step.exchange, 0
        share = exchange.share

        def failing_share(*own: Any) -> Any:
            rows = share(*own)
            visit = rows.visit

            def failing_visit(work: Any, *more: Any, **options: Any) -> Any:
                def failing(some: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if exchange.transport.rank == self.rank and calls == self.call:
                        raise torch.OutOfMemoryError("injected")
                    return work(some)

                return visit(failing, *more, **options)

            rows.visit = failing_visit
            return rows

        exchange.share = failing_share


def recovering_rank(world: Any, cases: list[tuple[Config, Batch, int, bool]]) -> list[Any]:
    # A bank is empty in the first step.
    return [
        engine_step(world, config, batch, 2 if of_bank else 1, prepare=RunsOutOnce(1, call, of_bank))
        for config, batch, call, of_bank in cases
    ]


def test_a_rank_that_runs_out_of_memory_among_others_takes_all_back(world, tmp_path):
    """Whether at its own rows, at others', at another rank's part of the bank, or on the way back."""
    batch = make_batch()
    cases = []
    for across, loss, call, of_bank in (
        ("ring", TOPK, 1, False),
        ("ring", EXACT, 4, False),
        ("gather", TOPK, 2, False),
        ("gather", EXACT, 3, False),
        ("ring", TOPK, 2, True),
        ("gather", EXACT, 4, True),
    ):
        bank = {**BANK, "sharded": True} if of_bank else None
        config = rank_config(tmp_path, (across, "clip", loss, bank, 2, 1), 2)
        config.raw["dsclr"]["step"] = {"retain": "auto"}
        cases.append((Config(config.raw), batch, call, of_bank))
    ranks = spawn(2, recovering_rank, cases)
    for number, (config, _, _, of_bank) in enumerate(cases):
        reference = engine_step(world, config, batch, 2) if of_bank else plain_step(config, batch)
        for rank in ranks:
            assert rank[number]["recoveries"] == 1
            assert_same_step(rank[number], reference, 2e-4 if of_bank else 2e-5)
