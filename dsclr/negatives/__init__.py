"""Where the keys of a batch come from."""

from dsclr.negatives.bank import MemoryBank
from dsclr.negatives.gathered import gathered_keys
from dsclr.negatives.local import local_keys

__all__ = ["KEY_SOURCES", "MemoryBank", "gathered_keys", "local_keys"]

# dsclr.negatives.across_ranks
KEY_SOURCES = {"off": local_keys, "gather": gathered_keys}
