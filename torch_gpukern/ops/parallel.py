# SPDX-License-Identifier: BSD-3-Clause
"""Ops in a process that has torch.distributed.tensor: what must be done before a call, without importing it.

The first call after somebody has imported DTensor registers the ops' sharding rules. Inside torch's `context_parallel` a
tensor is this rank's part of a sequence, which attention cannot see of it: attention is refused there, and SDPA, which
`context_parallel` replaces, is named.
"""

import sys
import warnings
from typing import Any

import torch

from .._library import NAMESPACE

__all__ = ["before_attention", "flattens", "meet"]

_DTENSOR = "torch.distributed.tensor"
_modules = sys.modules
_registered = False
_usual: Any = None  # the table of a dispatcher outside context_parallel


def meet() -> None:
    """Registers the sharding rules if a DTensor can be among the arguments: it looks like any tensor here."""
    if not _registered and _DTENSOR in _modules:
        _register()


def _register() -> None:
    global _registered
    if not hasattr(_modules[_DTENSOR], "DTensor"):  # it is being imported, and no DTensor is made yet
        return
    _registered = True
    try:
        from ..integrations import distributed

        distributed.register()
    except (ImportError, AttributeError, TypeError) as error:  # of what torch has no public name for
        warnings.warn(
            f"torch_gpukern: the sharding rules do not fit torch {torch.__version__} ({error}); DTensor refuses the ops",
            stacklevel=4,
        )


def before_attention(name: str) -> None:
    """ValueError inside context_parallel."""
    global _usual
    module = _modules.get(_DTENSOR)
    if module is None:
        return
    try:
        table = module.DTensor._op_dispatcher._custom_op_handlers
    except AttributeError:  # it is being imported
        return
    if table is _usual:
        return
    # context_parallel puts attention of its own here, in a table of its own, while it is active.
    if torch.ops.aten._scaled_dot_product_flash_attention.default in table:
        raise ValueError(
            f"{NAMESPACE}::{name}: called inside torch's context_parallel, where q, k and v are this rank's part of the "
            "sequence and it would see no other; call F.scaled_dot_product_attention there, with gpukern as its kernel by "
            "torch_gpukern.integrations.sdpa"
        )
    _usual = table


def flattens(x: torch.Tensor) -> bool:
    """Whether all dimensions but the last can be taken for one: not those of a DTensor that has shards inside them."""
    dtensor = getattr(_modules.get(_DTENSOR), "DTensor", None)
    if dtensor is None or not isinstance(x, dtensor):
        return True
    shards = 1
    for size, placement in zip(x.device_mesh.shape, x.placements):
        if placement.is_shard() and placement.dim < x.dim() - 1:
            if placement.dim > 0:
                return False
            shards *= size
    return x.shape[0] % shards == 0
