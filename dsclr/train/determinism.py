"""The same bits in every run of the same machine: ``dsclr.run.deterministic``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsclr.config import ConfigError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_ACCEPTED = (":4096:8", ":16:8")


def make_deterministic() -> None:
    """Let torch use only operations that always give the same bits; before any work on a GPU.

    Raises:
        ConfigError: CUBLAS_WORKSPACE_CONFIG is set to something else than that takes.
    """
    workspace = os.environ.setdefault(_CUBLAS, _CUBLAS_ACCEPTED[0])
    if workspace not in _CUBLAS_ACCEPTED:
        raise ConfigError(
            f"dsclr.run.deterministic: the environment sets {_CUBLAS}={workspace}, accepted: "
            f"{' or '.join(_CUBLAS_ACCEPTED)}; unset it"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@contextmanager
def explained() -> Iterator[None]:
    """Within, what torch says of an operation that cannot be deterministic becomes an error that says what to do.

    Raises:
        ConfigError
    """
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"dsclr.run.deterministic: {operation} has no implementation here that always gives the same bits: set it "
            "to false, or use a loss or model without this operation"
        ) from error
