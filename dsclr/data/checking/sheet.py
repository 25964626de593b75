"""A picture of the oddest pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from PIL import Image, ImageDraw, ImageFont

from dsclr.data.checking.examine import InPlace
from dsclr.data.checking.findings import Odd
from dsclr.data.dataset import Sample, ShardDataset

MOST_PICTURES = 48
# Pictures a row, pixels of each, of the space around it and of a line of text.
COLUMNS, SIDE, GAP, LINE = 8, 160, 8, 13
# Shard, key and why.
LINES = 3


def choose(odd: Mapping[str, Sequence[Odd]], most: int = MOST_PICTURES) -> list[Odd]:
    """The oddest of each kind in turns, every sample once."""
    turns = chain.from_iterable(zip_longest(*(odd[kind] for kind in sorted(odd))))
    chosen: dict[tuple[int, int], Odd] = {}
    for one in turns:
        if one is not None and len(chosen) < most:
            chosen.setdefault((one.shard, one.sample), one)
    return list(chosen.values())


def draw_sheet(chosen: Sequence[Odd], dataset: ShardDataset) -> Image.Image:
    """RGB: the pictures as training sees them, with shard, key and why they are odd below each.

    Args:
        chosen: usable samples, as :func:`choose` has them.
        dataset: in the order InPlace.
    """
    rows = max(1, -(-len(chosen) // COLUMNS))
    width, height = SIDE + GAP, SIDE + LINES * LINE + GAP
    # Grey, so that white backgrounds have an edge.
    sheet = Image.new("RGB", (COLUMNS * width + GAP, rows * height + GAP), (208, 208, 208))
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    if not chosen:
        draw.text((GAP, GAP), "no odd pictures", "black", font)
    for number, odd in enumerate(chosen):
        left, top = GAP + number % COLUMNS * width, GAP + number // COLUMNS * height
        item = dataset[InPlace.position(odd.shard, odd.sample)]
        if isinstance(item, Sample):
            picture = Image.fromarray(item.a.permute(1, 2, 0).numpy())
            picture.thumbnail((SIDE, SIDE))
            # Enlarged as they are: what is blurred in the sheet is blurred in training.
            factor = max(1, SIDE // max(picture.size))
            picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
            sheet.paste(picture, (left, top))
        for line, text in enumerate((dataset.reader.shards[odd.shard].name, odd.key, odd.why)):
            # The font that Pillow brings has no other letters.
            shown = _fitted(text.encode("ascii", "replace").decode(), draw, font)
            draw.text((left, top + SIDE + line * LINE), shown, "black", font)
    return sheet


def _fitted(text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The end of a name tells more than its beginning."""
    shown = text
    while shown and draw.textlength(shown if shown == text else f"..{shown}", font) > SIDE:
        shown = shown[1:]
    return shown if shown == text else f"..{shown}"
