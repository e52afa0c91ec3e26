# SPDX-License-Identifier: BSD-3-Clause
"""sparse_pack and sparse_gemm: the public functions and their declarations."""

from typing import NoReturn

import torch
from torch import Tensor

from .define import define_op
from .gemm import Activation
from .keywords import refuse_unknown
from .scaled_gemm import Accumulate

__all__ = ["sparse_gemm", "sparse_pack"]


def sparse_pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a 2:4 sparse weight: of every four elements along K, two are zero. Returns the other
    two and their positions.

    Args:
        w: [N, K], K a multiple of 4, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, any
            strides. A NaN counts as non-zero.

    Returns:
        (values, meta). values [N, K / 2] in w's dtype: two elements of each group of four, in
        order. If a group has fewer than two non-zeros, zeros at the lowest free positions are taken
        too. meta [N, ceil(K / 8)] uint8: four bits for each group, low bits first. They are the
        positions of the two elements, the first in the low two bits.

    Raises:
        ValueError: a dtype or shape that the op does not take. On the CPU, more than two non-zeros
            in a group; a GPU keeps the first two.

    Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021), arXiv:2104.08378.
    """
    return _sparse_pack.call(w)


def sparse_gemm(
    a: Tensor,
    values: Tensor,
    meta: Tensor,
    *more: NoReturn,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "precise",
    **unknown: NoReturn,
) -> Tensor:
    """Activations times a 2:4 sparse weight: ``out = activation((a @ w.T) * scale_a * scale_b +
    bias)``.

    Sums are float32, or exact int32 for int8. The result is rounded once.

    Args:
        a: [M, K] in the weight's dtype, any strides, any M. The two 8-bit float dtypes may be
            mixed.
        values: the result of `sparse_pack` for w [N, K], or some of its rows.
        meta: likewise. It is not checked: with bytes that `sparse_pack` does not make, results are
            undefined.
        scale_a: for 8-bit dtypes: float32 or float8_e8m0fnu [], [1] or [M, 1]. None is 1.
        scale_b: likewise [], [1] or [1, N].
        bias: [N] float32, or the dtype of a 16-bit result. With a float32 result also any 16-bit
            dtype.
        activation: as in `gemm`.
        out_dtype: a's dtype or float32. For 8-bit dtypes bfloat16 (the default), float16 or
            float32.
        accumulate: as in `scaled_gemm`, for 8-bit floats: with ``"precise"`` at most 128 products
            (256 of K) are summed with few bits on Hopper, with ``"fast"`` maybe all.

    Returns:
        [M, N] contiguous.

    No gradient: NotImplementedError. Under autocast a float32 a and the bias are cast to a 16-bit
    weight's dtype.

    Raises:
        ValueError: a dtype or shape that the op does not take.

    Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021), arXiv:2104.08378.
    """
    if more or unknown:
        refuse_unknown(sparse_gemm, unknown, more)
    return _sparse_gemm.call(
        a, values, meta, scale_a, scale_b, bias, activation, out_dtype, accumulate
    )


def _pack_symbolic(w):
    n, k = w.shape
    return w.new_empty((n, k // 2)), w.new_empty((n, (k + 7) // 8), dtype=torch.uint8)


def _symbolic(a, values, out_dtype, **_):
    own = torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype
    return (a.new_empty((a.shape[0], values.shape[0]), dtype=out_dtype or own),)


def _flops(a, values, **_) -> int:
    """M N K: half of the dense product's."""
    return a[0] * a[1] * values[0]


def _cast(_, to, a, values, bias, out_dtype, **rest):
    if a.dtype is not torch.float32 or values.dtype not in (torch.bfloat16, torch.float16):
        return {}
    return {"a": to(a, values.dtype), "bias": to(bias, out_dtype or values.dtype)}


_sparse_pack = define_op(
    "sparse_pack",
    public=sparse_pack,
    symbolic=_pack_symbolic,
    refuse="sparse_pack: it has no backward",
)
_sparse_gemm = define_op(
    "sparse_gemm",
    public=sparse_gemm,
    symbolic=_symbolic,
    refuse="sparse_gemm: it has no backward",
    autocast=_cast,
    flops=_flops,
)
