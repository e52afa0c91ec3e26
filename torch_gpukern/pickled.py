# SPDX-License-Identifier: BSD-3-Clause
"""Pickles of tensors of 8-bit floats. torch 2.13 cannot pickle them ("UntypedStorage has no
attribute dtype"), so they are stored as bytes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class _Bytes(NamedTuple):
    bytes: Tensor
    dtype: torch.dtype


def as_bytes(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of the dict in which tensors of 8-bit floats are replaced by bytes and a dtype;
    `as_codes` restores them."""
    coded = {
        name: x for name, x in state.items() if isinstance(x, Tensor) and x.dtype in EIGHT_BITS
    }
    return {**state, **{name: _Bytes(x.view(torch.uint8), x.dtype) for name, x in coded.items()}}


def as_codes(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `as_bytes`."""
    return {
        name: x.bytes.view(x.dtype) if isinstance(x, _Bytes) else x for name, x in state.items()
    }
