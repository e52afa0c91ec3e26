# SPDX-License-Identifier: BSD-3-Clause
"""adamw_: the raw op, one step of AdamW over lists of tensors (csrc/include/gpukern_train.h). The
optimiser on it is torch_gpukern.optim's."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._library import NAMESPACE, library, ops

__all__ = ["adamw_"]

# It returns nothing, and what it writes the schema says.
torch.library.register_fake(f"{NAMESPACE}::adamw_", lambda *args, **kwargs: None, lib=library)


def adamw_(params: list[Tensor], *lists: list[Tensor], **numbers: Any) -> None:
    """The op, of tensors of one device and dtype; autograd learns that params have changed."""
    ops.adamw_.default(params, *lists, **numbers)
    if not torch.compiler.is_compiling():
        increment_version(params)
