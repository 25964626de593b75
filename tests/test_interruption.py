"""Signals: noticed at once, also by a process that is busy, and by no loader process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsclr.interruption import INTERRUPTED

ROOT = Path(__file__).parents[1]
BEGIN = """
import os, sys, time
from dsclr.interruption import Interruption, ignore_signals
asked = Interruption()
asked.listen()
"""


def start(script: str, words: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """A process that has said its first line."""
    process = subprocess.Popen(
        [*words, sys.executable, "-c", BEGIN + script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def rest(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    # Not communicate: it would miss what was read along with the first line.
    out = process.stdout.read()
    process.wait(60)
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_before_there_is_something_to_save_a_signal_ends_the_process(number):
    # The main thread waits for a lock that never comes, as in a collective whose other side is missing.
    process = start("print('ready', flush=True); import threading; l = threading.Lock(); l.acquire(); l.acquire()")
    process.send_signal(number)
    assert rest(process) == f"{number.name} before the first step: nothing to save, exit status 85\n"
    assert process.returncode == INTERRUPTED == 85


def test_ctrl_c_pressed_again_ends_at_once():
    process = start(
        "asked.defer(); print('ready', flush=True); import threading; l = threading.Lock(); l.acquire(); l.acquire()"
    )
    # One press, heard from the terminal and from the launcher.
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert rest(process) == ""
    assert process.returncode == 130


def test_afterwards_it_waits_for_the_main_thread_and_a_second_one_changes_nothing():
    process = start("""
asked.defer()
print("ready", flush=True)
while not asked.requested:
    time.sleep(0.01)
print("saving", flush=True)
time.sleep(1)
print(asked.reason)
""")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    assert rest(process) == "SIGUSR1\n"
    assert process.returncode == 0


def test_a_loader_process_outlives_a_signal_for_the_whole_job_and_does_not_pass_its_own_on():
    process = start("""
import multiprocessing, signal
asked.defer()
def work():
    ignore_signals()
    ready.set()
    time.sleep(60)
ready = multiprocessing.get_context("fork").Event()
child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
child.start()
ready.wait()
os.kill(child.pid, signal.SIGTERM)
os.kill(child.pid, signal.SIGUSR1)
time.sleep(0.5)
print("ready", flush=True)
print(child.is_alive(), asked.requested)
child.kill()
""")
    assert rest(process) == "True False\n"


@pytest.mark.parametrize("launcher", [{"TORCHELASTIC_RUN_ID": "1"}, {"CROSS_RANK": "0"}, {}])
def test_a_launcher_that_is_gone_is_a_request_to_end(launcher):
    script = "asked.defer(); print('ready', flush=True)\nfor _ in range(400):\n  time.sleep(0.01)\n  "
    script += "if asked.requested: print(asked.reason); break\n"
    # Two shells above the process, as deepspeed has two processes above a rank; what ends is the upper one.
    above = ("sh", "-c", 'sh -c \'"$@"; :\' sh "$@"; :', "sh")
    process = start(script, above, **launcher)
    process.kill()
    # deepspeed's upper process is watched, torchrun has one only
    expected = "the launcher is gone\n" if "CROSS_RANK" in launcher else ""
    assert rest(process) == expected
