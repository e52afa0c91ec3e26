# SPDX-License-Identifier: BSD-3-Clause
"""torch.vmap of an op: the new dimension is folded into an existing one, so that one call serves
the whole batch.

An op declares ``fold(size, batched, **arguments)``. The arguments named in `batched` have the new
dimension, of `size`, in front. fold returns ``(changed, unfold)``. `changed` has the arguments that
change. ``unfold(name, result)`` returns a result with the new dimension in front again, or None if
that result has no such dimension. If fold returns None, the op is called once for each slice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import library
from .op import Op

MAX_DIMS = 8  # the most dimensions that a tensor of an op may have


def register(op: Op, fold: Callable | None) -> None:
    """Registers the op's rule for torch.vmap."""

    def rule(info, in_dims, *args):
        given, dims = op.named(args), dict(zip(op.names, in_dims, strict=False))
        batched = {name for name, d in dims.items() if d is not None}
        given |= {name: given[name].movedim(dims[name], 0) for name in batched}
        if info.batch_size == 0:
            return _empty_results(op, batched, given)
        folded = fold(info.batch_size, batched, **given) if fold is not None else None
        if folded is None:
            return _one_by_one(op, info.batch_size, batched, given)
        changed, unfold = folded
        results = op.unguarded(*(given | changed).values())
        if isinstance(results, Tensor):
            return unfold(op.all.results[0], results), 0
        unfolded = [unfold(name, x) for name, x in zip(op.results, results, strict=True)]
        dims_out = tuple(None if x is None else 0 for x in unfolded)
        return tuple(
            x if y is None else y for x, y in zip(results, unfolded, strict=True)
        ), dims_out

    torch.library.register_vmap(op.qualified, rule, lib=library)


def _empty_results(op: Op, batched: set[str], given: dict[str, Any]) -> tuple:
    """The results for a batch of size 0. A call with meta tensors says their shapes and dtypes."""
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
        op.unguarded(*(x[i] if name in batched else x for name, x in given.items()))
        for i in range(size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0,) * len(calls[0])


def everywhere(size: int, batched: set[str], **given: Any) -> tuple | None:
    """The fold of an op whose tensors all have one leading shape: a tensor that is not batched is
    expanded."""
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    changed = {n: x if n in batched else x.expand(size, *x.shape) for n, x in tensors.items()}
    if any(x.dim() > MAX_DIMS for x in changed.values()):
        return None
    return changed, lambda name, x: x


def rows(
    *names: str, unless: Sequence[str] = (), empty: dict[str, Callable[[dict], bool]] | None = None
) -> Callable:
    """Makes the fold of an op over rows. The tensors `names` all have one leading shape, and the
    new dimension is added in front of it.

    A call does not fold if another tensor is batched, or if one of the arguments `unless` is true:
    those ask for sums over all rows.

    empty: by the name of a result, a function of the arguments that says whether the call leaves
    this result out.
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
