# SPDX-License-Identifier: BSD-3-Clause
"""attn_merge: the public function and its declaration: fake function, gradients, vmap."""

from typing import NoReturn

import torch
from torch import Tensor

from . import autocast, batching
from .define import define_op
from .keywords import refuse_unknown

__all__ = ["attn_merge"]


def attn_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *more: NoReturn, **unknown: NoReturn
) -> tuple[Tensor, Tensor]:
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
        (out, lse), both contiguous, in the dtypes of out_a and lse_a. If one lse is -inf, the
        result is the other side, bit for bit. If both are, out is 0 and lse -inf. Only one of the
        two sides may have been computed with a sink.

    Gradients: all four arguments. Under autocast out_a and out_b take the wider of their dtypes.

    Raises:
        ValueError: shapes or dtypes that do not match.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv:1805.02867.
    """
    if more or unknown:
        refuse_unknown(attn_merge, unknown, more)
    return _attn_merge.call(out_a, lse_a, out_b, lse_b)


def _symbolic(out_a, lse_a, **_):
    return out_a.new_empty(out_a.shape), lse_a.new_empty(out_a.shape[:-1])


def _backward(needs, out_a, lse_a, out_b, lse_b, lse, grad_out, grad_lse, **_):
    # If neither side saw a key, lse is -inf. 0 in its place makes exp(-inf - lse) 0 instead of NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0)
    weights = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    grads = dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"))
    # A side of weight 0 has gradient 0, even if the incoming gradient is infinite.
    if grad_lse is not None:
        for name, w in zip(("lse_a", "lse_b"), weights, strict=True):
            grads[name] = (w * grad_lse).masked_fill(w == 0, 0)
    if grad_out is not None:
        acc = grad_out.to(lse.dtype)
        for name, w in zip(("out_a", "out_b"), weights, strict=True):
            grads[name] = (w[..., None] * acc).masked_fill(w[..., None] == 0, 0).to(out_a.dtype)
        # d out / d lse_a = w_a w_b (out_a - out_b) = -d out / d lse_b. This form does not contain
        # the rounding of out. The out of a side without keys may be NaN, hence masked_fill.
        change = (acc * (out_a.to(lse.dtype) - out_b.to(lse.dtype))).sum(-1)
        both = weights[0] * weights[1]
        change = (both * change).masked_fill(both == 0, 0)
        for name, move in (("lse_a", change), ("lse_b", -change)):
            grads[name] = move if grads[name] is None else grads[name] + move
    return grads


_attn_merge = define_op(
    "attn_merge",
    public=attn_merge,
    symbolic=_symbolic,
    backward=_backward,
    autocast=autocast.widest("out_a", "out_b"),
    fold=batching.everywhere,
)
