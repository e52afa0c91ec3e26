# SPDX-License-Identifier: BSD-3-Clause
"""grouped_gemm: the public function and its declaration: shapes, gradients, FLOPs."""

from typing import NoReturn

import torch
from torch import Tensor

from .._library import NAMESPACE
from .define import define_op
from .gemm import Activation
from .keywords import refuse_unknown
from .scaled_gemm import Accumulate

__all__ = ["grouped_gemm"]


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *more: NoReturn,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "precise",
    **unknown: NoReturn,
) -> Tensor:
    """Products of several groups in one call: the experts of a mixture, and the gradients of their
    weights.

    With b [G, K, N], groups are rows of a: ``out[offs[g - 1]:offs[g]] = activation(a[offs[g -
    1]:offs[g]] @ b[g] + bias)``. Result rows after the last group are 0, whatever a holds there.

    With b [K, N], groups are ranges of k: ``out[g] = activation(a[:, offs[g - 1]:offs[g]] @
    b[offs[g - 1]:offs[g]] + bias)``.

    Groups need no alignment and may be empty. On CUDA offs is read on the device.

    Args:
        a: [M, K] float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, any strides.
        b: [G, K, N] or [K, N] in a's dtype, any strides. The two float8 dtypes may be mixed.
        offs: [G] int32: the end of each group.
        scale_a: for 8-bit dtypes: float32 or float8_e8m0fnu [] or [Sm, Sk], as in `scaled_gemm`,
            over all rows of a. If groups are ranges of k: [M, 1].
        scale_b: likewise [] or [G, Sk, Sn]. If groups are ranges of k: [1, N].
        bias: [N] or [G, N], float32 or the dtype of a 16-bit result. With a float32 result also any
            16-bit dtype.
        activation: as in `gemm`.
        out_dtype: a's dtype or float32. For 8-bit dtypes bfloat16 (the default), float16 or
            float32.
        accumulate: as in `scaled_gemm`. Wider dtypes are always summed in float32 and take only
            ``"precise"``. So does int8, whose sums are exact within a block of one scale.

    Returns:
        [M, N] or [G, M, N], contiguous.

    Gradients: a, b and bias, for 16 and 32 bits without an activation. Others raise
    NotImplementedError. Under autocast a, b and bias are cast, unless a or b is 8-bit.

    Raises:
        ValueError: a dtype or shape that the op does not take; int8 with K over 131071 and scales
            that do not vary along K, because a sum may overflow int32. Groups of k may be shorter.
        IndexError: offs that decrease or exceed the rows. On CUDA they are clamped, and the next
            call or `check_errors` raises.

    Gale et al., "MegaBlocks" (2022), arXiv:2211.15841: experts without padding.
    """
    if more or unknown:
        refuse_unknown(grouped_gemm, unknown, more)
    return _grouped_gemm.call(a, b, offs, scale_a, scale_b, bias, activation, out_dtype, accumulate)


def _symbolic(a, b, offs, out_dtype, **_):
    text = f"{NAMESPACE}::grouped_gemm: b has {b.shape[-2]} rows, a has {a.shape[1]} columns; they must match"
    torch._check_with(ValueError, b.shape[-2] == a.shape[1], lambda: text)
    shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[-1])
    return (
        a.new_empty(
            shape, dtype=out_dtype or (torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)
        ),
    )


def _save(needs, args, out):
    a, b, offs = args[:3]
    scale_a, scale_b, bias = (
        _grouped_gemm.value(args, name) for name in ("scale_a", "scale_b", "bias")
    )
    if (
        scale_a is not None
        or scale_b is not None
        or _grouped_gemm.value(args, "activation") != "none"
    ):
        raise NotImplementedError(
            f"{NAMESPACE}::grouped_gemm: gradients are those of a, b and bias, without scales and "
            f"activation"
        )
    form = None if bias is None else (bias.dim(), bias.dtype)
    return (a if needs[1] else None, b if needs[0] else None, offs), {
        "dtype": a.dtype,
        "rows": b.dim() == 3,
        "form": form,
    }


def _backward(needs, a, b, offs, dtype, rows, form, **values):
    """The gradients of a and b are grouped products of the transposed operands."""
    made = {}
    whole = values[f"grad_{_grouped_gemm.results[0]}"]  # the schema gives the result no name
    grad = whole.to(dtype)
    if rows:
        if "a" in needs:
            made["a"] = _grouped_gemm.call_named(a=grad, b=b.mT, offs=offs)
        if "b" in needs:
            made["b"] = _grouped_gemm.call_named(a=a.mT, b=grad, offs=offs)
    else:
        if "a" in needs:
            made["a"] = _grouped_gemm.call_named(a=b, b=grad.mT, offs=offs).mT
        if "b" in needs:
            made["b"] = _grouped_gemm.call_named(a=a.mT, b=grad, offs=offs)
    if "bias" in needs:
        made["bias"] = bias_gradient(whole, offs, rows, *form)
    return made


def bias_gradient(grad: Tensor, offs: Tensor, rows: bool, dims: int, dtype: torch.dtype) -> Tensor:
    """The gradient of bias. For groups of rows, each group's sum is a grouped product with ones, so
    that offs is not read on the host."""
    if rows:
        ones = grad.new_ones(1, grad.shape[0])
        sums = _grouped_gemm.call_named(a=ones, b=grad, offs=offs, out_dtype=torch.float32)[:, 0]
    else:
        sums = grad.sum(1, dtype=torch.float32)
    return (sums if dims == 2 else sums.sum(0)).to(dtype)


def _flops(a, b, **_) -> int:
    """2 M N K, as if groups held all rows."""
    return 2 * a[0] * a[1] * b[-1]


def _cast(dtype, to, a, b, bias, **_):
    """gemm's rule. If a or b is 8-bit, nothing is cast."""
    if a.element_size() == 1 or b.element_size() == 1:
        return {}
    return {"a": to(a, dtype), "b": to(b, dtype), "bias": to(bias, dtype)}


_grouped_gemm = define_op(
    "grouped_gemm",
    public=grouped_gemm,
    symbolic=_symbolic,
    save=_save,
    saved=("a", "b", "offs"),
    backward=_backward,
    autocast=_cast,
    flops=_flops,
)
