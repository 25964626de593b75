"""What a run continues from: one part for the whole run, one for each rank, read by any number of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsclr.config import ConfigError
from dsclr.data.order import Slots
from dsclr.negatives import Bank
from dsclr.rng import RandomState, seed_rank
from dsclr.train.durable import Writes
from dsclr.train.engine_state import load_engine, save_engine
from dsclr.train.runtime import Runtime

logger = logging.getLogger(__name__)

_RUN_FILE = "run.pt"
# Of a Progress: what differs from rank to rank.
_COUNTS = ("skipped_samples", "noted_samples")
_OF_RANK = ("consumed", *_COUNTS)


def write_run(
    folder: Path,
    runtime: Runtime,
    engine: Any,
    progress: dict[str, Any],
    bank: Bank | None,
    writes: Writes,
    *,
    frozen: bool,
) -> None:
    """Write everything into a folder that exists; all ranks together.

    Args:
        progress: attributes of a Progress, ``slots`` among them.
        writes: keeps an error of writing.
        frozen: also keep weights that do not train.

    Raises:
        ConfigError: on all ranks, see :func:`save_engine`.
    """
    ranks: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(ranks, {name: progress[name] for name in _OF_RANK})
    state = save_engine(folder, engine, writes, is_main=runtime.is_main, frozen=frozen)
    if runtime.is_main:
        run = {name: value for name, value in progress.items() if name not in _OF_RANK}
        run["slots"] = asdict(progress["slots"])
        writes.save({"engine": state, "progress": run, "ranks": ranks}, folder / _RUN_FILE)
    random = RandomState.capture(runtime.device)
    writes.save(
        {
            "host": random.host,
            "device": random.device,
            "buffers": _buffers(engine.module),
            "bank": None if bank is None else bank.part(runtime.rank),
        },
        _rank_file(folder, runtime.rank),
    )


def read_run(folder: Path, runtime: Runtime, engine: Any, bank: Bank | None, seed: int) -> dict[str, Any]:
    """Continue from :func:`write_run`, bit for bit on as many ranks.

    On another number of ranks weights, optimizer, schedule, counts and the place in the data are the same; the rows of
    a batch are dealt anew, every sample of the epoch is still seen once; random numbers (dropout) are other ones, from
    seed, step and rank; running statistics of batch normalisations are the first rank's; and a memory bank that each
    rank fills for itself starts empty.

    Args:
        engine: fresh, of the same model.
        seed: of the run.

    Returns:
        The attributes of this rank's Progress.

    Raises:
        ConfigError: another model or optimizer, or a bank that does not fit.
        OSError, RuntimeError, KeyError, EOFError: damaged files.
    """
    if not (folder / _RUN_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {_RUN_FILE}: it was written by another version of dsclr, or is damaged; resume with that "
            "version, or delete it and resume from the one before"
        )
    saved = torch.load(folder / _RUN_FILE, weights_only=True)
    ranks, progress = saved["ranks"], saved["progress"]
    load_engine(folder, engine, saved["engine"])
    if bank is not None:
        _read_bank(folder, runtime, bank, len(ranks))
    slots = Slots(**progress["slots"])
    if len(ranks) == runtime.world_size:
        own = _rank_state(folder, runtime.rank)
        RandomState(own["host"], own["device"]).restore(runtime.device)
        progress.update(ranks[runtime.rank], slots=slots)
    else:
        logger.warning(
            "%s was written by %d rank(s) and goes on with %d: the same data, dropout draws other numbers",
            folder,
            len(ranks),
            runtime.world_size,
        )
        own = _rank_state(folder, 0)
        seed_rank(seed, progress["step"], runtime.rank)
        rows = slots.rows * slots.world_size // runtime.world_size
        consumed = [rank["consumed"] for rank in ranks]
        progress.update(slots=slots.continued(consumed, rows, runtime.world_size), consumed=0)
        for name in _COUNTS:
            # The metrics add up the ranks' counts.
            progress[name] = _added(rank[name] for rank in ranks) if runtime.is_main else {}
    for name, buffer in _buffers(engine.module).items():
        buffer.copy_(own["buffers"][name])
    return progress


def _read_bank(folder: Path, runtime: Runtime, bank: Bank, ranks: int) -> None:
    parts = [_rank_state(folder, rank)["bank"] for rank in range(ranks)]
    if all(part is None for part in parts):
        raise ConfigError(f"{folder} holds no memory bank: resume without dsclr.negatives.bank")
    state = bank.joined(parts, runtime.rank, runtime.world_size)
    if state is None:
        logger.warning(
            "the memory bank starts empty: in %s each of %d rank(s) kept its own rows, which %d cannot share out",
            folder,
            ranks,
            runtime.world_size,
        )
        return
    try:
        bank.load_state_dict(state, runtime.device)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}; set dsclr.negatives.bank.size accordingly") from error


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pt"


def _rank_state(folder: Path, rank: int) -> dict[str, Any]:
    # Mapped: of other ranks' files only what is looked at is read.
    state: dict[str, Any] = torch.load(_rank_file(folder, rank), mmap=True, weights_only=True)
    return state


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Such as the running statistics of batch normalisations, which differ from rank to rank."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
