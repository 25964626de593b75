"""Whether a tar file is whole."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

_BLOCK = 512
# Bytes read at once where zeros are expected.
_READ = 1 << 20


def find_damage(path: Path) -> str | None:
    """What is wrong with an uncompressed tar whose first part can be read; None: it is whole.

    Training reads the samples before the damage and never those behind it. Only headers are read.

    Raises:
        OSError, tarfile.TarError: nothing of it can be read.
    """
    size = path.stat().st_size
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        while True:
            start = tar.offset
            try:
                member = tar.next()
            except tarfile.TarError as error:
                return f"damaged at byte {start:,} of {size:,} ({error}): what stands there and after it is never read"
            if member is None:
                return end_damage(file.fileno(), tar.offset, size)
            tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header it has seen
            if member.isfile() and member.offset_data + member.size > size:
                return f"cut off at byte {size:,}, in {member.name}: that sample is left out"


def end_damage(descriptor: int, end: int, size: int) -> str | None:
    """What is wrong behind the last member: zeros are due, at least one block of them.

    Args:
        descriptor: of the open file, of ``size`` bytes.
        end: where tarfile stopped.
    """
    mark = os.pread(descriptor, _BLOCK, end)
    if len(mark) < _BLOCK:
        return f"ends at byte {size:,} without the end mark of a tar file: perhaps cut off between two members"
    if any(mark):
        # tarfile ends there without a word.
        return (
            f"is damaged at byte {end:,} of {size:,}, no header is there: what stands there and after it is never read"
        )
    at = end
    while rest := os.pread(descriptor, _READ, at):
        if any(rest):
            return f"goes on after its end mark at byte {end:,} of {size:,} (tar files put together?): never read"
        at += len(rest)
    return None
