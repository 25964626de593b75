"""tools/bench_step.py on a model of a few thousand parameters."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.train.steps import model_file

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def bench_step(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import bench_step  # type: ignore[import-not-found]

    yield bench_step
    for name in [name for name in sys.modules if name.startswith("bench_step")]:
        del sys.modules[name]


def test_ratios_memory_and_plan_of_one_run(world, tmp_path, monkeypatch, bench_step):
    from bench_step_memory import KEPT, measure  # type: ignore[import-not-found]

    def fresh_process(setup, case, rows, device):
        """In this process, for starting others takes long; and not all of them, as if some failed."""
        measured = not setup.checkpointing and (case in KEPT or case == "plain")
        return measure(setup, case, rows, world.device) if measured else None

    monkeypatch.setattr(bench_step, "fresh_process", fresh_process)
    output = tmp_path / "bench_step.json"
    words = ["--model", model_file(tmp_path), "--micro", "2", "--rows", "4", "8", "--compare-rows", "4"]
    words += ["--device", world.device.type, "--precision", "fp32", "--repeats", "1", "--output", str(output)]
    bench_step.main(words)
    result = json.loads(output.read_text())
    assert result["agreement"].keys() == set(bench_step.TIMED) - {"plain"}
    assert max(result["agreement"].values()) <= 1
    assert len(result["ratios"]) == len(bench_step.RATIOS)
    assert all(own["4"] > 0 for own in result["ratios"].values())
    assert result["memory"]["bytes"]["step_none_kept"].keys() == {"4", "8"}
    assert [growth["rows"] for growth in result["memory"]["growth"]] == [[4, 8]]
    assert [(x["rows"], x["kept"]) for x in result["plan"]] == [(4, 0), (8, 0), (4, 1), (4, 2)]
    for x in result["plan"]:
        assert x["kept_in_the_step"] == x["kept"]
        assert math.isfinite(x["relative_error"])
    assert "| step, no graph kept / 2 forwards + backward |" in output.with_suffix(".md").read_text()


def test_a_scheme_with_other_gradients_is_not_compared(world, tmp_path, monkeypatch, bench_step):
    import bench_step_cases as cases  # type: ignore[import-not-found]
    from bench_step_memory import first_rows

    monkeypatch.setattr(cases, "gradcache", lambda model, batch, micro: cases.plain(model, first_rows(batch, micro)))
    setup = cases.Setup(model_file(tmp_path), 4, 2, False, "fp32")
    with pytest.raises(SystemExit, match="gradcache does not compute"):
        cases.check_agreement(setup, world.device)


def test_a_process_that_measures_memory_takes_any_micro_batch(bench_step):
    words = ["--measure-memory", "step_none_kept", "24", "--device", "cpu", "--micro", "24"]
    assert bench_step.parse_arguments(words).micro == 24
