# SPDX-License-Identifier: BSD-3-Clause
"""`load_quantized`: directories of quantised weights, into models.

What files hold is read in one place, `Contents`: files that gpukern wrote, what save_pretrained
wrote of a quantised model, and directories of other tools (foreign.py).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import foreign
from .experts import as_in_linear, become_experts, empty_module, names_in, rows_of_expert
from .quantize import _become
from .quantized import FORMAT, VERSION, check_state, empty_of, fields_of
from .schemes import GROUPED, SCHEMES

__all__ = ["load_quantized"]

CONFIG = "config.json"


def safetensors_module() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "torch_gpukern: files of weights need safetensors: pip install safetensors"
        ) from error
    return safetensors


@contextmanager
def opened_file(who: str, file: Path) -> Iterator[Any]:
    """An open file of safetensors. ValueError names a file that is none, or only a part of one."""
    safetensors = safetensors_module()
    try:
        handle = safetensors.safe_open(file, "pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{who}: {file} is no whole file of safetensors ({error}); copy it again"
        ) from error
    with handle as opened:
        yield opened


def config_in(who: str, directory: Path) -> dict[str, Any]:
    """The fields of a directory's config.json; none if there is no such file."""
    file = directory / CONFIG
    if not file.exists():
        return {}
    try:
        about = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{who}: {file} is no JSON: {error}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{who}: {file} must hold an object, it holds a {type(about).__name__}")
    return about


def _layers_of(file: Path) -> dict[str, str]:
    """The quantised layers of a file, and their recipes."""
    with opened_file("load_quantized", file) as tensors:
        text = (tensors.metadata() or {}).get("gpukern")
        if text is None:
            return recipes_of(tensors)
    try:
        about = json.loads(text)
    except ValueError:
        about = None
    if not isinstance(about, dict) or FORMAT not in about:
        raise ValueError(
            f"load_quantized: {file}: the metadata's entry gpukern must be JSON with the field "
            f"{FORMAT}, it is {text[:80]!r}"
        )
    if about[FORMAT] != VERSION:
        raise ValueError(
            f"load_quantized: {file} is of version {about[FORMAT]!r}, this gpukern reads version "
            f"{VERSION}"
        )
    recipe, names = about.get("recipe"), about.get("layers")
    if recipe not in SCHEMES:
        raise ValueError(
            f"load_quantized: {file}: recipe must be one of {', '.join(SCHEMES)}, it is {recipe!r}"
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"load_quantized: {file}: layers must be a list of names")
    return dict.fromkeys(names, recipe)


def recipes_of(tensors: Any) -> dict[str, str]:
    """The layers of an open file that say themselves that they are quantised, and their recipes.
    transformers' save_pretrained writes such files: it keeps no metadata of ours."""
    found = {}
    for name in tensors.keys():
        layer, _, last = name.rpartition(".")
        if last == "_extra_state":
            magic, _, recipe = fields_of(tensors.get_tensor(name))
            if magic == FORMAT and recipe in SCHEMES:
                found[layer] = recipe
    return found


def foreign_method(directory: str | Path) -> str | None:
    """The quant_method of a directory that another tool quantised. None if gpukern wrote it, or if
    it is not quantised."""
    about = config_in("load_quantized", Path(directory)).get("quantization_config")
    if not isinstance(about, dict) or "gpukern" in about:
        return None
    return str(about.get("quant_method"))


def translated(directory: Path, model: Any) -> foreign.Translated:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"load_quantized: {directory} has no *.safetensors")
    about = config_in("load_quantized", directory)["quantization_config"]
    return foreign.translated(files, lambda f: opened_file("load_quantized", f), about, model)


def foreign_contents(directory: str | Path, model: Any) -> "Contents":
    """What a directory holds that another tool quantised."""
    return _in_memory(translated(Path(directory), model))


def _in_memory(contents: foreign.Translated) -> "Contents":
    there = {n: (list(t.shape), t.is_floating_point()) for n, t in contents.tensors.items()}
    return Contents(contents.layers, there, lambda: iter([dict(contents.tensors)]))


class Contents(NamedTuple):
    """A directory of quantised weights, in the names and forms of a QuantizedLinear's state_dict.

    layers: the quantised layers and their recipes. there: each tensor's shape, and whether it holds
    floating-point numbers. parts: the tensors, in parts.
    """

    layers: dict[str, str]
    there: dict[str, tuple[list[int], bool]]
    parts: Callable[[], Iterator[dict[str, Tensor]]]


def contents_of(directory: str | Path) -> Contents:
    """What a directory holds that gpukern wrote, or ``save_pretrained`` of a quantised model."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ValueError(f"load_quantized: {directory} has no *.safetensors")
    layers: dict[str, str] = {}
    for file in files:
        layers |= _layers_of(file)
    if not layers:
        raise ValueError(
            f"load_quantized: {directory} was not written by gpukern quantize, nor by "
            f"save_pretrained of a model that gpukern quantised: no layer in it is quantised"
        )
    there: dict[str, tuple[list[int], bool]] = {}
    for file in files:
        with opened_file("load_quantized", file) as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                there[name] = list(part.get_shape()), part.get_dtype().startswith(("F", "BF"))
            for layer, recipe in layers.items():
                if f"{layer}._extra_state" in opened.keys():
                    check_state(opened.get_tensor(f"{layer}._extra_state"), recipe)
    return Contents(layers, there, lambda: (safetensors_module().torch.load_file(f) for f in files))


def load_quantized(model: torch.nn.Module, directory: str | Path) -> list[str]:
    """Loads a directory of quantised weights into a model of the same kind, whose layers become
    `QuantizedLinear` in place, and its mixtures of experts likewise.

    Args:
        model: its modules have the names of the files' layers; values do not matter
            (``AutoModel.from_config``). Parameters on meta become the files' tensors, on the CPU.
        directory: what `quantize_directory`, or ``save_pretrained`` of a quantised model, wrote; or
            one that another tool wrote, if its config.json has a quantization_config of
            compressed-tensors, GPTQ, AWQ, bitsandbytes (4 bits), 8-bit floats in blocks, or MXFP4
            as gpt-oss has it. Codes keep their values.

    Returns:
        The names of those layers.

    Raises:
        ValueError: files of another version, or of no form of these; layers that the model lacks;
            tensors that the files lack, or have in another shape; buffers on meta. The model is
            then as it was.
        ImportError: safetensors is not installed.
    """
    foreign = foreign_method(directory)
    contents = contents_of(directory) if foreign is None else foreign_contents(directory, model)
    modules = dict(model.named_modules())
    contents = _fitted(contents, modules)
    layers = contents.layers
    missing = [name for name in layers if not _can_hold(modules.get(name))]
    if missing:
        raise ValueError(f"load_quantized: the model has no nn.Linear {', '.join(sorted(missing))}")
    _check_tensors(model, contents, directory)
    before = [(module, module.__class__, dict(vars(module))) for module in modules.values()]
    kept = [
        (dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set))
        for m in modules.values()
    ]
    try:
        _load(model, contents, modules)
    except BaseException:
        for (module, kind, attributes), (parameters, buffers, others) in zip(
            before, kept, strict=True
        ):
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            module._parameters, module._buffers, module._non_persistent_buffers_set = (
                parameters,
                buffers,
                others,
            )
        raise
    return list(layers)


def _fitted(contents: Contents, modules: dict[str, Any]) -> Contents:
    """The contents under the names of the model's modules. save_pretrained writes a mixture of
    experts under other names than its modules have."""
    one_by_one = any(".experts.0." in name for name in contents.there)
    if not one_by_one and not any(".block_sparse_moe." in name for name in contents.there):
        return contents
    tensors = {name: t for part in contents.parts() for name, t in part.items()}
    return _in_memory(foreign.fitted(foreign.Translated(contents.layers, tensors), modules))


def _can_hold(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or (module is not None and bool(names_in(module)))


def _load(model: torch.nn.Module, contents: Contents, modules: dict[str, Any]) -> None:
    """Fills the model. What is on meta takes the files' tensors as they are, on the CPU; tensors
    that were one stay one."""
    for name, recipe in contents.layers.items():
        module = modules[name]
        if not isinstance(module, torch.nn.Linear):
            become_experts(module, recipe, empty_module(module, recipe))
            continue
        _become(
            module,
            recipe,
            empty_of(recipe, module.out_features, module.in_features, module.weight.device),
        )
    shared: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in modules.values():
        for name, t in module._parameters.items():
            if t is not None and t.is_meta:
                shared.setdefault(id(t), []).append((module, name))
    for given in contents.parts():
        here = {n: t for n, t in given.items() if _on_meta(modules, n)}
        if here:
            model.load_state_dict(here, strict=False, assign=True)
        model.load_state_dict({n: t for n, t in given.items() if n not in here}, strict=False)
    for places in shared.values():
        made = next(
            (t for m, n in places if (t := m._parameters[n]) is not None and not t.is_meta), None
        )
        for module, name in places if made is not None else ():
            module._parameters[name] = made
    for name in contents.layers:
        module = modules[name]
        module.weight_like = torch.empty(
            0, dtype=module.weight_like.dtype, device=next(iter(module._tensors().values())).device
        )


def _on_meta(modules: dict[str, Any], name: str) -> bool:
    owner, _, last = name.rpartition(".")
    module = modules.get(owner)
    if last == "_extra_state" or module is None:
        return False
    t = module._parameters.get(last, module._buffers.get(last))
    return t is not None and t.is_meta


def _wanted(layer: str, module: Any, recipe: str) -> dict[str, tuple[list[int], bool, bool]]:
    """The tensors that a layer needs: the shape, whether groups may have another size, and whether
    they are floating."""
    wanted = {}
    if isinstance(module, torch.nn.Linear):
        spec = SCHEMES[recipe].spec(module.out_features, module.in_features)
        for part, (shape, dtype) in spec.items():
            free = recipe in GROUPED and part != "weight_packed"
            wanted[f"{layer}.{part}"] = list(shape), free, dtype.is_floating_point
        return wanted
    for name in names_in(module) or ():
        experts, n, k = as_in_linear(module, module._parameters[name]).shape
        spec = SCHEMES[recipe].spec(experts * rows_of_expert(recipe, n), k)
        for part, (shape, dtype) in spec.items():
            free = recipe in GROUPED and part != "weight_packed"
            wanted[f"{layer}.{name}{part.removeprefix('weight')}"] = (
                list(shape),
                free,
                dtype.is_floating_point,
            )
    return wanted


def _check_tensors(model: torch.nn.Module, contents: Contents, directory: Any) -> None:
    """ValueError, before anything is changed, where the files' tensors are not the model's."""
    modules, state = dict(model.named_modules()), model.state_dict()
    layers, there = contents.layers, contents.there
    if any(m._load_state_dict_pre_hooks for m in modules.values()):
        return  # which may rename them
    wanted = {
        name: (list(t.shape), False, t.is_floating_point())
        for name, t in state.items()
        if isinstance(t, Tensor)
    }
    for layer, recipe in layers.items():
        module = modules[layer]
        for weight in names_in(module) or ("weight",):
            del wanted[f"{layer}.{weight}"]
        wanted |= _wanted(layer, module, recipe)
        wanted[f"{layer}._extra_state"] = ([], True, False)
    optional = {
        f"{layer}.{part}"
        for layer in layers
        for part in ("input_order", "weight_zero", "weight_shift")
    }
    unknown = sorted(there.keys() - wanted.keys() - optional)
    tied = {
        id(t): name for name, t in model.named_parameters(remove_duplicate=False) if name in there
    }
    absent = {n for n in wanted.keys() - there.keys() if n not in optional}
    absent -= {n for n, t in model.named_parameters(remove_duplicate=False) if id(t) in tied}
    if absent or unknown:
        raise ValueError(
            f"load_quantized: {directory} lacks {', '.join(sorted(absent)) or 'nothing'}, "
            f"and has beside {', '.join(unknown) or 'nothing'}"
        )
    for name, (shape, free, floats) in wanted.items():
        if name not in there:
            continue
        given, floating = there[name]
        if not free and given != shape:
            raise ValueError(
                f"load_quantized: {name} must have shape {shape}, {directory} has {given}"
            )
        if floating != floats:
            kinds = {True: "floating-point numbers", False: "integers"}
            raise ValueError(
                f"load_quantized: {name} must hold {kinds[floats]}, {directory} has "
                f"{kinds[not floats]}"
            )
    lost = [n for n, t in model.named_buffers() if t.is_meta and n not in there]
    if lost:
        raise ValueError(
            f"load_quantized: {', '.join(lost)} are on meta and in no file: the model computes "
            f"them when it is made; make it on the CPU or a device, or with only its parameters "
            "on meta"
        )
