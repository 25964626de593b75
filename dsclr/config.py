"""The run's configuration: one DeepSpeed JSON whose ``"dsclr"`` section is ours.

DeepSpeed's own keys (batch size, precision, ZeRO, optimizer, scheduler, clipping, activation
checkpointing, TensorBoard) keep their names and their place; everything else lives under ``"dsclr"``.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dsclr.units import parse_bytes


class ConfigError(ValueError):
    """Something in the configuration cannot work; the message says what, where and how to fix it."""


Channel = Annotated[int, Field(ge=0, le=255)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class LoraConfig(Section):
    """LoRA adapters (peft). Absent or null: no adapters, full fine-tuning."""

    rank: int = Field(16, ge=1, description="Rank r of every adapter.")
    alpha: float = Field(32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapters' input.")
    towers: list[Literal["image", "text"]] = Field(["image", "text"], min_length=1)
    targets: list[Literal["q", "k", "v", "out", "mlp"]] = Field(["q", "k", "v", "out", "mlp"], min_length=1)
    layers: list[int] | None = Field(
        None, description="Block numbers that get adapters; negative counts from the last; null: all."
    )


class ProjectionConfig(Section):
    """An MLP on top of the tower's output: Linear, GELU, ..., Linear."""

    out_dim: int = Field(128, ge=1, description="Width of the embedding that the loss sees.")
    hidden_dim: int = Field(512, ge=1)
    layers: int = Field(2, ge=1, description="Number of Linear layers.")


class LogitScaleConfig(Section):
    """scale = exp(logit_scale), learnable, clamped to at most ``max`` after every step."""

    init: float | None = Field(None, gt=0, description="Initial multiplicative scale; null: the model's own.")
    max: float = Field(100.0, gt=0)
    learnable: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> LogitScaleConfig:
        if self.init is not None and self.init > self.max:
            raise ValueError(f"init = {self.init} is above max = {self.max}")
        return self


class ModelConfig(Section):
    name: str = Field("ViT-B-32", description="An open_clip model name, hf-hub:..., local-dir:... or a JSON file.")
    pretrained: str | None = Field(None, description="An open_clip tag or a weights file; null: random weights.")
    cache_dir: str | None = Field(None, description="Where downloaded weights are kept.")
    lora: LoraConfig | None = None
    lock_image: bool = Field(False, description="Freeze the image tower.")
    lock_text: bool = Field(False, description="Freeze the text tower.")
    projection: ProjectionConfig | None = None
    logit_scale: LogitScaleConfig = LogitScaleConfig()
    patch_dropout: float | None = Field(None, ge=0, lt=1)

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.lora is not None:
            locked = [t for t, lock in (("image", self.lock_image), ("text", self.lock_text)) if lock]
            clash = [tower for tower in locked if tower in self.lora.towers]
            if clash:
                raise ValueError(
                    f"lock_{clash[0]} freezes the {clash[0]} tower, but lora.towers = {self.lora.towers} adapts it: "
                    f"remove {clash[0]!r} from lora.towers or set lock_{clash[0]} to false"
                )
        return self


class SourceConfig(Section):
    """One part of a mixture."""

    shards: str | list[str] = Field(description="As dsclr.data.train.")
    weight: float = Field(gt=0, description="Its share of the samples, relative to the other sources' weights.")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$", description="In the metrics; null: its number.")


class DataConfig(Section):
    train: str | list[str] | list[SourceConfig] = Field(
        "demo:train",
        description="Shards: a path, URL, glob or brace pattern, an index file, a list of those, or demo:NAME; "
        'or a mixture: [{"shards": ..., "weight": 2, "name": ...}, ...].',
    )
    resampled: bool = Field(False, description="Draw samples with replacement instead of epoch by epoch.")
    allow_pipe: bool = Field(False, description="Whether pipe:COMMAND may run shell commands.")
    caption: str = Field(
        "txt", description="Caption member: an extension, or json:FIELD (a string, or a list to draw from)."
    )
    empty_caption: Literal["skip", "use"] = Field("skip", description="A sample whose captions hold no letter.")
    long_caption: Literal["truncate", "skip"] = Field("truncate", description="More tokens than the model reads.")
    image: str = Field(
        "jpg;jpeg;png;webp;gif;tif;tiff;bmp;avif",
        pattern=r"^[^;]+(;[^;]+)*$",
        description="Image members by extension, first present wins.",
    )
    background: tuple[Channel, Channel, Channel] = Field(
        (255, 255, 255), description="Red, green and blue under transparent pixels."
    )
    truncated_image: Literal["skip", "use"] = Field("skip", description="use: the missing part is grey.")
    max_pixels: int = Field(178_956_970, ge=1, description="Larger images are not decoded.")
    id: str = Field(
        "auto",
        description="What makes two samples the same (never negatives): caption, key, cls, json:FIELD, "
        "or auto (caption for clip, key for simclr).",
    )
    augment: Literal["none", "light", "simclr"] | None = Field(
        None, description="null: light for clip, simclr for simclr."
    )
    crop_scale: tuple[float, float] = Field((0.9, 1.0), description="Area range of the random crop (light).")
    flip: bool = Field(False, description="Random horizontal flip (light).")
    shuffle: bool = True
    shuffle_shards: int = Field(16, ge=1, description="Samples are mixed within windows of this many shards.")
    workers: int | None = Field(None, ge=0, description="Loader processes a rank; null: from the CPU count.")
    prefetch: int = Field(4, ge=1, description="Loader batches prefetched a worker.")
    cache_dir: str | None = Field(None, description="Where remote and compressed shards are kept unpacked.")
    cache_size: int | None = Field(
        None, description='Bytes or a size such as "500GB" that they may take, the least used go; null: no limit.'
    )
    max_bad_fraction: float = Field(0.01, ge=0, le=1, description="Stop when more than this part is unreadable.")

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale = {[low, high]} must satisfy 0 < low <= high <= 1")
        names = self.source_names
        if len(set(names)) < len(names):
            raise ValueError(f"train: sources need different names, these are {', '.join(names)}")
        if self.id not in ("auto", "caption", "key", "cls") and not self.id.startswith("json:"):
            raise ValueError(f"id = {self.id!r}, accepted: auto, caption, key, cls or json:FIELD")
        return self

    @field_validator("cache_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return None if value is None else parse_bytes(value)

    @property
    def sources(self) -> list[SourceConfig] | None:
        """Of a mixture."""
        if isinstance(self.train, list) and self.train and isinstance(self.train[0], SourceConfig):
            return [source for source in self.train if isinstance(source, SourceConfig)]
        return None

    @property
    def source_names(self) -> list[str]:
        """Of the sources of a mixture; empty without one."""
        return [source.name or str(number) for number, source in enumerate(self.sources or [])]


class LossConfig(Section):
    name: str = Field("topk", description="topk, exact, dense, or a dotted path such as my_pkg.losses:MyLoss.")
    k: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        64, description='Hard negatives kept per anchor (topk); "all": the exact loss.'
    )
    block_size: int = Field(1024, ge=1, description="Keys per column block of the scan (topk).")
    tail: Literal["none", "lse"] = Field(
        "none", description="lse: the normaliser sums over all negatives, gradients stay with the k kept (topk)."
    )
    false_negative_margin: float | None = Field(
        None, ge=0, le=2, description="Negatives above the positive's similarity by more than this are left out."
    )
    backend: Literal["auto", "torch", "native"] = Field("auto", description="Of the scan on a CPU (topk).")
    options: dict[str, Any] = Field({}, description="Further keyword arguments for a loss of your own.")


class BankConfig(Section):
    size: int = Field(ge=1, description="Rows of earlier steps kept as further negatives.")
    max_age: int | None = Field(None, ge=1, description="Steps after which a row is no longer used.")
    sharded: bool = Field(False, description="Each rank holds 1/W of it, which visits the others by the ring.")


class NegativesConfig(Section):
    across_ranks: Literal["off", "gather", "ring"] = Field(
        "off", description="Negatives from all ranks: gather holds them all, ring passes them from rank to rank."
    )
    bank: BankConfig | None = Field(None, description="Memory bank; null: none.")

    @model_validator(mode="after")
    def _consistent(self) -> NegativesConfig:
        if self.bank is not None and self.bank.sharded and self.across_ranks == "off":
            raise ValueError(
                'bank.sharded spreads the bank over ranks that see each other\'s rows, but across_ranks is "off": '
                'set across_ranks to "gather" or "ring", or leave bank.sharded out (each rank then has its own bank)'
            )
        return self


class StepConfig(Section):
    """Memory against time; none of it changes the result."""

    retain: Literal["auto"] | int = Field(
        "auto", description='Bytes for graphs kept from the first pass to the second: a size such as "8GB", auto, or 0.'
    )
    host_images: Literal["keep", "spill", "reread"] = Field(
        "keep", description="The batch's images on the host: in memory, in a temporary file, or read a second time."
    )
    spill_dir: str | None = Field(None, description="Folder of that file; null: the system's temporary folder.")

    @field_validator("retain", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return value if value == "auto" else parse_bytes(value)

    @model_validator(mode="after")
    def _consistent(self) -> StepConfig:
        if self.spill_dir is not None and self.host_images != "spill":
            raise ValueError(f'spill_dir is for host_images = "spill", which is {self.host_images!r}')
        return self


class EvalConfig(Section):
    data: str | list[str] | None = Field(None, description="Held-out shards; null: no evaluation while training.")
    every: int | None = Field(None, ge=1, description="Evaluate every so many steps; null: before and after only.")
    batch_size: int = Field(256, ge=1)


class RunConfig(Section):
    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = Field("runs", description="The run folder is <dir>/<name>.")
    seed: int = Field(0, ge=0, lt=2**31)
    deterministic: bool = Field(False, description="Only operations that always give the same bits; may be slower.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps of the run; excludes epochs.")
    epochs: float | None = Field(None, gt=0, description="Passes over the shards; excludes max_steps.")
    log_every: int = Field(1, ge=1)
    checkpoint_every: int | None = Field(None, ge=1, description="Steps between checkpoints; null: at the end only.")
    keep_last: int = Field(2, ge=1, description="Checkpoints kept.")
    max_bad_steps: int = Field(10, ge=1, description="Stop after this many non-finite or skipped steps in a row.")
    timeout_seconds: float = Field(
        1800, gt=0, description="A rank that waits longer for another ends the run; evaluation on rank 0 counts."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of max_steps and epochs")
        return self


class DsclrConfig(Section):
    objective: Literal["clip", "simclr"] = "clip"
    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    negatives: NegativesConfig = NegativesConfig()
    step: StepConfig = StepConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("eval", mode="before")
    @classmethod
    def _no_evaluation(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> DsclrConfig:
        if self.objective == "simclr":
            if self.model.lora is not None and "text" in self.model.lora.towers:
                raise ValueError(
                    'model.lora.towers adapts the text tower, but objective "simclr" never runs it: '
                    'set model.lora.towers to ["image"]'
                )
            if self.model.lock_image:
                raise ValueError('model.lock_image leaves nothing to train under objective "simclr"')
        return self


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
        _check_deepspeed_keys(raw, source)
        section = raw.get("dsclr", {})
        if not isinstance(section, dict):
            raise ConfigError(f'{source}: "dsclr" is {section!r}, an object is expected')
        try:
            self.dsclr = DsclrConfig.model_validate({"run": {}, **section})
        except ValidationError as error:
            raise ConfigError(_explain(error, section, source)) from None

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


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
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


# DeepSpeed ignores a top-level key it does not know, so that a typo would silently change the run.
DEEPSPEED_KEYS = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "disable_allgather",
        "dump_state",
        "elasticity",
        "flops_profiler",
        "fp16",
        "fp32_allreduce",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_predivide_factor",
        "load_universal_checkpoint",
        "memory_breakdown",
        "optimizer",
        "prescale_gradients",
        "progressive_layer_drop",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sparse_gradients",
        "steps_per_print",
        "tensorboard",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
        "wandb",
        "comet",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)


def _check_deepspeed_keys(raw: dict[str, Any], source: str) -> None:
    for key in raw:
        if key != "dsclr" and key not in DEEPSPEED_KEYS:
            ours = f"; {key} belongs under dsclr: dsclr.{key}" if key in DsclrConfig.model_fields else ""
            raise ConfigError(
                f"{source}: unknown key {key!r}{ours or _did_you_mean(key, [*DEEPSPEED_KEYS, 'dsclr'])}. "
                "Top-level keys are DeepSpeed's, everything of dsclr's own stands under \"dsclr\""
            )
    if raw.get("zero_optimization") is not None and not isinstance(raw["zero_optimization"], dict):
        raise ConfigError(f"{source}: zero_optimization = {raw['zero_optimization']!r}, an object is expected")


def _did_you_mean(key: str, names: typing.Iterable[str]) -> str:
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


def _explain(error: ValidationError, section: dict[str, Any], source: str) -> str:
    complaints: dict[str, list[str]] = {}
    reached: dict[str, int] = {}
    for problem in error.errors(include_url=False, include_context=False):
        location = problem["loc"]
        if problem["type"] == "extra_forbidden":
            # Without the names of a union's branches, such as list[SourceConfig].
            location = tuple(part for part in location if "[" not in str(part))
            names = _fields_at(location[:-1])
            key = f"unknown key {_dotted(location)}{_did_you_mean(str(location[-1]), names)}"
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
