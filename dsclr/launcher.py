"""Which of how many processes this is, as the launcher wrote it into the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dsclr.config import ConfigError

# What deepspeed and torchrun set, and what the process group is built from.
_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def find_place() -> Place:
    """The place that deepspeed, torchrun, srun or the user gave this process; without any, that of a single one.

    Tasks of srun get RANK and its companions from SLURM_* here, in the environment, where torch and DeepSpeed look.

    Raises:
        ConfigError: half a place, which would wait for other processes for ever.
    """
    if not os.environ.get("RANK") and int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        _take_over_srun()
    if not os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return Place()
    missing = [name for name in _GROUP if not os.environ.get(name)]
    if missing:
        there = [f"{name}={os.environ[name]}" for name in _GROUP if name not in missing]
        raise ConfigError(
            f"the environment holds {' '.join(there)}, but no {', '.join(missing)}: start with deepspeed or torchrun, "
            "which set them all, set them all yourself, or unset RANK and WORLD_SIZE to train in one process"
        )
    world_size = _number("WORLD_SIZE", least=1)
    # deepspeed calls it LOCAL_SIZE. By hand there is neither: all ranks are taken to be on this machine.
    size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if os.environ.get(name)), "WORLD_SIZE")
    local_world_size = _number(size, least=1)
    rank = _number("RANK", least=0, below=("WORLD_SIZE", world_size))
    return Place(rank, world_size, _number("LOCAL_RANK", least=0, below=(size, local_world_size)), local_world_size)


def _take_over_srun() -> None:
    # SLURM_STEP_*: only tasks of srun have them. A batch script has SLURM_PROCID and SLURM_NTASKS too.
    tasks = os.environ["SLURM_STEP_NUM_TASKS"]
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"srun started {tasks} tasks, but the environment holds no {', '.join(missing)}: before srun, "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'
        )
    # One count a node, such as 4(x2),3 for 4, 4 and 3.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
    a_node = [count for count, nodes in counts for _ in range(int(nodes or 1))]
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=tasks,
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=a_node[int(os.environ["SLURM_NODEID"])],
    )


def _number(name: str, least: int, below: tuple[str, int] | None = None) -> int:
    text = os.environ[name]
    value = int(text) if re.fullmatch(r"\d+", text) else -1
    if value < least or (below is not None and value >= below[1]):
        limit = f" below {below[0]} = {below[1]}" if below else ""
        raise ConfigError(f"the environment holds {name}={text}: a whole number from {least}{limit} is expected")
    return value
