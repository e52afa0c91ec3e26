# SPDX-License-Identifier: BSD-3-Clause
"""Writes files of quantised weights: `quantize_directory` makes them from a model's safetensors.
`load_quantized` (loading.py) reads them.

A file's metadata has an entry "gpukern": the version of the format of codes, the recipe, and the
layers that have it. Each layer's tensors are named as in a QuantizedLinear's state_dict.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...cli.terminal import progress
from ..latent import is_latent
from . import compressed_tensors
from .experts import (
    SERVED,
    names_in,
    pack_experts,
)
from .loading import (
    CONFIG,
    config_in,
    foreign_method,
    opened_file,
    recipes_of,
    safetensors_module,
    translated,
)
from .quantize import RECIPES, config_entry, is_skipped, quantize
from .quantized import FORMAT, VERSION, state_of
from .recommended import recommended
from .schemes import IMPORTED, SCHEMES

__all__ = ["SKIP", "quantize_directory"]

INDEX = "model.safetensors.index.json"
# names of matrices that are not the weight of an nn.Linear, or whose rounding costs more accuracy than
# it saves memory
SKIP = ("*embed*", "*wte*", "*wpe*", "lm_head", "*norm*", "*router*", "gate", "shared_expert_gate")


def quantize_directory(
    source: str | Path,
    target: str | Path,
    recipe: str | None,
    *,
    skip: Sequence[str] = SKIP,
    device: torch.device | str = "cpu",
    show: bool = True,
    say: Callable[[str], object] | None = print,
    layout: Literal["gpukern", "compressed-tensors"] = "gpukern",
) -> list[str]:
    """Writes a quantised copy of a model's directory, tensor by tensor. At most one file is in
    memory. A model whose tensors transformers renames or joins while it loads them (Mixtral's
    experts) is loaded whole, quantised and written.

    Args:
        source: a directory with \\*.safetensors, as transformers writes it.
        target: a directory that does not exist, or is empty. Configuration and tokenizer are
            copied.
        recipe: as in `quantize`, without calibration or training. None for a directory that another
            tool quantised in a form that `load_quantized` reads: its codes are kept, and written in
            our form.
        skip: patterns of the layers that stay. A pattern matches a whole name
            ("model.layers.0.self_attn.q_proj", without ".weight") or its last part. By default
            embeddings, heads, norms and routers stay. If transformers knows the model, heads are
            classifiers, too, and layers that are not an nn.Linear (GPT-2's Conv1D) stay. Only
            2-dimensional floating-point tensors named ".weight" are quantised, and the experts that
            `quantize` knows.
        device: where weights are rounded.
        show: whether to show a progress bar on stderr.
        say: called with a line at the end; None prints nothing.
        layout: ``"gpukern"``, which `load_quantized` reads, or ``"compressed-tensors"``, which
            transformers loads if compressed-tensors is installed. The latter has the recipes fp8,
            fp8-block, int8, w8, w4 and nvfp4, and scales of the weight's dtype.

    Returns:
        The names of the quantised layers.

    Raises:
        ValueError: no such recipe or layout, or a recipe that the layout lacks; no safetensors; no
            weight of an nn.Linear; a target that is not empty; weights that are quantised already;
            with layout compressed-tensors, tensors that transformers renames or joins while it
            loads them.
        ImportError: safetensors is not installed.
    """
    source, target = Path(source), Path(target)
    method = foreign_method(source)
    headers = _checked_headers(source, target, method, recipe, layout)
    if recipe is None:
        return _converted(source, target, str(method), layout, say)
    names = [name for tensors, _ in headers.values() for name in tensors]
    known = _linear_layers(source, names)
    if known.model is not None:
        return _whole(known.model, source, target, recipe, skip, device, say, layout)
    stays = _Stays([*skip, *known.heads] if tuple(skip) == SKIP else skip, known.linear)
    experts = {}
    if layout == "gpukern" and recipe in SERVED:
        for name, transposed in known.experts.items():
            if not is_skipped(name.rpartition(".")[0], None, skip):
                experts[name] = transposed
    matrices = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    if not experts and all(stays(name, None) for name in matrices):
        raise ValueError(
            f"quantize: no tensor of {source} is the weight of an nn.Linear that is not skipped"
        )
    target.mkdir(parents=True, exist_ok=True)
    steps = iter(progress(names, "quantizing", "tensor") if show else names)
    changed: list[str] = []  # quantised layers
    sizes = [0, 0]  # bytes of all tensors before and after
    file_of: dict[str, str] = {}
    for file, (_, metadata) in headers.items():
        made = _file(file, recipe, stays, device, steps, changed, sizes, layout, experts)
        ours = _metadata(recipe, made) if layout == "gpukern" else {}
        safetensors_module().torch.save_file(made, target / file.name, {**metadata, **ours})
        file_of |= dict.fromkeys(made, file.name)
    for _ in steps:  # ends the progress bar
        pass
    if (source / INDEX).exists():
        _index(target, file_of, sizes[1])
    _copy_texts(source, target)
    if layout == "gpukern":
        _mark(target / CONFIG, recipe)
    else:
        kept = (set(matrices) | (known.linear or set()) | {"lm_head"}) - set(changed)
        _describe(target / CONFIG, compressed_tensors.config_of(recipe, sorted(kept)))
    if say is not None:
        say(
            f"gpukern: {len(changed)} of {len(names)} tensors -> {recipe} ({RECIPES[recipe]}); "
            f"{sizes[0] / 2**20:.1f} -> {sizes[1] / 2**20:.1f} MiB in {target}"
        )
    return changed


def _checked_headers(
    source: Path, target: Path, method: str | None, recipe: str | None, layout: str
) -> dict[Path, tuple[list[str], dict[str, str]]]:
    """Checks the arguments of `quantize_directory`. Returns (names of tensors, metadata) of each file
    of the source."""
    files = sorted(source.glob("*.safetensors"))
    offered = [r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static]
    if method is not None and recipe is not None:
        raise ValueError(
            f"quantize: {source} is quantised already (quant_method {method}), its codes are kept: "
            f"expected no recipe, got {recipe}"
        )
    if method is None and recipe not in offered:
        why = "needs calibration or training" if recipe in RECIPES else "does not exist"
        raise ValueError(f"quantize: recipe {recipe} {why}; expected one of {', '.join(offered)}")
    if recipe is not None:
        _check_layout(layout, recipe)
    if not files:
        raise ValueError(f"quantize: {source} has no *.safetensors")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"quantize: {target} exists and is not an empty directory")
    config_in("quantize", source)
    return {file: _header(file) for file in files}


def _metadata(recipe: str, made: dict[str, Tensor]) -> dict[str, str]:
    """The entry of a file's metadata that names its quantised layers."""
    layers = [name.rpartition(".")[0] for name in made if name.endswith("._extra_state")]
    return {"gpukern": json.dumps({FORMAT: VERSION, "recipe": recipe, "layers": layers})}


def _index(target: Path, file_of: dict[str, str], size: int) -> None:
    """Writes the index of several files: the file of each tensor."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_texts(source: Path, target: Path) -> None:
    """Copies configuration and tokenizer."""
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".txt", ".model", ".jinja", ".py", ".md")
            and path.name != INDEX
        ):
            shutil.copy2(path, target / path.name)


def _converted(
    source: Path, target: Path, method: str, layout: str, say: Callable[[str], object] | None
) -> list[str]:
    """`quantize_directory` of a directory that another tool quantised: writes the same codes in our
    form."""
    if layout != "gpukern":
        raise ValueError(
            f"quantize: {source} has quant_method {method}; its codes can only be written in "
            f"layout gpukern, got {layout}"
        )
    layers, tensors = translated(source, _on_meta_of(source))
    target.mkdir(parents=True, exist_ok=True)
    write_parts(target, None, _parts(tensors))
    _copy_texts(source, target)
    about = config_in("quantize", source)
    recipes = sorted(set(layers.values()))
    if recipes:
        about["quantization_config"] = config_entry(", ".join(recipes))
    else:
        del about["quantization_config"]
    (target / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    if say is not None:
        what = f"{len(layers)} layers -> {', '.join(recipes)}" if layers else "16-bit weights"
        say(f"gpukern: {method}: {what}, codes as they were, in {target}")
    return list(layers)


def _whole(
    kind: Any,
    source: Path,
    target: Path,
    recipe: str,
    skip: Sequence[str],
    device: Any,
    say: Callable[[str], object] | None,
    layout: str,
) -> list[str]:
    """`quantize_directory` of a model that must be loaded to know its layers' weights."""
    if layout != "gpukern":
        raise ValueError(
            f"quantize: transformers renames or joins tensors of {source} while it loads them; "
            f"layout compressed-tensors does not serve that, use layout gpukern"
        )
    model = kind.from_pretrained(source, dtype="auto").to(device)
    before = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    chosen = stays_in(model) if tuple(skip) == SKIP else skip
    done = quantize(model, recipe, skip=chosen, say=None)
    if not done.replaced:
        raise ValueError(f"quantize: {source} has no layer that is not skipped")
    changed = list(done.replaced)
    del done
    target.mkdir(parents=True, exist_ok=True)
    size = write_parts(target, recipe, _parts(model.state_dict()))
    _copy_texts(source, target)
    _mark(target / CONFIG, recipe)
    if say is not None:
        say(
            f"gpukern: {len(changed)} modules -> {recipe} ({RECIPES[recipe]}); "
            f"{before / 2**20:.1f} -> {size / 2**20:.1f} MiB in {target}"
        )
    return changed


def _parts(state: dict[str, Tensor], most: int = 5 << 30) -> Iterator[dict[str, Tensor]]:
    """Cuts a state into parts of about `most` bytes, on the CPU. All tensors of a layer are in the same
    part. A tensor with several names is in the parts once."""
    part: dict[str, Tensor] = {}
    seen: set[tuple] = set()
    size, last = 0, None
    for name, t in state.items():
        identity = (t.data_ptr(), t.shape, t.dtype, t.stride())
        if t.numel() and identity in seen:
            continue
        seen.add(identity)
        layer = name.rpartition(".")[0]
        if size > most and layer != last:
            yield part
            part, size = {}, 0
        part[name], last = t.detach().cpu().contiguous(), layer
        size += t.numel() * t.element_size()
    yield part


def write_parts(target: Path, recipe: str | None, parts: Iterator[dict[str, Tensor]]) -> int:
    """Writes files of weights, and their index if there are several. Returns their size. If recipe is
    None, files have no metadata of ours: the tensors of each layer name its recipe."""
    made = list(parts)
    total = 0
    file_of: dict[str, str] = {}
    for i, part in enumerate(made):
        single = "model.safetensors"
        file = single if len(made) == 1 else f"model-{i + 1:05}-of-{len(made):05}.safetensors"
        metadata = {} if recipe is None else _metadata(recipe, part)
        safetensors_module().torch.save_file(part, target / file, {"format": "pt", **metadata})
        file_of |= dict.fromkeys(part, file)
        total += sum(t.numel() * t.element_size() for t in part.values())
    if len(made) > 1:
        _index(target, file_of, total)
    return total


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
    about = config_in("quantize", config.parent)
    about["quantization_config"] = quantization
    config.write_text(json.dumps(about, indent=2) + "\n")


def heads_of(model: Any) -> set[torch.nn.Module | None]:
    """The heads of a transformers model: all modules outside of its base model, such as classifiers,
    and the output embeddings of models inside of it."""
    body = set(model.base_model.modules())
    heads: set[torch.nn.Module | None] = {m for m in model.modules() if m not in body}
    return heads | {
        m.get_output_embeddings() for m in model.modules() if hasattr(m, "get_output_embeddings")
    }


def stays_in(model: Any) -> Callable[[str, Any], bool]:
    """The skip function for a transformers model. Embeddings, norms and routers stay by their names,
    and heads whatever their name. kv_b_proj of latent attention stays, because attention multiplies by
    parts of its weight."""
    stay = {*heads_of(model), *(m.kv_b_proj for m in model.modules() if is_latent(m))}
    return lambda name, module: is_skipped(name, module, SKIP) or module in stay


def _on_meta_of(source: Path) -> Any:
    """The model that transformers builds from a directory's configuration, on meta. None if
    transformers does not know it."""
    if "model_type" not in config_in("quantize", source):
        return None
    try:
        import transformers
    except ImportError:
        return None
    try:
        about = transformers.AutoConfig.from_pretrained(source)
        if hasattr(about, "quantization_config"):
            del about.quantization_config
        kind = next((getattr(transformers, n, None) for n in about.architectures or ()), None)
        with torch.device("meta"):
            return kind._from_config(about) if kind else transformers.AutoModel.from_config(about)
    except Exception:  # a model with code of its own, or of another transformers
        return None


class _Known(NamedTuple):
    """What transformers knows of a directory's tensors."""

    # the names of the nn.Linear modules; None if transformers does not know the model
    linear: set[str] | None = None
    heads: tuple[str, ...] = ()  # those of them that are heads
    experts: dict[
        str, bool
    ] = {}  # names of experts' weights, and whether they are stored transposed
    model: Any = None  # the class of a model whose tensors have other names or shapes in the files


def _linear_layers(source: Path, names: list[str]) -> _Known:
    """Asks the model that transformers builds from the configuration."""
    model = _on_meta_of(source)
    if model is None:
        return _Known()
    heads = heads_of(model)
    for root in (model, getattr(model, "base_model", model)):
        if set(names) <= root.state_dict().keys():
            linear = {n: m for n, m in root.named_modules() if isinstance(m, torch.nn.Linear)}
            experts = {
                f"{n}.{weight}": getattr(m, "is_transposed", False)
                for n, m in root.named_modules()
                for weight in names_in(m) or ()
            }
            return _Known(set(linear), tuple(n for n, m in linear.items() if m in heads), experts)
    return _Known(model=type(model))


class _Stays(NamedTuple):
    """A skip function. True for names that match a pattern, and for layers that are not an nn.Linear
    (`linear` has the names of those, or is None if they are unknown)."""

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
    """(names of tensors, metadata) of a file that is not quantised."""
    with opened_file("quantize", file) as tensors:
        metadata = tensors.metadata() or {}
        if "gpukern" in metadata or recipes_of(tensors):
            raise ValueError(f"quantize: {file} has been quantised already")
        return list(tensors.keys()), metadata


def _file(
    file: Path,
    recipe: str,
    skip: Any,
    device: Any,
    steps: Any,
    changed: list[str],
    sizes: list[int],
    layout: str,
    experts: dict[str, bool],
) -> dict:
    """The tensors of one file in the form in which they are written. Advances `steps` by the tensors,
    and adds the quantised layers to `changed` and the bytes before and after to `sizes`."""
    scheme, made, theirs = SCHEMES[recipe], {}, layout != "gpukern"
    multiple = compressed_tensors.multiple_of(recipe) if theirs else scheme.multiple
    with opened_file("quantize", file) as tensors, torch.no_grad():
        for name in tensors.keys():
            next(steps)
            t = tensors.get_tensor(name)
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
            elif name in experts and t.dtype in (torch.float32, torch.bfloat16, torch.float16):
                w = t.to(device)
                packed = pack_experts(recipe, w.mT if experts[name] else w)
                made |= {name + part.removeprefix("weight"): x.cpu() for part, x in packed.items()}
                if layer not in changed:
                    made[f"{layer}._extra_state"] = state_of(recipe)
                    changed.append(layer)
            else:
                made[name] = t
    sizes[1] += sum(t.numel() * t.element_size() for t in made.values())
    return made


# ---- the command line ----------------------------------------------------------------------------


def add_arguments(commands: Any) -> None:
    p = commands.add_parser("quantize", help="write a quantised copy of a model's directory")
    p.set_defaults(run=_run)
    p.add_argument("model", type=Path, metavar="MODEL_DIR", help="a directory with *.safetensors")
    p.add_argument("--out", type=Path, help="default: MODEL_DIR-RECIPE beside it")
    p.add_argument(
        "--recipe",
        choices=["auto", *(r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static)],
        help="default: w4; leave it out for a directory that another tool quantised. auto: the "
        "recipe that decodes --requests fastest on --for, by the measurements of docs/quantise.md",
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
        help="gpukern: for load_quantized; compressed-tensors: for transformers",
    )


def _run(args: Any) -> int:
    ours = foreign_method(args.model) is None
    if args.recipe is None and ours:
        args.recipe = "w4"
    if args.recipe == "auto":
        args.recipe, why = recommended(args.requests, args.served_on or args.device)
        print(f"gpukern: recipe {args.recipe}: {why}")
    out = args.out or args.model.resolve().with_name(
        f"{args.model.resolve().name}-{(args.recipe or 'gpukern').replace(':', '_')}"
    )
    quantize_directory(
        args.model, out, args.recipe, skip=args.skip, device=args.device, layout=args.layout
    )
    return 0
