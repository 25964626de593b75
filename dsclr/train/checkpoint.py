"""Checkpoints that are complete or absent, and the state a run continues from."""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from dsclr.config import ConfigError
from dsclr.data.order import Slots
from dsclr.negatives import Bank
from dsclr.train.run_state import read_run, write_run
from dsclr.train.runtime import Runtime

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})$")


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        slots: which positions of the data the ranks read.
        consumed, skipped_samples, noted_samples: of this rank's TrainLoader.
    """

    slots: Slots
    step: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    consumed: int = 0
    skipped_samples: dict[str, int] = field(default_factory=dict)
    noted_samples: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run folder.

    A checkpoint is written under a temporary name and renamed when every rank is done, so a folder called
    step-NNNNNNNN is complete. All ranks must see the same file system.

    Args:
        folder: <run>/checkpoints.
        runtime: of this process.
        keep_last: older ones are deleted.
        save_frozen: also keep weights that do not train (when they cannot be loaded again from a file).
    """

    folder: Path
    runtime: Runtime
    keep_last: int
    save_frozen: bool

    def complete(self) -> list[Path]:
        """Oldest first."""
        return complete_checkpoints(self.folder)

    def save(self, engine: Any, progress: Progress, bank: Bank | None = None) -> Path:
        """Write a checkpoint (all ranks together) and delete the oldest beyond keep_last."""
        final = self.folder / f"step-{progress.step:08d}"
        temporary = self.folder / f"{final.name}.part"
        if self.runtime.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        write_run(temporary, self.runtime, engine, vars(progress), bank, frozen=self.save_frozen)
        dist.barrier()
        if self.runtime.is_main:
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            for old in self.complete()[: -self.keep_last]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, engine: Any, checkpoint: Path, bank: Bank | None = None, seed: int = 0) -> Progress:
        """Continue from a checkpoint: weights, optimizer, scheduler, random numbers, memory bank and place in the data.

        Another number of ranks, ZeRO stage or precision than it was written with will do, see
        :func:`dsclr.train.run_state.read_run`.

        Args:
            seed: of the run.

        Raises:
            ConfigError: missing or damaged files, or another model or optimizer.
        """
        try:
            return Progress(**read_run(checkpoint, self.runtime, engine, bank, seed))
        except (OSError, RuntimeError, KeyError, EOFError) as error:
            raise ConfigError(
                f"{checkpoint} cannot be loaded ({type(error).__name__}: {error}): if it is damaged, delete it "
                "and resume from the one before"
            ) from error


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name))


def has_frozen_random_weights(model: nn.Module, pretrained: str | None, name: str) -> bool:
    """Whether there are weights that neither train nor come from a file."""
    from_file = pretrained is not None or name.startswith(("hf-hub:", "local-dir:"))
    return not from_file and any(not p.requires_grad for p in model.parameters())
