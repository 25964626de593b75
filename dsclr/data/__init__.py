"""Shards in, batches out."""

from dsclr.data.build import build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data.loader import BadDataError, Batch, TrainLoader
from dsclr.data.shards import expand_shards

__all__ = [
    "BadDataError",
    "Batch",
    "TrainLoader",
    "build_eval_loader",
    "build_train_dataset",
    "build_train_loader",
    "expand_shards",
]
