# SPDX-License-Identifier: BSD-3-Clause
"""Schemes: how a weight [N, K] is rounded and stored, and how activations [M, K] are multiplied by
it.

`spec` gives the names and shapes of a scheme's tensors, which a layer holds as buffers
(quantized.py). `pack` makes them from a weight, `decode` gives back the weight that they represent,
and `product` multiplies. The functions have no state.

OCP Microscaling Formats 1.0 (2023); Mishra et al., arXiv:2104.08378 (2:4); Frantar et al.,
arXiv:2408.11743 (weights of 4 bits); Micikevicius et al., arXiv:2209.05433 (8-bit floats).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops import (
    dequantize,
    gemm,
    pack_weight,
    quantize,
    scaled_gemm,
    sparse_gemm,
    sparse_pack,
    weight_gemm,
)
from ...ops.gemm import Activation
from ...ops.quantize import Granularity
from ...ops.weight_gemm import E2M1, decode_weight, spread

__all__ = ["SCHEMES", "Scheme", "prune_2_4"]

E4M3 = torch.float8_e4m3fn
MOST = {E4M3: 448.0, torch.int8: 127.0}
Tensors = dict[str, Tensor]
Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def by_rows(make: Callable[[Tensor], Tensor], w: Tensor, at_once: int = 1 << 22) -> Tensor:
    """make(w), computed for some rows at a time to bound its temporary memory."""
    rows = max(1, at_once // max(w.shape[1], 1))
    return torch.cat([make(part) for part in w.split(rows)]) if w.shape[0] > rows else make(w)


def grouped(w: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, ceil(K / group), group], zeros beyond K"""
    return torch.nn.functional.pad(w, (0, -w.shape[1] % group)).unflatten(1, (-1, group))


def best_scale(
    w: Tensor,
    importance: Tensor | None,
    group: int,
    ways: Callable[[Tensor], list[Tensor]],
    round_to,
) -> Tensor:
    """[N, ceil(K / group)]: for each group the candidate of ``ways(amax)`` with the least squared
    error, weighted by `importance` [K]. round_to(x) rounds x / scale to the values of codes.
    """

    def make(rows: Tensor) -> Tensor:
        x = grouped(rows.float(), group)
        weight = None if importance is None else grouped(importance.float()[None], group)
        best = scale = None
        for way in ways(x.abs().amax(-1)):
            error = (round_to(x / way[..., None]) * way[..., None] - x).square()
            error = (error if weight is None else error * weight).sum(-1)
            if best is None or scale is None:
                best, scale = error, way
            else:
                scale = torch.where(error < best, way, scale)
                best = torch.minimum(error, best)
        assert scale is not None
        return scale

    return by_rows(make, w)


_HALVES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between what e2m1 holds


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 e2m1 codes: x rounded to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with x's sign. Ties go
    to the even code."""
    size, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for lower, half in enumerate(_HALVES.tolist()):
        code += (size >= half) if lower % 2 else (size > half)
    return torch.where((x < 0) & (code > 0), code + 8, code)


def e2m1_round(x: Tensor) -> Tensor:
    code = e2m1_codes(x)
    size = torch.tensor(E2M1, device=x.device)[(code & 7).int()]
    return torch.where(code >= 8, -size, size)


def prune_2_4(w: Tensor, importance: Tensor | None = None) -> Tensor:
    """Zeroes the two smallest of every four values along K. The result is what
    `torch_gpukern.sparse_pack` takes.

    Args:
        w: [N, K] of any floating dtype; K is a multiple of 4.
        importance: [K], the mean square of each column's activations. Values are compared by
            ``|w| * sqrt(importance)`` (Sun et al., "Wanda" (2023), arXiv:2306.11695), without it by
            ``|w|``.

    Raises:
        ValueError: K is no multiple of 4.
    """
    if w.dim() != 2 or w.shape[1] % 4:
        raise ValueError(f"prune_2_4: w must be [N, K] with K a multiple of 4, got {list(w.shape)}")
    size = w.detach().float().abs()
    if importance is not None:
        size = size * importance.float().sqrt()
    order = torch.sort(size.unflatten(1, (-1, 4)), dim=-1, descending=True, stable=True).indices
    keep = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return torch.where(keep.flatten(1), w, torch.zeros((), dtype=w.dtype, device=w.device))


def half_of(x: Tensor) -> torch.dtype:
    """The 16-bit dtype that multiplies x."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16


def in_half(scale: Tensor, half: torch.dtype) -> Tensor:
    """The scale rounded to 16 bits, in its own dtype, and not 0.

    Packed weights have 16-bit scales, because weight_gemm's kernels for Hopper copy scales of a's
    dtype straight into shared memory. Codes are chosen for the rounded scale, so rounding it adds
    no error of its own.
    """
    if half is torch.float16:
        scale = scale.clamp_min(2.0**-24)
    return scale.to(half).to(scale.dtype)


def beside(scale: Tensor, half: torch.dtype) -> Tensor:
    """The scale as weight_gemm takes it beside activations of dtype `half`. A scale of the other
    16-bit dtype is widened."""
    other = torch.float16 if half is torch.bfloat16 else torch.bfloat16
    return scale.float() if scale.dtype is other else scale


class Scheme(NamedTuple):
    """A scheme by its functions.

    text: what a report says. bits: of a weight's element, scales not counted. static: asks for an
    input scale. multiple: K must be one of this.
    spec(n, k): names, shapes and dtypes of the tensors.
    pack(w, importance, step): the tensors of w [N, K]; step: the scales to use, [N, groups], None:
    the best. decode(tensors, n, k, dtype): the weight [N, K] that they stand for.
    product(x, tensors, n, bias, activation): x [M, K] of any 16- or 32-bit dtype; returns its
    dtype.
    codes, of_codes(codes, scale, tensors, bias, activation, dtype): where activations are quantised
    as they come, by which dtype and granularity, and the product of codes that are made already.
    """

    text: str
    bits: int
    spec: Callable[[int, int], Spec]
    pack: Callable[..., Tensors]
    decode: Callable[[Tensors, int, int, torch.dtype], Tensor]
    product: Callable[[Tensor, Tensors, int, Tensor | None, Activation], Tensor]
    static: bool = False
    multiple: int = 1
    codes: tuple[torch.dtype, Granularity] | None = None
    of_codes: Callable[..., Tensor] | None = None


# ---- 8-bit codes of weight and activation --------------------------------------------------------


def _codes(dtype: torch.dtype, granularity: Granularity, static: bool, text: str) -> Scheme:
    """granularity: of the weight."""

    def spec(n: int, k: int) -> Spec:
        scale = {
            "row": (n, 1),
            "128x128": (ceil_div(n, 128), ceil_div(k, 128)),
            "1x32": (n, ceil_div(k, 32)),
        }
        kept = torch.float8_e8m0fnu if granularity == "1x32" else torch.float32
        more: Spec = {"input_scale": ((), torch.float32)} if static else {}
        return {"weight_codes": ((n, k), dtype), "weight_scale": (scale[granularity], kept), **more}

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        codes, scale = quantize(w.float(), dtype, granularity, scale=step)
        return {"weight_codes": codes, "weight_scale": scale}

    def decode(t: Tensors, n: int, k: int, as_dtype: torch.dtype) -> Tensor:
        return dequantize(t["weight_codes"], t["weight_scale"], dtype=as_dtype)

    of_activations: Granularity = "1x128" if granularity == "128x128" else granularity

    def of_codes(
        codes: Tensor,
        scale: Tensor,
        t: Tensors,
        bias: Tensor | None,
        activation: Activation,
        as_dtype: torch.dtype,
    ) -> Tensor:
        return scaled_gemm(
            codes,
            t["weight_codes"].mT,
            scale,
            t["weight_scale"].mT,
            bias=None if bias is None else bias.to(as_dtype),
            activation=activation,
            out_dtype=as_dtype,
        )

    def product(
        x: Tensor, t: Tensors, n: int, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        if static:
            codes, scale = quantize(x, dtype, "tensor", scale=t["input_scale"])
        else:
            codes, scale = quantize(x, dtype, of_activations)
        return of_codes(codes, scale, t, bias, activation, x.dtype)

    if static:
        return Scheme(text, 8, spec, pack, decode, product, static=True)
    how = (dtype, of_activations)
    return Scheme(text, 8, spec, pack, decode, product, codes=how, of_codes=of_codes)


# ---- packed weights, 16-bit activations ----------------------------------------------------------


def _packed_product(format: str):
    def product(
        x: Tensor, t: Tensors, n: int, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        shift, half = t.get("weight_shift"), half_of(x)
        wide = x.dtype if shift is None else torch.float32
        out = weight_gemm(
            x.to(half),
            t["weight_packed"],
            beside(t["weight_scale"], half),
            n,
            format,  # type: ignore[arg-type]
            zero=t.get("weight_zero"),
            global_scale=t.get("weight_global_scale"),
            bias=None if bias is None else bias.to(wide),
            activation=activation if shift is None else "none",
            out_dtype=wide,
        )
        if shift is None:
            return out
        # The addend of a group multiplies the sum of the group's activations. Both products may be
        # much larger than their sum, so everything stays float32 until they are added.
        sums = grouped(x, ceil_div(x.shape[1], shift.shape[0])).sum(-1, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return gemm(sums, shift.float(), c=out, activation=activation).to(x.dtype)

    return product


def _packed_decode(format: str):
    def decode(t: Tensors, n: int, k: int, as_dtype: torch.dtype) -> Tensor:
        zero, whole = t.get("weight_zero"), t.get("weight_global_scale")
        shift = t.get("weight_shift")
        how = {"zero": zero, "global_scale": whole}
        wide = as_dtype if shift is None else torch.float32
        w = decode_weight(t["weight_packed"], t["weight_scale"], n, k, format, wide, **how)  # type: ignore[arg-type]
        if shift is None:
            return w
        return (w + spread(shift.float().mT, ceil_div(k, shift.shape[0]), k)).to(as_dtype)

    return decode


def _tile_bytes(bits: int) -> int:
    return 64 * 64 * bits // 8


def _integers(format: str, bits: int, group: int | None, text: str) -> Scheme:
    """int4 by groups, or int8 by rows."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def spec(n: int, k: int) -> Spec:
        return {
            "weight_packed": ((ceil_div(n, 64), ceil_div(k, 64), _tile_bytes(bits)), torch.uint8),
            "weight_scale": ((ceil_div(k, group) if group else 1, n), torch.bfloat16),
        }

    ratios = [1.0] if bits == 8 else [1 - 0.05 * i for i in range(-1, 11)]

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        size, half = group or max(w.shape[1], 1), half_of(w)

        def ways(amax: Tensor) -> list[Tensor]:
            most = amax.clamp_min(2.0**-100) / high
            return [in_half(most * ratio, half) for ratio in ratios]

        if step is None:
            scale = best_scale(w, importance, size, ways, lambda x: x.round().clamp(low, high))
        else:
            scale = in_half(step, half)
        q = (w.float() / spread(scale, size, w.shape[1])).round().clamp(low, high).to(torch.int8)
        return {
            "weight_packed": pack_weight(q, format),  # type: ignore[arg-type]
            "weight_scale": scale.to(half).mT.contiguous(),
        }

    return Scheme(text, bits, spec, pack, _packed_decode(format), _packed_product(format))


def _with_zero(group: int) -> Scheme:
    """uint4 by groups, from the least to the largest of each, 0 among them."""
    plain = _integers("int4", 4, group, "")

    def spec(n: int, k: int) -> Spec:
        shape, _ = plain.spec(n, k)["weight_scale"]
        return {**plain.spec(n, k), "weight_zero": (shape, torch.uint8)}

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        x, k = grouped(w.float(), group), w.shape[1]
        low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
        half = half_of(w)
        scale = in_half(((high - low) / 15).clamp_min(2.0**-100), half)
        zero = (-low / scale).round()
        q = ((w.float() / spread(scale, group, k)).round() + spread(zero, group, k)).clamp(0, 15)
        return {
            "weight_packed": pack_weight(q.to(torch.uint8), "uint4"),
            "weight_scale": scale.to(half).mT.contiguous(),
            "weight_zero": zero.mT.to(torch.uint8).contiguous(),
        }

    text = "uint4 weights, a scale and a zero point a 128"
    return Scheme(text, 4, spec, pack, _packed_decode("uint4"), _packed_product("uint4"))


def _with_shift(format: str, plain: Scheme) -> Scheme:
    """The scheme of imported weights that are code * scale + shift."""

    def spec(n: int, k: int) -> Spec:
        shape, _ = plain.spec(n, k)["weight_scale"]
        return {**plain.spec(n, k), "weight_shift": (shape, torch.float32)}

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        made = plain.pack(w, importance, step)
        shift = torch.zeros_like(made["weight_scale"], dtype=torch.float32)
        return {**made, "weight_shift": shift}

    text = f"{plain.text}, and an addend"
    return Scheme(text, plain.bits, spec, pack, _packed_decode(format), _packed_product(format))


def _mxfp4() -> Scheme:
    def spec(n: int, k: int) -> Spec:
        return {
            "weight_packed": ((ceil_div(n, 64), ceil_div(k, 64), _tile_bytes(4)), torch.uint8),
            "weight_scale": ((ceil_div(k, 32), n), torch.float8_e8m0fnu),
        }

    def ways(amax: Tensor) -> list[Tensor]:
        # the power of two with which nothing saturates, and half of it
        power = torch.log2(amax.clamp_min(2.0**-120) / 6).ceil().clamp(-126, 127)
        return [torch.exp2(power), torch.exp2(power - 1)]

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        scale = best_scale(w, importance, 32, ways, e2m1_round) if step is None else step
        q = w.float() / spread(scale, 32, w.shape[1])
        return {
            "weight_packed": pack_weight(e2m1_codes(q), "mxfp4"),
            "weight_scale": scale.mT.to(torch.float8_e8m0fnu).contiguous(),
        }

    return Scheme(
        "4-bit floats, a power of two a 32",
        4,
        spec,
        pack,
        _packed_decode("mxfp4"),
        _packed_product("mxfp4"),
    )


def nvfp4_whole(w: Tensor) -> Tensor:
    """The global scale [] of an nvfp4 weight: its largest group's scale is the largest e4m3."""
    largest = w.abs().amax().float() if w.numel() else w.new_zeros((), dtype=torch.float32)
    return largest.clamp_min(2.0**-60) / (6 * MOST[E4M3])


def _nvfp4() -> Scheme:
    def spec(n: int, k: int) -> Spec:
        return {
            "weight_packed": ((ceil_div(n, 64), ceil_div(k, 64), _tile_bytes(4)), torch.uint8),
            "weight_scale": ((ceil_div(k, 16), n), E4M3),
            "weight_global_scale": ((), torch.float32),
        }

    def pack(
        w: Tensor,
        importance: Tensor | None = None,
        step: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> Tensors:
        w = w.float()
        whole = nvfp4_whole(w) if whole is None else whole

        def ways(amax: Tensor) -> list[Tensor]:
            fitting = [amax / 6 * (1 - 0.05 * i) / whole for i in range(6)]
            return [s.clamp(2.0**-9, MOST[E4M3]).to(E4M3).float() * whole for s in fitting]

        scale = best_scale(w, importance, 16, ways, e2m1_round) if step is None else step
        coded = (scale / whole).clamp(2.0**-9, MOST[E4M3]).to(E4M3)
        q = w / spread(coded.float() * whole, 16, w.shape[1])
        return {
            "weight_packed": pack_weight(e2m1_codes(q), "nvfp4"),
            "weight_scale": coded.view(torch.uint8).mT.contiguous().view(E4M3),
            "weight_global_scale": whole,
        }

    return Scheme(
        "4-bit floats, an e4m3 scale a 16",
        4,
        spec,
        pack,
        _packed_decode("nvfp4"),
        _packed_product("nvfp4"),
    )


# ---- 2:4 -----------------------------------------------------------------------------------------


def _sparse(dtype: torch.dtype, text: str) -> Scheme:
    eight = dtype.itemsize == 1

    def spec(n: int, k: int) -> Spec:
        more: Spec = {"weight_scale": ((n, 1), torch.float32)} if eight else {}
        return {
            "weight_values": ((n, k // 2), dtype),
            "weight_meta": ((n, ceil_div(k, 8)), torch.uint8),
            **more,
        }

    def pack(w: Tensor, importance: Tensor | None = None, step: Tensor | None = None) -> Tensors:
        w = prune_2_4(w, importance)
        if not eight:
            values, meta = sparse_pack(w.to(dtype))
            return {"weight_values": values, "weight_meta": meta}
        codes, scale = quantize(w.float(), dtype, "row")
        # of a row with a NaN all are NaN, and may not be: its scale shows it
        codes = torch.where(w == 0, 0, codes.view(torch.uint8)).to(torch.uint8).view(dtype)
        values, meta = sparse_pack(codes)
        return {"weight_values": values, "weight_meta": meta, "weight_scale": scale}

    def decode(t: Tensors, n: int, k: int, as_dtype: torch.dtype) -> Tensor:
        meta = t["weight_meta"]
        places = torch.stack([meta >> i & 3 for i in (0, 2, 4, 6)], -1).reshape(
            n, 2 * meta.shape[-1], 2
        )[:, : k // 4]
        values = t["weight_values"].float().reshape(n, k // 4, 2)
        w = values.new_zeros(n, k // 4, 4).scatter(-1, places.long(), values).reshape(n, k)
        return (w * t["weight_scale"] if eight else w).to(as_dtype)

    def product(
        x: Tensor, t: Tensors, n: int, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        values, meta = t["weight_values"], t["weight_meta"]
        bias = None if bias is None else bias.to(x.dtype)
        how = {"bias": bias, "activation": activation, "out_dtype": x.dtype}
        if not eight:
            if x.dtype is not dtype:
                how["out_dtype"], how["bias"] = (
                    torch.float32,
                    None if bias is None else bias.float(),
                )
            return sparse_gemm(x.to(dtype), values, meta, **how).to(x.dtype)
        codes, scale = quantize(x, dtype, "row")
        return of_codes(codes, scale, t, bias, activation, x.dtype)

    def of_codes(
        codes: Tensor,
        scale: Tensor,
        t: Tensors,
        bias: Tensor | None,
        activation: Activation,
        as_dtype: torch.dtype,
    ) -> Tensor:
        return sparse_gemm(
            codes,
            t["weight_values"],
            t["weight_meta"],
            scale_a=scale,
            scale_b=t["weight_scale"].mT,
            bias=None if bias is None else bias.to(as_dtype),
            activation=activation,
            out_dtype=as_dtype,
        )

    if not eight:
        return Scheme(text, 16, spec, pack, decode, product, multiple=4)
    how = (dtype, "row")
    return Scheme(text, 8, spec, pack, decode, product, multiple=4, codes=how, of_codes=of_codes)


SCHEMES: dict[str, Scheme] = {
    "fp8": _codes(E4M3, "row", False, "e4m3, a scale a row, activations by row as they come"),
    "fp8-block": _codes(
        E4M3, "128x128", False, "e4m3, a scale a 128x128, activations by 1x128 as they come"
    ),
    "fp8-static": _codes(
        E4M3, "row", True, "e4m3, a scale a row, one calibrated scale of activations"
    ),
    "int8": _codes(
        torch.int8, "row", False, "int8, a scale a row, activations by row as they come"
    ),
    "int8-static": _codes(
        torch.int8, "row", True, "int8, a scale a row, one calibrated scale of activations"
    ),
    "w8": _integers("int8", 8, None, "int8 weights, a scale a row"),
    "w4": _integers("int4", 4, 128, "int4 weights, a scale a 128"),
    "w4-zero": _with_zero(128),
    "mxfp8": _codes(
        E4M3, "1x32", False, "e4m3, a power of two a 32, activations by 1x32 as they come"
    ),
    "mxfp4": _mxfp4(),
    "nvfp4": _nvfp4(),
    "2:4": _sparse(torch.bfloat16, "bfloat16, two of four"),
    "2:4-fp8": _sparse(E4M3, "e4m3, two of four, activations by row as they come"),
}
SCHEMES["w4-shift"] = _with_shift("int4", SCHEMES["w4"])
SCHEMES["w8-shift"] = _with_shift("int8", SCHEMES["w8"])
IMPORTED = ("w4-shift", "w8-shift")  # which `quantize` does not offer
# whose groups may have another size than `pack` gives them
GROUPED = ("w4", "w8", "w4-zero", *IMPORTED)


def _dims_of(recipe: str) -> dict[str, tuple[int | None, int]]:
    """Found by comparing the shapes for weights of 128 and 256 rows."""
    one, two = (SCHEMES[recipe].spec(n, 128) for n in (128, 256))
    found: dict[str, tuple[int | None, int]] = {}
    for name, (shape, _) in one.items():
        grows = [d for d, size in enumerate(shape) if two[name][0][d] != size]
        found[name] = (grows[0], 128 // shape[grows[0]]) if grows else (None, 1)
    return found


# For each tensor of a recipe: the dimension that grows with the rows of the weight, and how many
# rows an index there stands for. (None, 1) if the tensor does not grow with the rows.
DIMS = {recipe: _dims_of(recipe) for recipe in SCHEMES}
