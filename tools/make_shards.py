"""Make WebDataset shards of a folder of images, a table of paths and captions, or a torchvision data set.

    python tools/make_shards.py --images photos --output shards
    python tools/make_shards.py --table captions.csv --image-column file --caption-column text --output shards
    python tools/make_shards.py --torchvision CIFAR100 --root data --split train --output shards

Every image is decoded once before anything is written: those that cannot be read are listed in OUTPUT/skipped.jsonl,
and all shards come out equally long. The same input and options give the same bytes whatever --workers is, also when
the run is interrupted in between: the same command goes on.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsclr.data.writing import Made, Source
    from dsclr.data.writing.source import Unused

# Which input an option belongs to; unset options are None or False.
BELONGS = {
    "captions": ("images", "table", "torchvision"),
    "template": ("images", "torchvision"),
    "flat": ("images",),
    "image_column": ("table",),
    "caption_column": ("table",),
    "root": ("table", "torchvision"),
    "split": ("torchvision",),
    "download": ("torchvision",),
}
CAPTIONS = {"images": ("template", "txt", "none"), "table": ("none",), "torchvision": ("template", "none")}
CAPTIONS_HELP = "template: of the class; txt: x.txt beside x.jpg, also in subfolders, which are then no classes; none"
TEMPLATE = "a photo of a {}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--images", type=Path, metavar="FOLDER", help="FOLDER/class/x.jpg, or FOLDER/x.jpg and x.txt")
    kind.add_argument("--table", type=Path, metavar="FILE", help=".csv, .tsv, .jsonl or .parquet (extra: tables)")
    kind.add_argument("--torchvision", metavar="NAME", help="a classification data set in torchvision.datasets")
    add("--output", type=Path, required=True, metavar="FOLDER", help="of the shards, new or empty")

    add("--captions", choices=("template", "txt", "none"), help=CAPTIONS_HELP)
    add("--template", help=f'{{}} becomes the class; default: "{TEMPLATE}"')
    add("--flat", action="store_true", help="--images: subfolders are not classes; --captions txt implies it")
    add("--image-column", metavar="NAME", help="of paths; default: image")
    add("--caption-column", action="append", metavar="NAME", help="may be given again; default: caption")
    add("--root", type=Path, metavar="FOLDER", help="of the paths (default: the table's) or of the data set")
    add("--split", metavar="NAME", help="--torchvision: train, test, ...; default: train")
    add("--download", action="store_true", help="--torchvision: fetch what is not in --root")
    add("--allow-missing-captions", action="store_true", help="keep images without a caption, as images only")

    add("--resize", type=int, metavar="PIXELS", help="shrink larger images to this shorter side, as JPEG")
    add("--jpeg-quality", type=int, default=92, metavar="Q", help="with --resize, 1 to 95; default: 92")
    add("--prefix", default="shard", metavar="NAME", help="of the files' names; default: shard")
    add("--samples-per-shard", type=int, default=10_000, metavar="N", help="at most; default: 10000")
    add("--shards", type=int, metavar="N", help="so many shards, in place of --samples-per-shard")
    add("--shuffle", action=argparse.BooleanOptionalAction, default=True, help="mix all samples; default: yes")
    add("--seed", type=int, default=0, help="of the order and the held-out set; default: 0")
    add("--split-held-out", type=float, default=0.0, metavar="FRACTION", help="of the samples, into a second set")
    add("--max-bad-fraction", type=float, default=0.01, metavar="F", help="more make the exit status 1; default: 0.01")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: one a usable CPU")
    options = parser.parse_args(arguments)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.kind = next(name for name in CAPTIONS if getattr(options, name) is not None)
    for name, kinds in BELONGS.items():
        if getattr(options, name) and options.kind not in kinds:
            parser.error(f"--{name.replace('_', '-')} goes with {' or '.join(f'--{one}' for one in kinds)}")
    if options.captions and options.captions not in CAPTIONS[options.kind]:
        parser.error(f"--captions {options.captions}: with --{options.kind} {' or '.join(CAPTIONS[options.kind])}")
    if options.kind == "torchvision" and options.root is None:
        parser.error("--torchvision needs --root, the folder that the data set is in")
    for name in ("workers", "samples_per_shard", "shards", "resize"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; at least 1 is needed")
    if not 1 <= options.jpeg_quality <= 95:
        parser.error(f"--jpeg-quality is {options.jpeg_quality}; it must be 1 to 95")
    if not 0 <= options.split_held_out < 1:
        parser.error(f"--split-held-out is {options.split_held_out}; it must be at least 0 and below 1")
    if not 0 <= options.max_bad_fraction <= 1:
        parser.error(f"--max-bad-fraction is {options.max_bad_fraction}; it must be 0 to 1")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", options.prefix):
        parser.error(f"--prefix is {options.prefix!r}; letters, digits, - and _ are allowed")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from dsclr.config import ConfigError
    from dsclr.data.writing import Settings, make_shards
    from dsclr.units import format_fractions

    settings = Settings(
        prefix=options.prefix,
        samples_per_shard=options.samples_per_shard,
        shards=options.shards,
        shuffle=options.shuffle,
        seed=options.seed,
        split_held_out=options.split_held_out,
        resize=options.resize,
        jpeg_quality=options.jpeg_quality,
        allow_missing_captions=options.allow_missing_captions,
    )
    try:
        source = open_source(options)
        made = make_shards(source, options.output, settings, options.workers)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {explain(error, options.output)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(summary(made, source.unused, options.output))
    if made.bad_fraction > options.max_bad_fraction:
        bad, most = format_fractions(made.bad_fraction, options.max_bad_fraction)
        print(
            f"error: {bad} of the rows are bad, more than the {most} of --max-bad-fraction "
            f"{options.max_bad_fraction:g}: see {options.output / 'skipped.jsonl'}. The shards hold the others; to "
            "make them again after a repair, delete the folder",
            file=sys.stderr,
        )
        return 1
    return 0


def open_source(options: argparse.Namespace) -> Source:
    """The input that the options name. Raises ConfigError."""
    from dsclr.config import ConfigError
    from dsclr.data.writing import folder_source, table_source, torchvision_source

    template = TEMPLATE if options.template is None else options.template
    captioned = options.captions != "none"
    if options.kind == "table":
        captions = options.caption_column or ["caption"]
        return table_source(options.table, options.image_column or "image", captions, options.root, captioned)
    if options.kind == "torchvision":
        return torchvision_source(
            options.torchvision, options.root, options.split, template, captioned, options.download
        )
    if options.output.resolve().is_relative_to(options.images.resolve()):
        raise ConfigError(f"--output: {options.output} lies in --images {options.images}: choose a folder elsewhere")
    return folder_source(options.images, options.captions, template, options.flat)


def explain(error: OSError, output: Path) -> str:
    """What went wrong with a file, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of {output} is full ({error.strerror}); what is complete stays: make room and run the same "
            "command again, it goes on"
        )
    return f"{error}; when that is mended, the same command goes on"


def summary(made: Made, unused: Unused, output: Path) -> str:
    """What was made and how to train on it."""
    lines = [f"{output} was complete already; nothing was done"] if made.already else []
    first, *held_out = made.sets
    lines.append(f"{first['samples']:,} samples in {first['shards']:,} shard(s)")
    for one in held_out:
        lines[-1] += f", {one['samples']:,} held out in {one['shards']:,} shard(s)"
    if made.skipped:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in made.skipped.items())
        total = sum(made.skipped.values())
        lines.append(f"skipped {total:,} of {made.rows:,}: {causes}; each is listed in {output / 'skipped.jsonl'}")
    if unused.captions:
        named = ", ".join(unused.first_captions) + (", ..." if unused.captions > len(unused.first_captions) else "")
        lines.append(f"not used: {unused.captions:,} caption file(s) without an image: {named}")
    if unused.suffixes:
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in unused.suffixes.most_common(5))
        more = ", ..." if len(unused.suffixes) > 5 else ""
        lines.append(f"not looked at, for they have no image's ending: {kinds}{more}")
        if ".txt" in unused.suffixes:
            lines[-1] += " (--captions txt takes captions from x.txt beside x.jpg)"
    if made.captioned and made.without_caption:
        lines.append(f"{made.without_caption:,} samples have no caption: only dsclr.objective simclr can use them")
    lines.append("to train on them:")
    lines.append(f"  --set 'dsclr.data.train={output / 'index.json'}'")
    if held_out:
        lines.append(f"  --set 'dsclr.eval.data={output / 'index-heldout.json'}'")
    if made.several_captions:
        lines.append("  --set dsclr.data.caption=json:captions    (every pass draws one of a sample's captions)")
    if not made.captioned:
        lines.append("  --set dsclr.objective=simclr    (there are no captions)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
