"""Metrics as lines of JSON and as TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One JSON object on one line; NaN and infinities become null, which JSON can say."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(clean, allow_nan=False) + "\n")


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will do again, and a last line that was cut off."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append(line)
    write_atomically(path, "".join(line + "\n" for line in kept))


def write_atomically(path: Path, text: str) -> None:
    """The old text or the new one, also after a crash."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def step_of_last_line(path: Path) -> int | None:
    """Of a file of such lines; None if there is none."""
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])["step"] if lines else None


def tensorboard_events(record: Mapping[str, Any], prefix: str) -> list[tuple[str, float, int]]:
    """(tag, value, step) of every finite number, for DeepSpeed's monitor (TensorBoard, W&B, CSV, Comet).

    Names with a slash stay as they are, the others get the prefix.
    """
    step = int(record["step"])
    return [
        (name if "/" in name else f"{prefix}/{name}", float(value), step)
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    ]
