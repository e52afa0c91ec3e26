# SPDX-License-Identifier: BSD-3-Clause
"""rope_kv_write: QK norm, rotary embedding and the write into a paged cache, as one call."""

import torch
from torch import Tensor

from .norm import rms_norm
from .paged_attn import kv_cache_write
from .rope import rope
from .wrong_types import refuse_non_tensors

__all__ = ["rope_kv_write"]

CODES = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotates new queries and keys and writes keys and values into the pages of a cache; returns the rotated queries.

    Each head of q and k is first normalised where a weight is given, ``x / sqrt(mean(x^2) + eps) * weight``, then rotated as
    `rope` does, both in float32 and rounded once: q to its dtype, k to the cache's. Keys and values are written as
    `kv_cache_write` does, 8-bit caches included. On the CPU alone so far.

    Args:
        q: [T, Hq, D] float32, bfloat16, float16 or float64.
        k: [T, Hkv, D], q's dtype.
        v: [T, Hkv, Dv], q's dtype.
        cos: [P, R / 2] float32 (or float64 beside float64): the first R <= D columns are rotated.
        sin: likewise.
        positions: [T] int32 or int64, rows of cos and sin.
        k_cache: [num_blocks, block_size, Hkv, D], q's dtype or of 8 bits, written in place.
        v_cache: [num_blocks, block_size, Hkv, Dv], likewise.
        slots: [T] int64 or int32. A token with a negative slot is not written; its query is rotated all the same.
        q_weight: [D] q's dtype or float32; None: q is not normalised.
        k_weight: [D], likewise for k.
        eps: of the norm.
        interleaved: as in `rope`.
        k_scale: as in `kv_cache_write`.
        v_scale: as in `kv_cache_write`.

    Returns:
        q rotated, [T, Hq, D] in q's dtype.

    There is no gradient: NotImplementedError where an input requires one in grad mode.

    Raises:
        ValueError: a shape, dtype or device that the ops do not take; tensors on CUDA.
        IndexError: a position outside cos, or a slot past the end of the cache. Nothing has been written then.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv:2104.09864; Henry et al.,
    "Query-Key Normalization for Transformers" (2020), arXiv:2010.04245, with an RMS norm.
    """
    needed = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions}
    needed |= {"k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    other = {"q_weight": q_weight, "k_weight": k_weight, "k_scale": k_scale, "v_scale": v_scale}
    given = needed | {name: x for name, x in other.items() if x is not None}
    refuse_non_tensors("rope_kv_write", **given)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
        raise NotImplementedError(
            "rope_kv_write: it has no backward and an input requires a gradient; call it under torch.no_grad()"
        )
    _check(q, k, v, positions, q_weight, k_weight)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    once = wide if k_cache.dtype in CODES or q_weight is not None or k_weight is not None else q.dtype
    with torch.no_grad():
        queries = q if once is q.dtype else q.to(once)
        keys = k if once is k.dtype else k.to(once)
        if q_weight is not None:
            queries = rms_norm(queries, q_weight.to(once), eps=eps)
        if k_weight is not None:
            keys = rms_norm(keys, k_weight.to(once), eps=eps)
        queries, keys = rope(queries, keys, cos, sin, positions, interleaved=interleaved)
        if k_cache.dtype not in CODES:
            keys = keys.to(q.dtype)
        kv_cache_write(keys, v.to(keys.dtype), k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        return queries.to(q.dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, q_weight: Tensor | None, k_weight: Tensor | None
) -> None:
    """What the ops below would say in another's name, or after a conversion not at all."""
    for name, x, letters in (("q", q, "[T, Hq, D]"), ("k", k, "[T, Hkv, D]"), ("v", v, "[T, Hkv, Dv]")):
        if x.dim() != 3:
            raise ValueError(f"rope_kv_write: {name} must have 3 dimensions {letters}, got {x.dim()}")
        if not x.is_floating_point() or x.dtype in CODES:
            raise ValueError(f"rope_kv_write: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"rope_kv_write: {name} has dtype {x.dtype}, q has {q.dtype}; they must match")
        if x.is_cuda:
            raise ValueError(f"rope_kv_write: {name} is on {x.device}; it is served on the CPU, not yet on CUDA")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != q.shape[-1:] or weight.dtype not in (q.dtype, torch.float32)):
            raise ValueError(
                f"rope_kv_write: {name} is {list(weight.shape)} {weight.dtype}; "
                f"expected [{q.shape[-1]}] {q.dtype} or torch.float32"
            )
