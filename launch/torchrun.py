"""torchrun, ending with the exit status of the rank that failed first: ``python launch/torchrun.py --nnodes 2 ...``.

torchrun itself ends with 1 whatever a rank ended with, so that a scheduler could not tell a run that stopped to be
continued (85) from one that failed.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: list[str] | None = None) -> int:
    """
    Args:
        arguments: as for torchrun; the command line's by default.
    """
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        # As shells say it: 128 and the number of the signal that ended it.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
