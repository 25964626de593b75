"""The C++ scan is built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from dsclr.ops import native


def test_the_library_appears_whole_and_is_built_once_for_all_copies_of_the_package(tmp_path, monkeypatch):
    built = []

    def build(name, sources, build_directory, **options):
        built.append(sources)
        # Nothing of where the package lies: another path would make ninja compile again.
        assert all(Path(source).parent == tmp_path / "build" for source in sources)
        Path(build_directory, f"{name}.so").write_bytes(b"library")

    monkeypatch.setattr(cpp_extension, "load", build)
    library = tmp_path / "dsclr_scan.so"
    assert not native._is_built(tmp_path, library)
    assert library.read_bytes() == b"library"
    assert not (tmp_path / "build").exists()
    assert native._is_built(tmp_path, library)
    assert len(built) == 1


def test_a_build_that_was_killed_leaves_nothing_that_is_taken_for_a_library(tmp_path, monkeypatch):
    def killed(name, build_directory, **options):
        Path(build_directory, f"{name}.so").write_bytes(b"half")
        raise RuntimeError("killed")

    monkeypatch.setattr(cpp_extension, "load", killed)
    with pytest.raises(RuntimeError, match="killed"):
        native._is_built(tmp_path, tmp_path / "dsclr_scan.so")
    assert not (tmp_path / "dsclr_scan.so").exists()
