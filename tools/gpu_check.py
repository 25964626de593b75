"""What tools/gpu_check.sh asks and writes: the machine's facts; one JSON and one Markdown file of what its stages left.

    python tools/gpu_check.py machine
    python tools/gpu_check.py collect --work runs/gpu_check --output tools/results/gpu

The folder of the stages holds stages.tsv (name, limit, seconds, exit status or "skipped", command), machine.json, and
by stage what it printed (.out, .err), its result (.json) and a table of that (.md) where it made one. Absolute paths
and the name of the host are taken out of everything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Of a stage that failed.
TAIL_LINES = 20
# Exit statuses of timeout; a process that the kernel killed for its memory ends with the second one too.
TIMED_OUT = ("124", "137")
_ABSOLUTE = re.compile(r"(?<![\w.)\]*/:~-])/(?:[\w.+@~-]+/)+")
_DEEPSPEED_SAYS = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(INFO|WARNING)\].*")
_PACKAGES = re.compile(r"(?:[\w.+@~-]*/)+(?:site|dist)-packages/")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("machine", help="print what the GPU and PyTorch are")
    collecting = commands.add_parser("collect", help="write gpu_check.json and gpu_check.md")
    collecting.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="what the stages left")
    collecting.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    collecting.add_argument("--seconds", type=int, default=0, help="of everything so far")
    options = parser.parse_args(arguments)
    if options.command == "machine":
        print(json.dumps(machine(), indent=2))
        return 0
    result = collect(options.work, options.seconds)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result, tables(options.work, result))
    (options.output / "gpu_check.md").write_text(text, encoding="utf-8")
    print(f"\n{summary(result)}\n\n{clean(str(options.output))}: gpu_check.json, gpu_check.md")
    return 0


def machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "memory_bytes": device.total_memory,
        "compute_capability": f"{device.major}.{device.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
    }


def collect(work: Path, seconds: int = 0) -> dict[str, Any]:
    """Everything that the stages left, without absolute paths.

    Args:
        work: the folder of the stages.
        seconds: that everything took.
    """
    lines = (work / "stages.tsv").read_text(encoding="utf-8").splitlines()
    stages = [_stage(work, *line.split("\t", 4)) for line in lines]
    return {
        "what": "tools/gpu_check.sh: stages on one GPU; memory in bytes",
        "machine": _read_json(work / "machine.json"),
        "ok": all(stage["ok"] for stage in stages),
        "seconds": seconds,
        "stages": stages,
    }


def _stage(work: Path, name: str, limit: str, seconds: str, status: str, command: str) -> dict[str, Any]:
    result = _read_json(work / f"{name}.json")
    record: dict[str, Any] = {
        "name": name,
        "command": clean(command),
        "limit_seconds": int(limit),
        "seconds": int(seconds),
        "ok": status == "0",
        "outcome": _outcome(status, int(seconds) >= int(limit)),
        "figures": _figures(name, work, result),
    }
    if result is not None:
        record["result"] = result
    if not record["ok"]:
        record["tail"] = [*_tail(work / f"{name}.out"), *_tail(work / f"{name}.err")]
    return record


def _outcome(status: str, at_limit: bool) -> str:
    if status == "skipped":
        return "not run: no time was left"
    if status in TIMED_OUT and at_limit:
        return "stopped at its time limit"
    return "ok" if status == "0" else f"failed, exit status {status}"


def _figures(name: str, work: Path, result: Any) -> dict[str, Any]:
    """The few values that say how a stage went; empty for what it did not come to."""
    if name in ("tests", "verify"):
        return {"outcome": line} if (line := _last_line(work / f"{name}.out")) else {}
    if name == "train":
        return _training(work / "train")
    if name == "plan" and isinstance(result, dict):
        return {
            key: result[key] for key in ("fits", "largest_micro_batch", "largest_train_batch_size") if key in result
        }
    if name == "loss" and isinstance(result, dict) and (memory := result.get("memory", {})).get("rows"):
        return {f"{case}, N = {memory['rows'][-1]:,}, bytes": x[-1] for case, x in memory.get("bytes", {}).items()}
    return {}


def _training(run: Path) -> dict[str, Any]:
    """Of a run folder: the loss, the speed without the first steps, and the forecast of memory beside the peak."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return {}
    if not steps:
        return {}
    figures: dict[str, Any] = {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "samples_per_second": statistics.median(x["samples_per_second"] for x in steps[2:] or steps),
        "recoveries": steps[-1].get("recoveries"),
        "peak_bytes": max(x["peak_bytes"] for x in steps),
    }
    forecast = _read_json(run / "plan.json")
    if isinstance(forecast, dict) and forecast.get("peak_bytes"):
        figures["forecast_peak_bytes"] = forecast["peak_bytes"]
        figures["peak / forecast"] = figures["peak_bytes"] / forecast["peak_bytes"]
        figures["forecast_parts"] = forecast.get("parts")
    return figures


def tables(work: Path, result: dict[str, Any]) -> dict[str, str]:
    """Stage -> Markdown that its tool wrote beside its result, or printed."""
    found = {}
    for name in (stage["name"] for stage in result["stages"]):
        for path in (work / f"{name}.md", work / f"{name}.out"):
            if path.is_file() and name not in found:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                if any(re.match(r"\| ?---", line) for line in lines):
                    found[name] = clean("\n".join(x for x in lines if not _DEEPSPEED_SAYS.match(x))).strip()
    return found


def summary(result: dict[str, Any]) -> str:
    """One row a stage."""
    lines = ["| stage | | seconds | limit | |", "|---|---|---|---|---|"]
    for stage in result["stages"]:
        figures = [f"{key}: {_word(key, x)}" for key, x in stage["figures"].items() if not isinstance(x, dict)]
        text = "; ".join(figures).replace("|", "\\|").replace("outcome: ", "")
        lines.append(
            f"| {stage['name']} | {stage['outcome']} | {stage['seconds']} | {stage['limit_seconds']} | {text} |"
        )
    return "\n".join(lines)


def markdown(result: dict[str, Any], made: dict[str, str]) -> str:
    """Args:
    result: of :func:`collect`.
    made: of :func:`tables`.
    """
    about = ", ".join(f"{key} {_word(key, value)}" for key, value in (result["machine"] or {}).items())
    verdict = "all stages passed" if result["ok"] else "NOT all stages passed"
    sections = ["# GPU check", f"{about}; {verdict}, {result['seconds']} s.", summary(result)]
    for stage in result["stages"]:
        sections += [f"## {stage['name']}", f"`{stage['command']}`"]
        parts = {key: x for key, x in stage["figures"].items() if isinstance(x, dict)}
        for key, x in parts.items():
            sections.append(
                "\n".join(["| " + key + " | |", "|---|---|", *(f"| {k} | {_word(key, v)} |" for k, v in x.items())])
            )
        if stage.get("tail"):
            sections.append("\n".join(["```", *stage["tail"], "```"]))
        if stage["name"] in made:
            # One heading level is the stage's.
            sections.append(re.sub(r"^(#+ )", r"##\1", made[stage["name"]], flags=re.MULTILINE))
    return "\n\n".join(sections) + "\n"


def _word(key: str, value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if "bytes" in key or "parts" in key:
        return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def clean(text: str) -> str:
    """Without absolute paths (relative to the project or the package where that is in them) and the host's name."""
    text = _PACKAGES.sub("", text.replace(f"{ROOT}/", "").replace(str(ROOT), "."))
    text = _ABSOLUTE.sub("", text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "host", text) if len(host) > 3 and host != "localhost" else text


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(x) for x in value]
    return {clean(key): _cleaned(x) for key, x in value.items()} if isinstance(value, dict) else value


def _read_json(path: Path) -> Any:
    try:
        return _cleaned(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return []
    # A progress bar writes one long line.
    lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    lines = [line.rstrip() for line in lines if line.strip() and not _DEEPSPEED_SAYS.match(line)]
    return [clean(line)[:500] for line in lines[-TAIL_LINES:]]


def _last_line(path: Path) -> str:
    return next(iter(_tail(path)[-1:]), "").strip("= ")


if __name__ == "__main__":
    sys.exit(main())
