"""What every kind of input is turned into: rows that say what a sample is made of, and how to load one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from PIL import Image

from dsclr.data.causes import BadSample
from dsclr.data.writing.captions import present_captions

# Files that are named where there may be many.
MOST_NAMED = 5


class Row(NamedTuple):
    """One sample before anything of it is read; JSON can hold it."""

    image: str | int  # a path, or a position in a dataset
    captions: list[str] = []  # noqa: RUF012  (never changed)
    caption_file: str | None = None  # a path; its text is the caption
    cls: int | None = None
    info: dict[str, Any] = {}  # noqa: RUF012  # of the json member
    problem: tuple[str, str] | None = None  # cause and detail: this row can be no sample


@dataclass(frozen=True)
class Content:
    """One sample as loaded: an encoded image as bytes, or a picture that stands in memory only."""

    image: bytes | Image.Image
    captions: list[str]
    cls: int | None
    info: dict[str, Any]


@dataclass
class Unused:
    """Files of the input that no sample is made of.

    Attributes:
        suffixes: of files that are no images -> how many.
        captions: caption files without an image.
        first_captions: paths of the first of them.
    """

    suffixes: Counter[str] = field(default_factory=Counter)
    captions: int = 0
    first_captions: list[str] = field(default_factory=list)

    def add_caption(self, path: str) -> None:
        self.captions += 1
        if len(self.first_captions) < MOST_NAMED:
            self.first_captions.append(path)


@dataclass(frozen=True)
class Source:
    """An input.

    Args:
        rows: in the order of the input, the same each time; read once.
        load: a row's content; raises BadSample.
        captioned: whether samples are meant to have captions.
        identity: what the input is, by the names of the options that say so.
        fields: further names in the json member.
        unused: filled while ``rows`` is read.
    """

    rows: Iterator[Row]
    load: Callable[[Row], Content]
    captioned: bool
    identity: dict[str, Any]
    fields: list[str] = field(default_factory=list)
    unused: Unused = field(default_factory=Unused)


def load_file(row: Row, root: Path) -> Content:
    """The content of a row of paths below ``root``.

    Raises:
        BadSample: missing_file, unreadable_file, not_a_local_path or broken_caption.
    """
    path = str(row.image)
    if "://" in path:
        raise BadSample("not_a_local_path", f"{path}: download it first, with img2dataset for example")
    image = _read(root / path)
    captions = row.captions
    if row.caption_file is not None:
        try:
            captions = present_captions([_read(root / row.caption_file).decode("utf-8-sig")])
        except UnicodeDecodeError as error:
            raise BadSample("broken_caption", f"{row.caption_file} is not UTF-8: {error}") from None
    return Content(image, captions, row.cls, row.info)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadSample("missing_file", f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise BadSample("unreadable_file", f"{path}: {error}") from None


@dataclass(frozen=True)
class Rows:
    """Rows in a nameless file: millions of them need eight bytes of memory each, and forked processes share them."""

    file: IO[bytes]
    starts: array[int]  # one more than there are rows
    digest: str  # of all of them

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Row:
        start, end = self.starts[number], self.starts[number + 1]
        return Row(*json.loads(os.pread(self.file.fileno(), end - start, start)))


def store_rows(rows: Iterator[Row], folder: Path) -> Rows:
    """Read all rows into a file in ``folder`` that goes when it is closed, or with this process."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as the rows are used)
    starts, digest = array("q", [0]), hashlib.blake2b(digest_size=16)
    for row in rows:
        line = json.dumps(row).encode("ascii") + b"\n"
        file.write(line)
        digest.update(line)
        starts.append(starts[-1] + len(line))
    file.flush()
    return Rows(file, starts, digest.hexdigest())
