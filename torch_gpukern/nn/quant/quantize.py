# SPDX-License-Identifier: BSD-3-Clause
"""quantize(model, recipe): quantises the Linear layers of a model in place, and restores them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..layers import Linear
from .calibration import Observed, calibrate
from .experts import (
    QuantizedExperts,
    as_in_linear,
    become_experts,
    names_in,
    pack_module,
    why_not,
)
from .fp8 import HISTORIES, Fp8Linear
from .qat import WAYS, QatLinear, step_of
from .quantized import FORMAT, VERSION, HoldsCodes, QuantizedLinear
from .schemes import IMPORTED, SCHEMES

__all__ = ["RECIPES", "Quantized", "quantize"]

RECIPES: dict[str, str] = {
    **{name: scheme.text for name, scheme in SCHEMES.items() if name not in IMPORTED},
    "fp8-train": "training in 8-bit floats, scales of the tensors as they come",
    "fp8-train-delayed": "training in 8-bit floats, scales of the calls before",
    **{f"qat-{name}": f"training for {name}, scales are learned" for name in WAYS},
}


class Quantized:
    """The result of `quantize`. `replaced` maps each quantised layer's name to its recipe,
    `skipped` each other layer's name to the reason. `restore` undoes the change.

    This object keeps the original weights for `restore`. Drop it to free them.
    """

    def __init__(self, model: torch.nn.Module, recipe: str):
        self.model, self.recipe = model, recipe
        self.replaced: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.bytes_before = self.bytes_after = 0
        self._changed: dict[str, tuple[torch.nn.Linear, type, torch.nn.Parameter]] = {}
        # modules of experts, with their class and parameters
        self._experts: dict[str, tuple[Any, type, dict[str, torch.nn.Parameter | None]]] = {}

    def restore(self) -> None:
        """Restores every layer. Weights have their original bits, on the device and in the dtype
        that the model has now. Weights that were trained meanwhile (fp8-train, qat) keep their
        current values. A second call does nothing.

        Raises:
            RuntimeError: a layer's class or forward was changed since. That layer stays and is
                named; all others are restored.
        """
        left = []
        for name, (module, before, weight) in list(self._changed.items()):
            if type(module) not in _OURS or "forward" in vars(module):
                left.append(f"{name or 'the model'} is {type(module).__name__} now")
                continue
            trained = module._parameters.get("weight")
            if trained is None:
                _follow(weight, vars(module).get("weight_like"))
            _strip(module)
            module.__class__ = before
            module._parameters = {
                "weight": weight if trained is None else trained,
                **module._parameters,
            }  # type: ignore[assignment]
            del self._changed[name]
            self.replaced.pop(name, None)
        for name, (module, before, parameters) in list(self._experts.items()):
            if not isinstance(module, QuantizedExperts) or "forward" in vars(module):
                left.append(f"{name or 'the model'} is {type(module).__name__} now")
                continue
            like = vars(module).pop("weight_like")
            for weight in module.shapes:
                _follow(parameters[weight], like)  # type: ignore[arg-type]
            _strip(module)
            module.__class__ = before
            module._parameters = {n: module._parameters.get(n, p) for n, p in parameters.items()}
            del self._experts[name]
            self.replaced.pop(name, None)
        _mark(self.model, self.recipe)
        if left:
            raise RuntimeError(
                f"gpukern: modules that were changed after quantize cannot be restored; all others "
                f"are restored: {'; '.join(left)}"
            )
        self.replaced.clear()

    def finish(self) -> "Quantized":
        """Converts each layer that was trained with "qat-..." into the quantised layer it was
        trained for, with the learned scales.

        Raises:
            ValueError: no layer was trained so.
        """
        found = {name: m for name, (m, _, _) in self._changed.items() if isinstance(m, QatLinear)}
        if not found:
            raise ValueError(f"gpukern: finish is for the recipes qat-..., this is {self.recipe}")
        for name, module in found.items():
            recipe, step = module.recipe, step_of(module)
            tensors = SCHEMES[recipe].pack(module.weight.detach(), step=step)
            weight, before = module._parameters["weight"], self._changed[name][1]
            assert weight is not None
            _strip(module)
            _become(module, recipe, tensors)
            self._changed[name] = module, before, weight
            self.replaced[name] = recipe
            _mark(self.model, recipe)
        return self

    def __enter__(self) -> "Quantized":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def counted(self) -> str:
        """ "14 Linear and 2 MixtralExperts": what was quantised."""
        kinds = Counter(before.__name__ for _, before, _ in self._experts.values())
        linear = len(self.replaced) - len(self._experts)
        counts = ([f"{linear} Linear"] if linear or not kinds else []) + [
            f"{count} {kind}" for kind, count in kinds.items()
        ]
        return " and ".join(counts)

    def __str__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        return "\n".join(lines + [f"{name}: left, {why}" for name, why in self.skipped.items()])


_OURS = (QuantizedLinear, Fp8Linear, QatLinear)
_ATTRIBUTES = (
    "scheme",
    "names",
    "code_dtypes",
    "recipe",
    "scaling",
    "weight_like",
    "shapes",
    "joint",
)


def config_entry(recipe: str) -> dict[str, Any]:
    """The quantization_config of a model's configuration. It has no method, so transformers and
    other loaders refuse the directory. Otherwise they would find the weights missing and fill in
    random numbers."""
    gpukern = {
        FORMAT: VERSION,
        "recipe": recipe,
        "load_with": "torch_gpukern.nn.load_quantized(model, directory)",
    }
    return {"quant_method": None, "gpukern": gpukern}


def _mark(model: torch.nn.Module, recipe: str) -> None:
    """Adds `config_entry` to a transformers model's configuration, which save_pretrained writes, or
    removes it if no layer is quantised."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        return
    entry = getattr(config, "quantization_config", None)
    ours = isinstance(entry, dict) and "gpukern" in entry
    if any(isinstance(m, HoldsCodes) for m in model.modules()):
        if entry is None:
            config.quantization_config = config_entry(recipe)
    elif ours:
        del config.quantization_config


def _follow(weight: torch.nn.Parameter, like: torch.Tensor | None) -> None:
    """Moves the original weight to the device and dtype that its layer has now."""
    if (
        like is not None
        and not like.is_meta
        and (like.dtype, like.device) != (weight.dtype, weight.device)
    ):
        weight.data = weight.data.to(like)


def _strip(module: torch.nn.Module) -> None:
    """Removes every attribute that `_become`, `_scale_by` and `_begin` added."""
    for name in vars(module).get("names", HISTORIES):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    module._parameters.pop("log_step", None)
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)


def _become(module: Any, recipe: str, tensors: dict) -> None:
    # The object stays the same, so its hooks, its bias and references to it stay valid.
    k, n = module.in_features, module.out_features
    weight = module._parameters.pop("weight")
    # An empty tensor with the weight's dtype and device, which .to() of the layer changes.
    module.weight_like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    module.__class__ = QuantizedLinear
    module._hold(recipe, k, n, tensors)


def quantize(
    model: torch.nn.Module,
    recipe: str,
    *,
    skip: Sequence[str] | Callable[[str, torch.nn.Module], bool] = ("lm_head",),
    calibration: Iterable[Any] | None = None,
    say: Callable[[str], object] | None = print,
) -> Quantized:
    """Quantises every nn.Linear and every mixture of experts of a model in place and prints a
    summary.

    =======================  ============================================================================
    fp8, fp8-block           e4m3 weights and activations, a scale a row or a block, activations' as they come
    mxfp8                    likewise, with a power of two a 32 (OCP MX), of activations too
    fp8-static               a scale a row, and one calibrated scale of activations
    int8, int8-static        the same in int8
    w8, w4, w4-zero          int8 or int4 weights, 16-bit activations; w4-zero with zero points
    mxfp4, nvfp4             4-bit floats as OCP MX and NVIDIA group them, 16-bit activations
    2:4, 2:4-fp8             two of four weights, bfloat16 or e4m3
    fp8-train                for training: `Fp8Linear`; fp8-train-delayed with delayed scales
    qat-w4, w8, int8, fp8    for training: `QatLinear`; then ``Quantized.finish``
    =======================  ============================================================================

    The layer is the same object with the same hooks and bias; ``weight`` becomes buffers, which a
    state_dict has by name. To load one, quantize a model of the same kind with the same recipe
    first. A weight that an embedding shares stays with the embedding.

    Experts are those of `torch_gpukern.nn.MoE` and of transformers' mixtures. They have the recipes
    fp8, fp8-block, w8, w4, w4-zero and mxfp4; with another recipe they stay, and the summary names
    them.

    Args:
        model: any module, or an nn.Linear or a mixture of experts itself.
        recipe: one of the above (`RECIPES`).
        skip: patterns (``"*.router"``) of whole names or last parts; or ``skip(name, module)``.
        calibration: batches (see `calibrate`), needed by the static recipes. With them, w4, mxfp4,
            nvfp4 and 2:4 weight the rounding error of each column by the activations that it meets.
        say: called with each line; None prints nothing.

    Returns:
        Quantized, whose ``restore()`` undoes all of it. If quantize raises, nothing is changed.

    Raises:
        TypeError: model is not a torch.nn.Module.
        ValueError: no such recipe; a static one without calibration, or a layer that calibration
            did not reach, or gave only zeros; calibration that gave a layer an infinity or NaN.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"gpukern quantize: model must be a torch.nn.Module, got {model!r}")
    if recipe not in RECIPES:
        raise ValueError(
            f"gpukern quantize: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}"
        )
    scheme = SCHEMES.get(recipe)
    if scheme is not None and scheme.static and calibration is None:
        raise ValueError(
            f"gpukern quantize: recipe {recipe} needs calibration, batches that the model is "
            f"called with"
        )
    done = Quantized(model, recipe)
    found, experts = _found(done, model, recipe, skip)
    seen = {} if calibration is None else calibrate(model, calibration, found, show=say is not None)
    if scheme is not None and scheme.static and found.keys() - seen.keys():
        raise ValueError(
            f"gpukern quantize: calibration did not reach "
            f"{', '.join(sorted(found.keys() - seen.keys()))}"
        )
    _check_seen(
        recipe,
        scheme is not None and scheme.static,
        {name: seen[name] for name in found if name in seen},
    )
    try:
        for name, module in found.items():
            _change(done, name, module, recipe, seen.get(name))
        for name, module in experts.items():
            _change_experts(done, name, module, recipe)
    except BaseException:
        done.restore()
        raise
    _mark(model, recipe)
    if say is not None:
        _report(done, say)
    return done


def _check_seen(recipe: str, static: bool, seen: dict[str, Observed]) -> None:
    """Raises ValueError, by layer names, if calibration saw values that determine no scale."""
    bad = [
        name
        for name, one in seen.items()
        if not (one.amax.isfinite() & one.square.isfinite().all())
    ]
    zero = [name for name, one in seen.items() if static and one.square.numel() and one.amax == 0]
    for names, what in (
        (bad, "values that are infinite or NaN, or whose squares are"),
        (zero, "only zeros"),
    ):
        if names:
            raise ValueError(
                f"gpukern quantize: recipe {recipe}: calibration gave "
                f"{', '.join(name or 'the model' for name in names)} {what}; "
                "expected finite activations, not all 0: correct the batches, or name the layers "
                "in skip"
            )


def _found(
    done: Quantized, model: torch.nn.Module, recipe: str, skip: Any
) -> tuple[dict[str, torch.nn.Linear], dict[str, torch.nn.Module]]:
    """The layers and the experts to change. Reasons for the others go to ``done.skipped``."""
    closed: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
            closed.update(module.modules())
    scheme, found, experts = SCHEMES.get(recipe), {}, {}
    for name, module in model.named_modules():
        if isinstance(module, HoldsCodes):
            done.skipped[name] = f"it is {module.scheme} already"
            continue
        if names_in(module) is not None:
            reason = "skipped" if is_skipped(name, module, skip) else why_not(module, recipe)
            if reason is None:
                experts[name] = module
            else:
                done.skipped[name] = reason
            continue
        if not isinstance(module, torch.nn.Linear):
            continue
        if is_skipped(name, module, skip):
            why = "skipped"
        elif module in closed:
            why = "PyTorch's transformer layers read its weight themselves"
        elif type(module) not in (torch.nn.Linear, Linear):
            why = f"{type(module).__name__} has a forward of its own"
        elif module._parameters.get("weight") is None:
            why = "its weight is no parameter: a hook computes it"
        elif "forward" in vars(module):
            why = "its forward was replaced before"
        elif scheme is not None and module.in_features % scheme.multiple:
            why = f"in_features {module.in_features} is no multiple of {scheme.multiple}"
        elif module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            why = f"its weight is {str(module.weight.dtype)[6:]}"
        else:
            found[name] = module
            continue
        done.skipped[name] = why
    return found, experts


def is_skipped(name: str, module: Any, skip: Any) -> bool:
    if callable(skip):
        return bool(skip(name, module))
    last = name.rpartition(".")[2]
    return any(fnmatchcase(name, pattern) or last == pattern for pattern in skip)


def _change(
    done: Quantized, name: str, module: torch.nn.Linear, recipe: str, seen: Observed | None
) -> None:
    before, weight = type(module), module.weight
    done.bytes_before += weight.numel() * weight.element_size()
    if recipe in SCHEMES:
        scheme = SCHEMES[recipe]
        with torch.no_grad():
            tensors = scheme.pack(weight.detach(), None if seen is None else seen.square)
        if scheme.static:
            assert seen is not None
            most = 448.0 if recipe.startswith("fp8") else 127.0
            tensors["input_scale"] = (seen.amax / most).clamp_min(2.0**-126)
        _become(module, recipe, tensors)
        done.bytes_after += sum(t.numel() * t.element_size() for t in tensors.values())
    elif recipe.startswith("qat-"):
        module.__class__ = QatLinear
        module._begin(recipe.removeprefix("qat-"), None if seen is None else seen.square)  # type: ignore[attr-defined]
    else:
        module.__class__ = Fp8Linear
        module._scale_by("delayed" if recipe.endswith("delayed") else "current", 16)  # type: ignore[attr-defined]
    done._changed[name] = module, before, weight
    done.replaced[name] = recipe


def _change_experts(done: Quantized, name: str, module: Any, recipe: str) -> None:
    before, parameters = type(module), dict(module._parameters)
    packed = pack_module(module, recipe)
    for weight, p in packed.items():
        w = as_in_linear(module, parameters[weight])
        done.bytes_before += w.numel() * w.element_size()
        done.bytes_after += sum(t.numel() * t.element_size() for t in p.tensors.values())
    become_experts(module, recipe, packed)
    done._experts[name] = module, before, parameters
    done.replaced[name] = recipe


def _report(done: Quantized, say: Callable[[str], object]) -> None:
    names = [name or "the model" for name in done.replaced]
    if names:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        line = f"gpukern: {done.counted()} -> {done.recipe} ({RECIPES[done.recipe]}): {some}"
        if done.bytes_after:
            line += f"; {done.bytes_before / 2**20:.1f} -> {done.bytes_after / 2**20:.1f} MiB"
        say(line)
    else:
        say("gpukern: nothing to quantize")
    for name, why in done.skipped.items():
        say(f"gpukern: {name or 'the model'} left: {why}")
