"""What became of the samples, over all ranks: metrics, and a line for each that was skipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

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

    def metrics(self) -> dict[str, float]:
        """All ranks call this together.

        Returns:
            skipped_samples in all, data/skipped_CAUSE and data/NOTE where there are any, data/shards_per_batch
            (different shards in the latest global batch), and data/share_SOURCE of a mixture in it.
        """
        shards = len(self.loader.dataset.reader.shards)
        counts = [self.loader.skipped[cause] for cause in CAUSES] + [self.loader.notes[note] for note in NOTES]
        rows = [self.loader.shard_rows[shard] for shard in range(shards)]
        every = torch.tensor(counts + rows, dtype=torch.int64, device=self.runtime.device)
        if dist.is_initialized():
            dist.all_reduce(every)
        counted, of_shards = every[: len(counts)].tolist(), every[len(counts) :].cpu()
        found: dict[str, float] = {"skipped_samples": sum(counted[: len(CAUSES)])}
        names = [f"data/skipped_{cause}" for cause in CAUSES] + [f"data/{note}" for note in NOTES]
        found.update({name: count for name, count in zip(names, counted, strict=True) if count})
        found["data/shards_per_batch"] = int((of_shards > 0).sum())
        sources = self.loader.dataset.sources
        if sources:
            for name, part in zip(sources, of_shards.split(list(sources.values())), strict=True):
                found[f"data/share_{name}"] = float(part.sum() / of_shards.sum())
        return found
