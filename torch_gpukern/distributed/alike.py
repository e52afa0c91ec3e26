# SPDX-License-Identifier: BSD-3-Clause
"""Second derivatives through a gradient that is the same on every rank.

Each rank uses such a gradient for its own part of a backward. So the derivative with respect to the
gradient is the sum of the ranks' shares.
"""

import torch
from torch import Tensor

from ..ops.linear_cross_entropy_chunks import accumulator
from . import transport
from .ranks import ranks_of

__all__ = ["alike"]


class _Alike(torch.autograd.Function):
    """The identity, whose backward sums over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Summed.apply(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over ranks, whose backward is the identity on each rank."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return transport.sum_of_all(x.to(accumulator(x)), ranks_of(group), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Alike.apply(grad, ctx.group), None


def alike(grad: Tensor, group: str) -> Tensor:
    """grad, marked as the same on all ranks of the group for a second backward."""
    return _Alike.apply(grad, group) if torch.is_grad_enabled() and grad.requires_grad else grad
