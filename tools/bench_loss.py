"""Time and memory of the losses against bare matrix products, dense losses and faiss, as ratios of one run.

    python tools/bench_loss.py --output tools/results/bench_loss.json

Every repeat visits all cases in turn, so that a machine whose speed drifts treats them alike; a ratio is that of
medians. Memory is the rise of a fresh process's peak over its inputs and gradients. Needs the extra ``bench`` for faiss
and plots.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsclr.losses import DenseInfoNCE, ExactInfoNCE, Keys, Loss, TopKInfoNCE
from dsclr.ops import Kept, NativeUnavailable, expected_skip_rate, sparse_infonce, topk_scan, topk_scan_pair
from dsclr.ops.native import choose_backend
from dsclr.ops.streamed import streamed_infonce
from dsclr.ops.topk import DEFAULT_BLOCK_SIZE

Case = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="N")
    parser.add_argument("--keys", type=int, default=65536, help="M, of the one-directional cases")
    parser.add_argument("--dim", type=int, default=512, help="D")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[4096, 8192, 16384, 32768], help="N = M")
    parser.add_argument("--output", type=Path, help="JSON; a plot of the same name with .png beside it")
    parser.add_argument("--measure-memory", nargs=2, metavar=("LOSS", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        name, rows = options.measure_memory
        print(_peak_of(name, int(rows), options.dim, options.k, torch.device(options.device)))
        return
    result = {
        "what": "dsclr loss benchmark; times in seconds, medians; memory in bytes",
        "shape": {name: getattr(options, name) for name in ("rows", "keys", "dim", "k")},
        "block_size": DEFAULT_BLOCK_SIZE,
        "machine": _machine(options.device),
        **_times(options),
        "memory": _memory(options),
    }
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        _plot(result, options.output.with_suffix(".png"))


def _machine(device: str) -> dict[str, Any]:
    cpu = torch.device(device).type == "cpu"
    return {
        "device": torch.backends.cpu.get_cpu_capability() if cpu else torch.cuda.get_device_name(device),
        "native_bf16": bool(torch.cpu._is_avx512_bf16_supported()) if cpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _unit(rows: int, dim: int, seed: int, device: str | torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device)


def _cases(options: argparse.Namespace) -> dict[str, Case]:
    n, m, d, k, device = options.rows, options.keys, options.dim, options.k, options.device
    q, keys = _unit(n, d, 0, device).requires_grad_(), _unit(m, d, 1, device).requires_grad_()
    b = _unit(n, d, 2, device).requires_grad_()
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    labels = torch.arange(n, device=device)
    key_ids = torch.arange(m, device=device)
    plain_q, plain_keys = q.detach(), keys.detach()
    half_q, half_keys = plain_q.bfloat16(), plain_keys.bfloat16()

    def products(left: Tensor, right: Tensor) -> Case:
        buffer = left.new_empty(2048 * min(DEFAULT_BLOCK_SIZE, len(right)))

        def run() -> None:
            for rows in left.split(2048):
                for columns in right.split(DEFAULT_BLOCK_SIZE):
                    out = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
                    torch.mm(rows, columns.T, out=out)

        return run

    def one_direction(loss_fn: Any) -> Case:
        def run() -> None:
            _clear(q, keys, scale)
            positive = (q * keys[:n]).sum(1)
            loss_fn(positive).backward()

        return run

    def topk_loss(positive: Tensor) -> Tensor:
        top = topk_scan(plain_q, plain_keys, k, q_ids=labels, key_ids=key_ids)
        return sparse_infonce(q, keys[:n], positive, [Kept(q, keys, top)], scale)

    def exact_loss(positive: Tensor) -> Tensor:
        return streamed_infonce(q, keys, positive, scale, labels, key_ids)

    def dense_loss(positive: Tensor) -> Tensor:
        return F.cross_entropy(q @ keys.T * scale, labels)

    top = topk_scan(plain_q, plain_keys, k, q_ids=labels, key_ids=key_ids)
    positive = (plain_q * plain_keys[:n]).sum(1)

    def sparse() -> None:
        _clear(q, keys, scale)
        sparse_infonce(q, keys[:n], positive, [Kept(q, keys, top)], scale).backward()

    symmetric = {
        "symmetric_pair": lambda: topk_scan_pair(plain_q, b.detach(), k, ids=labels),
        "symmetric_two_calls": lambda: (
            topk_scan(plain_q, b.detach(), k, q_ids=labels, key_ids=labels),
            topk_scan(b.detach(), plain_q, k, q_ids=labels, key_ids=labels),
        ),
    }
    cases: dict[str, Case] = {
        "gemm_fp32": products(plain_q, plain_keys),
        "gemm_bf16": products(half_q, half_keys),
        "scan": lambda: topk_scan(plain_q, plain_keys, k, q_ids=labels, key_ids=key_ids),
        "scan_torch": lambda: topk_scan(plain_q, plain_keys, k, q_ids=labels, key_ids=key_ids, backend="torch"),
        "topk_forward_backward": one_direction(topk_loss),
        "sparse_forward_backward": sparse,
        "exact_forward_backward": one_direction(exact_loss),
        "dense_forward_backward": one_direction(dense_loss),
        **symmetric,
    }
    index = _faiss(plain_keys)
    if index is not None:
        queries = plain_q.numpy()
        cases["faiss_flat_ip"] = lambda: index.search(queries, k)
    if hasattr(F, "linear_cross_entropy"):
        cases["torch_linear_cross_entropy"] = one_direction(
            lambda positive: F.linear_cross_entropy(q * scale, keys, labels)
        )
    return cases


def _clear(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.grad = None


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
    median = {name: statistics.median(values) for name, values in times.items() if values}

    def ratio(one: str, other: str, factor: float = 1.0) -> float | None:
        return median[one] / (factor * median[other]) if one in median and other in median else None

    q, keys = _unit(options.rows, options.dim, 0, options.device), _unit(options.keys, options.dim, 1, options.device)
    stats = topk_scan(q, keys, options.k).stats
    return {
        "backend": _backend(q),
        "seconds": times,
        "ratios": {
            "scan / bare bf16 product": ratio("scan", "gemm_bf16"),
            "scan / bare fp32 product": ratio("scan", "gemm_fp32"),
            "scan / faiss IndexFlatIP": ratio("scan", "faiss_flat_ip"),
            "scan in PyTorch operations / scan": ratio("scan_torch", "scan"),
            "topk forward + backward / bare fp32 product": ratio("topk_forward_backward", "gemm_fp32"),
            "topk forward + backward / dense cross-entropy": ratio("topk_forward_backward", "dense_forward_backward"),
            "exact forward + backward / three bare fp32 products": ratio("exact_forward_backward", "gemm_fp32", 3),
            "exact forward + backward / F.linear_cross_entropy": ratio(
                "exact_forward_backward", "torch_linear_cross_entropy"
            ),
            "both directions from one tile / two calls": ratio("symmetric_pair", "symmetric_two_calls"),
            "sparse loss forward + backward / scan": ratio("sparse_forward_backward", "scan"),
        },
        "pruning": {
            "skip_rate": stats.skip_rate,
            "expected_skip_rate": expected_skip_rate(options.k, DEFAULT_BLOCK_SIZE, options.keys),
            "selection_work": stats.selection_work,
            "k": options.k,
            "block_size": DEFAULT_BLOCK_SIZE,
            "keys": options.keys,
            "order": "random",
        },
    }


def _backend(q: Tensor) -> str:
    try:
        return choose_backend("native", q.device, q.dtype)
    except NativeUnavailable:
        return "torch"


def _synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _peak_of(name: str, n: int, dim: int, k: int, device: torch.device) -> int:
    """Bytes of a loss's forward and backward (clip, N rows) beyond inputs and gradients, in this process."""
    losses: dict[str, Loss] = {"topk": TopKInfoNCE(k), "exact": ExactInfoNCE(), "dense": DenseInfoNCE()}
    a, b = (_unit(n, dim, seed, device).requires_grad_() for seed in (0, 1))
    scale = torch.tensor(50.0, device=device, requires_grad=True)
    ids = torch.arange(n, device=device)
    # Libraries and thread pools on a small problem first, gradients in place.
    small = slice(0, 64)
    losses[name](a[small], b[small], scale, ids[small], Keys(a[small], b[small], ids[small])).loss.backward()
    losses[name](a[small], b[small], scale, ids[small]).loss.backward()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _resident()
        _reset_peak()
    losses[name](a, b, scale, ids).loss.backward()
    gradients = 2 * a.numel() * a.element_size()  # of the inputs, before they are added to what is there
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


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {"rows": options.memory_rows}
    for name in ("topk", "exact", "dense"):
        table[name] = []
        for n in options.memory_rows:
            # dense holds some ten matrices of N x N
            if name == "dense" and n > 16384 and torch.device(options.device).type == "cpu":
                table[name].append(None)
                continue
            words = [sys.executable, __file__, "--measure-memory", name, str(n)]
            words += ["--dim", str(options.dim), "--k", str(options.k), "--device", options.device]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name} at {n} rows: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            table[name].append(int(done.stdout.split()[-1]) if done.returncode == 0 else None)
    table["topk_formula"] = [_formula(n, options.k) for n in options.memory_rows]
    table["dense / topk"] = [d / t if d and t else None for d, t in zip(table["dense"], table["topk"], strict=True)]
    table["topk / formula"] = [t / f if t else None for t, f in zip(table["topk"], table["topk_formula"], strict=True)]
    return table


def _formula(n: int, k: int) -> int:
    """Of TopKInfoNCE with one tile for both directions: results, candidates of one side, tile, sparse gradients."""
    tile = 4 * min(n, DEFAULT_BLOCK_SIZE) ** 2
    results = 2 * 12 * n * k
    candidates = 8 * n * (k + max(16, k // 4) + max(32, k // 2))
    return results + candidates + tile


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['machine']}, {result['backend']} scan, {result['shape']}\n")
    for name, value in result["ratios"].items():
        print(f"{name:<58} {'not measured' if value is None else f'{value:.3f}'}")
    memory = result["memory"]
    print(f"\n{'rows':>8} {'topk':>10} {'exact':>10} {'dense':>10}  MB beyond inputs and gradients")
    for i, n in enumerate(memory["rows"]):
        cells = [memory[name][i] for name in ("topk", "exact", "dense")]
        print(f"{n:>8} " + " ".join(f"{'-' if c is None else f'{c / 1e6:.1f}':>10}" for c in cells))
    print(f"\npruning: {result['pruning']}")


def _plot(result: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install 'dsclr[bench]'", file=sys.stderr)
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    memory = result["memory"]
    for name in ("dense", "exact", "topk"):
        points = [(n, v / 1e6) for n, v in zip(memory["rows"], memory[name], strict=True) if v]
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="rows N", ylabel="MB beyond inputs and gradients")
    left.legend()
    medians = {n: statistics.median(v) for n, v in result["seconds"].items() if v and n != "gemm_bf16"}
    base = medians["gemm_fp32"]
    right.barh(list(medians), [v / base for v in medians.values()])
    right.set(xlabel="time / bare fp32 product of N x M")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
