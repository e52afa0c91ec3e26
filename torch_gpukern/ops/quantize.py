# SPDX-License-Identifier: BSD-3-Clause
"""quantize, silu_mul_quantize, rms_norm_quantize and dequantize: the public functions and their
declarations."""

from typing import Literal, NoReturn

import torch
from torch import Tensor

from .._library import NAMESPACE
from . import autocast
from .define import define_op
from .keywords import number, refuse_unknown
from .vectors import widened

__all__ = ["Granularity", "dequantize", "quantize", "rms_norm_quantize", "silu_mul_quantize"]

Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32"]


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    granularity: Granularity,
    *more: NoReturn,
    scale_ub: Tensor | float | None = None,
    scale: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Quantises x to 8-bit codes and scales, so that ``codes * scale`` approximates x.

    For each block ``scale = max(amax / q, 2^-126)`` with q = 448 (float8_e4m3fn), 57344
    (float8_e5m2) or 127 (int8). ``codes = x / scale`` in float32 (float64 for float64), rounded to
    nearest even and saturated. A block of zeros has a finite scale. A block with an infinity or NaN
    has the scale NaN, so that every product with it is NaN.

    Args:
        x: [..., M, K] float32, bfloat16, float16 or float64, any strides.
        dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.int8``.
        granularity: the block that shares a scale: ``"tensor"``, ``"row"``, ``"1x128"`` (128
            columns of a row), ``"128x128"`` or ``"1x32"`` (OCP MX 1.0: scales are powers of two,
            rounded up so that nothing saturates). Blocks at the ends may be smaller.
        scale_ub: float32 [] or [1], or a number, above 0: an upper bound of amax. Larger values of
            x saturate.
        scale: scales to use instead of those from amax (static quantisation), above 0, in the shape
            and dtype of the result. A NaN is accepted, and its products are NaN.

    Returns:
        (codes, scale), contiguous. codes are [..., M, K]. scale is float32: "tensor" [], "row"
        [..., M, 1], "1x128" [..., M, ceil(K / 128)], "128x128" [..., ceil(M / 128), ceil(K / 128)].
        For "1x32" it is float8_e8m0fnu [..., M, ceil(K / 32)].

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype, granularity or shape that the op does not take. On the CPU, a scale or
            scale_ub of 0 or less. CUDA does not check that: with a scale of 0 the codes saturate,
            and with a negative scale they have the opposite sign.

    Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433; OCP Microscaling
    Formats 1.0 (2023).
    """
    if more or unknown:
        refuse_unknown(quantize, unknown, more)
    bound = _bound("quantize", scale_ub, x)
    codes, new_scale = _quantize.call(x, dtype, granularity, bound, scale)
    return codes, new_scale if scale is None else scale


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    granularity: Granularity,
    *,
    scale_ub: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize` of ``silu(gate) * up``, computed in float32 and never rounded to 16 bits.

    Args:
        gate: [..., M, K] float32, bfloat16 or float16, any strides. Half of a larger tensor is not
            copied.
        up: shape and dtype of gate, any strides.
        dtype: as in `quantize`.
        granularity: as in `quantize`.
        scale_ub: as in `quantize`.

    Returns:
        (codes, scale), as `quantize` returns them.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype, granularity or shape that the op does not take.

    Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    bound = _bound("silu_mul_quantize", scale_ub, gate)
    return _silu_mul_quantize.call(gate, up, dtype, granularity, bound)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: Granularity = "row",
    *,
    scale_ub: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` of an RMSNorm, ``h / sqrt(mean(h^2) + eps) * weight`` with ``h = x + residual``.

    h is rounded to x's dtype, as it is returned. The norm is computed in float32 and never rounded
    to 16 bits.

    Args:
        x: [..., M, K] float32, bfloat16 or float16, any strides.
        weight: [K] of 16 or 32 bits; None is 1.
        residual: shape and dtype of x; None is 0.
        eps: 0 or more.
        dtype: as in `quantize`.
        granularity: as in `quantize`.
        scale_ub: as in `quantize`.

    Returns:
        (codes, scale, h): the first two as `quantize` returns them, h in x's dtype. Without a
        residual, h is x itself.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype, granularity or shape that the op does not take.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv:1910.07467.
    """
    bound = _bound("rms_norm_quantize", scale_ub, x)
    weight = widened(weight, x)
    codes, scale, h = _rms_norm_quantize.call(
        x, weight, residual, number(eps), dtype, granularity, bound
    )
    return codes, scale, x if residual is None else h


def dequantize(codes: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a quantised tensor: ``codes * scale``, rounded once.

    Args:
        codes: [..., M, K] float8_e4m3fn, float8_e5m2 or int8, any strides.
        scale: float32 or float8_e8m0fnu: [] or [1], or [..., Sm, Sk] with Sm of 1, ceil(M / 128), M
            and Sk of 1, ceil(K / 128), ceil(K / 32); any strides. Leading dimensions are those of
            codes.
        dtype: float32, bfloat16, float16 or float64.

    Returns:
        [..., M, K] contiguous, of `dtype`.

    No gradient: NotImplementedError.

    Raises:
        ValueError: a dtype or shape that the op does not take.

    OCP Microscaling Formats 1.0 (2023), section 6.
    """
    return _dequantize.call(codes, scale, dtype)


def _bound(op: str, scale_ub: Tensor | float | None, x: Tensor) -> Tensor | None:
    """scale_ub as the tensor that the op takes."""
    if scale_ub is None or isinstance(scale_ub, Tensor):
        return scale_ub
    if not isinstance(scale_ub, (int, float)) or not scale_ub > 0:
        raise ValueError(
            f"{NAMESPACE}::{op}: scale_ub must be a number above 0 or a Tensor, got {scale_ub!r}"
        )
    return torch.full((), scale_ub, dtype=torch.float32, device=x.device)


# ---- fake functions ------------------------------------------------------------------------------


def _scale(x: Tensor, granularity: str) -> Tensor:
    """An empty tensor with the shape and dtype of quantize's scales."""
    dtype = torch.float8_e8m0fnu if granularity == "1x32" else torch.float32
    if granularity == "tensor":
        return x.new_empty((), dtype=dtype)
    *lead, k = x.shape
    if granularity == "row":
        blocks = 1
    else:
        columns = 32 if granularity == "1x32" else 128
        blocks = (k + columns - 1) // columns
    if granularity == "128x128":
        lead[-1] = (lead[-1] + 127) // 128
    return x.new_empty((*lead, blocks), dtype=dtype)


def _symbolic(x, dtype, granularity, scale=None, **_):
    new_scale = _scale(x, granularity) if scale is None else x.new_empty(0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), new_scale


def _silu_symbolic(gate, dtype, granularity, **_):
    return _symbolic(gate, dtype, granularity)


def _norm_symbolic(x, residual, dtype, granularity, **_):
    h = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return *_symbolic(x, dtype, granularity), h


def _dequantize_symbolic(codes, dtype, **_):
    # torch passes the schema's default to a fake function as a number
    if isinstance(dtype, int):
        dtype = torch.float32
    return (codes.new_empty(codes.shape, dtype=dtype),)


def _refusal(name: str) -> str:
    return (
        f"{name}: it has no backward; train through torch_gpukern.nn's layers, whose rule goes "
        "straight through the rounding"
    )


_quantize = define_op("quantize", public=quantize, symbolic=_symbolic, refuse=_refusal("quantize"))
_silu_mul_quantize = define_op(
    "silu_mul_quantize",
    public=silu_mul_quantize,
    symbolic=_silu_symbolic,
    refuse=_refusal("silu_mul_quantize"),
    autocast=autocast.widest("gate", "up"),
)
_rms_norm_quantize = define_op(
    "rms_norm_quantize",
    public=rms_norm_quantize,
    symbolic=_norm_symbolic,
    refuse=_refusal("rms_norm_quantize"),
    autocast=autocast.widest("x", "residual", vectors=("weight",)),
)
_dequantize = define_op(
    "dequantize", public=dequantize, symbolic=_dequantize_symbolic, refuse=_refusal("dequantize")
)
