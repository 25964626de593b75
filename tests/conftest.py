from __future__ import annotations

import pytest

from dsclr.train import runtime


@pytest.fixture(scope="session")
def world():
    # Once: DeepSpeed remembers the first process group of a process.
    yield runtime.start()
    runtime.stop()
