"""runs/<name>/: one run, its resolved configuration and everything it wrote."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsclr.config import Config, ConfigError
from dsclr.report.metrics import truncate_after, write_atomically
from dsclr.report.run_lock import LOCK

logger = logging.getLogger(__name__)

_PACKAGES = ("dsclr", "torch", "torchvision", "deepspeed", "open_clip_torch", "peft", "webdataset", "numpy", "pillow")
# A resumed run must be the same model and go on in the same order of samples; all else may change and is reported.
_FIXED = (
    "dsclr.objective",
    "dsclr.model",
    "train_batch_size",
    "dsclr.run.seed",
    "dsclr.data.train",
    "dsclr.data.resampled",
    "dsclr.data.shuffle",
)

# What a run writes before its config.json.
_OF_A_START = ("tensorboard", "config.json.part", LOCK)
# In config.json beside the configuration.
BESIDE = _VERSIONS, _SHARDS = "versions", "shards"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped.jsonl"

    @property
    def bad_steps(self) -> Path:
        return self.path / "bad_steps.jsonl"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def check(self, config: Config, shards: dict[str, Any], resume: str | None) -> None:
        """Refuse to mix two runs.

        Args:
            shards: see :meth:`dsclr.data.dataset.ShardDataset.contents`.
            resume: see :func:`dsclr.train.train`.

        Raises:
            ConfigError: a new run where another is, or a resumed one that is not the same.
        """
        if resume is None:
            if not self._is_empty():
                raise ConfigError(
                    f"{self.path} already holds a run: resume it with --resume, choose another "
                    "--set dsclr.run.name=NAME, or delete the folder"
                )
            return
        if resume == "auto" and self._has_no_step():
            return
        if not self.config.is_file():
            raise ConfigError(f"--resume: {self.path} holds no run (no {self.config.name}); start it without --resume")
        try:
            before = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--resume: {self.config} is unreadable: {error}") from None
        # A run of an earlier version did not write its shards down.
        changed = dict(differences(before.pop(_SHARDS, shards), shards))
        if changed:
            raise ConfigError(
                f"--resume: dsclr.data.train names other shards than {self.path} began with ("
                + ", ".join(f"{key} {json.dumps(old)}, now {json.dumps(new)}" for key, (old, new) in changed.items())
                + "): the order of samples would be another. Name those it began with, or start another run"
            )
        before.pop(_VERSIONS, None)
        changed = dict(differences(before, config.resolved()))
        # All that is refused comes before any word on what is not.
        for key, (old, new) in sorted(changed.items(), key=lambda item: not item[0].startswith(_FIXED)):
            if key.startswith(_FIXED):
                raise ConfigError(
                    f"--resume: {key} was {json.dumps(old)} in {self.path} and is {json.dumps(new)} now: "
                    "restore it, or start another run"
                )
            logger.info("resuming with %s = %s (was %s)", key, json.dumps(new), json.dumps(old))

    def _is_empty(self) -> bool:
        return not self.path.exists() or (self.path.is_dir() and all(path.name == LOCK for path in self.path.iterdir()))

    def _has_no_step(self) -> bool:
        """Whether this is at most a run that ended before its first checkpoint, of which nothing has to be kept."""
        if self._is_empty():
            return True
        is_ours = self.config.is_file() or all(path.name in _OF_A_START for path in self.path.iterdir())
        # Damaged ones count.
        return is_ours and not any(self.checkpoints.glob("step-" + "[0-9]" * 8))

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps, which a resumed run writes again."""
        for path in (self.metrics, self.evaluations, self.skipped, self.bad_steps):
            truncate_after(path, step)

    def sync(self) -> None:
        """Bring the lines so far to the disk: a checkpoint stands for them."""
        for path in (self.metrics, self.evaluations, self.skipped, self.bad_steps):
            if path.is_file():
                with path.open("rb") as lines:
                    os.fsync(lines.fileno())

    def write_state(self, state: str, step: int) -> None:
        """For whoever started the run: "running", "interrupted", "stopped", "done" or "failed".

        A run that was killed still says running. Process 0 of the run takes signals for all ranks.

        Args:
            step: of the newest checkpoint while it is running, else the last.
        """
        record = {"state": state, "step": step, "host": platform.node(), "pid": os.getpid()}
        write_atomically(self.state, json.dumps(record) + "\n")

    def write_config(self, config: Config, shards: dict[str, Any]) -> None:
        """The resolved configuration, the versions that made the run, and what it trains on."""
        self.path.mkdir(parents=True, exist_ok=True)
        resolved = {**config.resolved(), _VERSIONS: versions(), _SHARDS: shards}
        write_atomically(self.config, json.dumps(resolved, indent=2) + "\n")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(key, (old, new)) where two nests of dicts are not equal; keys are joined by dots."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, (old, new)
