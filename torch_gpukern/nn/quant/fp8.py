# SPDX-License-Identifier: BSD-3-Clause
"""Fp8Linear: training in 8-bit floats.

Forward multiplies e4m3 activations and weights. Backward rounds the incoming gradient to e5m2 once
and multiplies it by both. The gradient of the rounding is the identity (straight-through). The
tensors saved for backward have 8 bits.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._library import transforms_active
from ...ops import quantize, scaled_gemm
from ...ops.gemm import Activation
from ...reference import ACTIVATIONS
from .quantized import rows_of, taken

__all__ = ["Fp8Linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Scaling = Literal["current", "delayed"]
HISTORIES = "history_x", "history_weight", "history_grad", "calls"  # buffers of delayed scaling
CALLS = 256  # forwards of a layer that may wait for their backward under activation checkpointing


class GatheredWeight(Tensor):
    """A weight that FSDP2 has gathered as e4m3 codes (fp8_gather.py). It has the shape and dtype
    of the weight that the codes stand for, so its gradient has, too. Only Fp8Linear reads it."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype):
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        x = args[0]
        if func is torch.ops.aten.detach.default or (
            # FSDP2 lays what it has gathered out as the weight
            func is torch.ops.aten.as_strided.default
            and (tuple(args[1]), tuple(args[2])) == (tuple(x.shape), (x.shape[1], 1))
        ):
            return cls(x.codes, x.scale, x.dtype)
        raise NotImplementedError(
            f"fp8_all_gather: {func} on a weight that is gathered in 8 bits; only Fp8Linear's "
            "forward reads it. Read the sharded weight, after model.reshard()"
        )

    def __repr__(self, **_):
        return f"GatheredWeight({list(self.shape)}, dtype={self.dtype})"


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, scale_x, scale_w, grad_history: Tensor | None
):
    """(the product, then the tensors that backward needs)."""
    a, scale_a = quantize(x, E4M3, "tensor", scale=scale_x)
    if isinstance(w, GatheredWeight):
        b, scale_b = w.codes, w.scale
    else:
        b, scale_b = quantize(w, E4M3, "tensor", scale=scale_w)
    bias = None if bias is None else bias.to(x.dtype)
    return (
        scaled_gemm(a, b.mT, scale_a, scale_b, bias=bias, out_dtype=x.dtype),
        a,
        scale_a,
        b,
        scale_b,
    )


def _note(ctx: Any, inputs: tuple, kept: tuple) -> None:
    x, w, bias, _, _, history = inputs
    ctx.save_for_backward(*kept)
    ctx.history = history  # every backward writes it, which a saved tensor forbids
    ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype


def _keep(ctx: Any, inputs: tuple, results: tuple) -> None:
    ctx.mark_non_differentiable(*results[1:])
    _note(ctx, inputs, results[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any):
    a, scale_a, b, scale_b = ctx.saved_tensors
    history = ctx.history
    of_x, of_w, of_bias = ctx.dtypes
    g, scale_g = quantize(
        grad, E5M2, "tensor", scale=None if history is None else delayed_scale(grad, history, E5M2)
    )
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = scaled_gemm(g, b, scale_g, scale_b, out_dtype=of_x) if need_x else None
    dw = scaled_gemm(g.mT, a, scale_g, scale_a, out_dtype=of_w) if need_w else None
    dbias = grad.sum(0, dtype=torch.float32).to(of_bias) if need_bias else None
    return dx, dw, dbias, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any):
        out, *kept = _product(*inputs)
        _note(ctx, inputs, tuple(kept))
        return out

    backward = staticmethod(once_differentiable(_gradients))


class _Transformable(torch.autograd.Function):
    """The form that torch.func requires: the tensors for backward are returned."""

    generate_vmap_rule = True
    forward = staticmethod(_product)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)


def delayed_scale(x: Tensor, history: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of the largest size in `history`, into which x's own is written for the calls that
    follow. Where there is none yet, x's own. An infinity or NaN makes this scale NaN, so that the
    product shows it, and is not remembered. Nothing waits for the device.
    """
    seen, now, by = _sizes(x, history)
    _push(history, now)
    return scale_of(seen, by, dtype)


def _delayed_scales(
    x: Tensor, w: Tensor, history_x: Tensor, history_w: Tensor, calls: Tensor
) -> tuple[Tensor, Tensor]:
    """`delayed_scale` of both operands of one call.

    Activation checkpointing calls forward again inside backward. `calls` [3, CALLS] has x's size of
    the last calls and the sizes that x and w were scaled by. A second forward finds the first one
    by x's size, takes its scales, and writes nothing.
    """
    seen_x, now_x, by_x = _sizes(x, history_x)
    seen_w, now_w, by_w = _sizes(w, history_w)
    if _recomputing():
        same = calls[0] == now_x.to(calls.dtype)
        first = calls[1:].index_select(1, same.int().argmax().reshape(1))[:, 0]
        by_x, by_w = torch.where(same.any(), first.float(), torch.stack([by_x, by_w])).unbind()
    else:
        _push(history_x, now_x), _push(history_w, now_w)
        calls.copy_(torch.cat([torch.stack([now_x, by_x, by_w])[:, None], calls[:, :-1]], 1))
    return scale_of(seen_x, by_x, E4M3), scale_of(seen_w, by_w, E4M3)


def _sizes(x: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x's largest size; the same, where it is finite, for the history; the size that x is scaled
    by."""
    x, before = x.detach(), history.amax().float()
    seen = x.abs().amax().float() if x.numel() else torch.zeros_like(before)
    now = torch.where(seen.isfinite(), seen, before)
    return seen, now, torch.where(before > 0, before, now)


def _push(history: Tensor, now: Tensor) -> None:
    history.copy_(torch.cat([now[None], history[:-1]]))


def scale_of(seen: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    most = 448.0 if dtype is E4M3 else 57344.0
    return torch.where(seen.isfinite(), (by / most).clamp_min(2.0**-126), float("nan"))


def _recomputing() -> bool:
    """Whether this call runs inside a backward pass. A compiler that checkpoints records the
    histories' writes once, without help."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Fp8Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three products are of 8-bit floats: activations and weight e4m3, the
    gradient e5m2, each with one scale.

    Parameters are nn.Linear's, in their own dtype: an optimizer trains them as ever. The result has
    x's dtype.

    Args:
        scaling: ``"current"``: scales come from the tensors themselves. ``"delayed"``: from the
            largest of the last `history` calls, so that none is read before it is rounded; what is
            larger than all of these saturates. The histories are buffers (``history_x``,
            ``history_weight``, ``history_grad``) and part of the state_dict; they move in training
            alone. Activation checkpointing recomputes with the scales of the first pass and moves
            no history, unless it stands around a compiled layer. If it calls one layer twice with
            inputs of the same largest size, both are recomputed with the scales of the second call.
        history: calls that are remembered.

    Raises:
        ValueError: another scaling, or an x that is not float32, bfloat16 or float16.

    Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433.
    """

    scaling: Scaling = "current"
    activation: Activation = "none"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scaling: Scaling = "current",
        history: int = 16,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self._scale_by(scaling, history)

    def _scale_by(self, scaling: Scaling, history: int) -> None:
        if scaling not in get_args(Scaling) or history < 1:
            raise ValueError(
                f"Fp8Linear: scaling must be {' or '.join(get_args(Scaling))} and history 1 or "
                f"more, got {scaling!r} and {history}"
            )
        self.scaling = scaling
        if scaling == "delayed":
            for name in ("history_x", "history_weight", "history_grad"):
                self.register_buffer(
                    name, torch.zeros(history, dtype=torch.float32, device=self.weight.device)
                )
            calls = torch.zeros(3, CALLS, dtype=torch.float32, device=self.weight.device)
            self.register_buffer("calls", calls, persistent=False)

    def reset_parameters(self) -> None:
        """As nn.Linear's; the histories are as those of a new layer."""
        super().reset_parameters()
        for name in HISTORIES:
            if name in self._buffers:  # nn.Linear.__init__ calls this before there are any
                self._buffers[name].zero_()  # type: ignore[union-attr]

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        x = taken("Fp8Linear", input, self.in_features)
        rows = rows_of(x)
        scale_x = scale_w = history = None
        if self.scaling == "delayed" and self.training:
            kept = self.history_x, self.history_weight, self.calls
            scale_x, scale_w = _delayed_scales(rows, self.weight, *kept)
            history = self.history_grad
        with torch.autocast(x.device.type, enabled=False):
            given = rows, self.weight, self.bias, scale_x, scale_w, history
            out = _Transformable.apply(*given)[0] if transforms_active() else _Product.apply(*given)
        return ACTIVATIONS[self.activation](out).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8, scaling={self.scaling}"
