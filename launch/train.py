"""Train: ``deepspeed launch/train.py --deepspeed_config ds_configs/a100.json [--set path=value ...]``."""

from __future__ import annotations

import argparse
import errno
import json
import sys
import tempfile
import traceback
from typing import Any

from dsclr.interruption import INTERRUPTED, Interrupted, Interruption, end_process


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help="the run: see ds_configs/")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a value, e.g. dsclr.loss.k=128"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        choices=["newest", "auto"],
        help="continue the run from its newest checkpoint; auto: from the newest that is not damaged, or start anew "
        "if there is none",
    )
    parser.add_argument(
        "--max-steps", type=int, metavar="N", help="stop after step N with a checkpoint (the schedule stays)"
    )
    parser.add_argument("--dry-run", action="store_true", help="resolve, check and print everything, train nothing")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare one scaled-down step with a dense one, print a table, train nothing",
    )
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.max_steps is not None and options.max_steps < 1:
        parser.error(f"--max-steps {options.max_steps}: at least 1 is needed")
    return options


def main(arguments: list[str] | None = None, interruption: Interruption | None = None) -> int:
    """The exit status: 0; 1 after an error; INTERRUPTED if the run was asked to end and goes on with --resume auto."""
    options = parse_arguments(arguments)
    from dsclr.config import ConfigError, load_config
    from dsclr.launcher import find_place

    try:
        place = find_place()
    except ConfigError as error:
        return _fail(error, rank=0)
    rank = place.rank
    # Of what all ranks of a machine meet alike one of them speaks: another machine may have other files.
    first_here = place.local_rank == 0
    try:
        config = load_config(options.deepspeed_config, options.set)
    except ConfigError as error:
        return _fail(error, rank, alone=first_here)

    from dsclr.logs import configure_logging

    configure_logging(rank)
    from dsclr.train import Lifeline, check_agreement, make_plan, runtime, train, verify

    interruption = interruption or Interruption()
    lifeline = plan = None
    try:
        device = runtime.device_type()
        plan = make_plan(config, place.world_size, device)
        if options.dry_run:
            if rank == 0:
                print(json.dumps(plan.describe(), indent=2))
            return 0
        if not options.verify:
            plan.folder.check(plan.config, plan.dataset.contents(), options.resume)
        world = runtime.start(config.dsclr.run.timeout_seconds)
        lifeline = Lifeline(world, interruption)
        check_agreement(plan, world, {"--resume": options.resume, "--max-steps": options.max_steps})
        if options.verify:
            verification = verify(plan, world)
            if rank == 0:
                print(verification.table())
            status = 0 if verification.agrees else 1
        else:
            train(plan, world, resume=options.resume, stop_after=options.max_steps, interruption=interruption)
            status = 0
    except Interrupted as ended:
        if rank == 0:
            _say(str(ended))
        status = INTERRUPTED
    except Exception as error:
        status = _failed(error, rank, lifeline, first_here, "the run folder" if plan is None else str(plan.folder.path))
        if status == 1 and lifeline is not None:
            # Not out of the group: another rank may wait in it, or be gone.
            return status
    if lifeline is not None:
        lifeline.close()
    runtime.stop()
    return status


def _failed(error: Exception, rank: int, lifeline: Any, first_here: bool, folder: str) -> int:
    """Say what happened, in full on the first rank that failed only.

    Args:
        lifeline: None before there is one. A wrong configuration meets all ranks, and one of each machine says so.
        first_here: of the ranks on this machine.
        folder: of the run.
    """
    from dsclr.config import ConfigError
    from dsclr.train import BadDataError, OutOfMemory, TrainingError

    if isinstance(error, TrainingError) or (lifeline is None and isinstance(error, ConfigError)):
        # All ranks have it.
        if lifeline is not None:
            lifeline.close()
        return _fail(error, rank, alone=lifeline is None and first_here)
    if lifeline is not None and not lifeline.first_to_fail():
        first, status = lifeline.first
        if status == 1:
            _say(f"rank {rank} ends, since rank {first} is gone")
        return status
    if isinstance(error, (ConfigError, BadDataError, OutOfMemory)):
        return _fail(error, rank, alone=True)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # A write that fails does not say where.
        where = error.filename or f"{folder} or {tempfile.gettempdir()} (temporary files)"
        full = OSError(f"{error.strerror} in {where}: make room, then go on with --resume auto")
        return _fail(full, rank, alone=True)
    traceback.print_exception(error)
    if "imed out" in str(error):
        error = RuntimeError(f"{error} (no answer of another rank within dsclr.run.timeout_seconds)")
    return _fail(error, rank, alone=True)


def _fail(error: Exception, rank: int, alone: bool = False) -> int:
    """
    Args:
        alone: this rank may be the only one that met the error.
    """
    if rank == 0:
        _say(f"error: {error}")
    elif alone:
        _say(f"error on rank {rank}: {error}")
    return 1


def _say(line: str) -> None:
    # At once, its end included: ranks write to one terminal.
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    signals = Interruption()
    signals.listen()
    status = main(interruption=signals)
    if status:
        # Not by way of the interpreter's end: it would wait for threads and processes that wait for other ranks.
        end_process(status)
