"""Which rows can become samples: found out before writing, so that all shards come out equally long."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dsclr.data.causes import BadSample
from dsclr.data.writing.images import check_image
from dsclr.data.writing.output import CHECKS, SKIPPED, to_json, write_json, written_whole
from dsclr.data.writing.processes import in_processes
from dsclr.data.writing.source import Content, Row, Rows

# Rows whose result is kept when the run is interrupted.
CHUNK_ROWS = 500

NO_CAPTION = "missing_caption"


@dataclass(frozen=True)
class Checked:
    """The rows that are good, and why the others are not."""

    good: list[int]  # row numbers, rising
    skipped: dict[str, int]  # by cause
    without_caption: int  # of the good ones
    several_captions: bool  # whether any good one has more than one


def check_rows(
    rows: Rows, load: Callable[[Row], Content], folder: Path, captions_needed: bool, workers: int
) -> Checked:
    """Load and decode every row, and list those that fail in ``skipped.jsonl``.

    Args:
        folder: of the output; results of an interrupted run in it are used.
        captions_needed: rows without a caption fail.
    """
    checks = folder / CHECKS
    checks.mkdir(exist_ok=True)
    paths = [checks / f"{start:010d}.json" for start in range(0, len(rows), CHUNK_ROWS)]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    known = sum(len(_chunk(number, len(rows))) for number in range(len(paths))) - sum(
        len(_chunk(number, len(rows))) for number in missing
    )
    with tqdm(total=len(rows), initial=known, desc="checking", unit=" samples", disable=None) as bar:
        task = partial(_check_chunk, rows=rows, load=load, paths=paths, captions_needed=captions_needed)
        in_processes(task, missing, workers, bar)
    found = [json.loads(path.read_bytes()) for path in paths]
    skipped = [one for chunk in found for one in chunk["skipped"]]
    with written_whole(folder / SKIPPED) as file:
        for one in skipped:
            file.write(to_json(one) + b"\n")
    bad = {one["row"] for one in skipped}
    return Checked(
        good=[number for number in range(len(rows)) if number not in bad],
        skipped=dict(sorted(Counter(one["cause"] for one in skipped).items())),
        without_caption=sum(chunk["without_caption"] for chunk in found),
        several_captions=any(chunk["most_captions"] > 1 for chunk in found),
    )


def _chunk(number: int, rows: int) -> range:
    return range(number * CHUNK_ROWS, min((number + 1) * CHUNK_ROWS, rows))


def _check_chunk(
    number: int,
    tick: Callable[[], None],
    rows: Rows,
    load: Callable[[Row], Content],
    paths: list[Path],
    captions_needed: bool,
) -> None:
    skipped: list[dict[str, Any]] = []
    captions = []
    for at in _chunk(number, len(rows)):
        row = rows[at]
        try:
            captions.append(_check(row, load, captions_needed))
        except BadSample as bad:
            skipped.append({"row": at, "path": str(row.image), "cause": bad.cause, "detail": str(bad)})
        tick()
    write_json(
        paths[number],
        {"skipped": skipped, "most_captions": max(captions, default=0), "without_caption": captions.count(0)},
    )


def _check(row: Row, load: Callable[[Row], Content], captions_needed: bool) -> int:
    """How many captions the sample has. Raises BadSample."""
    if row.problem is not None:
        cause, detail = row.problem
        raise BadSample(cause, detail.removeprefix(f"{cause}: "))
    content = load(row)
    check_image(content.image)
    if captions_needed and not content.captions:
        raise BadSample(NO_CAPTION, "no caption")
    return len(content.captions)
