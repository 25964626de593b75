"""Steps in a row that changed nothing, and what the run was before them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch

from dsclr.rng import RandomState
from dsclr.train.checkpoint import Progress
from dsclr.train.step import StepResult


@dataclass
class BadSteps:
    """
    Args:
        most: this many in a row end the run.

    Attributes:
        count: in a row so far.
        last: what was wrong with the last of them.
    """

    most: int
    count: int = 0
    last: str = ""
    _good: tuple[Progress, RandomState] | None = field(default=None, init=False)
    _moved: bool = field(default=True, init=False)

    @property
    def is_over(self) -> bool:
        return self.count >= self.most

    def before_step(self, progress: Progress, device: torch.device) -> None:
        # A step that fp16 skipped has still changed the loss scale and the memory bank.
        if self._moved:
            self._good = copy.deepcopy(progress), RandomState.capture(device)

    def after_step(self, result: StepResult) -> None:
        good = result.applied and math.isfinite(result.loss)
        self._moved = result.not_finite is None
        self.count = 0 if good else self.count + 1
        if not good:
            bad = result.not_finite
            self.last = "fp16 overflow" if bad is None else f"{bad.tensor}, rank {bad.rank}"

    def go_back(self, device: torch.device) -> Progress:
        """Restore the random numbers of the last good state, and give its progress."""
        assert self._good is not None
        progress, random_state = self._good
        random_state.restore(device)
        return progress
