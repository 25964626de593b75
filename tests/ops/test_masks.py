"""Equal ids found by sorting are those found by comparing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsclr.ops.masks import SameIds


@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(0, 40), st.sampled_from([1, 3, 1000]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_fills_the_pairs_with_equal_ids(seed, n, m, kinds, transposed):
    generator = torch.Generator().manual_seed(seed)
    q_ids = torch.randint(-kinds, kinds, (n,), generator=generator)
    key_ids = torch.randint(-kinds, kinds, (m,), generator=generator)
    expected = torch.zeros(n, m).masked_fill(q_ids[:, None] == key_ids[None], 1.0)
    same = SameIds(q_ids, key_ids)
    rows, columns = slice(n // 3, n), slice(m // 4, m - m // 5)
    part = expected[rows, columns]
    tile = torch.zeros(part.shape[::-1]).T if transposed else torch.zeros(part.shape)
    assert torch.equal(same.fill_(tile, rows, columns, 1.0), part)
    tile = torch.zeros(part.shape)
    assert torch.equal(same.part(rows).fill_(tile, slice(0, len(tile)), columns, 1.0), part)
