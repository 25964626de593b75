"""A run goes on from its checkpoint: on as many ranks bit for bit, on others with the same weights, state and data."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from dsclr.config import Config, ConfigError
from dsclr.data import Batch
from dsclr.data.order import Slots
from dsclr.negatives import MemoryBank
from dsclr.rng import RandomState, seed_rank
from dsclr.train import engine_state
from dsclr.train.checkpoint import Checkpoints, Progress
from dsclr.train.engine import build_engine, engine_config
from dsclr.train.masters import master_value
from dsclr.train.step import build_step
from tests.data.samples import write_shard
from tests.train.runs import lines, run, run_config
from tests.train.steps import LORA, ROWS, make_batch, make_config, make_model, named, spawn

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}}
STAGES = (0, 1, 2)
# The first is met before the number of ranks changes, the second after it, both by the first rank of two, whose next
# sample is the one that a single rank takes too.
BROKEN = (19, 17)


class Trainer:
    """An engine with its step and checkpoints, fed with one batch."""

    def __init__(self, world, config: Config, folder: Path) -> None:
        self.world, self.config = world, config.with_world_size(world.world_size)
        self.engine = build_engine(make_model(config), engine_config(self.config, 10, "", world.device))
        self.step = build_step(self.config, self.engine, world.device)
        self.checkpoints = Checkpoints(folder, world, 100, save_frozen=False)
        self.rows = ROWS // world.world_size

    def train(self, steps: int) -> None:
        batch, own = make_batch(), slice(self.world.rank * self.rows, (self.world.rank + 1) * self.rows)
        for _ in range(steps):
            self.step(Batch(batch.a[own], batch.b[own], batch.ids[own]))

    def save(self, step: int, **progress) -> Path:
        slots = Slots(self.rows, self.world.world_size)
        return self.checkpoints.save(self.engine, Progress(slots, step=step, **progress))

    def load(self, checkpoint: Path) -> Progress:
        return self.checkpoints.load(self.engine, checkpoint, seed=3)

    def masters(self) -> dict:
        return named(self.engine.module, master_value)


def contents(checkpoint: Path) -> dict:
    """Everything of a checkpoint that is one for the run."""
    run = torch.load(checkpoint / "run.pt", weights_only=True)["engine"]
    tensors = {}
    for number in range(run.pop("files")):
        tensors.update(torch.load(checkpoint / f"weights-{number:05d}.pt", weights_only=True))
    return {**run, "tensors": tensors}


def assert_same(first: dict, second: dict) -> None:
    first, second = dict(first), dict(second)
    ours, theirs = first.pop("tensors"), second.pop("tensors")
    assert first == second
    assert ours.keys() == theirs.keys()
    for name, record in ours.items():
        assert record.keys() == theirs[name].keys() == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, theirs[name][key]) for key, value in record.items()), name


def adam_config(folder: Path, stage: int, offload_optimizer=None, **changes) -> Config:
    return make_config(
        folder,
        {"lora": LORA},
        zero_optimization={"stage": stage, "offload_optimizer": offload_optimizer},
        optimizer=ADAM,
        scheduler=COSINE,
        train_micro_batch_size_per_gpu=2,
        dsclr={"negatives": {"across_ranks": "gather"}, "run": {"max_steps": 10}},
        **changes,
    )


def on_two_ranks(world, folder: Path, adam: list[Config], offload: Config, grown: Config, shrunk: Config) -> None:
    trainer = Trainer(world, offload, folder / "two-offload")
    trainer.load(folder / "one-1/step-00000002")
    trainer.save(2)
    for before, now in itertools.product(STAGES, STAGES):
        trainer = Trainer(world, adam[now], folder / f"two-{before}-{now}")
        progress = trainer.load(folder / f"one-{before}/step-00000002")
        assert progress.slots == Slots(ROWS // 2, 2)
        trainer.save(2, skipped_samples={"failed": 1 + world.rank})
    run(world, grown, resume="newest")
    run(world, shrunk, stop_after=3)


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory) -> Path:
    """What one rank wrote and two went on with, and the other way round."""
    folder = tmp_path_factory.mktemp("resume")
    write_shard(folder / "s0.tar", range(30), broken=BROKEN)
    write_shard(folder / "s1.tar", range(30, 47))
    adam = [adam_config(folder, stage) for stage in STAGES]
    for stage in STAGES:
        trainer = Trainer(world, adam[stage], folder / f"one-{stage}")
        trainer.train(2)
        trainer.save(2)
    run(world, run_config(folder, "straight"), stop_after=3)
    shutil.copytree(folder / "straight", folder / "grown")
    run(world, run_config(folder, "straight"), resume="newest")
    grown = run_config(folder, "grown", stage=1, micro=2)
    offload = adam_config(folder, 2, offload_optimizer={"device": "cpu"})
    spawn(2, on_two_ranks, folder, adam, offload, grown, run_config(folder, "shrunk"))
    run(world, run_config(folder, "shrunk", stage=1, micro=8), resume="newest")
    return folder


@pytest.mark.parametrize("before", STAGES)
@pytest.mark.parametrize("now", STAGES)
def test_another_number_of_ranks_and_another_stage_hold_the_very_state(folder, before, now):
    written = contents(folder / f"one-{before}/step-00000002")
    assert written["counters"]["global_steps"] == 2
    assert written["scheduler"]["state"] == {"last_batch_iteration": 1}
    assert all(kept["numbers"] == {"step": 2} for kept in written["parameters"].values())
    assert all(record["exp_avg"].abs().sum() > 0 for record in written["tensors"].values())
    assert_same(written, contents(folder / f"two-{before}-{now}/step-00000002"))


def test_an_offloaded_optimizer_holds_the_very_state_on_another_number_of_ranks(folder):
    written = contents(folder / "one-1/step-00000002")
    assert_same(written, contents(folder / "two-offload/step-00000002"))


@pytest.mark.parametrize("before", STAGES)
def test_what_two_ranks_wrote_one_rank_holds(world, folder, tmp_path, before):
    trainer = Trainer(world, adam_config(tmp_path, 2 - before), tmp_path)
    progress = trainer.load(folder / f"two-{before}-{before}/step-00000002")
    assert progress.skipped_samples == {"failed": 3}
    assert_same(contents(folder / f"one-{before}/step-00000002"), contents(trainer.save(2)))


@pytest.mark.parametrize("name", ["grown", "shrunk"])
def test_a_run_on_another_number_of_ranks_goes_on_as_if_nothing_had_changed(folder, name):
    straight, other = (lines(folder / one / "metrics.jsonl") for one in ("straight", name))
    assert [line["step"] for line in other] == [1, 2, 3, 4, 5, 6]
    for expected, line in zip(straight, other, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        for same in ("learning_rate", "samples_seen", "bank_rows", "bank_age"):
            assert line[same] == expected[same]
    assert [line["bank_rows"] for line in other] == [0, 8, 16, 24, 24, 24]


@pytest.mark.parametrize("name", ["grown", "shrunk"])
def test_counts_of_skipped_samples_add_up_over_a_change_of_ranks(folder, name):
    skipped = lines(folder / name / "skipped.jsonl")
    assert lines(folder / name / "metrics.jsonl")[-1]["skipped_samples"] == len(skipped) >= 2
    assert {line["key"] for line in skipped} == {f"{number:06d}" for number in BROKEN}


def test_metrics_name_the_rank_that_the_others_wait_for(folder):
    for name, ranks in (("grown", 2), ("straight", 1)):
        line = lines(folder / name / "metrics.jsonl")[-1]
        assert line["slowest_rank"] in range(ranks)
        assert 0 < line["rank_seconds_max"] <= line["step_seconds"]
        rates = [line[f"rank_samples_per_second_{which}"] for which in ("min", "mean", "max")]
        assert rates == sorted(rates)
        assert rates[0] == pytest.approx(8 / ranks / line["rank_seconds_max"])
        assert 0 < line["data_wait_share"] <= line["data_wait_share_max"] < 1


@pytest.mark.slow
def test_two_ranks_become_four(folder, tmp_path):
    shutil.copytree(folder / "shrunk", folder / "four")
    shutil.rmtree(folder / "four/checkpoints/step-00000006")
    spawn(4, run, run_config(folder, "four", micro=1), True)
    straight, four = (lines(folder / name / "metrics.jsonl") for name in ("straight", "four"))
    for expected, line in zip(straight, four, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_on_as_many_ranks_it_goes_on_bit_for_bit(world, tmp_path, monkeypatch, stage, precision):
    monkeypatch.setattr(engine_state, "FILE_BYTES", 20_000)
    config = adam_config(tmp_path, stage, **precision)
    straight, resumed = Trainer(world, config, tmp_path / "runs"), Trainer(world, config, tmp_path / "runs")
    straight.train(2)
    checkpoint = straight.save(2)
    assert len(list(checkpoint.glob("weights-*.pt"))) > 2
    resumed.load(checkpoint)
    for trainer in (straight, resumed):
        trainer.train(2)
    ours, theirs = straight.masters(), resumed.masters()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_optimizer_with_other_state_and_weights_without_a_gradient(world, tmp_path):
    changes = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    config = make_config(tmp_path, {"lora": None}, zero_optimization={"stage": 0}, **changes)
    straight = Trainer(world, config, tmp_path / "runs")
    straight.save(0)
    straight.train(1)
    checkpoint = straight.save(1)
    resumed = Trainer(world, make_config(tmp_path, {"lora": None}, **changes), tmp_path / "runs")
    resumed.load(checkpoint)
    for trainer in (straight, resumed):
        trainer.train(1)
    ours, theirs = straight.masters(), resumed.masters()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-6, msg=name)
    fresh = Trainer(world, config, tmp_path / "runs")
    fresh.load(tmp_path / "runs/step-00000000")
    assert all(torch.equal(value, straight_before) for value, straight_before in zip(
        fresh.masters().values(), Trainer(world, config, tmp_path / "x").masters().values(), strict=True
    ))  # fmt: skip


def test_what_the_json_says_of_the_learning_rate_holds_after_a_resume(world, tmp_path, folder):
    slower = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}
    trainer = Trainer(world, make_config(tmp_path, {"lora": LORA}, optimizer=slower, scheduler=COSINE), tmp_path)
    trainer.load(folder / "one-2/step-00000002")
    groups = trainer.engine.optimizer.param_groups
    assert [group["lr"] for group in groups] == [pytest.approx(1e-3)] * 2
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ({"lora": {**LORA, "rank": 4}}, {}, "the first difference is .*lora_A.*(3, 32).* there, .*(4, 32).* here"),
        ({"lora": {**LORA, "towers": ["image"]}}, {}, "there, absent here"),
        (
            {"lora": LORA},
            {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
            "optimizer.type = adamw, which is SGD now",
        ),
        (
            {"lora": LORA},
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            "scheduler.type = WarmupCosineLR, which is WarmupLR now",
        ),
    ],
    ids=["rank", "towers", "optimizer", "scheduler"],
)
def test_what_does_not_fit_is_refused(world, tmp_path, folder, model, changes, message):
    config = make_config(tmp_path, model, **{"optimizer": ADAM, "scheduler": COSINE, **changes})
    with pytest.raises(ConfigError, match=message):
        Trainer(world, config, tmp_path).load(folder / "one-2/step-00000002")


def test_a_damaged_or_foreign_checkpoint_is_one_clear_error(world, tmp_path, folder):
    trainer = Trainer(world, adam_config(tmp_path, 2), tmp_path)
    damaged = tmp_path / "step-00000002"
    shutil.copytree(folder / "one-2/step-00000002", damaged)
    with (damaged / "weights-00000.pt").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match="delete it and resume from the one before"):
        trainer.load(damaged)
    (damaged / "run.pt").unlink()
    with pytest.raises(ConfigError, match=r"has no run.pt: .* another version"):
        trainer.load(damaged)


def test_a_bank_of_each_rank_starts_empty_on_another_number_of_ranks():
    def bank(shared: bool) -> MemoryBank:
        filled = MemoryBank(4, shared=shared)
        filled.add(torch.ones(2, 1), torch.ones(2, 1), torch.arange(2), 0)
        return filled

    own = [bank(False).part(rank) for rank in range(2)]
    assert MemoryBank(4).joined(own, 1, 2) is own[1]
    assert MemoryBank(4).joined(own, 0, 1) is None
    shared = [bank(True).part(rank) for rank in range(2)]
    assert shared[1] is None
    assert MemoryBank(4, shared=True).joined(shared, 2, 3) is shared[0]
    # From a bank for each rank to one that all share.
    assert MemoryBank(4, shared=True).joined(own, 0, 2) is None


def test_random_numbers_of_a_rank_without_a_state_are_its_own():
    before = RandomState.capture(torch.device("cpu"))
    drawn = set()
    for seed, step, rank in itertools.product((0, 1), (5, 6), (0, 1, 2)):
        seed_rank(seed, step, rank)
        first = float(torch.rand(1))
        seed_rank(seed, step, rank)
        assert first == float(torch.rand(1))
        drawn.add(first)
    assert len(drawn) == 12
    before.restore(torch.device("cpu"))
