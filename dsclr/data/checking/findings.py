"""What is found in the samples, in a form that takes as much memory for a thousand as for a billion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

# Examples of each cause that are kept: the first ones of the data set.
MOST_EXAMPLES = 5
# Pictures of each kind that a contact sheet may choose from.
MOST_ODD = 48
# One row a sample that could be read: hashes of 16 bytes, the id of training, and whether training can use it.
ROW = np.dtype(
    [
        ("shard", np.int32),
        ("sample", np.int32),
        ("key", np.uint64, 2),
        ("image", np.uint64, 2),
        ("caption", np.uint64, 2),
        ("id", np.int64),
        ("usable", np.bool_),
    ]
)


@dataclass(frozen=True, order=True)
class Example:
    """A sample by place: number of its shard, number in the shard, key, and what is to say about it."""

    shard: int
    sample: int
    key: str
    detail: str


@dataclass(frozen=True, order=True)
class Odd:
    """A picture that is unlike others.

    Attributes:
        rank: the smaller, the odder.
        shard, sample: where it is.
        why: for people.
    """

    rank: float
    shard: int
    sample: int
    key: str
    why: str


@dataclass
class Findings:
    """Of some samples; those of other samples are added with :meth:`add`, in any order.

    Attributes:
        samples: looked at.
        causes: of dsclr.data.causes.CAUSES -> unusable samples.
        notes: of dsclr.data.causes.NOTES -> usable samples.
        examples: cause, or another kind of sample worth showing -> the first ones.
        members: extension -> members.
        formats, modes: of Pillow -> images.
        widths, heights, shorter: pixels as stored, before EXIF orientation -> images.
        aspects: longer over shorter side, two decimals -> images.
        kinds: "rotated by EXIF", "transparent", "animated", "16-bit", "CMYK" (of all images), "nearly one colour" (of
            the usable ones) -> images.
        characters, words: of a caption -> captions.
        captions: "long" (more tokens than the model reads), "nan", "none", "null" -> captions.
        odd: kind -> the oddest usable pictures.
        rows: arrays of ROW.
    """

    samples: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    members: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: Counter[float] = field(default_factory=Counter)
    heights: Counter[float] = field(default_factory=Counter)
    shorter: Counter[float] = field(default_factory=Counter)
    aspects: Counter[float] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    characters: Counter[float] = field(default_factory=Counter)
    words: Counter[float] = field(default_factory=Counter)
    captions: Counter[str] = field(default_factory=Counter)
    odd: dict[str, list[Odd]] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def usable(self) -> int:
        return self.samples - self.causes.total()

    def unusable(self, cause: str, example: Example, count: int = 1) -> None:
        """One more sample, or ``count`` of which one is shown, of a cause."""
        self.samples += count
        self.causes[cause] += count
        self.show(cause, example)

    def show(self, kind: str, example: Example) -> None:
        self._keep_first(self.examples, kind, [example], MOST_EXAMPLES)

    def show_odd(self, kind: str, odd: Odd) -> None:
        self._keep_first(self.odd, kind, [odd], MOST_ODD)

    def add(self, other: Findings) -> None:
        self.samples += other.samples
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
        for kind, examples in other.examples.items():
            self._keep_first(self.examples, kind, examples, MOST_EXAMPLES)
        for kind, odd in other.odd.items():
            self._keep_first(self.odd, kind, odd, MOST_ODD)
        self.rows += other.rows

    @staticmethod
    def _keep_first(kept: dict[str, list[Any]], kind: str, more: Iterable[Any], most: int) -> None:
        kept[kind] = sorted([*kept.get(kind, []), *more])[:most]

    def all_rows(self) -> np.ndarray:
        """(M,) of ROW, in the order of the data set."""
        rows = np.concatenate([np.empty(0, ROW), *self.rows])
        return rows[np.lexsort((rows["sample"], rows["shard"]))]


def quantiles(counts: Counter[float]) -> dict[str, float]:
    """min, q01, q05, q25, median, q75, q95, q99 and max of values by how often they occur; empty without values."""
    if not counts:
        return {}
    values = sorted(counts)
    reached = np.cumsum([counts[value] for value in values])
    points = {"min": 0.0, "q01": 0.01, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "q99": 0.99}
    found = {name: values[int(np.searchsorted(reached, part * reached[-1]))] for name, part in points.items()}
    return {**found, "max": values[-1]}
