# SPDX-License-Identifier: BSD-3-Clause
"""Files of quantised weights: `quantize_directory` makes them of a model's safetensors,
`load_quantized` reads them.

A file's metadata has an entry "gpukern": the version of how codes lie, the recipe, and the layers
that have it. Each layer's tensors are named as in a QuantizedLinear's state_dict.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cli.terminal import progress
from .quantize import RECIPES, _become, is_skipped
from .quantized import FORMAT, VERSION, empty_of, state_of
from .schemes import IMPORTED, SCHEMES

__all__ = ["SKIP", "load_quantized", "quantize_directory"]

INDEX = "model.safetensors.index.json"
# names of matrices that are no Linear's weight, or whose rounding costs more than it gives
SKIP = ("*embed*", "*wte*", "*wpe*", "lm_head", "*norm*", "*router*", "gate", "shared_expert_gate")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "torch_gpukern: files of weights need safetensors: pip install safetensors"
        ) from error
    return safetensors


def quantize_directory(
    source: str | Path,
    target: str | Path,
    recipe: str,
    *,
    skip: Sequence[str] = SKIP,
    device: torch.device | str = "cpu",
    show: bool = True,
    say: Callable[[str], object] | None = print,
) -> list[str]:
    """Writes a model's directory again, its matrices in few bits: tensor by tensor, so that no more
    than one file is in memory.

    Args:
        source: a directory with \\*.safetensors, as transformers writes it.
        target: a directory that does not exist, or is empty. Configuration and tokenizer are
        copied.
        recipe: as in `quantize`, without calibration or training.
        skip: patterns of names ("model.layers.0.self_attn.q_proj", without ".weight") or last parts
            that stay; by default embeddings, the head, norms and routers. What is no 2-dimensional
            floating ".weight" stays, too.
        device: where weights are rounded.
        show: a progress bar on stderr.
        say: is called with a line at the end.

    Returns:
        The names of the layers that have few bits now.

    Raises:
        ValueError: no such recipe, no safetensors, a target with something in it, weights that are
        quantised already. ImportError: safetensors is not installed.
    """
    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors"))
    offered = [r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static]
    if recipe not in offered:
        why = "needs calibration or training" if recipe in RECIPES else "is none"
        raise ValueError(f"quantize: recipe {recipe} {why}; expected one of {', '.join(offered)}")
    if not files:
        raise ValueError(f"quantize: {source} has no *.safetensors")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"quantize: {target} exists and is not an empty directory")
    held = [(file, _header(file)) for file in files]
    target.mkdir(parents=True, exist_ok=True)
    names = [(file, name) for file, (names, _) in held for name in names]
    steps, changed, where, sizes = (
        iter(progress(names, "quantizing", "tensor") if show else names),
        [],
        {},
        [0, 0],
    )
    for file, (_, metadata) in held:
        made = _file(file, recipe, skip, device, steps, changed, sizes)
        about = {
            FORMAT: VERSION,
            "recipe": recipe,
            "layers": [n for n in changed if f"{n}._extra_state" in made],
        }
        _safetensors().torch.save_file(
            made, target / file.name, {**metadata, "gpukern": json.dumps(about)}
        )
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
    if say is not None:
        say(
            f"gpukern: {len(changed)} of {len(names)} tensors -> {recipe} ({RECIPES[recipe]}); "
            f"{sizes[0] / 2**20:.1f} -> {sizes[1] / 2**20:.1f} MiB in {target}"
        )
    return changed


def _header(file: Path) -> tuple[list[str], dict[str, str]]:
    with _safetensors().safe_open(file, "pt") as held:
        metadata = held.metadata() or {}
        if "gpukern" in metadata:
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
) -> dict:
    """The tensors of one file as they are written."""
    scheme, made = SCHEMES[recipe], {}
    with _safetensors().safe_open(file, "pt") as held, torch.no_grad():
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
            if matrix and t.shape[1] % scheme.multiple == 0 and not is_skipped(layer, None, skip):
                parts = {
                    f"{layer}.{part}": x.cpu() for part, x in scheme.pack(t.to(device)).items()
                }
                made |= {**parts, f"{layer}._extra_state": state_of(recipe)}
                changed.append(layer)
            else:
                made[name] = t
    sizes[1] += sum(t.numel() * t.element_size() for t in made.values())
    return made


def load_quantized(model: torch.nn.Module, directory: str | Path) -> list[str]:
    """Loads what `quantize_directory` wrote into a model of the same kind, whose layers become
    `QuantizedLinear` in place.

    Args:
        model: its nn.Linear modules have the names of the files' layers; values do not matter
        (``AutoModel.from_config``). directory: of the files.

    Returns:
        The names of those layers.

    Raises:
        ValueError: files of another version, or not of gpukern; layers that the model lacks;
        tensors that the files lack. ImportError: safetensors is not installed.
    """
    files, layers = sorted(Path(directory).glob("*.safetensors")), {}
    if not files:
        raise ValueError(f"load_quantized: {directory} has no *.safetensors")
    for file in files:
        with _safetensors().safe_open(file, "pt") as held:
            about = json.loads((held.metadata() or {}).get("gpukern", "{}"))
        if FORMAT not in about:
            raise ValueError(f"load_quantized: {file} was not written by gpukern quantize")
        if about[FORMAT] != VERSION:
            raise ValueError(
                f"load_quantized: {file} is of version {about[FORMAT]}, this gpukern reads "
                f"version {VERSION}"
            )
        layers |= dict.fromkeys(about["layers"], about["recipe"])
    modules = dict(model.named_modules())
    missing = [name for name in layers if not isinstance(modules.get(name), torch.nn.Linear)]
    if missing:
        raise ValueError(f"load_quantized: the model has no nn.Linear {', '.join(sorted(missing))}")
    for name, recipe in layers.items():
        module = modules[name]
        _become(
            module,
            recipe,
            empty_of(recipe, module.out_features, module.in_features, module.weight.device),
        )
    absent, unknown = set(model.state_dict()), []
    for file in files:
        given: dict[str, Tensor] = _safetensors().torch.load_file(file)
        unknown += model.load_state_dict(given, strict=False).unexpected_keys
        absent -= given.keys()
    tensors = model.state_dict()
    there = {
        t.data_ptr() for name, t in tensors.items() if name not in absent and isinstance(t, Tensor)
    }
    absent = {name for name in absent if tensors[name].data_ptr() not in there}  # but for tied ones
    if absent or unknown:
        raise ValueError(
            f"load_quantized: {directory} lacks {', '.join(sorted(absent)) or 'nothing'}, "
            f"and has beside {', '.join(sorted(unknown)) or 'nothing'}"
        )
    return list(layers)


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
        choices=[r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static],
        default="w4",
    )
    p.add_argument(
        "--skip",
        nargs="+",
        default=list(SKIP),
        metavar="PATTERN",
        help=f"names that stay; default: {' '.join(SKIP)}",
    )
    p.add_argument("--device", default="cpu", help="where weights are rounded")


def _run(args: Any) -> int:
    out = args.out or args.model.resolve().with_name(
        f"{args.model.resolve().name}-{args.recipe.replace(':', '_')}"
    )
    quantize_directory(args.model, out, args.recipe, skip=args.skip, device=args.device)
    return 0
