"""The place among the ranks, as each launcher announces it, and what half an announcement is told."""

from __future__ import annotations

import pytest

from dsclr.config import ConfigError
from dsclr.launcher import Place, find_place
from dsclr.train import runtime
from tests.scripts import load_script

# What a launcher may leave in the environment, of which a test sets its own part.
ANNOUNCED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
# Of a task of srun: the sixth of eight, on the second of three nodes.
TASK = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def environment(monkeypatch):
    def announce(values):
        for name in ANNOUNCED:
            # First set, so that what find_place itself sets is undone in the end.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return announce


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, Place(0, 1, 0, 1)),
        (MEET, Place(0, 1, 0, 1)),
        # torchrun; deepspeed; by hand
        (
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **MEET},
            Place(9, 16, 1, 8),
        ),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8", **MEET}, Place(9, 16, 1, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEET}, Place(1, 2, 1, 2)),
        # srun; torchrun within srun; a batch script and a single task of srun, which are one process
        ({**TASK, **MEET}, Place(5, 8, 2, 3)),
        (
            {**TASK, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MEET},
            Place(0, 2, 0, 2),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Place(0, 1, 0, 1)),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1"}, Place(0, 1, 0, 1)),
    ],
)
def test_every_launcher_gives_a_place(environment, values, place):
    environment(values)
    assert find_place() == place
    # Again the same: now srun's place stands in RANK and its companions.
    assert find_place() == place


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "1"}, "holds RANK=1, but no WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start with deepspeed"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, "but no MASTER_ADDR:"),
        ({"WORLD_SIZE": "2", **MEET}, "but no RANK, LOCAL_RANK:"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEET}, "RANK=2: a whole number from 0 below WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEET}, "RANK=one: a whole number"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1", **MEET},
            "LOCAL_RANK=1: a whole number from 0 below LOCAL_WORLD_SIZE = 1 is expected",
        ),
        (TASK, "srun started 8 tasks, but the environment holds no MASTER_ADDR, MASTER_PORT: before srun, export"),
    ],
)
def test_half_a_place_is_an_error_and_no_endless_wait(environment, capsys, values, message):
    environment(values)
    assert load_script("launch/train.py").main(["--deepspeed_config", "ds_configs/quickstart.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_more_ranks_than_devices_are_an_error(environment, monkeypatch):
    class OneGpu:
        def device_name(self):
            return "cuda"

        def device_count(self):
            return 1

    environment({**TASK, **MEET})
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", OneGpu)
    with pytest.raises(ConfigError, match=r"3 ranks on this machine need a device each, but see 1: .*--gpus-per-task"):
        runtime.start()
