"""InfoNCE over the k hardest negatives of every row (budgeted hard-negative selection, Xu 2026)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dsclr.losses.base import (
    Direction,
    Keys,
    LossOutput,
    SharedKeys,
    are_own_keys,
    check_margin,
    check_objective,
    check_scale,
    directions,
    similarity_metrics,
)
from dsclr.losses.exact import ExactInfoNCE
from dsclr.losses.topk_shared import SharedScan, sampled_logsumexp
from dsclr.ops import (
    Kept,
    ScanStats,
    TopK,
    expected_skip_rate,
    sparse_infonce,
    topk_scan,
    topk_scan_pair,
    topk_scan_self,
)
from dsclr.ops.native import BACKENDS, Backend
from dsclr.ops.precision import as_written
from dsclr.ops.topk import DEFAULT_BLOCK_SIZE

# Rows a direction whose full softmax is worked out to say how much of it the k kept negatives hold.
SAMPLED_ROWS = 32


class TopKInfoNCE:
    """L_i = -scale s_ip + log(exp(scale s_ip) + sum over the k largest valid s_ij of exp(scale s_ij)).

    The similarities are scanned in tiles (:func:`dsclr.ops.topk_scan`), so memory is linear in N; the gradient touches
    the kept pairs only. Where the rows are their own keys, one tile serves both directions ("clip"), or only the upper
    triangle of the matrix is visited ("simclr"). A row with fewer than k valid negatives uses those it has.
    """

    streams_keys = True

    def __init__(
        self,
        k: int | Literal["all"] = 64,
        block_size: int | None = None,
        objective: str = "clip",
        *,
        tail: Literal["none", "lse"] = "none",
        false_negative_margin: float | None = None,
        backend: Backend = "auto",
    ) -> None:
        """
        Args:
            k: hard negatives kept per row; "all": :class:`ExactInfoNCE`.
            block_size: keys per column block; None: the scan's default.
            objective: "clip" or "simclr".
            tail: "lse": the normaliser sums over all valid negatives, while gradients still flow to the k kept ones
                (and the positive) only, with their weights in the full softmax.
            false_negative_margin: negatives more similar than the row's positive by more than this (cosine) are taken
                for false ones and left out. None: all ids that differ are negatives.
            backend: of the scan: "auto", "torch" or "native".
        """
        if k != "all" and k < 1:
            raise ValueError(f'k = {k}, at least 1 or "all" is needed')
        if tail not in ("none", "lse"):
            raise ValueError(f"tail = {tail!r}, accepted: 'none', 'lse'")
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}, accepted: {', '.join(BACKENDS)}")
        self.k = k
        self.block_size = block_size
        self.objective = check_objective(objective)
        self.tail = tail
        self.false_negative_margin = check_margin(false_negative_margin)
        self.backend: Backend = backend
        self.exact = ExactInfoNCE(objective, false_negative_margin=false_negative_margin)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        logit_scale: Tensor,
        ids: Tensor | None = None,
        keys: Keys | SharedKeys | None = None,
    ) -> LossOutput:
        """See :class:`dsclr.losses.Loss`. Further metrics:

        skip_rate: (row, block) pairs that the row maximum ruled out; expected_skip_rate: the same for keys in
            random order (with k, block_size and the number of keys; see :func:`dsclr.ops.expected_skip_rate`).
        selection_work: part of the scores that a selection looked at.
        captured_mass: part of the full softmax's negative mass that the k kept negatives hold, the mean over rows; from
            a sample of rows, or from all of them with tail="lse".
        false_negatives: negatives a row that the margin left out; with false_negative_margin only.
        bank_share: part of the kept negatives that come from the memory bank; with a bank only.
        """
        if self.k == "all":
            return self.exact(a, b, logit_scale, ids, keys)
        check_scale(logit_scale)
        if isinstance(keys, SharedKeys):
            return self._shared(a, b, logit_scale, ids, keys)
        problems = directions(a, b, ids, keys, self.objective, self.false_negative_margin)
        first = problems[0]
        tops = self._scan(problems, logit_scale, are_own_keys(a, b, keys))
        kept = [Kept(d.q, d.keys, top, tuple(x.keys for x in d.bank)) for d, top in zip(problems, tops, strict=True)]
        loss = sparse_infonce(a, b, first.positive[: len(a)], kept, logit_scale)
        captured = [_captured_mass(*pair, logit_scale) for pair in zip(problems, tops, strict=True)]
        return LossOutput(loss, self._metrics(problems, tops, captured, len(first.keys), first.key_count))

    def _shared(self, a: Tensor, b: Tensor, logit_scale: Tensor, ids: Tensor | None, keys: SharedKeys) -> LossOutput:
        assert self.k != "all"
        problems = directions(a, b, ids, keys, self.objective, self.false_negative_margin)
        first = problems[0]
        with_lse = self.tail == "lse"
        scan = SharedScan(
            problems,
            keys,
            keys.shared(a, b, first.q_ids[: len(a)]),
            self.k,
            logit_scale.detach(),
            {
                "block_size": self.block_size,
                "limit": first.limit,
                "lse_scale": logit_scale.detach() if with_lse else None,
                "backend": self.backend,
            },
            [_sample(d)[: 0 if with_lse else None] for d in problems],
        )
        tops = scan.run()
        loss = scan.loss(a, b, logit_scale, tops)
        captured = [
            _mass(top.values * logit_scale.detach(), top.lse)
            if top.lse is not None
            else _mass(top.values[sample] * logit_scale.detach(), whole)
            for top, sample, whole in zip(tops, scan.samples, scan.sampled, strict=True)
        ]
        sides = 1 if self.objective == "clip" else 2
        count = sides * (scan.key_count + keys.bank_rows)
        return LossOutput(loss, self._metrics(problems, tops, captured, scan.bank_start, count))

    def _metrics(
        self,
        problems: list[Direction],
        tops: list[TopK],
        captured: list[Tensor],
        batch_keys: int,
        all_keys: int,
    ) -> dict[str, Tensor | float]:
        """
        Args:
            batch_keys: number of keys of a direction without the bank's; all_keys: with them.
        """
        stats = sum((top.stats for top in tops), ScanStats())
        rows = sum(len(d.q) for d in problems)
        metrics = similarity_metrics(
            torch.cat([d.positive for d in problems]), torch.cat([top.values[:, 0] for top in tops])
        )
        metrics.update(
            skip_rate=stats.skip_rate,
            expected_skip_rate=expected_skip_rate(int(self.k), self.block_size or DEFAULT_BLOCK_SIZE, all_keys),
            selection_work=stats.selection_work,
            captured_mass=torch.cat(captured).mean(),
        )
        if self.false_negative_margin is not None:
            metrics["false_negatives"] = stats.scores_over_limit / rows
        if all_keys > batch_keys:
            kept_from_bank = sum(int((top.indices >= batch_keys).sum()) for top in tops)
            metrics["bank_share"] = kept_from_bank / max(1, sum(int((top.indices >= 0).sum()) for top in tops))
        return metrics

    def _scan(self, problems: list[Direction], logit_scale: Tensor, own_keys: bool) -> list[TopK]:
        assert self.k != "all"
        k = self.k
        lse_scale = logit_scale.detach() if self.tail == "lse" else None
        first = problems[0]
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "limit": first.limit,  # of both directions: it hangs on the positives
            "lse_scale": lse_scale,
            "backend": self.backend,
        }
        if own_keys and self.objective == "clip":
            tops = list(topk_scan_pair(first.q.detach(), first.keys.detach(), k, ids=first.q_ids, **options))
        elif own_keys:
            tops = [topk_scan_self(first.q.detach(), k, ids=first.q_ids, **options)]
        else:
            tops = [
                topk_scan(d.q.detach(), d.keys.detach(), k, q_ids=d.q_ids, key_ids=d.key_ids, **options)
                for d in problems
            ]
        for number, d in enumerate(problems):
            offset = len(d.keys)
            for segment in d.bank:
                tops[number] = topk_scan(
                    d.q.detach(),
                    segment.keys,
                    k,
                    q_ids=d.q_ids,
                    key_ids=segment.ids,
                    initial=tops[number],
                    key_offset=offset,
                    **options,
                )
                offset += len(segment.keys)
        return tops


def _sample(d: Direction) -> Tensor:
    """(S,) numbers of queries, spread evenly: the same whatever the random state, and no draw that would disturb it."""
    count = min(SAMPLED_ROWS, len(d.q))
    return torch.arange(count, device=d.q.device) * len(d.q) // count


@torch.no_grad()
@as_written
def _captured_mass(d: Direction, top: TopK, logit_scale: Tensor) -> Tensor:
    """(R,) sum of exp over the kept negatives / over all valid ones; rows without a valid negative are left out."""
    kept = top.values * logit_scale
    if top.lse is not None:
        return _mass(kept, top.lse)
    sample = _sample(d)
    whole = kept.new_full((len(sample),), -torch.inf)
    for keys, key_ids in d.segments():
        whole = torch.logaddexp(whole, sampled_logsumexp(d, sample, keys, key_ids, logit_scale))
    return _mass(kept[sample], whole)


def _mass(kept: Tensor, whole: Tensor) -> Tensor:
    """kept: (R, k) logits. whole: (R,) log-sum-exp of all valid logits."""
    some = whole > -math.inf
    return (torch.logsumexp(kept[some], 1) - whole[some]).exp().clamp(max=1.0)
