"""From what the user wrote to a list of shards, wherever they lie."""

from __future__ import annotations

import glob
import json
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from braceexpand import braceexpand

from dsclr.config import ConfigError

DEMO = Path(__file__).parent / "demo"
# The index that webdataset's widsindex and tools/make_shards.py write.
INDEX_KIND = "wids-shard-index-v1"
# Packages of which fsspec makes a file system, by the extra that installs them.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


@dataclass(frozen=True)
class Shard:
    """A tar file.

    Attributes:
        address: a local path, a URL of a kind that fsspec knows, or ``pipe:COMMAND``.
        samples: how many an index says there are; None: it has to be counted.
    """

    address: str
    samples: int | None = None

    @property
    def is_local(self) -> bool:
        return not (self.is_pipe or "://" in self.address)

    @property
    def is_pipe(self) -> bool:
        return self.address.startswith("pipe:")

    @property
    def name(self) -> str:
        """The file's own name; of a pipe the command."""
        if self.is_pipe:
            return self.address
        return posixpath.basename(self.address if self.is_local else self.address.split("?")[0])

    def __str__(self) -> str:
        return self.address


def expand_shards(
    patterns: str | Sequence[str], where: str = "dsclr.data.train", allow_pipe: bool = False
) -> list[Shard]:
    """All shards that the patterns name, in order; local ones are checked to exist.

    Args:
        patterns: paths or URLs, also with braces (``shard-{000000..000099}.tar``) or as globs; index files
            (``index.json`` of webdataset, or a ``.txt`` file with an address a line; lines that begin with ``#`` are
            comments); ``pipe:COMMAND``; or
            ``demo:NAME`` (``demo:fluent-train``, ``demo:noto-heldout``, ``demo:train`` for both styles, ...).
        where: the configuration path, for messages.
        allow_pipe: whether shell commands may run.

    Raises:
        ConfigError: nothing matches, a shard is missing, or an address that cannot be read.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ConfigError(f"{where} is an empty list: name at least one shard")
    shards: list[Shard] = []
    for pattern in patterns:
        shards += _expand(pattern, where, allow_pipe)
    missing = [Path(shard.address) for shard in shards if shard.is_local and not Path(shard.address).is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more of {len(shards)})" if len(missing) > 1 else ""
        hint = " (it is a folder: name the files in it, such as FOLDER/*.tar)" if missing[0].is_dir() else ""
        raise ConfigError(f"{where}: shard {missing[0]} does not exist{more}{hint}")
    return shards


def _expand(pattern: str, where: str, allow_pipe: bool) -> list[Shard]:
    if pattern.startswith("demo:"):
        return _demo(pattern.removeprefix("demo:"), where)
    if not pattern.strip():
        raise ConfigError(f"{where}: an empty name; a path, URL, glob, brace pattern or demo:NAME is expected")
    if pattern.startswith("pipe:") and not allow_pipe:
        raise ConfigError(
            f"{where}: {pattern!r} runs a shell command, which dsclr.data.allow_pipe = true permits; for object stores "
            "no command is needed, name s3://..., gs://... or https://..."
        )
    if "{}" in pattern:
        raise ConfigError(f"{where}: the braces in {pattern!r} are empty; write a range such as {{000000..000099}}")
    try:
        names = list(braceexpand(os.path.expanduser(pattern.removeprefix("file://"))))
    except ValueError as error:
        raise ConfigError(f"{where}: {pattern!r}: {error}") from None
    found: list[Shard] = []
    for name in names:
        if name.startswith("pipe:"):
            found.append(Shard(name))
        elif name.endswith((".json", ".txt")):
            found += _listed(name, where, allow_pipe)
        elif glob.has_magic(name) and "?" not in name.partition("://")[2]:
            found += [Shard(match) for match in _matches(name, where)]
        else:
            if "://" in name:
                file_system(name, where)
            found.append(Shard(name))
    return found


def _matches(name: str, where: str) -> list[str]:
    if "://" not in name:
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise ConfigError(f"{where}: nothing matches {name!r} (working folder {os.getcwd()})")
        return matches
    system, path = file_system(name, where)
    try:
        matches = sorted(str(system.unstrip_protocol(match)) for match in system.glob(path))
    except Exception as error:
        raise ConfigError(f"{where}: {name} cannot be listed: {_words(error)}") from error
    if not matches:
        raise ConfigError(f"{where}: nothing matches {name!r}")
    return matches


def _listed(name: str, where: str, allow_pipe: bool) -> list[Shard]:
    """The shards of an index file; addresses without a folder lie beside it."""
    try:
        with fsspec.open(name, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except ImportError as error:
        raise _needs_package(name, where, error) from None
    except Exception as error:
        raise ConfigError(f"{where}: the index {name} cannot be read: {_words(error)}") from error
    entries: list[tuple[str, int | None]]
    if name.endswith(".txt"):
        lines = [line.strip() for line in text.splitlines()]
        entries = [(line, None) for line in lines if line and not line.startswith("#")]
    else:
        entries = _index_entries(text, name, where)
    if not entries:
        raise ConfigError(f"{where}: the index {name} lists no shards")
    shards = []
    for address, samples in entries:
        if address.startswith("pipe:") and not allow_pipe:
            raise ConfigError(f"{where}: {name} lists {address!r}: shell commands need dsclr.data.allow_pipe = true")
        absolute = "://" in address or address.startswith("pipe:") or os.path.isabs(address)
        shards.append(Shard(address if absolute else posixpath.join(posixpath.dirname(name), address), samples))
    return shards


def _index_entries(text: str, name: str, where: str) -> list[tuple[str, int | None]]:
    try:
        index = json.loads(text)
        entries = [(str(entry["url"]), entry.get("nsamples")) for entry in index["shardlist"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{where}: {name} is no index of shards ({_words(error)}): {{"__kind__": "{INDEX_KIND}", "shardlist": '
            '[{"url": ..., "nsamples": ...}, ...]} is expected, as tools/make_shards.py writes it'
        ) from None
    for address, samples in entries:
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
            raise ConfigError(f"{where}: {name} says that {address} has {samples!r} samples")
    return entries


def file_system(address: str, where: str = "dsclr.data") -> tuple[Any, str]:
    """(fsspec file system, path in it) of a URL.

    Raises:
        ConfigError: an unknown kind of address, or one whose package is missing.
    """
    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise _needs_package(address, where, error) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {address!r}: {error}") from None


def _needs_package(address: str, where: str, error: ImportError) -> ConfigError:
    extra = _EXTRAS.get(address.partition("://")[0])
    how = f"pip install 'dsclr[{extra}]'" if extra else "install it"
    return ConfigError(f"{where}: {address}: a package is missing ({error}): {how}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _demo(name: str, where: str) -> list[Shard]:
    shards = sorted(DEMO.glob(f"{name}-*.tar.gz")) or sorted(DEMO.glob(f"*-{name}-*.tar.gz"))
    if not shards or glob.has_magic(name):
        sets = sorted({shard.name.rsplit("-", 1)[0] for shard in DEMO.glob("*.tar.gz")})
        splits = sorted({one.split("-", 1)[1] for one in sets})
        raise ConfigError(f"{where}: demo:{name} is not one of {', '.join('demo:' + s for s in sets + splits)}")
    return [Shard(str(shard)) for shard in shards]
