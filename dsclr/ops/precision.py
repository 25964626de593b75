"""Matrix products in the dtype that is written, whatever the caller's surroundings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """Run a function of tensors with autocast off and half-precision sums in float32.

    Under autocast a float32 product silently becomes a bfloat16 one, and cuBLAS may add up parts of a half-precision
    product in half precision: neither is within the error bound that exact results rest on.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        device = next(tensors, torch.empty(0)).device
        with torch.autocast(device.type, enabled=False), _float32_sums(device):
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


@contextmanager
def _float32_sums(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def inner_roundoff(device: torch.device) -> float:
    """Unit roundoff of the factors inside a float32 matrix product, 0 if they stay float32."""
    try:
        allowed = torch.get_float32_matmul_precision()
    except RuntimeError:
        # PyTorch refuses to tell when old and new settings were mixed: think the worst.
        allowed = "medium"
    if allowed == "highest":
        return 0.0
    return 2.0**-10 if device.type == "cuda" and allowed == "high" else 2.0**-8
