"""The members of a tar file, and whether it is whole."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 512
# Bytes read at once where zeros are expected.
_READ = 1 << 20
# Where the name stands in a header.
_NAME_BYTES = 100


class TarScan:
    """The members of an uncompressed tar in order; only headers are read.

    Attributes:
        damage: what is wrong with the file, as "is cut off at ..."; None: nothing. Known when the iteration is over,
            or already with its last member, if that one's data is cut off.

    Raises:
        OSError, tarfile.ReadError: (while iterating) nothing of it can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        size = self.path.stat().st_size
        behind = "nothing"
        with tarfile.open(self.path, "r:") as tar, self.path.open("rb") as file:
            while self.damage is None:
                start = tar.offset
                try:
                    member = tar.next()
                except tarfile.TarError as error:
                    # It was looking for more than there is: for the zeros after a member, or the rest of a long header.
                    at_end = tar.fileobj is not None and tar.fileobj.tell() >= size
                    self.damage = (
                        f"is cut off at byte {size:,}, behind {behind}: what came after that is missing"
                        if at_end
                        else f"is damaged at byte {start:,} of {size:,} ({error}): what stands there and after it is "
                        "never read"
                    )
                    return
                if member is None:
                    self.damage = _end_damage(file.fileno(), tar.offset, size, behind)
                    return
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header it has seen
                behind = member.name
                if member.isfile() and not member.issparse() and member.offset_data + member.size > size:
                    self.damage = (
                        f"is cut off at byte {size:,}, in {member.name}: that sample and what came after it are missing"
                    )
                yield member


def _end_damage(descriptor: int, end: int, size: int, behind: str) -> str | None:
    """What is wrong behind the last member: zeros are due, at least one block of them.

    Args:
        descriptor: of the open file, of ``size`` bytes.
        end: where tarfile stopped.
        behind: name of the last member.
    """
    mark = os.pread(descriptor, _BLOCK, end)
    if len(mark) < _BLOCK and any(mark):
        name = _header_name(mark) or f"the member behind {behind}"
        return f"is cut off at byte {size:,}, in the header of {name}: this member and what came after it are missing"
    if len(mark) < _BLOCK:
        return (
            f"ends at byte {size:,}, behind {behind}, without the end mark of a tar file: perhaps cut off between two "
            "members"
        )
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


def _header_name(start: bytes) -> str | None:
    """The member's name in the first bytes of its header; None: not all of it, or it stands elsewhere."""
    name, end, _ = start[:_NAME_BYTES].partition(b"\0")
    # Headers that only hold a long name or further attributes of the next one are called so.
    if not name or name.startswith(b"././@") or b"PaxHeader" in name or not (end or len(start) >= _NAME_BYTES):
        return None
    return name.decode("utf-8", "replace")
