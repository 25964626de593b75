"""Batches of the training stream, the same for any number of loader processes, continued at any sample."""

from __future__ import annotations

import atexit
import functools
import logging
import tempfile
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.data import DataLoader

from dsclr.data.batch import Batch, BatchLike, RereadBatch, SpilledBatch, is_in_memory
from dsclr.data.causes import INCOMPLETE_SHARD
from dsclr.data.dataset import ShardDataset, Skipped
from dsclr.data.order import Slots
from dsclr.data.tasks import ROWS_PER_TASK, BadDataError, Part, Rereader, Rows, Task, collate
from dsclr.interruption import ignore_signals

logger = logging.getLogger(__name__)

# Positions over which the part of unusable samples is judged.
BAD_WINDOW = 10_000
# Skipped samples of one cause that the log names; all stand in skipped.jsonl.
MOST_LOGGED = 10


_OPEN: WeakValueDictionary[int, TrainLoader] = WeakValueDictionary()


@functools.cache
def _close_at_exit() -> None:
    """Python itself would end loader processes by SIGTERM, which they ignore, and wait for them for ever."""

    def close() -> None:
        for loader in list(_OPEN.values()):
            loader.close()

    atexit.register(close)


@dataclass
class TrainLoader:
    """An endless iterator of batches, see :class:`BatchLike`.

    A global batch is the same set of samples for every number of ranks, see :class:`dsclr.data.order.Slots`. A sample
    that cannot be used is counted, reported and replaced by the next of the rank's own stream; no rank waits for
    another.

    Rows, ids, what is skipped and where the stream stands are the same whatever ``host_images`` says.

    Args:
        dataset: rows by position.
        rows: N, rows a rank and batch.
        rank, world_size: of this process.
        workers: loader processes; 0 loads in this one.
        prefetch: tasks queued a worker.
        max_bad_fraction: see raises.
        pin_memory: for asynchronous copies to a GPU.
        slots: which positions the ranks read; None: all from the start of the run.
        consumed: slots of the rank's stream already used, from :attr:`consumed` of an earlier run. Moves on when
            all rows of a batch were read once: before it is given out, or for "reread" with its last first chunk.
        host_images: "keep" all rows of a batch in memory; "spill" the images to a temporary file; or "reread" them
            from the shards in every pass, a batch asked for before its predecessor was read to its end doing that.
        spill_dir: folder of the temporary file; None: the system's.

    Attributes:
        skipped: cause -> unusable samples of this rank.
        notes: of dsclr.data.causes.NOTES -> samples of this rank; the incomplete shards are those that rank 0 has met.
        shard_rows: shard number -> rows of the latest batch.

    Raises:
        ValueError: another host_images.
        ConfigError: (while iterating) the temporary file cannot be written.
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
    slots: Slots | None = None
    consumed: int = 0
    host_images: str = "keep"
    spill_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.host_images not in ("keep", "spill", "reread"):
            raise ValueError(f"host_images = {self.host_images!r}, accepted: keep, spill, reread")
        folder = Path(self.spill_dir or tempfile.gettempdir())
        if self.host_images == "spill" and is_in_memory(folder):
            logger.warning("%s is in memory: set dsclr.step.spill_dir to a folder on a disk", folder)
        self.slots = self.slots or Slots(self.rows, self.world_size)
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.shard_rows: Counter[int] = Counter()
        self._unreported: list[Skipped] = []
        # Of slots that no batch has passed yet: the processes run ahead.
        self._ahead: deque[tuple[int, Skipped]] = deque()
        self._flaws: dict[int, list[str]] = {}
        self._recent: deque[tuple[int, int]] = deque()
        self._rereader = Rereader(self.dataset, self.workers, self.prefetch)
        # Weakly: a stream ends with the iterator that reads it.
        self._streams: WeakSet[_Stream] = WeakSet()
        _OPEN[id(self)] = self
        _close_at_exit()

    def position(self, slot: int) -> int:
        """Position in the run's order of this rank's slot-th sample."""
        assert self.slots is not None
        return self.slots.position(self.rank, slot)

    def take_skipped(self) -> list[Skipped]:
        """Samples skipped since the last call, and shards of which some is never read."""
        taken, self._unreported = self._unreported, []
        return taken

    def __iter__(self) -> Iterator[BatchLike]:
        self._ahead.clear()
        stream = _Stream(self)
        self._streams.add(stream)
        while True:
            if self.host_images == "reread":
                again = RereadBatch(self.rows, stream, self.position, self._rereader, self.pin_memory)
                yield again
                again.finish()
            else:
                yield self._fill(stream)

    def close(self) -> None:
        """End the loader processes. Batches given out stay readable; iterating anew goes on at :attr:`consumed`."""
        for stream in list(self._streams):
            stream.close()
        self._rereader.close()

    def _fill(self, stream: _Stream) -> Batch | SpilledBatch:
        part = stream.take(self.rows)
        batch = self._empty(part)
        batch.write(0, part)
        filled = len(part)
        while filled < self.rows:
            part = stream.take(self.rows - filled)
            batch.write(filled, part)
            filled += len(part)
        return batch

    def _empty(self, like: Part) -> Batch | SpilledBatch:
        if self.host_images == "spill":
            return SpilledBatch(self.rows, like, self.spill_dir, self.pin_memory)
        return Batch.empty(self.rows, like, self.pin_memory)

    def _tasks(self, slot: int) -> Generator[Task, None, None]:
        loader = DataLoader(
            self.dataset,
            batch_sampler=_Positions(self, slot),
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            collate_fn=collate,
            worker_init_fn=ignore_signals,
            # Its own: drawing the workers' seed from the global one would shift the dropout of a resumed run.
            generator=torch.Generator(),
        )
        for task in _tasks_of(loader):
            self._record(task.flaws)
            slots = range(slot, slot + ROWS_PER_TASK) if task.skipped else ()
            slot_of: dict[int | None, int] = {self.position(s): s for s in slots}
            self._ahead.extend((slot_of[skipped.position], skipped) for skipped in task.skipped)
            slot += ROWS_PER_TASK
            self._judge(len(task.offsets), len(task.skipped), task)
            yield task

    def _pass(self, slot: int | None) -> None:
        """Count what was skipped before a slot; None: everything."""
        while self._ahead and (slot is None or self._ahead[0][0] < slot):
            self._report(self._ahead.popleft()[1])

    def _record(self, flaws: dict[int, list[str]]) -> None:
        """Leave a trace of shards of which some is never read; how many samples that is nobody knows."""
        if self.rank != 0:
            return  # all ranks read the same shards
        for shard, found in flaws.items():
            for flaw in found:
                if flaw not in self._flaws.get(shard, []):
                    name = str(self.dataset.reader.shards[shard])
                    self._unreported.append(Skipped(None, name, "", INCOMPLETE_SHARD, f"{name} {flaw}"))
            self._flaws[shard] = found
        if self._flaws:
            # Set, not added to: a resumed run begins with the count of the run before.
            self.notes["incomplete_shards"] = len(self._flaws)
        else:
            self.notes.pop("incomplete_shards", None)

    def _report(self, item: Skipped) -> None:
        self.skipped[item.cause] += 1
        self._unreported.append(item)
        count = self.skipped[item.cause]
        if count <= MOST_LOGGED:
            logger.warning("skipped %s in %s: %s", item.key, item.shard, item.detail)
        if count == MOST_LOGGED:
            logger.warning("further samples with this cause (%s) are only counted and listed", item.cause)

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
            self._pass(None)
            allowed = (
                f", or raise dsclr.data.max_bad_fraction (now {self.max_bad_fraction:g}: "
                f"{self.max_bad_fraction * BAD_WINDOW:,.0f} of {BAD_WINDOW:,})"
            )
            raise BadDataError(
                f"{recent_bad} of the last {recent} samples were unusable "
                f"({', '.join(f'{cause}: {n}' for cause, n in self.skipped.most_common())}), the last was "
                f"{last.key} in {last.shard}: {last.detail}. Look them over with tools/check_shards.py and mend the "
                f"shards{'' if hopeless else allowed}"
            )


def _tasks_of(loader: DataLoader) -> Iterator[Task]:
    """What a loader gives; a process of its that is gone becomes an error that says so.

    Raises:
        BadDataError: the operating system ended a loader process.
    """
    try:
        yield from loader
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error) and "is killed by signal" not in str(error):
            raise
        raise BadDataError(
            f"a loader process is gone ({error}). If the system ended it for want of memory, lower dsclr.data.workers "
            "or dsclr.data.prefetch; if a decoder crashed on a sample, tools/check_shards.py finds it. --resume goes "
            "on from the newest checkpoint"
        ) from error


class _Stream(Rows):
    """The rank's rows from ``consumed`` on; what is taken at once never crosses the end of a batch."""

    def __init__(self, loader: TrainLoader) -> None:
        super().__init__(loader._tasks(loader.consumed), loader.consumed)
        self.loader = loader
        self.filled = 0

    def take(self, most: int) -> Part:
        if not self.filled:
            self.loader.shard_rows.clear()
        part = super().take(min(most, self.loader.rows - self.filled))
        self.filled += len(part)
        self.loader.shard_rows.update(part.shards)
        self.loader.notes.update(note for notes in part.notes for note in notes)
        if self.filled == self.loader.rows:
            self.loader.consumed = part.slots[-1] + 1
            self.loader._pass(self.loader.consumed)
            self.filled = 0
        return part


class _Positions:
    """Lists of positions for the loader processes, without end."""

    def __init__(self, loader: TrainLoader, slot: int) -> None:
        self.loader = loader
        self.slot = slot

    def __iter__(self) -> Iterator[list[int]]:
        slot = self.slot
        while True:
            yield [self.loader.position(s) for s in range(slot, slot + ROWS_PER_TASK)]
            slot += ROWS_PER_TASK
