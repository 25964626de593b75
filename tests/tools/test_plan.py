"""tools/plan.py as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import of_a_user

ROOT = Path(__file__).parents[2]


def plan(*words):
    return subprocess.run(
        [sys.executable, "tools/plan.py", *words],
        cwd=ROOT,
        env=of_a_user(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_table_and_json(tmp_path):
    out = tmp_path / "plan.json"
    result = plan(
        *("--deepspeed_config", "ds_configs/quickstart.json", "--device-memory", "200MB", "--gpus", "2"),
        *("--set", "train_micro_batch_size_per_gpu=64", "--set", "dsclr.negatives.across_ranks=gather"),
        *("--batches", "128", "1024", "--json", str(out)),
    )
    assert result.returncode == 0, result.stderr
    assert "| rows | 64 | 64 |" in result.stdout
    assert "| 1,024 |" in result.stdout
    written = json.loads(out.read_text())
    assert [entry["train_batch_size"] for entry in written["batches"]] == [128, 1024]
    assert written["best"]["peak_bytes"] <= 0.9 * 200e6
    # What fits with every graph kept runs each row once.
    assert written["best"]["setting"]["forwards"] < 2
    per_row = written["per_row_bytes"]
    assert per_row["with checkpointing"]["graph"] < per_row["without checkpointing"]["graph"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--device-memory", "much"], 1, "no size in bytes"),
        (["--device-memory", "80"], 1, "write a unit, as in 80GB"),
        (["--gpus", "3"], 1, "does not divide over 3 ranks"),
        (["--gpus", "2", "--batches", "7"], 2, "--batches 7: a positive multiple of --gpus 2 is needed"),
        (["--json", "/nowhere/plan.json"], 1, "the folder /nowhere does not exist"),
        (["--set", "dsclr.loss.name=nowhere:Loss"], 1, "nowhere"),
        (
            [
                *("--set", "dsclr.model.lora=null", "--set", "dsclr.model.lock_image=true"),
                *("--set", "dsclr.model.lock_text=true", "--set", "dsclr.model.logit_scale.learnable=false"),
            ],
            1,
            "nothing to train",
        ),
    ],
)
def test_mistakes_are_told(words, status, message):
    result = plan("--deepspeed_config", "ds_configs/quickstart.json", *words)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
