"""From an image as it is found to the member that is stored."""

from __future__ import annotations

import io

from PIL import Image

from dsclr.data.causes import BadSample
from dsclr.data.images import ImageReader, readable_formats, to_rgb

# Kinds by Pillow's names. MPO is a JPEG file with further pictures after the first.
COPIED = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
# Lower case, of files that are looked at in a folder.
_SUFFIXES = "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm avif jp2"
SUFFIXES = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())

# At an eighth of the size a JPEG decodes three times as fast, and still every byte is read.
_READER = ImageReader(("image",), shortest=1)
_PNG_MODES = ("1", "L", "LA", "RGB", "RGBA", "I;16")


def check_image(image: bytes | Image.Image) -> None:
    """Make sure that training will be able to read an image, by decoding all of it.

    Raises:
        BadSample: as :class:`dsclr.data.images.ImageReader`.
    """
    if isinstance(image, bytes):
        _READER.read({"image": image})
        return
    try:
        to_rgb(image)
    except Exception as error:  # whatever a data set's own pictures may raise; the next one may be good
        raise BadSample("broken_image", f"{type(error).__name__}: {error}") from None


def stored_image(image: bytes | Image.Image, shorter_side: int | None, quality: int) -> tuple[str, bytes]:
    """(extension, bytes) of the member.

    A JPEG, PNG or WebP file is copied; other kinds become PNG, those from files as the RGB that training reads.

    Args:
        image: an encoded file, or a picture.
        shorter_side: images whose shorter side has more pixels are shrunk to it and become JPEG, upright.
        quality: of that JPEG, 1 to 95.

    Raises:
        OSError: the image is not one that :func:`check_image` passes.
    """
    picture = _open(image)
    if shorter_side is not None and min(picture.size) > shorter_side:
        return "jpg", _jpeg(_shrink(to_rgb(picture), shorter_side), quality)
    if isinstance(image, bytes):
        if picture.format in COPIED:
            return COPIED[picture.format], image
        picture = to_rgb(picture)
    elif picture.mode not in _PNG_MODES:
        picture = to_rgb(picture)
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "png", out.getvalue()


def _open(image: bytes | Image.Image) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    return Image.open(io.BytesIO(image), formats=readable_formats())


def _shrink(picture: Image.Image, shorter_side: int) -> Image.Image:
    scale = shorter_side / min(picture.size)
    width, height = (max(shorter_side, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _jpeg(picture: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()
