# SPDX-License-Identifier: BSD-3-Clause
"""Weights in the file format of compressed-tensors, which transformers loads:
`quantize_directory(layout="compressed-tensors")` writes it.

A scale is rounded to the weight's dtype before the codes are chosen, because loaders keep scales in
that dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import unpack_weight
from .schemes import E4M3, SCHEMES, Tensors

__all__ = ["CONFIGS", "config_of", "multiple_of", "tensors_of"]


def _group(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> dict:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        **({} if group is None else {"group_size": group}),
        "dynamic": False,
        **more,
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True}
# A recipe: the format's name, and what the configuration says of weights and activations.
CONFIGS: dict[str, tuple[str, dict, dict | None]] = {
    "fp8": (
        "float-quantized",
        _group(8, "float", "channel"),
        {**_group(8, "float", "token"), **_BY_TOKEN},
    ),
    "fp8-block": (
        "float-quantized",
        _group(8, "float", "block", block_structure=[128, 128]),
        {**_group(8, "float", "group", 128), "dynamic": True},
    ),
    "int8": (
        "int-quantized",
        _group(8, "int", "channel"),
        {**_group(8, "int", "token"), **_BY_TOKEN},
    ),
    "w8": ("pack-quantized", _group(8, "int", "channel"), None),
    "w4": ("pack-quantized", _group(4, "int", "group", 128), None),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _group(4, "float", "tensor_group", 16, scale_dtype="torch.float8_e4m3fn"),
        None,
    ),
}
_MULTIPLE = {"w4": 128, "w8": 4, "nvfp4": 16}


def multiple_of(recipe: str) -> int:
    """K must be a multiple of this: words and groups of the format are whole."""
    return max(SCHEMES[recipe].multiple, _MULTIPLE.get(recipe, 1))


def tensors_of(recipe: str, w: Tensor) -> Tensors:
    """The tensors that store a layer's weight [N, K]. Their names follow the layer's name."""
    n, k = w.shape
    scheme = SCHEMES[recipe]
    made = scheme.pack(w)
    if recipe == "nvfp4":
        codes = unpack_weight(made["weight_packed"], n, k, "nvfp4")
        return {
            "weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4,
            "weight_scale": made["weight_scale"].view(torch.uint8).mT.contiguous().view(E4M3),
            "weight_global_scale": 1 / made["weight_global_scale"].reshape(1),
        }
    packed = recipe in ("w4", "w8")
    scale = (made["weight_scale"].mT if packed else made["weight_scale"]).to(w.dtype).contiguous()
    made = scheme.pack(w, step=scale.float())
    if not packed:
        return {"weight": made["weight_codes"], "weight_scale": scale}
    bits = scheme.bits
    codes = unpack_weight(made["weight_packed"], n, k, "int4" if bits == 4 else "int8")
    return {
        "weight_packed": _words(codes.int() + 2 ** (bits - 1), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] from 0 -> int32 [N, K bits / 32], low bits first."""
    places = torch.arange(0, 32, bits, device=codes.device)
    words = (codes.long().unflatten(1, (-1, 32 // bits)) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def config_of(recipe: str, ignore: Sequence[str]) -> dict[str, Any]:
    """config.json's quantization_config; ignore: the linear layers that stay
    unquantised."""
    name, weights, activations = CONFIGS[recipe]
    group = {"targets": ["Linear"], "weights": weights}
    if activations is not None:
        group["input_activations"] = activations
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
    }
