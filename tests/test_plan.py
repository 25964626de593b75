"""Forecasts follow from what is measured and from shapes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from dsclr.encoder_use import EncoderUse, Line
from dsclr.memory import measured
from dsclr.models import build_model, enable_activation_checkpointing
from dsclr.plan import Planner, Setting, make_planner, summary
from dsclr.retention import Retention
from tests.train.steps import LORA, make_batch, make_config, model_file

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


def test_a_larger_micro_batch_costs_a_twentieth_of_a_forward_at_most(tmp_path):
    ours = planner(tmp_path)
    for rows in (64, 1024, 4096):
        for device in range(4_000_000, 60_000_000, 4_000_000):
            best = ours.best(rows, device)
            if best is None:
                continue
            fewest = min(
                s.forwards
                for s in ours._settings(rows, device)
                if ours.fits(s, device) and s.micro_batch_size >= min(32, best.setting.micro_batch_size)
            )
            assert best.setting.forwards <= fewest + 0.05


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
                torch.cat(list(sides.values())).sum().backward()
                del sides
        use = ours.uses[checkpointing]
        assert use.graph(12) == pytest.approx(graph.kept_bytes, rel=0.02)
        assert use.backward_peak(12) == pytest.approx(max(whole.peak_bytes, graph.peak_bytes), rel=0.1)
        assert use.recompute_peak(12) == pytest.approx(again.peak_bytes, rel=0.1)
        # One tower's graph does not stand beside the other's.
        assert use.recompute_peak(12) < use.backward_peak(12)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("model", [{"lock_image": True}, {"lock_text": True}, {}], ids=["text", "image", "both"])
def test_a_large_vocabulary_does_not_hide_the_activations(world, tmp_path, model):
    """Its gradient is the peak of a small micro-batch, the activations are that of a large one."""
    config = make_config(
        tmp_path, {"name": model_file(tmp_path, vocab_size=20_000), "lora": None, **model}
    ).with_world_size(1)
    built = build_model(config.dsclr.model, "clip")
    batch = make_batch(rows=256)
    use = make_planner(config, 1, built, lambda words: batch.b[: len(words)], both=False).uses[False]
    hooks = [p.register_post_accumulate_grad_hook(forget) for p in built.parameters() if p.requires_grad]
    with measured(torch.device("cpu")) as whole:
        trained = [z for z in built(batch.a, batch.b) if z.requires_grad]
        torch.cat(trained).sum().backward()
    assert use.backward_peak(256) == pytest.approx(whole.peak_bytes, rel=0.15)
    assert use.backward_peak(256) >= use.graph(256)
    del hooks


def test_measuring_leaves_running_statistics_alone(world, tmp_path):
    path = tmp_path / "dsclr-test-convolutional.json"
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    text = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 1}
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    config = make_config(tmp_path, {"name": str(path), "lora": None}).with_world_size(1)
    model = build_model(config.dsclr.model, "clip").train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    make_planner(config, 1, model, lambda words: make_batch().b[: len(words)], both=False)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


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
    forecast = planner(tmp_path).forecast(Setting(64, 8, False, 8))
    text = summary(forecast, 10**9)
    assert "gradients 6.64 MB" in text
    assert "of 1 GB a rank at the" in text
    # Of what lives at the peak and nothing else.
    assert forecast.peak_bytes == sum(forecast.as_dict()["peak_parts"].values())
    assert all(name in forecast.as_dict()["peak_parts"] for name in re.findall(r"[(,] ?([a-z' ,]*?) [0-9]", text))
