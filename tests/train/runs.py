"""Whole runs in this process, on small shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dsclr.config import Config
from dsclr.train import make_plan, train
from tests.train.steps import LORA, model_file


def run_config(folder: Path, name: str, stage: int = 2, micro: int = 4, **keys: Any) -> Config:
    """Six steps on the shards of a folder, with a bank that several ranks share out.

    Args:
        keys: of dsclr.run.
    """
    return Config(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": micro,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}},
            "zero_optimization": {"stage": stage},
            "tensorboard": {"enabled": False},
            "dsclr": {
                "run": {"name": name, "dir": str(folder), "max_steps": 6, **keys},
                "model": {
                    "name": model_file(folder, context_length=16, vocab_size=49408),
                    "lora": LORA,
                    "logit_scale": {"init": 10.0},
                },
                "data": {"train": f"{folder}/s*.tar", "workers": 0, "max_bad_fraction": 1.0, "shuffle_shards": 3},
                "loss": {"name": "topk", "k": 5, "block_size": 4, "backend": "torch"},
                "negatives": {"across_ranks": "gather", "bank": {"size": 24, "sharded": True}},
            },
        }
    )


def run(world: Any, config: Config, resume: str | None = None, stop_after: int | None = None) -> None:
    plan = make_plan(config, world.world_size, world.device)
    plan.folder.check(plan.config, plan.dataset.contents(), resume)
    train(plan, world, resume=resume, stop_after=stop_after)


# In the name of a metric that no two runs share.
TIMED = ("seconds", "samples_per_second", "data_wait_share", "peak_bytes", "slowest_rank")


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without what the clock says."""
    return {key: value for key, value in line.items() if not any(word in key for word in TIMED)}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and numbers are equal, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)
