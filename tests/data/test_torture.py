"""Every broken or odd sample and shard goes through the real loaders: right pixels, or skipped for the right cause."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import string
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsclr.config import ConfigError
from dsclr.data import BadDataError, build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data.batch import Batch
from dsclr.data.causes import CAUSES
from tests.data.samples import SETTINGS, add, write_shard
from tests.data.samples import tokenize as number_of
from tests.data.torture import (
    COLOURS,
    SIDE,
    bad_image,
    captions,
    config,
    encode,
    evaluate_once,
    image,
    jpeg,
    jpegs,
    json_captions,
    no_images,
    other_images,
    pixels_of,
    pngs,
    text,
    tiffs,
    tokenize,
    tokens_of,
    train_once,
    webps_and_gifs,
    write_cases,
)

pytestmark = pytest.mark.timeout(120)

IMAGES = [*jpegs(), *pngs(), *webps_and_gifs(), *tiffs(), *other_images()]
NOWHERE = Path("nowhere")
NAMES = {
    "images": [case.name for case in IMAGES],
    "no_images": [case.name for case in no_images(NOWHERE)],
    "captions": [case.name for case in captions(NOWHERE)],
    "json": [case.name for case in json_captions()],
}


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    return tmp_path_factory.mktemp("trap")


@pytest.fixture(scope="module")
def groups(tmp_path_factory, trap):
    """Group -> (configuration, cases, what a training epoch makes of them, its loader)."""
    folder = tmp_path_factory.mktemp("torture")
    # Where Pillow would look for Ghostscript.
    program = trap / "gs"
    program.write_text(f"#!/bin/sh\ntouch {trap}/started\n")
    program.chmod(0o755)
    found = {
        "images": [*IMAGES, image("last", encode(COLOURS))],
        "no_images": [*no_images(trap / "unpickled"), image("last", encode(COLOURS))],
        "captions": [*captions(trap / "unpickled"), image("last", encode(COLOURS))],
        "json": [*json_captions(), text("last", b'{"c": "last"}', "last", "json")],
    }
    ran = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{trap}{os.pathsep}{os.environ['PATH']}")
        for group, cases in found.items():
            shard = write_cases(folder / f"{group}.tar", cases)
            cfg = config(folder, str(shard), caption="json:c" if group == "json" else "txt", workers=1)
            good = sum(case.cause is None for case in cases)
            ran[group] = cfg, cases, *train_once(cfg, len(cases), good)
    return ran


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_sample(groups, group, name):
    _, cases, outcomes, _ = groups[group]
    case, outcome = next(pair for pair in zip(cases, outcomes, strict=True) if pair[0].name == name)
    assert outcome.cause == case.cause, outcome.detail
    if case.cause is None:
        assert outcome.pixels is not None
        assert outcome.tokens == tuple(tokens_of(case.caption))
        sharp = [i for i in range(SIDE) if not SIDE // 2 - case.blurred <= i < SIDE // 2 + case.blurred]
        difference = np.abs(outcome.pixels.astype(int) - np.asarray(case.pixels).astype(int))[np.ix_(sharp, sharp)]
        assert int(difference.max()) <= case.within, outcome.pixels[8::16, 8::16]


@pytest.mark.parametrize("group", NAMES)
def test_every_skipped_sample_is_counted_and_evaluation_sees_the_same(groups, group):
    cfg, cases, outcomes, loader = groups[group]
    assert loader.skipped == Counter(case.cause for case in cases if case.cause)
    assert set(loader.skipped) <= set(CAUSES)
    for trained, evaluated in zip(outcomes, evaluate_once(cfg, cfg.train), strict=True):
        assert (trained.cause, trained.detail, trained.tokens) == (evaluated.cause, evaluated.detail, evaluated.tokens)
        # Training may decode large JPEG files at a reduced scale.
        if trained.pixels is not None and evaluated.pixels is not None:
            assert np.abs(trained.pixels.astype(int) - evaluated.pixels.astype(int)).mean() < 2


def test_no_sample_starts_a_program_or_is_unpickled(groups, trap):
    assert sorted(path.name for path in trap.iterdir()) == ["gs"]


def test_names_are_unique():
    names = list(itertools.chain.from_iterable(NAMES.values()))
    assert len(set(names)) == len(names) >= 150


def ran(tmp_path, cases, good, **options):
    shard = write_cases(tmp_path / "x.tar", cases)
    return train_once(config(tmp_path, str(shard), **options), len(cases), good)


@pytest.mark.parametrize("part", [10, 50, 95])
def test_what_is_there_of_a_truncated_image_is_used_where_allowed(tmp_path, part):
    noise = np.random.default_rng(0).integers(-10, 11, (256, 256, 3))
    data = jpeg((COLOURS.repeat(8, 0).repeat(8, 1).astype(int) + noise).clip(0, 255).astype(np.uint8), quality=97)
    cases = [image("cut", data[: len(data) * part // 100]), image("last", encode(COLOURS))]
    (cut, _), loader = ran(tmp_path, cases, 2, truncated_image="use")
    there = SIDE * part // 100
    middle = range(SIDE // 2 - 2, SIDE // 2 + 2)
    rows, columns = ([i for i in range(end) if i not in middle] for end in (there - 1, SIDE))
    assert np.abs(cut.pixels.astype(int) - COLOURS)[np.ix_(rows, columns)].max() < 25
    if there < SIDE - 4:
        assert np.abs(cut.pixels[there + 3 :].astype(int) - 128).max() <= 3
    # A process that reads ahead meets it more than once.
    assert loader.notes["truncated_images"] >= 1
    assert not loader.skipped


def test_nothing_can_be_used_of_a_header(tmp_path):
    data = jpeg(COLOURS)
    cases = [
        bad_image("empty", b"", "empty_image"),
        bad_image("header", data[:40], "truncated_image"),
        bad_image("html", b"<html>" * 9, "not_an_image"),
        image("last", encode(COLOURS)),
    ]
    outcomes, _ = ran(tmp_path, cases, 1, truncated_image="use")
    assert [outcome.cause for outcome in outcomes] == [case.cause for case in cases]


def test_a_limit_of_pixels_above_and_below_the_image(tmp_path):
    cases = [image("small", encode(COLOURS)), image("large", encode(COLOURS.repeat(2, 0)))]
    outcomes, _ = ran(tmp_path, [*cases, cases[0]], 2, max_pixels=SIDE * SIDE)
    assert [outcome.cause for outcome in outcomes] == [None, "oversized_image", None]


def test_another_background(tmp_path):
    clear = np.dstack([COLOURS, np.zeros((SIDE, SIDE), np.uint8)])
    outcomes, _ = ran(tmp_path, [image("clear", encode(clear))], 1, background=(1, 2, 3))
    assert (outcomes[0].pixels == (1, 2, 3)).all()


def test_empty_captions_are_used_where_allowed(tmp_path):
    cases = [text(name, data.encode(), "") for name, data in {"a": "", "b": " \n", "c": "\u200b"}.items()]
    outcomes, _ = ran(tmp_path, cases, 3, empty_caption="use")
    assert [outcome.tokens for outcome in outcomes] == [tuple(tokens_of(""))] * 3


def test_an_endless_word_does_not_stop_the_run(tmp_path):
    import open_clip

    letters = "".join(random.Random(0).choice(string.ascii_lowercase) for _ in range(100_000))
    cases = [text("endless", letters.encode(), ""), text("foxes", b"fox " * 25_000, "")]
    shard = write_cases(tmp_path / "x.tar", cases)
    tokenizer = open_clip.SimpleTokenizer()
    (task,) = build_eval_loader(config(tmp_path, str(shard)), str(shard), SETTINGS, tokenizer, 2)
    assert task.notes == [("truncated_captions",)] * 2
    strict = config(tmp_path, str(shard), long_caption="skip")
    (task,) = build_eval_loader(strict, str(shard), SETTINGS, tokenizer, 2)
    assert [item.cause for item in task.skipped] == ["long_caption"] * 2


@pytest.mark.parametrize(("data", "cause"), [(None, "missing_id"), (b"{", "broken_json"), (b"[]", "broken_json")])
def test_ids_that_are_missing(tmp_path, data, cause):
    case = image("x", encode(COLOURS))
    odd = replace(case, name="odd", members=(*case.members, *([("json", data)] if data else [])))
    whole = replace(case, name="whole", members=(*case.members, ("json", b'{"n": NaN}')))
    outcomes, _ = ran(tmp_path, [odd, whole], 1, id="json:n")
    assert [outcome.cause for outcome in outcomes] == [cause, None]


# Shards


def plain(tar, key):
    add(tar, f"{key}.png", encode(COLOURS))
    add(tar, f"{key}.txt", key.encode())


def used_keys(tmp_path, *shards, **options):
    """(captions of all usable samples in order, causes of the others), from training without workers."""
    cfg = config(tmp_path, [str(shard) for shard in shards], **options)
    seen: list[str] = []

    def listening(texts):
        seen.extend(texts)
        return tokenize(texts)

    dataset = build_train_dataset(cfg, "clip", SETTINGS, listening, 0)
    rows = [dataset[position] for position in range(dataset.order.epoch_samples)]
    causes = Counter(row.cause for row in rows if hasattr(row, "cause"))
    for row in rows:
        if not hasattr(row, "cause"):
            assert np.array_equal(pixels_of(row.a), COLOURS)
    return seen, causes


def test_names_with_folders_unicode_and_dots(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key in ("a/b/c", "./d", "/e", "v1.2/f", "\u72d0/\U0001f98a", "name with blanks", "..up/g"):
            plain(tar, key)
        for ignored in ("README", "._a.png", "a/.hidden", "no-extension/"):
            add(tar, ignored, b"-")
    keys = ["a/b/c", "./d", "/e", "v1.2/f", "\u72d0/\U0001f98a", "name with blanks", "..up/g"]
    assert used_keys(tmp_path, tmp_path / "x.tar") == (keys, {})


def test_the_hidden_files_of_macos(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for folder in ("", "photos/"):
            for name, data in (("a.png", encode(COLOURS)), ("a.txt", b"a")):
                add(tar, f"{folder}._{name}", b"\0\5\x16\7")
                add(tar, f"{folder}{name}", data)
    assert used_keys(tmp_path, tmp_path / "x.tar") == (["a", "a"], {})


def test_a_dot_within_a_base_name_ends_it(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        plain(tar, "img.1")
        plain(tar, "b")
    assert used_keys(tmp_path, tmp_path / "x.tar") == (["b"], {"missing_caption": 1})


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names(tmp_path, kind):
    key = "/".join(["folder" * 3] * (5 if kind == tarfile.USTAR_FORMAT else 40)) + "/x" * 3
    with tarfile.open(tmp_path / "x.tar", "w", format=kind) as tar:
        plain(tar, key)
        plain(tar, "b")
    assert used_keys(tmp_path, tmp_path / "x.tar") == ([key, "b"], {})


def test_interleaved_members(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for extension, data in (("png", encode(COLOURS)), ("txt", b"text")):
            for key in "abc":
                add(tar, f"{key}.{extension}", data)
        plain(tar, "d")
    seen, causes = used_keys(tmp_path, tmp_path / "x.tar")
    assert (seen, causes) == (["d"], {"missing_caption": 3, "missing_image": 3})


def test_samples_of_one_name(tmp_path, caplog):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key in ("a", "a", "b", "a"):
            plain(tar, key)
    assert used_keys(tmp_path, tmp_path / "x.tar") == (["a", "b", "a"], {})
    assert "x.tar has 2 member(s) that are left out: their sample has one of that name already" in caplog.text


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sparse_header(name, data, start, size):
    """Of the old GNU kind: one piece of data that lies at ``start`` of a file of ``size`` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (start, len(data))
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("kind", ["hard", "symbolic", "device", "fifo", "sparse"])
def test_members_that_are_no_files(tmp_path, caplog, kind):
    path = tmp_path / "x.tar"
    outside = tmp_path / "secret.png"
    outside.write_bytes(encode(COLOURS))
    types = {
        "hard": (tarfile.LNKTYPE, "a.png"),
        "symbolic": (tarfile.SYMTYPE, str(outside)),
        "device": (tarfile.CHRTYPE, ""),
        "fifo": (tarfile.FIFOTYPE, ""),
    }
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(special("folder.png", tarfile.DIRTYPE))
        plain(tar, "a")
        if kind == "sparse":
            piece = encode(COLOURS)[:100].ljust(512, b"\0")
            tar.fileobj.write(sparse_header("b.png", piece, 1 << 20, 2 << 20) + piece)
            tar.offset += 1024
        else:
            tar.addfile(special("b.png", *types[kind]))
        add(tar, "b.txt", b"b")
        plain(tar, "c")
    assert used_keys(tmp_path, path) == (["a", "c"], {"missing_image": 1})
    assert "x.tar has 1 member(s) that are left out: they are links, devices or sparse files" in caplog.text


def whole(tmp_path, name="x.tar", count=6):
    with tarfile.open(tmp_path / name, "w") as tar:
        for number in range(count):
            plain(tar, f"{number}")
    return tmp_path / name


# A sample is a header and a block of the picture, and the same of the text.
PICTURE = -(-len(encode(COLOURS)) // 512) * 512
SAMPLE = 512 + PICTURE + 1024


@pytest.mark.parametrize(
    ("size", "used", "causes", "said"),
    [
        (3 * SAMPLE, 3, {}, "behind 2.txt, without the end mark"),
        (3 * SAMPLE + 4, 3, {}, "in the header of the member behind 2.txt"),
        (3 * SAMPLE + 400, 3, {}, "in the header of 3.png"),
        (3 * SAMPLE + 512, 3, {}, "is cut off at byte {size:,}, in 3.png"),
        (3 * SAMPLE + 512 + 50, 3, {}, "is cut off at byte {size:,}, in 3.png"),
        (3 * SAMPLE + 512 + PICTURE, 3, {"missing_caption": 1}, "behind 3.png, without the end mark"),
        (3 * SAMPLE + 512 + PICTURE + 512, 3, {}, "is cut off at byte {size:,}, in 3.txt"),
        (3 * SAMPLE + 512 + PICTURE + 513, 4, {}, "is cut off at byte {size:,}, behind 3.txt"),
        (6 * SAMPLE + 512, 6, {}, None),
        (100, 0, None, "not a tar file"),
        (0, 0, None, "not a tar file"),
    ],
)
def test_a_tar_that_is_cut(tmp_path, caplog, size, used, causes, said):
    path = whole(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    if causes is None:
        with pytest.raises(ConfigError, match=f"x.tar is {said}"):
            used_keys(tmp_path, path)
        return
    assert used_keys(tmp_path, path) == ([str(number) for number in range(used)], causes)
    assert (said.format(size=size) in caplog.text) if said else not caplog.text


def test_garbage_in_the_middle_is_told(tmp_path, caplog):
    path = whole(tmp_path)
    data = bytearray(path.read_bytes())
    data[2 * SAMPLE : 2 * SAMPLE + 512] = b"\xa5" * 512
    path.write_bytes(data)
    assert used_keys(tmp_path, path) == (["0", "1"], {})
    assert f"x.tar is damaged at byte {2 * SAMPLE:,} of {len(data):,}" in caplog.text


def test_garbage_within_a_member_is_one_bad_sample(tmp_path):
    path = whole(tmp_path)
    data = bytearray(path.read_bytes())
    data[SAMPLE + 512 : SAMPLE + 600] = b"\xa5" * 88
    path.write_bytes(data)
    assert used_keys(tmp_path, path) == (["0", "2", "3", "4", "5"], {"not_an_image": 1})


def test_tars_put_one_after_the_other_are_told(tmp_path, caplog):
    path = whole(tmp_path, count=2)
    path.write_bytes(path.read_bytes() * 3)
    assert used_keys(tmp_path, path) == (["0", "1"], {})
    assert "x.tar goes on after its end mark" in caplog.text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<html>no such bucket</html>" * 100, "not a tar file"),
        (bytes(range(256)) * 40, "not a tar file"),
        (b"PK\x03\x04" + bytes(5000), "not a tar file"),
        (gzip.compress(bytes(10240), mtime=0), r"not a tar file.*name it \.tar\.gz"),
        (bytes(10240), "no samples in 1 shard"),
        (b"", "not a tar file"),
    ],
)
def test_what_is_no_shard(tmp_path, data, said):
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"(?s){said}") as error:
        used_keys(tmp_path, tmp_path / "x.tar")
    assert "x.tar" in str(error.value)


def test_a_plain_tar_that_calls_itself_packed(tmp_path):
    path = whole(tmp_path).rename(tmp_path / "x.tar.gz")
    with pytest.raises(ConfigError, match=r"cannot read shard .*x\.tar\.gz.*[Nn]ot a gzipped file"):
        used_keys(tmp_path, path)
    assert not list((tmp_path / "cache" / "shards").glob("*.tar"))


@pytest.mark.parametrize("damage", ["cut", "garbled", "bytes behind"])
def test_a_packed_tar_that_is_damaged(tmp_path, caplog, damage):
    path = whole(tmp_path)
    data = gzip.compress(path.read_bytes(), 0)
    # Without compression: what comes before the damage is whole.
    place = 2 * SAMPLE + 600
    data = {"cut": data[:place], "garbled": data[:place] + b"\xff" * 5000, "bytes behind": data + b"\0" * 100}[damage]
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(data)
    seen, causes = used_keys(tmp_path, packed)
    assert seen[:2] == ["0", "1"]
    if damage == "bytes behind":
        assert len(seen) == 6
    elif damage == "cut":
        assert (len(seen), causes) == (2, {})
        assert "x.tar.gz is cut off or damaged" in caplog.text
    else:
        assert sum(causes.values()) <= 1


def test_one_empty_shard_among_others(tmp_path):
    whole(tmp_path, "a.tar", 2)
    whole(tmp_path, "b.tar", 0)
    whole(tmp_path, "c.tar", 3)
    for window in (1, 2, 16):
        shards = [tmp_path / f"{name}.tar" for name in "abc"]
        assert used_keys(tmp_path, *shards, shuffle_shards=window) == (["0", "1", "0", "1", "2"], {})
        for resampled in (False, True):
            cfg = config(tmp_path, [str(s) for s in shards], shuffle=True, shuffle_shards=window, resampled=resampled)
            dataset = build_train_dataset(cfg, "clip", SETTINGS, tokenize, 0)
            assert len(next(iter(build_train_loader(cfg, dataset, 40))).ids) == 40


def numbered(tmp_path, count):
    write_shard(tmp_path / "n.tar", range(count))
    return config(tmp_path, f"{tmp_path}/n.tar")


def test_fewer_shards_than_ranks_and_workers(tmp_path):
    cfg = numbered(tmp_path, 12).model_copy(update={"workers": 2})
    seen = []
    for rank in range(3):
        loader = build_train_loader(
            cfg, build_train_dataset(cfg, "clip", SETTINGS, number_of, 0), 2, rank=rank, world_size=3
        )
        for batch in itertools.islice(loader, 2):
            assert isinstance(batch, Batch)
            seen += batch.b[:, 0].tolist()
        loader.close()
    assert sorted(seen) == list(range(12))


def test_one_sample_in_all(tmp_path):
    cfg = numbered(tmp_path, 1)
    for rank in range(2):
        loader = build_train_loader(
            cfg, build_train_dataset(cfg, "clip", SETTINGS, number_of, 0), 4, rank=rank, world_size=2
        )
        batch = next(iter(loader))
        assert isinstance(batch, Batch)
        assert batch.b[:, 0].tolist() == [0] * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_bad_ends_at_once(tmp_path, workers):
    write_shard(tmp_path / "n.tar", range(40), broken=tuple(range(40)))
    cfg = config(tmp_path, f"{tmp_path}/n.tar", workers=workers)
    loader = build_train_loader(cfg, build_train_dataset(cfg, "clip", SETTINGS, number_of, 0), 8)
    with pytest.raises(BadDataError, match=r"were unusable .*not_an_image"):
        next(iter(loader))
    tasks = list(build_eval_loader(cfg, f"{tmp_path}/n.tar", SETTINGS, number_of, 16))
    assert sum(len(task.skipped) for task in tasks) == 40


def after_the_count(tmp_path, change):
    """Causes of an epoch over two shards, the second of which ``change`` is done to once all were counted."""
    first, second = write_shard(tmp_path / "a.tar", range(3)), write_shard(tmp_path / "b.tar", range(3, 6))
    cfg = config(tmp_path, [str(first), str(second)])
    dataset = build_train_dataset(cfg, "clip", SETTINGS, number_of, 0)
    change(second, dataset)
    rows = [dataset[position] for position in range(6)]
    return [getattr(row, "cause", None) for row in rows]


def test_a_shard_that_vanishes(tmp_path):
    lost = ["unreadable_shard"] * 3
    assert after_the_count(tmp_path, lambda path, dataset: path.unlink()) == [None] * 3 + lost


def test_a_shard_that_vanishes_while_it_is_open_is_read_on(tmp_path):
    def vanish(path, dataset):
        dataset[3]
        path.unlink()

    assert after_the_count(tmp_path, vanish) == [None] * 6


def test_a_shard_that_shrinks_while_it_is_open(tmp_path):
    def shrink(path, dataset):
        dataset[3]
        os.truncate(path, path.stat().st_size // 2)

    causes = after_the_count(tmp_path, shrink)
    assert causes[:4] == [None] * 4
    assert causes[5] == "unreadable_shard"
    assert set(causes) == {None, "unreadable_shard"}


def test_a_shard_that_shrinks_before_it_is_opened(tmp_path):
    def shrink(path, dataset):
        write_shard(path, [3])

    assert after_the_count(tmp_path, shrink) == [None] * 4 + ["unreadable_shard"] * 2


def test_a_shard_that_becomes_something_else(tmp_path):
    lost = ["unreadable_shard"] * 3
    assert after_the_count(tmp_path, lambda path, dataset: path.write_bytes(b"<html>" * 200)) == [None] * 3 + lost
    assert after_the_count(tmp_path, lambda path, dataset: path.write_bytes(b"")) == [None] * 3 + lost


def test_a_shard_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = whole(tmp_path)
    path.chmod(0)
    with pytest.raises(ConfigError, match=r"cannot read shard .*x\.tar"):
        used_keys(tmp_path, path)
