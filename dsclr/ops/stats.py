"""What a scan did, counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ScanStats:
    """What a scan did. A row is seen once per column block.

    Attributes:
        rows_seen: (row, block) pairs visited.
        rows_skipped: of those, pairs whose block maximum did not beat the row's k-th value (Xu 2026).
        scores_selected: scores that went through a selection.
        scores_total: scores looked at; N x M for one side.
        scores_over_limit: scores left out because they were above their row's limit, up to rounding.
        rows_redone: rows with so many scores around the k-th that they were searched a second time.
    """

    rows_seen: int = 0
    rows_skipped: int = 0
    scores_selected: int = 0
    scores_total: int = 0
    scores_over_limit: int = 0
    rows_redone: int = 0

    @property
    def skip_rate(self) -> float:
        return self.rows_skipped / max(self.rows_seen, 1)

    @property
    def selection_work(self) -> float:
        """Part of the scores that a selection had to look at."""
        return self.scores_selected / max(self.scores_total, 1)

    def __add__(self, other: ScanStats) -> ScanStats:
        return ScanStats(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))
