"""What a command line tool lets its libraries say."""

from __future__ import annotations

import logging
import warnings

# What DeepSpeed warns of in every run on a CPU, or at every start.
_NOISE = ("Setting accelerator to CPU", "Attempting to get learning rate from scheduler before it has started")


def configure_logging(rank: int) -> None:
    """Rank 0 speaks at INFO, the others only of warnings; the libraries' chatter is turned down.

    To be called before DeepSpeed is imported: it speaks while it loads.
    """
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"),
        force=True,
    )
    # open_clip logs on the root logger while it builds a model; what matters of it is raised as an error.
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("dsclr").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith(_NOISE))
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*No device id is provided via `init_process_group`.*")
