# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn: the public function and its declaration: fake function, gradients, autocast rule,
FLOPs, vmap.

The build makes overloads by the value of return_lse from its signature (cmake/stubs.py).
"""

from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch import Tensor

from .._library import are_deterministic
from . import attention, fakes, gradients
from .attn_dropout import seed_of
from .flash_attn_fp8 import FP8, Coded, declare, refuse_dropout, refuse_scales, symbolic
from .flash_attn_masked import Scored, refuse_scores, scores_of
from .flash_attn_masked import declare as declare_masked
from .keywords import refuse_unknown
from .wrong_types import refuse_non_bool

if TYPE_CHECKING:
    from ..masks import AttnMask

__all__ = ["flash_attn"]


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: NoReturn,
    is_causal: bool = False,
    scale: float | None = None,
    diagonal: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    q_start: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    v_mean: Tensor | None = None,
    accumulate: Literal["auto", "fast", "precise"] = "auto",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    attn_mask: "Tensor | AttnMask | None" = None,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that never stores the matrix of scores.

    ``out = softmax(scale * q k^T + ...) v`` over the keys that a query sees and its head's sink.

    For query i and a key j that it sees, in this order::

        s = scale * q_i . k_j
        s = softcap * tanh(s / softcap)                   where softcap > 0
        s = s - alibi_slopes[h] * |i + diagonal - j|      where alibi_slopes is given
        s = s + bias[b, h, i, j]                          where bias is given
        s = s + distance_bias[h, j - i + Sq - 1]          where distance_bias is given

    Args:
        q: [B, Hq, Sq, D] float32, bfloat16, float16, float64, or float8_e4m3fn codes (see below).
        k: [B, Hkv, Sk, D], q's dtype. Hq is a multiple of Hkv; query head h reads kv head
            ``h // (Hq / Hkv)``.
        v: [B, Hkv, Sk, Dv], q's dtype. Any strides; a tensor whose last dimension is not contiguous
            is copied first. D and Dv: 1 to 576, on CUDA multiples of 8 (codes there: up to 256).
        is_causal: query i sees keys ``j <= i + diagonal`` only.
        scale: factor of the scores, finite, `|scale| <= 1e38` unless q is float64. None is
            1 / sqrt(D).
        diagonal: the key index that query 0 is aligned with. 0 is the convention of
            ``F.scaled_dot_product_attention`` and ``torch.tril``. Pass ``Sk - Sq`` for the
            bottom-right convention, or q_start if each sequence has its own diagonal.
        window_left: query i sees keys ``j >= i + diagonal - window_left`` only; -1 is no bound.
        window_right: query i sees keys ``j <= i + diagonal + window_right`` only; -1 is no bound.
            Windows and is_causal intersect.
        softcap: bound of the scores, finite. 0 switches it off. A softcap far above all scores has
            no effect.
        alibi_slopes: [Hq] or [B, Hq] float32 (float64 with float64 inputs). It has no gradient.
        sinks: [Hq] float32 or q's dtype (float64 with float64 inputs), differentiable: one more
            logit per head, neither scaled nor capped. It enters the softmax's sum but adds no
            value. -inf switches it off.
        kv_start: [B] int32: sequence b sees keys ``j >= kv_start[b]`` only. Positions stay key
            indices.
        kv_end: [B] int32: sequence b sees keys ``j < kv_end[b]`` only. Both are clamped to [0, Sk];
            together they replace a padding mask, for padding on either side.
        q_start: [B] int32: the diagonal of each sequence, on the device. Query i of sequence b
            is aligned with key ``i + q_start[b]``, for is_causal, windows and ALiBi. So a static
            cache, a chunk of a prompt or a captured graph needs no number on the host. diagonal must
            then be 0.
        out_dtype: dtype of out. None is q's. On the CPU float32 too, which returns unrounded
            results for `attn_merge`. For float8_e4m3fn inputs: bfloat16 (None), float16 or float32.
        q_scale, k_scale, v_scale: for float8_e4m3fn: the scales of the codes, float32 [], [H],
            [B, H], or [B, H, ceil(S / 128)], one for each 128 tokens. None is 1. `quantize_attn`
            returns them.
        v_mean: for float8_e4m3fn: float32 [Hkv, Dv] or [B, Hkv, Dv], added to every value of v.
            A row of out gets v_mean times the sum of its keys' probabilities.
        accumulate: for float8_e4m3fn. ``"fast"`` may round weights to e4m3, with a relative error
            of 2.5 % each, and sums all keys in the 8-bit tensor cores. Their sums lose up to 1 % of
            the mean of the values at 8k keys and 2 % at 30k, unless v_mean holds that mean.
            ``"precise"`` sums in float32, as the CPU and all kernels for 16 and 32 bits do.
            ``"auto"`` is fast with a v_mean, else precise. `explain` says which.
        dropout_p: 0 to 1. Each probability is set to 0 with this probability, and otherwise divided
            by 1 - dropout_p. lse and the softmax's sum ignore dropout. float8_e4m3fn has none.
        dropout_seed: int64 [2] on q's device, (seed, offset), which decides what is kept.
            `attn_dropout_mask` returns the mask. By default both are drawn from torch's generator
            of the device. They are read on the device: if you write others into the tensor, a
            captured graph draws another mask.
        attn_mask: bool, broadcastable to [B, Hq, Sq, Sk], true where the query sees the key; or an
            `AttnMask`, which is built once for many calls and skips hidden tiles of 128 x 128. A
            query sees the keys that attn_mask, is_causal, windows and lengths all allow. Pass a
            float mask as bias.
        bias: 2 to 4 dimensions, broadcastable to [B, Hq, Sq, Sk], q's dtype or float32,
            differentiable, any strides. -inf and the lowest finite number of its dtype hide the
            key.
        distance_bias: [Hq, Sq + Sk - 1] or [1, Sq + Sk - 1] float32 (float64 with float64 inputs),
            differentiable: a bias by the distance of key and query. It ignores diagonal and cannot
            be combined with q_start.
        return_lse: return ``(out, lse)``.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype (or out_dtype). It is stored [B, Sq, Hq, Dv] if
        ``q.stride(1) < q.stride(2)``, else contiguous. With return_lse also lse [B, Hq, Sq],
        contiguous, float32 (float64 with float64 inputs): the natural logarithm of the sum of
        exp(s), sink included. A query that sees no key has out 0 and lse -inf (its sink, if it has
        one). Keys that no query of their sequence sees may hold NaN. With attn_mask or a bias,
        every hidden pair may.

    float8_e4m3fn has no gradient: NotImplementedError. Autocast does not cast it. sinks are then
    float32 or have the result's dtype.

    Gradients: q, k, v, sinks, bias and distance_bias, from the gradients of out and lse. Rows that
    see no key have gradient 0. The gradients of q, k and v are stored as out is. The others have
    their input's dtype. Those of biases are summed in float32 over broadcast dimensions. A second
    backward raises NotImplementedError.

    Under autocast q, k and v are cast, and 16-bit sinks too. With GPUKERN_DEBUG=1 in the
    environment, a warning is given if dimensions 1 and 2 of q and k look swapped.

    Raises:
        ValueError: a shape, dtype, device, window, softcap or NaN that the op does not take, or
            alibi_slopes that require a gradient; the text names the argument, what was expected and
            what was given.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023),
    arXiv:2307.08691.
    """
    if more or unknown:
        refuse_unknown(flash_attn, unknown, more)
    attention.warn_of_swapped(q, k)
    if return_lse is not False:
        refuse_non_bool(_flash_attn.said, "return_lse", return_lse)
    if getattr(q, "dtype", None) is FP8:
        refuse_dropout("flash_attn", dropout_p)
        refuse_scores("flash_attn", attn_mask, bias, distance_bias, "where q is float8_e4m3fn")
        op = _flash_attn_fp8.all if return_lse else _flash_attn_fp8
        op = Coded(op, _flash_attn, q_scale, k_scale, v_scale, v_mean, accumulate)
    else:
        if accumulate != "auto" or not (q_scale is k_scale is v_scale is v_mean is None):
            refuse_scales("flash_attn", q, q_scale, k_scale, v_scale, v_mean, accumulate)
        dropout_seed = seed_of("flash_attn", q, dropout_p, dropout_seed)
        op = _flash_attn.all if return_lse else _flash_attn
        if not (attn_mask is bias is distance_bias is None):
            op = _flash_attn_masked.all if return_lse else _flash_attn_masked
            op = Scored(op, scores_of("flash_attn", q, k, attn_mask, bias, distance_bias))
    # written out, because a call with *arguments takes 0.2 us longer
    return op.call(
        q,
        k,
        v,
        is_causal,
        scale,
        diagonal,
        window_left,
        window_right,
        softcap,
        alibi_slopes,
        sinks,
        kv_start,
        kv_end,
        q_start,
        out_dtype,
        dropout_p,
        dropout_seed,
    )


# ---- fake functions ------------------------------------------------------------------------------


def _symbolic(q, k, v, kv_start, kv_end, q_start, out_dtype, **_):
    bounds = {"kv_start": (kv_start, "B"), "kv_end": (kv_end, "B"), "q_start": (q_start, "B")}
    n = attention.sizes("flash_attn", q, k, v, **bounds)
    return attention.empty_stored_like(q, n["Dv"], out_dtype), q.new_empty(
        q.shape[:3], dtype=fakes.stats_dtype(q)
    )


def _bwd_symbolic(grad_out, q, k, v, out, lse, sinks, grad_dtype, **_):
    like_out = {
        "grad_out": (grad_out, "B Hq Sq Dv"),
        "out": (out, "B Hq Sq Dv"),
        "lse": (lse, "B Hq Sq"),
    }
    attention.sizes("flash_attn_bwd", q, k, v, **like_out)
    return *(
        attention.empty_stored_like(x, x.shape[3], grad_dtype) for x in (q, k, v)
    ), attention.empty_dsinks(q, sinks)


# ---- FLOPs ---------------------------------------------------------------------------------------


def _pairs(q, k, is_causal, diagonal, window_left, window_right, q_start=None, **_) -> int:
    """Pairs of query and key, over all batches and heads. q_start cannot be read here. If it is
    given, the last query is taken to be aligned with the last key.
    """
    if q_start is not None:
        diagonal = k[2] - q[2]
    return (
        q[0] * q[1] * attention.pairs_of(q[2], k[2], is_causal, diagonal, window_left, window_right)
    )


_flops, _bwd_flops = attention.flops_of(_pairs)


# ---- declarations --------------------------------------------------------------------------------

_flash_attn, _flash_attn_bwd = attention.declare(
    "flash_attn",
    flash_attn,
    _symbolic,
    _bwd_symbolic,
    _flops,
    _bwd_flops,
    attention.fold_into_batch,
)
_flash_attn_fp8 = declare("flash_attn", symbolic, _flops)
_flash_attn_masked = declare_masked(_flops, _bwd_flops)


# ---- q, k and v, and at most is_causal and scale --------------------------------------------------


def _forward_of_three(ctx, q, k, v, *how):
    out, lse = _flash_attn.all.below(q, k, v, *how)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.how = how
    return out


def _gradients_of_three(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors, how = ctx.saved_tensors, ctx.how
    if are_deterministic() or gradients.seen((grad, *tensors)):
        given = dict(zip(("q", "k", "v", "out", "lse"), tensors, strict=True))
        given |= dict(zip(("is_causal", "scale"), how))
        grads = _flash_attn_bwd.call_named(
            grad_out=grad, **given, deterministic=are_deterministic()
        )
    else:
        no_lse = (None,) if how else ()  # defaults are not handed on
        grads = _flash_attn_bwd.below(grad, *tensors, *no_lse, *how)
    made = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[:3])]
    return (*made, *(None,) * len(how))


gradients.write_out(
    _flash_attn, lambda args: len(args) <= 5, _forward_of_three, _gradients_of_three
)
