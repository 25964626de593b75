"""Which rows go into which shard, and in which order: a function of the good rows and the options alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dsclr.config import ConfigError


@dataclass(frozen=True)
class Shard:
    """One tar file: its name, its rows in order, and the number that is the key of the first."""

    name: str
    first_key: int
    rows: list[int]


@dataclass(frozen=True)
class ShardSet:
    """Shards that are read together."""

    name: str
    index: str
    shards: list[Shard]

    @property
    def samples(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)


def plan_sets(
    rows: list[int],
    image: Callable[[int], str | int],
    prefix: str,
    samples_per_shard: int,
    shards: int | None,
    shuffle: bool,
    seed: int,
    held_out: float,
) -> list[ShardSet]:
    """One set, or with ``held_out`` above 0 a second one of this part of the rows.

    Args:
        rows: at least one.
        image: what image a row has; all rows of an image come into the same set.
        samples_per_shard: at most; the shards of a set differ by one sample at most.
        shards: of the first set, in place of samples_per_shard.

    Raises:
        ConfigError: more shards than samples, or a held-out set that leaves nothing.
    """
    taken = _hold_out(rows, image, held_out, seed) if held_out else set()
    kept = [row for row in rows if row not in taken]
    if not kept:
        raise ConfigError(f"--split-held-out {held_out} of {len(rows)} samples leaves none to train on")
    if shards is not None and shards > len(kept):
        raise ConfigError(f"--shards {shards}: there are {len(kept)} samples only")
    count = shards or -(-len(kept) // samples_per_shard)
    sets = [_make_set(prefix, "index.json", kept, count, shuffle, seed, 0)]
    if taken:
        second = [row for row in rows if row in taken]
        count = -(-len(second) // -(-len(kept) // count))
        sets.append(_make_set(f"{prefix}-heldout", "index-heldout.json", second, count, shuffle, seed, len(kept)))
    return sets


def _hold_out(rows: list[int], image: Callable[[int], str | int], fraction: float, seed: int) -> set[int]:
    by_image: dict[str | int, list[int]] = {}
    for row in rows:
        by_image.setdefault(image(row), []).append(row)
    images = list(by_image.values())
    random.Random(f"{seed}-heldout").shuffle(images)
    taken: set[int] = set()
    wanted = max(1, round(fraction * len(rows)))
    for same in images:
        if len(taken) >= wanted:
            break
        taken.update(same)
    return taken


def _make_set(name: str, index: str, rows: list[int], count: int, shuffle: bool, seed: int, first_key: int) -> ShardSet:
    if shuffle:
        random.Random(f"{seed}-{index}").shuffle(rows)
    shards, at = [], 0
    for number in range(count):
        size = len(rows) // count + (number < len(rows) % count)
        shards.append(Shard(f"{name}-{number:06d}.tar", first_key + at, rows[at : at + size]))
        at += size
    return ShardSet(name, index, shards)
