"""How jobs of two ranks end under the launchers: what a scheduler sees, and how little is said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dsclr.interruption import INTERRUPTED
from tests.environment import of_a_user
from tests.launch.kills import END_SECONDS, ROOT, START_SECONDS, lines, write_config

TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port"]
OWN_TORCHRUN = [sys.executable, "launch/torchrun.py", *TORCHRUN[1:]]
DEEPSPEED = ["deepspeed", "--num_accelerators", "2", "--master_port"]
LAUNCHERS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED}


@dataclass
class Launched:
    """A job of two ranks under a launcher, in a process group of its own."""

    folder: Path
    process: psutil.Popen

    @property
    def run(self) -> Path:
        return self.folder / "runs/run"

    @property
    def step(self) -> int:
        return max((line["step"] for line in lines(self.run / "metrics.jsonl")), default=0)

    @property
    def state(self) -> dict:
        return json.loads((self.run / "state.json").read_text())

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        found: dict[str, psutil.Process] = {}
        for process in self.process.children(recursive=True):
            try:
                words, name, environment = process.cmdline(), process.name(), process.environ()
            except psutil.Error:  # at its end
                continue
            # The loader processes are forks of the ranks.
            if "launch/train.py" in words[1:3] and "pt_data" not in name and "LOCAL_RANK" in environment:
                found.setdefault(environment["RANK"], process)
        return [found[rank] for rank in sorted(found)]

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + START_SECONDS
        while self.step < step:
            assert self.process.poll() is None, self.said()[-3000:]
            assert time.monotonic() < until, self.said()[-3000:]
            time.sleep(0.05)

    def end(self, ranks: list[psutil.Process]) -> tuple[int, float]:
        """The launcher's exit status, and the seconds until all ranks are gone too."""
        started = time.monotonic()
        status = self.process.wait(END_SECONDS)
        _, alive = psutil.wait_procs(ranks, END_SECONDS - (time.monotonic() - started))
        assert not alive, self.said()[-3000:]
        return status, time.monotonic() - started


@pytest.fixture
def launch(tmp_path):
    """Starts a job and sees to it that nothing of it stays."""
    jobs: list[psutil.Popen] = []

    def start(launcher: list[str], *overrides: str) -> Launched:
        config = write_config(tmp_path, steps=2000)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            words = [*launcher, str(free.getsockname()[1]), "launch/train.py", "--deepspeed_config", str(config)]
        for override in overrides:
            words += ["--set", override]
        with (tmp_path / "log").open("w") as log:
            environment = of_a_user(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu")
            job = psutil.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        jobs.append(job)
        return Launched(tmp_path, job)

    yield start
    for job in jobs:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def begun(job: Launched) -> list[psutil.Process]:
    job.wait_for_step(4)
    ranks = job.ranks()
    assert len(ranks) == 2
    return ranks


def assert_interrupted(job: Launched) -> None:
    state = job.state
    assert (state["state"], state["step"]) == ("interrupted", job.step), job.said()[-3000:]
    assert (job.run / f"checkpoints/step-{job.step:08d}").is_dir()
    assert "goes on" in job.said()
    assert "before the first step" not in job.said()


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint_and_deepspeed_hands_the_status_on(launch):
    job = launch(DEEPSPEED)
    ranks = begun(job)
    ranks[1].terminate()
    status, seconds = job.end(ranks)
    print(f"deepspeed, SIGTERM to rank 1: status {status} after {seconds:.1f} s")
    assert status == INTERRUPTED
    assert_interrupted(job)
    assert "Traceback" not in job.said()


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)], ids=["torchrun", "deepspeed"]
)
def test_a_rank_that_is_killed_ends_the_job_and_is_named_once(launch, launcher):
    job = launch(LAUNCHERS[launcher])
    ranks = begun(job)
    ranks[1].kill()
    status, seconds = job.end(ranks)
    print(f"{launcher}, SIGKILL of rank 1: status {status} after {seconds:.1f} s")
    assert status not in (0, INTERRUPTED)
    said = job.said()
    assert said.count("error: rank 1 is gone without a word") == 1
    assert said.count("rank 0 ends, since rank 1 is gone") == 1
    # torchrun has one of its own
    assert said.count("Traceback") == (launcher == "torchrun"), said
    assert job.state["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("loss", "said"), [
    ("Raises", "error on rank 1: a mistake in the loss"),
    ("Hangs", "no answer of another rank within dsclr.run.timeout_seconds"),
])  # fmt: skip
def test_the_first_error_is_shown_once(launch, launcher, loss, said):
    overrides = f"dsclr.loss.name=tests.launch.faults:{loss}", "dsclr.run.timeout_seconds=15"
    job = launch(LAUNCHERS[launcher], *overrides)
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        ranks = job.ranks()
    job.process.wait(START_SECONDS)
    status, _ = job.end(ranks)
    print(f"{launcher}, {loss}: status {status}\n{job.said()}")
    assert status == 1
    assert job.said().count(said) == 1
    # that of the error, and torchrun's own
    assert job.said().count("Traceback") == 1 + (launcher == "torchrun")


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize(
    ("launcher", "number", "expected"),
    [
        (TORCHRUN, signal.SIGTERM, 1),
        (["torchrun", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *TORCHRUN[1:]], signal.SIGUSR1, 1),
        (TORCHRUN, signal.SIGUSR1, -signal.SIGUSR1),
        (OWN_TORCHRUN, signal.SIGTERM, INTERRUPTED),
        (OWN_TORCHRUN, signal.SIGUSR1, INTERRUPTED),
        (TORCHRUN, signal.SIGINT, 1),
        (OWN_TORCHRUN, signal.SIGINT, INTERRUPTED),
        (DEEPSPEED, signal.SIGINT, -signal.SIGINT),
        (DEEPSPEED, signal.SIGTERM, -signal.SIGTERM),
        (DEEPSPEED, signal.SIGUSR1, -signal.SIGUSR1),
    ],
    ids=[
        "torchrun-TERM",
        "torchrun-USR1-handled",
        "torchrun-USR1",
        "own-TERM",
        "own-USR1",
        "torchrun-INT",
        "own-INT",
        "deepspeed-INT",
        "deepspeed-TERM",
        "deepspeed-USR1",
    ],
)
def test_a_signal_to_the_launcher_ends_the_ranks_with_a_checkpoint(launch, launcher, number, expected, whole_group):
    job = launch(launcher)
    ranks = begun(job)
    if whole_group:
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    status, seconds = job.end(ranks)
    print(f"{number.name} to {launcher[:2]}{' and all' if whole_group else ''}: status {status} after {seconds:.1f} s")
    assert status == expected
    assert_interrupted(job)
