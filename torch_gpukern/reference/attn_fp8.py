# SPDX-License-Identifier: BSD-3-Clause
"""The definition of float8_e4m3fn attention in plain PyTorch, part of `reference`: how q, k and v
are quantised to codes, and how codes are decoded."""

import math

import torch
from torch import Tensor

from .quantised import saturate

__all__ = ["decoded_attn", "quantize_attn", "scale_of_sequence"]

_TOKENS = 128  # tokens of a scale block


def _scale_of_tokens(scale: Tensor | None, tokens: int) -> Tensor | float:
    """A scale [], [1], [H], [B, H] or [B, H, ceil(S / 128)] in a shape that broadcasts to codes [B,
    H, S, D]."""
    if scale is None:
        return 1.0
    scale = scale.double()
    if scale.dim() == 3:
        return scale.repeat_interleave(_TOKENS, 2)[:, :, :tokens, None]
    return scale if scale.dim() == 0 else scale[..., None, None]


def decoded_attn(
    q, k, v, q_scale=None, k_scale=None, v_scale=None, v_mean=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Decodes codes [B, H, S, D] to float64. v_mean [Hkv, Dv] or [B, Hkv, Dv] is added to v."""
    scales = q_scale, k_scale, v_scale
    q, k, v = (
        x.double() * _scale_of_tokens(s, x.shape[2]) for x, s in zip((q, k, v), scales, strict=True)
    )
    return q, k, v if v_mean is None else v + v_mean.double()[..., None, :]


def scale_of_sequence(scale: Tensor | None, b: int, tokens: int) -> Tensor | None:
    """The scale of sequence b of a packed call, in the form for a batch of one."""
    if scale is None or scale.dim() < 2:
        return scale
    return scale[b : b + 1] if scale.dim() == 2 else scale[b : b + 1, :, : -(-tokens // _TOKENS)]


def _codes(x: Tensor, per: str) -> tuple[Tensor, Tensor]:
    blocks = -(-x.shape[2] // _TOKENS) if per == "block" else 1
    shape = {"tensor": (), "head": x.shape[:2], "block": (*x.shape[:2], blocks)}[per]
    scale = torch.empty(shape)
    for place in (
        [()] if per == "tensor" else torch.cartesian_prod(*map(torch.arange, shape)).tolist()
    ):
        part = x[tuple(place[:2])]
        if per == "block":
            part = part[place[2] * _TOKENS : (place[2] + 1) * _TOKENS]
        scale[tuple(place)] = max(part.abs().max().item() / 448, 2.0**-126)
    return saturate(x / _scale_of_tokens(scale, x.shape[2]).float(), torch.float8_e4m3fn), scale


def quantize_attn(q, k, v, *, per="head", hadamard=False, center_v=True):
    """Quantises dense q, k and v: (q, k, v, q_scale, k_scale, v_scale, v_mean), where codes times
    scales give the values. With center_v, v_mean, the mean of v over tokens, is subtracted from v.

    With hadamard, q and k are rotated by a Hadamard matrix. The op also flips signs; which signs is
    not part of the definition, and here none are flipped.
    """
    q, k, v = q.float(), k.float(), v.float()
    if hadamard:
        dim = q.shape[-1]
        block = dim & -dim
        sylvester = torch.ones(1, 1)
        while len(sylvester) < block:
            sylvester = torch.cat(
                [torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)]
            )
        rotation = torch.block_diag(*[sylvester / math.sqrt(block)] * (dim // block))
        q, k = q @ rotation, k @ rotation
    mean = v.mean(2) if center_v else None
    codes = [_codes(x, per) for x in (q, k, v if mean is None else v - mean[:, :, None])]
    return (*(c for c, _ in codes), *(s for _, s in codes), mean)
