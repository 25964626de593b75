"""Where the two towers live in open_clip's model classes.

``CLIP`` keeps its text tower's parts on the model itself, ``CustomTextCLIP`` and ``CoCa`` under ``.text``.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

Tower = Literal["image", "text"]
TOWERS: tuple[Tower, Tower] = ("image", "text")

_CLIP_TEXT = ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection")


def open_clip_model(model: nn.Module) -> nn.Module:
    """The open_clip model inside a PeftModel, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def tower_parts(model: nn.Module, tower: Tower) -> dict[str, nn.Module | nn.Parameter]:
    """Name -> module or parameter, relative to the open_clip model."""
    base = open_clip_model(model)
    names: tuple[str, ...] = ("visual",)
    if tower == "text":
        names = ("text",) if hasattr(base, "text") else _CLIP_TEXT
    return {name: part for name in names if (part := getattr(base, name, None)) is not None}


def tower_modules(model: nn.Module, tower: Tower) -> list[nn.Module]:
    """The tower's top-level modules (parameters that stand alone are left out)."""
    return [part for part in tower_parts(model, tower).values() if isinstance(part, nn.Module)]


def tower_parameters(model: nn.Module, tower: Tower) -> dict[str, nn.Parameter]:
    """Name relative to the open_clip model -> parameter."""
    found: dict[str, nn.Parameter] = {}
    for name, part in tower_parts(model, tower).items():
        found.update({name: part} if isinstance(part, nn.Parameter) else part.named_parameters(prefix=name))
    return found


def is_trainable(model: nn.Module, tower: Tower) -> bool:
    return any(parameter.requires_grad for parameter in tower_parameters(model, tower).values())


# Relative to the open_clip model: open_clip's own transformers, timm's vision transformers, and Hugging Face's
# encoders (BERT-like, T5, M2M100).
_BLOCK_LISTS = {
    "image": ("visual.transformer.resblocks", "visual.trunk.blocks"),
    "text": (
        "transformer.resblocks",
        "text.transformer.resblocks",
        "text.transformer.encoder.layer",
        "text.transformer.block",
        "text.transformer.layers",
    ),
}


def tower_blocks(model: nn.Module, tower: Tower) -> tuple[str, list[nn.Module]] | None:
    """Name of the list that holds the tower's transformer blocks, and the blocks; None if there are none.

    Convolutional and hierarchical towers (ModifiedResNet, ConvNeXt, Swin, FastViT) have no such list.
    """
    base = open_clip_model(model)
    for name in _BLOCK_LISTS[tower]:
        found: object = base
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, (nn.ModuleList, nn.Sequential)) and len(found):
            return name, list(found)
    return None
