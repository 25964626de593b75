"""The configuration: what is accepted, and what each mistake is told."""

from __future__ import annotations

import json

import pytest

from dsclr.config import Config, ConfigError, load_config


def raw(**ours):
    return {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsclr": {"run": {"max_steps": 3}, "loss": {"k": 8}, **ours},
    }


def write(tmp_path, value):
    path = tmp_path / "run.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_overrides_reach_both_parts(tmp_path):
    path = write(tmp_path, raw())
    config = load_config(
        path,
        [
            "dsclr.loss.k=16",
            "train_batch_size=32",
            'dsclr.model.lora={"rank": 4}',
            "dsclr.run.name=x=y".replace("=y", "y"),
            "optimizer.params.lr=0.5",
            "dsclr.model.lora.alpha=8",
            "dsclr.eval.data=demo:noto-heldout",
        ],
    )
    assert config.dsclr.loss.k == 16
    assert config.train_batch_size == 32
    assert config.dsclr.model.lora is not None
    assert (config.dsclr.model.lora.rank, config.dsclr.model.lora.alpha) == (4, 8)
    assert config.raw["optimizer"]["params"]["lr"] == 0.5
    assert config.dsclr.eval.data == "demo:noto-heldout"


def test_resolved_configuration_is_complete_and_loads_again(tmp_path):
    config = Config(raw()).with_world_size(2)
    again = load_config(write(tmp_path, config.resolved())).with_world_size(2)
    assert again.resolved() == config.resolved()
    assert config.resolved()["dsclr"]["data"]["train"] == "demo:train"


@pytest.mark.parametrize(
    ("keys", "world_size", "expected"),
    [
        ({}, 1, (64, 64, 1)),
        ({}, 4, (64, 16, 1)),
        ({"train_micro_batch_size_per_gpu": 8}, 1, (64, 8, 8)),
        ({"train_micro_batch_size_per_gpu": 8}, 2, (64, 8, 4)),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 8}, 1, (64, 8, 8)),
    ],
)
def test_batch_keys_follow_from_the_contrastive_batch(keys, world_size, expected):
    config = Config({**raw(), **keys}).with_world_size(world_size)
    assert (config.train_batch_size, config.micro_batch_size, config.chunks) == expected


@pytest.mark.parametrize(
    ("change", "world_size", "message"),
    [
        ({"train_batch_size": 65}, 2, "train_batch_size = 65 does not divide over 2 ranks: use 64 or 66"),
        ({"train_micro_batch_size_per_gpu": 24}, 1, "micro-batch of 16 or 32, or a train_batch_size of 48 or 72"),
        ({"train_micro_batch_size_per_gpu": 128}, 1, "micro-batch of 64"),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}, 1, "makes 8: leave"),
        ({"train_batch_size": "auto"}, 1, "train_batch_size = 'auto', a positive integer"),
        ({"train_batch_size": None}, 1, "train_batch_size .* is missing"),
        ({"train_batch_size": 8}, 1, "k = 8, but only 7 valid negatives exist \\(N = 8\\): lower k or raise"),
        ({"train_batch_size": 16}, 2, "N = 8 rows a rank.* set dsclr.negatives.across_ranks to gather"),
    ],
)
def test_batches_that_do_not_fit(change, world_size, message):
    with pytest.raises(ConfigError, match=message):
        Config({**raw(), **change}).with_world_size(world_size)


def test_valid_negatives_are_counted_per_objective():
    simclr = {**raw(objective="simclr"), "train_batch_size": 5}
    Config(simclr).with_world_size(1)  # 2 x 5 - 2 = 8 negatives
    gathered = {**raw(negatives={"across_ranks": "gather"}), "train_batch_size": 16}
    Config(gathered).with_world_size(2)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"los": {}}, "unknown key dsclr.los; did you mean 'loss'?"),
        ({"data": {"train": [{"shards": "a", "weight": 0}]}}, "'weight': 0}]: weight: input should be greater than 0"),
        (
            {"data": {"train": [{"shard": "a", "weight": 1}]}},
            "unknown key dsclr.data.train.0.shard; did you mean 'shards'? Accepted: name, shards, weight",
        ),
        ({"step": "spill"}, "dsclr.step = 'spill': an object with host_images, retain, spill_dir is expected"),
        ({"loss": {"kk": 1}}, "unknown key dsclr.loss.kk; did you mean 'k'?"),
        ({"loss": {"k": 0}}, "dsclr.loss.k = 0: input should be greater than or equal to 1"),
        ({"loss": {"k": "many"}}, "dsclr.loss.k = 'many': input should be a valid integer"),
        ({"objective": "triplet"}, "dsclr.objective = 'triplet': input should be 'clip' or 'simclr'"),
        ({"model": {"lora": {"rnk": 1}}}, "unknown key dsclr.model.lora.rnk; did you mean 'rank'?"),
        ({"model": {"lora": {}, "lock_text": True}}, "lock_text freezes the text tower"),
        ({"objective": "simclr", "model": {"lora": {}}}, "never runs it"),
        ({"data": {"crop_scale": [0.5, 0.1]}}, "crop_scale"),
        ({"data": {"id": "md5"}}, "accepted: auto, caption, key, cls or json:FIELD"),
        ({"model": {"logit_scale": {"init": 200}}}, "init = 200.0 is above max = 100.0"),
        ({"run": {}}, "exactly one of max_steps and epochs"),
        ({"run": {"max_steps": 1, "epochs": 1}}, "exactly one of max_steps and epochs"),
        ({"run": {"max_steps": 1, "name": "a/b"}}, "dsclr.run.name = 'a/b'"),
        ({"data": {"train": 3}}, "dsclr.data.train = 3"),
    ],
)
def test_mistakes_in_our_section(ours, message):
    with pytest.raises(ConfigError) as error:
        Config(raw(**ours), "run.json")
    assert message in str(error.value)
    assert "run.json" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batchsize": 1}, "did you mean 'train_batch_size'?"),
        ({"model": {}}, "model belongs under dsclr: dsclr.model"),
        ({"dsclr": 3}, '"dsclr" is 3'),
        ({"zero_optimization": 2}, "zero_optimization = 2"),
    ],
)
def test_mistakes_at_the_top(change, message):
    with pytest.raises(ConfigError) as error:
        Config({**raw(), **change})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "a": 1,,\n}', "line 2, column"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' stands twice"),
        ("[]", "a JSON object is expected"),
        ("", "not valid JSON"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(path)


@pytest.mark.parametrize("override", ["dsclr.loss.k", "=3", "dsclr..k=3", "train_batch_size.x=3"])
def test_overrides_that_say_nothing(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        load_config(write(tmp_path, raw()), [override])


def test_null_switches_a_section_of_the_file_off(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(raw() | {"activation_checkpointing": {}}))
    assert "activation_checkpointing" in load_config(path).raw
    assert "activation_checkpointing" not in load_config(path, ["activation_checkpointing=null"]).raw
