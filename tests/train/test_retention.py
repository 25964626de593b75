"""What a step keeps, runs again, or does over after running out of memory changes no number."""

from __future__ import annotations

import json

import pytest
import torch

from dsclr.models import build_model
from dsclr.models.memo import Memo, frozen_blocks
from dsclr.negatives import MemoryBank
from dsclr.retention import Retention
from dsclr.train import OutOfMemory
from dsclr.train.step import ContrastiveStep
from tests.train.steps import LORA, ROWS, assert_same_step, engine_step, make_batch, make_config, make_model, spawn

UPPER = {**LORA, "layers": [-1]}
DROPOUT = {**LORA, "dropout": 0.3}


def step_config(folder, micro, retain=0, model=None, **changes):
    changes["dsclr"] = {"step": {"retain": retain}, **changes.get("dsclr", {})}
    return make_config(folder, {"lora": LORA, **(model or {})}, train_micro_batch_size_per_gpu=micro, **changes)


def graph_bytes(world, config):
    """Of one row."""
    seen: dict[str, ContrastiveStep] = {}
    engine_step(world, config, make_batch(), prepare=lambda step: seen.update(step=step))
    retention = seen["step"].retention
    assert retention is not None
    assert retention.graph_bytes is not None
    return retention.graph_bytes


def assert_bitwise(one, other):
    assert one["loss"] == other["loss"]
    for name, value in one["after"].items():
        assert torch.equal(value, other["after"][name]), name
    assert torch.equal(one["random"], other["random"]), "the next step would draw other random numbers"


@pytest.mark.parametrize("checkpointing", [{}, {"activation_checkpointing": {}}], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("lora", [None, DROPOUT], ids=["full", "dropout"])
def test_kept_or_run_again_is_bitwise_the_same(world, tmp_path, lora, checkpointing):
    def run(retain):
        config = step_config(tmp_path, 3, retain, {"lora": lora}, **checkpointing)
        return engine_step(world, config, make_batch())

    none, everything, auto = run(0), run(10**9), run("auto")
    per_row = graph_bytes(world, step_config(tmp_path, 3, 10**9, {"lora": lora}, **checkpointing))
    # Of four micro-batches: room for two and a half.
    half = run(int(per_row * ROWS * 0.625))
    assert none["metrics"]["retained"] == 0
    assert half["metrics"]["retained"] == 0.5
    assert everything["metrics"]["retained"] == auto["metrics"]["retained"] == 1
    for other in (half, everything, auto):
        assert_bitwise(none, other)


def test_the_second_forward_is_saved(world, tmp_path, monkeypatch):
    forwards = []
    inputs = ContrastiveStep._inputs

    def counted(self, batch, start, end):
        forwards.append(start)
        return inputs(self, batch, start, end)

    monkeypatch.setattr(ContrastiveStep, "_inputs", counted)
    for retain, expected in ((0, 8), ("auto", 4)):
        forwards.clear()
        engine_step(world, step_config(tmp_path, 3, retain), make_batch())
        assert len(forwards) == expected


def test_micro_batches_of_any_size_give_the_same_update(world, tmp_path):
    whole = engine_step(world, step_config(tmp_path, ROWS), make_batch())
    for micro in (1, 4, 6):
        assert_same_step(engine_step(world, step_config(tmp_path, micro), make_batch()), whole)


class RunsOut:
    """Out of memory at some calls of the encoder, or of the loss."""

    def __init__(self, *calls, where="_inputs", rank=0):
        self.calls, self.where, self.rank = calls, where, rank

    def __call__(self, step):
        import torch.distributed as dist

        if dist.get_rank() != self.rank:
            return
        target = {"_inputs": "_inputs", "loss": "loss_fn"}[self.where]
        original, count = getattr(step, target), 0

        def failing(*arguments):
            nonlocal count
            count += 1
            if count in self.calls:
                raise torch.OutOfMemoryError("injected")
            return original(*arguments)

        # All ranks take the same way.
        failing.__dict__["streams_keys"] = getattr(original, "streams_keys", False)
        setattr(step, target, failing)


# 12 rows by 6: calls 1 and 2 are the first pass, 3 and 4 the second; after that, by 3, four and four.
@pytest.mark.parametrize("calls", [(1,), (2,), (3,), (4,), (4, 5), (1, 2, 3)])
@pytest.mark.parametrize("checkpointing", [{}, {"activation_checkpointing": {}}], ids=["plain", "checkpointing"])
def test_recovery_gives_the_weights_of_a_run_that_never_ran_out(world, tmp_path, calls, checkpointing):
    config = step_config(tmp_path, 6, **checkpointing)
    reference = engine_step(world, config, make_batch(), steps=2)
    recovered = engine_step(world, config, make_batch(), steps=2, prepare=RunsOut(*calls))
    assert recovered["recoveries"] == len(calls)
    assert recovered["metrics"]["micro_batch_size"] == {1: 3, 2: 2, 3: 1}[len(calls)]
    assert_same_step(recovered, reference)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_recovery_with_kept_graphs(world, tmp_path, stage):
    config = step_config(tmp_path, 4, "auto", zero_optimization={"stage": stage})
    reference = engine_step(world, config, make_batch(), steps=2)
    recovered = engine_step(world, config, make_batch(), steps=2, prepare=RunsOut(3))
    assert recovered["metrics"]["micro_batch_size"] == 2
    assert recovered["metrics"]["retained"] < 1
    assert_same_step(recovered, reference)


def test_recovery_from_the_loss_drops_the_graphs(world, tmp_path):
    config = step_config(tmp_path, 4, "auto")
    reference = engine_step(world, config, make_batch(), steps=2)
    recovered = engine_step(world, config, make_batch(), steps=2, prepare=RunsOut(1, where="loss"))
    assert recovered["metrics"]["retained"] == 0
    assert recovered["metrics"]["micro_batch_size"] == 4
    assert_same_step(recovered, reference)


@pytest.mark.parametrize("where", ["loss", "_inputs"])
def test_the_frozen_blocks_output_goes_before_the_micro_batch(world, tmp_path, where):
    """Where it alone is kept, running out of memory gives it back, and the step is the same."""

    def prepare(step, failure=None):
        step._retention = Retention(10**9, step.device)
        step._retention.graph_bytes = 1e12
        if failure is not None:
            failure(step)

    config = step_config(tmp_path, 3, 0, {"lora": UPPER})
    reference = engine_step(world, config, make_batch(), prepare=prepare)
    # The sixth call is in the second pass.
    failure = RunsOut(1 if where == "loss" else 6, where=where)
    recovered = engine_step(world, config, make_batch(), prepare=lambda step: prepare(step, failure))
    assert recovered["recoveries"] == 1
    assert recovered["metrics"]["micro_batch_size"] == 3
    assert_same_step(recovered, reference)


def test_running_out_where_ranks_wait_for_each_other_is_explained(world, tmp_path):
    def prepare(step):
        def failing(*arguments):
            raise torch.OutOfMemoryError("injected")

        step.bank = MemoryBank(4)
        step.bank.add = failing

    with pytest.raises(OutOfMemory, match=r"step 1: no memory for the memory bank: lower dsclr.negatives.bank.size"):
        engine_step(world, step_config(tmp_path, 6), make_batch(), prepare=prepare)


def test_running_statistics_move_once_a_row(world, tmp_path):
    """Whether its graph is kept or not, and also where the step is done again."""
    path = tmp_path / "dsclr-test-convolutional.json"
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    text = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 1}
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    found = []

    def statistics(step):
        found.append(dict(step.engine.module.named_buffers()))

    for retain, failure in ((0, None), ("auto", None), (0, RunsOut(3))):

        def prepare(step, failure=failure):
            statistics(step)
            if failure is not None:
                failure(step)

        engine_step(
            world, step_config(tmp_path, 6, retain, {"name": str(path), "lora": None}), make_batch(), prepare=prepare
        )
    kept_none, kept_all, again = found
    moved = [name for name in kept_none if name.endswith("running_mean")]
    assert moved
    for name in moved:
        assert kept_none[name].abs().max() > 0
        torch.testing.assert_close(kept_none[name], kept_all[name])
    assert all(int(kept_none[n]) == int(kept_all[n]) == 2 for n in kept_none if n.endswith("num_batches_tracked"))
    # Recovered with micro-batches of 3 rows.
    assert all(int(again[n]) == 4 for n in again if n.endswith("num_batches_tracked"))


def test_a_row_that_does_not_fit_is_named(world, tmp_path):
    config = step_config(tmp_path, 4)
    with pytest.raises(OutOfMemory, match=r"step 1: out of memory in the encoder forward with a micro-batch of 1 row"):
        engine_step(world, config, make_batch(), prepare=RunsOut(*range(1, 50)))
    with pytest.raises(OutOfMemory, match=r"in the loss on 12 rows a rank.*block_size"):
        engine_step(world, config, make_batch(), prepare=RunsOut(1, 2, where="loss"))


def test_a_host_allocation_that_fails_is_recovered_from(world, tmp_path):
    def prepare(step):
        original, calls = step._inputs, []

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 2:
                torch.empty(2**58, dtype=torch.uint8)
            return original(*arguments)

        step._inputs = failing

    config = step_config(tmp_path, 6)
    recovered = engine_step(world, config, make_batch(), prepare=prepare)
    assert recovered["recoveries"] == 1
    assert_same_step(recovered, engine_step(world, config, make_batch()))


def test_other_errors_are_not_taken_for_memory(world, tmp_path):
    def prepare(step):
        def failing(*arguments):
            raise RuntimeError("shapes cannot be multiplied")

        step._inputs = failing

    with pytest.raises(RuntimeError, match="shapes"):
        engine_step(world, step_config(tmp_path, 6), make_batch(), prepare=prepare)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_runs_out_and_both_recover(tmp_path, stage):
    config = step_config(
        tmp_path, 3, "auto", zero_optimization={"stage": stage}, dsclr={"negatives": {"across_ranks": "gather"}}
    )
    reference = spawn(2, engine_step, config, make_batch(), 2)
    for failure in (RunsOut(2, rank=1), RunsOut(1, where="loss", rank=1)):
        recovered = spawn(2, engine_step, config, make_batch(), 2, 100.0, failure)
        for one, other in zip(recovered, reference, strict=True):
            assert one["recoveries"] == 1
            assert_same_step(one, other)


@pytest.mark.parametrize("checkpointing", [{}, {"activation_checkpointing": {}}], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("objective", "model"),
    [
        ("clip", {"lora": {**UPPER, "dropout": 0.3}}),
        ("clip", {"lora": {**UPPER, "towers": ["image"], "dropout": 0.3}, "patch_dropout": 0.5}),
        ("simclr", {"lora": {**UPPER, "towers": ["image"]}}),
        ("clip", {"lora": None, "lock_image": True}),
        ("clip", {"lora": None, "lock_text": True, "projection": {"out_dim": 8, "hidden_dim": 16}}),
    ],
    ids=["blocks", "patch_dropout", "simclr", "locked", "locked_with_head"],
)
def test_what_is_frozen_is_not_run_twice(world, tmp_path, objective, model, checkpointing):
    """Same numbers as running everything again, with fewer forwards of frozen blocks."""
    runs: list[int] = []
    below: list[int] = []
    locked: list[int] = []

    def prepare(step):
        clip = step.engine.module.open_clip_model
        for blocks in (clip.visual.transformer.resblocks, clip.transformer.resblocks):
            frozen = [b for b in blocks if not any(p.requires_grad for p in b.parameters())]
            if objective == "clip" or blocks is not clip.transformer.resblocks:
                (locked if len(frozen) == len(blocks) else below).extend([1] * len(frozen))
            for block in frozen:
                block.mlp.register_forward_hook(lambda *_: runs.append(1))

    def run(budget):
        for counted in (runs, below, locked):
            counted.clear()
        config = step_config(tmp_path, 3, 0, model, dsclr={"objective": objective}, **checkpointing)

        def with_budget(step):
            prepare(step)
            if budget:
                # Room for the blocks' output, none for a graph.
                step._retention = Retention(budget, step.device)
                step._retention.graph_bytes = 1e12

        result = engine_step(world, config, make_batch(objective), prepare=with_budget)
        assert result["metrics"]["retained"] == 0
        return result, len(runs)

    again, runs_again = run(0)
    spared, runs_spared = run(10**9)
    assert_bitwise(again, spared)
    assert below or locked
    assert runs_again == 4 * (2 * len(below) + len(locked))
    assert runs_spared == 4 * (len(below) + len(locked))


def test_frozen_blocks_are_those_below_the_lowest_adapter(tmp_path):
    upper = build_model(make_config(tmp_path, {"lora": UPPER}).dsclr.model, "clip")
    assert len(frozen_blocks(upper.clip, "image")) == 2
    everywhere = build_model(make_config(tmp_path, {"lora": LORA}).dsclr.model, "clip")
    assert frozen_blocks(everywhere.clip, "image") == []
    full = build_model(make_config(tmp_path).dsclr.model, "clip")
    assert frozen_blocks(full.clip, "image") == []


def test_memo_of_a_forward_gives_the_same_embeddings(tmp_path):
    model = make_model(make_config(tmp_path, {"lora": {**UPPER, "dropout": 0.5}}))
    batch = make_batch()
    memo = Memo(keep_hidden=True)
    state = torch.get_rng_state()
    with torch.no_grad():
        first = model(batch.a, batch.b, memo)
    assert memo.hidden_bytes == sum(h.nbytes for h, _ in memo.hidden.values()) > 0
    torch.set_rng_state(state)
    second = model(batch.a, batch.b, memo)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert other.requires_grad


def test_budget_on_a_device_is_what_two_steps_leave_free(monkeypatch):
    monkeypatch.setattr("dsclr.retention.capacity_bytes", lambda *_: 1000)
    retention = Retention("auto", torch.device("cuda"))
    assert retention.kept_chunks(64, 8) == 1
    retention.observe_graph(8, 80)
    for _ in range(2):
        assert retention.kept_chunks(64, 8) == 1
        retention.observe_step(300, 8)
    # 900 of 1,000 bytes, of which 300 - 80 are taken by everything but the graphs.
    assert retention.budget == 900 - 300 + 80
    assert retention.kept_chunks(64, 8) == 8
    assert retention.kept_chunks(800, 8) == 8
    retention.shrink(64)
    assert retention.budget == 320


def test_micro_batches_of_1_8_32_and_all_of_64_rows(world, tmp_path):
    def run(micro, retain):
        config = step_config(tmp_path, micro, retain, train_batch_size=64)
        return engine_step(world, config, make_batch(rows=64), steps=2)

    whole = run(64, 0)
    for micro, retain in ((1, 0), (8, "auto"), (32, 0)):
        assert_same_step(run(micro, retain), whole)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 1, "overlap_comm": True},
        {"stage": 2, "reduce_bucket_size": 1000},
    ],
    ids=["offload", "overlap", "small_buckets"],
)
def test_deepspeed_options_see_an_ordinary_step(world, tmp_path, zero):
    reference = engine_step(world, step_config(tmp_path, 4), make_batch(), steps=2)
    changed = step_config(tmp_path, 4, zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    assert_same_step(engine_step(world, changed, make_batch(), steps=2), reference)


def test_torch_autocast_reaches_the_encoder(world, tmp_path):
    plain = engine_step(world, step_config(tmp_path, 4), make_batch())
    lower = step_config(tmp_path, 4, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    autocast = engine_step(world, lower, make_batch())
    assert autocast["loss"] != plain["loss"]
    assert autocast["loss"] == pytest.approx(plain["loss"], rel=0.02)
