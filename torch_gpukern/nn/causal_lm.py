# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a transformers causal model without its logits: what `patch(model,
fused_linear_cross_entropy=True)` puts in."""

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor

from ..ops import linear_cross_entropy
from .layers import Linear, has_hooks
from .rows import served

__all__ = ["fused_loss_of", "is_causal_lm"]


def is_causal_lm(model: torch.nn.Module) -> bool:
    return type(model).__name__.endswith("ForCausalLM") and "transformers" in sys.modules


def fused_loss_of(model: torch.nn.Module) -> tuple[type | None, str]:
    """A subclass of the model's class with our loss, or None and why there is none."""
    kind = type(model)
    if not isinstance(getattr(model, "lm_head", None), torch.nn.Linear) or not hasattr(
        model, "base_model"
    ):
        return None, "it has no lm_head that is an nn.Linear"
    if "forward" in vars(model):
        return None, "its forward was replaced before"
    source = inspect.getsource(inspect.unwrap(kind.forward))
    from transformers.loss.loss_utils import ForCausalLMLoss

    if "self.loss_function(" not in source or model.loss_function is not ForCausalLMLoss:
        return None, "its loss is one of its own"
    if (
        len(re.findall(r"\blogits\s*=\s", source)) != 1
        or "aux_loss" in source
        or "self.lm_head(" not in source
    ):
        return None, "its forward does more than the head and the loss"
    return _with_fused_loss(kind), ""


@functools.cache
def _with_fused_loss(kind: type) -> type:
    """The same name, so that what asks for it (save_pretrained, for one) finds it."""
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = self.lm_head
        whole = _is_plain(head)
        given = inspect.signature(plain).bind(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        labels = given.pop("labels", None)
        keep = given.pop("logits_to_keep", 0)
        if labels is None or not whole or not isinstance(keep, int) or keep != 0:
            return plain(self, *args, **kwargs)
        del given["self"]
        as_dict = given.pop("return_dict", None)
        outputs = self.base_model(**given)
        loss = _loss(outputs.last_hidden_state, labels, head, **given)
        result = _result(loss, outputs)
        return (
            result
            if as_dict in (None, True) and self.config.return_dict is not False
            else result.to_tuple()
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the name of this class pickle finds the model's own.
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


def _is_plain(head: torch.nn.Module) -> bool:
    """Whether a head's call is the product of its weight and bias and nothing else, and our kernels
    read both."""
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
        hidden, head.weight, target, head.bias, ignore_index=ignore_index, reduction=reduction
    )
    if num_items_in_batch is None:
        return loss
    return loss / (
        num_items_in_batch.to(loss.device)
        if isinstance(num_items_in_batch, Tensor)
        else num_items_in_batch
    )


def _result(loss: Tensor, outputs: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    names = set(CausalLMOutputWithPast.__dataclass_fields__) - {"loss", "logits"}
    found = {name: getattr(outputs, name, None) for name in names}
    return CausalLMOutputWithPast(loss=loss, logits=None, **found)
