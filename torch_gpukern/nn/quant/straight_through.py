# SPDX-License-Identifier: BSD-3-Clause
"""Products with weights in few bits, differentiable by their activations."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._library import transforms_active


def straight_through(
    product: Callable[..., Tensor],
    keep: Callable[[Any, tuple, Any], None],
    gradients: Callable[[Any, Tensor], tuple],
) -> Callable[..., Tensor]:
    """`product`, with the gradients of a product with the decoded weights, as if nothing had been
    rounded. The weights have none.

    Args:
        product: a function of the inputs.
        keep: keep(ctx, inputs, result) saves what the gradients need.
        gradients: gradients(ctx, gradient of the result) returns one value for each input.
    """

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any):
            result = product(*inputs)
            keep(ctx, inputs, result)
            return result

        backward = staticmethod(once_differentiable(gradients))

    class Transformable(Function):
        """The form that torch.func requires. It takes the host longer."""

        generate_vmap_rule = True
        forward = staticmethod(product)
        setup_context = staticmethod(keep)
        backward = staticmethod(gradients)

    def call(*inputs: Any) -> Tensor:
        return (Transformable if transforms_active() else Eager).apply(*inputs)

    return call
