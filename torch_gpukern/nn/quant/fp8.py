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
# the buffers of delayed scaling: three histories, and the record of calls (`_delayed_scales`)
HISTORIES = "history_x", "history_weight", "history_grad", "calls"
CALLS = 256  # forwards of a layer that may wait for their backward under activation checkpointing


class GatheredWeight(Tensor):
    """A weight that FSDP2 has gathered as e4m3 codes (fp8_gather.py). Its shape and dtype are those
    of the original weight, so its gradient has them, too. Only Fp8Linear reads it."""

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
            # FSDP2 views the gathered codes with the weight's shape and strides
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
    """The forward: the product, then the four tensors that backward needs."""
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


def _save(ctx: Any, inputs: tuple, kept: tuple) -> None:
    """Saves what backward needs."""
    x, w, bias, _, _, history = inputs
    ctx.save_for_backward(*kept)
    ctx.history = history  # every backward writes it, which a saved tensor forbids
    ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype


def _setup_context(ctx: Any, inputs: tuple, results: tuple) -> None:
    ctx.mark_non_differentiable(*results[1:])
    _save(ctx, inputs, results[1:])


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
        _save(ctx, inputs, tuple(kept))
        return out

    backward = staticmethod(once_differentiable(_gradients))


class _Transformable(torch.autograd.Function):
    """The form that torch.func requires: the tensors for backward are returned."""

    generate_vmap_rule = True
    forward = staticmethod(_product)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)


def delayed_scale(x: Tensor, history: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale for the largest amax in `history`, or for x's amax if the history is empty. x's
    amax is then written into the history, for later calls. If x has an infinity or NaN, this
    scale is NaN, so that the product shows it, and the history does not take it. Nothing waits for
    the device.
    """
    amax, finite, used = _amaxes(x, history)
    _push(history, finite)
    return scale_of(amax, used, dtype)


def _delayed_scales(
    x: Tensor, w: Tensor, history_x: Tensor, history_w: Tensor, calls: Tensor
) -> tuple[Tensor, Tensor]:
    """`delayed_scale` of both operands of one call.

    Activation checkpointing calls forward again inside backward. A column of `calls` [3, CALLS]
    describes one of the last calls: x's amax, and the amaxes that x and w were scaled by. The
    second forward finds the first one by x's amax, takes its scales, and writes nothing.
    """
    amax_x, finite_x, used_x = _amaxes(x, history_x)
    amax_w, finite_w, used_w = _amaxes(w, history_w)
    if _recomputing():
        same = calls[0] == finite_x.to(calls.dtype)
        first = calls[1:].index_select(1, same.int().argmax().reshape(1))[:, 0]
        used = torch.where(same.any(), first.float(), torch.stack([used_x, used_w]))
        used_x, used_w = used.unbind()
    else:
        _push(history_x, finite_x)
        _push(history_w, finite_w)
        call = torch.stack([finite_x, used_x, used_w])[:, None]
        calls.copy_(torch.cat([call, calls[:, :-1]], 1))
    return scale_of(amax_x, used_x, E4M3), scale_of(amax_w, used_w, E4M3)


def _amaxes(x: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x's amax; the amax for the history, which is x's if that is finite; the amax to scale by,
    which is the largest in the history, or x's if the history is empty."""
    x, before = x.detach(), history.amax().float()
    amax = x.abs().amax().float() if x.numel() else torch.zeros_like(before)
    finite = torch.where(amax.isfinite(), amax, before)
    return amax, finite, torch.where(before > 0, before, finite)


def _push(history: Tensor, amax: Tensor) -> None:
    """Puts an amax at the front of a history and drops the oldest one."""
    history.copy_(torch.cat([amax[None], history[:-1]]))


def scale_of(amax: Tensor, used: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that maps the amax `used` to the largest code; NaN if `amax`, the tensor's own, is
    not finite."""
    largest = 448.0 if dtype is E4M3 else 57344.0
    return torch.where(amax.isfinite(), (used / largest).clamp_min(2.0**-126), float("nan"))


def _recomputing() -> bool:
    """Whether this call runs inside a backward pass, which means that activation checkpointing
    repeats a forward. Never while compiling: a compiler that checkpoints records the writes of the
    histories only once."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Fp8Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three products take 8-bit floats: activations and weight are e4m3, the
    gradient is e5m2, and each has one scale.

    Parameters are nn.Linear's, in their own dtype, and any optimizer trains them. The result has
    x's dtype.

    Args:
        scaling: ``"current"``: a tensor's scale comes from its own largest absolute value (amax).
            ``"delayed"``: it comes from the largest amax of the last `history` calls, so that a
            tensor need not be read before it is rounded. Larger values saturate. The histories are
            buffers (``history_x``, ``history_weight``, ``history_grad``), part of the state_dict,
            and change in training only. Activation checkpointing recomputes with the scales of the
            first pass and changes no history, unless it is applied around a compiled layer. If it
            calls one layer twice with inputs of the same amax, both are recomputed with the scales
            of the second call.
        history: the number of calls that are remembered.

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
            for name in HISTORIES[:3]:
                self.register_buffer(
                    name, torch.zeros(history, dtype=torch.float32, device=self.weight.device)
                )
            calls = torch.zeros(3, CALLS, dtype=torch.float32, device=self.weight.device)
            self.register_buffer("calls", calls, persistent=False)

    def reset_parameters(self) -> None:
        """As nn.Linear's. Also empties the histories."""
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
