"""Markdown and plots of what tools/bench_step.py measured."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(result: dict[str, Any], titles: dict[str, str]) -> str:
    """Ratios, times and memory by N, growth of the memory, the plan against it."""
    setup, machine, memory = result["setup"], result["machine"], result["memory"]
    trained = f"LoRA rank {setup['rank']}" if setup["rank"] else "every weight trained"
    seconds = result["seconds"]
    sections = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}; {setup['model']}, {trained}, "
        f"{setup['precision']}, micro-batches of {setup['micro']} rows, "
        f"{'with' if setup['checkpointing'] else 'without'} activation checkpointing, ZeRO 2, full softmax.",
    ]
    if seconds:
        rounds = max(len(values) for own in seconds.values() for values in own.values())
        sections += [
            f"Time, medians of {rounds} rounds in turns. A step of one micro-batch keeps its graph always.",
            _table(
                ["ratio", *(f"N = {n}" for n in seconds)],
                ([name, *(_number(own.get(n)) for n in seconds)] for name, own in result["ratios"].items()),
            ),
            _table(
                ["seconds", *(f"N = {n}" for n in seconds)],
                (
                    [title, *(_number(_median(own.get(case))) for own in seconds.values())]
                    for case, title in titles.items()
                    if any(case in own for own in seconds.values())
                ),
            ),
        ]
    rows = sorted({int(n) for own in memory["bytes"].values() for n in own})
    sections += [
        "Rise of the peak over what is there before the step, images left out, MB:",
        _table(
            ["MB", *(f"N = {n}" for n in rows)],
            (
                [titles[case], *(_megabytes(own.get(str(n))) for n in rows)]
                for case, own in memory["bytes"].items()
                if own
            ),
        ),
    ]
    for growth in memory["growth"]:
        sections.append(
            f"Without graphs kept, from N = {growth['rows'][0]} to {growth['rows'][1]} the peak grows by "
            f"{_megabytes(growth['bytes'])} MB, {_megabytes(growth['embeddings'])} MB of it embeddings and their "
            f"gradients; the rest is {100 * growth['beyond_embeddings / smallest peak']:.1f} % of the smallest peak."
        )
    sections += [
        "The planner against it:",
        _table(
            ["", "N", "checkpointing", "kept", "forecast, MB", "measured, MB", "error", "peak at"],
            (
                [
                    titles[x["case"]],
                    x["rows"],
                    "on" if x["checkpointing"] else "off",
                    f"{x['kept']} of {x['micro_batches']}",
                    _megabytes(x["forecast"]),
                    _megabytes(x["measured"]),
                    f"{100 * x['relative_error']:+.1f} %",
                    x["phase"],
                ]
                for x in result["plan"]
            ),
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _median(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def plot(result: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    """Times of the largest N, memory by N, the plan against it; nothing where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install 'dsclr[bench]'", file=sys.stderr)
        return
    figure, (times, memory, plan) = pyplot.subplots(1, 3, figsize=(20, 6))
    for rows, own in list(result["seconds"].items())[-1:]:
        names = list(own)[::-1]
        times.barh([titles[name] for name in names], [statistics.median(own[name]) for name in names])
        times.set(xlabel=f"seconds, N = {rows}")
    for case, by_rows in result["memory"]["bytes"].items():
        if by_rows:
            points = sorted((int(n), size / 1e6) for n, size in by_rows.items())
            memory.plot(*zip(*points, strict=True), marker="o", label=titles[case])
    memory.set(xscale="log", yscale="log", xlabel="N", ylabel="MB beyond what is there before the step")
    memory.legend()
    for on in (False, True):
        points = [(x["measured"] / 1e6, x["forecast"] / 1e6) for x in result["plan"] if x["checkpointing"] is on]
        if points:
            plan.scatter(*zip(*points, strict=True), label=f"{'with' if on else 'without'} checkpointing")
    if result["plan"]:
        ends = [f(x[name] / 1e6 for x in result["plan"] for name in ("measured", "forecast")) for f in (min, max)]
        plan.plot(ends, ends, color="grey", linewidth=1)
        plan.set(xscale="log", yscale="log")
        plan.legend()
    plan.set(xlabel="measured, MB", ylabel="forecast, MB")
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
