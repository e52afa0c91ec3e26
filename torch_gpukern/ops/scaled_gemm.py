# SPDX-License-Identifier: BSD-3-Clause
"""scaled_gemm: the public function and its declaration."""

from typing import Literal, NoReturn

import torch
from torch import Tensor

from .._library import NAMESPACE
from .define import define_op
from .gemm import Activation
from .keywords import refuse_unknown

__all__ = ["Accumulate", "scaled_gemm"]

Accumulate = Literal["precise", "fast"]


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *more: NoReturn,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_scale: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "precise",
    **unknown: NoReturn,
) -> Tensor:
    """The product of two quantised matrices, each element a code times a scale.

    ``out = activation(sum_k (a * scale_a) (b * scale_b) + beta * c + bias)``

    All of it is float32 and rounded once. Sums of int8 within a block of scales are exact int32;
    with one scale along K that is all of it. On CUDA those of powers of two in a byte along K may
    be float32, too. Scales are read in their natural order, whatever their strides, and every mix
    of them is taken.

    Args:
        a: [M, K] float8_e4m3fn or float8_e5m2, or int8; any strides.
        b: [K, N] likewise, int8 with int8 alone; any strides.
        scale_a: float32 or float8_e8m0fnu: [] or [1], or [Sm, Sk] with Sm of 1, ceil(M / 128), M
            and Sk of 1, ceil(K / 128), ceil(K / 32): element (i, k) has the scale of its row or
            block. `quantize` makes them.
        scale_b: likewise [Sk, Sn]; a transposed scale of a transposed weight is one.
        bias: [N] float32, or the dtype of a 16-bit result; beside a float32 or 8-bit result any of
        16 bits too.
        c: likewise, broadcasts to [M, N]; with ``beta=0`` it is not read.
        beta: factor of c.
        out_scale: float32 [] or [1]: an 8-bit result is divided by it, rounded to nearest even and
        saturated. activation: as in `gemm`.
        out_dtype: bfloat16 (the default), float16, float32, float8_e4m3fn, float8_e5m2 or int8.
        accumulate: ``"precise"``: no sum in the few bits that Hopper's 8-bit instruction keeps
            spans more than 128 of K; ``"fast"``: it may span all of K, which costs 2e-1 of the
            result where summands have one sign and K is 16384. For 8-bit floats with one scale
            along K.

    Returns:
        [M, N] contiguous. K = 0 gives ``activation(beta * c + bias)``, of finite scales.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype, shape, scale or word that the op does not take; int8 with one scale
            along a K over 131071, where a sum may leave int32.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), arXiv:2412.19437, section 3.3 (blocks, and
    sums in two levels).
    """
    if more or unknown:
        refuse_unknown(scaled_gemm, unknown, more)
    return _scaled_gemm.call(
        a, b, scale_a, scale_b, bias, c, beta, out_scale, activation, out_dtype, accumulate
    )


def _symbolic(a, b, out_dtype, **_):
    text = f"{NAMESPACE}::scaled_gemm: b has {b.shape[0]} rows, a has {a.shape[1]} columns; they must match"
    torch._check_with(ValueError, b.shape[0] == a.shape[1], lambda: text)
    return (a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or torch.bfloat16),)


def _flops(a, b, **_) -> int:
    """2 M N K"""
    return 2 * a[0] * a[1] * b[1]


_scaled_gemm = define_op(
    "scaled_gemm",
    public=scaled_gemm,
    symbolic=_symbolic,
    refuse="scaled_gemm: it has no backward; train through torch_gpukern.nn's layers, whose rule "
    "goes straight through the rounding",
    flops=_flops,
)
