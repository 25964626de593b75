"""Each rank's own time in a step."""

from __future__ import annotations

import time

import pytest
import torch

from dsclr.train.timing import StepClock, rank_metrics


def measured(data: float, work: tuple[float, ...]) -> StepClock:
    clock = StepClock(torch.device("cpu"))
    with clock.waiting_for_data():
        time.sleep(data)
    for seconds in work:
        with clock.working():
            time.sleep(seconds)
    return clock


def test_the_slowest_rank_and_the_share_of_waiting_for_data():
    clocks = [measured(0.01, (0.02,)), measured(0.1, (0.05, 0.05)), measured(0.02, (0.02,))]
    lists = [clock.counts(rank, 3) for rank, clock in enumerate(clocks)]
    metrics = rank_metrics([sum(counts) for counts in zip(*lists, strict=True)], rows=8, step_seconds=0.4)
    own = [clock.data_seconds + clock.work_seconds for clock in clocks]
    assert own[1] >= 0.2
    assert metrics["slowest_rank"] == 1
    assert metrics["rank_seconds_max"] == pytest.approx(own[1])
    assert metrics["rank_samples_per_second_min"] == pytest.approx(8 / own[1])
    assert metrics["rank_samples_per_second_max"] == pytest.approx(8 / min(own))
    assert metrics["rank_samples_per_second_mean"] == pytest.approx(sum(8 / seconds for seconds in own) / 3)
    assert metrics["data_wait_share_max"] == pytest.approx(clocks[1].data_seconds / 0.4)
    assert metrics["data_wait_share"] == pytest.approx(sum(clock.data_seconds for clock in clocks) / 3 / 0.4)


def test_every_step_is_measured_anew_and_failed_work_counts():
    clock = measured(0.0, (0.05,))
    with clock.waiting_for_data():
        pass
    assert clock.work_seconds == 0
    with pytest.raises(MemoryError), clock.working():
        raise MemoryError
    assert 0 < clock.work_seconds < 0.05
