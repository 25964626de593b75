"""What is in a data set, what training would make of it, and what to do about it.

    python tools/check_shards.py '/data/shards/{000000..000099}.tar'
    python tools/check_shards.py --deepspeed_config ds_configs/a100.json --json check.json --contact-sheet odd.png

Every sample is read once, by the code that training reads it with, in processes that may crash or hang over one: that
sample is named and the rest goes on. The exit status is 0 where all is fine; 1 where too many samples are unusable, a
shard is unreadable, cut off or damaged, or an index file does not have the real counts; 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsclr.config import Config
    from dsclr.data.dataset import ShardDataset

DEFAULT_BATCH_SIZE = 4096
# Of the model that shards are checked for where none is named.
DEFAULT_IMAGE_SIZE = 224
OF_DATA = ("caption", "image", "id", "max_bad_fraction")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shards", nargs="*", metavar="SHARDS", help="paths, URLs, globs, brace patterns, index files, or demo:NAME")
    add("--deepspeed_config", metavar="JSON", help="in place of SHARDS: a run, whose dsclr.data is checked")
    add("--set", action="append", default=[], metavar="PATH=VALUE", help="as for launch/train.py")
    add("--caption", metavar="SOURCE", help="as dsclr.data.caption: an extension, or json:FIELD; default: txt")
    add("--image", metavar="EXTENSIONS", help="as dsclr.data.image; default: all that training knows")
    add("--id", metavar="SOURCE", help="as dsclr.data.id; default: auto")
    add("--tokenizer", metavar="NAME", help="an open_clip model that captions must not be too long for")
    add("--batch-size", type=int, metavar="N", help=f"of training; default: the run's, or {DEFAULT_BATCH_SIZE}")
    add(
        "--max-bad-fraction",
        type=float,
        metavar="F",
        help="of unusable samples; default: the run's, or 0.01",
    )
    add("--limit", type=int, metavar="N", help="look at the first N samples only")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: one a usable CPU")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="that one sample may take; default: 60")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--contact-sheet", type=Path, metavar="PNG", help="draw the oddest images there")
    options = parser.parse_args(arguments)
    if bool(options.shards) == bool(options.deepspeed_config):
        parser.error("name either SHARDS or --deepspeed_config, which says what dsclr.data.train is")
    if options.set and not options.deepspeed_config:
        parser.error("--set goes with --deepspeed_config")
    if options.tokenizer and options.deepspeed_config:
        parser.error("--tokenizer goes with SHARDS: a run has its model's (--set dsclr.model.name=NAME)")
    for name in ("batch_size", "limit", "workers", "timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} {value}: more than 0 is needed")
    for name in ("json", "contact_sheet"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name.replace('_', '-')} {path}: the folder {path.parent} does not exist")
    if options.contact_sheet is not None and options.contact_sheet.suffix.lower() != ".png":
        parser.error(f"--contact-sheet {options.contact_sheet}: a name that ends in .png is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from dsclr.config import ConfigError

    try:
        config = read_config(options)
        dataset, image_size = build_dataset(config, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        report = check_all(dataset, config, options, image_size)
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from dsclr.data.checking.table import table

    print(table(report))
    return 1 if report["problems"] else 0


def read_config(options: argparse.Namespace) -> Config:
    """The run, or a run on SHARDS with defaults. Raises ConfigError."""
    from dsclr.config import Config, load_config

    given = {name: getattr(options, name) for name in OF_DATA if getattr(options, name) is not None}
    if options.deepspeed_config:
        overrides = [f"dsclr.data.{name}={json.dumps(value)}" for name, value in given.items()]
        return load_config(options.deepspeed_config, [*options.set, *overrides])
    section = {"run": {"max_steps": 1}, "data": {"train": options.shards, **given}}
    if options.tokenizer:
        section["model"] = {"name": options.tokenizer}
    return Config({"dsclr": section}, "command line")


def build_dataset(config: Config, options: argparse.Namespace) -> tuple[ShardDataset, int]:
    """The data set of training in the order InPlace, and the model's shorter side in pixels. Raises ConfigError."""
    from dsclr.data import build_train_dataset
    from dsclr.data.checking.examine import InPlace
    from dsclr.models import ImageSettings, get_tokenizer, image_settings

    ours = config.dsclr
    half = (0.5, 0.5, 0.5)
    settings = ImageSettings((DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE), half, half, "bicubic", "shortest")
    tokenizer: Any = _no_tokens
    if options.deepspeed_config or options.tokenizer:
        settings = image_settings(ours.model)
        tokenizer = get_tokenizer(ours.model) if ours.objective == "clip" else None
    dataset = build_train_dataset(ours.data, ours.objective, settings, tokenizer, ours.run.seed, InPlace())
    dataset.choose_caption = False
    return dataset, min(settings.image_size)


def _no_tokens(texts: list[str]) -> Any:
    """In place of a tokenizer: what is checked without a model has no tokens."""
    import torch

    return torch.zeros(len(texts), 1, dtype=torch.int64)


def check_all(dataset: ShardDataset, config: Config, options: argparse.Namespace, image_size: int) -> dict[str, Any]:
    """The report with its "advice" and "problems". Raises OSError for a contact sheet that cannot be written."""
    from tqdm import tqdm

    from dsclr.data.checking.advice import advise
    from dsclr.data.checking.check import check
    from dsclr.data.checking.report import make_report
    from dsclr.data.checking.sheet import choose, draw_sheet

    # Its thread and the locks it may hold would be copied into every process.
    tqdm.monitor_interval = 0
    shards, opened = len(dataset.reader.shards), 0
    with tqdm(total=options.limit, unit=" samples", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def show(new_shards: int, samples: int) -> None:
            nonlocal opened
            opened += new_shards
            bar.set_postfix_str(f"{opened} of {shards} shards opened", refresh=False)
            bar.update(samples)

        checked = check(dataset, options.workers, options.timeout, options.limit, show)
    batch_size = options.batch_size or config.raw.get("train_batch_size") or DEFAULT_BATCH_SIZE
    weights = [source.weight for source in config.dsclr.data.sources or []]
    sources = [(*source, weight) for source, weight in zip(dataset.sources.items(), weights, strict=True)]
    report = make_report(checked, dataset, batch_size, sources)
    most_bad = config.dsclr.data.max_bad_fraction
    report["advice"] = advise(report, config.dsclr.data, image_size, most_bad)
    report["problems"] = find_problems(report, most_bad)
    if options.contact_sheet:
        draw_sheet(choose(checked.findings.odd), dataset).save(options.contact_sheet, "PNG")
    return report


def find_problems(report: dict[str, Any], max_bad_fraction: float) -> list[str]:
    """What makes the exit status 1."""
    from dsclr.units import format_fractions

    samples, shards = report["samples"], report["shards"]
    problems = []
    if not samples["looked_at"]:
        problems.append("there is not one sample")
    if samples["unusable_fraction"] > max_bad_fraction:
        part, most = format_fractions(samples["unusable_fraction"], max_bad_fraction)
        problems.append(
            f"{samples['unusable']:,} of {samples['looked_at']:,} samples are unusable ({part}, over {most})"
        )
    for name, words in (
        ("unreadable", "cannot be read"),
        ("damaged", "are cut off or damaged"),
        ("wrong_index", "have other counts than the index file says"),
    ):
        if shards[name]:
            problems.append(f"{len(shards[name]):,} shard(s) {words}, the first is {shards[name][0]['shard']}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
