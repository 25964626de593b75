"""Running statistics of batch normalisations: a forward that is run again must not move them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def _moving(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Within, batch normalisations in training mode normalise as always and leave their running statistics alone."""
    moving = _moving(model)
    for module in moving:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in moving:
            module.track_running_stats = True


def capture_statistics(model: nn.Module) -> Callable[[], None]:
    """What puts the running statistics back to where they are now."""
    saved = [(buffer, buffer.clone()) for module in _moving(model) for buffer in module.buffers(recurse=False)]

    def restore() -> None:
        for buffer, value in saved:
            buffer.copy_(value)

    return restore
