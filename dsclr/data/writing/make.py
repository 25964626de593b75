"""From a source to a finished folder of shards; what an interrupted run has finished is kept."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dsclr.config import ConfigError
from dsclr.data.causes import BadSample
from dsclr.data.writing.checks import NO_CAPTION, Checked, check_rows
from dsclr.data.writing.images import stored_image
from dsclr.data.writing.output import (
    CHECKS,
    CONTENT,
    PART,
    PLAN,
    ROWS,
    SKIPPED,
    differences,
    locked,
    read_plan,
    tars,
    to_json,
    write_json,
    written_whole,
)
from dsclr.data.writing.plan import Shard, ShardSet, plan_sets
from dsclr.data.writing.processes import in_processes
from dsclr.data.writing.source import Content, Row, Rows, Source, store_rows

# Raised when the same input and options would give other bytes than before.
FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of the shards, beside the source. Names are those of the tool's options."""

    prefix: str = "shard"
    samples_per_shard: int = 10_000
    shards: int | None = None
    shuffle: bool = True
    seed: int = 0
    split_held_out: float = 0.0
    resize: int | None = None  # pixels of the shorter side
    jpeg_quality: int = 92
    allow_missing_captions: bool = False


@dataclass(frozen=True)
class Made:
    """What stands in the folder."""

    sets: list[dict[str, Any]]  # name, index, samples, shards; the held-out one second
    rows: int
    skipped: dict[str, int]  # by cause
    captioned: bool
    several_captions: bool
    without_caption: int
    already: bool = False  # a finished folder was found, and nothing done

    @property
    def bad_fraction(self) -> float:
        """Rows with an image or text that cannot be read; a caption that is missing is no damage."""
        return sum(count for cause, count in self.skipped.items() if cause != NO_CAPTION) / self.rows


def make_shards(source: Source, output: Path, settings: Settings, workers: int) -> Made:
    """Check all rows, then write the shards, their index and the list of what was skipped.

    Args:
        workers: processes; they change the time and nothing else.

    Raises:
        ConfigError: the folder belongs to something else, or not one sample is good.
        OSError: nothing can be written, for example because the disk is full.
    """
    with locked(output):
        before = read_plan(output)
        rows = store_rows(source.rows, output)
        with rows.file:
            if not len(rows):
                raise ConfigError("the input is empty")
            plan = _plan_of(source, settings, rows)
            finished = _compare(before, plan, output)
            if finished is not None:
                return finished
            return _make(source, output, settings, workers, rows, plan)


def _plan_of(source: Source, settings: Settings, rows: Rows) -> dict[str, Any]:
    options = {f"--{name.replace('_', '-')}": value for name, value in asdict(settings).items()}
    content = {ROWS: len(rows), CONTENT: rows.digest}
    return {"format": FORMAT, **source.identity, **options, **content}


def _compare(before: dict[str, Any] | None, plan: dict[str, Any], output: Path) -> Made | None:
    """What is there already, if it is complete; otherwise note the plan. Raises ConfigError if it is another's."""
    if before is not None:
        result = before.pop("result", None)
        different = differences(before, plan)
        if different and tars(output):
            changes = "".join(f"\n  {one}" for one in different)
            raise ConfigError(
                f"--output: the shards in {output} are from another command or input. What changed:{changes}\n"
                "Give the same command to go on with them, choose another folder, or delete this one."
            )
        if different:
            shutil.rmtree(output / CHECKS, ignore_errors=True)
        elif result is not None and _complete(result, output):
            shutil.rmtree(output / CHECKS, ignore_errors=True)
            return Made(**result, already=True)
    # An index says that all shards are there.
    for name in ("index.json", "index-heldout.json"):
        (output / name).unlink(missing_ok=True)
    write_json(output / PLAN, plan)
    return None


def _complete(result: dict[str, Any], output: Path) -> bool:
    names = [f"{one['name']}-{number:06d}.tar" for one in result["sets"] for number in range(one["shards"])]
    names += [SKIPPED, *(one["index"] for one in result["sets"])]
    return all((output / name).is_file() for name in names)


def _make(source: Source, output: Path, settings: Settings, workers: int, rows: Rows, plan: dict[str, Any]) -> Made:
    captions_needed = source.captioned and not settings.allow_missing_captions
    checked = check_rows(rows, source.load, output, captions_needed, workers)
    if not checked.good:
        raise ConfigError(_nothing_left(checked, rows, output))
    if checked.several_captions and "captions" in source.fields:
        raise ConfigError(
            "--table: the list of captions is called 'captions' in the json member, and so is a column: rename the "
            "column, or name it with --caption-column"
        )
    sets = plan_sets(
        checked.good,
        lambda number: rows[number].image,
        settings.prefix,
        settings.samples_per_shard,
        settings.shards,
        settings.shuffle,
        settings.seed,
        settings.split_held_out,
    )
    shards = [shard for one in sets for shard in one.shards]
    foreign = sorted(set(tars(output)) - {shard.name for shard in shards})
    if foreign:
        raise ConfigError(f"--output: {output} holds another shard ({foreign[0]}): move it away")
    for part in output.glob(f"*.tar{PART}"):
        part.unlink()
    missing = [number for number, shard in enumerate(shards) if not (output / shard.name).is_file()]
    total, left = len(checked.good), sum(len(shards[number].rows) for number in missing)
    with tqdm(total=total, initial=total - left, desc="writing", unit=" samples", disable=None) as bar:
        task = partial(
            _write_shard,
            shards=shards,
            rows=rows,
            load=source.load,
            output=output,
            several=checked.several_captions,
            settings=settings,
        )
        in_processes(task, missing, workers, bar)
    return _finish(source, output, sets, rows, checked, plan)


def _write_shard(
    number: int,
    tick: Callable[[], None],
    shards: list[Shard],
    rows: Rows,
    load: Callable[[Row], Content],
    output: Path,
    several: bool,
    settings: Settings,
) -> None:
    shard = shards[number]
    with (
        written_whole(output / shard.name) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for key, at in enumerate(shard.rows, shard.first_key):
            row = rows[at]
            try:
                members = _members(load(row), several, settings)
            except BadSample as bad:
                raise ConfigError(
                    f"{row.image} was good when it was checked and is not now ({bad}): put it back and run the same "
                    f"command again, or delete {output} and start anew"
                ) from None
            for extension, data in members.items():
                _add(tar, f"{key:09d}.{extension}", data)
            tick()


def _members(content: Content, several: bool, settings: Settings) -> dict[str, bytes]:
    """A sample's members by extension, in the order in which they are stored. Raises BadSample."""
    try:
        extension, data = stored_image(content.image, settings.resize, settings.jpeg_quality)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadSample("broken_image", str(error)) from None
    members, info = {extension: data}, content.info
    if content.captions:
        members["txt"] = content.captions[0].encode("utf-8")
        if several:
            info = {**info, "captions": content.captions}
    members["json"] = to_json(info)
    if content.cls is not None:
        members["cls"] = str(content.cls).encode("ascii")
    return members


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # time, owner and group are 0 and nameless unless set
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, BytesIO(data))


def _finish(
    source: Source, output: Path, sets: list[ShardSet], rows: Rows, checked: Checked, plan: dict[str, Any]
) -> Made:
    made = Made(
        sets=[
            {"name": one.name, "index": one.index, "samples": one.samples, "shards": len(one.shards)} for one in sets
        ],
        rows=len(rows),
        skipped=checked.skipped,
        captioned=source.captioned,
        several_captions=checked.several_captions,
        without_caption=checked.without_caption,
    )
    result = {name: value for name, value in asdict(made).items() if name != "already"}
    write_json(output / PLAN, {**plan, "result": result})
    for one in reversed(sets):
        shardlist = [
            {"url": shard.name, "nsamples": len(shard.rows), "filesize": (output / shard.name).stat().st_size}
            for shard in one.shards
        ]
        index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": one.name, "shardlist": shardlist}
        write_json(output / one.index, index)
    shutil.rmtree(output / CHECKS, ignore_errors=True)
    return made


def _nothing_left(checked: Checked, rows: Rows, output: Path) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in checked.skipped.items())
    hint = "; --allow-missing-captions keeps images without caption" if set(checked.skipped) == {NO_CAPTION} else ""
    return f"not one sample left of {len(rows)} rows: {causes}; each is listed in {output / SKIPPED}{hint}"
