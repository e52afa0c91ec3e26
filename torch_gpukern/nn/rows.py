# SPDX-License-Identifier: BSD-3-Clause
"""RMSNorm, LayerNorm, RotaryEmbedding, and the head LinearCrossEntropy with its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ops import layer_norm, linear, linear_cross_entropy, rms_norm, rope
from ..ops.cross_entropy import Reduction
from ..ops.fakes import stats_dtype
from ..ops.linear import PLAIN, has_a_function_of_its_own

__all__ = [
    "LayerNorm",
    "LinearCrossEntropy",
    "RMSNorm",
    "RotaryEmbedding",
    "normalised_rms",
    "served",
    "served_vector",
]


def served_vector(v: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or bias in a dtype that the norms take beside x: x's own, or float32 beside 16
    bits."""
    if (
        v is None
        or v.dtype is x.dtype
        or (v.dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16))
    ):
        return v
    return v.to(x.dtype)


def served(*tensors: Tensor | None) -> bool:
    """Whether our kernels can read all of these tensors. DTensors, quantised tensors and other
    subclasses with their own functions go through PyTorch's formula. The tensors that torch.export
    and AOTAutograd trace with are served.
    """
    return all(
        type(t) in PLAIN or not (is_traceable_wrapper_subclass(t) or has_a_function_of_its_own(t))
        for t in tensors
    )


def normalised_rms(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """rms_norm over the last dimension; PyTorch's formula if a tensor is not `served`."""
    if served(x, weight, residual):
        return rms_norm(
            x, served_vector(weight, x), eps=eps, weight_offset=weight_offset, residual=residual
        )
    h = x if residual is None else x + residual
    factor = weight if weight is None or not weight_offset else weight + weight_offset
    out = F.rms_norm(h, h.shape[-1:], factor, eps)
    return out if residual is None else (out, h)


def _columns(owner: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x with the normalised dimensions as one."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{owner}: x must be a Tensor [..., {', '.join(map(str, shape))}], got "
            f"{type(x).__name__}"
        )
    if tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(
            f"{owner}: x must have shape [..., {', '.join(map(str, shape))}], got {list(x.shape)}"
        )
    return x if len(shape) == 1 else x.flatten(-len(shape))


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` by `torch_gpukern.rms_norm`: one pass over the rows forward, one backward.

    Args:
        normalized_shape, elementwise_affine, device, dtype: as in nn.RMSNorm.
        eps: as in nn.RMSNorm. None is the distance of 1 to the next float32 (float64 for float64).
        weight_offset: added to weight (1 for Gemma's checkpoints). The first values of weight are
            then zeros.

    ``norm(x, residual)`` returns (norm(x + residual), x + residual).
    """

    # A class attribute, so that `patch` adds nothing to an instance that `restore` must remove. An
    # integer, because torch.compile treats it as a constant.
    weight_offset: float = 0

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight_offset: float = 0.0,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if weight_offset:
            self.weight_offset = weight_offset
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight, shape = self.weight, self.normalized_shape
        rows = _columns("RMSNorm", x, shape)
        if len(shape) > 1:
            weight = None if weight is None else weight.flatten()
            residual = None if residual is None else residual.flatten(-len(shape))
        eps = torch.finfo(stats_dtype(x)).eps if self.eps is None else self.eps
        return _like(normalised_rms(rows, weight, eps, self.weight_offset, residual), x, shape)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` by `torch_gpukern.layer_norm`, with the same arguments.

    ``norm(x, residual)`` returns (norm(x + residual), x + residual).
    """

    # named as in nn.LayerNorm
    def forward(
        self, input: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, weight, bias, shape = input, self.weight, self.bias, self.normalized_shape
        rows = _columns("LayerNorm", x, shape)
        if not served(x, weight, bias, residual):
            h = x if residual is None else x + residual
            out = F.layer_norm(h, shape, weight, bias, self.eps)
            return out if residual is None else (out, h)
        if len(shape) > 1:
            weight, bias, residual = (
                None if weight is None else weight.flatten(),
                None if bias is None else bias.flatten(),
                None if residual is None else residual.flatten(-len(shape)),
            )
        out = layer_norm(
            rows, served_vector(weight, x), served_vector(bias, x), residual=residual, eps=self.eps
        )
        return _like(out, x, shape)


def _like(
    out: Tensor | tuple[Tensor, Tensor], x: Tensor, shape: tuple[int, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    if len(shape) == 1:
        return out
    return (
        out.view(x.shape)
        if isinstance(out, Tensor)
        else (out[0].view(x.shape), out[1].view(x.shape))
    )


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of queries and keys by `torch_gpukern.rope`: both in one launch.

    ``rotary(q, k)`` or ``rotary(q, k, positions)`` returns both rotated; shapes are those of
    `rope`.

    Args:
        rotary_dim: columns that are rotated, even, at most head_dim.
        max_positions: positions are in [0, max_positions).
        base: angle i of position p is p / base^(2 i / rotary_dim).
        interleaved: pairs of neighbours (GPT-J's), else column i with column i + rotary_dim / 2
            (Llama's).

    The tables cos and sin are float32 [max_positions, rotary_dim / 2], no part of the state_dict,
    and stay float32 where the module is cast.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int,
        base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even and 2 or more, got {rotary_dim}"
            )
        if max_positions < 1:
            raise ValueError(
                f"RotaryEmbedding: max_positions must be 1 or more, got {max_positions}"
            )
        self.rotary_dim, self.max_positions, self.base, self.interleaved = (
            rotary_dim,
            max_positions,
            base,
            interleaved,
        )
        self._tabulate(torch.device(device) if device is not None else torch.get_default_device())

    def reset_parameters(self) -> None:
        self._tabulate(self.cos.device)

    def _tabulate(self, device: torch.device) -> None:
        steps = (
            torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu") / self.rotary_dim
        )
        angle = (
            torch.arange(self.max_positions, dtype=torch.float64, device="cpu")[:, None]
            * self.base**-steps
        )
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, table.float().to(device), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        before = self.cos, self.sin
        super()._apply(fn, recurse)
        device = self.cos.device
        if before[0].is_meta:
            self._tabulate(device)
        elif self.cos is not before[0]:
            # Keep the old values: a cast would round them, and to_empty leaves them undefined.
            self.cos, self.sin = (table.to(device) for table in before)
        return self

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # A module on meta stays there after load_state_dict(assign=True): tables are no state.
        if self.cos.is_meta and not q.is_meta:
            self._tabulate(q.device)
        cos, sin = self.cos, self.sin
        if q.dtype is torch.float64:
            cos, sin = cos.double(), sin.double()
        return rope(q, k, cos, sin, positions, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return (
            f"rotary_dim={self.rotary_dim}, max_positions={self.max_positions}, "
            f"base={self.base}, interleaved={self.interleaved}"
        )


class LinearCrossEntropy(torch.nn.Linear):
    """A head and its loss by `torch_gpukern.linear_cross_entropy`, without the logits in memory:
    ``loss = head(x, target)``.

    Weights, their names and their first values are nn.Linear's; ``head(x)`` gives the logits.

    Args:
        in_features: H of x [..., H].
        num_classes: V.
        ignore_index, label_smoothing, softcap, logit_scale, reduction, low_memory, z_loss: as in
            `linear_cross_entropy`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float = 0.0,
        logit_scale: float = 1.0,
        reduction: Reduction = "mean",
        low_memory: bool = False,
        z_loss: float = 0.0,
    ):
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.rules = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "reduction": reduction,
            "low_memory": low_memory,
            "z_loss": z_loss,
        }

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        if target is not None:
            return linear_cross_entropy(x, self.weight, target, self.bias, **self.rules)
        logits, cap = (
            linear(x, self.weight, self.bias) * self.rules["logit_scale"],
            self.rules["softcap"],
        )
        return cap * torch.tanh(logits / cap) if cap else logits

    def extra_repr(self) -> str:
        return ", ".join(
            [super().extra_repr(), *(f"{name}={value}" for name, value in self.rules.items())]
        )
