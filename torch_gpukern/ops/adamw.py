# SPDX-License-Identifier: BSD-3-Clause
"""adamw_: the raw op, one step of AdamW over lists of tensors (csrc/include/gpukern_train.h).
torch_gpukern.optim has the optimiser that calls it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._library import NAMESPACE, library, ops

__all__ = ["adamw_"]

# It returns nothing. The schema says which arguments it writes.
torch.library.register_fake(f"{NAMESPACE}::adamw_", lambda *args, **kwargs: None, lib=library)


def adamw_(params: list[Tensor], *lists: list[Tensor], **numbers: Any) -> None:
    """Calls the op for tensors of one device and dtype, and tells autograd that params have
    changed."""
    ops.adamw_.default(params, *lists, **numbers)
    if not torch.compiler.is_compiling():
        increment_version(params)
