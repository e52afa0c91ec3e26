# SPDX-License-Identifier: BSD-3-Clause
"""Decoder layers with few launches.

A decoder layer of transformers launches some 25 small kernels: an add, a norm, three projections,
ten for the rotation, a cache write, and so on. In a decoding step each kernel is so short that its
launch takes about as long. A layer with Llama's structure runs as these nine launches instead:

    1 add the residual and normalise         (and quantise, if the product takes codes)
    2 q, k and v as one product
    3 QK norm, rotation and the write into the cache
    4 attention
    5 o
    6 as 1
    7 gate and up as one product
    8 activation(gate) times up              (and quantise)
    9 down

TransformersModel calls `fuse` once, and runs its network inside `Fused.active`. The names of a
layer's modules do not say what it computes. So `fuse` runs three tokens through the network. It
replaces a layer only if the fused queries, keys, values and result agree with the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn import QuantizedLinear, RMSNorm
from ..nn.joined import Joined, joined
from ..nn.layers import has_hooks
from ..nn.rows import normalised_rms
from ..nn.similar import SimilarMLP, SimilarRMSNorm
from ..ops import geglu, quantize, rms_norm_quantize, silu_mul_quantize, swiglu
from .shards import Summed

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
TOKENS = 3  # of the trial run
# The largest root mean square error of a fused layer's results, relative to their standard deviation:
# in float32, and in dtypes of fewer bits. A layer that computes something else differs by more than
# 1, or by 0.17 if only one of 32 heads computes something else.
EXACT, ROUNDED = 1e-2, 0.1


def is_exact(net: nn.Module) -> bool:
    """Whether the network computes in float32."""
    return all(p.dtype == torch.float32 for p in net.parameters()) and not any(
        isinstance(m, QuantizedLinear) for m in net.modules()
    )


class Norm(NamedTuple):
    """An RMS norm, which multiplies by ``weight + offset``."""

    weight: Tensor | None
    eps: float
    offset: float

    def __call__(self, x: Tensor, residual: Tensor | None, product: Joined | None) -> Any:
        """Adds the residual and normalises. Returns (the input of `product`, x + residual). The input
        is (codes, scale) if the product takes quantised activations."""
        codes = None if product is None else product.codes
        if codes is not None and not self.offset and x.shape[0]:
            quantised, scale, h = rms_norm_quantize(x, self.weight, residual, self.eps, *codes)
            return (quantised, scale), h
        if residual is None:
            out, h = normalised_rms(x, self.weight, self.eps, self.offset, None), x
        else:
            out, h = normalised_rms(x, self.weight, self.eps, self.offset, residual)
        return out if codes is None else quantize(out, *codes), h


def norm_of(module: Any, dtype: torch.dtype) -> Norm | None:
    """The norm that a module computes. None if the module is not an RMS norm, or does more."""
    if "forward" in vars(module) or has_hooks(module):
        return None
    if type(module) is SimilarRMSNorm:
        name, offset, *_ = module._gpukern_rule
        norm = Norm(module.weight, getattr(module, name), offset)
    elif type(module) is RMSNorm and len(module.normalized_shape) == 1:
        eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        norm = Norm(module.weight, eps, module.weight_offset)
    else:
        return None
    if norm.weight is not None and norm.weight.dtype is not dtype:
        return None
    return norm


def times(product: Joined, x: Any, dtype: torch.dtype) -> Tensor:
    """The product with x, which is the first result of a Norm."""
    return product.of_codes(*x, dtype) if isinstance(x, tuple) else product(x)


def inner_of(layer: Any) -> Any:
    """The layer inside a `Summed`, which adds its results over the ranks; any other layer itself."""
    return layer.inner if type(layer) is Summed and not has_hooks(layer) else layer


def total_of(layer: Any) -> Callable[[Tensor], Tensor]:
    """The function that adds a layer's results over the ranks, which is the identity unless the
    layer is a `Summed`."""
    return layer.total if type(layer) is Summed else lambda x: x


class Run:
    """State that the layers share during one run of the network: the angles of the rotation, and the
    norm that the previous layer has computed for the next."""

    def __init__(self, served_by: Any) -> None:
        self.served_by = served_by
        self.hidden: Tensor | None = None  # the result of the previous layer
        self.rows: Tensor | None = None  # the same as [T, H]
        self.normed: Any = None  # the same, normalised for the next layer's first product
        self.rotations: dict[int, tuple] = {}  # by the id of cos, see `angles`
        self.positions: Tensor | None = None

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(cos and sin [T, R / 2] in float32, the row of each token in both)."""
        found = self.rotations.get(id(cos))
        if found is None:
            half = cos.shape[-1] // 2
            rows = tuple(x.flatten(0, -2)[:, :half].float().contiguous() for x in (cos, sin))
            # cos is kept so that no other tensor gets its id
            found = self.rotations[id(cos)] = (*rows, cos)
        if self.positions is None:
            self.positions = torch.arange(found[0].shape[0], device=cos.device)
        return found[0], found[1], self.positions


class FusedLayer:
    """A decoder layer in nine launches. `rules` are the arguments of its attention call."""

    def __init__(self, layer: Any, index: int, products: tuple[Joined, ...], rules: dict) -> None:
        attention, dtype = layer.self_attn, layer.input_layernorm.weight.dtype
        self.qkv, self.o, self.gate_up, self.down = products
        self.first, self.second = (
            norm_of(n, dtype) for n in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.index, self.rules, self.head_dim = index, rules, attention.head_dim
        self.activation = layer.mlp._gpukern_rule[0]
        self.o_total, self.down_total = map(total_of, (attention.o_proj, layer.mlp.down_proj))
        self.heads: dict[str, Any] = {}
        for name in ("q", "k"):
            module = attention._modules.get(f"{name}_norm")
            if module is None:
                continue
            norm = norm_of(module, dtype)
            if norm is None or norm.offset:
                raise ValueError(f"{name}_norm is not a plain RMS norm")
            self.heads |= {f"{name}_weight": norm.weight, "eps": norm.eps}
        if self.first is None or self.second is None:
            raise ValueError("a norm is not a plain RMS norm")
        # The norm and the product of the next layer: this layer computes that norm.
        self.next: tuple[Norm, Joined | None] | None = None

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, run: Run) -> Tensor:
        dtype, served_by = hidden.dtype, run.served_by
        if hidden is run.hidden:
            x, rows = run.normed, run.rows
        else:
            rows = hidden.flatten(0, -2)
            x, rows = self.first(rows, None, self.qkv)
        out = times(self.qkv, x, dtype)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in out.split(self.qkv.sizes, -1)
        )
        step, cache = served_by.step, served_by.cache
        angles = run.angles(cos, sin)
        q = cache.rope_write(q, k, v, *angles, step.slots, self.index, **self.heads)
        if served_by.heard is not None:
            served_by.heard(self.index, q, self.rules)
        out = step.attend(cache, self.index, q, **self.rules).flatten(-2)
        out = self.o_total(self.o(out))
        x, rows = self.second(out, rows, self.gate_up)
        out = self.down_total(self.down_of(times(self.gate_up, x, dtype)))
        if self.next is None:
            return (out + rows).view(hidden.shape)
        norm, product = self.next
        run.normed, run.rows = norm(out, rows, product)
        run.hidden = run.rows.view(hidden.shape)
        return run.hidden

    def down_of(self, gate_up: Tensor) -> Tensor:
        """The MLP's result for the result of its first product."""
        codes, dtype = self.down.codes, gate_up.dtype
        if self.activation == "silu" and codes is not None:
            gate, up = gate_up.split(self.gate_up.sizes, -1)
            return self.down.of_codes(*silu_mul_quantize(gate, up, *codes), dtype)
        if self.activation == "silu":
            return self.down(swiglu(gate_up))
        return self.down(geglu(gate_up, approximate=self.activation))


class Fused:
    """The fused layers of a TransformersModel's network."""

    def __init__(self) -> None:
        self.layers: dict[Any, FusedLayer] = {}
        self.norm: Any = None  # the network's last norm, if the last fused layer computes it

    @contextmanager
    def active(self, served_by: Any) -> Iterator[None]:
        """Inside the context the network runs fused. Outside, its modules are unchanged."""
        run = Run(served_by)
        replaced = []
        try:
            for layer, fused in self.layers.items():
                layer.forward = _layer_forward(fused, run)
                replaced.append(layer)
            if self.norm is not None:
                self.norm.forward = _norm_forward(self.norm, run)
                replaced.append(self.norm)
            yield
        finally:
            for module in replaced:
                del module.forward


def _layer_forward(fused: FusedLayer, run: Run) -> Any:
    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any) -> Tensor:
        return fused(hidden_states, *position_embeddings, run)

    return forward


def _norm_forward(norm: Any, run: Run) -> Any:
    def forward(x: Tensor) -> Tensor:
        if x is run.hidden:
            return run.normed.view(x.shape)
        return type(norm).forward(norm, x)

    return forward


# ---- which layers -------------------------------------------------------------------------------


class Seen:
    """The record of one layer's run: its input, angles and result, and the query and arguments of
    its attention call."""

    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    result: Tensor
    query: Tensor
    rules: dict[str, Any]


def fuse(served_by: Any) -> Fused:
    """Finds the layers of the model that can run fused, and joins their weights."""
    found, net = Fused(), served_by.model
    layers = [m for m in net.modules() if m._modules.keys() == LAYER and _candidate(m)]
    if not layers:
        return found
    cache = served_by.cache
    if cache.num_blocks * cache.block_size < TOKENS:
        return found
    handle = cache.allocate()
    try:
        served_by.begin([handle], [TOKENS])
        seen = _watched(served_by, layers)
        most = EXACT if is_exact(net) else ROUNDED
        for layer in layers:
            if layer in seen and (fused := _fused(layer, seen[layer], served_by, most)) is not None:
                found.layers[layer] = fused
    finally:
        cache.free(handle)
    _chain(found, net, layers)
    return found


def _candidate(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    names = set(attention._modules)
    if not {*PROJECTIONS, "o_proj"} <= names <= {*PROJECTIONS, "o_proj", "q_norm", "k_norm"}:
        return False
    plain = not any("forward" in vars(m) or has_hooks(m) for m in (layer, attention, mlp))
    return plain and type(mlp) is SimilarMLP and hasattr(attention, "layer_idx")


def _watched(served_by: Any, layers: list[Any]) -> dict[Any, Seen]:
    """Runs three tokens through the network and returns a record of each layer."""
    seen: dict[Any, Seen] = {}
    by_index = {layer.self_attn.layer_idx: layer for layer in layers}

    def watch(layer: Any) -> Any:
        def forward(hidden_states: Tensor, *args: Any, **named: Any) -> Any:
            one = seen[layer] = Seen()
            out = type(layer).forward(layer, hidden_states, *args, **named)
            angles = named.get("position_embeddings")
            if isinstance(out, Tensor) and isinstance(angles, tuple) and len(angles) == 2:
                one.hidden, one.angles, one.result = hidden_states, angles, out
            return out

        return forward

    def attended(index: int, query: Tensor, rules: dict[str, Any]) -> None:
        if index in by_index and by_index[index] in seen:
            seen[by_index[index]].query = query.clone()
            seen[by_index[index]].rules = rules

    served_by.heard = attended
    for layer in layers:
        layer.forward = watch(layer)
    try:
        ids = [(17 * i + 3) % min(served_by.vocab, 250) for i in range(TOKENS)]
        served_by.forward(ids, list(range(TOKENS)), [TOKENS - 1], [0], [[]])
    finally:
        served_by.heard = None
        for layer in layers:
            del layer.forward
    return {
        layer: one
        for layer, one in seen.items()
        if hasattr(one, "result") and hasattr(one, "query")
    }


def _fused(layer: Any, seen: Seen, served_by: Any, most: float) -> FusedLayer | None:
    """The fused layer. None if its results differ from those of the layer's own run, which `seen`
    recorded."""
    attention, mlp = layer.self_attn, layer.mlp
    weight = layer.input_layernorm._parameters.get("weight")
    if weight is None or seen.hidden.dtype is not weight.dtype or seen.hidden.shape[0] != 1:
        return None
    products = (
        joined([attention._modules[name] for name in PROJECTIONS]),
        joined([inner_of(attention.o_proj)]),
        joined([mlp.gate_proj, mlp.up_proj]),
        joined([inner_of(mlp.down_proj)]),
    )
    if any(product is None for product in products):
        return None
    cache, slots, index = served_by.cache, served_by.step.slots.long(), attention.layer_idx
    pages = [x[index].flatten(0, 1) for x in (cache.k, cache.v)]
    want = [seen.query, seen.result, *(x[slots].float() for x in pages)]
    for page in pages:  # zeroed, so that rows that the fused layer fails to write differ
        page.view(torch.uint8).index_fill_(0, slots, 0)
    got: dict[str, Tensor] = {}

    def attended(_: int, query: Tensor, rules: dict[str, Any]) -> None:
        got["query"] = query

    run, served_by.heard = Run(served_by), attended
    try:
        with torch.inference_mode():
            fused = FusedLayer(layer, index, products, seen.rules)  # type: ignore[arg-type]
            result = fused(seen.hidden, *seen.angles, run)
            ours = [got["query"], result, *(x[slots].float() for x in pages)]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    finally:
        served_by.heard = None
    for x, y in zip(want, ours, strict=True):
        if x.shape != y.shape:
            return None
        error = (x.float() - y.float()).square().mean().sqrt() / x.float().std()
        if not error.item() <= most:
            return None
    return fused


def _chain(found: Fused, net: Any, layers: list[Any]) -> None:
    """Sets `next` of each fused layer: the first norm and product of the next layer if that is
    fused, or the network's last norm."""
    for module in net.modules():
        inner = module._modules.get("layers")
        if not isinstance(inner, nn.ModuleList) or not any(m in found.layers for m in inner):
            continue
        order = list(inner)
        for layer, after in zip(order, order[1:], strict=False):
            if layer in found.layers and after in found.layers:
                fused = found.layers[after]
                assert fused.first is not None
                found.layers[layer].next = fused.first, fused.qkv
        last, norm = order[-1], module._modules.get("norm")
        if last in found.layers and norm is not None:
            rule = norm_of(norm, last.input_layernorm.weight.dtype)
            if rule is not None:
                found.layers[last].next, found.norm = (rule, None), norm
