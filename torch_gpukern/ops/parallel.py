# SPDX-License-Identifier: BSD-3-Clause
"""The step before each call in a process that has torch.distributed.tensor, without importing it.

The first call after DTensor has been imported registers the ops' sharding rules. Inside torch's
`context_parallel` a tensor holds only this rank's part of a sequence, and attention cannot tell. So
attention is refused there, and the error names SDPA, which `context_parallel` replaces.
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
_usual: Any = None  # the table of a dispatcher outside context_parallel


def before(name: str, whole_sequences: bool) -> None:
    """Runs before a call of the op `name`. ValueError inside context_parallel if the op must see whole
    sequences."""
    module = _modules.get(_DTENSOR)
    if module is None:
        return
    if not _registered:  # a DTensor may be among the arguments, and looks like any tensor here
        _register()
    if whole_sequences:
        _refuse_part(name, module)


def _register() -> None:
    global _registered
    # the module is still being imported, so there is no DTensor yet
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
    ) as error:  # of what torch has no public name for
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
    # context_parallel puts attention of its own here, in a table of its own, while it is active.
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
    """Tensors of one shape but for the last dimension, as matrices whose rows are all of theirs, in
    one order. Where they lie alike, it is the order in which they lie, so that nothing is copied.
    None for DTensors whose rows no order brings together without communication: those sharded in
    two dimensions, or unevenly.
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
    """The dimension that has shards comes first: so each rank's rows stay on it."""
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
    """The order in which all of them lie; None where they lie otherwise, or as their dimensions
    are; and of symbols, which are not compared."""
    strides = [x.stride() for x in tensors]
    if any(type(s) is not int for stride in strides for s in stride) or any(
        x.is_contiguous() for x in tensors
    ):
        return None
    orders = [sorted(range(dims), key=lambda d, stride=stride: -stride[d]) for stride in strides]
    return orders[0] if all(order == orders[0] for order in orders) else None
