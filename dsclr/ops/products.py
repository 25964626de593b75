"""Similarity tiles by fast matrix products, with a proven bound of how far they are from the exact scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsclr.ops.precision import inner_roundoff

Precision = Literal["auto", "input", "bf16", "fp32"]
PRECISIONS = ("auto", "input", "bf16", "fp32")
# Rows whose norms are taken at once.
NORM_ROWS = 65536


@dataclass(frozen=True)
class Products:
    """Tiles of q @ keys.T in ``dtype`` and, per row, a bound of their error.

    Attributes:
        q: (N, D); keys: (M, D); both as given.
        dtype: of the factors of the products.
        margin: (N,) float32 (float64 for float64 inputs), E_i of :func:`error_bound`.
    """

    q: Tensor
    keys: Tensor
    dtype: torch.dtype
    margin: Tensor

    def tile(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """(R, C) contiguous scores, written to the start of ``out``, one-dimensional and of ``dtype``."""
        left, right = self.q[rows].to(self.dtype), self.keys[columns].to(self.dtype)
        return torch.mm(left, right.T, out=out[: len(left) * len(right)].view(len(left), len(right)))


def make_products(q: Tensor, keys: Tensor, precision: Precision) -> Products:
    """
    Args:
        q: (N, D) float. keys: (M, D) of the same dtype.
        precision: "input": products in the dtype of the inputs; "bf16": float32 inputs are rounded to bfloat16
            for the products; "fp32": half-precision inputs are widened; "auto": bf16 for float32 inputs where the
            processor multiplies it faster, else "input".

    Raises:
        ValueError: an unknown precision, or rows that are not finite or overflow float32.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}, accepted: {', '.join(PRECISIONS)}")
    dtype = q.dtype
    if dtype == torch.float32 and (precision == "bf16" or (precision == "auto" and _bf16_is_fast(q.device))):
        dtype = torch.bfloat16
    elif precision == "fp32":
        dtype = torch.promote_types(dtype, torch.float32)
    return Products(q, keys, dtype, error_bound(q, keys, dtype))


def error_bound(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """E_i with abs(tile_ij - s_ij) <= E_i for every key j, where s_ij is q_i . keys_j rounded once.

    The product of the rounded factors q', k' differs from q . k by (q - q') . k + q' . (k - k'), at most
    ||q - q'|| ||k|| + ||q'|| ||k - k'|| by Cauchy and Schwarz; the norms of the rounding errors are measured, not
    estimated. Adding D products in any order, with or without FMA, errs by at most gamma ||q'|| ||k'||,
    gamma = D u / (1 - D u), u the unit roundoff of the accumulator (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 3.1). The output is rounded once to the tile's dtype, and the exact score once to
    float32. Key norms enter by their largest. Where PyTorch is allowed to use TF32 or bf16 inside float32
    products, the roundoff of that format stands for the rounding of both factors.

    Args:
        q: (N, D). keys: (M, D). dtype: of the products' factors and output.

    Returns:
        (N,) float32, or float64 for float64 inputs.

    Raises:
        ValueError: entries that are not finite, or norms whose products overflow.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_norm, q_rounding = _norms(q, dtype, wide)
    key_norm, key_rounding = (x.amax() if len(x) else x.new_zeros(()) for x in _norms(keys, dtype, wide))
    largest = key_norm * (q_norm.amax() if len(q) else 1.0)
    # A norm of an entry that is NaN or infinite is itself so.
    if not bool(largest <= torch.finfo(dtype).max):
        raise ValueError(
            "similarities with NaN or infinite values: the embeddings contain NaN or Inf, or rows so long that "
            f"their products overflow {dtype}; normalise the embeddings"
        )
    dim = max(q.shape[1], 1)
    unit = torch.finfo(wide).eps / 2
    gamma = 2 * dim * unit / (1 - 2 * dim * unit)
    rounded_norms = (q_norm + q_rounding) * (key_norm + key_rounding)
    # the sum, the exact score's one rounding, and that of the threshold it is compared with
    bound = (gamma + 4 * unit) * rounded_norms
    bound = bound + q_rounding * key_norm + (q_norm + q_rounding) * key_rounding
    if dtype != wide:
        bound = bound + torch.finfo(dtype).eps * rounded_norms + torch.finfo(dtype).tiny
    elif wide == torch.float32:
        bound = bound + 2.5 * inner_roundoff(q.device) * rounded_norms
    # The norms are float32 sums themselves.
    return bound * (1 + 1e-3) + dim * torch.finfo(wide).tiny


def _norms(x: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row norms of x, and of what rounding x to dtype takes away."""
    norms, rounding = [], []
    for rows in x.split(NORM_ROWS) if len(x) else [x]:
        exact = rows.to(wide)
        norms.append(torch.linalg.vector_norm(exact, dim=1))
        lost = norms[-1].new_zeros(len(rows))
        if dtype not in (x.dtype, wide):
            lost = torch.linalg.vector_norm(exact - rows.to(dtype).to(wide), dim=1)
        rounding.append(lost)
    return torch.cat(norms), torch.cat(rounding)


def _bf16_is_fast(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "cpu":
        # Elsewhere bfloat16 products are emulated, many times slower than float32.
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False
