# SPDX-License-Identifier: BSD-3-Clause
"""Code that flash_attn and flash_attn_varlen share: symbolic sizes, gradients, FLOPs, folds for
vmap, declarations."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import NAMESPACE, are_deterministic
from . import fakes
from .define import Op, define_op

_SHORT = (torch.bfloat16, torch.float16)
_DEBUG = os.environ.get("GPUKERN_DEBUG") == "1"
_MANY_HEADS = 128  # no model known has more


def autocast(
    dtype: torch.dtype,
    to: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    **_: Any,
) -> dict:
    """Casts q, k and v. Sinks of 16 bits are cast too, because they must have q's dtype or
    float32."""
    cast = {"q": to(q, dtype), "k": to(k, dtype), "v": to(v, dtype)}
    return cast | sinks_as(cast["q"].dtype, to, sinks)


def sinks_as(dtype: torch.dtype, to: Callable, sinks: Tensor | None) -> dict:
    """16-bit sinks that have not q's dtype, cast to it. Empty if there is nothing to cast, or if q
    is float64."""
    if sinks is None or sinks.dtype not in _SHORT or sinks.dtype is dtype or dtype is torch.float64:
        return {}
    return {"sinks": to(sinks, dtype)}


def warn_of_swapped(q: Tensor, k: Tensor) -> None:
    """With GPUKERN_DEBUG=1: warns if q and k look like [B, S, H, D], flash-attn's order, instead
    of [B, H, S, D]."""
    if not _DEBUG or torch.compiler.is_compiling() or q.dim() != 4 or k.dim() != 4:
        return
    if _looks_swapped(q, k):
        text = (
            f"flash_attn: q of shape {list(q.shape)} has {q.shape[1]} heads and {q.shape[2]} "
            f"queries: are dimensions 1 and 2 "
            "swapped? q is [B, Hq, Sq, D]; of [B, S, H, D], flash-attn's order, pass "
            "q.transpose(1, 2)"
        )
        warnings.warn(text, stacklevel=3)


def _looks_swapped(q: Tensor, k: Tensor) -> bool:
    """Whether dimensions 1 and 2 look swapped. Either of two signs is enough.

    Dimension 1 is larger than any number of heads, and dimension 2 is not. Or dimension 1 has the
    same size in q and k, as sequences of one length have, dimension 2 is smaller and divides as
    grouped heads do, and neither tensor is a transposed view of [B, S, H, D].
    """
    (_, q_1, q_2, _), (_, k_1, k_2, _) = q.shape, k.shape
    if min(q_1, k_1) > _MANY_HEADS >= max(q_2, k_2):
        return True
    by_token = any(t.stride(1) < t.stride(2) for t in (q, k))
    return q_1 == k_1 > q_2 > 1 and k_2 > 0 and q_2 % k_2 == 0 and not by_token


def sizes(
    op: str, q: Tensor, k: Tensor, v: Tensor, **more: tuple[Tensor | None, str]
) -> dict[str, int]:
    """Sizes by letter, for a fake function: dense q, k and v for flash_attn, packed ones for
    flash_attn_varlen."""
    if q.dim() == 4:
        n = fakes.sizes(op, q=(q, "B Hq Sq D"), k=(k, "B Hkv Sk D"), v=(v, "B Hkv Sk Dv"), **more)
    else:
        n = fakes.sizes(op, q=(q, "Tq Hq D"), k=(k, "Tk Hkv D"), v=(v, "Tk Hkv Dv"), **more)
    same_group(op, n["Hq"], "k", n["Hkv"])
    return n


def same_group(op: str, heads_q: int, name: str, heads_kv: int) -> None:
    """ValueError unless the number of q's heads is a multiple of the number of key heads."""
    holds = heads_q % heads_kv == 0 if heads_kv != 0 else heads_q == 0
    text = f"{NAMESPACE}::{op}: {name} has {heads_kv} heads, q has {heads_q}; q's must be a multiple of {name}'s"
    torch._check_with(ValueError, holds, lambda: text)


def empty_stored_like(x: Tensor, head_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, H, S, head_dim] for x [B, H, S, D], in x's dtype or `dtype`; stored [B, S, H, head_dim]
    if x is."""
    # Only fake functions call this, so that importing the package does not pay for this import.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    batch, heads, seq, _ = x.shape
    if guard_or_false(x.stride(1) < x.stride(2)):
        return x.new_empty((batch, seq, heads, head_dim), dtype=dtype or x.dtype).transpose(1, 2)
    return x.new_empty((batch, heads, seq, head_dim), dtype=dtype or x.dtype)


def empty_dsinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return (
        q.new_empty(0, dtype=fakes.stats_dtype(q))
        if sinks is None
        else sinks.new_empty(sinks.shape)
    )


def backward_of(bwd: Op) -> Callable:
    """Makes the `backward` of define_op from the op `bwd`. Its arguments are those of the forward,
    the forward's results and their gradients. Its results dq, dk, .. are the gradients of q, k, ..
    """
    names = tuple(result.removeprefix("d") for result in bwd.results)
    more = {"deterministic"} & set(bwd.names)
    # gradients that bwd computes only on request
    asked = tuple(name for name in bwd.names if name.startswith("need_"))

    def backward(needs, q, out, grad_out, grad_lse, out_dtype=None, **kept):
        if grad_out is None:  # the loss reads only lse
            grad_out = torch.zeros_like(out)
        if out_dtype is not None:
            out, grad_out = out.to(q.dtype), grad_out.to(q.dtype)
        if more:
            kept["deterministic"] = are_deterministic()
        for name in asked:
            kept[name] = name.removeprefix("need_") in needs
        grads = bwd.call_named(**kept, q=q, out=out, grad_out=grad_out, grad_lse=grad_lse)
        return dict(zip(names, grads, strict=True))

    return backward


# ---- FLOPs ---------------------------------------------------------------------------------------


def _at_most(queries: int, keys: int, last: int) -> int:
    """The number of pairs (i < queries, j < keys) with j - i <= last. Row i has i + last + 1,
    clamped to 0 and keys."""
    first = torch.sym_max(0, torch.sym_min(queries, -last))  # rows before it have none
    full = torch.sym_max(first, torch.sym_min(queries, keys - last))  # rows from it on have all
    rows = full - first
    return rows * (last + 1) + (first + full - 1) * rows // 2 + (queries - full) * keys


def pairs_of(
    queries: int, keys: int, is_causal: bool, diagonal: int, window_left: int, window_right: int
) -> int:
    """The number of pairs of query and key that are not masked. kv_start and kv_end are tensor
    contents and are not read."""
    pairs = queries * keys
    if is_causal or window_right >= 0:
        right = 0 if is_causal else window_right
        pairs = _at_most(queries, keys, diagonal + right)
    if window_left >= 0:
        pairs = pairs - _at_most(queries, keys, diagonal - window_left - 1)
    return torch.sym_max(pairs, 0)


def flops_of(pairs: Callable) -> tuple[Callable, Callable]:
    """The FLOPs of a forward and of its backward. pairs: how many pairs of query and key meet, over
    all heads, of the shapes of q and k and the other arguments."""

    def flops(q, v, **rest) -> int:
        """2 (D + Dv) a pair."""
        return 2 * pairs(q, **rest) * (q[-1] + v[-1])

    def bwd_flops(q, v, **rest) -> int:
        """2 (3 D + 2 Dv) a pair: scores, dq and dk; dp and dv. 2.5 times the forward if Dv = D."""
        return 2 * pairs(q, **rest) * (3 * q[-1] + 2 * v[-1])

    return flops, bwd_flops


# ---- vmap ----------------------------------------------------------------------------------------

# Tensors whose dimension 1 is heads (before vmap adds its own), and tensors of shape [B].
_HEADS_SECOND = ("q", "k", "v", "out", "lse", "grad_out", "grad_lse")
_OF_SEQUENCES = ("kv_start", "kv_end", "q_start")
_FOLDED = {*_HEADS_SECOND, *_OF_SEQUENCES, "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"}


def _folds(given: dict) -> bool:
    """Whether a fold knows all tensors of the call. It does not fold a dropout seed: the mask
    follows from a row's number, which a fold would change."""
    return all(name in _FOLDED for name, x in given.items() if isinstance(x, Tensor))


def fold_into_heads(size, batched, sinks, alibi_slopes, **given):
    """Folds `size` tensors [B, H, S, D] or [T, H, D] into `size` times as many heads. A query head
    still reads its own kv head."""
    lengths = {*_OF_SEQUENCES, "cu_seqlens_q", "cu_seqlens_k"}
    if batched & lengths or not _folds(given):
        return None

    def in_front(name: str, x: Tensor) -> Tensor:
        return x if name in batched else x.expand(size, *x.shape)

    changed = {
        name: in_front(name, given[name]).movedim(0, 1).flatten(1, 2)
        for name in _HEADS_SECOND
        if given.get(name) is not None
    }
    if sinks is not None:
        changed["sinks"] = in_front("sinks", sinks).flatten()
    if alibi_slopes is not None:
        slopes = in_front("alibi_slopes", alibi_slopes)
        changed["alibi_slopes"] = (
            slopes.flatten() if slopes.dim() == 2 else slopes.movedim(0, 1).flatten(1)
        )

    def unfold(name: str, x: Tensor) -> Tensor | None:
        if name == "dsinks":
            return None if sinks is None else x.unflatten(0, (size, -1))
        return x.unflatten(1, (size, -1)).movedim(1, 0)

    return changed, unfold


def fold_into_batch(size, batched, q, sinks, alibi_slopes, **given):
    """Folds `size` tensors [B, H, S, D] into a batch of `size` times B. A call with sinks is folded
    into the heads, because sinks have no batch dimension."""
    given["q"] = q
    if not _folds(given):
        return None
    if sinks is not None:
        return fold_into_heads(size, batched, sinks=sinks, alibi_slopes=alibi_slopes, **given)

    def in_front(name: str, x: Tensor) -> Tensor:
        return x if name in batched else x.expand(size, *x.shape)

    names = (*_HEADS_SECOND, *_OF_SEQUENCES)
    changed = {
        name: in_front(name, given[name]).flatten(0, 1)
        for name in names
        if given.get(name) is not None
    }
    if alibi_slopes is not None and (batched & {"alibi_slopes"} or alibi_slopes.dim() == 2):
        slopes = in_front("alibi_slopes", alibi_slopes)
        if slopes.dim() == 2:  # [size, Hq], which all sequences of one batch share
            batch = q.shape[1] if "q" in batched else q.shape[0]
            slopes = slopes[:, None].expand(size, batch, slopes.shape[1])
        changed["alibi_slopes"] = slopes.flatten(0, 1)

    def unfold(name: str, x: Tensor) -> Tensor | None:
        return None if name == "dsinks" else x.unflatten(0, (size, -1))

    return changed, unfold


# ---- declarations --------------------------------------------------------------------------------


def declare(
    name: str,
    public: Callable,
    symbolic: Callable,
    bwd_symbolic: Callable,
    flops: Callable,
    bwd_flops: Callable,
    fold: Callable,
) -> tuple[Op, Op]:
    """Declares the op `name` and its backward, and returns both."""
    bwd = define_op(
        f"{name}_bwd",
        symbolic=bwd_symbolic,
        refuse=f"{name}: it is not twice differentiable",
        flops=bwd_flops,
        fold=fold,
    )
    op = define_op(
        name,
        public=public,
        symbolic=symbolic,
        backward=backward_of(bwd),
        without_gradient=("alibi_slopes",),
        autocast=autocast,
        flops=flops,
        fold=fold,
        whole_sequences=True,
    )
    return op, bwd
