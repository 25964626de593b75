"""Broken and odd samples, each with what should become of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import pickle
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dsclr.config import DataConfig
from dsclr.data import build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data.batch import Batch
from tests.data.samples import SETTINGS, add

SIDE = 32


def quadrants(top_left, top_right, bottom_left, bottom_right, side: int = SIDE) -> np.ndarray:
    corners = np.array([[top_left, top_right], [bottom_left, bottom_right]])
    return corners.repeat(side // 2, axis=0).repeat(side // 2, axis=1)


# No two corners alike, so that nothing turned, mirrored or inverted passes; even blocks survive lossy formats.
COLOURS = quadrants((200, 30, 30), (30, 180, 40), (40, 50, 190), (220, 200, 60)).astype(np.uint8)
GREY = quadrants(10, 90, 170, 250).astype(np.uint8)
BITS = quadrants(0, 255, 255, 0).astype(np.uint8)
ALPHA = quadrants(255, 0, 51, 255).astype(np.uint8)


def rgb(grey: np.ndarray) -> np.ndarray:
    return np.stack([grey] * 3, axis=-1)


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.round(colours * share + 255 * (1 - share))


@dataclass(frozen=True)
class Case:
    """A sample.

    Attributes:
        members: (extension, bytes) in the order of the tar.
        cause: it is skipped; None: it is used.
        pixels: (32, 32, 3) what it looks like; None: the picture of the other members.
        within: largest difference allowed in a channel.
        blurred: pixels on both sides of the middle lines that are not compared.
        caption: what the tokenizer is given.
    """

    name: str
    members: tuple[tuple[str, bytes], ...]
    cause: str | None = None
    pixels: np.ndarray | None = None
    within: int = 0
    caption: str = ""
    blurred: int = 0


def image(name: str, data: bytes, pixels=COLOURS, within: int = 0, extension: str = "jpg", blurred: int = 0) -> Case:
    return Case(name, ((extension, data), ("txt", name.encode())), None, pixels, within, name, blurred)


def bad_image(name: str, data: bytes, cause: str, extension: str = "jpg") -> Case:
    return Case(name, ((extension, data), ("txt", name.encode())), cause)


def text(name: str, data: bytes, caption: str, extension: str = "txt") -> Case:
    return Case(name, (("png", encode(COLOURS)), (extension, data)), None, COLOURS, 0, caption)


def bad_text(name: str, data: bytes, cause: str, extension: str = "txt") -> Case:
    return Case(name, (("png", encode(COLOURS)), (extension, data)), cause)


def encode(picture: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(out, kind, **options)
    return out.getvalue()


def jpeg(picture: np.ndarray | Image.Image, **options) -> bytes:
    return encode(picture, "JPEG", **{"quality": 95, "subsampling": 0, **options})


def exif_of(orientation: object) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    return data[:2] + segment(marker, body) + data[2:]


def without_adobe(data: bytes) -> bytes:
    at = data.index(b"Adobe") - 4
    return data[:at] + data[at + 16 :]


def thumbnail(small: bytes) -> bytes:
    """Exif of an empty first directory and a second one that is the thumbnail."""
    entries = [(0x0103, 3, 6), (0x0201, 4, 56), (0x0202, 4, len(small))]
    second = struct.pack("<H", 3) + b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IHI", 8, 0, 14) + second + b"\0" * 4 + small


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(samples: np.ndarray, depth: int, colour: int, extra: bytes = b"", interlaced: bool = False) -> bytes:
    """What Pillow does not write."""
    samples = samples.reshape(*samples.shape[:2], -1).astype(">u2" if depth == 16 else np.uint8)
    adam7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    passes = adam7 if interlaced else [(0, 0, 1, 1)]
    rows = b"".join(b"\0" + row.tobytes() for y, x, dy, dx in passes for row in samples[y::dy, x::dx])
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], depth, colour, 0, 0, int(interlaced))
    chunks = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def jpegs() -> list[Case]:
    # Ink of none, half or all: the simple formula (1 - ink) (1 - black), which Pillow and browsers use for it.
    inks = np.concatenate([255 - COLOURS, np.full((SIDE, SIDE, 1), 51)], axis=-1).astype(np.uint8)
    printed = np.round(COLOURS * 0.8)
    cmyk = jpeg(Image.fromarray(inks, "CMYK"))
    # Odd sizes: what the picture is before JPEG, cut out of the middle by hand.
    ramp = np.linspace(0, 255, 3 * SIDE + 1)[None, :, None].repeat(2 * SIDE + 1, 0) * [1, 0.5, 0.25]
    odd = ramp[:SIDE, :SIDE].round().astype(np.uint8)[:31, :31]
    plain = jpeg(COLOURS)
    turned = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: np.rot90(COLOURS, 1),
        7: COLOURS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(COLOURS, -1),
    }
    start = plain.index(b"\xff\xc0") + 5
    huge = plain[:start] + struct.pack(">HH", 65_000, 65_000) + plain[start + 4 :]
    noisy = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    long = jpeg(noisy)
    cases = [
        image("jpeg", plain, within=3),
        image("jpeg-grey", jpeg(GREY), rgb(GREY), 2),
        image("jpeg-progressive", jpeg(COLOURS, progressive=True), within=3),
        image("jpeg-420", jpeg(COLOURS, subsampling=2), within=4, blurred=2),
        image("jpeg-420-odd", jpeg(odd, subsampling=2), np.asarray(Image.fromarray(odd).resize((32, 32), 3)), 6),
        image("jpeg-rgb-not-ycc", jpeg(COLOURS, keep_rgb=True), within=2),
        image("jpeg-cmyk-adobe", cmyk, printed, 3),
        image("jpeg-cmyk-no-adobe", without_adobe(cmyk), printed, 3),
        image("jpeg-exif-thumbnail", with_segment(plain, 0xE1, thumbnail(jpeg(GREY[:8, :8]))), within=3),
        image("jpeg-exif-damaged", with_segment(plain, 0xE1, b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage"), within=3),
        image("jpeg-exif-no-tiff", with_segment(plain, 0xE1, b"Exif\0\0" + bytes(range(256))), within=3),
        image("jpeg-exif-orientation-0", jpeg(COLOURS, exif=exif_of(0)), within=3),
        image("jpeg-exif-orientation-99", jpeg(COLOURS, exif=exif_of(99)), within=3),
        image("jpeg-rubbish-after-end", plain + b"<html>" * 50, within=3),
        image("jpeg-mpo", encode(Image.fromarray(COLOURS), "MPO", save_all=True, append_images=[Image.fromarray(GREY)],
                                 quality=95, subsampling=0), within=3),
        image("jpeg-large-drafted", jpeg(COLOURS.repeat(16, 0).repeat(16, 1)), within=4, blurred=2),
        image("jpeg-named-png", plain, within=3, extension="png"),
        bad_image("jpeg-bomb", huge, "oversized_image"),
        bad_image("jpeg-zero-bytes", b"", "empty_image"),
        bad_image("jpeg-only-start", plain[:2], "not_an_image"),
        bad_image("jpeg-header-cut", plain[:40], "truncated_image"),
        *(bad_image(f"jpeg-cut-{part}", long[: len(long) * part // 100], "truncated_image") for part in (10, 50, 95)),
        *(bad_image(f"jpeg-progressive-cut-{part}", prog[: len(prog) * part // 100], "truncated_image")
          for prog in [jpeg(noisy, progressive=True)] for part in (30, 80)),
    ]  # fmt: skip
    cases += [
        image(f"jpeg-exif-{o}", jpeg(np.ascontiguousarray(as_stored), exif=exif_of(o)), within=3)
        for o, as_stored in turned.items()
    ]
    wide = COLOURS.repeat(2, axis=1)
    cases.append(
        image("jpeg-exif-6-wide", jpeg(np.ascontiguousarray(np.rot90(wide, 1)), exif=exif_of(6)), wide[:, 16:48], 40)
    )
    return cases


def pngs() -> list[Case]:
    wide = GREY.astype(np.uint16) * 257
    deep = COLOURS.astype(np.uint16) * 257
    palette = Image.fromarray(quadrants(0, 1, 2, 3).astype(np.uint8), "L")
    palette = Image.frombytes("P", (SIDE, SIDE), palette.tobytes())
    entries = [(200, 30, 30), (30, 180, 40), (40, 50, 190), (220, 200, 60)]
    palette.putpalette(list(itertools.chain.from_iterable(entries)))
    two = Image.frombytes("P", (SIDE, SIDE), (BITS // 255).tobytes())
    two.putpalette([0, 0, 0, 255, 255, 255])
    first_white = COLOURS.copy()
    first_white[:16, :16] = 255
    grey_white = rgb(GREY).copy()
    grey_white[:16, :16] = 255
    shaded = COLOURS.copy()
    shaded[:16, :16] = 255
    shaded[16:, :16] = np.round(np.array([40, 50, 190]) * 128 / 255 + 255 * 127 / 255)
    plain = encode(COLOURS)
    data_at, head_at = plain.index(b"IDAT"), plain.index(b"IHDR")
    length = struct.unpack(">I", plain[data_at - 4 : data_at])[0]

    def flipped(at: int) -> bytes:
        return plain[:at] + bytes([plain[at] ^ 0xFF]) + plain[at + 1 :]

    bomb = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(8 << 20)))
    huge = chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    frames = [Image.fromarray(GREY).convert("RGB")]
    rgba = np.dstack([COLOURS, ALPHA])
    ga = np.dstack([GREY, ALPHA])
    return [
        image("png-1", encode(Image.fromarray(BITS).convert("1")), rgb(BITS)),
        image("png-l", encode(GREY), rgb(GREY)),
        image("png-l-trns", encode(GREY, transparency=10), grey_white),
        image("png-la", encode(ga), on_white(rgb(GREY), ALPHA), 1),
        image("png-p", encode(palette)),
        image("png-p-trns-index", encode(palette, transparency=0), first_white),
        image("png-p-trns-bytes", encode(palette, transparency=b"\0\xff\x80\xff"), shaded, 1),
        image("png-p-1-bit", encode(two, bits=1), rgb(BITS)),
        image("png-rgb", plain),
        image("png-rgb-trns", encode(COLOURS, transparency=(200, 30, 30)), first_white),
        image("png-rgba", encode(rgba), on_white(COLOURS, ALPHA), 1),
        image("png-16-grey", encode(wide), rgb(GREY), 1),
        image("png-16-grey-trns", png(wide, 16, 0, chunk(b"tRNS", struct.pack(">H", 10 * 257))), grey_white, 1),
        image("png-16-grey-dark", png(GREY.astype(np.uint16), 16, 0), np.zeros_like(COLOURS), 1),
        image("png-16-rgb", png(deep, 16, 2), within=1),
        image("png-16-rgb-trns", png(deep, 16, 2, chunk(b"tRNS", struct.pack(">HHH", *deep[0, 0]))),
              first_white, 1),
        image("png-16-rgba", png(np.dstack([deep, ALPHA.astype(np.uint16) * 257]), 16, 6), on_white(COLOURS, ALPHA), 1),
        image("png-16-la", png(np.dstack([wide, ALPHA.astype(np.uint16) * 257]), 16, 4), on_white(rgb(GREY), ALPHA), 1),
        image("png-interlaced", png(COLOURS, 8, 2, interlaced=True)),
        image("png-16-grey-interlaced", png(wide, 16, 0, interlaced=True), rgb(GREY), 1),
        image("png-exif-6", encode(np.ascontiguousarray(np.rot90(COLOURS, 1)), exif=exif_of(6))),
        image("png-apng", encode(Image.fromarray(COLOURS), save_all=True, append_images=frames)),
        image("png-text", png(COLOURS, 8, 2, chunk(b"tEXt", b"Comment\0" + b"\xff" * 1000))),
        bad_image("png-broken-crc-header", flipped(head_at + 17), "broken_image"),
        # The data have a checksum of their own, which is right.
        image("png-broken-crc-data", flipped(data_at + 4 + length)),
        bad_image("png-broken-data", flipped(data_at + 4 + length // 2), "broken_image"),
        bad_image("png-text-bomb", png(COLOURS, 8, 2, bomb), "broken_image"),
        bad_image("png-bomb", plain[:8] + huge + plain[33:], "oversized_image"),
        bad_image("png-cut", plain[: data_at + 4 + length // 2], "truncated_image"),
        bad_image("png-header-only", plain[:33], "broken_image"),
        bad_image("png-signature-only", plain[:8], "broken_image"),
    ]  # fmt: skip


def webps_and_gifs() -> list[Case]:
    first, second = Image.fromarray(COLOURS), Image.fromarray(GREY).convert("RGB")
    rgba = np.dstack([COLOURS, ALPHA])
    binary = np.where(ALPHA > 0, 255, 0).astype(np.uint8)
    seen = np.where(binary[..., None] > 0, COLOURS, 255)
    lossless = encode(COLOURS, "WEBP", lossless=True)
    gif = encode(np.random.default_rng(1).integers(0, 256, (SIDE, SIDE), dtype=np.uint8), "GIF")
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(COLOURS, 1)))
    return [
        image("webp-lossy", encode(COLOURS, "WEBP", quality=100), within=6, blurred=3),
        image("webp-lossless", lossless),
        image("webp-alpha", encode(rgba, "WEBP", lossless=True, exact=True), on_white(COLOURS, ALPHA), 1),
        image("webp-animated", encode(first, "WEBP", lossless=True, save_all=True, append_images=[second])),
        image("webp-exif-6", encode(turned, "WEBP", lossless=True, exif=exif_of(6))),
        bad_image("webp-cut", lossless[: len(lossless) // 2], "broken_image"),
        image("gif", encode(first, "GIF")),
        image("gif-grey", encode(GREY, "GIF"), rgb(GREY)),
        image("gif-transparent", encode(np.dstack([COLOURS, binary]), "GIF"), seen),
        image("gif-animated", encode(first, "GIF", save_all=True, append_images=[second])),
        bad_image("gif-cut", gif[: len(gif) // 2], "truncated_image"),
    ]


def tiffs() -> list[Case]:
    first, second = Image.fromarray(COLOURS), Image.fromarray(GREY).convert("RGB")
    inks = Image.fromarray(np.dstack([255 - COLOURS, np.full((SIDE, SIDE), 51, np.uint8)]), "CMYK")
    # Neutral colours have a = b = 0: grey at L. Of L = 0, 50, 75, 100 sRGB is 0, 119, 185, 255.
    lab = np.dstack([quadrants(0, 128, 191, 255), np.zeros((SIDE, SIDE)), np.zeros((SIDE, SIDE))])
    neutral = rgb(quadrants(0, 119, 185, 255))
    levels = GREY.astype(np.float32)
    pa = Image.frombytes("PA", (SIDE, SIDE), np.dstack([quadrants(0, 1, 2, 3), ALPHA]).astype(np.uint8).tobytes())
    pa.putpalette([200, 30, 30, 30, 180, 40, 40, 50, 190, 220, 200, 60])
    inverted = encode(GREY, "TIFF")
    # Tag 262, type SHORT: 1 is black at zero, 0 white at zero.
    photometric = struct.pack("<HHIHH", 262, 3, 1, 1, 0)
    return [
        image("tiff-rgb", encode(first, "TIFF")),
        image("tiff-lzw", encode(first, "TIFF", compression="tiff_lzw")),
        image("tiff-deflate", encode(first, "TIFF", compression="tiff_adobe_deflate")),
        image("tiff-jpeg", encode(first, "TIFF", compression="jpeg", quality=95), within=12),
        image("tiff-pages", encode(first, "TIFF", save_all=True, append_images=[second])),
        image("tiff-cmyk", encode(inks, "TIFF"), np.round(COLOURS * 0.8), 1),
        image("tiff-lab", encode(Image.fromarray(lab.astype(np.uint8), "LAB"), "TIFF"), neutral, 2),
        image("tiff-float-1", encode(levels / 255, "TIFF"), rgb(GREY)),
        image("tiff-float-255", encode(levels, "TIFF"), rgb(GREY)),
        image("tiff-float-nan", encode(np.where(GREY == 90, np.nan, levels / 255).astype(np.float32), "TIFF"),
              rgb(np.where(GREY == 90, 0, GREY))),
        image("tiff-16", encode(GREY.astype(np.uint16) * 257, "TIFF"), rgb(GREY), 1),
        image("tiff-int32", encode(GREY.astype(np.int32) * ((2**31 - 1) // 255), "TIFF"), rgb(GREY), 1),
        image("tiff-la", encode(np.dstack([GREY, ALPHA]), "TIFF"), on_white(rgb(GREY), ALPHA), 1),
        image("tiff-pa", encode(pa, "TIFF"), on_white(COLOURS, ALPHA), 1),
        image("tiff-rgba", encode(np.dstack([COLOURS, ALPHA]), "TIFF"), on_white(COLOURS, ALPHA), 1),
        image("tiff-white-is-zero", inverted.replace(photometric, struct.pack("<HHIHH", 262, 3, 1, 0, 0)),
              rgb(255 - GREY)),
        image("tiff-orientation-6", encode(np.ascontiguousarray(np.rot90(COLOURS, 1)), "TIFF", tiffinfo={274: 6})),
        bad_image("tiff-cut", encode(first, "TIFF")[:1500], "truncated_image"),
    ]  # fmt: skip


def other_images() -> list[Case]:
    first = Image.fromarray(COLOURS)
    tall, thin = np.zeros((101, 1, 3), np.uint8), np.zeros((99, 1, 3), np.uint8) + np.uint8(7)
    pam = b"P6\n32 32\n65535\n" + (COLOURS.astype(">u2") * 257).astype(">u2").tobytes()
    return [
        image("bmp", encode(first, "BMP")),
        image("bmp-grey", encode(GREY, "BMP"), rgb(GREY)),
        image("ico", encode(first, "ICO", sizes=[(32, 32), (16, 16)])),
        image("avif", encode(first, "AVIF", quality=100), within=6, extension="avif", blurred=3),
        image("jpeg2000", encode(first, "JPEG2000")),
        image("tga", encode(first, "TGA")),
        image("ppm-16", pam, within=1),
        bad_image("bmp-cut", encode(first, "BMP")[:1000], "truncated_image"),
        bad_image("avif-cut", encode(first, "AVIF")[:-40], "truncated_image"),
        bad_image("aspect-101", encode(tall), "extreme_aspect"),
        bad_image("aspect-101-wide", encode(np.ascontiguousarray(tall.transpose(1, 0, 2))), "extreme_aspect"),
        image("aspect-99", encode(thin), np.full((SIDE, SIDE, 3), 7)),
        image("one-pixel", encode(np.array([[[9, 99, 199]]], np.uint8)), np.full((SIDE, SIDE, 3), (9, 99, 199))),
    ]


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def no_images(trap: Path) -> list[Case]:
    svg = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="32" height="32"><rect/></svg>'
    files = {
        "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "svg": svg,
        "pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n",
        "text": b"a picture of a fox\n" * 20,
        "random": np.random.default_rng(7).bytes(4000),
        "zeros": bytes(4000),
        "ones": b"\xff" * 4000,
        "one-byte": b"\0",
        "zip": b"PK\x03\x04" + bytes(200),
        "gzip": gzip.compress(encode(COLOURS), mtime=0),
        "pickle": pickle.dumps(_Touch(trap)),
        "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    }
    return [bad_image(f"no-image-{name}", data, "not_an_image") for name, data in files.items()]


def captions(trap: Path) -> list[Case]:
    fox = "ein Fuchs mit \u00e4rger"
    # Combining accents, joined emoji, Hebrew and Arabic.
    odd = "e\u0301le\u0300ve \U0001f98a\U0001f468\u200d\U0001f469\u200d\U0001f467 \u05e9\u05dc\u05d5\u05dd"
    odd += " \u0645\u0631\u062d\u0628\u0627"
    picture, unpickled = ("png", encode(COLOURS)), pickle.dumps(_Touch(trap))
    good = ("txt", b"a fox")
    return [
        text("caption", b" a fox\r\n", "a fox"),
        text("caption-lines", b"a fox\nand a hare\n", "a fox\nand a hare"),
        text("caption-bom", b"\xef\xbb\xbf" + fox.encode(), fox),
        text("caption-unicode", odd.encode(), odd),
        text("caption-long", b"fox " * 25_000, ("fox " * 25_000).strip()),
        bad_text("caption-empty", b"", "empty_caption"),
        bad_text("caption-blank", b" \t\r\n", "empty_caption"),
        bad_text("caption-wide-blank", "\u3000\u00a0\u2028".encode(), "empty_caption"),
        bad_text("caption-invisible", "\u200b\ufeff\u200e".encode(), "empty_caption"),
        bad_text("caption-bom-only", b"\xef\xbb\xbf", "empty_caption"),
        bad_text("caption-utf16", fox.encode("utf-16"), "broken_caption"),
        bad_text("caption-utf16-no-mark", "a fox".encode("utf-16-le"), "broken_caption"),
        bad_text("caption-utf32", "a fox".encode("utf-32"), "broken_caption"),
        bad_text("caption-latin1", fox.encode("latin-1"), "broken_caption"),
        bad_text("caption-zeros", bytes(20), "broken_caption"),
        bad_text("caption-zero-inside", b"a\0fox", "broken_caption"),
        bad_text("caption-cut-letter", "\u72d0".encode()[:2], "broken_caption"),
        bad_text("caption-surrogate", b"\xed\xa0\x80", "broken_caption"),
        Case("caption-missing", (picture,), "missing_caption"),
        Case("caption-other-member", (picture, ("text", b"a fox")), "missing_caption"),
        Case("image-missing", (good, ("json", b"{}")), "missing_image"),
        Case("image-other-member", (("mp4", encode(COLOURS)), good), "missing_image"),
        Case("pickles-beside", (picture, *((e, unpickled) for e in ("pyd", "pkl", "pickle", "pth", "npy")), good), None,
             COLOURS, 0, "a fox"),
        Case("upper-case", (("PNG", encode(COLOURS)), ("TXT", b"a fox")), None, COLOURS, 0, "a fox"),
        Case("several-dots", (("seg.png", encode(GREY)), picture, good), None, COLOURS, 0, "a fox"),
        Case("twice", (picture, good, ("png", encode(GREY)), ("txt", b"a hare")), None, COLOURS, 0, "a fox"),
        Case("by-preference", (picture, ("jpg", jpeg(GREY)), good), None, rgb(GREY), 2, "a fox"),
        Case("text-first", (good, picture), None, COLOURS, 0, "a fox"),
    ]  # fmt: skip


def json_captions() -> list[Case]:
    def good(name: str, data: bytes, caption: str = "a fox") -> Case:
        return text(f"json-{name}", data, caption, "json")

    def bad(name: str, data: bytes, cause: str) -> Case:
        return bad_text(f"json-{name}", data, cause, "json")

    return [
        good("string", b'{"c": " a fox "}'),
        good("escaped", b'{"c": "\\ud83e\\udd8a"}', "\U0001f98a"),
        good("list", b'{"c": ["a fox"]}'),
        good("list-some-empty", b'{"c": ["", "a fox", " "]}'),
        good("bom", b'\xef\xbb\xbf{"c": "a fox"}'),
        good("utf16", '{"c": "a fox"}'.encode("utf-16")),
        good("nan-elsewhere", b'{"p": NaN, "c": "a fox"}'),
        bad("half-surrogate", b'{"c": "\\ud800 fox"}', "broken_caption"),
        bad("zero", b'{"c": "a\\u0000fox"}', "broken_caption"),
        bad("number-in-list", b'{"c": ["a fox", 3]}', "missing_caption"),
        bad("null-in-list", b'{"c": ["a fox", null]}', "missing_caption"),
        bad("nan", b'{"c": NaN}', "missing_caption"),
        bad("null", b'{"c": null}', "missing_caption"),
        bad("object", b'{"c": {"en": "a fox"}}', "missing_caption"),
        bad("empty-list", b'{"c": []}', "missing_caption"),
        bad("no-field", b'{"d": "a fox"}', "missing_caption"),
        bad("empty", b'{"c": ""}', "empty_caption"),
        bad("nothing", b"", "broken_json"),
        bad("cut", b'{"c": "a fox', "broken_json"),
        bad("list-at-top", b'["a fox"]', "broken_json"),
        bad("string-at-top", b'"a fox"', "broken_json"),
        bad("number-at-top", b"1", "broken_json"),
        bad("deep", b'{"c": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "broken_json"),
        bad("deep-objects", b'{"c":' * 100_000, "broken_json"),
        bad("endless-number", b'{"c": ' + b"1" * 10_000 + b"}", "broken_json"),
        bad("latin1", '{"c": "\u00e4rger"}'.encode("latin-1"), "broken_json"),
        bad("lines", b'{"c": "a fox"}\n{"c": "a hare"}', "broken_json"),
        bad("html", b"<html>", "broken_json"),
    ]


def write_cases(path: Path, cases: list[Case]) -> Path:
    with tarfile.open(path, "w") as tar:
        for case in cases:
            for extension, data in case.members:
                add(tar, f"{case.name}.{extension}", data)
    return path


def tokens_of(caption: str) -> list[int]:
    digest = hashlib.blake2b(caption.encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype=np.int32).astype(np.int64).tolist()


def tokenize(texts: list[str]) -> torch.Tensor:
    """Tells which caption came."""
    return torch.tensor([tokens_of(text) for text in texts])


@dataclass(frozen=True)
class Outcome:
    """Of one sample: ``cause`` and ``detail``, or ``pixels`` (32, 32, 3) and ``tokens``."""

    cause: str | None
    detail: str = ""
    pixels: np.ndarray | None = None
    tokens: tuple[int, ...] = ()


def config(folder: Path, train: object, **options) -> DataConfig:
    defaults = {"workers": 0, "shuffle": False, "augment": "none", "max_bad_fraction": 1.0}
    return DataConfig(**{"train": train, "cache_dir": str(folder / "cache"), **defaults, **options})


def train_once(cfg: DataConfig, samples: int, good: int, tokenizer=tokenize):
    """(what became of each position, the loader) of one batch of the good ones of an epoch."""
    dataset = build_train_dataset(cfg, "clip", SETTINGS, tokenizer, 0)
    assert dataset.order.epoch_samples == samples
    loader = build_train_loader(cfg, dataset, good)
    batches = iter(loader)
    batch = next(batches)
    assert isinstance(batch, Batch)
    skipped = {
        item.position: item for item in loader.take_skipped() if item.position is not None and item.position < samples
    }
    outcomes = {at: Outcome(item.cause, item.detail) for at, item in skipped.items()}
    left = [position for position in range(samples) if position not in skipped]
    assert len(left) == good, f"{len(left)} of {samples} are used, {good} should be"
    for row, position in enumerate(left):
        outcomes[position] = Outcome(None, "", pixels_of(batch.a[row]), tuple(batch.b[row].tolist()))
    loader.close()
    return [outcomes[position] for position in range(samples)], loader


def evaluate_once(cfg: DataConfig, train: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for task in build_eval_loader(cfg, train, SETTINGS, tokenize, 16):
        size = len(task.offsets) + len(task.skipped)
        rows = {offset: row for row, offset in enumerate(task.offsets)}
        bad = iter(task.skipped)
        for offset in range(size):
            if offset in rows:
                row = rows[offset]
                outcomes.append(Outcome(None, "", pixels_of(task.a[row]), tuple(task.b[row].tolist())))
            else:
                item = next(bad)
                outcomes.append(Outcome(item.cause, item.detail))
    return outcomes


def pixels_of(row: torch.Tensor) -> np.ndarray:
    return row.permute(1, 2, 0).numpy().copy()
