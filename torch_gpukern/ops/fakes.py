# SPDX-License-Identifier: BSD-3-Clause
"""Fake functions: the results of an op for tensors that have no data.

If all sizes are numbers, the op X_results asks csrc. It runs the same check as the op, with the
same errors, and makes the results on the meta device.

csrc cannot read sizes that are symbols. For those, an op states the shapes of its results in Python
(`symbolic` of define_op), and `sizes` guards on the sizes that must be equal. The op's own check
runs when the compiled code calls it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import NAMESPACE, below_modes, library, ops
from .op import Op

__all__ = ["made", "register", "sizes", "stats_dtype"]


def made(op: Op, symbolic: Callable, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """All results of an op X, or of X_fwd, for arguments by name."""
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    if any(_is_symbolic(x) for x in given.values()):
        return symbolic(**given)
    with below_modes():
        results = getattr(ops, f"{op.name.removesuffix('_fwd')}_results").default(*given.values())
    if isinstance(results, Tensor):
        results = (results,)
    device = tensors[0].device
    return tuple(
        torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=device)
        for r in results or ()
    )


def register(op: Op, symbolic: Callable, first: bool = False, composed: bool = False) -> None:
    """Registers the fake function of an op.

    first: the op returns only the first result. composed: the op is written in Python, and csrc does
    not know it.
    """

    def fake(*args, **kwargs):
        given = op.named(args) | kwargs
        results = symbolic(**given) if composed else made(op, symbolic, given)
        if isinstance(results, Tensor):
            return results
        return results[0] if first or len(results) == 1 else results or None

    torch.library.register_fake(op.qualified, fake, lib=library)


def _is_symbolic(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not all(type(n) is int for n in (*x.shape, *x.stride()))
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes(op: str, **letters: tuple[Tensor | None, str]) -> dict[str, int]:
    """Sizes by letter: ``sizes("flash_attn", q=(q, "B Hq Sq D"), k=(k, "B Hkv Sk D"))``.

    ValueError if a tensor has another number of dimensions, or if a letter has two sizes. A tensor
    that is None is skipped.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, (x, text) in letters.items():
        dims = text.split()
        if x is None:
            continue
        if x.dim() != len(dims):
            raise ValueError(
                f"{NAMESPACE}::{op}: {name} must have {len(dims)} dimensions [{', '.join(dims)}], "
                f"got {x.dim()}"
            )
        for letter, size in zip(dims, x.shape, strict=True):
            known, owner = found.setdefault(letter, (size, name))
            say = f"{NAMESPACE}::{op}: {name} has {letter} {size}, {owner} has {known}; they must match"
            torch._check_with(ValueError, size == known, lambda say=say: say)
    return {letter: size for letter, (size, _) in found.items()}


def stats_dtype(first: Tensor) -> torch.dtype:
    """The dtype of sums, lse, sinks and slopes: float64 for float64 tensors, else float32."""
    return torch.float64 if first.dtype is torch.float64 else torch.float32
