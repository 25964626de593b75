"""Signals that ask a run to end (pre-emption): noticed at once, obeyed at the next step boundary."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

# Nothing here may import torch: the signals are taken over before the seconds that takes.

# Exit status of a run that wrote a checkpoint (or had nothing to write yet) and goes on with --resume auto.
INTERRUPTED = 85
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Of the one key press a rank may hear twice, from the terminal and from its launcher.
ONE_PRESS_SECONDS = 1.0
# Between two looks at whether the launcher is still there.
LOOK_SECONDS = 1.0


class Interrupted(Exception):
    """A run that ended on request; everything is saved."""


class Interruption:
    """Whether somebody asked this process to end: by SIGTERM, SIGUSR1, Ctrl-C, through another rank, or by ending the
    launcher.

    A thread takes the signals, as the main one may sit in a collective for long. Until :meth:`defer` there is nothing
    to save, and the process ends at once; afterwards ``requested`` waits to be looked at, and a second Ctrl-C ends the
    process at once.

    Attributes:
        reason: the signal's name, or a sentence.
        tell: called once with the request, before anything else; by default it does nothing.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.tell: Callable[[], None] = lambda: None
        self._deferred = False
        self._lock = threading.Lock()

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def listen(self) -> None:
        """Take over SIGTERM, SIGUSR1 and SIGINT of this process; called in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            # Does nothing: the number arrives at the thread by the descriptor, whatever this thread is at.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="interruption", daemon=True).start()

    def defer(self) -> None:
        """From now on there is something to save: requests wait for the main thread."""
        with self._lock:
            self._deferred = True

    def request(self, reason: str) -> None:
        """Ask this process to end; further requests change nothing."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
            deferred = self._deferred
        self.tell()
        if not deferred:
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write(f"{reason} before the first step: nothing to save, exit status {INTERRUPTED}\n")
            end_process(INTERRUPTED)

    def _watch(self, reader: int) -> None:
        launchers = _launchers()
        pressed: float | None = None
        while True:
            ready, _, _ = select.select([reader], [], [], LOOK_SECONDS)
            for number in os.read(reader, 64) if ready else b"":
                if number == signal.SIGINT:
                    if pressed is not None and time.monotonic() - pressed > ONE_PRESS_SECONDS:
                        end_process(128 + number)
                    pressed = time.monotonic() if pressed is None else pressed
                if number in SIGNALS:
                    self.request(signal.Signals(number).name)
            if launchers and _launchers() != launchers:
                self.request("the launcher is gone")
                launchers = []


def end_process(status: int) -> None:
    """Leave now, with the loader processes, whatever other threads are at. Does not return."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def ignore_signals(_: int = 0) -> None:
    """In a loader process: a signal for the whole job must not take the batch away that the last step waits for.

    The process ends with the one that started it, in whatever way that ends.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _launchers() -> list[int]:
    """The processes of torchrun or deepspeed above this one: the parent, and deepspeed's own parent.

    A launcher that is killed does not end its ranks: deepspeed's command dies of SIGTERM and leaves them behind.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [parent]
    # Set by deepspeed's launcher only.
    if "CROSS_RANK" not in os.environ:
        return []
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as stat:
            # The name, in brackets, may hold blanks.
            return [parent, int(stat.read().rpartition(")")[2].split()[1])]
    except OSError:
        return [parent]
