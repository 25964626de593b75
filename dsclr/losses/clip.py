"""Streamed losses with the call of open_clip's ClipLoss, for training loops that already have it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dsclr.losses.base import SharedKeys
from dsclr.losses.topk import TopKInfoNCE
from dsclr.ops.native import Backend
from dsclr.ops.shared import Exchange


class StreamingClipLoss(nn.Module):
    """``open_clip.ClipLoss`` without the similarity matrix.

    With the defaults value and gradients are those of ``ClipLoss`` on one process: every other row is a negative. With
    ``k`` only the k hardest negatives of each row count (:class:`TopKInfoNCE`).

    Across ranks under DistributedDataParallel pass ``exchange=dsclr.negatives.GatherExchange()``, or
    ``RingExchange()`` for batches whose embeddings do not fit a card; loss and gradients then equal
    ``ClipLoss(local_loss=True, gather_with_grad=True)``.
    """

    def __init__(
        self,
        k: int | Literal["all"] = "all",
        *,
        block_size: int | None = None,
        tail: Literal["none", "lse"] = "none",
        false_negative_margin: float | None = None,
        backend: Backend = "auto",
        exchange: Exchange | None = None,
    ) -> None:
        """
        Args:
            k, block_size, tail, false_negative_margin, backend: see :class:`TopKInfoNCE`.
            exchange: brings the rows of other ranks; None: the rows of this call are the keys.
        """
        super().__init__()
        self.loss_fn = TopKInfoNCE(
            k,
            block_size,
            tail=tail,
            false_negative_margin=false_negative_margin,
            backend=backend,
        )
        self.exchange = exchange

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """
        Args:
            image_features, text_features: (N, D) L2-normalised.
            logit_scale: the multiplicative scale, 0-dim or a number.
            output_dict: return ``{"contrastive_loss": loss}`` instead of the loss.
            ids: (N,) int64; rows with equal ids are never each other's negatives. None: all differ, as in ClipLoss.

        Raises:
            ValueError: shapes that do not fit together, or an exchange without ids.
        """
        scale = torch.as_tensor(logit_scale, device=image_features.device)
        if self.exchange is not None and ids is None:
            raise ValueError("ids are needed with an exchange: they tell which rows of other ranks are no negatives")
        keys = None if self.exchange is None else SharedKeys(self.exchange)
        loss = self.loss_fn(image_features, text_features, scale, ids, keys).loss
        return {"contrastive_loss": loss} if output_dict else loss
