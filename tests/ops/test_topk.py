"""The scan against a full sort in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsclr.ops import topk as topk_module
from dsclr.ops import topk_scan
from tests.oracle import dense_topk


def grid(rows: int, dim: int, generator: torch.Generator, levels: int) -> Tensor:
    """Small multiples of 1/4: products are exact in every dtype, and ties are common."""
    return torch.randint(-levels, levels + 1, (rows, dim), generator=generator).float() / 4


@st.composite
def problems(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, m, d = draw(st.integers(1, 40)), draw(st.integers(1, 60)), draw(st.integers(1, 6))
    levels = draw(st.integers(0, 4))
    q, keys = grid(n, d, generator, levels), grid(m, d, generator, levels)
    order = draw(st.sampled_from(["random", "ascending", "descending"]))
    if order != "random":
        keys = keys[(keys @ q[0]).argsort(descending=order == "descending")]
    ids = None
    if draw(st.booleans()):
        kinds = draw(st.integers(1, 30))
        ids = (
            torch.randint(0, kinds, (n,), generator=generator),
            torch.randint(0, kinds, (m,), generator=generator),
        )
    k = draw(st.integers(1, m + 3))
    block = draw(st.integers(1, m + 3))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    return q.to(dtype), keys.to(dtype), k, ids, block


@given(problems())
@settings(max_examples=300, deadline=None)
def test_equals_a_full_stable_sort(problem):
    q, keys, k, ids, block = problem
    q_ids, key_ids = ids if ids else (None, None)
    top = topk_scan(q, keys, k, q_ids=q_ids, key_ids=key_ids, block_size=block)
    values, indices = dense_topk(q, keys, k, q_ids, key_ids)
    assert torch.equal(top.indices, indices)
    assert torch.equal(top.values.double(), values)
    assert top.values.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)


def test_rows_are_tiled_without_a_trace(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, keys = grid(50, 4, generator, 3), grid(70, 4, generator, 3)
    ids = (torch.randint(0, 9, (50,)), torch.randint(0, 9, (70,)))
    whole = topk_scan(q, keys, 5, q_ids=ids[0], key_ids=ids[1], block_size=16)
    monkeypatch.setattr(topk_module, "ROW_TILE", 7)
    tiled = topk_scan(q, keys, 5, q_ids=ids[0], key_ids=ids[1], block_size=16)
    assert torch.equal(whole.indices, tiled.indices)
    assert torch.equal(whole.values, tiled.values)
    assert whole.stats == tiled.stats


def test_skipping_counts_every_row_and_block():
    # One query; the best keys come first, so that every later block is skipped.
    q = torch.ones(1, 1)
    keys = torch.arange(40, 0, -1).float()[:, None]
    stats = topk_scan(q, keys, 4, block_size=10).stats
    assert (stats.rows_seen, stats.rows_skipped) == (4, 3)
    assert (stats.scores_selected, stats.scores_total) == (10, 40)
    assert stats.skip_rate == 0.75
    assert topk_scan(q, keys.flip(0), 4, block_size=10).stats.skip_rate == 0.0


def test_a_tie_with_the_kth_value_is_skipped():
    top = topk_scan(torch.ones(1, 1), torch.ones(30, 1), 3, block_size=5)
    assert top.indices.tolist() == [[0, 1, 2]]
    assert top.stats.rows_skipped == 5


def test_no_query():
    top = topk_scan(torch.empty(0, 4), torch.randn(3, 4), 2)
    assert top.values.shape == top.indices.shape == (0, 2)


def test_no_key():
    top = topk_scan(torch.randn(3, 4), torch.empty(0, 4), 2)
    assert (top.indices == -1).all()


@pytest.mark.parametrize(
    ("q", "keys", "options", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), {}, r"\(2, 3\) and \(2, 4\)"),
        (torch.ones(2, 3), torch.ones(2, 3).double(), {}, "one floating dtype"),
        (torch.ones(2, 3), torch.ones(2, 3), {"k": 0}, "k = 0"),
        (torch.ones(2, 3), torch.ones(2, 3), {"block_size": 0}, "block_size = 0"),
        (torch.ones(2, 3), torch.ones(2, 3), {"q_ids": torch.arange(2)}, "go together"),
        (torch.ones(2, 3), torch.ones(2, 3), {"q_ids": torch.arange(2), "key_ids": torch.arange(3)}, "key_ids"),
        (torch.full((2, 3), torch.nan), torch.ones(2, 3), {}, "NaN"),
        (torch.ones(2, 3), torch.tensor([[1.0] * 3, [torch.nan] * 3]), {}, "NaN"),
    ],
)
def test_wrong_arguments(q, keys, options, message):
    with pytest.raises(ValueError, match=message):
        topk_scan(q, keys, **{"k": 1, **options})
