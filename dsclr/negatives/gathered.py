"""The rows of all ranks are the keys of every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsclr.losses import Keys


def gathered_keys(a: Tensor, b: Tensor, ids: Tensor) -> Keys:
    """Keys of all ranks in rank order, differentiable.

    The backward sums over ranks what each of them found for a rank's rows. With a loss that is a mean over
    the rank's own rows, and DeepSpeed's averaging of parameter gradients over ranks, the result is the
    gradient of the one-process loss, with no further factor.

    Args:
        a, b: (N, D) embeddings, N the same on every rank.
        ids: (N,) int64.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Keys(a, b, ids)
    return Keys(_Gather.apply(a), _Gather.apply(b), _all_gather(ids))


def _all_gather(x: Tensor) -> Tensor:
    whole = x.new_empty((dist.get_world_size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own = grad.new_empty((len(grad) // dist.get_world_size(), *grad.shape[1:]))
        if dist.get_backend() == "gloo":
            # gloo has no reduce-scatter for every torch this project admits
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad.chunk(dist.get_world_size())[dist.get_rank()]
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own
