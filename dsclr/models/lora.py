"""LoRA adapters (Hu et al. 2021) on the transformer blocks of both towers, through peft."""

from __future__ import annotations

import re

import peft
from torch import nn

from dsclr.config import ConfigError, LoraConfig
from dsclr.models.attention import split_attention
from dsclr.models.towers import TOWERS, Tower, tower_blocks, tower_modules

# Module names inside a block: open_clip (split attention), timm, Hugging Face (BERT-like, T5, M2M100).
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("attn.q_proj", "attention.self.query", "layer.0.SelfAttention.q", "self_attn.q_proj"),
    "k": ("attn.k_proj", "attention.self.key", "layer.0.SelfAttention.k", "self_attn.k_proj"),
    "v": ("attn.v_proj", "attention.self.value", "layer.0.SelfAttention.v", "self_attn.v_proj"),
    "out": ("attn.out_proj", "attn.proj", "attention.output.dense", "layer.0.SelfAttention.o", "self_attn.out_proj"),
    "mlp": (
        *("mlp.c_fc", "mlp.c_proj"),
        *("mlp.fc1", "mlp.fc2", "mlp.fc1_g", "mlp.fc1_x", "mlp.w0", "mlp.w1", "mlp.w2"),
        *("intermediate.dense", "output.dense"),
        *(f"layer.1.DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1", "wo")),
        *("fc1", "fc2"),
    ),
}
# timm's q, k and v in one Linear.
_FUSED = "attn.qkv"


def apply_lora(model: nn.Module, cfg: LoraConfig) -> peft.PeftModel:
    """Put adapters on an open_clip model and freeze everything else, logit_scale included.

    open_clip's own attention is split into separate projections first, in place. ``cfg.targets`` name the query,
    key, value and output projections and both Linears of the MLP of every block that ``cfg.layers`` selects.

    Args:
        model: CLIP, CustomTextCLIP or CoCa.

    Returns:
        A PeftModel around the same model. Its configuration names exactly the adapted modules (a regular
        expression), so that ``peft.PeftModel.from_pretrained`` finds them in a model with split attention.

    Raises:
        ConfigError: a tower without transformer blocks, a block number or a target that does not exist.
    """
    try:
        split_attention(model)
    except NotImplementedError as error:
        raise ConfigError(f"dsclr.model.lora: {error}") from None
    patterns = [_tower_pattern(model, tower, cfg) for tower in TOWERS if tower in cfg.towers]
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules="|".join(patterns), bias="none"
        ),
    )


def _tower_pattern(model: nn.Module, tower: Tower, cfg: LoraConfig) -> str:
    """A regular expression for the full names of the tower's adapted modules.

    Anchored, because peft would match a list of names by their ends and CLIP's ``transformer.resblocks.0...``
    (text) is the end of ``visual.transformer.resblocks.0...`` (image).
    """
    found = tower_blocks(model, tower)
    if found is None:
        kinds = ", ".join(type(getattr(module, "trunk", module)).__name__ for module in tower_modules(model, tower))
        raise ConfigError(
            f"dsclr.model.lora.towers: the {tower} tower ({kinds}) has no transformer blocks to adapt: leave "
            f"{tower!r} out of dsclr.model.lora.towers, set dsclr.model.lora to null or choose a ViT model"
        )
    prefix, blocks = found
    numbers = _block_numbers(cfg.layers, len(blocks), tower)
    names = _names_in_block(blocks[numbers[0]], cfg, tower, f"{prefix}.{numbers[0]}")
    choices = ("|".join(map(re.escape, names)), "|".join(map(str, numbers)))
    return rf"{re.escape(prefix)}\.(?:{choices[1]})\.(?:{choices[0]})"


def _block_numbers(layers: list[int] | None, count: int, tower: Tower) -> list[int]:
    if layers is None:
        return list(range(count))
    wrong = [number for number in layers if not -count <= number < count]
    if wrong:
        raise ConfigError(
            f"dsclr.model.lora.layers contains {wrong[0]}, but the {tower} tower has {count} blocks: "
            f"0 to {count - 1}, or {-count} to -1"
        )
    if not layers:
        raise ConfigError("dsclr.model.lora.layers is empty: name blocks, or use null for all of them")
    return sorted({number % count for number in layers})


def _names_in_block(block: nn.Module, cfg: LoraConfig, tower: Tower, where: str) -> list[str]:
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    chosen: list[str] = []
    qkv = [target for target in ("q", "k", "v") if target in cfg.targets]
    if _FUSED in linears and qkv:
        if len(qkv) < 3:
            raise ConfigError(
                f"dsclr.model.lora.targets = {cfg.targets}: the {tower} tower keeps q, k and v in one Linear "
                f"({where}.{_FUSED}): name all three or none"
            )
        if getattr(block.get_submodule("attn"), "q_bias", None) is not None:
            # EVA01 and EVA02-E read qkv.weight and never call the Linear.
            raise ConfigError(
                f"dsclr.model.lora.targets = {cfg.targets}: the {tower} tower bypasses {where}.{_FUSED}, so an "
                'adapter there would do nothing: use ["out", "mlp"]'
            )
        chosen.append(_FUSED)
    for target in cfg.targets:
        names = [name for name in _NAMES[target] if name in linears]
        if not names and not (target in qkv and _FUSED in linears):
            raise ConfigError(
                f"dsclr.model.lora.targets: {target!r} matches nothing in the {tower} tower; looked for "
                f"{', '.join(_NAMES[target])} in {where}, which has {', '.join(linears)}"
            )
        chosen.extend(names)
    return chosen
