"""One function over many items in several processes, which never outlive this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from tqdm import tqdm

from dsclr.config import ConfigError

Task = Callable[[int, Callable[[], None]], None]

REFRESH_SECONDS = 0.3

# Of a worker process: task, stop and done.
_worker: tuple[Task, Any, Any]


class Stopped(Exception):
    """Another task has failed, or the user has stopped the run."""


def in_processes(task: Task, items: Sequence[int], workers: int, bar: tqdm) -> None:
    """Call ``task(item, tick)`` for every item; it calls ``tick`` after each sample, for the bar.

    Raises:
        ConfigError: a process died.
        Exception: the first that a task raised; the other tasks are stopped then.
    """
    if not items:
        return
    # Forked processes share what this one has loaded: a data set in memory is there once.
    context = multiprocessing.get_context("fork")
    stop, done, before = context.Event(), context.Value("q", 0), bar.n
    with ProcessPoolExecutor(min(workers, len(items)), context, _start, (task, stop, done)) as pool:
        try:
            # A few at a time: waiting for all of many thousands would take as long as they do.
            queue = iter(items)
            waiting = {pool.submit(_call, item) for item in islice(queue, 2 * workers)}
            while waiting:
                finished, waiting = wait(waiting, REFRESH_SECONDS, FIRST_COMPLETED)
                bar.update(before + done.value - bar.n)
                for future in finished:
                    future.result()
                waiting |= {pool.submit(_call, item) for item in islice(queue, len(finished))}
        except BrokenProcessPool:
            stop.set()
            raise ConfigError(
                "a worker process was killed, most often because memory ran out: use fewer --workers and run the same "
                "command again, it goes on"
            ) from None
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _start(task: Task, stop: Any, done: Any) -> None:
    global _worker
    _worker = (task, stop, done)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and tells us
    warnings.simplefilter("ignore")  # Pillow's about files that it can read all the same
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would write on while the next run is at work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: int) -> None:
    task, stop, done = _worker

    def tick() -> None:
        if stop.is_set():
            raise Stopped
        with done.get_lock():
            done.value += 1

    task(item, tick)
