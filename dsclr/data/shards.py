"""From what the user wrote to a list of local tar files that can be read at any offset."""

from __future__ import annotations

import glob
import gzip
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from braceexpand import braceexpand

from dsclr.config import ConfigError

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parent / "demo"


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dsclr``, by default ``~/.cache/dsclr``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsclr"


def expand_shards(patterns: str | Sequence[str], where: str = "dsclr.data.train") -> list[Path]:
    """All shards that the patterns name, in order, each checked to exist.

    Args:
        patterns: paths, globs, brace patterns (``shard-{000000..000099}.tar``) or ``demo:NAME``
            (``demo:fluent-train``, ``demo:noto-heldout``, ``demo:train`` for both styles, ...).
        where: the configuration path, for messages.

    Raises:
        ConfigError: nothing matches, a shard is missing, or a kind of address that cannot be read.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ConfigError(f"{where} is an empty list: name at least one shard")
    shards: list[Path] = []
    for pattern in patterns:
        shards += _expand(pattern, where)
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more of {len(shards)})" if len(missing) > 1 else ""
        hint = " (it is a folder: name the files in it, such as FOLDER/*.tar)" if missing[0].is_dir() else ""
        raise ConfigError(f"{where}: shard {missing[0]} does not exist{more}{hint}")
    return shards


def _expand(pattern: str, where: str) -> list[Path]:
    if pattern.startswith("demo:"):
        return _demo(pattern.removeprefix("demo:"), where)
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ConfigError(f"{where}: {pattern!r} is not a local path; copy the shards to a local disk first")
    if not pattern.strip():
        raise ConfigError(f"{where}: an empty name; a path, glob, brace pattern or demo:NAME is expected")
    if "{}" in pattern:
        raise ConfigError(f"{where}: the braces in {pattern!r} are empty; write a range such as {{000000..000099}}")
    try:
        names = list(braceexpand(os.path.expanduser(pattern)))
    except ValueError as error:
        raise ConfigError(f"{where}: {pattern!r}: {error}") from None
    found: list[Path] = []
    for name in names:
        if glob.has_magic(name):
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise ConfigError(f"{where}: nothing matches {name!r} (working folder {os.getcwd()})")
            found += [Path(match) for match in matches]
        else:
            found.append(Path(name))
    return found


def _demo(name: str, where: str) -> list[Path]:
    shards = sorted(DEMO.glob(f"{name}-*.tar.gz")) or sorted(DEMO.glob(f"*-{name}-*.tar.gz"))
    if not shards or glob.has_magic(name):
        sets = sorted({shard.name.rsplit("-", 1)[0] for shard in DEMO.glob("*.tar.gz")})
        splits = sorted({one.split("-", 1)[1] for one in sets})
        raise ConfigError(f"{where}: demo:{name} is not one of {', '.join('demo:' + s for s in sets + splits)}")
    return shards


def local_tar(shard: Path, cache_dir: Path) -> Path:
    """The shard itself, or an unpacked copy in ``cache_dir`` when it is compressed (.tar.gz, .tgz).

    Processes may call this at once: the copy appears under its final name only when complete.

    Raises:
        OSError: unreadable shard, damaged compression or full disk.
    """
    if shard.suffix not in (".gz", ".tgz"):
        return shard
    unpacked = cache_dir / "shards" / f"{fingerprint(shard)}.tar"
    if unpacked.is_file():
        return unpacked
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=unpacked.parent, suffix=".part")
    try:
        with gzip.open(shard, "rb") as source, os.fdopen(handle, "wb") as target:
            try:
                # read1 hands over what it has; read would keep back up to a whole block at a cut.
                while block := source.read1(1 << 16):
                    target.write(block)
            except (EOFError, zlib.error):
                # What came before a cut is still good; the tar index drops the incomplete last sample.
                logger.warning("%s is cut off or damaged: only its first part is used", shard)
        os.replace(temporary, unpacked)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return unpacked


def fingerprint(path: Path) -> str:
    """A name for this content of this file: changes when the file is replaced."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
