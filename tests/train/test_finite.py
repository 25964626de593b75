"""NaN and infinities are named, change nothing, and end a run on its last good state."""

from __future__ import annotations

import copy

import pytest
import torch

from dsclr.data.order import Slots
from dsclr.negatives import MemoryBank
from dsclr.train.bad_steps import BadSteps
from dsclr.train.checkpoint import Progress
from dsclr.train.engine import build_engine, engine_config
from dsclr.train.finite import NotFinite, first_not_finite, training_state
from dsclr.train.masters import master_value
from dsclr.train.step import ContrastiveStep, StepResult, build_step
from tests.train.steps import LORA, make_batch, make_config, make_model, named, spawn

CPU = torch.device("cpu")


def first_on_rank(world):
    """Rank 1 has the earlier tensor, both have the later one."""
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan, torch.inf, 0.0])
    found = first_not_finite([("a", good), ("b", bad if world.rank else good), ("c", bad)], world.device)
    later = first_not_finite([("a", good), ("b", good), ("c", bad)], world.device)
    nothing = first_not_finite([("a", good)], world.device)
    return found, later, nothing


def test_the_first_tensor_and_the_lowest_rank_are_named(monkeypatch):
    monkeypatch.setattr(torch, "load", lambda path, load=torch.load: load(path, weights_only=False))
    (found, later, nothing), (found_too, *_) = spawn(2, first_on_rank)
    assert (found.rank, found.tensor) == (found_too.rank, found_too.tensor) == (1, "b")
    assert str(found_too) == "2 of 4 values of b are not finite"
    assert later == NotFinite(0, "c", 2, 4)
    assert nothing is None


def build(world, tmp_path, stage, precision):
    config = make_config(
        tmp_path,
        {"lora": LORA},
        train_micro_batch_size_per_gpu=4,
        zero_optimization={"stage": stage},
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **precision,
    ).with_world_size(1)
    model = make_model(config)
    engine = build_engine(model, engine_config(config, 1, "", world.device))
    return engine, build_step(config, engine, world.device, MemoryBank(30))


def everything(engine, step):
    """What a skipped step may not touch."""
    state = {**named(engine.module, master_value), **dict(training_state(engine))}
    return {
        "state": {name: value.detach().clone() for name, value in state.items()},
        "bank": copy.deepcopy(step.bank.state_dict()),
        "lr": engine.optimizer.param_groups[0]["lr"],
        "scheduler": engine.lr_scheduler.state_dict(),
    }


def assert_same(before, after):
    assert before["lr"] == after["lr"]
    assert before["scheduler"] == after["scheduler"]
    assert before["state"].keys() == after["state"].keys()
    assert all(torch.equal(value, after["state"][name]) for name, value in before["state"].items())
    assert all(torch.equal(before["bank"][name], after["bank"][name]) for name in ("a", "b", "ids", "steps"))


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_not_finite_reaches_nothing_and_is_named(world, tmp_path, monkeypatch, stage, precision):
    engine, step = build(world, tmp_path, stage, precision)
    batch = make_batch()
    assert step(batch, 0).not_finite is None
    before = everything(engine, step)
    backward, encode, loss = ContrastiveStep._backward, ContrastiveStep._encode, ContrastiveStep._loss

    def bad_gradient(self, *arguments):
        gradients = backward(self, *arguments)
        gradients[parameter].view(-1)[1] = torch.inf
        return gradients

    def bad_texts(self, *arguments):
        a, b = encode(self, *arguments)
        return a, b * torch.nan

    def bad_loss(self, *arguments):
        result = loss(self, *arguments)
        result.value.fill_(torch.nan)
        return result

    parameter_name, parameter = [(n, p) for n, p in engine.module.named_parameters() if "lora_B" in n][-1]
    for name, replacement, tensor in (
        ("_backward", bad_gradient, f"the gradient of {parameter_name}"),
        ("_encode", bad_texts, "text embeddings"),
        ("_loss", bad_loss, "the loss"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ContrastiveStep, name, replacement)
            result = step(batch, 1)
        assert not result.applied
        assert result.not_finite is not None
        assert result.not_finite.tensor == tensor
        assert result.not_finite.values == {"_backward": 1, "_encode": 12 * 16, "_loss": 1}[name]
        assert_same(before, everything(engine, step))
    # and the step can go on
    assert step(batch, 1).applied
    assert everything(engine, step)["state"].keys() == before["state"].keys()


def test_the_state_of_training_holds_weights_and_optimizer(world, tmp_path):
    engine, step = build(world, tmp_path, 2, {})
    step(make_batch(), 0)
    names = [name for name, _ in training_state(engine)]
    assert any("lora_A" in name for name in names)
    assert {"the optimizer's exp_avg (group 0)", "the optimizer's exp_avg_sq (group 1)"} <= set(names)
    assert first_not_finite(training_state(engine), world.device) is None
    moments = [p for n, p in training_state(engine) if n == "the optimizer's exp_avg_sq (group 0)"]
    moments[0].view(-1)[0] = torch.inf
    bad = first_not_finite(training_state(engine), world.device)
    assert bad is not None
    assert bad.tensor == "the optimizer's exp_avg_sq (group 0)"


def test_bad_steps_in_a_row_lead_back_to_the_last_good_state():
    bad = StepResult(float("nan"), {}, float("nan"), applied=False, not_finite=NotFinite(1, "the loss", 1, 1))
    good = StepResult(1.0, {}, 1.0, applied=True)
    streak, progress = BadSteps(2), Progress(slots=Slots(4, 1))
    torch.manual_seed(0)
    for result, over in ((bad, False), (good, False), (bad, False), (bad, True)):
        streak.before_step(progress, CPU)
        if progress.step == 2:
            expected = torch.get_rng_state()
        torch.rand(1)
        progress.step += 1
        progress.skipped_samples["cause"] = progress.step
        streak.after_step(result)
        assert streak.is_over == over
    assert (streak.count, streak.last) == (2, "the loss, rank 1")
    back = streak.go_back(CPU)
    assert (back.step, back.skipped_samples) == (2, {"cause": 2})
    assert torch.equal(torch.get_rng_state(), expected)
