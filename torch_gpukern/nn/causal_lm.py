# SPDX-License-Identifier: BSD-3-Clause
"""Computes the loss of a transformers causal model without its logits. `patch(model,
fused_linear_cross_entropy=True)` uses it.

causal_forward.py reads the source of a model's forward. `linear_cross_entropy` must be able to express
everything that the forward does to the logits before the loss. A model that does something else keeps
its own loss, with the reason.
"""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from ..ops import linear_cross_entropy
from .causal_forward import plan_of
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
        return None, "its loss is not transformers' ForCausalLMLoss"
    plan, why = plan_of(kind)
    if plan is None:
        return None, why
    if not isinstance(getattr(model, plan.head, None), torch.nn.Linear):
        return None, f"its {plan.head} is not an nn.Linear"
    try:
        for rule in plan.rules:
            rule(model)
    except TypeError as error:
        return None, str(error)
    return _with_fused_loss(kind), ""


# ---- the forward ---------------------------------------------------------------------------------


@functools.cache
def _with_fused_loss(kind: type) -> type:
    """A subclass of a model's class that computes the loss without logits if it is given labels. It has
    the same name, because save_pretrained, for example, writes the name."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    plain = kind.forward
    plan, _ = plan_of(kind)
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
            # A user may set loss_function at any time; its setter stores it in _loss_function. Its
            # getter cannot be used here: for some models it writes to a log, which no compiler traces.
            or getattr(self, "_loss_function", None) not in (None, ForCausalLMLoss)
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
        hidden = outputs[0].to(head.weight.dtype) if plan.casts else outputs[0]
        of_loss = {k: x for k, x in others.items() if plan.loss_rest or k in plan.loss_named}
        loss = _loss(hidden, labels, head, rules, **of_loss)
        found = {name: getattr(outputs, name, None) for name in plan.fields}
        result = plan.result(loss=loss, logits=None, **found)
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
    """transformers' ForCausalLMLoss: the target of a token is the next token. The loss is a mean over
    tokens, or a sum divided by num_items_in_batch."""
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
