"""tools/bench_scale.py compares schemes that compute the same, and its formulas are what its own transfers count."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.environment import of_a_user
from tests.scripts import ROOT, load_script


@pytest.mark.slow
def test_every_scheme_is_measured_beside_its_formula(tmp_path):
    output = tmp_path / "bench.json"
    words = ["--ranks", "2", "--rows", "32", "--dim", "8", "--k", "4", "--repeats", "1", "--output", str(output)]
    # Its ranks are processes that import the script by its path.
    command = [sys.executable, str(ROOT / "tools" / "bench_scale.py"), *words]
    run = subprocess.run(command, env=of_a_user(), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(output.read_text())
    assert len(result["cases"]) == 8
    assert all(case["seconds"] > 0 and case["formula_bytes"] > 0 for case in result["cases"])
    table = output.with_suffix(".md").read_text()
    assert table in run.stdout
    assert "| 2 | open_clip, local_loss and gather_with_grad |" in table
    assert {point["gpus"] for point in result["on_paper"]} >= {8, 1024}


@pytest.mark.parametrize("world_size", [8, 64])
def test_one_tile_for_both_directions_sends_less_than_two_rings(monkeypatch, world_size):
    monkeypatch.syspath_prepend("tools")
    model = load_script("tools/bench_scale_model.py")
    size = model.Size(world_size, 1024, 512, row=2)
    sent = {name: formula(size) for name, formula in model.SCHEMES.items()}
    assert sent["exact, ring"] < 0.6 * sent["Inf-CL"]
    assert sent["exact, gather"] < sent["open_clip, local_loss and gather_with_grad"]
