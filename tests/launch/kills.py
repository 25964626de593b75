"""A run that is killed at random moments and resumed, until it is done."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsclr.interruption import INTERRUPTED, Interruption, end_process
from tests.data.samples import write_shard
from tests.environment import of_a_user
from tests.scripts import load_script
from tests.train.runs import same, timeless
from tests.train.steps import model_file

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["dsclr.train", __name__])
CHECKPOINT_EVERY = 3
# For a start under load; for the end of all ranks after the death of one.
START_SECONDS, END_SECONDS = 600, 60


def write_config(folder: Path, steps: int) -> Path:
    """A run with all that has to be where it was: dropout, a memory bank, skipped samples, evaluations."""
    train = write_shard(folder / "train.tar", range(48), broken=(3, 17))
    held_out = write_shard(folder / "held-out.tar", range(100, 116))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"stage": 2},
        "tensorboard": {"enabled": False},
        "dsclr": {
            "run": {"dir": str(folder / "runs"), "max_steps": steps, "checkpoint_every": CHECKPOINT_EVERY},
            "model": {"name": model_file(folder, 16, 49408), "lora": {"rank": 2, "dropout": 0.1}},
            "data": {"train": str(train), "workers": 1, "max_bad_fraction": 1},
            "eval": {"data": str(held_out), "every": 5},
            "loss": {"k": 3, "block_size": 4, "backend": "torch"},
            "negatives": {"across_ranks": "gather", "bank": {"size": 20, "max_age": 3}},
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


class _Imported:
    """A process of launch/train.py with the imports done, used like a subprocess.Popen."""

    def __init__(self, arguments: list[str], environment: dict[str, str], output: Path) -> None:
        self._process = FORK.Process(target=_train, args=(arguments, environment, output))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("launch/train.py", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _train(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """What the last lines of launch/train.py do."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    handle = os.open(output, os.O_APPEND | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    # Its own loader processes come from itself again.
    multiprocessing.set_start_method("fork", force=True)
    signals = Interruption()
    signals.listen()
    end_process(load_script("launch/train.py").main(arguments, signals))


class Job:
    """The ranks of a run, started as a launcher would.

    Args:
        arguments: of launch/train.py.
        output: a file that gets what every rank says.
        fresh: as commands; otherwise from a process that has done the imports, which are most of a start.
    """

    def __init__(self, ranks: int, arguments: list[str], output: Path, fresh: bool = False) -> None:
        self.output = output
        output.touch()
        environment = of_a_user(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environment.update(MASTER_PORT=str(free.getsockname()[1]), MASTER_ADDR="127.0.0.1")
            environment.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        start = self._command if fresh else self._imported
        self.processes: list[Any] = [
            start(arguments, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else environment)
            for rank in range(ranks)
        ]

    def _command(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
        words = [sys.executable, "launch/train.py", *arguments]
        with self.output.open("a") as out:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def _imported(self, arguments: list[str], environment: dict[str, str]) -> _Imported:
        return _Imported(arguments, environment, self.output)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def terminate_the_rest(self, seconds: float) -> None:
        """What a launcher does a second after a rank ended with an error."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and all(process.poll() is None for process in self.processes):
            time.sleep(0.1)
        time.sleep(1)
        for process in self.processes:
            process.terminate()

    def end(self, seconds: float) -> list[int]:
        """Exit statuses of all ranks, which have to end by themselves."""
        until = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.said()[-3000:]}") from None
        finally:
            for process in self.processes:
                process.kill()

    def wait_until(self, condition: Callable[[], bool], seconds: float = START_SECONDS, poll: float = 0.002) -> bool:
        """Whether it came true before the job ended."""
        until = time.monotonic() + seconds
        while not condition():
            if self.is_over():
                return False
            if time.monotonic() > until:
                self.end(0.1)
            time.sleep(poll)
        return True


@dataclass
class Killer:
    """Runs one configuration twice, undisturbed and with kills, and compares.

    Attributes:
        told: a line for every kill.
    """

    folder: Path
    ranks: int
    steps: int
    seed: int = 0
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = write_config(self.folder, self.steps)
        self.random = random.Random(self.seed)
        self.whole, self.killed = self.folder / "runs/whole", self.folder / "runs/killed"

    def start(self, name: str, fresh: bool = False) -> Job:
        arguments = ["--deepspeed_config", str(self.config), "--set", f"dsclr.run.name={name}", "--resume", "auto"]
        return Job(self.ranks, arguments, self.folder / f"{name}.log", fresh)

    def run(self, kills: int) -> None:
        """
        Raises:
            AssertionError: a run does not resume, loses more than it may, or is not the same in the end.
        """
        self.run_undisturbed()
        for number in range(kills):
            self.kill_once(number)
        self.finish()

    def run_undisturbed(self) -> None:
        job = self.start("whole")
        assert job.end(START_SECONDS + self.steps) == [0] * self.ranks, job.said()[-3000:]

    def finish(self) -> None:
        job = self.start("killed")
        assert job.end(START_SECONDS + self.steps) == [0] * self.ranks, job.said()[-3000:]
        self.compare()

    def kill_once(
        self, number: int, moment: str | None = None, killer: int | None = None, victims: list[int] | None = None
    ) -> None:
        """What is not given is drawn."""
        moment = moment or self.random.choice(["imports", "start-up", "step", "step", "save", "save"])
        killer = killer or self.random.choice([signal.SIGKILL, signal.SIGTERM])
        if victims is None:
            one = self.random.random() < 0.5
            victims = [self.random.randrange(self.ranks)] if one else list(range(self.ranks))
        before, started = self.step(), time.monotonic()
        begun = self.begun()
        job = self.start("killed", fresh=moment == "imports")
        if moment in ("imports", "start-up"):
            time.sleep(self.random.uniform(0.1, 12 if moment == "imports" else 4))
        elif moment == "step":
            target = before + self.random.randint(1, 4)
            job.wait_until(lambda: self.step() >= target)
            time.sleep(self.random.uniform(0, 0.3))
        else:
            # Not a part that an earlier kill left.
            job.wait_until(lambda: self.begun() > begun, poll=0.05)
            job.wait_until(lambda: any(self.killed.glob("checkpoints/*.part")), poll=0.0005)
            time.sleep(self.random.uniform(0, 0.06))
        is_saving = any(self.killed.glob("checkpoints/*.part"))
        for victim in victims:
            job.processes[victim].send_signal(killer)
        when = time.monotonic()
        if moment in ("imports", "start-up"):
            # Before there are lifelines the others wait for the rank that is gone, until the launcher ends them.
            job.terminate_the_rest(END_SECONDS)
        statuses = job.end(END_SECONDS)
        ended, step, newest = time.monotonic(), self.step(), self.newest()
        self.told.append(
            f"{number}: {signal.Signals(killer).name} of {victims} at {moment}{' (saving)' if is_saving else ''}, "
            f"{when - started:.1f} s after the start: {statuses} after {ended - when:.1f} s; step {before} -> {step}, "
            f"newest checkpoint {newest}"
        )
        print(self.told[-1], flush=True)
        self.check_statuses(killer, moment, victims, statuses, job)
        # A save that was under way may be lost, one that is complete never.
        every = CHECKPOINT_EVERY
        assert newest >= (step // every - 1) * every, self.told[-1]
        if killer == signal.SIGTERM and INTERRUPTED in statuses and moment == "step":
            assert newest == step, self.told[-1]
        self.compare_lines(len(lines(self.killed / "metrics.jsonl")))

    def check_statuses(self, killer: int, moment: str, victims: list[int], statuses: list[int], job: Job) -> None:
        said = job.said()[-3000:]
        if moment in ("imports", "start-up"):
            # -SIGTERM: before Python had begun with the script.
            assert set(statuses) <= {INTERRUPTED, 0, -signal.SIGTERM, -signal.SIGKILL, 1}, said
        elif killer == signal.SIGKILL:
            # Of the others, one that was at its end already may have made it.
            assert all(statuses[victim] in (-killer, 0) for victim in victims), said
            others = {statuses[rank] for rank in range(self.ranks) if rank not in victims}
            assert others <= {1, 0}, said
        else:
            assert set(statuses) <= {INTERRUPTED, 0}, said

    def begun(self) -> int:
        """How many starts have come as far as to choose where they begin."""
        log = self.folder / "killed.log"
        said = log.read_text(errors="replace") if log.is_file() else ""
        return len(re.findall("a new run begins|^resumed from", said, re.MULTILINE))

    def step(self) -> int:
        return next((line["step"] for line in reversed(lines(self.killed / "metrics.jsonl"))), 0)

    def newest(self) -> int:
        return max((int(path.name[5:]) for path in self.killed.glob("checkpoints/step-" + "[0-9]" * 8)), default=0)

    def compare_lines(self, count: int | None = None) -> None:
        whole, killed = (lines(run / "metrics.jsonl") for run in (self.whole, self.killed))
        assert [timeless(line) for line in killed] == [timeless(line) for line in whole[:count]]

    def compare(self) -> None:
        """Bit for bit."""
        self.compare_lines()
        for name in ("eval.jsonl", "skipped.jsonl"):
            # The ranks write to one file in any order.
            whole, killed = (sorted(map(str, lines(run / name))) for run in (self.whole, self.killed))
            assert killed == whole, name
            assert killed, name
        last = f"checkpoints/step-{self.steps:08d}"
        files = sorted(path.name for path in (self.whole / last).glob("*.pt"))
        assert len(files) > self.ranks
        for file in files:
            assert same(*(torch.load(run / last / file) for run in (self.whole, self.killed))), file
        ours, theirs = (weights(run / "adapter") for run in (self.whole, self.killed))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may be written to."""
    if not path.is_file():
        return []
    *complete, _ = path.read_text().split("\n")
    return [json.loads(line) for line in complete]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {**load_file(folder / "adapter_model.safetensors"), **load_file(folder / "extras.safetensors")}
