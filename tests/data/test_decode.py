"""Bytes to images, captions and ids."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dsclr.data.causes import BadSample
from dsclr.data.decode import hash_id, read_captions, read_id
from dsclr.data.images import ImageReader


def encode(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def read_image(members, extensions, **options):
    return ImageReader(tuple(extensions.split(";")), **options).read(members)[0]


def pixel(data, at=(0, 0)):
    image = read_image({"png": data}, "png")
    assert image.mode == "RGB"
    return image.getpixel(at)


def test_transparency_lies_on_white():
    assert pixel(encode(Image.new("RGBA", (2, 2), (255, 0, 0, 0)))) == (255, 255, 255)
    assert pixel(encode(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))) == (127, 127, 127)
    assert pixel(encode(Image.new("LA", (2, 2), (0, 0)))) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    assert pixel(encode(palette)) == (10, 20, 30)
    assert pixel(encode(palette, transparency=0)) == (255, 255, 255)


def test_sixteen_bit_grey_is_rescaled():
    grey = Image.fromarray(np.full((2, 2), 0x8080, dtype=np.uint16))
    assert pixel(encode(grey)) == (128, 128, 128)


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (4, 2), (0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    decoded = read_image({"jpg": encode(image, "JPEG", exif=exif)}, "jpg")
    assert decoded.size == (2, 4)


@pytest.mark.parametrize("mode", ["1", "L", "CMYK"])
def test_other_modes(mode):
    image = Image.new(mode, (3, 3))
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert read_image({"png": encode(image, kind)}, "png").mode == "RGB"


def test_first_image_member_by_preference():
    members = {"png": encode(Image.new("RGB", (1, 1), "red")), "jpg": encode(Image.new("RGB", (2, 2)), "JPEG")}
    assert read_image(members, "jpg;png").size == (2, 2)
    assert read_image(members, "webp;png").size == (1, 1)


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ({"txt": b""}, "missing_image"),
        ({"jpg": b""}, "empty_image"),
        ({"jpg": b"not an image"}, "not_an_image"),
        ({"png": encode(Image.effect_noise((64, 64), 90))[:300]}, "truncated_image"),
    ],
)
def test_images_that_cannot_be_used(members, cause):
    with pytest.raises(BadSample) as error:
        read_image(members, "jpg;png")
    assert error.value.cause == cause


def test_a_decompression_bomb(monkeypatch):
    data = encode(Image.new("RGB", (64, 64)))
    # Pillow's own limit says nothing: a user may set a higher one.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert read_image({"png": data}, "png", max_pixels=64 * 64).size == (64, 64)
    with pytest.raises(BadSample) as error:
        read_image({"png": data}, "png", max_pixels=64 * 64 - 1)
    assert error.value.cause == "oversized_image"
    assert Image.MAX_IMAGE_PIXELS == 100


def test_captions():
    assert read_captions({"txt": b" a fox\n"}, "txt") == ["a fox"]
    assert read_captions({"json": b'{"c": "b\\u00e9b\\u00e9"}'}, "json:c") == ["b\u00e9b\u00e9"]
    assert read_captions({"json": b'{"c": ["a fox", " a red fox "]}'}, "json:c") == ["a fox", "a red fox"]


@pytest.mark.parametrize(
    ("members", "source", "cause"),
    [
        ({}, "txt", "missing_caption"),
        ({"txt": b" \n"}, "txt", "empty_caption"),
        ({"txt": b"\xff\xfe"}, "txt", "broken_caption"),
        ({"json": b"{"}, "json:c", "broken_json"),
        ({"json": b"[]"}, "json:c", "broken_json"),
        ({"json": b"{}"}, "json:c", "missing_caption"),
        ({"json": b'{"c": 3}'}, "json:c", "missing_caption"),
        ({"json": b'{"c": []}'}, "json:c", "missing_caption"),
        ({"json": b'{"c": "\\ud800 half"}'}, "json:c", "broken_caption"),
        ({"json": b"[" * 100_000}, "json:c", "broken_json"),
        ({"json": b'{"c": ["a fox", 3]}'}, "json:c", "missing_caption"),
        ({"json": b'{"c": ["", " "]}'}, "json:c", "empty_caption"),
        ({}, "json:c", "missing_caption"),
    ],
)
def test_captions_that_cannot_be_used(members, source, cause):
    with pytest.raises(BadSample) as error:
        read_captions(members, source)
    assert error.value.cause == cause


def test_ids():
    assert (
        read_id({}, "caption", "s", "k", ["a fox"]) == hash_id("a fox") == read_id({}, "caption", "t", "l", ["a fox"])
    )
    assert read_id({}, "key", "s", "k", []) != read_id({}, "key", "s", "l", [])
    assert read_id({"cls": b"3\n"}, "cls", "s", "k", []) == read_id({"cls": b"3"}, "cls", "t", "l", [])
    assert read_id({"json": b'{"c": 1}'}, "json:c", "s", "k", []) == hash_id("1")
    with pytest.raises(BadSample, match="missing_id"):
        read_id({}, "cls", "s", "k", [])
    assert 0 <= hash_id("x") < 2**63


def test_a_large_jpeg_is_decoded_at_a_scale_that_leaves_enough():
    pixels = np.asarray(Image.effect_noise((16, 12), 90).resize((1600, 1200), Image.Resampling.BICUBIC))
    data = encode(Image.fromarray(pixels).convert("RGB"), "JPEG", quality=95)
    whole = read_image({"jpg": data}, "jpg")
    assert whole.size == (1600, 1200)
    for shortest, expected in ((0, 1200), (601, 1200), (600, 600), (400, 600), (300, 300), (10, 150)):
        image = read_image({"jpg": data}, "jpg", shortest=shortest)
        assert image.height == expected >= shortest
        small = image.resize((80, 60), Image.Resampling.BICUBIC)
        reference = whole.resize((80, 60), Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(small, dtype=int) - np.asarray(reference, dtype=int)).mean() < 1
    png = encode(Image.fromarray(pixels))
    assert read_image({"png": png}, "png", shortest=10).size == (1600, 1200)
