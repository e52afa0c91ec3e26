# SPDX-License-Identifier: BSD-3-Clause
"""Joins linear layers that read the same input into one product: q, k and v, or gate and up.

One launch replaces two or three, and activations are quantised only once. serve/fused.py calls
`joined`.

The weights are concatenated into one tensor. The layers keep their parameters and buffers, which
become views of it, so that the weights are in memory once. A tensor whose rows do not form its
first dimension, such as scales, is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import linear
from ..ops.quantize import Granularity
from .layers import Linear, has_hooks
from .quant.quantized import QuantizedLinear
from .quant.schemes import DIMS, SCHEMES, Tensors

__all__ = ["Joined", "joined", "side_by_side"]


class Joined:
    """The product with the concatenated weights of all layers: x [M, K] -> [M, sum of N].

    ``codes`` is the dtype and granularity in which activations are quantised, or None if they are
    not quantised.
    """

    def __init__(self, bias: Tensor | None, sizes: list[int]) -> None:
        self.bias, self.sizes = bias, sizes
        self.codes: tuple[torch.dtype, Granularity] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def of_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product of activations that are already quantised as `codes` says, in dtype."""
        raise NotImplementedError


class _Plain(Joined):
    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> None:
        super().__init__(bias, sizes)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Quantized(Joined):
    def __init__(
        self, recipe: str, tensors: Tensors, bias: Tensor | None, sizes: list[int]
    ) -> None:
        super().__init__(bias, sizes)
        self.scheme, self.tensors = SCHEMES[recipe], tensors
        self.codes = self.scheme.codes

    def __call__(self, x: Tensor) -> Tensor:
        return self.scheme.product(x, self.tensors, sum(self.sizes), self.bias, "none")

    def of_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.scheme.of_codes is not None
        return self.scheme.of_codes(codes, scale, self.tensors, self.bias, "none", dtype)


def joined(layers: Sequence[Any]) -> Joined | None:
    """The layers as one product. None if one of them does more than a product, or if their weights
    cannot be concatenated: an nvfp4 weight, for one, has a scale for the whole weight."""
    sizes = [getattr(layer, "out_features", 0) for layer in layers]
    biases = [layer._parameters.get("bias") for layer in layers]
    same = {type(layer) in (torch.nn.Linear, Linear) for layer in layers}
    if not all(_is_product(layer) for layer in layers) or len(same) != 1:
        return None
    if any(b is None for b in biases) and any(b is not None for b in biases):
        return None
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])  # type: ignore[union-attr]
    if same == {True}:
        weights = [layer.weight for layer in layers]
        if len({(w.dtype, w.device, w.shape[1]) for w in weights}) != 1:
            return None
        whole, parts = side_by_side([w.detach() for w in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part
        return _Plain(whole, bias, sizes)
    recipe = layers[0].scheme
    if any(layer.scheme != recipe for layer in layers):
        return None
    dims = DIMS[recipe]
    layer_tensors = [layer._tensors() for layer in layers]
    if any(t.keys() != layer_tensors[0].keys() for t in layer_tensors):
        return None
    if not all(
        _can_join([t[name] for t in layer_tensors], dims[name], sizes) for name in layer_tensors[0]
    ):
        return None
    tensors = {}
    for name, (dim, _) in dims.items():
        tensors[name], parts = _joined_tensors([t[name] for t in layer_tensors], dim)
        if parts is None:
            continue
        for layer, part in zip(layers, parts, strict=True):
            layer._buffers[name] = part.view(torch.uint8) if name in layer.code_dtypes else part
    return _Quantized(recipe, tensors, bias, sizes)


def _is_product(layer: Any) -> bool:
    """Whether the layer is only a product with a bias: it has no adapter, hook, activation or
    permutation of its input."""
    if type(layer) not in (torch.nn.Linear, Linear, QuantizedLinear):
        return False
    if "forward" in vars(layer) or has_hooks(layer):
        return False
    if getattr(layer, "activation", "none") != "none" or "input_order" in layer._buffers:
        return False
    if type(layer) is QuantizedLinear:
        return True
    weight = layer._parameters.get("weight")
    return type(weight) is torch.nn.Parameter and not weight.is_meta


def _can_join(tensors: list[Tensor], at: tuple[int | None, int], sizes: list[int]) -> bool:
    dim, rows = at
    if dim is None:
        return all(torch.equal(t, tensors[0]) for t in tensors[1:])
    if any(n % rows for n in sizes[:-1]):
        return False
    others = {(t.dtype, t.device, *t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    return len(others) == 1


def _joined_tensors(tensors: list[Tensor], dim: int | None) -> tuple[Tensor, list[Tensor] | None]:
    """The concatenated tensor, and the views of it that may replace the tensors. None for the views
    if they would not be contiguous."""
    if dim is None or len(tensors) == 1:
        return tensors[0], None
    bytes_of = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]
    dtype = tensors[0].dtype
    if dim:
        whole = torch.cat(bytes_of, dim)
        return whole.view(dtype) if dtype.itemsize == 1 else whole, None
    whole, parts = side_by_side(bytes_of)
    if dtype.itemsize == 1:
        return whole.view(dtype), [part.view(dtype) for part in parts]
    return whole, parts


def side_by_side(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One tensor with all rows, and a view of it for each tensor. If the tensors already follow
    each other in one storage, nothing is copied."""
    first, rows = tensors[0], [t.shape[0] for t in tensors]
    at = first.data_ptr()
    for t in tensors:
        if not t.is_contiguous() or t.data_ptr() != at:
            break
        if t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        at += t.numel() * t.element_size()
    else:
        shape = (sum(rows), *first.shape[1:])
        return first.as_strided(shape, first.stride(), first.storage_offset()), tensors
    whole = torch.cat(tensors)
    return whole, list(whole.split(rows))
