# SPDX-License-Identifier: BSD-3-Clause
"""gemm: the public function and its declaration: fake function, gradients, autocast rule, FLOPs,
vmap."""

import math
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .._library import NAMESPACE
from . import batching, fakes, gradients, parallel
from .define import define_op, is_transposed
from .keywords import refuse_unknown

__all__ = ["Activation", "Precision", "gemm"]

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32"]

_float32, _fp32_precision_of = torch.float32, torch._C._get_fp32_precision_getter


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *more: NoReturn,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    fp32_precision: Precision | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Matrix product with scale, bias, another addend and an activation, in one kernel.

    ``out = activation(alpha * (a @ b) + beta * c + bias)``

    Everything is computed in float32 (float64 for float64 inputs), and the result is rounded once.

    Args:
        a: [..., M, K] float32, bfloat16, float16 or float64, any strides. A transposed view is not
            copied.
        b: [K, N] or [..., K, N], a's dtype, any strides. Batch dimensions broadcast as in
            ``torch.matmul``. Both operands have at least two dimensions.
        bias: [N] in a's dtype or out_dtype.
        c: in a's dtype, or float32 for a 16-bit a. It broadcasts to the result [..., M, N] and
            never enlarges it. With ``beta=0`` it is not read and may hold anything.
        alpha: factor of the product. Unless a is float64, it must be within float32's range.
        beta: factor of c, likewise.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (x/2 (1 + erf(x / sqrt 2))), ``"gelu_tanh"``
            (x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))) or ``"silu"`` (x / (1 + exp(-x))).
        out_dtype: dtype of the result: a's dtype (the default) or float32.
        fp32_precision: ``"ieee"`` or ``"tf32"``, for float32 on CUDA. None takes torch's setting,
            ``torch.backends.cuda.matmul.fp32_precision``. The CPU always computes ieee float32.

    Returns:
        [..., M, N] contiguous. K = 0 gives ``activation(beta * c + bias)``.

    Gradients: a, b, bias and c, each in its own dtype, summed over broadcast dimensions in float32.
    The op is twice differentiable, also with an activation. With ``out_dtype=torch.float32`` and
    16-bit inputs, the float32 gradient of the result is rounded to the inputs' dtype before it is
    multiplied.

    Under autocast a, b, bias and c are cast. If out_dtype is given, it remains the dtype of the
    result.

    Raises:
        ValueError: a shape, dtype, device, activation name or precision that the op does not take.
            The text names the argument, what was expected and what was given.

    The loops are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix
    Multiplication" (2008).
    """
    if more or unknown:
        refuse_unknown(gemm, unknown, more)
    if fp32_precision is None:
        tf32 = getattr(a, "is_cuda", False) and a.dtype == _float32 and _torch_allows_tf32()
        fp32_precision = "tf32" if tf32 else "ieee"
    return _gemm.call(a, b, bias, c, alpha, beta, activation, out_dtype, fp32_precision)


# torch.backends.cuda.matmul.fp32_precision, without 0.6 us of attribute look-ups
def _torch_allows_tf32() -> bool:
    return _fp32_precision_of("cuda", "matmul") == "tf32"


# This is what torch.compiler.assume_constant_result sets, without its import of torch._dynamo.
# Dynamo can trace the older allow_tf32, but reading allow_tf32 raises if the user set
# fp32_precision.
setattr(_torch_allows_tf32, "_dynamo_marked_constant", True)  # noqa: B010 (typed as a function)


# ---- fake functions ------------------------------------------------------------------------------


def _symbolic(a, b, activation, out_dtype, **_):
    rows, columns = b.shape[-2], a.shape[-1]
    text = f"{NAMESPACE}::gemm: b has {rows} rows, a has {columns} columns; they must match"
    torch._check_with(ValueError, rows == columns, lambda: text)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = a.new_empty(
        (*batch, a.shape[-2], b.shape[-1]), dtype=a.dtype if out_dtype is None else out_dtype
    )
    return out, (out.new_empty(0) if activation in ("none", "relu") else torch.empty_like(out))


def _act_bwd_symbolic(grad_out, **_):
    return (grad_out.new_empty(grad_out.shape),)


# ---- gradients -----------------------------------------------------------------------------------


def _sum_to(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Sums x over the dimensions that broadcasting added to a tensor of `shape`, in float32, and
    rounds once to `dtype`."""
    added = x.dim() - len(shape)
    dims = list(range(added)) + [
        added + i for i, s in enumerate(shape) if s == 1 and x.shape[added + i] != 1
    ]
    if dims:
        x = x.sum(dims, keepdim=True, dtype=fakes.stats_dtype(x))
    return x.reshape(shape).to(dtype)


def _summed_product(x: Tensor, y: Tensor, shape: torch.Size, how: dict) -> Tensor:
    """x @ y, summed over the dimensions that broadcasting added to `shape`. The sum is float32 and
    is rounded once."""
    if torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]) == shape[:-2]:
        return _gemm.call_named(a=x, b=y, **how)
    acc = fakes.stats_dtype(x)
    return _sum_to(_gemm.call_named(a=x, b=y, **how, out_dtype=acc), shape, x.dtype)


def _reads_preact(args) -> bool:
    # relu's derivative follows from its output, so preact is not needed
    return len(args) > 2 and _gemm.value(args, "activation") not in ("none", "relu")


_KEPT = {"forms": ()}  # if both a and b are kept, backward reads shapes and dtypes from them


def _save(needs, args, out, preact):
    """Keeps an operand only if the other operand's gradient reads it. For tensors that are not
    kept, `forms` has shape and dtype."""
    a, b = args[:2]
    if len(args) == 2 and needs[0] and needs[1]:
        return (a, b, None), _KEPT
    forms: list = [(a.shape, a.dtype), (b.shape, is_transposed(b))]
    if len(args) == 2:
        return (a if needs[1] else None, b if needs[0] else None, None), {"forms": forms}
    forms += [x if x is None else (x.shape, x.dtype) for x in args[2:4]]
    activation = _gemm.value(args, "activation")
    activated = None if activation == "none" else out if activation == "relu" else preact
    return (a if needs[1] else None, b if needs[0] else None, activated), {"forms": forms}


def _backward(
    needs,
    a,
    b,
    activated,
    forms,
    alpha,
    beta,
    activation,
    fp32_precision,
    grad_out,
    grad_preact,
    **_,
):
    """grad_out is [..., M, N] in the dtype of the result, grad_preact likewise. grad_preact arises
    in a second derivative, which differentiates through the value before the activation.
    """
    if forms:
        (shape_a, dtype), (shape_b, transposed) = forms[:2]
    else:
        shape_a, dtype, shape_b, transposed = a.shape, a.dtype, b.shape, is_transposed(b)
    grad, made = grad_out, {}
    if activated is not None and grad is not None:
        grad = _gemm_act_bwd.call_named(grad_out=grad, saved=activated, activation=activation)
    if grad_preact is not None and activation not in ("none", "relu"):
        grad = grad_preact if grad is None else grad + grad_preact

    how = {"alpha": alpha, "fp32_precision": fp32_precision}
    g = grad if grad.dtype is dtype else grad.to(dtype)
    one = len(shape_b) == 2
    if "a" in needs and one:
        made["a"] = _gemm.call_named(a=g, b=b.mT, **how)
    elif "a" in needs:
        made["a"] = _summed_product(g, b.mT, shape_a, how)
    if "b" in needs:
        if one and len(shape_a) > 2:  # one product over the rows of all batches sums over the batch
            rows = parallel.as_rows(a, g)
            one = rows is not None
            a, g = rows if one else (a, g)
        if one and transposed:  # the gradient is stored as b is: the weight of a linear layer
            made["b"] = _gemm.call_named(a=g.mT, b=a, **how).mT
        elif one:
            made["b"] = _gemm.call_named(a=a.mT, b=g, **how)
        else:
            made["b"] = _summed_product(a.mT, g, shape_b, how)
    if "bias" in needs:
        made["bias"] = _sum_to(grad, *forms[2])
    if "c" in needs and beta == 0:  # c was not read, so not even an infinite gradient reaches it
        shape, dtype = forms[3]
        made["c"] = grad.new_zeros(shape, dtype=dtype)
    elif "c" in needs:
        made["c"] = _sum_to(grad if beta == 1 else beta * grad, *forms[3])
    return made


def _save_of_act_bwd(needs, args, grad_in):
    return args[:2], {}


def _backward_of_act_bwd(needs, grad_out, saved, activation, grad_grad_in, **_):
    """The gradients of grad_out * f'(saved). That of saved uses f'' below, in PyTorch operations,
    so that autograd can differentiate it further."""
    made = {}
    if "grad_out" in needs:
        made["grad_out"] = _gemm_act_bwd.call_named(
            grad_out=grad_grad_in, saved=saved, activation=activation
        )
    if "saved" in needs:
        acc = fakes.stats_dtype(saved)
        second = _second_derivative(activation, saved.to(acc))
        made["saved"] = (grad_grad_in.to(acc) * grad_out.to(acc) * second).to(saved.dtype)
    return made


def _second_derivative(activation: str, x: Tensor) -> Tensor:
    """f''(x). x is clamped to a range outside which f'' is 0 in float64. Without the clamp a factor
    may be inf, and inf * 0 is NaN."""
    if activation == "silu":
        x = x.clamp(-800, 800)
        s = x.sigmoid()
        return s * (-x).sigmoid() * (2 + x * (1 - 2 * s))
    if activation == "gelu":
        x = x.clamp(-40, 40)
        return (2 - x * x) * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if activation == "gelu_tanh":
        x = x.clamp(-40, 40)
        slope = math.sqrt(2 / math.pi)
        u, du, ddu = (
            slope * (x + 0.044715 * x**3),
            slope * (1 + 3 * 0.044715 * x * x),
            slope * 6 * 0.044715 * x,
        )
        sech2 = 4 * (2 * u).sigmoid() * (-2 * u).sigmoid()  # 1 - tanh(u)^2 without its cancellation
        return sech2 * (du + 0.5 * x * (ddu - 2 * torch.tanh(u) * du * du))
    return torch.zeros_like(x)


# ---- vmap ----------------------------------------------------------------------------------------


def _fold(size, batched, a, b, bias, c, activation, **_):
    """Adds a batch dimension. A batch of biases becomes a c whose rows are all the same."""
    changed, addend = {}, c if "c" in batched else None
    if "bias" in batched:
        if c is not None:
            return None
        changed, addend = {"bias": None, "beta": 1.0}, bias[:, None]
    operands = {"a": a, "b": b, "c": addend}
    dims = max(x.dim() - (name in batched) for name, x in (("a", a), ("b", b)))
    if dims + 1 > batching.MAX_DIMS:
        return None
    if addend is not None and not batched & {"a", "b"}:  # c never enlarges the result
        operands["a"] = a.expand(size, *a.shape)
    for name, x in operands.items():
        if x is not None and (name in batched or x is addend or (name == "a" and x is not a)):
            changed[name] = x.reshape(size, *(1,) * (dims + 1 - x.dim()), *x.shape[1:])
    return (
        changed,
        lambda name, x: None if name == "preact" and activation in ("none", "relu") else x,
    )


# ---- FLOPs ---------------------------------------------------------------------------------------


def _flops(a, b, **_) -> int:
    """2 M N K of each product of the batch."""
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * math.prod(batch) * a[-2] * a[-1] * b[-1]


_gemm = define_op(
    "gemm",
    symbolic=_symbolic,
    public=gemm,
    save=_save,
    saved=("a", "b", "activated"),
    reads_all=_reads_preact,
    backward=_backward,
    refuse_fwd="gemm_fwd has no backward; gpukern::gemm has",
    autocast=("a", "b", "bias", "c"),
    flops=_flops,
    fold=_fold,
)
_gemm_act_bwd = define_op(
    "gemm_act_bwd",
    symbolic=_act_bwd_symbolic,
    save=_save_of_act_bwd,
    saved=("grad_out", "saved"),
    backward=_backward_of_act_bwd,
    fold=batching.everywhere,
)


# ---- two matrices and no other argument ----------------------------------------------------------


def _forward_of_two(ctx, a: Tensor, b: Tensor) -> Tensor:
    need_a, need_b = ctx.needs_input_grad
    ctx.save_for_backward(a if need_b else None, b if need_a else None)
    ctx.transposed = need_b and is_transposed(b)
    return _gemm.below(a, b)


def _gradients_of_two(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad
    product = _seen_product if gradients.seen((grad, a, b)) else _gemm.below
    da = product(grad, b.mT) if need_a else None
    if not need_b:
        return da, None
    if ctx.transposed:  # the gradient is stored as b is: the weight of a linear layer
        return da, product(grad.mT, a).mT
    return da, product(a.mT, grad)


def _seen_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b that a second derivative, a compiler, a mode or a subclass may see."""
    return _gemm.call_named(a=a, b=b)


def _are_two(args: tuple) -> bool:
    if len(args) != 2:
        return False
    a, b = args  # a generator over args would take 0.5 us more
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == 2 and b.dim() == 2


gradients.write_out(_gemm, _are_two, _forward_of_two, _gradients_of_two)
