# SPDX-License-Identifier: BSD-3-Clause
"""dropout, dropout_add, bias_gelu_dropout and dropout_mask: the public functions and their
declarations."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .._library import NAMESPACE
from . import autocast
from .define import define_op
from .wrong_types import refuse_non_tensors

__all__ = ["bias_gelu_dropout", "dropout", "dropout_add", "dropout_mask"]


def dropout(x: Tensor, p: float, seed: Tensor | None = None) -> Tensor:
    """Each element of x is 0 with probability p, else x / (1 - p): in float32, rounded once
    (float64 for float64).

    Only x's shape, p and the seed decide which elements are kept. The mask is the same on the CPU
    and on CUDA, in eager and compiled code and in a captured graph. Backward computes the mask
    again, so none is stored. A dropped value is 0, also if x is NaN.

    Args:
        x: [..., N], float32, bfloat16, float16 or float64. Leading dimensions may have any strides;
            If the last dimension is not contiguous, x is copied first.
        p: 0 to 1.
        seed: int64 [2] on x's device, (seed, offset). By default both are drawn from torch's
            generator of the device, unless p = 0. The numbers are read on the device: if you write
            others into the tensor, a captured graph draws another mask.

    Returns:
        x's shape and dtype, contiguous.

    Gradients: x, as often as asked for.

    Raises:
        ValueError: p outside 0 to 1; a seed that is not int64 [2] on x's device.

    Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, "Dropout" (2014). Random numbers
    are Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
    (2011).
    """
    return _of_rows(lambda x: _dropout.call(x, p, drawn(x, p) if seed is None else seed), x)


def dropout_add(x: Tensor, residual: Tensor, p: float, seed: Tensor | None = None) -> Tensor:
    """dropout(x) + residual in one pass over both, rounded once.

    Args:
        x: [..., N], float32, bfloat16, float16 or float64.
        residual: x's shape and dtype.
        p: 0 to 1.
        seed: as of `dropout`.

    Returns:
        x's shape and dtype, contiguous.

    Gradients: x and residual, as often as asked for. Under autocast both take the wider of their
    dtypes.

    Raises:
        ValueError: shapes or dtypes that do not match; p outside 0 to 1; a seed that is not int64
            [2] on x's device.

    Srivastava and others, "Dropout" (2014).
    """
    return _of_rows(
        lambda x, y: _dropout_add.call(x, y, p, drawn(x, p) if seed is None else seed), x, residual
    )


def bias_gelu_dropout(
    x: Tensor,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None = None,
    *,
    approximate: Literal["none", "tanh"] = "none",
) -> Tensor:
    """dropout(gelu(x + bias)) in one pass over x: in float32, rounded once (float64 for float64).

    Args:
        x: [..., N], float32, bfloat16, float16 or float64.
        bias: [N] in x's dtype, or None.
        p: 0 to 1.
        seed: as of `dropout`.
        approximate: ``"none"``, x/2 (1 + erf(x / sqrt 2)), or ``"tanh"``, x/2 (1 + tanh(sqrt(2/pi)
            (x + 0.044715 x^3))).

    Returns:
        x's shape and dtype, contiguous.

    Gradients: x and bias. Backward reads x and the gradient of the result. The gradient of bias is
    the sum of x's over all rows. Not twice differentiable. Under autocast bias is cast to x's
    dtype.

    Raises:
        ValueError: shapes or dtypes that do not match; p outside 0 to 1; an unknown approximate; a
            seed that is not int64 [2] on x's device.

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), arXiv:1606.08415; Srivastava and
    others, "Dropout" (2014).
    """
    return _bias_gelu_dropout.call(x, bias, p, drawn(x, p) if seed is None else seed, approximate)


def dropout_mask(
    shape: Sequence[int], p: float, seed: Tensor, device: torch.device | str | None = None
) -> Tensor:
    """The mask of `dropout`, `dropout_add` and `bias_gelu_dropout` for an x of this shape: bool,
    true where an element is kept.

    Args:
        shape: x's shape.
        p: 0 to 1.
        seed: int64 [2], (seed, offset).
        device: device of the mask, by default the seed's.
    """
    refuse_non_tensors(f"{NAMESPACE}::dropout_mask", seed=seed)
    device = seed.device if device is None else device
    return dropout(torch.ones(tuple(shape), device=device), p, seed.to(device)) != 0


def drawn(x: Tensor, p: float = 1.0) -> Tensor | None:
    """A seed drawn from torch's generator of x's device. None if x is no tensor: the op then raises
    the error.

    With p = 0 nothing is drawn. As with F.dropout, the generator's state does not change, and vmap
    sees no random operation. Under torch.compile p is a constant of the graph in any case, so the
    comparison causes no compilation of its own.
    """
    if not isinstance(x, Tensor):
        return None
    if isinstance(p, (int, float)) and p == 0:
        return torch.zeros(2, dtype=torch.int64, device=x.device)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device)


def _of_rows(call, *tensors: Tensor) -> Tensor:
    """Calls `call`. Tensors without a dimension are passed as rows of one element."""
    if (
        isinstance(tensors[0], Tensor)
        and tensors[0].dim() == 0
        and all(isinstance(x, Tensor) for x in tensors)
    ):
        return call(*(x[None] for x in tensors))[0]
    return call(*tensors)


def _symbolic(x, **_):
    return (x.new_empty(x.shape),)


def _keep_seed(place: int):
    def save(needs, args, out):
        return (args[place],), {}

    return save


def _backward(needs, p, seed, grad_out, **_):
    return {"x": _dropout.call(grad_out, p, seed)}


def _add_backward(needs, p, seed, grad_out, **_):
    return {"x": _dropout.call(grad_out, p, seed) if "x" in needs else None, "residual": grad_out}


def _gelu_backward(needs, x, bias, p, seed, approximate, grad_out, **_):
    dx = _bias_gelu_dropout_bwd.call(grad_out, x, bias, p, seed, approximate)
    return {
        "x": dx,
        "bias": dx.sum(tuple(range(dx.dim() - 1))) if "bias" in needs and dx.dim() > 1 else dx,
    }


def _gelu_save(needs, args, out):
    return (args[0], args[1], args[3]), {}


_dropout = define_op(
    "dropout",
    public=dropout,
    symbolic=_symbolic,
    save=_keep_seed(2),
    saved=("seed",),
    backward=_backward,
)
_dropout_add = define_op(
    "dropout_add",
    public=dropout_add,
    symbolic=_symbolic,
    save=_keep_seed(3),
    saved=("seed",),
    backward=_add_backward,
    autocast=autocast.widest("x", "residual"),
)
_bias_gelu_dropout_bwd = define_op(
    "bias_gelu_dropout_bwd",
    symbolic=_symbolic,
    refuse="bias_gelu_dropout: it is not twice differentiable",
)
_bias_gelu_dropout = define_op(
    "bias_gelu_dropout",
    public=bias_gelu_dropout,
    symbolic=_symbolic,
    save=_gelu_save,
    saved=("x", "bias", "seed"),
    backward=_gelu_backward,
    autocast=autocast.widest("x", exactly=("bias",)),
)
