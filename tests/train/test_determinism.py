"""dsclr.run.deterministic: the same bits every time, or an error that names the operation."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dsclr.config import ConfigError
from dsclr.train.determinism import explained, make_deterministic
from dsclr.train.step import ContrastiveStep
from tests.data.samples import write_shard
from tests.train.runs import lines, run, run_config


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    yield
    torch.use_deterministic_algorithms(False)


def test_two_runs_are_the_same_bit_for_bit(world, tmp_path):
    write_shard(tmp_path / "s0.tar", range(30), broken=(3,))
    for name in ("first", "second"):
        run(world, run_config(tmp_path, name, max_steps=3, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
    first, second = (
        [(line["loss"], line["grad_norm"]) for line in lines(tmp_path / name / "metrics.jsonl")]
        for name in ("first", "second")
    )
    assert len(first) == 3
    assert first == second
    for file in ("adapter_model.safetensors", "extras.safetensors"):
        ours, theirs = (load_file(tmp_path / name / "adapter" / file) for name in ("first", "second"))
        assert ours
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_an_operation_without_a_deterministic_implementation_is_named(world, tmp_path, monkeypatch):
    encode = ContrastiveStep._encode

    def scattered(self, *arguments):
        a, b = encode(self, *arguments)
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
        return a, b

    monkeypatch.setattr(ContrastiveStep, "_encode", scattered)
    write_shard(tmp_path / "s0.tar", range(30))
    with pytest.raises(ConfigError, match=r"dsclr\.run\.deterministic: put_ has no implementation"):
        run(world, run_config(tmp_path, "named", deterministic=True))


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="unrelated"), explained():
        raise RuntimeError("unrelated")


def test_a_workspace_that_is_not_deterministic_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0, accepted: :4096:8 or :16:8"):
        make_deterministic()
