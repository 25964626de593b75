"""One pass over all samples of a data set, in parallel, whatever happens to the processes that read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dsclr.config import ConfigError
from dsclr.data.checking.examine import Examiner
from dsclr.data.checking.findings import Example, Findings
from dsclr.data.checking.workers import NOWHERE, Died, Watch, run
from dsclr.data.dataset import ShardDataset
from dsclr.data.index import load_index

# Samples a process looks at between two answers: large enough to hide the pipe, small enough to share one shard.
CHUNK = 256


@dataclass(frozen=True)
class Opened:
    """A shard.

    Attributes:
        shard: its number.
        samples: that it holds; None: it cannot be read.
        bytes: of the tar, unpacked.
        damage: what is wrong with a part of it.
        left_out: further members that are never read, in words.
        error: why it cannot be read.
    """

    shard: int
    samples: int | None = None
    bytes: int = 0
    damage: str | None = None
    left_out: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Checked:
    """
    Attributes:
        opened: the shards looked at, in order.
        read: of each, the samples that an epoch reads: what an index file says, else what it holds.
        findings: of all samples.
        complete: False where a limit left some out.
    """

    opened: list[Opened]
    read: list[int]
    findings: Findings
    complete: bool


@dataclass(frozen=True)
class _Task:
    """Samples [start, stop) of a shard; stop None: open it. alone: a sample that a process has died over."""

    shard: int
    start: int = 0
    stop: int | None = None
    alone: bool = False


@dataclass
class _Schedule:
    """Shards are opened in order and looked at as soon as they are open.

    Under a limit one at a time is opened: which samples are the first ones shows only then.
    """

    shards: int
    limit: int | None
    queue: deque[_Task] = field(default_factory=deque)
    next_shard: int = 0
    opening: int = 0

    def take(self) -> _Task | None:
        if self.queue:
            return self.queue.popleft()
        if self.next_shard == self.shards or self.limit == 0 or (self.limit is not None and self.opening):
            return None
        self.next_shard += 1
        self.opening += 1
        return _Task(self.next_shard - 1)

    def granted(self, samples: int) -> int:
        """How many of the samples of a shard just opened are to be looked at."""
        if self.limit is None:
            return samples
        granted = min(samples, self.limit)
        self.limit -= granted
        return granted


def check(
    dataset: ShardDataset,
    workers: int,
    seconds: float,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda shards, samples: None,
) -> Checked:
    """Look at every sample once.

    A sample over which a process dies, or is busy for too long, twice, is unusable with cause "failed". What is found
    does not depend on the number of processes.

    Args:
        dataset: of training, in the order :class:`dsclr.data.checking.examine.InPlace`.
        workers: processes.
        seconds: that one sample may take.
        limit: samples to look at, the first ones; None: all.
        progress: told of (shards opened, samples looked at) since the last time.

    Raises:
        RuntimeError: a mistake in this code.
    """
    shards = dataset.reader.shards
    schedule = _Schedule(len(shards), limit)
    findings = Findings()
    opened: dict[int, Opened] = {}
    read: dict[int, int] = {}

    def work(task: _Task, watch: Watch) -> Opened | Findings:
        return _open(dataset, task.shard) if task.stop is None else _look(dataset, task, watch)

    def take_in(task: _Task, outcome: Opened | Findings | Died) -> None:
        before = findings.samples
        if isinstance(outcome, Findings):
            findings.add(outcome)
        elif task.stop is None:
            schedule.opening -= 1
            shard = outcome if isinstance(outcome, Opened) else Opened(task.shard, error=outcome.why)
            opened[task.shard] = shard
            promised = shards[task.shard].samples
            read[task.shard] = (shard.samples or 0) if promised is None else promised
            granted = schedule.granted(read[task.shard])
            if shard.error is None:
                starts = range(0, granted, CHUNK)
                schedule.queue += [_Task(task.shard, start, min(start + CHUNK, granted)) for start in starts]
            elif granted:
                example = Example(task.shard, 0, "sample 0", f"{shards[task.shard]}: {shard.error}")
                findings.unusable("unreadable_shard", example, granted)
        elif isinstance(outcome, Died):
            _blame(dataset, task, outcome, schedule, findings)
        progress(task.stop is None, findings.samples - before)

    for task, outcome in run(work, schedule.take, workers, seconds):
        take_in(task, outcome)
    numbers = sorted(opened)
    complete = len(numbers) == len(shards) and findings.samples == sum(read.values())
    return Checked([opened[n] for n in numbers], [read[n] for n in numbers], findings, complete)


def _open(dataset: ShardDataset, shard: int) -> Opened:
    cache = dataset.reader.cache
    try:
        path = cache.local(dataset.reader.shards[shard])
        index = load_index(path, cache.folder)
        return Opened(shard, len(index), path.stat().st_size, index.damage, tuple(index.left_out))
    except (OSError, ConfigError) as error:
        return Opened(shard, error=str(error) or type(error).__name__)


def _look(dataset: ShardDataset, task: _Task, watch: Watch) -> Findings:
    assert task.stop is not None
    examiner = Examiner(dataset, task.shard)
    if not dataset.reader.cache.is_ready(dataset.reader.shards[task.shard]):
        # Its copy had to make room for others. Fetching it again is not in the time of a sample.
        _open(dataset, task.shard)
    for sample in range(task.start, task.stop):
        watch.begin(sample)
        examiner.look(sample)
    watch.begin(NOWHERE)
    return examiner.finish()


def _blame(dataset: ShardDataset, task: _Task, died: Died, schedule: _Schedule, findings: Findings) -> None:
    """What a process was at when it died gets a process of its own, and is the culprit if that dies too."""
    assert task.stop is not None
    # Before its first sample or after its last one: any of them may be to blame for it.
    culprit = died.at if task.start <= died.at < task.stop else task.start
    if task.alone:
        findings.unusable("failed", Example(task.shard, culprit, _key(dataset, task.shard, culprit), died.why))
        return
    parts = [(task.start, culprit, False), (culprit, culprit + 1, True), (culprit + 1, task.stop, False)]
    schedule.queue.extendleft(_Task(task.shard, start, stop, alone) for start, stop, alone in parts if start < stop)


def _key(dataset: ShardDataset, shard: int, sample: int) -> str:
    """Of a sample whose members must not be read."""
    cache = dataset.reader.cache
    try:
        return load_index(cache.local(dataset.reader.shards[shard]), cache.folder)[sample].key
    except (OSError, ConfigError, IndexError):
        return f"sample {sample}"
