"""torchrun, ending with the exit status of the rank that failed first: ``python launch/torchrun.py --nnodes 2 ...``.

torchrun itself ends with 1 whatever a rank ended with, so that a scheduler could not tell a run that stopped to be
continued (85) from one that failed. SIGTERM, SIGUSR1 and Ctrl-C are passed on to the ranks, and then it is for them to
end; torchrun would kill them after 30 seconds and end with 1.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: list[str] | None = None) -> int:
    """
    Args:
        arguments: as for torchrun; the command line's by default.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        # One that is ignored here is sent to the ranks by others, as in slurm.sh.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _pass_on)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        torchrun(["--signals-to-handle", "SIGHUP,SIGQUIT", *given])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        # As shells say it: 128 and the number of the signal that ended it.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _pass_on(number: int, _: Any) -> None:
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
