"""Batches of the training stream, the same for any number of loader processes, continued at any sample."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dsclr.data.dataset import Sample, ShardDataset, Skipped

logger = logging.getLogger(__name__)

# Rows a loader process makes at a time: large enough to hide the queue, small enough to bound its memory.
ROWS_PER_TASK = 32
# Positions over which the part of unusable samples is judged.
BAD_WINDOW = 10_000


class BadDataError(RuntimeError):
    """Too large a part of the samples cannot be used."""


@dataclass(frozen=True)
class Batch:
    """A rank's rows of one contrastive batch, on the host.

    Attributes:
        a: (N, 3, H, W) uint8 images.
        b: (N, L) int64 tokens, or (N, 3, H, W) uint8 second views.
        ids: (N,) int64.
    """

    a: Tensor
    b: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Task:
    """The rows a loader process made of one list of positions, few tensors whatever their number.

    Attributes:
        a, b, ids: as in :class:`Batch`, of the usable rows.
        offsets: of each usable row, its place in the list of positions.
        skipped: the others.
    """

    a: Tensor
    b: Tensor
    ids: Tensor
    offsets: list[int]
    skipped: list[Skipped]


def collate(items: Sequence[Sample | Skipped]) -> Task:
    """Stack the usable rows of a list."""
    rows = [(offset, item) for offset, item in enumerate(items) if isinstance(item, Sample)]
    skipped = [item for item in items if isinstance(item, Skipped)]
    empty = torch.empty(0)
    return Task(
        torch.stack([row.a for _, row in rows]) if rows else empty,
        torch.stack([row.b for _, row in rows]) if rows else empty,
        torch.tensor([row.id for _, row in rows], dtype=torch.int64),
        [offset for offset, _ in rows],
        skipped,
    )


@dataclass
class TrainLoader:
    """An endless iterator of :class:`Batch`.

    The run's order is cut into global batches, and each of those into one slice a rank, so a global batch is
    the same set of samples for every number of ranks. A sample that cannot be used is counted, reported and
    replaced by the next of the rank's own stream; no rank waits for another.

    Args:
        dataset: rows by position.
        rows: N, rows a rank and batch.
        rank, world_size: of this process.
        workers: loader processes; 0 loads in this one.
        prefetch: tasks queued a worker.
        max_bad_fraction: see raises.
        pin_memory: for asynchronous copies to a GPU.
        consumed: slots of the rank's stream already used, from :attr:`consumed` of an earlier run.

    Raises:
        BadDataError: (while iterating) over max_bad_fraction of the last 10,000 samples were unusable.
    """

    dataset: ShardDataset
    rows: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    prefetch: int = 4
    max_bad_fraction: float = 0.01
    pin_memory: bool = False
    consumed: int = 0

    def __post_init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self._recent: deque[tuple[int, int]] = deque()

    def position(self, slot: int) -> int:
        """Position in the run's order of this rank's slot-th sample."""
        batch, row = divmod(slot, self.rows)
        return (batch * self.world_size + self.rank) * self.rows + row

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.dataset,
            batch_sampler=_Tasks(self, self.consumed),
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            collate_fn=collate,
            # Its own: drawing the workers' seed from the global one would shift the dropout of a resumed run.
            generator=torch.Generator(),
        )
        slot = self.consumed
        filled = 0
        batch: Batch | None = None
        for task in loader:
            for skipped in task.skipped:
                self._report(skipped)
            self._judge(len(task.offsets), len(task.skipped), task)
            start = 0
            while start < len(task.offsets):
                batch = batch or self._empty(task)
                count = min(self.rows - filled, len(task.offsets) - start)
                for whole, part in ((batch.a, task.a), (batch.b, task.b), (batch.ids, task.ids)):
                    whole[filled : filled + count] = part[start : start + count]
                start, filled = start + count, filled + count
                if filled == self.rows:
                    self.consumed = slot + task.offsets[start - 1] + 1
                    yield batch
                    batch, filled = None, 0
            slot += ROWS_PER_TASK

    def _empty(self, task: Task) -> Batch:
        def like(part: Tensor) -> Tensor:
            return torch.empty((self.rows, *part.shape[1:]), dtype=part.dtype, pin_memory=self.pin_memory)

        return Batch(like(task.a), like(task.b), like(task.ids))

    def _report(self, item: Skipped) -> None:
        self.skipped[item.cause] += 1
        logger.warning("skipped %s in %s: %s", item.key, item.shard, item.detail)

    def _judge(self, good: int, bad: int, task: Task) -> None:
        self._recent.append((good + bad, bad))
        while sum(rows for rows, _ in self._recent) > BAD_WINDOW:
            self._recent.popleft()
        recent = sum(rows for rows, _ in self._recent)
        recent_bad = sum(bad for _, bad in self._recent)
        # Nothing usable for a whole pass: no batch would ever come, whatever fraction is allowed.
        hopeless = recent_bad == recent >= min(BAD_WINDOW // 2, self.dataset.order.epoch_samples)
        # Judged against a full window, so that a few bad samples at the very start do not end a run.
        if hopeless or recent_bad > self.max_bad_fraction * BAD_WINDOW:
            last = task.skipped[-1]
            raise BadDataError(
                f"{recent_bad} of the last {recent} samples were unusable "
                f"({', '.join(f'{cause}: {n}' for cause, n in self.skipped.most_common())}), the last was "
                f"{last.key} in {last.shard}: {last.detail}. Mend the shards, or raise dsclr.data.max_bad_fraction "
                f"(now {self.max_bad_fraction})"
            )


class _Tasks:
    """Lists of positions for the loader processes, without end."""

    def __init__(self, loader: TrainLoader, slot: int) -> None:
        self.loader = loader
        self.slot = slot

    def __iter__(self) -> Iterator[list[int]]:
        slot = self.slot
        while True:
            yield [self.loader.position(s) for s in range(slot, slot + ROWS_PER_TASK)]
            slot += ROWS_PER_TASK
