"""What loader processes hand over, and the rows cut from it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dsclr.data.dataset import Sample, Skipped
from dsclr.interruption import ignore_signals

# Rows a loader process makes at a time: large enough to hide the queue, small enough to bound its memory.
ROWS_PER_TASK = 32


class BadDataError(RuntimeError):
    """Samples that cannot be used: too large a part of them, or one that has to be read a second time."""


@dataclass(frozen=True)
class Task:
    """The rows a loader process made of one list of positions, few tensors whatever their number.

    Attributes:
        a: (M, 3, H, W) uint8 images of the usable rows.
        b: (M, L) int64 tokens, or (M, 3, H, W) uint8 second views.
        ids: (M,) int64.
        offsets: of each usable row, its place in the list of positions.
        skipped: the others.
        shards: of each usable row, the number of its shard.
        notes: of each usable row, which of dsclr.data.causes.NOTES.
        flaws: number of a shard opened for them -> what of it is never read, in words.
    """

    a: Tensor
    b: Tensor
    ids: Tensor
    offsets: list[int]
    skipped: list[Skipped]
    shards: list[int]
    notes: list[tuple[str, ...]]
    flaws: dict[int, list[str]]


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
        [row.shard for _, row in rows],
        [row.notes for _, row in rows],
        {shard: flaws for item in items for shard, flaws in item.flaws.items()},
    )


@dataclass(frozen=True)
class Part:
    """Consecutive usable rows: ``a``, ``b``, ``ids``, ``shards`` and ``notes`` as in :class:`Task`.

    Attributes:
        slots: where each was in the order.
    """

    a: Tensor
    b: Tensor
    ids: Tensor
    slots: list[int]
    shards: list[int]
    notes: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.slots)


class Rows:
    """The usable rows of consecutive tasks, as many at a time as asked for.

    Args:
        tasks: of ROWS_PER_TASK slots each (the last may be shorter).
        slot: of the first task's first row.
    """

    def __init__(self, tasks: Generator[Task, None, None], slot: int = 0) -> None:
        self.closed = False
        self._tasks = tasks
        self._task: Task | None = None
        self._start = 0
        self._slot = self._next_slot = slot

    def take(self, most: int) -> Part:
        """The next rows, at least one and at most ``most``; without copying them.

        Raises:
            BadDataError: rows that cannot be used.
            RuntimeError: after :meth:`close` or an earlier error.
        """
        while self._task is None or self._start == len(self._task.offsets):
            self._task = None
            task = next(self._tasks, None)
            if task is None:
                raise RuntimeError("no rows: their loader was closed or has failed")
            self._task, self._start = task, 0
            self._slot, self._next_slot = self._next_slot, self._next_slot + ROWS_PER_TASK
        task, start, end = self._task, self._start, self._start + most
        self._start = min(end, len(task.offsets))
        slots = [self._slot + offset for offset in task.offsets[start:end]]
        tensors = task.a[start:end], task.b[start:end], task.ids[start:end]
        return Part(*tensors, slots, task.shards[start:end], task.notes[start:end])

    def close(self) -> None:
        """Let go of the loader; no more rows come."""
        self.closed = True
        self._tasks.close()
        self._task = None


class Rereader:
    """Reads rows again by position, in worker processes that stay alive from one reading to the next.

    Args:
        dataset: rows by position.
        workers: processes, started at the first reading; 0 reads in this one.
        prefetch: tasks queued a worker.
    """

    def __init__(self, dataset: Dataset, workers: int, prefetch: int) -> None:
        self._dataset, self._workers, self._prefetch = dataset, workers, prefetch
        self._order = _Positions()
        self._loader: DataLoader | None = None
        self._reading: Rows | None = None

    def read(self, positions: Tensor) -> Rows:
        """
        Args:
            positions: (N,) int64, in the order wanted.

        Returns:
            The rows, closed when the next reading begins. Its ``take`` raises BadDataError where one is unusable.
        """
        if self._reading is not None:
            self._reading.close()
        self._reading = Rows(self._tasks(positions))
        return self._reading

    def close(self) -> None:
        """End the worker processes; another reading starts new ones."""
        if self._reading is not None:
            self._reading.close()
        self._loader = None

    def _tasks(self, positions: Tensor) -> Generator[Task, None, None]:
        self._order.positions = positions
        if self._loader is None:
            self._loader = DataLoader(
                self._dataset,
                batch_sampler=self._order,
                num_workers=self._workers,
                prefetch_factor=self._prefetch if self._workers else None,
                persistent_workers=self._workers > 0,
                collate_fn=collate,
                worker_init_fn=ignore_signals,
                generator=torch.Generator(),
            )
        for task in self._loader:
            if task.skipped:
                lost = task.skipped[0]
                raise BadDataError(
                    f"{lost.key} in {lost.shard} was read before and cannot be read again: {lost.detail}. Leave the "
                    'shards as they are during a run, or set dsclr.step.host_images to "spill" or "keep"'
                )
            yield task


class _Positions:
    """Lists of positions for the worker processes, of the reading that begins."""

    positions: Tensor

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.positions), ROWS_PER_TASK):
            yield self.positions[start : start + ROWS_PER_TASK].tolist()
