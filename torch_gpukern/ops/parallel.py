"""Ops in a process that has torch.distributed.tensor: what must be done before a call, without importing it.

The first call after somebody has imported DTensor registers the ops' sharding rules. Inside torch's `context_parallel` a
tensor is this rank's part of a sequence, which attention cannot see of it: attention is refused there, and SDPA, which
`context_parallel` replaces, is named.
"""

import sys
from typing import Any

import torch

from .._library import NAMESPACE

__all__ = ["before_attention", "meet"]

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
    if hasattr(_modules[_DTENSOR], "DTensor"):  # else it is being imported, and no DTensor is made yet
        from ..integrations import distributed

        distributed.register()
        _registered = True


def before_attention(name: str) -> None:
    """ValueError inside context_parallel."""
    global _usual
    tensor = _modules.get(_DTENSOR)
    if tensor is None:
        return
    dtensor = getattr(tensor, "DTensor", None)
    if dtensor is None:
        return
    table = dtensor._op_dispatcher._custom_op_handlers
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
