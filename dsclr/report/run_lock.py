"""One job at a time writes into a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsclr.config import ConfigError

logger = logging.getLogger(__name__)

LOCK = "lock"
_POLL_SECONDS = 0.5


@contextmanager
def only_job(folder: Path, patience_seconds: float = 0) -> Iterator[None]:
    """Hold a run folder, which is made if need be, and is gone again if nothing was put into it.

    The system lets go of it when this process ends, however it ends, on a shared file system too.

    Args:
        patience_seconds: for a job that is about to end, such as the one that this one continues.

    Raises:
        ConfigError: another process holds it.
        OSError: the folder cannot be made or written to.
    """
    path = folder / LOCK
    handle = _open(path, time.monotonic() + patience_seconds)
    try:
        yield
    finally:
        with suppress(OSError):
            if all(other.name == LOCK for other in folder.iterdir()):
                path.unlink()
                folder.rmdir()
        os.close(handle)


def _open(path: Path, until: float) -> int:
    waits = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Not flock, which the loader processes would inherit and hold on to.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    "%s cannot be locked (%s): nothing keeps a second job from writing into this run",
                    path,
                    error.strerror,
                )
                return handle
            holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
            os.close(handle)
            if time.monotonic() > until:
                raise ConfigError(
                    f"another job trains in {path.parent} ({holder or 'it has just begun'}): wait for its end, end it, "
                    "or choose another --set dsclr.run.name=NAME"
                ) from None
            if not waits:
                logger.info("another job is in %s (%s): waiting for its end", path.parent, holder)
                waits = True
            time.sleep(_POLL_SECONDS)
            continue
        if _is_the_file(handle, path):
            os.truncate(handle, 0)
            os.pwrite(handle, json.dumps({"host": platform.node(), "pid": os.getpid()}).encode(), 0)
            return handle
        # Deleted by the job that held it.
        os.close(handle)


def _is_the_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
