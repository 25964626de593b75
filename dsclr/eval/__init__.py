"""Evaluation: functions of features."""

from dsclr.eval.features import Features, extract_features
from dsclr.eval.retrieval import retrieval_recall

__all__ = ["Features", "extract_features", "retrieval_recall"]
