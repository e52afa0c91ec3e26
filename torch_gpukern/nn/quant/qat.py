# SPDX-License-Identifier: BSD-3-Clause
"""QatLinear: quantisation-aware training (fake quantisation) with a learned scale.

Esser et al., "Learned Step Size Quantization" (2019), arXiv:1902.08153. For a weight w with scale s,
let v = w / s and r = round(clip(v)). Forward uses r s in place of w. Backward treats the rounding as
the identity if v was not clipped: w has the gradient g, and s has g (r - v). If v was clipped, w has
no gradient, and s has g r. The gradient of s is divided by sqrt(weights per scale * largest code).
The parameter is log2 of s, so that an optimizer's step is relative to s, however small s is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import dequantize, linear, quantize
from ...ops.gemm import Activation
from ...ops.weight_gemm import spread
from .schemes import E4M3, best_scale, ceil_div

__all__ = ["QatLinear"]


class Way(NamedTuple):
    """How a scheme rounds: weights to integers or e4m3 in [low, high]; activations to the dtype
    `codes`, or not at all if it is None."""

    low: float
    high: float
    group: int | None
    integers: bool
    codes: torch.dtype | None


WAYS = {
    "w4": Way(-8, 7, 128, True, None),
    "w8": Way(-128, 127, None, True, None),
    "int8": Way(-128, 127, None, True, torch.int8),
    "fp8": Way(-448, 448, None, False, E4M3),
}


def rounded(x: Tensor, way: Way) -> Tensor:
    x = x.clamp(way.low, way.high)
    return x.round() if way.integers else x.to(E4M3).to(x.dtype)


def to_bfloat16_values(x: Tensor) -> Tensor:
    """float32 x rounded to 8 significant bits, as bfloat16 does. In integers, because Inductor
    leaves out a cast to bfloat16 and back."""
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)  # the sum of a NaN's bits may overflow


def straight_through(x: Tensor, seen: Tensor) -> Tensor:
    """`seen`, with the gradient of x. It is also right for an infinite x, where x + (seen - x)
    would be NaN."""
    return x + torch.where(seen == x, 0.0, seen - x).detach()


class QatLinear(torch.nn.Linear):
    """`torch.nn.Linear` that multiplies the weight and the activations as the quantised layer will
    round them. One difference remains: a 16-bit product rounds the decoded values of int8 and fp8 to
    its dtype, which the quantised layer does not.

    ``step`` [out_features, groups] is the scale. ``log_step``, its log2, is a parameter that is
    trained with the weight. ``torch_gpukern.nn.quantize(model, "qat-w4")`` (or w8, int8, fp8)
    creates the layer, and `Quantized.finish` converts it into the quantised layer.
    """

    recipe: str
    log_step: Tensor
    activation: Activation = "none"

    def _begin(self, recipe: str, importance: Tensor | None = None) -> None:
        self.recipe, way = recipe, WAYS[recipe]
        ratios = [1 - 0.05 * i for i in range(11)] if recipe == "w4" else [1.0]
        scale = best_scale(
            self.weight.detach(),
            importance,
            way.group or max(1, self.in_features),
            lambda amax: [amax.clamp_min(2.0**-100) / way.high * r for r in ratios],
            lambda x: rounded(x, way),
        )
        # A group of zeros determines no scale. It starts with the mean of the other groups' scales, so
        # that training can move its weights away from 0.
        zero = scale <= 2.0**-100 / way.high
        known = ~zero & scale.isfinite()
        mean = torch.where(known, scale, 0.0).sum() / known.sum().clamp_min(1)
        # If all groups are zeros, use the bound of nn.Linear's initial weights.
        mean = torch.where(mean > 0, mean, max(1, self.in_features) ** -0.5 / way.high)
        self.log_step = torch.nn.Parameter(torch.where(zero, mean, scale).float().log2())

    @property
    def step(self) -> Tensor:
        """The scale as the finished layer will have it: rounded to bfloat16 for w4 and w8. The
        gradient goes straight through that rounding."""
        step = torch.exp2(self.log_step.float())
        if WAYS[self.recipe].codes is not None:
            return step
        return straight_through(step, to_bfloat16_values(step.detach()))

    def fake_weight(self) -> Tensor:
        """The weight that the finished layer will decode, in float32, with gradients."""
        way, k = WAYS[self.recipe], self.in_features
        group = way.group or max(1, k)
        # Without this factor the scale's gradient would be much larger than the weights'.
        factor = (min(group, max(1, k)) * way.high) ** -0.5
        step, w = self.step, self.weight.float()
        with torch.no_grad():
            each = spread(step.detach(), group, k)
            v = w / each
            r = rounded(v, way)
            inside = (v >= way.low) & (v <= way.high)
            slope = torch.where(inside, r - v, r) * factor
        # The result is r * each. The other two terms are 0 and carry the gradients. If w / each
        # carried them, a weight that is infinitely large for its scale would have 0 * inf = NaN.
        w = torch.where(inside, w - w.detach(), 0.0)
        return r * each + w + slope * spread(step - step.detach(), group, k)

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        x = input
        if x.dtype is torch.float32 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        codes, weight = WAYS[self.recipe].codes, self.fake_weight().to(x.dtype)
        if codes is not None:
            with torch.no_grad():
                seen = dequantize(*quantize(x, codes, "row"), dtype=x.dtype)
            x = straight_through(x, seen)
        elif x.dtype is torch.float32:
            # weight_gemm multiplies in 16 bits: the finished layer rounds float32 activations and
            # the decoded weight to bfloat16.
            x = straight_through(x, to_bfloat16_values(x.detach()))
            weight = straight_through(weight, to_bfloat16_values(weight.detach()))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, weight, bias, activation=self.activation)

    def extra_repr(self) -> str:
        groups = ceil_div(self.in_features, WAYS[self.recipe].group or max(1, self.in_features))
        return f"{super().extra_repr()}, qat={self.recipe}, groups={groups}"


def step_of(module: Any) -> Tensor:
    return module.step.detach()
