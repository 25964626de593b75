"""Processes that may die or hang over what they are given: they are replaced, and what they were at is told."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Not "spawn": a process that starts anew imports PyTorch for ten seconds.
_CONTEXT = multiprocessing.get_context("fork")
# Seconds between two looks at the clock.
_TICK = 0.2
NOWHERE = -1


@dataclass(frozen=True)
class Died:
    """A process that ended or was ended over a task.

    Attributes:
        at: what it had last told :class:`Watch`.
        why: for people.
    """

    at: int
    why: str


class Watch:
    """Shared memory in which a process says what it is at."""

    def __init__(self) -> None:
        self._state = _CONTEXT.RawArray("d", [NOWHERE, 0.0])

    def begin(self, number: int) -> None:
        """The time for this number runs from now. NOWHERE: there is no limit."""
        self._state[0] = NOWHERE
        self._state[1] = time.monotonic()
        self._state[0] = number

    @property
    def at(self) -> int:
        return int(self._state[0])

    @property
    def seconds(self) -> float:
        """Since the number began; 0 at NOWHERE."""
        at, since = self._state[:]
        return 0.0 if at == NOWHERE else time.monotonic() - since


class _Worker(Generic[T, R]):
    def __init__(self, work: Callable[[T, Watch], R], others: list[_Worker[T, R]]) -> None:
        self.watch = Watch()
        self.task: T | None = None
        self.connection, theirs = _CONTEXT.Pipe()
        inherited = [self.connection, *(other.connection for other in others)]
        self.process = _CONTEXT.Process(target=_serve, args=(work, theirs, self.watch, inherited), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: T) -> None:
        self.task = task
        self.watch.begin(NOWHERE)
        try:
            self.connection.send(task)
        except OSError:
            # It died while it had nothing to do: noticed as if it were over this task.
            return

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(
    work: Callable[[T, Watch], R], take: Callable[[], T | None], workers: int, seconds: float
) -> Iterator[tuple[T, R | Died]]:
    """Give tasks to processes until there are none and none is at work.

    Args:
        work: runs in the processes, which are forks of this one.
        take: the next task; None: none at the moment, perhaps when another one is done.
        workers: processes.
        seconds: that a process may be at one number of its :class:`Watch`; then it is killed.

    Yields:
        (task, result), as they come.

    Raises:
        RuntimeError: work raised; with its traceback.
    """
    pool: list[_Worker[T, R]] = []
    try:
        while True:
            while len([one for one in pool if one.task is not None]) < workers and (task := take()) is not None:
                idle = next((one for one in pool if one.task is None), None)
                if idle is None:
                    idle = _Worker(work, pool)
                    pool.append(idle)
                idle.give(task)
            busy = {one.connection: one for one in pool if one.task is not None}
            if not busy:
                return
            for ready in wait(list(busy), min(_TICK, seconds)):
                assert isinstance(ready, Connection)
                worker = busy.pop(ready)
                task, outcome = worker.task, _receive(worker)
                assert task is not None
                worker.task = None
                if isinstance(outcome, Died):
                    pool.remove(worker)
                yield task, outcome
            for worker in busy.values():
                if worker.watch.seconds > seconds:
                    task, at = worker.task, worker.watch.at
                    assert task is not None
                    worker.end()
                    pool.remove(worker)
                    yield task, Died(at, f"was not done within {seconds:g} seconds")
    finally:
        for worker in pool:
            worker.end()


def _receive(worker: _Worker[T, R]) -> R | Died:
    try:
        result, failure = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        worker.end()
        how = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return Died(worker.watch.at, f"the process that read it died {how}")
    if failure is not None:
        raise RuntimeError(failure)
    return result


def _serve(work: Callable[[T, Watch], R], tasks: Connection, watch: Watch, inherited: list[Connection]) -> None:
    # As long as any process holds the other end of the pipe, this one would outlive its parent.
    for connection in inherited:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # The report says it all.
    logging.getLogger("dsclr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    while True:
        try:
            task = tasks.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[R | None, str | None] = work(task, watch), None
        except Exception:
            answer = None, traceback.format_exc()
        tasks.send(answer)
