"""A finished run against the model it started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dsclr.config import Config, ConfigError
from dsclr.data import build_eval_loader
from dsclr.eval.features import extract_features
from dsclr.eval.retrieval import retrieval_recall
from dsclr.models import build_model, get_tokenizer, image_settings, load_trained
from dsclr.report.run_folder import BESIDE, RunFolder


def load_run(path: Path) -> tuple[RunFolder, Config]:
    """The run at ``path`` and its resolved configuration.

    Raises:
        ConfigError: no run there, or its configuration is unreadable.
    """
    folder = RunFolder(path)
    try:
        raw = json.loads(folder.config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} is not a run folder: {folder.config}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{folder.config} is not valid JSON: {error}") from None
    for key in BESIDE:
        raw.pop(key, None)
    return folder, Config(raw, str(folder.config))


def trained_weights(folder: RunFolder) -> Path:
    """adapter/ or model/, whichever the run made. Raises ConfigError if it has not finished."""
    for target in (folder.adapter, folder.model):
        if target.is_dir():
            return target
    raise ConfigError(f"{folder.path} has no trained weights yet (adapter/ or model/): finish it with --resume")


def compare_with_base(path: Path, shards: list[str] | None = None) -> dict[str, Any]:
    """Held-out retrieval of the base model and of the trained one, in fp32 with the same code.

    Args:
        path: a run folder.
        shards: to evaluate on; None: the run's ``dsclr.eval.data``.

    Returns:
        {"data": [...], "samples": N, "before": {"image_to_text_R@1": ...}, "after": {...}}

    Raises:
        ConfigError: nothing to evaluate, or nothing to evaluate on.
    """
    folder, config = load_run(path)
    ours = config.dsclr
    if ours.objective != "clip":
        raise ConfigError(f"{path} was trained with objective {ours.objective!r}: retrieval needs captions (clip)")
    where = "dsclr.eval.data" if shards is None else "--data"
    data = shards if shards is not None else ours.eval.data
    if data is None:
        raise ConfigError(f"{path} has no dsclr.eval.data: name shards with --data")
    weights = trained_weights(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(ours.run.seed)
    model = build_model(ours.model, ours.objective).to(device)
    settings, tokenizer = image_settings(ours.model), get_tokenizer(ours.model)

    def recall() -> tuple[dict[str, float], int]:
        loader = build_eval_loader(ours.data, data, settings, tokenizer, ours.eval.batch_size, where)
        features = extract_features(model, loader, device)
        return retrieval_recall(features), len(features.ids)

    # Fresh adapters change nothing, so before loading this is the base model.
    before, samples = recall()
    load_trained(model, weights)
    after, _ = recall()
    return {
        "run": str(path),
        "data": [data] if isinstance(data, str) else data,
        "samples": samples,
        "before": before,
        "after": after,
    }


def markdown_table(results: dict[str, Any]) -> str:
    """Before and after, one row a direction."""
    before, after = results["before"], results["after"]
    ks = sorted({int(name.rsplit("@", 1)[1]) for name in before})
    lines = [
        f"Held-out retrieval, {results['samples']} pairs ({', '.join(results['data'])}); chance R@1 is "
        f"{1 / results['samples']:.4f}",
        "",
        "| | " + " | ".join(f"R@{k} before | R@{k} after" for k in ks) + " |",
        "|---|" + "---|" * (2 * len(ks)),
    ]
    for direction in ("image_to_text", "text_to_image"):
        cells = [f"{values[f'{direction}_R@{k}']:.3f}" for k in ks for values in (before, after)]
        lines.append(f"| {direction.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
