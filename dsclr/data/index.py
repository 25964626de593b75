"""Where each sample of a tar shard lies, so that any sample can be read without reading those before it."""

from __future__ import annotations

import json
import logging
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from webdataset.tariterators import base_plus_ext

from dsclr.config import ConfigError
from dsclr.data.shards import fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One sample: its key and, by lower-case extension, (offset, bytes) of every member."""

    key: str
    members: dict[str, tuple[int, int]]


def index_tar(path: Path) -> list[Entry]:
    """Scan the headers of an uncompressed tar. Consecutive members with one base name form a sample.

    A tar that ends early yields its complete samples. Of members with the same name in a sample the first
    counts.

    Raises:
        ConfigError: the file is no tar at all.
        OSError: it cannot be read.
    """
    entries: list[Entry] = []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            for member in _members(tar, path):
                if not member.isfile():
                    continue
                base, extension = base_plus_ext(member.name)
                if base is None or not extension:
                    continue
                if member.offset_data + member.size > size:
                    logger.warning("%s is cut off in %s: that sample is left out", path, member.name)
                    if entries and entries[-1].key == base:
                        entries.pop()
                    break
                if not entries or entries[-1].key != base:
                    entries.append(Entry(base, {}))
                entries[-1].members.setdefault(extension.lower(), (member.offset_data, member.size))
    except tarfile.ReadError as error:
        raise ConfigError(f"{path} is not a tar file: {error}") from None
    return entries


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    while True:
        try:
            member = tar.next()
        except tarfile.TarError as error:
            logger.warning("%s is damaged (%s): samples after that point are left out", path, error)
            return
        if member is None:
            return
        tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header it has seen
        yield member


def load_index(path: Path, cache_dir: Path) -> list[Entry]:
    """:func:`index_tar`, remembered in ``cache_dir`` until the shard changes."""
    cached = cache_dir / "index" / f"{fingerprint(path)}.json"
    try:
        rows = json.loads(cached.read_text(encoding="utf-8"))
        return [Entry(key, {name: (at, size) for name, at, size in members}) for key, members in rows]
    except (OSError, ValueError):
        pass  # not there, or written by an interrupted or older run: made anew
    entries = index_tar(path)
    rows = [[e.key, [[name, at, size] for name, (at, size) in e.members.items()]] for e in entries]
    cached.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=cached.parent, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(rows, out, separators=(",", ":"))
    os.replace(temporary, cached)
    return entries
