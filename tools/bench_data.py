"""Samples a second of one core, by stage, against a bare webdataset pipeline, open_clip's own, and JPEG decoding alone.

    python tools/bench_data.py --output tools/results/bench_data.json

The shards are made on the spot, of JPEG images of several sizes with captions of fifteen words, and are in the page
cache. Every repeat visits all cases in turn, each in this process with one thread; a ratio is that of medians. The
other pipelines end in normalised floats, as they are used; ours in uint8, since normalisation happens on the device.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset as wds
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from dsclr.config import DataConfig
from dsclr.data import build_train_dataset, build_train_loader
from dsclr.data.decode import read_captions
from dsclr.data.tasks import ROWS_PER_TASK, collate
from dsclr.data.views import seeded
from dsclr.models import ImageSettings

# Width and height of the images of a data set.
SIZES = {"256 x 256": (256, 256), "640 x 480": (640, 480), "1600 x 1200": (1600, 1200)}
MODEL_SIZE = 224
CAPTION = "a photo of one small red fox beside two large green trees in winter snow"
TITLES = {
    "ours": "dsclr",
    "open_clip": "open_clip's pipeline",
    "webdataset": "bare webdataset with our transform",
    "pillow": "JPEG decoding alone, Pillow",
    "torchvision": "JPEG decoding alone, torchvision",
}
STAGES = ("read", "decode", "augment", "tokenize", "collate")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512, metavar="N", help="of each size; default: 512")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES), help="default: all")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; default: 3")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the figures there, and a table beside it")
    options = parser.parse_args(arguments)
    if options.samples < 2 * ROWS_PER_TASK or options.samples % ROWS_PER_TASK:
        parser.error(f"--samples {options.samples}: a multiple of {ROWS_PER_TASK}, twice that at least, is needed")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1 is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "samples": options.samples,
        "repeats": options.repeats,
        "sizes": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sizes:
            results["sizes"][name] = measure(Path(folder), SIZES[name], options.samples, options.repeats)
    print(table(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
        options.output.with_suffix(".md").write_text(table(results))
    return 0


def measure(folder: Path, size: tuple[int, int], samples: int, repeats: int) -> dict[str, Any]:
    """Seconds a sample of every case and stage: the median, the least and the most of the rounds."""
    shards = make_shards(folder / f"{size[0]}", size, samples)
    cases = make_cases(shards, folder / "cache", samples)
    for run in cases.values():
        run()  # reads the files into the page cache, builds tables
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            times.setdefault(name, []).append((time.perf_counter() - started) / samples)
        for stage, seconds in measure_stages(shards, folder / "cache", samples).items():
            times.setdefault(f"stage_{stage}", []).append(seconds / samples)
    return {
        name: {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        for name, seconds in times.items()
    }


def make_shards(folder: Path, size: tuple[int, int], samples: int) -> list[Path]:
    """Two shards of JPEG files (quality 90) with the spectrum of photographs more than of noise, and captions."""
    folder.mkdir()
    random = np.random.default_rng(0)
    paths = [folder / f"{number}.tar" for number in range(2)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for sample in range(number, samples, 2):
                coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
                smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
                pixels = (smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
                out = io.BytesIO()
                Image.fromarray(pixels).save(out, "JPEG", quality=90)
                words = random.permutation(CAPTION.split())
                for extension, data in (("jpg", out.getvalue()), ("txt", " ".join(words).encode())):
                    info = tarfile.TarInfo(f"{sample:06d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return paths


def our_dataset(shards: list[Path], cache: Path) -> Any:
    config = DataConfig(train=[str(shard) for shard in shards], cache_dir=str(cache), workers=0)
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    settings = ImageSettings((MODEL_SIZE, MODEL_SIZE), mean, std, "bicubic", "shortest")
    return build_train_dataset(config, "clip", settings, open_clip.get_tokenizer("ViT-B-32"), 0)


def make_cases(shards: list[Path], cache: Path, samples: int) -> dict[str, Callable[[], None]]:
    """Name -> one pass over all samples."""
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    dataset = our_dataset(shards, cache)
    preprocess = open_clip.image_transform(MODEL_SIZE, is_train=True)
    pattern = [str(shard) for shard in shards]
    jpegs = [dataset.reader.read(*dataset.order.locate(i))[1]["jpg"] for i in range(samples)]
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in jpegs]

    def ours() -> None:
        loader = build_train_loader(DataConfig(workers=0), dataset, ROWS_PER_TASK)
        for _, batch in zip(range(samples // ROWS_PER_TASK), loader, strict=False):
            batch.chunk(0, ROWS_PER_TASK)

    def theirs() -> None:
        # In the wheel of open_clip_torch, beside open_clip itself.
        from open_clip_train.data import get_wds_dataset

        arguments = SimpleNamespace(
            val_data="::".join(pattern),
            val_num_samples=samples,
            batch_size=ROWS_PER_TASK,
            workers=0,
            world_size=1,
        )
        # Its training variant differs in shuffling, and does not run with webdataset 1.0.
        consume(get_wds_dataset(arguments, preprocess, is_train=False, tokenizer=tokenizer).dataloader)

    def bare() -> None:
        def view(image: Image.Image) -> torch.Tensor:
            return dataset.transform(image)

        pipeline = wds.DataPipeline(
            wds.SimpleShardList(pattern),
            wds.tarfile_to_samples(),
            wds.decode("pilrgb"),
            wds.to_tuple("jpg", "txt"),
            wds.map_tuple(view, lambda text: tokenizer([text])[0]),
            wds.batched(ROWS_PER_TASK),
        )
        consume(iter(pipeline))

    def consume(batches: Iterator[Any]) -> None:
        seen = sum(len(texts) for _, texts in batches)
        assert seen == samples, f"{seen} of {samples} samples"

    def pillow() -> None:
        for data in jpegs:
            Image.open(io.BytesIO(data)).convert("RGB").load()

    def torchvision() -> None:
        for data in encoded:
            decode_jpeg(data, mode=ImageReadMode.RGB)

    return {"ours": ours, "open_clip": theirs, "webdataset": bare, "pillow": pillow, "torchvision": torchvision}


def measure_stages(shards: list[Path], cache: Path, samples: int) -> dict[str, float]:
    """Seconds of each stage of ours for all samples."""
    dataset = our_dataset(shards, cache)
    seconds = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, run: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = run(*arguments)
        seconds[stage] += time.perf_counter() - started
        return result

    for start in range(0, samples, ROWS_PER_TASK):
        rows = []
        for position in range(start, start + ROWS_PER_TASK):
            _, members = timed("read", dataset.reader.read, *dataset.order.locate(position))
            image, _ = timed("decode", dataset.images.read, members)
            timed("augment", seeded, dataset.transform, image, position)
            timed("tokenize", dataset.tokenizer, read_captions(members, "txt"))
            rows.append(dataset[position])
        timed("collate", collate, rows)
    return seconds


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    sizes = list(results["sizes"])
    lines = [
        f"{results['samples']} samples of each size, medians of {results['repeats']} rounds in turns, one core, "
        f"{MODEL_SIZE} px, torch {results['torch']}.",
        "",
        "| samples a second relative to | " + " | ".join(sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for case, title in list(TITLES.items())[1:]:
        ratios = [results["sizes"][size][case]["median"] / results["sizes"][size]["ours"]["median"] for size in sizes]
        lines.append(f"| {title} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    lines += ["", "| part of the time in | " + " | ".join(sizes) + " |", "|---|" + "---|" * len(sizes)]
    for stage in STAGES:
        parts = []
        for size in sizes:
            found = results["sizes"][size]
            whole = sum(found[f"stage_{one}"]["median"] for one in STAGES)
            parts.append(f"{found[f'stage_{stage}']['median'] / whole:.0%}")
        lines.append(f"| {stage} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
