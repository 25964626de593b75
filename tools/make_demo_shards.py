"""Build the demo image-text shards in dsclr/data/demo from three pinned npm packages.

    python tools/make_demo_shards.py --out dsclr/data/demo --work build/demo-sources

npm (Node.js) is needed only when the packages are not yet in the work folder. The same sources and arguments
give byte-identical shards as long as the Pillow and zlib builds stay the same.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image

# (npm package, version, licence of what is used from it, what is used)
NOTO = ("emoji-datasource-google", "16.0.0", "Apache-2.0 (art), MIT (package)", "images of style noto")
FLUENT = ("@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "images of style fluent")
EMOJIBASE = ("emojibase-data", "17.0.0", "MIT (package), Unicode-3.0 (CLDR texts)", "labels, tags and groups")
SOURCES = (NOTO, FLUENT, EMOJIBASE)

STYLES = ("noto", "fluent")
TRAIN_SHARDS = 4
HELDOUT_CONCEPTS = 250  # samples of each style in the held-out set
MAX_CAPTION_WORDS = 12
CAPTION_VARIANTS = 7  # beside the caption itself
MAX_TOTAL_BYTES = 11_500_000  # the shards travel inside the wheel, which has to stay small

SKIN_TONES = {"1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}
# Code points that differ only in the gender of the person, and the neutral one.
NEUTRAL_PERSON = {
    "1f468": "1f9d1",  # man -> person
    "1f469": "1f9d1",  # woman
    "1f466": "1f9d2",  # boy -> child
    "1f467": "1f9d2",  # girl
    "1f474": "1f9d3",  # old man -> older person
    "1f475": "1f9d3",  # old woman
}
# Gender variants that Unicode encodes as unrelated code points or sequences.
SAME_CONCEPT = {
    "1f934": "1fac5",  # prince, princess -> person with crown
    "1f478": "1fac5",
    "1f385": "1f9d1-200d-1f384",  # Santa Claus, Mrs. Claus -> Mx Claus
    "1f936": "1f9d1-200d-1f384",
    "1f57a": "1f483",  # man dancing -> woman dancing
    "1f930": "1fac4",  # pregnant woman, pregnant man -> pregnant person
    "1fac3": "1fac4",
    "1f46b": "1f9d1-200d-1f91d-200d-1f9d1",  # women/men/woman and man -> people holding hands
    "1f46c": "1f9d1-200d-1f91d-200d-1f9d1",
    "1f46d": "1f9d1-200d-1f91d-200d-1f9d1",
    "1f9d1-200d-2764-200d-1f48b-200d-1f9d1": "1f48f",  # kiss
    "1f9d1-200d-2764-200d-1f9d1": "1f491",  # couple with heart
    "1f6ba": "1f6b9",  # women's room -> men's room
}
FAMILY = "1f46a"


@dataclass(frozen=True)
class Emoji:
    """One emoji that exists in both styles."""

    hexcode: str  # normalised, see normalise_hexcode
    label: str
    caption: str
    captions: list[str]  # the caption and others made of label and tags, for training
    group: str
    cls: int  # index of the group in the list of classes
    concept: int  # index of the concept; gender variants share it
    images: dict[str, Image.Image]  # style -> RGB picture, size x size pixels


def normalise_hexcode(hexcode: str) -> str:
    """Lower case, without the variation selector FE0F, which the sources write or omit as they like."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def is_country_flag(hexcode: str) -> bool:
    """Whether a normalised hexcode is a flag written as two regional indicators (1F1E6 to 1F1FF)."""
    return all(0x1F1E6 <= int(part, 16) <= 0x1F1FF for part in hexcode.split("-"))


def concept_key(hexcode: str) -> str:
    """The hexcode that stands for all skin-tone and gender variants of an emoji.

    The split into train and held-out goes by this key, so that "woman pilot" cannot be in the train set while
    "man pilot" is held out.
    """
    parts = [part for part in normalise_hexcode(hexcode).split("-") if part not in SKIN_TONES]
    if parts[-2:] in (["200d", "2640"], ["200d", "2642"]):  # joiner + female or male sign
        parts = parts[:-2]
    parts = [NEUTRAL_PERSON.get(part, part) for part in parts]
    if len(parts) > 1 and set(parts) <= {"1f9d1", "1f9d2", "200d"}:  # only persons: any make-up of a family
        return FAMILY
    key = "-".join(parts)
    return SAME_CONCEPT.get(key, key)


def make_caption(label: str, tags: list[str], max_words: int = MAX_CAPTION_WORDS) -> str:
    """The label, then the tags that say something the label does not, up to max_words words in all."""
    label_words = set(re.findall(r"\w+", label.lower()))
    caption = label
    for tag in tags:
        if set(re.findall(r"\w+", tag.lower())) <= label_words:
            continue
        longer = f"{caption}, {tag}"
        if len(longer.split()) > max_words:
            break
        caption = longer
    return caption


def caption_variants(label: str, tags: list[str], seed: str) -> list[str]:
    """make_caption of the label with seeded random halves of the tags in random order; repeats are left out."""
    draw = random.Random(seed)
    captions = [make_caption(label, tags)]
    for _ in range(CAPTION_VARIANTS):
        some = [tag for tag in tags if draw.random() < 0.5]
        draw.shuffle(some)
        captions.append(make_caption(label, some))
    return list(dict.fromkeys(captions))


def flatten_on_white(image: Image.Image) -> Image.Image:
    """Any mode to RGB, with transparent pixels turned white."""
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def to_square(image: Image.Image, size: int) -> Image.Image:
    """RGB picture centred on a white square, then resized to size x size pixels."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    if side == size:
        return square
    return square.resize((size, size), Image.Resampling.LANCZOS)


def choose_heldout(sizes: dict[int, int], count: int, seed: int) -> set[int]:
    """Concepts of the held-out set: drawn in seeded random order, skipping those that would overshoot.

    Args:
        sizes: concept index -> number of emoji in it.
        count: emoji wanted; the result has exactly this many, else SystemExit.
        seed: seed of the order.
    """
    order = sorted(sizes)
    random.Random(f"{seed}-heldout").shuffle(order)
    chosen: set[int] = set()
    total = 0
    for concept in order:
        if total + sizes[concept] <= count:
            chosen.add(concept)
            total += sizes[concept]
    if total != count:
        raise SystemExit(f"held-out set: whole concepts add up to {total}, not {count}; use another --seed")
    return chosen


def fetch_package(name: str, version: str, work: Path) -> Path:
    """Folder of the unpacked npm package under work; downloaded with `npm pack` unless already there."""
    stem = f"{name.lstrip('@').replace('/', '-')}-{version}"
    folder = work / stem / "package"
    if folder.is_dir():
        return folder
    archive = work / f"{stem}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(
                f"npm is not installed, so {name}@{version} cannot be downloaded. Install Node.js (it brings "
                f"npm), or put the package's archive at {archive}."
            )
        result = subprocess.run(
            [npm, "pack", f"{name}@{version}", "--pack-destination", str(work)],
            capture_output=True,
            text=True,
        )
        if result.returncode != 0 or not archive.is_file():
            raise SystemExit(
                f"`npm pack {name}@{version}` failed (exit status {result.returncode}):\n{result.stderr}\n"
                f"Check the network and npm's registry setting, or put the package's archive at {archive}."
            )
    # Unpack under another name first: an interrupted run must not leave a folder that looks complete.
    partial = work / f"{stem}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    partial.rename(work / stem)
    return folder


def images_by_hexcode(folder: Path, suffix: str) -> dict[str, Path]:
    """Normalised hexcode -> picture file of a source; of two spellings of one hexcode the first by name."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        files.setdefault(normalise_hexcode(path.stem), path)
    if not files:
        raise SystemExit(f"no *{suffix} files in {folder}; delete the package's folder and run again")
    return files


def load_emoji(work: Path, size: int) -> tuple[list[Emoji], list[str]]:
    """All emoji of the demo set in Unicode's order, and the class names (emoji groups) in order of cls."""
    noto, fluent, emojibase = (fetch_package(name, version, work) for name, version, *_ in SOURCES)
    files = {
        "noto": images_by_hexcode(noto / "img" / "google" / "64", ".png"),
        "fluent": images_by_hexcode(fluent / "assets", ".webp"),
    }
    entries: list[dict[str, Any]] = json.loads((emojibase / "en" / "data.json").read_text("utf-8"))
    groups: dict[str, str] = json.loads((emojibase / "meta" / "groups.json").read_text("utf-8"))["groups"]

    # Skin-tone variants are nested under "skins" of their base and so left out here. Entries without a group
    # are not emoji of their own (single regional indicators).
    rows = []
    seen: dict[tuple[str, bytes], str] = {}
    for entry in sorted((e for e in entries if "group" in e), key=lambda e: e["order"]):
        hexcode = normalise_hexcode(entry["hexcode"])
        # The Fluent package's country flags are the same drawings as Noto's: not a second style.
        if is_country_flag(hexcode) or not all(hexcode in files[style] for style in STYLES):
            continue
        images = {style: to_square(flatten_on_white(Image.open(files[style][hexcode])), size) for style in STYLES}
        # Two emoji with the same picture cannot be told apart; the second one is left out of both styles.
        pixels = [(style, image.tobytes()) for style, image in images.items()]
        twins = [seen[p] for p in pixels if p in seen]
        if twins:
            print(f"left out: {entry['label']!r} has the same picture as {twins[0]!r}")
            continue
        seen.update((p, entry["label"]) for p in pixels)
        rows.append((hexcode, entry, groups[str(entry["group"])], images))

    used = {group for _, _, group, _ in rows}
    classes = [groups[index] for index in sorted(groups, key=int) if groups[index] in used]
    concepts: dict[str, int] = {}
    emoji = [
        Emoji(
            hexcode=hexcode,
            label=entry["label"],
            caption=make_caption(entry["label"], entry.get("tags", [])),
            captions=caption_variants(entry["label"], entry.get("tags", []), hexcode),
            group=group,
            cls=classes.index(group),
            concept=concepts.setdefault(concept_key(hexcode), len(concepts)),
            images=images,
        )
        for hexcode, entry, group, images in rows
    ]
    return emoji, classes


def duplicate_captions(emoji: list[Emoji]) -> list[str]:
    """Captions that more than one emoji has."""
    captions = [e.caption for e in emoji]
    return sorted({caption for caption in captions if captions.count(caption) > 1})


def encode_jpeg(image: Image.Image, quality: int) -> bytes:
    """JPEG bytes. Colour is not subsampled: at 64 pixels that would smear the flat coloured shapes."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0, optimize=True)
    return buffer.getvalue()


def write_shard(path: Path, emoji: list[Emoji], style: str, split: str, quality: int) -> None:
    """One gzip-compressed tar of samples, without times, owners or names that would differ between runs."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=9, mtime=0) as packed,
        # TarWriter's own compression would put the current time into the gzip header.
        wds.TarWriter(packed, compress=False, encoder=False, mtime=0, user="", group="") as tar,
    ):
        for e in emoji:
            info = {
                "concept": e.concept,
                "hexcode": e.hexcode,
                "label": e.label,
                "captions": e.captions,
                "style": style,
                "group": e.group,
                "split": split,
            }
            tar.write(
                {
                    "__key__": f"{style}-{e.hexcode}",
                    "jpg": encode_jpeg(e.images[style], quality),
                    "txt": e.caption.encode("utf-8"),
                    "json": json.dumps(info, ensure_ascii=False).encode("utf-8"),
                    "cls": str(e.cls).encode("ascii"),
                }
            )


def build(out: Path, work: Path, size: int, quality: int, seed: int) -> None:
    """Write all shards and index.json into out."""
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    emoji, classes = load_emoji(work, size)
    sizes: dict[int, int] = {}
    for e in emoji:
        sizes[e.concept] = sizes.get(e.concept, 0) + 1
    heldout = choose_heldout(sizes, HELDOUT_CONCEPTS, seed)
    splits = {
        "train": [e for e in emoji if e.concept not in heldout],
        "heldout": [e for e in emoji if e.concept in heldout],
    }

    for split, members in splits.items():
        print(f"{split}: {len(members)} emoji a style, {len({e.concept for e in members})} concepts")
    repeated = duplicate_captions(emoji)
    print(f"captions that occur more than once: {repeated or 'none'}")
    if duplicate_captions(splits["heldout"]):
        raise SystemExit("held-out captions must be distinct for retrieval; raise MAX_CAPTION_WORDS")

    shards: dict[str, dict[str, int]] = {}
    total = 0
    for style in STYLES:
        for split, members in splits.items():
            order = list(members)
            random.Random(f"{seed}-{style}-{split}").shuffle(order)
            count = TRAIN_SHARDS if split == "train" else 1
            for i in range(count):
                path = out / f"{style}-{split}-{i:06d}.tar.gz"
                write_shard(path, order[i::count], style, split, quality)
                shards[path.name] = {"samples": len(order[i::count])}
                total += path.stat().st_size
                print(f"{path.name}: {len(order[i::count])} samples, {path.stat().st_size:,} bytes")
    print(f"total: {total:,} bytes")
    if total > MAX_TOTAL_BYTES:
        raise SystemExit(
            f"the shards in {out} take {total:,} bytes, more than the {MAX_TOTAL_BYTES:,} allowed; "
            "use a lower --quality or --size"
        )

    index = {
        "shards": shards,
        "classes": classes,
        "image": {"format": "jpg", "size": size, "quality": quality},
        "seed": seed,
        "sources": [
            {"package": name, "version": version, "licence": licence, "used_for": used_for}
            for name, version, licence, used_for in SOURCES
        ],
    }
    (out / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; argv is without the program's name."""
    parser = argparse.ArgumentParser(description="Build the demo shards from three npm packages.")
    parser.add_argument("--out", type=Path, default=Path("dsclr/data/demo"), help="folder of the shards")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo-sources"),
        help="folder of the packages, kept for the next run",
    )
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--quality", type=int, default=92, help="JPEG quality, 1 to 95")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the sample order")
    args = parser.parse_args(argv)
    if not 1 <= args.size <= 96:
        parser.error(f"--size is {args.size}; it must be 1 to 96 pixels")
    if not 1 <= args.quality <= 95:
        parser.error(f"--quality is {args.quality}; it must be 1 to 95")
    return args


if __name__ == "__main__":
    build(**vars(parse_args()))
