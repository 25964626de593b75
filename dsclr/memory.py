"""What memory there is, what a piece of work takes of it, and whether an error says that it ran out."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of errors that are no torch.OutOfMemoryError: the host's allocator, and libraries with allocators of their own.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def capacity_bytes(device: torch.device, local_ranks: int = 1) -> int:
    """What this process may use in all: of the device, what it holds and what is free; of the host, its share of what
    is free (a container's limit counts)."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device))
    free = psutil.virtual_memory().available
    for limit_file, use_file in zip(_CGROUP_LIMITS, _CGROUP_USES, strict=True):
        try:
            limit, used = (int(Path(name).read_text()) for name in (limit_file, use_file))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        free = min(free, limit - used)
    return max(0, free // local_ranks)


def peak_bytes(device: torch.device) -> int:
    """Peak so far: allocated on the device, or resident of this process on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))


@dataclass
class Use:
    """Attributes:
    kept_bytes: of tensors made in the block and alive at its end.
    peak_bytes: most that tensors made in the block took at one time.
    """

    kept_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def measured(device: torch.device) -> Iterator[Use]:
    """Measure the tensors that a block makes: by the allocator of a device, by watching every operation on a CPU.

    On a device the peak of :func:`peak_bytes` starts anew.
    """
    use = Use()
    if device.type == "cpu":
        meter = _HostMeter()
        with meter:
            yield use
        use.kept_bytes, use.peak_bytes = meter.live, meter.peak
        return
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    yield use
    use.kept_bytes = int(module.memory_allocated(device) - before)
    use.peak_bytes = int(module.max_memory_allocated(device) - before)


class _HostMeter(TorchDispatchMode):
    """Adds up the storages that operations make, and takes them off when they are freed.

    What an operation uses inside and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self._meet(x, is_new=False)
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            self._meet(x, is_new=True)
        return result

    def _meet(self, x: Any, is_new: bool) -> None:
        if not isinstance(x, Tensor):
            return
        storage = x.untyped_storage()
        key = id(storage)
        known = self._storages.get(key)
        if known is not None and known() is storage:
            return
        size = storage.nbytes() if is_new else 0
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: Any) -> None:
            self.live -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, freed)
