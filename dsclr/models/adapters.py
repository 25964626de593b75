"""Save, load and merge LoRA adapters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsclr.config import ConfigError
from dsclr.models.attention import fuse_attention, split_attention
from dsclr.models.checkpointing import disable_activation_checkpointing
from dsclr.models.contrastive import ContrastiveModel

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
EXTRAS = "extras.safetensors"


def save_adapter(model: ContrastiveModel, folder: str | Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters in peft's format and what else the run trains as ``extras.safetensors``.

    ``peft.PeftModel.from_pretrained(open_clip_model, folder)`` loads the adapters into an open_clip model whose
    attention is split (:func:`dsclr.models.split_attention`).

    Args:
        model: built with LoRA.
        folder: created if need be.
        tensors: parameter name of ``model`` -> value to save in its place, such as the optimizer's fp32 one.

    Raises:
        ConfigError: the model has no adapters.
    """
    if not isinstance(model.clip, peft.PeftModel):
        raise ConfigError("the model has no LoRA adapters to save")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.clip.state_dict()
    state.update({name.removeprefix("clip."): t for name, t in (tensors or {}).items() if name.startswith("clip.")})
    adapters = peft.get_peft_model_state_dict(model.clip, state_dict=state, save_embedding_layers=False)
    save_file(_plain(adapters), folder / ADAPTER, metadata={"format": "pt"})
    config = copy.copy(model.clip.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_extras(model, folder, tensors)


def load_adapter(model: ContrastiveModel, folder: str | Path) -> None:
    """Read what :func:`save_adapter` wrote. A model without adapters gets those of the folder.

    Raises:
        ConfigError: missing or damaged files, or adapters and heads that do not fit the model.
    """
    folder = Path(folder)
    tensors = read_tensors(folder / ADAPTER)
    if not isinstance(model.clip, peft.PeftModel):
        try:
            config = peft.LoraConfig.from_pretrained(str(folder))
            split_attention(model.clip)
            learnable = model.logit_scale.requires_grad
            model.clip = peft.get_peft_model(model.clip, config)
        except (ValueError, OSError, TypeError) as error:
            raise ConfigError(f"{folder / ADAPTER_CONFIG} does not fit the model: {error}") from error
        model.logit_scale.requires_grad_(learnable)
    expected = peft.get_peft_model_state_dict(model.clip, save_embedding_layers=False)
    check_tensors(tensors, expected, folder / ADAPTER)
    peft.set_peft_model_state_dict(model.clip, tensors)
    load_extras(model, folder)


def merge_adapters(model: ContrastiveModel, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """A stock open_clip model, in fp32 and evaluation mode, with the adapters added to its weights.

    ``model`` is not changed. A bf16 engine has rounded the weights that do not train: for a lossless export,
    build the model anew, :func:`load_adapter` and merge that.

    Args:
        model: with or without adapters.
        tensors: parameter name of ``model`` -> value to use in its place, such as the optimizer's fp32 one.

    Returns:
        CLIP, CustomTextCLIP or CoCa with open_clip's own modules and state-dict keys; without projection heads.
    """
    clip: Any = copy.deepcopy(model.clip).float()
    parameters = dict(clip.named_parameters())
    with torch.no_grad():
        for name, value in (tensors or {}).items():
            if name.startswith("clip."):
                parameters[name.removeprefix("clip.")].copy_(value)
    if isinstance(clip, peft.PeftModel):
        clip = clip.merge_and_unload(safe_merge=True)
    disable_activation_checkpointing(clip)
    fuse_attention(clip)
    return clip.requires_grad_(True).eval()


def save_extras(model: ContrastiveModel, folder: Path, tensors: Mapping[str, Tensor] | None) -> None:
    """logit_scale and the heads, under names that do not depend on peft."""
    values = {key: (tensors or {}).get(name, parameter) for key, (name, parameter) in _extras(model).items()}
    save_file(_plain(values), folder / EXTRAS, metadata={"format": "pt"})


def load_extras(model: ContrastiveModel, folder: Path) -> None:
    """Raises ConfigError: heads that do not fit the model."""
    tensors = read_tensors(folder / EXTRAS)
    parameters = {key: parameter for key, (_, parameter) in _extras(model).items()}
    check_tensors(tensors, parameters, folder / EXTRAS)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])


def _extras(model: ContrastiveModel) -> dict[str, tuple[str, nn.Parameter]]:
    """Key in the file -> name in the model and parameter."""
    scale = model.logit_scale
    found = {}
    for name, parameter in model.named_parameters():
        if parameter is scale:
            found["logit_scale"] = (name, parameter)
        elif not name.startswith("clip."):
            found[name] = (name, parameter)
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises ConfigError: a missing or damaged file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raises ConfigError: other names or shapes than the model's."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    for names, what in ((missing, "lacks"), (unknown, "holds, unknown to the model,")):
        if names:
            raise ConfigError(
                f"{path} {what} {len(names)} tensors, such as {names[0]}: build the model with the dsclr.model section "
                "that it was trained with"
            )
    for name, value in expected.items():
        if tensors[name].shape != value.shape:
            raise ConfigError(
                f"{path}: {name} is {tuple(tensors[name].shape)}, the model's is {tuple(value.shape)}: build the model "
                "with the dsclr.model section that it was trained with"
            )


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host, contiguous, each with its own memory, as safetensors wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
