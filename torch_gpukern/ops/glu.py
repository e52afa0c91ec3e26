# SPDX-License-Identifier: BSD-3-Clause
"""swiglu and geglu, gated linear units: the public functions and their declarations."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from . import autocast, batching
from .define import define_op
from .op import Op

__all__ = ["geglu", "swiglu"]


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)), in float32, rounded once (float64 for float64).

    Args:
        gate: [..., N], float32, bfloat16, float16 or float64. Without up [..., 2 N]: gate is the
            first half of the last dimension and up the second, as a product with both weights side
            by side returns them. Leading dimensions may have any strides. If the last dimension is
            not contiguous, the tensor is copied first.
        up: gate's shape and dtype.

    Returns:
        [..., N] contiguous, in gate's dtype.

    Gradients: gate and up. Not twice differentiable. Under autocast both take the wider of their
    dtypes.

    Raises:
        ValueError: shapes or dtypes that do not match; an odd last dimension without up.

    Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    return _swiglu.call(gate, up)


def geglu(
    gate: Tensor, up: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """gelu(gate) * up, in float32, rounded once (float64 for float64).

    Args:
        gate: [..., N], float32, bfloat16, float16 or float64. Without up [..., 2 N]: gate is the
            first half of the last dimension and up the second. Leading dimensions may have any
            strides. If the last dimension is not contiguous, the tensor is copied first.
        up: gate's shape and dtype.
        approximate: ``"none"``, x/2 (1 + erf(x / sqrt 2)), or ``"tanh"``, x/2 (1 + tanh(sqrt(2/pi)
            (x + 0.044715 x^3))).

    Returns:
        [..., N] contiguous, in gate's dtype.

    Gradients: gate and up. Not twice differentiable. Under autocast both take the wider of their
    dtypes.

    Raises:
        ValueError: shapes or dtypes that do not match; an odd last dimension without up; an unknown
            approximate.

    Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    return _geglu.call(gate, up, approximate)


def _symbolic(gate, up, **_):
    if up is not None:
        return (gate.new_empty(gate.shape),)
    return (gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2)),)


def _bwd_symbolic(gate, up, **_):
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _save(needs, args, out):
    return (args[0], args[1] if len(args) > 1 else None), {}


_glu_bwd = define_op(
    "glu_bwd",
    symbolic=_bwd_symbolic,
    refuse="swiglu and geglu: they are not twice differentiable",
    fold=batching.rows("grad_out", "gate", "up", empty={"dup": lambda given: given["up"] is None}),
)


def _declare(public: Callable) -> Op:
    """Declares swiglu or geglu, whose name is the public function's."""
    gelu = public is geglu

    def backward(needs, gate, up, grad_out, approximate="", **_):
        how = approximate if gelu else ""
        dgate, dup = _glu_bwd.call_named(grad_out=grad_out, gate=gate, up=up, approximate=how)
        return {"gate": dgate, "up": dup}

    return define_op(
        public.__name__,
        public=public,
        symbolic=_symbolic,
        save=_save,
        saved=("gate", "up"),
        backward=backward,
        autocast=autocast.widest("gate", "up"),
        fold=batching.rows("gate", "up"),
    )


_swiglu = _declare(swiglu)
_geglu = _declare(geglu)
