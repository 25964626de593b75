"""The order of samples."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsclr.data.order import SampleOrder


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0),
    st.integers(0, 100),
    st.booleans(),
    st.integers(1, 10),
)
@settings(deadline=None)
def test_every_epoch_holds_every_sample_once(counts, seed, shuffle, window):
    order = SampleOrder(counts, seed, shuffle, window)
    everything = {(shard, sample) for shard, count in enumerate(counts) for sample in range(count)}
    for epoch in range(3):
        seen = [order.locate(epoch * sum(counts) + i) for i in range(sum(counts))]
        assert {e for e, *_ in seen} == {epoch}
        assert {(shard, sample) for _, shard, sample in seen} == everything
    fresh = SampleOrder(counts, seed, shuffle, window)
    assert fresh.locate(sum(counts) + 1) == order.locate(sum(counts) + 1)


def test_without_shuffling_samples_keep_their_order():
    order = SampleOrder([2, 3], 0, False, 1)
    assert [order.locate(i)[1:] for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_epochs_and_seeds_differ():
    first, second = SampleOrder([50, 50], 0, True, 2), SampleOrder([50, 50], 1, True, 2)
    orders = [[o.locate(start + i)[1:] for i in range(100)] for o, start in ((first, 0), (first, 100), (second, 0))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_only_a_window_of_shards_is_read_at_a_time(window):
    order = SampleOrder([20] * 6, 0, True, window)
    shards = [order.locate(i)[1] for i in range(120)]
    for start in range(0, 120, 20 * window):
        assert len(Counter(shards[start : start + 20 * window])) == window
