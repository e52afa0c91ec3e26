# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn with a mask or a bias: the declaration of the op that serves such calls, and the
conversion of their arguments.

`flash_attn` in flash_attn.py calls `scores_of` and this op, and documents the arguments.
"""

from typing import Any

import torch
from torch import Tensor

from .._library import NAMESPACE, is_compiling
from . import attention, fakes
from .define import Op, define_op
from .wrong_types import refuse_types

__all__ = ["Scored", "declare", "refuse_scores", "scores_of"]


class Scored:
    """Calls the masked op with flash_attn's arguments: `scores`, its own arguments, are inserted
    after v."""

    def __init__(self, op: Op, scores: tuple):
        self.op, self.scores = op, scores

    def call(self, q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> Any:
        return self.op.call(q, k, v, *self.scores, *rules)


def refuse_scores(name: str, attn_mask: Any, bias: Any, distance_bias: Any, where: str) -> None:
    """ValueError if a mask or bias is given to attention that takes none."""
    given = {"attn_mask": attn_mask, "bias": bias, "distance_bias": distance_bias}
    for argument, x in given.items():
        if x is not None:
            raise ValueError(f"{NAMESPACE}::{name}: {argument} must be None {where}")


def scores_of(
    name: str,
    q: Tensor,
    k: Tensor,
    attn_mask: Any,
    bias: Tensor | None,
    distance_bias: Tensor | None,
) -> tuple:
    """The op's own arguments: the stored mask, the kind of store, its two lengths, bias with 4
    dimensions, distance_bias."""
    from ..masks import AttnMask, attn_mask_of  # masks imports this package

    if attn_mask is not None and not isinstance(attn_mask, AttnMask):
        attn_mask = attn_mask_of(_broadcast(name, "attn_mask", attn_mask, q, k))
    if bias is not None:
        bias = _four_dims(name, "bias", bias)
        if bias.dtype is torch.bool:
            raise ValueError(
                f"{NAMESPACE}::{name}: bias must have q's dtype or float32, got bool; pass it as "
                f"attn_mask"
            )
    if attn_mask is None:
        return None, 0, 0, 0, bias, distance_bias
    return attn_mask.data, attn_mask.store, attn_mask.seq_q, attn_mask.seq_k, bias, distance_bias


def _four_dims(name: str, argument: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{NAMESPACE}::{name}: {argument} must be a tensor, got {type(x).__name__}")
    refuse_types(f"{NAMESPACE}::{name}", ((argument, "Tensor", x),))
    if not 2 <= x.dim() <= 4:
        raise ValueError(
            f"{NAMESPACE}::{name}: {argument} must have 2 to 4 dimensions, got {x.dim()}"
        )
    return x[(None,) * (4 - x.dim())]


def _broadcast(name: str, argument: str, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A bool mask of 2 to 4 dimensions as [B|1, H|1, Sq, Sk]."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{NAMESPACE}::{name}: {argument} must be a bool tensor or an AttnMask, got "
            f"{type(mask).__name__}"
        )
    if mask.dtype is not torch.bool:
        what = "; pass it as bias" if mask.dtype.is_floating_point else ""
        raise ValueError(
            f"{NAMESPACE}::{name}: {argument} must be bool or an AttnMask, got {mask.dtype}{what}"
        )
    mask = _four_dims(name, argument, mask)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if not is_compiling():  # while compiling, `expand` and the op's check raise
        if not all(own in (1, all_) for own, all_ in zip(mask.shape, full, strict=True)):
            raise ValueError(
                f"{NAMESPACE}::{name}: {argument} must broadcast to {list(full)}, got "
                f"{list(mask.shape)}"
            )
    return mask.expand(-1, -1, full[2], full[3])


# ---- fake functions ------------------------------------------------------------------------------


def _symbolic(q, k, v, kv_start, kv_end, q_start, out_dtype, **_):
    bounds = {"kv_start": (kv_start, "B"), "kv_end": (kv_end, "B"), "q_start": (q_start, "B")}
    n = attention.sizes("flash_attn", q, k, v, **bounds)
    return attention.empty_stored_like(q, n["Dv"], out_dtype), q.new_empty(
        q.shape[:3], dtype=fakes.stats_dtype(q)
    )


def _bwd_symbolic(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    sinks,
    grad_dtype,
    bias,
    distance_bias,
    need_bias,
    need_distance_bias,
    **_,
):
    like_out = {
        "grad_out": (grad_out, "B Hq Sq Dv"),
        "out": (out, "B Hq Sq Dv"),
        "lse": (lse, "B Hq Sq"),
    }
    attention.sizes("flash_attn_bwd", q, k, v, **like_out)
    stats = fakes.stats_dtype(q)
    dbias = bias.new_empty(bias.shape) if need_bias else q.new_empty(0, dtype=stats)
    ddistance = (
        distance_bias.new_empty(distance_bias.shape)
        if need_distance_bias
        else q.new_empty(0, dtype=stats)
    )
    grads = (attention.empty_stored_like(x, x.shape[3], grad_dtype) for x in (q, k, v))
    return *grads, attention.empty_dsinks(q, sinks), dbias, ddistance


# ---- gradients, autocast -------------------------------------------------------------------------


def _autocast(dtype, to, q, bias, **rest):
    """flash_attn's rule. A 16-bit bias is cast to q's dtype, as sinks are."""
    cast = attention.autocast(dtype, to, q=q, **rest)
    short = attention.sinks_as(cast["q"].dtype, to, bias)
    return cast | ({"bias": short["sinks"]} if short else {})


def declare(flops: Any, bwd_flops: Any) -> Any:
    """Declares the op flash_attn_masked. Its errors call it flash_attn."""
    bwd = define_op(
        "flash_attn_masked_bwd",
        symbolic=_bwd_symbolic,
        refuse="flash_attn: it is not twice differentiable",
        flops=bwd_flops,
    )
    op = define_op(
        "flash_attn_masked",
        symbolic=_symbolic,
        backward=attention.backward_of(bwd),
        without_gradient=("alibi_slopes",),
        autocast=_autocast,
        flops=flops,
        whole_sequences=True,
    )
    bwd.said = f"{NAMESPACE}::flash_attn_bwd"
    op.said = op.all.said = f"{NAMESPACE}::flash_attn"
    return op
