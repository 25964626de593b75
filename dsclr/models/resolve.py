"""From ``dsclr.model`` to an open_clip model configuration, preprocessing, weights file and tokenizer."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import parse_model_name
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from torch import Tensor

from dsclr.config import ConfigError, ModelConfig
from dsclr.models.pretrained import find_weights, first_line, hub_model, local_model, read_json, refuse_pretrained

CONFIGS = Path(__file__).parent / "configs"
_OPEN_CLIP_CONFIGS = Path(open_clip.__file__).parent / "model_configs"

_REQUIRED = ("embed_dim", "vision_cfg", "text_cfg")


@dataclass(frozen=True)
class ImageSettings:
    """The model's own preprocessing.

    Attributes:
        image_size: (height, width) in pixels.
        mean, std: per RGB channel, of values in [0, 1].
        interpolation: bicubic, bilinear or random.
        resize_mode: shortest, longest or squash.
    """

    image_size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    resize_mode: str

    @classmethod
    def from_preprocess(cls, preprocess: dict[str, Any]) -> ImageSettings:
        """Args: preprocess: of open_clip, with its key ``size`` (an int or a pair)."""
        size = preprocess["size"]
        height, width = (size, size) if isinstance(size, int) else size
        r, g, b = (float(value) for value in preprocess["mean"])
        sr, sg, sb = (float(value) for value in preprocess["std"])
        return cls(
            (int(height), int(width)),
            (r, g, b),
            (sr, sg, sb),
            str(preprocess["interpolation"]),
            str(preprocess["resize_mode"]),
        )


@dataclass(frozen=True)
class ModelSource:
    """What a ``dsclr.model`` section stands for.

    Attributes:
        name: as open_clip knows it; JSON files are registered.
        model_cfg: open_clip's model configuration (embed_dim, vision_cfg, text_cfg, ...).
        preprocess: open_clip's preprocessing, every key filled in.
        weights: file to load; None: random weights.
    """

    name: str
    model_cfg: dict[str, Any]
    preprocess: dict[str, Any]
    weights: Path | None


def check_model(cfg: ModelConfig) -> None:
    """Whether name, tag and files exist; nothing is built or downloaded.

    Raises:
        ConfigError: unknown model or tag, missing or unreadable file.
    """
    schema, identifier = _parse(cfg.name)
    if schema is None:
        find_weights(cfg, _registered_name(cfg.name), download=False)
    elif schema == "local-dir":
        local_model(cfg, Path(identifier))
    else:
        refuse_pretrained(cfg)


def resolve_model(cfg: ModelConfig, load_weights: bool = True) -> ModelSource:
    """Configuration, preprocessing and weights of a model, downloaded where needed.

    Args:
        load_weights: False: leave ``weights`` None and download no weights (hf-hub: still its configuration).

    Raises:
        ConfigError: unknown model or tag, missing or unreadable file, failed download.
    """
    schema, identifier = _parse(cfg.name)
    preprocess = asdict(PreprocessCfg())
    weights: Path | None = None
    name = cfg.name
    if schema is None:
        name = _registered_name(cfg.name)
        model_cfg = open_clip.get_model_config(name)
        tag, weights = find_weights(cfg, name, download=load_weights)
        preprocess = merge_preprocess_dict(preprocess, tag)
    else:
        if schema == "local-dir":
            config, weights = local_model(cfg, Path(identifier))
        else:
            config, weights = hub_model(cfg, identifier, load_weights)
        model_cfg = config["model_cfg"]
        preprocess = merge_preprocess_dict(preprocess, config.get("preprocess_cfg", {}))
    preprocess["size"] = model_cfg["vision_cfg"].get("image_size", 224)
    return ModelSource(name, model_cfg, preprocess, weights if load_weights else None)


def image_settings(cfg: ModelConfig) -> ImageSettings:
    """The preprocessing that goes with the configured model; its weights are not needed.

    Raises:
        ConfigError: as :func:`resolve_model`.
    """
    return ImageSettings.from_preprocess(resolve_model(cfg, load_weights=False).preprocess)


def get_tokenizer(cfg: ModelConfig) -> Callable[[list[str]], Tensor]:
    """The model's own tokenizer: list of B strings -> (B, context_length) int64.

    Raises:
        ConfigError: unknown model, a tokenizer that cannot be downloaded, or one whose ids exceed the vocabulary.
    """
    source = resolve_model(cfg, load_weights=False)
    try:
        with quiet_open_clip():
            tokenizer = open_clip.get_tokenizer(source.name, cache_dir=cfg.cache_dir)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer of {cfg.name} cannot be loaded ({first_line(error)}): it is downloaded from the Hugging "
            "Face hub; run once with network access (HF_HOME names the cache), then set HF_HUB_OFFLINE=1"
        ) from error
    vocabulary = source.model_cfg["text_cfg"].get("vocab_size", 49408)
    if isinstance(tokenizer, open_clip.SimpleTokenizer) and tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"{cfg.name}: text_cfg.vocab_size = {vocabulary}, but its tokenizer makes ids up to "
            f"{tokenizer.vocab_size - 1}: set vocab_size to {tokenizer.vocab_size} or name an hf_tokenizer_name"
        )
    return tokenizer


@contextmanager
def quiet_open_clip() -> Iterator[None]:
    """Without open_clip's warning that no weights were loaded (we load them, or want none)."""

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("No pretrained weights loaded")

    # open_clip logs through logging.info(), which would install a handler on a root logger that has none.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)
        root.removeHandler(handler)


def _parse(name: str) -> tuple[str | None, str]:
    try:
        return parse_model_name(name)
    except ValueError as error:
        raise ConfigError(f"dsclr.model.name = {name!r}: {error}") from None


def _registered_name(name: str) -> str:
    """The name under which open_clip finds the model; JSON files and our own configurations are added to it."""
    own = CONFIGS / f"{name}.json"
    if own.is_file():
        return _register(own)
    if name.endswith(".json"):
        return _register(Path(name).expanduser())
    known = open_clip.list_models()
    if name.replace("/", "-") in known:
        return name.replace("/", "-")
    names = sorted({*known, *(path.stem for path in CONFIGS.glob("*.json"))})
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower().replace("/", "-"), lower, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(lower[match]) for match in close)}?" if close else ""
    raise ConfigError(
        f"dsclr.model.name = {name!r} is not a model of open_clip{hint} Accepted: {len(names)} names that "
        "open_clip.list_models() prints, hf-hub:ORG/REPO, local-dir:FOLDER, or the path of a model configuration "
        "that ends in .json"
    )


def _register(path: Path) -> str:
    config = read_json(path, "dsclr.model.name")
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        wrapped = "; it looks like an open_clip_config.json: use local-dir:FOLDER" if "model_cfg" in config else ""
        raise ConfigError(f"{path} is not an open_clip model configuration: it lacks {', '.join(missing)}{wrapped}")
    if open_clip.get_model_config(path.stem) != config:
        if path.parent != CONFIGS and any((folder / path.name).is_file() for folder in (CONFIGS, _OPEN_CLIP_CONFIGS)):
            raise ConfigError(f"{path} has the name of another model, {path.stem}: rename the file")
        open_clip.add_model_config(path)
    return path.stem
