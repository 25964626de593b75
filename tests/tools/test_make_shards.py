"""tools/make_shards.py: every kind of input, what is left out, and runs that are interrupted."""

from __future__ import annotations

import csv
import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

from dsclr.data.cache import ShardCache
from dsclr.data.decode import read_captions
from dsclr.data.images import ImageReader
from dsclr.data.reader import ShardReader
from dsclr.data.shards import Shard, expand_shards
from dsclr.data.writing import checks, images, make, output, processes
from tests.data.samples import picture
from tests.environment import of_a_user
from tests.scripts import ROOT, load_script

tool = load_script("tools/make_shards.py")


def reader_of(shards, cache):
    return ShardReader([Shard(str(shard)) for shard in shards], ShardCache(cache))


def read_image(members, extension):
    return ImageReader((extension,)).read(members)[0]


def jpeg(number, size=(40, 30), **options):
    out = io.BytesIO()
    rng = np.random.default_rng(number)
    Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(out, "JPEG", **options)
    return out.getvalue()


def make_folder(folder, files):
    """files: bytes or text by path."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


@pytest.fixture
def classes(tmp_path):
    """Three classes of 4, 5 and 6 images."""
    files = {
        f"{name}/{number}.jpg": jpeg(100 * cls + number)
        for cls, (name, count) in enumerate((("golden_retriever", 4), ("apple", 5), ("zebra", 6)))
        for number in range(count)
    }
    return make_folder(tmp_path / "photos", files)


def run(*words, workers=2):
    return tool.main([*map(str, words), "--workers", str(workers)])


def read(folder, pattern="shard-0*.tar"):
    """Key -> members of all shards, as training reads them; each key once."""
    shards = sorted(folder.glob(pattern))
    reader = reader_of(shards, folder.parent / "cache")
    samples = [reader.read(shard, at) for shard, count in enumerate(reader.counts()) for at in range(count)]
    assert len({key for key, _ in samples}) == len(samples)
    return dict(samples)


def infos(samples):
    return [json.loads(members["json"]) for members in samples.values()]


def contents(folder):
    """What is in a folder, without the list of skipped files, which names paths."""
    assert not any(path.is_dir() or path.suffix == ".part" for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".tar" or "index" in path.name}


def skipped(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


# Inputs


def test_a_folder_with_classes(classes, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--images", classes, "--output", out, "--samples-per-shard", 6) == 0
    samples = read(out)
    assert len(samples) == 15
    names = ["apple", "golden_retriever", "zebra"]
    for members in samples.values():
        assert list(members) == ["jpg", "txt", "json", "cls"]
        info = json.loads(members["json"])
        assert members["jpg"] == (classes / info["path"]).read_bytes()
        assert info["class"] == info["path"].split("/")[0] == names[int(members["cls"])]
        assert members["txt"].decode() == f"a photo of a {info['class'].replace('_', ' ')}"
    assert sorted(info["path"] for info in infos(samples)) == sorted(
        path.relative_to(classes).as_posix() for path in classes.glob("*/*.jpg")
    )
    (pattern,) = re.findall(r"'dsclr.data.train=(.*)'", capsys.readouterr().out)
    assert [shard.address for shard in expand_shards(pattern)] == sorted(map(str, out.glob("shard-*.tar")))

    plain = list(wds.WebDataset([str(path) for path in sorted(out.glob("*.tar"))], shardshuffle=False).decode("pil"))
    assert [sample["__key__"] for sample in plain] == list(samples)
    for sample, members in zip(plain, samples.values(), strict=True):
        assert sample["jpg"].size == (40, 30)
        assert sample["txt"] == read_captions(members, "txt")[0]
        assert sample["cls"] == int(members["cls"])
        assert sample["json"] == json.loads(members["json"])


def test_class_folders_may_have_folders_and_captions_of_their_own(tmp_path, capsys):
    folder = make_folder(
        tmp_path / "photos",
        {"a/deep/1.jpg": jpeg(1), "a/deep/1.txt": "a caption", "b/2.png": picture(2), "b/2.txt": "another"},
    )
    assert run("--images", folder, "--output", tmp_path / "out", "--captions", "txt", "--no-shuffle") == 0
    first, second = read(tmp_path / "out").values()
    # With captions of their own, folders are no classes.
    assert (list(first), first["txt"]) == (["jpg", "txt", "json"], b"a caption")
    assert (second["txt"], second["png"]) == (b"another", picture(2))
    capsys.readouterr()
    assert run("--images", folder, "--output", tmp_path / "new", "--template", "{}, drawn", "--no-shuffle") == 0
    assert [members["txt"] for members in read(tmp_path / "new").values()] == [b"a, drawn", b"b, drawn"]
    assert "2 .txt (--captions txt takes captions from x.txt beside x.jpg)" in capsys.readouterr().out


def test_caption_files_with_images_at_the_top_and_in_subfolders(tmp_path, capsys):
    files = {"1.jpg": jpeg(1), "1.txt": "one", "sub/2.jpg": jpeg(2), "sub/2.txt": "two", "p4.txt": "no image"}
    files |= {"sub/1.txt": "its image lies elsewhere", "notes.md": "", "2.TXT": ""}
    folder = make_folder(tmp_path / "photos", files)
    for number, words in enumerate((["--captions", "txt"], ["--captions", "txt", "--flat"], ["--flat"])):
        out = tmp_path / f"out{number}"
        assert run("--images", folder, "--output", out, "--no-shuffle", *words) == 0
        assert [members["txt"] for members in read(out).values()] == [b"one", b"two"]
        said = capsys.readouterr().out
        assert "not used: 3 caption file(s) without an image: 2.TXT, p4.txt, sub/1.txt\n" in said
        assert "no image's ending: 1 .md\n" in said
    assert run("--images", folder, "--output", tmp_path / "none") == 1
    assert "--captions txt, for captions in x.txt beside x.jpg, implies it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--help")
    assert "--captions txt implies it" in " ".join(capsys.readouterr().out.split())


def test_of_many_caption_files_without_an_image_the_first_are_named(tmp_path, capsys):
    files = {"1.jpg": jpeg(1), "1.txt": "one", **{f"p{number}.txt": "" for number in range(7)}}
    folder = make_folder(tmp_path / "photos", files)
    assert run("--images", folder, "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "7 caption file(s) without an image: p0.txt, p1.txt, p2.txt, p3.txt, p4.txt, ...\n" in said


def test_a_flat_folder_with_caption_files(tmp_path, capsys):
    folder = make_folder(
        tmp_path / "photos",
        {
            "1.jpg": jpeg(1),
            "1.txt": "\ufeff a caption\n",
            "2.PNG": picture(2),
            "2.txt": "nan\n",
            "3.jpg": jpeg(3),
            "4.jpg": jpeg(4),
            "4.txt": b"\xff\xfe",
            "5.heic": "an image of a kind that is not read",
            ".hidden.jpg": "no image",
        },
    )
    out = tmp_path / "out"
    assert run("--images", folder, "--output", out, "--max-bad-fraction", 0.5) == 0
    (members,) = read(out).values()
    assert list(members) == ["jpg", "txt", "json"]
    assert members["txt"] == b"a caption"
    causes = {(one["path"], one["cause"]) for one in skipped(out)}
    assert causes == {("2.PNG", "missing_caption"), ("3.jpg", "missing_caption"), ("4.jpg", "broken_caption")}
    assert "1 .heic" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--flat"]])
def test_a_flat_folder_of_images_only(tmp_path, capsys, words):
    names = ["1.jpg", "sub/2.jpg"] if words else ["1.jpg", "2.jpg"]
    folder = make_folder(tmp_path / "photos", {name: jpeg(number) for number, name in enumerate(names)})
    assert run("--images", folder, "--output", tmp_path / "out", *words) == 0
    samples = read(tmp_path / "out")
    assert [sorted(members) for members in samples.values()] == [["jpg", "json"]] * 2
    assert sorted(info["path"] for info in infos(samples)) == names
    assert "dsclr.objective=simclr" in capsys.readouterr().out


def write_table(path, rows):
    """rows: dicts with the same names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table(tmp_path, suffix):
    make_folder(tmp_path / "data", {"x/1.jpg": jpeg(1), "x/2.png": picture(2)})
    rows = [
        {"image": "x/1.jpg", "caption": 'one, "quoted"\r\nin two lines', "licence": "é"},
        {"image": str(tmp_path / "data/x/2.png"), "caption": "\ttwo ", "licence": ""},
    ]
    table = write_table(tmp_path / f"table{suffix}", rows)
    words = ["--table", table, "--root", tmp_path / "data", "--no-shuffle"]
    assert run(*words, "--output", tmp_path / "out") == 0
    first, second = read(tmp_path / "out").values()
    assert first["jpg"] == jpeg(1)
    assert first["txt"].decode() == rows[0]["caption"]
    assert json.loads(first["json"]) == {"image": "x/1.jpg", "licence": "é"}
    assert second["png"] == picture(2)
    assert second["txt"] == b"two"
    assert "cls" not in first
    assert run(*words, "--output", tmp_path / "images", "--captions", "none") == 0
    assert [sorted(members) for members in read(tmp_path / "images").values()] == [["jpg", "json"], ["json", "png"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_several_captions(tmp_path, suffix, capsys):
    make_folder(tmp_path, {f"{number}.jpg": jpeg(number) for number in range(3)})
    texts = [["one", "uno"], ["two", None], [None]]
    if suffix == ".csv":
        texts = [json.dumps(texts[0]), str(texts[1]), "[not] a list"]
    rows = [{"file": f"{n}.jpg", "text": texts[n], "more": ["", "zwei", "drei"][n], "n": n} for n in range(3)]
    table = write_table(tmp_path / f"table{suffix}", rows)
    columns = ["--image-column", "file", "--caption-column", "text", "--caption-column", "more"]
    assert run("--table", table, "--output", tmp_path / "out", "--no-shuffle", *columns) == 0
    samples = list(read(tmp_path / "out").values())
    third = ["[not] a list", "drei"] if suffix == ".csv" else ["drei"]
    assert [read_captions(members, "json:captions") for members in samples] == [["one", "uno"], ["two", "zwei"], third]
    assert [members["txt"].decode() for members in samples] == ["one", "two", third[0]]
    assert [int(json.loads(members["json"])["n"]) for members in samples] == [0, 1, 2]
    assert "dsclr.data.caption=json:captions" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("allow", [False, True])
def test_a_missing_caption_is_never_a_caption(tmp_path, suffix, allow, capsys):
    make_folder(tmp_path, {f"{number}.jpg": jpeg(number) for number in range(4)})
    missing: dict[str, list[str | float | None]] = {
        ".csv": ["", "nan", " ", "NaN"],
        ".jsonl": [None, "nan", float("nan"), ""],
        ".parquet": [None, "nan", "None", ""],
    }
    captions = ["a good one", *missing[suffix]]
    rows = [{"image": f"{n % 4}.jpg", "caption": caption} for n, caption in enumerate(captions)]
    table = write_table(tmp_path / f"table{suffix}", rows)
    out = tmp_path / "out"
    words = ["--allow-missing-captions"] if allow else []
    # What has no caption is no damage: the exit status stays 0.
    assert run("--table", table, "--output", out, *words) == 0
    samples = read(out)
    assert [members["txt"] for members in samples.values() if "txt" in members] == [b"a good one"]
    assert len(samples) == (5 if allow else 1)
    printed = capsys.readouterr().out
    if allow:
        assert "4 samples have no caption" in printed
        assert skipped(out) == []
    else:
        assert "skipped 4 of 5: 4 missing_caption" in printed
        assert [(one["row"], one["cause"]) for one in skipped(out)] == [(n, "missing_caption") for n in range(1, 5)]


def test_values_of_further_columns_are_json(tmp_path):
    make_folder(tmp_path, {"1.jpg": jpeg(1)})
    row = {"image": "1.jpg", "caption": "one", "score": float("nan"), "tags": [1.5, None], "more": {"x": "\ud800"}}
    assert run("--table", write_table(tmp_path / "t.jsonl", [row]), "--output", tmp_path / "out") == 0
    (members,) = read(tmp_path / "out").values()
    assert b"NaN" not in members["json"]
    assert json.loads(members["json"]) == {"image": "1.jpg", "score": None, "tags": [1.5, None], "more": row["more"]}


def test_rows_of_a_table_that_are_none(tmp_path):
    make_folder(tmp_path, {"1.jpg": jpeg(1)})
    (tmp_path / "t.csv").write_text("image,caption\n1.jpg,one\n1.jpg,two,three\n,four\nhttp://x/y.jpg,five\n")
    (tmp_path / "t.jsonl").write_text(
        '{"image": "1.jpg", "caption": "one"}\n{"image": \n[]\n{"image": "1.jpg", "caption": 5}\n'
        '{"image": "1.jpg", "caption": "\\ud800"}\n{"caption": "six"}\n'
    )
    for name, causes in (
        ("t.csv", ["broken_row", "missing_path", "not_a_local_path"]),
        ("t.jsonl", ["broken_row", "broken_row", "broken_caption", "broken_caption", "missing_path"]),
    ):
        out = tmp_path / f"out-{name}"
        assert run("--table", tmp_path / name, "--output", out) == 1
        assert [one["cause"] for one in skipped(out)] == causes
        assert "line 3" in skipped(out)[0]["detail"] or name == "t.jsonl"
        assert len(read(out)) == 1


def write_idx(path, array):
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture
def fashion(tmp_path):
    """FashionMNIST as torchvision unpacks it: 5 images to train on and 3 to test."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8)
    for name, part in (("train", slice(5)), ("t10k", slice(5, 8))):
        write_idx(raw / f"{name}-images-idx3-ubyte", pixels[part])
        write_idx(raw / f"{name}-labels-idx1-ubyte", np.arange(8, dtype=np.uint8)[part])
    return tmp_path / "data", pixels


@pytest.mark.parametrize(("split", "part"), [([], range(5)), (["--split", "test"], range(5, 8))])
def test_a_torchvision_data_set(fashion, tmp_path, split, part):
    root, pixels = fashion
    words = ["--torchvision", "FashionMNIST", "--root", root, "--template", "an image of a {}", *split]
    assert run(*words, "--output", tmp_path / "out") == 0
    samples = read(tmp_path / "out")
    names = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker"]
    seen = []
    for members in samples.values():
        cls, info = int(members["cls"]), json.loads(members["json"])
        assert members["txt"].decode() == f"an image of a {names[cls]}"
        assert info == {"dataset": "FashionMNIST", "index": cls - part[0], "class": names[cls]}
        with Image.open(io.BytesIO(members["png"])) as stored:
            np.testing.assert_array_equal(np.asarray(stored), pixels[cls])
        seen.append(cls)
    assert sorted(seen) == list(part)


def test_a_torchvision_data_set_of_files(tmp_path):
    # its splits have names, its classes several, and one file is damaged
    folder = make_folder(
        tmp_path / "data" / "imagenette2",
        {"val/n01440764/1.JPEG": jpeg(1), "val/n02979186/2.JPEG": jpeg(2), "val/n02979186/3.JPEG": jpeg(3)[:-300]},
    )
    words = ["--torchvision", "Imagenette", "--root", folder.parent, "--split", "val"]
    assert run(*words, "--output", tmp_path / "out", "--no-shuffle") == 1
    assert [members["txt"] for members in read(tmp_path / "out").values()] == [
        b"a photo of a tench",
        b"a photo of a cassette player",
    ]
    assert [one["cause"] for one in skipped(tmp_path / "out")] == ["broken_image"]
    assert run(*words, "--output", tmp_path / "images", "--captions", "none", "--max-bad-fraction", 1) == 0
    assert all(sorted(members) == ["cls", "json", "png"] for members in read(tmp_path / "images").values())


# Images


def test_images_that_cannot_be_read_are_counted_and_listed(tmp_path, capsys):
    whole = jpeg(1, (200, 200))
    folder = make_folder(
        tmp_path / "photos",
        {
            "good.jpg": whole,
            "cut.jpg": whole[: len(whole) // 2],
            "late.jpg": whole[:-300],
            "text.jpg": "this is no image",
            "empty.png": "",
            "gone.jpg": "",
        },
    )
    (folder / "gone.jpg").unlink()
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    out = tmp_path / "out"
    assert run("--images", folder, "--output", out) == 1
    expected = [
        ("cut.jpg", "truncated_image"),
        ("empty.png", "empty_image"),
        ("gone.jpg", "missing_file"),
        ("late.jpg", "truncated_image"),
        ("text.jpg", "not_an_image"),
    ]
    assert [(one["path"], one["cause"]) for one in skipped(out)] == expected
    printed = capsys.readouterr()
    assert "skipped 5 of 6: 1 empty_image, 1 missing_file, 1 not_an_image, 2 truncated_image" in printed.out
    assert "83.3% of the rows are bad, more than the 1.0% of --max-bad-fraction 0.01:" in printed.err
    assert [members["jpg"] for members in read(out).values()] == [whole]
    # The status is that of the folder, also when nothing is left to do.
    assert run("--images", folder, "--output", out) == 1
    assert run("--images", folder, "--output", out, "--max-bad-fraction", 0.9) == 0
    assert run("--images", folder, "--output", out, "--max-bad-fraction", 0.8) == 1


def test_bytes_are_copied_by_kind_and_rarer_kinds_become_png(tmp_path):
    def encode(image, kind):
        out = io.BytesIO()
        image.save(out, kind)
        return out.getvalue()

    with Image.open(io.BytesIO(picture(5))) as image:
        image.load()
    transparent = Image.new("RGBA", (10, 10), (255, 0, 0, 0))
    files = {
        "a-jpeg-in-truth.png": jpeg(1),
        "b.webp": encode(image, "WEBP"),
        "c.bmp": encode(image, "BMP"),
        "d.gif": encode(transparent, "GIF"),
    }
    folder = make_folder(tmp_path / "photos", files)
    assert run("--images", folder, "--output", tmp_path / "out", "--no-shuffle") == 0
    a, b, c, d = read(tmp_path / "out").values()
    assert a["jpg"] == files["a-jpeg-in-truth.png"]
    assert b["webp"] == files["b.webp"]
    np.testing.assert_array_equal(np.asarray(read_image(c, "png")), np.asarray(image))
    assert read_image(d, "png").getpixel((0, 0)) == (255, 255, 255)


def test_resize_shrinks_only_and_applies_the_orientation(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    # red above blue once it is turned
    pixels = np.zeros((60, 90, 3), np.uint8)
    pixels[:, :45, 0] = pixels[:, 45:, 2] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95, exif=turned)
    small = jpeg(1, (40, 20))
    folder = make_folder(tmp_path / "photos", {"a.jpg": out.getvalue(), "b.jpg": small, "c.png": picture(2)})
    words = ["--images", folder, "--no-shuffle", "--resize", 20]
    assert run(*words, "--output", tmp_path / "out") == 0
    a, b, c = read(tmp_path / "out").values()
    with Image.open(io.BytesIO(a["jpg"])) as image:
        assert image.size == (20, 30)
        assert 0x0112 not in image.getexif()
        assert image.getpixel((10, 3))[0] > 200
        assert image.getpixel((10, 27))[2] > 200
    assert b["jpg"] == small
    assert read_image(c, "jpg").size == (20, 20)
    assert run(*words, "--output", tmp_path / "coarse", "--jpeg-quality", 10) == 0
    coarse = list(read(tmp_path / "coarse").values())[2]
    assert len(coarse["jpg"]) < len(c["jpg"])


# Shards


def test_the_same_bytes_whatever_the_workers(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    words = ["--images", classes, "--shards", 4, "--split-held-out", 0.2, "--resize", 20]
    for workers in (1, 3):
        assert run(*words, "--output", tmp_path / str(workers), workers=workers) == 0
    one, three = contents(tmp_path / "1"), contents(tmp_path / "3")
    assert len(one) == 4 + 1 + 2
    assert one == three
    with tarfile.open(tmp_path / "1" / "shard-000000.tar") as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
            assert member.mode == 0o644


def test_shards_are_balanced_also_when_files_are_bad(classes, tmp_path):
    for number in range(4):
        (classes / "golden_retriever" / f"{number}.jpg").write_text("no image")
    words = ["--images", classes, "--max-bad-fraction", 1]
    assert run(*words, "--output", tmp_path / "out", "--samples-per-shard", 4) == 0
    reader = reader_of(sorted((tmp_path / "out").glob("*.tar")), tmp_path / "cache")
    assert reader.counts() == [4, 4, 3]
    assert run(*words, "--output", tmp_path / "many", "--shards", 11) == 0
    assert len(list((tmp_path / "many").glob("*.tar"))) == 11


def test_order(classes, tmp_path):
    paths = {}
    for name, words in (("0", []), ("1", ["--seed", 1]), ("again", []), ("no", ["--no-shuffle"])):
        assert run("--images", classes, "--output", tmp_path / name, *words) == 0
        paths[name] = [info["path"] for info in infos(read(tmp_path / name))]
    assert paths["no"] == sorted(paths["no"])
    assert paths["0"] == paths["again"]
    assert len({tuple(paths[name]) for name in ("0", "1", "no")}) == 3
    assert sorted(paths["0"]) == sorted(paths["1"]) == paths["no"]


def test_held_out(tmp_path, capsys):
    make_folder(tmp_path, {f"{number}.jpg": jpeg(number) for number in range(20)})
    # Every image twice: both rows have to come into the same set.
    rows = [{"image": f"{n % 20}.jpg", "caption": f"caption {n}"} for n in range(40)]
    table = write_table(tmp_path / "t.csv", rows)
    out = tmp_path / "out"
    assert run("--table", table, "--output", out, "--split-held-out", 0.25, "--samples-per-shard", 8) == 0
    train, held_out = read(out), read(out, "shard-heldout-*.tar")
    assert (len(train), len(held_out)) == (30, 10)
    assert not set(train) & set(held_out)
    ours, theirs = ({info["image"] for info in infos(samples)} for samples in (train, held_out))
    assert not ours & theirs
    assert len({members["txt"] for members in [*train.values(), *held_out.values()]}) == 40
    index = json.loads((out / "index-heldout.json").read_text())
    assert [shard["nsamples"] for shard in index["shardlist"]] == [5, 5]
    assert index["shardlist"][0]["url"] == "shard-heldout-000000.tar"
    (pattern,) = re.findall(r"'dsclr.eval.data=(.*)'", capsys.readouterr().out)
    assert [one.address for one in expand_shards(pattern)] == sorted(map(str, out.glob("shard-heldout-*.tar")))
    assert run("--table", table, "--output", tmp_path / "other", "--split-held-out", 0.25, "--seed", 1) == 0
    assert {info["image"] for info in infos(read(tmp_path / "other", "shard-heldout-*.tar"))} != theirs


def test_index(classes, tmp_path):
    out = tmp_path / "out"
    assert run("--images", classes, "--output", out, "--samples-per-shard", 7, "--prefix", "pets") == 0
    index = json.loads((out / "index.json").read_text())
    assert {name: value for name, value in index.items() if name != "shardlist"} == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "pets",
    }
    assert [shard["url"] for shard in index["shardlist"]] == [f"pets-{number:06d}.tar" for number in range(3)]
    for shard in index["shardlist"]:
        path = out / shard["url"]
        assert shard["filesize"] == path.stat().st_size
        assert shard["nsamples"] == len(list(wds.WebDataset(str(path), shardshuffle=False))) == 5


# Interruptions


def killed(words, name, moment):
    """Run the tool and kill it with its processes' parent, just before or after a file gets its name."""

    def child():
        parent, replace = os.getpid(), os.replace

        def dying(source, target):
            if moment == "after":
                replace(source, target)
            if Path(target).name == name:
                os.kill(parent, signal.SIGKILL)
                time.sleep(30)
            if moment == "before":
                replace(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", dying)
            os._exit(run(*words))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    return process.exitcode


def slowly(function, seconds=0.01):
    def slow(*words):
        time.sleep(seconds)
        return function(*words)

    return slow


FILES = ["make_shards.json", "0000000004.json", "skipped.jsonl", "shard-000001.tar", "index-heldout.json", "index.json"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_run_goes_on(classes, tmp_path, monkeypatch, moment, capsys):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    (classes / "apple" / "9.jpg").write_text("no image")
    words = ["--images", classes, "--shards", 4, "--split-held-out", 0.2, "--max-bad-fraction", 0.5]
    assert run(*words, "--output", tmp_path / "whole") == 0
    whole = contents(tmp_path / "whole")
    for name in FILES:
        out = tmp_path / f"{moment}-{name}"
        assert killed([*words, "--output", out], name, moment) == -signal.SIGKILL
        assert (out / "index.json").exists() == (name == "index.json" and moment == "after")
        complete = {path: path.stat() for path in out.glob("*.tar")}
        assert all(whole[path.name] == path.read_bytes() for path in complete)
        started = time.monotonic()
        assert run(*words, "--output", out) == 0
        # Processes that outlived their parent would have kept the folder locked.
        assert time.monotonic() - started < output.LOCK_SECONDS / 2
        assert contents(out) == whole
        assert skipped(out) == skipped(tmp_path / "whole")
        for path, before in complete.items():
            assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_run_is_killed_again_and_again(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    words = ["--images", classes, "--shards", 15]
    assert run(*words, "--output", tmp_path / "whole") == 0
    # The other process has a moment left after the parent's end.
    monkeypatch.setattr(make, "_add", slowly(make._add))
    kept = []
    for shard in (3, 7, 11):
        assert killed([*words, "--output", tmp_path / "out"], f"shard-{shard:06d}.tar", "after") == -signal.SIGKILL
        kept.append(len(list((tmp_path / "out").glob("*.tar"))))
    assert 0 < kept[0] < kept[1] < kept[2] < 15
    assert run(*words, "--output", tmp_path / "out") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_checks_are_not_done_again(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    words = ["--images", classes, "--output", tmp_path / "out"]
    assert killed(words, "shard-000000.tar", "before") == -signal.SIGKILL
    monkeypatch.setattr(checks, "check_image", lambda image: pytest.fail("checked again"))
    assert run(*words) == 0


@pytest.mark.parametrize(("number", "message"), [(errno.ENOSPC, "disk of .* is full"), (errno.EIO, "Input/output")])
def test_a_full_disk(classes, tmp_path, monkeypatch, capsys, number, message):
    words = ["--images", classes, "--shards", 5]
    assert run(*words, "--output", tmp_path / "whole") == 0
    out = tmp_path / "out"
    add = make._add

    def failing(tar, name, data):
        if name == "000000007.txt":
            raise OSError(number, os.strerror(number))
        add(tar, name, data)

    monkeypatch.setattr(make, "_add", failing)
    assert run(*words, "--output", out) == 1
    printed = capsys.readouterr().err
    assert re.search(message, printed)
    assert "the same command" in printed.replace("same command again", "the same command")
    assert not list(out.glob("*.tar.part"))
    assert not (out / "index.json").exists()
    monkeypatch.undo()
    assert run(*words, "--output", out) == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_worker_that_is_killed(classes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "_add", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert run("--images", classes, "--output", tmp_path / "out") == 1
    assert "fewer --workers" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("--images", classes, "--output", tmp_path / "out") == 0
    assert len(read(tmp_path / "out")) == 15


def test_stopped_by_the_user(classes, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    # Its processes stop in the middle of their work, which would take four seconds.
    monkeypatch.setattr(checks, "check_image", slowly(checks.check_image, 4 / 15))
    monkeypatch.setattr(processes, "wait", interrupted)
    started = time.monotonic()
    assert run("--images", classes, "--output", tmp_path / "out") == 130
    assert time.monotonic() - started < 3
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("--images", classes, "--output", tmp_path / "out") == 0


def test_an_image_that_is_gone_when_it_is_written(classes, tmp_path, monkeypatch, capsys):
    victim = classes / "zebra" / "3.jpg"
    data = victim.read_bytes()
    check = make.check_rows
    monkeypatch.setattr(make, "check_rows", lambda *words: (check(*words), victim.unlink())[0])
    words = ["--images", classes, "--output", tmp_path / "out"]
    assert run(*words) == 1
    assert "zebra/3.jpg was good when it was checked" in capsys.readouterr().err
    monkeypatch.undo()
    victim.write_bytes(data)
    assert run(*words) == 0
    assert len(read(tmp_path / "out")) == 15


# Folders that are not ours


def test_a_finished_folder_is_left_alone(classes, tmp_path, capsys):
    words = ["--images", classes, "--output", tmp_path / "out", "--shards", 2]
    assert run(*words) == 0
    first = capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(*words, workers=1) == 0
    again = capsys.readouterr().out
    assert "was complete already; nothing was done" in again
    assert first in again
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before

    lost = tmp_path / "out" / "shard-000001.tar"
    data = lost.read_bytes()
    lost.unlink()
    assert run(*words) == 0
    assert lost.read_bytes() == data


def test_another_command_is_refused(classes, tmp_path, capsys):
    words = ["--images", classes, "--output", tmp_path / "out"]
    assert run(*words) == 0
    before = contents(tmp_path / "out")
    for more, message in (
        (["--seed", 7], "\n  --seed: 0 -> 7\n"),
        (["--shards", 3, "--prefix", "x"], '\n  --prefix: "shard" -> "x"\n  --shards: not given -> 3\n'),
        (["--template", "a {}"], '\n  --template: "a photo of a {}" -> "a {}"\n'),
    ):
        assert run(*words, *more) == 1
        said = capsys.readouterr().err
        assert message in said
        assert "(a hash)" not in said
        assert "number of rows" not in said
    other = shutil.copytree(classes, tmp_path / "other")
    assert run("--images", other, "--output", tmp_path / "out") == 1
    assert "\n  --images: " in capsys.readouterr().err
    table = write_table(tmp_path / f"{'long' * 40}.csv", [{"image": "1.jpg", "caption": "one"}])
    assert run("--table", table, "--output", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "\n  --table: not given -> " in said
    assert max(len(line) for line in said.replace(str(tmp_path / "out"), "out").splitlines()) <= 120
    (classes / "apple" / "10.jpg").write_bytes(jpeg(10))
    assert run(*words) == 1
    assert "\n  number of rows: 15 -> 16\n" in capsys.readouterr().err
    (classes / "apple" / "10.jpg").unlink()
    next((classes / "apple").iterdir()).rename(classes / "apple" / "other.jpg")
    assert run(*words) == 1
    assert "\n  paths, captions or columns of the rows: changed\n" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


def test_a_command_that_wrote_no_shard_may_be_corrected(tmp_path, capsys):
    make_folder(tmp_path / "data", {"1.jpg": jpeg(1)})
    table = write_table(tmp_path / "t.csv", [{"image": "1.jpg", "caption": "one"}])
    words = ["--table", table, "--output", tmp_path / "out"]
    assert run(*words) == 1
    assert "not one sample left of 1 rows: 1 missing_file" in capsys.readouterr().err
    words += ["--root", tmp_path / "data"]
    assert killed([*words, "--prefix", "other"], "other-000000.tar", "before") == -signal.SIGKILL
    assert run(*words) == 0
    assert len(read(tmp_path / "out")) == 1
    assert sorted(contents(tmp_path / "out")) == ["index.json", "shard-000000.tar"]


@pytest.mark.parametrize("name", ["x.tar", "train-000000.tar.gz", "index.json"])
def test_a_folder_with_other_data_is_refused(classes, tmp_path, capsys, name):
    make_folder(tmp_path / "out", {name: "something"})
    assert run("--images", classes, "--output", tmp_path / "out") == 1
    assert f"holds other data ({name})" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_shard_that_is_not_of_the_plan_is_refused(classes, tmp_path, capsys):
    words = ["--images", classes, "--output", tmp_path / "out"]
    assert killed(words, "shard-000000.tar", "before") == -signal.SIGKILL
    make_folder(tmp_path / "out", {"shard-000001.tar": "something"})
    assert run(*words) == 1
    assert "another shard (shard-000001.tar)" in capsys.readouterr().err


def test_two_at_once(classes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(output, "LOCK_SECONDS", 0.0)
    with output.locked(tmp_path / "out"):
        assert run("--images", classes, "--output", tmp_path / "out") == 1
    assert "another process is making shards" in capsys.readouterr().err


# Mistakes


def test_mistakes_are_told(classes, tmp_path, capsys):
    make_folder(
        tmp_path,
        {
            "t.csv": "file,captoin\n1.jpg,one\n",
            "head.csv": "image,caption\n",
            "nothing.csv": "",
            "twice.csv": "image,image\n1.jpg,one\n",
            "latin.csv": b"image,caption\n1.jpg,caf\xe9\n",
            "open.csv": 'image,caption\n1.jpg,"' + "never closed " * 20000,
            "t.txt": "image",
            "bytes.jsonl": '{"image": {"bytes": ""}, "caption": "one"}\n',
            "clash.jsonl": '{"image": "1.jpg", "caption": ["one", "two"], "captions": "three"}\n',
            "1.jpg": jpeg(1),
            "mixed/1.jpg": jpeg(1),
            "mixed/sub/2.jpg": jpeg(2),
            "none/x.pdf": "",
        },
    )
    table = ["--table", tmp_path / "t.csv"]
    here = ["--root", tmp_path]
    for words, message in (
        (["--images", tmp_path / "gone"], "gone does not exist"),
        (["--images", tmp_path / "t.csv"], "tables go with --table"),
        (["--images", tmp_path / "none"], "no image found in"),
        (["--images", tmp_path / "mixed"], "say --flat if subfolders are no classes"),
        (["--images", classes, "--template", "a photo"], "{} must stand once"),
        (["--images", classes, "--shards", 16], "--shards 16: there are 15 samples only"),
        (["--images", classes, "--split-held-out", 0.99], "leaves none to train on"),
        (["--images", tmp_path / "mixed" / "sub", "--captions", "template"], "has no class folders"),
        (["--table", tmp_path / "gone.csv"], "gone.csv does not exist"),
        (["--table", tmp_path / "t.txt"], ".csv, .tsv, .jsonl and .parquet can be read"),
        (table, "--image-column: "),
        (table, "has no column 'image'; its columns: file, captoin"),
        ([*table, "--image-column", "file"], "has no column 'caption' (did you mean 'captoin'?)"),
        ([*table, "--image-column", "file", *here[:1], tmp_path / "gone"], "--root: folder"),
        (["--table", tmp_path / "head.csv"], "is empty: it has no rows"),
        (["--table", tmp_path / "nothing.csv"], "is empty: it names no columns"),
        (["--table", tmp_path / "twice.csv"], "more than one column 'image'"),
        (["--table", tmp_path / "latin.csv"], "is not UTF-8"),
        (["--table", tmp_path / "open.csv"], "is a quotation mark never closed?"),
        (["--table", tmp_path / "bytes.jsonl"], "holds dict, paths are expected"),
        (["--table", tmp_path / "clash.jsonl"], "name it with --caption-column"),
        (["--torchvision", "CIFAR1000", *here], "did you mean CIFAR100?"),
        (["--torchvision", "CIFAR100", *here], "cannot be read from"),
        (["--torchvision", "CIFAR100", *here, "--split", "val"], "CIFAR100 has train and test"),
        (["--torchvision", "Food101", *here, "--split", "val"], "check --root and --split"),
        (["--torchvision", "SEMEION", *here, "--split", "test"], "has no splits"),
    ):
        out = tmp_path / f"out-{len(message)}-{len(words)}"
        assert run(*words, "--output", out) == 1, words
        printed = capsys.readouterr()
        assert message in printed.err, words
        assert "Traceback" not in printed.err
    assert run("--images", classes, "--output", classes / "shards") == 1
    assert "lies in --images" in capsys.readouterr().err
    assert run("--images", classes, "--output", tmp_path / "t.csv") == 1
    assert "is a file, a folder is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --images --table --torchvision is required"),
        (["--images", "x", "--table", "y"], "not allowed with"),
        (["--images", "x", "--split", "train"], "--split goes with --torchvision"),
        (["--table", "x", "--template", "{}"], "--template goes with --images or --torchvision"),
        (["--table", "x", "--captions", "txt"], "with --table none"),
        (["--torchvision", "CIFAR10"], "needs --root"),
        (["--images", "x", "--shards", "0"], "--shards is 0"),
        (["--images", "x", "--jpeg-quality", "100"], "must be 1 to 95"),
        (["--images", "x", "--split-held-out", "1"], "at least 0 and below 1"),
        (["--images", "x", "--max-bad-fraction", "2"], "must be 0 to 1"),
        (["--images", "x", "--prefix", "a/b"], "--prefix is 'a/b'"),
    ],
)
def test_options_that_cannot_be(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*words, "--output", "nowhere")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_parquet_without_pyarrow(tmp_path, monkeypatch, capsys):
    make_folder(tmp_path, {"t.parquet": "PAR1", "t.csv": "image,caption\n1.jpg,one\n", "1.jpg": jpeg(1)})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert run("--table", tmp_path / "t.parquet", "--output", tmp_path / "out") == 1
    assert "pip install 'dsclr[tables]'" in capsys.readouterr().err
    assert run("--table", tmp_path / "t.csv", "--output", tmp_path / "out") == 0


def test_a_damaged_parquet_file(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    make_folder(tmp_path, {"t.parquet": "PAR1 and no more"})
    assert run("--table", tmp_path / "t.parquet", "--output", tmp_path / "out") == 1
    assert "is no parquet file" in capsys.readouterr().err


def test_checking_finds_what_training_would_stumble_over():
    whole = jpeg(1, (300, 200))
    for data in (whole, whole[: len(whole) // 3], whole[:-200], picture(1), picture(1)[:-40], picture(1)[:100]):
        verdicts = []
        for look in (images.check_image, lambda data: read_image({"jpg": data}, "jpg")):
            try:
                look(data)
                verdicts.append(True)
            except Exception:
                verdicts.append(False)
        assert verdicts[0] == verdicts[1] == (data in (whole, picture(1)))


def test_as_a_user_calls_it(classes, tmp_path):
    (classes / "apple" / "9.jpg").write_text("no image")
    result = subprocess.run(
        [sys.executable, "tools/make_shards.py", "--images", str(classes), "--output", str(tmp_path / "out")],
        cwd=ROOT,
        env=of_a_user(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "15 samples in 1 shard(s)" in result.stdout
    assert "6.2% of the rows are bad" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(read(tmp_path / "out")) == 15


def test_captions_are_judged_as_training_judges_them():
    from dsclr.data.causes import BadSample
    from dsclr.data.writing.captions import present_captions

    assert present_captions([" a fox ", "\u200b\ufeff", " ", None, float("nan"), "nan"]) == ["a fox"]
    for broken in ("a\0 \0f\0", "\ud800 half", 3):
        with pytest.raises(BadSample, match="broken_caption"):
            present_captions([broken])
