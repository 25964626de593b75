"""Tensor algorithms of the losses. They know torch and nothing of training."""

from dsclr.ops.native import NativeUnavailable
from dsclr.ops.sparse import Kept, sparse_infonce
from dsclr.ops.stats import ScanStats
from dsclr.ops.topk import TopK, expected_skip_rate, topk_scan, topk_scan_pair, topk_scan_self

__all__ = [
    "Kept",
    "NativeUnavailable",
    "ScanStats",
    "TopK",
    "expected_skip_rate",
    "sparse_infonce",
    "topk_scan",
    "topk_scan_pair",
    "topk_scan_self",
]
