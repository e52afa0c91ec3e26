# SPDX-License-Identifier: BSD-3-Clause
"""Vectors beside rows of another dtype: weights of norms and of classes."""

import torch
from torch import Tensor

from . import fakes

__all__ = ["widened"]

_WIDER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}


def widened(vector: Tensor | None, rows: Tensor, own: bool = True) -> Tensor | None:
    """`vector` [N] in a dtype that kernels read beside `rows`: float32, float64 beside float64, and
    the dtype of rows if `own`.

    A vector of fewer bits is widened, which is exact, and its gradient comes back in its own dtype.
    One of more bits would be rounded: it stays, and the op refuses it by name.
    """
    if not isinstance(vector, Tensor) or not isinstance(rows, Tensor):
        return vector
    if not rows.is_floating_point() or (own and vector.dtype is rows.dtype):
        return vector
    wide = fakes.stats_dtype(rows)
    return vector.to(wide) if vector.dtype in _WIDER[wide] else vector
