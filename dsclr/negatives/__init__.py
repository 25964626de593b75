"""Where the keys of a batch come from."""

from dsclr.negatives.bank import Bank, MemoryBank, ShardedBank, build_bank
from dsclr.negatives.exchange import EXCHANGES, Exchange, GatherExchange, RingExchange

__all__ = [
    "EXCHANGES",
    "Bank",
    "Exchange",
    "GatherExchange",
    "MemoryBank",
    "RingExchange",
    "ShardedBank",
    "build_bank",
]
