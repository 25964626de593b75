"""The log-sum-exp of all valid scores of a row, gathered from the same tiles as its top k."""

from __future__ import annotations

import torch
from torch import Tensor

from dsclr.ops.collect import Problem


class TailSum:
    """Running log(sum_j exp(scale s_ij)) of a problem's rows over its valid keys.

    Attributes:
        lse: (N,) so far; -inf where no key was valid.
    """

    def __init__(self, problem: Problem, scale: Tensor, lse: Tensor | None = None) -> None:
        self.problem, self.scale = problem, scale.detach().reshape(()).to(problem.margin.dtype)
        self.lse = torch.full_like(problem.margin, -torch.inf) if lse is None else lse.clone()

    def visit(self, tile: Tensor, by_column: bool, first_row: int, first_key: int) -> None:
        """See :meth:`dsclr.ops.collect.TorchCollector.visit`."""
        p = self.problem
        scores = (tile.T if by_column else tile).to(self.lse.dtype, copy=True)
        rows = slice(first_row, first_row + scores.shape[0])
        columns = slice(first_key, first_key + scores.shape[1])
        if p.same is not None:
            p.same.fill_(scores, rows, columns, -torch.inf)
        if p.limit is not None:
            scores.masked_fill_(scores > p.limit[rows, None], -torch.inf)
        scores.mul_(self.scale)
        top = scores.amax(1)
        top = top.masked_fill(top == -torch.inf, 0.0)
        total = scores.sub_(top[:, None]).exp_().sum(1).log() + top
        self.lse[rows] = torch.logaddexp(self.lse[rows], total)
