"""The loss over 1, 2 and 4 ranks: its time, the bytes that leave a rank, counted, and the formulas they follow.

    python tools/bench_scale.py --output tools/results/bench_scale.json

Ranks are processes of this machine that talk gloo over the loopback interface, whose counters say what was sent; other
traffic on it would be counted too, so the smallest of the rounds is taken. A model of 8 to 1,024 GPUs follows from the
formulas, on paper.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_scale_model import SCHEMES, Size, markdown, on_paper, plot  # type: ignore[import-not-found]
from open_clip import ClipLoss
from torch import Tensor

from dsclr.losses import DenseInfoNCE, ExactInfoNCE, SharedKeys, TopKInfoNCE, backward_of_collected
from dsclr.negatives import GatherExchange, RingExchange

SCALE = 100.0
# Hard negatives of which so few rows are chosen that only they go back.
FEW = 1
# Scheme -> (loss, exchange).
CASES = (
    "topk, gather",
    "topk, ring",
    "exact, gather",
    "exact, ring",
    "dense, gather",
    "chosen, gather",
    "chosen, ring",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], metavar="W", help="default: 1 2 4")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="of a rank; default: 1024")
    parser.add_argument("--dim", type=int, default=512, metavar="D", help="default: 512")
    parser.add_argument("--k", type=int, default=64, help="default: 64")
    parser.add_argument("--paper-rows", type=int, default=8192, metavar="N", help="of a GPU on paper; default: 8192")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; default: 3")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the figures, a table and a plot beside it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    setup = {
        "rows": options.rows,
        "dim": options.dim,
        "k": options.k,
        "paper_rows": options.paper_rows,
        "repeats": options.repeats,
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }
    cases = [case for ranks in options.ranks for case in measure(ranks, setup)]
    result = {
        "setup": setup,
        "cases": cases,
        "on_paper": on_paper(options.paper_rows, options.dim, options.k),
    }
    table = markdown(result)
    print(table, end="")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        options.output.with_suffix(".md").write_text(table)
        plot(result, options.output.with_suffix(".png"))
    return 0


def measure(ranks: int, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """All cases on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        mp.start_processes(_rank, (ranks, port, setup, str(path)), nprocs=ranks, start_method="spawn")
        return json.loads(path.read_text())


def _rank(rank: int, ranks: int, port: int, setup: dict[str, Any], path: str) -> None:
    # Loopback only: its counters are read.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        cases = _cases(rank, ranks, setup)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(path).write_text(json.dumps(cases))


def _cases(rank: int, ranks: int, setup: dict[str, Any]) -> list[dict[str, Any]]:
    rows, dim = setup["rows"], setup["dim"]
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.nn.functional.normalize(torch.randn(rows, dim, generator=generator), dim=1) for _ in range(2))
    ids = torch.arange(rows) + rank * rows
    works = _works(ranks, setup["k"])
    losses = {name: float(work(a, b, ids)[0]) for name, work in works.items()}
    _check(losses)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in works}
    chosen = dict.fromkeys(works, 0)
    for _ in range(setup["repeats"]):
        for name, work in works.items():
            dist.barrier()
            sent, started = _loopback_bytes(), time.perf_counter()
            _, chosen[name] = work(a, b, ids)
            dist.barrier()
            found[name].append((time.perf_counter() - started, _loopback_bytes() - sent))
    cases = []
    for name, rounds in found.items():
        if name.startswith("alone"):
            continue
        scheme = name.replace("chosen", "topk") + (", chosen pairs" if chosen[name] else "")
        counts = torch.tensor([chosen[name]])
        dist.all_reduce(counts)
        formula = SCHEMES[scheme](Size(ranks, rows, dim, int(counts) // ranks)) if ranks > 1 else 0
        cases.append(
            {
                "ranks": ranks,
                "scheme": scheme,
                "k": {"topk": setup["k"], "chosen": FEW}.get(name.split(", ")[0]),
                "seconds": statistics.median(seconds for seconds, _ in rounds),
                "alone_seconds": statistics.median(seconds for seconds, _ in found[_alone(name)]),
                "counted_bytes": min(sent for _, sent in rounds) / ranks if ranks > 1 else 0,
                "formula_bytes": formula,
            }
        )
    return cases


Work = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, int]]


def _works(ranks: int, k: int) -> dict[str, Work]:
    losses: dict[str, Any] = {
        "topk": TopKInfoNCE(k),
        "chosen": TopKInfoNCE(FEW),
        "exact": ExactInfoNCE(),
        "dense": DenseInfoNCE(),
    }
    works: dict[str, Work] = {f"alone, {name}": partial(_alone_step, loss) for name, loss in losses.items()}
    if ranks == 1:
        return works | {f"{name}, gather": works[f"alone, {name}"] for name in ("topk", "exact", "dense")}
    exchanges = {"gather": GatherExchange, "ring": RingExchange}
    for case in CASES:
        name, exchange = case.split(", ")
        step = _collected_step if name == "dense" else _shared_step
        works[case] = partial(step, losses[name], exchanges[exchange]())
    works["open_clip, local_loss and gather_with_grad"] = _open_clip_step
    return works


def _alone(name: str) -> str:
    loss = name.split(", ")[0]
    return f"alone, {'dense' if loss == 'open_clip' else loss}"


def _leaves(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.clone().requires_grad_(), b.clone().requires_grad_(), torch.tensor(SCALE, requires_grad=True)


def _alone_step(loss: Any, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    a, b, scale = _leaves(a, b)
    output = loss(a, b, scale, ids)
    output.loss.backward()
    return output.loss.detach(), 0


def _shared_step(loss: Any, exchange: Any, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    a, b, scale = _leaves(a, b)
    output = loss(a, b, scale, ids, SharedKeys(exchange))
    output.loss.backward()
    return output.loss.detach(), exchange.transport.rows_chosen


def _collected_step(loss: Any, exchange: Any, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    a, b, scale = _leaves(a, b)
    output, _ = backward_of_collected(loss, exchange, a, b, scale, ids)
    return output.loss, 0


def _open_clip_step(a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    a, b, scale = _leaves(a, b)
    loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=dist.get_rank(), world_size=dist.get_world_size())
    value = loss(a, b, scale)
    value.backward()
    return value.detach(), 0


def _check(losses: dict[str, float]) -> None:
    """That the schemes compute the same, before they are compared."""
    for group in (("topk",), ("exact", "dense", "open_clip"), ("chosen",)):
        values = {name: value for name, value in losses.items() if name.startswith(group)}
        if values and max(values.values()) - min(values.values()) > 1e-4 * max(values.values()):
            raise SystemExit(f"the schemes do not compute the same loss: {values}")


def _loopback_bytes() -> int:
    """Sent so far, by whatever process."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("/proc/net/dev knows no loopback interface: bytes cannot be counted here")


if __name__ == "__main__":
    raise SystemExit(main())
