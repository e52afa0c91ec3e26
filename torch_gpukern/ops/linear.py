# SPDX-License-Identifier: BSD-3-Clause
"""linear: gemm with the signature of F.linear."""

from typing import NoReturn

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from .._library import NAMESPACE
from .gemm import Activation, gemm
from .keywords import hide_unknown, refuse_unknown
from .wrong_types import WrongType, refuse_non_tensors

__all__ = ["linear"]

PLAIN = (Tensor, Parameter, type(None))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *more: NoReturn,
    activation: Activation = "none",
    **unknown: NoReturn,
) -> Tensor:
    """``torch.nn.functional.linear`` with the activation in the same pass: ``activation(x @
    weight.mT + bias)``.

    Args:
        x: [..., K] float32, bfloat16, float16 or float64, any strides.
        weight: [N, K], x's dtype, any strides, never copied.
        bias: [N], x's dtype.
        activation: as in `gemm`.

    Returns:
        [..., N] contiguous in x's dtype. Float32 on CUDA follows
        ``torch.backends.cuda.matmul.fp32_precision``.

    Gradients and autocast are those of `gemm`.

    A tensor subclass with its own ``__torch_function__``, such as a quantised weight, may hold data
    that no kernel here can read. ``F.linear`` then computes the product, and the activation is
    applied to its result.

    Raises:
        ValueError: a shape, dtype, device or activation name that it does not take.
    """
    if more or unknown:
        refuse_unknown(linear, unknown, more)
    # written out, because a generator would take 0.6 us
    plain = type(x) in PLAIN and type(weight) in PLAIN and type(bias) in PLAIN
    if not plain and any(
        type(t) not in PLAIN and has_a_function_of_its_own(t) for t in (x, weight, bias)
    ):
        if activation not in reference.ACTIVATIONS:
            raise ValueError(
                f"{NAMESPACE}::linear: activation must be none, relu, gelu, gelu_tanh or silu, "
                f"got '{activation}'"
            )
        return reference.ACTIVATIONS[activation](F.linear(x, weight, bias))
    # a nested tensor with strided layout has no shape
    if x is None or weight is None or x.is_nested or weight.is_nested:
        refuse_non_tensors(f"{NAMESPACE}::linear", x=x, weight=weight)
    dims = x.dim()
    if dims < 1 or weight.dim() != 2:
        raise ValueError(
            f"{NAMESPACE}::linear: x must have at least 1 dimension and weight 2, [N, K]; got "
            f"{dims} and {weight.dim()}"
        )
    if x.size(-1) != weight.size(1):
        raise ValueError(
            f"{NAMESPACE}::linear: weight has {weight.shape[1]} columns, x has {x.shape[-1]}; "
            f"they must match"
        )
    if dims == 1:
        return gemm(x[None], weight.mT, bias, activation=activation)[0]
    return gemm(x, weight.mT, bias, activation=activation)


def has_a_function_of_its_own(x: Tensor, refuses: bool = True) -> bool:
    """Whether a tensor's type overrides __torch_function__. If `refuses`, anything but a tensor
    raises an error of linear."""
    if not isinstance(x, Tensor) and not hasattr(type(x), "__torch_function__"):
        if not refuses:
            return False
        raise WrongType(
            f"{NAMESPACE}::linear: x, weight and bias must be Tensors, got {type(x).__name__}"
        )
    own = getattr(type(x).__torch_function__, "__func__", None)
    return own is not None and own is not Tensor.__torch_function__.__func__


hide_unknown(linear)
