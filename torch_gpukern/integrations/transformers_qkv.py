# SPDX-License-Identifier: BSD-3-Clause
"""q, k and v of transformers' attentions as one product where no gradient is wanted.
transformers_accelerate.py calls `join`.

The weights q, k and v [Nq, K], [Nk, K], [Nv, K] become views of one tensor. They stay parameters of
q_proj, k_proj and v_proj, so names, checkpoints, optimizers and training are as before. An attention
calls the three with the same x. The first call computes x [q; k; v]^T, and the other two return
their parts of it. The parts live as long as the attention's call.

It is done if the caller asks for it. A launch and its host time cost more than the product of few
tokens, but the gain on CUDA has not been measured. On the CPU one product took 0.97 to 1.0 of the
speed of three (Llama's layers of 64 to 1024 columns, 1 and 64 tokens, one thread), because rope and
attention read its parts with strides.

The three compute their own products if one of them is not what was joined (an adapter, a hook,
weights that were moved), if a gradient is wanted, and under torch.compile.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..nn.joined import side_by_side
from ..nn.layers import Linear, has_hooks, is_itself
from ..ops import linear

__all__ = ["NAMES", "join", "separate"]

NAMES = ("q_proj", "k_proj", "v_proj")
NO_BIASES = [None] * 3
PARTS = "_gpukern_parts"  # an attention's attribute while its forward runs


def join(attention: torch.nn.Module) -> tuple[type | None, str]:
    """The class of an attention that multiplies once, after its weights were joined; or None and
    why it stays. Weights that were moved since are joined again."""
    kind = type(attention)
    layers: list[Any] = [attention._modules[name] for name in NAMES]
    if hasattr(kind, "_gpukern_class"):
        if all(map(_is_plain, layers)):
            _join_weights(layers)
        return None, "they are one product already"
    if "forward" in vars(attention):
        return None, "its forward was replaced before"
    if other := next((m for m in layers if not _is_plain(m)), None):
        what = "Linear" if type(other) is Linear else type(other).__name__
        return None, f"{NAMES[layers.index(other)]} is no plain nn.Linear ({what})"
    if len({m.bias is None for m in layers}) > 1:
        return None, "some of q_proj, k_proj and v_proj have a bias"
    if len({(m.weight.dtype, m.weight.device, m.in_features) for m in layers}) > 1:
        return None, "q_proj, k_proj and v_proj differ in dtype, device or input"
    if not _calls_them_in_turn(kind):
        return None, f"the forward of {kind.__name__} does not call the three with the same input"
    _join_weights(layers)
    return _joined(kind), ""


def separate(attention: torch.nn.Module) -> None:
    """Gives q, k and v weights of their own again."""
    for name in NAMES:
        layer = attention._modules.get(name)
        for p in () if layer is None else layer.parameters():
            if p.untyped_storage().nbytes() > p.nbytes:
                p.data = p.data.clone()


def _join_weights(layers: list[Any]) -> None:
    for name in ("weight", "bias"):
        held = [m._parameters[name] for m in layers]
        if held[0] is not None:
            _, parts = side_by_side([p.detach() for p in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.data = part


def _is_plain(m: Any) -> bool:
    return (
        isinstance(m, Linear)
        and is_itself(m)
        and all(p is None or type(p) is torch.nn.Parameter for p in m._parameters.values())
        and not m.weight.is_meta
    )


@functools.cache
def _calls_them_in_turn(kind: type) -> bool:
    """Whether a forward calls q_proj, k_proj and v_proj once each, in statements of one block, with
    one variable, which no statement in between reads or writes otherwise."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    used = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in NAMES]
    if sorted(used) != sorted(NAMES):
        return False
    for block in _blocks(tree):
        at = [i for i, statement in enumerate(block) if _calls_in(statement)]
        calls = [call for i in at for call in _calls_in(block[i])]
        if not calls:
            continue
        given = {ast.unparse(call.args[0]) for call in calls if len(call.args) == 1}
        between = [n for s in block[at[0] : at[-1] + 1] for n in ast.walk(s)]
        names = [n for n in between if isinstance(n, ast.Name) and n.id in given]
        inside = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.Lambda)
        return (
            len(calls) == len(NAMES) == len(names)
            and len(given) == 1
            and not any(call.keywords for call in calls)
            and not any(isinstance(n, (*inside, ast.IfExp)) for n in between)
        )
    return False


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements, innermost first."""
    found = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                found.append(block)
    return found[::-1]


def _calls_in(statement: ast.stmt) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in NAMES
        and ast.unparse(node.func.value) == "self"
    ]


# ---- the forward ---------------------------------------------------------------------------------


class _Parts:
    """The products of one call of an attention."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        # x, its version and the products: replaced at once, since threads may share an attention
        self.held: tuple[Tensor, int, tuple[Tensor, ...]] | None = None

    def __call__(self, index: int, x: Tensor) -> Tensor:
        held = self.held
        if held is None and (whole := _whole(self.layers, x)) is not None:
            out = linear(x, *whole)
            held = x, _version(x), out.split([m.out_features for m in self.layers], -1)
            self.held = held
        if held is not None and x is held[0] and _version(x) == held[1]:
            return held[2][index]
        return self.layers[index](x)


def _version(x: Tensor) -> int:
    """Changes when x is written in place. Tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version


def _whole(layers: list[Any], x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """[q; k; v] and their biases, if the three are still what was joined and no gradient is
    wanted."""
    # The same as `_is_plain`, which takes 10 us for three layers, as long as the two products that
    # are saved.
    if type(x) is not Tensor or has_hooks(layers[0]):
        return None
    weights, biases = [], []
    for m in layers:
        own = m.__dict__
        if m.__class__ is not Linear or "forward" in own or m.activation != "none":
            return None
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return None
        if own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return None
        weights.append(own["_parameters"].get("weight"))
        biases.append(own["_parameters"].get("bias"))
    if torch.is_grad_enabled():
        given = [x, *weights, *biases]
        if any(p is not None and p.requires_grad for p in given):
            return None
    weight = _together(weights)
    if weight is None or biases == NO_BIASES:
        return None if weight is None else (weight, None)
    bias = _together(biases)
    return None if bias is None else (weight, bias)


def _together(tensors: list[Any]) -> Tensor | None:
    """One tensor over all rows, if they follow each other in the memory of the first."""
    first = tensors[0]
    if first is None:
        return None
    at, rows = first.data_ptr(), 0
    dtype, columns = first.dtype, first.shape[1:]
    for t in tensors:
        if type(t) is not Parameter or t.dtype is not dtype or not t.is_contiguous():
            return None
        if t.data_ptr() != at or t.shape[1:] != columns:
            return None
        at += t.nbytes
        rows += t.shape[0]
    storage = first.untyped_storage()
    if at > storage.data_ptr() + storage.nbytes():
        return None  # they are neighbours by chance
    return first.as_strided((rows, *columns), first.stride())


def _projection(index: int) -> property:
    """The layer itself, but inside the attention's forward a call of its part."""

    def get(self: Any) -> Any:
        layer = self._modules.get(NAMES[index])
        if layer is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {NAMES[index]!r}")
        if torch.compiler.is_compiling():
            return layer
        parts = vars(self).get(PARTS)
        return layer if parts is None else functools.partial(parts, index)

    return property(get)


@functools.cache
def _joined(kind: type) -> type:
    """The subclass keeps the class's name, as reports and `_no_split_modules` name it."""
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        vars(self)[PARTS] = _Parts([self._modules[name] for name in NAMES])
        try:
            return plain(self, *args, **kwargs)
        finally:
            vars(self).pop(PARTS, None)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Pickle finds classes by name, and this class's name belongs to the attention's own class.
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _empty, (kind,), *state

    own: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
        "_gpukern_class": kind,
    }
    own |= {name: _projection(i) for i, name in enumerate(NAMES)}
    return type(kind.__name__, (kind,), own)


def _empty(kind: type) -> Any:
    made = _joined(kind)
    return made.__new__(made)
