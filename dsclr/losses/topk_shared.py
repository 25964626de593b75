"""The loss over the k hardest negatives among the rows of all ranks, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsclr.losses.base import Direction, SharedKeys
from dsclr.ops import TopK, topk_scan
from dsclr.ops.pairs import SortedPairs
from dsclr.ops.precision import as_written
from dsclr.ops.shared import Back, SharedRows, Visit
from dsclr.ops.sparse import softmax_of_kept
from dsclr.ops.streamed import attach_gradients


@dataclass
class SharedScan:
    """The top k of some directions over all ranks' rows and the memory bank.

    Keys are numbered as in one process on the concatenated rows: a direction's keys on side 0 (a) or 1 (b) start at
    ``parts``, the bank's come after them.

    Attributes:
        directions: with the rank's own rows as queries.
        parts: of each direction, (side, number of its first key).
        key_count: rows of all ranks.
        tops: results.
        sampled: of each direction, (S,) log-sum-exp of all valid scaled scores of the sampled queries.
    """

    directions: Sequence[Direction]
    keys: SharedKeys
    rows: SharedRows
    k: int
    scale: Tensor
    options: dict[str, Any]
    samples: Sequence[Tensor]
    tops: list[TopK | None] = field(init=False)
    sampled: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.own_rows = len(self.rows.own[0])
        self.key_count = self.rows.world_size * self.own_rows
        two_sides = len(self.directions) == 2
        self.parts = [[(1, 0)], [(0, 0)]] if two_sides else [[(0, 0), (1, self.key_count)]]
        self.bank_start = self.key_count if two_sides else 2 * self.key_count
        self.tops = [None] * len(self.directions)
        wide = self.directions[0].positive.dtype
        self.sampled = [torch.full_like(x, -torch.inf, dtype=wide) for x in self.samples]

    @torch.no_grad()
    @as_written
    def run(self) -> list[TopK]:
        def visit(some: Visit) -> tuple[Tensor, ...]:
            *sides, ids = some.rows
            for number, side, first in self._places(self._first(some)):
                self._scan(number, sides[side], ids, first)
            return ()

        self.rows.visit(visit)
        if self.keys.bank is not None:
            self.keys.bank(self._scan_bank)
        return [top for top in self.tops if top is not None]

    def _first(self, some: Visit) -> int:
        return some.owner * self.own_rows + some.start

    def _places(self, first: int) -> list[tuple[int, int, int]]:
        """(direction, side, number of the key) of row ``first`` of all ranks."""
        return [(number, side, base + first) for number, parts in enumerate(self.parts) for side, base in parts]

    def _bank_places(self, first: int) -> list[tuple[int, int, int]]:
        if len(self.parts) == 2:
            return [(0, 1, self.bank_start + first), (1, 0, self.bank_start + first)]
        return [(0, 0, self.bank_start + first), (0, 1, self.bank_start + self.keys.bank_rows + first)]

    def _scan_bank(self, a: Tensor, b: Tensor, ids: Tensor, first: int) -> None:
        for number, side, place in self._bank_places(first):
            self._scan(number, (a, b)[side], ids, place)

    def _scan(self, number: int, keys: Tensor, ids: Tensor, first: int) -> None:
        d = self.directions[number]
        q = d.q.detach()
        self.tops[number] = topk_scan(
            q, keys, self.k, q_ids=d.q_ids, key_ids=ids, initial=self.tops[number], key_offset=first, **self.options
        )
        sample = self.samples[number]
        if not len(sample):
            return
        self.sampled[number] = torch.logaddexp(
            self.sampled[number], sampled_logsumexp(d, sample, keys, ids, self.scale)
        )

    @as_written
    def loss(self, a: Tensor, b: Tensor, logit_scale: Tensor, tops: Sequence[TopK]) -> Tensor:
        """Mean over the rank's queries, with the gradients that its rows get from all ranks' losses.

        The gradient of keys goes back with another visit, or, where that is fewer bytes, only the rows that some
        query of this rank kept are sent.
        """
        queries = sum(len(d.q) for d in self.directions)
        positive = self.directions[0].positive[: len(a)].detach()
        with torch.no_grad():
            s = logit_scale.detach().reshape(()).to(positive.dtype)
            softmaxes = [
                softmax_of_kept(top, d.positive.detach(), s) for d, top in zip(self.directions, tops, strict=True)
            ]
            loss = torch.stack([x.losses.sum() for x in softmaxes]).sum() / queries
            inputs = (a, b, logit_scale)
            if not any(x.requires_grad for x in inputs):
                return loss
            weights = [x.weights for x in softmaxes]
            grad_a, grad_b = self._gradients(tops, weights)
            missing = torch.stack([x.missing.view(-1, len(positive)).sum(0) for x in softmaxes]).sum(0)
            for grad, other in ((grad_a, b), (grad_b, a)):
                grad.addcmul_(other.detach().to(grad.dtype), missing[:, None]).mul_(s / queries)
            grad_scale = torch.stack([x.grad_scale for x in softmaxes]).sum() / queries
        return attach_gradients(loss, inputs, (grad_a, grad_b, grad_scale))

    def _gradients(self, tops: Sequence[TopK], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of the rows' sides, before the factor: as queries and, from all ranks, as keys."""
        wide = weights[0].dtype
        by_query = [torch.zeros_like(d.q, dtype=wide) for d in self.directions]
        row_bytes = self.rows.own[0][:1].nbytes
        chosen = [self._chosen(side, tops) for side in (0, 1)]
        selections = self.rows.select(chosen, row_bytes, by_query[0][:1].nbytes)
        pairs = [SortedPairs(top.indices, w) for top, w in zip(tops, weights, strict=True)]

        def visit(some: Visit) -> tuple[Tensor, ...]:
            *sides, _ = some.rows
            given = [torch.zeros_like(x, dtype=wide) for x in sides] if selections is None else []
            for number, side, first in self._places(self._first(some)):
                pairs[number].add_to_queries(by_query[number], sides[side], first)
                if selections is None:
                    pairs[number].add_to_keys(given[side], self.directions[number].q, first)
            return tuple(given)

        if selections is None:
            by_key = list(
                self.rows.visit(visit, back=[Back(torch.zeros_like(x, dtype=wide)) for x in self.rows.own[:2]])
            )
        else:
            if self.rows.holds:
                self.rows.visit(visit)
            by_key = []
            for side, (selection, numbers) in enumerate(zip(selections, chosen, strict=True)):
                found = None if self.rows.holds else selection.fetch([self.rows.own[side]])[0]
                given = torch.zeros((len(numbers), by_query[0].shape[1]), dtype=wide, device=numbers.device)
                for number, parts in enumerate(self.parts):
                    for base in (base for part, base in parts if part == side):
                        some = SortedPairs(self._renumbered(tops[number].indices - base, numbers), weights[number])
                        some.add_to_keys(given, self.directions[number].q)
                        if found is not None:
                            some.add_to_queries(by_query[number], found)
                by_key.append(selection.give_back(given, self.own_rows))

        def visit_bank(a: Tensor, b: Tensor, ids: Tensor, first: int) -> None:
            for number, side, place in self._bank_places(first):
                pairs[number].add_to_queries(by_query[number], (a, b)[side], place)

        if self.keys.bank is not None:
            self.keys.bank(visit_bank)
        as_query = by_query if len(by_query) == 2 else by_query[0].chunk(2)
        return by_key[0].add_(as_query[0]), by_key[1].add_(as_query[1])

    def _chosen(self, side: int, tops: Sequence[TopK]) -> Tensor:
        """Global numbers, rising, of the rows whose side some query of this rank kept."""
        found = []
        for top, parts in zip(tops, self.parts, strict=True):
            for base in (base for part, base in parts if part == side):
                numbers = top.indices - base
                found.append(numbers[(numbers >= 0) & (numbers < self.key_count)])
        return torch.cat(found).unique()

    @staticmethod
    def _renumbered(numbers: Tensor, chosen: Tensor) -> Tensor:
        """Places among ``chosen``; -1 for others."""
        if not len(chosen):
            return torch.full_like(numbers, -1)
        places = torch.searchsorted(chosen, numbers).clamp_(max=len(chosen) - 1)
        return torch.where(chosen[places] == numbers, places, -1)


def sampled_logsumexp(d: Direction, sample: Tensor, keys: Tensor, key_ids: Tensor, scale: Tensor) -> Tensor:
    """(S,) log-sum-exp of some queries' valid scores with some keys, scaled.

    Args:
        sample: (S,) numbers of queries.
    """
    scores = (d.q.detach()[sample] @ keys.T).to(d.positive.dtype)
    scores.masked_fill_(d.q_ids[sample, None] == key_ids[None, :], -torch.inf)
    if d.limit is not None:
        scores.masked_fill_(scores > d.limit[sample, None], -torch.inf)
    return torch.logsumexp(scores * scale, 1)
