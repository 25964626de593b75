"""tools/gpu_check.sh, gpu_check.py and make_wheelhouse.sh, as far as a machine without a GPU and a network can tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import of_a_user
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
FORECAST = {"peak_bytes": 8_000_000_000, "parts": {"parameters": 300_000_000, "loss": 5_000_000}}
NAMES = ("gpu_check.sh", "gpu_check.py", "make_wheelhouse.sh", "constraints.txt")


@pytest.fixture(scope="module")
def gpu_check():
    return load_script("tools/gpu_check.py")


@pytest.fixture
def project(tmp_path):
    """The scripts in a folder of their own, so that what they write would be seen."""
    (tmp_path / "tools").mkdir()
    for name in NAMES:
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def bash(project, script, *arguments, **environment):
    words = ["bash", f"tools/{script}", *arguments]
    environment = of_a_user(**{"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1", **environment})
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, check=False)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_without_a_gpu_nothing_happens(project):
    before = files(project)
    done = bash(project, "gpu_check.sh", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"no GPU that PyTorch \(\S+\) can use: nothing to check\n", done.stdout)
    assert files(project) == before


def test_without_pytorch_nothing_happens(project, tmp_path_factory):
    before = files(project)
    bare = tmp_path_factory.mktemp("bin")
    for name in ("bash", "dirname"):
        (bare / name).symlink_to(str(shutil.which(name)))
    done = bash(project, "gpu_check.sh", PYTHON="no-such-python", PATH=str(bare))
    assert done.returncode == 0, done.stderr
    assert "no Python with PyTorch found" in done.stdout
    assert files(project) == before


def test_stages_fail_alone(project):
    """A machine whose Python does nothing but say that there is a GPU, and fail in one stage."""
    fake = project / "python-with-gpu"
    fake.write_text(f"""#!/bin/sh
case "$*" in
    *torch.cuda.is_available*) echo 2.11.0 True ;;
    *"gpu_check.py machine"*) echo '{{"device": "Fake", "memory_bytes": 80000000000, "torch": "2.11.0"}}' ;;
    *gpu_check.py*|*memory_bytes*) exec {sys.executable} "$@" ;;
    *bench_step*) echo "no such file in {project}/tools" >&2; exit 3 ;;
    "-m venv"*) mkdir -p .venv-gpu/bin && cp "$0" .venv-gpu/bin/python ;;
    *purelib*) echo .venv-gpu ;;
    *"-m pip install"*) echo "$@" >.venv-gpu/installed ;;
    *"-m pytest"*) echo "2 passed, 5 deselected in 1.00s" ;;
    *sys.executable*) echo /usr/bin ;;
esac
""")
    fake.chmod(0o755)
    (project / "wheelhouse").mkdir()
    done = bash(project, "gpu_check.sh", "results", PYTHON=str(fake))
    assert done.returncode == 1, done.stderr
    result = json.loads((project / "results/gpu_check.json").read_text())
    assert {stage["name"]: stage["outcome"] for stage in result["stages"]} == {
        **dict.fromkeys(("install", "tests", "verify", "train", "plan", "loss"), "ok"),
        "step": "failed, exit status 3",
    }
    words = (project / ".venv-gpu/installed").read_text()
    assert "--no-index --find-links wheelhouse" in words
    assert "-c runs/gpu_check/constraints.txt" in words
    for path in (project / "results").iterdir():
        assert str(project) not in path.read_text()
    again = bash(project, "gpu_check.sh", "results", PYTHON=str(fake))
    assert "== install" not in again.stdout


@pytest.fixture
def work(tmp_path):
    """What stages leave: one that passed, one that ran into its limit, one without a result."""
    folder = tmp_path / "work"
    (folder / "train").mkdir(parents=True)
    rows = [
        ("tests", 120, 40, 0, "python -m pytest -m gpu"),
        ("train", 90, 60, 0, "python launch/train.py"),
        ("plan", 60, 20, 0, "python tools/plan.py"),
        ("step", 180, 180, 124, "python tools/bench_step.py"),
        ("loss", 5, 0, "skipped", f"{ROOT}/tools/bench_loss.py"),
    ]
    (folder / "stages.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    (folder / "machine.json").write_text(json.dumps({"device": "A GPU", "memory_bytes": 80 * 10**9, "torch": "2.11.0"}))
    (folder / "tests.out").write_text("..........\n10 passed, 900 deselected in 30.0s\n")
    steps = [{"step": i, "loss": 5 - i, "samples_per_second": 10.0**i, "peak_bytes": 10**9 * i} for i in (1, 2, 3, 4)]
    (folder / "train/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "train/plan.json").write_text(json.dumps(FORECAST))
    (folder / "plan.json").write_text(json.dumps({"fits": True, "config": f"{ROOT}/ds_configs/a100.json"}))
    (folder / "plan.out").write_text("[2026-01-01 00:00:00,000] [WARNING] [x.py] noise\n| a rank | best |\n|---|---|\n")
    (folder / "step.err").write_text(f'File "{folder}/lib/python3.12/site-packages/torch/nn.py"\nkilled\n')
    return folder


def test_one_json(gpu_check, work, tmp_path):
    assert gpu_check.main(["collect", "--work", str(work), "--output", str(tmp_path / "out"), "--seconds", "300"]) == 0
    result = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert not result["ok"]
    assert result["seconds"] == 300
    stages = {stage["name"]: stage for stage in result["stages"]}
    assert stages["tests"]["figures"]["outcome"] == "10 passed, 900 deselected in 30.0s"
    assert stages["train"]["figures"] == {
        "steps": 4,
        "first_loss": 4,
        "last_loss": 1,
        "samples_per_second": 5500.0,
        "recoveries": None,
        "peak_bytes": 4 * 10**9,
        "forecast_peak_bytes": FORECAST["peak_bytes"],
        "peak / forecast": 0.5,
        "forecast_parts": FORECAST["parts"],
    }
    assert stages["plan"]["result"] == {"fits": True, "config": "ds_configs/a100.json"}
    assert stages["step"]["outcome"] == "stopped at its time limit"
    assert stages["step"]["tail"] == ['File "torch/nn.py"', "killed"]
    assert stages["loss"]["outcome"] == "not run: no time was left"
    assert stages["loss"]["command"] == "tools/bench_loss.py"


def test_one_markdown_file(gpu_check, work, tmp_path):
    gpu_check.main(["collect", "--work", str(work), "--output", str(tmp_path / "out")])
    text = (tmp_path / "out/gpu_check.md").read_text()
    assert "device A GPU, memory_bytes 80 GB" in text
    assert "| tests | ok | 40 | 120 | 10 passed, 900 deselected in 30.0s |" in text
    assert "peak_bytes: 4 GB" in text
    assert "| loss | 5 MB |" in text
    assert "| a rank | best |" in text
    assert "noise" not in text
    assert str(ROOT) not in text
    assert str(work) not in text


def test_memory_of_the_losses(gpu_check, work):
    memory = {"rows": [2048, 65536], "bytes": {"topk": [1, 2], "dense": [3, None]}}
    (work / "loss.json").write_text(json.dumps({"memory": memory}))
    result = gpu_check.collect(work)
    assert result["stages"][-1]["figures"] == {"topk, N = 65,536, bytes": 2, "dense, N = 65,536, bytes": None}
    assert "dense, N = 65,536, bytes: not measured" in gpu_check.summary(result)


def test_a_wheelhouse_holds_no_torch(project):
    before = files(project)
    done = bash(project, "make_wheelhouse.sh", "wheels", "3.12", "--without", "numpy,Pillow==12.0.0", "--dry-run")
    assert done.returncode == 0, done.stderr
    first, *wanted, last = done.stdout.splitlines()
    assert first.startswith("wheels, for Python 3.12 on Linux x86_64")
    assert last.split(": ")[1].split() == ["torch", "torchvision", "numpy", "pillow"]
    names = {re.split(r"[^\w.-]", line.strip())[0] for line in wanted}
    assert {"deepspeed", "open_clip_torch", "peft", "pytest", "pytest-timeout", "hypothesis", "setuptools"} <= names
    assert not names & {"torch", "torchvision", "numpy", "pillow", "ruff", "mypy"}
    assert files(project) == before


def test_torchvision_only_if_asked(project):
    done = bash(project, "make_wheelhouse.sh", "--torchvision", "0.26.0", "--dry-run")
    assert "torchvision==0.26.0" in done.stdout.split()


@pytest.mark.parametrize(
    "arguments", [["--with", "numpy"], ["a", "3.12", "b"], ["a", "312"], ["--without"], ["--torchvision", "--without"]]
)
def test_wrong_arguments(project, arguments):
    done = bash(project, "make_wheelhouse.sh", "--dry-run", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
