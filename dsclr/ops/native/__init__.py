"""The C++ scan for CPUs: built on first use, kept in torch's extension cache, optional."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "native"]
BACKENDS = ("auto", "torch", "native")
SOURCE = Path(__file__).parent / "scan.cpp"
_NAME = "dsclr_scan"
_COMPILER_FLAGS = ("-O3", "-fopenmp")


class NativeUnavailable(RuntimeError):
    """The C++ scan cannot be built here; the message says why."""


def choose_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> Literal["torch", "native"]:
    """What scans tensors of this kind.

    "auto" takes the C++ scan on a CPU where it builds and PyTorch operations elsewhere; the choice is logged
    once a process. float64, which only tests use, always goes to PyTorch.

    Raises:
        ValueError: an unknown name.
        NativeUnavailable: "native" was asked for and does not exist here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}, accepted: {', '.join(BACKENDS)}")
    if backend == "torch":
        return "torch"
    if device.type != "cpu":
        if backend == "native":
            raise NativeUnavailable(f'backend = "native" is for CPU tensors, these are on {device}: use "auto"')
        return "torch"
    if dtype == torch.float64:
        return "torch"
    try:
        native_ops()
    except NativeUnavailable as error:
        if backend == "native":
            raise
        _say_once(str(error))
        return "torch"
    return "native"


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("the C++ scan is not available, PyTorch operations do its work: %s", reason)


def native_ops() -> Any:
    """``torch.ops.dsclr`` with the scan in it, built if need be.

    Raises:
        NativeUnavailable: no compiler, or it failed.
    """
    outcome = _load()
    if isinstance(outcome, str):
        raise NativeUnavailable(outcome)
    return torch.ops.dsclr


@functools.cache
def _load() -> str | None:
    """None once the operators exist, else why they do not."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); install g++ or set CXX"
    if shutil.which("ninja") is None and not _ninja_of_package():
        return "there is no ninja; pip install ninja"
    # It speaks on machines with CUDA's files and no GPU, and this is for CPUs.
    logging.getLogger("torch.utils.cpp_extension").addFilter(
        lambda record: not record.getMessage().startswith("No CUDA runtime is found")
    )
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(_tagged(_NAME), verbose=False))
    library = folder / f"{_NAME}.so"
    try:
        if _is_built(folder, library):
            torch.ops.load_library(str(library))
    except (RuntimeError, OSError, ImportError) as error:
        return f"it does not build or load in {folder}: {str(error).strip().splitlines()[-1]}"
    logger.info("the C++ scan is in use (%s)", torch.backends.cpu.get_cpu_capability())
    return None


def _is_built(folder: Path, library: Path) -> bool:
    """Whether the library was there; if not it is built here, which also loads it.

    It appears whole or not at all, so those who find it need no lock. The build knows nothing of where this package
    lies: copies of it share one library.
    """
    if library.exists():
        return True
    # torch waits for ever for a lock file that a killed build left behind; a lock the system holds dies with its owner.
    with open(folder / "dsclr.lock", "w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds the C++ scan (in %s)", folder)
            fcntl.flock(held, fcntl.LOCK_EX)
        if library.exists():
            return True
        logger.info("building the C++ scan, which takes half a minute or more, once (in %s)", folder)
        build = folder / "build"
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        source = str(shutil.copy(SOURCE, build))
        from torch.utils import cpp_extension

        cpp_extension.load(
            name=_NAME,
            sources=[source],
            extra_cflags=list(_COMPILER_FLAGS),
            extra_ldflags=["-fopenmp"],
            build_directory=str(build),
            is_python_module=False,
        )
        os.replace(build / library.name, library)
        shutil.rmtree(build)
    return False


def _ninja_of_package() -> bool:
    """Whether the ninja package brings the program; it then joins the PATH."""
    try:
        import ninja
    except ImportError:
        return False
    if not (Path(ninja.BIN_DIR) / "ninja").exists():
        return False
    os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    return True


def _tagged(name: str) -> str:
    # Builds of several versions of the source, of torch or of the environment live side by side.
    made_of = (
        SOURCE.read_bytes() + "\0".join((torch.__version__, platform.machine(), sys.prefix, *_COMPILER_FLAGS)).encode()
    )
    return f"{name}_{hashlib.sha256(made_of).hexdigest()[:12]}"
