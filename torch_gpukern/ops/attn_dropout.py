# SPDX-License-Identifier: BSD-3-Clause
"""attn_dropout_mask, and the drawing of seeds for flash_attn and flash_attn_varlen.

The mask is the rule of csrc/formats/attn_dropout.h, stated again in tensor operations. Tests
compare the kernels with it.
"""

from typing import Any

import torch
from torch import Tensor

from .._library import NAMESPACE
from .dropout import drawn
from .wrong_types import refuse_non_tensors, refuse_types

__all__ = ["attn_dropout_mask"]

_WORD = 0xFFFFFFFF


def attn_dropout_mask(q: Tensor, k: Tensor, p: float, seed: Tensor) -> Tensor:
    """Which probabilities `flash_attn` or `flash_attn_varlen` keeps with dropout_p ``p`` and
    dropout_seed ``seed``.

    The mask depends only on the shapes of q and k, p and the seed. It is the same on the CPU and on
    CUDA, for every kernel, in forward and backward.

    Args:
        q: [B, Hq, Sq, D], or packed [Tq, Hq, D].
        k: [B, Hkv, Sk, D], or packed [Tk, Hkv, D].
        p: 0 to 1.
        seed: int64 [2], (seed, offset).

    Returns:
        bool on q's device, true where kept: [B, Hq, Sq, Sk]. For packed tensors [Hq, Tq, Tk]: row t
            is the packed query token t, and column j is the key's index within its own sequence.
            So the mask of sequence b is ``mask[:, cu_q[b]:cu_q[b + 1], :cu_k[b + 1] - cu_k[b]]``.

    Raises:
        ValueError: p outside [0, 1]; a seed that is not int64 [2]; a q without 3 or 4 dimensions.

    Random numbers are Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011). Eight neighbouring keys
    of a row share one Philox call, and 16 bits decide on each. So the rate of kept elements is 1 -
    p, rounded to a multiple of 1 / 65536.
    """
    name = "attn_dropout_mask"
    refuse_non_tensors(f"{NAMESPACE}::{name}", q=q, k=k, seed=seed)
    refuse_types(f"{NAMESPACE}::{name}", [("p", "float", p)])
    if q.dim() not in (3, 4) or k.dim() != q.dim():
        raise ValueError(
            f"{NAMESPACE}::{name}: q and k must both have 3 or 4 dimensions, got {q.dim()} and "
            f"{k.dim()}"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"{NAMESPACE}::{name}: p must be between 0 and 1, got {p:g}")
    if seed.dtype is not torch.int64 or tuple(seed.shape) != (2,):
        raise ValueError(
            f"{NAMESPACE}::{name}: seed must be int64 [2], got {seed.dtype} {list(seed.shape)}"
        )
    lse = q.shape[:-1]
    keys = k.shape[2] if q.dim() == 4 else k.shape[0]
    rows = lse.numel()
    row = torch.arange(rows, device=q.device)[:, None]
    groups = torch.arange((keys + 7) // 8, device=q.device)
    words = philox(
        seed.to(q.device),
        (row << 29 & _WORD) | groups,
        (row >> 3 & _WORD).expand(rows, groups.numel()),
    )
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    below = max(int((1 - p) * 65536 + 0.5), 1) if p < 1 else 0
    kept = (
        (halves < below).flatten(1)[:, :keys].unflatten(0, tuple(lse))
        if rows
        else q.new_empty((*lse, keys)).bool()
    )
    return kept if q.dim() == 4 else kept.transpose(0, 1)


def philox(seed: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """The four 32-bit words of Philox for the counters (low, high, offset), as int64."""
    k0, k1 = seed[0] & _WORD, seed[0] >> 32 & _WORD
    c = [low, high, (seed[1] & _WORD).expand_as(low), (seed[1] >> 32 & _WORD).expand_as(low)]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # 64-bit products that wrap around
        c = [(b >> 32 & _WORD) ^ c[1] ^ k0, b & _WORD, (a >> 32 & _WORD) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return tuple(c)


def seed_of(name: str, q: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    """The seed of a call: the given one, or a new one if 0 < p <= 1. The op refuses a p that is no
    number."""
    if seed is not None or isinstance(p, (int, float)) and not 0 < p <= 1:
        return seed
    if not _is_plain(q):
        raise ValueError(
            f"{NAMESPACE}::{name}: dropout_seed must be given where q is a DTensor: each rank "
            f"would draw one of its own"
        )
    return drawn(q)


def _is_plain(q: Any) -> bool:
    return not hasattr(q, "placements")
