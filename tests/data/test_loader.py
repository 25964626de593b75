"""Batches: complete, independent of workers and ranks, continued at any sample, and never silent about bad ones."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import tarfile

import pytest
import torch

from dsclr.config import ConfigError, DataConfig
from dsclr.data import BadDataError, build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data.causes import NOTES
from dsclr.data.order import Slots
from tests.data.samples import SETTINGS, add, picture, tokenize, write_shard


@pytest.fixture
def cfg(tmp_path):
    for i in range(3):
        write_shard(tmp_path / f"s{i}.tar", range(i * 10, i * 10 + 10))
    return DataConfig(train=f"{tmp_path}/s*.tar", cache_dir=str(tmp_path / "cache"), workers=0, shuffle_shards=2)


def take(cfg, rows, batches, objective="clip", seed=0, **options):
    dataset = build_train_dataset(cfg, objective, SETTINGS, tokenize, seed)
    loader = build_train_loader(cfg, dataset, rows, **options)
    return list(itertools.islice(loader, batches)), loader


def numbers(batches):
    return [batch.b[:, 0].tolist() for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def equal(first, second):
    return all(
        torch.equal(x.a, y.a) and torch.equal(x.b, y.b) and torch.equal(x.ids, y.ids)
        for x, y in zip(first, second, strict=True)
    )


def test_an_epoch_holds_every_sample_once(cfg):
    batches, _ = take(cfg, 6, 10)
    assert batches[0].a.shape == (6, 3, 32, 32)
    assert batches[0].a.dtype == torch.uint8
    assert batches[0].ids.dtype == torch.int64
    seen = flat(numbers(batches))
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30))
    assert seen[:30] != seen[30:]


def test_same_for_any_number_of_workers(cfg):
    alone, _ = take(cfg, 7, 9)
    for workers in (1, 3):
        assert equal(alone, take(cfg.model_copy(update={"workers": workers}), 7, 9)[0])


def test_of_several_captions_every_pass_draws_one(cfg):
    several = cfg.model_copy(update={"caption": "json:captions"})
    batches, _ = take(several, 6, 20)
    rows = flat(numbers(batches))
    drawn = [number // 1000 for number in rows]
    assert {0, 1, 2} == set(drawn)
    assert drawn[:30] != drawn[30:60]
    assert sorted(number % 1000 for number in rows[:30]) == list(range(30))
    ids = torch.cat([batch.ids for batch in batches])
    # whichever caption was drawn, the sample stays the same sample
    assert len(ids.unique()) == 30
    assert equal(batches, take(several.model_copy(update={"workers": 2}), 6, 20)[0])
    held_out = build_eval_loader(several, several.train, SETTINGS, tokenize, 8)
    assert flat(task.b[:, 0].tolist() for task in held_out) == list(range(30))


def test_a_global_batch_is_the_same_for_any_number_of_ranks(cfg):
    whole, _ = take(cfg, 8, 6)
    parts = [take(cfg, 4, 6, rank=rank, world_size=2)[0] for rank in range(2)]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(batch.a, torch.cat([first.a, second.a]))
        assert torch.equal(batch.b, torch.cat([first.b, second.b]))
        assert torch.equal(batch.ids, torch.cat([first.ids, second.ids]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_continues_where_it_stopped(cfg, tmp_path, workers, stop):
    write_shard(tmp_path / "s1.tar", range(10, 20), broken=(12, 13, 19))
    cfg = cfg.model_copy(update={"workers": workers, "max_bad_fraction": 1.0})
    whole, _ = take(cfg, 5, 9)
    first, loader = take(cfg, 5, stop)
    rest, _ = take(cfg, 5, 9 - stop, consumed=loader.consumed)
    assert equal(whole, first + rest)


def test_a_bad_sample_is_skipped_counted_and_named(cfg, tmp_path, caplog):
    write_shard(tmp_path / "s1.tar", range(10, 20), broken=(12, 13))
    with caplog.at_level(logging.WARNING):
        batches, loader = take(cfg, 7, 4)
    assert sorted(flat(numbers(batches))) == [n for n in range(30) if n not in (12, 13)]
    assert loader.skipped == {"not_an_image": 2}
    assert "000012" in caplog.text
    assert "s1.tar" in caplog.text


def test_too_many_bad_samples_end_the_run(cfg, tmp_path):
    write_shard(tmp_path / "s1.tar", range(10, 20), broken=tuple(range(10, 20)))
    with pytest.raises(BadDataError, match=r"1[01]\d of the last \d+ .*not_an_image.*s1\.tar.*max_bad_fraction"):
        take(cfg, 8, 1000)


def test_nothing_but_bad_samples_end_the_run_too(cfg, tmp_path):
    for i in range(3):
        write_shard(tmp_path / f"s{i}.tar", range(10), broken=tuple(range(10)))
    with pytest.raises(BadDataError):
        take(cfg, 8, 1)


def test_fewer_samples_than_a_batch(cfg):
    (batch,), _ = take(cfg, 70, 1)
    assert sorted(batch.b[:, 0].tolist()) == sorted([*range(30)] * 2 + batch.b[60:, 0].tolist())


def test_views_of_simclr_differ_but_repeat(cfg):
    first, _ = take(cfg, 6, 2, "simclr")
    assert first[0].b.shape == (6, 3, 32, 32)
    assert not torch.equal(first[0].a, first[0].b)
    assert equal(first, take(cfg, 6, 2, "simclr")[0])
    assert not equal(first, take(cfg, 6, 2, "simclr", seed=1)[0])


def test_ids_mark_equal_captions(cfg):
    batches, _ = take(cfg, 30, 2)
    by_number = [dict(zip(b.b[:, 0].tolist(), b.ids.tolist(), strict=True)) for b in batches]
    assert by_number[0] == by_number[1]
    assert len(set(by_number[0].values())) == 30
    classes, _ = take(cfg.model_copy(update={"id": "cls"}), 30, 1)
    assert len(set(classes[0].ids.tolist())) == 3
    fields, _ = take(cfg.model_copy(update={"id": "json:number"}), 30, 1)
    assert len(set(fields[0].ids.tolist())) == 30


def test_drawing_views_leaves_the_runs_random_numbers_alone(cfg):
    dataset = build_train_dataset(cfg, "simclr", SETTINGS, tokenize, 0)
    before = torch.get_rng_state()
    dataset[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_sees_every_sample_in_order(cfg):
    loader = build_eval_loader(cfg, cfg.train, SETTINGS, tokenize, 7)
    tasks = list(loader)
    assert flat(task.b[:, 0].tolist() for task in tasks) == list(range(30))


def test_missing_shards_are_an_error_at_once(cfg):
    with pytest.raises(ConfigError, match=r"dsclr.data.train: shard .*nothing.tar does not exist"):
        build_train_dataset(cfg.model_copy(update={"train": "nothing.tar"}), "clip", SETTINGS, tokenize, 0)
    with pytest.raises(ConfigError, match=r"dsclr.eval.data"):
        build_eval_loader(cfg, "nothing.tar", SETTINGS, tokenize, 7)


def test_shards_without_a_usable_sample_end_the_run_whatever_fraction_may_be_bad(tmp_path):
    write_shard(tmp_path / "bad.tar", range(8), broken=tuple(range(8)))
    cfg = DataConfig(
        train=str(tmp_path / "bad.tar"), cache_dir=str(tmp_path / "cache"), workers=0, max_bad_fraction=1.0
    )
    with pytest.raises(BadDataError, match="were unusable"):
        take(cfg, 4, 1)


def test_a_mixture_is_drawn_by_its_weights(cfg, tmp_path):
    sources = [
        {"shards": f"{tmp_path}/s0.tar", "weight": 3, "name": "first"},
        {"shards": [f"{tmp_path}/s1.tar", f"{tmp_path}/s2.tar"], "weight": 1},
    ]
    mixed = DataConfig(**{**cfg.model_dump(), "train": sources})
    assert mixed.source_names == ["first", "1"]
    batches, loader = take(mixed, 50, 20)
    rows = flat(numbers(batches))
    assert sum(number < 10 for number in rows) / len(rows) == pytest.approx(0.75, abs=0.04)
    assert loader.shard_rows.total() == 50
    with pytest.raises(ValueError, match="different names"):
        DataConfig(train=[{"shards": "a", "weight": 1, "name": "1"}, {"shards": "b", "weight": 1}])


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_interrupted_anywhere_it_goes_on_in_the_same_order(cfg, tmp_path, resampled, workers):
    write_shard(tmp_path / "s1.tar", range(10, 20), broken=(12, 13, 19))
    changes = {"workers": workers, "max_bad_fraction": 1.0, "resampled": resampled}
    cfg = cfg.model_copy(update=changes)
    whole, _ = take(cfg, 5, 12, rank=1, world_size=2)
    for stop in (1, 5, 8):
        first, loader = take(cfg, 5, stop, rank=1, world_size=2)
        loader.close()
        rest, again = take(cfg, 5, 12 - stop, rank=1, world_size=2, consumed=loader.consumed)
        again.close()
        assert equal(whole, first + rest)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_with_another_number_of_ranks_an_epoch_still_holds_every_sample_once(cfg, tmp_path, before, after):
    write_shard(tmp_path / "s1.tar", range(10, 20), broken=(12, 13, 19))
    cfg = cfg.model_copy(update={"max_bad_fraction": 1.0})
    good = [number for number in range(30) if number not in (12, 13, 19)]
    for stop in (1, 3):
        runs = [take(cfg, 6 // before, stop, rank=rank, world_size=before) for rank in range(before)]
        seen = flat(numbers(flat(batches for batches, _ in runs)))
        slots = Slots(6 // before, before).continued([loader.consumed for _, loader in runs], 6 // after, after)
        left = [take(cfg, 6 // after, 3, rank=rank, world_size=after, slots=slots)[0] for rank in range(after)]
        seen += flat(numbers(itertools.chain(*zip(*left, strict=True))))
        assert len(set(seen[:24])) == 24
        assert set(seen) <= set(good)


def test_captions_that_are_too_long_are_cut_off_and_counted_or_skipped(tmp_path):
    import open_clip

    tokenizer = open_clip.SimpleTokenizer(context_length=8)
    words = {0: "a fox", 1: "one two three four five six", 2: "one two three four five six seven", 3: "x " * 100}
    with tarfile.open(tmp_path / "long.tar", "w") as tar:
        for number, text in words.items():
            add(tar, f"{number}.png", picture(number))
            add(tar, f"{number}.txt", text.encode())
    cfg = DataConfig(
        train=str(tmp_path / "long.tar"), cache_dir=str(tmp_path / "cache"), workers=0, max_bad_fraction=1.0
    )
    dataset = build_train_dataset(cfg, "clip", SETTINGS, tokenizer, 0)
    loader = build_train_loader(cfg, dataset, 4)
    next(iter(loader))
    # Six words, with start and end, are eight tokens: exactly full is not cut off.
    assert loader.notes == {"truncated_captions": 2}
    strict = build_train_loader(
        cfg, build_train_dataset(cfg.model_copy(update={"long_caption": "skip"}), "clip", SETTINGS, tokenizer, 0), 2
    )
    next(iter(strict))
    assert set(strict.skipped) == {"long_caption"}


def test_one_samples_surprise_is_a_skipped_sample(cfg, tmp_path):
    def surprised(texts):
        if texts == ["picture number 7"]:
            raise LookupError("a tokenizer's bug")
        return tokenize(texts)

    dataset = build_train_dataset(cfg, "clip", SETTINGS, surprised, 0)
    loader = build_train_loader(cfg, dataset, 29)
    assert sorted(flat(numbers(itertools.islice(loader, 1)))) == [number for number in range(30) if number != 7]
    assert loader.skipped["failed"] >= 1
    assert any("LookupError: a tokenizer's bug" in item.detail for item in loader.take_skipped())
    assert not loader.take_skipped()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_incomplete_shard_leaves_a_trace_at_every_start(cfg, tmp_path, workers):
    cut = tmp_path / "s1.tar"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    index = {"shardlist": [{"url": f"s{i}.tar", "nsamples": count} for i, count in ((0, 10), (2, 8))]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    cfg = cfg.model_copy(update={"train": [str(cut), f"{tmp_path}/index.json"], "workers": workers})
    for start in range(2):
        _, loader = take(cfg, 7, 8)
        loader.close()
        told = {item.shard: item for item in loader.take_skipped()}
        assert set(told) == {str(cut), f"{tmp_path}/s2.tar"}, f"start {start}"
        assert {(item.position, item.key, item.cause) for item in told.values()} == {(None, "", "incomplete_shard")}
        assert f"{cut} is cut off at byte" in told[str(cut)].detail
        assert "s2.tar holds 10 samples, its index file says 8" in told[f"{tmp_path}/s2.tar"].detail
        assert loader.notes == {"incomplete_shards": 2}
        assert not loader.skipped
        assert "incomplete_shards" in NOTES
    _, other = take(cfg, 7, 8, rank=1, world_size=2)
    assert not other.notes
    assert not other.take_skipped()


def test_a_resumed_run_counts_incomplete_shards_anew(cfg, tmp_path):
    loader = build_train_loader(cfg, build_train_dataset(cfg, "clip", SETTINGS, tokenize, 0), 5)
    loader.notes.update({"incomplete_shards": 1, "truncated_captions": 3})
    next(iter(loader))
    assert loader.notes == {"truncated_captions": 3}


def test_a_loader_process_that_is_gone_is_explained(cfg):
    dataset = build_train_dataset(cfg.model_copy(update={"workers": 1}), "clip", SETTINGS, tokenize, 0)
    loader = build_train_loader(cfg.model_copy(update={"workers": 1}), dataset, 5)
    batches = iter(loader)
    next(batches)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(BadDataError, match=r"a loader process is gone .*dsclr.data.workers"):
        list(itertools.islice(batches, 100))
