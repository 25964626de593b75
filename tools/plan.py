"""What a configuration needs of memory, and which settings fit a card.

    python tools/plan.py --deepspeed_config ds_configs/a100.json --device-memory 80GB --gpus 1

The encoder is built (with random weights) and measured on two small micro-batches; no data and no GPU are needed. On a
CPU the activations are those of its kernels in float32, scaled to the precision of the configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Fewer bytes are a number without its unit.
SMALLEST_DEVICE = 10**6
BATCHES = (2048, 4096, 8192, 65536)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help="the run: see ds_configs/")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as for launch/train.py")
    parser.add_argument("--device-memory", default="80GB", metavar="SIZE", help="of one card; default: 80GB")
    parser.add_argument("--gpus", type=int, default=1, metavar="W", help="ranks; default: 1")
    parser.add_argument(
        "--batches", type=int, nargs="*", metavar="N", help="train_batch_size to compare; default: 2,048 to 65,536"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    if options.gpus < 1:
        parser.error("--gpus: at least 1 is needed")
    if options.batches is None:
        options.batches = [n for n in BATCHES if n % options.gpus == 0]
    for batch in options.batches:
        if batch < 1 or batch % options.gpus:
            parser.error(f"--batches {batch}: a positive multiple of --gpus {options.gpus} is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from dsclr.config import ConfigError, load_config
    from dsclr.units import parse_bytes

    try:
        device_bytes = parse_bytes(options.device_memory)
        if device_bytes < SMALLEST_DEVICE:
            raise ValueError(
                f"--device-memory {options.device_memory} is {device_bytes} bytes: write a unit, as in 80GB"
            )
        if options.json and not options.json.parent.is_dir():
            raise ValueError(f"--json {options.json}: the folder {options.json.parent} does not exist")
        config = load_config(options.deepspeed_config, options.set).with_world_size(options.gpus)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from dsclr.logs import configure_logging

    configure_logging(0)
    from dsclr.train import runtime

    try:
        result = plan(config, options.gpus, device_bytes, options.batches, runtime.start().device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        runtime.stop()
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def plan(config: Any, world_size: int, device_bytes: int, batches: list[int], device: Any) -> dict[str, Any]:
    """
    Args:
        config: with batch keys filled in.
        device_bytes: of the card to plan for.
        batches: train_batch_size values to compare.
        device: where the encoder is measured.
    """
    import torch

    from dsclr.losses import build_loss
    from dsclr.models import build_model, enable_activation_checkpointing, get_tokenizer
    from dsclr.plan import make_planner
    from dsclr.train.engine import engine_config

    ours = config.dsclr
    engine_config(config, 1, "", torch.device("cuda"))
    build_loss(ours.loss, ours.objective)
    model = build_model(ours.model.model_copy(update={"pretrained": None}), ours.objective).to(device)
    if device.type != "cpu":
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision])
    enable_activation_checkpointing(model, config.raw)
    tokenizer = get_tokenizer(ours.model) if ours.objective == "clip" else None
    planner = make_planner(config, world_size, model, tokenizer)
    configured = planner.forecast(planner.configured(device_bytes))
    rows, micro = configured.setting.rows, configured.setting.micro_batch_size
    checkpointing = configured.setting.checkpointing
    compared = []
    for batch in batches:
        own = batch // world_size
        best = planner.best(own, device_bytes)
        compared.append(
            {
                "train_batch_size": batch,
                "best": None if best is None else best.as_dict(),
                "dense": planner.dense(own),
            }
        )
    best = planner.best(rows, device_bytes)
    return {
        "config": config.source,
        "device_memory_bytes": device_bytes,
        "gpus": world_size,
        "precision": config.precision,
        "measured_on": device.type,
        "parameters": planner.parameters,
        "trainable": planner.trainable,
        "per_row_bytes": {
            ("with checkpointing" if on else "without checkpointing"): {
                "graph": use.graph.per_row,
                "forward": use.forward_peak.per_row,
                "backward": use.backward_peak.per_row,
                "second_pass": use.recompute_peak.per_row,
            }
            for on, use in planner.uses.items()
        },
        "configured": configured.as_dict(),
        "fits": planner.fits(configured.setting, device_bytes),
        "dense": planner.dense(rows),
        "best": None if best is None else best.as_dict(),
        "least_device_memory_bytes": planner.least_device_bytes(rows),
        "largest_micro_batch": planner.largest_micro_batch(rows, checkpointing, device_bytes),
        "largest_train_batch_size": world_size * planner.largest_rows(micro, checkpointing, device_bytes),
        "batches": compared,
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    from dsclr.units import format_bytes

    configured, best = result["configured"], result["best"]
    lines = [
        f"{result['config']}: {result['trainable']:,} of {result['parameters']:,} parameters train, "
        f"{result['precision']}, {result['gpus']} card(s) of {format_bytes(result['device_memory_bytes'])}",
        "",
        "| a rank | as configured | best |",
        "|---|---|---|",
    ]

    def row(title: str, value: Any) -> None:
        lines.append(f"| {title} | {value(configured)} | {value(best) if best else 'nothing fits'} |")

    for title, key in (("rows", "rows"), ("micro-batch", "micro_batch_size"), ("checkpointing", "checkpointing")):
        row(title, lambda forecast, key=key: _word(forecast["setting"][key]))
    row(
        "micro-batches kept",
        lambda f: f"{f['setting']['kept']} of {-(-f['setting']['rows'] // f['setting']['micro_batch_size'])}",
    )
    row("forwards a row", lambda f: f"{f['setting']['forwards']:.2f}")
    for part in configured["parts"]:
        row(part, lambda forecast, part=part: format_bytes(forecast["parts"][part]))
    # Not all of them live at once.
    row("**peak**", lambda f: f"**{format_bytes(f['peak_bytes'])}** ({f['peak_phase']})")
    row("made of", lambda f: ", ".join(f"{part} {format_bytes(n)}" for part, n in f["peak_parts"].items() if n))
    for part in configured["host"]:
        row(f"host: {part}", lambda forecast, part=part: format_bytes(forecast["host"][part]))
    dense = result["dense"]
    lines += [
        "",
        f"The configuration {'fits' if result['fits'] else 'does NOT fit'} (nine tenths of a card are planned for). "
        + (
            "Not even a micro-batch of one row fits; the least that would is a card of "
            f"{format_bytes(result['least_device_memory_bytes'])}."
            if result["largest_micro_batch"] is None
            else f"Largest micro-batch: {result['largest_micro_batch']}; largest train_batch_size in micro-batches of "
            f"{configured['setting']['micro_batch_size']}: {result['largest_train_batch_size']:,}."
        ),
        f"All rows at once without checkpointing would take {format_bytes(dense['activations'])} of activations; one "
        f"similarity matrix in float32 {format_bytes(dense['one similarity matrix'])}, open_clip's ClipLoss "
        f"{format_bytes(dense['ClipLoss'])}.",
        f"Not counted: {'; '.join(configured['not_counted'])}. Activations measured on: {result['measured_on']}.",
    ]
    if result["batches"]:
        lines += [
            "",
            "| train_batch_size | plain: activations | plain: ClipLoss | dsclr: peak | micro-batch | checkpointing "
            "| kept | forwards a row | loss |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for entry in result["batches"]:
        ours = entry["best"]
        cells = ["nothing fits", *["-"] * 5]
        if ours:
            setting = ours["setting"]
            cells = [
                format_bytes(ours["peak_bytes"]),
                str(setting["micro_batch_size"]),
                _word(setting["checkpointing"]),
                str(setting["kept"]),
                f"{setting['forwards']:.2f}",
                format_bytes(ours["parts"]["loss"]),
            ]
        plain = [format_bytes(entry["dense"][name]) for name in ("activations", "ClipLoss")]
        lines.append("| " + " | ".join([f"{entry['train_batch_size']:,}", *plain, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _word(value: bool | int) -> str:
    return str(value) if type(value) is int else ("on" if value else "off")


if __name__ == "__main__":
    sys.exit(main())
