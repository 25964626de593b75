"""The engine's step is the full-batch step of plain PyTorch, whatever the chunks."""

from __future__ import annotations

import math

import pytest
import torch

from dsclr.config import ConfigError
from dsclr.train.engine import build_engine, engine_config
from tests.train.steps import (
    LORA,
    ROWS,
    assert_same_step,
    engine_step,
    make_batch,
    make_config,
    make_model,
    plain_step,
)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("lora", [None, LORA, {**LORA, "dropout": 0.3}], ids=["full", "lora", "dropout"])
def test_update_equals_plain_pytorch(world, tmp_path, lora, chunks):
    config = make_config(tmp_path, {"lora": lora}, train_micro_batch_size_per_gpu=ROWS // chunks)
    ours = engine_step(world, config, make_batch())
    reference = plain_step(config, make_batch())
    assert_same_step(ours, reference)
    assert any("logit_scale" in name for name in ours["after"])
    assert all((ours["after"][name] != ours["before"][name]).any() for name in ours["after"])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_zero_stage(world, tmp_path, stage):
    config = make_config(tmp_path, {"lora": LORA}, train_micro_batch_size_per_gpu=4, zero_optimization={"stage": stage})
    assert_same_step(engine_step(world, config, make_batch()), plain_step(config, make_batch()))


@pytest.mark.parametrize("stage", [1, 2])
def test_an_offloaded_optimizer_takes_the_same_steps_and_its_logit_scale_is_clamped(world, tmp_path, stage):
    def config(**zero):
        return make_config(
            tmp_path,
            {"lora": LORA, "logit_scale": {"init": 30.0}},
            train_micro_batch_size_per_gpu=4,
            zero_optimization={"stage": stage, **zero},
            optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
        )

    def is_offloaded(step):
        assert step.engine.optimizer.cpu_offload

    kept = engine_step(world, config(), make_batch(), steps=2, max_scale=20.0)
    offload = config(offload_optimizer={"device": "cpu"})
    offloaded = engine_step(world, offload, make_batch(), steps=2, max_scale=20.0, prepare=is_offloaded)
    for where in ("after", "module"):
        assert all(torch.equal(value, offloaded[where][name]) for name, value in kept[where].items())
        (scale,) = (value for name, value in offloaded[where].items() if name.endswith("logit_scale"))
        assert float(scale) == pytest.approx(math.log(20.0), abs=0.02)
    assert all((offloaded["after"][name] != before).any() for name, before in offloaded["before"].items())


def test_the_build_of_adam_for_offload_is_announced(tmp_path, monkeypatch, caplog):
    import deepspeed

    def refuse(**arguments):
        raise ValueError("no device")

    monkeypatch.setattr(deepspeed, "initialize", refuse)
    config = make_config(
        tmp_path,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
    ).with_world_size(1)
    for device, announced in (("cuda", True), ("cpu", False)):
        caplog.clear()
        with caplog.at_level("INFO", logger="dsclr"), pytest.raises(ConfigError, match="no device"):
            build_engine(make_model(config), engine_config(config, 1, "", torch.device(device)))
        assert ("needs a C++ compiler and takes minutes" in caplog.text) is announced


def test_stage_0_in_bf16_takes_the_steps_of_stages_1_and_2(world, tmp_path):
    results = []
    for stage in (0, 1, 2):
        config = make_config(
            tmp_path,
            {"lora": LORA},
            zero_optimization={"stage": stage},
            optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.5}},
            bf16={"enabled": True},
        )
        results.append(engine_step(world, config, make_batch(), steps=2)["after"])
    for name, expected in results[2].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-7, msg=name)
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-7, msg=name)


def test_activation_checkpointing_changes_nothing(world, tmp_path):
    config = make_config(
        tmp_path, {"lora": {**LORA, "dropout": 0.3}}, train_micro_batch_size_per_gpu=4, activation_checkpointing={}
    )
    assert_same_step(engine_step(world, config, make_batch()), plain_step(config, make_batch()))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("loss", [{"name": "topk", "k": 5, "block_size": 4}, {"name": "dense", "k": 10**6}])
def test_simclr(world, tmp_path, chunks, loss):
    config = make_config(
        tmp_path,
        {"projection": {"out_dim": 8, "hidden_dim": 16}},
        train_micro_batch_size_per_gpu=ROWS // chunks,
        dsclr={"objective": "simclr", "loss": loss},
    )
    batch = make_batch("simclr")
    assert_same_step(engine_step(world, config, batch), plain_step(config, batch))


def test_gradient_clipping_is_the_global_norms(world, tmp_path):
    config = make_config(tmp_path, gradient_clipping=0.05, train_micro_batch_size_per_gpu=4)
    ours, reference = engine_step(world, config, make_batch()), plain_step(config, make_batch())
    assert reference["grad_norm"] > 0.05
    assert_same_step(ours, reference, tolerance=1e-4)
    assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [({}, 1e-4), ({"bf16": {"enabled": True}}, 0.05)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_norm_of_the_gradients_is_told(world, tmp_path, stage, precision, tolerance):
    config = make_config(tmp_path, {"lora": LORA}, zero_optimization={"stage": stage}, **precision)
    ours, reference = engine_step(world, config, make_batch()), plain_step(config, make_batch())
    assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=tolerance)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_logit_scale_is_clamped_where_the_optimizer_keeps_it(world, tmp_path, stage, precision):
    config = make_config(
        tmp_path,
        {"lora": LORA, "logit_scale": {"init": 30.0}},
        zero_optimization={"stage": stage},
        optimizer={"type": "SGD", "params": {"lr": 1e-3}},
        **precision,
    )
    after = engine_step(world, config, make_batch(), steps=2, max_scale=20.0)
    for kept in ("after", "module"):
        (scale,) = (value for name, value in after[kept].items() if name.endswith("logit_scale"))
        # 30 would come back in the second step if the optimizer's copy had not been clamped in the first
        assert float(scale) == pytest.approx(math.log(20.0), abs=0.02)


def test_bf16_moves_every_tensor(world, tmp_path):
    config = make_config(
        tmp_path, {"lora": LORA}, train_micro_batch_size_per_gpu=4, bf16={"enabled": True}, activation_checkpointing={}
    )
    ours = engine_step(world, config, make_batch())
    reference = plain_step(config, make_batch())
    assert ours["loss"] == pytest.approx(reference["loss"], rel=0.02)
    for name, before in ours["before"].items():
        update = ours["after"][name] - before
        expected = reference["after"][name] - reference["before"][name]
        assert torch.nn.functional.cosine_similarity(update.flatten(), expected.flatten(), dim=0) > 0.9, name


def test_a_step_that_is_not_finite_changes_nothing(world, tmp_path, monkeypatch):
    from dsclr.train.step import ContrastiveStep

    encode = ContrastiveStep._encode

    def poisoned(self, *arguments):
        a, b = encode(self, *arguments)
        return a * torch.nan, b

    monkeypatch.setattr(ContrastiveStep, "_encode", poisoned)
    config = make_config(tmp_path, {"lora": LORA}, train_micro_batch_size_per_gpu=4)
    ours = engine_step(world, config, make_batch())
    assert math.isnan(ours["loss"])
    assert all(torch.equal(ours["after"][name], ours["before"][name]) for name in ours["after"])
