"""The model behind one forward: shapes, units, frozen parts."""

from __future__ import annotations

import copy

import open_clip
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsclr.models import split_attention


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["clip", "custom", "coca", "siglip", "resnet"])
def test_forward_is_open_clips_own(build, batch, kind):
    model = build(kind).eval()
    images, tokens = batch(size=160 if kind == "siglip" else 32)
    za, zb = model(images, tokens)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (model.settings.mean, model.settings.std))
    pixels = ((images / 255) - mean) / std
    torch.testing.assert_close(za, F.normalize(model.clip.encode_image(pixels, normalize=False), dim=-1))
    torch.testing.assert_close(zb, F.normalize(model.clip.encode_text(tokens, normalize=False), dim=-1))
    for z in (za, zb):
        assert z.dtype == torch.float32
        torch.testing.assert_close(z.norm(dim=1), torch.ones(len(z)))


def test_normalisation_is_bitwise_that_of_open_clips_transform(build, batch):
    model = build()
    images, _ = batch(1)
    transform = open_clip.image_transform(32, is_train=False, mean=model.settings.mean, std=model.settings.std)
    normalise = transform.transforms[-1]
    assert torch.equal(model._normalise(images)[0], normalise(images[0].to(torch.float32).div(255)))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_give_fp32_units(build, batch, half):
    model = build().eval()
    expected = model(*batch())
    for found, wanted in zip(model.to(half)(*batch()), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found)))
        assert (found * wanted).sum(1).min() > 0.99


def test_autocast(build, batch):
    model = build().eval()
    expected = model(*batch())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(*batch())
    for z, wanted in zip(found, expected, strict=True):
        assert z.dtype == torch.float32
        assert (z * wanted).sum(1).min() > 0.99


def test_float_images_are_refused(build, batch):
    images, tokens = batch()
    with pytest.raises(TypeError, match="uint8"):
        build()(images.float(), tokens)


def test_a_zero_vector_gives_no_nan(build):
    features = torch.zeros(2, 4, requires_grad=True)
    z = build()._unit(features, None)
    z.sum().backward()
    assert torch.equal(z, torch.zeros(2, 4))
    assert features.grad is not None
    assert features.grad.isfinite().all()


def test_clip_trains_everything_but_the_scale_bias(build):
    assert trainable(build()) == {name for name, _ in build().named_parameters()}
    siglip = build("siglip")
    assert {name for name, _ in siglip.named_parameters()} - trainable(siglip) == {"clip.logit_bias"}
    assert siglip.clip.logit_bias.item() == -10


@pytest.mark.parametrize("kind", ["clip", "custom", "coca", "siglip", "resnet"])
def test_no_parameter_without_dimensions(build, kind):
    assert all(p.ndim for p in build(kind).parameters())


def test_cocas_decoder_does_not_train(build, batch):
    model = build("coca")
    assert not any("text_decoder" in name for name in trainable(model))
    za, zb = model(*batch())
    (za @ zb.T).square().sum().backward()
    model.logit_scale.grad = torch.ones(1)
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_logit_scale(build):
    assert build().logit_scale.item() == pytest.approx(2.6593, abs=1e-4)
    model = build(logit_scale={"init": 20.0})
    assert model.logit_scale.exp().item() == pytest.approx(20)
    assert model.logit_scale.requires_grad
    assert isinstance(model.logit_scale, nn.Parameter)
    assert not build(logit_scale={"learnable": False}).logit_scale.requires_grad


@pytest.mark.parametrize("kind", ["clip", "custom", "coca", "siglip"])
@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_locked_tower_keeps_no_graph(build, batch, kind, tower):
    model = build(kind, **{f"lock_{tower}": True})
    is_image = {name: name.startswith("clip.visual.") for name in trainable(model)}
    is_image.pop("clip.logit_scale")
    assert is_image
    assert all(value == (tower == "text") for value in is_image.values())
    za, zb = model(*batch(size=160 if kind == "siglip" else 32))
    assert (za.requires_grad, zb.requires_grad) == (tower == "text", tower == "image")


def test_a_locked_tower_with_a_head_trains_the_head(build, batch):
    model = build(lock_image=True, projection={"out_dim": 8})
    za, _ = model(*batch())
    za.square().sum().backward()
    assert model.image_head[0].weight.grad is not None
    assert all(p.grad is None for p in model.clip.visual.parameters())


def test_batch_norm_of_a_locked_tower_stands_still(build, batch):
    model = build("resnet", lock_image=True).train()
    before = copy.deepcopy(model.clip.visual.state_dict())
    model(*batch())
    assert all(torch.equal(value, before[key]) for key, value in model.clip.visual.state_dict().items())
    assert model.clip.transformer.training


def test_batch_norm_that_trains_is_warned_of(build, caplog):
    build("resnet")
    assert "train_micro_batch_size_per_gpu" in caplog.text


def test_heads(build, batch):
    model = build(projection={"out_dim": 8, "hidden_dim": 24, "layers": 3})
    assert [type(m).__name__ for m in model.image_head] == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    images, tokens = batch()
    za, zb = model(images, tokens)
    assert za.shape == zb.shape == (5, 8)
    assert model.encode_image(images, head=False).shape == model.encode_text(tokens, head=False).shape == (5, 16)


def test_simclr(build, batch):
    model = build(objective="simclr", projection={"out_dim": 8}).train()
    assert model.text_head is None
    assert all(name.startswith(("clip.visual.", "image_head.", "clip.logit_scale")) for name in trainable(model))
    first, second = batch()[0], batch()[0].flip(3)
    za, zb = model(first, second)
    assert za.shape == zb.shape == (5, 8)
    torch.testing.assert_close(za, model.encode_image(first))
    torch.testing.assert_close(zb, model.encode_image(second))
    (za * zb).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad and "scale" not in name)


def test_patch_dropout_drops_only_in_training(build, batch):
    model = build(patch_dropout=0.5)
    images, _ = batch()
    assert not torch.equal(model.encode_image(images), model.encode_image(images))
    model.eval()
    assert torch.equal(model.encode_image(images), model.encode_image(images))


def test_split_attention_does_not_change_what_half_precision_sees(build, batch):
    model = build().bfloat16().eval()
    expected = model(*batch())
    split_attention(model.clip)
    for found, wanted in zip(model(*batch()), expected, strict=True):
        assert (found * wanted).sum(1).min() > 0.999
