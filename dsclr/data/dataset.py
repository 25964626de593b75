"""Any sample of the shards by position: read, decode, augment, tokenize."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from dsclr.config import ConfigError
from dsclr.data.decode import BadSample, Members, Tokenizer, hash_id, read_captions, read_id, read_image
from dsclr.data.index import Entry, load_index
from dsclr.data.order import SampleOrder
from dsclr.data.shards import local_tar
from dsclr.data.views import seeded


@dataclass(frozen=True)
class Sample:
    """One row: ``a`` an image (3, H, W) uint8; ``b`` tokens (L,) int64 or a second view; ``id`` int."""

    a: Tensor
    b: Tensor
    id: int
    position: int


@dataclass(frozen=True)
class Skipped:
    """A row that could not be made, and why."""

    position: int
    shard: str
    key: str
    cause: str
    detail: str


@dataclass
class ShardReader:
    """Random access to the samples of local tar shards, a few files open at a time.

    Args:
        shards: tar or tar.gz files.
        cache_dir: for unpacked copies and indexes.
        open_files: kept open and indexed in memory.
    """

    shards: Sequence[Path]
    cache_dir: Path
    open_files: int = 32
    _open: dict[int, tuple[int, list[Entry]]] = field(default_factory=dict, repr=False)

    def counts(self) -> list[int]:
        """Samples of every shard.

        Raises:
            ConfigError: a file that is no tar, or not one sample in all of them.
        """
        counts = []
        for shard in self.shards:
            try:
                counts.append(len(load_index(local_tar(shard, self.cache_dir), self.cache_dir)))
            except OSError as error:
                raise ConfigError(f"cannot read shard {shard}: {error}") from error
        if not sum(counts):
            raise ConfigError(f"no samples in {len(self.shards)} shard(s), the first is {self.shards[0]}")
        return counts

    def read(self, shard: int, sample: int) -> tuple[str, dict[str, bytes]]:
        """(key, members by extension). Raises BadSample("unreadable_shard")."""
        path = self.shards[shard]
        try:
            descriptor, entries = self._file(shard)
            entry = entries[sample]
            members = {name: os.pread(descriptor, size, at) for name, (at, size) in entry.members.items()}
        except (OSError, IndexError, ConfigError) as error:
            raise BadSample("unreadable_shard", f"{path}: {error}") from None
        short = [name for name, (_, size) in entry.members.items() if len(members[name]) != size]
        if short:
            raise BadSample("unreadable_shard", f"{path} ends inside {entry.key}.{short[0]}")
        return entry.key, members

    def _file(self, shard: int) -> tuple[int, list[Entry]]:
        if shard not in self._open:
            while len(self._open) >= self.open_files:
                oldest = next(iter(self._open))
                os.close(self._open.pop(oldest)[0])
            path = local_tar(self.shards[shard], self.cache_dir)
            self._open[shard] = (os.open(path, os.O_RDONLY), load_index(path, self.cache_dir))
        return self._open[shard]

    def __getstate__(self) -> dict[str, object]:
        """File descriptors do not travel to another process."""
        return {**self.__dict__, "_open": {}}


@dataclass
class ShardDataset(Dataset):
    """Rows by position in the run's order.

    Args:
        reader, order: where samples are and in which order they come.
        image: image member extensions.
        caption: caption source; unused without a tokenizer.
        id_source: what makes two samples the same.
        transform: of every view.
        tokenizer: of open_clip; None: ``b`` is a second view of the image.
        seed: of the augmentations, with the position.
        choose_caption: where a sample has several captions, draw one; False: the first.
    """

    reader: ShardReader
    order: SampleOrder
    image: str
    caption: str
    id_source: str
    transform: v2.Compose
    tokenizer: Tokenizer | None
    seed: int
    choose_caption: bool = True

    def __getitem__(self, position: int) -> Sample | Skipped:
        _, shard, sample = self.order.locate(position)
        key = f"sample {sample}"
        try:
            key, members = self.reader.read(shard, sample)
            return self._row(position, self.reader.shards[shard].name, key, members)
        except BadSample as bad:
            return Skipped(position, str(self.reader.shards[shard]), key, bad.cause, str(bad))

    def _row(self, position: int, shard: str, key: str, members: Members) -> Sample:
        captions: list[str] = []
        if self.tokenizer is not None or self.id_source == "caption":
            captions = read_captions(members, self.caption)
        image = read_image(members, self.image)
        seed = hash_id(f"{self.seed} {position}")
        a = seeded(self.transform, image, seed)
        if self.tokenizer is None:
            b = seeded(self.transform, image, seed + 1)
        else:
            # Several captions: another one each time the sample comes round, the same whichever process reads it.
            caption = captions[seed % len(captions)] if self.choose_caption else captions[0]
            b = self.tokenizer([caption])[0].to(torch.int64)
        return Sample(a, b, read_id(members, self.id_source, shard, key, captions), position)
