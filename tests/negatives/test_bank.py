"""The memory bank: order, ages, what it hands out, and that a checkpoint holds all of it."""

from __future__ import annotations

import pytest
import torch

from dsclr.losses import Keys
from dsclr.negatives import MemoryBank, ShardedBank
from dsclr.negatives.saved_bank import part_of_bank, whole_bank


def fill(bank: MemoryBank, sizes: list[int], first_step: int = 0) -> list[int]:
    """Add batches whose rows carry a running number as value and id; returns the numbers."""
    number = 0
    for step, size in enumerate(sizes):
        numbers = torch.arange(number, number + size)
        bank.add(numbers[:, None].float(), -numbers[:, None].float(), numbers, first_step + step)
        number += size
    return list(range(number))


def held(parts: tuple[Keys, ...]) -> list[int]:
    for part in parts:
        assert torch.equal(part.a[:, 0], part.ids.float())
        assert torch.equal(part.b, -part.a)
    return [int(x) for part in parts for x in part.ids]


@pytest.mark.parametrize("sizes", [[3], [3, 3], [4, 4], [3, 3, 3], [8], [11], [3, 11], [5, 5, 5, 5], [1] * 20])
def test_holds_the_newest_rows_oldest_first(sizes):
    bank = MemoryBank(8)
    numbers = fill(bank, sizes)
    assert held(bank.keys(len(sizes))) == numbers[-8:]
    assert bank.metrics(len(sizes))["bank_rows"] == min(8, len(numbers))


def test_is_empty_at_first():
    bank = MemoryBank(8)
    assert bank.keys(0) == ()
    assert bank.metrics(0) == {"bank_rows": 0.0, "bank_age": 0.0}


def test_old_rows_are_not_handed_out():
    bank = MemoryBank(10, max_age=2)
    fill(bank, [3, 3, 3, 3], first_step=5)  # steps 5 to 8; 10 rows are left
    assert held(bank.keys(9)) == [6, 7, 8, 9, 10, 11]
    assert held(bank.keys(10)) == [9, 10, 11]
    assert bank.metrics(9) == {"bank_rows": 6.0, "bank_age": 1.5}
    assert held(bank.keys(11)) == []


def test_rows_carry_no_graph():
    bank = MemoryBank(4)
    a = torch.ones(2, 1, requires_grad=True)
    bank.add(a * 2, a * 3, torch.arange(2), 0)
    (part,) = bank.keys(1)
    assert not part.a.requires_grad
    assert not part.b.requires_grad


def test_a_saved_bank_goes_on_as_if_never_stopped():
    straight, stopped = MemoryBank(8), MemoryBank(8)
    for bank in (straight, stopped):
        fill(bank, [3, 3, 3])
    state = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in stopped.state_dict().items()}
    resumed = MemoryBank(8)
    resumed.load_state_dict(state, torch.device("cpu"))
    for bank in (straight, resumed):
        bank.add(torch.full((2, 1), 50.0), torch.full((2, 1), -50.0), torch.tensor([50, 50]), 3)
    assert held(straight.keys(4)) == held(resumed.keys(4))
    empty = MemoryBank(8)
    empty.load_state_dict(MemoryBank(8).state_dict(), torch.device("cpu"))
    assert empty.keys(0) == ()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="size = 0"):
        MemoryBank(0)
    with pytest.raises(ValueError, match="max_age = 0"):
        MemoryBank(4, 0)
    bank = MemoryBank(4)
    bank.add(torch.ones(1, 3), torch.ones(1, 3), torch.zeros(1, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="width 3"):
        bank.add(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="4 rows, this one 8"):
        MemoryBank(8).load_state_dict(bank.state_dict(), torch.device("cpu"))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_parts_of_a_sharded_bank_are_the_whole_one_for_any_number_of_ranks(steps):
    whole = MemoryBank(24)
    parts = [MemoryBank(12) for _ in range(2)]
    for step in range(steps):
        rows = torch.arange(8 * step, 8 * step + 8)
        whole.add(rows[:, None].float(), -rows[:, None].float(), rows, step)
        for rank, part in enumerate(parts):
            own = rows[4 * rank : 4 * rank + 4]
            part.add(own[:, None].float(), -own[:, None].float(), own, step)
    saved = [{**part.state_dict(), "rows_a_step": 4 if steps else 0} for part in parts]
    joined = whole_bank(saved)
    assert joined is not None
    assert same(joined, whole.state_dict())
    for rank in range(2):
        assert same(part_of_bank(joined, rank, 2), saved[rank])
    if steps:
        of_four = [part_of_bank(joined, rank, 4) for rank in range(4)]
        assert [part and part["rows_a_step"] for part in of_four] == [2] * 4
        assert same(whole_bank(of_four), joined)
        assert part_of_bank(joined, 0, 3) is None


def test_one_bank_for_all_ranks_becomes_that_of_each():
    common = MemoryBank(8, shared=True)
    fill(common, [3, 3])
    parts = [common.part(rank) for rank in range(2)]
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            assert same(MemoryBank(8).joined(parts, rank, world_size), common.state_dict())
    # Each had its own: the same ranks get theirs back, others nothing.
    own = [MemoryBank(8), MemoryBank(8)]
    fill(own[1], [2])
    parts = [bank.part(rank) for rank, bank in enumerate(own)]
    assert same(MemoryBank(8).joined(parts, 1, 2), own[1].state_dict())
    assert MemoryBank(8).joined(parts, 0, 3) is None


def test_sizes_are_those_of_the_configuration():
    class TwoRanks:
        world_size = 2

    class Exchange:
        transport = TwoRanks()

    saved = ShardedBank(24, None, Exchange()).state_dict()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the saved memory bank has 24 rows, this one 48"):
        ShardedBank(48, None, Exchange()).load_state_dict(saved, torch.device("cpu"))  # type: ignore[arg-type]


def same(first: dict | None, second: dict | None) -> bool:
    assert first is not None
    assert second is not None
    return first.keys() == second.keys() and all(
        torch.equal(x, second[name]) if isinstance(x, torch.Tensor) else x == second[name] for name, x in first.items()
    )
