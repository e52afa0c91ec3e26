# SPDX-License-Identifier: BSD-3-Clause
"""Quantised layers that read one tensor multiply together: q, k and v of attention, gate and up of
an MLP.

The first of them that is called quantises the activations once and computes the product with all
weights (joined.py). The others return their columns of it. A decoding step of a transformers model
then launches as many kernels as in 16 bits: a quantisation and a product for q, k and v, where it
was three of each. serve/fused.py does the same with a forward of its own.

`join` finds the layers. Their modules must call them on one tensor and must only split the columns
of the results, because these are columns of a larger tensor: our own modules do, and those of
transformers whose source says so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import transforms_active
from .joined import Joined, joined
from .layers import MLP, Attention
from .quant.quantized import QuantizedLinear, rows_of, taken
from .similar import SimilarMLP

__all__ = ["Joint", "join"]

ATTENTION, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class Held:
    """The products with a tensor x, until each layer has its own."""

    def __init__(self, x: Tensor, parts: tuple[Tensor, ...]) -> None:
        self.x, self.parts = x, parts
        self.state = _state(x)

    def serve(self, x: Tensor) -> bool:
        return x is self.x and _state(x) == self.state


def _state(x: Tensor) -> tuple[int, bool] | None:
    """Changes if x is written to, and outside of inference_mode, whose results autograd refuses.
    None for a compiler, which writes to no tensor between the layers of a module that we know."""
    if torch.compiler.is_compiling():
        return None
    return _version(x), torch.is_inference_mode_enabled()


class Joint:
    """Layers whose products are computed at once. Each layer has it, with its own place, as the
    attribute ``joint``.

    It computes nothing where a gradient is needed. If a layer's tensors were changed or moved, the
    weights are joined again; if that is not possible, each layer multiplies by itself.

    The first layer always computes. The products of its call serve the others if they are called on
    the same tensor, which was not written to in between. A tensor that inference_mode made does not
    count its writes, so that such a write is not seen.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers = tuple(layers)
        self.whole: Joined | None = None
        self.held: Held | None = None
        self.seen: list[tuple[dict, str, Tensor, int]] = []

    def build(self) -> bool:
        """Joins the weights. False if they cannot be joined."""
        self.held, self.seen = None, []
        self.whole = joined(self.layers)
        if self.whole is None:
            for layer in self.layers:
                vars(layer).pop("joint", None)
            return False
        for layer in self.layers:
            for owner in (layer._parameters, layer._buffers):
                self.seen += [(owner, n, t, _version(t)) for n, t in owner.items() if t is not None]
        return True

    def stale(self) -> None:
        """Is called where a layer's tensors are replaced."""
        self.whole = self.held = None

    def part(self, place: int, x: Tensor) -> Tensor | None:
        """The product of the layer at `place` with x. None if the layer must compute it itself."""
        held = self.held
        if place == 0 or place == len(self.layers) - 1:
            self.held = None
        if torch.is_grad_enabled() and self._needs_gradient(x):
            return None
        if place:
            return held.parts[place] if held is not None and held.serve(x) else None
        if not self._ready():
            return None
        whole = self.whole
        assert whole is not None
        first = self.layers[0]
        rows = rows_of(taken("QuantizedLinear", x, first.in_features))
        out = whole(rows).reshape(*x.shape[:-1], sum(whole.sizes))
        parts = out.split(whole.sizes, -1)
        if not torch.compiler.is_compiling() and not transforms_active():
            # A caller may add to a product in place, as to that of nn.Linear. Autograd refuses that
            # for the views of a split.
            parts = tuple(part.data for part in parts)
        self.held = Held(x, parts)
        return parts[0]

    def _needs_gradient(self, x: Tensor) -> bool:
        return x.requires_grad or any(
            layer.bias is not None and layer.bias.requires_grad for layer in self.layers
        )

    def _ready(self) -> bool:
        if torch.compiler.is_compiling():
            return self.whole is not None  # `stale` was called if a tensor was replaced
        if self.whole is not None and all(
            owner.get(name) is t and _version(t) == version for owner, name, t, version in self.seen
        ):
            return True
        x = self.layers[0]._buffers[self.layers[0].names[0]] if self.layers[0].names else None
        if x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # the joined weights would lie in the graph's memory
        return self.build()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "whole": None, "held": None, "seen": []}


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def join(model: torch.nn.Module) -> dict[str, str]:
    """Joins the quantised products of a model's attention and MLPs. Returns the names of the modules
    whose products were joined, and which they are."""
    found = {}
    for name, module in model.named_modules():
        for names in _names_of(module):
            layers = [_inner(module._modules.get(n)) for n in names]
            if any(
                type(layer) is not QuantizedLinear or "joint" in vars(layer) for layer in layers
            ):
                continue
            if any(t.is_meta for layer in layers for t in layer._tensors().values()):
                continue
            joint = Joint(layers)
            if joint.build():
                for place, layer in enumerate(layers):
                    layer.joint = joint, place
                found[name] = ", ".join(names)
    return found


def leave(model: torch.nn.Module) -> None:
    """Undoes `join`."""
    for module in model.modules():
        vars(module).pop("joint", None)


def _inner(module: Any) -> Any:
    """The layer that an adapter of PEFT wraps, or the layer itself."""
    base = getattr(module, "get_base_layer", None)
    return module if base is None else base()


def _names_of(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """The layers of a module that may be joined, in the order in which they are called."""
    if "forward" in vars(module):
        return []
    if type(module) in (MLP, SimilarMLP):
        return [GATED]
    if type(module) is Attention or ATTENTION[0] in module._modules and _splits(type(module)):
        return [ATTENTION]
    return []


_known: dict[type, bool] = {}


def _splits(kind: type) -> bool:
    """Whether the source of a class's forward calls q_proj, k_proj and v_proj in this order, once
    each, on hidden_states, and splits their columns into heads."""
    if kind not in _known:
        try:
            source = inspect.getsource(inspect.unwrap(kind.forward))
        except (OSError, TypeError):
            source = ""
        calls = re.findall(r"self\.([qkv])_proj\b", source)
        split = re.findall(r"self\.[qkv]_proj\(hidden_states\)\.view\(\*?hidden_shape\)", source)
        shape = re.search(r"hidden_shape = \(\*input_shape, -1, self\.head_dim\)", source)
        _known[kind] = calls == ["q", "k", "v"] and len(split) == 3 and shape is not None
    return _known[kind]
