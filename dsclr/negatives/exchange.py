"""How the rows of a batch are shared between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dsclr.negatives.gathered import GatheredRows
from dsclr.negatives.ring import RingRows
from dsclr.negatives.transport import Transport
from dsclr.ops.shared import SharedRows


@dataclass
class GatherExchange:
    """Every rank holds the rows of all: each is sent once, and gradients go back by reduce-scatter.

    Args:
        transport: the ranks.
        chunk: rows of every rank in a transfer; those that have come are worked on while the next ones come.
    """

    transport: Transport = field(default_factory=Transport)
    chunk: int = 2048

    def share(self, *own: Tensor) -> SharedRows:
        self.transport.check_rows(own)
        return GatheredRows(self.transport, own, self.chunk)


@dataclass
class RingExchange:
    """Rows go around a ring once for the scan and once for the gradients; a rank holds three ranks' rows at most.

    Args:
        transport: the ranks.
    """

    transport: Transport = field(default_factory=Transport)

    def share(self, *own: Tensor) -> SharedRows:
        self.transport.check_rows(own)
        return RingRows(self.transport, own)


Exchange = GatherExchange | RingExchange

# dsclr.negatives.across_ranks; "off" has none.
EXCHANGES: dict[str, type[GatherExchange] | type[RingExchange]] = {"gather": GatherExchange, "ring": RingExchange}
