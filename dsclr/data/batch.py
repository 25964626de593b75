"""A rank's rows of one contrastive batch: in memory, in a temporary file, or read again in every pass."""

from __future__ import annotations

import errno
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import Tensor

from dsclr.config import ConfigError
from dsclr.data.tasks import BadDataError, Part, Rereader, Rows


class BatchLike(Protocol):
    """What a step reads, chunk by chunk, as often as it needs to."""

    @property
    def rows(self) -> int:
        """N of this rank."""

    @property
    def ids(self) -> Tensor:
        """(N,) int64. Raises RuntimeError before all rows were read once."""

    def chunk(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows [start, end) on the host: (n, 3, H, W) uint8, and (n, L) int64 tokens or second views like the first.

        Raises:
            IndexError: not 0 <= start < end <= N.
            ConfigError: the temporary file failed.
            BadDataError: samples that cannot be read, or not again.
        """


@dataclass(frozen=True)
class Batch:
    """All rows in memory.

    Attributes:
        a: (N, 3, H, W) uint8 images.
        b: (N, L) int64 tokens, or (N, 3, H, W) uint8 second views.
        ids: (N,) int64.
    """

    a: Tensor
    b: Tensor
    ids: Tensor

    @classmethod
    def empty(cls, rows: int, like: Part, pin_memory: bool) -> Batch:
        """To be written, with rows as in ``like``."""
        return cls(*(empty(rows, part, pin_memory) for part in (like.a, like.b, like.ids)))

    @property
    def rows(self) -> int:
        return len(self.ids)

    def chunk(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        check_range(self, start, end)
        return self.a[start:end], self.b[start:end]

    def write(self, start: int, part: Part) -> None:
        end = start + len(part)
        self.a[start:end], self.b[start:end], self.ids[start:end] = part.a, part.b, part.ids


class SpilledBatch:
    """Images in an unlinked temporary file, tokens and ids in memory.

    Not a memory map, whose pages would count as this process's resident memory.

    Args:
        rows: N.
        like: rows of the same shapes.
        folder: of the file; None: the system's temporary folder.
        pin_memory: of the chunks.

    Raises:
        ConfigError: a folder that cannot be written or has too little room, here or in :meth:`write`.
    """

    def __init__(self, rows: int, like: Part, folder: Path | None = None, pin_memory: bool = False) -> None:
        self.rows = rows
        self.ids = empty(rows, like.ids, pin_memory)
        self._pin_memory = pin_memory
        self._folder = Path(folder or tempfile.gettempdir())
        sides = (like.a, like.b) if is_image(like.b) else (like.a,)
        self._bytes = sum(rows * math.prod(side.shape[1:]) for side in sides)
        try:
            descriptor, name = tempfile.mkstemp(prefix="dsclr-", dir=self._folder)
        except OSError as error:
            raise self._failed(error) from error
        weakref.finalize(self, os.close, descriptor)
        os.unlink(name)
        room = os.fstatvfs(descriptor)
        # Some network file systems report no size at all.
        if room.f_blocks and room.f_bavail * room.f_frsize < self._bytes:
            raise self._failed(OSError(errno.ENOSPC, f"only {room.f_bavail * room.f_frsize:,} are free"))
        self._a = _FileRows(descriptor, 0, like.a.shape[1:])
        self._b: _FileRows | Tensor = empty(rows, like.b, pin_memory)
        if is_image(like.b):
            self._b = _FileRows(descriptor, rows * self._a.row_bytes, like.b.shape[1:])

    def chunk(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        check_range(self, start, end)
        try:
            a, b = (
                side.read(start, end, self._pin_memory) if isinstance(side, _FileRows) else side[start:end]
                for side in (self._a, self._b)
            )
        except OSError as error:
            raise self._failed(error) from error
        return a, b

    def write(self, start: int, part: Part) -> None:
        end = start + len(part)
        self.ids[start:end] = part.ids
        try:
            self._a.write(start, part.a)
            if isinstance(self._b, _FileRows):
                self._b.write(start, part.b)
            else:
                self._b[start:end] = part.b
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the images of a batch need {self._bytes:,} bytes a rank in a temporary file in {self._folder}: "
            f"{error.strerror or error}. Set dsclr.step.spill_dir to a folder on a disk with room for all ranks, or "
            'dsclr.step.host_images to "reread"'
        )


@dataclass(frozen=True)
class _FileRows:
    """uint8 rows of one shape, one after the other in a file from byte ``offset`` on. Both methods raise OSError."""

    descriptor: int
    offset: int
    shape: Sequence[int]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape)

    def write(self, start: int, rows: Tensor) -> None:
        self._all(os.pwrite, rows.contiguous(), start)

    def read(self, start: int, end: int, pin_memory: bool) -> Tensor:
        rows = torch.empty((end - start, *self.shape), dtype=torch.uint8, pin_memory=pin_memory)
        self._all(lambda descriptor, left, at: os.preadv(descriptor, [left], at), rows, start)
        return rows

    def _all(self, move: Callable[[int, memoryview, int], int], rows: Tensor, start: int) -> None:
        """The kernel moves 2 GiB at most a call, and may stop anywhere before."""
        data = rows.view(-1).numpy().data
        done = 0
        while done < len(data):
            moved = move(self.descriptor, data[done:], self.offset + start * self.row_bytes + done)
            if not moved:
                raise OSError(errno.EIO, "the temporary file is shorter than what was written to it")
            done += moved


class RereadBatch:
    """No image is kept: the first pass takes rows from the stream, later ones read the same samples again.

    A sample's augmentation follows from its position, so it comes out the same. Chunks may be asked for in any order
    and again before all rows were seen; ascending ones without gaps are read ahead of time.

    Args:
        rows: N.
        stream: gives this batch's rows in order.
        position: of a slot of the stream, in the dataset.
        rereader: for the later passes; shared with other batches.
        pin_memory: of the chunks.
    """

    def __init__(
        self, rows: int, stream: Rows, position: Callable[[int], int], rereader: Rereader, pin_memory: bool = False
    ) -> None:
        self.rows = rows
        self._stream: Rows | None = stream
        self._position, self._rereader, self._pin_memory = position, rereader, pin_memory
        self._positions = torch.empty(rows, dtype=torch.int64)
        self._ids = torch.empty(rows, dtype=torch.int64, pin_memory=pin_memory)
        # Rows that the stream has given.
        self._seen = 0
        self._reading: Rows | None = None
        # The row that the reading gives next.
        self._reading_at = 0

    @property
    def ids(self) -> Tensor:
        if self._seen < self.rows:
            raise RuntimeError(f"the ids are known after the first pass: {self._seen} of {self.rows} rows were read")
        return self._ids

    def chunk(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        check_range(self, start, end)
        self._see(start)
        sides: tuple[Tensor, Tensor] | None = None
        at = start
        while at < end:
            part = self._again(at, end - at) if at < self._seen else self._first_time(end - at)
            if sides is None:
                a, b = (empty(end - start, side, self._pin_memory) for side in (part.a, part.b))
                sides = a, b
            for side, rows in zip(sides, (part.a, part.b), strict=True):
                side[at - start : at - start + len(part)] = rows
            at += len(part)
        assert sides is not None
        return sides

    def finish(self) -> None:
        """Take from the stream what is left of the first pass, so that the next batch starts where it should."""
        self._see(self.rows)

    def _see(self, rows: int) -> None:
        while self._seen < rows:
            self._first_time(rows - self._seen)

    def _first_time(self, most: int) -> Part:
        assert self._stream is not None
        part = self._stream.take(most)
        end = self._seen + len(part)
        self._positions[self._seen : end] = torch.tensor([self._position(slot) for slot in part.slots])
        self._ids[self._seen : end] = part.ids
        self._seen = end
        # It was to end at the rows seen until now.
        self._reading = None
        if end == self.rows:
            self._stream = None
        return part

    def _again(self, start: int, most: int) -> Part:
        if self._reading is None or self._reading.closed or start != self._reading_at:
            self._reading = self._rereader.read(self._positions[start : self._seen])
        part = self._reading.take(most)
        if not torch.equal(part.ids, self._ids[start : start + len(part)]):
            raise BadDataError(
                f"a shard changed between two readings of a batch (rows {start} to {start + len(part)} are other "
                "samples now). Leave the shards as they are during a run, or set dsclr.step.host_images to "
                '"spill" or "keep"'
            )
        self._reading_at = start + len(part)
        return part


def empty(rows: int, like: Tensor, pin_memory: bool) -> Tensor:
    """(rows, ...) with shape and dtype of the rows of ``like``."""
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, pin_memory=pin_memory)


def is_image(side: Tensor) -> bool:
    """Whether it holds images and not tokens."""
    return side.dtype == torch.uint8


def check_range(batch: BatchLike, start: int, end: int) -> None:
    if not 0 <= start < end <= batch.rows:
        raise IndexError(f"rows [{start}, {end}) of a batch of {batch.rows}")


def is_in_memory(folder: Path) -> bool:
    """Whether files in ``folder`` take memory (tmpfs) and not a disk."""
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    folder = folder.resolve()
    mounts = [str(parent) for parent in (folder, *folder.parents) if str(parent) in kinds]
    return bool(mounts) and kinds[mounts[0]] in ("tmpfs", "ramfs")
