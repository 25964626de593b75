"""tools/check_shards.py: what it finds, against training on the same shards, and what it survives."""

from __future__ import annotations

import faulthandler
import functools
import http.server
import io
import json
import os
import re
import signal
import tarfile
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsclr.config import DataConfig, ModelConfig
from dsclr.data import BadDataError, build_train_dataset, build_train_loader
from dsclr.data.causes import CAUSES
from dsclr.data.checking import advice, check, duplicates, examine, sheet
from dsclr.data.checking.findings import Findings, Odd, quantiles
from dsclr.data.dataset import Sample, Skipped
from dsclr.data.images import ImageReader
from dsclr.data.index import index_tar
from dsclr.data.tasks import ROWS_PER_TASK
from dsclr.models import get_tokenizer, image_settings
from tests.data.samples import SETTINGS, add, picture, tokenize, write_shard
from tests.scripts import load_script

tool = load_script("tools/check_shards.py")


def encode(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(noise(80, 70, 1), "JPEG", exif=exif)


def animated():
    return encode(noise(70, 70, 2), "GIF", save_all=True, append_images=[noise(70, 70, 3)])


def wide_grey():
    return encode(Image.fromarray(np.random.default_rng(4).integers(0, 65536, (70, 70), dtype=np.uint16)))


def see_through():
    image = noise(70, 70, 5).convert("RGBA")
    image.putalpha(100)
    return encode(image)


def deep_png():
    """16 bits a colour, which Pillow opens as RGB."""
    import struct
    import zlib

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pixels = b"".join(b"\0" + os.urandom(70 * 6) for _ in range(70))
    header = struct.pack(">IIBBBBB", 70, 70, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


GOOD = encode(noise(70, 80, 6), "JPEG")
ZOO = {
    "rotated": {"jpg": rotated(), "txt": b"rotated"},
    "animated": {"gif": animated(), "txt": b"animated"},
    "grey16": {"png": wide_grey(), "txt": b"wide grey"},
    "deep": {"png": deep_png(), "txt": b"deep colours"},
    "cmyk": {"jpg": encode(noise(70, 70, 7).convert("CMYK"), "JPEG"), "txt": b"for print"},
    "alpha": {"png": see_through(), "txt": b"see through"},
    "flat": {"png": encode(Image.new("RGB", (70, 70), "red")), "txt": b"red"},
    "long": {"png": encode(noise(700, 70, 8)), "txt": b"panorama"},
    "tiny": {"bmp": encode(noise(9, 8, 9), "BMP"), "txt": b"tiny"},
    "nan": {"jpg": GOOD, "txt": b"nan"},
    "none": {"jpg": encode(noise(66, 66, 10), "JPEG"), "txt": b"None"},
    "words": {"jpg": encode(noise(66, 66, 11), "JPEG"), "txt": b"very " * 300},
    "missing_image": {"txt": b"alone"},
    "empty_image": {"jpg": b"", "txt": b"empty"},
    "not_an_image": {"jpg": b"<html>", "txt": b"an error page"},
    "truncated_image": {"png": encode(noise(64, 64, 12))[:2000], "txt": b"cut"},
    "oversized_image": {"png": encode(noise(800, 80, 13)), "txt": b"large"},
    "extreme_aspect": {"png": encode(noise(505, 5, 14)), "txt": b"a line"},
    "missing_caption": {"jpg": GOOD},
    "empty_caption": {"jpg": GOOD, "txt": b" \n"},
    "broken_caption": {"jpg": GOOD, "txt": b"\xff\xfe"},
}
UNUSABLE = {name for name in ZOO if name in CAUSES}
MAX_PIXELS = 60_000


def write(path, samples):
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for extension, data in members.items():
                add(tar, f"{key}.{extension}", data)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(tmp_path, *words, status=None):
    """(exit status, report)."""
    out = tmp_path / "report.json"
    got = tool.main([*map(str, words), "--json", str(out)])
    if status is not None:
        assert got == status
    return json.loads(out.read_text())


def config_file(tmp_path, data, **model):
    section = {"run": {"max_steps": 1}, "data": data, "model": {"name": "dsclr-tiny", **model}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 32, "dsclr": section}))
    return path


def test_it_says_what_training_does(tmp_path, capsys):
    shard = write(tmp_path / "zoo.tar", ZOO)
    data = {"train": str(shard), "max_pixels": MAX_PIXELS, "cache_dir": str(tmp_path / "cache")}
    report = run(tmp_path, "--deepspeed_config", config_file(tmp_path, data), status=1)
    model = ModelConfig(name="dsclr-tiny")
    trained = build_train_dataset(DataConfig(**data), "clip", image_settings(model), get_tokenizer(model), 0)
    rows = [trained[position] for position in range(len(ZOO))]
    skipped = {(row.key, row.cause, row.detail) for row in rows if isinstance(row, Skipped)}
    assert {key for key, *_ in skipped} == UNUSABLE
    assert skipped == {
        (one["key"], cause, one["detail"])
        for cause, examples in report["samples"]["examples"].items()
        for one in examples
    }
    samples = report["samples"]
    assert samples["causes"] == dict.fromkeys(sorted(UNUSABLE), 1)
    assert (samples["looked_at"], samples["usable"], samples["unusable"]) == (len(ZOO), len(ZOO) - 9, 9)
    assert samples["notes"] == {"truncated_captions": 1}
    assert report["batch_size"] == 32
    said = capsys.readouterr().out
    assert "9 (42.86%)" in said
    assert re.search(r"\n +not_an_image +1\n .*: not_an_image: jpg: 6 bytes", said)
    assert "42.9% of the samples are unusable, over 1.0%" in said
    assert "With these that is after some 236 samples, 11 epochs of this set: a shorter run gets through" in said


def test_images_and_captions(tmp_path, capsys):
    shard = write(tmp_path / "zoo.tar", ZOO)
    report = run(tmp_path, shard, "--workers", "1", status=1)
    images, captions = report["images"], report["captions"]
    assert images["kinds"] == {
        "16-bit": 2,
        "CMYK": 1,
        "animated": 1,
        "nearly one colour": 1,
        "rotated by EXIF": 1,
        "transparent": 1,
    }
    assert images["formats"]["GIF"] == 1
    assert images["formats"]["BMP"] == 1
    assert images["modes"]["CMYK"] == 1
    assert (images["width"]["min"], images["width"]["max"]) == (9, 800)
    assert (images["height"]["min"], images["shorter_side"]["max"]) == (5, 80)
    assert images["aspect"]["max"] == 101
    assert report["members"]["txt"] == len(ZOO) - 1
    assert (captions["missing"], captions["empty"], captions["placeholders"]) == (1, 1, {"nan": 1, "none": 1})
    assert [one["key"] for one in captions["examples"]["placeholder"]] == ["nan", "none"]
    assert (captions["characters"]["max"], captions["words"]["max"]) == (len("very " * 300) - 1, 300)
    # Without a model nobody knows.
    assert captions["long"] is None
    assert "not counted without a tokenizer" in capsys.readouterr().out
    with_model = run(tmp_path, shard, "--tokenizer", "dsclr-tiny", status=1)["captions"]
    assert with_model["long"] == 1
    assert with_model["examples"]["long"][0]["key"] == "words"


def test_workers_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "CHUNK", 3)
    names = [write(tmp_path / f"{i}.tar", ZOO) for i in range(3)]
    one, four = (run(tmp_path, *names, "--workers", workers, status=1) for workers in (1, 4))
    assert one == four
    assert one["samples"]["looked_at"] == 3 * len(ZOO)
    # The first of each cause, in the order of the shards.
    shown = one["samples"]["examples"]["empty_image"]
    assert [Path(example["shard"]).name for example in shown] == ["0.tar", "1.tar", "2.tar"]


def test_policies_and_names_of_members(tmp_path):
    samples = {"a": {"img": GOOD, "caption": b"a"}, "b": {"img": ZOO["truncated_image"]["png"], "caption": b" "}}
    shard = write(tmp_path / "a.tar", samples)
    plain = run(tmp_path, shard, status=1)
    assert plain["samples"]["causes"] == {"missing_caption": 2}
    assert any("dsclr.data.caption; caption is there" in one for one in plain["advice"])
    named = run(tmp_path, shard, "--image", "img", "--caption", "caption", "--id", "key", status=1)
    assert named["samples"]["causes"] == {"empty_caption": 1}
    assert named["id"] == "key"
    config = config_file(
        tmp_path, {"train": str(shard), "image": "img", "caption": "caption", "truncated_image": "use"}
    )
    used = run(tmp_path, "--deepspeed_config", config, "--set", "dsclr.data.empty_caption=use", status=0)
    assert used["samples"]["notes"] == {"truncated_images": 1}


def test_images_alone(tmp_path):
    shard = write(tmp_path / "a.tar", {"a": {"jpg": GOOD}, "b": {"jpg": GOOD}})
    config = config_file(tmp_path, {"train": str(shard)})
    report = run(tmp_path, "--deepspeed_config", config, "--set", "dsclr.objective=simclr", status=0)
    assert report["captions"] is None
    assert set(report["duplicates"]) == {"image", "false_negative_pairs_per_batch"}
    assert report["duplicates"]["image"]["redundant"] == 1


def test_a_bad_fraction_that_is_accepted(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(10), broken=(3,))
    assert run(tmp_path, shard, status=1)["problems"] == ["1 of 10 samples are unusable (10.0%, over 1.0%)"]
    assert run(tmp_path, shard, "--max-bad-fraction", "0.1", status=0)["problems"] == []
    config = config_file(tmp_path, {"train": str(shard), "max_bad_fraction": 0.1})
    run(tmp_path, "--deepspeed_config", config, status=0)


# Processes that die


@pytest.fixture
def decoder(monkeypatch):
    """Injects what happens to images of given bytes."""
    acts: dict[bytes, Callable[[], object]] = {}
    read = ImageReader.read

    def patched(self, members):
        for data, act in acts.items():
            if members.get("png") == data:
                act()
        return read(self, members)

    monkeypatch.setattr(ImageReader, "read", patched)
    return acts


def die(signal_number=signal.SIGKILL):
    # pytest's would tell at length.
    faulthandler.disable()
    os.kill(os.getpid(), signal_number)


def test_a_decoder_that_crashes_ends_nothing(tmp_path, decoder):
    shards = [write_shard(tmp_path / f"{i}.tar", range(10 * i, 10 * i + 10)) for i in range(2)]
    for number in (0, 4, 5, 19):
        decoder[picture(number)] = functools.partial(die, signal.SIGSEGV)
    report = run(tmp_path, *shards, "--workers", "2", status=1)
    assert report["samples"]["looked_at"] == 20
    assert report["samples"]["causes"] == {"failed": 4}
    shown = report["samples"]["examples"]["failed"]
    assert [one["key"] for one in shown] == ["000000", "000004", "000005", "000019"]
    assert shown[0]["detail"] == "the process that read it died of SIGSEGV"
    assert report["members"]["png"] == 16
    assert any("also ends training" in one for one in report["advice"])


def test_a_process_that_dies_once_blames_nobody(tmp_path, decoder):
    mark = tmp_path / "mark"

    def die_once():
        if not mark.exists():
            mark.touch()
            die()

    decoder[picture(4)] = die_once
    report = run(tmp_path, write_shard(tmp_path / "a.tar", range(10)), status=0)
    assert mark.exists()
    assert report["samples"]["usable"] == 10
    assert report["members"]["png"] == 10


def test_a_decoder_that_hangs_is_ended(tmp_path, decoder):
    decoder[picture(2)] = lambda: time.sleep(600)
    report = run(tmp_path, write_shard(tmp_path / "a.tar", range(5)), "--timeout", "1.5", status=1)
    assert report["samples"]["usable"] == 4
    assert report["samples"]["examples"]["failed"][0]["key"] == "000002"
    assert report["samples"]["examples"]["failed"][0]["detail"] == "was not done within 1.5 seconds"


def test_a_process_that_dies_over_opening_a_shard(tmp_path, monkeypatch):
    good, bad = (write_shard(tmp_path / name, range(5)) for name in ("good.tar", "bad.tar"))
    load = check.load_index
    monkeypatch.setattr(check, "load_index", lambda path, cache: die() if path == bad else load(path, cache))
    report = run(tmp_path, bad, good, status=1)
    assert [one["shard"] for one in report["shards"]["unreadable"]] == [str(bad)]
    assert report["samples"]["usable"] == 5


def test_a_mistake_of_ours_is_no_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(examine.Examiner, "look", lambda self, sample: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(tmp_path, write_shard(tmp_path / "a.tar", range(5)))


# Shards


def damaged(tmp_path, kind):
    path = write_shard(tmp_path / f"{kind}.tar", range(4))
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        at = {member.name: member for member in tar}
    last = at["000003.cls"].offset_data + 512
    middle = at["000002.png"].offset
    changed = {
        "in a member": data[: at["000002.png"].offset_data + 99],
        "in a header": data[: middle + 200],
        "between members": data[:middle],
        "no header": data[:middle] + b"\x07" * 512 + data[middle + 512 :],
        "put together": data + data,
        "whole": data,
        "end mark only": data[: last + 512],
    }
    path.write_bytes(changed[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "words", "samples"),
    [
        ("in a member", "cut off at byte", 2),
        ("in a header", "in the header of 000002.png", 2),
        ("between members", "without the end mark", 2),
        ("no header", "no header is there", 2),
        ("put together", "goes on after its end mark", 4),
    ],
)
def test_damaged_shards(tmp_path, kind, words, samples):
    path = damaged(tmp_path, kind)
    report = run(tmp_path, path, "--workers", "1", status=1)
    assert words in report["shards"]["damaged"][0]["damage"]
    # Training reads what comes before.
    assert report["samples"]["usable"] == samples
    assert any("cut off or damaged" in one for one in report["problems"])


def test_members_that_are_left_out(tmp_path, capsys):
    path = write(tmp_path / "a.tar", {"a": {"png": encode(noise(20, 20)), "txt": b"one"}})
    with tarfile.open(path, "a") as tar:
        add(tar, "a.txt", b"two")
    report = run(tmp_path, path, status=0)
    why = "has 1 member(s) that are left out: their sample has one of that name already"
    assert report["shards"]["left_out"] == [{"shard": str(path), "members": why}]
    assert f"a.tar {why}" in capsys.readouterr().out


def test_whole_shards_are_not_damaged(tmp_path):
    for kind in ("whole", "end mark only"):
        assert index_tar(damaged(tmp_path, kind)).damage is None


def test_shards_that_cannot_be_read(tmp_path):
    page = tmp_path / "page.tar"
    page.write_text("<html>not found</html>" * 100)
    good = write_shard(tmp_path / "good.tar", range(3))
    report = run(tmp_path, page, good, status=1)
    assert report["shards"]["unreadable"][0]["shard"] == str(page)
    assert "is not a tar file" in report["shards"]["unreadable"][0]["error"]
    assert report["samples"]["usable"] == 3
    assert any("training does not start" in one for one in report["advice"])


def index_file(tmp_path, counts):
    path = tmp_path / "index.json"
    entries = [{"url": name, "nsamples": count} for name, count in counts.items()]
    path.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": entries}))
    return path


def test_an_index_file_that_lies(tmp_path):
    for name in ("more", "less", "right"):
        write_shard(tmp_path / f"{name}.tar", range(4))
    (tmp_path / "page.tar").write_text("no tar at all" * 100)
    index = index_file(tmp_path, {"more.tar": 6, "less.tar": 3, "right.tar": 4, "page.tar": 5})
    report = run(tmp_path, index, "--max-bad-fraction", "1", status=1)
    lies = {Path(one["shard"]).name: (one["index_file"], one["holds"]) for one in report["shards"]["wrong_index"]}
    assert lies == {"more.tar": (6, 4), "less.tar": (3, 4)}
    # As in training: what is promised and not there is skipped, what is there and not promised is never read.
    assert report["samples"]["causes"] == {"unreadable_shard": 2 + 5}
    assert report["samples"]["usable"] == 4 + 3 + 4
    assert report["shards"]["samples"] == 18
    assert any("widsindex" in one for one in report["advice"])
    honest = index_file(tmp_path, {"right.tar": 4})
    assert run(tmp_path, honest, status=0)["problems"] == []


def test_counts_of_shards(tmp_path):
    sizes = {"a": 8, "b": 8, "c": 2, "d": 0, "e": 9}
    names = [write_shard(tmp_path / f"{name}.tar", range(size)) for name, size in sizes.items()]
    shards = run(tmp_path, *names, names[0], status=0)["shards"]
    assert shards["samples_per_shard"] == {"min": 0, "median": 8, "max": 9}
    assert (shards["listed"], shards["samples"], shards["empty"]) == (6, 35, [str(names[3])])
    assert shards["small"] == [{"shard": str(names[2]), "samples": 2}]
    assert shards["listed_twice"] == [str(names[0])]
    assert shards["bytes"] == sum(name.stat().st_size for name in [*names, names[0]])


def test_no_samples_is_a_problem(tmp_path):
    empty = write_shard(tmp_path / "a.tar", [])
    assert run(tmp_path, empty, status=1)["problems"] == ["there is not one sample"]


def test_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "CHUNK", 2)
    names = [write_shard(tmp_path / f"{i}.tar", range(5), broken=(4,)) for i in range(4)]
    for workers in ("1", "3"):
        report = run(tmp_path, *names, "--limit", "7", "--workers", workers, status=1)
        assert not report["complete"]
        # The other shards are not even opened.
        assert (report["shards"]["opened"], report["samples"]["looked_at"]) == (2, 7)
        assert report["samples"]["causes"] == {"not_an_image": 1}
    assert run(tmp_path, *names, "--limit", "20", status=1)["complete"]


def test_urls_and_compressed_shards(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    write_shard(folder / "a.tar", range(3))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        report = run(tmp_path, f"http://127.0.0.1:{server.server_port}/a.tar", status=0)
        server.shutdown()
    assert report["samples"]["usable"] == 3
    assert run(tmp_path, "demo:noto-heldout", "--limit", "5", status=0)["samples"]["usable"] == 5


# Duplicates


def test_duplicates(tmp_path):
    def sample(image, caption):
        return {"png": picture(image), "txt": caption.encode()}

    first = {"a": sample(1, "one"), "b": sample(1, "two"), "c": sample(1, "one"), "d": sample(2, "one")}
    second = {"a": sample(3, "three"), "x": sample(4, "four"), "y": {"png": b"", "txt": b"one"}}
    shards = [write(tmp_path / "0.tar", first), write(tmp_path / "1.tar", second)]
    report = run(tmp_path, *shards, "--batch-size", "4", "--max-bad-fraction", "1", status=0)
    found = report["duplicates"]
    # Unusable samples are no copies of anything.
    sizes = {
        name: [found[name][key] for key in ("groups", "samples", "redundant")] for name in ("image", "caption", "both")
    }
    assert sizes == {"image": [1, 3, 2], "caption": [1, 3, 2], "both": [1, 2, 1]}
    assert [one["key"] for one in found["both"]["examples"][0]["first"]] == ["a", "c"]
    # Of 15 pairs two (a, b and b, c) have equal images and different captions; a batch of 4 has 6 pairs.
    assert found["false_negative_pairs_per_batch"] == pytest.approx(2 / 15 * 6)
    assert report["captions"]["frequent"] == [{"samples": 3, "caption": "one"}]
    keys = report["keys_in_several_shards"]
    assert (keys["keys"], keys["examples"]) == (1, [{"key": "a", "shards": [str(shard) for shard in shards]}])
    # With an id that is not the caption, other pairs are masked.
    by_key = run(tmp_path, *shards, "--batch-size", "4", "--max-bad-fraction", "1", "--id", "key", status=0)
    assert by_key["duplicates"]["false_negative_pairs_per_batch"] == pytest.approx(3 / 15 * 6)


def test_expected_false_negatives_are_the_mean_over_all_batches():
    images, ids = np.array([0, 0, 0, 1, 1, 2, 3]), np.array([5, 5, 6, 7, 8, 5, 9])
    for size in (2, 3, 5, 7):
        batches = list(combinations(range(7), size))
        pairs = sum(images[i] == images[j] and ids[i] != ids[j] for batch in batches for i, j in combinations(batch, 2))
        assert duplicates.expected_false_negatives(images, ids, size) == pytest.approx(pairs / len(batches))


def test_expected_false_negatives_of_unequal_chances():
    images, ids, weights = np.array([0, 0, 1, 1]), np.array([1, 2, 3, 4]), np.array([3.0, 3.0, 1.0, 1.0])
    p = weights / 8
    same = 2 * (p[0] * p[1] + p[2] * p[3]) / (1 - (p**2).sum())
    assert duplicates.expected_false_negatives(images, ids, 10, weights) == pytest.approx(45 * same)
    assert duplicates.expected_false_negatives(images[:1], ids[:1], 10) == 0
    assert duplicates.expected_false_negatives(np.arange(999), np.arange(999), 10, np.linspace(0.1, 1, 999)) == 0


def test_sources_of_a_mixture(tmp_path):
    left = write_shard(tmp_path / "left.tar", range(4), broken=(1,))
    right = write(tmp_path / "right.tar", {"a": {"jpg": GOOD, "txt": b"a"}, "b": {"jpg": GOOD, "txt": b"b"}})
    sources = [{"shards": str(left), "weight": 1, "name": "left"}, {"shards": str(right), "weight": 3}]
    config = config_file(tmp_path, {"train": sources})
    report = run(tmp_path, "--deepspeed_config", config, status=1)
    assert report["sources"] == [
        {"name": "left", "shards": 1, "weight": 1.0, "readable": 4, "usable": 3},
        {"name": "1", "shards": 1, "weight": 3.0, "readable": 2, "usable": 2},
    ]
    # Three quarters of the draws are one of two samples.
    p = np.array([1 / 12] * 3 + [3 / 8] * 2)
    expected = 2 * p[3] * p[4] / (1 - (p**2).sum()) * 32 * 31 / 2
    assert report["duplicates"]["false_negative_pairs_per_batch"] == pytest.approx(expected)


def test_quantiles():
    counts = Findings().widths
    counts.update({1: 1, 10: 97, 30: 2})
    found = quantiles(counts)
    assert (found["min"], found["q01"], found["median"], found["q99"], found["max"]) == (1, 1, 10, 30, 30)
    assert quantiles(Findings().widths) == {}


def test_memory_does_not_grow_with_the_samples():
    """Of a sample nothing stays but its row."""
    found, other = Findings(), Findings()
    for number in range(1000):
        other.unusable("failed", examine.Example(0, number, "key", "why"))
        other.show_odd("tiny", Odd(float(number % 7), 0, number, "key", "why"))
    found.add(other)
    assert [one.sample for one in found.examples["failed"]] == [0, 1, 2, 3, 4]
    assert len(found.odd["tiny"]) == 48
    assert {one.rank for one in found.odd["tiny"]} == {0.0}


# What to do


def test_advice_by_cause(tmp_path):
    report = run(tmp_path, write(tmp_path / "zoo.tar", ZOO), "--workers", "1", status=1)

    def told(causes=(), members=None, **changes):
        samples = {**report["samples"], "causes": dict.fromkeys(causes, 3), "unusable_fraction": 0.0}
        changed = {**report, "samples": samples, "members": members or {}, "captions": None, **changes}
        return "\n".join(advice.advise(changed, DataConfig(), 224, 0.01))

    assert told() == ""
    expected = {
        "truncated_image": "dsclr.data.truncated_image=use",
        "empty_caption": "dsclr.data.empty_caption=use",
        "long_caption": "dsclr.data.long_caption=truncate",
        "oversized_image": "--resize",
        "missing_id": "dsclr.data.id=caption",
        "failed": "tools/make_shards.py",
    }
    for cause, words in expected.items():
        assert words in told([cause])
    assert "avif;jp2." in told(["missing_image"], {"jp2": 3})
    assert "dot in their key" in told(["missing_image"], {"01.jpg": 3})
    assert "txt or json:FIELD is there" not in told(["missing_caption"], {"json": 3})
    assert "json:FIELD is there" in told(["missing_caption"], {"json": 3})
    large = {**report["images"], "shorter_side": {"median": 673}}
    assert "tools/make_shards.py --resize 448" in told(images=large)
    assert told(images={**large, "shorter_side": {"median": 672}}) == ""
    shards = report["shards"]
    many = {**shards, "listed": 100, "samples_per_shard": {"median": 500}}
    assert "dsclr.data.shuffle_shards=33." not in told(shards=many, batch_size=2000)
    assert "dsclr.data.shuffle_shards=33," in told(shards=many, batch_size=4096)
    few = {**shards, "listed": 2, "opened": 2, "bytes": 5 * 10**9}
    assert "too few" in told(shards=few)
    copies = {**report["duplicates"], "false_negative_pairs_per_batch": 2.0}
    assert "dsclr.data.id=json:FIELD" in told(duplicates=copies)
    equal = {**copies, "false_negative_pairs_per_batch": 0.0, "caption": {"samples": 11}}
    assert "never negatives of each other" in told(duplicates=equal)
    assert "dsclr.data.id=caption does not" in told(duplicates=equal, id="key")
    captions = {**report["captions"], "placeholders": {}, "captions": 100, "long": 6}
    assert "dsclr.data.long_caption" in told(captions=captions)
    assert told(captions={**captions, "long": 5}) == ""
    assert "nan (2)" in told(captions={**captions, "long": 0, "placeholders": {"nan": 2}})


def test_raising_the_accepted_fraction_comes_with_its_consequence(tmp_path):
    report = run(tmp_path, write_shard(tmp_path / "a.tar", range(10), broken=(3,)), status=1)
    told = next(one for one in report["advice"] if "max_bad_fraction" in one)
    assert "these 1 samples are then never trained on" in told
    assert "not_an_image first" in told


@pytest.mark.parametrize(
    ("samples", "unusable", "most", "words"),
    [
        (10, 1, 0.01, "more than 100 of the last 10,000 samples that a rank has read, over all epochs"),
        (10, 1, 0.01, "after some 1,010 samples, 101 epochs of this set: a shorter run gets through."),
        (10**6, 20_000, 0.01, "after some 5,050 samples."),
        (5_000, 250, 0.01, "after some 2,020 samples."),
        (10**6, 20, 0.00001, "more than 0 of the last 10,000 samples"),
        (20, 20, 0.5, "after some 20 samples."),
    ],
)
def test_when_too_many_unusable_samples_end_training(samples, unusable, most, words):
    report = {"samples": {"unusable_fraction": unusable / samples}, "shards": {"samples": samples}}
    assert words in advice._when_training_ends(report, most) + "."


def test_training_ends_when_the_shard_doctor_says(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(10), broken=(3,))
    report = run(tmp_path, shard, "--max-bad-fraction", "0.002", status=1)
    (said,) = re.findall(r"after some (\d+) samples", "\n".join(report["advice"]))
    cfg = DataConfig(train=str(shard), workers=0, max_bad_fraction=0.002, cache_dir=str(tmp_path / "cache"))
    loader = build_train_loader(cfg, build_train_dataset(cfg, "clip", SETTINGS, tokenize, 0), 9)
    with pytest.raises(BadDataError) as error:
        for _ in loader:
            pass
    (read,) = re.findall(r"of the last (\d+) samples", str(error.value))
    assert abs(int(read) - int(said)) <= ROWS_PER_TASK


# The contact sheet


def test_contact_sheet(tmp_path):
    path = tmp_path / "odd.png"
    shard = write(tmp_path / "zoo.tar", ZOO)
    config = config_file(tmp_path, {"train": str(shard), "augment": "none"})
    run(tmp_path, "--deepspeed_config", config, "--contact-sheet", path, status=1)
    drawn = Image.open(path).convert("RGB")
    width, height = sheet.SIDE + sheet.GAP, sheet.SIDE + sheet.LINES * sheet.LINE + sheet.GAP
    # Two rows: nine odd pictures, and the large one, which is usable without max_pixels.
    assert drawn.size == (8 * width + sheet.GAP, 2 * height + sheet.GAP)


def test_pictures_are_as_training_sees_them(tmp_path):
    shard = write(tmp_path / "zoo.tar", ZOO)
    data = DataConfig(train=str(shard), augment="none")
    dataset = build_train_dataset(data, "clip", SETTINGS, lambda texts: tokenize(["0"]), 0, examine.InPlace())
    chosen = [Odd(0.0, 0, list(ZOO).index(name), name, "odd") for name in ("alpha", "rotated")]
    drawn = sheet.draw_sheet(chosen, dataset)
    for number, odd in enumerate(chosen):
        row = dataset[odd.sample]
        assert isinstance(row, Sample)
        left = sheet.GAP + number * (sheet.SIDE + sheet.GAP)
        shown = np.asarray(drawn.crop((left, sheet.GAP, left + 160, sheet.GAP + 160)))
        # 32 pixels, each five times as large.
        assert np.array_equal(shown, row.a.permute(1, 2, 0).numpy().repeat(5, 0).repeat(5, 1))
    # Key and reason stand below.
    below = drawn.crop((sheet.GAP, sheet.GAP + sheet.SIDE, sheet.SIDE, sheet.GAP + sheet.SIDE + sheet.LINE))
    assert np.asarray(below.convert("L")).min() < 100


def test_the_oddest_of_each_kind_in_turns():
    odd = {
        "extreme aspect": [Odd(-9.0, 0, n, str(n), "long") for n in range(100)],
        "CMYK": [Odd(0.0, 0, n, str(n), "print") for n in (0, 200)],
    }
    chosen = sheet.choose(odd)
    assert len(chosen) == 48
    # CMYK comes first by name; sample 0 is odd in two ways and shown once.
    assert [one.sample for one in chosen[:3]] == [0, 200, 1]
    assert sheet.choose({}) == []


def test_why_a_picture_is_odd(tmp_path):
    shard = write(tmp_path / "zoo.tar", ZOO)
    dataset = build_train_dataset(
        DataConfig(train=str(shard), max_pixels=MAX_PIXELS),
        "clip",
        SETTINGS,
        lambda texts: tokenize(["0"]),
        0,
        examine.InPlace(),
    )
    examiner = examine.Examiner(dataset, 0)
    for sample in range(len(ZOO)):
        examiner.look(sample)
    odd = examiner.finish().odd
    assert {kind: [one.key for one in ones] for kind, ones in odd.items()} == {
        "rotated by EXIF": ["rotated"],
        "animated": ["animated"],
        "16-bit": ["grey16", "deep"],
        "CMYK": ["cmyk"],
        "transparent": ["alpha"],
        "nearly one colour": ["flat"],
        "extreme aspect": ["long"],
        "tiny": ["tiny"],
    }
    assert odd["extreme aspect"][0].why == "700 x 70"
    assert odd["tiny"][0].why == "only 9 x 8"


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name either SHARDS or --deepspeed_config"),
        (["a.tar", "--deepspeed_config", "x.json"], "name either SHARDS or --deepspeed_config"),
        (["a.tar", "--set", "dsclr.data.id=key"], "--set goes with --deepspeed_config"),
        (["a.tar", "--workers", "0"], "--workers 0: more than 0 is needed"),
        (["a.tar", "--limit", "-1"], "--limit -1: more than 0 is needed"),
        (["a.tar", "--timeout", "nan"], "--timeout nan: more than 0 is needed"),
        (["a.tar", "--json", "no/such/folder.json"], "the folder no/such does not exist"),
        (["a.tar", "--contact-sheet", "odd.jpg"], "a name that ends in .png is needed"),
        (["no-such.tar"], "shard no-such.tar does not exist"),
        (["demo:nothing"], "demo:nothing is not one of"),
        (["pipe:true"], "dsclr.data.allow_pipe"),
        (["demo:train", "--id", "url"], "accepted: auto, caption, key, cls or json:FIELD"),
        (["demo:train", "--max-bad-fraction", "2"], "max_bad_fraction"),
        (["demo:train", "--tokenizer", "no-such-model"], "no-such-model"),
        (["--deepspeed_config", "no-such.json"], "cannot read the configuration no-such.json"),
    ],
)
def test_mistakes_are_told(words, message, capsys):
    try:
        status = tool.main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
