"""What to do about what was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dsclr.config import DataConfig
from dsclr.data.loader import BAD_WINDOW
from dsclr.units import format_bytes, format_fractions

# Images with a shorter side of more than so many times the model's are worth making smaller.
LARGE_IMAGE = 3
# A window of shards should hold the samples of so many batches.
BATCHES_PER_WINDOW = 4
# Shards of more bytes, and fewer of them than that, are hard to share and slow to fetch.
LARGE_SHARD, FEW_SHARDS = 2 * 10**9, 8
# Parts of all captions from which on something is worth saying.
MANY_LONG, MANY_EQUAL = 0.05, 0.1
_CAPTION_MEMBERS = ("txt", "caption", "text", "title")
_IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "bmp", "avif", "jp2", "ppm", "tga", "ico")


def advise(report: dict[str, Any], data: DataConfig, image_size: int, max_bad_fraction: float) -> list[str]:
    """Sentences that each name a configuration key or a tool.

    Args:
        report: of :func:`dsclr.data.checking.report.make_report`.
        data: the settings that it was made with.
        image_size: pixels of the model's shorter side.
        max_bad_fraction: that is accepted.
    """
    return [
        *_on_shards(report, data),
        *_on_samples(report, data, max_bad_fraction),
        *_on_images(report, image_size),
        *_on_captions(report),
        *_on_copies(report),
    ]


def _on_shards(report: dict[str, Any], data: DataConfig) -> Iterator[str]:
    shards = report["shards"]
    uncounted = [one for one in shards["unreadable"] if not one["counted_by_index"]]
    if uncounted:
        yield (
            f"{len(uncounted)} shard(s) cannot be read, and training does not start with them: fetch or write them "
            "anew, or leave them out of dsclr.data.train."
        )
    if len(shards["unreadable"]) > len(uncounted):
        yield (
            "Shards of an index file cannot be read: training skips all their samples (unreadable_shard). Fetch or "
            "write them anew, or take them out of the index file that dsclr.data.train names."
        )
    if shards["damaged"]:
        yield (
            f"{len(shards['damaged'])} shard(s) are cut off or damaged: training reads what comes before, and warns at "
            "every start (data/incomplete_shards). Compare their sizes with the source's and fetch them anew, or write "
            "them again with tools/make_shards.py."
        )
    if shards["wrong_index"]:
        yield (
            "The index file does not have the real counts: samples too many are skipped as unreadable_shard, samples "
            "too few are never read. Write it anew (tools/make_shards.py or webdataset's widsindex), or name the "
            "shards themselves in dsclr.data.train, which are then counted."
        )
    if shards["listed_twice"]:
        count = len(shards["listed_twice"])
        yield f"dsclr.data.train lists {count} shard(s) more than once: an epoch reads them as often."
    if shards["empty"]:
        yield f"{len(shards['empty'])} shard(s) have no samples: leave them out of dsclr.data.train."
    if not data.shuffle or not shards["samples_per_shard"]:
        return
    median = shards["samples_per_shard"]["median"]
    wanted = BATCHES_PER_WINDOW * report["batch_size"]
    if shards["listed"] > data.shuffle_shards and 0 < median * data.shuffle_shards < wanted:
        enough = min(shards["listed"], int(-(-wanted // median)))
        yield (
            f"Samples are mixed within windows of {data.shuffle_shards} shards, about "
            f"{median * data.shuffle_shards:,.0f} samples: too few for batches of {report['batch_size']:,}, which hold "
            f"neighbours. Set dsclr.data.shuffle_shards={enough}, or write larger shards (tools/make_shards.py "
            "--samples-per-shard)."
        )
    if shards["listed"] < FEW_SHARDS and shards["bytes"] > LARGE_SHARD * max(1, shards["opened"]):
        yield (
            f"{shards['listed']} shard(s) of {format_bytes(shards['bytes'] / shards['opened'])} are too few and too "
            "large to be mixed and fetched one by one: write smaller ones (tools/make_shards.py --samples-per-shard)."
        )


def _on_samples(report: dict[str, Any], data: DataConfig, max_bad_fraction: float) -> Iterator[str]:
    samples, members = report["samples"], report["members"]
    causes = samples["causes"]
    if samples["unusable_fraction"] > max_bad_fraction:
        worst = next(iter(causes))
        part, most = format_fractions(samples["unusable_fraction"], max_bad_fraction)
        yield (
            f"{part} of the samples are unusable, over {most}: {_when_training_ends(report, max_bad_fraction)}. Mend "
            f"them, {worst} first. Raising "
            f"dsclr.data.max_bad_fraction lets it run on, but these {samples['unusable']:,} samples are then never "
            "trained on, and a source that breaks later is noticed late."
        )
    if "failed" in causes:
        yield (
            "Some samples fail in a decoder (cause failed). One that ends its process also ends training, whatever "
            "dsclr.data.max_bad_fraction is: take it out, with shards written anew (tools/make_shards.py)."
        )
    if "truncated_image" in causes:
        yield (
            f"{causes['truncated_image']:,} image(s) end early: dsclr.data.truncated_image=use keeps them, with the "
            "missing part grey; fetching them anew is better."
        )
    if "missing_image" in causes:
        known = data.image.lower().split(";")
        others = [name for name in members if name in _IMAGE_MEMBERS and name not in known]
        dotted = [name for name in members if name.rpartition(".")[2] in known and "." in name]
        if others:
            yield f"Images are there under other extensions: dsclr.data.image={';'.join([*known, *others])}."
        if dotted:
            yield (
                f"Members such as .{dotted[0]} have a dot in their key: WebDataset ends the key at the first dot. "
                "Name them without (tools/make_shards.py does), or name that extension in dsclr.data.image."
            )
    if "missing_caption" in causes:
        others = [name for name in _CAPTION_MEMBERS if name in members and name != data.caption]
        others += ["json:FIELD"] if "json" in members else []
        there = f"; {' or '.join(others)} is there" if others else ""
        yield f"{causes['missing_caption']:,} sample(s) have no {data.caption}: see dsclr.data.caption{there}."
    if "empty_caption" in causes:
        yield (
            f"{causes['empty_caption']:,} caption(s) are empty: dsclr.data.empty_caption=use trains on them as the "
            "empty text, of which all have the same id where it is the caption."
        )
    if "long_caption" in causes:
        yield (
            f"{causes['long_caption']:,} sample(s) are left out for long captions: dsclr.data.long_caption=truncate "
            "keeps them, cut off."
        )
    if "oversized_image" in causes:
        yield (
            f"{causes['oversized_image']:,} image(s) have too many pixels: write them smaller (tools/make_shards.py "
            "--resize), or raise dsclr.data.max_pixels, which costs memory in every loader process."
        )
    if "missing_id" in causes:
        lack = f"{causes['missing_id']:,} sample(s) lack what dsclr.data.id={data.id} names"
        yield f"{lack}: dsclr.data.id=caption needs nothing more."


def _when_training_ends(report: dict[str, Any], max_bad_fraction: float) -> str:
    """As dsclr.data.loader judges, if unusable samples stand everywhere as often."""
    part, epoch = report["samples"]["unusable_fraction"], report["shards"]["samples"]
    allowed = math.floor(max_bad_fraction * BAD_WINDOW)
    read = math.ceil((allowed + 1) / part)
    if part == 1:
        # Nothing usable for a whole epoch: no batch would ever come.
        read = min(read, BAD_WINDOW // 2, epoch)
    epochs = read / max(1, epoch)
    # Only of a small set an epoch or more goes by before.
    when = f", {epochs:,.0f} epochs of this set: a shorter run gets through" if epochs >= 1.5 else ""
    return (
        f"training ends when more than {allowed:,} of the last {BAD_WINDOW:,} samples that a rank has read, over all "
        f"epochs, were unusable. With these that is after some {read:,} samples{when}"
    )


def _on_images(report: dict[str, Any], image_size: int) -> Iterator[str]:
    median = report["images"]["shorter_side"].get("median", 0)
    if median > LARGE_IMAGE * image_size:
        yield (
            f"Half of the images have a shorter side of {median:,} pixels or more, and the model sees {image_size}: "
            f"shards of originals made with tools/make_shards.py --resize {2 * image_size} are smaller and faster."
        )


def _on_captions(report: dict[str, Any]) -> Iterator[str]:
    captions = report["captions"]
    if captions is None:
        return
    if captions["placeholders"]:
        words = ", ".join(f"{word} ({count:,})" for word, count in captions["placeholders"].items())
        yield (
            f"Captions say {words}: what a table has where there is no caption. Leave those rows out "
            "(tools/make_shards.py --table) or name another caption (dsclr.data.caption)."
        )
    if captions["long"] and captions["long"] > MANY_LONG * captions["captions"]:
        yield (
            f"{captions['long']:,} of {captions['captions']:,} captions have more tokens than the model reads: "
            "dsclr.data.long_caption says whether they are cut off (truncate) or left out (skip)."
        )


def _on_copies(report: dict[str, Any]) -> Iterator[str]:
    copies, usable = report["duplicates"], report["samples"]["usable"]
    pairs = copies["false_negative_pairs_per_batch"]
    if pairs >= 1:
        yield (
            f"A batch of {report['batch_size']:,} holds about {pairs:,.1f} pairs of equal images with different ids, "
            "each taken for a negative of the other. With a field that names the image, dsclr.data.id=json:FIELD masks "
            "them; or put the captions of an image into one sample as a list (dsclr.data.caption=json:FIELD)."
        )
    if "both" in copies and copies["both"]["redundant"]:
        yield (
            f"{copies['both']['redundant']:,} sample(s) repeat image and caption of another: an epoch trains on them "
            "as often. Write shards without them (tools/make_shards.py), or see whether dsclr.data.train names a "
            "source twice."
        )
    if "caption" in copies and copies["caption"]["samples"] > MANY_EQUAL * usable:
        part = copies["caption"]["samples"] / usable
        if report["id"] == "caption":
            yield (
                f"{part:.0%} of the samples share their caption with another. With dsclr.data.id=caption they are "
                "never negatives of each other; other captions (dsclr.data.caption) would tell them apart."
            )
        else:
            yield (
                f"{part:.0%} of the samples share their caption with another, and dsclr.data.id={report['id']} may "
                "take them for negatives of each other: dsclr.data.id=caption does not."
            )
    if report["keys_in_several_shards"]["keys"]:
        yield (
            f"{report['keys_in_several_shards']['keys']:,} key(s) stand in several shards. Training tells them apart "
            "(dsclr.data.id=key takes the shard's name too), but they may be the same data listed twice in "
            "dsclr.data.train."
        )
