# SPDX-License-Identifier: BSD-3-Clause
"""attn_dropout_mask, and what flash_attn and flash_attn_varlen share of dropout.

The law of csrc/formats/attn_dropout.h is said here again, in tensors: the kernels are judged by it.
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

    It depends on q's and k's shapes, p and the seed alone: the same on the CPU and on CUDA, of
    every kernel, in both passes.

    Args:
        q: [B, Hq, Sq, D], or packed [Tq, Hq, D].
        k: [B, Hkv, Sk, D], or packed [Tk, Hkv, D].
        p: 0 to 1.
        seed: int64 [2], (seed, offset).

    Returns:
        bool on q's device, true where kept: [B, Hq, Sq, Sk]. Packed [Hq, Tq, Tk]: row t is the
        packed query token t, column j the key's place in its own sequence, so that sequence b reads
        ``mask[:, cu_q[b]:cu_q[b + 1], :cu_k[b + 1] - cu_k[b]]``.

    Raises:
        ValueError: p outside [0, 1]; a seed that is no int64 [2]; a q of other than 3 or 4
        dimensions.

    The words are Philox4x32-10's (Salmon, Moraes, Dror and Shaw 2011): eight neighbouring keys of a
    row share one call, and 16 bits decide on each, so that the rate is (1 - p) rounded to 1 /
    65536.
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
    """The four words of counters (low, high, offset), as int64."""
    k0, k1 = seed[0] & _WORD, seed[0] >> 32 & _WORD
    c = [low, high, (seed[1] & _WORD).expand_as(low), (seed[1] >> 32 & _WORD).expand_as(low)]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # of 64 bits, which wrap
        c = [(b >> 32 & _WORD) ^ c[1] ^ k0, b & _WORD, (a >> 32 & _WORD) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return tuple(c)


def seed_of(name: str, q: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    """A call's seed: the one given, else one drawn where there is dropout."""
    # what is no p the op refuses
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
