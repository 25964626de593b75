"""The folder that is written: whose it is, and files that are complete or absent."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dsclr.config import ConfigError

PLAN = "make_shards.json"
CHECKS = "make_shards.checks"
SKIPPED = "skipped.jsonl"
PART = ".part"
# Of a plan, beside the options.
ROWS = "number of rows"
CONTENT = "content of the rows (a hash)"

# Characters of an option's value that a message shows.
MOST_SHOWN = 80

# A killed run's processes leave at once, but not before the next run can start.
LOCK_SECONDS = 10.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and keep it from other processes.

    Raises:
        ConfigError: it is a file, or another process is at work in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file, a folder is needed")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"--output: another process is making shards in {folder}: wait for it or end it"
                    ) from None
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that stands under its name only when all of it is on the disk."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    with written_whole(path) as file:
        file.write(to_json(value, indent=2) + b"\n")


def to_json(value: Any, indent: int | None = None) -> bytes:
    """UTF-8; the lone surrogates of file names that are no text become JSON's own escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode("utf-8", "backslashreplace")


def tars(folder: Path) -> list[str]:
    """Names of the shards in a folder, compressed ones too."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith((".tar", ".tar.gz", ".tgz")))


def read_plan(folder: Path) -> dict[str, Any] | None:
    """What the run that began this folder wrote down; None: nothing was begun.

    Raises:
        ConfigError: the folder is not ours to write into.
    """
    try:
        return json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise ConfigError(f"--output: {folder / PLAN} is damaged ({error}): choose another folder") from None
    others = [*tars(folder), *(n for n in ("index.json", "index-heldout.json", SKIPPED) if (folder / n).exists())]
    if others:
        raise ConfigError(f"--output: {folder} holds other data ({others[0]}): choose an empty or a new folder")
    return None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two plans do not have in common, as "--seed: 0 -> 1"; the content of the rows only if nothing else."""
    different = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    # Other options make other rows.
    options = [name for name in different if name not in (ROWS, CONTENT)]
    lines = [f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in options or different[:1]]
    return ["paths, captions or columns of the rows: changed"] if different == [CONTENT] else lines


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value, ensure_ascii=False)
    # The end of a long path says more than its middle.
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2 - 3]}...{text[-MOST_SHOWN // 2 :]}"
