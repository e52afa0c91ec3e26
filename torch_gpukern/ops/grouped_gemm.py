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
    """Products of groups, in one call: what a mixture of experts multiplies, and the gradient of
    its weights.

    Groups of rows, b [G, K, N]: ``out[offs[g - 1]:offs[g]] = activation(a[offs[g - 1]:offs[g]] @
    b[g] + bias)``. Rows at or past the last end are 0, and what a holds there, NaN too, has no
    effect. Groups of k, b [K, N]:
    ``out[g] = activation(a[:, offs[g - 1]:offs[g]] @ b[offs[g - 1]:offs[g]] + bias)``. Ends need no
    alignment, groups may be empty, and ends on a GPU are read there.

    Args:
        a: [M, K] float32, bfloat16 or float16, or float8_e4m3fn, float8_e5m2; any strides.
        b: [G, K, N] or [K, N] of a's dtype, of 8-bit floats either; any strides.
        offs: [G] int32: where groups end.
        scale_a: of 8 bits: float32 or float8_e8m0fnu [] or [Sm, Sk], as in `scaled_gemm`, counted
        over all of a; groups of k: [M, 1]. scale_b: likewise [] or [G, Sk, Sn]; groups of k: [1,
        N].
        bias: [N] or [G, N], float32 or the dtype of a 16-bit result; beside a float32 result any of
        16 bits too. activation: as in `gemm`.
        out_dtype: a's dtype (the default; of 8 bits bfloat16 or float16) or float32.
        accumulate: as in `scaled_gemm`; wider operands are always summed in float32, and take
        ``"precise"`` alone.

    Returns:
        [M, N] or [G, M, N], contiguous.

    Gradients: a, b and bias, of what is no 8-bit float, without an activation; others raise
    NotImplementedError. Under autocast a, b and bias are cast, but for 8-bit floats.

    Raises:
        ValueError: a dtype or shape that the op does not take.
        IndexError: ends that decrease or pass the rows (on CUDA at the next call, or by
        `check_errors`; they are clamped).

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
    """Each gradient is a grouped product again, of the transposed operands."""
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
        made["bias"] = _of_bias(whole, offs, rows, *form)
    return made


def _of_bias(grad: Tensor, offs: Tensor, rows: bool, dims: int, dtype: torch.dtype) -> Tensor:
    """Of rows the sums of each group, a product with ones, so that ends are read where they are."""
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
    """As of gemm; codes of 8 bits stay."""
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
