# SPDX-License-Identifier: BSD-3-Clause
"""Joins quantised layers that multiply the same tensor into one product: q, k and v of attention,
gate and up of an MLP.

The first of these layers quantises the activations once and computes the product with all weights
(joined.py). The other layers return their columns of the result. So a decoding step launches one
quantisation and one product for q, k and v, instead of three of each. serve/fused.py does the same
with a forward of its own.

`join` finds the layers. Their module must call all of them on the same tensor. It must only split
the columns of their results, because these are columns of a larger tensor. Our own modules do so, and
those of transformers whose source shows it.
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


class Products:
    """The products of all layers with a tensor x, kept until every layer has returned its own."""

    def __init__(self, x: Tensor, parts: tuple[Tensor, ...]) -> None:
        self.x, self.parts = x, parts
        self.state = _state(x)

    def are_of(self, x: Tensor) -> bool:
        """Whether these are still the products with x."""
        return x is self.x and _state(x) == self.state


def _state(x: Tensor) -> tuple[int, bool] | None:
    """A value that changes if x is written to, or if inference_mode begins or ends: autograd refuses
    results of inference_mode. None under a compiler: the modules that `join` accepts write to no tensor
    between their layers."""
    if torch.compiler.is_compiling():
        return None
    return _version(x), torch.is_inference_mode_enabled()


class Joint:
    """Layers whose products are computed at once. Each of them has the attribute ``joint``: (the
    Joint, its own place in it).

    A call of the first layer computes all products. A later layer returns its part if it is called on
    the same tensor, which must not have been written to in between. (A tensor of inference_mode does not
    count its writes, so such a write is not noticed.)

    Nothing is joined if a gradient is needed. If a layer's tensors were changed or moved, the weights
    are joined again. If that is not possible, each layer multiplies by itself.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers = tuple(layers)
        self.whole: Joined | None = None
        self.products: Products | None = None
        # (owner, name, tensor, version) of each of the layers' tensors when `whole` was made
        self.sources: list[tuple[dict, str, Tensor, int]] = []

    def build(self) -> bool:
        """Joins the weights. Returns False if they cannot be joined."""
        self.products, self.sources = None, []
        self.whole = joined(self.layers)
        if self.whole is None:
            for layer in self.layers:
                vars(layer).pop("joint", None)
            return False
        for layer in self.layers:
            for owner in (layer._parameters, layer._buffers):
                for name, t in owner.items():
                    if t is not None:
                        self.sources.append((owner, name, t, _version(t)))
        return True

    def stale(self) -> None:
        """Forgets the joined weights. Called if a layer's tensors are replaced."""
        self.whole = self.products = None

    def part(self, place: int, x: Tensor) -> Tensor | None:
        """The product of the layer at `place` with x. None if the layer must compute it itself."""
        products = self.products
        if place == 0 or place == len(self.layers) - 1:
            self.products = None
        if torch.is_grad_enabled() and self._needs_gradient(x):
            return None
        if place:
            return products.parts[place] if products is not None and products.are_of(x) else None
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
        self.products = Products(x, parts)
        return parts[0]

    def _needs_gradient(self, x: Tensor) -> bool:
        return x.requires_grad or any(
            layer.bias is not None and layer.bias.requires_grad for layer in self.layers
        )

    def _ready(self) -> bool:
        if torch.compiler.is_compiling():
            return self.whole is not None  # if a tensor was replaced, `stale` has set it to None
        if self.whole is not None and all(
            owner.get(name) is t and _version(t) == version
            for owner, name, t, version in self.sources
        ):
            return True
        x = self.layers[0]._buffers[self.layers[0].names[0]] if self.layers[0].names else None
        if x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # joined weights made now would be in the memory of the graph
        return self.build()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "whole": None, "products": None, "sources": []}


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def join(model: torch.nn.Module) -> dict[str, str]:
    """Joins the quantised layers of a model's attention and MLPs. Returns the names of their modules,
    with the names of the layers that were joined."""
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
