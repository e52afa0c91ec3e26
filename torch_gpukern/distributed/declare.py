# SPDX-License-Identifier: BSD-3-Clause
"""declare: what an op of several ranks registers: its kernel, fake function and gradients."""

import functools
from collections.abc import Callable

import torch

from .._library import library, ops
from .symmetric import give_back

__all__ = ["declare"]


def declare(
    name: str, kernel: Callable, fake: Callable, differentiate: Callable | None = None, keep: Callable | None = None
) -> None:
    """An op of several ranks, on both devices. Without `differentiate` its backward is refused by name."""
    group = [x.name for x in getattr(ops, name).default._schema.arguments].index("group")

    @functools.wraps(kernel)
    def run(*given):
        try:
            return kernel(*given)
        except BaseException:
            give_back(given[group])
            raise

    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"gpukern::{name}", fake, lib=library)
    if differentiate is None:

        def differentiate(ctx, *grads):
            raise NotImplementedError(f"gpukern::{name}: it has no backward")

    torch.library.register_autograd(f"gpukern::{name}", differentiate, setup_context=keep, lib=library)
