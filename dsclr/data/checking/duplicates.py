"""Samples that stand more than once in a data set, and what they do to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Copies:
    """Samples that are equal in something.

    Attributes:
        groups: different values that several samples share.
        samples: that share one.
        largest: (samples, row numbers of the first few) of the largest groups, the largest first.
    """

    groups: int
    samples: int
    largest: list[tuple[int, list[int]]]

    @property
    def redundant(self) -> int:
        """Samples beside the first of each group."""
        return self.samples - self.groups


def number_values(values: np.ndarray) -> np.ndarray:
    """Equal values as equal numbers.

    Args:
        values: (M, C) integers of any type, a value a row.

    Returns:
        (M,) int64, from 0 on without gaps.
    """
    order = np.lexsort(values.T)
    ordered = values[order]
    new = np.ones(len(values), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(values), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers


def find_copies(numbers: np.ndarray, most: int = 5, shown: int = 3) -> Copies:
    """Groups of equal ``numbers``, (M,) int64 of :func:`number_values`.

    Args:
        most: of the largest groups.
        shown: samples of each.
    """
    counts = np.bincount(numbers)
    shared = counts > 1
    # Equally large ones as they come in the data: the numbers themselves follow from hashes and mean nothing.
    first = np.unique(numbers, return_index=True)[1]
    by_size = [group for group in np.lexsort((first, -counts))[:most] if shared[group]]
    largest = [(int(counts[group]), np.flatnonzero(numbers == group)[:shown].tolist()) for group in by_size]
    return Copies(int(shared.sum()), int(counts[shared].sum()), largest)


def in_several(numbers: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Values that stand in more than one shard.

    Args:
        numbers: (M,) int64 of :func:`number_values`.
        shards: (M,) int, where each stands.

    Returns:
        (V,) int64, those numbers.
    """
    if not len(numbers):
        return np.empty(0, np.int64)
    first = np.full(numbers.max() + 1, np.iinfo(np.int64).max)
    last = np.full(numbers.max() + 1, -1)
    np.minimum.at(first, numbers, shards)
    np.maximum.at(last, numbers, shards)
    return np.flatnonzero(first < last)


def expected_false_negatives(
    images: np.ndarray, ids: np.ndarray, batch_size: int, chances: Sequence[float] | np.ndarray | None = None
) -> float:
    """Pairs of a batch that show the same image but are negatives of each other, because their ids differ.

    With chances p_i that sum to 1, and the sum Q of p_i p_j over all ordered pairs of different samples with equal
    images and different ids, two different samples of a batch are such a pair with probability
    Q / (1 - sum of p_i^2), and a batch of N has N (N - 1) / 2 pairs::

        expected pairs = N (N - 1) / 2 * Q / (1 - sum_i p_i^2)

    With equal chances this is P N (N - 1) / (M (M - 1)) for P such pairs among M samples: exact for N <= M drawn
    without replacement. Each pair is two false negatives in each direction of the loss, one for each of its samples.

    Args:
        images: (M,) int64 of :func:`number_values`.
        ids: (M,) int64 of training.
        batch_size: N.
        chances: (M,) of each sample to be drawn next, in any unit; None: the same for all.
    """
    if len(images) < 2:
        return 0.0
    p = np.ones(len(images)) if chances is None else np.asarray(chances, np.float64)
    p = p / p.sum()
    both = number_values(np.stack([images, ids], axis=1))
    q = (np.bincount(images, p) ** 2).sum() - (np.bincount(both, p) ** 2).sum()
    # What rounding leaves of 0.
    q = q if len(np.unique(both)) > len(np.unique(images)) else 0.0
    return float(max(0.0, q) / (1 - (p**2).sum()) * batch_size * (batch_size - 1) / 2)
