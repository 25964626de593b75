"""Attention with separate projections, so that LoRA can reach each of them.

``nn.MultiheadAttention`` and open_clip's ``Attention`` hold q, k and v in one tensor that is no Linear, and the
former bypasses ``out_proj.forward``: adapters on them adapt nothing, or twice. The modules here compute the same
numbers from four Linears. Checkpoints keep open_clip's stock keys through :func:`fuse_attention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock
from torch import Tensor, nn


class _BiasAfter(nn.Linear):
    """A Linear that rounds before it adds the bias.

    ``nn.MultiheadAttention`` projects a transposed, hence non-contiguous, input, where torch does not fuse the
    bias into the product. Without this the outputs would differ in the last bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Projections(nn.Module):
    """q_proj, k_proj, v_proj, out_proj and the attention between them."""

    projection: type[nn.Linear] = nn.Linear

    def __init__(self, weight: Tensor, bias: Tensor | None, out_proj: nn.Linear, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        biases = (None, None, None) if bias is None else bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (
            _linear(self.projection, w, b).requires_grad_(weight.requires_grad)
            for w, b in zip(weight.chunk(3), biases, strict=True)
        )
        self.out_proj = _linear(nn.Linear, out_proj.weight, out_proj.bias)
        self.out_proj.requires_grad_(out_proj.weight.requires_grad)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, heads, L, C / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, batch: int, dtype: torch.dtype) -> Tensor | None:
        """An additive mask that broadcasts to (B, heads, L, S). Boolean: True may not be attended to."""
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        if mask.ndim == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        return mask.to(dtype)

    def _fused(self) -> tuple[Tensor, Tensor | None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([p.weight.detach() for p in projections])
        bias = None if self.q_proj.bias is None else torch.cat([p.bias.detach() for p in projections])
        return weight, bias


class SplitAttention(_Projections):
    """``nn.MultiheadAttention`` as open_clip's ResidualAttentionBlock uses it: batch first, no weights returned.

    In fp32 the output is bit for bit that of the stock module (which may take another path, equal within
    rounding, in evaluation mode without gradients).

    Args:
        stock: whose weights to take over.
    """

    projection = _BiasAfter

    def __init__(self, stock: nn.MultiheadAttention) -> None:
        super().__init__(stock.in_proj_weight, stock.in_proj_bias, stock.out_proj, stock.num_heads)
        self.dropout = stock.dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attention output and, in place of the attention weights, None.

        Args:
            query: (B, L, C).
            key, value: (B, S, C).
            need_weights: must be False.
            attn_mask: (L, S) or (B * heads, L, S), added to the scores; or bool, True may not be attended to.

        Raises:
            ValueError: need_weights.
        """
        if need_weights:
            raise ValueError("SplitAttention does not return attention weights")
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        x = F.scaled_dot_product_attention(
            q, k, v, self._mask(attn_mask, len(query), q.dtype), self.dropout if self.training else 0.0
        )
        return self.out_proj(x.transpose(1, 2).flatten(2)), None

    def fuse(self) -> nn.MultiheadAttention:
        """The stock module with these weights."""
        weight, bias = self._fused()
        stock = nn.MultiheadAttention(
            weight.shape[1], self.num_heads, self.dropout, bias=bias is not None, batch_first=True, device="meta"
        )
        trainable = self.q_proj.weight.requires_grad
        stock.in_proj_weight = nn.Parameter(weight, trainable)
        if bias is not None:
            stock.in_proj_bias = nn.Parameter(bias, trainable)
        stock.out_proj.weight = nn.Parameter(self.out_proj.weight.detach(), self.out_proj.weight.requires_grad)
        if self.out_proj.bias is not None:
            stock.out_proj.bias = nn.Parameter(self.out_proj.bias.detach(), self.out_proj.bias.requires_grad)
        return stock.train(self.training)


class SplitCustomAttention(_Projections):
    """open_clip's own ``Attention`` (blocks with qk_norm, scale_heads or scale_attn_inner).

    Args:
        stock: whose weights and norms to take over.
    """

    def __init__(self, stock: Attention) -> None:
        super().__init__(stock.in_proj_weight, stock.in_proj_bias, stock.out_proj, stock.num_heads)
        self.ln_q, self.ln_k, self.ln_inner = stock.ln_q, stock.ln_k, stock.ln_inner
        self.head_scale = stock.head_scale
        self.attn_drop, self.out_drop = stock.attn_drop, stock.out_drop

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Self-attention, (B, L, C) -> (B, L, C).

        Args:
            x: (B, L, C).
            attn_mask: (L, L) or (B * heads, L, L), added to the scores; or bool, True may not be attended to.
        """
        q, k, v = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = self._mask(attn_mask, len(x), q.dtype)
        drop = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(self.ln_q(q), self.ln_k(k), v, mask, drop)
        if self.head_scale is not None:
            y = y * self.head_scale
        return self.out_drop(self.out_proj(self.ln_inner(y.transpose(1, 2).flatten(2))))

    def fuse(self) -> Attention:
        """The stock module with these weights."""
        weight, bias = self._fused()
        with torch.device("meta"):
            stock = Attention(weight.shape[1], self.num_heads, qkv_bias=bias is not None)
        trainable = self.q_proj.weight.requires_grad
        stock.in_proj_weight = nn.Parameter(weight, trainable)
        stock.in_proj_bias = None if bias is None else nn.Parameter(bias, trainable)
        stock.out_proj = self.out_proj
        stock.ln_q, stock.ln_k, stock.ln_inner = self.ln_q, self.ln_k, self.ln_inner
        stock.scale_heads = self.head_scale is not None
        stock.head_scale = self.head_scale
        stock.attn_drop, stock.out_drop = self.attn_drop, self.out_drop
        return stock.train(self.training)


def split_attention(model: nn.Module) -> int:
    """Replace the attention of every open_clip transformer block by one with separate projections, in place.

    Cross-attention blocks (CoCa's decoder) are replaced too: their queries, keys and values have one width.
    Left as they are: attentional poolers, whose keys may have another width and which are no LoRA target, and
    the towers of timm and Hugging Face, whose projections are Linears already.

    Returns:
        How many modules were replaced.

    Raises:
        NotImplementedError: scaled cosine attention (open_clip's own forward of it does not run either).
    """
    count = 0
    for block in model.modules():
        if isinstance(block, ResidualAttentionBlock) and isinstance(block.attn, nn.MultiheadAttention):
            if not block.attn.batch_first:
                raise NotImplementedError("attention that is not batch first cannot be split")
            block.attn = SplitAttention(block.attn).train(block.attn.training)
            count += 1
        elif isinstance(block, CustomResidualAttentionBlock) and isinstance(block.attn, Attention):
            if block.attn.scaled_cosine:
                raise NotImplementedError("scaled cosine attention cannot be split")
            block.attn = SplitCustomAttention(block.attn).train(block.attn.training)
            count += 1
    return count


def fuse_attention(model: nn.Module) -> int:
    """Undo :func:`split_attention` in place: the stock modules and open_clip's state-dict keys.

    Returns:
        How many modules were replaced.
    """
    count = 0
    for block in model.modules():
        if isinstance(block, (ResidualAttentionBlock, CustomResidualAttentionBlock)) and isinstance(
            block.attn, (SplitAttention, SplitCustomAttention)
        ):
            block.attn = block.attn.fuse()
            count += 1
    return count


def _linear(kind: type[nn.Linear], weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear
