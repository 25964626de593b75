"""Shards that are not files of this machine, and lists of shards: the same batches, or a word on what is wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch

from dsclr.config import ConfigError, DataConfig
from dsclr.data import build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data import cache as cache_module
from dsclr.data import reader as reader_module
from dsclr.data.cache import ShardCache
from dsclr.data.shards import Shard, expand_shards
from tests.data.samples import SETTINGS, tokenize, write_shard

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(cache_module, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(reader_module, "RETRY_WAITS", (0.001,))


@pytest.fixture
def folder(tmp_path):
    """Of three shards with ten samples each."""
    (tmp_path / "shards").mkdir()
    for i in range(3):
        write_shard(tmp_path / "shards" / f"s{i}.tar", range(10 * i, 10 * i + 10))
    return tmp_path / "shards"


def config(tmp_path, train, **options):
    defaults = {"cache_dir": str(tmp_path / "cache"), "workers": 0, "max_bad_fraction": 1.0}
    return DataConfig(**{"train": train, **defaults, **options})


def batches_of(cfg, count=6, rows=10):
    loader = build_train_loader(cfg, build_train_dataset(cfg, "clip", SETTINGS, tokenize, 0), rows)
    batches = list(itertools.islice(loader, count))
    loader.close()
    return batches, loader


def epoch(cfg):
    """(numbers of the usable samples, causes of the others)."""
    dataset = build_train_dataset(cfg.model_copy(update={"shuffle": False}), "clip", SETTINGS, tokenize, 0)
    rows = [dataset[position] for position in range(dataset.order.epoch_samples)]
    good = [int(row.b[0]) for row in rows if not hasattr(row, "cause")]
    return good, Counter(row.cause for row in rows if hasattr(row, "cause"))


def equal(first, second):
    return all(
        torch.equal(x.a, y.a) and torch.equal(x.b, y.b) and torch.equal(x.ids, y.ids)
        for x, y in zip(first, second, strict=True)
    )


def copies(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "shards").glob("*") if path.suffix != ".lock")


def wids_index(entries):
    """As widsindex of webdataset writes it."""
    shards = []
    for url, samples in entries:
        counted = {} if samples is None else {"nsamples": samples}
        shards.append({"url": str(url), "md5sum": "0" * 32, **counted, "filesize": 1})
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards, "name": "x"})


# Index files


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_an_index_in_json(tmp_path, folder, absolute, counted):
    names = [folder / f"s{i}.tar" if absolute else f"s{i}.tar" for i in range(3)]
    (folder / "index.json").write_text(wids_index([(name, 10 if counted else None) for name in names]))
    shards = expand_shards(f"{folder}/index.json")
    assert shards == [Shard(f"{folder}/s{i}.tar", 10 if counted else None) for i in range(3)]
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    assert equal(local, batches_of(config(tmp_path, f"{folder}/index.json"))[0])


@pytest.mark.parametrize("absolute", [False, True])
def test_a_list_of_addresses(tmp_path, folder, absolute):
    names = [f"{folder}/s{i}.tar" if absolute else f"s{i}.tar" for i in (2, 0)]
    # As an editor of Windows leaves it, with blank lines and comments.
    lines = ["# two of three", *names, "  # s1.tar", " "]
    (folder / "list.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    assert expand_shards(f"{folder}/list.txt") == [Shard(f"{folder}/s{i}.tar") for i in (2, 0)]
    assert epoch(config(tmp_path, [f"{folder}/list.txt", f"{folder}/s1.tar"])) == (
        [*range(20, 30), *range(20)],
        {},
    )


def test_an_index_that_promises_too_much(tmp_path, folder):
    (folder / "index.json").write_text(wids_index([("s0.tar", 13), ("s1.tar", 10)]))
    assert epoch(config(tmp_path, f"{folder}/index.json")) == ([*range(20)], {"unreadable_shard": 3})


def test_an_index_that_promises_too_little(tmp_path, folder, caplog):
    (folder / "index.json").write_text(wids_index([("s0.tar", 7), ("s1.tar", 0), ("s2.tar", 10)]))
    assert epoch(config(tmp_path, f"{folder}/index.json")) == ([*range(7), *range(20, 30)], {})
    assert "s0.tar holds 10 samples, its index file says 7: the last 3 are never read" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no index of shards"),
        ("{", "is no index of shards"),
        ("[]", "is no index of shards"),
        ("null", "is no index of shards"),
        ('{"shardlist": 3}', "is no index of shards"),
        ('{"shardlist": ["s0.tar"]}', "is no index of shards"),
        ('{"shardlist": [{"nsamples": 3}]}', "is no index of shards"),
        ('{"shardlist": []}', "lists no shards"),
        ('{"shardlist": [{"url": "s0.tar", "nsamples": -1}]}', "has -1 samples"),
        ('{"shardlist": [{"url": "s0.tar", "nsamples": "10"}]}', "has '10' samples"),
        ('{"shardlist": [{"url": "s0.tar", "nsamples": true}]}', "has True samples"),
        ('{"shardlist": [{"url": "s9.tar", "nsamples": 10}]}', r"s9\.tar does not exist"),
        ('{"shardlist": [{"url": "pipe:true"}]}', "allow_pipe"),
        ('{"shardlist": [{"url": "s0.tar", "nsamples": 0}]}', "no samples in 1 shard"),
    ],
)
def test_an_index_that_is_wrong(tmp_path, folder, text, message):
    (folder / "index.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        epoch(config(tmp_path, f"{folder}/index.json"))


@pytest.mark.parametrize(("text", "message"), [("\n \n# s0.tar\n", "lists no shards"), ("pipe:true\n", "allow_pipe")])
def test_a_list_that_is_wrong(folder, text, message):
    (folder / "list.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        expand_shards(f"{folder}/list.txt")


def test_an_index_that_is_no_text(folder):
    (folder / "list.txt").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match=r"list\.txt cannot be read: UnicodeDecodeError"):
        expand_shards(f"{folder}/list.txt")


# Commands


def test_the_output_of_a_command(tmp_path, folder):
    command = f"pipe:cat {folder}/s{{0..2}}.tar"
    with pytest.raises(ConfigError, match="allow_pipe"):
        epoch(config(tmp_path, command))
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    assert equal(local, batches_of(config(tmp_path, command, allow_pipe=True))[0])
    assert len(copies(tmp_path)) == 3


@pytest.mark.parametrize("command", ["cat nothing.tar", "cat {}/s0.tar; exit 3", "cat {}/s0.tar; kill -9 $$", "true"])
def test_a_command_that_fails(tmp_path, folder, command):
    bad = f"pipe:{command.format(folder)}"
    with pytest.raises(ConfigError):
        epoch(config(tmp_path, bad, allow_pipe=True))
    (folder / "index.json").write_text(wids_index([(bad, 2), ("s0.tar", 10)]))
    seen = epoch(config(tmp_path, f"{folder}/index.json", allow_pipe=True))
    assert seen == ([*range(10)], {"unreadable_shard": 2})
    if command != "true":
        assert copies(tmp_path) == []


# A web server


class _Server(ThreadingHTTPServer):
    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: Counter[str] = Counter()


class _Handler(BaseHTTPRequestHandler):
    """/HOW/FILE: how the file comes."""

    server: _Server

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        how, name = self.path.split("?")[0].strip("/").split("/")
        asked = self.server.asked
        if body:
            asked[self.path] += 1
        path = self.server.folder / name
        if how == "gone" or not path.is_file():
            return self.send_error(404)
        if how == "dead" or (how == "flaky" and body and asked[self.path] <= 2):
            return self.send_error(503)
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if how == "cut" else data)
        self.close_connection = True
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(folder):
    server = _Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(server, path):
    return f"http://127.0.0.1:{server.server_port}/{path}"


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_from_a_web_server(tmp_path, folder, server, workers):
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    cfg = config(tmp_path, address(server, "ok/s{0..2}.tar"), workers=workers)
    assert equal(local, batches_of(cfg)[0])
    # One copy of each, whoever asks again.
    assert set(server.asked.values()) == {1}
    assert len(copies(tmp_path)) == 3
    held_out = build_eval_loader(cfg, address(server, "ok/s0.tar?token=a*b"), SETTINGS, tokenize, 8)
    assert [int(number) for task in held_out for number in task.b[:, 0]] == list(range(10))


def test_a_packed_shard_and_an_index_from_a_web_server(tmp_path, folder, server):
    (folder / "s0.tar.gz").write_bytes(gzip.compress((folder / "s0.tar").read_bytes()))
    (folder / "index.json").write_text(wids_index([("s0.tar.gz", 10), (address(server, "ok/s1.tar"), 10)]))
    assert epoch(config(tmp_path, address(server, "ok/index.json"))) == ([*range(20)], {})
    (folder / "list.txt").write_text("s2.tar\n")
    assert epoch(config(tmp_path, address(server, "ok/list.txt"))) == ([*range(20, 30)], {})


def test_a_server_that_stumbles_is_asked_again(tmp_path, server, caplog):
    assert epoch(config(tmp_path, address(server, "flaky/s1.tar"))) == ([*range(10, 20)], {})
    assert server.asked["/flaky/s1.tar"] == 3
    assert "attempt 2 of 4 failed" in caplog.text


@pytest.mark.parametrize("how", ["dead", "cut", "gone"])
def test_a_shard_that_never_comes(tmp_path, folder, server, how):
    bad = address(server, f"{how}/s1.tar")
    with pytest.raises(ConfigError, match=rf"cannot read shard .*{how}/s1\.tar"):
        epoch(config(tmp_path, bad))
    (folder / "index.json").write_text(wids_index([("s0.tar", 10), (bad, 10), ("s2.tar", 10)]))
    cfg = config(tmp_path, f"{folder}/index.json")
    server.asked.clear()
    assert epoch(cfg) == ([*range(10), *range(20, 30)], {"unreadable_shard": 10})
    assert copies(tmp_path) == []
    # Not once for each of its samples.
    assert server.asked[f"/{how}/s1.tar"] <= 3 * cache_module.ATTEMPTS
    _, loader = batches_of(cfg, 2)
    assert set(loader.skipped) <= {"unreadable_shard"}


def test_a_server_that_is_not_there(tmp_path, server):
    with pytest.raises(ConfigError, match=r"cannot read shard http://127\.0\.0\.1:1/s\.tar"):
        epoch(config(tmp_path, "http://127.0.0.1:1/s.tar"))
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_shards("http://127.0.0.1:1/index.json")
    with pytest.raises(ConfigError, match=r"gone/index\.json cannot be read"):
        expand_shards(address(server, "gone/index.json"))


# The cache


def _ask(cache, shard, ready, answers):
    ready.wait()
    answers.put(str(cache.local(shard)))


def test_processes_that_ask_at_once_make_one_copy(tmp_path, folder):
    shard = Shard(f"pipe:echo made >> {tmp_path}/log; sleep 0.3; cat {folder}/s0.tar")
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(4), context.Queue()
    cache = ShardCache(tmp_path / "cache")
    children = [context.Process(target=_ask, args=(cache, shard, ready, answers)) for _ in range(4)]
    for child in children:
        child.start()
    found = {answers.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert (tmp_path / "log").read_text() == "made\n"
    assert [Path(name).read_bytes() for name in found] == [(folder / "s0.tar").read_bytes()]
    assert len(copies(tmp_path)) == 1


def test_over_the_limit_the_least_recently_used_goes(tmp_path, folder):
    size = (folder / "s0.tar").stat().st_size
    cache = ShardCache(tmp_path / "cache", 2 * size + size // 2)
    first, second, third = (Shard(f"file://{folder}/s{i}.tar") for i in range(3))
    old = cache.local(first)
    cache.local(second)
    os.utime(old, (time.time() - 100, old.stat().st_mtime))
    os.utime(cache.local(second), (time.time() - 50, old.stat().st_mtime))
    assert cache.local(first) == old
    cache.local(third)
    assert [cache.is_ready(shard) for shard in (first, second, third)] == [True, False, True]


def test_training_goes_on_with_a_cache_smaller_than_a_shard(tmp_path, folder, server):
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    cfg = config(tmp_path, address(server, "ok/s{0..2}.tar"), cache_size=1)
    batches, loader = batches_of(cfg)
    assert equal(local, batches)
    assert not loader.skipped
    for path in (tmp_path / "cache" / "shards").glob("*.tar"):
        os.utime(path, (time.time() - 100, path.stat().st_mtime))
    ShardCache(tmp_path / "cache", 1).local(Shard(f"file://{folder}/s0.tar"))
    assert len(copies(tmp_path)) == 1


def test_an_interrupted_copy_leaves_nothing_under_its_name(tmp_path, folder):
    cache = ShardCache(tmp_path / "cache")
    fifo, started = tmp_path / "fifo", tmp_path / "started"
    os.mkfifo(fifo)
    shard = Shard(f"pipe:head -c 2000 {folder}/s0.tar; touch {started}; test -e {tmp_path}/free || cat {fifo}; "
                  f"tail -c +2001 {folder}/s0.tar")  # fmt: skip
    context = multiprocessing.get_context("fork")
    child = context.Process(target=cache.local, args=(shard,))
    child.start()
    while not started.exists():
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (tmp_path / "free").touch()
    # Lets the command end that its parent left behind.
    with fifo.open("w"):
        pass
    assert not cache.is_ready(shard)
    assert not list((tmp_path / "cache" / "shards").glob("*.tar"))
    assert cache.local(shard).read_bytes() == (folder / "s0.tar").read_bytes()


def test_a_full_disk_is_no_half_copy(tmp_path, folder, monkeypatch):
    def full(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/full/s0.tar", (folder / "s0.tar").read_bytes())
    monkeypatch.setattr(type(memory), "get_file", lambda self, source, target: full(source, target))
    with pytest.raises(ConfigError, match=r"after 1 attempt.*No space left"):
        epoch(config(tmp_path, "memory://full/s0.tar"))
    assert copies(tmp_path) == []


# Object stores


def test_another_kind_of_store(tmp_path, folder):
    memory = fsspec.filesystem("memory")
    for i in range(3):
        memory.pipe_file(f"/bucket/s{i}.tar", (folder / f"s{i}.tar").read_bytes())
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    for pattern in ("memory://bucket/s{0..2}.tar", "memory://bucket/*.tar", "memory://bucket/s[0-2].tar"):
        assert equal(local, batches_of(config(tmp_path, pattern))[0])
    with pytest.raises(ConfigError, match="nothing matches"):
        expand_shards("memory://bucket/*.zip")


def test_a_missing_package_is_named(monkeypatch):
    if "gcsfs" in sys.modules:
        pytest.skip("it was imported before")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for address in ("gs://bucket/s0.tar", "gs://bucket/*.tar", "gs://bucket/index.json", "gcs://bucket/list.txt"):
        with pytest.raises(ConfigError, match=r"dsclr\.data\.train: .*pip install 'dsclr\[gcs\]'"):
            expand_shards(address)


@pytest.fixture(scope="module")
def endpoint():
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, folder, monkeypatch):
    """Holding the shards."""
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    name = f"bucket-{time.monotonic_ns()}"
    store.mkdir(name)
    for path in folder.iterdir():
        store.put_file(str(path), f"{name}/shards/{path.name}")
    (folder / "index.json").write_text(wids_index([(f"s{i}.tar", 10) for i in range(3)]))
    store.put_file(f"{folder}/index.json", f"{name}/shards/index.json")
    yield f"s3://{name}/shards"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_batches_from_s3_are_those_from_files(tmp_path, folder, bucket):
    local, _ = batches_of(config(tmp_path, f"{folder}/s*.tar"))
    for pattern in ("s{0..2}.tar", "*.tar", "index.json"):
        shutil.rmtree(tmp_path / "cache")
        assert equal(local, batches_of(config(tmp_path, f"{bucket}/{pattern}"))[0])
        assert len(copies(tmp_path)) == 3
    shutil.rmtree(tmp_path / "cache")
    assert equal(local, batches_of(config(tmp_path, f"{bucket}/*.tar", workers=2))[0])
    resampled = [batches_of(config(tmp_path, x, resampled=True))[0] for x in (f"{folder}/s*.tar", f"{bucket}/*.tar")]
    assert equal(*resampled)


def test_what_is_not_in_s3(tmp_path, bucket):
    with pytest.raises(ConfigError, match="nothing matches"):
        expand_shards(f"{bucket}/*.zip")
    with pytest.raises(ConfigError, match=r"s7\.tar"):
        epoch(config(tmp_path, f"{bucket}/s7.tar"))
    with pytest.raises(ConfigError, match=r"other\.json cannot be read"):
        expand_shards(f"{bucket}/other.json")


def test_an_object_that_is_gone_after_the_start(tmp_path, bucket):
    cfg = config(tmp_path, f"{bucket}/index.json")
    store = fsspec.filesystem("s3")
    store.rm(f"{bucket}/s1.tar")
    assert epoch(cfg) == ([*range(10), *range(20, 30)], {"unreadable_shard": 10})


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_mixture_of_local_and_remote_sources(tmp_path, folder, server, kind, request):
    far = request.getfixturevalue("bucket") if kind == "s3" else address(server, "ok")

    def mixed(last):
        sources = [
            {"shards": f"{folder}/s0.tar", "weight": 3, "name": "near"},
            {"shards": last, "weight": 1, "name": "far"},
        ]
        return batches_of(config(tmp_path, sources), 20)[0]

    batches = mixed(f"{far}/s{{1..2}}.tar")
    assert equal(batches, mixed([f"{folder}/s1.tar", f"{folder}/s2.tar"]))
    numbers = [int(number) for batch in batches for number in batch.b[:, 0]]
    assert sum(number < 10 for number in numbers) / len(numbers) == pytest.approx(0.75, abs=0.1)
