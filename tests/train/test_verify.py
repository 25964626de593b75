"""--verify passes what is right and finds what is wrong."""

from __future__ import annotations

import pytest
import torch

from dsclr.config import Config
from dsclr.train import make_plan, verify
from dsclr.train.verify import scaled_down
from tests.train.steps import LORA, make_config, model_file, spawn


def verify_config(tmp_path, model=None, **changes) -> Config:
    """On the demo's shards."""
    ours = {"data": {"train": "demo:fluent-train", "workers": 0}, **changes.pop("dsclr", {})}
    return make_config(
        tmp_path,
        {"lora": LORA, **(model or {})},
        train_batch_size=512,
        train_micro_batch_size_per_gpu=4,
        dsclr=ours,
        **changes,
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """With the vocabulary of the tokenizer that reads the captions."""
    return model_file(tmp_path_factory.mktemp("model"), context_length=16, vocab_size=49408)


def run_verify(world, config):
    return verify(make_plan(config, world.world_size, world.device), world)


LOSSES = {
    "topk": {"name": "topk", "k": 64},
    "tail": {"name": "topk", "k": 64, "tail": "lse"},
    "margin": {"name": "topk", "k": 64, "false_negative_margin": 0.05},
    "all": {"name": "topk", "k": "all"},
    "exact": {"name": "exact"},
    "dense": {"name": "dense"},
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_agrees(world, tmp_path, model_path, loss):
    config = verify_config(tmp_path, {"name": model_path}, dsclr={"loss": loss})
    result = run_verify(world, config)
    assert result.agrees, result.table()
    assert len(result.compared) > 10
    assert all(c.norm > 0 for c in result.compared)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": {}},
        {"zero_optimization": {"stage": 0}},
        {"bf16": {"enabled": True}, "activation_checkpointing": {}},
        {"dsclr": {"objective": "simclr"}},
        {"dsclr": {"negatives": {"bank": {"size": 100}}}},
    ],
    ids=["checkpointing", "zero0", "bf16", "simclr", "bank"],
)
def test_settings_agree(world, tmp_path, model_path, changes):
    towers = ["image"] if changes.get("dsclr", {}).get("objective") == "simclr" else ["image", "text"]
    model = {"name": model_path, "lora": {**LORA, "dropout": 0.2, "towers": towers}}
    result = run_verify(world, verify_config(tmp_path, model, **changes))
    assert result.agrees, result.table()


def test_two_ranks_agree(tmp_path, model_path):
    configs = [
        verify_config(tmp_path, {"name": model_path}, dsclr={"negatives": {"across_ranks": across}})
        for across in ("off", "gather")
    ]
    assert spawn(2, _agree, configs) == [[True, True]] * 2


def _agree(world, configs):
    return [run_verify(world, config).agrees for config in configs]


def test_a_wrong_gradient_is_found(world, tmp_path, model_path, monkeypatch):
    import dsclr.train.step as step

    deliver = step.deliver_gradients

    def wrong(engine, gradients):
        last = list(gradients)[-1]
        deliver(engine, {p: g * (1.01 if p is last else 1) for p, g in gradients.items()})

    monkeypatch.setattr(step, "deliver_gradients", wrong)
    result = run_verify(world, verify_config(tmp_path, {"name": model_path}))
    assert not result.agrees
    assert sum(not c.agrees for c in result.compared) == 1
    assert "DIFFERS" in result.table()
    assert "1 of" in result.table()


def test_scaled_down_keeps_several_chunks_and_blocks(tmp_path):
    small = scaled_down(verify_config(tmp_path).with_world_size(1), 1)
    assert small.chunks == 3
    assert small.dsclr.loss.k == 4
    assert small.dsclr.loss.block_size == 4


def test_weights_that_are_not_finite_do_not_pass(world, tmp_path, model_path, monkeypatch):
    from dsclr.models import ContrastiveModel

    monkeypatch.setattr(ContrastiveModel, "_unit", staticmethod(lambda features, head: features * torch.nan))
    result = run_verify(world, verify_config(tmp_path, {"name": model_path}))
    assert not result.agrees
    assert "not finite" in result.table()
