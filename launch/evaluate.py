"""Evaluate a run's trained weights, and its base model beside them: ``python launch/evaluate.py --run runs/NAME``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, type=Path, metavar="FOLDER", help="a run folder")
    parser.add_argument(
        "--data", action="append", metavar="SHARDS", help="shards to evaluate on (repeatable); default: the run's own"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write; default: FOLDER/retrieval.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from dsclr.logs import configure_logging

    configure_logging(0)
    from dsclr.config import ConfigError
    from dsclr.eval.run import compare_with_base, markdown_table
    from dsclr.report.metrics import write_atomically

    try:
        results = compare_with_base(options.run, options.data)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    output = options.output or options.run / "retrieval.json"
    write_atomically(output, json.dumps(results, indent=2) + "\n")
    print(markdown_table(results))
    print(f"\nwritten to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
