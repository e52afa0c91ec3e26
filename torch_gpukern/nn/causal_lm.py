# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a transformers causal model without its logits: what `patch(model,
fused_linear_cross_entropy=True)` puts in.

`_plan_of` reads the source of a model's forward. Each statement must be one that is known to leave
the loss alone, or one that `linear_cross_entropy` can express. Any other statement keeps the
model's own loss, and is named.
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import linear_cross_entropy
from .layers import Linear, has_hooks
from .rows import served

__all__ = ["fused_loss_of", "is_causal_lm"]


def is_causal_lm(model: torch.nn.Module) -> bool:
    return (
        type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        and "transformers" in sys.modules
    )


def fused_loss_of(model: torch.nn.Module) -> tuple[type | None, str]:
    """A subclass of the model's class with our loss, or None and why there is none."""
    kind = type(model)
    if hasattr(kind, "_gpukern_class"):
        return None, "it has our loss already"
    if "forward" in vars(model):
        return None, "its forward was replaced before"
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return None, "its loss is one of its own"
    plan, why = _plan_of(kind)
    if plan is None:
        return None, why
    if not isinstance(getattr(model, plan.head, None), torch.nn.Linear):
        return None, f"its {plan.head} is no nn.Linear"
    return _with_fused_loss(kind), ""


# ---- the plan ------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The parts of a model's forward."""

    base: str  # the module that gives the hidden states, by its dotted name
    positional: tuple[str, ...]  # arguments of the forward that the base gets by position
    named: tuple[str, ...]  # arguments of the forward that the base gets by name
    rest: bool  # whether the base also gets the forward's **kwargs
    head: str
    rules: tuple[Callable[[Any], dict[str, float]], ...]  # what happens to logits before the loss
    routers: bool  # whether output_router_logits adds a loss
    result: type


def _softcap(attribute: str):
    return lambda model: {"softcap": attrgetter(attribute)(model) or 0.0}


# Statements between head and loss, as ast.unparse writes them, and their meaning in
# `linear_cross_entropy`'s arguments. LOGITS stands for the variable.
_CHANGES = {
    "if self.config.final_logit_softcapping is not None:\n"
    "    LOGITS = LOGITS / self.config.final_logit_softcapping\n"
    "    LOGITS = torch.tanh(LOGITS)\n"
    "    LOGITS = LOGITS * self.config.final_logit_softcapping": _softcap(
        "config.final_logit_softcapping"
    ),
    "LOGITS = nn.functional.tanh(LOGITS / cap) * cap": _softcap("config.logits_soft_cap"),
    "LOGITS = LOGITS * self.logit_scale": lambda model: {"logit_scale": float(model.logit_scale)},
    "LOGITS = LOGITS / self.config.logits_scaling": lambda model: {
        "logit_scale": 1.0 / model.config.logits_scaling
    },
}

# Statements that leave the loss alone. HIDDEN, OUT and LOGITS stand for variables.
_HARMLESS = (
    r"(return_dict|output_\w+) = \1 if \1 is not None else self\.config\.\1",
    r"slice_indices = slice\(-logits_to_keep, None\) if isinstance\(logits_to_keep, int\) else "
    r"logits_to_keep",
    r"HIDDEN = OUT(\.last_hidden_state|\[0\])",
    r"HIDDEN = slice_logits_to_keep\((HIDDEN|OUT\.last_hidden_state), logits_to_keep\)",
    r"cap = self\.config\.logits_soft_cap",
    r"loss = None",
    r"aux_loss = None",
    r"if not return_dict:\n    output = \(LOGITS,\) \+ OUT\[1:\]\n    return .*",
)
_HEAD = (
    r"(\w+) = self\.(\w+)\((\w+)(?:\.last_hidden_state)?(?:\[:, slice_indices, :\])?\)"
    r"(?:\.float\(\)|\.contiguous\(\))?"
)
_LOSS = (
    r"if labels is not None:\n    loss = self\.loss_function\((?:\w+=)?LOGITS, (?:labels=)?"
    r"labels, (?:vocab_size=)?[\w.()]+(?:, pad_token_id=[\w.]+)?(?:, \*\*\w+)?\)"
)
_ROUTERS = r"if output_router_logits:\n    aux_loss = .*"


@functools.cache
def _plan_of(kind: type) -> tuple[_Plan | None, str]:
    """(the plan of a class's forward, ""), or None and why there is none."""
    forward = inspect.unwrap(kind.forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None, "the source of its forward cannot be read"
    found: dict[str, Any] = {"rules": (), "routers": False}
    names: dict[str, str] = {}  # a variable's name: what stands for it
    has_loss = False
    for statement in tree.body[0].body:  # type: ignore[attr-defined]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        text = ast.unparse(statement)
        if "base" not in found and (base := _base_of(statement)) is not None:
            names[base.pop("out")] = "OUT"
            found |= base
            continue
        if "base" in found and "head" not in found:
            hidden = re.match(r"(\w+) = ", text)
            if hidden and "logits" not in hidden[1]:
                names.setdefault(hidden[1], "HIDDEN")
            head = re.fullmatch(_HEAD, text)
            if head and names.get(head[3]) in ("HIDDEN", "OUT"):
                names[head[1]], found["head"] = "LOGITS", head[2]
                continue
        same = re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), text)
        if same in _CHANGES:
            found["rules"] += (_CHANGES[same],)
        elif re.fullmatch(_LOSS, same):
            has_loss = True
        elif re.fullmatch(_ROUTERS, same, re.DOTALL):
            found["routers"] = True
        elif isinstance(statement, ast.Return):
            name = _result_of(statement, names)
            if name is None:
                return None, f"its forward does more than the head and the loss: {_first(text)}"
            found["result"] = forward.__globals__[name]
        elif not any(re.fullmatch(known, same, re.DOTALL) for known in _HARMLESS):
            return None, f"its forward does more than the head and the loss: {_first(text)}"
    if not has_loss or not {"base", "head", "result"} <= found.keys():
        return None, "its forward is no base model, head and loss"
    return _Plan(**found), ""


def _first(text: str) -> str:
    return text.partition("\n")[0][:60]


def _base_of(statement: ast.stmt) -> dict[str, Any] | None:
    """The call of the base model in a statement ``out = self.model(..)``; None for any other
    statement, and if an argument is anything but an argument of the forward by its own name."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    call = statement.value
    if not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
        return None
    called = ast.unparse(call.func)
    if not called.startswith("self.") or not all(isinstance(a, ast.Name) for a in call.args):
        return None
    named = [k for k in call.keywords if k.arg is not None]
    if not all(isinstance(k.value, ast.Name) and k.value.id == k.arg for k in named):
        return None
    return {
        "out": target.id,
        "base": called.removeprefix("self."),
        "positional": tuple(a.id for a in call.args if isinstance(a, ast.Name)),
        "named": tuple(k.arg for k in named if k.arg is not None),
        "rest": len(named) < len(call.keywords),
    }


def _result_of(statement: ast.Return, names: dict[str, str]) -> str | None:
    """The class that is returned, where its fields are loss, logits and those of the base's
    result by the same names."""
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        return None
    for field in call.keywords:
        value = ast.unparse(field.value)
        owner, _, last = value.partition(".")
        plain = field.arg in ("loss", "aux_loss") and value == field.arg
        of_base = names.get(owner) == "OUT" and last == field.arg
        if not (plain or of_base or (field.arg == "logits" and names.get(value) == "LOGITS")):
            return None
    return call.func.id


# ---- the forward ---------------------------------------------------------------------------------


@functools.cache
def _with_fused_loss(kind: type) -> type:
    """The subclass keeps the class's name, because save_pretrained, for example, writes it."""
    plain = kind.forward
    plan, _ = _plan_of(kind)
    assert plan is not None
    path = plan.base.split(".")
    signature = inspect.signature(plain)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    @functools.wraps(plain)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = getattr(self, plan.head)
        whole = _is_plain(head)
        given = signature.bind(self, *args, **kwargs).arguments
        others = given.pop(extra, {})
        labels = given.pop("labels", others.get("labels"))
        keep = given.pop("logits_to_keep", others.get("logits_to_keep", 0))
        if (
            labels is None
            or not whole
            or not isinstance(keep, int)
            or keep != 0
            or (plan.routers and _wants_routers(self, given))
        ):
            return plain(self, *args, **kwargs)
        as_dict = given.pop("return_dict", others.pop("return_dict", None))
        base = functools.reduce(getattr, path, self)
        outputs = base(
            *(given.get(name) for name in plan.positional),
            **{name: given[name] for name in plan.named if given.get(name) is not None},
            **(others if plan.rest else {}),
        )
        rules = {name: x for rule in plan.rules for name, x in rule(self).items()}
        loss = _loss(outputs[0], labels, head, rules, **others)
        result = _result(plan.result, loss, outputs)
        return (
            result
            if as_dict in (None, True) and self.config.return_dict is not False
            else result.to_tuple()
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle finds classes by name, and this class's name belongs to the model's own class.
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _empty_with_fused_loss, (kind,), *state

    own = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
        "_gpukern_class": kind,
    }
    return type(kind.__name__, (kind,), own)


def _empty_with_fused_loss(kind: type) -> torch.nn.Module:
    made = _with_fused_loss(kind)
    return made.__new__(made)


def _wants_routers(model: Any, given: dict[str, Any]) -> bool:
    asked = given.get("output_router_logits")
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)


def _is_plain(head: torch.nn.Module) -> bool:
    """Whether calling the head multiplies by its weight, adds its bias and does nothing else, and
    our kernels can read both."""
    return (
        type(head) in (torch.nn.Linear, Linear)
        and getattr(head, "activation", "none") == "none"
        and "forward" not in vars(head)
        and not has_hooks(head)
        and served(head.weight, head.bias)
    )


def _loss(
    hidden: Tensor,
    labels: Tensor,
    head: torch.nn.Linear,
    rules: dict[str, float],
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss: the token after each is its class; a mean, or a sum over
    num_items_in_batch."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    target = shift_labels.to(hidden.device)
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        target,
        head.bias,
        ignore_index=ignore_index,
        reduction=reduction,
        **rules,
    )
    if num_items_in_batch is None:
        return loss
    return loss / (
        num_items_in_batch.to(loss.device)
        if isinstance(num_items_in_batch, Tensor)
        else num_items_in_batch
    )


def _result(kind: Any, loss: Tensor, outputs: Any) -> Any:
    names = set(kind.__dataclass_fields__) - {"loss", "logits"}
    found = {name: getattr(outputs, name, None) for name in names}
    return kind(loss=loss, logits=None, **found)
