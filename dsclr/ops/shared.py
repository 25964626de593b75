"""What an algorithm sees of rows that every rank holds a part of. How they come is :mod:`dsclr.negatives`' to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

# How contributions of several ranks to a row become one.
Merge = Literal["sum", "logsumexp"]


@dataclass(frozen=True)
class Visit:
    """Some rows of one rank, on this rank.

    Attributes:
        owner: the rank.
        start: number of the first row among the owner's.
        rows: tensors of these rows, to be read only.
    """

    owner: int
    start: int
    rows: tuple[Tensor, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows[0])


# Gives one contribution a tensor to bring back, each with as many rows as the visit.
Work = Callable[[Visit], Sequence[Tensor]]


@dataclass(frozen=True)
class Back:
    """What comes back to the owner of rows.

    Attributes:
        start: (N, ...) what the contributions of all ranks are merged with; may be overwritten.
    """

    start: Tensor
    merge: Merge = "sum"


class SharedRows(Protocol):
    """N rows on each of W ranks. All ranks call the methods together and with tensors of the same shapes.

    Row i of rank r has the global number r N + i.

    Attributes:
        own: tensors of this rank's rows.
        holds: whether visits after the first send no rows any more, because the rank holds those of all.
    """

    rank: int
    world_size: int
    own: tuple[Tensor, ...]
    holds: bool

    def visit(self, work: Work, more: Sequence[Tensor] = (), back: Sequence[Back] = ()) -> tuple[Tensor, ...]:
        """Let the rows of all ranks, this rank's first, pass by this one.

        Communication goes on while ``work`` computes. If it raises, the other ranks still get what they wait for, and
        the error is raised at the end.

        Args:
            work: called with each part of the rows once.
            more: further tensors of this rank's rows that visit with them.
            back: what the contributions become.

        Returns:
            For each of ``back``, the totals of this rank's rows.
        """
        ...

    def collect(self) -> tuple[Tensor, ...]:
        """The rows of all ranks by global number, as (W N, ...) tensors."""
        ...

    def select(self, numbers: Sequence[Tensor], row_bytes: int, back_bytes: int) -> Sequence[Selection] | None:
        """Only rows that this rank needs, instead of another visit that brings a contribution to each tensor back.

        Args:
            numbers: sets of global numbers, rising, each once; each set with a contribution of its own.
            row_bytes: of a row as :meth:`Selection.fetch` would send it; back_bytes: of its contribution.

        Returns:
            One a set; None, on all ranks, if the visit sends fewer bytes.
        """
        ...


class Exchange(Protocol):
    """A way of sharing rows between ranks."""

    def share(self, *own: Tensor) -> SharedRows:
        """
        Args:
            own: tensors of this rank's N rows; N is the same on all ranks.
        """
        ...


class Selection(Protocol):
    """Rows of all ranks that this rank asked for, one after the other by global number."""

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """
        Args:
            tensors: (N, ...) of this rank's rows.

        Returns:
            (U, ...) those of the rows that were asked for.
        """
        ...

    def give_back(self, contribution: Tensor, rows: int) -> Tensor:
        """
        Args:
            contribution: (U, ...) to the rows that were asked for. rows: N.

        Returns:
            (N, ...) sums of all ranks' contributions to this rank's rows, added in the order of the ranks.
        """
        ...


def merge_(total: Tensor, contribution: Tensor, merge: Merge) -> Tensor:
    """Merge a contribution into ``total``, in place."""
    if merge == "sum":
        return total.add_(contribution)
    return torch.logaddexp(total, contribution, out=total)
