from __future__ import annotations

import pytest

from dsclr.train import runtime


@pytest.fixture(scope="session")
def world():
    # Once: DeepSpeed remembers the first process group of a process.
    yield runtime.start()
    runtime.stop()


def pytest_make_parametrize_id(config, val, argname):
    # Test processes must agree on a test's name, and contents may hold a time (gzip) or be drawn.
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes | bytearray) else None
