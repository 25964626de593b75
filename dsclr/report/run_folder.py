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

logger = logging.getLogger(__name__)

_PACKAGES = ("dsclr", "torch", "torchvision", "deepspeed", "open_clip_torch", "peft", "webdataset", "numpy", "pillow")
# A resumed run must be the same model; everything else may change and is reported.
_FIXED = ("dsclr.objective", "dsclr.model", "train_batch_size", "dsclr.run.seed", "dsclr.data.train")


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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def check(self, config: Config, resume: bool) -> None:
        """Refuse to mix two runs.

        Raises:
            ConfigError: a new run where another is, or a resumed one that is not the same.
        """
        if not resume:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise ConfigError(
                    f"{self.path} already holds a run: resume it with --resume, choose another "
                    "--set dsclr.run.name=NAME, or delete the folder"
                )
            return
        if not self.config.is_file():
            raise ConfigError(f"--resume: {self.path} holds no run (no {self.config.name}); start it without --resume")
        try:
            before = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--resume: {self.config} is unreadable: {error}") from None
        changed = dict(_differences(before, config.resolved()))
        # All that is refused comes before any word on what is not.
        for key, (old, new) in sorted(changed.items(), key=lambda item: not item[0].startswith(_FIXED)):
            if key.startswith(_FIXED):
                raise ConfigError(
                    f"--resume: {key} was {json.dumps(old)} in {self.path} and is {json.dumps(new)} now: "
                    "restore it, or start another run"
                )
            logger.info("resuming with %s = %s (was %s)", key, json.dumps(new), json.dumps(old))

    def write_config(self, config: Config) -> None:
        """The resolved configuration and the versions that made the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        resolved = {**config.resolved(), "versions": versions()}
        write_atomically(self.config, json.dumps(resolved, indent=2) + "\n")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if path == "" and key == "versions":
                continue
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, (old, new)
