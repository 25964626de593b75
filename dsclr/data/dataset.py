"""Any sample of the shards by position: read, decode, augment, tokenize."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from dsclr.data.causes import BadSample
from dsclr.data.decode import (
    Members,
    Tokenizer,
    hash_id,
    is_cut_off,
    padding_token,
    read_captions,
    read_id,
    shortened,
)
from dsclr.data.images import ImageReader
from dsclr.data.order import Order
from dsclr.data.reader import ShardReader
from dsclr.data.views import seeded

logger = logging.getLogger(__name__)

# Reads of a process between two looks at what will be needed.
PREPARE_EVERY = 256


@dataclass(frozen=True)
class Sample:
    """One row.

    Attributes:
        a: (3, H, W) uint8 image.
        b: (L,) int64 tokens, or a second view like the first.
        id: what makes two samples the same.
        position: in the run's order.
        shard: number of the shard.
        notes: of dsclr.data.causes.NOTES.
        flaws: of the shards that its reading opened, see :class:`dsclr.data.reader.ShardReader`.
    """

    a: Tensor
    b: Tensor
    id: int
    position: int
    shard: int
    notes: tuple[str, ...] = ()
    flaws: Mapping[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A row that could not be made, and why; or without position and key a shard of which some is never read.

    Attributes:
        flaws: as of :class:`Sample`.
    """

    position: int | None
    shard: str
    key: str
    cause: str
    detail: str
    flaws: Mapping[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptionPolicy:
    """Attributes:
    empty: captions without letters make a bad sample ("skip") or are the empty text ("use").
    long: captions with more tokens than the model reads are cut off ("truncate") or make a bad sample ("skip").
    """

    empty: Literal["skip", "use"] = "skip"
    long: Literal["truncate", "skip"] = "truncate"


@dataclass
class ShardDataset(Dataset):
    """Rows by position in the run's order.

    Args:
        reader, order: where samples are and in which order they come.
        images: decodes the image member.
        caption: caption source; unused without a tokenizer.
        captions: what becomes of empty and over-long captions.
        id_source: what makes two samples the same.
        transform: of every view.
        tokenizer: of open_clip; None: ``b`` is a second view of the image.
        seed: of the augmentations, with the position.
        sources: name -> shards, of a mixture in the order of its shards; empty without one.
        counts: samples of every shard.
        choose_caption: where a sample has several captions, draw one; False: the first.
    """

    reader: ShardReader
    order: Order
    images: ImageReader
    caption: str
    captions: CaptionPolicy
    id_source: str
    transform: v2.Compose
    tokenizer: Tokenizer | None
    seed: int
    sources: dict[str, int]
    counts: Sequence[int] = ()
    choose_caption: bool = True
    _reads: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._padding = None if self.tokenizer is None else padding_token(self.tokenizer)

    def contents(self) -> dict[str, Any]:
        """What tells these shards from others, wherever they lie: how many, their samples, a digest of each shard's."""
        names = [shard.name for shard in self.reader.shards]
        digest = hashlib.sha256(json.dumps([names, list(self.counts)]).encode()).hexdigest()
        return {"number": len(names), "samples": sum(self.counts), "digest": digest[:16]}

    def __getitem__(self, position: int) -> Sample | Skipped:
        if self._reads % PREPARE_EVERY == 0:
            self.reader.prepare(self.order.coming_shards(position))
        self._reads += 1
        item = self._item(position)
        flaws = self.reader.take_new_flaws()
        return replace(item, flaws=flaws) if flaws else item

    def _item(self, position: int) -> Sample | Skipped:
        shard, sample = self.order.locate(position)
        key = f"sample {sample}"
        try:
            key, members = self.reader.read(shard, sample)
            return self._row(position, shard, key, members)
        except BadSample as bad:
            return Skipped(position, str(self.reader.shards[shard]), key, bad.cause, str(bad))
        except Exception as error:
            # One sample, whatever is wrong with it, ends no run; too many do.
            logger.debug("%s in %s", key, self.reader.shards[shard], exc_info=True)
            return Skipped(position, str(self.reader.shards[shard]), key, "failed", f"{type(error).__name__}: {error}")

    def _row(self, position: int, shard: int, key: str, members: Members) -> Sample:
        captions: list[str] = []
        if self.tokenizer is not None or self.id_source == "caption":
            captions = read_captions(members, self.caption, self.captions.empty)
        image, notes = self.images.read(members)
        seed = hash_id(f"{self.seed} {position}")
        a = seeded(self.transform, image, seed)
        if self.tokenizer is None:
            b = seeded(self.transform, image, seed + 1)
        else:
            # Several captions: another one each time the sample comes round, the same whichever process reads it.
            caption = captions[seed % len(captions)] if self.choose_caption else captions[0]
            text = shortened(caption)
            b = self.tokenizer([text])[0].to(torch.int64)
            if len(text) < len(caption) or is_cut_off(self.tokenizer, text, b, self._padding):
                if self.captions.long == "skip":
                    raise BadSample("long_caption", f"{caption[:60]!r}... has more than {len(b)} tokens")
                notes = [*notes, "truncated_captions"]
        name = self.reader.shards[shard].name
        return Sample(a, b, read_id(members, self.id_source, name, key, captions), position, shard, tuple(notes))
