# SPDX-License-Identifier: BSD-3-Clause
"""The definition of the quantised ops in plain PyTorch, part of `reference`.

Values are float64 unless stated otherwise. Quotients x / scale are computed in float32, or in
float64 if x is float64, as in the ops.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.weight_gemm import E2M1


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an op's sums, lse, sinks and scales: float64 if its inputs are float64,
    otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


__all__ = [
    "dequantize",
    "grouped_gemm",
    "pack_weight",
    "quantize",
    "rms_norm_quantize",
    "scaled_gemm",
    "silu_mul_quantize",
    "sparse_gemm",
    "sparse_pack",
    "unpack_weight",
    "weight_gemm",
]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_BLOCKS = {
    "tensor": (None, None),
    "row": (1, None),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
}


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x to an 8-bit dtype, ties to even. Values out of range saturate. NaN stays NaN; in
    int8 it becomes 0."""
    if dtype is torch.int8:
        return x.nan_to_num(0.0, 127.0, -128.0).round().clamp(-128, 127).to(dtype)
    return x.clamp(-_LARGEST[dtype], _LARGEST[dtype]).to(dtype)


def _power_above(scale: Tensor) -> Tensor:
    """The smallest power of two >= scale, but at most 2^127, the largest float8_e8m0fnu."""
    mantissa, exponent = torch.frexp(scale)
    above = torch.ldexp(torch.ones_like(scale), (exponent - (mantissa == 0.5).int()).clamp(max=127))
    return torch.where(scale.isfinite(), above, torch.nan)


def spread(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Repeats the scale of each block, so that it broadcasts to a [..., rows, cols] matrix."""
    scale = scale.double()
    if scale.numel() == 1 and scale.dim() < 2:
        return scale.reshape(())
    for dim, size in ((-2, rows), (-1, cols)):
        count = scale.shape[dim]
        if count not in (1, size):
            block = 128 if count == -(-size // 128) else 32
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def quantize(x, dtype, granularity, *, scale_ub=None, scale=None):
    """(codes, scale): codes = x / scale, with one scale for each block.

    scale = max(amax / largest, 2^-126), clamped to the largest float32. `largest` is the largest
    value of the codes' dtype. A given `scale` is used instead."""
    wide = x.to(accumulator(x.dtype))
    high, across = _BLOCKS[granularity]
    if granularity == "tensor":
        amax = wide.abs().max() if x.numel() else wide.new_zeros(())
    else:
        rows, cols = x.shape[-2:]
        high, across = high or max(rows, 1), across or max(cols, 1)
        padded = F.pad(
            wide, (0, across - cols if granularity == "row" else -cols % across, 0, -rows % high)
        )
        blocks = padded.unflatten(-1, (-1, across)).unflatten(-3, (-1, high))
        amax = blocks.abs().amax((-3, -1))
    bad = ~amax.isfinite()
    if scale_ub is not None:
        amax = amax.clamp(max=float(scale_ub))
    # divide by a tensor, because PyTorch on CUDA divides by a number as x * (1 / number)
    made = amax / torch.full_like(amax, _LARGEST[dtype])
    # a quotient in float64 may exceed the largest float32; the codes of such a block saturate
    most = torch.finfo(torch.float32).max
    made = made.clamp(max=most).float().clamp(min=2.0**-126).masked_fill(bad, torch.nan)
    if granularity == "1x32":
        made = _power_above(made)
    if scale is not None:
        made = scale.float()
    quotient = wide / (
        made if granularity == "tensor" else spread(made, *x.shape[-2:]).to(wide.dtype)
    )
    kept = made.to(torch.float8_e8m0fnu) if granularity == "1x32" else made
    return saturate(quotient, dtype), kept


def silu_mul_quantize(gate, up, dtype, granularity, *, scale_ub=None):
    return quantize(
        F.silu(gate.double()).mul(up.double()).float(), dtype, granularity, scale_ub=scale_ub
    )


def rms_norm_quantize(
    x,
    weight=None,
    residual=None,
    eps=1e-6,
    dtype=torch.float8_e4m3fn,
    granularity="row",
    *,
    scale_ub=None,
):
    h = x if residual is None else x + residual
    y = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.double()
    return *quantize(y.float(), dtype, granularity, scale_ub=scale_ub), h


def dequantize(codes, scale, *, dtype=torch.float32):
    wide = accumulator(dtype)
    return (codes.to(wide) * spread(scale, *codes.shape[-2:]).to(wide)).to(dtype)


def scaled_gemm(
    a,
    b,
    scale_a,
    scale_b,
    *,
    bias=None,
    c=None,
    beta=1.0,
    out_scale=None,
    activation="none",
    out_dtype=None,
    accumulate="precise",
):
    """activation((a scale_a) @ (b scale_b) + beta c + bias) in float64, rounded once."""
    x = (a.double() * spread(scale_a, *a.shape)) @ (b.double() * spread(scale_b, *b.shape))
    if c is not None and beta != 0:
        x = x + beta * c.double()
    if bias is not None:
        x = x + bias.double()
    x = ACTIVATIONS[activation](x)
    out_dtype = out_dtype or torch.bfloat16
    if out_dtype.itemsize == 1:
        return saturate(x / out_scale.double(), out_dtype)
    return x.to(out_dtype)


def values_of(q: Tensor, format: str, zero: Tensor | float = 8) -> Tensor:
    """Decodes codes to float64, before scaling."""
    if format in ("mxfp4", "nvfp4"):
        size = torch.tensor(E2M1, dtype=torch.float64, device=q.device)[(q & 7).long()]
        return torch.where(q >= 8, -size, size)
    return q.double() - (zero if format == "uint4" else 0)


def decoded(q, scale, format, *, zero=None, global_scale=None, dtype=torch.float64) -> Tensor:
    """Decodes codes q to the weight [N, K], rounded once to `dtype`."""
    n, k = q.shape
    groups = scale.shape[0]
    group = k if groups == 1 else next(g for g in (16, 32, 64, 128, 256) if -(-k // g) == groups)

    def each(x):
        return x.double().repeat_interleave(max(group, 1), 0)[:k].mT

    w = values_of(q, format, 8 if zero is None else each(zero)) * each(scale)
    return (w if global_scale is None else w * global_scale.double()).to(dtype)


def weight_gemm(
    a,
    q,
    scale,
    format,
    *,
    zero=None,
    global_scale=None,
    scale_a=None,
    bias=None,
    activation="none",
    out_dtype=None,
    offs=None,
):
    """activation(a @ decoded weight^T * scale_a + bias), from unpacked codes q [N, K].

    If offs is given, q is [G, N, K], and each group of rows of a has its own weight. scale and zero
    have the op's shape [ceil(K / g), G N'], where N' is N rounded up to a multiple of 64."""
    eight = a.dtype is torch.float8_e4m3fn
    out_dtype = out_dtype or (torch.bfloat16 if eight else a.dtype)
    if offs is not None:
        each, rows = -(-q.shape[1] // 64) * 64, q.shape[1]
        ends, parts = [0, *offs.tolist()], []
        per_row = None if scale_a is None else spread(scale_a, a.shape[0], 1).expand(len(a), 1)
        for g, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False)):
            columns = slice(g * each, g * each + rows)
            part = weight_gemm(
                a[lo:hi],
                q[g],
                scale[:, columns],
                format,
                zero=None if zero is None else zero[:, columns],
                global_scale=global_scale,
                scale_a=None if per_row is None else per_row[lo:hi],
                bias=bias[g] if bias is not None and bias.dim() == 2 else bias,
                activation=activation,
                out_dtype=out_dtype,
            )
            parts.append(part)
        rest = a.new_zeros((a.shape[0] - ends[-1], rows), dtype=out_dtype)
        return torch.cat([*parts, rest])
    w = decoded(
        q,
        scale,
        format,
        zero=zero,
        global_scale=global_scale,
        dtype=torch.float64 if eight else a.dtype,
    )
    x = a.double() @ w.double().mT
    if scale_a is not None:
        x = x * spread(scale_a, a.shape[-2], 1)
    if bias is not None:
        x = x + bias.double()
    return ACTIVATIONS[activation](x).to(out_dtype)


def pack_weight(q, format, *, scale=None):
    """Packs codes [N, K] into tiles of 64 x 64 codes in the order of an MMA fragment, [w, g, t, s,
    i, j, h] from slow to fast; csrc/formats/weight_tile.h defines the letters."""
    n, k = q.shape
    codes = F.pad(q.view(torch.uint8).int(), (0, -k % 64, 0, -n % 64))
    #                    N: tile w h g              K: tile s j t i
    x = codes.unflatten(1, (-1, 4, 2, 4, 2)).unflatten(0, (-1, 4, 2, 8))
    tn, w, h, g, tk, s, j, t, i = range(9)
    if format in ("int8", "e4m3"):
        x = x.unflatten(s, (2, 2))  # into sh (slow) and sl (fast)
        tn, w, h, g, tk, sh, sl, j, t, i = range(10)
        return x.permute(tn, tk, sh, w, g, t, sl, j, h, i).flatten(2).to(torch.uint8)
    x = (x & 15).permute(tn, tk, w, g, t, s, i, j, h).flatten(2)  # nibble 4 i + 2 j + h
    return (x[..., 0::2] | x[..., 1::2] << 4).to(torch.uint8)


def unpack_weight(packed, n, k, format):
    """The inverse of `pack_weight`. It permutes the indices of a tile as `pack_weight` permutes the
    codes, which gives the position of each code."""
    tiles_n, tiles_k, size = packed.shape
    eight = format in ("int8", "e4m3")
    codes = packed if eight else torch.stack((packed & 15, packed >> 4), -1).flatten(2)
    order = torch.arange(64 * 64, device=packed.device).reshape(64, 64)
    x = order.unflatten(1, (4, 2, 4, 2)).unflatten(0, (4, 2, 8))  # w h g s j t i
    if eight:
        x = x.unflatten(3, (2, 2)).permute(3, 0, 2, 6, 4, 5, 1, 7).flatten()
    else:
        x = x.permute(0, 2, 5, 3, 6, 4, 1).flatten()
    flat = torch.empty_like(codes)
    flat[..., x] = codes
    q = (
        flat.unflatten(-1, (64, 64))
        .transpose(1, 2)
        .reshape(tiles_n * 64, tiles_k * 64)[:n, :k]
        .contiguous()
    )
    if format == "int4":
        return ((q.int() ^ 8) - 8).to(torch.int8)
    return q.view({"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(format, torch.uint8))


def grouped_gemm(
    a,
    b,
    offs,
    *,
    scale_a=None,
    scale_b=None,
    bias=None,
    activation="none",
    out_dtype=None,
    accumulate="precise",
):
    """The product of each group, in float64, rounded once. If b is 2-D, groups are ranges of k and
    the result is [G, M, N]; otherwise groups are ranges of rows of a."""
    x, y = a.double(), b.double()
    if scale_a is not None:
        x, y = x * spread(scale_a, *a.shape), y * spread(scale_b, *b.shape[-2:])
    ends = [0, *offs.tolist()]
    bias = None if bias is None else bias.double().expand(len(ends) - 1, -1)
    act = ACTIVATIONS[activation]

    def plus(product, g):
        return act(product if bias is None else product + bias[g])

    out_dtype = out_dtype or (torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)
    spans = list(zip(ends, ends[1:], strict=False))
    if b.dim() == 2:
        parts = [plus(x[:, lo:hi] @ y[lo:hi], g) for g, (lo, hi) in enumerate(spans)]
        return (
            torch.stack(parts).to(out_dtype)
            if parts
            else x.new_zeros(0, a.shape[0], b.shape[1]).to(out_dtype)
        )
    parts = [plus(x[lo:hi] @ y[g], g) for g, (lo, hi) in enumerate(spans)]
    return torch.cat([*parts, x.new_zeros(a.shape[0] - ends[-1], b.shape[-1])]).to(out_dtype)


def sparse_pack(w):
    """(values, meta) of a 2:4 sparse weight.

    Of each four elements two are stored, in ascending order of position: the non-zeros and, if
    there are fewer than two, the first zeros. meta holds the positions, two bits each."""
    n, k = w.shape
    four = w.float().reshape(n, k // 4, 4)
    place = torch.argsort((four == 0).int(), dim=-1, stable=True)[..., :2].sort(-1).values
    raw = (
        w.contiguous()
        .view(torch.uint8 if w.element_size() == 1 else torch.int16)
        .reshape(n, k // 4, 4)
    )
    values = raw.gather(-1, place).reshape(n, k // 2).view(w.dtype)
    bits = place[..., 0] | place[..., 1] << 2
    bits = F.pad(bits, (0, bits.shape[1] % 2)).unflatten(1, (-1, 2))
    return values, (bits[..., 0] | bits[..., 1] << 4).to(torch.uint8)


def sparse_gemm(a, w, *, scale_a=None, scale_b=None, bias=None, activation="none", out_dtype=None):
    """activation(a @ w^T * scale_a * scale_b + bias), from the unpacked weight w [N, K]."""
    x = a.double() @ w.double().mT
    if scale_a is not None:
        x = x * spread(scale_a, a.shape[0], 1)
    if scale_b is not None:
        x = x * spread(scale_b, 1, w.shape[0])
    if bias is not None:
        x = x + bias.double()
    return ACTIVATIONS[activation](x).to(
        out_dtype or (torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)
    )
