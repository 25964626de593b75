"""Random access to the samples of shards."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsclr.config import ConfigError
from dsclr.data.cache import ShardCache
from dsclr.data.causes import BadSample
from dsclr.data.index import ShardIndex, load_index
from dsclr.data.shards import Shard

logger = logging.getLogger(__name__)

# A local read that fails is tried again after so many seconds: network file systems stumble.
RETRY_WAITS = (0.2, 1.0)
# A shard that could not be read is not asked again for so many seconds: each of its samples would wait as long.
FAILED_SECONDS = 60.0
# Shards whose samples are counted at once, which is mostly waiting where they are remote.
COUNTING_THREADS = 8
# Shards that the log names for what of them is never read, when all are counted.
MOST_NAMED = 10


@dataclass
class ShardReader:
    """Reads any sample, a few files open at a time.

    Args:
        shards: tar or tar.gz files.
        cache: of copies and indexes.
        open_files: kept open.

    Attributes:
        flaws: number of a shard -> what of it is never read, in words; of the shards counted or opened so far.
    """

    shards: Sequence[Shard]
    cache: ShardCache
    open_files: int = 32
    flaws: dict[int, list[str]] = field(default_factory=dict, repr=False)
    _new_flaws: dict[int, list[str]] = field(default_factory=dict, repr=False)
    _open: dict[int, tuple[int, ShardIndex]] = field(default_factory=dict, repr=False)
    _failed: dict[int, tuple[float, str]] = field(default_factory=dict, repr=False)
    _fetcher: threading.Thread | None = field(default=None, repr=False)

    def counts(self) -> list[int]:
        """Samples of every shard: what an index file says, otherwise counted (and remembered in the cache).

        Raises:
            ConfigError: a shard that cannot be read, a file that is no tar, or not one sample in all of them.
        """
        counts: dict[int, int] = {i: shard.samples for i, shard in enumerate(self.shards) if shard.samples is not None}
        unknown = [i for i in range(len(self.shards)) if i not in counts]
        remote = sum(not self.shards[i].is_local for i in unknown)
        if remote:
            logger.info(
                "fetching %d remote shards to count their samples; with an index file (tools/make_shards.py writes "
                "one) each is fetched when it is needed",
                remote,
            )
        # In random order: processes that begin together share the work through the cache.
        with ThreadPoolExecutor(COUNTING_THREADS) as pool:
            drawn = random.Random(os.getpid()).sample(unknown, len(unknown))
            indexes = dict(zip(drawn, pool.map(self._index, drawn), strict=True))
        counts.update({i: len(index) for i, index in indexes.items()})
        # All ranks count the same shards: one speaks.
        first_rank = os.environ.get("RANK", "0") in ("", "0")
        flawed = {i: indexes[i].flaws for i in unknown if indexes[i].flaws}
        for named, (i, flaws) in enumerate(flawed.items()):
            self._note(i, flaws, first_rank and named < MOST_NAMED)
        if first_rank and len(flawed) > MOST_NAMED:
            logger.warning(
                "the same goes for %d more shard(s); tools/check_shards.py names them all", len(flawed) - MOST_NAMED
            )
        if not sum(counts.values()):
            raise ConfigError(f"no samples in {len(self.shards)} shard(s), the first is {self.shards[0]}")
        return [counts[i] for i in range(len(self.shards))]

    def _index(self, shard: int) -> ShardIndex:
        try:
            return load_index(self.cache.local(self.shards[shard]), self.cache.folder)
        except OSError as error:
            raise ConfigError(f"cannot read shard {self.shards[shard]}: {error}") from error

    def read(self, shard: int, sample: int) -> tuple[str, dict[str, bytes]]:
        """(key, members by extension). Raises BadSample("unreadable_shard")."""
        name = self.shards[shard]
        failed_at, why = self._failed.get(shard, (-FAILED_SECONDS, ""))
        if time.monotonic() - failed_at < FAILED_SECONDS:
            raise BadSample("unreadable_shard", why)
        for wait in (*RETRY_WAITS, None):
            try:
                return self._read(shard, sample)
            except ConfigError as error:
                why = f"{name}: {error}"
                break
            except IndexError:
                # The shard is good; its index file promises more than it holds.
                raise BadSample(
                    "unreadable_shard", f"{name} has no sample {sample}, which its index file promises"
                ) from None
            except OSError as error:
                self._close(shard)
                why = f"{name}: {error}"
                # The cache was patient with a remote shard already; of its copy only eviction is worth another try.
                if wait is None or name.is_local == isinstance(error, FileNotFoundError):
                    break
                time.sleep(wait)
        self._failed[shard] = time.monotonic(), why
        raise BadSample("unreadable_shard", why)

    def _read(self, shard: int, sample: int) -> tuple[str, dict[str, bytes]]:
        descriptor, index = self._file(shard)
        entry = index[sample]
        members = {name: os.pread(descriptor, size, at) for name, (at, size) in entry.members.items()}
        short = [name for name, (_, size) in entry.members.items() if len(members[name]) != size]
        if short:
            raise BadSample("unreadable_shard", f"{self.shards[shard]} ends inside {entry.key}.{short[0]}")
        return entry.key, members

    def prepare(self, shards: Sequence[int]) -> None:
        """Fetch shards that will be needed, in the background; nothing happens for those that are here."""
        if self._fetcher is not None and self._fetcher.is_alive():
            return
        missing = [self.shards[i] for i in shards if not self.cache.is_ready(self.shards[i])]
        if missing:
            # Other processes have the same list: they meet less often in different orders.
            random.Random(os.getpid()).shuffle(missing)
            self._fetcher = threading.Thread(target=self.cache.prepare, args=(missing,), daemon=True)
            self._fetcher.start()

    def _file(self, shard: int) -> tuple[int, ShardIndex]:
        if shard not in self._open:
            while len(self._open) >= self.open_files:
                self._close(next(iter(self._open)))
            path = self.cache.local(self.shards[shard])
            index = load_index(path, self.cache.folder)
            promised = self.shards[shard].samples
            flaws = index.flaws
            if promised is not None and promised < len(index):
                flaws.append(
                    f"holds {len(index)} samples, its index file says {promised}: the last {len(index) - promised} are "
                    "never read; write the index anew"
                )
            self._note(shard, flaws)
            self._open[shard] = (os.open(path, os.O_RDONLY), index)
        return self._open[shard]

    def take_new_flaws(self) -> dict[int, list[str]]:
        """What was added to :attr:`flaws` since the last call in this process."""
        taken, self._new_flaws = self._new_flaws, {}
        return taken

    def _note(self, shard: int, flaws: list[str], log: bool = True) -> None:
        """Keep what of a shard is never read, and say what was not said of it yet."""
        known = self.flaws.get(shard, [])
        for flaw in flaws:
            if log and flaw not in known:
                logger.warning("%s %s", self.shards[shard], flaw)
        if flaws != known:
            self.flaws[shard] = self._new_flaws[shard] = flaws

    def _close(self, shard: int) -> None:
        if shard in self._open:
            os.close(self._open.pop(shard)[0])

    def __getstate__(self) -> dict[str, object]:
        """Neither file descriptors nor threads travel to another process."""
        return {**self.__dict__, "_open": {}, "_fetcher": None}
