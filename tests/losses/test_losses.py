"""Losses and their gradients against the dense fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsclr.losses import DenseInfoNCE, ExactInfoNCE, Keys, Loss, StreamingClipLoss, TopKInfoNCE
from dsclr.negatives import RingExchange
from dsclr.ops import collect, streamed
from tests.oracle import dense_loss


def rows(n, d, generator, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def value_and_grads(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = function(*leaves)
    return loss, torch.autograd.grad(loss, leaves)


@st.composite
def batches(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, d = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    a, b = rows(n, d, generator), rows(n, d, generator)
    if draw(st.booleans()) and n > 1:  # duplicated rows: exact ties
        a[-1], b[-1] = a[0], b[0]
    ids = torch.randint(0, draw(st.integers(1, 2 * n)), (n,), generator=generator)
    scale = torch.tensor(draw(st.sampled_from([1.0, 14.3, 100.0])), dtype=torch.float64)
    return a, b, scale, ids, draw(st.sampled_from(["clip", "simclr"])), draw(st.integers(1, 40))


@given(batches(), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_topk_equals_the_oracle(batch, block):
    a, b, scale, ids, objective, k = batch
    loss_fn = TopKInfoNCE(k=k, block_size=block, objective=objective)
    loss, grads = value_and_grads(lambda a, b, s: loss_fn(a, b, s, ids).loss, a, b, scale)
    expected, expected_grads = value_and_grads(lambda a, b, s: dense_loss(a, b, s, ids, objective, k), a, b, scale)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    # scale is compared always; where duplicated rows tie at the k-th place the oracle may keep the other copy
    torch.testing.assert_close(grads[2], expected_grads[2], rtol=1e-9, atol=1e-9)
    if len(torch.unique(a, dim=0)) == len(a):
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss_class", [DenseInfoNCE, ExactInfoNCE])
@given(batches(), st.integers(1, 400))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_full_softmax_equals_the_oracle(loss_class, monkeypatch, batch, tile_scores):
    # at least 16 rows a tile, so that batches of up to 24 make one tile or two
    monkeypatch.setattr(streamed, "TILE_SCORES", tile_scores)
    a, b, scale, ids, objective, _ = batch
    loss_fn = loss_class(objective)
    loss, grads = value_and_grads(lambda a, b, s: loss_fn(a, b, s, ids).loss, a, b, scale)
    expected, expected_grads = value_and_grads(lambda a, b, s: dense_loss(a, b, s, ids, objective), a, b, scale)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("loss_class", [DenseInfoNCE, ExactInfoNCE, TopKInfoNCE])
def test_gradcheck(loss_class, objective):
    generator = torch.Generator().manual_seed(3)
    a, b = rows(9, 5, generator).requires_grad_(), rows(9, 5, generator).requires_grad_()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1])
    options = {"k": 4, "block_size": 3} if loss_class is TopKInfoNCE else {}
    loss_fn = loss_class(objective=objective, **options)
    assert torch.autograd.gradcheck(lambda a, b, s: loss_fn(a, b, s, ids).loss, (a, b, scale))


@pytest.mark.parametrize("objective", ["clip", "simclr"])
def test_k_of_all_negatives_is_dense(objective):
    generator = torch.Generator().manual_seed(0)
    a, b, scale = rows(33, 8, generator), rows(33, 8, generator), torch.tensor(100.0, dtype=torch.float64)
    ids = torch.arange(33)
    top, top_grads = value_and_grads(
        lambda a, b, s: TopKInfoNCE(k=64, objective=objective)(a, b, s, ids).loss, a, b, scale
    )
    dense, dense_grads = value_and_grads(lambda a, b, s: DenseInfoNCE(objective)(a, b, s, ids).loss, a, b, scale)
    torch.testing.assert_close(top, dense)
    for ours, theirs in zip(top_grads, dense_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("loss_class", [DenseInfoNCE, ExactInfoNCE, TopKInfoNCE])
def test_without_a_valid_negative_loss_and_gradients_are_zero_not_nan(loss_class, objective):
    loss_fn = loss_class(objective=objective)
    a, b = torch.eye(3)[:, [0, 1, 2]], torch.eye(3)[:, [1, 2, 0]]
    loss, grads = value_and_grads(
        lambda a, b, s: loss_fn(a, b, s, torch.zeros(3, dtype=torch.int64)).loss, a, b, torch.tensor(100.0)
    )
    assert loss == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("objective", ["clip", "simclr"])
def test_half_precision_is_nearer_the_truth_than_dense(objective, dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = rows(96, 32, generator, dtype), rows(96, 32, generator, dtype)
    scale, ids = torch.tensor(20.0), torch.arange(96)
    exact, exact_grads = value_and_grads(
        lambda a, b, s: dense_loss(a, b, s, ids, objective), a.double(), b.double(), scale.double()
    )
    dense, dense_grads = value_and_grads(lambda a, b, s: DenseInfoNCE(objective)(a, b, s, ids).loss, a, b, scale)
    top, top_grads = value_and_grads(
        lambda a, b, s: TopKInfoNCE(k=200, objective=objective)(a, b, s, ids).loss, a, b, scale
    )
    assert (top - exact).abs() <= (dense - exact).abs() + 1e-6
    for ours, theirs, reference in zip(top_grads, dense_grads, exact_grads, strict=True):
        assert (ours.double() - reference).norm() <= 2 * (theirs.double() - reference).norm() + 1e-7


def test_backward_is_bitwise_repeatable():
    generator = torch.Generator().manual_seed(2)
    a, b, scale = rows(200, 16, generator, torch.float32), rows(200, 16, generator, torch.float32), torch.tensor(30.0)
    first, second = (value_and_grads(lambda a, b, s: TopKInfoNCE(k=16)(a, b, s).loss, a, b, scale)[1] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("loss_class", [DenseInfoNCE, ExactInfoNCE, TopKInfoNCE])
def test_slices_with_all_keys_average_to_the_whole_batch(loss_class, objective):
    """What ranks do: own rows against everybody's keys; gradients of keys add up."""
    generator = torch.Generator().manual_seed(5)
    a, b, scale = rows(24, 6, generator), rows(24, 6, generator), torch.tensor(9.0, dtype=torch.float64)
    ids = torch.randint(0, 20, (24,), generator=generator)
    options = {"k": 7} if loss_class is TopKInfoNCE else {}
    loss_fn = loss_class(objective=objective, **options)

    def in_slices(a, b, s):
        keys = Keys(a, b, ids)
        parts = [loss_fn(a[i : i + 6], b[i : i + 6], s, ids[i : i + 6], keys).loss for i in range(0, 24, 6)]
        return torch.stack(parts).mean()

    whole, whole_grads = value_and_grads(lambda a, b, s: loss_fn(a, b, s, ids).loss, a, b, scale)
    parts, parts_grads = value_and_grads(in_slices, a, b, scale)
    torch.testing.assert_close(parts, whole)
    for ours, theirs in zip(parts_grads, whole_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_metrics():
    a = torch.eye(4)
    output = TopKInfoNCE(k=2, block_size=2)(a, a, torch.tensor(10.0))
    assert output.metrics["batch_accuracy"] == 1
    assert output.metrics["positive_similarity"] == 1
    assert output.metrics["hardest_negative_similarity"] == 0
    assert 0 <= output.metrics["skip_rate"] <= 1


@pytest.mark.parametrize(
    ("a", "b", "ids", "message"),
    [
        (torch.ones(2, 3), torch.ones(3, 3), None, "two"),
        (torch.ones(0, 3), torch.ones(0, 3), None, "empty"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.arange(3), "ids must be"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), "ids must be"),
    ],
)
def test_wrong_arguments(a, b, ids, message):
    for loss_fn in (DenseInfoNCE(), ExactInfoNCE(), TopKInfoNCE()):
        with pytest.raises(ValueError, match=message):
            loss_fn(a, b, torch.tensor(1.0), ids)


def test_wrong_options():
    with pytest.raises(ValueError, match="objective"):
        DenseInfoNCE("triplet")
    with pytest.raises(ValueError, match="k = 0"):
        TopKInfoNCE(k=0)


@pytest.mark.parametrize("objective", ["clip", "simclr"])
def test_exact_with_keys_of_its_own_in_several_tiles(monkeypatch, objective):
    monkeypatch.setattr(streamed, "TILE_SCORES", 1)  # 16 rows a tile
    generator = torch.Generator().manual_seed(8)
    a, b, scale = rows(40, 6, generator), rows(40, 6, generator), torch.tensor(50.0, dtype=torch.float64)
    ids = torch.randint(0, 35, (40,), generator=generator)
    loss_fn = ExactInfoNCE(objective)
    loss, grads = value_and_grads(lambda a, b, s: loss_fn(a, b, s, ids, Keys(a * 1, b * 1, ids)).loss, a, b, scale)
    expected, expected_grads = value_and_grads(lambda a, b, s: dense_loss(a, b, s, ids, objective), a, b, scale)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("loss_class", [DenseInfoNCE, ExactInfoNCE, TopKInfoNCE])
def test_only_dense_holds_the_similarity_matrix(monkeypatch, loss_class, objective):
    monkeypatch.setattr(streamed, "TILE_SCORES", 1 << 14)
    monkeypatch.setattr(collect, "CHUNK", 1 << 14)
    n, d, k, block = 1024, 8, 4, 16
    generator = torch.Generator().manual_seed(9)
    a, b = (rows(n, d, generator, torch.float32).requires_grad_() for _ in range(2))
    options = {"k": k, "block_size": block} if loss_class is TopKInfoNCE else {}
    with LargestTensor() as seen:
        loss_class(objective=objective, **options)(a, b, torch.tensor(10.0, requires_grad=True)).loss.backward()
    z = n if objective == "clip" else 2 * n
    if loss_class is DenseInfoNCE:
        assert seen.elements >= z * z
    else:
        assert seen.elements <= 64 * z


def bank_of(n, d, generator, kinds=10_000):
    return Keys(
        rows(n, d, generator),
        rows(n, d, generator),
        torch.randint(0, kinds, (n,), generator=generator),
    )


def loss_by_hand(a, b, scale, ids, objective, bank=(), margin=None, k=None, tail=False):
    """Row by row: further keys, false negatives left out, the k hardest kept, a normaliser over all with tail."""
    positive = (a * b).sum(1)
    if objective == "clip":
        problems = [(a, b, ids, ids, positive, [(x.b, x.ids) for x in bank])]
        problems += [(b, a, ids, ids, positive, [(x.a, x.ids) for x in bank])]
    else:
        z, both = torch.cat([a, b]), torch.cat([ids, ids])
        further = [(y, x.ids) for x in bank for y in (x.a, x.b)]
        problems = [(z, z, both, both, torch.cat([positive, positive]), further)]
    losses, masses, dropped = [], [], 0
    for q, keys, q_ids, key_ids, pos, further in problems:
        keys = torch.cat([keys, *(x for x, _ in further)])
        key_ids = torch.cat([key_ids, *(x for _, x in further)])
        for i in range(len(q)):
            negatives = (keys @ q[i])[key_ids != q_ids[i]]
            if margin is not None:
                over = negatives > pos[i] + margin
                dropped += int(over.sum())
                negatives = negatives[~over]
            kept = negatives if k is None else negatives.sort(descending=True).values[:k]
            normaliser = torch.logsumexp(torch.cat([pos[i : i + 1], kept]) * scale, 0)
            if len(negatives):
                mass = (torch.logsumexp(kept * scale, 0) - torch.logsumexp(negatives * scale, 0)).exp()
                masses.append(float(mass.detach()))
            if tail:
                # the value is that of all negatives, the gradient leaves those out that were not kept
                whole = torch.logsumexp(torch.cat([pos[i : i + 1], negatives]) * scale, 0).detach()
                weighted = (torch.cat([pos[i : i + 1], kept]) * scale - whole).exp().sum()
                normaliser = whole + weighted - weighted.detach()
            losses.append(normaliser - pos[i] * scale)
    return torch.stack(losses).mean(), sum(masses) / max(1, len(masses)), dropped / (2 * len(a))


BANKS = ["none", "bank", "two_segments"]


@pytest.mark.parametrize("objective", ["clip", "simclr"])
@pytest.mark.parametrize("bank_kind", BANKS)
@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("kind", ["topk", "tail", "exact", "all", "dense"])
def test_bank_margin_and_tail_equal_the_oracle(objective, bank_kind, margin, kind):
    generator = torch.Generator().manual_seed(11)
    a, b, scale = rows(21, 6, generator), rows(21, 6, generator), torch.tensor(8.0, dtype=torch.float64)
    ids = torch.randint(0, 18, (21,), generator=generator)
    bank = {
        "none": (),
        "bank": (bank_of(30, 6, generator, 40),),
        "two_segments": (bank_of(7, 6, generator), bank_of(25, 6, generator)),
    }[bank_kind]
    k = 5 if kind in ("topk", "tail") else None
    options: dict[str, Any] = {"objective": objective, "false_negative_margin": margin}
    makers: dict[str, Callable[[], Loss]] = {
        "topk": lambda: TopKInfoNCE(5, block_size=4, **options),
        "tail": lambda: TopKInfoNCE(5, block_size=4, tail="lse", **options),
        "exact": lambda: ExactInfoNCE(**options),
        "all": lambda: TopKInfoNCE("all", **options),
        "dense": lambda: DenseInfoNCE(**options),
    }
    loss_fn = makers[kind]()
    outputs = []

    def ours(a, b, s):
        outputs.append(loss_fn(a, b, s, ids, Keys(a, b, ids, bank)))
        return outputs[0].loss

    _, mass, dropped = loss_by_hand(a, b, scale, ids, objective, bank, margin, k)
    loss, grads = value_and_grads(ours, a, b, scale)
    expected, expected_grads = value_and_grads(
        lambda a, b, s: loss_by_hand(a, b, s, ids, objective, bank, margin, k, kind == "tail")[0], a, b, scale
    )
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    for x, y in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    if k is not None:
        metrics = outputs[0].metrics
        # of the 42 rows of simclr 32 are sampled
        near = 0.1 if kind == "topk" and objective == "simclr" else 1e-9
        assert float(metrics["captured_mass"]) == pytest.approx(mass, abs=near)
        assert ("bank_share" in metrics) == bool(bank)
        if margin is not None:
            assert metrics["false_negatives"] == pytest.approx(dropped)


def test_captured_mass_tells_a_k_that_is_large_enough():
    generator = torch.Generator().manual_seed(0)
    a, b = rows(300, 16, generator, torch.float32), rows(300, 16, generator, torch.float32)
    sharp = [float(TopKInfoNCE(k)(a, b, torch.tensor(100.0)).metrics["captured_mass"]) for k in (1, 16, 299)]
    flat = float(TopKInfoNCE(16)(a, b, torch.tensor(1.0)).metrics["captured_mass"])
    assert sharp[0] < sharp[1] < sharp[2]
    assert sharp[2] == pytest.approx(1.0, abs=1e-4)
    assert flat < 0.2 < sharp[1]


@pytest.mark.parametrize("output_dict", [False, True])
@pytest.mark.parametrize("k", ["all", 20])
def test_drop_in_equals_open_clips_loss(k, output_dict):
    from open_clip import ClipLoss

    generator = torch.Generator().manual_seed(4)
    a, b = rows(20, 8, generator, torch.float32), rows(20, 8, generator, torch.float32)
    scale = torch.tensor(50.0)

    def call(loss_fn):
        def loss(a, b, s):
            out = loss_fn(a, b, s, output_dict=output_dict)
            return out["contrastive_loss"] if output_dict else out

        return value_and_grads(loss, a, b, scale)

    loss, grads = call(StreamingClipLoss(k))
    expected, expected_grads = call(ClipLoss())
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_drop_in_with_an_exchange_needs_ids():
    a = torch.eye(3)
    with pytest.raises(ValueError, match="ids are needed"):
        StreamingClipLoss(exchange=RingExchange())(a, a, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "max"}, "tail"),
        ({"false_negative_margin": -0.1}, "0 to 2"),
        ({"backend": "cuda"}, "auto, torch, native"),
        ({"k": 0}, "at least 1"),
    ],
)
def test_wrong_topk_options(options, message):
    with pytest.raises(ValueError, match=message):
        TopKInfoNCE(**options)


@pytest.mark.parametrize("k", ["all", 7])
def test_autocast_around_the_loss_changes_nothing(k):
    generator = torch.Generator().manual_seed(6)
    a, b = rows(64, 16, generator, torch.float32), rows(64, 16, generator, torch.float32)
    loss_fn, scale = StreamingClipLoss(k), torch.tensor(100.0)
    plain, plain_grads = value_and_grads(loss_fn, a, b, scale)
    with torch.autocast("cpu", torch.bfloat16):
        inside, inside_grads = value_and_grads(loss_fn, a, b, scale)
    assert torch.equal(plain, inside)
    assert all(torch.equal(x, y) for x, y in zip(plain_grads, inside_grads, strict=True))


@pytest.mark.parametrize("loss_class", [ExactInfoNCE, TopKInfoNCE])
def test_fp16_gradients_survive_a_loss_scaler(loss_class):
    generator = torch.Generator().manual_seed(0)
    a, b = rows(64, 16, generator, torch.float16), rows(64, 16, generator, torch.float16)
    scale = torch.tensor(20.0)
    plain = value_and_grads(lambda a, b, s: loss_class()(a, b, s).loss, a.float(), b.float(), scale)[1]
    scaled = value_and_grads(lambda a, b, s: loss_class()(a, b, s).loss * 65536, a, b, scale)[1]
    for ours, reference in zip(scaled, plain, strict=True):
        assert (ours.float() / 65536 - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(value):
    a = torch.eye(3)
    for loss_fn in (ExactInfoNCE(), TopKInfoNCE(2), TopKInfoNCE(2, tail="lse")):
        with pytest.raises(ValueError, match="positive"):
            loss_fn(a, a, torch.tensor(value))


@pytest.mark.parametrize("options", [{}, {"k": 2}, {"k": 2, "tail": "lse"}, {"false_negative_margin": 0.1}])
def test_drop_in_takes_a_number_as_scale(options):
    a = torch.eye(5)
    loss_fn = StreamingClipLoss(**options)
    assert torch.equal(loss_fn(a, a, 30.0), loss_fn(a, a, torch.tensor(30.0)))
