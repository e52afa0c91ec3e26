# SPDX-License-Identifier: BSD-3-Clause
"""Experts in few bits: what `quantize` makes of `torch_gpukern.nn.MoE` and of the experts of
transformers.

The weights of all experts, [E, N, K], are packed as one weight [E N', K]. N' is N rounded up to the
rows that share a tile or a block of scales, so the tensors of one expert are a slice.

    fp8, fp8-block, int8
                        activations are quantised, one grouped_gemm of codes multiplies all experts
    w4, w8, w4-zero, mxfp4, nvfp4
                        one weight_gemm with offs multiplies all experts

On CUDA no path waits for the device, and each call has the same bits.

Gale et al., "MegaBlocks" (2022), arXiv:2211.15841; Frantar et al., "MARLIN" (2024),
arXiv:2408.11743.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...ops import (
    dequantize,
    grouped_gemm,
    quantize,
    silu_mul_quantize,
    swiglu,
    unpack_weight,
    weight_gemm,
)
from ...ops.grouped_gemm import bias_gradient
from ...ops.weight_gemm import spread
from ..moe import MoE, grouped_experts, is_transformers_experts, names_of_experts
from ..moe import transformers_experts as forward_of_transformers
from .quantized import HoldsCodes, check_state, taken
from .schemes import DIMS, GROUPED, SCHEMES, Tensors, beside, ceil_div, half_of, nvfp4_whole
from .straight_through import straight_through

__all__ = ["SERVED", "PackedExperts", "QuantizedExperts", "become_experts", "why_not"]

CODES = ("fp8", "fp8-block", "int8")
# the packed recipes, and how an element is decoded from its code
PACKED = {"w4": "int4", "w8": "int8", "w4-zero": "uint4", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
SERVED = (*CODES, *PACKED)
AT_ONCE = 1 << 28  # elements that are decoded at once


def rows_of_expert(recipe: str, n: int) -> int:
    """N': the rows that each expert has in the packed weight."""
    each = max(rows for _, rows in DIMS[recipe].values())
    return ceil_div(n, each) * each


def pack_experts(recipe: str, w: Tensor) -> Tensors:
    """The recipe's tensors of [E, N, K]."""
    n = rows_of_expert(recipe, w.shape[1])
    more = {"whole": nvfp4_whole(w)} if recipe == "nvfp4" else {}  # one for all experts
    parts = [
        SCHEMES[recipe].pack(torch.nn.functional.pad(one, (0, 0, 0, n - one.shape[0])), **more)
        for one in w
    ]
    return side_by_side(recipe, parts)


def side_by_side(recipe: str, parts: list[Tensors]) -> Tensors:
    """One weight of the experts' weights, each of which has whole tiles.

    nvfp4 has one global scale for the whole weight. If the parts have different ones, each is
    multiplied into the scales of its part, which then are float32, and the global scale is 1.
    """
    if recipe == "nvfp4" and not _of_one_global_scale(parts):
        parts = [
            p
            | {
                "weight_scale": p["weight_scale"].float() * p["weight_global_scale"],
                "weight_global_scale": torch.ones_like(p["weight_global_scale"]),
            }
            for p in parts
        ]
    made = {}
    for name, (dim, _) in DIMS[recipe].items():
        if dim is None:
            made[name] = parts[0][name]
            continue
        eight = parts[0][name].dtype.itemsize == 1
        joined = torch.cat([p[name].view(torch.uint8) if eight else p[name] for p in parts], dim)
        made[name] = joined.view(parts[0][name].dtype) if eight else joined
    return made


def _of_one_global_scale(parts: list[Tensors]) -> bool:
    first = parts[0]
    return all(
        p["weight_scale"].dtype is first["weight_scale"].dtype
        and (
            p["weight_global_scale"] is first["weight_global_scale"]
            or bool(p["weight_global_scale"] == first["weight_global_scale"])
        )
        for p in parts
    )


class PackedExperts:
    """The weights [E, N, K] of all experts in few bits, as `grouped_experts` takes them.

    Args:
        recipe: one of SERVED.
        tensors: of `pack_experts`.
        shape: (E, K, N).
    """

    def __init__(self, recipe: str, tensors: Tensors, shape: tuple[int, int, int]) -> None:
        self.recipe, self.tensors, self.shape = recipe, tensors, shape

    def times(self, rows: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """As `ExpertWeights.times`. The gradient of rows goes straight through the rounding."""
        if torch.is_grad_enabled() and (
            rows.requires_grad or (bias is not None and bias.requires_grad)
        ):
            about = (self.recipe, self.shape, tuple(self.tensors))
            return _straight_through(rows, bias, ends, about, *self.tensors.values())
        return self._product(rows, ends, bias)

    def times_swiglu(self, rows: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """As `ExpertWeights.times_swiglu`. A recipe that quantises activations does it in the same
        pass as swiglu, unless a gradient is asked for."""
        codes = SCHEMES[self.recipe].codes
        if codes is None or (torch.is_grad_enabled() and rows.requires_grad):
            return self.times(swiglu(rows), ends, bias)
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return self.times(swiglu(rows), ends, bias)
        made = silu_mul_quantize(*rows.chunk(2, -1), *codes)
        return self._of_codes(*made, ends, bias, rows.dtype)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [E, N, K] that the experts multiply by, rounded to dtype."""
        experts, k, n = self.shape
        rows = rows_of_expert(self.recipe, n)
        at_once = max(1, AT_ONCE // max(rows * k, 1))
        parts = []
        for first in range(0, experts, at_once):
            count = min(at_once, experts - first)
            part = self._slice(first, count)
            parts.append(_decoded(self.recipe, part, count * rows, k, dtype))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(experts, rows, k)[:, :n]

    # ---- the products ----

    def _product(self, rows: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        codes = SCHEMES[self.recipe].codes
        if codes is not None:
            return self._of_codes(*quantize(rows, *codes), ends, bias, rows.dtype)
        _, _, n = self.shape
        half = half_of(rows)
        return weight_gemm(
            rows.to(half),
            self.tensors["weight_packed"],
            beside(self.tensors["weight_scale"], half),
            n,
            PACKED[self.recipe],  # type: ignore[arg-type]
            zero=self.tensors.get("weight_zero"),
            global_scale=self.tensors.get("weight_global_scale"),
            bias=None if bias is None else bias.to(rows.dtype),
            out_dtype=rows.dtype,
            offs=ends,
        )

    def _of_codes(
        self, codes: Tensor, scale: Tensor, ends: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        experts, k, n = self.shape
        weight, scales = (
            self.tensors[name].unflatten(0, (experts, -1)).mT
            for name in ("weight_codes", "weight_scale")
        )
        return grouped_gemm(
            codes,
            weight[..., :n],
            ends,
            scale_a=scale,
            scale_b=scales,
            bias=None if bias is None else bias.to(dtype),
            out_dtype=dtype,
        )

    def _slice(self, first: int, count: int) -> Tensors:
        """The tensors of `count` experts."""
        made = {}
        for name, t in self.tensors.items():
            dim, _ = DIMS[self.recipe][name]
            each = 1 if dim is None else t.shape[dim] // self.shape[0]
            made[name] = t if dim is None else t.narrow(dim, first * each, count * each)
        return made


def _decoded(recipe: str, t: Tensors, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that the tensors stand for, rounded once: the bits of the recipe's own
    decoder, in fewer passes over memory.

    Codes become int8 or e4m3, which `dequantize` multiplies by their scales. The nibble of an e2m1
    code, with its sign moved up and its size to the upper bits of an e4m3 code, is its value times
    2^-6. The factor 2^6 goes into the scale, so scales of 2^122 and more, which no weight has,
    overflow.
    """
    format, scale = PACKED.get(recipe), t.get("weight_scale")
    if format in (None, "nvfp4") or scale is None or dtype is torch.float64:
        return SCHEMES[recipe].decode(t, n, k, dtype)
    groups = scale.shape[0]
    size = k if groups == 1 else next(g for g in (256, 128, 64, 32, 16) if ceil_div(k, g) == groups)
    if size == 16 and groups > 1:  # no kernel has scales of 16
        return SCHEMES[recipe].decode(t, n, k, dtype)
    each = scale.float().mT
    if groups > 1 and size in (64, 256):
        each = each.repeat_interleave(2, 1)[:, : ceil_div(k, size // 2)]
    if format == "mxfp4":
        nibbles = unpack_weight(t["weight_packed"], n, k, "int4").view(torch.uint8)
        codes = nibbles.bitwise_left_shift_(2).bitwise_and_(0x9C).view(torch.float8_e4m3fn)
        return dequantize(codes, each * 64, dtype=dtype)
    codes = unpack_weight(t["weight_packed"], n, k, format).view(torch.int8)  # type: ignore[arg-type]
    if (zero := t.get("weight_zero")) is not None:  # both are 0 to 15
        codes -= spread(zero.view(torch.int8).mT, size, k)
    elif format == "uint4":
        codes -= 8
    return dequantize(codes, each, dtype=dtype)


def _product_of(
    rows: Tensor, bias: Tensor | None, ends: Tensor, about: tuple, *tensors: Tensor
) -> Tensor:
    recipe, shape, names = about
    packed = PackedExperts(recipe, dict(zip(names, tensors, strict=True)), shape)
    with torch.no_grad():
        return packed._product(rows, ends, bias)


def _keep(ctx: Any, inputs: tuple, result: Any) -> None:
    rows, bias, ends, about, *tensors = inputs
    ctx.save_for_backward(ends, *tensors)
    ctx.about = about, rows.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor):
    (recipe, shape, names), dtype, bias_dtype = ctx.about
    ends, *tensors = ctx.saved_tensors
    rows = bias = None
    if ctx.needs_input_grad[0]:
        half = half_of(grad)
        packed = PackedExperts(recipe, dict(zip(names, tensors, strict=True)), shape)
        rows = grouped_gemm(grad.to(half), packed.decoded(half), ends, out_dtype=dtype)
    if ctx.needs_input_grad[1]:
        bias = bias_gradient(grad.contiguous(), ends, True, 2, bias_dtype)
    return rows, bias, None, None, *[None] * len(tensors)


_straight_through = straight_through(_product_of, _keep, _gradients)


# ---- modules -------------------------------------------------------------------------------------


def names_in(module: torch.nn.Module) -> tuple[str, str] | None:
    """The names of a module's experts' weights, up and down. None if it holds no experts."""
    if isinstance(module, MoE):
        return "gate_up_proj", "down_proj"
    return names_of_experts(module) if is_transformers_experts(module) else None


def why_not(module: Any, recipe: str) -> str | None:
    """Why `quantize` leaves a module of experts. None if it does not."""
    names = names_in(module)
    assert names is not None
    if recipe not in SERVED:
        return f"experts have the recipes {', '.join(SERVED)}"
    if "forward" in vars(module):
        return "its forward was replaced before"
    weights = [module._parameters.get(name) for name in names]
    if any(type(w) is not torch.nn.Parameter or w.dim() != 3 for w in weights):
        return "its weights are no parameters [experts, .., ..]"
    if any(w.dtype not in (torch.float32, torch.bfloat16, torch.float16) for w in weights):  # type: ignore[union-attr]
        return f"its weights are {str(weights[0].dtype)[6:]}"  # type: ignore[union-attr]
    if isinstance(module, MoE):
        spread = module.multiply is not grouped_experts
    else:
        spread = bool(getattr(module, "_is_expert_parallel", False))
    return "its experts are spread over ranks" if spread else None


def as_in_linear(module: Any, w: Tensor) -> Tensor:
    """The weights as [E, N, K]."""
    return w.mT if getattr(module, "is_transposed", False) else w


class QuantizedExperts(HoldsCodes):
    """Experts in few bits. `torch_gpukern.nn.quantize` makes the class of a module with experts a
    subclass of this one and of the class that it had.

    A weight ``gate_up_proj`` becomes buffers ``gate_up_proj_codes`` and ``gate_up_proj_scale``, or
    ``_packed``, ``_scale`` and ``_zero``. A transformers module then runs these experts whatever
    its configuration's experts_implementation says.
    """

    shapes: dict[str, tuple[int, int, int]]  # (E, K, N) of each weight

    def _hold_experts(self, recipe: str, packed: dict[str, PackedExperts]) -> None:
        self.shapes = {name: p.shape for name, p in packed.items()}
        self._hold_tensors(
            recipe,
            {
                name + part.removeprefix("weight"): t
                for name, p in packed.items()
                for part, t in p.tensors.items()
            },
        )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Groups may be of another size than the module was made with, and scales of nvfp4 may be
        float32 (see `side_by_side`)."""
        if (state := state_dict.get(f"{prefix}_extra_state")) is not None:
            check_state(state, self.scheme)
        for name in self.names if self.scheme in GROUPED else ():
            held, given = self._buffers[name], state_dict.get(prefix + name)
            if given is None or held is None or name.endswith("_packed"):
                continue
            alike = held.is_floating_point() == given.is_floating_point()
            if alike and given.dim() == 2 and given.shape[1] == held.shape[1]:
                self._buffers[name] = torch.empty_like(given, device=held.device)
        for name in self.names if self.scheme == "nvfp4" else ():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and name.endswith("_scale") and given.dim() == 2:
                self._hold_scales_like(name, given)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _hold_scales_like(self, name: str, given: Tensor) -> None:
        """Has the buffer hold e4m3, as uint8, or float32."""
        held = self._buffers[name]
        self.code_dtypes = {n: d for n, d in self.code_dtypes.items() if n != name}
        if given.dtype.itemsize == 1:
            self.code_dtypes[name] = torch.float8_e4m3fn
        kept = torch.uint8 if given.dtype.itemsize == 1 else torch.float32
        if held is not None and held.dtype is not kept:
            self._buffers[name] = torch.empty_like(held, dtype=kept)

    def packed(self, name: str) -> PackedExperts:
        """A weight of the experts, by the name that its parameter had."""
        held = self._tensors()
        tensors = {part: held[name + part.removeprefix("weight")] for part in DIMS[self.scheme]}
        return PackedExperts(self.scheme, tensors, self.shapes[name])

    def _matrices(self) -> tuple[PackedExperts, PackedExperts]:
        up, down = (self.packed(name) for name in self.shapes)
        return up, down

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _of_kind, (type(self).__bases__[1],), state


class _QuantizedMoE(QuantizedExperts):
    pass


class _QuantizedTransformersExperts(QuantizedExperts):
    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor:
        if top_k_index is None:  # gpt-oss has other names for them
            top_k_index = others.pop("router_indices")
        if top_k_weights is None:
            top_k_weights = others.pop("routing_weights")
        if others:
            raise TypeError(f"QuantizedExperts: unexpected arguments {', '.join(others)}")
        up, down = self._matrices()
        x = taken("QuantizedExperts", hidden_states, up.shape[1])
        out = forward_of_transformers(self, x, top_k_index, top_k_weights, up, down)
        return out.to(hidden_states.dtype)


@functools.cache
def kind_of(before: type) -> type:
    """The class that a module of class `before` has after quantising."""
    ours = _QuantizedMoE if issubclass(before, MoE) else _QuantizedTransformersExperts
    return type(f"Quantized{before.__name__}", (ours, before), {"__module__": __name__})


def _of_kind(before: type) -> Any:
    kind = kind_of(before)
    return kind.__new__(kind)


def become_experts(module: Any, recipe: str, packed: dict[str, PackedExperts]) -> None:
    """Changes the module in place. Its other parameters, buffers and hooks stay."""
    some = None
    for name in packed:
        some = module._parameters.pop(name)
    module.weight_like = torch.empty(0, dtype=some.dtype, device=some.device)
    module.__class__ = kind_of(type(module))
    module._hold_experts(recipe, packed)


def pack_module(module: Any, recipe: str) -> dict[str, PackedExperts]:
    """The packed weights of a module of experts, by their names."""
    names, made = names_in(module), {}
    assert names is not None
    with torch.no_grad():
        for name in names:
            w = as_in_linear(module, module._parameters[name].detach())
            shape = (w.shape[0], w.shape[2], w.shape[1])
            made[name] = PackedExperts(recipe, pack_experts(recipe, w), shape)
    return made


def empty_module(module: Any, recipe: str) -> dict[str, PackedExperts]:
    """The same, zeros, for a state that will be loaded."""
    names, made = names_in(module), {}
    assert names is not None
    for name in names:
        w = as_in_linear(module, module._parameters[name])
        experts, n, k = w.shape
        spec = SCHEMES[recipe].spec(experts * rows_of_expert(recipe, n), k)
        tensors = {
            part: torch.zeros(
                shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=w.device
            ).view(dtype)
            for part, (shape, dtype) in spec.items()
        }
        made[name] = PackedExperts(recipe, tensors, (experts, k, n))
    return made
