"""What every loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dsclr.ops.shared import Exchange, SharedRows

Objective = Literal["clip", "simclr"]


@dataclass(frozen=True)
class Keys:
    """Candidates that the local rows are compared with: the local batch, or the batch of all ranks.

    Attributes:
        a: (M, D) first embeddings (images, or first views).
        b: (M, D) second embeddings (texts, or second views).
        ids: (M,) int64; equal ids are never negatives of each other.
        bank: further keys without gradient, such as those of a memory bank; they come after the others.
    """

    a: Tensor
    b: Tensor
    ids: Tensor
    bank: tuple[Keys, ...] = ()


# Takes (a, b, ids) of a part of a memory bank and the number of the part's first row in the bank.
BankWork = Callable[[Tensor, Tensor, Tensor, int], None]
# Calls its argument with each part.
BankRows = Callable[[BankWork], None]


@dataclass(frozen=True)
class SharedKeys:
    """Candidates of which every rank holds a part: the rows of all ranks.

    Loss and gradients of all ranks together are those of one process on the concatenated rows if each rank's loss is
    the mean over its own rows and parameter gradients are averaged over ranks. Backward gives a rank's rows their
    gradient of all ranks' losses.

    Attributes:
        exchange: brings rows of other ranks.
        rows: (a, b, ids) of all ranks where they are shared already.
        bank: further keys without gradient; None: there are none.
        bank_rows: their number.
    """

    exchange: Exchange
    rows: SharedRows | None = None
    bank: BankRows | None = None
    bank_rows: int = 0

    def shared(self, a: Tensor, b: Tensor, ids: Tensor) -> SharedRows:
        return self.rows if self.rows is not None else self.exchange.share(a.detach(), b.detach(), ids)


@dataclass(frozen=True)
class LossOutput:
    """Attributes:
    loss: 0-dim, the mean over this rank's rows and directions; has a graph to a, b, keys and logit_scale.
    metrics: detached scalars for logging, such as positive_similarity or skip_rate.
    """

    loss: Tensor
    metrics: dict[str, Tensor | float]


class Loss(Protocol):
    """``loss_fn(a, b, logit_scale, ids=None, keys=None) -> LossOutput``.

    a, b: (N, D) L2-normalised rows, a[i] and b[i] a positive pair. logit_scale: the multiplicative scale,
    0-dim or one element. ids: (N,) int64, all distinct if None. keys: the rows themselves if None; otherwise
    they must contain the local rows, and ids must be given.

    A loss with ``streams_keys = True`` also takes :class:`SharedKeys`. Others get the rows of all ranks at once.
    """

    def __call__(
        self, a: Tensor, b: Tensor, logit_scale: Tensor, ids: Tensor | None = None, keys: Any = None
    ) -> LossOutput: ...


def streams_keys(loss_fn: Loss) -> bool:
    """Whether a loss takes keys of other ranks as they arrive."""
    return bool(getattr(loss_fn, "streams_keys", False))


@dataclass(frozen=True)
class Segment:
    """Constant keys (M, D) and their ids (M,)."""

    keys: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Direction:
    """One set of queries against its keys.

    Attributes:
        positive: (R,) score of each query with its own pair.
        bank: further keys, without gradient.
        limit: (R,) negatives above it are taken for false ones; None: none are.
    """

    q: Tensor
    keys: Tensor
    q_ids: Tensor
    key_ids: Tensor
    positive: Tensor
    bank: tuple[Segment, ...] = ()
    limit: Tensor | None = None

    @property
    def key_count(self) -> int:
        return len(self.keys) + sum(len(x.keys) for x in self.bank)

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """All keys with their ids, the bank's after the batch's."""
        return [(self.keys, self.key_ids), *((x.keys, x.ids) for x in self.bank)]

    def joined(self) -> tuple[Tensor, Tensor]:
        """The same as one pair of tensors; a copy where there is a bank."""
        if not self.bank:
            return self.keys, self.key_ids
        keys, ids = zip(*self.segments(), strict=True)
        return torch.cat(keys), torch.cat(ids)


def directions(
    a: Tensor,
    b: Tensor,
    ids: Tensor | None,
    keys: Keys | SharedKeys | None,
    objective: Objective,
    false_negative_margin: float | None = None,
) -> list[Direction]:
    """Lay a batch out as query/key problems whose losses are averaged.

    clip: a against all b, and b against all a. simclr: Z = [a; b] against all of Z. A row's positive and the
    row itself share its id, so the ids mask takes both out of the negatives. With shared keys, a direction's keys are
    the rank's own.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    if a.ndim != 2 or a.shape != b.shape or not a.is_floating_point() or a.dtype != b.dtype:
        raise ValueError(
            f"a and b must be two (N, D) floats of one dtype: got {tuple(a.shape)} {a.dtype} "
            f"and {tuple(b.shape)} {b.dtype}"
        )
    if len(a) == 0:
        raise ValueError("the batch is empty: a contrastive loss needs at least one row")
    if ids is None:
        if keys is not None:
            raise ValueError("ids are required with keys: they tell which keys are the rows themselves")
        ids = torch.arange(len(a), device=a.device)
    if ids.shape != (len(a),) or ids.dtype != torch.int64:
        raise ValueError(f"ids must be ({len(a)},) int64: got {tuple(ids.shape)} {ids.dtype}")
    keys = keys if isinstance(keys, Keys) else Keys(a, b, ids)
    # float32 at least: a bf16 scalar product of unit vectors is only good to 1e-2
    wide = torch.promote_types(a.dtype, torch.float32)
    positive = (a.to(wide) * b.to(wide)).sum(-1)
    limit = None if false_negative_margin is None else positive.detach() + false_negative_margin
    if objective == "clip":
        to_b = tuple(Segment(x.b.detach(), x.ids) for x in keys.bank)
        to_a = tuple(Segment(x.a.detach(), x.ids) for x in keys.bank)
        return [
            Direction(a, keys.b, ids, keys.ids, positive, to_b, limit),
            Direction(b, keys.a, ids, keys.ids, positive, to_a, limit),
        ]
    return [
        Direction(
            torch.cat([a, b]),
            torch.cat([keys.a, keys.b]),
            torch.cat([ids, ids]),
            torch.cat([keys.ids, keys.ids]),
            torch.cat([positive, positive]),
            tuple(Segment(z.detach(), x.ids) for x in keys.bank for z in (x.a, x.b)),
            None if limit is None else torch.cat([limit, limit]),
        )
    ]


def are_own_keys(a: Tensor, b: Tensor, keys: Keys | None) -> bool:
    """Whether the rows' keys (leaving a bank aside) are the rows themselves."""
    return keys is None or (keys.a is a and keys.b is b)


def similarity_metrics(positive: Tensor, hardest: Tensor) -> dict[str, Tensor | float]:
    """Metrics every loss reports.

    Args:
        positive: (R,) score of each row with its positive.
        hardest: (R,) largest negative score, -inf where a row has none.
    """
    positive, hardest = positive.detach(), hardest.detach()
    some = hardest > -torch.inf
    return {
        "positive_similarity": positive.mean(),
        "hardest_negative_similarity": hardest[some].mean() if bool(some.any()) else float("nan"),
        "batch_accuracy": (positive > hardest).to(torch.float32).mean(),
    }


def check_scale(logit_scale: Tensor) -> None:
    """
    Raises:
        ValueError: a multiplicative scale that is not positive (NaN passes: it is the training loop's to notice).
    """
    if bool((logit_scale.detach() <= 0).any()):
        value = float(logit_scale.detach())
        raise ValueError(f"logit_scale = {value:g}: the multiplicative scale, exp of the parameter, is positive")


def check_margin(margin: float | None) -> float | None:
    """A false-negative margin: a difference of cosines.

    Raises:
        ValueError: outside [0, 2].
    """
    if margin is not None and not 0 <= margin <= 2:
        raise ValueError(f"false_negative_margin = {margin}, accepted: 0 to 2 (a difference of cosines), or null")
    return margin


def check_objective(objective: str) -> Objective:
    if objective not in ("clip", "simclr"):
        raise ValueError(f"objective = {objective!r}, accepted: 'clip', 'simclr'")
    return objective  # type: ignore[return-value]
