# SPDX-License-Identifier: BSD-3-Clause
"""quantize_attn: q, k and v as the codes, scales and means that flash_attn takes."""

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
    """What `quantize_attn` returns, named as `flash_attn` names its arguments:
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
    """q, k and v for `flash_attn` and `flash_attn_varlen` in float8_e4m3fn:
    ``flash_attn(**quantize_attn(q, k, v)._asdict())``.

    Each is codes times scales, as `quantize` makes them: ``scale = max(amax / 448, 2^-126)``.

    Args:
        q: [B, Hq, S, D], or packed [T, Hq, D]; float32, bfloat16 or float16, any strides.
        k: [B, Hkv, Sk, D], or packed [T, Hkv, D], q's dtype.
        v: [B, Hkv, Sk, Dv], or packed [T, Hkv, Dv], q's dtype.
        per: what shares a scale: ``"tensor"``, a ``"head"`` of a sequence (packed: of all
            sequences), or a ``"block"`` of 128 tokens of a head, which packed tensors cannot have.
        hadamard: rotate q and k by one orthogonal matrix, a Hadamard matrix with the signs of its
            rows drawn once and for all. Scores stay what they are, and what was large in few
            columns is spread over all. Where D is no power of two its blocks are as large as the
            power of two that divides it.
        center_v: take the mean over tokens from v, a channel at a time, and return it as v_mean.
            What the values have in common is then neither rounded to 4 bits nor summed in few.

    Returns:
        QuantizedAttn: codes q, k and v, contiguous; q_scale, k_scale and v_scale float32 [], [B, H]
        (packed [H]) or [B, H, ceil(S / 128)]; v_mean float32 [B, Hkv, Dv] (packed [Hkv, Dv]), None
        without center_v.

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
    """Codes of x's shape and its scales: a row of `quantize` is all that shares one."""
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
    """[D, D] of 1, -1 and, outside blocks of a power of two, 0, in q's dtype; its rows are
    orthogonal.

    Made by arithmetic on q's device, so that it is captured and compiled as any op is. Sylvester's
    matrix has -1 at (i, j) where i & j has an odd number of ones; the signs of its rows are bits of
    a product with the golden ratio, so that no row of q that people make is one of it.
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
    """x times the matrix, float32."""
    return gemm(x, signs, out_dtype=torch.float32) * _block(x.shape[-1]) ** -0.5


def _block(dim: int) -> int:
    """The largest power of two that divides it, a number also where dim is a symbol."""
    block = 1
    while block < 512 and dim % (2 * block) == 0:
        block *= 2
    return block
