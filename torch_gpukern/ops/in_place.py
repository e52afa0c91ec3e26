# SPDX-License-Identifier: BSD-3-Clause
"""Declares ops that write into their arguments: fake function, refusal of gradients, version
counters."""

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import increment_version

from .._library import any_requires_grad, is_grad_enabled
from . import fakes
from .define import Op, guard, register_autograd

__all__ = ["define_in_place"]


def define_in_place(
    name: str, symbolic: Callable, written: tuple[str, ...]
) -> tuple[Op, Callable[..., Any]]:
    """Declares the op. Returns it and the function that its Autograd kernel calls if no gradient is
    wanted.

    written: names of the arguments that the op changes.
    """
    op = Op(name)
    fakes.register(op, symbolic)

    def write(*args: Any) -> Any:
        results = op.below(*args)
        # Autograd must notice if a tensor that it has saved changes.
        increment_version([op.value(args, argument) for argument in written])
        return results

    def kernel(*args: Any) -> Any:
        # The written tensors get no history, so the gradient of an input would silently be lost.
        if is_grad_enabled() and any_requires_grad(*args):
            raise NotImplementedError(
                f"{op.qualified}: it has no backward and an input requires a gradient; call it "
                f"under torch.no_grad()"
            )
        return write(*args)

    register_autograd(op, kernel)
    guard(op)
    return op, write
