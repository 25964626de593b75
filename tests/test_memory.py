"""What is measured of memory is what tensors take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsclr.memory import capacity_bytes, is_out_of_memory, measured

CPU = torch.device("cpu")


def test_kept_and_peak_of_a_forward_and_backward():
    net = nn.Sequential(nn.Linear(100, 200), nn.GELU(), nn.Linear(200, 100))
    x = torch.randn(50, 100)
    with measured(CPU) as use:
        y = net(x)
    # The first Linear's output (saved by GELU), GELU's (saved by the second Linear), the result.
    assert use.kept_bytes == 4 * 50 * (200 + 200 + 100)
    with measured(CPU) as use:
        with torch.no_grad():
            net(x)
        with measured(CPU) as inner:
            z = F.relu(net(x))
    assert inner.kept_bytes == use.kept_bytes > 0
    assert use.peak_bytes >= use.kept_bytes
    del y, z


def test_views_in_place_operations_and_what_was_there_before_take_nothing():
    x = torch.zeros(1000)
    with measured(CPU) as use:
        y = x.view(10, 100).t()[3:]
        y.add_(1)
        x.mul_(2)
    assert use.kept_bytes == use.peak_bytes == 0


def test_what_is_freed_is_taken_off():
    with measured(CPU) as use:
        for _ in range(10):
            torch.ones(1000)
    assert use.kept_bytes == 0
    assert use.peak_bytes == 4000


def test_errors_that_mean_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)


def test_capacity_of_a_host_is_shared_by_its_ranks():
    whole = capacity_bytes(CPU)
    assert whole > 0
    assert capacity_bytes(CPU, 4) == pytest.approx(whole / 4, rel=0.2)
