"""Runs that are asked to end, that meet bad steps, or that start where another was cut off."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsclr.config import Config, ConfigError
from dsclr.interruption import Interrupted, Interruption
from dsclr.report.run_folder import RunFolder
from dsclr.train import TrainingError, check_agreement, loop, make_plan, train
from dsclr.train.durable import damage
from dsclr.train.step import ContrastiveStep
from tests.data.samples import write_shard
from tests.environment import of_a_user
from tests.scripts import ROOT
from tests.train.runs import lines, run, run_config, same, timeless
from tests.train.steps import spawn


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """Shards, and a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("stopping")
    for number in range(3):
        write_shard(folder / f"s{number}.tar", range(12 * number, 12 * number + 12), broken=(5,))
    write_shard(folder / "held-out.tar", range(100, 108))
    run(world, config(folder, "whole"))
    return folder


def config(folder, name, **keys):
    made = run_config(folder, name, **keys)
    raw = {**made.raw, "dsclr": {**made.raw["dsclr"], "eval": {"data": f"{folder}/held-out.tar", "every": 2}}}
    return type(made)(raw)


def go(world, config, asked=None, resume="auto"):
    plan = make_plan(config, world.world_size, world.device)
    plan.folder.check(plan.config, plan.dataset.contents(), resume)
    train(plan, world, resume=resume, interruption=asked)
    return plan.folder


def assert_as_whole(folder, name):
    """Lines, and the last checkpoint, to the bit."""
    whole, other = folder / "whole", folder / name
    for file in ("metrics.jsonl", "eval.jsonl", "skipped.jsonl"):
        ours, theirs = ([timeless(line) for line in lines(one / file)] for one in (whole, other))
        assert ours == theirs, file
    assert_same_checkpoint(whole, other)


def assert_same_checkpoint(whole, other):
    ours, theirs = (sorted((run / "checkpoints/step-00000006").glob("*.pt")) for run in (whole, other))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert all(same(torch.load(mine), torch.load(its)) for mine, its in zip(ours, theirs, strict=True))


def state_of(run):
    state = json.loads((run / "state.json").read_text())
    return state["state"], state["step"]


def ask_in_step(monkeypatch, asked, number):
    call = ContrastiveStep.__call__

    def step(self, batch, at=0):
        if at == number:
            asked.request("SIGUSR1")
        return call(self, batch, at)

    monkeypatch.setattr(ContrastiveStep, "__call__", step)


def test_asked_in_a_step_the_run_ends_behind_it_and_goes_on_as_if_it_had_not(world, folder, monkeypatch):
    asked = Interruption()
    with monkeypatch.context() as patch:
        ask_in_step(patch, asked, 2)
        with pytest.raises(Interrupted, match="SIGUSR1: ended after step 3 of 6, the same command with --resume auto"):
            go(world, config(folder, "asked"), asked)
    assert [path.name for path in (folder / "asked/checkpoints").iterdir()] == ["step-00000003"]
    assert state_of(folder / "asked") == ("interrupted", 3)
    go(world, config(folder, "asked"))
    assert_as_whole(folder, "asked")
    assert state_of(folder / "asked") == ("done", 6)


@pytest.mark.parametrize("step", [2, 6])
def test_an_evaluation_is_given_up_when_asked_and_made_up_for(world, folder, monkeypatch, step):
    # the one within the run, and the one behind its last step
    asked, name = Interruption(), f"evaluation-{step}"
    extract = loop.extract_features

    def asked_meanwhile(model, tasks, device):
        if (folder / name / "metrics.jsonl").is_file() and len(lines(folder / name / "metrics.jsonl")) == step:
            asked.request("SIGTERM")
        return extract(model, tasks, device)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "extract_features", asked_meanwhile)
        with pytest.raises(Interrupted, match=f"ended after step {step} of 6"):
            go(world, config(folder, name), asked)
    assert [line["step"] for line in lines(folder / name / "eval.jsonl")] == list(range(0, step, 2))
    assert not (folder / name / "adapter").exists()
    go(world, config(folder, name))
    assert_as_whole(folder, name)
    assert (folder / name / "adapter").is_dir()


def told_other_things(world, folder):
    """What two ranks hear of which the second was started otherwise; and a mean over both."""
    plain = config(folder, "told")
    of_second = [
        ({"loss": {**plain.raw["dsclr"]["loss"], "k": 6}}, {}),
        ({"run": {**plain.raw["dsclr"]["run"], "seed": 5}}, {}),
        ({"data": {**plain.raw["dsclr"]["data"], "train": [f"{folder}/s{number}.tar" for number in (0, 2, 1)]}}, {}),
        ({"data": {**plain.raw["dsclr"]["data"], "workers": 1}}, {"--resume": "auto"}),
        ({}, {}),
    ]
    messages = []
    for ours, options in of_second:
        raw = {**plain.raw, "dsclr": {**plain.raw["dsclr"], **(ours if world.rank else {})}}
        try:
            check_agreement(
                make_plan(Config(raw), 2, world.device), world, {"--resume": None, **(options if world.rank else {})}
            )
            messages.append("")
        except TrainingError as error:
            messages.append(str(error))
    mean = world.mean({"both": 1.0 + world.rank, **({"one": 7.0} if world.rank else {})})
    return messages, mean


def test_ranks_that_were_told_other_things_are_refused(folder):
    for messages, mean in spawn(2, told_other_things, folder):
        assert messages[0].startswith(
            "rank 1 was started with dsclr.loss.k = 6, rank 0 with 5: give all ranks the same"
        )
        assert "dsclr.run.seed = 5, rank 0 with 0" in messages[1]
        assert "dsclr.data.train = [" in messages[2]
        assert '--resume = "auto", rank 0 with null' in messages[3]
        assert messages[4] == ""
        assert mean == {"both": 1.5, "one": 7.0}


def one_rank_is_asked(world, folder):
    asked, call = Interruption(), ContrastiveStep.__call__

    def step(self, batch, at=0):
        if at == 2 and world.rank == 1:
            asked.request("SIGUSR1")
        return call(self, batch, at)

    ContrastiveStep.__call__ = step  # type: ignore[method-assign]
    try:
        go(world, config(folder, "one", checkpoint_every=1), asked)
    except Interrupted as ended:
        message = str(ended)
    return message, sorted(path.name for path in (folder / "one/checkpoints").iterdir())


def test_one_rank_that_is_asked_ends_all_at_the_same_step(folder):
    (first, checkpoints), (second, _) = spawn(2, one_rank_is_asked, folder)
    assert first.startswith("another rank was asked to end: ended after step 3 of 6")
    assert second.startswith("SIGUSR1: ended after step 3 of 6")
    assert checkpoints == ["step-00000002", "step-00000003"]
    # What the metrics tell is of all rows, not of the first rank's.
    ours, theirs = (lines(folder / name / "metrics.jsonl")[:3] for name in ("one", "whole"))
    for key in ("positive_similarity", "hardest_negative_similarity"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-3), key


def poison(monkeypatch, steps):
    """Gradients that are not finite in some steps."""
    backward, call = ContrastiveStep._backward, ContrastiveStep.__call__
    at = [0]

    def numbered(self, batch, number=0):
        at[0] = number
        return call(self, batch, number)

    def poisoned(self, *arguments):
        gradients = backward(self, *arguments)
        if at[0] in steps:
            next(iter(gradients.values())).fill_(torch.nan)
        return gradients

    monkeypatch.setattr(ContrastiveStep, "__call__", numbered)
    monkeypatch.setattr(ContrastiveStep, "_backward", poisoned)


def test_bad_steps_in_a_row_end_the_run_on_the_last_good_state(world, folder, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        poison(patch, (1, 3, 4))
        with pytest.raises(TrainingError) as raised:
            # without checkpoints of its own
            go(world, config(folder, "bad", max_bad_steps=2))
    message = str(raised.value)
    assert message.startswith("2 steps in a row were not finite, up to step 5 (the gradient of ")
    assert "The only checkpoint, of step 3, may hold the cause (then start anew): lower the learning rate" in message
    assert state_of(folder / "bad") == ("failed", 3)
    assert [path.name for path in (folder / "bad/checkpoints").iterdir()] == ["step-00000003"]
    named = lines(folder / "bad/bad_steps.jsonl")
    assert [(line["step"], line["rank"]) for line in named] == [(2, 0), (4, 0), (5, 0)]
    assert all(line["tensor"].startswith("the gradient of ") for line in named)
    assert all(line["values"] == line["size"] > 1 for line in named)
    assert caplog.text.count("skipped on all ranks: ") == 3
    # what comes then is what would have come without the bad steps that were undone
    with monkeypatch.context() as patch:
        poison(patch, (1,))
        go(world, config(folder, "bad", max_bad_steps=2))
        go(world, config(folder, "one-bad", max_bad_steps=2), resume=None)
    assert_same_checkpoint(folder / "bad", folder / "one-bad")
    assert [line["step"] for line in lines(folder / "bad/bad_steps.jsonl")] == [2]


@pytest.mark.parametrize(("keep_last", "every"), [(1, 1), (2, 2)])
def test_weights_that_are_finite_but_of_no_use_do_not_displace_a_good_checkpoint(world, folder, keep_last, every):
    name = f"useless-{keep_last}-{every}"
    keys = {"checkpoint_every": every, "keep_last": keep_last, "max_bad_steps": 2}
    run(world, config(folder, name, **keys), stop_after=3)
    steep = Config({**config(folder, name, **keys).raw, "optimizer": {"type": "AdamW", "params": {"lr": 1e30}}})
    # The step behind the checkpoint is still finite, and makes weights of which nothing is.
    with pytest.raises(TrainingError, match=r"2 steps in a row .*up to step 6 .*embeddings.* is in step-0") as ended:
        go(world, steep)
    assert "The checkpoint of step 3 is the last good one" in str(ended.value)
    left = {path.name for path in (folder / name / "checkpoints").iterdir()}
    assert left - {"step-00000002"} == {"step-00000003", "step-00000004.suspect"}
    assert damage(folder / name / "checkpoints/step-00000004.suspect") is None
    go(world, config(folder, name, **keys))
    assert_as_whole(folder, name)


def test_a_failure_is_told_even_where_the_folder_cannot_be_written_to(world, folder, monkeypatch):
    def full(path, *_):
        raise OSError(errno.ENOSPC, f"No space left for {path}")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "append_line", full)
        patch.setattr(RunFolder, "write_state", lambda self, state, step: full(state) if state == "failed" else None)
        with pytest.raises(OSError, match=r"No space left for .*\.jsonl"):
            go(world, config(folder, "full"))


HOLD = """
import sys, time
from pathlib import Path
from dsclr.report.run_lock import only_job
with only_job(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_is_one_jobs_at_a_time(world, folder, caplog, resume):
    caplog.set_level("INFO")
    run_folder = folder / f"held-{resume}"
    words = [sys.executable, "-c", HOLD, str(run_folder), "3" if resume else "60"]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=of_a_user(PYTHONPATH=str(ROOT)))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        if resume is None:
            with pytest.raises(TrainingError, match=rf'another job trains in .*held-None .*"pid": {holder.pid}'):
                go(world, config(folder, run_folder.name), resume=resume)
            holder.kill()
            holder.wait()
        # One that continues another waits for its end; nothing else of a killed one is in the way.
        go(world, config(folder, run_folder.name), resume=resume)
        assert ("waiting for its end" in caplog.text) == (resume == "auto")
    finally:
        holder.kill()
    assert_as_whole(folder, run_folder.name)


def test_a_run_that_does_not_start_leaves_no_folder(world, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(world, config(folder, "never"), resume=None)
    assert not (folder / "never").exists()


def test_other_shards_or_no_folder_to_write_to_are_refused(world, folder, tmp_path):
    plan = make_plan(config(folder, "whole"), 1, world.device)
    contents = plan.dataset.contents()
    assert (contents["number"], contents["samples"]) == (3, 36)
    with pytest.raises(ConfigError, match=r"other shards than .*whole began with \(samples 36, now 48\)"):
        plan.folder.check(plan.config, {**contents, "samples": 48}, "newest")
    raw = {**plan.config.raw, "dsclr": {**plan.config.raw["dsclr"], "data": {"train": f"{folder}/s*.tar"}}}
    with pytest.raises(ConfigError, match=r"dsclr\.data\.shuffle_shards was 3"):
        plan.folder.check(Config(raw), contents, "auto")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/proc/1")):
        with pytest.raises(TrainingError, match=rf"nothing can be written to {path}/run \(.*dsclr.run.dir=FOLDER"):
            train(replace(plan, folder=RunFolder(path / "run")), world)


def test_damaged_weights_are_never_saved(world, folder, monkeypatch):
    call = ContrastiveStep.__call__

    def damaging(self, batch, number=0):
        result = call(self, batch, number)
        if number == 3:
            next(p for n, p in self.engine.module.named_parameters() if "lora_A" in n).data.fill_(torch.nan)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ContrastiveStep, "__call__", damaging)
        with pytest.raises(TrainingError, match=r"step 4: .* of rank 0 .* The checkpoint of step 2 is the last good"):
            go(world, config(folder, "damaged", checkpoint_every=2))
        assert [path.name for path in (folder / "damaged/checkpoints").iterdir()] == ["step-00000002"]
        # noticed by the steps behind it, as no checkpoint is due
        with pytest.raises(TrainingError, match=r"2 steps in a row .* has become not finite itself.*\. Lower"):
            go(world, config(folder, "damaged-late", max_bad_steps=2))
    assert not (folder / "damaged-late/checkpoints").exists()
    go(world, config(folder, "damaged", checkpoint_every=2))
    assert_as_whole(folder, "damaged")


def test_a_run_that_was_killed_in_its_start_begins_anew(world, folder):
    start = folder / "start"
    (start / "checkpoints/step-00000002.part").mkdir(parents=True)
    (start / "config.json").write_text("{}")
    for name in ("metrics", "eval", "skipped"):
        (start / f"{name}.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    with pytest.raises(ConfigError, match=r"--resume: .* was null in"):
        go(world, config(folder, "start"), resume="newest")
    go(world, config(folder, "start"))
    assert_as_whole(folder, "start")
    assert [path.name for path in (start / "checkpoints").iterdir()] == ["step-00000006"]


def test_what_is_no_run_is_left_alone(world, folder):
    (folder / "precious").mkdir()
    (folder / "precious/thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds no run"):
        go(world, config(folder, "precious"))
    # what a start leaves before it has written its configuration
    (folder / "early/tensorboard").mkdir(parents=True)
    (folder / "early/config.json.part").write_text("{")
    go(world, config(folder, "early"))
    assert_as_whole(folder, "early")


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(world, folder, monkeypatch, caplog):
    asked = Interruption()
    with monkeypatch.context() as patch:
        ask_in_step(patch, asked, 3)
        with pytest.raises(Interrupted):
            go(world, config(folder, "truncated", checkpoint_every=2), asked)
    damaged = next((folder / "truncated/checkpoints/step-00000004").glob("rank-*.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    with pytest.raises(
        ConfigError, match=r"step-00000004 is damaged \(rank-00000.pt has .*--resume auto sets it aside"
    ):
        go(world, config(folder, "truncated"), resume="newest")
    go(world, config(folder, "truncated"))
    assert "set aside as step-00000004.damaged" in caplog.text
    assert_as_whole(folder, "truncated")
