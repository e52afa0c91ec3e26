# SPDX-License-Identifier: BSD-3-Clause
"""Elementwise and row operations in Triton: add, ReLU, GELU, bias + GELU + dropout, softmax, layer
norm; forward alone. Needs triton and a GPU, or TRITON_INTERPRET=1. Sums are float32; a row is read
once and stays on chip, 65536 elements at most."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of a program of an elementwise kernel


@triton.jit
def add_kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    tl.store(out + at, tl.load(a + at, mask=here) + tl.load(b + at, mask=here), mask=here)


@triton.jit
def relu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    value = tl.load(x + at, mask=here)
    tl.store(out + at, tl.where(value < 0, 0.0, value), mask=here)  # NaN stays


@triton.jit
def gelu_of(x):
    """x times the normal distribution's integral up to x."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    tl.store(
        out + at,
        gelu_of(tl.load(x + at, mask=here).to(tl.float32)).to(out.dtype.element_ty),
        mask=here,
    )


@triton.jit
def bias_gelu_dropout_kernel(x, bias, out, n, cols, p, seed, BLOCK: tl.constexpr):
    """Element i is kept if the seed's uniform random number i is at least p. The numbers are made by
    Philox, so no mask is in memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    value = tl.load(x + at, mask=here).to(tl.float32) + tl.load(bias + at % cols, mask=here).to(
        tl.float32
    )
    kept = tl.rand(seed, at) >= p
    result = tl.where(kept, gelu_of(value) / (1.0 - p), 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def softmax_kernel(x, out, cols, COLS: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * cols, tl.arange(0, COLS)
    value = tl.load(x + row + col, mask=col < cols, other=float("-inf")).to(tl.float32)
    weight = tl.exp(value - tl.max(value, 0))
    tl.store(
        out + row + col, (weight / tl.sum(weight, 0)).to(out.dtype.element_ty), mask=col < cols
    )


@triton.jit
def layer_norm_kernel(x, weight, bias, out, cols, eps, COLS: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * cols, tl.arange(0, COLS)
    value = tl.load(x + row + col, mask=col < cols, other=0.0).to(tl.float32)
    # lanes past the row stay out of the variance
    away = tl.where(col < cols, value - tl.sum(value, 0) / cols, 0.0)
    scale = tl.rsqrt(tl.sum(away * away, 0) / cols + eps)
    w = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
    b = tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(out + row + col, (away * scale * w + b).to(out.dtype.element_ty), mask=col < cols)


def elementwise(kernel, *operands: torch.Tensor) -> torch.Tensor:
    """One of the kernels whose operands all have the result's shape and dtype."""
    operands = [x.contiguous() for x in operands]
    out = torch.empty_like(operands[0])
    if out.numel():
        kernel[(triton.cdiv(out.numel(), BLOCK),)](*operands, out, out.numel(), BLOCK)
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return elementwise(add_kernel, a, b)


def relu(x: torch.Tensor) -> torch.Tensor:
    return elementwise(relu_kernel, x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return elementwise(gelu_kernel, x)


def bias_gelu_dropout(x: torch.Tensor, bias: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """dropout(gelu(x + bias), p): x [..., N], bias [N], 0 <= p < 1. The same seed drops the same
    elements."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        bias_gelu_dropout_kernel[grid](
            x, bias.contiguous(), out, out.numel(), bias.numel(), p, seed, BLOCK
        )
    return out


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(x contiguous, its result, rows, lanes of a row's program)."""
    x = x.contiguous()
    return (
        x,
        torch.empty_like(x),
        x.numel() // max(x.shape[-1], 1),
        triton.next_power_of_2(max(x.shape[-1], 1)),
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    x, out, rows, lanes = rows_of(x)
    if rows:
        softmax_kernel[(rows,)](x, out, x.shape[-1], lanes)
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Over the last dimension, which weight and bias have."""
    x, out, rows, lanes = rows_of(x)
    if rows:
        layer_norm_kernel[(rows,)](
            x, weight.contiguous(), bias.contiguous(), out, x.shape[-1], eps, lanes
        )
    return out
