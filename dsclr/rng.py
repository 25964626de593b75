"""torch's random numbers as a value that can be kept and put back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of the generators on the host and on the device (None: there is only the host's)."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a rank that has no state to go on from: another stream for each seed, step and rank."""
    (mixed,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed >> np.uint64(1)))
