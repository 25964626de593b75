"""Losses that fail on one rank, for dsclr.loss.name."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from dsclr.losses import DenseInfoNCE


class Raises(DenseInfoNCE):
    def __call__(self, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("a mistake in the loss")
        return super().__call__(*arguments)


class Hangs(DenseInfoNCE):
    def __call__(self, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(600)
        return super().__call__(*arguments)
