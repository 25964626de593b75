"""From the bytes of a sample's members to what the model reads."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

Members = Mapping[str, bytes]


class BadSample(Exception):
    """A sample that cannot be used. ``cause`` is a short name to count by."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


def read_image(members: Members, extensions: str) -> Image.Image:
    """The first image member present, as RGB: EXIF orientation applied, transparency on white.

    Args:
        members: by extension.
        extensions: "jpg;png;...", in order of preference.

    Raises:
        BadSample: missing_image, or broken_image.
    """
    names = [name for name in extensions.lower().split(";") if name in members]
    if not names:
        raise BadSample("missing_image", f"none of {extensions} among {', '.join(sorted(members))}")
    try:
        with Image.open(io.BytesIO(members[names[0]])) as image:
            return to_rgb(image)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BadSample("broken_image", f"{names[0]}: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any Pillow image; 16-bit grey is rescaled and transparency composited on white.

    ``convert("RGB")`` alone would make 16-bit greys white, ignore EXIF orientation and show whatever colours
    lie under transparent pixels.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I;16", "I")):
        grey = np.asarray(image).astype(np.float64) / 257.0
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        grey = np.nan_to_num(np.asarray(image, dtype=np.float64))
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def read_captions(members: Members, source: str) -> list[str]:
    """All captions of a sample, stripped: of member ``source`` ("txt": one), or of "json:FIELD", a string or a list.

    Raises:
        BadSample: missing_caption, broken_caption or empty_caption.
    """
    if source.startswith("json:"):
        value = read_json_field(members, source.removeprefix("json:"), "missing_caption")
        found = value if isinstance(value, list) else [value]
        captions = [caption for caption in found if isinstance(caption, str)]
        if not captions or len(captions) < len(found):
            raise BadSample("missing_caption", f"{source} is {value!r}, a string or a list of strings is expected")
    elif source in members:
        try:
            captions = [members[source].decode("utf-8")]
        except UnicodeDecodeError as error:
            raise BadSample("broken_caption", f"{source} is not UTF-8: {error}") from None
    else:
        raise BadSample("missing_caption", f"no {source} among {', '.join(sorted(members))}")
    captions = [caption.strip() for caption in captions]
    if any("\ud800" <= letter <= "\udfff" for caption in captions for letter in caption):
        raise BadSample("broken_caption", f"{source} holds half a surrogate pair, which is no text")
    if not all(captions):
        raise BadSample("empty_caption", f"{source} holds no text")
    return captions


def read_json_field(members: Members, field: str, cause: str) -> object:
    """Field of the json member. Raises BadSample(cause)."""
    try:
        return json.loads(members["json"])[field]
    except KeyError as error:
        raise BadSample(cause, f"no {error} in the json member or no such member") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise BadSample("broken_json", str(error)) from None


def read_id(members: Members, source: str, shard: str, key: str, captions: list[str]) -> int:
    """The int64 that tells which samples are the same.

    Args:
        source: "caption" (all of them together), "key" (shard and key), "cls", or "json:FIELD".
        captions: of the sample; empty where it has none.
    """
    if source == "caption" and captions:
        return hash_id("\0".join(captions))
    if source == "cls":
        if "cls" not in members:
            raise BadSample("missing_id", f"no cls among {', '.join(sorted(members))}")
        return hash_id(members["cls"].decode("utf-8", "replace").strip())
    if source.startswith("json:"):
        return hash_id(json.dumps(read_json_field(members, source.removeprefix("json:"), "missing_id")))
    return hash_id(f"{shard}\0{key}")


def hash_id(text: str) -> int:
    """A stable 63-bit hash: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1


Transform = Callable[[Image.Image], Tensor]
Tokenizer = Callable[[list[str]], Tensor]
