"""How long each rank worked for itself in a step: who keeps the others waiting, and whether it is the data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class StepClock:
    """A rank's own time in a step, without what it waited for other ranks.

    Args:
        device: whose queue of work counts as work.

    Attributes:
        data_seconds: waited for a batch.
        work_seconds: in the encoder, and in the loss where that asks no other rank.
    """

    device: torch.device
    data_seconds: float = field(default=0.0, init=False)
    work_seconds: float = field(default=0.0, init=False)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A new step begins with this."""
        started = time.perf_counter()
        yield
        self.data_seconds, self.work_seconds = time.perf_counter() - started, 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work that waits for no other rank; ends when the device is done."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type != "cpu":
                torch.get_device_module(self.device).synchronize(self.device)
            self.work_seconds += time.perf_counter() - started

    def counts(self, rank: int, world_size: int) -> list[int]:
        """Nanoseconds of all ranks once these lists are added up over ranks."""
        own = [0] * (2 * world_size)
        own[2 * rank : 2 * rank + 2] = [round(self.data_seconds * 1e9), round(self.work_seconds * 1e9)]
        return own


def rank_metrics(counts: list[int], rows: int, step_seconds: float) -> dict[str, float]:
    """
    Args:
        counts: of :meth:`StepClock.counts`, added up over ranks.
        rows: of each rank.
        step_seconds: of the step.

    Returns:
        rank_samples_per_second_min, _mean, _max: rows by the rank's own seconds (data and work); rank_seconds_max and
        slowest_rank; data_wait_share and data_wait_share_max: of the step, waited for data, mean and most of the ranks.
    """
    data = [count / 1e9 for count in counts[0::2]]
    seconds = [own + count / 1e9 for own, count in zip(data, counts[1::2], strict=True)]
    rates = [rows / max(own, 1e-9) for own in seconds]
    return {
        "rank_samples_per_second_min": min(rates),
        "rank_samples_per_second_mean": sum(rates) / len(rates),
        "rank_samples_per_second_max": max(rates),
        "rank_seconds_max": max(seconds),
        "slowest_rank": seconds.index(max(seconds)),
        "data_wait_share": sum(data) / len(data) / step_seconds,
        "data_wait_share_max": max(data) / step_seconds,
    }
