"""From what was found to plain JSON values."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsclr.config import ConfigError
from dsclr.data.causes import BadSample
from dsclr.data.checking.check import Checked
from dsclr.data.checking.duplicates import Copies, expected_false_negatives, find_copies, in_several, number_values
from dsclr.data.checking.examine import reads_captions
from dsclr.data.checking.findings import Example, quantiles
from dsclr.data.dataset import ShardDataset
from dsclr.data.decode import read_captions

# Shards with fewer than this part of the median's samples are named.
SMALL_SHARD = 0.5
# Entries of every list of examples.
MOST_SHOWN = 5
# Characters of a caption that are shown.
SHOWN_CHARACTERS = 80


def make_report(
    checked: Checked, dataset: ShardDataset, batch_size: int, sources: Sequence[tuple[str, int, float]] = ()
) -> dict[str, Any]:
    """Everything that was found.

    Args:
        dataset: that was checked.
        batch_size: of the expected false negatives.
        sources: (name, shards, weight) of a mixture, in the order of its shards.
    """
    found, rows = checked.findings, checked.findings.all_rows()
    usable = rows[rows["usable"]]
    unusable = found.causes.total()
    return {
        "complete": checked.complete,
        "id": dataset.id_source,
        "batch_size": batch_size,
        "shards": _shards(checked, dataset),
        "samples": {
            "looked_at": found.samples,
            "usable": found.usable,
            "unusable": unusable,
            "unusable_fraction": unusable / found.samples if found.samples else 0.0,
            "causes": _by_count(found.causes),
            "notes": _by_count(found.notes),
            "examples": {cause: _examples(found.examples[cause], dataset) for cause, _ in found.causes.most_common()},
        },
        "sources": _sources(rows, usable, sources),
        "members": _by_count(found.members),
        "images": {
            "formats": _by_count(found.formats),
            "modes": _by_count(found.modes),
            "kinds": _by_count(found.kinds),
            "width": quantiles(found.widths),
            "height": quantiles(found.heights),
            "shorter_side": quantiles(found.shorter),
            "aspect": quantiles(found.aspects),
        },
        "captions": _captions(checked, dataset, usable) if reads_captions(dataset) else None,
        "duplicates": _duplicates(usable, dataset, batch_size, sources),
        "keys_in_several_shards": _keys(rows, dataset),
    }


def _shards(checked: Checked, dataset: ShardDataset) -> dict[str, Any]:
    opened, read = checked.opened, checked.read
    shards = dataset.reader.shards
    names = [str(shards[one.shard]) for one in opened]
    median = statistics.median_low(read) if read else 0
    listed = Counter(str(shard) for shard in shards)
    lies = [
        {"shard": name, "index_file": promised, "holds": one.samples}
        for name, one in zip(names, opened, strict=True)
        if (promised := shards[one.shard].samples) is not None and one.samples is not None and promised != one.samples
    ]
    return {
        "listed": len(shards),
        "opened": len(opened),
        "bytes": sum(one.bytes for one in opened),
        "samples": sum(read),
        "samples_per_shard": {"min": min(read), "median": median, "max": max(read)} if read else {},
        "empty": [name for name, count in zip(names, read, strict=True) if not count],
        "small": [
            {"shard": name, "samples": count}
            for name, count in zip(names, read, strict=True)
            if 0 < count < SMALL_SHARD * median
        ],
        "unreadable": [
            {"shard": name, "error": one.error, "counted_by_index": shards[one.shard].samples is not None}
            for name, one in zip(names, opened, strict=True)
            if one.error
        ],
        "damaged": [
            {"shard": name, "damage": one.damage} for name, one in zip(names, opened, strict=True) if one.damage
        ],
        "left_out": [
            {"shard": name, "members": told} for name, one in zip(names, opened, strict=True) for told in one.left_out
        ],
        "wrong_index": lies,
        "listed_twice": [name for name, count in listed.items() if count > 1],
    }


def _sources(rows: np.ndarray, usable: np.ndarray, sources: Sequence[tuple[str, int, float]]) -> list[dict[str, Any]]:
    start, result = 0, []
    for name, shards, weight in sources:
        mine = [int(((part["shard"] >= start) & (part["shard"] < start + shards)).sum()) for part in (rows, usable)]
        result.append({"name": name, "shards": shards, "weight": weight, "readable": mine[0], "usable": mine[1]})
        start += shards
    return result


def _captions(checked: Checked, dataset: ShardDataset, usable: np.ndarray) -> dict[str, Any]:
    found = checked.findings
    groups = find_copies(number_values(usable["caption"]), MOST_SHOWN).largest if len(usable) else []
    frequent = [{"samples": count, "caption": _caption(dataset, usable[rows[0]])} for count, rows in groups]
    return {
        "source": dataset.caption,
        "captions": found.characters.total(),
        "missing": found.causes["missing_caption"],
        "empty": found.characters[0] + found.causes["empty_caption"],
        "long": found.captions["long"] if hasattr(dataset.tokenizer, "context_length") else None,
        "placeholders": {word: n for word, n in _by_count(found.captions).items() if word != "long"},
        "examples": {
            kind: _examples(found.examples[kind], dataset) for kind in ("long", "placeholder") if kind in found.examples
        },
        "characters": quantiles(found.characters),
        "words": quantiles(found.words),
        "frequent": frequent,
    }


def _caption(dataset: ShardDataset, row: np.void) -> str:
    """What a usable sample says, cut to what fits a line."""
    try:
        _, members = dataset.reader.read(int(row["shard"]), int(row["sample"]))
        text = " | ".join(read_captions(members, dataset.caption, dataset.captions.empty))
    except BadSample as bad:
        return str(bad)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _duplicates(
    usable: np.ndarray, dataset: ShardDataset, batch_size: int, sources: Sequence[tuple[str, int, float]]
) -> dict[str, Any]:
    images = number_values(usable["image"])
    captions = number_values(usable["caption"])
    both = number_values(np.stack([images, captions], axis=1))
    chances = np.ones(len(usable))
    start = 0
    for _, shards, weight in sources:
        mine = (usable["shard"] >= start) & (usable["shard"] < start + shards)
        chances[mine] = weight / max(1, mine.sum())
        start += shards
    named = {"image": images, "caption": captions, "both": both}
    if not reads_captions(dataset):
        named = {"image": images}
    pairs = expected_false_negatives(images, usable["id"], batch_size, chances)
    return {
        **{name: _copies(find_copies(numbers, MOST_SHOWN), usable, dataset) for name, numbers in named.items()},
        "false_negative_pairs_per_batch": pairs,
    }


def _copies(copies: Copies, usable: np.ndarray, dataset: ShardDataset) -> dict[str, Any]:
    return {
        "groups": copies.groups,
        "samples": copies.samples,
        "redundant": copies.redundant,
        "examples": [
            {"samples": count, "first": [_place(usable[row], dataset) for row in rows]}
            for count, rows in copies.largest
        ],
    }


def _keys(rows: np.ndarray, dataset: ShardDataset) -> dict[str, Any]:
    numbers = number_values(rows["key"])
    several = in_several(numbers, rows["shard"])
    firsts = np.unique(numbers, return_index=True)[1][several]
    shown = sorted(firsts.tolist())[:MOST_SHOWN]
    examples = [
        {
            "key": _place(rows[first], dataset)["key"],
            "shards": [str(dataset.reader.shards[s]) for s in np.unique(rows["shard"][numbers == numbers[first]])[:3]],
        }
        for first in shown
    ]
    return {"keys": len(several), "examples": examples}


def _place(row: np.void, dataset: ShardDataset) -> dict[str, str]:
    shard, sample = int(row["shard"]), int(row["sample"])
    try:
        key = dataset.reader.read(shard, sample)[0]
    except (BadSample, ConfigError):
        key = f"sample {sample}"
    return {"shard": str(dataset.reader.shards[shard]), "key": key}


def _examples(examples: list[Example], dataset: ShardDataset) -> list[dict[str, str]]:
    return [{"shard": str(dataset.reader.shards[one.shard]), "key": one.key, "detail": one.detail} for one in examples]


def _by_count(counts: Counter[str]) -> dict[str, int]:
    """The most frequent first, then by name: the same however it was counted."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
