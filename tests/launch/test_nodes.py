"""Two "nodes" of one rank each, by every launcher of launch/README.md, train what two ranks of one node train."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.environment import of_a_user
from tests.launch.test_train import ROOT, SMALL, command, lines, weights

FAKES = Path(__file__).parent / "fakes"
TORCHRUN = ["torchrun", "--nproc-per-node", "1"]
# A job of two nodes, as sbatch describes it to its script.
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_CPUS_PER_TASK": "16",
    "RANKS_PER_NODE": "1",
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def started(processes, folder, **environment):
    """One process for each of several lists of words, as a user starts them; none is left in the end."""
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    running = []
    try:
        for number, words in enumerate(processes):
            with open(folder / f"{number}.log", "w") as log:
                running.append(
                    subprocess.Popen(
                        words,
                        cwd=ROOT,
                        env=of_a_user(**changes),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                # Launchers end their ranks on this, also those in other sessions.
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def run_nodes(processes, folder, **environment):
    """Run them to their ends, which have to be good ones."""
    with started(processes, folder, **environment) as running:
        for number, process in enumerate(running):
            assert process.wait(400) == 0, (folder / f"{number}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """The configuration, and the run folder of two ranks on one node."""
    folder = tmp_path_factory.mktemp("one_node")
    config: dict[str, Any] = copy.deepcopy(SMALL)
    # With its warm-up the first steps would move nothing.
    del config["scheduler"]
    config["train_micro_batch_size_per_gpu"] = 4
    config["dsclr"]["run"]["max_steps"] = 2
    config["dsclr"]["negatives"] = {"across_ranks": "gather"}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["torchrun", "--nproc-per-node", "2", "--master-port", free_port(), "launch/train.py"]
    command([*words, "--deepspeed_config", str(folder / "config.json")], folder)
    return folder / "config.json", folder / "runs/small"


def test_two_ranks_of_one_node_train(one_node):
    _, run = one_node
    assert [record["step"] for record in lines(run / "metrics.jsonl")] == [1, 2]
    trained = weights(run / "adapter")
    assert all(value.abs().max() > 1e-4 for name, value in trained.items() if "lora_B" in name)


def assert_same_run(ours, theirs):
    timed = re.compile(r"(rank_)?(samples_per_second|seconds)|step_seconds|peak_bytes|slowest_rank|data_wait_share")
    records, expected = (lines(run / "metrics.jsonl") for run in (ours, theirs))
    assert [record["step"] for record in records] == [1, 2]
    for record, reference in zip(records, expected, strict=True):
        assert record.keys() == reference.keys()
        for name in (name for name in record if not timed.match(name)):
            assert record[name] == pytest.approx(reference[name], rel=1e-5), name
    first, second = (weights(run / "adapter") for run in (ours, theirs))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-6, msg=name)


def train(one_node, folder):
    return ["launch/train.py", "--deepspeed_config", str(one_node[0]), "--set", f"dsclr.run.dir={folder}/runs"]


def torchrun(script, folder):
    meet = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    return [[*TORCHRUN, "--nnodes", "2", "--node-rank", str(node), *meet, *script] for node in (0, 1)], {}


def torchrun_c10d(script, folder):
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "nodes"]
    return [[*TORCHRUN, "--nnodes", "2", *meet, *script] for _ in (0, 1)], {}


def hostfile(folder):
    path = folder / "hostfile"
    path.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    return ["deepspeed", "--hostfile", str(path), "--master_addr", "127.0.0.1", "--master_port", free_port()]


def deepspeed_no_ssh(script, folder):
    words = [*hostfile(folder), "--no_ssh", "--node_rank"]
    return [[*words, str(node), *script] for node in (0, 1)], {"DS_ACCELERATOR": "cpu"}


def deepspeed_ssh(script, folder):
    forwarded = folder / "deepspeed_env"
    forwarded.write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    environment = {"DS_ACCELERATOR": "cpu", "DS_ENV_FILE": str(forwarded)}
    return [[*hostfile(folder), *script]], {**environment, "PATH": f"{FAKES}:{os.environ['PATH']}"}


def slurm_script(script, folder):
    _, _, config, *rest = script
    environment = {**JOB, "SLURM_SUBMIT_DIR": str(ROOT), "MASTER_PORT": free_port()}
    return [["launch/slurm.sh", config, *rest]], {**environment, "PATH": f"{FAKES}:{os.environ['PATH']}"}


def srun_alone(script, folder):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, *script]
    return [words], {**environment, "PATH": f"{FAKES}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [slurm_script, torchrun, torchrun_c10d, deepspeed_no_ssh, deepspeed_ssh, srun_alone]
)
def test_two_nodes_train_what_one_trains(one_node, tmp_path, launcher):
    processes, environment = launcher(train(one_node, tmp_path), tmp_path)
    run_nodes(processes, tmp_path, **environment)
    assert_same_run(tmp_path / "runs/small", one_node[1])


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a cable, eth0 at 10.0.0.1 and at 10.0.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command: install iproute2")
    names = [f"dsclr-{os.getpid()}-{node}" for node in (0, 1)]
    ip = [["netns", "add", name] for name in names]
    ip.append(["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]])
    for node, name in enumerate(names):
        ip.append(["-n", name, "address", "add", f"10.0.0.{node + 1}/24", "dev", "eth0"])
        ip += [["-n", name, "link", "set", device, "up"] for device in ("lo", "eth0")]
    try:
        for words in ip:
            done = subprocess.run(["ip", *words], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: ip {' '.join(words)}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_two_network_namespaces_train_what_one_node_trains(one_node, tmp_path, namespaces):
    words = [*TORCHRUN, "--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29500", "--node-rank"]
    processes = [
        ["ip", "netns", "exec", name, *words, str(node), *train(one_node, tmp_path)]
        for node, name in enumerate(namespaces)
    ]
    run_nodes(processes, tmp_path, GLOO_SOCKET_IFNAME="eth0")
    assert_same_run(tmp_path / "runs/small", one_node[1])


STUB = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
started = " ".join([os.environ["SRUN_CPUS_PER_TASK"], *sys.argv[1:]])
pathlib.Path(f"started-{os.environ['RANK']}").write_text(started)
if os.environ["ENDS"] == "failed":
    sys.exit(3)
time.sleep(100)
"""


@pytest.mark.parametrize(("ends", "status"), [("signalled", 85), pytest.param("failed", 3, marks=pytest.mark.slow)])
def test_slurm_queues_a_run_again_that_stopped_for_its_time_limit(tmp_path, ends, status):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/train.py").write_text(STUB)
    (tmp_path / "launch/torchrun.py").symlink_to(ROOT / "launch/torchrun.py")
    environment = {
        **JOB,
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "PATH": f"{FAKES}:{os.environ['PATH']}",
        "FAKE_REQUEUED": str(tmp_path / "requeued"),
        "MASTER_PORT": free_port(),
        "ENDS": ends,
    }
    ranks = [tmp_path / f"started-{rank}" for rank in (0, 1)]
    with started([["launch/slurm.sh", "run.json", "--set", "a=b c"]], tmp_path, **environment) as (script,):
        if ends == "signalled":
            patience = time.monotonic() + 200
            while not all(rank.exists() for rank in ranks) and time.monotonic() < patience:
                time.sleep(0.1)
            # To the script alone, as --signal=B:USR1 does.
            script.send_signal(signal.SIGUSR1)
        code = script.wait(200)
    assert code == status, (tmp_path / "0.log").read_text()
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("4711\n" if status == 85 else "")
    assert ranks[0].read_text() == "16 --deepspeed_config run.json --resume auto --set a=b c"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [([], {}, "usage: sbatch"), (["run.json"], {"RANKS_PER_NODE": ""}, "Slurm gave this job no GPUs")],
)
def test_slurm_script_says_what_it_lacks(tmp_path, arguments, environment, message):
    environment = of_a_user(**{**JOB, "SLURM_SUBMIT_DIR": str(tmp_path), **environment})
    done = subprocess.run(["launch/slurm.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
