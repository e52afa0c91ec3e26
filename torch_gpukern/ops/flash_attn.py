"""flash_attn, flash_attn_varlen and attn_merge: public functions, fakes, gradients, autocast rules,
FLOP formulas.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from .._library import (
    NAMESPACE,
    any_requires_grad,
    apply_of,
    are_deterministic,
    autocast,
    autograd,
    bare,
    call_below,
    fake,
    flop_formula,
    is_compiling,
    is_grad_enabled,
    ops,
    public,
    refuse_backward,
    twin,
)
from . import laws

__all__ = ["attn_merge", "flash_attn", "flash_attn_varlen"]

_below, _below_fwd = twin("flash_attn"), twin("flash_attn_fwd")
_below_varlen, _below_varlen_fwd = twin("flash_attn_varlen"), twin("flash_attn_varlen_fwd")
_below_merge = twin("attn_merge")
_call_short = public("flash_attn", twin("flash_attn", short=True))
_call, _call_fwd = public("flash_attn", _below), public("flash_attn_fwd", _below_fwd)
_call_varlen = public("flash_attn_varlen", _below_varlen)
_call_varlen_fwd = public("flash_attn_varlen_fwd", _below_varlen_fwd)
_call_merge = public("attn_merge", _below_merge)
_bare_bwd = bare(ops.flash_attn_bwd.default)
_bare_varlen_bwd = bare(ops.flash_attn_varlen_bwd.default)


@overload
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, without ever holding the matrix of scores.

    ``out = softmax(scale * q k^T + ...) v`` over the keys that a query sees and its head's sink.

    For query i and a key j that it sees, in this order::

        s = scale * q_i . k_j
        s = softcap * tanh(s / softcap)                   where softcap > 0
        s = s - alibi_slopes[h] * |i + diagonal - j|      where alibi_slopes is given

    Args:
        q: [B, Hq, Sq, D] float32, bfloat16, float16 or float64.
        k: [B, Hkv, Sk, D], q's dtype. Hq is a multiple of Hkv; query head h reads kv head
            ``h // (Hq / Hkv)``.
        v: [B, Hkv, Sk, Dv], q's dtype. Any strides; a tensor whose last dimension is not contiguous
            is copied first. D and Dv: 1 to 512 on the CPU, multiples of 8 up to 256 on CUDA.
        is_causal: query i sees keys ``j <= i + diagonal`` only.
        scale: factor of the scores, a finite number, at most 1e38 in size unless q is float64; None is
            1 / sqrt(D).
        diagonal: the key index at which query 0 stands. 0 is the convention of
            ``F.scaled_dot_product_attention`` and ``torch.tril``; pass ``Sk - Sq`` for the
            bottom-right one.
        window_left: query i sees keys ``j >= i + diagonal - window_left`` only; -1 is no bound.
        window_right: query i sees keys ``j <= i + diagonal + window_right`` only; -1 is no bound.
            Windows and is_causal intersect.
        softcap: bound of the scores, a finite number; 0 switches it off, and so does one that no score
            comes near.
        alibi_slopes: [Hq] or [B, Hq] float32 (float64 with float64 inputs). It has no gradient.
        sinks: [Hq] float32 (float64 with float64 inputs), differentiable: one more logit per head,
            neither scaled nor capped, that takes probability and adds no value; -inf switches it
            off.
        kv_start: [B] int32: sequence b sees keys ``j >= kv_start[b]`` only. Positions stay key
            indices.
        kv_end: [B] int32: sequence b sees keys ``j < kv_end[b]`` only. Both are clamped to [0, Sk];
            together they take the place of a padding mask, for padding on either side.
        return_lse: return ``(out, lse)``.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype, stored [B, Sq, Hq, Dv] if ``q.stride(1) < q.stride(2)``,
        else as its shape says, dense. With return_lse also lse [B, Hq, Sq], contiguous, float32
        (float64 with float64 inputs): the natural logarithm of the sum of exp(s), sink included. A
        query that sees no key gives out 0 and lse -inf (its sink where there is one). Keys that no
        query of their sequence sees may hold NaN.

    Gradients: q, k, v and sinks, from those of out and lse; rows that see no key have none. Those
    of q, k and v are stored by the rule of out. A second backward raises NotImplementedError.

    Under autocast q, k and v are cast.

    Raises:
        ValueError: a shape, dtype, device, window, softcap or NaN that the op does not take, or
            alibi_slopes that require a gradient; the text names the argument, what was expected and
            what was given.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023),
    arXiv:2307.08691.
    """
    op = _call_fwd if return_lse else _call
    # A number that a compiler holds as a symbol is not compared: that would be a guard, so a second graph. A tensor that
    # equals a default is no default: the op refuses it where it wants a gradient.
    ints = not is_compiling() and type(window_left) is type(window_right) is type(diagonal) is int
    plain = ints and window_left == -1 and window_right == -1 and type(softcap) in (float, int) and softcap == 0
    plain = plain and alibi_slopes is None and sinks is None
    if plain and kv_start is None and kv_end is None:  # the schema fills in the rest sooner than it reads it
        if scale is None and diagonal == 0:
            short = op if return_lse else _call_short
            return short(q, k, v, is_causal)
        return op(q, k, v, is_causal, scale, diagonal)
    return op(
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
    )


@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn over sequences of different lengths, packed one after the other, no padding.

    For each sequence b of Sq_b queries and Sk_b keys::

        out[rows of b] = flash_attn(q[rows of b], k[keys of b], v[keys of b], diagonal=Sk_b - Sq_b)

    Args:
        q: [Tq, Hq, D] float32, bfloat16, float16 or float64; sequence b owns tokens
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        k: [Tk, Hkv, D], q's dtype; sequence b owns tokens ``cu_seqlens_k[b]`` to
            ``cu_seqlens_k[b + 1]``.
        v: [Tk, Hkv, Dv], q's dtype. Any strides; a tensor whose last dimension is not contiguous is
            copied first.
        cu_seqlens_q: [B + 1] int32, starts at 0 and does not decrease.
        cu_seqlens_k: [B + 1] int32, likewise.
        max_seqlen_q: upper bound of the sequences' query lengths; it sizes the launch and nothing
            else.
        max_seqlen_k: upper bound of the sequences' key lengths.
        is_causal: query i of a sequence sees keys ``j <= i + Sk_b - Sq_b`` only (bottom-right).
        scale: factor of the scores, a finite number, at most 1e38 in size unless q is float64; None is
            1 / sqrt(D).
        window_left: keys before the diagonal that a query sees; -1 is no bound. Counted, like
            ALiBi's distance, from the same bottom-right diagonal.
        window_right: keys after the diagonal that a query sees; -1 is no bound.
        softcap, sinks: as in `flash_attn`.
        alibi_slopes: [Hq] or [B, Hq], as in `flash_attn`.
        return_lse: return ``(out, lse)``.

    Returns:
        out [Tq, Hq, Dv] contiguous in q's dtype; with return_lse also lse [Tq, Hq], contiguous,
        float32 (float64 with float64 inputs). Tokens at or after ``cu_seqlens_q[B]`` belong to no
        sequence: out 0, lse -inf.

    Gradients: q, k, v and sinks, from those of out and lse; tokens that belong to no sequence have
    none. A second backward raises NotImplementedError.

    Under autocast q, k and v are cast.

    Raises:
        ValueError: a shape, dtype, device or value that the op does not take, or alibi_slopes that
            require a gradient.
        IndexError: on the CPU, contents of cu_seqlens: decreasing, past the tokens, or longer than
            max_seqlen. On CUDA such rows give 0 and the next call or `check_errors` reports them.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023),
    arXiv:2307.08691.
    """
    op = _call_varlen_fwd if return_lse else _call_varlen
    # As in flash_attn, no symbol and no tensor is compared.
    ints = not is_compiling() and type(window_left) is type(window_right) is int
    plain = ints and window_left == -1 and window_right == -1 and type(softcap) in (float, int) and softcap == 0
    if plain and alibi_slopes is None and sinks is None:
        return op(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale)
    return op(
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
    )


def attn_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the attention of the same queries over two disjoint sets of keys.

    In float32, rounded once (float64 for float64)::

        lse = logaddexp(lse_a, lse_b)
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Args:
        out_a: [..., Dv], dense or packed, as `flash_attn` or `paged_attn` returns it, any strides.
        lse_a: [...], out_a's shape without its last dimension, float32 (float64 with float64 outs).
        out_b: [..., Dv], shape and dtype of out_a.
        lse_b: [...], shape and dtype of lse_a.

    Returns:
        (out, lse), both contiguous, in the dtypes of out_a and lse_a. -inf on one side returns the
        other bit for bit; on both it gives 0 and -inf. A sink belongs to one of the two sides only.

    Gradients: all four arguments.

    Raises:
        ValueError: shapes or dtypes that do not match.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv:1805.02867.
    """
    return _call_merge(out_a, lse_a, out_b, lse_b)


# ---- fake functions ------------------------------------------------------------------------------


def _laws_of_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v: dense for flash_attn, packed for flash_attn_varlen."""
    dense = op == "flash_attn"
    if dense:
        letters = "[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]"
    else:
        letters = "[Tq, Hq, D]", "[Tk, Hkv, D]", "[Tk, Hkv, Dv]"
    dims, keys = (4, 2) if dense else (3, 0)  # dimensions; which of them counts the keys
    laws.is_float(op, "q", q)
    laws.has_dims(op, "q", q, dims, letters[0])
    laws.same_dtype(op, "k", k, "q", q)
    laws.has_dims(op, "k", k, dims, letters[1])
    if dense:
        laws.same_size(op, "k", "batch size", k.shape[0], "q", q.shape[0])
    laws.head_ratio(op, q.shape[1], "k", k.shape[1])
    laws.same_size(op, "k", "head_dim", k.shape[-1], "q", q.shape[-1])
    laws.same_dtype(op, "v", v, "q", q)
    laws.has_dims(op, "v", v, dims, letters[2])
    if dense:
        laws.same_size(op, "v", "batch size", v.shape[0], "k", k.shape[0])
    laws.same_size(op, "v", "heads", v.shape[1], "k", k.shape[1])
    laws.same_size(op, "v", "length", v.shape[keys], "k", k.shape[keys])


def _empty_stored_like(x: Tensor, head_dim: int) -> Tensor:
    """[B, H, S, head_dim] for x [B, H, S, D]; stored [B, S, H, head_dim] if x is."""
    # Only fake functions get here, so that compiling pays for this import and not the package's.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    batch, heads, seq, _ = x.shape
    if guard_or_false(x.stride(1) < x.stride(2)):
        return x.new_empty((batch, seq, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, seq, head_dim))


def _empty_dsinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0, dtype=laws.wide_dtype(q)) if sinks is None else sinks.new_empty(sinks.shape)


@fake("flash_attn_fwd")
def _flash_attn_fwd_fake(q, k, v, *rest):
    _laws_of_qkv("flash_attn", q, k, v)
    lse = q.new_empty(q.shape[:3], dtype=laws.wide_dtype(q))
    return _empty_stored_like(q, v.shape[3]), lse


@fake("flash_attn")
def _flash_attn_fake(q, k, v, *rest):
    return _flash_attn_fwd_fake(q, k, v)[0]


@fake("flash_attn_bwd")
def _flash_attn_bwd_fake(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    grad_lse=None,
    is_causal=False,
    scale=None,
    diagonal=0,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    *rest,
):
    _laws_of_qkv("flash_attn", q, k, v)
    return (*(_empty_stored_like(x, x.shape[3]) for x in (q, k, v)), _empty_dsinks(q, sinks))


@fake("flash_attn_varlen_fwd")
def _flash_attn_varlen_fwd_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    op = "flash_attn_varlen"
    _laws_of_qkv(op, q, k, v)
    laws.has_dtype(op, "cu_seqlens_q", cu_seqlens_q, torch.int32)
    laws.has_dims(op, "cu_seqlens_q", cu_seqlens_q, 1, "[B+1]")
    laws.has_dtype(op, "cu_seqlens_k", cu_seqlens_k, torch.int32)
    laws.has_shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    lse = q.new_empty(q.shape[:2], dtype=laws.wide_dtype(q))
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


@fake("flash_attn_varlen")
def _flash_attn_varlen_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    return _flash_attn_varlen_fwd_fake(q, k, v, cu_seqlens_q, cu_seqlens_k)[0]


@fake("flash_attn_varlen_bwd")
def _flash_attn_varlen_bwd_fake(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    grad_lse=None,
    is_causal=False,
    scale=None,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    *rest,
):
    _laws_of_qkv("flash_attn_varlen", q, k, v)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), _empty_dsinks(q, sinks))


@fake("attn_merge")
def _attn_merge_fake(out_a, lse_a, out_b, lse_b):
    op = "attn_merge"
    laws.is_float(op, "out_a", out_a)
    laws.has_dtype(op, "lse_a", lse_a, laws.wide_dtype(out_a))
    laws.has_shape(op, "lse_a", lse_a, out_a.shape[:-1])
    laws.same_dtype(op, "out_b", out_b, "out_a", out_a)
    laws.has_shape(op, "out_b", out_b, out_a.shape)
    laws.has_dtype(op, "lse_b", lse_b, laws.wide_dtype(out_a))
    laws.has_shape(op, "lse_b", lse_b, lse_a.shape)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


# ---- gradients -----------------------------------------------------------------------------------


# Arguments after v as torch hands them on, so without trailing ones that have their default. The raw
# backward op takes them in the same order, and what is left out has the same default there.


class _FlashAttn(torch.autograd.Function):
    """flash_attn (want_lse False: out) and flash_attn_fwd (True: out and lse), over the raw ops.

    rest: is_causal, scale, diagonal, window_left, window_right, softcap; alibi_slopes, sinks,
    kv_start, kv_end.
    """

    @staticmethod
    def forward(ctx, want_lse, q, k, v, *rest):
        out, lse = _below_fwd(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, *rest[6:])
        ctx.rules = rest[:6]
        if not want_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if grad_out is None:  # the loss reads lse alone
            grad_out = torch.zeros_like(out)
        args = grad_out, q, k, v, out, lse, grad_lse, *ctx.rules, *tensors
        dq, dk, dv, dsinks = _call_bwd(_bare_bwd, args, tensors)
        return None, dq, dk, dv, *(None,) * len(ctx.rules), *(None, dsinks, None, None)[: len(tensors)]


class _FlashAttnVarlen(torch.autograd.Function):
    """flash_attn_varlen (want_lse False: out) and flash_attn_varlen_fwd (True: out and lse).

    rest: cu_seqlens_q, cu_seqlens_k; max_seqlen_q, max_seqlen_k; is_causal, scale, window_left,
    window_right, softcap; alibi_slopes, sinks.
    """

    @staticmethod
    def forward(ctx, want_lse, q, k, v, *rest):
        out, lse = _below_varlen_fwd(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, *rest[:2], *rest[9:])
        ctx.bounds = rest[2:4]
        ctx.rules = rest[4:9]
        if not want_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        lengths = cu_seqlens_q, cu_seqlens_k, *ctx.bounds
        args = grad_out, q, k, v, out, lse, *lengths, grad_lse, *ctx.rules, *tensors
        dq, dk, dv, dsinks = _call_bwd(_bare_varlen_bwd, args, tensors)
        return None, dq, dk, dv, *(None,) * 10, dsinks


def _call_bwd(op, args, tensors):
    """dq, dk, dv, dsinks; tensors: alibi_slopes, sinks and what follows, as far as given. dsinks is None without sinks."""
    if are_deterministic():
        op = partial(op, deterministic=True)
    # Under create_graph the op's own Autograd kernel sees the call, and refuses the second backward
    # by name.
    grads = op(*args) if is_grad_enabled() else call_below(op, args)
    return grads if len(tensors) > 1 and tensors[1] is not None else (*grads[:3], None)


def _register_autograd(name: str, below: Callable, function, want_lse: bool, slopes_at: int) -> None:
    """An Autograd kernel; alibi_slopes is argument `slopes_at` after v, sinks the next."""
    apply = apply_of(function)

    @autograd(name)
    def kernel(q, k, v, *rest):
        if is_grad_enabled():
            wanted = q.requires_grad or k.requires_grad or v.requires_grad
            if len(rest) > slopes_at:
                slopes, sinks = (*rest[slopes_at : slopes_at + 2], None)[:2]
                if slopes is not None and slopes.requires_grad:
                    raise ValueError(
                        f"{NAMESPACE}::{name}: alibi_slopes requires a gradient and has none; "
                        "pass alibi_slopes.detach()"
                    )
                wanted = wanted or (sinks is not None and sinks.requires_grad)
            if wanted:
                return apply(want_lse, q, k, v, *rest)
        return below(q, k, v, *rest)


_register_autograd("flash_attn", _below, _FlashAttn, False, 6)
_register_autograd("flash_attn_fwd", _below_fwd, _FlashAttn, True, 6)
_register_autograd("flash_attn_varlen", _below_varlen, _FlashAttnVarlen, False, 9)
_register_autograd("flash_attn_varlen_fwd", _below_varlen_fwd, _FlashAttnVarlen, True, 9)
refuse_backward("flash_attn_bwd", "flash_attn: it is not twice differentiable")
refuse_backward("flash_attn_varlen_bwd", "flash_attn_varlen: it is not twice differentiable")


class _AttnMerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out_a, lse_a, out_b, lse_b):
        out, lse = _below_merge(out_a, lse_a, out_b, lse_b)
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        out_a, lse_a, out_b, lse_b, lse = ctx.saved_tensors
        # 0 for -inf, where neither side saw a key: exp(-inf - lse) is then 0 and not NaN.
        lse = lse.masked_fill(lse == -torch.inf, 0)
        weights = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
        grads = [None, None, None, None]
        # A side without weight has no gradient, not even of an infinite one.
        if grad_lse is not None:
            grads[1::2] = ((w * grad_lse).masked_fill(w == 0, 0) for w in weights)
        if grad_out is not None:
            acc = grad_out.to(lse.dtype)
            grads[0::2] = ((w[..., None] * acc).masked_fill(w[..., None] == 0, 0).to(out_a.dtype) for w in weights)
            # d out / d lse_a = w_a w_b (out_a - out_b) = -d out / d lse_b, without out's rounding;
            # the out of a side without keys may be NaN.
            change = (acc * (out_a.to(lse.dtype) - out_b.to(lse.dtype))).sum(-1)
            both = weights[0] * weights[1]
            change = (both * change).masked_fill(both == 0, 0)
            for i, move in ((1, change), (3, -change)):
                grads[i] = move if grads[i] is None else grads[i] + move
        return tuple(grads)


_apply_merge = apply_of(_AttnMerge)


@autograd("attn_merge")
def _attn_merge_autograd(*args):
    if is_grad_enabled() and any_requires_grad(*args):
        return _apply_merge(*args)
    return _below_merge(*args)


# ---- autocast ------------------------------------------------------------------------------------


def _cast(dtype, args, to):
    return *(to(x, dtype) for x in args[:3]), *args[3:]


for _name in ("flash_attn", "flash_attn_fwd", "flash_attn_varlen", "flash_attn_varlen_fwd"):
    autocast(_name, _cast)


# ---- FLOPs ---------------------------------------------------------------------------------------


def _at_most(queries: int, keys: int, last: int) -> int:
    """Pairs (i < queries, j < keys) with j - i <= last: i + last + 1 in a row, 0 to keys."""
    first = torch.sym_max(0, torch.sym_min(queries, -last))  # rows before it have none
    full = torch.sym_max(first, torch.sym_min(queries, keys - last))  # rows from it on have all
    rows = full - first
    return rows * (last + 1) + (first + full - 1) * rows // 2 + (queries - full) * keys


def _pairs(queries: int, keys: int, is_causal: bool, diagonal: int, window_left: int, window_right: int) -> int:
    """Pairs of query and key that meet; kv_start and kv_end are contents, so they do not count."""
    pairs = queries * keys
    if is_causal or window_right >= 0:
        right = 0 if is_causal else window_right
        pairs = _at_most(queries, keys, diagonal + right)
    if window_left >= 0:
        pairs = pairs - _at_most(queries, keys, diagonal - window_left - 1)
    return torch.sym_max(pairs, 0)


@flop_formula("flash_attn", "flash_attn_fwd")
def _flash_attn_flops(
    q,
    k,
    v,
    is_causal=False,
    scale=None,
    diagonal=0,
    window_left=-1,
    window_right=-1,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    """2 (D + Dv) for each head and each pair of query and key that meet."""
    (batch, heads, queries, d), keys, dv = q, k[2], v[3]
    pairs = _pairs(queries, keys, is_causal, diagonal, window_left, window_right)
    return 2 * batch * heads * pairs * (d + dv)


@flop_formula("flash_attn_bwd")
def _flash_attn_bwd_flops(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    grad_lse=None,
    is_causal=False,
    scale=None,
    diagonal=0,
    window_left=-1,
    window_right=-1,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    """2 (3 D + 2 Dv) a pair: scores, dq and dk; dp and dv. 2.5 times the forward if Dv = D."""
    (batch, heads, queries, d), keys, dv = q, k[2], v[3]
    pairs = _pairs(queries, keys, is_causal, diagonal, window_left, window_right)
    return 2 * batch * heads * pairs * (3 * d + 2 * dv)


def _packed_pairs(queries, cu_seqlens, max_q, max_k, is_causal, window_left, window_right) -> int:
    """An upper bound: shapes tell how many sequences and tokens there are, not how long each
    sequence is.
    """
    sequences = torch.sym_max(cu_seqlens[0] - 1, 0)
    each = _pairs(max_q, max_k, is_causal, max_k - max_q, window_left, window_right)
    return torch.sym_min(sequences * each, queries * max_k)


@flop_formula("flash_attn_varlen", "flash_attn_varlen_fwd")
def _flash_attn_varlen_flops(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    is_causal=False,
    scale=None,
    window_left=-1,
    window_right=-1,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    """At most 2 (D + Dv) for each head and pair, as if each sequence had max_seqlen_q queries and
    max_seqlen_k keys.
    """
    bounds = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right
    return 2 * q[1] * _packed_pairs(q[0], cu_seqlens_q, *bounds) * (q[2] + v[2])


@flop_formula("flash_attn_varlen_bwd")
def _flash_attn_varlen_bwd_flops(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    grad_lse=None,
    is_causal=False,
    scale=None,
    window_left=-1,
    window_right=-1,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    bounds = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right
    return 2 * q[1] * _packed_pairs(q[0], cu_seqlens_q, *bounds) * (3 * q[2] + 2 * v[2])
