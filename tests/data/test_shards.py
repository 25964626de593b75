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
    entries = index_tar(path).entries
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


def spoiled(tmp_path, how):
    """A shard of which some is never read, and what is said of it."""
    path = write_tar(tmp_path / "x.tar", [(f"{i}.txt", b"text") for i in range(4)])
    data = path.read_bytes()
    changed = {
        "cut in a member": (data[:2562], "is cut off at byte 2,562, in 2.txt"),
        "cut in a header": (data[:2300], "is cut off at byte 2,300, in the header of 2.txt"),
        "cut between members": (data[:2048], "ends at byte 2,048, behind 1.txt, without the end mark"),
        "no header": (data[:2048] + b"\x07" * 512 + data[2560:], "is damaged at byte 2,048"),
        "put together": (data + data, "goes on after its end mark"),
    }
    if how == "a name twice":
        write_tar(path, [("a.txt", b"one"), ("a.txt", b"two")])
        return path, "has 1 member(s) that are left out: their sample has one of that name already"
    if how == "packed":
        packed = tmp_path / "x.tar.gz"
        packed.write_bytes(gzip.compress(data, 0)[:2700])
        return packed, "is cut off at byte"
    path.write_bytes(changed[how][0])
    return path, changed[how][1]


@pytest.mark.parametrize(
    "how",
    [
        "cut in a member",
        "cut in a header",
        "cut between members",
        "no header",
        "put together",
        "a name twice",
        "packed",
    ],
)
def test_what_is_never_read_is_told_at_every_start(tmp_path, caplog, monkeypatch, how):
    path, said = spoiled(tmp_path, how)
    for _ in range(2):
        caplog.clear()
        reader = reader_of([path], tmp_path / "cache")
        reader.counts()
        reader.read(0, 0)
        assert caplog.text.count(f"{path} {said}") == 1
        assert [said in flaw for flaw in reader.flaws[0]] == [True]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    reader_of([path], tmp_path / "cache").counts()
    assert not caplog.text


def test_an_index_of_an_older_version_is_made_anew(tmp_path, caplog):
    path, said = spoiled(tmp_path, "cut in a member")
    load_index(path, tmp_path)
    (cached,) = (tmp_path / "index").iterdir()
    new = cached.read_bytes()
    # The first version: no word of damage behind the entries, and one place less in the table.
    count = int.from_bytes(new[8:16], "little")
    starts = [int.from_bytes(new[16 + 8 * i : 24 + 8 * i], "little") for i in range(count + 1)]
    table = b"".join((start - 8).to_bytes(8, "little") for start in starts)
    cached.write_bytes(b"dsclrix1" + new[8:16] + table + new[starts[0] : starts[-1]])
    reader = reader_of([path], tmp_path)
    assert reader.counts() == [2]
    assert said in caplog.text
    assert cached.read_bytes() == new


def test_many_incomplete_shards_are_not_all_named(tmp_path, caplog):
    path, said = spoiled(tmp_path, "cut in a member")
    reader = reader_of([path] * 13, tmp_path / "cache")
    assert reader.counts() == [2] * 13
    assert caplog.text.count(said) == 10
    assert "3 more shard(s)" in caplog.text
    assert len(reader.flaws) == 13
