"""Contrastive losses. A loss knows embeddings, keys and ids; it never communicates."""

from dsclr.losses.base import Keys, Loss, LossOutput, SharedKeys, streams_keys
from dsclr.losses.build import LOSSES, build_loss
from dsclr.losses.clip import StreamingClipLoss
from dsclr.losses.collected import backward_of_collected
from dsclr.losses.dense import DenseInfoNCE
from dsclr.losses.exact import ExactInfoNCE
from dsclr.losses.topk import TopKInfoNCE

__all__ = [
    "LOSSES",
    "DenseInfoNCE",
    "ExactInfoNCE",
    "Keys",
    "Loss",
    "LossOutput",
    "SharedKeys",
    "StreamingClipLoss",
    "TopKInfoNCE",
    "backward_of_collected",
    "build_loss",
    "streams_keys",
]
