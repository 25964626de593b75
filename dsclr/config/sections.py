"""Every key of the ``"dsclr"`` section with its default and what it may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dsclr.units import parse_bytes

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
    keep_last: int = Field(2, ge=1, description="Checkpoints kept; besides, the newest that a finite step came after.")
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
