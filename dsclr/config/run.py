"""A run: DeepSpeed's JSON, read, overridden and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from dsclr.config.deepspeed_keys import check_deepspeed_keys
from dsclr.config.explain import ConfigError, explain
from dsclr.config.sections import DsclrConfig


class Config:
    """A resolved run: ``raw`` is the whole JSON (for DeepSpeed), ``dsclr`` our validated section.

    Attributes:
        raw: the JSON as a dict, batch keys filled in by :meth:`with_world_size`.
        dsclr: our section.
        source: the file it came from, for messages.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config") -> None:
        """Validate ``raw``. Raises ConfigError."""
        self.source = source
        # null at the top level is an absent key: so --set can switch a section of a file off.
        self.raw = raw = {key: value for key, value in raw.items() if value is not None or key == "dsclr"}
        check_deepspeed_keys(raw, source)
        section = raw.get("dsclr", {})
        if not isinstance(section, dict):
            raise ConfigError(f'{source}: "dsclr" is {section!r}, an object is expected')
        try:
            self.dsclr = DsclrConfig.model_validate({"run": {}, **section})
        except ValidationError as error:
            raise ConfigError(explain(error, section, source)) from None

    @property
    def train_batch_size(self) -> int:
        return int(self.raw["train_batch_size"])

    @property
    def micro_batch_size(self) -> int:
        return int(self.raw["train_micro_batch_size_per_gpu"])

    @property
    def chunks(self) -> int:
        """Micro-batches a rank runs per optimizer step."""
        return int(self.raw["gradient_accumulation_steps"])

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        names: tuple[Literal["bf16"], Literal["fp16"]] = ("bf16", "fp16")
        for name in names:
            if self.raw.get(name, {}).get("enabled"):
                return name
        return "fp32"

    @property
    def zero_stage(self) -> int:
        return int(self.raw.get("zero_optimization", {}).get("stage", 0))

    def with_world_size(self, world_size: int) -> Config:
        """The same run with the three batch keys filled in for ``world_size`` ranks and cross-checked.

        ``train_batch_size`` is the contrastive batch; the micro-batch is a memory knob and
        ``gradient_accumulation_steps`` follows from both.

        Raises:
            ConfigError: a batch that does not divide, or a k that can never be met.
        """
        raw = dict(self.raw)
        total = _positive_int(raw, "train_batch_size", self.source)
        if total is None:
            raise ConfigError(f"{self.source}: train_batch_size (the contrastive batch, over all ranks) is missing")
        if total % world_size:
            raise ConfigError(
                f"train_batch_size = {total} does not divide over {world_size} ranks: "
                f"use {_nearest_multiples(total, world_size)}"
            )
        per_rank = total // world_size
        micro = _positive_int(raw, "train_micro_batch_size_per_gpu", self.source)
        micro = per_rank if micro is None else micro
        if per_rank % micro:
            fits = [d for d in range(1, per_rank + 1) if per_rank % d == 0]
            below = max((d for d in fits if d < micro), default=None)
            above = min((d for d in fits if d > micro), default=None)
            choices = " or ".join(str(c) for c in (below, above) if c is not None)
            raise ConfigError(
                f"train_batch_size = {total} is not divisible into micro-batches: {per_rank} rows a rank "
                f"({world_size} ranks), train_micro_batch_size_per_gpu = {micro}. Use a micro-batch of {choices}, "
                f"or a train_batch_size of {_nearest_multiples(total, micro * world_size)}"
            )
        chunks = per_rank // micro
        given = _positive_int(raw, "gradient_accumulation_steps", self.source)
        if given is not None and given != chunks:
            raise ConfigError(
                f"gradient_accumulation_steps = {given}, but train_batch_size = {total} in micro-batches of {micro} "
                f"over {world_size} ranks makes {chunks}: leave gradient_accumulation_steps out, it is computed"
            )
        raw.update(train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=chunks)
        config = Config(raw, self.source)
        config._check_k(world_size)
        config._check_bank(world_size)
        return config

    def _check_k(self, world_size: int) -> None:
        k = self.dsclr.loss.k
        if self.dsclr.loss.name != "topk" or k == "all":
            return
        rows = self.train_batch_size
        where = f"N = {rows}"
        if world_size > 1 and self.dsclr.negatives.across_ranks == "off":
            rows //= world_size
            where = f"N = {rows} rows a rank, negatives.across_ranks is off"
        valid = rows - 1 if self.dsclr.objective == "clip" else 2 * rows - 2
        bank = self.dsclr.negatives.bank
        if bank is not None:
            valid += bank.size if self.dsclr.objective == "clip" else 2 * bank.size
            where += f", memory bank of {bank.size}"
        if k > valid:
            more = ", set dsclr.negatives.across_ranks to gather" if rows != self.train_batch_size else ""
            raise ConfigError(
                f"dsclr.loss.k = {k}, but only {valid} valid negatives exist ({where}): "
                f"lower k or raise train_batch_size{more}"
            )

    def _check_bank(self, world_size: int) -> None:
        bank, rows = self.dsclr.negatives.bank, self.train_batch_size
        if bank is not None and bank.sharded and world_size > 1 and bank.size % rows:
            raise ConfigError(
                f"dsclr.negatives.bank.size = {bank.size}: a sharded bank holds whole batches of train_batch_size = "
                f"{rows} rows: use {_nearest_multiples(bank.size, rows)}"
            )

    def resolved(self) -> dict[str, Any]:
        """The whole configuration with every default spelled out, as plain JSON values."""
        return {**self.raw, "dsclr": self.dsclr.model_dump(mode="json")}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a JSON configuration and apply ``path=value`` overrides.

    Args:
        path: a DeepSpeed JSON with a ``"dsclr"`` section.
        overrides: such as ``"dsclr.loss.k=128"``; the value is JSON, or else a plain string.

    Raises:
        ConfigError: unreadable file, bad JSON, duplicate or unknown keys, values out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: a JSON file is expected") from None
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a JSON object is expected, found {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    return Config(raw, str(path))


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, found, value_text = override.partition("=")
    parts = key.split(".")
    if not found or not all(parts):
        raise ConfigError(f"--set {override}: expected PATH=VALUE, for example --set dsclr.loss.k=128")
    try:
        value = json.loads(value_text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError:
        value = value_text
    node = raw
    for depth, part in enumerate(parts[:-1]):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {'.'.join(parts[: depth + 1])} is {child!r}, not a section")
        node = child
    node[parts[-1]] = value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"key {repeated[0]!r} stands twice in the same object")
    return dict(pairs)


def _positive_int(raw: dict[str, Any], key: str, source: str) -> int | None:
    value = raw.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{source}: {key} = {value!r}, a positive integer is expected")
    return value


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
