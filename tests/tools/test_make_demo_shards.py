"""tools/make_demo_shards.py: its pure functions, and the shards it wrote into dsclr/data/demo."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from PIL import Image

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "dsclr" / "data" / "demo"


tool = load_script("tools/make_demo_shards.py")


@pytest.fixture(scope="module")
def index() -> dict[str, Any]:
    return json.loads((DEMO / "index.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def shards() -> dict[str, dict[str, dict[str, bytes]]]:
    """Shard name -> sample key -> member extension -> content."""
    result: dict[str, dict[str, dict[str, bytes]]] = {}
    for path in sorted(DEMO.glob("*.tar.gz")):
        samples = result.setdefault(path.name, {})
        with tarfile.open(path) as tar:
            for member in tar:
                key, extension = member.name.split(".")
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, {})[extension] = content.read()
    return result


@pytest.fixture(scope="module")
def samples(shards) -> dict[str, dict[str, bytes]]:
    merged: dict[str, dict[str, bytes]] = {}
    for content in shards.values():
        merged.update(content)
    return merged


@pytest.fixture(scope="module")
def infos(samples) -> dict[str, dict[str, Any]]:
    return {key: json.loads(sample["json"]) for key, sample in samples.items()}


# The shards


def test_shards_are_small_enough_for_the_wheel():
    assert sum(path.stat().st_size for path in DEMO.glob("*.tar.gz")) < 12_000_000


def test_shards_and_counts_match_the_index(index, shards):
    assert {name: {"samples": len(content)} for name, content in shards.items()} == index["shards"]
    names = {f"{style}-train-{i:06d}.tar.gz" for style in ("noto", "fluent") for i in range(4)}
    assert set(shards) == names | {"noto-heldout-000000.tar.gz", "fluent-heldout-000000.tar.gz"}


def test_no_sample_is_in_two_shards(shards, samples):
    assert sum(len(content) for content in shards.values()) == len(samples)


def test_every_sample_is_complete(index, samples, infos):
    for key, sample in samples.items():
        assert set(sample) == {"jpg", "txt", "json", "cls"}
        info = infos[key]
        assert set(info) == {"concept", "hexcode", "label", "captions", "style", "group", "split"}
        assert key == f"{info['style']}-{info['hexcode']}"
        assert index["classes"][int(sample["cls"])] == info["group"]
        caption = sample["txt"].decode("utf-8")
        assert caption.startswith(info["label"])
        assert info["captions"][0] == caption
        assert 1 <= len(set(info["captions"])) == len(info["captions"]) <= 1 + tool.CAPTION_VARIANTS
        for variant in info["captions"]:
            assert variant.startswith(info["label"])
            assert len(variant.split()) <= tool.MAX_CAPTION_WORDS


def test_every_class_is_used(index, samples):
    assert {int(sample["cls"]) for sample in samples.values()} == set(range(len(index["classes"])))


def test_shard_names_agree_with_the_samples(shards):
    for name, content in shards.items():
        for sample in content.values():
            info = json.loads(sample["json"])
            assert name.startswith(f"{info['style']}-{info['split']}-")


def test_no_concept_is_on_both_sides(infos):
    sides: dict[str, tuple[set[int], set[str]]] = {}
    for split in ("train", "heldout"):
        members = [info for info in infos.values() if info["split"] == split]
        sides[split] = ({i["concept"] for i in members}, {tool.concept_key(i["hexcode"]) for i in members})
    assert not sides["train"][0] & sides["heldout"][0]
    assert not sides["train"][1] & sides["heldout"][1]


@pytest.mark.parametrize(("split", "count"), [("train", 1355), ("heldout", 250)])
def test_both_styles_hold_the_same_emoji(infos, samples, split, count):
    by_style: dict[str, dict[str, tuple[int, bytes]]] = {"noto": {}, "fluent": {}}
    for key, info in infos.items():
        if info["split"] == split:
            by_style[info["style"]][info["hexcode"]] = (info["concept"], samples[key]["txt"])
    assert by_style["noto"] == by_style["fluent"]
    assert len(by_style["noto"]) == count


def test_captions_are_distinct(infos, samples):
    for style in ("noto", "fluent"):
        captions = [samples[key]["txt"] for key, info in infos.items() if info["style"] == style]
        assert len(set(captions)) == len(captions)


def test_images_decode_and_are_distinct(index, samples):
    size = index["image"]["size"]
    pixels = set()
    for sample in samples.values():
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert image.mode == "RGB"
        assert image.size == (size, size)
        pixels.add(image.tobytes())
    assert len(pixels) == len(samples)


def test_samples_are_not_sorted_by_class(shards):
    for content in shards.values():
        classes = [int(sample["cls"]) for sample in content.values()]
        changes = sum(a != b for a, b in pairwise(classes))
        assert changes > len(classes) / 2


def test_webdataset_reads_a_shard(index):
    name = "noto-heldout-000000.tar.gz"
    dataset = wds.WebDataset(str(DEMO / name), shardshuffle=False).decode("pil").to_tuple("jpg", "txt", "json", "cls")
    rows = list(dataset)
    assert len(rows) == index["shards"][name]["samples"]
    image, caption, info, cls = rows[0]
    assert isinstance(image, Image.Image)
    assert caption.startswith(info["label"])
    assert index["classes"][cls] == info["group"]


def test_licences_are_next_to_the_shards():
    texts = {path.name: path.read_text("utf-8") for path in DEMO.glob("LICENSE-*")}
    assert "Apache License" in texts["LICENSE-noto-emoji"]
    assert "Microsoft" in texts["LICENSE-fluent-emoji"]
    assert "Miles Johnson" in texts["LICENSE-emojibase"]
    assert "Cal Henderson" in texts["LICENSE-emoji-datasource"]
    assert "UNICODE LICENSE V3" in texts["LICENSE-unicode-cldr"]


# The functions


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("1F600", "1f600"),
        ("0023-FE0F-20E3", "0023-20e3"),
        ("26a7-fe0f", "26a7"),
        ("1F441-FE0F-200D-1F5E8-FE0F", "1f441-200d-1f5e8"),
    ],
)
def test_normalise_hexcode(raw, expected):
    assert tool.normalise_hexcode(raw) == expected


@pytest.mark.parametrize(
    "variants",
    [
        ["1F481", "1F481-200D-2640-FE0F", "1f481-200d-2642", "1F481-1F3FB-200D-2640-FE0F"],  # tipping hand
        ["1F9D1-200D-2708-FE0F", "1F468-200D-2708-FE0F", "1F469-1F3FF-200D-2708-FE0F"],  # pilot
        ["1F9D1", "1F468", "1F469"],
        ["1F9D2", "1F466", "1F467"],
        ["1F9D3", "1F474", "1F475"],
        ["1FAC5", "1F934", "1F478"],  # crown
        ["1F385", "1F936", "1F9D1-200D-1F384"],  # Claus
        ["1F46A", "1F468-200D-1F469-200D-1F466", "1F469-200D-1F467-200D-1F467"],  # family
        ["1F9D1-200D-1F91D-200D-1F9D1", "1F46B", "1F46C", "1F46D"],  # holding hands
        ["1F48F", "1F469-200D-2764-FE0F-200D-1F48B-200D-1F468"],  # kiss
        ["1F491", "1F468-200D-2764-FE0F-200D-1F468"],  # couple with heart
    ],
)
def test_variants_are_one_concept(variants):
    assert len({tool.concept_key(hexcode) for hexcode in variants}) == 1


def test_different_emoji_are_different_concepts():
    # pilot, astronaut, person, child, female sign, male sign, rainbow flag, transgender flag
    hexcodes = ["1F9D1-200D-2708", "1F9D1-200D-1F680", "1F9D1", "1F9D2", "2640", "2642"]
    hexcodes += ["1F3F3-200D-1F308", "1F3F3-200D-26A7"]
    assert len({tool.concept_key(hexcode) for hexcode in hexcodes}) == len(hexcodes)


def test_country_flags():
    assert tool.is_country_flag("1f1eb-1f1f7")
    assert not tool.is_country_flag("1f3f4-200d-2620")
    assert not tool.is_country_flag("1f600")


def test_caption_leaves_out_what_the_label_says():
    assert tool.make_caption("raised hand", ["5", "Hand", "high five", "raised"]) == "raised hand, 5, high five"
    assert tool.make_caption("ring", []) == "ring"


def test_caption_stays_short():
    assert tool.make_caption("a b", ["c d", "e f", "g"], max_words=5) == "a b, c d"


def test_transparency_becomes_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    flat = tool.flatten_on_white(image)
    assert flat.mode == "RGB"
    assert flat.getpixel((0, 0)) == (255, 255, 255)
    assert flat.getpixel((1, 0)) == (255, 0, 0)


def test_half_transparent_grey_is_blended():
    flat = tool.flatten_on_white(Image.new("LA", (1, 1), (0, 51)))  # a fifth of black
    assert flat.getpixel((0, 0)) == (204, 204, 204)


def test_to_square_pads_with_white_and_resizes():
    square = tool.to_square(Image.new("RGB", (4, 8), "black"), 8)
    assert square.size == (8, 8)
    assert square.getpixel((0, 4)) == (255, 255, 255)
    assert square.getpixel((4, 4)) == (0, 0, 0)
    assert tool.to_square(Image.new("RGB", (256, 264)), 64).size == (64, 64)


def test_heldout_takes_whole_concepts():
    sizes = {0: 3, 1: 1, 2: 1, 3: 1, 4: 4}
    for seed in range(20):
        chosen = tool.choose_heldout(sizes, 3, seed)
        assert sum(sizes[concept] for concept in chosen) == 3
        assert chosen == tool.choose_heldout(sizes, 3, seed)


def test_heldout_that_cannot_be_exact_is_refused():
    with pytest.raises(SystemExit, match="add up to 2, not 3"):
        tool.choose_heldout({0: 2, 1: 2}, 3, seed=0)


def make_emoji(hexcode: str, caption: str) -> Any:
    image = Image.new("RGB", (8, 8), "red")
    images = {"noto": image, "fluent": image}
    return tool.Emoji(hexcode, caption, caption, [caption], "objects", 0, 0, images)


def test_duplicate_captions():
    emoji = [make_emoji("1", "a"), make_emoji("2", "b"), make_emoji("3", "a")]
    assert tool.duplicate_captions(emoji) == ["a"]


def test_shards_are_byte_identical(tmp_path, monkeypatch):
    emoji = [make_emoji("1f48d", "ring"), make_emoji("1f9e8", "“firecracker”")]
    tool.write_shard(tmp_path / "a.tar.gz", emoji, "noto", "train", 90)
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    tool.write_shard(tmp_path / "b.tar.gz", emoji, "noto", "train", 90)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert len(tar.getnames()) == 8
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, 0, "", "")}


def test_package_in_the_work_folder_is_reused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: pytest.fail(f"looked for {name}"))
    folder = tmp_path / "lobehub-fluent-emoji-3d-1.1.0" / "package"
    folder.mkdir(parents=True)
    assert tool.fetch_package("@lobehub/fluent-emoji-3d", "1.1.0", tmp_path) == folder


def test_archive_in_the_work_folder_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: pytest.fail(f"looked for {name}"))
    with tarfile.open(tmp_path / "some-data-1.0.0.tgz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("package/empty.json"))
    folder = tool.fetch_package("some-data", "1.0.0", tmp_path)
    assert [path.name for path in folder.iterdir()] == ["empty.json"]
    assert not (tmp_path / "some-data-1.0.0.partial").exists()


def test_missing_npm_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"Install Node\.js"):
        tool.fetch_package("some-data", "1.0.0", tmp_path)


def test_failing_npm_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    with pytest.raises(SystemExit, match=r"npm pack some-data@1\.0\.0` failed"):
        tool.fetch_package("some-data", "1.0.0", tmp_path)


@pytest.mark.parametrize("argv", [["--size", "97"], ["--size", "0"], ["--quality", "96"]])
def test_bad_arguments_are_refused(argv):
    with pytest.raises(SystemExit):
        tool.parse_args(argv)


def test_caption_variants_are_seeded_and_start_with_the_caption():
    tags = ["fire", "engine", "rescue", "hose", "helmet"]
    first = tool.caption_variants("firefighter", tags, "1f692")
    assert (
        first == tool.caption_variants("firefighter", tags, "1f692") != tool.caption_variants("firefighter", tags, "0")
    )
    assert first[0] == tool.make_caption("firefighter", tags)
    assert len(first) > 3
    assert tool.caption_variants("ring", [], "0") == ["ring"]
