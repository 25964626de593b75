"""Where each sample of a tar shard lies, so that any sample can be read without reading those before it."""

from __future__ import annotations

import json
import os
import posixpath
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from webdataset.tariterators import base_plus_ext

from dsclr.config import ConfigError
from dsclr.data.cache import fingerprint
from dsclr.data.tars import TarScan

# Of this format: an index in another one is made anew. 2: with what is wrong with the shard.
_MAGIC = b"dsclrix2"


@dataclass(frozen=True)
class Entry:
    """One sample: its key and, by lower-case extension, (offset, bytes) of every member."""

    key: str
    members: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class TarIndex:
    """
    Attributes:
        entries: the samples.
        damage: what is wrong with the file, as "is cut off at ..."; None: nothing.
        left_out: further members that are never read, as "has 2 members that are left out: ...".
    """

    entries: list[Entry]
    damage: str | None = None
    left_out: tuple[str, ...] = ()


def index_tar(path: Path) -> TarIndex:
    """Scan the headers of an uncompressed tar. Consecutive members with one base name form a sample.

    A tar that ends early or is damaged yields the complete samples before that point. Of members with the same name in
    a sample the first counts. Links, devices and sparse files are left out.

    Raises:
        ConfigError: the file is no tar at all.
        OSError: it cannot be read.
    """
    entries: list[Entry] = []
    left_out: Counter[str] = Counter()
    scan = TarScan(path)
    try:
        for member in scan:
            # Hidden files: macOS puts one beside each file, which would cut every sample in two.
            if member.isdir() or posixpath.basename(member.name).startswith("."):
                continue
            # The bytes of a sparse file do not lie in the tar as they are read.
            if not member.isfile() or member.issparse():
                left_out["they are links, devices or sparse files"] += 1
                continue
            base, extension = base_plus_ext(member.name)
            if base is None or not extension:
                continue
            if scan.damage is not None:
                if entries and entries[-1].key == base:
                    entries.pop()
                break
            if not entries or entries[-1].key != base:
                entries.append(Entry(base, {}))
            elif extension.lower() in entries[-1].members:
                left_out["their sample has one of that name already"] += 1
                continue
            entries[-1].members[extension.lower()] = member.offset_data, member.size
    except tarfile.ReadError as error:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        hint = " (it is compressed with gzip: name it .tar.gz)" if packed else ""
        raise ConfigError(f"{path} is not a tar file: {error}{hint}") from None
    told = tuple(f"has {count:,} member(s) that are left out: {why}" for why, count in left_out.items())
    return TarIndex(entries, scan.damage, told)


class ShardIndex(Sequence[Entry]):
    """The entries of a shard, read from a file one by one: in memory they would take as much in every process.

    Attributes:
        damage, left_out: of :class:`TarIndex`.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError for a file of another kind."""
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        header = len(_MAGIC)
        if bytes(self._bytes[:header]) != _MAGIC:
            raise ValueError(f"{path} is no index of this version")
        count = int(self._bytes[header : header + 8].view(np.int64)[0])
        # Behind the entries stands what was found beside them.
        self._starts = self._bytes[header + 8 : header + 24 + 8 * count].view(np.int64)
        if len(self._starts) != count + 2 or int(self._starts[-1]) != len(self._bytes):
            raise ValueError(f"{path} is incomplete")
        self.damage, self.left_out = self._json(count)

    @property
    def flaws(self) -> list[str]:
        """All that is never read, in words; empty for a shard as it should be."""
        return [*([] if self.damage is None else [self.damage]), *self.left_out]

    def __len__(self) -> int:
        return len(self._starts) - 2

    @overload
    def __getitem__(self, i: int) -> Entry: ...

    @overload
    def __getitem__(self, i: slice) -> list[Entry]: ...

    def __getitem__(self, i: int | slice) -> Entry | list[Entry]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        key, members = self._json(i)
        return Entry(key, {name: (at, size) for name, at, size in members})

    def _json(self, i: int) -> Any:
        return json.loads(self._bytes[int(self._starts[i]) : int(self._starts[i + 1])].tobytes())

    @staticmethod
    def write(path: Path, index: TarIndex) -> None:
        values: list[Any] = [[e.key, [[name, *place] for name, place in e.members.items()]] for e in index.entries]
        lines = [json.dumps(value).encode() for value in [*values, [index.damage, index.left_out]]]
        first = len(_MAGIC) + 16 + 8 * len(lines)
        starts = np.cumsum([first, *map(len, lines)], dtype=np.int64)
        with path.open("wb") as out:
            out.write(_MAGIC + np.int64(len(index.entries)).tobytes() + starts.tobytes() + b"".join(lines))


def load_index(path: Path, cache_dir: Path) -> ShardIndex:
    """:func:`index_tar`, remembered in ``cache_dir`` until the shard changes.

    Raises:
        ConfigError: the file is no tar at all.
        OSError: it cannot be read, or the cache not written.
    """
    cached = cache_dir / "index" / f"{fingerprint(path)}.idx"
    try:
        return ShardIndex(cached)
    except (OSError, ValueError):
        pass  # not there, or written by an interrupted or older run: made anew
    index = index_tar(path)
    cached.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=cached.parent, suffix=".part")
    os.close(handle)
    ShardIndex.write(Path(temporary), index)
    os.replace(temporary, cached)
    return ShardIndex(cached)
