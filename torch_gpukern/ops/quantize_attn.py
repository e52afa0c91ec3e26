# SPDX-License-Identifier: BSD-3-Clause
"""quantize_attn: quantises q, k and v to FP8 codes and scales for flash_attn."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import NAMESPACE
from .gemm import gemm
from .quantize import quantize
from .wrong_types import refuse_non_bool, refuse_non_tensors

__all__ = ["QuantizedAttn", "quantize_attn"]

_TOKENS = 128  # of a block
_E4M3 = torch.float8_e4m3fn


class QuantizedAttn(NamedTuple):
    """The result of `quantize_attn`. Fields have the names of `flash_attn`'s arguments:
    ``flash_attn(**quantized._asdict())``."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    v_mean: Tensor | None


def quantize_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    per: Literal["tensor", "head", "block"] = "head",
    hadamard: bool = False,
    center_v: bool = True,
) -> QuantizedAttn:
    """Quantises q, k and v to float8_e4m3fn for `flash_attn` and `flash_attn_varlen`:
    ``flash_attn(**quantize_attn(q, k, v)._asdict())``.

    Codes and scales are those of `quantize`: ``scale = max(amax / 448, 2^-126)``.

    Args:
        q: [B, Hq, S, D], or packed [T, Hq, D]; float32, bfloat16 or float16, any strides.
        k: [B, Hkv, Sk, D], or packed [T, Hkv, D], q's dtype.
        v: [B, Hkv, Sk, Dv], or packed [T, Hkv, Dv], q's dtype.
        per: the elements that share a scale: the ``"tensor"``, a ``"head"`` of a sequence (packed:
            of all sequences), or a ``"block"`` of 128 tokens of a head. Packed tensors cannot have
            blocks.
        hadamard: rotate q and k by one orthogonal matrix, a Hadamard matrix with fixed signs of its
            rows. Scores do not change, but outliers in a few columns are spread over all columns.
            If D is no power of two, the matrix consists of blocks as large as the largest power of
            two that divides D.
        center_v: subtract from v its mean over tokens, for each channel, and return it as v_mean.
            The common part of the values is then neither rounded to 8-bit codes nor summed with the
            tensor cores' reduced precision.

    Returns:
        QuantizedAttn: the codes q, k and v are contiguous. q_scale, k_scale and v_scale are float32
        [], [B, H] (packed [H]) or [B, H, ceil(S / 128)]. v_mean is float32 [B, Hkv, Dv] (packed
        [Hkv, Dv]), or None without center_v.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a shape, dtype or `per` that it does not take.

    Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433; the rotation:
    Ashkboos et al., "QuaRot" (2024), arXiv:2404.00456.
    """
    refuse_non_tensors(f"{NAMESPACE}::quantize_attn", q=q, k=k, v=v)
    refuse_non_bool(f"{NAMESPACE}::quantize_attn", "hadamard", hadamard)
    refuse_non_bool(f"{NAMESPACE}::quantize_attn", "center_v", center_v)
    _check(q, k, v, per)
    if hadamard:
        signs = _signs(q)
        q, k = _rotated(q, signs), _rotated(k, signs)
    mean = None
    if center_v:
        tokens = -2 if v.dim() == 4 else 0
        wide = v.float()
        mean = wide.sum(tokens) / max(v.shape[tokens], 1)
        v = wide - mean.unsqueeze(tokens)
    codes = [_quantized(x, per) for x in (q, k, v)]
    return QuantizedAttn(*(c for c, _ in codes), *(s for _, s in codes), mean)


def _check(q: Tensor, k: Tensor, v: Tensor, per: str) -> None:
    def refuse(text: str) -> None:
        raise ValueError(f"{NAMESPACE}::quantize_attn: {text}")

    if per not in ("tensor", "head", "block"):
        refuse(f"per must be tensor, head or block, got '{per}'")
    if q.dim() not in (3, 4):
        refuse(f"q must have 4 dimensions [B, Hq, S, D] (or 3, packed [T, Hq, D]), got {q.dim()}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse(f"q must be float32, bfloat16 or float16, got {str(q.dtype).removeprefix('torch.')}")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim():
            refuse(f"{name} must have {q.dim()} dimensions, as q, got {x.dim()}")
        if x.dtype != q.dtype:
            dtypes = [str(y.dtype).removeprefix("torch.") for y in (x, q)]
            refuse(f"{name} has dtype {dtypes[0]}, q has {dtypes[1]}; they must match")
    if k.shape[-1] != q.shape[-1]:
        refuse(f"k has head_dim {k.shape[-1]}, q has {q.shape[-1]}; they must match")
    if k.shape[:-1] != v.shape[:-1]:
        refuse(
            f"v must have the tokens and heads of k, {list(k.shape[:-1])}, got {list(v.shape[:-1])}"
        )
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        refuse(f"k has batch {k.shape[0]}, q has {q.shape[0]}; they must match")
    if k.shape[1] and q.shape[1] % k.shape[1]:
        refuse(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if per == "block" and q.dim() == 3:
        refuse("per must be tensor or head where q is packed, got 'block'")


def _quantized(x: Tensor, per: str) -> tuple[Tensor, Tensor]:
    """Codes of x's shape, and scales. x is reshaped so that the elements that share a scale are one
    row of `quantize`."""
    if per == "tensor":
        return quantize(x, _E4M3, "tensor")
    if x.dim() == 3:  # [T, H, D] by heads
        heads = x.transpose(0, 1)
        codes, scale = quantize(heads.flatten(1), _E4M3, "row")
        return codes.view(heads.shape).transpose(0, 1).contiguous(), scale[:, 0]
    if per == "head":
        codes, scale = quantize(x.flatten(2), _E4M3, "row")
        return codes.view(x.shape), scale[..., 0]
    batch, heads, tokens, dim = x.shape
    blocks = (tokens + _TOKENS - 1) // _TOKENS
    padded = F.pad(x, (0, 0, 0, blocks * _TOKENS - tokens))
    codes, scale = quantize(padded.reshape(batch, heads, blocks, _TOKENS * dim), _E4M3, "row")
    codes = codes.view(batch, heads, blocks * _TOKENS, dim)
    return codes.view(torch.uint8)[:, :, :tokens].contiguous().view(_E4M3), scale[..., 0]


def _signs(q: Tensor) -> Tensor:
    """The rotation [D, D] without its factor, in q's dtype: 1 and -1 in blocks on the diagonal
    whose size is a power of two, and 0 outside. Its rows are orthogonal.

    It is computed on q's device, so that it can be captured and compiled. Sylvester's Hadamard
    matrix has -1 at (i, j) if i & j has an odd number of ones. Each row then gets a sign, a bit of
    i times the golden ratio (2654435761 / 2^32), so that a typical row of q is not a row of the
    matrix.
    """
    dim = q.shape[-1]
    block = _block(dim)
    i = torch.arange(dim, device=q.device)
    bits = (i[:, None] ^ (i * 2654435761 >> 13 << 12)[:, None] & 4096) & ((i % block)[None] | 4096)
    for shift in (16, 8, 4, 2, 1):
        bits = bits ^ bits >> shift
    same = i[:, None] // block == i[None] // block
    return ((1 - 2 * (bits & 1)) * same).to(q.dtype)


def _rotated(x: Tensor, signs: Tensor) -> Tensor:
    """x times the orthogonal matrix, in float32."""
    return gemm(x, signs, out_dtype=torch.float32) * _block(x.shape[-1]) ** -0.5


def _block(dim: int) -> int:
    """The largest power of two, at most 512, that divides dim. A number even if dim is a symbol."""
    block = 1
    while block < 512 and dim % (2 * block) == 0:
        block *= 2
    return block
