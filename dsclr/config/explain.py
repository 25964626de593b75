"""What is wrong with a configuration, in the words of the user's own keys."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from dsclr.config.sections import DsclrConfig


class ConfigError(ValueError):
    """Something in the configuration cannot work; the message says what, where and how to fix it."""


def did_you_mean(key: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Names a section accepts, found by walking the pydantic models along an error's location."""
    model: type[BaseModel] = DsclrConfig
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:
            return []
        inner = [a for a in _unwrap(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _unwrap(annotation: Any) -> tuple[Any, ...]:
    """The types that a union or a list is made of, also one within the other."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return tuple(inner for part in typing.get_args(annotation) for inner in _unwrap(part))
    return (annotation,)


def explain(error: ValidationError, section: dict[str, Any], source: str) -> str:
    complaints: dict[str, list[str]] = {}
    reached: dict[str, int] = {}
    for problem in error.errors(include_url=False, include_context=False):
        location = problem["loc"]
        if problem["type"] == "extra_forbidden":
            # Without the names of a union's branches, such as list[SourceConfig].
            location = tuple(part for part in location if "[" not in str(part))
            names = _fields_at(location[:-1])
            key = f"unknown key {_dotted(location)}{did_you_mean(str(location[-1]), names)}"
            complaints[f"{key} Accepted: {', '.join(sorted(names))}"] = []
            continue
        given: Any = section
        depth = 0
        # Past what the user wrote, a location only names the branches of a union.
        for part in location:
            if not ((isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int))):
                break
            given = given[part]  # type: ignore[index]
            depth += 1
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "value_error":
            complaints.setdefault(_dotted(location), []).append(message)
        else:
            message = message[0].lower() + message[1:]
            if problem["type"] == "model_type":
                message = f"an object with {', '.join(sorted(_fields_at(location)))} is expected"
            where = f"{_dotted(location[:depth])} = {given!r}"
            # Of the branches of a union only the one that came furthest fits what the user meant.
            if len(location) > reached.setdefault(where, len(location)):
                reached[where] = len(location)
                complaints[where] = []
                message = f"{location[-1]}: {message}"
            if len(location) == reached[where]:
                complaints.setdefault(where, []).append(message)
    lines = [": ".join([where, " or ".join(messages)]) if messages else where for where, messages in complaints.items()]
    return f"{source}: " + "; ".join(lines)


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(["dsclr", *map(str, location)])
