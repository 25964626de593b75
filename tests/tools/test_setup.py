"""tools/setup.sh: installs once, and only what its caller asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    """A project whose .venv/bin/python only writes down its arguments."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/constraints.txt", "tools/setup.sh"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n')
    python.chmod(0o755)
    return tmp_path


def installs(project, extras="", arguments=()):
    script = f"set -euo pipefail; source tools/setup.sh; setup_venv {extras}"
    subprocess.run(["bash", "-c", script, "test", *arguments], cwd=project, check=True, capture_output=True)
    calls = (project / ".venv/bin/calls").read_text().splitlines()
    return [call.split()[-1] for call in calls if " install " in call]


def test_arguments_of_the_calling_script_are_no_extras(project):
    assert installs(project, arguments=["--set", "dsclr.run.seed=1"]) == ["."]


def test_a_step_already_done_is_not_repeated(project):
    assert installs(project, "dev") == [".[dev]"]
    assert installs(project, "dev") == [".[dev]"]
    (project / "tools/constraints.txt").write_text("numpy==2.4.6\n")
    assert installs(project, "dev") == [".[dev]", ".[dev]"]
