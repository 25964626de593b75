"""Tensor algorithms of the losses. They know torch and nothing of training."""

from dsclr.ops.sparse import sparse_scores
from dsclr.ops.topk import ScanStats, TopK, topk_scan

__all__ = ["ScanStats", "TopK", "sparse_scores", "topk_scan"]
