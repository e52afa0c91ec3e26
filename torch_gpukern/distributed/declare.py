# SPDX-License-Identifier: BSD-3-Clause
"""declare: what an op of several ranks registers: its kernel, fake function, gradients and autocast
rule."""

import functools
from collections.abc import Callable, Sequence

import torch

from .._library import below_autocast, library, ops
from ..ops.define import AUTOCAST_KEYS, cast_arguments
from .symmetric import give_back

__all__ = ["declare"]


def declare(
    name: str,
    kernel: Callable,
    fake: Callable,
    differentiate: Callable | None = None,
    keep: Callable | None = None,
    autocast: Sequence[str] | Callable = (),
) -> None:
    """An op of several ranks, on both devices. Without `differentiate` its backward is refused by
    name.

    autocast: as for `define_op`. Below it, and in backward, nothing is cast.
    """
    overload = getattr(ops, name).default
    names = [x.name for x in overload._schema.arguments]
    group = names.index("group")

    @functools.wraps(kernel)
    def run(*given):
        try:
            return kernel(*given)
        except BaseException:
            give_back(given[group])
            raise

    def cast(device: str) -> Callable:
        def below(*given):
            given = cast_arguments(autocast, device, dict(zip(names, given, strict=True))).values()
            with below_autocast():
                return overload(*given)

        return below

    def backward(ctx, *grads):
        if differentiate is None:
            raise NotImplementedError(f"gpukern::{name}: it has no backward")
        with below_autocast():
            return differentiate(ctx, *grads)

    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    for device, key in AUTOCAST_KEYS.items():
        library.impl(name, cast(device), key)
    torch.library.register_fake(f"gpukern::{name}", fake, lib=library)
    torch.library.register_autograd(f"gpukern::{name}", backward, setup_context=keep, lib=library)
