# SPDX-License-Identifier: BSD-3-Clause
"""Makes layers of the 4-bit weights of other tools: compressed-tensors (pack-quantized, which may have
8 bits, too, and nvfp4-pack-quantized), gpt-oss (MXFP4) and bitsandbytes (NF4, FP4).

Codes of compressed-tensors and gpt-oss are packed in our order and not rounded again. A code of
bitsandbytes is an index into a table of 16 numbers, which no kernel of ours reads. Such a weight is
decoded to 16 bits, or rounded again by a recipe that the caller names.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops import pack_weight
from ..layers import Linear
from .importers import _check, _count, _fields, _groups, _layer, _matrix, _with_zeros, kept
from .quantized import QuantizedLinear
from .schemes import E4M3, IMPORTED, SCHEMES, ceil_div

__all__ = ["from_bitsandbytes", "from_mxfp4", "from_nvfp4", "from_pack_quantized"]


def from_pack_quantized(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Any,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    bias: Tensor | None = None,
) -> QuantizedLinear:
    """A layer of compressed-tensors' format "pack-quantized": integers of 4 or 8 bits.

    Args:
        weight_packed: int32 [N, ceil(K bits / 32)]: ``code + 2^(bits - 1)`` along K, low bits first.
        weight_scale: [N, groups] floating; the weight is ``(code - zero_point) * scale``.
        weight_shape: (N, K), numbers or a tensor.
        weight_zero_point: int32 [ceil(N bits / 32), groups], packed along N in the same way; None is
            0.
        weight_g_idx: [K], the group of each k (act-order); None or negative: groups in order.
        bits: 4 or 8.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit; groups of several sizes.
    """
    who = "from_pack_quantized"
    if bits not in (4, 8):
        raise ValueError(f"{who}: bits must be 4 or 8, got {bits}")
    n, k = (int(size) for size in weight_shape)
    each = 32 // bits
    _check(who, "weight_packed", weight_packed, torch.int32, (n, ceil_div(k, each)))
    groups = _count(who, "weight_scale", weight_scale.mT)
    _check(who, "weight_scale", weight_scale, None, (n, groups))
    _groups(who, k, groups)
    codes = _fields(weight_packed, bits).flatten(1)[:, :k]
    order = None  # columns sorted by their groups
    if weight_g_idx is not None and not bool((weight_g_idx < 0).any()):
        _check(who, "weight_g_idx", weight_g_idx, None, (k,))
        order = torch.sort(weight_g_idx, stable=True).indices
        want = torch.arange(groups, device=order.device).repeat_interleave(k // groups)
        if not torch.equal(weight_g_idx[order].long(), want):
            raise ValueError(
                f"{who}: weight_g_idx must have {k // groups} columns in each of the {groups} groups"
            )
        codes = codes[:, order]
    if weight_zero_point is None:
        zeros = torch.full((groups, n), 2 ** (bits - 1), dtype=torch.int32, device=codes.device)
    else:
        _check(
            who, "weight_zero_point", weight_zero_point, torch.int32, (ceil_div(n, each), groups)
        )
        zeros = _fields(weight_zero_point.mT.contiguous(), bits).flatten(1)[:, :n]
    if weight_zero_point is None and bits == 4:
        tensors = {
            "weight_packed": pack_weight((codes - 8).to(torch.int8), "int4"),
            "weight_scale": kept(weight_scale.mT),
        }
        layer = _layer(who, "w4", n, k, tensors, bias)
    else:
        layer = _with_zeros(who, codes, zeros, weight_scale.mT, bits, bias)
    if order is not None and not torch.equal(order, torch.arange(k, device=order.device)):
        layer.order_input(order)
    return layer


def _nibbles(x: Tensor) -> Tensor:
    """uint8 [..., W] -> codes [..., 2 W], the low half of a byte first."""
    return torch.stack((x & 15, x >> 4), -1).flatten(-2)


def from_nvfp4(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_global_scale: Tensor,
    *,
    bias: Tensor | None = None,
) -> QuantizedLinear:
    """A layer of compressed-tensors' format "nvfp4-pack-quantized": 4-bit floats, with an
    e4m3 scale for every 16. Activations stay 16 bits, so the files' input_global_scale is not
    needed.

    Args:
        weight_packed: uint8 [N, K / 2], e2m1 codes, even k in the low half.
        weight_scale: float8_e4m3fn [N, K / 16].
        weight_global_scale: [] or [1]; the weight is ``code * weight_scale / weight_global_scale``.
            ModelOpt's weight_scale_2 multiplies: pass ``1 / weight_scale_2``.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit, or a global scale that is no finite number
            above 0.
    """
    who = "from_nvfp4"
    n, half = _matrix(who, "weight_packed", weight_packed, torch.uint8)
    k = 2 * half
    if k % 16:
        raise ValueError(f"{who}: K must be a multiple of 16, got {k}")
    _check(who, "weight_scale", weight_scale, E4M3, (n, k // 16))
    if weight_global_scale.numel() != 1:
        raise ValueError(
            f"{who}: weight_global_scale must be one number, got {list(weight_global_scale.shape)}"
        )
    whole = weight_global_scale.detach().reshape(()).double()
    if not 0 < whole.item() < math.inf:
        raise ValueError(
            f"{who}: weight_global_scale must be a finite number above 0, got {whole.item()}"
        )
    tensors = {
        "weight_packed": pack_weight(_nibbles(weight_packed), "nvfp4"),
        "weight_scale": weight_scale.view(torch.uint8).mT.contiguous().view(E4M3),
        "weight_global_scale": (1 / whole).float(),
    }
    return _layer(who, "nvfp4", n, k, tensors, bias)


def from_mxfp4(blocks: Tensor, scales: Tensor, *, bias: Tensor | None = None) -> QuantizedLinear:
    """A layer of gpt-oss's ``*_blocks`` and ``*_scales``, of one expert: ``from_mxfp4(blocks[e],
    scales[e])``.

    Args:
        blocks: uint8 [N, K / 32, 16], e2m1 codes, even k in the low half.
        scales: uint8 [N, K / 32]; the weight is ``code * 2^(scale - 127)``.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit.

    OCP Microscaling Formats (MX) Specification 1.0.
    """
    who = "from_mxfp4"
    if not isinstance(blocks, Tensor) or blocks.dim() != 3 or blocks.shape[2] != 16:
        got = list(blocks.shape) if isinstance(blocks, Tensor) else type(blocks).__name__
        raise ValueError(
            f"{who}: blocks must be [N, K / 32, 16], of one expert, got {got}; pass blocks[e] and "
            f"scales[e]"
        )
    n, groups, _ = blocks.shape
    _check(who, "blocks", blocks, torch.uint8, (n, groups, 16))
    _check(who, "scales", scales, torch.uint8, (n, groups))
    tensors = {
        "weight_packed": pack_weight(_nibbles(blocks.flatten(1)), "mxfp4"),
        "weight_scale": scales.mT.contiguous().view(torch.float8_e8m0fnu),
    }
    return _layer(who, "mxfp4", n, 32 * groups, tensors, bias)


def from_bitsandbytes(
    weight: Tensor,
    state: Mapping[str, Any],
    recipe: str = "bf16",
    *,
    bias: Tensor | None = None,
) -> torch.nn.Module:
    """A layer of bitsandbytes' 4 bits (NF4 or FP4).

    Args:
        weight: uint8, N K / 2 bytes in the order of rows, the first of two values in the high half.
        state: what bitsandbytes' ``QuantState.as_dict()`` gives: absmax (float32, or uint8 with
            nested_absmax, nested_quant_map, nested_blocksize and nested_offset), quant_map [16],
            blocksize, shape (N, K).
        recipe: ``"bf16"`` or ``"fp16"``: a `torch_gpukern.nn.Linear` of the decoded weight, rounded
            once. A recipe of `quantize` without calibration (``"w4"``): a `QuantizedLinear`, whose
            weight is rounded again to that recipe's numbers.
        bias: [N].

    Raises:
        ValueError: a missing entry, a dtype or shape that does not fit, another recipe.

    Dettmers et al., "QLoRA" (2023), arXiv:2305.14314.
    """
    who = "from_bitsandbytes"
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    offered = [*halves, *(r for r, s in SCHEMES.items() if r not in IMPORTED and not s.static)]
    if recipe not in offered:
        raise ValueError(f"{who}: recipe must be one of {', '.join(offered)}, got {recipe!r}")
    needed = ["absmax", "quant_map", "blocksize", "shape"]
    if "nested_absmax" in state:
        needed += ["nested_quant_map", "nested_blocksize", "nested_offset"]
    if missing := [name for name in needed if state.get(name) is None]:
        raise ValueError(f"{who}: state has no {', '.join(missing)}")
    n, k = (int(size) for size in state["shape"])
    if (
        not isinstance(weight, Tensor)
        or weight.dtype is not torch.uint8
        or 2 * weight.numel() != n * k
    ):
        got = (
            f"{str(weight.dtype)[6:]} {list(weight.shape)}"
            if isinstance(weight, Tensor)
            else weight
        )
        raise ValueError(f"{who}: weight must be uint8 with {n * k // 2} bytes, got {got}")
    size = int(state["blocksize"])
    absmax = state["absmax"]
    _check(who, "absmax", absmax.reshape(-1), None, (ceil_div(n * k, size),))
    if "nested_absmax" in state:
        nested = state["nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))
        absmax = state["nested_quant_map"].float()[absmax.reshape(-1).long()] * nested[
            : absmax.numel()
        ] + float(state["nested_offset"])
    bytes_ = weight.reshape(-1)
    codes = torch.stack((bytes_ >> 4, bytes_ & 15), -1).flatten()
    scale = absmax.reshape(-1).float().repeat_interleave(size)[: n * k]
    dense = (state["quant_map"].float()[codes.long()] * scale).view(n, k)
    if recipe in halves:
        layer = Linear(k, n, bias is not None, device="meta", dtype=halves[recipe])
        layer.weight = torch.nn.Parameter(dense.to(halves[recipe]), requires_grad=False)
        if bias is not None:
            _check(who, "bias", bias, None, (n,))
            layer.bias = torch.nn.Parameter(bias.detach().to(halves[recipe]), requires_grad=False)
        return layer
    scheme = SCHEMES[recipe]
    if k % scheme.multiple:
        raise ValueError(f"{who}: K must be a multiple of {scheme.multiple}, got {k}")
    return _layer(who, recipe, n, k, scheme.pack(dense), bias)
