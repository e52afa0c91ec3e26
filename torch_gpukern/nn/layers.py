# SPDX-License-Identifier: BSD-3-Clause
"""Three modules: Linear with a fused activation, a gated MLP, and Attention with grouped heads and
a paged cache."""

from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.modules.module as _torch
from torch import Tensor

from ..ops import flash_attn, kv_cache_write, linear, paged_attn
from ..ops.gemm import Activation
from ..reference import ACTIVATIONS

if TYPE_CHECKING:
    from ..masks import AttnMask

__all__ = ["MLP", "Attention", "Linear"]


def _check_activation(owner: str, activation: str) -> None:
    names = get_args(Activation)
    if activation not in names:
        raise ValueError(
            f"{owner}: activation must be one of {', '.join(names)}, got {activation!r}"
        )


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with an activation in the same pass: ``activation(x @ weight.mT + bias)``.

    Weights, their names and their initial values are those of nn.Linear. A weight that is a tensor
    subclass with its own F.linear (a quantised one, for example) keeps it; see
    `torch_gpukern.linear`.

    An adapter around the layer (LoRA, for example) adds to the result, which is after the
    activation. If adapters will be used, make the activation a separate module. `patch` and `MLP`
    fuse the two as long as nothing is between them.

    Args:
        activation: none, relu, gelu, gelu_tanh or silu.
    """

    # A class attribute, so that `patch` adds nothing to an instance that `restore` must remove.
    activation: Activation = "none"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ):
        _check_activation("Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        return linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def has_hooks(m: torch.nn.Module) -> bool:
    """Whether a hook sees the module's arguments or its result."""
    return bool(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or _torch._global_forward_hooks
        or _torch._global_forward_pre_hooks
        or _torch._global_backward_hooks
        or _torch._global_backward_pre_hooks
    )


def is_itself(m: torch.nn.Module) -> bool:
    """Whether calling the module computes its product and nothing else: no adapter, no hook, no
    parametrisation, no replaced forward. If so, the activation behind it may be fused.
    """
    return (
        type(m) is Linear
        and m.activation == "none"
        and "forward" not in m.__dict__
        and not has_hooks(m)
    )


class MLP(torch.nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, which is SwiGLU if activation is silu.
    The names are those of Llama and most later models.

    The activation is fused into gate_proj's product as long as gate_proj is the plain Linear that
    was created here.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_activation("MLP", activation)
        self.activation = activation
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, **options)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj
        if is_itself(gate):
            gated = linear(x, gate.weight, gate.bias, activation=self.activation)
        else:
            gated = ACTIVATIONS[self.activation](gate(x))
        return self.down_proj(gated * self.up_proj(x))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class Attention(torch.nn.Module):
    """Self-attention with projections q_proj, k_proj, v_proj and o_proj, grouped heads, and a paged
    cache to decode over.

    Args:
        hidden_size: size of x's last dimension.
        num_heads: query heads.
        num_kv_heads: key heads, a divisor of num_heads; None is num_heads.
        head_dim: None is hidden_size / num_heads.
        window: number of keys that a query sees to its left, its own key included. Without
            is_causal a query sees as many to its right. None is all.
        softcap, is_causal: as in `torch_gpukern.flash_attn`.
        dropout: probability of dropping an attention weight, in training only. The seed comes from
            torch's generator.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        is_causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"Attention: num_heads {num_heads} must be a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"Attention: hidden_size {hidden_size} must be a multiple of num_heads "
                f"{num_heads}, or head_dim given"
            )
        if window is not None and window < 1:
            raise ValueError(f"Attention: window must be 1 or more, or None, got {window}")
        self.head_dim = head_dim or hidden_size // num_heads
        if not 0 <= dropout <= 1:
            raise ValueError(f"Attention: dropout must be between 0 and 1, got {dropout}")
        self.is_causal, self.window = is_causal, window
        self.softcap, self.dropout = softcap, dropout
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = Linear(hidden_size, num_heads * self.head_dim, **options)
        self.k_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, **options)
        self.v_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, **options)
        self.o_proj = Linear(num_heads * self.head_dim, hidden_size, **options)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        kv_start: Tensor | None = None,
        kv_end: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
        block_table: Tensor | None = None,
        seq_lens: Tensor | None = None,
        slots: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        attn_mask: "Tensor | AttnMask | None" = None,
    ) -> Tensor:
        """x [B, S, hidden_size]; returns the same shape.

        Args:
            rotary: cos and sin, each [S, head_dim] or [B, S, head_dim], which rotate queries and
                keys. Column i is rotated with column i + head_dim / 2, as in Llama. None rotates
                nothing.
            kv_start, kv_end: [B] int32, the bounds of each sequence's keys in a padded batch. With
                a cache, kv_end must be None.
            cache: (k_cache, v_cache) of this layer, each [num_blocks, block_size, num_kv_heads,
                head_dim]. The S new tokens of each sequence are written to it, and attend to all
                tokens of their sequence. There are no gradients.
            block_table: [B, max_blocks] int32, the pages of each sequence. `PagedKVCache` makes it,
                and seq_lens and slots.
            seq_lens: [B] int32, the tokens of each sequence, the new ones included.
            slots: [B * S], the places of the new tokens in the cache.
            k_scale, v_scale: scales of an 8-bit cache, as `paged_attn` takes them.
            attn_mask: without a cache as in `torch_gpukern.flash_attn`: bool, broadcastable to [B,
                num_heads, S, S], or an `AttnMask`. A query sees the keys that the mask, is_causal,
                the window and the bounds all allow. With a cache as in `paged_attn`: bool [B, S, S]
                or [B * S, S] over the new tokens, in place of the causal rule among them.

        Raises:
            ValueError: a cache without block_table, seq_lens and slots; a cache with kv_end or
                without is_causal; an argument that the ops refuse.
        """
        if not isinstance(x, Tensor):
            raise ValueError(
                f"Attention: x must be a Tensor [B, S, hidden_size], got {type(x).__name__}"
            )
        if x.dim() != 3:
            raise ValueError(
                f"Attention: x must have 3 dimensions [B, S, hidden_size], got {x.dim()}"
            )
        batch, seq, _ = x.shape
        # The number of heads follows from the projections' results: under tensor parallelism they
        # are this rank's heads.
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary is not None:
            q, k = (_rotated(t, *rotary) for t in (q, k))
        left = -1 if self.window is None else self.window - 1
        rules = {"is_causal": self.is_causal, "softcap": self.softcap, "window_left": left}
        if cache is None:
            rules |= {
                "kv_start": kv_start,
                "kv_end": kv_end,
                "window_right": -1 if self.is_causal else left,
            }
            rules["dropout_p"] = self.dropout if self.training else 0.0
            rules["attn_mask"] = attn_mask
            out = flash_attn(*(t.transpose(1, 2) for t in (q, k, v)), **rules).transpose(1, 2)
        else:
            if block_table is None or seq_lens is None or slots is None:
                raise ValueError("Attention: cache needs block_table, seq_lens and slots")
            if kv_end is not None or not self.is_causal:
                raise ValueError(
                    "Attention: with a cache, kv_end must be None and is_causal must be True"
                )
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            kv_cache_write(k.flatten(0, 1), v.flatten(0, 1), *cache, slots, **scales)
            out = paged_attn(
                q.flatten(0, 1),
                *cache,
                block_table,
                seq_lens,
                **rules,
                kv_start=kv_start,
                attn_mask=attn_mask,
                **scales,
            )
        # A size of -1 would be ambiguous for a batch of 0.
        return self.o_proj(out.reshape(batch, seq, out.shape[-2] * out.shape[-1]))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D], rotated by angles [S, D] or [B, S, D]. Column d pairs with d + D / 2."""
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos.unsqueeze(-2).to(x.dtype) + other * sin.unsqueeze(-2).to(x.dtype)
