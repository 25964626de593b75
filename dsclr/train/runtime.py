"""The process: rank, device, threads, process group."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dsclr.config import ConfigError
from dsclr.launcher import find_place


@dataclass(frozen=True)
class Runtime:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, metrics: dict[str, float]) -> dict[str, float]:
        """Of every rank's, which call this together; of those ranks that have it, where a name is not on all."""
        if self.world_size == 1:
            return metrics
        ranks: list[dict[str, float]] = [{}] * self.world_size
        dist.all_gather_object(ranks, metrics)
        names = list(dict.fromkeys(name for rank in ranks for name in rank))
        of_ranks = {name: [rank[name] for rank in ranks if name in rank] for name in names}
        return {name: sum(values) / len(values) for name, values in of_ranks.items()}

    def added(self, counts: list[int]) -> list[int]:
        """Element by element over all ranks, which call this together with lists of one length."""
        total = torch.tensor(counts, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        summed: list[int] = total.tolist()
        return summed


def device_type() -> torch.device:
    """The kind of device DeepSpeed will use, without touching it."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().device_name())


def start(timeout_seconds: float = 1800) -> Runtime:
    """Join the process group that the launcher announced, or be a group of one.

    On a CPU the backend is gloo, DeepSpeed compiles nothing, and the ranks of a machine share its processors
    unless OMP_NUM_THREADS says otherwise.

    Args:
        timeout_seconds: a rank that waits longer than this for the others fails.

    Raises:
        ConfigError: the environment holds half a group, or the machine shows fewer devices than it has ranks.
    """
    place = find_place()
    if not os.environ.get("RANK"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Compiling this op takes minutes and a compiler; gloo does its work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    else:
        if place.local_world_size > accelerator.device_count():
            raise ConfigError(
                f"{place.local_world_size} ranks on this machine need a device each, but see "
                f"{accelerator.device_count()}: start as many ranks as there are devices, all of them visible to every "
                "rank (srun: --gpus-per-node, without --gpus-per-task and --gpu-bind). How many ranks this machine "
                "has is what LOCAL_WORLD_SIZE says"
            )
        accelerator.set_device(place.local_rank)
        device = torch.device(accelerator.device_name(place.local_rank))
    if not dist.is_initialized():
        deepspeed.init_distributed(
            dist_backend=accelerator.communication_backend_name(),
            verbose=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    return Runtime(dist.get_rank(), dist.get_world_size(), place.local_rank, place.local_world_size, device)


def stop() -> None:
    """Leave the process group: without it half of the gloo runs abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
