# SPDX-License-Identifier: BSD-3-Clause
"""A reference for float64 that is more accurate than float64 sums, on every CPU and GPU.

PyTorch's float64 product adds terms in the order of its BLAS. On some CPUs, its error is four times
that of the kernel under test. Inside `Exact`, every float64 product and sum is rounded once. So no
result depends on the order of additions, on MKL's code path or on the vector width:

- a product splits its operands into slices of so few bits that the sums of their products are exact
  (Ozaki, Ogita, Oishi, Rump, "Error-free transformations of matrix multiplication by using fast
  routines of matrix multiplication", 2012);
- a sum keeps the rounding of every addition (Knuth's two-sum) in a tree.

Both are as accurate as 63 bits or more. (A long double has as many only on x86.) Gradients of any
order use the same functions.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

BITS = 53  # bits of a float64's significand
# bits of an operand that a product uses, counted from the largest value of its row or column
WANTED = 63


def two_sum(a, b):
    """(a + b rounded, the rounding error)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _power(exponent):
    """2^exponent of a normal number, from its bits, because pow may be off by a rounding."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _scaled(x, exponent):
    """x 2^exponent, rounded only if it is subnormal."""
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)


def _exponent(x):
    """The exponents of x, as integers of 64 bits."""
    return torch.frexp(x)[1].long()


def _slices(x, exponent, bits, dim, largest_last):
    """x as a sum of slices, concatenated along dim. Slice i is a multiple of 2^(exponent - bits i);
    slice 1 is the largest. largest_last: the order of the slices along dim."""
    n, size = -(-WANTED // bits), x.shape[dim]
    assert n <= 6, f"{n} slices: sums of their products need more than {BITS} bits"
    shape = list(x.shape)
    shape[dim] *= n
    out = x.new_empty(shape)
    for i in range(1, n + 1):
        part = out.narrow(dim, (n - i if largest_last else i - 1) * size, size)
        rounds = 1.5 * _power(exponent + (52 - bits * i))  # adding it rounds to the slice's unit
        torch.add(x, rounds, out=part)
        part -= rounds
        if i < n:
            x = x - part
    return out


def _product(a, b):
    """a @ b of float64 matrices, rounded once.

    The products of slices i and j with the same i + j are multiples of one unit. The first slice
    has at most 2^bits units, each of the others at most 2^(bits - 1). So with up to six slices, the
    sum of all products with the same i + j has at most 2^53 units. It is exact, and one product of
    PyTorch computes it.
    """
    k = a.shape[-1]
    if not k or not a.numel() or not b.numel():
        return a @ b
    plain = None  # a @ b by PyTorch, if it has infinities or NaN
    of_rows, of_columns = a.abs().amax(-1, keepdim=True), b.abs().amax(-2, keepdim=True)
    if not (of_rows.isfinite().all() and of_columns.isfinite().all()):
        plain = a @ b
        a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
        of_rows, of_columns = a.abs().amax(-1, keepdim=True), b.abs().amax(-2, keepdim=True)
    row_exponent, column_exponent = _exponent(of_rows), _exponent(of_columns)
    back = None  # the exponent by which the result is scaled back
    if max(x.abs().max().item() for x in (row_exponent, column_exponent)) > 300:
        # slices might overflow or underflow, so the operands are scaled to about 1
        back = row_exponent + column_exponent
        a, b = _scaled(a, -row_exponent), _scaled(b, -column_exponent)
        row_exponent, column_exponent = row_exponent * 0, column_exponent * 0
    bits = (BITS - math.ceil(math.log2(k)) - 1) // 2
    x = _slices(a, row_exponent, bits, -1, largest_last=False)
    y = _slices(b, column_exponent, bits, -2, largest_last=True)
    # With these orders, one product sums all slices with the same i + j. The smallest come first.
    total, lost = x @ y, 0.0
    for width in range(x.shape[-1] - k, 0, -k):
        total, more = two_sum(total, x[..., :width] @ y[..., -width:, :])
        lost = lost + more
    total = total + lost
    if back is not None:
        total = _scaled(total, back)
    return total if plain is None else torch.where(plain.isfinite(), total, plain)


def _total(x, dim, keepdim=False):
    """The sum over one dimension of float64 values, rounded once. `low` collects the rounding
    errors of the additions in `high`."""
    if not x.shape[dim]:
        return x.sum(dim, keepdim=keepdim)
    high, low = x.movedim(dim, -1), None
    while (n := high.shape[-1]) > 1:
        if n % 2:
            high = F.pad(high, (0, 1))
            low = low if low is None else F.pad(low, (0, 1))
        high, more = two_sum(*high.chunk(2, -1))
        low = more if low is None else more + low.chunk(2, -1)[0] + low.chunk(2, -1)[1]
    out = high if low is None else torch.where(high.isfinite(), high + low, high)
    return out.movedim(-1, dim) if keepdim else out.squeeze(-1)


class _Sum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, dim):
        return _total(x, dim, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape), None


def total(x, dim=None, keepdim=False):
    """x.sum(dim, keepdim)."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    if not x.dim():
        return x.clone()
    dims = sorted(d % x.dim() for d in dims)
    for d in dims:
        x = _Sum.apply(x, d)
    return x if keepdim else x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def _as_shape(grad, shape):
    """The gradient of a tensor of this shape that was broadcast."""
    extra = grad.dim() - len(shape)
    dims = [
        *range(extra),
        *(extra + d for d, n in enumerate(shape) if n == 1 and grad.shape[extra + d] != 1),
    ]
    return total(grad, dims, keepdim=True).reshape(shape) if dims else grad


class _MatMul(torch.autograd.Function):
    @staticmethod
    def vmap(info, in_dims, a, b):
        both = tuple(zip((a, b), in_dims))
        most = max(x.dim() - (dim is not None) for x, dim in both)
        a, b = (
            # the batch goes before the dimensions of the operand that has more of them
            x if dim is None else x.movedim(dim, 0)[(slice(None), *[None] * (most - x.dim() + 1))]
            for x, dim in both
        )
        return _MatMul.apply(a, b), 0

    @staticmethod
    def forward(a, b):
        return _product(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        da = _as_shape(product(grad, b.mT), a.shape) if ctx.needs_input_grad[0] else None
        db = _as_shape(product(a.mT, grad), b.shape) if ctx.needs_input_grad[1] else None
        return da, db


def product(a, b):
    """a @ b of float64 tensors."""
    x, y = (a if a.dim() > 1 else a[None]), (b if b.dim() > 1 else b[:, None])
    out = _MatMul.apply(x, y)
    out = out if b.dim() > 1 else out.squeeze(-1)
    return out if a.dim() > 1 else out.squeeze(-1 if b.dim() == 1 else -2)


# ---- PyTorch's functions by these products and sums ----------------------------------------------


def _linear(x, weight, bias=None):
    out = product(x, weight.mT)
    return out if bias is None else out + bias


def _addmm(c, a, b, *, beta=1, alpha=1):
    return beta * c + alpha * product(a, b)


def _mean(x, dim=None, keepdim=False):
    out = total(x, dim, keepdim)
    return out / (x.numel() // max(out.numel(), 1)) if out.numel() else out


def _logsumexp(x, dim, keepdim=False):
    peak = x.detach().amax(dim, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    out = peak + torch.log(total(torch.exp(x - peak), dim, keepdim=True))
    return out if keepdim else out.squeeze(dim)


def _softmax(x, dim):
    e = torch.exp(x - x.detach().amax(dim, keepdim=True))
    return e / total(e, dim, keepdim=True)


def _log_softmax(x, dim):
    x = x - x.detach().amax(dim, keepdim=True)
    return x - torch.log(total(torch.exp(x), dim, keepdim=True))


def _rms_norm(x, shape, weight=None, eps=None):
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = x * torch.rsqrt(_mean(x * x, -1, keepdim=True) + eps)
    return out if weight is None else out * weight


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    out = _rms_norm(x - _mean(x, -1, keepdim=True), shape, weight, eps)
    return out if bias is None else out + bias


def _cross_entropy(
    logits, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0
):
    """Cross entropy of logits [N, C] and class indices."""
    log_p = _log_softmax(logits, -1)
    kept = target != ignore_index
    w = torch.ones_like(logits[0]) if weight is None else weight
    share = w[target.clamp(0, len(w) - 1)].where(kept, 0.0)
    at = log_p.gather(-1, target.clamp(0, len(w) - 1)[:, None])[:, 0]
    loss = (-share * at).where(kept, 0.0)
    if label_smoothing:
        even = total(-log_p * w, -1).where(kept, 0.0) / len(w)
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    if reduction == "none":
        return loss
    return total(loss) if reduction == "sum" else total(loss) / total(share)


_INSTEAD = {
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__), product
    ),
    **dict.fromkeys((torch.Tensor.mm, torch.Tensor.bmm), product),
    torch.Tensor.__rmatmul__: lambda b, a: product(a, b),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
    F.linear: _linear,
    **dict.fromkeys((torch.sum, torch.Tensor.sum), total),
    **dict.fromkeys((torch.mean, torch.Tensor.mean), _mean),
    **dict.fromkeys((torch.logsumexp, torch.Tensor.logsumexp), _logsumexp),
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.log_softmax, torch.Tensor.log_softmax, F.log_softmax), _log_softmax),
    **dict.fromkeys((torch.rms_norm, F.rms_norm), _rms_norm),
    F.layer_norm: _layer_norm,
    F.cross_entropy: _cross_entropy,
}
# arguments that PyTorch adds by itself, with their defaults None and 3
_FILLED_IN = ("size_average", "reduce", "dtype", "_stacklevel")
# Functions that add float64 values in their own order. Inside `Exact` they raise an error instead
# of being inexact.
_REFUSED = (
    torch.einsum,
    torch.baddbmm,
    F.scaled_dot_product_attention,
    torch.var,
    torch.Tensor.var,
    torch.cumsum,
    torch.Tensor.cumsum,
    torch.dot,
    torch.Tensor.dot,
    torch.mv,
    torch.Tensor.mv,
    F.nll_loss,
)


class Exact(TorchFunctionMode):
    """A mode in which float64 products and sums, and functions made of them, are rounded once.
    Other dtypes are unchanged."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func in _INSTEAD:
                given = {
                    name: x
                    for name, x in kwargs.items()
                    if name not in _FILLED_IN or x not in (None, 3)
                }
                return _INSTEAD[func](*args, **given)
            if func in _REFUSED:
                raise NotImplementedError(
                    f"tests/exact.py has no {func.__name__}: write it there by product and total"
                )
        return func(*args, **kwargs)


class Judge:
    """A module of reference functions that run inside `Exact`."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if not callable(found) or isinstance(found, type):
            return found

        @functools.wraps(found)
        def judged(*args, **kwargs):
            with Exact():
                return found(*args, **kwargs)

        return judged
