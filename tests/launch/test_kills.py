"""Killed at any moment, a run goes on where it was, and ends as if nothing had been."""

from __future__ import annotations

import signal

import pytest

from tests.launch.kills import Killer


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(tmp_path):
    killer = Killer(tmp_path, ranks=2, steps=11)
    killer.run_undisturbed()
    killer.kill_once(0, "step", signal.SIGTERM, [1])
    killer.kill_once(1, "save", signal.SIGKILL, [1])
    killer.kill_once(2, "start-up", signal.SIGKILL, [0, 1])
    killer.kill_once(3, "step", signal.SIGKILL, [0])
    killer.finish()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 60), (2, 40)])
def test_a_hundred_random_kills(tmp_path, ranks, kills):
    Killer(tmp_path, ranks, steps=3 * kills, seed=ranks).run(kills)
