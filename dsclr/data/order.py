"""The order of samples: a function of seed and position alone, whatever the ranks and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class SampleOrder:
    """Epoch after epoch, which sample stands at which position.

    Each epoch has its own permutation of shards; samples are mixed within windows of consecutive shards, so
    that only ``window`` shards are read at a time. Every sample appears once an epoch.

    Args:
        counts: samples of each shard; at least one sample in all.
        seed: of the run.
        shuffle: False keeps shards and samples as they are.
        window: shards mixed together.
    """

    counts: Sequence[int]
    seed: int
    shuffle: bool
    window: int
    _windows: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)
    _starts: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def epoch_samples(self) -> int:
        return sum(self.counts)

    def locate(self, position: int) -> tuple[int, int, int]:
        """(epoch, shard, sample within the shard) at a position counted from the start of the run."""
        epoch, rest = divmod(position, self.epoch_samples)
        shards, starts = self._epoch(epoch)
        window = int(np.searchsorted(starts, rest, side="right")) - 1
        shard, sample = self._window(epoch, window, shards)[rest - starts[window]]
        return epoch, int(shard), int(sample)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards, and the position at which each window starts."""
        if epoch not in self._starts:
            shards = np.arange(len(self.counts))
            if self.shuffle:
                shards = np.random.default_rng((self.seed, epoch)).permutation(shards)
            sizes = np.asarray(self.counts, dtype=np.int64)[shards]
            per_window = np.add.reduceat(sizes, np.arange(0, len(sizes), self.window))
            starts = np.concatenate([[0], np.cumsum(per_window)[:-1]])
            _bound(self._starts)
            self._starts[epoch] = (shards, starts)
        return self._starts[epoch]

    def _window(self, epoch: int, window: int, shards: np.ndarray) -> np.ndarray:
        if (epoch, window) not in self._windows:
            members = shards[window * self.window : (window + 1) * self.window]
            pairs = np.concatenate(
                [np.stack([np.full(self.counts[s], s), np.arange(self.counts[s])], axis=1) for s in members]
            )
            if self.shuffle:
                pairs = np.random.default_rng((self.seed, epoch, window)).permutation(pairs)
            _bound(self._windows)
            self._windows[epoch, window] = pairs
        return self._windows[epoch, window]


def _bound(cache: dict, most: int = 3) -> None:
    """Make room for one more: the oldest goes (positions only ever rise, batch after batch)."""
    while len(cache) >= most:
        cache.pop(next(iter(cache)))
