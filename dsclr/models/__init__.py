"""Open_clip towers as one contrastive model: building, LoRA, activation checkpointing, saving."""

from dsclr.models.adapters import load_adapter, merge_adapters, save_adapter
from dsclr.models.attention import SplitAttention, SplitCustomAttention, fuse_attention, split_attention
from dsclr.models.build import build_model
from dsclr.models.checkpointing import disable_activation_checkpointing, enable_activation_checkpointing
from dsclr.models.contrastive import ContrastiveModel
from dsclr.models.lora import apply_lora
from dsclr.models.resolve import ImageSettings, check_model, get_tokenizer, image_settings
from dsclr.models.saving import load_trained, save_model, save_trained

__all__ = [
    "ContrastiveModel",
    "ImageSettings",
    "SplitAttention",
    "SplitCustomAttention",
    "apply_lora",
    "build_model",
    "check_model",
    "disable_activation_checkpointing",
    "enable_activation_checkpointing",
    "fuse_attention",
    "get_tokenizer",
    "image_settings",
    "load_adapter",
    "load_trained",
    "merge_adapters",
    "save_adapter",
    "save_model",
    "save_trained",
    "split_attention",
]
