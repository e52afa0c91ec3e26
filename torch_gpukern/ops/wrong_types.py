# SPDX-License-Identifier: BSD-3-Clause
"""Errors for arguments of wrong types. They name the argument and the expected type. torch's own
text names a position, and prints values and the whole schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["WrongType", "refuse_non_bool", "refuse_non_tensors", "refuse_types"]

_NUMBERS = {"float": (float, int), "Optional[float]": (float, int), "int": (int,), "SymInt": (int,)}


class WrongType(ValueError, RuntimeError):
    """A ValueError, as the ops raise, and a RuntimeError, as torch raises for such a call."""


def _kind(x: Any) -> str:
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def refuse_types(op: str, arguments: Iterable[tuple[str, str, Any]]) -> None:
    """Raises WrongType for the first of `arguments`, (name, type in the schema, value), that has
    another type. If none has, it returns, and the caller raises torch's error again.
    """
    for name, kind, x in arguments:
        text = _wrong(kind, x)
        if text is not None and name.endswith("seed") and type(x) is int:
            text += f"; a seed is int64 [2]: pass torch.tensor([{x}, 0]) on the device of the other tensors"
        if name == "activation" and text is not None:
            text = f"must be none, relu, gelu, gelu_tanh or silu, got {_kind(x)}"
        if text is not None:
            raise WrongType(f"{op}: {name} {text}") from None


def refuse_non_bool(op: str, name: str, x: Any) -> None:
    """WrongType unless x is True or False, for an argument that the op does not have. It is fast
    and can be traced."""
    if x is not True and x is not False:
        raise WrongType(f"{op}: {name} must be True or False, got {_kind(x)}")


def refuse_non_tensors(op: str, **given: Any) -> None:
    """`refuse_types` for arguments that must be dense tensors. It is fast and can be traced."""
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.is_nested:
            refuse_types(op, ((name, "Tensor", x),))


def _wrong(kind: str, x: Any) -> str | None:
    if kind in ("Tensor", "Optional[Tensor]"):
        if isinstance(x, Tensor):
            return _wrong_layout(x)
        if x is None and kind != "Tensor":
            return None
        hint = (
            "; torch.as_tensor makes one"
            if isinstance(x, (list, tuple)) or hasattr(x, "__array__")
            else ""
        )
        return f"must be a Tensor{'' if kind == 'Tensor' else ' or None'}, got {_kind(x)}{hint}"
    if isinstance(x, Tensor):  # torch accepts a tensor of one number
        one = kind not in _NUMBERS or x.numel() == 1
        return None if one else f"must be a number, got a tensor of shape {list(x.shape)}"
    if kind == "str":
        return None if isinstance(x, str) else f"must be a string, got {_kind(x)}"
    if kind.endswith(("ScalarType", "ScalarType]")):
        fits = isinstance(x, torch.dtype) or (x is None and kind != "ScalarType")
        return (
            None
            if fits
            else f"must be a torch.dtype{'' if kind == 'ScalarType' else ' or None'}, got "
            f"{_kind(x)}"
        )
    if kind in _NUMBERS:
        symbols = (torch.SymInt, torch.SymFloat)
        fits = isinstance(x, (*_NUMBERS[kind], *symbols)) or (
            x is None and kind.startswith("Optional")
        )
        noun = "a number" if "float" in kind else "an int"
        return (
            None
            if fits
            else f"must be {noun}{' or None' if kind.startswith('Optional') else ''}, got "
            f"{_kind(x)}"
        )
    return None


def _wrong_layout(x: Tensor) -> str | None:
    if x.is_nested:
        return (
            "is a nested tensor; pass its parts, or their values packed one after the other "
            "(flash_attn_varlen takes sequences of several lengths so)"
        )
    if x.layout is not torch.strided:
        return f"has layout {x.layout}, expected a dense tensor"
    return None
