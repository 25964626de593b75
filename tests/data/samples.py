"""Small shards for tests."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from dsclr.models import ImageSettings

SETTINGS = ImageSettings((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", "shortest")


def picture(number: int, size: int = 40) -> bytes:
    rng = np.random.default_rng(number)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shard(path: Path, numbers: range | list[int], broken: tuple[int, ...] = ()) -> Path:
    """A shard of image, txt, json and cls members; the images of ``broken`` are no images."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            add(tar, f"{number:06d}.png", b"broken" if number in broken else picture(number))
            add(tar, f"{number:06d}.txt", f"picture number {number}".encode())
            # of several captions the number at the end tells which: the first is the number itself
            captions = [f"one {number}", f"two {number + 1000}", f"three {number + 2000}"]
            add(tar, f"{number:06d}.json", json.dumps({"number": number, "captions": captions}).encode())
            add(tar, f"{number:06d}.cls", str(number % 3).encode())
    return path


def tokenize(texts: list[str]):
    """Stands in for a tokenizer: the numbers at the end of the captions."""
    import torch

    return torch.tensor([[int(text.split()[-1])] * 4 for text in texts])
