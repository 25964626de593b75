"""How much of the first pass a step keeps, so that less of it is run a second time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from dsclr.memory import capacity_bytes
from dsclr.units import format_bytes

logger = logging.getLogger(__name__)

# "auto" leaves a tenth of a device free for fragmentation and what other libraries allocate. On a host, where too much
# ends a process without an exception, it takes half.
DEVICE_SHARE = 0.9
HOST_SHARE = 0.5
# Steps after which the peak on a device is known: the first allocates what stays, the second meets the memory bank.
WARM_STEPS = 2


def keeps_hidden(budget: int, rows: int, hidden_bytes: float) -> bool:
    """Whether so many bytes hold the frozen blocks' output of all rows, of ``hidden_bytes`` a row."""
    return 0 < budget >= hidden_bytes * rows


def kept_chunks(budget: int, rows: int, micro_batch_size: int, graph_bytes: float, hidden_bytes: float) -> int:
    """Micro-batches whose graphs, of ``graph_bytes`` a row, fit beside the frozen blocks' output where that is kept."""
    left = budget - hidden_bytes * rows if keeps_hidden(budget, rows, hidden_bytes) else budget
    return min(-(-rows // micro_batch_size), int(left / max(1.0, graph_bytes * micro_batch_size)))


@dataclass
class Retention:
    """Decides how many micro-batches keep their graphs from the first pass to the second.

    Kept or run again, a micro-batch gives the same numbers, so this changes time and memory only. What the second
    forward would start from (see :class:`dsclr.models.memo.Memo`) comes first: it saves most for its size.

    Args:
        retain: bytes for graphs, or "auto": what is free. On a device that is known after two steps, which keep one
            graph each; on a host at once.
        device: of the graphs.
        local_ranks: processes that share the host's memory.
    """

    retain: Literal["auto"] | int
    device: torch.device
    local_ranks: int = 1

    def __post_init__(self) -> None:
        self.budget: int | None = None if self.retain == "auto" else self.retain
        self.graph_bytes: float | None = None  # a row
        self.hidden_bytes: float | None = None  # a row
        self._steps = 0

    @property
    def wants_measurement(self) -> bool:
        """Whether the size of a graph decides something and is not known."""
        return self.graph_bytes is None and self.retain != 0

    def observe_graph(self, rows: int, kept_bytes: int) -> None:
        """Size of the graph of a micro-batch of ``rows`` rows."""
        self.graph_bytes = kept_bytes / rows
        if self.budget is None and self.device.type == "cpu":
            self.budget = int(HOST_SHARE * capacity_bytes(self.device, self.local_ranks))

    def observe_hidden(self, rows: int, kept_bytes: int) -> None:
        """Size of the frozen blocks' output of a micro-batch."""
        self.hidden_bytes = kept_bytes / rows

    def observe_step(self, peak: int, graph_rows: int) -> None:
        """Peak memory of a whole step that kept the graph of ``graph_rows`` rows (one micro-batch)."""
        self._steps += 1
        if self.budget is None and self._steps >= WARM_STEPS and self.graph_bytes is not None:
            spare = DEVICE_SHARE * capacity_bytes(self.device) - peak
            self.budget = max(0, int(spare + self.graph_bytes * graph_rows))
            logger.info("%s for the graphs of micro-batches (retain = auto)", format_bytes(self.budget))

    def keeps_hidden(self, rows: int) -> bool:
        """Whether the frozen blocks' output is kept for all rows."""
        return self.budget is not None and keeps_hidden(self.budget, rows, self.hidden_bytes or 0)

    def kept_chunks(self, rows: int, micro_batch_size: int) -> int:
        """Of how many micro-batches, from the first, the graph is kept.

        A step of one micro-batch keeps its graph always: the backward needs it at once.
        """
        if rows <= micro_batch_size or self.budget is None:
            return 1
        if self.graph_bytes is None:
            return 0
        return kept_chunks(self.budget, rows, micro_batch_size, self.graph_bytes, self.hidden_bytes or 0)

    def shrink(self, kept_rows: int) -> None:
        """After running out of memory with the graphs of ``kept_rows`` rows kept: half of that, and no more."""
        if kept_rows:
            kept = int(kept_rows * (self.graph_bytes or 0) / 2)
            self.budget = kept if self.budget is None else min(self.budget // 2, kept)

    def drop(self) -> None:
        """Keep nothing any more."""
        self.budget = 0
