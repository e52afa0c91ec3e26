"""patch(model): gpukern in the place of modules that stand, and back."""

from collections import Counter
from collections.abc import Callable

import torch

from .layers import Linear

__all__ = ["Patched", "patch"]


class Patched:
    """What `patch` did: `replaced` maps each module's name to what it was and became; `restore` undoes it.

    ::

        with patch(model): ...  # restored at the end
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.replaced: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []

    def restore(self) -> None:
        """Puts every module back as it was; weights keep the values they have now. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self.replaced.clear()

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: left, {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def patch(model: torch.nn.Module, say: Callable[[str], object] | None = print) -> Patched:
    """Replaces, in place, what gpukern serves, and prints a line for each kind of replacement and for each module left.

    - ``nn.Linear`` becomes `torch_gpukern.nn.Linear`, the same object with the same parameters and hooks; an activation that
      follows in an ``nn.Sequential`` (ReLU, GELU, SiLU) moves into it.
    - In ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` nothing is replaced: PyTorch's inference path reads their
      weights and calls no module. `torch_gpukern.integrations.sdpa` serves these.
    - Subclasses of nn.Linear keep their own forward: LoRA's wrapped base layer is an nn.Linear and is replaced, quantised
      layers are not. Weights that are tensor subclasses go through F.linear as before.

    transformers' attention is not a module to replace: `torch_gpukern.integrations.transformers.register`.

    Args:
        say: is called with each line; None says nothing.

    Returns:
        Patched, whose ``restore()`` undoes all of it.
    """
    done = Patched(model)
    closed: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
            closed.update(module.modules())
    uses = Counter(child for module in model.modules() for child in module._modules.values())
    for name, module in model.named_modules():
        if type(module) is torch.nn.Sequential and module not in closed:
            _fuse(done, name, module, uses)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or isinstance(module, Linear):
            continue
        if module in closed:
            done.skipped[name] = "PyTorch's transformer layers read its weight themselves"
        elif type(module) is not torch.nn.Linear:
            done.skipped[name] = f"{type(module).__name__} has a forward of its own"
        elif "forward" in vars(module):
            done.skipped[name] = "its forward was replaced before"
        else:
            _become(done, name, module, "none")
    if say is not None:
        _report(done, say)
    return done


def _become(done: Patched, name: str, module: torch.nn.Linear, activation: str) -> None:
    # The object stays: parameters, hooks, and whoever holds it.
    module.__class__ = Linear
    module.activation = activation  # type: ignore[assignment]
    done.replaced[name] = "Linear" if activation == "none" else f"Linear + {activation}"

    def undo() -> None:
        module.__class__ = torch.nn.Linear  # type: ignore[assignment]
        del module.activation

    done._undo.append(undo)


def _activation_of(module: torch.nn.Module) -> str | None:
    if type(module) is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return {torch.nn.ReLU: "relu", torch.nn.SiLU: "silu"}.get(type(module))


def _fuse(done: Patched, name: str, sequence: torch.nn.Sequential, uses: Counter) -> None:
    """An activation after a Linear moves into it and leaves an Identity; not where hooks see what it is given, and not
    where the Linear is used elsewhere, too.
    """
    children = list(sequence._modules.items())
    for (first_name, first), (second_name, second) in zip(children, children[1:]):
        activation = _activation_of(second)
        if type(first) is not torch.nn.Linear or "forward" in vars(first) or uses[first] > 1:
            continue
        if activation is None or any(_has_hooks(m) for m in (first, second)):
            continue
        _become(done, f"{name}.{first_name}" if name else first_name, first, activation)
        sequence._modules[second_name] = torch.nn.Identity()

        def undo(at: str = second_name, old: torch.nn.Module = second) -> None:
            sequence._modules[at] = old

        done._undo.append(undo)


def _has_hooks(m: torch.nn.Module) -> bool:
    return any((m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks))


def _report(done: Patched, say: Callable[[str], object]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, what in done.replaced.items():
        kinds.setdefault(what, []).append(name)
    for what, names in kinds.items():
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        say(f"gpukern: {len(names)} nn.Linear -> {what}: {some}")
    for name, why in done.skipped.items():
        say(f"gpukern: {name} left: {why}")
    if not kinds:
        say("gpukern: nothing to replace")
