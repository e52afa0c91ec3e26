# SPDX-License-Identifier: BSD-3-Clause
"""RMS norms and gated MLPs of other libraries, such as transformers, that compute the same as one of
our ops.

A class's name does not say what it computes. So `patch` runs the module on two rows of numbers, and
replaces it only if our op gives the same result.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..ops import geglu, swiglu
from .layers import has_hooks
from .rows import normalised_rms, served

__all__ = ["MLP", "SimilarMLP", "SimilarRMSNorm", "similar"]

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class SimilarRMSNorm(torch.nn.Module):
    """The class that replaces another library's RMS norm: `torch_gpukern.rms_norm` with the module's
    own weight."""

    # (name of the attribute that has eps, whose value may change; weight_offset, an integer because
    # torch.compile treats it as a constant; whether the result has the promoted dtype of x and
    # weight instead of x's; name of forward's argument)
    _gpukern_rule: tuple[str, int, bool, str] = ("eps", 0, False, "x")

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        eps, offset, promotes, name = self._gpukern_rule
        x = _argument(name, given, named)
        if promotes:
            x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return normalised_rms(x, self.weight, getattr(self, eps), offset)

    def extra_repr(self) -> str:
        eps, offset, *_ = self._gpukern_rule
        return f"{tuple(self.weight.shape)}, eps={getattr(self, eps)}, weight_offset={offset}"


class SimilarMLP(torch.nn.Module):
    """The class that replaces another library's gated MLP,
    ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``. Activation and multiplication are one op as long
    as act_fn is unchanged."""

    # (the activation; `_kind` of act_fn when it was replaced; name of forward's argument)
    _gpukern_rule: tuple[str, Any, str] = ("silu", None, "x")

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        activation, kind, name = self._gpukern_rule
        x = _argument(name, given, named)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if has_hooks(self.act_fn) or _kind(self.act_fn) != kind or not served(gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        if activation == "silu":
            # A quantised layer can quantise gate and up in the same pass, unless a hook sees its
            # input.
            fused = getattr(type(self.down_proj), "after_swiglu", None)
            if fused is not None and (out := fused(self.down_proj, gate, up)) is not None:
                return out
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(geglu(gate, up, approximate=activation))


def _argument(name: str, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> Tensor:
    """The argument of a forward that takes one, positional or by its name."""
    if len(given) == 1 and not named:
        return given[0]
    if not given and named.keys() == {name}:
        return named[name]
    raise TypeError(
        f"forward() takes one argument, {name}; got {len(given)} and the names {sorted(named)}"
    )


def _kind(act_fn: Any) -> Any:
    """Identifies what an activation module computes; None if its forward was replaced."""
    if "forward" in vars(act_fn):
        return None
    return type(act_fn), getattr(act_fn, "approximate", None)


def similar(module: torch.nn.Module) -> tuple[type, Any, str] | None:
    """(our class, its `_gpukern_rule`, a description) for a module that one of our classes can
    replace; None for any other."""
    kind = type(module)
    ours = kind.__module__.startswith(("torch.", __name__.partition(".")[0]))
    if ours or "forward" in vars(module) or len(_parameters(kind)) != 1:
        return None
    if kind.__name__.endswith("RMSNorm"):
        if not module._modules and set(module._parameters) == {"weight"}:
            return _similar_norm(module)
    if set(module._modules) == MLP and not module._parameters:
        return _similar_mlp(module)
    return None


def _similar_norm(module: torch.nn.Module) -> tuple[type, Any, str] | None:
    weight = module.weight
    if type(weight) is not torch.nn.Parameter or weight.dim() != 1 or weight.is_meta:
        return None
    names = (n for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float))
    eps = next(names, None)
    if eps is None:
        return None
    (name,) = _parameters(type(module))
    rules = [(eps, offset, _promotes(module), name) for offset in (0, 1)]
    return _first_that_agrees(module, SimilarRMSNorm, rules, weight, weight.shape[0])


def _similar_mlp(module: torch.nn.Module) -> tuple[type, Any, str] | None:
    products = (module.gate_proj, module.up_proj, module.down_proj)
    if any(hasattr(product, "scheme") for product in products):
        module = _with_plain_products(module)
        products = (module.gate_proj, module.up_proj, module.down_proj)
    for product in products:
        # an nn.Linear whose weight compressed-tensors has packed has no attribute `weight`
        weight = getattr(product, "weight", None)
        if not isinstance(product, torch.nn.Linear) or type(weight) is not torch.nn.Parameter:
            return None
        if weight.is_meta:
            return None
    if not isinstance(module.act_fn, torch.nn.Module) or has_hooks(module.act_fn):
        return None
    kind = _kind(module.act_fn)
    if kind is None:
        return None
    (name,) = _parameters(type(module))
    rules = [(activation, kind, name) for activation in ("silu", "tanh", "none")]
    gate = module.gate_proj
    return _first_that_agrees(module, SimilarMLP, rules, gate.weight, gate.in_features)


def _with_plain_products(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module with small plain products instead of its quantised ones. What it computes
    between the products is the same."""
    other = type(module).__new__(type(module))
    other.__dict__.update(module.__dict__)
    sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    plain = {n: torch.nn.Linear(*size, device="cpu") for n, size in sizes.items()}
    other.__dict__["_modules"] = {**module._modules, **plain}
    return other


def _parameters(kind: type) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


def _promotes(norm: torch.nn.Module) -> bool:
    """Whether a norm with float32 weight gives float32 for a bfloat16 x, as Llama's does."""
    weight = norm.weight
    other = type(norm).__new__(type(norm))
    other.__dict__.update(norm.__dict__)
    other.__dict__["_parameters"] = {
        "weight": torch.nn.Parameter(weight.detach().float(), requires_grad=False)
    }
    x = torch.ones(1, 1, weight.shape[0], dtype=torch.bfloat16, device=weight.device)
    try:
        with torch.no_grad():
            return type(norm).forward(other, x).dtype is torch.float32
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return False  # it requires x in the dtype of its weight


def _first_that_agrees(
    module: torch.nn.Module, kind: type, rules: list, like: Tensor, columns: int
) -> tuple[type, Any, str] | None:
    """The first rule whose result agrees with the module's for two rows; None if there is none. The
    rows hold numbers from 1 to 2 and from -1 to -2, where all activations and offsets differ by
    more than any rounding."""
    if not like.is_floating_point():
        return None
    ramp = torch.linspace(1, 2, columns, device=like.device, dtype=torch.float32)
    x = torch.stack((ramp, -ramp)).to(like.dtype)[None]
    try:
        with torch.no_grad():
            want = type(module).forward(module, x)
            for rule in rules:
                if _agree(want, _as(kind, module, rule)(x), like.dtype):
                    return kind, rule, f"{type(module).__name__} -> {_name_of(kind, rule)}"
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None  # the module takes other arguments than its class and names suggest
    return None


def _agree(want: Any, ours: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results differ by roundings of `dtype` at most."""
    if not isinstance(want, Tensor) or want.shape != ours.shape or want.dtype is not ours.dtype:
        return False
    largest = max(float(want.abs().max()), 1e-6)
    error = float((want.float() - ours.float()).abs().max())
    return error <= 8 * torch.finfo(dtype).eps * largest


def _name_of(kind: type, rule: tuple) -> str:
    if kind is SimilarRMSNorm:
        return "RMSNorm"
    return "MLP with swiglu" if rule[0] == "silu" else "MLP with geglu"


def _as(kind: type, module: torch.nn.Module, rule: Any):
    """`kind`'s forward with the module's own attributes."""
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__["_gpukern_rule"] = rule
    return stand_in.forward
