"""LoRA: which modules it reaches, and saving, loading and merging without loss."""

from __future__ import annotations

import copy
import json
import re

import open_clip
import peft
import pytest
import torch
from safetensors.torch import load_file

from dsclr.config import ConfigError, LoraConfig, ModelConfig
from dsclr.models import (
    apply_lora,
    build_model,
    load_adapter,
    load_trained,
    merge_adapters,
    save_adapter,
    save_model,
    save_trained,
    split_attention,
)

OPEN_CLIP = {"q": ["attn.q_proj"], "k": ["attn.k_proj"], "v": ["attn.v_proj"], "out": ["attn.out_proj"],
             "mlp": ["mlp.c_fc", "mlp.c_proj"]}  # fmt: skip
PREFIX = {
    ("clip", "image"): "visual.transformer.resblocks",
    ("clip", "text"): "transformer.resblocks",
    ("custom", "image"): "visual.transformer.resblocks",
    ("custom", "text"): "text.transformer.resblocks",
}


def adapted(model):
    """Names of the modules that have adapters, relative to the open_clip model."""
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    return {re.sub(r"^(clip\.)?base_model\.model\.|\.lora_A\..*$", "", name) for name in names}


def train_once(model, inputs):
    """One backward through everything that trains."""
    za, zb = model(*inputs)
    weights = torch.linspace(-1, 1, za.numel()).view_as(za)
    ((za + zb * 0.5) * weights).sum().backward()
    if model.logit_scale.requires_grad:
        model.logit_scale.grad = torch.ones(1)


@pytest.mark.parametrize("kind", ["clip", "custom"])
@pytest.mark.parametrize("towers", [["image"], ["text"], ["image", "text"]])
@pytest.mark.parametrize("targets", [["q"], ["v", "k"], ["out"], ["mlp"], ["q", "k", "v", "out", "mlp"]])
@pytest.mark.parametrize("layers", [None, [0], [-1]])
def test_adapters_where_asked_and_gradients_reach_them(build, batch, kind, towers, targets, layers):
    model = build(kind, lora=LoraConfig(towers=towers, targets=targets, layers=layers, rank=2))
    depth = {"image": 2, "text": 3}
    expected = {
        f"{PREFIX[kind, tower]}.{number % depth[tower]}.{name}"
        for tower in towers
        for number in (layers or range(depth[tower]))
        for target in targets
        for name in OPEN_CLIP[target]
    }
    assert adapted(model) == expected
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trains if "lora_" not in name} == {"clip.base_model.model.logit_scale"}
    train_once(model, batch())
    for name, parameter in model.named_parameters():
        if name in trains:
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("kind", ["clip", "custom"])
def test_fresh_adapters_change_nothing(tiny, batch, kind):
    torch.manual_seed(0)
    plain = build_model(tiny(kind), "clip")
    torch.manual_seed(0)
    lora = build_model(tiny(kind, lora=LoraConfig()), "clip")
    for found, wanted in zip(lora(*batch()), plain(*batch()), strict=True):
        assert torch.equal(found, wanted)


def test_logit_scale_stays_frozen_if_not_learnable(build):
    model = build(lora=LoraConfig(), logit_scale={"learnable": False})
    assert not model.logit_scale.requires_grad


def test_timm_tower(build, batch):
    model = build("siglip", lora=LoraConfig(towers=["image"], layers=[-1], rank=2))
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert adapted(model) == {f"visual.trunk.blocks.5.{name}" for name in names}
    train_once(model, batch(2, 160))
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_eva02_names():
    with torch.device("meta"):
        config = open_clip.get_model_config("EVA02-B-16")
        config.pop("custom_text")
        model = open_clip.CustomTextCLIP(**config)
        lora = apply_lora(model, LoraConfig(towers=["image"], layers=[3]))
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2")
    assert adapted(lora) == {f"visual.trunk.blocks.3.{name}" for name in names}


def test_eva01_bypasses_its_qkv():
    with torch.device("meta"):
        config = open_clip.get_model_config("EVA01-g-14")
        config.pop("custom_text")
        model = open_clip.CustomTextCLIP(**config)
    with pytest.raises(ConfigError, match="bypasses"):
        apply_lora(model, LoraConfig(towers=["image"]))


def test_vit_b_32():
    model = build_model(ModelConfig(name="ViT-B-32", lora=LoraConfig(rank=4, layers=[0, -1])), "clip")
    names = [name for group in OPEN_CLIP.values() for name in group]
    assert adapted(model) == {
        f"{prefix}.{number}.{name}"
        for prefix in ("visual.transformer.resblocks", "transformer.resblocks")
        for number in (0, 11)
        for name in names
    }
    assert model.logit_scale.shape == (1,)


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        ("clip", {"layers": [2]}, r"layers contains 2.*image tower has 2 blocks: 0 to 1, or -2 to -1"),
        ("clip", {"layers": [-4], "towers": ["text"]}, r"text tower has 3 blocks"),
        ("clip", {"layers": []}, "empty"),
        ("siglip", {"targets": ["q", "v"]}, r"attn\.qkv.*all three or none"),
        ("resnet", {}, r"image tower \(ModifiedResNet\).*'image'"),
    ],
)
def test_what_cannot_be_adapted(build, kind, lora, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, lora=LoraConfig(**lora))


def test_a_target_without_a_module_names_what_exists(build):
    model = build("clip").clip
    for block in model.visual.transformer.resblocks:
        block.mlp = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(ConfigError, match=r"'mlp' matches nothing in the image tower.*mlp\.c_fc.*which has.*mlp\.0"):
        apply_lora(model, LoraConfig())


def test_the_text_tower_of_a_resnet_can_be_adapted(build, batch):
    model = build("resnet", lora=LoraConfig(towers=["text"], rank=2)).train()
    assert all(not m.training for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    train_once(model, batch())


@pytest.mark.parametrize("kind", ["clip", "custom", "siglip", "coca"])
def test_merged_is_adapted(build, batch, kind):
    stock = build(kind).clip
    model = build(kind, lora=LoraConfig(rank=3, alpha=6)).eval()
    inputs = batch(3, 160 if kind == "siglip" else 32)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(*inputs)
        merged = merge_adapters(model)
        plain = build(kind).eval()
        unadapted = plain(*inputs)
        plain.clip = merged
        found = plain(*inputs)
    assert type(merged) is type(stock)
    assert {key: value.shape for key, value in merged.state_dict().items()} == {
        key: value.shape for key, value in stock.state_dict().items()
    }
    for z, wanted, base in zip(found, expected, unadapted, strict=True):
        torch.testing.assert_close(z, wanted, atol=1e-6, rtol=0)
        assert (z - base).abs().max() > 1e-3
    after = model.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=0, equal_nan=True)


def test_adapter_round_trip_is_exact(build, batch, tmp_path):
    fields = {"lora": LoraConfig(rank=3, alpha=5), "projection": {"out_dim": 8}}
    model = build(**fields).eval()
    with torch.no_grad():
        model.logit_scale.fill_(3.25)
    save_adapter(model, tmp_path / "adapter")
    torch.manual_seed(0)  # the same base weights, fresh adapters
    fresh = build(**fields).eval()
    with torch.no_grad():
        for p in fresh.parameters():
            if p.requires_grad:
                p.normal_()
    load_adapter(fresh, tmp_path / "adapter")
    assert fresh.logit_scale.item() == 3.25
    for found, wanted in zip(fresh(*batch()), model(*batch()), strict=True):
        assert torch.equal(found, wanted)


def test_adapter_loads_into_a_model_without_adapters(build, batch, tmp_path):
    model = build(lora=LoraConfig(rank=3, towers=["image"])).eval()
    save_adapter(model, tmp_path)
    plain = build().eval()
    load_adapter(plain, tmp_path)
    assert plain.logit_scale.requires_grad
    for found, wanted in zip(plain(*batch()), model(*batch()), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["clip", "custom"])
def test_plain_peft_loads_the_adapter(build, batch, tmp_path, kind):
    model = build(kind, lora=LoraConfig(rank=3, layers=[-1])).eval()
    save_adapter(model, tmp_path)
    plain = build(kind).eval()
    split_attention(plain.clip)
    plain.clip = peft.PeftModel.from_pretrained(plain.clip, tmp_path)
    assert adapted(plain) == adapted(model)
    for found, wanted in zip(plain(*batch()), model(*batch()), strict=True):
        assert torch.equal(found, wanted)


def test_masters_are_saved_in_place_of_bf16_values(build, tmp_path):
    model = build(lora=LoraConfig(rank=2)).bfloat16()
    masters = {name: torch.randn(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, tmp_path, masters)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.visual.transformer.resblocks.1.attn.q_proj.lora_B"
    assert torch.equal(saved[f"{name}.weight"], masters[f"clip.{name}.default.weight"])
    assert all(value.dtype == torch.float32 for value in saved.values())
    extras = load_file(tmp_path / "extras.safetensors")
    assert torch.equal(extras["logit_scale"], masters["clip.base_model.model.logit_scale"])
    assert set(extras) == {"logit_scale"}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
@pytest.mark.parametrize("kind", ["clip", "custom", "siglip"])
def test_saved_model_is_a_stock_open_clip_model(build, batch, tmp_path, kind, lora):
    model = build(kind, lora=lora).eval()
    save_model(model, tmp_path / "model")
    images, tokens = batch(3, 160 if kind == "siglip" else 32)
    clip, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'model'}")
    clip.eval()
    assert clip.logit_scale.ndim == 0
    assert tuple(preprocess.transforms[-1].mean) == model.settings.mean
    with torch.no_grad():
        za, zb = model(images, tokens)
        pixels = model._normalise(images)
        torch.testing.assert_close(clip.encode_image(pixels, normalize=True), za, atol=1e-6, rtol=0)
        torch.testing.assert_close(clip.encode_text(tokens, normalize=True), zb, atol=1e-6, rtol=0)
    ours = build_model(ModelConfig(name=f"local-dir:{tmp_path / 'model'}"), "clip").eval()
    torch.testing.assert_close(ours.encode_image(images), za, atol=1e-6, rtol=0)
    if kind == "siglip":
        assert clip.logit_bias.item() == -10


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
def test_trained_round_trip(build, batch, tmp_path, lora):
    model = build(lora=lora, projection={"out_dim": 8}).eval()
    masters = {name: p.detach() + 0.125 for name, p in model.named_parameters() if p.requires_grad}
    save_trained(model, tmp_path, masters)
    loaded = build(lora=lora, projection={"out_dim": 8}).eval()
    load_trained(loaded, tmp_path)
    expected = {**dict(model.named_parameters()), **masters}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_files_that_do_not_fit(build, tmp_path):
    model = build(lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="does not exist"):
        load_adapter(model, tmp_path)
    save_adapter(model, tmp_path)
    with pytest.raises(ConfigError, match=r"lacks.*dsclr\.model section"):
        load_adapter(build(lora=LoraConfig(rank=2), projection={}), tmp_path)
    with pytest.raises(ConfigError, match=r"is \(2, 32\), the model's is \(3, 32\)"):
        load_adapter(build(lora=LoraConfig(rank=3)), tmp_path)
    with pytest.raises(ConfigError, match="unknown to the model"):
        load_adapter(build(lora=LoraConfig(rank=2, towers=["image"])), tmp_path)
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        save_adapter(build(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_adapter(model, tmp_path)
    save_model(build(), tmp_path / "whole")
    with pytest.raises(ConfigError, match="lora = null"):
        load_trained(model, tmp_path / "whole")


def test_the_adapter_config_is_peft_s(build, tmp_path):
    save_adapter(build(lora=LoraConfig(rank=7, alpha=21, dropout=0.1)), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["lora_dropout"]) == ("LORA", 7, 21, 0.1)
    assert config["inference_mode"]
