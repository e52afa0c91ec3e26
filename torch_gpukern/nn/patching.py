# SPDX-License-Identifier: BSD-3-Clause
"""patch(model): replaces an existing model's modules by gpukern's, in place, and restores them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..ops import linear
from .causal_lm import fused_loss_of, is_causal_lm
from .layers import Linear, has_hooks, is_itself
from .rows import LayerNorm, RMSNorm
from .similar import similar

__all__ = ["Patched", "patch"]


class Fused(torch.nn.Sequential):
    """An nn.Sequential that fuses an activation into the Linear before it. Every call checks that
    both modules are unchanged, so that adapters, hooks, slices and replaced or inserted modules
    behave as in a plain nn.Sequential.
    """

    _gpukern_pairs: dict[str, str] = {}  # names of a Linear and of its activation

    def forward(self, input: Any) -> Any:
        names = list(self._modules)
        at = 0
        while at < len(names):
            first, activation = self._modules[names[at]], None
            if (
                at + 1 < len(names)
                and self._gpukern_pairs.get(names[at]) == names[at + 1]
                and is_itself(first)
            ):
                activation = _activation_of(self._modules[names[at + 1]])
            if activation is None:
                input = first(input)
            else:
                input = linear(input, first.weight, first.bias, activation=activation)
            at += 1 if activation is None else 2
        return input


class Patched:
    """The result of `patch`. `replaced` maps the name of each replaced module to a description,
    `skipped` the name of each module that stays to the reason. `restore` undoes the patch.

    ::

        with patch(model): ...  # restored at the end
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.replaced: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        # name: (module, its class then, and now)
        self._changed: dict[str, tuple[torch.nn.Module, type, type]] = {}

    def restore(self) -> None:
        """Restores every module's class. Weights keep their current values. A second call does
        nothing.

        Raises:
            RuntimeError: another tool changed a module since (a parametrisation, FSDP, a replaced
                forward). The module stays and is named; all others are restored. Undo that change
                and call again.
        """
        left = {}
        for name, (module, before, after) in list(self._changed.items()):
            if type(module) is not after:
                left[name] = f"its class is {type(module).__name__} now, not {after.__name__}"
            elif "forward" in vars(module):
                left[name] = "its forward was replaced"
            else:
                module.__class__ = before
                for own in ("_gpukern_pairs", "_gpukern_rule"):
                    vars(module).pop(own, None)
                del self._changed[name]
                self.replaced.pop(name, None)
        if left:
            what = "; ".join(f"{name or 'the model'}: {why}" for name, why in left.items())
            raise RuntimeError(
                f"gpukern: modules that were changed after patch cannot be restored; all others "
                f"are restored: {what}"
            )
        self.replaced.clear()

    def _become(self, name: str, module: torch.nn.Module, kind: type) -> None:
        # The object stays the same, so its parameters, hooks and references stay valid.
        self._changed[name] = module, type(module), kind
        module.__class__ = kind

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: left, {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def patch(
    model: torch.nn.Module,
    say: Callable[[str], object] | None = print,
    *,
    fused_linear_cross_entropy: bool = False,
) -> Patched:
    """Replaces, in place, the modules that gpukern serves. Prints a line for each kind of
    replacement and for each module that stays.

    - ``nn.Linear`` becomes `torch_gpukern.nn.Linear`, the same object with the same parameters and
      hooks. An activation behind it in an ``nn.Sequential`` (ReLU, GELU, SiLU) is fused, as long
      as both modules are unchanged.
    - ``nn.RMSNorm`` and ``nn.LayerNorm`` become those of `torch_gpukern.nn`.
    - Classes named ``...RMSNorm`` (Llama's, Gemma's, Qwen's and others) become RMS norms, too. MLPs
      of gate_proj, up_proj, down_proj and act_fn run `swiglu` or `geglu` between their products.
      Both are replaced only if ours give the same result for two rows of numbers. 16-bit norms
      round once; Llama's round twice.
    - In ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` nothing is replaced: PyTorch's
      inference path reads their weights and calls no module. `torch_gpukern.integrations.sdpa`
      serves these.
    - Subclasses of nn.Linear keep their own forward. LoRA's wrapped base layer is an nn.Linear and
      is replaced. Quantised layers are subclasses and are not. Weights that are tensor subclasses
      go through F.linear as before.

    Restore the model before two kinds of tools are used. Tools that compare types with nn.Linear
    (``torch.ao.quantization.quantize_dynamic``) find none in a patched model, and
    ``torch.jit.script`` cannot compile our calls.

    transformers' attention is a function, not a module:
    `torch_gpukern.integrations.transformers.register` replaces it.

    Args:
        say: called with each line; None prints nothing.
        fused_linear_cross_entropy: a transformers causal model that is given labels computes its
            loss by `linear_cross_entropy`. Its logits are never in memory, and it returns None for
            them. Calls without labels are as before. Softcaps and scales of logits are supported. A
            model whose forward does more than head and loss is left and named.

    Returns:
        Patched, whose ``restore()`` undoes all of it. If patch raises, nothing is changed.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"gpukern patch: model must be a torch.nn.Module, got {model!r}")
    done = Patched(model)
    try:
        _patch(done, model)
        if fused_linear_cross_entropy:
            _patch_loss(done, model)
        if say is not None:
            _report(done, say)
    except BaseException:
        done.restore()
        raise
    return done


def _patch(done: Patched, model: torch.nn.Module) -> None:
    closed: set[torch.nn.Module] = set()  # modules that PyTorch's transformer layers do not call
    for module in model.modules():
        if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
            closed.update(module.modules())
    _patch_rows(done, model, closed)
    fused: dict[str, str] = {}  # a Linear's name: the activation that is fused into it
    uses = Counter(child for module in model.modules() for child in module._modules.values())
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Sequential or module in closed or "forward" in vars(module):
            continue
        pairs = _pairs_of(module, uses)
        fused.update(
            {f"{name}.{first}" if name else first: which for first, (_, which) in pairs.items()}
        )
        if pairs:
            done._become(name, module, Fused)
            vars(module)["_gpukern_pairs"] = {first: second for first, (second, _) in pairs.items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or isinstance(module, Linear):
            continue
        if module in closed:
            done.skipped[name] = "PyTorch's transformer layers read its weight themselves"
        elif type(module) is not torch.nn.Linear:
            done.skipped[name] = f"{type(module).__name__} has a forward of its own"
        elif "forward" in vars(module):
            done.skipped[name] = "its forward was replaced before"
        elif hasattr(module, "activation"):
            done.skipped[name] = "it has an attribute named activation"
        else:
            done._become(name, module, Linear)
            done.replaced[name] = "Linear" if name not in fused else f"Linear + {fused[name]}"


def _patch_rows(done: Patched, model: torch.nn.Module, closed: set[torch.nn.Module]) -> None:
    """Replaces norms, and MLPs whose activation and product become one op."""
    for name, module in model.named_modules():
        if module in closed:
            continue
        for theirs, ours in ((torch.nn.RMSNorm, RMSNorm), (torch.nn.LayerNorm, LayerNorm)):
            if (
                type(module) is theirs
                and "forward" not in vars(module)
                and not hasattr(module, "weight_offset")
            ):
                done._become(name, module, ours)
                done.replaced[name] = f"nn.{theirs.__name__} -> {ours.__name__}"
        if (found := similar(module)) is not None:
            kind, rule, what = found
            done._become(name, module, kind)
            vars(module)["_gpukern_rule"] = rule
            done.replaced[name] = what


def _patch_loss(done: Patched, model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if not is_causal_lm(module):
            continue
        kind, why = fused_loss_of(module)
        if kind is None:
            done.skipped[name or type(module).__name__] = f"loss and logits as before: {why}"
        else:
            done.replaced[name or type(module).__name__] = "loss -> linear_cross_entropy"
            done._become(name, module, kind)


def _activation_of(module: torch.nn.Module) -> Any:
    """The op's name for an activation module without hooks; None for any other module."""
    if has_hooks(module) or "forward" in module.__dict__:
        return None
    if type(module) is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return {torch.nn.ReLU: "relu", torch.nn.SiLU: "silu"}.get(type(module))


def _pairs_of(sequence: torch.nn.Sequential, uses: Counter) -> dict[str, tuple[str, str]]:
    """Maps the name of a Linear to (the name of the activation module behind it, the op's name for
    that activation). A pair with hooks and a Linear that is used elsewhere, too, are left out.
    """
    children, found = list(sequence._modules.items()), {}
    for (first_name, first), (second_name, second) in zip(children, children[1:]):
        activation = _activation_of(second)
        plain = (
            type(first) is torch.nn.Linear
            and not hasattr(first, "activation")
            and "forward" not in vars(first)
        )
        if plain and activation is not None and uses[first] == 1 and not has_hooks(first):
            found[first_name] = second_name, activation
    return found


def _report(done: Patched, say: Callable[[str], object]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, what in done.replaced.items():
        kinds.setdefault(what, []).append(name)
    for what, names in kinds.items():
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        say(f"gpukern: {len(names)} {what if ' -> ' in what else f'nn.Linear -> {what}'}: {some}")
    for name, why in done.skipped.items():
        say(f"gpukern: {name} left: {why}")
    if not kinds:
        say("gpukern: nothing to replace")
