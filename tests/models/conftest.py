"""Tiny open_clip models, written as JSON files as a user would."""

from __future__ import annotations

import json

import pytest
import torch

from dsclr.config import ModelConfig
from dsclr.models import build_model

VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 3}
CONFIGS = {
    "clip": {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT},
    "custom": {
        "embed_dim": 16,
        "custom_text": True,
        "vision_cfg": {**VISION, "qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "ls_init_value": 0.1},
        "text_cfg": {**TEXT, "qk_norm": True, "no_causal_mask": True, "pool_type": "last", "proj_bias": True},
    },
    "siglip": {
        "embed_dim": 64,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": "none"},
        "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last", "proj_bias": True},
    },
    "coca": {
        "embed_dim": 16,
        "custom_text": True,
        "vision_cfg": {**VISION, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 12, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1},
    },
    "resnet": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": TEXT,
    },
}


@pytest.fixture
def tiny(tmp_path):
    """tiny(kind, **fields of ModelConfig) -> ModelConfig."""

    def make(kind="clip", **fields):
        path = tmp_path / f"tiny-{kind}.json"
        path.write_text(json.dumps(CONFIGS[kind]))
        return ModelConfig(name=str(path), **fields)

    return make


@pytest.fixture
def build(tiny):
    """build(kind, objective, **fields of ModelConfig) -> ContrastiveModel with seeded, lively weights."""

    def make(kind="clip", objective="clip", **fields):
        torch.manual_seed(0)
        model = build_model(tiny(kind, **fields), objective)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Stock initialisation leaves biases and lora_B at zero, where mistakes do not show. Biases repeat
                # every 32, so that split and fused attention get the same ones.
                if name.endswith("bias") and "logit" not in name:
                    parameter.copy_(torch.sin(torch.arange(parameter.numel()) % 32.0) / 10)
                elif "lora_B" in name:
                    parameter.normal_(std=0.1)
        return model

    return make


@pytest.fixture
def batch():
    """batch(rows, size) -> uint8 images and token ids that end like CLIP's, with the highest id."""

    def make(rows=5, size=32):
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(0, 256, (rows, 3, size, size), generator=generator, dtype=torch.uint8)
        tokens = torch.randint(1, 48, (rows, 12), generator=generator)
        tokens[:, -1] = 49
        return images, tokens

    return make
