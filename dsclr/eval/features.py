"""Embeddings of a whole data set."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsclr.data.loader import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Features:
    """Attributes:
    image: (N, D) float32 L2-normalised.
    text: (N, D) float32 L2-normalised; row i belongs to image i.
    ids: (N,) int64; equal ids match.
    """

    image: Tensor
    text: Tensor
    ids: Tensor


@torch.no_grad()
def extract_features(model: Any, loader: Iterable[Task], device: torch.device) -> Features:
    """Encode every usable sample; the model is in evaluation mode meanwhile.

    Args:
        model: a ContrastiveModel.
        loader: of :func:`dsclr.data.build_eval_loader`.

    Raises:
        ValueError: not one usable sample.
    """
    was_training = model.training
    model.eval()
    images, texts, ids, skipped = [], [], [], 0
    try:
        for task in loader:
            skipped += len(task.skipped)
            for item in task.skipped:
                logger.warning("evaluation skips %s in %s: %s", item.key, item.shard, item.detail)
            if task.offsets:
                images.append(model.encode_image(task.a.to(device)).float().cpu())
                texts.append(model.encode_text(task.b.to(device)).float().cpu())
                ids.append(task.ids)
    finally:
        model.train(was_training)
    if not images:
        raise ValueError(f"no usable sample to evaluate on ({skipped} skipped)")
    return Features(torch.cat(images), torch.cat(texts), torch.cat(ids))
