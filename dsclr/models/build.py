"""Build the model of a run."""

from __future__ import annotations

import logging
import math
from typing import Any

import open_clip
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsclr.config import ConfigError, ModelConfig
from dsclr.models.contrastive import ContrastiveModel
from dsclr.models.head import projection_head
from dsclr.models.lora import apply_lora
from dsclr.models.resolve import ImageSettings, ModelSource, quiet_open_clip, resolve_model
from dsclr.models.towers import TOWERS, open_clip_model, tower_modules, tower_parameters

logger = logging.getLogger(__name__)


def build_model(cfg: ModelConfig, objective: str) -> ContrastiveModel:
    """The model with its weights, adapters, heads and frozen parts, in fp32 on the CPU and in training mode.

    Trainable are the towers that are not locked (under LoRA: their adapters), the heads and, if learnable,
    logit_scale. Nothing else is: not SigLIP's logit_bias, which InfoNCE cancels, nor CoCa's decoder.

    Args:
        cfg: the ``dsclr.model`` section.
        objective: "clip" or "simclr"; the latter never runs the text tower.

    Raises:
        ConfigError: unknown model or tag, missing or unfitting weights, failed download, adapters that fit nothing.
    """
    source = resolve_model(cfg)
    clip = create_clip(source, cfg)
    settings = ImageSettings.from_preprocess(open_clip.get_model_preprocess_cfg(clip))
    if cfg.lora is not None:
        clip = apply_lora(clip, cfg.lora)
    image_head: nn.Module | None = None
    text_head: nn.Module | None = None
    if cfg.projection is not None:
        embed_dim = int(source.model_cfg["embed_dim"])
        image_head = projection_head(embed_dim, cfg.projection)
        text_head = projection_head(embed_dim, cfg.projection) if objective == "clip" else None
    model = ContrastiveModel(clip, objective, settings, image_head, text_head, source.model_cfg)
    _freeze(model, cfg)
    _set_logit_scale(model, cfg)
    _warn_of_batch_norm(model)
    return model.train()


def create_clip(source: ModelSource, cfg: ModelConfig) -> nn.Module:
    """The open_clip model with its weights; logit_scale (and SigLIP's logit_bias) have one element.

    Raises:
        ConfigError: weights that do not fit, or a tower that cannot do patch_dropout.
    """
    try:
        with quiet_open_clip():
            clip = open_clip.create_model(
                source.name,
                load_weights=False,
                pretrained_text=False,
                force_patch_dropout=cfg.patch_dropout,
                force_preprocess_cfg=source.preprocess,
                cache_dir=cfg.cache_dir,
                # DeepSpeed cannot flatten a parameter without dimensions.
                nonscalar_logit_scale=True,
            )
    except Exception as error:
        raise ConfigError(f"dsclr.model: open_clip cannot build {cfg.name}: {error}") from error
    if cfg.patch_dropout and not _drops_patches(clip.visual):
        raise ConfigError(
            f"dsclr.model.patch_dropout = {cfg.patch_dropout}, but the image tower of {cfg.name} "
            f"({type(clip.visual).__name__}) has no patches to drop: set it to null"
        )
    if source.weights is not None:
        try:
            with quiet_open_clip():
                open_clip.load_checkpoint(clip, str(source.weights))
        except Exception as error:
            raise ConfigError(f"the weights {source.weights} do not fit {cfg.name}: {error}") from error
    return clip


def _drops_patches(visual: Any) -> bool:
    return any("PatchDropout" in type(module).__name__ for module in visual.modules())


def _freeze(model: ContrastiveModel, cfg: ModelConfig) -> None:
    base = model.open_clip_model
    towers = {id(p) for tower in TOWERS for p in tower_parameters(base, tower).values()}
    for parameter in base.parameters():
        if id(parameter) not in towers:
            parameter.requires_grad_(False)
    locked = {"image": cfg.lock_image, "text": cfg.lock_text or model.objective == "simclr"}
    for tower in TOWERS:
        if locked[tower]:
            for parameter in tower_parameters(base, tower).values():
                parameter.requires_grad_(False)


def _set_logit_scale(model: ContrastiveModel, cfg: ModelConfig) -> None:
    scale = model.logit_scale
    if cfg.logit_scale.init is not None:
        with torch.no_grad():
            scale.fill_(math.log(cfg.logit_scale.init))
    scale.requires_grad_(cfg.logit_scale.learnable)


def _warn_of_batch_norm(model: ContrastiveModel) -> None:
    for tower in TOWERS:
        modules = [m for part in tower_modules(open_clip_model(model.clip), tower) for m in part.modules()]
        if any(isinstance(m, _BatchNorm) and any(p.requires_grad for p in m.parameters()) for m in modules):
            logger.warning(
                "the %s tower normalises over the micro-batch (batch norm): unlike with other towers, results "
                "depend on train_micro_batch_size_per_gpu",
                tower,
            )
