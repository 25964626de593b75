"""Killed at any moment, a run goes on where it was, and ends as if nothing had been."""

from __future__ import annotations

import pytest

from tests.launch.kills import Killer


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, ranks):
    Killer(tmp_path, ranks, steps=8, seed=4).run(kills=2)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 60), (2, 40)])
def test_a_hundred_random_kills(tmp_path, ranks, kills):
    Killer(tmp_path, ranks, steps=4 * kills, seed=ranks).run(kills)
