"""The order of samples: a function of seed and position alone, whatever the ranks and workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

# Positions over which the shares of a mixture are exact.
MIXTURE_BLOCK = 10_000


class Order(Protocol):
    """Which sample stands at which position, counted from the start of the run."""

    @property
    def epoch_samples(self) -> int:
        """Samples of all shards."""

    def locate(self, position: int) -> tuple[int, int]:
        """(shard, sample within the shard)."""

    def coming_shards(self, position: int) -> list[int]:
        """Shards that the positions some way after this one will need."""


@dataclass
class SampleOrder:
    """Epoch after epoch, every sample once.

    Each epoch has its own permutation of shards; samples are mixed within windows of consecutive shards, so
    that only ``window`` shards are read at a time.

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

    def locate(self, position: int) -> tuple[int, int]:
        epoch, rest = divmod(position, self.epoch_samples)
        shards, starts = self._epoch(epoch)
        window = int(np.searchsorted(starts, rest, side="right")) - 1
        shard, sample = self._window(epoch, window, shards)[rest - starts[window]]
        return int(shard), int(sample)

    def coming_shards(self, position: int) -> list[int]:
        epoch, rest = divmod(position, self.epoch_samples)
        shards, starts = self._epoch(epoch)
        following = int(np.searchsorted(starts, rest, side="right"))
        if following == len(starts):
            shards, following = self._epoch(epoch + 1)[0], 0
        return [int(shard) for shard in shards[following * self.window : (following + 1) * self.window]]

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


@dataclass
class ResampledOrder:
    """Samples drawn with replacement, each as likely as any other.

    Stretches of positions draw from ``window`` shards each, drawn with replacement by their number of samples, so that
    only so many are read at a time.

    Args:
        counts, seed, window: as for :class:`SampleOrder`.
    """

    counts: Sequence[int]
    seed: int
    window: int
    _stretches: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def epoch_samples(self) -> int:
        return sum(self.counts)

    @property
    def _length(self) -> int:
        return math.ceil(self.epoch_samples * min(1.0, self.window / len(self.counts)))

    def locate(self, position: int) -> tuple[int, int]:
        stretch, rest = divmod(position, self._length)
        if stretch not in self._stretches:
            random, shards = self._shards(stretch)
            drawn = shards[random.integers(len(shards), size=self._length)]
            samples = (random.random(self._length) * np.asarray(self.counts)[drawn]).astype(np.int64)
            _bound(self._stretches)
            self._stretches[stretch] = np.stack([drawn, samples], axis=1)
        shard, sample = self._stretches[stretch][rest]
        return int(shard), int(sample)

    def coming_shards(self, position: int) -> list[int]:
        return [int(shard) for shard in np.unique(self._shards(position // self._length + 1)[1])]

    def _shards(self, stretch: int) -> tuple[np.random.Generator, np.ndarray]:
        random = np.random.default_rng((self.seed, stretch, 1))
        share = np.asarray(self.counts) / self.epoch_samples
        return random, random.choice(len(self.counts), size=self.window, p=share)


@dataclass
class MixedOrder:
    """Several sources, each with its share of every stretch of 10,000 positions and an order of its own.

    A source that is drawn more often than others begins its next epoch earlier.

    Args:
        orders: of each source, its shards counted from zero.
        shards: of each source, how many.
        weights: of each source, positive; only their ratios matter.
        seed: of the run.

    Raises:
        ValueError: a weight below a ten-thousandth of all.
    """

    orders: Sequence[Order]
    shards: Sequence[int]
    weights: Sequence[float]
    seed: int
    _blocks: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        shares = np.asarray(self.weights, dtype=np.float64) / sum(self.weights) * MIXTURE_BLOCK
        quotas = np.floor(shares).astype(np.int64)
        # The largest remainders are rounded up, so that the quotas add up.
        for source in np.argsort(quotas - shares, kind="stable")[: MIXTURE_BLOCK - quotas.sum()]:
            quotas[source] += 1
        if quotas.min() < 1:
            raise ValueError(f"source {int(quotas.argmin())} has less than one ten-thousandth of all weights")
        self._quotas = quotas
        self._first_shard = np.concatenate([[0], np.cumsum(self.shards)[:-1]])

    @property
    def epoch_samples(self) -> int:
        return sum(order.epoch_samples for order in self.orders)

    def locate(self, position: int) -> tuple[int, int]:
        source, own = self._own(position)
        shard, sample = self.orders[source].locate(own)
        return int(self._first_shard[source]) + shard, sample

    def coming_shards(self, position: int) -> list[int]:
        block = position // MIXTURE_BLOCK
        coming: list[int] = []
        for source, order in enumerate(self.orders):
            first = int(self._first_shard[source])
            coming += [first + shard for shard in order.coming_shards(block * int(self._quotas[source]))]
        return coming

    def _own(self, position: int) -> tuple[int, int]:
        """(source, position within the source)."""
        block, rest = divmod(position, MIXTURE_BLOCK)
        if block not in self._blocks:
            sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
            sources = np.random.default_rng((self.seed, block, 2)).permutation(sources)
            within = np.empty(MIXTURE_BLOCK, dtype=np.int64)
            for source, quota in enumerate(self._quotas):
                within[sources == source] = np.arange(quota)
            _bound(self._blocks)
            self._blocks[block] = (sources, within)
        sources, within = self._blocks[block]
        source = int(sources[rest])
        return source, block * int(self._quotas[source]) + int(within[rest])


def _bound(cache: dict, most: int = 3) -> None:
    """Make room for one more: the oldest goes (positions only ever rise, batch after batch)."""
    while len(cache) >= most:
        cache.pop(next(iter(cache)))


@dataclass(frozen=True)
class Slots:
    """Which positions each rank reads, in which order: its slots.

    The order is cut into global batches and each of those into one slice a rank, so that a global batch is the same set
    of samples for every number of ranks.

    Attributes:
        rows: a rank and batch.
        world_size: ranks.
        first: positions that come before all others: what ranks had left over when their number changed.
        start: the position after those.
    """

    rows: int
    world_size: int = 1
    first: tuple[int, ...] = ()
    start: int = 0

    def position(self, rank: int, slot: int) -> int:
        """Position in the run's order of a rank's slot."""
        batch, row = divmod(slot, self.rows)
        index = (batch * self.world_size + rank) * self.rows + row
        return self.first[index] if index < len(self.first) else self.start + index - len(self.first)

    def continued(self, consumed: Sequence[int], rows: int, world_size: int) -> Slots:
        """For another number of ranks: every position that these ranks have not consumed, once.

        Args:
            consumed: slots of each rank. They differ where samples were skipped.
            rows, world_size: from now on.
        """
        if (rows, world_size) == (self.rows, self.world_size):
            raise ValueError("nothing changes: go on with what each rank has consumed")
        batches = max(math.ceil(slots / self.rows) for slots in consumed)
        left = [
            self.position(rank, slot) for rank, used in enumerate(consumed) for slot in range(used, batches * self.rows)
        ]
        reached = batches * self.rows * self.world_size
        start = self.start + max(0, reached - len(self.first))
        return Slots(rows, world_size, (*sorted(left), *self.first[reached:]), start)
