"""Checkpoints that are complete or absent, and the state a run continues from."""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from dsclr.config import ConfigError
from dsclr.data.order import Slots
from dsclr.negatives import Bank
from dsclr.train.durable import Writes, damage, seal, sync_folder
from dsclr.train.run_state import read_run, write_run
from dsclr.train.runtime import Runtime
from dsclr.units import format_bytes

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})$")
# Being written or deleted; replaced by a new one that has its name in a moment.
_PART, _OLD = ".part", ".old"
# Of no use to --resume: found damaged; followed by bad steps only.
_DAMAGED, _SUSPECT = ".damaged", ".suspect"
# In a checkpoint that a finite step came after.
_GOOD = "good"


class TrainingError(RuntimeError):
    """A run that cannot go on, on all ranks alike; the message says what happened and what to do."""


class CheckpointError(TrainingError):
    """A checkpoint that could not be written."""


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

    Weights can be finite and still give nothing that is: a checkpoint is known to be good when a finite step has come
    after it (:meth:`prove`), and the newest of those is never deleted.

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
        """Write a checkpoint (all ranks together) and delete the oldest beyond keep_last.

        Everything is on the disk before the checkpoint gets its name, and every rank knows that it is.

        Raises:
            CheckpointError: on all ranks, if one of them could not write; the checkpoints before are as they were.
        """
        final = self.folder / _name(progress.step)
        temporary = self.folder / f"{final.name}{_PART}"
        writes = Writes()
        if self.runtime.is_main:
            writes.attempt(lambda: _make_empty(temporary))
        self._agree(writes, temporary)
        write_run(temporary, self.runtime, engine, vars(progress), bank, writes, frozen=self.save_frozen)
        self._agree(writes, temporary)
        if self.runtime.is_main:
            writes.attempt(lambda: self._complete(temporary, final))
        self._agree(writes, temporary)
        return final

    def _complete(self, temporary: Path, final: Path) -> None:
        """Name what is written, and delete what it replaces."""
        seal(temporary)
        if final.exists():
            # A crash between the two leaves both under names that tidy puts right.
            os.replace(final, final.with_name(final.name + _OLD))
        os.replace(temporary, final)
        sync_folder(self.folder)
        shutil.rmtree(final.with_name(final.name + _OLD), ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        complete, good = self.complete(), self.newest_good()
        for old in complete[: -self.keep_last]:
            if old != good:
                _remove(old)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that a finite step came after."""
        return next((path for path in reversed(self.complete()) if (path / _GOOD).exists()), None)

    def prove(self, step: int) -> None:
        """A finite step has come after the checkpoint of a step. One rank calls this.

        Raises:
            OSError: this could not be written down.
        """
        (self.folder / _name(step) / _GOOD).touch()
        self._prune()

    def set_aside(self, step: int) -> Path:
        """Keep a checkpoint under a name that --resume does not look at. One rank calls this.

        Returns:
            Where it is now.

        Raises:
            OSError: it could not be renamed.
        """
        return _rename(self.folder / _name(step), _SUSPECT)

    def _agree(self, writes: Writes, temporary: Path) -> None:
        """Wait for all ranks; if one could not write, give the checkpoint up on all of them."""
        answers: list[Any] = [None] * self.runtime.world_size
        own = None if writes.error is None else f"rank {self.runtime.rank}: {writes.error}"
        dist.all_gather_object(answers, (own, writes.needed_bytes))
        errors = [error for error, _ in answers if error is not None]
        if not errors:
            return
        if self.runtime.is_main:
            with suppress(OSError):
                self.tidy()
        dist.barrier()
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        complete = self.complete()
        kept = f"{complete[-1].name} is intact: make room and --resume" if complete else "there was none before it"
        raise CheckpointError(
            f"the checkpoint {temporary.name.removesuffix(_PART)} could not be written to {self.folder} "
            f"({'; '.join(errors)}): it needs {format_bytes(sum(needed for _, needed in answers))} or a little more, "
            f"{format_bytes(free)} are free; {kept}"
        )

    def tidy(self) -> None:
        """What a killed save leaves: one that was replaced gets its name back, parts go. One rank calls this."""
        if not self.folder.is_dir():
            return
        for old in self.folder.glob(f"step-*{_OLD}"):
            final = old.with_name(old.name.removesuffix(_OLD))
            if final.exists():
                shutil.rmtree(old)
            else:
                os.replace(old, final)
        for part in self.folder.glob(f"step-*{_PART}"):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()

    def choose(self, mode: str) -> Path | None:
        """The checkpoint to continue from; rank 0 looks, the others hear of it.

        Args:
            mode: "newest", or "auto": one that is not damaged, None if there is none at all.

        Raises:
            ConfigError: on all ranks, when there is none to continue from, or the newest is damaged.
        """
        found: list[Any] = [None, None]
        if self.runtime.is_main:
            self.tidy()
            complete = self.complete()
            try:
                if mode != "auto" and not complete:
                    raise ConfigError(f"--resume: {self.folder} holds no complete checkpoint")
                found[0] = self.newest_intact() if mode == "auto" else _intact(complete[-1])
            except ConfigError as error:
                found[1] = error
        dist.broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def newest_intact(self) -> Path | None:
        """The newest checkpoint that is not damaged; newer ones are set aside. None if there is none at all.

        One rank calls this.

        Raises:
            ConfigError: there are only damaged ones.
        """
        complete = self.complete()
        for checkpoint in reversed(complete):
            wrong = damage(checkpoint)
            if wrong is None:
                return checkpoint
            aside = _rename(checkpoint, _DAMAGED)
            logger.warning(
                "%s is damaged (%s): set aside as %s, the one before is tried", checkpoint, wrong, aside.name
            )
        if complete:
            raise ConfigError(
                f"--resume auto: all checkpoints of {self.folder} are damaged: restore one (they are called .damaged "
                "now), or delete the run folder to start anew"
            )
        return None

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


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _intact(checkpoint: Path) -> Path:
    wrong = damage(checkpoint)
    if wrong is not None:
        raise ConfigError(
            f"--resume: {checkpoint} is damaged ({wrong}): --resume auto sets it aside and goes on from the one before"
        )
    return checkpoint


def _rename(checkpoint: Path, ending: str) -> Path:
    aside = checkpoint.with_name(checkpoint.name + ending)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    return aside


def _remove(checkpoint: Path) -> None:
    # Half deleted it would pass for complete.
    part = checkpoint.with_name(checkpoint.name + _PART)
    os.replace(checkpoint, part)
    shutil.rmtree(part)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    found = _NAME.match(checkpoint.name)
    assert found is not None
    return int(found[1])


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name))


def has_frozen_random_weights(model: nn.Module, pretrained: str | None, name: str) -> bool:
    """Whether there are weights that neither train nor come from a file."""
    from_file = pretrained is not None or name.startswith(("hf-hub:", "local-dir:"))
    return not from_file and any(not p.requires_grad for p in model.parameters())
