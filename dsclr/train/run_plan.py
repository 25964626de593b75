"""What a configuration means, worked out and checked before anything slow starts."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsclr.config import Config, ConfigError
from dsclr.data import build_train_dataset, expand_shards
from dsclr.data.dataset import ShardDataset
from dsclr.losses import build_loss
from dsclr.models import (
    ImageSettings,
    check_model,
    get_tokenizer,
    image_settings,
)
from dsclr.report.run_folder import RunFolder
from dsclr.train.engine import engine_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """A checked run.

    Attributes:
        config: with batch keys filled in.
        folder: of the run.
        dataset: of the training rows.
        tokenizer, settings: of the model.
        total_steps: length of the run.
    """

    config: Config
    folder: RunFolder
    dataset: ShardDataset
    tokenizer: Any
    settings: ImageSettings
    total_steps: int

    def describe(self) -> dict[str, Any]:
        """For --dry-run: the resolved JSON and what follows from it."""
        raw = self.config.raw
        samples = self.dataset.order.epoch_samples
        return {
            "config": self.config.resolved(),
            "run_folder": str(self.folder.path),
            "train_shards": len(self.dataset.reader.shards),
            "train_samples": samples,
            "total_steps": self.total_steps,
            "epochs": self.total_steps * raw["train_batch_size"] / samples,
            "micro_batches_per_step": raw["gradient_accumulation_steps"],
        }


def make_plan(config: Config, world_size: int, device: torch.device) -> Plan:
    """Check everything that can be checked without building the model.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    config = config.with_world_size(world_size)
    ours = config.dsclr
    folder = RunFolder(Path(ours.run.dir) / ours.run.name)
    engine_config(config, 1, "", device)
    build_loss(ours.loss, ours.objective)
    check_model(ours.model)
    if ours.eval.data is not None:
        if ours.objective == "simclr":
            raise ConfigError("dsclr.eval.data: retrieval needs captions, which objective simclr does not train on")
        expand_shards(ours.eval.data, "dsclr.eval.data", ours.data.allow_pipe)
    spill_dir = ours.step.spill_dir
    if spill_dir is not None and not (Path(spill_dir).is_dir() and os.access(spill_dir, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"dsclr.step.spill_dir = {spill_dir}: not a folder one can write to; make it, or name "
            "one on a disk with room for a batch's images"
        )
    settings = image_settings(ours.model)
    tokenizer = get_tokenizer(ours.model) if ours.objective == "clip" else None
    dataset = build_train_dataset(ours.data, ours.objective, settings, tokenizer, ours.run.seed)
    if ours.run.max_steps is not None:
        total_steps = ours.run.max_steps
    else:
        samples = (ours.run.epochs or 0) * dataset.order.epoch_samples
        total_steps = max(1, math.floor(samples / config.train_batch_size))
    if config.train_batch_size > dataset.order.epoch_samples:
        logger.warning(
            "train_batch_size = %d is more than the %d samples of dsclr.data.train: a batch holds samples several "
            "times, which are no negatives of each other",
            config.train_batch_size,
            dataset.order.epoch_samples,
        )
    return Plan(config, folder, dataset, tokenizer, settings, total_steps)
