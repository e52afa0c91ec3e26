# SPDX-License-Identifier: BSD-3-Clause
"""MoE: a mixture of experts over grouped_gemm, without padding and without synchronising the host.

Shazeer et al., "Outrageously Large Neural Networks" (2017), arXiv:1701.06538; Gale et al.,
"MegaBlocks" (2022), arXiv:2211.15841: tokens sorted by expert, one product for all experts.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops import grouped_gemm, moe_unpermute, swiglu
from ..ops.gemm import Activation
from ..ops.wrong_types import refuse_non_tensors
from ..reference import ACTIVATIONS
from .layers import Linear, _check_activation

__all__ = ["MoE", "grouped_experts"]


class ExpertWeights(Protocol):
    """Weights of all experts in another form than one tensor [E, K, N]: in few bits, for one
    (quant/experts.py)."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, K, N)"""

    def times(self, rows: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """The products of rows [R, K], sorted by expert: those of expert e end at ends[e]. Rows of
        no expert may hold anything in the result."""

    def times_swiglu(self, rows: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """`times` of swiglu(rows)."""


def grouped_experts(
    x: Tensor,
    expert_of: Tensor,
    weight_of: Tensor,
    up: Tensor | ExpertWeights,
    down: Tensor | ExpertWeights,
    gate: Callable[[Tensor], Tensor] = swiglu,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``sum_j weight_of[t, j] * (gate(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])`` with
    ``e = expert_of[t, j]``.

    Tokens are sorted by expert, multiplied in two calls of `grouped_gemm`, and summed in float32 in
    the order of j. Every call gives the same bits. An expert number below 0, or not below E, adds
    nothing: it marks a dropped token or an expert of another rank.

    Args:
        x: [T, H] float32, bfloat16 or float16.
        expert_of: [T, J] int32 or int64.
        weight_of: [T, J].
        up: [E, H, I] in x's dtype, any strides (``w.mT`` of weights stored as in nn.Linear). A
            quantised module passes its weights in few bits for up and down.
        down: [E, I', H], any strides; gate maps I columns to I'.
        gate: a function of rows [R, I] that treats each row on its own.
        up_bias, down_bias: [E, I] and [E, H].
        after: a function applied to each expert's result [R, H] before it is weighted.

    Returns:
        [T, H] in x's dtype. Gradients of all floating arguments.

    Raises:
        ValueError: a dtype or shape that does not fit.

    Gale et al., "MegaBlocks" (2022), arXiv:2211.15841.
    """
    check_tokens("grouped_experts", x, expert_of, weight_of)
    if not torch.compiler.is_compiling():
        check_experts("grouped_experts", x, expert_of, up, down)
    tokens, each = expert_of.shape
    expert_of, chosen = marked(expert_of, up.shape[0])
    experts, order = torch.sort(expert_of.reshape(-1), stable=True)
    every = torch.arange(up.shape[0], device=x.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    count = torch.arange(tokens * each, dtype=torch.int32, device=x.device)
    place = torch.empty_like(order, dtype=torch.int32).scatter_(0, order, count)
    place = torch.where(chosen, place.view(tokens, each), -1)
    rows = gathered(x, order, place)
    rows = _times(rows, up, ends, up_bias)
    if gate is swiglu and not isinstance(down, Tensor):
        rows = down.times_swiglu(rows, ends, down_bias)
    else:
        rows = _times(gate(rows), down, ends, down_bias)
    if after is not None:
        rows = after(rows)
    return combined(rows, place, weight_of, x.dtype)


def _times(rows: Tensor, w: Tensor | ExpertWeights, ends: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(w, Tensor):
        return grouped_gemm(rows, w, ends, bias=bias)
    return w.times(rows, ends, bias)


def marked(expert_of: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(expert_of with every invalid number replaced by `experts`, whether each number is valid).

    Dropped tokens are therefore sorted behind the last expert's rows, which no product reads. A NaN
    in them reaches neither a result nor a gradient.
    """
    chosen = (expert_of >= 0) & (expert_of < experts)
    return torch.where(chosen, expert_of, experts), chosen


def check_tokens(op: str, x: Tensor, expert_of: Tensor, weight_of: Tensor) -> None:
    if (
        x.dim() != 2
        or expert_of.dim() != 2
        or expert_of.shape != weight_of.shape
        or expert_of.shape[0] != x.shape[0]
    ):
        raise ValueError(
            f"{op}: x must be [T, H], expert_of and weight_of [T, J], "
            f"got {list(x.shape)}, {list(expert_of.shape)} and {list(weight_of.shape)}"
        )


def check_experts(op: str, x: Tensor, expert_of: Tensor, up: Any, down: Any) -> None:
    if expert_of.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: expert_of must be int32 or int64, got {expert_of.dtype}")
    if (
        up is None
        or down is None
        or len(up.shape) != 3
        or len(down.shape) != 3
        or up.shape[0] != down.shape[0]
    ):
        shapes = " and ".join("None" if m is None else str(list(m.shape)) for m in (up, down))
        raise ValueError(f"{op}: up must be [E, H, I] and down [E, I', H] of one E, got {shapes}")
    if up.shape[1] != x.shape[1]:
        raise ValueError(
            f"{op}: up must be [E, H, I] with x's H {x.shape[1]}, got {list(up.shape)}"
        )


class _Gathered(torch.autograd.Function):
    """Gathers rows of x [T, H] for the choices in `order`: choice i belongs to token i // J. place
    [T, J] says where the row of each choice went, below 0 if no product reads it.

    Backward sums the gradients of a token's rows in float32, in the order of choices. The backward
    of `index_select` adds them one by one in x's dtype, in no fixed order, with atomics (measured:
    1.1 ms for 65,536 rows of 2048 bfloat16 on an H200).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        return x.index_select(0, order // place.shape[1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad: Tensor):
        (place,) = ctx.saved_tensors
        ones = grad.new_ones((), dtype=torch.float32).expand(place.shape)
        return moe_unpermute(grad, place, ones), None, None


def gathered(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """The rows of x for the choices in `order`, as `_Gathered` does it."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gathered.apply(x, order, place)
    return x.index_select(0, order // place.shape[1])


def combined(rows: Tensor, place: Tensor, weight_of: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H] in `dtype`: each token's weighted sum of its experts' rows. Rows of a narrower dtype,
    as products under autocast return, are widened first, so that the sum is rounded once."""
    rows = rows.to(torch.promote_types(rows.dtype, dtype))
    if weight_of.dtype is not rows.dtype:
        weight_of = weight_of.float()
    return moe_unpermute(rows, place, weight_of).to(dtype)


class MoE(torch.nn.Module):
    """``x -> sum over the top_k experts e of p_e * down_e(act(gate_e(x)) * up_e(x))``, p the
    softmax of the router, float32.

    Names and shapes are those of Qwen3-MoE's and Mixtral's experts: ``gate_up_proj`` [experts, 2 I,
    H] (gate first) and ``down_proj`` [experts, H, I]; ``router`` is a Linear [H -> experts].

    Args:
        hidden_size: H, of x.
        intermediate_size: I.
        num_experts: the number of experts.
        top_k: the number of experts that each token is sent to.
        normalize: the weights of the chosen ones sum to 1.
        activation: as in `torch_gpukern.gemm`; with silu the layer is SwiGLU.

    ``forward(x)`` takes [..., H]; ``forward(x, return_logits=True)`` also returns the
    router's logits, for a load-balancing loss. `torch_gpukern.distributed.shard_experts` spreads the
    experts over ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool = True,
        activation: Activation = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_activation("MoE", activation)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"MoE: top_k must be 1 to num_experts {num_experts}, got {top_k}")
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.normalize, self.activation = normalize, activation
        # shard_experts replaces this by the product over all ranks' experts
        self.multiply: Callable[..., Tensor] = grouped_experts
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = Linear(hidden_size, num_experts, bias=False, **options)
        self.gate_up_proj = torch.nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size, **options)
        )
        self.down_proj = torch.nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size, **options)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the experts' weights as nn.Linear does. The router resets itself."""
        for w, fan_in in (
            (self.gate_up_proj, self.hidden_size),
            (self.down_proj, self.intermediate_size),
        ):
            torch.nn.init.uniform_(w, -(fan_in**-0.5), fan_in**-0.5)

    def forward(self, x: Tensor, return_logits: bool = False):
        refuse_non_tensors("MoE", x=x)
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"MoE: x must have shape [.., {self.hidden_size}], as hidden_size says, got "
                f"{list(x.shape)}; pass rows of {self.hidden_size} columns"
            )
        rows = x.reshape(-1, self.hidden_size)
        logits = self.router(rows)
        weight_of, expert_of = torch.topk(torch.softmax(logits.float(), -1), self.top_k, dim=-1)
        if self.normalize:
            weight_of = weight_of / weight_of.sum(-1, keepdim=True)
        gate = swiglu if self.activation == "silu" else self._gated
        out = self.multiply(rows, expert_of, weight_of, *self._matrices(), gate)
        out = out.reshape(x.shape)
        return (out, logits.reshape(*x.shape[:-1], self.num_experts)) if return_logits else out

    def _matrices(self) -> tuple[Any, Any]:
        """up and down as `grouped_experts` takes them."""
        return self.gate_up_proj.mT, self.down_proj.mT

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return ACTIVATIONS[self.activation](gate) * up

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, "
            f"top_k={self.top_k}, normalize={self.normalize}, activation={self.activation}"
        )


# ---- experts of transformers ---------------------------------------------------------------------


def is_transformers_experts(module: torch.nn.Module) -> bool:
    """Whether transformers' ``use_experts_implementation`` made the module's class."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def names_of_experts(module: Any) -> tuple[str, str]:
    """The names of a transformers module's up and down weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def transformers_experts(
    module: Any, hidden_states: Tensor, expert_of: Tensor, weight_of: Tensor, up: Any, down: Any
) -> Tensor:
    """The forward of a transformers experts module over `grouped_experts`. up and down are as
    `grouped_experts` takes them."""
    biases = {}
    if module.has_bias:
        biases = {
            f"{part}_bias": getattr(module, f"{name}_bias")
            for part, name in zip(("up", "down"), names_of_experts(module), strict=True)
        }
    after = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return grouped_experts(
        hidden_states, expert_of, weight_of, up, down, _gate_of(module), **biases, after=after
    )


def _gate_of(module: Any):
    """SwiGLU in one pass where the model's own is that."""
    if not module.has_gate:
        return module.act_fn
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return module._apply_gate
    silu = (
        isinstance(module.act_fn, torch.nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
    )
    return swiglu if silu else module._apply_gate
