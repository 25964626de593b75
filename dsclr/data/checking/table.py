"""The report for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsclr.units import format_bytes

# Characters of a detail that are shown; all of it stands in the JSON.
MOST_DETAIL = 160


def table(report: dict[str, Any]) -> str:
    """Of :func:`dsclr.data.checking.report.make_report`, with its "problems" and "advice": plain lines."""
    sections = [
        ("Shards", _shards(report["shards"])),
        ("Samples", _samples(report)),
        ("Images", _images(report)),
        ("Captions", _captions(report["captions"])),
        ("Duplicates", _duplicates(report)),
        ("What to do", (f"- {one}" for one in report["advice"] or ["nothing"])),
        ("Result", (f"- {one}" for one in report["problems"] or ["fine"])),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections) + "\n"


def _row(title: str, value: object) -> str:
    return f"{title:<24}{value}"


def _shards(shards: dict[str, Any]) -> Iterator[str]:
    opened = "" if shards["opened"] == shards["listed"] else f" ({shards['opened']:,} opened)"
    yield _row("shards", f"{shards['listed']:,}{opened}, {format_bytes(shards['bytes'])} unpacked")
    spread = ", ".join(f"{name} {value:,}" for name, value in shards["samples_per_shard"].items())
    yield _row("samples", f"{shards['samples']:,}; a shard: {spread or '-'}")
    yield from _listed("empty", shards["empty"])
    yield from _listed("far smaller", [f"{one['shard']}: {one['samples']:,} samples" for one in shards["small"]])
    yield from _listed("unreadable", [f"{one['shard']}: {one['error']}" for one in shards["unreadable"]])
    yield from _listed("cut off or damaged", [f"{one['shard']} {one['damage']}" for one in shards["damaged"]])
    yield from _listed("members left out", [f"{one['shard']} {one['members']}" for one in shards["left_out"]])
    lies = [f"{one['shard']}: {one['index_file']:,}, really {one['holds']:,}" for one in shards["wrong_index"]]
    yield from _listed("wrong in the index file", lies)
    yield from _listed("listed twice", shards["listed_twice"])


def _samples(report: dict[str, Any]) -> Iterator[str]:
    samples = report["samples"]
    yield _row("looked at", f"{samples['looked_at']:,}" + ("" if report["complete"] else ", not all (--limit)"))
    yield _row("an epoch trains on", f"{samples['usable']:,}")
    yield _row("unusable", f"{samples['unusable']:,} ({samples['unusable_fraction']:.2%})")
    for cause, count in samples["causes"].items():
        yield _row(f"  {cause}", f"{count:,}")
        for one in samples["examples"][cause]:
            yield f"      {one['shard']}: {one['key']}: {_short(one['detail'].removeprefix(f'{cause}: '))}"
    for note, count in samples["notes"].items():
        yield _row(note.replace("_", " "), f"{count:,}, used all the same")
    for one in report["sources"]:
        words = f"{one['shards']:,} shard(s), {one['usable']:,} of {one['readable']:,} usable, weight {one['weight']:g}"
        yield _row(f"source {one['name']}", words)
    yield _row("members", _counts(report["members"]))
    keys = report["keys_in_several_shards"]
    places = [f"{one['key']}: {', '.join(one['shards'])}" for one in keys["examples"]]
    yield from _listed("keys in several shards", places, keys["keys"])


def _images(report: dict[str, Any]) -> Iterator[str]:
    images = report["images"]
    yield _row("formats", _counts(images["formats"]))
    yield _row("modes", _counts(images["modes"]))
    yield _row("of them", _counts(images["kinds"]))
    for name in ("width", "height", "shorter_side"):
        yield _row(name.replace("_", " "), _quantiles(images[name]))
    yield _row("longer / shorter side", _quantiles(images["aspect"]))


def _captions(captions: dict[str, Any] | None) -> Iterator[str]:
    if captions is None:
        yield "not read: the objective has none"
        return
    yield _row("captions", f"{captions['captions']:,} of {captions['source']}")
    yield _row("missing, empty", f"{captions['missing']:,}, {captions['empty']:,}")
    unknown = "not counted without a tokenizer (--tokenizer or --deepspeed_config)"
    yield _row("more tokens than read", unknown if captions["long"] is None else f"{captions['long']:,}")
    yield _row("nan, none or null", _counts(captions["placeholders"]))
    yield _row("characters", _quantiles(captions["characters"]))
    yield _row("words", _quantiles(captions["words"]))
    yield from _listed("most frequent", [f"{one['samples']:,} x {one['caption']!r}" for one in captions["frequent"]])


def _duplicates(report: dict[str, Any]) -> Iterator[str]:
    copies = report["duplicates"]
    titles = {"image": "equal images", "caption": "equal captions", "both": "equal in both"}
    for name, title in titles.items():
        if name not in copies:
            continue
        found = copies[name]
        words = f"{found['samples']:,} samples in {found['groups']:,} groups, {found['redundant']:,} beside the first"
        yield _row(title, words)
        for one in found["examples"]:
            first = ", ".join(f"{place['key']} in {place['shard']}" for place in one["first"])
            yield f"      {one['samples']:,} x: {first}"
    pairs = copies["false_negative_pairs_per_batch"]
    yield _row("false negatives", f"{pairs:,.2f} pairs expected in a batch of {report['batch_size']:,}: equal images,")
    yield _row("", f"different ids (dsclr.data.id={report['id']})")


def _listed(title: str, lines: list[str], count: int | None = None) -> Iterator[str]:
    count = len(lines) if count is None else count
    if not count:
        return
    yield _row(title, f"{count:,}")
    for line in lines[:10]:
        yield f"      {_short(line)}"
    if count > len(lines[:10]):
        yield "      ..."


def _counts(counts: dict[str, int]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:12])
    return shown + (", ..." if len(counts) > 12 else "") or "none"


def _quantiles(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in found.items()) or "-"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_DETAIL else text[: MOST_DETAIL - 3] + "..."
