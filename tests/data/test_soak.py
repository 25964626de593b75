"""Long runs do not grow."""

from __future__ import annotations

import io
import tarfile

import psutil
import pytest
from PIL import Image

from dsclr.config import DataConfig
from dsclr.data import build_train_dataset, build_train_loader
from tests.data.samples import SETTINGS, add, tokenize

SHARDS, PER_SHARD = 40, 250
ROWS = 500


@pytest.fixture
def shards(tmp_path):
    """More than are open at a time, some samples of them unusable."""
    out = io.BytesIO()
    Image.new("RGB", (34, 34), "green").save(out, "JPEG")
    for number in range(SHARDS):
        with tarfile.open(tmp_path / f"{number:03d}.tar", "w") as tar:
            for sample in range(PER_SHARD):
                add(tar, f"{sample}.jpg", out.getvalue() if sample % 200 else b"broken")
                add(tar, f"{sample}.txt", f"caption {number * PER_SHARD + sample}".encode())
    return tmp_path


def resident_bytes() -> int:
    """Of this process and its children, what they share counted once."""
    own = psutil.Process()
    return sum(process.memory_full_info().uss for process in (own, *own.children(recursive=True)))


@pytest.mark.parametrize(
    "samples", [10_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])]
)
def test_memory_stays_flat(shards, samples):
    config = DataConfig(
        train=f"{shards}/*.tar", cache_dir=str(shards / "cache"), workers=2, shuffle_shards=4, max_bad_fraction=1.0
    )
    dataset = build_train_dataset(config, "clip", SETTINGS, tokenize, 0)
    loader = build_train_loader(config, dataset, ROWS)
    sizes = []
    for number, batch in enumerate(loader):
        del batch
        loader.take_skipped()
        if number * ROWS >= samples:
            break
        if (number * ROWS) % (samples // 10) < ROWS:
            sizes.append(resident_bytes())
    loader.close()
    # The first tenth fills caches and opens files.
    assert max(sizes[5:]) - max(sizes[1:4]) < 20e6, [f"{size / 1e6:.0f} MB" for size in sizes]
