"""gemm: the public function, its fake functions, gradients, autocast rule and FLOP formulas."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from .._library import (
    apply_of,
    autocast,
    autograd,
    bare,
    below_autocast,
    below_autograd,
    fake,
    flop_formula,
    is_grad_enabled,
    ops,
    public,
    refuse_backward,
    twin,
)
from . import laws

__all__ = ["Activation", "Precision", "gemm"]

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32"]

_below, _below_fwd = twin("gemm"), twin("gemm_fwd")
_call, _call_short = public("gemm", _below), public("gemm", twin("gemm", short=True))
_float32, _fp32_precision_of = torch.float32, torch._C._get_fp32_precision_getter
_bare = bare(ops.gemm.default)
_bare_act_bwd = bare(ops.gemm_act_bwd.default)


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    fp32_precision: Precision | None = None,
) -> Tensor:
    """Matrix product with what usually follows it, in one pass over the result.

    ``out = activation(alpha * (a @ b) + beta * c + bias)``

    All of it up to and including the activation is computed in float32 (float64 for float64 inputs)
    and rounded once.

    Args:
        a: [..., M, K] float32, bfloat16, float16 or float64. Any strides: a transposed view costs
            no copy.
        b: [K, N] or [..., K, N], a's dtype, any strides. Batch dimensions broadcast as in
            ``torch.matmul``; both operands have at least two dimensions.
        bias: [N] in a's dtype or out_dtype.
        c: a's dtype or out_dtype; broadcasts to the result [..., M, N] and never enlarges it.
            With ``beta=0`` it is not read and may hold anything.
        alpha: factor of the product; unless a is float64 a number that float32 holds.
        beta: factor of c, likewise.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (x/2 (1 + erf(x / sqrt 2))), ``"gelu_tanh"``
            (x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))) or ``"silu"`` (x / (1 + exp(-x))).
        out_dtype: dtype of the result: a's dtype (the default) or float32.
        fp32_precision: ``"ieee"`` or ``"tf32"``, for float32 on CUDA; None takes torch's own
            setting (``torch.backends.cuda.matmul.fp32_precision``). The CPU always computes ieee
            float32.

    Returns:
        [..., M, N] contiguous. K = 0 gives ``activation(beta * c + bias)``.

    Gradients: a, b, bias and c, each in its own dtype, summed over broadcast dimensions in float32.
    Without an activation the op is twice differentiable; with one a second backward raises
    NotImplementedError. A float32 gradient of a 16-bit product (``out_dtype=torch.float32``) is
    rounded to the inputs' dtype before it is multiplied.

    Under autocast a, b, bias and c are cast; out_dtype, where given, still is the dtype of the
    result.

    Raises:
        ValueError: a shape, dtype, device, activation name or precision that the op does not take;
            the text names the argument, what was expected and what was given.

    The loops are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix
    Multiplication" (2008).
    """
    if fp32_precision is None:
        tf32 = a.dtype == _float32 and a.is_cuda and _torch_allows_tf32()
        fp32_precision = "tf32" if tf32 else "ieee"
    # A tensor that equals a default is no default: the op refuses it where it wants a gradient.
    plain = type(alpha) in (float, int) and type(beta) in (float, int) and alpha == 1 and beta == 1
    plain = plain and activation == "none" and fp32_precision == "ieee"
    if plain and bias is None and c is None and out_dtype is None:
        return _call_short(a, b)
    return _call(a, b, bias, c, alpha, beta, activation, out_dtype, fp32_precision)


def _torch_allows_tf32() -> bool:  # torch.backends.cuda.matmul.fp32_precision, without 0.6 us of attributes
    return _fp32_precision_of("cuda", "matmul") == "tf32"


# What torch.compiler.assume_constant_result sets, which would import all of torch._dynamo to set
# it. Dynamo can trace the older allow_tf32, but that raises where the setting was made through
# fp32_precision.
setattr(_torch_allows_tf32, "_dynamo_marked_constant", True)  # noqa: B010 (typed as a function)


# ---- fake functions ------------------------------------------------------------------------------


@fake("gemm")
def _gemm_fake(
    a,
    b,
    bias=None,
    c=None,
    alpha=1.0,
    beta=1.0,
    activation="none",
    out_dtype=None,
    fp32_precision="ieee",
):
    laws.is_float("gemm", "a", a)
    laws.law(a.dim() >= 2, "gemm", "a must have at least 2 dimensions, got ", a.dim())
    laws.same_dtype("gemm", "b", b, "a", a)
    laws.law(b.dim() >= 2, "gemm", "b must have at least 2 dimensions, got ", b.dim())
    rows, columns = b.shape[-2], a.shape[-1]
    text = ("b has ", rows, " rows, a has ", columns, " columns; they must match")
    laws.law(rows == columns, "gemm", *text)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    if bias is not None:
        laws.has_shape("gemm", "bias", bias, shape[-1:])
    if c is not None:
        fits = c.dim() <= len(shape)
        text = ("c must broadcast to the result's shape ", list(shape), ", got ", list(c.shape))
        laws.law(fits, "gemm", *text)
        for got, want in zip(reversed(c.shape), reversed(shape), strict=False):
            laws.law(got == 1 or got == want, "gemm", *text)
    known = activation in get_args(Activation)
    text = ("activation must be none, relu, gelu, gelu_tanh or silu, got '", activation, "'")
    laws.law(known, "gemm", *text)
    return a.new_empty(shape, dtype=a.dtype if out_dtype is None else out_dtype)


@fake("gemm_fwd")
def _gemm_fwd_fake(a, b, bias=None, c=None, alpha=1.0, beta=1.0, activation="none", *rest):
    out = _gemm_fake(a, b, bias, c, alpha, beta, activation, *rest)
    return out, (out.new_empty(0) if activation in ("none", "relu") else torch.empty_like(out))


@fake("gemm_act_bwd")
def _gemm_act_bwd_fake(grad_out, saved, activation):
    laws.has_shape("gemm_act_bwd", "saved", saved, grad_out.shape)
    return grad_out.new_empty(grad_out.shape)


# ---- gradients -----------------------------------------------------------------------------------


def _sum_to(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Sums x over the dimensions that broadcasting added to a tensor of `shape`: in float32,
    rounded once to `dtype`.
    """
    added = x.dim() - len(shape)
    dims = list(range(added)) + [added + i for i, s in enumerate(shape) if s == 1 and x.shape[added + i] != 1]
    if dims:
        x = x.sum(dims, keepdim=True, dtype=x.dtype if x.dtype is torch.float64 else torch.float32)
    return x.reshape(shape).to(dtype)


def _summed_product(x: Tensor, y: Tensor, how: tuple, shape: torch.Size) -> Tensor:
    """x @ y of one dtype, summed to `shape`: in float32 until the sum is complete."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if batch == shape[:-2]:
        return _bare(x, y, *how)
    acc = x.dtype if x.dtype is torch.float64 else torch.float32
    return _sum_to(_bare(x, y, *how[:5], acc, how[6]), shape, x.dtype)


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        a,
        b,
        bias=None,
        c=None,
        alpha=1.0,
        beta=1.0,
        activation="none",
        out_dtype=None,
        fp32_precision="ieee",
    ):
        if activation == "none" or activation == "relu":
            out = _below(a, b, bias, c, alpha, beta, activation, out_dtype, fp32_precision)
            saved = out if activation == "relu" else None
        else:
            out, saved = _below_fwd(a, b, bias, c, alpha, beta, activation, out_dtype, fp32_precision)
        # An operand is kept only where the other's gradient reads it; of bias and c the shape and
        # dtype are enough.
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, saved)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.c = None if c is None else (c.shape, c.dtype)
        ctx.call = a.shape, b.shape, a.dtype, alpha, beta, activation, fp32_precision
        return out

    @staticmethod
    def backward(ctx, grad):
        # Under create_graph the products below are differentiable ops themselves; otherwise they
        # skip that road. Tensors come before the guards: under checkpoint, reading them recomputes.
        tensors = ctx.saved_tensors
        if is_grad_enabled():
            with below_autocast():
                return _Gemm._gradients(ctx, grad, *tensors)
        with below_autocast(), below_autograd():
            return _Gemm._gradients(ctx, grad, *tensors)

    @staticmethod
    def _gradients(ctx, grad, a, b, saved):  # grad [..., M, N] in the dtype of the result
        shape_a, shape_b, dtype, alpha, beta, activation, fp32_precision = ctx.call
        needs_a, needs_b, needs_bias, needs_c = ctx.needs_input_grad[:4]
        grad_a = grad_b = grad_bias = grad_c = None
        if saved is not None:
            if is_grad_enabled() and not saved.requires_grad:
                # The preact has no history, so that a second backward must be stopped at the op
                # that reads it.
                saved = saved.detach().requires_grad_()
            grad = _bare_act_bwd(grad, saved, activation)

        g = grad if grad.dtype is dtype else grad.to(dtype)
        how = None, None, alpha, 1.0, "none", None, fp32_precision
        if len(shape_b) == 2:  # the sum over the batch is part of the product of grad_b
            if needs_a:
                grad_a = _bare(g, b.mT, *how)
            if needs_b:
                if len(shape_a) > 2:
                    # Not flatten: below autograd it has no rule for a batch of gradients (vmap over a backward).
                    rows = math.prod(shape_a[:-1])
                    a, g = a.reshape(rows, a.shape[-1]), g.reshape(rows, g.shape[-1])
                grad_b = _bare(a.mT, g, *how)
        else:
            if needs_a:
                grad_a = _summed_product(g, b.mT, how, shape_a)
            if needs_b:
                grad_b = _summed_product(a.mT, g, how, shape_b)
        if needs_bias:
            grad_bias = _sum_to(grad, *ctx.bias)
        if needs_c and beta == 0:  # c was not read, so not even an infinite gradient reaches it
            grad_c = grad.new_zeros(ctx.c[0], dtype=ctx.c[1])
        elif needs_c:
            grad_c = _sum_to(grad if beta == 1 else beta * grad, *ctx.c)
        return grad_a, grad_b, grad_bias, grad_c, None, None, None, None, None


_apply = apply_of(_Gemm)


@autograd("gemm")
def _gemm_autograd(a, b, bias=None, c=None, *rest):
    if is_grad_enabled() and (
        a.requires_grad
        or b.requires_grad
        or (bias is not None and bias.requires_grad)
        or (c is not None and c.requires_grad)
    ):
        return _apply(a, b, bias, c, *rest)
    return _below(a, b, bias, c, *rest)


refuse_backward("gemm_fwd", "gemm_fwd has no backward; gpukern::gemm has")
refuse_backward("gemm_act_bwd", "gemm: with an activation it is not twice differentiable")


# ---- autocast ------------------------------------------------------------------------------------


def _cast(dtype, args, to):
    return *(to(x, dtype) for x in args[:4]), *args[4:]


autocast("gemm", _cast)
autocast("gemm_fwd", _cast)


# ---- FLOPs ---------------------------------------------------------------------------------------


@flop_formula("gemm", "gemm_fwd")
def _gemm_flops(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """2 M N K of each product of the batch."""
    batch = torch.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    return 2 * math.prod(batch) * a_shape[-2] * a_shape[-1] * b_shape[-1]
