"""What the schemes send, as formulas, and what that takes on networks of several speeds; tables and plots."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Bytes of a float32 number and of an id.
FLOAT, ID = 4, 8
# Gigabytes a second that one GPU can send, by network.
NETWORKS = {"NVLink, 300 GB/s": 300e9, "50 GB/s": 50e9, "25 GB/s": 25e9}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        ranks: W. rows: N of a rank. dim: D. chosen: rows of other ranks that a rank's rows kept, of both sides.
        row: bytes of a number of an embedding; gradients are float32.
    """

    ranks: int
    rows: int
    dim: int
    chosen: int = 0
    row: int = FLOAT

    @property
    def others(self) -> int:
        return self.rows * (self.ranks - 1)

    @property
    def all_visits(self) -> int:
        """Rows that a ring sends when they come home."""
        return self.rows * self.ranks


def _gather(s: Size, sides: int) -> int:
    return s.others * (sides * s.row * s.dim + ID)


# Payload that a rank sends in a step of the loss, forward and backward, by scheme.
SCHEMES: dict[str, Callable[[Size], int]] = {
    "topk, gather": lambda s: _gather(s, 2) + s.others * 2 * FLOAT * s.dim,
    "topk, gather, chosen pairs": lambda s: _gather(s, 2) + s.chosen * (FLOAT * s.dim + ID),
    "topk, ring": lambda s: 2 * _gather(s, 2) + s.all_visits * 2 * FLOAT * s.dim,
    "topk, ring, chosen pairs": lambda s: _gather(s, 2) + s.chosen * ((FLOAT + s.row) * s.dim + ID),
    "exact, gather": lambda s: _gather(s, 1) + s.others * (2 * FLOAT + FLOAT * s.dim),
    "exact, ring": lambda s: 2 * _gather(s, 1) + s.all_visits * FLOAT + s.others * FLOAT + s.all_visits * FLOAT * s.dim,
    "dense, gather": lambda s: _gather(s, 2) + s.others * 2 * s.row * s.dim,
    # All-gather of both sides, and reduce-scatter of their gradients.
    "open_clip, local_loss and gather_with_grad": lambda s: s.others * 2 * (s.row + s.row) * s.dim,
    # All-gather of both sides, and all-reduce of the gradients of all rows (Chen et al. 2023).
    "DisCo-CLIP": lambda s: s.others * 2 * (s.row + 2 * s.row) * s.dim,
    # Each direction alone: keys in the forward, keys and their gradients in the backward (Cheng et al. 2024).
    "Inf-CL": lambda s: 2 * (2 * s.others * s.row * s.dim + s.all_visits * FLOAT * s.dim),
}


def on_paper(rows: int, dim: int, k: int) -> list[dict[str, Any]]:
    """Bytes and seconds a step for 8 to 1,024 GPUs: bytes divided by the network's speed, no latency, no overlap."""
    points = []
    for ranks in GPUS:
        # Not more than there are, not more than the pairs: chosen without repetition in the worst case.
        chosen = 2 * min(rows * (ranks - 1), rows * k)
        size = Size(ranks, rows, dim, chosen, row=2)
        for scheme, formula in SCHEMES.items():
            if scheme == "topk, ring, chosen pairs" and chosen > 4 * rows:
                # More than pass by in a visit of both sides: the ring visits (RingRows.select).
                continue
            sent = formula(size)
            seconds = {network: sent / speed for network, speed in NETWORKS.items()}
            points.append({"gpus": ranks, "scheme": scheme, "bytes_sent": sent, "seconds": seconds})
    return points


def markdown(result: dict[str, Any]) -> str:
    setup = result["setup"]
    lines = [
        f"N = {setup['rows']} rows a rank, D = {setup['dim']}, k = {setup['k']}, float32, gloo over loopback, torch "
        f"{setup['torch']}, one thread a rank on {setup['cores']} cores; medians of {setup['repeats']} rounds.",
        "Times are those of the slowest rank, beside one process with as many rows as a rank has. "
        "Bytes are those of the loopback interface during a step, divided by the ranks; the smallest of the rounds.",
        "",
        "| ranks | scheme | k | time / one process on its rows | MB sent a rank | formula | counted / formula |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        k, time = case["k"] or "", case["seconds"] / case["alone_seconds"]
        formula = case["formula_bytes"]
        ratio = f"{case['counted_bytes'] / formula:.3f}" if formula else ""
        lines.append(
            f"| {case['ranks']} | {case['scheme']} | {k} | {time:.2f} | "
            f"{case['counted_bytes'] / 1e6:.2f} | {formula / 1e6:.2f} | {ratio} |"
        )
    paper = result["on_paper"]
    lines += [
        "",
        f"On paper: {setup['paper_rows']} rows a GPU, D = {setup['dim']}, k = {setup['k']}, embeddings in bfloat16, "
        "gradients in float32. Milliseconds a step that one GPU sends, without latency and as if nothing else was done "
        "meanwhile; chosen pairs in the worst case, no row chosen twice. A network's speed is that of one GPU.",
        "",
        "| GPUs | scheme | GB sent | " + " | ".join(f"{name}, ms" for name in NETWORKS) + " |",
        "|---|---|---|" + "---|" * len(NETWORKS),
    ]
    for point in paper:
        if point["gpus"] not in (8, 64, 1024):
            continue
        milliseconds = " | ".join(f"{1e3 * point['seconds'][name]:.2f}" for name in NETWORKS)
        lines.append(f"| {point['gpus']} | {point['scheme']} | {point['bytes_sent'] / 1e9:.3f} | {milliseconds} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Milliseconds by GPUs on the slowest network."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install -e .[bench] brings matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    network = list(NETWORKS)[-1]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for scheme in SCHEMES:
        points = [p for p in result["on_paper"] if p["scheme"] == scheme]
        axes.loglog([p["gpus"] for p in points], [1e3 * p["seconds"][network] for p in points], "o-", label=scheme)
    axes.set(xlabel="GPUs", ylabel=f"ms a step at {network}", title=f"{result['setup']['paper_rows']} rows a GPU")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
