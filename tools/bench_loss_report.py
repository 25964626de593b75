"""Markdown and plots of what tools/bench_loss.py measured."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """The tables: ratios, times, memory by N, growth with M, what formulas say beyond, pruning."""
    shape, machine = result["shape"], result["machine"]
    product = _median(result, "gemm_fp32")
    memory, growth, beyond = result["memory"], result["growth"], result["formula"]
    sections = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {result['backend']} scan; "
        f"N = {shape['rows']}, M = {shape['keys']}, D = {shape['dim']}, k = {shape['k']}, float32. Symmetric cases "
        f"are both directions of N rows against N rows. Medians of {len(result['seconds']['scan'])} rounds in turns.",
        _table(["time", "ratio"], ((name, _number(value)) for name, value in result["ratios"].items())),
        _table(
            ["case", "seconds", "/ bare fp32 product of N x M"],
            (
                (name, _number(_median(result, name)), _number(_median(result, name) / product))
                for name in result["seconds"]
                if "/" not in name
            ),
        ),
    ]
    if memory["rows"]:
        sections += [
            "Memory beyond inputs and gradients, MB, symmetric:",
            _table(["N", *memory["bytes"]], _columns(memory["rows"], map(_megabytes, memory["bytes"].values()))),
            "Ratios of these:",
            _table(
                ["N", *(f"{n:,}" for n in memory["rows"])],
                ((name, *map(_number, values)) for name, values in memory["ratios"].items()),
            ),
        ]
    if growth["keys"]:
        times = [[_number(x) for x in growth[name]] for name in ("gemm_fp32", "scan", "scan / gemm_fp32")]
        sections += [
            f"Growth with the keys, N = {growth['rows']}, one direction, seconds and MB:",
            _table(
                ["M", "bare fp32 product", "scan", "scan / product", *(f"{name}, MB" for name in growth["bytes"])],
                _columns(growth["keys"], [*times, *map(_megabytes, growth["bytes"].values())]),
            ),
        ]
    by_formula = [_megabytes(beyond[name]) for name in ("topk", "exact", "dense_at_least")]
    sections += [
        "By formula beyond (dense: one float32 matrix of scores, and no less):",
        _table(
            ["N = M", "topk, MB", "exact, MB", "dense, MB", "scan of one direction, seconds"],
            _columns(beyond["rows"], [*by_formula, [_number(x) for x in beyond["scan_seconds"]]]),
        ),
        _table(
            ["order of the keys", "skip rate", "expected in random order", "selection work"],
            (
                (x["order"], *(_number(x[name]) for name in ("skip_rate", "expected_skip_rate", "selection_work")))
                for x in result["pruning"]
            ),
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _columns(first: Sequence[int], others: Iterable[Sequence[str]]) -> Iterable[tuple[object, ...]]:
    return zip([f"{x:,}" for x in first], *others, strict=True)


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(values: Sequence[int | None]) -> list[str]:
    return ["-" if x is None else f"{x / 1e6:,.1f}" for x in values]


def _median(result: dict[str, Any], name: str) -> float:
    return statistics.median(result["seconds"][name])


def plot(result: dict[str, Any], path: Path) -> None:
    """Memory by N and by M, times of all cases, growth of the scan with M; nothing where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install 'dsclr[bench]'", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 10))
    memory, growth = result["memory"], result["growth"]
    _lines(axes[0, 0], memory["rows"], memory["bytes"], 1e-6)
    axes[0, 0].set(xlabel="rows N = M, both directions", ylabel="MB beyond inputs and gradients")
    _lines(axes[1, 0], growth["keys"], growth["bytes"], 1e-6)
    axes[1, 0].set(xlabel=f"keys M, one direction, N = {growth['rows']}", ylabel="MB beyond inputs and gradients")
    _lines(axes[1, 1], growth["keys"], {name: growth[name] for name in ("gemm_fp32", "scan")})
    axes[1, 1].set(xlabel=f"keys M, N = {growth['rows']}", ylabel="seconds")
    names = [name for name in result["seconds"] if name != "gemm_bf16" and "/" not in name]
    axes[0, 1].barh(names[::-1], [_median(result, name) / _median(result, "gemm_fp32") for name in names[::-1]])
    axes[0, 1].set(xlabel="time / bare fp32 product of N x M")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _lines(axes: Any, x: Sequence[int], series: dict[str, Sequence[float | None]], unit: float = 1.0) -> None:
    for name, values in series.items():
        points = [(a, b * unit) for a, b in zip(x, values, strict=True) if b and b > 0]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log")
    axes.legend()
