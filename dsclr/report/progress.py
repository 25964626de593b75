"""What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

# Seconds between two plain lines.
LINE_INTERVAL_SECONDS = 5.0


class ProgressDisplay:
    """Args:
    total_steps: of the run.
    step: already done.
    enabled: False on all ranks but the first.
    """

    def __init__(self, total_steps: int, step: int, enabled: bool) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self._bar: tqdm | None = None
        self._redirect: Any = None
        self._last_line = -LINE_INTERVAL_SECONDS
        self._started = time.monotonic()
        self._first_step = step
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)
            self._redirect = logging_redirect_tqdm()
            self._redirect.__enter__()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step. record: as written to metrics.jsonl."""
        if not self.enabled:
            return
        step, loss, rate = record["step"], record["loss"], record["samples_per_second"]
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_INTERVAL_SECONDS or step == self.total_steps:
            self._last_line = now
            done = step - self._first_step
            left = (now - self._started) / done * (self.total_steps - step) if done else 0.0
            logger.info(
                "step %d/%d  loss %.4f  %.0f samples/s  %s left",
                step,
                self.total_steps,
                loss,
                rate,
                tqdm.format_interval(left),
            )

    def close(self) -> None:
        if self._bar is not None:
            self._redirect.__exit__(None, None, None)
            self._bar.close()
