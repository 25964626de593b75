"""Files of a checkpoint that survive a crash, and how one sees that they did."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

MANIFEST = "files.json"


class Writes:
    """What this rank writes of a checkpoint. An error is kept until all ranks can hear of it: raised at once, it would
    leave the others waiting; nothing more is written after it.

    Attributes:
        error: the first.
        needed_bytes: of the tensors, written or not.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.needed_bytes = 0

    def attempt(self, work: Callable[[], Any]) -> None:
        if self.error is not None:
            return
        try:
            work()
        # torch's writer has RuntimeErrors of its own for what the system refuses it.
        except (OSError, RuntimeError) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            self.error = cause or error

    def save(self, state: Any, path: Path) -> None:
        """torch.save, down to the disk."""
        self.needed_bytes += sum(x.untyped_storage().nbytes() for x in tree_leaves(state) if isinstance(x, Tensor))

        def write() -> None:
            with path.open("wb") as out:
                torch.save(state, out)
                _sync(out)

        self.attempt(write)


def seal(folder: Path) -> None:
    """List a folder's files with their sizes in its MANIFEST, and bring the folder itself to the disk."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({"bytes": files}, out, indent=2)
        _sync(out)
    sync_folder(folder)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder (missing, truncated or changed files), or None. Reads everything once."""
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["bytes"])
    except FileNotFoundError:
        # Of a version that did not list them.
        expected = {p.name: p.stat().st_size for p in folder.glob("*.pt")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    if not expected:
        return "it is empty"
    for name, size in expected.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes of {size}"
            if path.suffix == ".pt":
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip()
                if bad is not None:
                    return f"{name} is damaged (at {bad})"
        except (OSError, zipfile.BadZipFile) as error:
            return f"{name}: {error}"
    return None


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
