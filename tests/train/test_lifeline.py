"""Ranks learn at once that one is gone, agree which was the first, and end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch

from dsclr.interruption import INTERRUPTED, Interruption, end_process
from dsclr.train import lifeline
from dsclr.train.lifeline import Lifeline
from dsclr.train.runtime import Runtime

FORK = multiprocessing.get_context("fork")
RANKS = 3


def rank(number: int, addresses: Any, path: Any, behave: Any) -> None:
    """A rank without torch's group, of which the lifeline needs only that it tells where rank 0 listens."""
    output = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    logging.basicConfig(force=True, format="%(message)s", stream=sys.stderr)

    def broadcast(values: list[Any]) -> None:
        if number == 0:
            for _ in range(RANKS - 1):
                addresses.put(list(values))
        else:
            values[:] = addresses.get()

    lifeline.dist.broadcast_object_list = broadcast  # type: ignore[assignment]
    lifeline.GRACE_SECONDS = 1.0
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(number))
    asked = Interruption()
    end_process(behave(number, asked, Lifeline(Runtime(number, RANKS, 0, 1, torch.device("cpu")), asked)) or 0)


def run(tmp_path, behave):
    """Exit statuses, what was said, and the seconds it took."""
    addresses, path = FORK.Queue(), tmp_path / "said"
    started = time.monotonic()
    ranks = [FORK.Process(target=rank, args=(number, addresses, path, behave)) for number in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
        process.kill()
    return [process.exitcode for process in ranks], path.read_text().splitlines(), time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_that_wait_for_a_dead_one_end_and_one_says_who_it_was(tmp_path, victim):
    def behave(number, asked, line):
        if number == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # in a collective that never returns

    statuses, said, seconds = run(tmp_path, behave)
    assert statuses == [-signal.SIGKILL if number == victim else 1 for number in range(RANKS)]
    assert said[0] == f"error: rank {victim} is gone without a word (killed, or its machine ran out of memory)"
    others = sorted(set(range(RANKS)) - {victim})
    assert sorted(said[1:]) == [f"rank {number} ends, since rank {victim} is gone" for number in others]
    assert seconds < 20


def test_of_ranks_that_fail_together_one_is_the_first(tmp_path):
    def behave(number, asked, line):
        first = line.first_to_fail()
        print(f"{number} {first} {line.first}")
        return 1

    statuses, said, _ = run(tmp_path, behave)
    assert statuses == [1] * RANKS
    assert sum(" True " in text for text in said) == 1, said
    # rank 0 may be gone before it can tell
    assert all("None" not in text for text in said)


def test_a_rank_that_ends_as_it_should_ends_nobody_else(tmp_path):
    def behave(number, asked, line):
        if number != 1:
            time.sleep(2.5)
        assert line.first is None
        line.close()

    assert run(tmp_path, behave)[:2] == ([0] * RANKS, [])


@pytest.mark.parametrize("deferred", [True, False])
def test_a_request_to_end_reaches_all_ranks(tmp_path, deferred):
    def behave(number, asked, line):
        if deferred:
            asked.defer()
        if number == 1:
            time.sleep(1)
            asked.request("SIGUSR1")
        until = time.monotonic() + 20
        while not asked.requested and time.monotonic() < until:
            time.sleep(0.05)
        # without defer nobody comes here
        time.sleep(0.5)
        print(asked.reason)
        line.close()

    statuses, said, _ = run(tmp_path, behave)
    if deferred:
        assert (statuses, said) == ([0] * RANKS, ["SIGUSR1"] * RANKS)
    else:
        assert statuses == [INTERRUPTED] * RANKS
        assert said == ["SIGUSR1 before the first step: nothing to save, exit status 85"]
