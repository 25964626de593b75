"""The order of samples."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsclr.data.order import MIXTURE_BLOCK, MixedOrder, ResampledOrder, SampleOrder, Slots


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
        assert len(set(seen)) == len(seen)
        assert set(seen) == everything
    fresh = SampleOrder(counts, seed, shuffle, window)
    assert fresh.locate(sum(counts) + 1) == order.locate(sum(counts) + 1)


def test_without_shuffling_samples_keep_their_order():
    order = SampleOrder([2, 3], 0, False, 1)
    assert [order.locate(i) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_epochs_and_seeds_differ():
    first, second = SampleOrder([50, 50], 0, True, 2), SampleOrder([50, 50], 1, True, 2)
    orders = [[o.locate(start + i) for i in range(100)] for o, start in ((first, 0), (first, 100), (second, 0))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_only_a_window_of_shards_is_read_at_a_time(window):
    order = SampleOrder([20] * 6, 0, True, window)
    shards = [order.locate(i)[0] for i in range(120)]
    for start in range(0, 120, 20 * window):
        assert len(Counter(shards[start : start + 20 * window])) == window


def test_a_mixture_has_its_shares_and_every_source_its_own_epochs():
    counts = [[40, 60], [30], [7, 0, 13]]
    orders = [SampleOrder(own, 3, True, 2) for own in counts]
    order = MixedOrder(orders, [2, 1, 3], [3, 1, 1], 3)
    assert order.epoch_samples == 150
    drawn = [order.locate(i) for i in range(MIXTURE_BLOCK + 500)]
    source_of = [0, 0, 1, 2, 2, 2]
    share = Counter(source_of[shard] for shard, _ in drawn[:MIXTURE_BLOCK])
    assert share == {0: 6000, 1: 2000, 2: 2000}
    # Mixed, and not one source after the other.
    assert 150 < sum(source_of[shard] == 0 for shard, _ in drawn[:300]) < 210
    for source, own in enumerate(counts):
        of_source = [(shard, sample) for shard, sample in drawn if source_of[shard] == source]
        # Across the end of a block too, each epoch of the source holds each of its samples once.
        for epoch in range(len(of_source) // sum(own)):
            assert len(set(of_source[epoch * sum(own) : (epoch + 1) * sum(own)])) == sum(own)
    fresh = MixedOrder([SampleOrder(own, 3, True, 2) for own in counts], [2, 1, 3], [3, 1, 1], 3)
    assert fresh.locate(MIXTURE_BLOCK + 499) == drawn[-1]
    with pytest.raises(ValueError, match="source 1 has less than"):
        MixedOrder(orders, [2, 1, 3], [1, 1e-6, 1], 3)


def test_resampled_every_sample_is_as_likely_as_any_other():
    counts = [10, 200, 0, 40]
    order = ResampledOrder(counts, 5, 2)
    draws = [order.locate(i) for i in range(50_000)]
    assert all(0 <= sample < counts[shard] for shard, sample in draws)
    per_shard = Counter(shard for shard, _ in draws)
    for shard, count in enumerate(counts):
        assert per_shard[shard] / 50_000 == pytest.approx(count / 250, abs=0.03)
    # With replacement: some come again before all were seen.
    assert len(set(draws[:250])) < 220
    assert [ResampledOrder(counts, 5, 2).locate(i) for i in (0, 777, 49_999)] == [draws[0], draws[777], draws[-1]]
    assert draws[:100] != [ResampledOrder(counts, 6, 2).locate(i) for i in range(100)]
    # Few shards at a time.
    assert all(len({shard for shard, _ in draws[i : i + 125]}) <= 2 for i in range(0, 1000, 125))


def test_coming_shards_are_those_needed_next():
    counts = [5, 6, 7, 8, 9, 10]
    order = SampleOrder(counts, 1, True, 2)
    here = set(order.coming_shards(sum(counts) - 1)), set(order.coming_shards(0))
    # The window before the first one of an epoch is the last of the epoch before.
    epoch = [order.locate(sum(counts) + i)[0] for i in range(sum(counts))]
    size = sum(counts[shard] for shard in here[0])
    assert set(epoch[:size]) == here[0]
    first = [order.locate(i)[0] for i in range(sum(counts))]
    start = next(i for i in range(60) if first[i] in here[1])
    assert set(first[start : start + sum(counts[shard] for shard in here[1])]) == here[1]
    # Stretches of a third of 45 samples.
    resampled = ResampledOrder(counts, 1, 2)
    for stretch in range(5):
        needed = {resampled.locate(15 * (stretch + 1) + i)[0] for i in range(15)}
        assert needed == set(resampled.coming_shards(15 * stretch + 7))


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 25), min_size=4, max_size=4),
    st.lists(st.integers(0, 25), min_size=4, max_size=4),
)
@settings(deadline=None)
def test_another_number_of_ranks_repeats_and_loses_nothing(before, between, after, consumed, consumed_again):
    """Twice in a row, from ranks that have consumed as many slots as they like."""
    plan = [(before, consumed), (between, consumed_again)]
    slots, read = Slots(12 // before, before), []
    for number, (ranks, used) in enumerate(plan):
        read += [slots.position(rank, slot) for rank in range(ranks) for slot in range(used[rank])]
        following = (between, after)[number]
        if following == ranks:
            return
        slots = slots.continued(used[:ranks], 12 // following, following)
    # So many batches that what was left over is among them.
    read += [slots.position(rank, slot) for rank in range(after) for slot in range(40 * 12 // after)]
    assert sorted(read) == list(range(len(read)))


def test_the_same_ranks_go_on_with_what_they_consumed():
    with pytest.raises(ValueError, match="nothing changes"):
        Slots(6, 2).continued([5, 7], 6, 2)
