# SPDX-License-Identifier: BSD-3-Clause
"""Ops that write into their arguments: fake function, refusal of gradients, version counters."""

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
    """The op, and what its Autograd kernel does where no gradient is wanted. written: the arguments
    that the op changes."""
    op = Op(name)
    fakes.register(op, symbolic)

    def write(*args: Any) -> Any:
        results = op.below(*args)
        # A tensor that autograd has saved must not change unseen.
        increment_version([op.value(args, argument) for argument in written])
        return results

    def kernel(*args: Any) -> Any:
        # What is written has no history, so a lost gradient can only be refused here.
        if is_grad_enabled() and any_requires_grad(*args):
            raise NotImplementedError(
                f"{op.qualified}: it has no backward and an input requires a gradient; call it "
                f"under torch.no_grad()"
            )
        return write(*args)

    register_autograd(op, kernel)
    guard(op)
    return op, write
