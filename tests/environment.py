"""The environment of a process that a user would start."""

from __future__ import annotations

import os

# This process may be a rank itself, whose group a child would try to join.
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def of_a_user(**changes: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in GROUP}, **changes}
