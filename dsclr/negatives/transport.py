"""Transfers between ranks, with the bytes that a rank sends counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _nothing() -> None:
    return None


@dataclass
class Transport:
    """The ranks of a process group.

    Attributes:
        agree: called by all ranks before they exchange anything; raises on all of them if one has failed.
        bytes_sent: by this rank so far, payload only. A collective counts as its ring algorithm: every rank sends
            (W - 1) / W of the whole.
        rows_chosen: rows of other ranks that the last selection of this rank asked for; 0 if all rows were sent.
    """

    group: Any = None
    agree: Callable[[], None] = _nothing
    bytes_sent: int = 0
    rows_chosen: int = 0
    _tag: int = field(default=0, init=False)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def check_rows(self, own: Sequence[Tensor]) -> None:
        """
        Raises:
            ValueError: on all ranks, if the ranks have different numbers of rows.
        """
        self.agree()
        rows = own[0].new_tensor([len(own[0])], dtype=torch.int64)
        of_ranks = rows.new_empty(self.world_size)
        dist.all_gather_into_tensor(of_ranks, rows, group=self.group)
        if bool((of_ranks != rows).any()):
            raise ValueError(
                f"all ranks need the same number of rows, they have {', '.join(map(str, of_ranks.tolist()))}: drop the "
                "last incomplete batch"
            )

    def gather(self, out: Tensor, own: Tensor) -> Any:
        """Start to bring ``own`` of every rank into ``out``, (W, ...); a handle to wait for."""
        self.bytes_sent += (self.world_size - 1) * own.nbytes
        flat = out.view(-1, *own.shape[1:])
        return dist.all_gather_into_tensor(flat, own.contiguous(), group=self.group, async_op=True)

    def all_to_all(
        self, parts: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Send part r of ``parts`` to rank r.

        Args:
            parts: (P, ...), the first dimension split evenly, or by ``sends``.
            receives: sizes of what the ranks send here; None: evenly.
        """
        sizes = list(sends) if sends is not None else [len(parts) // self.world_size] * self.world_size
        rows = sum(receives) if receives is not None else len(parts)
        out = parts.new_empty((rows, *parts.shape[1:]))
        row_bytes = parts[:1].nbytes if len(parts) else 0
        self.bytes_sent += (sum(sizes) - sizes[self.rank]) * row_bytes
        dist.all_to_all_single(
            out,
            parts.contiguous(),
            None if receives is None else list(receives),
            None if sends is None else sizes,
            group=self.group,
        )
        return out

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """(W, ...) -> (...): the sum over ranks of their part for this one."""
        if dist.get_backend(self.group) == "gloo":
            # gloo's own adds up in an order of its own, or is missing, by version of PyTorch.
            return self.all_to_all(parts).sum(0)
        out = torch.empty_like(parts[0])
        self.bytes_sent += (self.world_size - 1) * out.nbytes
        dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=self.group)
        return out

    def pass_on(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        """Start to send tensors to the next rank of the ring and to receive as many from the one before.

        The tensors must not be touched until the handles were waited for.
        """
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        operations = []
        for out, into in zip(sent, received, strict=True):
            self.bytes_sent += out.nbytes
            self._tag += 1
            peers = (self._peer(after), self._peer(before))
            operations += [
                dist.P2POp(dist.isend, out, peers[0], self.group, tag=self._tag),
                dist.P2POp(dist.irecv, into, peers[1], self.group, tag=self._tag),
            ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def wait(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.wait()
