"""What became of the samples, over all ranks: metrics, and a line for each that was skipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsclr.data import TrainLoader
from dsclr.data.causes import CAUSES, NOTES
from dsclr.report.metrics import append_line
from dsclr.train.runtime import Runtime


@dataclass(frozen=True)
class DataReport:
    """
    Attributes:
        loader: of this rank.
        skipped_path: one JSON object a line for every sample that was skipped.
        runtime: of this process.
    """

    loader: TrainLoader
    skipped_path: Path
    runtime: Runtime

    def write_skipped(self, step: int) -> None:
        """Append what this rank skipped since the last call, as part of a step."""
        for item in self.loader.take_skipped():
            append_line(
                self.skipped_path,
                {
                    "step": step,
                    "rank": self.runtime.rank,
                    "cause": item.cause,
                    "shard": item.shard,
                    "key": item.key,
                    "position": item.position,
                    "detail": item.detail,
                },
            )

    def counts(self) -> list[int]:
        """What :meth:`metrics` takes once these lists are added up over ranks."""
        counts = [self.loader.skipped[cause] for cause in CAUSES] + [self.loader.notes[note] for note in NOTES]
        shards = len(self.loader.dataset.reader.shards)
        return counts + [self.loader.shard_rows[shard] for shard in range(shards)]

    def metrics(self, counts: list[int]) -> dict[str, float]:
        """
        Args:
            counts: of :meth:`counts`, added up over ranks.

        Returns:
            skipped_samples in all, data/skipped_CAUSE and data/NOTE where there are any, data/shards_per_batch
            (different shards in the latest global batch), and data/share_SOURCE of a mixture in it.
        """
        names = [f"data/skipped_{cause}" for cause in CAUSES] + [f"data/{note}" for note in NOTES]
        counted, of_shards = counts[: len(names)], counts[len(names) :]
        found: dict[str, float] = {"skipped_samples": sum(counted[: len(CAUSES)])}
        found.update({name: count for name, count in zip(names, counted, strict=True) if count})
        found["data/shards_per_batch"] = sum(rows > 0 for rows in of_shards)
        first = 0
        for name, shards in self.loader.dataset.sources.items():
            found[f"data/share_{name}"] = sum(of_shards[first : first + shards]) / sum(of_shards)
            first += shards
        return found
