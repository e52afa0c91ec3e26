# SPDX-License-Identifier: BSD-3-Clause
"""Sharding rules of DTensor, and the refusal of attention inside torch's `context_parallel`.

`before` runs before each call of an op. The first call after torch.distributed.tensor has been
imported registers the ops' sharding rules. This file never imports it. Inside `context_parallel` a
tensor holds only this rank's part of a sequence, which attention cannot know. So attention is
refused there, and the error names SDPA, which `context_parallel` replaces.
"""

import math
import sys
import warnings
from typing import Any

import torch

from .._library import NAMESPACE

__all__ = ["as_rows", "before"]

_DTENSOR = "torch.distributed.tensor"
_modules = sys.modules
_registered = False
_usual: Any = None  # DTensor's table of op handlers outside context_parallel


def before(name: str, whole_sequences: bool) -> None:
    """Runs before a call of the op `name`. ValueError inside context_parallel if the op must see whole
    sequences."""
    module = _modules.get(_DTENSOR)
    if module is None:
        return
    if not _registered:  # an argument may be a DTensor
        _register()
    if whole_sequences:
        _refuse_part(name, module)


def _register() -> None:
    global _registered
    # the module may still be importing, so that DTensor does not exist yet
    if not hasattr(_modules[_DTENSOR], "DTensor"):
        return
    _registered = True
    try:
        from ..integrations import distributed

        distributed.register()
    except (
        ImportError,
        AttributeError,
        TypeError,
    ) as error:  # the rules use names of torch that are not public
        warnings.warn(
            f"torch_gpukern: the sharding rules do not fit torch {torch.__version__} ({error}); "
            f"DTensor refuses the ops",
            stacklevel=4,
        )


def _refuse_part(name: str, module: Any) -> None:
    global _usual
    try:
        table = module.DTensor._op_dispatcher._custom_op_handlers
    except AttributeError:  # it is being imported
        return
    if table is _usual:
        return
    # while context_parallel is active, it installs its own table, which has its own attention
    if torch.ops.aten._scaled_dot_product_flash_attention.default in table:
        raise ValueError(
            f"{NAMESPACE}::{name}: called inside torch's context_parallel, where q, k and v are "
            f"this rank's part of the "
            "sequence and it would see no other; call F.scaled_dot_product_attention there, with "
            "gpukern as its kernel by "
            "torch_gpukern.integrations.sdpa"
        )
    _usual = table


def as_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Flattens tensors to matrices: all leading dimensions become rows, in the same order for all.
    The tensors must have one shape but for the last dimension.

    If all tensors have the same order of strides, the rows are in that order, so that nothing is
    copied. None for DTensors that cannot be flattened without communication: those sharded in two
    of these dimensions, or unevenly.
    """
    dims = tensors[0].dim() - 1
    dtensor = getattr(_modules.get(_DTENSOR), "DTensor", None)
    if dtensor is not None and any(isinstance(x, dtensor) for x in tensors):
        order = _order_of_shards(dims, [x for x in tensors if isinstance(x, dtensor)])
        if order is None:
            return None
    else:
        order = _order_of_strides(dims, tensors)
    rows = math.prod(tensors[0].shape[:-1])
    if order is not None and order != list(range(dims)):
        tensors = tuple(x.permute(*order, dims) for x in tensors)
    return tuple(x.reshape(rows, x.shape[-1]) for x in tensors)


def _order_of_shards(dims: int, tensors: list[Any]) -> list[int] | None:
    """An order in which the sharded dimension is first, so that each rank's rows stay on that
    rank."""
    shards = [1] * len(tensors)
    found = set()
    for i, x in enumerate(tensors):
        for size, placement in zip(x.device_mesh.shape, x.placements):
            if placement.is_shard() and placement.dim < dims:
                found.add(placement.dim)
                shards[i] *= size
    if len(found) > 1:
        return None
    first = found.pop() if found else 0
    if any(x.shape[first] % n for x, n in zip(tensors, shards)):
        return None
    return [first, *(d for d in range(dims) if d != first)]


def _order_of_strides(dims: int, tensors: tuple[torch.Tensor, ...]) -> list[int] | None:
    """The order of dimensions by descending stride, if it is the same for all tensors. None if it
    is not, if a tensor is contiguous, or if strides are symbols, which must not be compared."""
    strides = [x.stride() for x in tensors]
    if any(type(s) is not int for stride in strides for s in stride) or any(
        x.is_contiguous() for x in tensors
    ):
        return None
    orders = [sorted(range(dims), key=lambda d, stride=stride: -stride[d]) for stride in strides]
    return orders[0] if all(order == orders[0] for order in orders) else None
