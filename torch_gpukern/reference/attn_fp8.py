# SPDX-License-Identifier: BSD-3-Clause
"""The PyTorch statement of float8_e4m3fn attention, part of `reference`: what codes stand for, and
how q, k and v become codes."""

import math

import torch
from torch import Tensor

from .quantised import saturate

__all__ = ["decoded_attn", "quantize_attn", "scale_of_sequence"]

_TOKENS = 128  # of a block


def _scale_of_tokens(scale: Tensor | None, tokens: int) -> Tensor | float:
    """What [B, H, S, D] codes are multiplied by, from a scale [], [1], [H], [B, H] or [B, H, ceil(S
    / 128)]."""
    if scale is None:
        return 1.0
    scale = scale.double()
    if scale.dim() == 3:
        return scale.repeat_interleave(_TOKENS, 2)[:, :, :tokens, None]
    return scale if scale.dim() == 0 else scale[..., None, None]


def decoded_attn(
    q, k, v, q_scale=None, k_scale=None, v_scale=None, v_mean=None
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, S, D] codes as float64 values; v_mean [Hkv, Dv] or [B, Hkv, Dv] is added to each
    value."""
    scales = q_scale, k_scale, v_scale
    q, k, v = (
        x.double() * _scale_of_tokens(s, x.shape[2]) for x, s in zip((q, k, v), scales, strict=True)
    )
    return q, k, v if v_mean is None else v + v_mean.double()[..., None, :]


def scale_of_sequence(scale: Tensor | None, b: int, tokens: int) -> Tensor | None:
    """That of sequence b of a packed call as one of a batch of one."""
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
    """(q, k, v, q_scale, k_scale, v_scale, v_mean) of dense q, k and v: codes times scales, v less
    its mean over tokens. The rotation is a Hadamard matrix with signs, whose choice is no part of
    the statement: here there are none.
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
