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


@dataclass
class ShardReader:
    """Reads any sample, a few files open at a time.

    Args:
        shards: tar or tar.gz files.
        cache: of copies and indexes.
        open_files: kept open.
    """

    shards: Sequence[Shard]
    cache: ShardCache
    open_files: int = 32
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
            counts.update(zip(drawn, pool.map(self._count, drawn), strict=True))
        if not sum(counts.values()):
            raise ConfigError(f"no samples in {len(self.shards)} shard(s), the first is {self.shards[0]}")
        return [counts[i] for i in range(len(self.shards))]

    def _count(self, shard: int) -> int:
        try:
            return len(load_index(self.cache.local(self.shards[shard]), self.cache.folder))
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
            if promised is not None and promised < len(index):
                logger.warning(
                    "%s holds %d samples, its index file says %d: the last %d are never read; write the index anew",
                    self.shards[shard],
                    len(index),
                    promised,
                    len(index) - promised,
                )
            self._open[shard] = (os.open(path, os.O_RDONLY), index)
        return self._open[shard]

    def _close(self, shard: int) -> None:
        if shard in self._open:
            os.close(self._open.pop(shard)[0])

    def __getstate__(self) -> dict[str, object]:
        """Neither file descriptors nor threads travel to another process."""
        return {**self.__dict__, "_open": {}, "_fetcher": None}
