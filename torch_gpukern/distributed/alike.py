# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that every rank has alike, in second derivatives: a rank uses such a gradient for its
own part alone, so that what is differentiated by it again is the sum over ranks.
"""

import torch
from torch import Tensor

from ..ops.linear_cross_entropy_chunks import accumulator
from . import transport
from .ranks import ranks_of

__all__ = ["alike"]


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Summed.apply(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return transport.sum_of_all(x.to(accumulator(x)), ranks_of(group), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Alike.apply(grad, ctx.group), None


def alike(grad: Tensor, group: str) -> Tensor:
    """grad, which all ranks of the group have alike."""
    return _Alike.apply(grad, group) if torch.is_grad_enabled() and grad.requires_grad else grad
