"""Separate projections against the fused modules they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from open_clip.transformer import Attention, AttentionalPooler
from torch import nn

from dsclr.models import SplitAttention, SplitCustomAttention, fuse_attention, split_attention


def lively(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def causal(length):
    return torch.full((length, length), float("-inf")).triu_(1)


MASKS = {
    "none": lambda rows, heads, length: None,
    "causal": lambda rows, heads, length: causal(length),
    "bool": lambda rows, heads, length: causal(length).bool(),
    "per head": lambda rows, heads, length: causal(length) + torch.randn(rows * heads, length, length),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("width", "heads", "length"), [(32, 4, 17), (192, 3, 65), (96, 4, 32), (768, 12, 50)])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_bitwise_equal(mask, width, heads, length, bias):
    stock = lively(nn.MultiheadAttention(width, heads, bias=bias, batch_first=True))
    split = SplitAttention(stock)
    x = torch.randn(3, length, width, requires_grad=True)
    attn_mask = MASKS[mask](3, heads, length)
    expected = stock(x, x, x, need_weights=False, attn_mask=attn_mask)[0]
    found, weights = split(x, x, x, need_weights=False, attn_mask=attn_mask)
    assert torch.equal(found, expected)
    assert weights is None
    expected_grad, found_grad = (torch.autograd.grad(y.square().mean(), x)[0] for y in (expected, found))
    torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": False}, {"qk_norm": True, "scale_heads": True, "inner_norm": True}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_custom_attention_is_bitwise_equal(mask, options):
    stock = lively(Attention(32, 4, **options))
    split = SplitCustomAttention(stock)
    x = torch.randn(3, 17, 32)
    attn_mask = MASKS[mask](3, 4, 17)
    assert torch.equal(split(x, attn_mask=attn_mask), stock(x, attn_mask=attn_mask))


def test_custom_dropout_draws_the_same_numbers():
    stock = lively(Attention(32, 4, attn_drop=0.3, proj_drop=0.2))
    x = torch.randn(2, 9, 32)
    outputs = []
    for module in (stock, SplitCustomAttention(stock)):
        torch.manual_seed(3)
        outputs.append(module(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], stock(x))


def test_dropout_only_while_training():
    split = SplitAttention(lively(nn.MultiheadAttention(32, 4, dropout=0.3, batch_first=True)))
    x = torch.randn(2, 9, 32)
    assert not torch.equal(split(x, x, x)[0], split(x, x, x)[0])
    split.eval()
    assert torch.equal(split(x, x, x)[0], split(x, x, x)[0])


def test_cross_attention_is_equal():
    stock = lively(nn.MultiheadAttention(32, 4, batch_first=True))
    query, context = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 9, 32)
    expected = stock(query, context, context, need_weights=False)[0]
    torch.testing.assert_close(SplitAttention(stock)(query, context, context)[0], expected)


def test_no_attention_weights():
    split = SplitAttention(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="weights"):
        split(x, x, x, need_weights=True)


@pytest.mark.parametrize(("kind", "count"), [("clip", 5), ("custom", 5), ("coca", 2 + 3 + 2), ("siglip", 3)])
def test_model_is_bitwise_equal_and_fuses_back(build, batch, kind, count):
    model = build(kind)
    stock = copy.deepcopy(model.clip.state_dict())
    inputs = batch(size=160 if kind == "siglip" else 32)
    expected = model(*inputs)
    assert split_attention(model.clip) == count
    assert not any("in_proj_weight" in key and "attn_pool" not in key for key in model.clip.state_dict())
    for found, wanted in zip(model(*inputs), expected, strict=True):
        assert torch.equal(found, wanted)
    assert fuse_attention(model.clip) == count
    fused = model.clip.state_dict()
    assert list(fused) == list(stock)
    for key, value in stock.items():  # CoCa leaves a decoder weight uninitialised, which may be NaN
        torch.testing.assert_close(fused[key], value, rtol=0, atol=0, equal_nan=True)
    for found, wanted in zip(model(*inputs), expected, strict=True):
        assert torch.equal(found, wanted)


def test_splitting_keeps_what_is_frozen_and_draws_no_random_numbers(build):
    model = build("clip", lock_image=True)
    state = torch.get_rng_state()
    split_attention(model.clip)
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not any(value for name, value in trains.items() if ".visual." in name)
    assert trains["clip.transformer.resblocks.0.attn.q_proj.weight"]
    fuse_attention(model.clip)
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not trains["clip.visual.transformer.resblocks.0.attn.in_proj_weight"]
    assert trains["clip.transformer.resblocks.0.attn.in_proj_weight"]
    assert torch.equal(state, torch.get_rng_state())


def test_attentional_poolers_stay_as_they_are(build):
    model = build("coca")
    split_attention(model.clip)
    poolers = [m for m in model.modules() if isinstance(m, AttentionalPooler)]
    assert poolers
    assert all(isinstance(m.attn, nn.MultiheadAttention) for m in poolers)


def test_bf16_autocast_keeps_bf16():
    stock = lively(nn.MultiheadAttention(32, 4, batch_first=True))
    split, x = SplitAttention(stock), torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = stock(x, x, x, need_weights=False)[0], split(x, x, x)[0]
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
