# SPDX-License-Identifier: BSD-3-Clause
"""pack_weight, unpack_weight and weight_gemm: the public functions and their declarations."""

import math
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .._library import NAMESPACE
from .define import define_op
from .gemm import Activation, gemm
from .grouped_gemm import bias_gradient, grouped_gemm
from .keywords import refuse_unknown
from .wrong_types import refuse_non_tensors

__all__ = ["WeightFormat", "pack_weight", "unpack_weight", "weight_gemm"]

WeightFormat = Literal["int4", "uint4", "int8", "e4m3", "mxfp4", "nvfp4"]

_TILE = 64
# The size that the low three bits of an e2m1 code stand for. The fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SAVED = ("packed", "scale", "zero", "global_scale", "offs")
_CODES = {
    "int4": torch.int8,
    "uint4": torch.uint8,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
}


def pack_weight(q: Tensor, format: WeightFormat, *, scale: Tensor | None = None) -> Tensor:
    """Packs the codes of a weight in the order in which `weight_gemm` reads them. The order is the
    same on every device.

    Args:
        q: [N, K], one code an element, any strides. int8 for ``"int4"`` (-8 to 7) and ``"int8"``;
            uint8 for ``"uint4"`` (0 to 15), ``"mxfp4"`` and ``"nvfp4"`` (0 to 15: a sign bit, then
            e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6); float8_e4m3fn for ``"e4m3"``.
        format: the name of the format.
        scale: the scales that will be used with the codes, [ceil(K / g), N]. They are only checked:
            all must be finite and positive. The check waits for the device.

    Returns:
        uint8 [ceil(N / 64), ceil(K / 64), 2048], or 4096 for 8-bit codes. A slice of the first two
        dimensions is the packed slice of the weight, so a packed weight can be sharded. Codes
        beyond N and K are 0.

    Raises:
        ValueError: a dtype, shape or format that the op does not take; a scale of another shape, or
            one that is not positive and finite.
        IndexError: on the CPU, a code that the format does not have. A GPU takes its low four bits.

    Frantar et al., "MARLIN" (2024), arXiv:2408.11743: weights in the order of the tensor cores'
    fragments.
    """
    packed = _pack_weight.call(q, format)
    if scale is not None:
        _check_scale(q, scale)
    return packed


def _check_scale(q: Tensor, scale: Tensor) -> None:
    op = f"{NAMESPACE}::pack_weight"
    refuse_non_tensors(op, scale=scale)
    k = q.shape[-1]
    groups = {1, *(-(-k // g) for g in (16, 32, 64, 128, 256))}
    if scale.dim() != 2 or scale.shape[1] != q.shape[0] or scale.shape[0] not in groups:
        raise ValueError(
            f"{op}: scale must have shape [ceil(K / g), N], g 16, 32, 64, 128, 256 or K, with K "
            f"{k} and N {q.shape[0]}, "
            f"got {list(scale.shape)}"
        )
    if not scale.is_floating_point():
        raise ValueError(f"{op}: scale must be of a floating dtype, got {str(scale.dtype)[6:]}")
    x = scale.float()
    if not bool(((x > 0) & x.isfinite()).all()):
        raise ValueError(f"{op}: scale must be positive and finite everywhere")


def unpack_weight(packed: Tensor, n: int, k: int, format: WeightFormat) -> Tensor:
    """The codes that `pack_weight` packed, bit for bit.

    Args:
        packed: uint8 [ceil(n / 64), ceil(k / 64), bytes]. The first two dimensions may have any
            strides.
        n: rows of the weight.
        k: its columns.
        format: the format that it was packed in.

    Returns:
        [n, k], in the dtype that `pack_weight` takes.

    Raises:
        ValueError: a shape that does not fit n, k and format.

    Frantar et al., "MARLIN" (2024), arXiv:2408.11743.
    """
    return _unpack_weight.call(packed, n, k, format)


def weight_gemm(
    a: Tensor,
    packed: Tensor,
    scale: Tensor,
    n: int,
    format: WeightFormat,
    *more: NoReturn,
    zero: Tensor | None = None,
    global_scale: Tensor | None = None,
    scale_a: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    offs: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Activations times a packed weight of 4 or 8 bits, or times one for each group of rows.

    ``out = activation(a @ w.T + bias)`` with ``w [N, K] = (code - zero) * scale * global_scale``,
    rounded to a's dtype, and sums in float32. For a float8_e4m3fn a, the float32 sum of each group
    of k is multiplied by the group's scale instead. CUDA does the same for a small M of any dtype.
    Weights are then not rounded.

    With offs, rows ``offs[g - 1]:offs[g]`` of a are multiplied by the weight of group g: the experts
    of a mixture in one call. The weights of the G groups are packed below each other as one weight
    of G N' rows, and each group has N' = N rounded up to 64, so that it begins with a whole tile.
    Groups may be empty. Result rows after the last group are 0, whatever a holds there. On CUDA offs
    is read on the device.

    Args:
        a: [..., M, K] bfloat16 or float16, any strides; or float8_e4m3fn, with scale_a. With offs
            [M, K].
        packed: the result of `pack_weight` for [N, K], or a slice of it. With offs for [G N', K].
        scale: [ceil(K / g), N], any strides; with offs [ceil(K / g), G N']. g consecutive k share a
            scale: 16, 32, 64, 128, 256 or K. In float32 or a's dtype (bfloat16 for a float8_e4m3fn
            a). For "mxfp4" float8_e8m0fnu or float32 and g = 32; for "nvfp4" float8_e4m3fn or
            float32 and g = 16.
        n: N, rows of the weight (with offs, of each group's) and columns of the result.
        format: the format of packed.
        zero: uint8 of scale's shape, for "uint4". None is 8.
        global_scale: float32 [] or [1], for "nvfp4".
        scale_a: float32 [], [1] or [..., M, 1], for a float8_e4m3fn a: scales of its rows, as
            `quantize` returns them.
        bias: [N] float32, or the dtype of a 16-bit result. With a float32 result also any 16-bit
            dtype. With offs also [G, N].
        activation: as in `gemm`.
        out_dtype: a's dtype or float32. For a float8_e4m3fn a bfloat16 (the default), float16 or
            float32.
        offs: [G] int32: the end of each group of rows of a. None is one group.

    Returns:
        [..., M, N] contiguous. If a row of a is a single 1 and zeros, the result row is a column of
        the decoded weight, bit for bit.

    Gradients: a and bias, for a 16-bit a without an activation. Others raise NotImplementedError.
    Under autocast a float32 a is cast.

    Raises:
        ValueError: a dtype, shape or format that the op does not take.
        IndexError: offs that decrease or exceed the rows. On CUDA they are clamped, and the next
            call or `check_errors` raises.

    Frantar et al., "MARLIN" (2024), arXiv:2408.11743; Gale et al., "MegaBlocks" (2022),
    arXiv:2211.15841.
    """
    if more or unknown:
        refuse_unknown(weight_gemm, unknown, more)
    if isinstance(scale_a, Tensor) and scale_a.dim() > 2 and scale_a.shape[:-1] == a.shape[:-1]:
        scale_a = scale_a.flatten(0, -2)  # the op counts rows over all leading dimensions
    return _weight_gemm.call(
        a, packed, scale, n, format, zero, global_scale, scale_a, bias, activation, out_dtype, offs
    )


# ---- fake functions ------------------------------------------------------------------------------


def _pack_symbolic(q, format, **_):
    n, k = q.shape
    tile = (
        _TILE * _TILE // (1 if _CODES[format] in (torch.float8_e4m3fn,) or format == "int8" else 2)
    )
    return (
        q.new_empty(((n + _TILE - 1) // _TILE, (k + _TILE - 1) // _TILE, tile), dtype=torch.uint8),
    )


def _unpack_symbolic(packed, n, k, format, **_):
    return (packed.new_empty((n, k), dtype=_CODES[format]),)


def _symbolic(a, n, out_dtype, **_):
    own = torch.bfloat16 if a.dtype is torch.float8_e4m3fn else a.dtype
    return (a.new_empty((*a.shape[:-1], n), dtype=out_dtype or own),)


# ---- gradients -----------------------------------------------------------------------------------


def decode_weight(
    packed: Tensor,
    scale: Tensor,
    n: int,
    k: int,
    format: WeightFormat,
    dtype: torch.dtype,
    *,
    zero: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The weight [n, k] that `weight_gemm` multiplies by: ``(code - zero) * scale * global_scale``
    in float32, rounded to dtype."""
    codes = unpack_weight(packed, n, k, format)
    if format in ("mxfp4", "nvfp4"):
        values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)[codes.int()]
    else:
        values = codes.float()
    if format == "uint4":
        values = values - (8 if zero is None else _of_each_k(zero, k))
    values = values * _of_each_k(scale, k)
    return (values if global_scale is None else values * global_scale).to(dtype)


def _of_each_k(x: Tensor, k: int) -> Tensor:
    """[ceil(K / g), N] -> [N, K], or [N, 1] if one group has all of K. float32."""
    groups = x.shape[0]
    group = (
        k if groups == 1 else next(g for g in (256, 128, 64, 32, 16) if (k + g - 1) // g == groups)
    )
    return spread(x.float().mT, group, k)


def spread(scale: Tensor, group: int, k: int) -> Tensor:
    """[N, ceil(K / group)] -> [N, K]. [N, 1] is returned unchanged.

    If the last group is not full, it is expanded by itself. Inductor miscompiles the obvious forms:
    of ``repeat_interleave(group, 1)[:, :k]``, an expand, or ``scale[:, arange(k) // group]`` it
    writes only the full groups (torch 2.13, CPU).
    """
    if scale.shape[1] == 1:
        return scale
    whole = k // group
    each = scale[:, :whole, None].expand(-1, -1, group).flatten(1)
    return (
        each
        if k % group == 0
        else torch.cat([each, scale[:, whole:].expand(-1, k - whole * group)], 1)
    )


def _save(needs, args, out):
    given = _weight_gemm.named(args)
    a, bias = given["a"], given["bias"]
    wanted = {name for name, needed in zip(_weight_gemm.names, needs, strict=False) if needed}
    if a.dtype is torch.float8_e4m3fn or given["activation"] != "none" or wanted - {"a", "bias"}:
        raise NotImplementedError(
            f"{NAMESPACE}::weight_gemm: gradients are those of a 16-bit a and of bias, without an "
            f"activation"
        )
    form = None if bias is None else (bias.dim(), bias.dtype)
    more = {"dtype": a.dtype, "k": a.shape[-1], "form": form}
    kept = tuple(given[name] if needs[0] or name == "offs" else None for name in _SAVED)
    return kept, more


def _backward(needs, packed, scale, zero, global_scale, offs, n, format, dtype, k, form, **values):
    """The gradient of a multiplies by the whole weight, decoded in a's dtype."""
    grad, made = values[f"grad_{_weight_gemm.results[0]}"], {}
    if "a" in needs:
        rows = n if offs is None else scale.shape[1]
        w = decode_weight(
            packed, scale, rows, k, format, dtype, zero=zero, global_scale=global_scale
        )
        if offs is None:
            made["a"] = gemm(grad.to(dtype), w)
        else:
            groups = w.view(offs.shape[0], -(-n // _TILE) * _TILE, k)[:, :n]
            made["a"] = grouped_gemm(grad.to(dtype), groups, offs)
    if "bias" in needs:
        dims, bias_dtype = form
        if offs is None:
            made["bias"] = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype)
        else:
            made["bias"] = bias_gradient(grad, offs, True, dims, bias_dtype)
    return made


def _cast(dtype, to, a, **_):
    """Casts a float32 a. 16-bit tensors are not cast, because scale must have a's dtype or
    float32."""
    return {"a": to(a, dtype)} if a.dtype is torch.float32 else {}


def _flops(a, n, **_) -> int:
    """2 M N K"""
    return 2 * math.prod(a) * n


_pack_weight = define_op(
    "pack_weight",
    public=pack_weight,
    symbolic=_pack_symbolic,
    refuse="pack_weight: codes have no gradient",
)
_unpack_weight = define_op(
    "unpack_weight",
    public=unpack_weight,
    symbolic=_unpack_symbolic,
    refuse="unpack_weight: codes have no gradient",
)
_weight_gemm = define_op(
    "weight_gemm",
    public=weight_gemm,
    symbolic=_symbolic,
    save=_save,
    saved=_SAVED,
    backward=_backward,
    autocast=_cast,
    flops=_flops,
)
