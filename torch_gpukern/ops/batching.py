# SPDX-License-Identifier: BSD-3-Clause
"""torch.vmap: its dimension becomes part of one that the op has, so that one call serves the whole
batch.

An op declares ``fold(size, batched, **arguments)``. The arguments come by name, and those named in
`batched` have the new dimension, of `size`, in front. fold returns ``(changed, unfold)``: the
arguments that change, and a function ``unfold(name, result)`` that gives a result with the dimension
in front again, or None if that result has none. For a call that does not fold it returns None, and
the call is served slice by slice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import library
from .op import Op

MAX_DIMS = 8  # of a tensor of any op


def register(op: Op, fold: Callable | None) -> None:
    """The rule of the op where torch.vmap batches an argument."""

    def rule(info, in_dims, *args):
        given, dims = op.named(args), dict(zip(op.names, in_dims, strict=False))
        batched = {name for name, d in dims.items() if d is not None}
        given |= {name: given[name].movedim(dims[name], 0) for name in batched}
        if info.batch_size == 0:
            return _of_none(op, batched, given)
        folded = fold(info.batch_size, batched, **given) if fold is not None else None
        if folded is None:
            return _one_by_one(op, info.batch_size, batched, given)
        changed, unfold = folded
        results = op.bare(*(given | changed).values())
        if isinstance(results, Tensor):
            return unfold(op.all.results[0], results), 0
        unfolded = [unfold(name, x) for name, x in zip(op.results, results, strict=True)]
        dims_out = tuple(None if x is None else 0 for x in unfolded)
        return tuple(
            x if y is None else y for x, y in zip(results, unfolded, strict=True)
        ), dims_out

    torch.library.register_vmap(op.qualified, rule, lib=library)


def _of_none(op: Op, batched: set[str], given: dict[str, Any]) -> tuple:
    """Empty results: of what shapes and dtypes, a call says whose tensors have no contents."""
    device = next(x.device for x in given.values() if isinstance(x, Tensor))

    def described(name: str, x: Any) -> Any:
        shape = x.shape[1:] if name in batched else x.shape if isinstance(x, Tensor) else None
        return x if shape is None else torch.empty(shape, dtype=x.dtype, device="meta")

    one = op.overload(*(described(name, x) for name, x in given.items()))
    empty = tuple(
        torch.empty((0, *x.shape), dtype=x.dtype, device=device)
        for x in ((one,) if isinstance(one, Tensor) else one)
    )
    return (empty[0], 0) if isinstance(one, Tensor) else (empty, (0,) * len(empty))


def _one_by_one(op: Op, size: int, batched: set[str], given: dict[str, Any]) -> tuple:
    calls = [
        op.bare(*(x[i] if name in batched else x for name, x in given.items())) for i in range(size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0,) * len(calls[0])


def everywhere(size: int, batched: set[str], **given: Any) -> tuple | None:
    """The fold of an op of tensors alone that all have one leading shape."""
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    changed = {n: x if n in batched else x.expand(size, *x.shape) for n, x in tensors.items()}
    if any(x.dim() > MAX_DIMS for x in changed.values()):
        return None
    return changed, lambda name, x: x


def rows(
    *names: str, unless: Sequence[str] = (), empty: dict[str, Callable[[dict], bool]] | None = None
) -> Callable:
    """The fold of an op over rows, whose tensors `names` all have one leading shape: the new
    dimension joins it.

    What else is a tensor may not be batched, and arguments `unless` not be true: they ask for sums
    over all rows. empty: results that a call does not have, by a question about its arguments.
    """

    def fold(size: int, batched: set[str], **given: Any) -> tuple | None:
        if not batched <= set(names) or any(given[name] for name in unless):
            return None
        tensors = {n: given[n] for n in names if given[n] is not None}
        changed = {n: x if n in batched else x.expand(size, *x.shape) for n, x in tensors.items()}
        if any(x.dim() > MAX_DIMS for x in changed.values()):
            return None
        missing = {n for n, asked in (empty or {}).items() if asked(given)}
        return changed, lambda name, x: None if name in missing else x

    return fold
