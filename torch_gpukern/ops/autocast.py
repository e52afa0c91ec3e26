# SPDX-License-Identifier: BSD-3-Clause
"""Autocast rules of ops that combine tensors without a matrix product, such as norms with a
residual: under autocast, a product's 16-bit result meets a float32 residual stream."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

__all__ = ["widest"]

_SHORT = (torch.bfloat16, torch.float16)
_CAST = (torch.float32, *_SHORT)


def widest(*names: str, vectors: Sequence[str] = (), exactly: Sequence[str] = ()) -> Callable:
    """A rule for define_op: tensors of different dtypes are cast to the widest, as in PyTorch's own
    ops that autocast promotes. If one of them is neither float32 nor 16-bit, nothing is cast.

    Args:
        names: the tensors that are combined, which must be of one dtype.
        vectors: parameters that may be float32 beside 16-bit tensors. Those of 16 bits are cast.
        exactly: parameters that must have the tensors' dtype. They are always cast, as a linear
            layer's bias is.
    """

    def rule(_: torch.dtype, to: Callable, /, **given: Any) -> dict[str, Tensor]:
        joined = [given[n] for n in names if given[n] is not None]
        if any(x.dtype not in _CAST for x in joined):
            return {}
        wide = reduce(torch.promote_types, (x.dtype for x in joined))
        cast = {n: given[n] for n in names if given[n] is not None and given[n].dtype is not wide}
        cast |= {n: given[n] for n in vectors if given[n] is not None and given[n].dtype in _SHORT}
        cast |= {n: given[n] for n in exactly if given[n] is not None}
        return {n: to(x, wide) for n, x in cast.items()}

    return rule
