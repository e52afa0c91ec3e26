# SPDX-License-Identifier: BSD-3-Clause
"""softmax and log_softmax over the last dimension: the public functions and their declarations."""

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from . import batching
from .define import define_op
from .keywords import refuse_unknown
from .op import Op

__all__ = ["log_softmax", "softmax"]


def softmax(
    x: Tensor,
    *more: NoReturn,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Softmax of scale * x over the last dimension, or over the first columns of each row.

    In float32, rounded once (float64 for float64)::

        out = exp(scale * x - max) / sum(exp(scale * x - max))

    Args:
        x: [..., N], float32, bfloat16, float16 or float64; N may be 0. Leading dimensions may have
            any strides. If the last dimension is not contiguous, x is copied first.
        scale: finite.
        lengths: [...] int32, x's shape without the last dimension: the number of columns of each
            row that are read. The result is 0 in the other columns. Values are clamped to [0, N],
            on the device.

    Returns:
        [..., N] contiguous, in x's dtype. A row with a NaN or +inf, or of only -inf, is NaN, as in
        torch.

    Gradient: x. Not twice differentiable.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv:1805.02867.
    """
    if more or unknown:
        refuse_unknown(softmax, unknown, more)
    return _softmax.call(x, scale, lengths)


def log_softmax(x: Tensor, *more: NoReturn, scale: float = 1.0, **unknown: NoReturn) -> Tensor:
    """Logarithm of the softmax of scale * x over the last dimension.

    In float32, rounded once (float64 for float64)::

        out = scale * x - max - log(sum(exp(scale * x - max)))

    Args:
        x: [..., N], float32, bfloat16, float16 or float64; N may be 0. Leading dimensions may have
            any strides. If the last dimension is not contiguous, x is copied first.
        scale: finite.

    Returns:
        [..., N] contiguous, in x's dtype. A row with a NaN or +inf, or of only -inf, is NaN, as in
        torch.

    Gradient: x. Not twice differentiable.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.
    """
    if more or unknown:
        refuse_unknown(log_softmax, unknown, more)
    return _log_softmax.call(x, scale, None)


def _symbolic(x, **_):
    return (x.new_empty(x.shape),)


def _bwd_symbolic(out, **_):
    return (out.new_empty(out.shape),)


def _save(needs, args, out):
    return (out, args[2] if len(args) > 2 else None), {}


def _declare(public: Callable) -> Op:
    """Declares softmax or log_softmax, whose name is the public function's, and its backward."""
    name = public.__name__
    bwd = define_op(
        f"{name}_bwd",
        symbolic=_bwd_symbolic,
        refuse=f"{name}: it is not twice differentiable",
        fold=batching.rows("grad_out", "out", "lengths"),
    )

    def backward(needs, out, lengths, scale, grad_out, **_):
        return {"x": bwd.call_named(grad_out=grad_out, out=out, scale=scale, lengths=lengths)}

    return define_op(
        name,
        public=public,
        symbolic=_symbolic,
        save=_save,
        saved=("out", "lengths"),
        backward=backward,
        fold=batching.rows("x", "lengths"),
    )


_softmax = _declare(softmax)
_log_softmax = _declare(log_softmax)
