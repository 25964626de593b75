"""Forecasts follow from what is measured and from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsclr.encoder_use import EncoderUse, Line
from dsclr.memory import measured
from dsclr.models import build_model, enable_activation_checkpointing
from dsclr.plan import Planner, Setting, make_planner, summary
from dsclr.retention import Retention
from tests.train.steps import LORA, make_batch, make_config

USE = EncoderUse(Line(0, 10**5), Line(0, 10**4), Line(0, 13 * 10**4), Line(0, 9 * 10**4), Line(0, 0))
CHECKPOINTED = EncoderUse(Line(0, 10**4), Line(0, 10**4), Line(0, 6 * 10**4), Line(0, 5 * 10**4), Line(0, 0))


def planner(folder, **changes):
    config = make_config(folder, train_batch_size=64, train_micro_batch_size_per_gpu=8, **changes).with_world_size(1)
    return Planner(config, 1, {False: USE, True: CHECKPOINTED}, 1000, 10, 4000, 4, 16, 3 * 32 * 32)


def test_fewest_forwards_that_fit(tmp_path):
    ours = planner(tmp_path)
    fixed = ours.forecast(Setting(64, 8, False, 0)).peak_bytes
    roomy = ours.best(64, 20 * fixed)
    assert roomy is not None
    assert (roomy.setting.micro_batch_size, roomy.setting.checkpointing, roomy.setting.forwards) == (64, False, 1)
    assert ours.best(64, 1000) is None
    tight = ours.best(64, int(fixed * 1.3))
    assert tight is not None
    assert 1 < tight.setting.forwards <= 2
    assert tight.peak_bytes <= 0.9 * 1.3 * fixed


def test_more_kept_takes_more_and_runs_less(tmp_path):
    ours = planner(tmp_path)
    one, all_kept = (ours.forecast(Setting(64, 8, False, kept)) for kept in (1, 8))
    assert all_kept.peak_bytes - one.peak_bytes == pytest.approx(7 * 8 * 10**5, abs=8 * 10**5)
    assert all_kept.setting.forwards == 1 < one.setting.forwards


def test_largest_batch_is_the_largest_that_fits(tmp_path):
    ours = planner(tmp_path)
    device = 4_000_000
    rows = ours.largest_rows(8, False, device)
    assert rows % 8 == 0
    assert ours.fits(Setting(rows, 8, False, 0), device)
    assert not ours.fits(Setting(rows + 8, 8, False, 0), device)
    micro = ours.largest_micro_batch(64, False, device)
    assert micro is not None
    assert ours.fits(Setting(64, micro, False, 0), device)
    assert not ours.fits(Setting(64, 2 * micro, False, 0), device)


def test_bank_and_loss_are_counted(tmp_path):
    without = planner(tmp_path).forecast(Setting(64, 8, False, 0))
    bank = planner(tmp_path, dsclr={"negatives": {"bank": {"size": 1000}}}).forecast(Setting(64, 8, False, 0))
    assert bank.parts["memory bank"] == 1000 * (2 * 4 * 16 + 8)
    assert bank.peak_bytes >= without.peak_bytes + bank.parts["memory bank"]
    spilled = planner(tmp_path, dsclr={"step": {"host_images": "spill"}}).forecast(Setting(64, 8, False, 0))
    assert spilled.host["images on disk"] == 64 * 3 * 32 * 32
    own = planner(tmp_path, dsclr={"loss": {"name": "json:dumps"}}).forecast(Setting(64, 8, False, 0))
    assert any("json:dumps" in words for words in own.unknown)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_measured_on_small_micro_batches_it_holds_for_larger_ones(world, tmp_path, lora):
    """Graph and peaks of 12 rows from those of 2 and 6, random numbers and gradients untouched."""
    config = make_config(tmp_path, {"lora": lora}).with_world_size(1)
    torch.manual_seed(0)
    model = build_model(config.dsclr.model, "clip")
    batch = make_batch()

    def tokenizer(words):
        return batch.b[: len(words)]

    before = torch.get_rng_state()
    ours = make_planner(config, 1, model, tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    for checkpointing in (False, True):
        if checkpointing:
            enable_activation_checkpointing(model, {"activation_checkpointing": {}})
        hooks = [p.register_post_accumulate_grad_hook(forget) for p in model.parameters() if p.requires_grad]
        with measured(torch.device("cpu")) as whole:
            with measured(torch.device("cpu")) as graph:
                a, b = model(batch.a, batch.b)
            (a.sum() + b.sum()).backward()
        del a, b
        with measured(torch.device("cpu")) as again:
            for sides in model.by_tower(batch.a, batch.b):
                sum(z.sum() for z in sides.values()).backward()
                del sides
        use = ours.uses[checkpointing]
        assert use.graph(12) == pytest.approx(graph.kept_bytes, rel=0.02)
        assert use.backward_peak(12) == pytest.approx(max(whole.peak_bytes, graph.peak_bytes), rel=0.1)
        assert use.recompute_peak(12) == pytest.approx(again.peak_bytes, rel=0.1)
        # One tower's graph does not stand beside the other's.
        assert use.recompute_peak(12) < use.backward_peak(12)
        for hook in hooks:
            hook.remove()


def forget(parameter):
    parameter.grad = None


@pytest.mark.parametrize("retain", ["auto", 1_500_000, 0])
@pytest.mark.parametrize("hidden", [0, 10**3, 10**5])
def test_a_host_keeps_what_the_step_would(tmp_path, monkeypatch, retain, hidden):
    host_bytes = 5_000_000
    monkeypatch.setattr("dsclr.retention.capacity_bytes", lambda *_: host_bytes)
    ours = replace(
        planner(tmp_path, dsclr={"step": {"retain": retain}}), uses={False: replace(USE, hidden=Line(0, hidden))}
    )
    retention = Retention(retain, torch.device("cpu"))
    retention.observe_graph(8, USE.graph(8))
    retention.observe_hidden(8, 8 * hidden)
    setting = ours.configured(host_bytes, on_host=True)
    assert setting.kept == retention.kept_chunks(64, 8)
    assert setting.hidden == retention.keeps_hidden(64)


def test_summary_names_the_largest_parts(tmp_path):
    text = summary(planner(tmp_path).forecast(Setting(64, 8, False, 8)), 10**9)
    assert "graphs kept 6.4 MB" in text
    assert "of 1 GB a rank at the" in text
