"""tools/bench_data.py runs all of its cases on the same samples."""

from __future__ import annotations

import json

import pytest

from tests.scripts import load_script


def test_every_case_and_stage_is_measured(tmp_path, capsys):
    pytest.importorskip("pandas", reason="open_clip's own pipeline needs it")
    bench_data = load_script("tools/bench_data.py")
    output = tmp_path / "bench.json"
    words = ["--samples", "64", "--sizes", "256 x 256", "--repeats", "1", "--output", str(output)]
    assert bench_data.main(words) == 0
    measured = json.loads(output.read_text())["sizes"]["256 x 256"]
    assert measured.keys() == {*bench_data.TITLES, *(f"stage_{stage}" for stage in bench_data.STAGES)}
    assert all(case["median"] > 0 for case in measured.values())
    table = output.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    assert "| open_clip's pipeline |" in table


def test_samples_that_make_no_whole_batches_are_refused(capsys):
    with pytest.raises(SystemExit):
        load_script("tools/bench_data.py").parse_arguments(["--samples", "100"])
    assert "a multiple of 32" in capsys.readouterr().err
