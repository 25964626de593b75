"""The command line: real runs, resuming, and what every mistake is told."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.samples import write_shard
from tests.environment import of_a_user
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
SMALL = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}},
    "zero_optimization": {"stage": 2},
    "activation_checkpointing": {},
    "dsclr": {
        "run": {"name": "small", "max_steps": 10},
        "model": {"name": "dsclr-tiny", "pretrained": "noto", "lora": {"rank": 2, "dropout": 0.1}},
        "data": {"train": "demo:fluent-train", "workers": 1},
        "loss": {"k": 4, "block_size": 8},
    },
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


def command(words, tmp_path, **environment):
    """Run as a user does, with the run folders in tmp_path; returns the completed process."""
    result = subprocess.run(
        [*words, "--set", f"dsclr.run.dir={tmp_path}/runs"],
        cwd=ROOT,
        env=of_a_user(**{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(folder):
    from safetensors.torch import load_file

    return {**load_file(folder / "adapter_model.safetensors"), **load_file(folder / "extras.safetensors")}


@pytest.mark.slow
def test_ten_steps_equal_five_then_five(small, tmp_path):
    # with a memory bank and a mixture with bad samples, which have to be where they were too
    shard = write_shard(tmp_path / "odd.tar", range(12), broken=(3, 5, 8))
    sources = [{"shards": "demo:fluent-train", "weight": 2, "name": "emoji"}, {"shards": str(shard), "weight": 1}]
    train = [sys.executable, "launch/train.py", "--deepspeed_config", str(small)]
    train += ["--set", 'dsclr.negatives.bank={"size":40,"max_age":3}']
    train += ["--set", f"dsclr.data.train={json.dumps(sources)}", "--set", "dsclr.data.max_bad_fraction=1"]
    command([*train, "--set", "dsclr.run.name=whole"], tmp_path)
    stopped = command([*train, "--set", "dsclr.run.name=parts", "--max-steps", "5"], tmp_path)
    assert "stopped after step 5 of 10" in stopped.stderr
    assert not (tmp_path / "runs/parts/adapter").exists()
    command([*train, "--set", "dsclr.run.name=parts", "--resume"], tmp_path)
    whole, parts = (lines(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("whole", "parts"))
    assert [line["step"] for line in parts] == list(range(1, 11))
    timed = {"samples_per_second", "step_seconds", "peak_bytes", "rank_seconds_max"}
    timed |= {
        "data_wait_share",
        "data_wait_share_max",
        *(f"rank_samples_per_second_{x}" for x in ("min", "mean", "max")),
    }
    for first, second in zip(whole, parts, strict=True):
        assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
    skipped, again = (lines(tmp_path / f"runs/{name}/skipped.jsonl") for name in ("whole", "parts"))
    assert skipped == again
    assert whole[-1]["skipped_samples"] == whole[-1]["data/skipped_not_an_image"] == len(skipped) > 3
    assert {line["key"] for line in skipped} == {"000003", "000005", "000008"}
    assert all(line["shard"] == str(shard) and line["cause"] == "not_an_image" for line in skipped)
    assert {line["step"] for line in skipped} <= set(range(1, 11))
    shares = [line["data/share_1"] for line in whole]
    assert all(line["data/share_emoji"] + share == pytest.approx(1) for line, share in zip(whole, shares, strict=True))
    assert sum(shares) / 10 == pytest.approx(1 / 3, abs=0.1)
    assert all(2 <= line["data/shards_per_batch"] <= 5 for line in whole)
    ours, theirs = (weights(tmp_path / f"runs/{name}/adapter") for name in ("whole", "parts"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # a batch of 16, at most 3 steps back, at most 40 rows
    assert [line["bank_rows"] for line in whole[:5]] == [0, 16, 32, 40, 40]
    assert whole[-1]["bank_share"] > 0
    expected = {
        "step", "samples_seen", "loss", "learning_rate", "logit_scale", "grad_norm", "skip_rate",
        "samples_per_second", "step_seconds", "peak_bytes", "skipped_steps",
    }  # fmt: skip
    assert expected <= whole[0].keys()
    assert [line["samples_seen"] for line in whole] == [16 * step for step in range(1, 11)]
    config = json.loads((tmp_path / "runs/whole/config.json").read_text())
    assert config["dsclr"]["loss"]["name"] == "topk"
    assert config["versions"]["torch"] == torch.__version__.split("+")[0] or config["versions"]["torch"]
    assert list((tmp_path / "runs/whole/tensorboard").glob("events*"))
    # adapters only: the frozen 7 million parameters are not in the checkpoint
    (checkpoint,) = (tmp_path / "runs/whole/checkpoints").glob("step-*")
    assert checkpoint.name == "step-00000010"
    assert sum(f.stat().st_size for f in checkpoint.rglob("*")) < 4e6


# Processors without instructions for bfloat16 take minutes over the real model.
@pytest.mark.parametrize("model", ["ViT-S-32-alt", pytest.param("ViT-B-32", marks=pytest.mark.slow)])
def test_a100_configuration_on_the_cpu(tmp_path, model):
    overrides = [
        f"dsclr.model.name={model}",
        "train_batch_size=2",
        "train_micro_batch_size_per_gpu=1",
        "dsclr.loss.k=1",
        "dsclr.model.pretrained=null",
    ]
    words = ["deepspeed", "launch/train.py", "--deepspeed_config", "ds_configs/a100.json", "--max-steps", "1"]
    for override in overrides:
        words += ["--set", override]
    result = command(words, tmp_path)
    records = lines(tmp_path / "runs/a100/metrics.jsonl")
    assert [record["step"] for record in records] == [1]
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in records)
    assert "Warning:" not in result.stderr


def test_quickstart_configuration_trains_and_evaluates(tmp_path, capsys):
    words = ["deepspeed", "launch/train.py", "--deepspeed_config", "ds_configs/quickstart.json"]
    for override in (
        "train_batch_size=16",
        "train_micro_batch_size_per_gpu=8",
        "dsclr.loss.k=4",
        "dsclr.run.max_steps=3",
    ):
        words += ["--set", override]
    command(words, tmp_path)
    run = tmp_path / "runs/quickstart"
    evaluations = lines(run / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 3]
    assert load_script("launch/evaluate.py").main(["--run", str(run)]) == 0
    table = capsys.readouterr().out
    assert "R@10 after" in table
    results = json.loads((run / "retrieval.json").read_text())
    assert results["samples"] == 250
    for when, record in zip(("before", "after"), evaluations, strict=True):
        for name, value in results[when].items():
            assert value == pytest.approx(record[name], abs=0.009)  # the checkpointed blocks round differently


def test_two_views_of_images_without_captions(small, tmp_path):
    words = [sys.executable, "launch/train.py", "--deepspeed_config", str(small)]
    for override in (
        "dsclr.objective=simclr",
        'dsclr.model.lora.towers=["image"]',
        "dsclr.model.projection={}",
        "dsclr.loss.tail=lse",
        "dsclr.run.max_steps=2",
    ):
        words += ["--set", override]
    command(words, tmp_path)
    records = lines(tmp_path / "runs/small/metrics.jsonl")
    assert all(0 < record["loss"] < 100 and 0 < record["captured_mass"] <= 1 for record in records)
    assert (tmp_path / "runs/small/adapter/adapter_model.safetensors").is_file()


def test_full_fine_tuning_exports_a_stock_open_clip_model(small, tmp_path, capsys):
    import open_clip

    command(
        [sys.executable, "launch/train.py", "--deepspeed_config", str(small), "--set", "dsclr.model.lora=null",
         "--set", "dsclr.run.max_steps=2", "--set", "dsclr.run.name=full", "--set", "dsclr.model.lock_text=true"],
        tmp_path,
    )  # fmt: skip
    export = load_script("tools/export.py")
    assert (
        export.main(["--run", str(tmp_path / "runs/full"), "--output", str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    )
    model = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    trained = open_clip.create_model(f"local-dir:{tmp_path / 'runs/full/model'}")
    # What is there is not overwritten.
    assert export.main(["--run", str(tmp_path / "runs/full"), "--output", str(tmp_path / "out")]) == 1
    assert "holds something already" in capsys.readouterr().err
    for (name, exported), kept in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        torch.testing.assert_close(exported, kept.half().float(), msg=name)


def test_dry_run_prints_and_writes_nothing(small, tmp_path, capsys):
    arguments = ["--deepspeed_config", str(small), "--dry-run", "--set", f"dsclr.run.dir={tmp_path}/runs"]
    assert load_script("launch/train.py").main([*arguments, "--set", "dsclr.eval=null"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["train_samples"] == 1355
    assert plan["total_steps"] == 10
    assert plan["config"]["gradient_accumulation_steps"] == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dsclr.data.train=missing.tar"], "dsclr.data.train: shard missing.tar does not exist"),
        (["dsclr.data.train=shard-{}.tar"], "empty"),
        (["dsclr.data.train=nothing-*.tar"], "nothing matches"),
        (["dsclr.loss.kk=3"], "unknown key dsclr.loss.kk"),
        (["zero_optimisation=3"], "did you mean 'zero_optimization'?"),
        (["dsclr.loss.k=4096"], "dsclr.loss.k = 4096, but only 15 valid negatives exist (N = 16)"),
        (["train_micro_batch_size_per_gpu=7"], "not divisible"),
        (["dsclr.model.name=ViT-B-33", "dsclr.model.pretrained=null"], "did you mean"),
        (["dsclr.model.name=ViT-B-32", "dsclr.model.pretrained=nowhere"], "Tags: "),
        (["dsclr.model.pretrained=missing.safetensors"], "missing.safetensors"),
        (["dsclr.loss.name=my_pkg.losses:MyLoss"], "does not import"),
        (["dsclr.loss.name=triplet"], "accepted: dense"),
        (["dsclr.loss.name=dense", "dsclr.loss.tail=lse"], "dense has no such option"),
        (["dsclr.loss.false_negative_margin=3"], "dsclr.loss.false_negative_margin"),
        (["dsclr.loss.k=some"], "dsclr.loss.k"),
        (["dsclr.loss.k=60", 'dsclr.negatives.bank={"size":40}'], "only 55 valid negatives exist (N = 16, memory bank"),
        (['dsclr.negatives.bank={"size":0}'], "dsclr.negatives.bank.size"),
        (['fp16={"enabled": true}'], "fp16 does not run on a CPU"),
        (["zero_optimization.stage=3"], "stages 0, 1 and 2"),
        (['zero_optimization.offload_param={"device":"cpu"}'], "offload_param is for stage 3"),
        (
            ['zero_optimization={"stage":0,"offload_optimizer":{"device":"cpu"}}'],
            "needs zero_optimization.stage 1 or 2",
        ),
        (['zero_optimization.offload_optimizer={"device":"nvme"}'], "device = nvme, accepted: cpu or none"),
        (["optimizer=null"], 'no "optimizer"'),
        (["dsclr.step.retain=much"], "dsclr.step.retain"),
        (["dsclr.step.retain=-1"], "no size in bytes"),
        (["dsclr.step.spill_dir=missing"], 'spill_dir is for host_images = "spill"'),
        (
            ["dsclr.step.spill_dir=missing", "dsclr.step.host_images=spill"],
            "dsclr.step.spill_dir = missing: not a folder",
        ),
        (["dsclr.step.spill_dir=README.md", "dsclr.step.host_images=spill"], "spill_dir = README.md: not a folder"),
        (["dsclr.eval.data=missing.tar"], "dsclr.eval.data"),
    ],
)
def test_a_mistake_is_one_clear_error_before_any_training(small, tmp_path, capsys, overrides, message):
    arguments = ["--deepspeed_config", str(small), "--set", f"dsclr.run.dir={tmp_path}/runs"]
    for override in overrides:
        arguments += ["--set", override]
    assert load_script("launch/train.py").main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_unreadable_json(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("{nope")
    assert load_script("launch/train.py").main(["--deepspeed_config", str(path)]) == 1
    assert "line 1, column 2" in capsys.readouterr().err


def test_a_folder_with_another_run_is_left_alone(small, tmp_path, capsys):
    run = tmp_path / "runs/small"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("precious")
    arguments = ["--deepspeed_config", str(small), "--set", f"dsclr.run.dir={tmp_path}/runs"]
    assert load_script("launch/train.py").main(arguments) == 1
    assert "already holds a run: resume it with --resume" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == "precious"
    assert load_script("launch/train.py").main([*arguments, "--resume"]) == 1
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.slow
def test_images_kept_spilled_or_read_again_train_the_same_weights(small, tmp_path):
    train = [sys.executable, "launch/train.py", "--deepspeed_config", str(small)]
    train += [
        "--set",
        "dsclr.run.max_steps=3",
        "--set",
        "train_micro_batch_size_per_gpu=4",
        "--set",
        "dsclr.step.retain=0",
    ]
    for mode in ("keep", "spill", "reread"):
        command([*train, "--set", f"dsclr.run.name={mode}", "--set", f"dsclr.step.host_images={mode}"], tmp_path)
    kept, spilled, reread = (weights(tmp_path / f"runs/{mode}/adapter") for mode in ("keep", "spill", "reread"))
    for name, value in kept.items():
        assert torch.equal(value, spilled[name])
        assert torch.equal(value, reread[name])
    forecast = json.loads((tmp_path / "runs/keep/plan.json").read_text())
    assert forecast["setting"]["rows"] == 16
    assert forecast["host"]["images in memory"] == 16 * 3 * 64 * 64
    assert 0 < forecast["peak_bytes"] < 1e9
    line = lines(tmp_path / "runs/keep/metrics.jsonl")[-1]
    assert (line["micro_batch_size"], line["retained"], line["recoveries"]) == (4, 0, 0)


def test_a_full_disk_is_named_with_what_may_lie_on_it(capsys):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert load_script("launch/train.py")._failed(full, 0, None, True, "runs/mine") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: No space left on device in runs/mine or ")
    assert line.endswith("(temporary files): make room, then go on with --resume auto")


def test_verify_from_the_command_line(small, tmp_path):
    result = command([sys.executable, "launch/train.py", "--deepspeed_config", str(small), "--verify"], tmp_path)
    assert "gradients agree" in result.stdout
    assert not (tmp_path / "runs").exists()
