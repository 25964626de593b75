"""Batches kept, spilled and read again: the same rows in any order of chunks, in flat memory, never silently less."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsclr.config import ConfigError, DataConfig
from dsclr.data import BadDataError, Batch, build_train_dataset, build_train_loader
from dsclr.data.batch import is_in_memory
from tests.data.samples import SETTINGS, tokenize, write_shard

MODES = ["keep", "spill", "reread"]
BATCHES = 4
ROWS = 37


@pytest.fixture
def cfg(tmp_path):
    """30 samples of which 26 are usable."""
    for i in range(3):
        write_shard(tmp_path / f"s{i}.tar", range(i * 10, i * 10 + 10), broken=(3, 12, 13, 19))
    return DataConfig(
        train=f"{tmp_path}/s*.tar",
        cache_dir=str(tmp_path / "cache"),
        workers=0,
        shuffle_shards=2,
        max_bad_fraction=1.0,
        prefetch=1,
    )


@pytest.fixture
def loader_of(cfg):
    """Makes a loader; all are closed in the end."""
    loaders = []

    def make(host_images, workers=0, objective="clip", rows=ROWS, **options):
        settings = cfg.model_copy(update={"workers": workers})
        dataset = build_train_dataset(settings, objective, SETTINGS, tokenize, 0)
        loaders.append(build_train_loader(settings, dataset, rows, host_images=host_images, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def whole(batch, size=None, start=0):
    """All rows from ``start`` on as one in-memory batch, asked for in chunks of ``size``."""
    size = size or batch.rows
    parts = [batch.chunk(at, min(at + size, batch.rows)) for at in range(start, batch.rows, size)]
    return Batch(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]), batch.ids[start:])


def assert_equal(batch, expected, start=0):
    for got, want in ((batch.a, expected.a), (batch.b, expected.b), (batch.ids, expected.ids)):
        assert got.dtype == want.dtype
        assert torch.equal(got, want[start:])


def children():
    return {child.pid for child in multiprocessing.active_children()}


def test_a_batch_in_memory_gives_its_rows():
    batch = Batch(torch.arange(5), torch.arange(5) + 10, torch.arange(5))
    assert batch.rows == 5
    a, b = batch.chunk(1, 3)
    assert (a.tolist(), b.tolist()) == ([1, 2], [11, 12])


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["spill", "reread"])
def test_same_rows_ids_and_place_as_in_memory(loader_of, mode, workers, objective):
    kept, other = loader_of("keep", objective=objective), loader_of(mode, workers, objective)
    for number, (expected, batch) in enumerate(itertools.islice(zip(kept, other, strict=True), BATCHES)):
        assert batch.rows == ROWS
        for size in (5 + number, 7, ROWS):
            assert_equal(whole(batch, size), expected)
        assert_equal(whole(batch, 4, start=8), expected, start=8)
        assert other.consumed == kept.consumed
        assert other.skipped == kept.skipped
    assert kept.skipped["not_an_image"] >= 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_continues_where_it_stopped(loader_of, mode, workers):
    expected = list(itertools.islice(loader_of("keep"), BATCHES))
    first = loader_of(mode, workers)
    for batch in itertools.islice(first, 2):
        whole(batch, 10)
    rest = loader_of(mode, workers, consumed=first.consumed)
    for batch, want in zip(itertools.islice(rest, 2), expected[2:], strict=True):
        assert_equal(whole(batch, 10), want)
    # the first loader itself, iterated anew, as well
    assert_equal(whole(next(iter(first))), expected[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_first_pass_interrupted_and_done_again_in_other_chunks(loader_of, workers):
    expected = next(iter(loader_of("keep", rows=90)))
    loader = loader_of("reread", workers, rows=90)
    batch = next(iter(loader))
    for start, end in ((0, 40), (40, 70), (0, 20), (20, 40), (40, 60), (0, 10), (10, 20)):
        a, b = batch.chunk(start, end)
        assert torch.equal(a, expected.a[start:end])
        assert torch.equal(b, expected.b[start:end])
        assert loader.consumed == 0
        with pytest.raises(RuntimeError, match="of 90 rows"):
            _ = batch.ids
    assert_equal(whole(batch, 11), expected)
    assert loader.consumed >= 90
    # the second pass starts where the redo of the first met the stream
    assert_equal(whole(batch, 10, start=70), expected, start=70)


@pytest.mark.parametrize("mode", MODES)
def test_any_order_of_chunks(loader_of, mode):
    draw = random.Random(0)
    expected = list(itertools.islice(loader_of("keep"), BATCHES))
    given = []
    for batch in itertools.islice(loader_of(mode), BATCHES):
        given.append(batch)
        for _ in range(20):
            # earlier batches in between: they share the processes that read again
            number = draw.randrange(len(given))
            start = draw.randrange(ROWS)
            end = draw.randint(start + 1, ROWS)
            for at in range(start, end, 6):
                a, b = given[number].chunk(at, min(at + 6, end))
                assert torch.equal(a, expected[number].a[at : min(at + 6, end)])
                assert torch.equal(b, expected[number].b[at : min(at + 6, end)])
        for start, end in ((-1, 3), (3, 3), (0, ROWS + 1)):
            with pytest.raises(IndexError):
                batch.chunk(start, end)


def test_the_next_batch_does_not_lose_rows_of_one_that_was_not_read(loader_of):
    kept, loader = loader_of("keep"), loader_of("reread")
    expected = list(itertools.islice(kept, 3))
    batches = iter(loader)
    first = next(batches)
    first.chunk(0, 10)
    second = next(batches)
    third = next(batches)
    for batch, want in zip((third, first, second), (expected[2], expected[0], expected[1]), strict=True):
        assert_equal(whole(batch, 10), want)
    assert loader.consumed == kept.consumed


def test_a_row_that_cannot_be_read_again_is_named(loader_of, tmp_path):
    batch = next(iter(loader_of("reread")))
    whole(batch)
    for i in range(3):
        os.truncate(tmp_path / f"s{i}.tar", 0)
    with pytest.raises(BadDataError, match=r"sample \d+ in .*s\d\.tar was read before .* ends inside .*host_images"):
        whole(batch)


def test_too_many_bad_samples_end_the_run_in_every_mode(cfg, loader_of, tmp_path):
    for i in range(3):
        write_shard(tmp_path / f"s{i}.tar", range(10), broken=tuple(range(10)))
    for mode in MODES:
        with pytest.raises(BadDataError, match="were unusable"):
            next(iter(loader_of(mode))).chunk(0, 1)


def test_the_file_has_no_name_and_goes_with_its_batch(loader_of, tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()

    def open_files():
        links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return sum(link.startswith(str(folder)) for link in links)

    batches = iter(loader_of("spill", spill_dir=folder))
    batch = next(batches)
    assert not list(folder.iterdir())
    assert open_files() == 1
    del batch
    gc.collect()
    assert open_files() == 0
    batch = next(batches)
    assert open_files() == 1
    assert batch.rows == ROWS


def test_a_full_disk_names_folder_and_bytes(loader_of, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    needed = f"{ROWS * 3 * 32 * 32:,} bytes.* in {tmp_path}: .*dsclr.step.spill_dir.*reread"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=needed.replace(": ", ": No space left.*")):
            next(iter(loader_of("spill", spill_dir=tmp_path)))
    room = os.statvfs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((*room[:4], 0, *room[5:])))
        with pytest.raises(ConfigError, match=needed.replace(": ", ": only 0 are free.*")):
            next(iter(loader_of("spill", spill_dir=tmp_path)))
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        next(iter(loader_of("spill", spill_dir=tmp_path / "nowhere")))


def test_short_writes_and_reads_are_continued(loader_of, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, data, at: preadv(descriptor, [data[0][:999]], at))
    expected = next(iter(loader_of("keep", objective="simclr")))
    assert_equal(whole(next(iter(loader_of("spill", objective="simclr"))), 10), expected)


def test_a_shard_that_changes_between_two_readings_ends_the_run(loader_of):
    batch = next(iter(loader_of("reread")))
    batch.chunk(0, ROWS)
    batch._ids[3] += 1
    with pytest.raises(BadDataError, match="a shard changed between two readings"):
        batch.chunk(0, ROWS)


def test_files_in_memory_are_warned_about(loader_of, caplog, tmp_path):
    assert not is_in_memory(Path("/usr"))
    loader_of("keep", spill_dir=Path("/dev/shm"))
    assert not caplog.messages
    if is_in_memory(Path("/dev/shm")):
        loader_of("spill", spill_dir=Path("/dev/shm"))
        assert "/dev/shm is in memory" in caplog.text


def test_an_unknown_mode_is_an_error(loader_of):
    with pytest.raises(ValueError, match="host_images = 'forget', accepted: keep, spill, reread"):
        loader_of("forget")


def test_rereading_processes_persist_until_the_loader_is_closed(loader_of):
    before = children()
    loader = loader_of("reread", workers=2)
    batches = iter(loader)
    seen = set()
    for _ in range(3):
        batch = next(batches)
        for size in (ROWS, 10, 7):
            whole(batch, size)
        batch.chunk(0, 3)
        seen.add(frozenset(children() - before))
    (pids,) = seen
    assert len(pids) == 4
    loader.close()
    assert not children() - before
    with pytest.raises(RuntimeError, match="closed"):
        next(batches).chunk(0, 3)
    # a batch read before, and the loader iterated anew, start what they need
    whole(batch)
    next(iter(loader)).chunk(0, 3)
    loader.close()
    assert not children() - before
    loader.close()


# Rows out of nothing, so that memory and shut-down are all there is to see.
SCRIPT = """
import itertools, json
import torch
from dsclr.data.dataset import Sample
from dsclr.data.loader import TrainLoader

class Synthetic:
    def __getitem__(self, position):
        image = torch.full((3, 64, 64), position % 251, dtype=torch.uint8)
        return Sample(image, torch.full((8,), position), position, position, 0)

def use(mode, rows, workers):
    loader = TrainLoader(Synthetic(), rows, workers=workers, prefetch=2, host_images=mode)
    for batch in itertools.islice(loader, 2):
        for size in (64, 48):
            for start in range(0, rows, size):
                batch.chunk(start, min(start + size, rows))
    return loader

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""


def run_script(body):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=300, check=True
    )
    assert "Error" not in process.stderr
    return json.loads(process.stdout)


def test_memory_does_not_grow_with_the_batch():
    grown = run_script("""
grown = {}
# the peak never falls, so what takes most comes last
for mode, workers in (("spill", 0), ("spill", 2), ("reread", 0), ("reread", 2), ("keep", 0)):
    use(mode, 512, workers).close()
    before = peak()
    use(mode, 4096, workers).close()
    grown[f"{mode} {workers}"] = peak() - before
print(json.dumps(grown))
""")
    images = 3584 * 3 * 64 * 64
    # what a batch held in memory takes, or the measurement sees nothing
    assert grown.pop("keep 0") > images * 0.8
    assert max(grown.values()) < images / 8, grown


def test_a_loader_that_is_not_closed_does_not_keep_the_program():
    assert run_script("""
loaders = [use(mode, 512, 2) for mode in ("keep", "spill", "reread")]
batches = iter(loaders[2])
next(batches).chunk(0, 100)
print(json.dumps("done"))
""")
