# SPDX-License-Identifier: BSD-3-Clause
"""Files of quantised weights: `quantize_directory` makes them of a model's safetensors,
`load_quantized` reads them.

A file's metadata has an entry "gpukern": the version of how codes lie, the recipe, and the layers
that have it. Each layer's tensors are named as in a QuantizedLinear's state_dict.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...cli.terminal import progress
from . import compressed_tensors
from .quantize import RECIPES, _become, config_entry, is_skipped
from .quantized import FORMAT, VERSION, check_state, empty_of, fields_of, state_of
from .recommended import recommended
from .schemes import GROUPED, IMPORTED, SCHEMES

__all__ = ["SKIP", "load_quantized", "quantize_directory"]

INDEX = "model.safetensors.index.json"
# names of matrices that are no Linear's weight, or whose rounding costs more than it gives
SKIP = ("*embed*", "*wte*", "*wpe*", "lm_head", "*norm*", "*router*", "gate", "shared_expert_gate")
CONFIG = "config.json"


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "torch_gpukern: files of weights need safetensors: pip install safetensors"
        ) from error
    return safetensors


@contextmanager
def _opened(who: str, file: Path) -> Iterator[Any]:
    """An open file of safetensors. ValueError names a file that is none, or only a part of one."""
    safetensors = _safetensors()
    try:
        held = safetensors.safe_open(file, "pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{who}: {file} is no whole file of safetensors ({error}); copy it again"
        ) from error
    with held as opened:
        yield opened


def _config(who: str, directory: Path) -> dict[str, Any]:
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


def quantize_directory(
    source: str | Path,
    target: str | Path,
    recipe: str,
    *,
    skip: Sequence[str] = SKIP,
    device: torch.device | str = "cpu",
    show: bool = True,
    say: Callable[[str], object] | None = print,
    layout: Literal["gpukern", "compressed-tensors"] = "gpukern",
) -> list[str]:
    """Writes a quantised copy of a model's directory, tensor by tensor. At most one file is in
    memory.

    Args:
        source: a directory with \\*.safetensors, as transformers writes it.
        target: a directory that does not exist, or is empty. Configuration and tokenizer are
            copied.
        recipe: as in `quantize`, without calibration or training.
        skip: patterns of names ("model.layers.0.self_attn.q_proj", without ".weight") or last parts
            that stay; by default embeddings, heads (classifiers, too, where transformers knows the
            model), norms and routers. What is no 2-dimensional floating ".weight" stays, too, and
            where transformers knows the model what is no nn.Linear of it (GPT-2's Conv1D).
        device: where weights are rounded.
        show: a progress bar on stderr.
        say: is called with a line at the end.
        layout: ``"gpukern"``, which `load_quantized` reads, or ``"compressed-tensors"``, which
            transformers loads where compressed-tensors is installed: recipes fp8,
            fp8-block, int8, w8, w4 and nvfp4. Scales have the weight's dtype there.

    Returns:
        The names of the layers that have few bits now.

    Raises:
        ValueError: no such recipe or layout, or a recipe that the layout lacks; no safetensors; no
            weight of an nn.Linear; a target that is not empty; weights that are quantised already;
            tensors that transformers renames or joins while it loads them (Mixtral's experts).
        ImportError: safetensors is not installed.
    """
    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors"))
    offered = [r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static]
    if recipe not in offered:
        why = "needs calibration or training" if recipe in RECIPES else "is none"
        raise ValueError(f"quantize: recipe {recipe} {why}; expected one of {', '.join(offered)}")
    _check_layout(layout, recipe)
    if not files:
        raise ValueError(f"quantize: {source} has no *.safetensors")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"quantize: {target} exists and is not an empty directory")
    _config("quantize", source)
    held = [(file, _header(file)) for file in files]
    linear, heads = _linear_layers(source, [name for _, (names, _) in held for name in names])
    stays = _Stays([*skip, *heads] if tuple(skip) == SKIP else skip, linear)
    if all(
        stays(n.removesuffix(".weight"), None)
        for _, (names, _) in held
        for n in names
        if n.endswith(".weight")
    ):
        raise ValueError(
            f"quantize: no tensor of {source} is the weight of an nn.Linear that is not skipped"
        )
    target.mkdir(parents=True, exist_ok=True)
    names = [(file, name) for file, (names, _) in held for name in names]
    steps, changed, where, sizes = (
        iter(progress(names, "quantizing", "tensor") if show else names),
        [],
        {},
        [0, 0],
    )
    for file, (_, metadata) in held:
        made = _file(file, recipe, stays, device, steps, changed, sizes, layout)
        about = {
            FORMAT: VERSION,
            "recipe": recipe,
            "layers": [n for n in changed if f"{n}._extra_state" in made],
        }
        ours = {"gpukern": json.dumps(about)} if layout == "gpukern" else {}
        _safetensors().torch.save_file(made, target / file.name, {**metadata, **ours})
        where |= dict.fromkeys(made, file.name)
    for _ in steps:  # the bar's end
        pass
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": sizes[1]}, "weight_map": dict(sorted(where.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".txt", ".model", ".jinja", ".py", ".md")
            and path.name != INDEX
        ):
            shutil.copy2(path, target / path.name)
    if layout == "gpukern":
        _mark(target / CONFIG, recipe)
    else:
        matrices = {name.removesuffix(".weight") for _, name in names if name.endswith(".weight")}
        kept = (matrices | (linear or set()) | {"lm_head"}) - set(changed)
        _describe(target / CONFIG, compressed_tensors.config_of(recipe, sorted(kept)))
    if say is not None:
        say(
            f"gpukern: {len(changed)} of {len(names)} tensors -> {recipe} ({RECIPES[recipe]}); "
            f"{sizes[0] / 2**20:.1f} -> {sizes[1] / 2**20:.1f} MiB in {target}"
        )
    return changed


def _check_layout(layout: str, recipe: str) -> None:
    if layout not in ("gpukern", "compressed-tensors"):
        raise ValueError(f"quantize: layout must be gpukern or compressed-tensors, got {layout!r}")
    served = compressed_tensors.CONFIGS
    if layout != "gpukern" and recipe not in served:
        raise ValueError(
            f"quantize: layout compressed-tensors has the recipes {', '.join(served)}, got "
            f"{recipe!r}; use layout gpukern"
        )


def _describe(config: Path, quantization: dict[str, Any]) -> None:
    about = _config("quantize", config.parent)
    about["quantization_config"] = quantization
    config.write_text(json.dumps(about, indent=2) + "\n")


def heads_of(model: Any) -> set[torch.nn.Module | None]:
    """The modules of a transformers model outside of its body (classifiers, which LoRA trains as
    they are), and the heads of models within the model."""
    body = set(model.base_model.modules())
    heads: set[torch.nn.Module | None] = {m for m in model.modules() if m not in body}
    return heads | {
        m.get_output_embeddings() for m in model.modules() if hasattr(m, "get_output_embeddings")
    }


def _linear_layers(source: Path, names: list[str]) -> tuple[set[str] | None, set[str]]:
    """Names of the nn.Linear modules of the model that transformers builds from the configuration,
    and of its heads; None and no head if transformers does not know the model."""
    if "model_type" not in _config("quantize", source):
        return None, set()
    try:
        import transformers
    except ImportError:
        return None, set()
    try:
        about = transformers.AutoConfig.from_pretrained(source)
        kind = next((getattr(transformers, n, None) for n in about.architectures or ()), None)
        with torch.device("meta"):
            model = kind._from_config(about) if kind else transformers.AutoModel.from_config(about)
    except Exception:  # a model of its own code, or of another transformers: names alone decide
        return None, set()
    heads = heads_of(model)
    for root in (model, getattr(model, "base_model", model)):
        if set(names) <= root.state_dict().keys():
            linear = {n: m for n, m in root.named_modules() if isinstance(m, torch.nn.Linear)}
            return set(linear), {name for name, m in linear.items() if m in heads}
    unknown = sorted(set(names) - model.state_dict().keys())
    raise ValueError(
        f"quantize: {source} has tensors that are no tensors of {type(model).__name__} "
        f"({unknown[0]}, {len(unknown)} of "
        f"{len(names)}): transformers renames or joins them, load_quantized does not; load the "
        f"model and use torch_gpukern.nn.quantize"
    )


class _Stays(NamedTuple):
    """A skip function: true for names that match a pattern and for layers that are no nn.Linear."""

    skip: Sequence[str]
    linear: set[str] | None

    def __call__(self, name: str, module: Any) -> bool:
        return is_skipped(name, module, self.skip) or (
            self.linear is not None and name not in self.linear
        )


def _mark(config: Path, recipe: str) -> None:
    if config.exists():
        _describe(config, config_entry(recipe))


def _header(file: Path) -> tuple[list[str], dict[str, str]]:
    with _opened("quantize", file) as held:
        metadata = held.metadata() or {}
        if "gpukern" in metadata or _recipes_of(held):
            raise ValueError(f"quantize: {file} has been quantised already")
        return list(held.keys()), metadata


def _file(
    file: Path,
    recipe: str,
    skip: Any,
    device: Any,
    steps: Any,
    changed: list[str],
    sizes: list[int],
    layout: str,
) -> dict:
    """The tensors of one file as they are written."""
    scheme, made, theirs = SCHEMES[recipe], {}, layout != "gpukern"
    multiple = compressed_tensors.multiple_of(recipe) if theirs else scheme.multiple
    with _opened("quantize", file) as held, torch.no_grad():
        for name in held.keys():
            next(steps)
            t = held.get_tensor(name)
            sizes[0] += t.numel() * t.element_size()
            layer, _, last = name.rpartition(".")
            matrix = (
                last == "weight"
                and t.dim() == 2
                and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
            )
            if matrix and t.shape[1] % multiple == 0 and not is_skipped(layer, None, skip):
                w = t.to(device)
                packed = compressed_tensors.tensors_of(recipe, w) if theirs else scheme.pack(w)
                made |= {f"{layer}.{part}": x.cpu() for part, x in packed.items()}
                if not theirs:
                    made[f"{layer}._extra_state"] = state_of(recipe)
                changed.append(layer)
            else:
                made[name] = t
    sizes[1] += sum(t.numel() * t.element_size() for t in made.values())
    return made


def _layers_of(file: Path) -> dict[str, str]:
    """The quantised layers of a file, and their recipes."""
    with _opened("load_quantized", file) as held:
        text = (held.metadata() or {}).get("gpukern")
        if text is None:
            return _recipes_of(held)
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


def _recipes_of(held: Any) -> dict[str, str]:
    """The layers of an open file that say themselves that they are quantised, and their recipes.
    transformers' save_pretrained writes such files: it keeps no metadata of ours."""
    found = {}
    for name in held.keys():
        layer, _, last = name.rpartition(".")
        if last == "_extra_state":
            magic, _, recipe = fields_of(held.get_tensor(name))
            if magic == FORMAT and recipe in SCHEMES:
                found[layer] = recipe
    return found


def load_quantized(model: torch.nn.Module, directory: str | Path) -> list[str]:
    """Loads what `quantize_directory`, or ``save_pretrained`` of a quantised model, wrote into a
    model of the same kind, whose layers become `QuantizedLinear` in place.

    Args:
        model: its nn.Linear modules have the names of the files' layers; values do not matter
            (``AutoModel.from_config``). Parameters on meta become the files' tensors, on the CPU.
        directory: of the files.

    Returns:
        The names of those layers.

    Raises:
        ValueError: files of another version, or not of gpukern; layers that the model lacks;
            tensors that the files lack, or have in another shape; buffers on meta. The model is
            then as it was.
        ImportError: safetensors is not installed.
    """
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
    modules = dict(model.named_modules())
    missing = [name for name in layers if not isinstance(modules.get(name), torch.nn.Linear)]
    if missing:
        raise ValueError(f"load_quantized: the model has no nn.Linear {', '.join(sorted(missing))}")
    _check_tensors(model, files, layers, directory)
    before = [(module, module.__class__, dict(vars(module))) for module in modules.values()]
    kept = [
        (dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set))
        for m in modules.values()
    ]
    try:
        _load(model, files, layers, modules)
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


def _load(
    model: torch.nn.Module, files: list[Path], layers: dict[str, str], modules: dict[str, Any]
) -> None:
    """Fills the model. What is on meta takes the files' tensors as they are, on the CPU; tensors
    that were one stay one."""
    for name, recipe in layers.items():
        module = modules[name]
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
    for file in files:
        given: dict[str, Tensor] = _safetensors().torch.load_file(file)
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
    for name in layers:
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


def _check_tensors(
    model: torch.nn.Module, files: list[Path], layers: dict[str, str], directory: Any
) -> None:
    """ValueError, before anything is changed, where the files' tensors are not the model's."""
    modules, held = dict(model.named_modules()), model.state_dict()
    if any(m._load_state_dict_pre_hooks for m in modules.values()):
        return  # which may rename them
    wanted = {
        name: (list(t.shape), False, t.is_floating_point())
        for name, t in held.items()
        if isinstance(t, Tensor)
    }
    for layer, recipe in layers.items():
        module = modules[layer]
        del wanted[f"{layer}.weight"]
        spec = SCHEMES[recipe].spec(module.out_features, module.in_features)
        wanted |= {
            f"{layer}.{part}": (
                list(shape),
                recipe in GROUPED and part != "weight_packed",
                dtype.is_floating_point,
            )
            for part, (shape, dtype) in spec.items()
        }
        wanted[f"{layer}._extra_state"] = ([], True, False)
    there: dict[str, list[int]] = {}
    floating: dict[str, bool] = {}
    for file in files:
        with _opened("load_quantized", file) as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                there[name] = list(part.get_shape())
                floating[name] = part.get_dtype().startswith(("F", "BF"))
            for layer, recipe in layers.items():
                if f"{layer}._extra_state" in opened.keys():
                    check_state(opened.get_tensor(f"{layer}._extra_state"), recipe)
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
        if name in there and not free and there[name] != shape:
            raise ValueError(
                f"load_quantized: {name} must have shape {shape}, {directory} has {there[name]}"
            )
        if name in there and floating[name] != floats:
            kinds = {True: "floating-point numbers", False: "integers"}
            raise ValueError(
                f"load_quantized: {name} must hold {kinds[floats]}, {directory} has "
                f"{kinds[not floats]}"
            )
    lost = [n for n, t in model.named_buffers() if t.is_meta and n not in there]
    if lost:
        raise ValueError(
            f"load_quantized: {', '.join(lost)} are on meta and in no file: the model computes "
            f"them when it is made; make it on the "
            "CPU or a device, or with its parameters alone on meta"
        )


# ---- the command line ----------------------------------------------------------------------------


def add_arguments(commands: Any) -> None:
    p = commands.add_parser(
        "quantize", help="write a model's safetensors again, its matrices in few bits"
    )
    p.set_defaults(run=_run)
    p.add_argument("model", type=Path, metavar="MODEL_DIR", help="a directory with *.safetensors")
    p.add_argument("--out", type=Path, help="default: MODEL_DIR-RECIPE beside it")
    p.add_argument(
        "--recipe",
        choices=["auto", *(r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static)],
        default="w4",
        help="auto: the one that decodes --requests fastest on --for, as docs/quantise.md measured",
    )
    p.add_argument("--requests", type=int, default=1, help="requests that decode at once, for auto")
    p.add_argument(
        "--for",
        dest="served_on",
        help="cpu, cuda or cuda:<index> that will serve the model, for auto; default: --device",
    )
    p.add_argument(
        "--skip",
        nargs="+",
        default=list(SKIP),
        metavar="PATTERN",
        help=f"names that stay; default: heads of every name and {' '.join(SKIP)}",
    )
    p.add_argument("--device", default="cpu", help="where weights are rounded")
    p.add_argument(
        "--layout",
        choices=["gpukern", "compressed-tensors"],
        default="gpukern",
        help="compressed-tensors: what transformers loads",
    )


def _run(args: Any) -> int:
    if args.recipe == "auto":
        args.recipe, why = recommended(args.requests, args.served_on or args.device)
        print(f"gpukern: recipe {args.recipe}: {why}")
    out = args.out or args.model.resolve().with_name(
        f"{args.model.resolve().name}-{args.recipe.replace(':', '_')}"
    )
    quantize_directory(
        args.model, out, args.recipe, skip=args.skip, device=args.device, layout=args.layout
    )
    return 0
