"""The laws of dtype and shape that the fake functions state, in the words of ops/checks.h.

Sizes may be symbolic: every law goes through torch._check_with, which then guards on it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import NAMESPACE

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def law(holds: bool, op: str, *text: object) -> None:
    """ValueError "gpukern::op: text" where a law does not hold."""
    torch._check_with(ValueError, holds, lambda: f"{NAMESPACE}::{op}: {''.join(map(str, text))}")


def is_float(op: str, name: str, x: Tensor) -> None:
    got = _name(x.dtype)
    law(x.dtype in _FLOATS, op, name, " must be float32, bfloat16, float16 or float64, got ", got)


def has_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    law(x.dtype == dtype, op, name, " must be ", _name(dtype), ", got ", _name(x.dtype))


def same_dtype(op: str, name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    got, want = _name(x.dtype), _name(first.dtype)
    text = (name, " has dtype ", got, ", ", first_name, " has ", want, "; they must match")
    law(x.dtype == first.dtype, op, *text)


def has_dims(op: str, name: str, x: Tensor, dims: int, letters: str) -> None:
    noun = "dimension" if dims == 1 else "dimensions"
    law(x.dim() == dims, op, f"{name} must have {dims} {noun} {letters}, got ", x.dim())


def has_shape(op: str, name: str, x: Tensor, shape: Sequence[int]) -> None:
    same = x.dim() == len(shape)
    law(same, op, name, " must have shape ", list(shape), ", got ", list(x.shape))
    for got, want in zip(x.shape, shape, strict=True):
        law(got == want, op, name, " must have shape ", list(shape), ", got ", list(x.shape))


def same_size(op: str, name: str, what: str, got: int, other: str, want: int) -> None:
    text = (name, " has ", what, " ", got, ", ", other, " has ", want, "; they must match")
    law(got == want, op, *text)


def head_ratio(op: str, heads_q: int, k_name: str, heads_kv: int) -> None:
    holds = heads_q % heads_kv == 0 if heads_kv != 0 else heads_q == 0
    text = (k_name, " has ", heads_kv, " heads, q has ", heads_q, "; q's must be a multiple of ")
    law(holds, op, *text, k_name, "'s")


def wide_dtype(first: Tensor) -> torch.dtype:
    """The dtype of lse, sinks and slopes: float64 where the op computes in float64."""
    return torch.float64 if first.dtype is torch.float64 else torch.float32
