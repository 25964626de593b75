"""Local copies of shards that cannot be read in place: remote, compressed, or the output of a command."""

from __future__ import annotations

import errno
import gzip
import hashlib
import logging
import os
import random
import subprocess
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dsclr.data.shards import Shard, file_system

logger = logging.getLogger(__name__)

# Tries at a remote shard, and the seconds before the second one; each further wait is twice as long.
ATTEMPTS = 4
FIRST_WAIT = 1.0
# A copy handed out so many seconds ago is not evicted: who asked for it has still to open it.
IN_USE_SECONDS = 5.0


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dsclr``, by default ``~/.cache/dsclr``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsclr"


@dataclass(frozen=True)
class ShardCache:
    """A folder of unpacked copies, shared by all processes of a machine.

    Attributes:
        folder: of the cache.
        limit_bytes: what the copies may take; the least recently used go first. None: no limit.
    """

    folder: Path
    limit_bytes: int | None = None

    def local(self, shard: Shard) -> Path:
        """A local uncompressed tar: the shard itself, or its copy, made now if need be.

        Processes may ask at once: one makes the copy, the others wait for it.

        Raises:
            OSError: unreadable or missing shard, a command that fails, or a full disk.
            ConfigError: an address of an unknown kind.
        """
        if not self._needs_copy(shard):
            return Path(shard.address)
        copy = self._copy(shard)
        while True:
            if not copy.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{copy}.lock"):
                    if not copy.is_file():
                        self._make(shard, copy)
            # Another process may have evicted it meanwhile.
            with suppress(FileNotFoundError):
                os.utime(copy, (time.time(), copy.stat().st_mtime))
                return copy

    def is_ready(self, shard: Shard) -> bool:
        """Whether :meth:`local` has nothing to do."""
        return not self._needs_copy(shard) or self._copy(shard).is_file()

    def prepare(self, shards: Sequence[Shard]) -> None:
        """As :meth:`local`, leaving out what another process is at. Failures are left to the reader."""
        for shard in shards:
            self._prepare(shard)

    def _prepare(self, shard: Shard) -> None:
        copy = self._copy(shard)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{copy}.lock", blocking=False):
                if not copy.is_file():
                    self._make(shard, copy)
        except Timeout:
            return
        except Exception as error:
            logger.debug("%s was not fetched ahead: %s", shard, error)

    def _needs_copy(self, shard: Shard) -> bool:
        return not shard.is_local or _is_compressed(shard)

    def _copy(self, shard: Shard) -> Path:
        identity = hashlib.blake2b(shard.address.encode(), digest_size=16).hexdigest()
        return self.folder / "shards" / f"{fingerprint(Path(shard.address)) if shard.is_local else identity}.tar"

    def _make(self, shard: Shard, copy: Path) -> None:
        handle, name = tempfile.mkstemp(dir=copy.parent, suffix=".part")
        os.close(handle)
        temporary = Path(name)
        try:
            source = Path(shard.address)
            if not shard.is_local:
                source = temporary
                _fetch_patiently(shard, temporary)
            if _is_compressed(shard):
                temporary = _unpacked(source, temporary, shard)
            os.utime(temporary)
            os.replace(temporary, copy)
        finally:
            temporary.unlink(missing_ok=True)
            Path(name).unlink(missing_ok=True)
        self._evict(copy)

    def _evict(self, newest: Path) -> None:
        if self.limit_bytes is None:
            return
        copies = []
        for path in newest.parent.glob("*.tar"):
            try:
                copies.append((path.stat().st_atime, path.stat().st_size, path))
            except FileNotFoundError:
                continue  # another process was faster
        total = sum(size for _, size, _ in copies)
        for used, size, path in sorted(copies):
            if total <= self.limit_bytes:
                return
            if path != newest and used < time.time() - IN_USE_SECONDS:
                # A process that reads it has it open and is not disturbed.
                path.unlink(missing_ok=True)
                total -= size


def _is_compressed(shard: Shard) -> bool:
    return shard.name.endswith((".gz", ".tgz"))


def _fetch_patiently(shard: Shard, target: Path) -> None:
    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch(shard, target)
            return
        except FileNotFoundError:
            raise
        except Exception as error:
            # Each kind of store has exceptions of its own.
            if attempt == ATTEMPTS or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                raise OSError(f"{shard} cannot be fetched after {attempt} attempt(s): {error}") from error
            logger.warning("%s: %s; attempt %d of %d failed, the next in %.0f s", shard, error, attempt, ATTEMPTS, wait)
            # Not all processes at the same moment.
            time.sleep(wait * random.uniform(0.75, 1.25))
            wait *= 2


def _fetch(shard: Shard, target: Path) -> None:
    if shard.is_pipe:
        command = shard.address.removeprefix("pipe:")
        with target.open("wb") as out:
            result = subprocess.run(command, shell=True, stdout=out, stderr=subprocess.PIPE, check=False)
        if result.returncode:
            said = result.stderr.decode("utf-8", "replace").strip()[-300:]
            raise OSError(f"{command!r} failed with exit status {result.returncode}: {said}")
        return
    system, path = file_system(shard.address)
    system.get_file(path, str(target))
    expected = system.info(path).get("size")
    if expected is not None and target.stat().st_size != expected:
        raise OSError(f"{target.stat().st_size:,} of {expected:,} bytes arrived")


def _unpacked(source: Path, beside: Path, shard: Shard) -> Path:
    handle, name = tempfile.mkstemp(dir=beside.parent, suffix=".part")
    try:
        with gzip.open(source, "rb") as packed, os.fdopen(handle, "wb") as target:
            try:
                # read1 hands over what it has; read would keep back up to a whole block at a cut.
                while block := packed.read1(1 << 16):
                    target.write(block)
            except (EOFError, zlib.error):
                # What came before a cut is still good; the tar index drops the incomplete last sample.
                logger.warning("%s is cut off or damaged: only its first part is used", shard)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def fingerprint(path: Path) -> str:
    """A name for this content of this file: changes when the file is replaced."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
