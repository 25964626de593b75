"""The peak memory of one case of tools/bench_step.py, and of a step of ours the planner's forecast of it.

On a CPU the peak is the process's, so each measurement needs a fresh one, with :data:`ENVIRONMENT`.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_step_cases import (  # type: ignore[import-not-found]
    EVERYTHING,
    Setup,
    make_batch,
    make_engine,
    make_model,
    make_step,
    other_schemes,
)

from dsclr.data import Batch
from dsclr.losses.footprint import CLIP_LOSS_MATRICES, dense_bytes
from dsclr.memory import capacity_bytes, release
from dsclr.models import ContrastiveModel
from dsclr.plan import Forecast, Planner, make_planner
from dsclr.retention import DEVICE_SHARE, HOST_SHARE, Retention

# Our steps, by the part of the graphs that is kept.
KEPT = {"step_none_kept": 0.0, "step_half_kept": 0.5, "step_all_kept": 1.0}
# glibc keeps freed memory below this size for itself, in holes that the next tensor may not fit: measured so, the same
# step takes twice what its tensors do.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "16384"}
# Parts of a forecast that are there before the step.
RESIDENT = ("parameters", "fp32 master weights", "optimizer state", "memory bank")
WARM_ROWS = 2


def planner_of(setup: Setup, model: ContrastiveModel, rows: int, retain: int = 0) -> Planner:
    """Of a step of so many rows, with checkpointing as the setup says."""
    batch = make_batch(model, 1)

    def tokenizer(texts: list[str]) -> torch.Tensor:
        # Not the model's own, whose ids need not be those of a model made for tests.
        return batch.b.expand(len(texts), -1)

    return make_planner(setup.config(rows, retain), 1, model, tokenizer, both=False)


def with_retention(planner: Planner, setup: Setup, case: str, rows: int) -> Planner:
    """For a step of so many rows that keeps what its case says."""
    chunks = -(-rows // setup.micro)
    retain = EVERYTHING
    if KEPT[case] < 1:
        # Half a graph to spare where some are kept: what the step measures may differ from the plan in its last digits.
        kept = int(KEPT[case] * chunks)
        retain = int((kept + 0.5) * planner.uses[setup.checkpointing].graph(setup.micro)) if kept else 0
    return replace(planner, config=setup.config(rows, retain))


def fits(planner: Planner, setup: Setup, case: str, rows: int, device: torch.device) -> bool:
    """Whether a case is tried: as far as the step itself would go, since a host without memory kills a process."""
    share = HOST_SHARE if device.type == "cpu" else DEVICE_SHARE
    return _needed_bytes(planner, setup, case, rows) <= share * capacity_bytes(device)


def _needed_bytes(planner: Planner, setup: Setup, case: str, rows: int) -> int:
    if case in KEPT:
        ours = with_retention(planner, setup, case, rows)
        return ours.forecast(ours.configured(0)).peak_bytes
    at_once = rows if case == "plain" else min(setup.micro, rows)
    activations = planner.uses[setup.checkpointing].backward_peak(at_once)
    has_loss = case in ("plain", "accum_freq", "gradcache")
    return activations + (dense_bytes(rows, rows, CLIP_LOSS_MATRICES) if has_loss else 0)


def measure(setup: Setup, case: str, rows: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a first whole step, and the rise of the peak over what is there before it.

    Before it are the model, the optimizer's state, the batch on the host, and what libraries allocate in a step of two
    rows.
    """
    model = make_model(setup, device)
    batch = make_batch(model, rows)
    if case not in KEPT:
        scheme = other_schemes(model, setup.micro)[case]
        scheme(first_rows(batch, WARM_ROWS))
        return _measured(lambda: scheme(batch), device)[0]
    engine = make_engine(setup, model)
    planner = with_retention(planner_of(setup, model, rows), setup, case, rows)
    make_step(replace(setup, micro=WARM_ROWS // 2), engine, Retention(0, device))(first_rows(batch, WARM_ROWS))
    step = make_step(setup, engine, Retention(planner.config.dsclr.step.retain, device))
    record, result = _measured(lambda: step(batch), device)
    forecast = planner.forecast(planner.configured(0))
    return {**record, "plan": _against_plan(forecast, record["bytes"], result.metrics["retained"])}


def first_rows(batch: Batch, rows: int) -> Batch:
    return Batch(batch.a[:rows], batch.b[:rows], batch.ids[:rows])


def _against_plan(forecast: Forecast, measured: int, retained: float) -> dict[str, Any]:
    resident = sum(forecast.parts[name] for name in RESIDENT)
    rise = forecast.peak_bytes - resident
    return {
        "checkpointing": forecast.setting.checkpointing,
        "kept": forecast.setting.kept,
        "micro_batches": forecast.setting.chunks,
        "kept_in_the_step": round(retained * forecast.setting.rows / forecast.setting.micro_batch_size),
        "forecast": rise,
        "measured": measured,
        "relative_error": rise / measured - 1,
        "phase": forecast.peak_phase,
        "phases": {name: forecast.phase_bytes(name) - resident for name in forecast.phases},
        "parts": {name: size for name, size in forecast.parts.items() if name not in RESIDENT},
    }


def _measured(run: Callable[[], Any], device: torch.device) -> tuple[dict[str, Any], Any]:
    """Seconds and bytes beyond those there before; the result."""
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        if platform.libc_ver()[0] == "glibc":
            # Free memory of the heap would be taken for memory there before.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        # Imports may have had a higher peak than what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        status = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return {"seconds": time.perf_counter() - start, "bytes": peak - before}, result
