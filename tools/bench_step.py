"""Time and peak memory of a training step against the bare encoder, plain training and other schemes, for several N.

    python tools/bench_step.py --output tools/results/bench_step.json

Every repeat visits all cases in turn, so that a machine whose speed drifts treats them alike; a ratio is that of
medians. That all schemes compute the same gradients is checked first. Memory is the rise of a fresh process's peak over
what is there before the step; the planner's forecast of it stands beside it. Images, texts and weights are random, the
images are in memory. Plots need the extra ``bench``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dsclr.plan import Planner

# Case -> what the report calls it.
TITLES = {
    "step_none_kept": "step, no graph kept",
    "step_half_kept": "step, half of the graphs kept",
    "step_all_kept": "step, all graphs kept",
    "two_forwards_backward": "encoder alone: 2 forwards + backward",
    "forward_backward": "encoder alone: forward + backward",
    "plain": "plain full batch",
    "accum_freq": "open_clip --accum-freq",
    "gradcache": "GradCache package",
}
TIMED = tuple(case for case in TITLES if case != "step_half_kept")
# A forward without graph takes less than one with it: the encoder alone need not be measured twice.
COMPARED_MEMORY = tuple(case for case in TITLES if case not in ("step_none_kept", "forward_backward"))
RATIOS = (
    ("step_none_kept", "two_forwards_backward"),
    ("step_all_kept", "forward_backward"),
    ("step_none_kept", "plain"),
    ("step_all_kept", "plain"),
    ("step_none_kept", "accum_freq"),
    ("step_all_kept", "accum_freq"),
    ("step_none_kept", "gradcache"),
    ("step_all_kept", "gradcache"),
)
# Bytes that N x D embeddings may take at their most: of both sides, the micro-batches' own, one tensor, its gradient.
EMBEDDING_COPIES = 6


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", help="an open_clip name or a JSON file; default: ViT-S-32-alt, on a GPU ViT-B-32")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--full", action="store_true", help="train every weight, without LoRA")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32, on a GPU bf16")
    parser.add_argument("--micro", type=int, help="rows of a micro-batch; default: 4, on a GPU 256")
    parser.add_argument("--rows", type=int, nargs="*", help="N: peak memory of the step that keeps no graph")
    parser.add_argument("--compare-rows", type=int, nargs="*", help="N: time and memory of every case that fits")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON; a table (.md) and plots (.png) of the same name beside it")
    parser.add_argument("--measure-memory", nargs=2, metavar=("CASE", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.model = options.model or ("ViT-B-32" if on_gpu else "ViT-S-32-alt")
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    options.micro = options.micro or (256 if on_gpu else 4)
    if options.rows is None:
        options.rows = [1024, 2048, 8192, 65536] if on_gpu else [4, 16, 64, 256]
    if options.compare_rows is None:
        options.compare_rows = [2048, 8192] if on_gpu else [4, 16]
    if not options.measure_memory and any(n % options.micro for n in (*options.rows, *options.compare_rows)):
        parser.error("--rows and --compare-rows must be multiples of --micro")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    # Before DeepSpeed is imported, by everything below.
    os.environ["DS_ACCELERATOR"] = options.device
    from dsclr.logs import configure_logging

    configure_logging(1)
    from bench_step_cases import Setup, check_agreement  # type: ignore[import-not-found]
    from bench_step_memory import measure  # type: ignore[import-not-found]
    from bench_step_report import markdown, plot  # type: ignore[import-not-found]

    from dsclr.train import runtime

    device = runtime.start().device
    setup = Setup(
        options.model, 0 if options.full else options.rank, options.micro, options.checkpointing, options.precision
    )
    if options.measure_memory:
        case, rows = options.measure_memory
        print(json.dumps(measure(setup, case, int(rows), device)))
        return
    result: dict[str, Any] = {
        "what": "dsclr step benchmark; times in seconds, memory in bytes",
        "setup": asdict(setup),
        "machine": _machine(device),
        "agreement": check_agreement(setup, device),
        **times(setup, options, device),
    }
    result.update(memory(setup, options, result["dim"], result["does_not_fit"]))
    text = markdown(result, TITLES)
    print(f"\n{text}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        options.output.with_suffix(".md").write_text(text)
        plot(result, TITLES, options.output.with_suffix(".png"))


def _machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def times(setup: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of every case by N, and what does not fit."""
    from bench_step_cases import EVERYTHING, make_batch, make_engine, make_model, make_step, other_schemes
    from bench_step_memory import WARM_ROWS, first_rows, fits, planner_of

    from dsclr.memory import is_out_of_memory, release
    from dsclr.retention import Retention

    model = make_model(setup, device)
    cases = other_schemes(copy.deepcopy(model), setup.micro)
    planner: Planner = planner_of(setup, model, setup.micro)
    engine = make_engine(setup, model)
    batch = make_batch(model, max([WARM_ROWS, *options.compare_rows]))
    for scheme in cases.values():
        scheme(first_rows(batch, WARM_ROWS))
    for case, retain in (("step_none_kept", 0), ("step_all_kept", EVERYTHING)):
        retention = Retention(retain, device)
        # Two micro-batches of one row: it measures the size of a graph, once.
        make_step(replace(setup, micro=1), engine, retention)(first_rows(batch, WARM_ROWS))
        cases[case] = make_step(setup, engine, retention)

    def once(case: str, rows: int) -> float:
        own = first_rows(batch, rows)
        _synchronise(device)
        start = time.perf_counter()
        cases[case](own)
        _synchronise(device)
        if getattr(cases[case], "recoveries", 0):
            # It was done again, in other micro-batches: something else was measured.
            raise torch.OutOfMemoryError(f"{case}: {rows} rows are out of memory")
        return time.perf_counter() - start

    seconds: dict[str, dict[str, list[float]]] = {}
    skipped: list[tuple[str, int]] = []
    for rows in options.compare_rows:
        own = seconds[str(rows)] = {case: [] for case in TIMED if fits(planner, setup, case, rows, device)}
        for repeat in range(options.repeats):
            for case in list(own):
                try:
                    own[case].append(once(case, rows))
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    del own[case]
                    release(device)
                    continue
                print(f"{rows} rows  {repeat + 1}/{options.repeats}  {case}  {own[case][-1]:.3f} s", file=sys.stderr)
        skipped += [(case, rows) for case in TIMED if case not in own]
    return {"dim": planner.dim, "seconds": seconds, "ratios": _ratios(seconds), "does_not_fit": skipped}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ratios(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Name -> N -> ratio of medians."""
    ratios: dict[str, dict[str, float]] = {}
    for one, other in RATIOS:
        name = f"{TITLES[one]} / {TITLES[other].removeprefix('encoder alone: ')}"
        ratios[name] = {
            rows: statistics.median(own[one]) / statistics.median(own[other])
            for rows, own in seconds.items()
            if one in own and other in own
        }
    return ratios


def memory(setup: Any, options: argparse.Namespace, dim: int, skipped: list[tuple[str, int]]) -> dict[str, Any]:
    """Rise of the peak by case and N, its growth with N, and the plan against it."""
    rows = sorted({*options.rows, *options.compare_rows})
    wanted = [(setup, "step_none_kept", n) for n in rows]
    for n in options.compare_rows:
        # With one micro-batch its graph is kept whatever the case.
        if n > setup.micro:
            wanted += [(setup, case, n) for case in COMPARED_MEMORY if (case, n) not in skipped]
    several = [n for _, case, n in wanted if case == "step_half_kept"]
    other = replace(setup, checkpointing=not setup.checkpointing)
    wanted += [(other, case, several[-1]) for _, case, n in wanted if case.startswith("step") and n in several[-1:]]
    records = [(own, case, n, fresh_process(own, case, n, options.device)) for own, case, n in wanted]
    there = [(own, case, n, record) for own, case, n, record in records if record is not None]
    peaks: dict[str, dict[str, int]] = {case: {} for case in TITLES}
    for own, case, n, record in there:
        if own == setup:
            peaks[case][str(n)] = record["bytes"]
    return {
        "memory": {
            "bytes": peaks,
            # Of a first step, in that process.
            "seconds": {str(n): x["seconds"] for own, case, n, x in there if (own, case) == (setup, "step_none_kept")},
            "growth": _growth(peaks["step_none_kept"], setup.micro, dim),
        },
        "plan": [{"case": case, "rows": n, **record["plan"]} for _, case, n, record in there if "plan" in record],
    }


def _growth(peaks: dict[str, int], micro: int, dim: int) -> list[dict[str, Any]]:
    """Of the step without graphs: from the smallest N to the largest, and from the smallest of several micro-batches.

    One micro-batch is a step of another kind: its gradients are no sum, so there is one set of them less.
    """
    rows = sorted(map(int, peaks))
    starts = [rows[:1], [n for n in rows if n > micro][:1]]
    growth = []
    for smallest in sorted({n for start in starts for n in start if n < rows[-1]}):
        embeddings = EMBEDDING_COPIES * 4 * dim * (rows[-1] - smallest)
        grown = peaks[str(rows[-1])] - peaks[str(smallest)]
        growth.append(
            {
                "rows": [smallest, rows[-1]],
                "bytes": grown,
                "embeddings": embeddings,
                "beyond_embeddings": grown - embeddings,
                "beyond_embeddings / smallest peak": (grown - embeddings) / peaks[str(smallest)],
            }
        )
    return growth


def fresh_process(setup: Any, case: str, rows: int, device: str) -> dict[str, Any] | None:
    """What :func:`bench_step_memory.measure` returns in a process of its own; None where it fails."""
    from bench_step_memory import ENVIRONMENT

    words = [sys.executable, __file__, "--measure-memory", case, str(rows), "--device", device]
    words += ["--model", setup.model, "--micro", str(setup.micro), "--precision", setup.precision]
    words += ["--rank", str(setup.rank)] if setup.rank else ["--full"]
    words += ["--checkpointing"] if setup.checkpointing else []
    # A process group of its own.
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=alone | ENVIRONMENT)
    if done.returncode:
        print(f"{case}, {rows} rows: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"memory  {case}  {rows} rows  {record['bytes'] / 1e6:.1f} MB", file=sys.stderr)
    return record


if __name__ == "__main__":
    main()
    from dsclr.train import runtime

    runtime.stop()
