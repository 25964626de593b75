"""Which texts are captions, and which only stand for a missing one."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from typing import Any

from dsclr.config import ConfigError
from dsclr.data.causes import BadSample
from dsclr.data.decode import check_text, is_blank

# What pandas makes of a missing value when a column is turned into text.
MISSING = frozenset({"nan", "NaN", "None", "<NA>"})


def is_missing(value: Any) -> bool:
    """Whether a value of a table stands for nothing: None, NaN, a text that shows nothing or the text of either."""
    if isinstance(value, str):
        # Zero bytes show nothing either, but are a fault and not a gap.
        return value.strip() in MISSING or (is_blank(value) and "\0" not in value)
    return value is None or value != value


def present_captions(values: Iterable[Any]) -> list[str]:
    """The captions among values that are texts or missing, without the blanks around them.

    Raises:
        BadSample: broken_caption, where a value is neither, or half a surrogate pair.
    """
    captions = [value for value in values if not is_missing(value)]
    for caption in captions:
        if not isinstance(caption, str):
            raise BadSample("broken_caption", f"{caption!r} is no text")
        check_text(caption, repr(caption))
    return [caption.strip() for caption in captions]


def split_list(cell: Any) -> list[Any]:
    """The captions of one cell: a list as it is, a text that is a list in JSON or Python as a list, else [cell]."""
    if isinstance(cell, list | tuple):
        return list(cell)
    if isinstance(cell, str) and cell.lstrip().startswith("[") and cell.rstrip().endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(cell)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(found, list) and all(one is None or isinstance(one, str) for one in found):
                return found
    return [cell]


def check_template(template: str) -> None:
    """Raises ConfigError unless the class name has exactly one place."""
    if template.count("{}") != 1:
        raise ConfigError(f'--template {template!r}: {{}} must stand once, for the class, as in "a photo of a {{}}"')


def class_caption(template: str, name: str) -> str:
    """The template with a class name as one says it: folders and data sets often have underscores for blanks."""
    return template.replace("{}", " ".join(name.replace("_", " ").split()))
