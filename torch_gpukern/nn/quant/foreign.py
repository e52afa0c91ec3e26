# SPDX-License-Identifier: BSD-3-Clause
"""Directories of weights that other tools quantised.

`foreign_contents` reads the quantization_config of a directory's config.json, finds the layers by
the names of their tensors, and has the importers (importers.py, importers_4bit.py) make each layer's
codes and scales. All other tensors stay as they are. load_quantized, quantize_directory and serve
read such directories by it.

    quant_method         tensors of a layer                                   becomes
    compressed-tensors   weight_packed or weight, weight_scale, ..            by the group's format
    gptq                 qweight, qzeros, scales, g_idx                       w4-zero, w8, w8-shift
    awq                  qweight, qzeros, scales                              w4-zero
    fp8                  weight, weight_scale_inv                             fp8-block, fp8
    mxfp4 (gpt-oss)      gate_up_proj_blocks, gate_up_proj_scales, ..         experts of mxfp4
    bitsandbytes         weight, weight.absmax, weight.quant_map, ..          16 bits

Experts that the files hold one by one (``experts.0.gate_proj``, Mixtral's ``w1``) become the
tensors of a transformers module that holds all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .experts import SERVED, names_in, rows_of_expert, side_by_side
from .importers import _layer, from_awq, from_compressed_tensors, from_gptq
from .importers_4bit import from_bitsandbytes, from_mxfp4, from_nvfp4, from_pack_quantized
from .quantized import QuantizedLinear, state_of
from .schemes import DIMS, Tensors, ceil_div

__all__ = ["METHODS", "Translated", "translated"]

METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "bitsandbytes")
WHO = "load_quantized"
# the parts of a layer's tensors, by method
PARTS = {
    "compressed-tensors": (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "input_global_scale",
        "input_scale",
        "input_zero_point",
    ),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv", "activation_scale"),
}
# the part that says that a layer is quantised
MARKS = {
    "compressed-tensors": "weight_scale",
    "gptq": "qweight",
    "awq": "qweight",
    "fp8": "weight_scale_inv",
}
# an expert's projections in files: which weight of the module, and which part of it
PROJECTIONS = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
EXPERT = re.compile(r"(?P<module>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>\w+)$")
Get = Callable[[str], Tensor]


class Translated(NamedTuple):
    """A directory's tensors in our names. layers: the quantised layers and their recipes."""

    layers: dict[str, str]
    tensors: dict[str, Tensor]


def translated(
    files: list[Path], opened: Callable[[Path], Any], about: dict[str, Any], model: Any
) -> Translated:
    """The tensors of a directory.

    Args:
        files: its safetensors.
        opened: opens one of them.
        about: the quantization_config.
        model: the model that will hold them, or None where it is not known. It says whether experts
            are one module.

    Raises:
        ValueError: a form that is not read, by its name.
    """
    method = about.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"{WHO}: quant_method is {method!r}; expected one of {', '.join(METHODS)}, or what "
            f"gpukern wrote"
        )
    modules = {} if model is None else dict(model.named_modules())
    with ExitStack() as stack, torch.no_grad():
        open_files = [stack.enter_context(opened(file)) for file in files]
        where = {name: one for one in open_files for name in one.keys()}

        def get(name: str) -> Tensor:
            return where[name].get_tensor(name)

        if method == "bitsandbytes":
            return _bitsandbytes(where, get, about)
        if method == "mxfp4":
            return _gpt_oss(where, get)
        return _joined_experts(_layers(where, get, method, about), modules)


def fitted(contents: Translated, modules: dict[str, Any]) -> Translated:
    """The tensors under the names of the model's modules: Mixtral's experts and router are renamed,
    and experts in 16 bits that the files hold one by one are stacked."""
    layers = {_renamed(n, modules): recipe for n, recipe in contents.layers.items()}
    made, experts = {}, {}
    for name, t in contents.tensors.items():
        owner, _, last = name.rpartition(".")
        name = f"{_renamed(owner, modules)}.{last}" if owner else last
        match = EXPERT.match(name.removesuffix(".weight"))
        module = modules.get(match["module"]) if match else None
        known = match is not None and match["projection"] in PROJECTIONS
        if match is None or not known or module is None or names_in(module) is None:
            made[name] = t
            continue
        weight, place = PROJECTIONS[match["projection"]]
        one = experts.setdefault((match["module"], weight), {})
        one.setdefault(int(match["expert"]), {})[place] = t
    for (at, weight), by_expert in experts.items():
        each = [torch.cat([e[p] for p in sorted(e)]) for _, e in sorted(by_expert.items())]
        whole = torch.stack(each)
        transposed = getattr(modules[at], "is_transposed", False)
        made[f"{at}.{weight}"] = whole.mT.contiguous() if transposed else whole
    return Translated(layers, made)


def _renamed(module: str, modules: dict[str, Any]) -> str:
    """A module's name in the model. Mixtral's files have another one for experts and router."""
    other = re.sub(r"\.block_sparse_moe\.(experts|gate)\b", r".mlp.\1", module)
    root = re.sub(r"\.\d+\.\w+$", "", other) if ".experts." in other else other
    return other if module not in modules and root in modules else module


# ---- layer by layer ------------------------------------------------------------------------------


class _Parts(NamedTuple):
    layers: dict[str, QuantizedLinear]
    others: dict[str, Tensor]


def _layers(where: Any, get: Get, method: str, about: dict[str, Any]) -> _Parts:
    """Each layer by its importer, and the tensors of no quantised layer."""
    mark, parts = MARKS[method], PARTS[method]
    found = [n.rpartition(".")[0] for n in where if n.rpartition(".")[2] == mark]
    if not found:
        raise ValueError(f"{WHO}: quant_method is {method}, and no tensor is called {mark}")
    make = {
        "compressed-tensors": _compressed,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
    }[method](about)
    layers, used = {}, set()
    for name in found:
        own = {part: f"{name}.{part}" for part in parts if f"{name}.{part}" in where}
        used.update(own.values())
        try:
            layers[name] = make(name, {part: get(full) for part, full in own.items()})
        except (ValueError, KeyError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{WHO}: layer {name} of {method}: {what}") from None
    return _Parts(layers, {n: get(n) for n in where if n not in used})


def _must(about: dict[str, Any], field: str, *expected: Any) -> Any:
    """The value of a field of the configuration, if it is one of those that are read."""
    value = about.get(field)
    if value not in expected:
        some = " or ".join(map(repr, expected))
        raise ValueError(f"{WHO}: {field} is {value!r}; expected {some}")
    return value


def _gptq(about: dict[str, Any]) -> Callable[[str, Tensors], QuantizedLinear]:
    bits = _must(about, "bits", 2, 3, 4, 8)
    form = _must(about, "checkpoint_format", None, "gptq", "gptq_v2")

    def make(name: str, t: Tensors) -> QuantizedLinear:
        version = 2 if form == "gptq_v2" else 1
        return from_gptq(
            t["qweight"], t["qzeros"], t["scales"], t.get("g_idx"), bits=bits, version=version
        )

    return make


def _awq(about: dict[str, Any]) -> Callable[[str, Tensors], QuantizedLinear]:
    _must(about, "bits", 4)
    _must({"version": str(about.get("version", "gemm")).lower()}, "version", "gemm")
    return lambda name, t: from_awq(t["qweight"], t["qzeros"], t["scales"])


def _fp8(about: dict[str, Any]) -> Callable[[str, Tensors], QuantizedLinear]:
    _must(about, "activation_scheme", None, "dynamic")
    blocks = about.get("weight_block_size")
    if blocks not in (None, [128, 128]):
        raise ValueError(f"{WHO}: weight_block_size is {blocks}; expected [128, 128]")

    def make(name: str, t: Tensors) -> QuantizedLinear:
        if "activation_scale" in t:
            raise ValueError("activation_scale (static activations) is not read")
        return _float8(t["weight"], t["weight_scale_inv"], None, blocks is not None)

    return make


def _float8(
    weight: Tensor, scale: Tensor, input_scale: Tensor | None, blocks: bool
) -> QuantizedLinear:
    """A layer of 8-bit floats. A weight of one block alone does not show that its scale is of
    blocks."""
    layer = from_compressed_tensors(weight, scale, input_scale)
    if not blocks or layer.scheme != "fp8":
        return layer
    n, k = weight.shape
    if scale.numel() != ceil_div(n, 128) * ceil_div(k, 128):
        raise ValueError(f"weight_scale must have a scale a 128x128, got {list(scale.shape)}")
    tensors = {"weight_codes": weight.contiguous(), "weight_scale": scale.float().reshape(1, 1)}
    return _layer(WHO, "fp8-block", n, k, tensors, None)


def _compressed(about: dict[str, Any]) -> Callable[[str, Tensors], QuantizedLinear]:
    for field in ("kv_cache_scheme", "transform_config"):
        if about.get(field):
            raise ValueError(f"{WHO}: {field} is not read; expected none, got {about[field]}")
    sparsity = (about.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"{WHO}: sparsity_config has the format {sparsity!r}; expected 'dense'")
    groups = list((about.get("config_groups") or {}).values())
    if not groups:
        raise ValueError(f"{WHO}: quantization_config of compressed-tensors has no config_groups")

    def make(name: str, t: Tensors) -> QuantizedLinear:
        group = _group_of(groups, name)
        form = group.get("format") or about.get("format")
        return _of_format(form, group.get("weights") or {}, group.get("input_activations"), t)

    return make


def _group_of(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The group of a layer: that which names it, or else that of all Linear."""

    def names(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], name) is not None
        return target == name

    for group in groups:
        if any(names(t) for t in group.get("targets", ())):
            return group
    for group in groups:
        if "Linear" in group.get("targets", ()):
            return group
    raise ValueError("no group of config_groups has it among its targets")


def _of_format(
    form: str | None, weights: dict[str, Any], inputs: dict[str, Any] | None, t: Tensors
) -> QuantizedLinear:
    """A layer of one of compressed-tensors' formats."""
    bits, kind = weights.get("num_bits"), weights.get("type")
    if form == "pack-quantized":
        if inputs is not None:
            raise ValueError(
                f"{form} with input_activations of {inputs.get('num_bits')} bits is not read"
            )
        return from_pack_quantized(
            t["weight_packed"],
            t["weight_scale"],
            t["weight_shape"],
            t.get("weight_zero_point"),
            t.get("weight_g_idx"),
            bits=bits,  # type: ignore[arg-type]
        )
    if form == "nvfp4-pack-quantized":
        return from_nvfp4(t["weight_packed"], t["weight_scale"], t["weight_global_scale"])
    if form == "mxfp4-pack-quantized":
        packed = t["weight_packed"]
        return from_mxfp4(packed.unflatten(1, (-1, 16)), t["weight_scale"])
    eight = (
        form in ("float-quantized", "naive-quantized", "int-quantized", "mxfp8-quantized")
        and bits == 8
    )
    if not eight:
        raise ValueError(f"the format {form!r} of {bits}-bit {kind} weights is not read")
    if "weight_zero_point" in t or "input_zero_point" in t:
        raise ValueError(f"{form} with zero points is not read")
    if kind == "int":
        return _integers(inputs, t)
    if inputs is None:
        raise ValueError(f"{form} with 16-bit activations beside 8-bit floats is not read")
    _check_inputs(inputs, "float")
    blocks = weights.get("strategy") == "block"
    if blocks and weights.get("block_structure") not in (None, [128, 128]):
        raise ValueError(f"{form} with blocks of {weights['block_structure']} is not read")
    return _float8(t["weight"], t["weight_scale"], _static(inputs, t), blocks)


def _check_inputs(inputs: dict[str, Any], kind: str) -> None:
    if inputs.get("num_bits") != 8 or inputs.get("type") != kind or not inputs.get("symmetric"):
        raise ValueError(
            f"input_activations of {inputs.get('num_bits')}-bit {inputs.get('type')}, symmetric "
            f"{inputs.get('symmetric')}, are not read; expected symmetric 8-bit {kind}"
        )


def _static(inputs: dict[str, Any], t: Tensors) -> Tensor | None:
    return None if inputs.get("dynamic") else t["input_scale"]


def _integers(inputs: dict[str, Any] | None, t: Tensors) -> QuantizedLinear:
    """int8 weights with a scale a row or one scale."""
    weight, scale = t["weight"], t["weight_scale"]
    if weight.dtype is not torch.int8 or weight.dim() != 2:
        raise ValueError(f"weight must be int8 [N, K], got {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    if scale.numel() not in (1, n):
        raise ValueError(f"weight_scale must have 1 or {n} numbers, got {list(scale.shape)}")
    rows = scale.reshape(-1, 1).expand(n, 1).contiguous()
    if inputs is None:
        words = torch.tensor([n, k])
        packed = (weight.int() + 128).to(torch.uint8)
        packed = torch.nn.functional.pad(packed, (0, -k % 4)).contiguous().view(torch.int32)
        return from_pack_quantized(packed, rows, words, bits=8)
    _check_inputs(inputs, "int")
    tensors = {"weight_codes": weight.contiguous(), "weight_scale": rows.float()}
    static = _static(inputs, t)
    if static is None:
        return _layer(WHO, "int8", n, k, tensors, None)
    tensors["input_scale"] = static.float().reshape(())
    return _layer(WHO, "int8-static", n, k, tensors, None)


# ---- experts -------------------------------------------------------------------------------------


def _joined_experts(parts: _Parts, modules: dict[str, Any]) -> Translated:
    """The layers' tensors, with the experts of a module side by side."""
    made: dict[str, Tensor] = {}
    layers: dict[str, str] = {}
    experts: dict[str, dict[str, dict[int, dict[int, QuantizedLinear]]]] = {}
    for name, layer in parts.layers.items():
        match = EXPERT.match(name)
        at = _renamed(match["module"], modules) if match else ""
        module = modules.get(at)
        if match is None or module is None or names_in(module) is None:
            layers[name] = layer.scheme
            made |= {f"{name}.{part}": t for part, t in layer.state_dict().items()}
            continue
        if match["projection"] not in PROJECTIONS:
            raise ValueError(f"{WHO}: {name} is no projection of experts that is read")
        weight, place = PROJECTIONS[match["projection"]]
        one = experts.setdefault(at, {}).setdefault(weight, {})
        one.setdefault(int(match["expert"]), {})[place] = layer
    for at, weights in experts.items():
        recipes = {
            layer.scheme for w in weights.values() for e in w.values() for layer in e.values()
        }
        if len(recipes) > 1 or not recipes <= set(SERVED):
            raise ValueError(
                f"{WHO}: the experts of {at} are {', '.join(sorted(recipes))}; experts have one of "
                f"{', '.join(SERVED)}"
            )
        (recipe,) = recipes
        for weight, by_expert in weights.items():
            if sorted(by_expert) != list(range(len(by_expert))):
                raise ValueError(f"{WHO}: {at} has the experts {sorted(by_expert)} of {weight}")
            each = [
                _stacked(recipe, [by_expert[e][p] for p in sorted(by_expert[e])], at)
                for e in range(len(by_expert))
            ]
            made |= _named(f"{at}.{weight}", side_by_side(recipe, each))
        layers[at] = recipe
        made[f"{at}._extra_state"] = state_of(recipe)
    made |= _without_zero_biases(parts.others, layers, modules)
    return fitted(Translated(layers, made), modules)


def _without_zero_biases(
    plain: dict[str, Tensor], layers: dict[str, str], modules: dict[str, Any]
) -> dict[str, Tensor]:
    """Some tools write a bias of zeros for layers that have none."""
    extra = [
        f"{name}.bias"
        for name in layers
        if f"{name}.bias" in plain
        and getattr(modules.get(name), "bias", 0) is None
        and not bool(plain[f"{name}.bias"].any())
    ]
    return {n: t for n, t in plain.items() if n not in extra}


def _named(weight: str, tensors: Tensors) -> dict[str, Tensor]:
    return {weight + part.removeprefix("weight"): t for part, t in tensors.items()}


def _stacked(recipe: str, layers: list[QuantizedLinear], at: str) -> Tensors:
    """One expert's tensors: the layers' rows below each other, filled to whole tiles."""
    if any("input_order" in layer._buffers for layer in layers):
        raise ValueError(f"{WHO}: the experts of {at} have act-order, which is not read")
    each = max(rows for _, rows in DIMS[recipe].values())
    sizes = [layer.out_features for layer in layers]
    if any(n % each for n in sizes[:-1]):
        raise ValueError(
            f"{WHO}: the experts of {at} have {sizes[0]} rows; expected a multiple of {each}"
        )
    return _filled(recipe, side_by_side(recipe, [x._tensors() for x in layers]), sum(sizes))


def _filled(recipe: str, tensors: Tensors, n: int) -> Tensors:
    """The tensors of a weight of n rows with zeros up to the rows that an expert has."""
    rows, made = rows_of_expert(recipe, n), {}
    for name, t in tensors.items():
        dim, each = DIMS[recipe][name]
        if dim is None:
            made[name] = t
            continue
        codes = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        more = list(codes.shape)
        more[dim] = rows // each - more[dim]
        made[name] = torch.cat([codes, codes.new_zeros(more)], dim).view(t.dtype)
    return made


def _gpt_oss(where: Any, get: Get) -> Translated:
    """gpt-oss: the experts of a module in one tensor of blocks and one of scales."""
    made: dict[str, Tensor] = {}
    layers: dict[str, str] = {}
    weights = [n.removesuffix("_blocks") for n in where if n.endswith("_blocks")]
    if not weights:
        raise ValueError(f"{WHO}: quant_method is mxfp4, and no tensor is called *_blocks")
    for weight in weights:
        blocks, scales = get(f"{weight}_blocks"), get(f"{weight}_scales")
        if blocks.dim() == 3 and scales.dim() == 3:  # bytes of a row are not split into blocks
            blocks = blocks.unflatten(2, (-1, 16))
        parts = []
        for one, scale in zip(blocks, scales, strict=True):
            layer = from_mxfp4(one, scale)
            parts.append(_filled("mxfp4", layer._tensors(), layer.out_features))
        made |= _named(weight, side_by_side("mxfp4", parts))
        at = weight.rpartition(".")[0]
        layers[at] = "mxfp4"
        made[f"{at}._extra_state"] = state_of("mxfp4")
    used = {f"{w}_{part}" for w in weights for part in ("blocks", "scales")}
    return Translated(layers, made | {n: get(n) for n in where if n not in used})


# ---- bitsandbytes --------------------------------------------------------------------------------


def _bitsandbytes(where: Any, get: Get, about: dict[str, Any]) -> Translated:
    """NF4 and FP4, decoded to 16 bits: their codes are places in a table, which no kernel reads."""
    if about.get("load_in_8bit") or about.get("_load_in_8bit"):
        raise ValueError(f"{WHO}: bitsandbytes with load_in_8bit is not read; expected 4 bits")
    mark = re.compile(r"(.*)\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$")
    found = {match[1]: n for n in where if (match := mark.match(n))}
    if not found:
        raise ValueError(
            f"{WHO}: quant_method is bitsandbytes, and no tensor is called "
            f"*.weight.quant_state.bitsandbytes__nf4"
        )
    made, used = {}, set()
    for layer, name in found.items():
        state = json.loads(bytes(get(name).tolist()).decode())
        for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
            if (full := f"{layer}.weight.{part}") in where:
                state[part] = get(full)
                used.add(full)
        used.update((name, f"{layer}.weight"))
        half = "fp16" if state.get("dtype") == "float16" else "bf16"
        linear = from_bitsandbytes(get(f"{layer}.weight"), state, half)
        made[f"{layer}.weight"] = linear.weight.detach()
    return Translated({}, made | {n: get(n) for n in where if n not in used})
