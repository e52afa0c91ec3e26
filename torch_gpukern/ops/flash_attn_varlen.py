# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_varlen: the public function and its declaration: fake function, gradients, autocast
rule, FLOPs, vmap.

The build makes overloads by the value of return_lse from its signature (cmake/stubs.py).
"""

from typing import Literal, NoReturn

import torch
from torch import Tensor

from . import attention, fakes
from .attn_dropout import seed_of
from .flash_attn_fp8 import FP8, Coded, declare, refuse_dropout, refuse_scales, varlen_symbolic
from .keywords import refuse_unknown
from .wrong_types import refuse_non_bool

__all__ = ["flash_attn_varlen"]


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *more: NoReturn,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    v_mean: Tensor | None = None,
    accumulate: Literal["auto", "fast", "precise"] = "auto",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn over sequences of different lengths, packed one after the other without padding.

    For each sequence b of Sq_b queries and Sk_b keys::

        out[rows of b] = flash_attn(q[rows of b], k[keys of b], v[keys of b], diagonal=Sk_b - Sq_b)

    Args:
        q: [Tq, Hq, D] float32, bfloat16, float16, float64 or float8_e4m3fn; sequence b owns tokens
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        k: [Tk, Hkv, D], q's dtype; sequence b owns tokens ``cu_seqlens_k[b]`` to
            ``cu_seqlens_k[b + 1]``.
        v: [Tk, Hkv, Dv], q's dtype. Any strides; a tensor whose last dimension is not contiguous is
            copied first.
        cu_seqlens_q: [B + 1] int32, starts at 0 and does not decrease.
        cu_seqlens_k: [B + 1] int32, likewise.
        max_seqlen_q: upper bound of the sequences' query lengths. It only sizes the launch.
        max_seqlen_k: upper bound of the sequences' key lengths.
        is_causal: query i of a sequence sees keys ``j <= i + Sk_b - Sq_b`` only (bottom-right).
        scale: factor of the scores, finite, `|scale| <= 1e38` unless q is float64. None is
            1 / sqrt(D).
        window_left: keys before the diagonal that a query sees; -1 is no bound. Windows and ALiBi
            count from the same bottom-right diagonal.
        window_right: keys after the diagonal that a query sees; -1 is no bound.
        softcap, sinks: as in `flash_attn`.
        alibi_slopes: [Hq] or [B, Hq], as in `flash_attn`.
        out_dtype: dtype of out. None is q's. On the CPU float32 too, which returns unrounded
            results for `attn_merge`. For float8_e4m3fn inputs: bfloat16 (None), float16 or float32.
        q_scale, k_scale, v_scale: as in `flash_attn`: [], [H], [B, H], or [B, H, ceil(max_seqlen /
            128)]. Blocks of 128 tokens are counted from a sequence's first token.
        v_mean, accumulate: as in `flash_attn`.
        dropout_p: 0 to 1. Each probability is set to 0 with this probability, and otherwise divided
            by 1 - dropout_p. lse and the softmax's sum ignore dropout. float8_e4m3fn has none.
        dropout_seed: int64 [2] on q's device, (seed, offset), which decides what is kept.
            `attn_dropout_mask` returns the mask. By default both are drawn from torch's generator
            of the device. They are read on the device: if you write others into the tensor, a
            captured graph draws another mask.
        return_lse: return ``(out, lse)``.

    Returns:
        out [Tq, Hq, Dv] contiguous in q's dtype; with return_lse also lse [Tq, Hq], contiguous,
        float32 (float64 with float64 inputs). Tokens at or after ``cu_seqlens_q[B]`` belong to no
        sequence. They have out 0 and lse -inf.

    Gradients: q, k, v and sinks, from the gradients of out and lse. Tokens that belong to no
    sequence have gradient 0. A second backward raises NotImplementedError.

    Under autocast q, k and v are cast, and 16-bit sinks too.

    Raises:
        ValueError: a shape, dtype, device or value that the op does not take, or alibi_slopes that
            require a gradient.
        IndexError: on the CPU, bad contents of cu_seqlens: decreasing, past the tokens, or longer
            than max_seqlen. On CUDA such rows give 0, and the next call or `check_errors` raises.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023),
    arXiv:2307.08691.
    """
    if more or unknown:
        refuse_unknown(flash_attn_varlen, unknown, more)
    if return_lse is not False:
        refuse_non_bool(_flash_attn_varlen.said, "return_lse", return_lse)
    if getattr(q, "dtype", None) is FP8:
        refuse_dropout("flash_attn_varlen", dropout_p)
        op = _flash_attn_varlen_fp8.all if return_lse else _flash_attn_varlen_fp8
        op = Coded(op, _flash_attn_varlen, q_scale, k_scale, v_scale, v_mean, accumulate)
    else:
        if accumulate != "auto" or not (q_scale is k_scale is v_scale is v_mean is None):
            refuse_scales("flash_attn_varlen", q, q_scale, k_scale, v_scale, v_mean, accumulate)
        dropout_seed = seed_of("flash_attn_varlen", q, dropout_p, dropout_seed)
        op = _flash_attn_varlen.all if return_lse else _flash_attn_varlen
    return op.call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal,
        scale,
        window_left,
        window_right,
        softcap,
        alibi_slopes,
        sinks,
        out_dtype,
        dropout_p,
        dropout_seed,
    )


# ---- fake functions ------------------------------------------------------------------------------


def _symbolic(q, k, v, cu_seqlens_q, cu_seqlens_k, out_dtype, **_):
    lengths = {"cu_seqlens_q": (cu_seqlens_q, "B+1"), "cu_seqlens_k": (cu_seqlens_k, "B+1")}
    n = attention.sizes("flash_attn_varlen", q, k, v, **lengths)
    return q.new_empty((*q.shape[:2], n["Dv"]), dtype=out_dtype or q.dtype), q.new_empty(
        q.shape[:2], dtype=fakes.stats_dtype(q)
    )


def _bwd_symbolic(grad_out, q, k, v, out, lse, sinks, grad_dtype, **_):
    like_out = {"grad_out": (grad_out, "Tq Hq Dv"), "out": (out, "Tq Hq Dv"), "lse": (lse, "Tq Hq")}
    attention.sizes("flash_attn_varlen_bwd", q, k, v, **like_out)
    return *(
        x.new_empty(x.shape, dtype=grad_dtype or x.dtype) for x in (q, k, v)
    ), attention.empty_dsinks(q, sinks)


# ---- FLOPs ---------------------------------------------------------------------------------------


def _pairs(
    q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, **_
) -> int:
    """An upper bound of the pairs of query and key, over all heads: as if each sequence had
    max_seqlen_q queries and max_seqlen_k keys. Shapes give the number of sequences and tokens, but
    not the length of each sequence.
    """
    bounds = (
        max_seqlen_q,
        max_seqlen_k,
        is_causal,
        max_seqlen_k - max_seqlen_q,
        window_left,
        window_right,
    )
    sequences = torch.sym_max(cu_seqlens_q[0] - 1, 0)
    return q[1] * torch.sym_min(sequences * attention.pairs_of(*bounds), q[0] * max_seqlen_k)


_flops, _bwd_flops = attention.flops_of(_pairs)


# ---- declarations --------------------------------------------------------------------------------

_flash_attn_varlen, _ = attention.declare(
    "flash_attn_varlen",
    flash_attn_varlen,
    _symbolic,
    _bwd_symbolic,
    _flops,
    _bwd_flops,
    attention.fold_into_heads,
)
_flash_attn_varlen_fp8 = declare("flash_attn_varlen", varlen_symbolic, _flops)
