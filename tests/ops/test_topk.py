"""The scan against a full sort in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from dsclr.ops import NativeUnavailable, TopK, expected_skip_rate, topk_scan, topk_scan_pair, topk_scan_self
from dsclr.ops import topk as topk_module
from dsclr.ops.native import native_ops
from dsclr.ops.products import error_bound
from tests.oracle import dense_topk


def _backends() -> list[str]:
    try:
        native_ops()
    except NativeUnavailable:
        return ["torch"]
    return ["torch", "native"]


BACKENDS = _backends()
WAYS = [(backend, precision) for backend in BACKENDS for precision in ("input", "bf16")]


def grid(rows: int, dim: int, generator: torch.Generator, levels: int) -> Tensor:
    """Small multiples of 1/4: products are exact in every dtype, and ties are common."""
    return torch.randint(-levels, levels + 1, (rows, dim), generator=generator).float() / 4


def unit(rows: int, dim: int, seed: int) -> Tensor:
    return normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def same(x, y) -> bool:
    return torch.equal(x.values, y.values) and torch.equal(x.indices, y.indices)


def assert_equals_oracle(top, q, keys, k, q_ids=None, key_ids=None) -> None:
    values, indices = dense_topk(q, keys, k, q_ids, key_ids)
    assert torch.equal(top.indices, indices)
    assert torch.equal(top.values.double(), values)


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


@given(problems(), st.sampled_from(WAYS))
@settings(max_examples=250, deadline=None)
def test_equals_a_full_stable_sort(problem, way):
    q, keys, k, ids, block = problem
    q_ids, key_ids = ids if ids else (None, None)
    options = {"block_size": block, "backend": "auto" if q.dtype == torch.float64 else way[0], "precision": way[1]}
    top = topk_scan(q, keys, k, q_ids=q_ids, key_ids=key_ids, **options)
    assert_equals_oracle(top, q, keys, k, q_ids, key_ids)
    assert top.values.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    if len(q) <= len(keys):
        a, b, ids = q, keys[: len(q)], q_ids
        one, other = topk_scan_pair(a, b, k, ids=ids, **options)
        assert_equals_oracle(one, a, b, k, ids, ids)
        assert_equals_oracle(other, b, a, k, ids, ids)
        assert_equals_oracle(topk_scan_self(a, k, ids=ids, **options), a, a, k, ids, ids)


# Many rows so near each other that fast products cannot tell them apart, lengths from 0 to 60, and plain ones.
HARD = {
    "random": unit(90, 33, 0),
    "near_ties": normalize(
        unit(1, 33, 1) + 1e-4 * torch.randn(90, 33, generator=torch.Generator().manual_seed(2)), dim=1
    ),
    "duplicates": unit(9, 33, 3).repeat(10, 1),
    "all_equal": unit(1, 33, 4).expand(90, 33),
    "unnormalised": torch.randn(90, 33, generator=torch.Generator().manual_seed(5))
    * torch.logspace(-3, 1, 90)[:, None],
    "zero_rows": unit(90, 33, 6) * (torch.arange(90) % 3 > 0)[:, None],
    "negative": -unit(90, 33, 7).abs(),
}


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounded_products_lose_nothing(kind, dtype, way):
    z = HARD[kind].to(dtype)
    q, keys = z[:40], z[25:]
    # The exact score rounded once: what every backend, precision and block size must rank by.
    scores = (q.double() @ keys.double().T).float()
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    for block in (7, 64, 1024):
        top = topk_scan(q, keys, 9, block_size=block, backend=way[0], precision=way[1])
        assert torch.equal(top.values, values[:, :9])
        assert torch.equal(top.indices, indices[:, :9])


def test_a_margin_of_nothing_would_be_caught(monkeypatch):
    q, keys = unit(400, 33, 0), unit(3000, 33, 1)
    right = topk_scan(q, keys, 9, precision="bf16")
    monkeypatch.setattr("dsclr.ops.products.error_bound", lambda q, keys, dtype: torch.zeros(len(q)))
    assert not same(topk_scan(q, keys, 9, precision="bf16"), right)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_bound_holds_and_is_no_wild_guess(kind, dtype):
    z = HARD[kind]
    for source in (torch.float32, dtype):
        x = z.to(source)
        tile = (x.to(dtype) @ x.to(dtype).T).double()
        error = (tile - x.double() @ x.double().T).abs().amax(1)
        bound = error_bound(x, x, dtype).double()
        assert (error <= bound).all()
        assert (bound <= (3e-5 if dtype == torch.float32 else 0.05) * x.double().norm(dim=1).amax() ** 2 + 1e-3).all()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_result_is_independent_of_how_it_is_reached(way, monkeypatch):
    q, keys = unit(150, 48, 0), unit(700, 48, 1)
    ids = torch.randint(0, 60, (150,)), torch.randint(0, 60, (700,))
    options = {"q_ids": ids[0], "backend": way[0], "precision": way[1]}
    expected = topk_scan(q, keys, 20, q_ids=ids[0], key_ids=ids[1], backend="torch", precision="input")
    for block in (1, 13, 64, 100, 699, 5000):
        assert same(topk_scan(q, keys, 20, key_ids=ids[1], block_size=block, **options), expected)
    monkeypatch.setattr(topk_module, "ROW_TILE", 7)
    assert same(topk_scan(q, keys, 20, key_ids=ids[1], **options), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert same(topk_scan(q, keys, 20, key_ids=ids[1], **options), expected)
    finally:
        torch.set_num_threads(threads)
    # segments of the keys, in any order
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        top = None
        for segment in order:
            part = slice(segment * 200, (segment + 1) * 200)
            top = topk_scan(
                q, keys[part], 20, key_ids=ids[1][part], initial=top, key_offset=part.start, block_size=64, **options
            )
        assert top is not None
        assert same(top, expected)
        assert top.stats.scores_total == 150 * 700


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_scores_above_the_limit_are_left_out_and_counted(way):
    q, keys = unit(50, 16, 0), unit(300, 16, 1)
    ids = torch.arange(50), torch.arange(300)
    scores = (q.double() @ keys.double().T).float()
    scores[ids[0][:, None] == ids[1][None]] = -torch.inf
    limit = torch.linspace(0.0, 0.9, 50)
    # a limit that a score meets exactly lets it in
    limit[3] = scores[3].sort(descending=True).values[5]
    over = scores > limit[:, None]
    values, indices = scores.masked_fill(over, -torch.inf).sort(dim=1, descending=True, stable=True)
    options = {"backend": way[0], "precision": way[1], "block_size": 32, "limit": limit}
    top = topk_scan(q, keys, 8, q_ids=ids[0], key_ids=ids[1], **options)
    assert torch.equal(top.values, values[:, :8])
    assert torch.equal(top.indices, indices[:, :8])
    assert abs(top.stats.scores_over_limit - int(over.sum())) <= (0.05 * int(over.sum()) if way[1] == "bf16" else 1)
    one, other = topk_scan_pair(q, keys[:50], 8, ids=ids[0], **options)
    assert same(one, topk_scan(q, keys[:50], 8, q_ids=ids[0], key_ids=ids[0], **options))
    assert same(other, topk_scan(keys[:50], q, 8, q_ids=ids[0], key_ids=ids[0], **options))
    # no score is below the limit
    none = topk_scan(q, keys, 8, **{**options, "limit": torch.full((50,), -2.0)})
    assert (none.indices == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_tiled_without_a_trace(monkeypatch, backend):
    generator = torch.Generator().manual_seed(0)
    q, keys = grid(50, 4, generator, 3), grid(70, 4, generator, 3)
    ids = (torch.randint(0, 9, (50,)), torch.randint(0, 9, (70,)))
    options = {"q_ids": ids[0], "key_ids": ids[1], "block_size": 16, "backend": backend}
    whole = topk_scan(q, keys, 5, **options)
    monkeypatch.setattr(topk_module, "ROW_TILE", 7)
    tiled = topk_scan(q, keys, 5, **options)
    assert same(whole, tiled)
    assert whole.stats == tiled.stats


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipping_counts_every_row_and_block(backend):
    # One query; the best keys come first, so that every later block is skipped.
    q = torch.ones(1, 1)
    keys = torch.arange(40, 0, -1).float()[:, None]
    stats = topk_scan(q, keys, 4, block_size=10, backend=backend).stats
    assert (stats.rows_seen, stats.rows_skipped) == (4, 3)
    assert (stats.scores_selected, stats.scores_total) == (10, 40)
    assert stats.skip_rate == 0.75
    assert topk_scan(q, keys.flip(0), 4, block_size=10, backend=backend).stats.skip_rate == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tie_with_the_kth_value_is_skipped(backend):
    top = topk_scan(torch.ones(1, 1), torch.ones(30, 1), 3, block_size=5, backend=backend)
    assert top.indices.tolist() == [[0, 1, 2]]
    assert top.stats.rows_skipped == 5


def closed_form(x: float) -> float:
    """e^-x - x E1(x), the exponential integral by numerical integration over u in (0, 1) of exp(-x / u) / u."""
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    return math.exp(-x) - x * float((torch.exp(-x / u) / u).mean())


@pytest.mark.parametrize(("k", "block", "keys"), [(16, 64, 8192), (64, 128, 8192), (16, 256, 8192)])
def test_skip_rate_in_random_order_is_the_closed_form(k, block, keys):
    rate = topk_scan(unit(512, 32, 0), unit(keys, 32, 1), k, block_size=block).stats.skip_rate
    assert abs(rate - expected_skip_rate(k, block, keys)) < 0.01
    assert abs(rate - closed_form(k * block / keys)) < 0.01


def test_the_published_setting_skips_a_seventh():
    assert closed_form(64 * 1024 / 65536) == pytest.approx(0.148, abs=5e-4)
    assert expected_skip_rate(64, 1024, 65536) == pytest.approx(0.148, abs=0.01)


def test_an_order_sorted_by_class_skips_more_than_chance():
    centres = unit(32, 32, 0)
    labels = torch.arange(32).repeat_interleave(128)
    keys = normalize(centres[labels] + 0.1 * unit(4096, 32, 1), dim=1)
    q = normalize(centres[torch.arange(512) % 32] + 0.1 * unit(512, 32, 2), dim=1)
    expected = expected_skip_rate(16, 128, 4096)
    shuffled = keys[torch.randperm(4096, generator=torch.Generator().manual_seed(3))]
    assert topk_scan(q, keys, 16, block_size=128).stats.skip_rate > expected + 0.1
    assert abs(topk_scan(q, shuffled, 16, block_size=128).stats.skip_rate - expected) < 0.02


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_float32_products_are_allowed_for(precision):
    q, keys = unit(100, 48, 0), unit(900, 48, 1)
    expected = topk_scan(q, keys, 12)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        bound = error_bound(q, keys, torch.float32)
        reduced = topk_scan(q, keys, 12)
    finally:
        torch.set_float32_matmul_precision(before)
    assert same(reduced, expected)
    # what rounding both factors to bfloat16 can take away
    assert (bound > 2**-8).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["input", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_finds_what_a_cpu_finds(dtype, precision):
    q, keys = unit(3000, 512, 0).to(dtype), unit(5000, 512, 1).to(dtype)
    ids = torch.randint(0, 900, (3000,)), torch.randint(0, 900, (5000,))
    expected = topk_scan(q, keys, 64, q_ids=ids[0], key_ids=ids[1], precision="input")
    on_gpu = {"q_ids": ids[0].cuda(), "key_ids": ids[1].cuda(), "precision": precision}
    top = topk_scan(q.cuda(), keys.cuda(), 64, **on_gpu)
    assert torch.equal(top.values.cpu(), expected.values)
    assert torch.equal(top.indices.cpu(), expected.indices)
    own = topk_scan_self(keys.cuda(), 64, ids=ids[1].cuda(), precision=precision)
    assert torch.equal(own.indices.cpu(), topk_scan_self(keys, 64, ids=ids[1]).indices)


def test_no_query():
    top = topk_scan(torch.empty(0, 4), torch.randn(3, 4), 2)
    assert top.values.shape == top.indices.shape == (0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_at_all(backend):
    nothing = torch.empty(0, 4)
    for top in (*topk_scan_pair(nothing, nothing, 2, backend=backend), topk_scan_self(nothing, 2, backend=backend)):
        assert top.values.shape == top.indices.shape == (0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["cut", "columns", "strided"])
def test_an_earlier_result_may_lie_in_memory_as_it_likes(backend, layout):
    q, keys = unit(40, 20, 0), unit(300, 20, 1)
    earlier = topk_scan(q, keys[:100], 5)
    values, indices = earlier.values, earlier.indices
    if layout == "cut":
        wider = topk_scan(q, keys[:100], 8)
        values, indices = wider.values[:, :5], wider.indices[:, :5]
    elif layout == "columns":
        values, indices = values.T.contiguous().T, indices.T.contiguous().T
    else:
        values, indices = values.repeat_interleave(2, 0)[::2], indices.repeat_interleave(2, 0)[::2]
    laid_out = TopK(values, indices, earlier.stats)
    top = topk_scan(q=q, keys=keys[100:], k=5, initial=laid_out, key_offset=100, backend=backend)
    assert same(top, topk_scan(q, keys, 5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_dtype_does_not_matter(backend):
    q, keys = unit(10, 8, 0), unit(30, 8, 1)
    expected = topk_scan(q, keys, 4)
    torch.set_default_dtype(torch.float64)
    try:
        assert same(topk_scan(q, keys, 4, backend=backend), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("initial", "options", "message"),
    [
        (topk_scan(unit(4, 8, 0).double(), unit(9, 8, 1).double(), 2), {}, "of torch.float32"),
        (topk_scan(unit(4, 8, 0), unit(9, 8, 1), 3), {}, "must hold"),
        (topk_scan(unit(4, 8, 0), unit(9, 8, 1), 2), {"lse_scale": torch.tensor(1.0)}, "lse_scale"),
        (topk_scan(unit(4, 8, 0), unit(9, 8, 1), 2, lse_scale=torch.tensor(1.0)), {}, "lse_scale"),
    ],
)
def test_an_earlier_result_that_does_not_fit(initial, options, message):
    with pytest.raises(ValueError, match=message):
        topk_scan(unit(4, 8, 0), unit(9, 8, 1), 2, initial=initial, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_key(backend):
    top = topk_scan(torch.randn(3, 4), torch.empty(0, 4), 2, backend=backend)
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
        (torch.ones(2, 3), torch.ones(2, 3), {"limit": torch.ones(3)}, "limit must be"),
        (torch.ones(2, 3), torch.ones(2, 3), {"backend": "cuda"}, "accepted: auto, torch, native"),
        (torch.ones(2, 3), torch.ones(2, 3), {"precision": "fp8"}, "accepted: auto, input, bf16"),
        (torch.full((2, 3), torch.nan), torch.ones(2, 3), {}, "NaN"),
        (torch.ones(2, 3), torch.tensor([[1.0] * 3, [torch.nan] * 3]), {}, "NaN"),
        (torch.ones(2, 3), torch.tensor([[1.0] * 3, [torch.inf] * 3]), {}, "Inf"),
        (torch.full((2, 3), 1e25), torch.full((2, 3), 1e25), {}, "overflow"),
    ],
)
def test_wrong_arguments(q, keys, options, message):
    with pytest.raises(ValueError, match=message):
        topk_scan(q, keys, **{"k": 1, **options})
