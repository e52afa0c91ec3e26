# SPDX-License-Identifier: BSD-3-Clause
"""rope_kv_write: QK norm, rotary embedding and the write into a paged cache, as one call."""

from torch import Tensor

from .._library import any_requires_grad, is_grad_enabled, traced
from . import fakes
from .in_place import define_in_place
from .keywords import number
from .vectors import widened
from .wrong_types import refuse_non_bool, refuse_non_tensors

__all__ = ["rope_kv_write"]


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
    """Rotates new queries and keys, writes keys and values into the pages of a cache, and returns
    the rotated queries.

    If a weight is given, each head of q or k is first normalised: ``x / sqrt(mean(x^2) + eps) *
    weight``. Then it is rotated as `rope` does. Both happen in float32, rounded once: q to its
    dtype, k to the cache's. Keys and values are written as `kv_cache_write` does, also into 8-bit
    caches. One launch on CUDA.

    Args:
        q: [T, Hq, D] float32, bfloat16, float16 or float64, any strides. If the last dimension of
            q, k or v is not contiguous, that tensor is copied first. All three may share memory
            with the caches.
        k: [T, Hkv, D], q's dtype.
        v: [T, Hkv, Dv], q's dtype.
        cos: [P, R / 2] float32 (float64 with float64): the first R <= D columns are rotated.
        sin: likewise.
        positions: [T] int32 or int64, rows of cos and sin.
        k_cache: [num_blocks, block_size, Hkv, D], q's dtype or of 8 bits, written in place.
        v_cache: [num_blocks, block_size, Hkv, Dv], likewise.
        slots: [T] int64 or int32. A token with a negative slot is not written, but its query is
            rotated.
        q_weight: [D] in q's dtype or of 16 or 32 bits. With None q is not normalised.
        k_weight: [D], likewise for k.
        eps: of the norm.
        interleaved: as in `rope`.
        k_scale: as in `kv_cache_write`.
        v_scale: as in `kv_cache_write`.

    Returns:
        q rotated, [T, Hq, D] in q's dtype.

    There is no gradient: if grad mode is on and an input requires one, the call raises
    NotImplementedError.

    Raises:
        ValueError: a shape, dtype or device that the op does not take.
        IndexError: a position outside cos, or a slot past the end of the cache. The CPU raises
            before anything is written. CUDA uses the last row of cos, or does not write the token,
            and the next call or `check_errors` raises.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021),
    arXiv:2104.09864; Henry et al., "Query-Key Normalization for Transformers" (2020),
    arXiv:2010.04245, with an RMS norm.
    """
    needed = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions}
    needed |= {"k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    other = {"q_weight": q_weight, "k_weight": k_weight, "k_scale": k_scale, "v_scale": v_scale}
    refuse_non_tensors(
        _op.said, **needed, **{name: x for name, x in other.items() if x is not None}
    )
    refuse_non_bool(_op.said, "interleaved", interleaved)
    q_weight, k_weight = widened(q_weight, q), widened(k_weight, k)
    args = *needed.values(), q_weight, k_weight, number(eps), interleaved, k_scale, v_scale
    if traced() or (is_grad_enabled() and any_requires_grad(*args)):
        return _op.overload(*args)
    # what the Autograd kernel would do, without entering it through the dispatcher
    return _write(*args)


def _symbolic(q, k, v, cos, sin, positions, k_cache, v_cache, slots, **_):
    fakes.sizes(
        "rope_kv_write",
        q=(q, "T Hq D"),
        k=(k, "T Hkv D"),
        v=(v, "T Hkv Dv"),
        cos=(cos, "P R/2"),
        sin=(sin, "P R/2"),
        positions=(positions, "T"),
        k_cache=(k_cache, "num_blocks block_size Hkv D"),
        v_cache=(v_cache, "num_blocks block_size Hkv Dv"),
        slots=(slots, "T"),
    )
    return (q.new_empty(q.shape),)


_op, _write = define_in_place("rope_kv_write", _symbolic, ("k_cache", "v_cache"))
