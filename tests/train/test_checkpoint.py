"""A checkpoint is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dsclr.config import ConfigError
from dsclr.data.order import Slots
from dsclr.train import checkpoint
from dsclr.train.checkpoint import CheckpointError, Checkpoints, Progress
from dsclr.train.durable import MANIFEST, Writes, damage
from dsclr.train.runtime import Runtime
from tests.train.steps import spawn


class Engine:
    """What is saved of a run: tensors of some size."""

    def __init__(self, size: int = 1000) -> None:
        self.weights = torch.arange(float(size))


def write_part(
    folder: Path, runtime: Runtime, engine: Engine, progress: Any, bank: Any, writes: Writes, *, frozen: bool
) -> None:
    """In place of write_run: every rank writes a part, with barriers around it."""
    torch.distributed.barrier()
    writes.save({"weights": engine.weights}, folder / f"part-{runtime.rank}.pt")
    torch.distributed.barrier()
    writes.save({"progress": progress["step"]}, folder / f"rank-{runtime.rank:05d}.pt")


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setattr(checkpoint, "write_run", write_part)


def progress(step: int) -> Progress:
    return Progress(slots=Slots(4, 1), step=step)


def make(world: Runtime, folder: Path, keep_last: int = 2) -> Checkpoints:
    return Checkpoints(folder, world, keep_last, save_frozen=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoints_are_kept_and_nothing_else(world, tmp_path):
    checkpoints = make(world, tmp_path / "checkpoints")
    engine = Engine()
    for step in (3, 6, 9):
        checkpoints.save(engine, progress(step))
    assert names(checkpoints.folder) == ["step-00000006", "step-00000009"]
    assert names(checkpoints.folder / "step-00000009") == [MANIFEST, "part-0.pt", "rank-00000.pt"]
    saved = torch.load(checkpoints.folder / "step-00000009/part-0.pt")
    assert torch.equal(saved["weights"], engine.weights)
    # the same step once more
    engine.weights = engine.weights + 1
    checkpoints.save(engine, progress(9))
    assert names(checkpoints.folder) == ["step-00000006", "step-00000009"]
    assert torch.load(checkpoints.folder / "step-00000009/part-0.pt")["weights"][0] == 1
    assert damage(checkpoints.folder / "step-00000009") is None


def test_the_newest_good_one_is_kept_whatever_comes_after(world, tmp_path):
    checkpoints = make(world, tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(Engine(), progress(3))
    checkpoints.prove(3)
    for step in (6, 9):
        checkpoints.save(Engine(), progress(step))
        assert names(checkpoints.folder) == ["step-00000003", f"step-{step:08d}"]
    assert checkpoints.newest_good() == checkpoints.folder / "step-00000003"
    checkpoints.prove(9)
    assert names(checkpoints.folder) == ["step-00000009"]
    assert damage(checkpoints.folder / "step-00000009") is None
    assert checkpoints.set_aside(9).name == "step-00000009.suspect"
    assert checkpoints.complete() == []


@pytest.mark.parametrize("text", ["[]", '{"bytes": [1, 2]}', "{", '{"bytes": {}}', '{"bytes": {"part-0.pt": "x"}}'])
def test_a_list_of_files_that_is_none_is_damage(world, tmp_path, text):
    checkpoints = make(world, tmp_path / "checkpoints")
    checkpoint = checkpoints.save(Engine(), progress(3))
    (checkpoint / MANIFEST).write_text(text)
    assert damage(checkpoint) is not None
    with pytest.raises(ConfigError, match="step-00000003 is damaged"):
        checkpoints.choose("newest")


def test_a_changed_byte_is_damage_also_to_resume_from_the_newest(world, tmp_path):
    checkpoints = make(world, tmp_path / "checkpoints")
    checkpoint = checkpoints.save(Engine(), progress(3))
    content = bytearray((checkpoint / "part-0.pt").read_bytes())
    place = content.index(torch.arange(1000.0).numpy().tobytes())
    content[place + 100] ^= 1
    (checkpoint / "part-0.pt").write_bytes(content)
    # not a folder, as a kill leaves
    (checkpoints.folder / "step-00000006.part").touch()
    with pytest.raises(ConfigError, match=r"step-00000003 is damaged \(part-0.pt is damaged"):
        checkpoints.choose("newest")
    assert names(checkpoints.folder) == ["step-00000003"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before_as_it_was(world, small_disk):
    checkpoints = make(world, small_disk / "checkpoints")
    checkpoints.save(Engine(), progress(3))
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save(Engine(size=500_000), progress(6))
    message = str(raised.value)
    assert f"step-00000006 could not be written to {checkpoints.folder}" in message
    assert "rank 0" in message
    assert "No space left on device" in message
    assert "needs 2 MB" in message
    assert re.search(r" 1\.0\d MB are free", message)
    assert "step-00000003 is intact: make room and --resume" in message
    assert names(checkpoints.folder) == ["step-00000003"]
    assert damage(checkpoints.folder / "step-00000003") is None
    # with room again
    checkpoints.save(Engine(), progress(6))
    assert names(checkpoints.folder) == ["step-00000003", "step-00000006"]


def save_with_a_full_disk(world: Runtime, folder: Path, full: int) -> str:
    """On two ranks, of which only one has the full disk."""
    checkpoint.write_run = write_part
    checkpoints = make(world, folder)
    checkpoints.save(Engine(), progress(3))

    def refuse(self: Writes, state: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if world.rank == full:
        Writes.save, original = (  # type: ignore[method-assign]
            lambda self, state, path: self.attempt(lambda: refuse(self, state, path)),
            Writes.save,
        )
    try:
        checkpoints.save(Engine(), progress(6))
    except CheckpointError as error:
        message = str(error)
    if world.rank == full:
        Writes.save = original  # type: ignore[method-assign]
    checkpoints.save(Engine(), progress(9))
    return message


def test_one_rank_with_a_full_disk_ends_the_save_on_all(tmp_path):
    messages = spawn(2, save_with_a_full_disk, tmp_path / "checkpoints", 1)
    assert all("rank 1: [Errno 28] No space left on device" in message for message in messages)
    assert all("step-00000003 is intact" in message for message in messages)
    assert names(tmp_path / "checkpoints") == ["step-00000003", "step-00000009"]
    assert names(tmp_path / "checkpoints/step-00000009") == [
        MANIFEST, "part-0.pt", "part-1.pt", "rank-00000.pt", "rank-00001.pt",
    ]  # fmt: skip


def test_what_a_killed_save_leaves_is_put_right(world, tmp_path):
    checkpoints = make(world, tmp_path)
    checkpoints.tidy()
    for step in (3, 6):
        checkpoints.save(Engine(), progress(step))
    # killed while it wrote 9, between the two renames that replace 6, and after those that replace 3
    shutil.copytree(tmp_path / "step-00000006", tmp_path / "step-00000009.part")
    (tmp_path / "step-00000006").rename(tmp_path / "step-00000006.old")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003.old")
    checkpoints.tidy()
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    assert checkpoints.newest_intact() == tmp_path / "step-00000006"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: truncate(folder / "part-0.pt"), "part-0.pt has"),
        (lambda folder: flip_a_bit(folder / "part-0.pt"), "part-0.pt is damaged"),
        (lambda folder: (folder / "rank-00000.pt").unlink(), "rank-00000.pt"),
        (lambda folder: truncate(folder / MANIFEST), "unreadable"),
    ],
    ids=["truncated", "bit", "missing", "manifest"],
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(world, tmp_path, caplog, harm, said):
    checkpoints = make(world, tmp_path)
    for step in (3, 6):
        checkpoints.save(Engine(), progress(step))
    harm(tmp_path / "step-00000006")
    assert checkpoints.newest_intact() == tmp_path / "step-00000003"
    assert said in caplog.text
    assert names(tmp_path) == ["step-00000003", "step-00000006.damaged"]
    harm(tmp_path / "step-00000003")
    with pytest.raises(ConfigError, match=r"all checkpoints of .* are damaged"):
        checkpoints.newest_intact()
    assert names(tmp_path) == ["step-00000003.damaged", "step-00000006.damaged"]


def test_a_truncated_checkpoint_without_a_list_of_files_is_noticed(world, tmp_path):
    make(world, tmp_path).save(Engine(), progress(3))
    folder = tmp_path / "step-00000003"
    assert json.loads((folder / MANIFEST).read_text())["bytes"].keys() == {"part-0.pt", "rank-00000.pt"}
    (folder / MANIFEST).unlink()
    assert damage(folder) is None
    truncate(folder / "part-0.pt")
    assert "part-0.pt" in (damage(folder) or "")
