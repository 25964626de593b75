"""Shards in, batches out."""

from dsclr.data.batch import Batch, BatchLike
from dsclr.data.build import build_eval_loader, build_train_dataset, build_train_loader
from dsclr.data.loader import TrainLoader
from dsclr.data.shards import expand_shards
from dsclr.data.tasks import BadDataError

__all__ = [
    "BadDataError",
    "Batch",
    "BatchLike",
    "TrainLoader",
    "build_eval_loader",
    "build_train_dataset",
    "build_train_loader",
    "expand_shards",
]
