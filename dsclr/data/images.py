"""Any image that people have, as RGB."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError

from dsclr.data.causes import BadSample

# What Pillow decodes by itself. Not all it can open: some of its formats start other programs (EPS: Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")
# With which a file is an image, if a damaged one.
_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\0", b"MM\0*")
# Longer side over shorter side. A model sees a square: of anything longer hardly a part.
MOST_ASPECT = 100


@dataclass(frozen=True)
class ImageReader:
    """Decodes the image member of a sample.

    Attributes:
        extensions: of image members, in order of preference.
        background: (red, green, blue) of 0 to 255, under transparent pixels.
        truncated: an image that ends early is a bad sample ("skip"), or filled up with grey ("use").
        max_pixels: width times height; what is larger is not decoded.
        shortest: pixels that the shorter side needs; JPEG files with more are decoded at a half, quarter or eighth
            where that leaves enough. 0: always at full size.
    """

    extensions: tuple[str, ...]
    background: tuple[int, int, int] = (255, 255, 255)
    truncated: Literal["skip", "use"] = "skip"
    max_pixels: int = 178_956_970
    shortest: int = 0

    def read(self, members: Mapping[str, bytes]) -> tuple[Image.Image, list[str]]:
        """The first image member present, as RGB, and notes of dsclr.data.causes.NOTES.

        The first frame of an animation, EXIF orientation applied, transparency on the background, 16-bit and floating
        point greys rescaled, colour profiles ignored.

        Args:
            members: of a sample, by lower-case extension.

        Raises:
            BadSample: missing_image, empty_image, not_an_image, truncated_image, broken_image, oversized_image or
                extreme_aspect.
        """
        name = next((name for name in self.extensions if name in members), None)
        if name is None:
            raise BadSample("missing_image", f"none of {', '.join(self.extensions)} among {', '.join(sorted(members))}")
        if not members[name]:
            raise BadSample("empty_image", f"{name} has no bytes")
        try:
            return self._decode(members[name], name), []
        except BadSample as bad:
            if bad.cause != "truncated_image" or self.truncated == "skip":
                raise
        with _filling_up():
            return self._decode(members[name], name), ["truncated_images"]

    def _decode(self, data: bytes, name: str) -> Image.Image:
        try:
            with _at_most(self.max_pixels), Image.open(io.BytesIO(data), formats=readable_formats()) as image:
                self._check_size(image, name)
                if self.shortest:
                    self._draft(image)
                return to_rgb(image, self.background)
        except BadSample:
            raise
        except UnidentifiedImageError:
            if data.startswith(_STARTS):
                raise BadSample("broken_image", f"{name}: the header is damaged or cut off") from None
            known = ", ".join(readable_formats())
            raise BadSample("not_an_image", f"{name}: {len(data):,} bytes that are none of {known}") from None
        except Image.DecompressionBombError as error:
            raise BadSample("oversized_image", f"{name}: {error}") from None
        except MemoryError:
            raise BadSample("oversized_image", f"{name}: no memory to decode it") from None
        except Exception as error:
            # Whatever it is: Pillow's decoders raise all kinds of exceptions on damaged files.
            cause = "truncated_image" if "truncated" in str(error).lower() else "broken_image"
            raise BadSample(cause, f"{name}: {error or type(error).__name__}") from None

    def _check_size(self, image: Image.Image, name: str) -> None:
        width, height = image.size
        if width * height > self.max_pixels:
            raise BadSample("oversized_image", f"{name}: {width} x {height}, over {self.max_pixels:,} pixels")
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise BadSample("extreme_aspect", f"{name}: {width} x {height}, over {MOST_ASPECT} to 1")

    def _draft(self, image: Image.Image) -> None:
        ratio = self.shortest / min(image.size)
        # Does nothing for other formats. The result is never smaller than asked for.
        image.draft(None, (math.ceil(image.width * ratio), math.ceil(image.height * ratio)))


def to_rgb(image: Image.Image, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """RGB of any Pillow image.

    ``convert("RGB")`` alone would make 16-bit greys white, ignore EXIF orientation and show whatever colours
    lie under transparent pixels.
    """
    image.load()
    # Damaged EXIF: the pixels are good, their orientation is unknown.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _from_wide_grey(image, background)
    if image.mode == "LAB":
        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB")
        assert converted is not None
        return converted
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (*background, 255)), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_wide_grey(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    highest = values.max()
    # Floating point is in [0, 1] or in [0, 255]; integers are 16 bits wide, or 31.
    white = (1.0 if highest <= 1 else 255.0) if image.mode == "F" else (65535.0 if highest <= 65535 else 2.0**31 - 1)
    grey = (values * (255 / white)).clip(0, 255).round().astype(np.uint8)
    pixels = np.stack([grey] * 3, axis=-1)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        pixels[values == transparent] = background
    return Image.fromarray(pixels)


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def _at_most(pixels: int) -> Iterator[None]:
    """Within, this is also Pillow's limit, which would otherwise refuse what a user allows."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


@contextmanager
def _filling_up() -> Iterator[None]:
    """Within, Pillow fills up images that end early."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
