"""Where a model's weights come from: a tag, a file, a folder or the Hugging Face hub."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import open_clip
from open_clip.pretrained import download_pretrained, download_pretrained_from_hf, get_pretrained_cfg

from dsclr.config import ConfigError, ModelConfig

# Of our own models: <name>-<tag>.safetensors.
WEIGHTS = Path(__file__).parent / "weights"

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")


def find_weights(cfg: ModelConfig, name: str, download: bool) -> tuple[dict[str, Any], Path | None]:
    """The weights that ``cfg.pretrained`` names, for a model of open_clip or our own.

    Args:
        name: of the model, as open_clip knows it.
        download: False: of a tag, only check that it exists.

    Returns:
        The preprocessing that the tag prescribes (else empty), and the file (None: none, or not downloaded).

    Raises:
        ConfigError: neither tag nor file, a tag for another activation function, a failed download.
    """
    value = cfg.pretrained
    if value is None:
        return {}, None
    own = WEIGHTS / f"{name}-{value}.safetensors"
    if own.is_file():
        return {}, own
    tag = get_pretrained_cfg(name, value)
    if tag:
        _check_activation(name, value, tag)
        return tag, _download(cfg, value, tag) if download else None
    path = Path(value).expanduser()
    if path.is_file():
        return {}, path
    tags = open_clip.list_pretrained_tags_by_model(name)
    tags += [file.stem.removeprefix(f"{name}-") for file in WEIGHTS.glob(f"{name}-*.safetensors")]
    if path.suffix in _SUFFIXES or os.sep in value:
        raise ConfigError(f"dsclr.model.pretrained: there is no weights file {value}")
    close = difflib.get_close_matches(value, tags, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"dsclr.model.pretrained = {value!r} is neither a weights file nor a tag of {name}{hint} "
        f"Tags: {', '.join(sorted(tags)) or 'none'}"
    )


def _check_activation(name: str, value: str, tag: dict[str, Any]) -> None:
    """Weights trained with QuickGELU give a poor model under GELU, and the other way round, without an error."""
    wanted = bool(tag.get("quick_gelu", False))
    if bool(open_clip.get_model_config(name).get("quick_gelu", False)) == wanted:
        return
    twin = f"{name}-quickgelu" if wanted else name.removesuffix("-quickgelu")
    advice = f"set dsclr.model.name to {twin!r}" if twin in open_clip.list_models() else "choose another tag"
    raise ConfigError(
        f"dsclr.model.pretrained = {value!r} was trained with {'QuickGELU' if wanted else 'GELU'}, "
        f"which {name} does not use: {advice}"
    )


def _download(cfg: ModelConfig, value: str, tag: dict[str, Any]) -> Path:
    try:
        return Path(download_pretrained(tag, cache_dir=cfg.cache_dir))
    except Exception as error:
        raise ConfigError(
            f"the weights {value!r} of {cfg.name} cannot be downloaded: {first_line(error)}. Without network, give a "
            "weights file with --set dsclr.model.pretrained=/path/to/file.safetensors, train from random weights "
            "with --set dsclr.model.pretrained=null, or copy the Hugging Face cache of a machine that has them "
            "(HF_HOME, or dsclr.model.cache_dir) and set HF_HUB_OFFLINE=1"
        ) from error


def refuse_pretrained(cfg: ModelConfig) -> None:
    """Raises ConfigError: ``pretrained`` beside a name that stands for weights already."""
    if cfg.pretrained is not None:
        raise ConfigError(
            f"dsclr.model.pretrained = {cfg.pretrained!r}, but {cfg.name} brings its own weights: set it to null"
        )


def local_model(cfg: ModelConfig, folder: Path) -> tuple[dict[str, Any], Path]:
    """Content of open_clip_config.json and weights file of a folder. Raises ConfigError: one of them is missing."""
    refuse_pretrained(cfg)
    config = read_json(folder / "open_clip_config.json", f"dsclr.model.name = {cfg.name!r}")
    if "model_cfg" not in config:
        raise ConfigError(f"{folder / 'open_clip_config.json'} has no model_cfg")
    files = sorted(
        (path for path in folder.iterdir() if path.suffix in _SUFFIXES),
        key=lambda path: (not path.name.startswith("open_clip"), _SUFFIXES.index(path.suffix), path.name),
    )
    if not files:
        raise ConfigError(f"{cfg.name}: the folder has no weights file ({', '.join(_SUFFIXES)})")
    return config, files[0]


def hub_model(cfg: ModelConfig, repository: str, load_weights: bool) -> tuple[dict[str, Any], Path | None]:
    """The same of a repository of the hub. Raises ConfigError: a failed download, or no open_clip model."""
    refuse_pretrained(cfg)
    try:
        config = download_pretrained_from_hf(repository, filename="open_clip_config.json", cache_dir=cfg.cache_dir)
        weights = download_pretrained_from_hf(repository, cache_dir=cfg.cache_dir) if load_weights else None
    except Exception as error:
        raise ConfigError(
            f"{cfg.name} cannot be downloaded: {first_line(error)}. Without network, name a model of open_clip and "
            "give a weights file with --set dsclr.model.pretrained=/path/to/file.safetensors, or copy the Hugging "
            "Face cache of a machine that has it (HF_HOME, or dsclr.model.cache_dir) and set HF_HUB_OFFLINE=1"
        ) from error
    read = read_json(Path(config), cfg.name)
    if "model_cfg" not in read:
        raise ConfigError(f"{cfg.name} is not an open_clip model: its open_clip_config.json has no model_cfg")
    return read, None if weights is None else Path(weights)


def first_line(error: Exception) -> str:
    """What a library's error says, without the rest of it."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def read_json(path: Path, where: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError, naming ``where`` the path was given."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: {path} holds {type(config).__name__}, a JSON object is expected")
    return config
