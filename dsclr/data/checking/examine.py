"""One sample: what training makes of it, and what is in it."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from dsclr.data.causes import BadSample
from dsclr.data.checking.findings import ROW, Example, Findings, Odd
from dsclr.data.dataset import Sample, ShardDataset
from dsclr.data.decode import is_cut_off, padding_token, read_captions
from dsclr.data.images import ImageReader, readable_formats

# Pictures worth a look: longer than so many times their shorter side, ...
ODD_ASPECT = 3.0
# ... with a shorter side of fewer pixels, ...
TINY = 64
# ... or with a standard deviation of every colour channel below this, of 255.
ONE_COLOUR = 3.0
# Captions that a table of data left where it had none.
PLACEHOLDERS = ("nan", "none", "null")
_ORIENTATION = 0x0112
_SAMPLE_BITS = 32


class InPlace:
    """Positions that say shard and sample themselves, see :class:`dsclr.data.order.Order`."""

    epoch_samples = 0

    @staticmethod
    def position(shard: int, sample: int) -> int:
        return (shard << _SAMPLE_BITS) + sample

    def locate(self, position: int) -> tuple[int, int]:
        return position >> _SAMPLE_BITS, position & ((1 << _SAMPLE_BITS) - 1)

    def coming_shards(self, position: int) -> list[int]:
        return []


@dataclass
class Examiner:
    """Looks at consecutive samples of one shard.

    Args:
        dataset: of training, in the order :class:`InPlace`. Of several captions of a sample it takes the first.
        shard: number of the shard.

    Attributes:
        findings: of the samples so far, complete after :meth:`finish`.
    """

    dataset: ShardDataset
    shard: int
    findings: Findings = field(default_factory=Findings)
    _rows: list[tuple[int, bytes, bytes, bytes, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokenizer = self.dataset.tokenizer
        self._padding = None if tokenizer is None else padding_token(tokenizer)

    def look(self, sample: int) -> None:
        """Add one sample."""
        dataset, found = self.dataset, self.findings
        item = dataset[InPlace.position(self.shard, sample)]
        if isinstance(item, Sample):
            found.samples += 1
            found.notes.update(item.notes)
        else:
            found.unusable(item.cause, Example(self.shard, sample, item.key, item.detail))
        try:
            key, members = dataset.reader.read(self.shard, sample)
        except BadSample:
            return
        # Names with dots before the extension would each be an extension of their own.
        found.members.update(re.sub(r"\d{3,}", "...", name) for name in members)
        captions = self._captions(key, sample, members)
        image = self._image(key, sample, members, item if isinstance(item, Sample) else None)
        identity = item.id if isinstance(item, Sample) else 0
        caption = "\0".join(captions).encode("utf-8", "surrogatepass")
        self._rows.append(
            (
                sample,
                _hash(key.encode("utf-8", "surrogateescape")),
                _hash(image),
                _hash(caption),
                identity,
                isinstance(item, Sample),
            )
        )

    def finish(self) -> Findings:
        """All that was found."""
        rows = np.zeros(len(self._rows), ROW)
        rows["shard"] = self.shard
        for row, (sample, key, image, caption, identity, usable) in zip(rows, self._rows, strict=True):
            row["sample"], row["id"], row["usable"] = sample, identity, usable
            for name, value in (("key", key), ("image", image), ("caption", caption)):
                row[name] = np.frombuffer(value, np.uint64)
        self.findings.rows.append(rows)
        self._rows = []
        return self.findings

    def _captions(self, key: str, sample: int, members: Mapping[str, bytes]) -> Sequence[str]:
        """The captions of a sample, counted; none where training reads none, or they cannot be used."""
        dataset, found = self.dataset, self.findings
        if not reads_captions(dataset):
            return []
        try:
            captions = read_captions(members, dataset.caption, dataset.captions.empty)
        except BadSample:
            return []
        for caption in captions:
            found.characters[len(caption)] += 1
            found.words[len(caption.split())] += 1
            if caption.lower() in PLACEHOLDERS:
                found.captions[caption.lower()] += 1
                found.show("placeholder", Example(self.shard, sample, key, f"its caption is {caption!r}"))
            if self._is_long(caption):
                found.captions["long"] += 1
                found.show("long", Example(self.shard, sample, key, f"{len(caption):,} characters"))
        return captions

    def _is_long(self, caption: str) -> bool:
        tokenizer = self.dataset.tokenizer
        if tokenizer is None:
            return False
        try:
            tokens = tokenizer([caption])[0]
        except Exception:
            # One of any kind can fail over a text: training has counted it as "failed".
            return False
        return is_cut_off(tokenizer, caption, tokens, self._padding)

    def _image(self, key: str, sample: int, members: Mapping[str, bytes], usable: Sample | None) -> bytes:
        """The bytes of the image member, what is in them counted."""
        found = self.findings
        data = image_bytes(self.dataset.images, members)
        facts = image_facts(data)
        if facts is None:
            return data
        found.formats[facts.format] += 1
        found.modes[facts.mode] += 1
        found.widths[facts.width] += 1
        found.heights[facts.height] += 1
        found.shorter[min(facts.width, facts.height)] += 1
        found.aspects[round(facts.aspect, 2)] += 1
        found.kinds.update(facts.kinds)
        if usable is None:
            return data
        odd = {kind: (0.0, kind) for kind in facts.kinds}
        if facts.aspect >= ODD_ASPECT:
            odd["extreme aspect"] = -facts.aspect, f"{facts.width} x {facts.height}"
        if min(facts.width, facts.height) < TINY:
            odd["tiny"] = float(min(facts.width, facts.height)), f"only {facts.width} x {facts.height}"
        spread = float(usable.a.numpy().std(axis=(1, 2)).max())
        if spread < ONE_COLOUR:
            found.kinds["nearly one colour"] += 1
            odd["nearly one colour"] = spread, "nearly one colour"
        why = ", ".join(words for _, words in odd.values())
        for kind, (rank, _) in odd.items():
            found.show_odd(kind, Odd(rank, self.shard, sample, key, why))
        return data


@dataclass(frozen=True)
class ImageFacts:
    """What the header of an image says.

    Attributes:
        format, mode: of Pillow.
        width, height: pixels as stored.
        kinds: of Findings.kinds.
    """

    format: str
    mode: str
    width: int
    height: int
    kinds: tuple[str, ...]

    @property
    def aspect(self) -> float:
        """Longer over shorter side."""
        return max(self.width, self.height) / max(1, min(self.width, self.height))


def image_facts(data: bytes) -> ImageFacts | None:
    """Of an image's header, no pixel is decoded; None: no image that training reads."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            kinds = {
                "transparent": image.has_transparency_data,
                # Pillow opens 16-bit colours as 8-bit ones: only the layout of the file tells.
                "16-bit": image.mode.startswith("I") or ";16" in str(image.tile),
                "CMYK": image.mode == "CMYK",
            }
            form, mode, (width, height) = image.format or "unknown", image.mode, image.size
            with suppress(Exception):
                kinds["rotated by EXIF"] = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
            with suppress(Exception):
                kinds["animated"] = getattr(image, "is_animated", False)
    except Exception:
        # Training has counted it, by cause.
        return None
    return ImageFacts(form, mode, width, height, tuple(kind for kind in kinds if kinds[kind]))


def image_bytes(images: ImageReader, members: Mapping[str, bytes]) -> bytes:
    """The member that training decodes; empty without one."""
    return next((members[name] for name in images.extensions if name in members), b"")


def reads_captions(dataset: ShardDataset) -> bool:
    """Whether training reads captions at all."""
    return dataset.tokenizer is not None or dataset.id_source == "caption"


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
