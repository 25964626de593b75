"""The C++ softmax pass against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from dsclr.ops import NativeUnavailable
from dsclr.ops.native import native_ops


@pytest.mark.parametrize("width", [1, 7, 8, 9, 1024, 1500])
@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_exponentials_by_row(width, scale):
    try:
        ops = native_ops()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    tile = torch.rand(9, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tile[3] = -torch.inf
    tile[4, width // 2] = -torch.inf
    logits = tile.double() * scale
    expected_top = logits.amax(1)
    expected_top[expected_top == -torch.inf] = 0.0
    expected = (logits - expected_top[:, None]).exp()
    top, total = ops.exp_rows(tile, scale)
    torch.testing.assert_close(top.double(), expected_top, rtol=1e-6, atol=0)
    # a float32 logit of 100 is only good to 4e-6
    torch.testing.assert_close(tile.double(), expected, rtol=3e-5, atol=1e-37)
    torch.testing.assert_close(total.double(), expected.sum(1), rtol=3e-5, atol=0)
