"""Train: ``deepspeed launch/train.py --deepspeed_config ds_configs/a100.json [--set path=value ...]``."""

from __future__ import annotations

import argparse
import json
import sys


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help="the run: see ds_configs/")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a value, e.g. dsclr.loss.k=128"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
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


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from dsclr.config import ConfigError, load_config
    from dsclr.launcher import find_place

    try:
        place = find_place()
    except ConfigError as error:
        return _fail(error, rank=0)
    rank = place.rank
    try:
        config = load_config(options.deepspeed_config, options.set)
    except ConfigError as error:
        return _fail(error, rank)

    from dsclr.logs import configure_logging

    configure_logging(rank)
    from dsclr.train import BadDataError, OutOfMemory, TrainingError, make_plan, runtime, train, verify

    started = False
    try:
        device = runtime.device_type()
        plan = make_plan(config, place.world_size, device)
        if options.dry_run:
            if rank == 0:
                print(json.dumps(plan.describe(), indent=2))
            return 0
        if options.verify:
            started = True
            verification = verify(plan, runtime.start())
            if rank == 0:
                print(verification.table())
            return 0 if verification.agrees else 1
        plan.folder.check(plan.config, options.resume)
        started = True
        train(plan, runtime.start(), resume=options.resume, stop_after=options.max_steps)
    except (ConfigError, TrainingError, OutOfMemory, BadDataError) as error:
        return _fail(error, rank, alone=started)
    finally:
        runtime.stop()
    return 0


def _fail(error: Exception, rank: int, alone: bool = False) -> int:
    """
    Args:
        alone: this rank may be the only one that met the error. A wrong configuration meets all, and one says so.
    """
    if rank == 0:
        print(f"error: {error}", file=sys.stderr)
    elif alone:
        print(f"error on rank {rank}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
