# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of parameter vectors whose dtype is not that of the rows: weights of norms and of
classes."""

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

    A vector of fewer bits is widened, which is exact. Its gradient is in its own dtype. A vector of
    more bits would be rounded, so it is returned unchanged, and the op refuses it.
    """
    if not isinstance(vector, Tensor) or not isinstance(rows, Tensor):
        return vector
    if not rows.is_floating_point() or (own and vector.dtype is rows.dtype):
        return vector
    wide = fakes.stats_dtype(rows)
    return vector.to(wide) if vector.dtype in _WIDER[wide] else vector
