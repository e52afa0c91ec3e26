# SPDX-License-Identifier: BSD-3-Clause
"""The parts of `torch_gpukern.integrations.transformers.accelerate`, and how each is restored."""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D as TheirConv1D

from ..nn.joint import join, leave
from ..nn.patching import Patched, patch
from ..nn.quant.adopted import adopt
from ..nn.quant.files import stays_in
from ..nn.quant.quantize import Quantized, quantize
from ..nn.rows import served
from ..nn.similar import MLP
from ..ops import linear, rope
from ..ops.fakes import stats_dtype
from .transformers_latent import absorb

__all__ = ["Accelerated"]


class Conv1D(TheirConv1D):
    """transformers' Conv1D (GPT-2's linear layer, weight [K, N]) by one product."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.mT, self.bias)


class Accelerated:
    """The result of `accelerate`. ``done`` maps each replaced part to its replacement, ``left``
    each other part to the reason. ``print`` shows both. `restore` undoes everything.

    Attributes:
        patched: what `torch_gpukern.nn.patch` did, layer by layer.
        quantized: what `torch_gpukern.nn.quantize` did, or None.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.done: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.patched = Patched(model)
        self.quantized: Quantized | None = None
        self._undo: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Puts the model back as it was. A second call does nothing.

        Raises:
            RuntimeError: another tool changed a layer since. That layer stays and is named, all
                others are put back.
        """
        while self._undo:
            self._undo.pop()()
        if self.quantized is not None:
            self.quantized.restore()
        self.patched.restore()
        self.done.clear()

    def __enter__(self) -> "Accelerated":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"{part}: {what}" for part, what in self.done.items()]
        lines += [f"{part}: left, {why}" for part, why in self.left.items()]
        return "\n".join(lines) or "nothing to change"


def change(
    done: Accelerated,
    name: str,
    experts: Callable[[], None],
    quantise: str | None,
    loss: bool,
) -> None:
    """Changes all parts of the model. The order matters: `patch` must see the model's own layers,
    `quantize` the patched ones."""
    model = done.model
    adopted = adopt(model)
    if adopted.replaced:
        done._undo.append(adopted.restore)
        kinds = Counter(adopted.replaced.values())
        done.done["quantised before"] = ", ".join(f"{n} Linear -> {r}" for r, n in kinds.items())
    done.left |= {
        f"{names} of another tool": why for names, why in _by_reason(adopted.left).items()
    }
    _attention(done, model, name)
    _experts(done, model, name, experts)
    _rotation(done, model)
    done.patched = patch(model, None, fused_linear_cross_entropy=loss)
    for path, module in model.named_modules():
        if type(module) is TheirConv1D and "forward" not in vars(module):
            done.patched._become(path, module, Conv1D)
            done.patched.replaced[path] = "Conv1D -> linear"
    _count_layers(done)
    _other_layers(done, model)
    if quantise is not None:
        done.quantized = quantize(model, quantise, skip=stays_in(model), say=None)
        done.done["quantised"] = f"{done.quantized.counted()} -> {quantise}"
        for paths, why in _by_reason(done.quantized.skipped).items():
            done.left[f"{paths} in {quantise}"] = why
    if joints := join(model):
        done._undo.append(partial(leave, model))
        kinds = Counter(joints.values())
        done.done["joined"] = "; ".join(f"{names} of {n}" for names, n in kinds.items())
    if not loss:
        done.left["loss"] = "loss=False"


def _count_layers(done: Accelerated) -> None:
    kinds: dict[str, int] = {}
    for what in done.patched.replaced.values():
        what = what if " -> " in what else f"nn.Linear -> gnn.{what}"
        kinds[what] = kinds.get(what, 0) + 1
    for what, count in kinds.items():
        before, _, after = what.partition(" -> ")
        if before == "loss":
            done.done["loss"] = f"{after}, logits are None where labels are given"
        else:
            done.done[f"{count} {before}"] = after
    done.left |= _by_reason(done.patched.skipped)


def _other_layers(done: Accelerated, model: torch.nn.Module) -> None:
    """Names the norms and gated MLPs of transformers that `patch` did not replace."""
    for kind, count in Counter(type(m) for m in model.modules()).items():
        if not kind.__module__.startswith("transformers"):
            continue  # torch's, or ours
        name = kind.__name__
        children = next(set(m._modules) for m in model.modules() if type(m) is kind)
        if "Norm" in name and not children:
            why = "no rms_norm was found that computes the same"
            if not name.endswith("RMSNorm"):
                why = "it is neither torch's norm nor called RMSNorm"
        elif ("MLP" in name or "Dense" in name) and (
            "Gated" in name or any("gate" in child for child in children)
        ):
            why = "no swiglu or geglu was found that computes the same"
            if children != MLP:
                why = f"its modules are not {', '.join(sorted(MLP))}"
        else:
            continue
        done.left[f"{count} {name}"] = why


def _by_reason(skipped: dict[str, str]) -> dict[str, str]:
    """One entry for all layers that were left for the same reason."""
    paths: dict[str, list[str]] = {}
    for path, why in skipped.items():
        paths.setdefault(why, []).append(path)
    return {
        ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else ""): why
        for why, some in paths.items()
    }


# ---- attention and experts -----------------------------------------------------------------------


def _attention(done: Accelerated, model: PreTrainedModel, name: str) -> None:
    configs = _configs(model)
    before = [(config, config._attn_implementation) for config in configs]
    if all(way == name for _, way in before):
        done.left["attention"] = f'it is "{name}" already'
        return
    if not model._can_set_attn_implementation():
        done.left["attention"] = (
            f"{type(model).__name__} has one of its own and does not ask transformers' "
            f"AttentionInterface"
        )
        return
    if (own := _changes_the_mask(model)) is not None:
        done.left["attention"] = f"{own} changes the mask itself"
        return
    model.set_attn_implementation(name)

    def undo() -> None:
        for config, way in before:
            config._attn_implementation_internal = way

    done._undo.append(undo)
    done.done["attention"] = f'"{name}"'
    kinds, left, restore = absorb(model, name)
    done._undo.append(restore)
    for kind, count in kinds.items():
        done.done[f"{count} {kind}"] = "over latents where that is less work"
    done.left |= {f"latents of {kind}": why for kind, why in left.items()}


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configurations of a model and of the models in it, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is not None and id(config) not in found:
            found[id(config)] = config
            for name in getattr(config, "sub_configs", ()):
                add(getattr(config, name, None))

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            add(module.config)
    return list(found.values())


# A line of a forward that changes its attention_mask or adds it to scores.
_CHANGED = re.compile(
    r"\battention_mask = (?!encoder_attention_mask$)|\battention_mask(\[|\.)|[+&|] attention_mask\b"
    r"|\battention_mask=(?!attention_mask\b|None\b)\w+"
)


def _changes_the_mask(model: torch.nn.Module) -> str | None:
    """The name of an attention class that changes its mask instead of only passing it on; None if
    there is none. The source of its forward is searched."""
    for kind in {type(m) for m in model.modules() if "Attention" in type(m).__name__}:
        forward = inspect.unwrap(kind.forward)
        if "attention_mask" not in inspect.signature(forward).parameters:
            continue
        try:
            source = inspect.getsource(forward)
        except (OSError, TypeError):
            return kind.__name__
        if "get_interface(" not in source and "softmax(" not in source:
            continue
        where = vars(sys.modules[kind.__module__])
        if not any(name.startswith("create_") and "mask" in name for name in where):
            continue  # its masks are plain matrices of its own, which it may change
        if any(_CHANGED.search(line.partition("#")[0].rstrip()) for line in source.splitlines()):
            return kind.__name__
    return None


def _experts(
    done: Accelerated,
    model: PreTrainedModel,
    name: str,
    register: Callable[[], None],
) -> None:
    found = [m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]
    if not found:
        return
    kind = type(found[0]).__name__
    if any(p.dtype is torch.float64 for p in found[0].parameters()):
        done.left["experts"] = f"{kind} is float64, grouped_gemm takes float32 and 16 bits"
        return
    register()
    before = [(c, c._experts_implementation) for c in _configs(model)]
    if all(way == name for _, way in before):
        done.left["experts"] = f'they are "{name}" already'
        return
    model.set_experts_implementation(name)
    if all(c._experts_implementation == way for c, way in before):
        done.left["experts"] = f"{type(model).__name__} does not let its experts be replaced"
        return

    def undo() -> None:
        for config, way in before:
            config._experts_implementation_internal = way

    done._undo.append(undo)
    done.done["experts"] = f"{len(found)} {kind} -> grouped_gemm"


# ---- rotary embedding ----------------------------------------------------------------------------

_ROTATION = "apply_rotary_pos_emb"
# For each module whose function is replaced: the function, and the accelerated models that need
# the replacement.
_replaced: dict[str, tuple[Any, WeakSet]] = {}


def _rotation(done: Accelerated, model: torch.nn.Module) -> None:
    """Replaces the function that rotates q and k. It belongs to the module of a model family, and
    every model of the family calls it. It stays replaced while an accelerated model lives."""
    modules: dict[str, ModuleType] = {}
    for module in model.modules():
        if "Attention" in type(module).__name__:
            where = sys.modules.get(type(module).__module__)
            if where is not None and _ROTATION in vars(where):
                modules[where.__name__] = where
                continue
            others = [x for x in vars(where) if x.startswith("apply_rotary")] if where else []
            if others:
                part = f"rotary embedding of {where.__name__.rpartition('.')[2]}"
                done.left[part] = f"it is {others[0]}, not {_ROTATION}"
    for name, where in modules.items():
        own = _replaced[name][0] if name in _replaced else getattr(where, _ROTATION)
        how, why = _kind_of_rotation(own, model)
        if how is None:
            done.left[f"rotary embedding of {name.rpartition('.')[2]}"] = why
            continue
        models = _replaced.setdefault(name, (own, WeakSet()))[1]
        if model in models:
            done.left["rotary embedding"] = "it is rope already"
            continue
        if not models:
            setattr(where, _ROTATION, _rotated_by(own, *how))
        models.add(model)
        # the function is also put back if the model is freed without `restore`
        put_back = finalize(model, _put_back, name, where)
        put_back.atexit = False
        done._undo.append(partial(_let_go, models, model, put_back))
        done.done["rotary embedding"] = "rope, for all models of this family in the process"


def _let_go(models: WeakSet, model: torch.nn.Module, put_back: Callable[[], object]) -> None:
    models.discard(model)
    put_back()


def _put_back(name: str, where: ModuleType) -> None:
    """Gives the module its own function back, unless an accelerated model still needs ours."""
    if name in _replaced and not list(_replaced[name][1]):  # len counts a model that is dying
        setattr(where, _ROTATION, _replaced.pop(name)[0])


# How a model's cos [.., R] holds the R / 2 angles of a token: a pattern of the source that makes
# it, a name, and a function that returns each angle once.
_ANGLES = {
    r"torch\.cat\(\((\w+), \1\), dim=-1\)": ("halves", lambda t: t[..., : t.shape[-1] // 2]),
    r"repeat_interleave\(\w+, 2, dim=-1\)": ("pairs", lambda t: t[..., ::2]),
    r"cos = (emb|freqs)\.cos\(\)": ("once", lambda t: t),
}


def _kind_of_rotation(own: Any, model: torch.nn.Module) -> tuple[tuple | None, str]:
    """(the arguments of `_rotated_by`, ""), or (None, why `rope` cannot replace the function).

    The function is called with random q and k, and its results are compared with those of `rope`.
    How cos repeats its angles is read from the source of the modules that make cos."""
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None, "its arguments are not q, k, cos, sin, unsqueeze_dim"
    makers = {type(m) for m in model.modules() if "Rotary" in type(m).__name__}
    found = {_angles_of(kind) for kind in makers}
    if len(found) != 1 or None in found:
        return None, "the modules that make its angles are none, several, or of another kind"
    (pattern,) = found
    name, angles = _ANGLES[pattern]
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 16, generator=gen) for heads in (2, 1))
    angle = once = torch.randn(1, 3, 8, generator=gen)
    if name != "once":
        angle = torch.cat((once, once), -1) if name == "halves" else once.repeat_interleave(2, -1)
    try:
        want = own(q, k, angle.cos(), angle.sin())
        wide = own(q.bfloat16(), k.bfloat16(), angle.cos(), angle.sin())[0].dtype is torch.float32
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None, "it is not rope"
    for interleaved in (False, True):
        got = rope(q, k, once[0].cos(), once[0].sin(), interleaved=interleaved)
        if all(w.shape == g.shape and torch.allclose(w, g, atol=1e-5) for w, g in zip(want, got)):
            return (angles, interleaved, not wide), ""
    return None, "it is not rope"


def _angles_of(kind: type) -> str | None:
    """The pattern of _ANGLES that the source of a rotary module's forward has."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return None
    return next((pattern for pattern in _ANGLES if re.search(pattern, source)), None)


def _rotated_by(own: Any, angles: Callable, interleaved: bool, casts: bool) -> Any:
    """A replacement for the function `own`: `rope`, or `own` where `rope` does not fit. casts:
    `own` returns q's dtype, whatever dtype cos has."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        fits = (
            q.dim() == 4
            and cos.dim() == 3
            and unsqueeze_dim in (1, 2)
            and (casts or cos.dtype == q.dtype)
            and q.dtype == k.dtype
            and not cos.requires_grad
            and served(q, k, cos, sin)
        )
        if not fits:
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = (angles(t).to(stats_dtype(q)) for t in (cos, sin))
        positions = None
        if cos.shape[0] > 1:
            rows = cos.shape[0] * cos.shape[1]
            positions = torch.arange(rows, device=q.device).view(cos.shape[:2])
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rope(q, k, cos.flatten(0, 1), sin.flatten(0, 1), positions, interleaved=interleaved)
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)

    return apply_rotary_pos_emb
