# SPDX-License-Identifier: BSD-3-Clause
"""rms_norm and layer_norm: the public functions and their declarations: fakes, gradients, vmap."""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from . import autocast, batching, gradients
from .define import define_op
from .keywords import number, refuse_unknown
from .op import Op
from .vectors import widened

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *more: NoReturn,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square normalisation over the last dimension.

    In float32, rounded once (float64 for float64), with h = x + residual, rounded to x's dtype::

        out = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias

    Args:
        x: [..., N], float32, bfloat16, float16 or float64; N is 1 or more. Leading dimensions may
            have any strides. If the last dimension is not contiguous, x is copied first.
        weight: [N] in x's dtype, or of 16 or 32 bits. None is 1. If its 16-bit dtype is not x's, it
            is converted to float32 first.
        bias: [N], likewise. None is 0.
        residual: x's shape and dtype, added to x before it is normalised.
        eps: finite, 0 or more. With 0, a row whose squares underflow gives inf or NaN, as in
            PyTorch.
        weight_offset: added to weight (1 for Gemma's checkpoints). Not read without a weight.

    Returns:
        out, of x's shape and dtype, contiguous. With a residual (out, x + residual).

    Gradients: x, residual, weight and bias, each in its own dtype. Those of weight and bias are
    summed over all rows in float32, in a fixed order: they have the same bits each time. Not twice
    differentiable.

    Under autocast x and residual are cast to the wider of their dtypes, and 16-bit weight and bias
    to the same dtype.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv:1910.07467.
    """
    if more or unknown:
        refuse_unknown(rms_norm, unknown, more)
    weight, bias = widened(weight, x), widened(bias, x)
    out, h = _rms_norm.call(x, weight, bias, residual, number(eps), weight_offset)
    return out if residual is None else (out, h)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *more: NoReturn,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last dimension.

    In float32, rounded once (float64 for float64), with h = x + residual, rounded to x's dtype::

        out = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias

    Args:
        x: [..., N], float32, bfloat16, float16 or float64; N is 1 or more. Leading dimensions may
            have any strides. If the last dimension is not contiguous, x is copied first.
        weight: [N] in x's dtype, or of 16 or 32 bits. None is 1. If its 16-bit dtype is not x's, it
            is converted to float32 first.
        bias: [N], likewise. None is 0.
        residual: x's shape and dtype, added to x before it is normalised.
        eps: finite, 0 or more. With 0, a row whose squares underflow gives inf or NaN, as in
            PyTorch.

    Returns:
        out, of x's shape and dtype, contiguous. With a residual (out, x + residual).

    Gradients: x, residual, weight and bias, each in its own dtype. Those of weight and bias are
    summed over all rows in float32, in a fixed order: they have the same bits each time. Not twice
    differentiable.

    Under autocast x and residual are cast to the wider of their dtypes, and 16-bit weight and bias
    to the same dtype.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.

    Ba, Kiros and Hinton, "Layer Normalization" (2016), arXiv:1607.06450.
    """
    if more or unknown:
        refuse_unknown(layer_norm, unknown, more)
    weight, bias = widened(weight, x), widened(bias, x)
    out, h = _layer_norm.call(x, weight, bias, residual, number(eps), 0.0)
    return out if residual is None else (out, h)


def _symbolic(x, residual, **_):
    return x.new_empty(x.shape), x.new_empty(0) if residual is None else x.new_empty(x.shape)


def _bwd_symbolic(grad_out, h, weight, need_weight, need_bias, wide_bias, **_):
    dweight = h.new_empty(
        h.shape[-1] if need_weight else 0, dtype=h.dtype if weight is None else weight.dtype
    )
    dbias = h.new_empty(
        h.shape[-1] if need_bias else 0, dtype=torch.float32 if need_bias and wide_bias else h.dtype
    )
    return h.new_empty(h.shape), dweight, dbias


def _save(needs, args, out, h):
    """Keeps the tensor that was normalised, x or x + residual, and the dtype of bias."""
    x, weight, bias, residual = (*args, None, None, None)[:4]
    return (x if residual is None else h, weight), {
        "bias_dtype": None if bias is None else bias.dtype
    }


def _declare(public: Callable) -> Op:
    """Declares rms_norm or layer_norm, whose name is the public function's, and its backward."""
    name = public.__name__
    bwd = define_op(
        f"{name}_bwd",
        symbolic=_bwd_symbolic,
        refuse=f"{name}: it is not twice differentiable",
        fold=batching.rows("grad_out", "h", "grad_sum", unless=("need_weight", "need_bias")),
    )

    def backward(needs, h, weight, bias_dtype, eps, weight_offset, grad_out, grad_sum, **_):
        if grad_out is None:  # the loss reads only the sum
            return {"x": grad_sum, "residual": grad_sum}
        dx, dweight, dbias = bwd.call_named(
            grad_out=grad_out,
            h=h,
            weight=weight,
            grad_sum=None if grad_sum is None or grad_sum.shape != h.shape else grad_sum,
            eps=eps,
            weight_offset=weight_offset,
            need_weight="weight" in needs,
            need_bias="bias" in needs,
            wide_bias=bias_dtype is torch.float32,
        )
        return {"x": dx, "residual": dx, "weight": dweight, "bias": dbias}

    op = define_op(
        name,
        public=public,
        symbolic=_symbolic,
        save=_save,
        saved=("h", "weight"),
        backward=backward,
        autocast=autocast.widest("x", "residual", vectors=("weight", "bias")),
        fold=batching.rows("x", "residual", empty={"sum": lambda given: given["residual"] is None}),
    )
    _write_out(op, bwd)
    return op


def _write_out(op: Op, bwd: Op) -> None:
    """The Function of a norm without residual."""

    def forward(ctx, *args):
        out, h = op.below(*args)
        x, weight, bias, _, *how = (*args, *op.defaults[len(args) :])
        ctx.save_for_backward(x, weight)
        ctx.how = (*how, bias is not None and bias.dtype is torch.float32)
        ctx.mark_non_differentiable(h)  # it is empty
        ctx.set_materialize_grads(False)
        return out, h

    def gradients_of_rows(ctx, grad):
        x, weight = ctx.saved_tensors
        needs = (*ctx.needs_input_grad, False, False)[:3]
        eps, weight_offset, wide_bias = ctx.how
        call = bwd.call if gradients.seen((grad, x, weight)) else bwd.below
        grads = call(grad, x, weight, None, eps, weight_offset, needs[1], needs[2], wide_bias)
        made = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
        return (*made, None, None, None)[: len(ctx.needs_input_grad)]

    def has_no_residual(args):
        return len(args) < 4 or args[3] is None

    gradients.write_out(op, has_no_residual, forward, gradients_of_rows)


_rms_norm = _declare(rms_norm)
_layer_norm = _declare(layer_norm)
