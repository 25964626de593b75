"""The projection head: an MLP between a tower and the loss."""

from __future__ import annotations

import itertools

from torch import nn

from dsclr.config import ProjectionConfig


def projection_head(in_dim: int, cfg: ProjectionConfig) -> nn.Sequential:
    """Linear, GELU, ..., Linear: (B, in_dim) -> (B, cfg.out_dim); cfg.layers = 1 is one Linear."""
    widths = [in_dim, *[cfg.hidden_dim] * (cfg.layers - 1), cfg.out_dim]
    modules: list[nn.Module] = []
    for number, (narrow, wide) in enumerate(itertools.pairwise(widths)):
        if number:
            modules.append(nn.GELU())
        modules.append(nn.Linear(narrow, wide))
    return nn.Sequential(*modules)
