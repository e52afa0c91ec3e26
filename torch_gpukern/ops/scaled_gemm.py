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

    Everything is computed in float32 and rounded once. Sums of int8 products that share their
    scales are exact int32. If the scales do not vary along K, that is the whole sum. With
    float8_e8m0fnu scales that vary along K, CUDA may sum int8 in float32. Scales may have any
    strides, and all shapes of scale_a and scale_b may be combined.

    Args:
        a: [M, K] float8_e4m3fn or float8_e5m2, or int8; any strides.
        b: [K, N] likewise; int8 goes only with int8. Any strides.
        scale_a: float32 or float8_e8m0fnu: [] or [1], or [Sm, Sk] with Sm of 1, ceil(M / 128), M
            and Sk of 1, ceil(K / 128), ceil(K / 32): element (i, k) has the scale of its row or
            block. `quantize` returns such scales.
        scale_b: likewise [Sk, Sn]. The scale of a transposed weight is passed transposed.
        bias: [N] float32, or the dtype of a 16-bit result. With a float32 or 8-bit result also any
            16-bit dtype.
        c: likewise, broadcasts to [M, N]. With ``beta=0`` it is not read.
        beta: factor of c.
        out_scale: float32 [] or [1]: an 8-bit result is divided by it, rounded to nearest even and
            saturated.
        activation: as in `gemm`.
        out_dtype: bfloat16 (the default), float16, float32, float8_e4m3fn, float8_e5m2 or int8.
        accumulate: Hopper's 8-bit instruction sums with few bits. ``"precise"`` adds its sums to
            float32 after at most 128 of K. ``"fast"`` may let one such sum span all of K, for 8-bit
            floats whose scales do not vary along K. The relative error is then up to 2e-1, if all
            summands have one sign and K is 16384.

    Returns:
        [M, N] contiguous. With K = 0 and finite scales it is ``activation(beta * c + bias)``.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype, shape, scale or word that the op does not take; int8 with K over 131071
            and scales that do not vary along K, because a sum may overflow int32.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), arXiv:2412.19437, section 3.3 (scales of
    blocks, and promotion of partial sums).
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
