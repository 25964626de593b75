"""Several ranks take the step of one process on the concatenated batch."""

from __future__ import annotations

import pytest

from tests.train.steps import LORA, assert_same_step, engine_step, make_batch, make_config, plain_step, spawn


@pytest.mark.parametrize(
    ("world_size", "objective", "loss", "stage"),
    [
        (2, "clip", {"name": "topk", "k": 5, "block_size": 4}, 2),
        (4, "clip", {"name": "dense", "k": 10**6}, 1),
        (2, "simclr", {"name": "topk", "k": 5, "block_size": 4}, 0),
    ],
)
def test_gathered_ranks_equal_one_process(tmp_path, world_size, objective, loss, stage):
    towers = ["image", "text"] if objective == "clip" else ["image"]
    config = make_config(
        tmp_path,
        {"lora": {**LORA, "towers": towers}},
        train_micro_batch_size_per_gpu=1 if world_size == 4 else 3,
        zero_optimization={"stage": stage},
        dsclr={"objective": objective, "loss": loss, "negatives": {"across_ranks": "gather"}},
    )
    batch = make_batch(objective)
    reference = plain_step(config, batch)
    for result in spawn(world_size, engine_step, config, batch):
        assert_same_step(result, reference)
