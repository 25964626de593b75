"""The trained weights of a run: adapters under LoRA, otherwise the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsclr.config import ConfigError
from dsclr.models.adapters import (
    ADAPTER,
    check_tensors,
    load_adapter,
    load_extras,
    merge_adapters,
    read_tensors,
    save_adapter,
    save_extras,
)
from dsclr.models.contrastive import ContrastiveModel

MODEL = "open_clip_model.safetensors"
MODEL_CONFIG = "open_clip_config.json"


def save_trained(model: ContrastiveModel, folder: str | Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """:func:`dsclr.models.save_adapter` for a model with adapters, else :func:`save_model`."""
    if isinstance(model.clip, peft.PeftModel):
        save_adapter(model, folder, tensors)
    else:
        save_model(model, folder, tensors)


def load_trained(model: ContrastiveModel, folder: str | Path) -> None:
    """Read a folder of :func:`save_trained` into a model built from the same ``dsclr.model`` section.

    Raises:
        ConfigError: missing or damaged files, or weights that do not fit.
    """
    folder = Path(folder)
    if (folder / ADAPTER).is_file():
        load_adapter(model, folder)
        return
    if isinstance(model.clip, peft.PeftModel):
        raise ConfigError(f"{folder} holds a whole model: build it with dsclr.model.lora = null")
    tensors = read_tensors(folder / MODEL)
    check_tensors(tensors, model.clip.state_dict(), folder / MODEL)
    model.clip.load_state_dict(tensors)
    load_extras(model, folder)


def save_model(
    model: ContrastiveModel,
    folder: str | Path,
    tensors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a stock open_clip model, adapters merged: ``open_clip.create_model("local-dir:FOLDER")`` loads it.

    Projection heads, which open_clip does not know, go beside it as ``extras.safetensors``.

    Args:
        folder: created if need be.
        tensors: parameter name of ``model`` -> value to save in its place, such as the optimizer's fp32 one.
        dtype: of the floating-point weights in the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = merge_adapters(model, tensors).state_dict()
    plain = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous().clone() for name, t in state.items()}
    save_file({name: t.cpu() for name, t in plain.items()}, folder / MODEL, metadata={"format": "pt"})
    settings = asdict(model.settings)
    preprocess = {"size": settings.pop("image_size"), "mode": "RGB", **settings}
    config = {"model_cfg": model.model_cfg, "preprocess_cfg": preprocess}
    (folder / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_extras(model, folder, tensors)
