"""Names of shards, tar indexes and random access."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest

from dsclr.config import ConfigError
from dsclr.data.cache import ShardCache
from dsclr.data.causes import BadSample
from dsclr.data.index import index_tar, load_index
from dsclr.data.reader import ShardReader
from dsclr.data.shards import Shard, expand_shards


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def reader_of(paths, cache, **options):
    return ShardReader([Shard(str(path)) for path in paths], ShardCache(cache), **options)


def addresses(*arguments, **options):
    return [shard.address for shard in expand_shards(*arguments, **options)]


@pytest.fixture
def shards(tmp_path):
    return [
        write_tar(tmp_path / f"s-{i:03d}.tar", [(f"{i}-{j}.txt", f"{i} {j}".encode()) for j in range(3)])
        for i in range(4)
    ]


def test_patterns(shards, tmp_path):
    names = [str(shard) for shard in shards]
    assert addresses(f"{tmp_path}/s-{{000..003}}.tar") == addresses(f"file://{tmp_path}/*.tar") == names
    assert addresses(f"{tmp_path}/*.tar") == names
    assert addresses([names[2], f"{tmp_path}/s-00[01].tar"]) == [names[2], names[0], names[1]]
    assert len(expand_shards("demo:train")) == 8
    assert len(expand_shards("demo:fluent-heldout")) == 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{tmp}/s-{{000..009}}.tar", r"s-004\.tar does not exist \(and 5 more of 10\)"),
        ("{tmp}/missing.tar", "missing.tar does not exist"),
        ("{tmp}/*.zip", "nothing matches"),
        ("{tmp}/s-{{}}.tar", "braces .* are empty"),
        ("{tmp}/s-{{000..003.tar", "nbalanced"),
        ("{tmp}", "it is a folder"),
        ("", "an empty name"),
        ("demo:nothing", "demo:fluent-train"),
        ("demo:*", "is not one of"),
        ("nothing://bucket/x.tar", "nothing"),
        ("pipe:cat x.tar", "dsclr.data.allow_pipe"),
        ("{tmp}/index.json", "index.json cannot be read"),
    ],
)
def test_names_that_lead_nowhere(shards, tmp_path, pattern, message):
    with pytest.raises(ConfigError, match=message) as error:
        expand_shards(pattern.format(tmp=tmp_path), "dsclr.data.train")
    assert "dsclr.data.train" in str(error.value)


def test_an_empty_list():
    with pytest.raises(ConfigError, match="empty list"):
        expand_shards([])


def test_index_groups_members_by_name(tmp_path):
    path = write_tar(
        tmp_path / "x.tar",
        [
            ("d/a.jpg", b"1"),
            ("d/a.txt", b"22"),
            ("d/b.JPG", b"333"),
            ("d/b.seg.png", b"4"),
            ("README", b"-"),
            ("d/c.txt", b""),
        ],
    )
    entries = index_tar(path)
    assert [(e.key, sorted(e.members)) for e in entries] == [
        ("d/a", ["jpg", "txt"]),
        ("d/b", ["jpg", "seg.png"]),
        ("d/c", ["txt"]),
    ]
    assert entries[1].members["jpg"][1] == 3


def test_of_members_with_one_name_the_first_counts(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("a.txt", b"first"), ("a.txt", b"second"), ("b.txt", b"b")])
    reader = reader_of([path], tmp_path)
    assert reader.counts() == [2]
    assert reader.read(0, 0) == ("a", {"txt": b"first"})


def test_random_access_and_few_open_files(shards, tmp_path):
    reader = reader_of(shards, tmp_path / "cache", open_files=2)
    assert reader.counts() == [3, 3, 3, 3]
    for i in (3, 0, 1, 3, 2, 0):
        assert reader.read(i, 2) == (f"{i}-2", {"txt": f"{i} 2".encode()})
    assert len(reader._open) == 2


def test_compressed_shards_are_unpacked_once(shards, tmp_path):
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(shards[1].read_bytes()))
    cache = tmp_path / "cache"
    reader = reader_of([packed], cache)
    assert reader.read(0, 1) == ("1-1", {"txt": b"1 1"})
    first = ShardCache(cache).local(Shard(str(packed)))
    made = first.stat().st_mtime_ns
    assert ShardCache(cache).local(Shard(str(packed))) == first
    assert first.stat().st_mtime_ns == made
    assert list((cache / "shards").glob("*.tar")) == [first]
    assert not list((cache / "shards").glob("*.part"))


def test_a_replaced_shard_is_indexed_anew(shards, tmp_path):
    assert len(load_index(shards[0], tmp_path)) == 3
    write_tar(shards[0], [("z.txt", b"z" * 5000)])
    assert [e.key for e in load_index(shards[0], tmp_path)] == ["z"]


@pytest.mark.parametrize("keep", [0.3, 0.55, 0.9])
def test_a_tar_that_was_cut_off_yields_its_complete_samples(tmp_path, keep):
    members = [(f"{i}.{ext}", bytes([i]) * 3000) for i in range(10) for ext in ("jpg", "txt")]
    path = write_tar(tmp_path / "x.tar", members)
    whole = path.read_bytes()[: 20 * (512 + 3072)]
    path.write_bytes(whole[: int(len(whole) * keep)])
    reader = reader_of([path], tmp_path / "cache")
    count = reader.counts()[0]
    assert 10 * keep - 1 <= count <= 10 * keep + 1
    for i in range(count):
        _, got = reader.read(0, i)
        assert all(data == bytes([i]) * 3000 for data in got.values())


@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_a_damaged_compressed_shard_yields_its_first_part(tmp_path, damage):
    path = write_tar(tmp_path / "x.tar", [(f"{i}.txt", os.urandom(5000)) for i in range(40)])
    packed = tmp_path / "x.tar.gz"
    data = gzip.compress(path.read_bytes(), 1)
    half = len(data) // 2
    packed.write_bytes(data[:half] if damage == "cut" else data[:half] + b"\xff" * half)
    assert 0 < reader_of([packed], tmp_path / "cache").counts()[0] < 40


def test_not_a_tar(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"not a tar at all" * 100)
    with pytest.raises(ConfigError, match="not a tar file"):
        reader_of([path], tmp_path / "cache").counts()


def test_no_samples_at_all(tmp_path):
    path = write_tar(tmp_path / "x.tar", [])
    with pytest.raises(ConfigError, match="no samples"):
        reader_of([path], tmp_path / "cache").counts()


def test_a_shard_that_vanishes_is_a_bad_sample(shards, tmp_path):
    reader = reader_of(shards, tmp_path / "cache")
    reader.counts()
    shards[1].unlink()
    with pytest.raises(BadSample) as error:
        reader.read(1, 0)
    assert error.value.cause == "unreadable_shard"


def test_what_tarfile_ends_before_is_told(tmp_path, caplog):
    first, second = (write_tar(tmp_path / f"{i}.tar", [(f"{i}.txt", b"text")]) for i in range(2))
    joined = tmp_path / "joined.tar"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    assert len(load_index(joined, tmp_path / "cache")) == 1
    assert "joined.tar goes on after its end mark" in caplog.text
