"""Time and memory of the losses against bare matrix products, other losses and faiss, as ratios of one run.

    python tools/bench_loss.py --output tools/results/bench_loss.json

Every repeat visits all cases in turn, with the same threads, so that a machine whose speed drifts treats them alike; a
ratio is that of medians. That all losses compared are one and the same is checked first. Memory is the rise of a fresh
process's peak over its inputs and gradients. Needs the extra ``bench`` for faiss and plots; the cases stand in
bench_loss_cases.py.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_loss_cases import (  # type: ignore[import-not-found]
    MINI_BATCHES,
    all_steps,
    check_agreement,
    class_sorted,
    sparse_step,
    unit,
)
from bench_loss_report import markdown, plot  # type: ignore[import-not-found]
from torch import Tensor

from dsclr.losses.footprint import exact_bytes, topk_bytes
from dsclr.ops import NativeUnavailable, expected_skip_rate, topk_scan, topk_scan_pair
from dsclr.ops.native import choose_backend
from dsclr.ops.topk import DEFAULT_BLOCK_SIZE

Case = Callable[[], Any]
# Symmetric losses in the table of memory: all but the torch scan's.
CACHED = tuple(f"cached_stage_{size}" for size in MINI_BATCHES)
MEMORY = ("topk", "exact", "dense", "clip_loss", *CACHED, "infcl")
MEMORY_ONE_DIRECTION = ("topk", "exact", "dense", "linear_cross_entropy_chunked")
# Those that hold the matrix are not tried on a CPU beyond so many scores: some ten float32 matrices, 10 GB.
DENSE = ("dense", "clip_loss")
DENSE_SCORES = 16384**2
BEYOND = (65536, 131072, 262144)
CLASSES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="N")
    parser.add_argument("--keys", type=int, default=65536, help="M, of the one-directional cases")
    parser.add_argument("--dim", type=int, default=512, help="D")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[4096, 8192, 16384, 32768], help="N = M")
    parser.add_argument("--growth-keys", type=int, nargs="*", default=[4096, 16384, 65536], help="M, N as in --rows")
    parser.add_argument("--output", type=Path, help="JSON; a table (.md) and plots (.png) of the same name beside it")
    parser.add_argument("--markdown", type=Path, help="the table elsewhere")
    parser.add_argument("--measure-memory", nargs=3, metavar=("CASE", "N", "M"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        name, rows, keys = options.measure_memory
        print(_peak_of(name, int(rows), int(keys), options.dim, options.k, torch.device(options.device)))
        return
    if options.rows > min([options.keys, *options.growth_keys]):
        parser.error("--rows must not exceed --keys and --growth-keys: each row's positive is a key")
    result = {
        "what": "dsclr loss benchmark; times in seconds, medians; memory in bytes",
        "shape": {name: getattr(options, name) for name in ("rows", "keys", "dim", "k")},
        "block_size": DEFAULT_BLOCK_SIZE,
        "machine": _machine(options.device),
        "agreement": check_agreement(options.device),
        **_times(options),
        "pruning": _pruning(options),
        "memory": _memory(options),
    }
    result["growth"]["bytes"] = _memory_of_keys(options)
    result["formula"] = _formulas(options, result["growth"]["seconds_per_score"])
    text = markdown(result)
    print(f"\n{text}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        plot(result, options.output.with_suffix(".png"))
    table = options.markdown or (options.output and options.output.with_suffix(".md"))
    if table:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(text)


def _machine(device: str) -> dict[str, Any]:
    cpu = torch.device(device).type == "cpu"
    return {
        "device": torch.backends.cpu.get_cpu_capability() if cpu else torch.cuda.get_device_name(device),
        "native_bf16": bool(torch.cpu._is_avx512_bf16_supported()) if cpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cases(options: argparse.Namespace) -> dict[str, Case]:
    n, m, d, k, device = options.rows, options.keys, options.dim, options.k, options.device
    q, b, keys = (unit(rows, d, seed, device).requires_grad_() for rows, seed in ((n, 0), (n, 2), (m, 1)))
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    labels, key_ids = torch.arange(n, device=device), torch.arange(m, device=device)
    plain_q, plain_b, plain_keys = q.detach(), b.detach(), keys.detach()

    def scan(left: Tensor, right: Tensor, **more: Any) -> Case:
        return partial(topk_scan, left, right, k, q_ids=labels, key_ids=key_ids[: len(right)], **more)

    cases: dict[str, Case] = {
        "gemm_fp32": _products(plain_q, plain_keys),
        "gemm_bf16": _products(plain_q.bfloat16(), plain_keys.bfloat16()),
        "scan": scan(plain_q, plain_keys),
        "scan_torch": scan(plain_q, plain_keys, backend="torch"),
        "sparse_forward_backward": partial(sparse_step(scan(plain_q, plain_keys)()), q, keys, scale),
        "symmetric_gemm_fp32": _products(plain_q, plain_b),
        "symmetric_pair": lambda: topk_scan_pair(plain_q, plain_b, k, ids=labels),
        "symmetric_two_calls": lambda: (scan(plain_q, plain_b)(), scan(plain_b, plain_q)()),
    }
    index = _faiss(plain_keys)
    if index is not None:
        cases["faiss_flat_ip"] = partial(index.search, plain_q.numpy(), k)
    for name, step in all_steps(k).items():
        cases[name] = partial(step, q, b if name.startswith("symmetric") else keys, scale)
    most = unit(max([1, *options.growth_keys]), d, 1, device)
    for count in options.growth_keys:
        ids = torch.arange(count, device=device)
        cases[f"gemm_fp32/{count}"] = _products(plain_q, most[:count])
        cases[f"scan/{count}"] = partial(topk_scan, plain_q, most[:count], k, q_ids=labels, key_ids=ids)
    return cases


def _products(left: Tensor, right: Tensor) -> Case:
    """All scores in the tiles of a scan, into one buffer."""
    buffer = left.new_empty(2048 * min(DEFAULT_BLOCK_SIZE, len(right)))

    def run() -> None:
        for rows in left.split(2048):
            for columns in right.split(DEFAULT_BLOCK_SIZE):
                torch.mm(rows, columns.T, out=buffer[: len(rows) * len(columns)].view(len(rows), len(columns)))

    return run


def _faiss(keys: Tensor) -> Any:
    if keys.device.type != "cpu":
        return None
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(keys.shape[1])
    index.add(keys.numpy())
    return index


def _times(options: argparse.Namespace) -> dict[str, Any]:
    cases = _cases(options)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats):
        for name, case in cases.items():
            # Where bf16 products are emulated one measurement says all there is to say.
            if name == "gemm_bf16" and repeat and times[name][0] > 2 * times["gemm_fp32"][0]:
                continue
            _synchronise(options.device)
            start = time.perf_counter()
            case()
            _synchronise(options.device)
            times[name].append(time.perf_counter() - start)
            print(f"repeat {repeat + 1}/{options.repeats}  {name}  {times[name][-1]:.3f} s", file=sys.stderr)
    median = {name: statistics.median(values) for name, values in times.items()}
    growth = {name: [median[f"{name}/{m}"] for m in options.growth_keys] for name in ("gemm_fp32", "scan")}
    return {
        "backend": _backend(options.device),
        "seconds": times,
        "ratios": _ratios(median),
        "growth": {
            "rows": options.rows,
            "keys": options.growth_keys,
            **growth,
            "scan / gemm_fp32": [s / g for s, g in zip(growth["scan"], growth["gemm_fp32"], strict=True)],
            "seconds_per_score": median["scan"] / (options.rows * options.keys),
        },
    }


def _ratios(median: dict[str, float]) -> dict[str, float | None]:
    def ratio(one: str, other: str, factor: float = 1.0) -> float | None:
        return median[one] / (factor * median[other]) if one in median and other in median else None

    topk, exact = "topk_forward_backward", "exact_forward_backward"
    ratios = {
        "scan / bare bf16 product": ratio("scan", "gemm_bf16"),
        "scan / bare fp32 product": ratio("scan", "gemm_fp32"),
        "scan / faiss IndexFlatIP": ratio("scan", "faiss_flat_ip"),
        "scan in PyTorch operations / scan": ratio("scan_torch", "scan"),
        "sparse loss forward + backward / scan": ratio("sparse_forward_backward", "scan"),
        "topk forward + backward / bare fp32 product": ratio(topk, "gemm_fp32"),
        "topk in PyTorch operations / topk, forward + backward": ratio("topk_torch_forward_backward", topk),
        "exact forward + backward / three bare fp32 products": ratio(exact, "gemm_fp32", 3),
    }
    others = {
        "dense cross-entropy": "dense_forward_backward",
        "F.linear_cross_entropy": "linear_cross_entropy_forward_backward",
        "F.linear_cross_entropy, chunked": "linear_cross_entropy_chunked_forward_backward",
    }
    for name, case in others.items():
        ratios[f"topk forward + backward / {name}"] = ratio(topk, case)
        ratios[f"exact forward + backward / {name}"] = ratio(exact, case)
    ratios["both directions from one tile / two calls"] = ratio("symmetric_pair", "symmetric_two_calls")
    ratios["symmetric topk / bare fp32 product"] = ratio("symmetric_topk", "symmetric_gemm_fp32")
    ratios["symmetric topk in PyTorch operations / symmetric topk"] = ratio("symmetric_topk_torch", "symmetric_topk")
    ratios["symmetric exact / four bare fp32 products"] = ratio("symmetric_exact", "symmetric_gemm_fp32", 4)
    others = {
        "dense autograd": "symmetric_dense",
        "open_clip ClipLoss": "symmetric_clip_loss",
        **{
            f"sentence-transformers' cached stage, {size} rows": f"symmetric_cached_stage_{size}"
            for size in MINI_BATCHES
        },
        "Inf-CL, tile by tile": "symmetric_infcl",
    }
    for name, case in others.items():
        ratios[f"symmetric topk / {name}"] = ratio("symmetric_topk", case)
        ratios[f"symmetric exact / {name}"] = ratio("symmetric_exact", case)
    return ratios


def _pruning(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a scan skips with keys in random order, and with queries and keys sorted by class."""
    n, m, d, k, device = options.rows, options.keys, options.dim, options.k, options.device
    orders = {
        "random": (unit(n, d, 0, device), unit(m, d, 1, device)),
        f"sorted by class, {CLASSES} classes": (
            class_sorted(n, d, 1, CLASSES, device),
            class_sorted(m, d, 2, CLASSES, device),
        ),
    }
    records = []
    for order, (q, keys) in orders.items():
        stats = topk_scan(q, keys, k).stats
        records.append(
            {
                "order": order,
                "skip_rate": stats.skip_rate,
                "expected_skip_rate": expected_skip_rate(k, DEFAULT_BLOCK_SIZE, m),
                "selection_work": stats.selection_work,
                "k": k,
                "block_size": DEFAULT_BLOCK_SIZE,
                "keys": m,
            }
        )
    return records


def _backend(device: str) -> str:
    try:
        return choose_backend("native", torch.device(device), torch.float32)
    except NativeUnavailable:
        return "torch"


def _synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _peak_of(name: str, n: int, m: int, dim: int, k: int, device: torch.device) -> int:
    """Bytes of one forward and backward beyond inputs and gradients, in this process."""
    step = all_steps(k)[name]
    a, b = unit(n, dim, 0, device).requires_grad_(), unit(m, dim, 1, device).requires_grad_()
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    # Libraries and thread pools on a small problem first.
    step(*(x[:64].detach().requires_grad_() for x in (a, b)), scale)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _resident()
        _reset_peak()
    outcome = step(a, b, scale)
    gradients = sum(x.numel() * x.element_size() for x in (*outcome.a, *outcome.b))
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - before - gradients
    return _peak() - before - gradients


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _reset_peak() -> None:
    # Imports may have had a higher peak than what is resident now.
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _measured(options: argparse.Namespace, case: str, n: int, m: int, dense: bool) -> int | None:
    """What :func:`_peak_of` returns in a fresh process; None where it fails or is not tried."""
    if dense and n * m > DENSE_SCORES and torch.device(options.device).type == "cpu":
        return None
    words = [sys.executable, __file__, "--measure-memory", case, str(n), str(m)]
    words += ["--dim", str(options.dim), "--k", str(options.k), "--device", options.device]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{case}, {n} rows, {m} keys: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    print(f"memory  {case}  {n} x {m}  {int(done.stdout.split()[-1]) / 1e6:.1f} MB", file=sys.stderr)
    return int(done.stdout.split()[-1])


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    """Symmetric losses by the number of rows."""
    rows = options.memory_rows
    table = {name: [_measured(options, f"symmetric_{name}", n, n, name in DENSE) for n in rows] for name in MEMORY}
    formula = {
        "topk": [topk_bytes(n, n, options.k) for n in rows],
        "exact": [exact_bytes(n, n, options.dim) for n in rows],
    }
    ratios = {}
    for ours in formula:
        for name in MEMORY:
            if name not in formula:
                ratios[f"{name} / {ours}"] = _quotients(table[name], table[ours])
        ratios[f"{ours} / formula"] = _quotients(table[ours], formula[ours])
    return {"rows": rows, "bytes": table, "formula": formula, "ratios": ratios}


def _quotients(one: Sequence[int | None], other: Sequence[int | None]) -> list[float | None]:
    return [x / y if x and y else None for x, y in zip(one, other, strict=True)]


def _memory_of_keys(options: argparse.Namespace) -> dict[str, list[int | None]]:
    """Losses of one direction by the number of keys."""
    cases = {name: f"{name}_forward_backward" for name in MEMORY_ONE_DIRECTION}
    there = all_steps(options.k)
    return {
        name: [_measured(options, case, options.rows, m, name in DENSE) for m in options.growth_keys]
        for name, case in cases.items()
        if case in there
    }


def _formulas(options: argparse.Namespace, seconds_per_score: float) -> dict[str, Any]:
    return {
        "what": "N = M beyond what is measured: bytes of the symmetric losses from their buffers, dense at least one "
        "float32 matrix of scores; seconds of the scan of one direction as N x M of the measured one",
        "rows": list(BEYOND),
        "topk": [topk_bytes(n, n, options.k) for n in BEYOND],
        "exact": [exact_bytes(n, n, options.dim) for n in BEYOND],
        "dense_at_least": [4 * n * n for n in BEYOND],
        "scan_seconds": [seconds_per_score * n * n for n in BEYOND],
    }


if __name__ == "__main__":
    main()
