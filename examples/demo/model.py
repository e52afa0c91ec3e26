# SPDX-License-Identifier: BSD-3-Clause
"""A byte-level GPT whose every matrix product and attention goes through an exchangeable `Ops`.

Pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, after Vaswani et al.
2017 (arXiv:1706.03762), Su et al. 2021 (RoPE, arXiv:2104.09864), Ainslie et al. 2023 (GQA,
arXiv:2305.13245) and Shazeer 2020 (SwiGLU, arXiv:2002.05202).

Weights are stored [in, out], so that a layer is `gemm(x, w)` with both operands row-major.
The same `forward` trains on dense [batch, seq] tokens and generates on packed [tokens]: only
`attend`, which says how queries meet keys, differs. One that writes keys into a cache may rotate
them itself, so that norm, rotation and write are one kernel.

A position's embedding is the sum of three, of its byte and of the two before it. With the pair
before a byte in every key, one attention layer can already look up what followed the same pair
earlier; without it two layers must first learn to cooperate, which costs most of a short training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Positions(NamedTuple):
    """Of packed tokens: what `torch_gpukern.rope_kv_write` takes to normalise and rotate queries
    and keys."""

    cos: Tensor  # [context, head_dim / 2]
    sin: Tensor
    positions: Tensor  # [tokens], rows of the two
    gain: Tensor  # [head_dim] ones: the norm has no weight

    def norm(self) -> dict:
        """rms_norm's, for the queries and the keys."""
        return {"q_weight": self.gain, "k_weight": self.gain, "eps": torch.finfo(torch.float32).eps}


# (layer, q, k, v), and Positions where q and k are not yet normalised and rotated
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `grams` is how many bytes a position's embedding sees."""

    vocab: int = 256
    grams: int = 3
    context: int = 512
    layers: int = 3
    dim: int = 128
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    hidden: int = 384


class GpukernOps:
    """The model's products on torch_gpukern."""

    name = "gpukern"

    def __init__(self) -> None:
        import torch_gpukern

        self.gemm = torch_gpukern.gemm
        self.flash_attn = torch_gpukern.flash_attn

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x [..., in], w [in, out] -> [..., out]"""
        return self.gemm(x, w)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, heads_q, seq, head_dim], k and v [batch, heads_kv, seq, head_dim] -> like q"""
        return self.flash_attn(q, k, v, is_causal=True)


class TorchOps:
    """The same products on PyTorch's built-ins: the peer of the comparison. backend: who attends,
    None is PyTorch's choice."""

    name = "torch"

    def __init__(self, backend: SDPBackend | None = None) -> None:
        self.backend = backend

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x [..., in], w [in, out] -> [..., out]"""
        return torch.matmul(x, w)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, heads_q, seq, head_dim], k and v [batch, heads_kv, seq, head_dim] -> like q"""
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


OPS = {"gpukern": GpukernOps, "torch": TorchOps}


def grams_of(tokens: Tensor, grams: int) -> Tensor:
    """tokens [..., seq] -> [..., seq, grams]: each byte and those before it, 0 before the first."""
    return torch.stack([F.pad(tokens, (i, 0))[..., : tokens.shape[-1]] for i in range(grams)], -1)


def rms_norm(x: Tensor) -> Tensor:
    """Unit root mean square over the last dimension, without a gain: the product that follows
    learns it."""
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x [..., seq, heads, head_dim], cos and sin [seq, 1, head_dim / 2]"""
    lo, hi = x.chunk(2, dim=-1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)


def among_themselves(ops) -> Attend:
    """Queries see the keys of their own sequence up to their own: q [batch, seq, heads, head_dim],
    k and v likewise."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return ops.causal_attention(*heads_first).transpose(1, 2)

    return attend


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        heads = c.heads_q + 2 * c.heads_kv
        self.config = c
        self.qkv = nn.Parameter(torch.randn(c.dim, heads * c.head_dim) * c.dim**-0.5)
        self.gate_up = nn.Parameter(torch.randn(c.dim, 2 * c.hidden) * c.dim**-0.5)
        # zero: every block starts as the identity, and the first steps are stable without warmup
        self.attn_out = nn.Parameter(torch.zeros(c.heads_q * c.head_dim, c.dim))
        self.mlp_out = nn.Parameter(torch.zeros(c.hidden, c.dim))

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | Positions, ops, layer: int, attend: Attend
    ) -> Tensor:
        """x [..., seq, dim] -> [..., seq, dim]"""
        c = self.config
        qkv = ops.linear(rms_norm(x), self.qkv).unflatten(-1, (-1, c.head_dim))
        q, k, v = qkv.split((c.heads_q, c.heads_kv, c.heads_kv), dim=-2)
        if isinstance(angles, Positions):
            y = attend(layer, q, k, v, angles)
        else:
            q, k = rotate(rms_norm(q), *angles), rotate(rms_norm(k), *angles)
            y = attend(layer, q.to(v.dtype), k.to(v.dtype), v)
        x = x + ops.linear(y.flatten(-2), self.attn_out)
        gate, up = ops.linear(rms_norm(x), self.gate_up).chunk(2, dim=-1)
        return x + ops.linear(F.silu(gate) * up, self.mlp_out)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.config = c
        self.embed = nn.Parameter(torch.randn(c.grams * c.vocab, c.dim))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Parameter(torch.zeros(c.dim, c.vocab))
        inv_freq = 10_000.0 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.arange(c.context)[:, None, None] * inv_freq
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("gain", torch.ones(c.head_dim), persistent=False)

    def forward(
        self, grams: Tensor, positions: Tensor, ops, attend: Attend, rotated: bool = True
    ) -> Tensor:
        """grams [..., seq, grams] int64, positions [seq] int64 -> float32 logits [..., seq, vocab]"""
        return ops.linear(self.states(grams, positions, ops, attend, rotated), self.head).float()

    def states(
        self, grams: Tensor, positions: Tensor, ops, attend: Attend, rotated: bool = True
    ) -> Tensor:
        """What the head reads, [..., seq, dim].

        attend(layer, q, k, v) gets q [..., seq, heads_q, head_dim], k and v
        [..., seq, heads_kv, head_dim] and returns q's shape. Not rotated: attend(layer, q, k, v,
        Positions)
        gets q and k as the product made them."""
        tables = self.config.vocab * torch.arange(grams.shape[-1], device=grams.device)
        x = rms_norm(F.embedding(grams + tables, self.embed).sum(dim=-2))
        if rotated:
            angles = self.cos[positions], self.sin[positions]
        else:
            angles = Positions(self.cos[:, 0], self.sin[:, 0], positions, self.gain)
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, ops, layer, attend)
        return rms_norm(x)

    def dense_states(self, tokens: Tensor, ops) -> Tensor:
        """`states` of whole sequences: tokens [batch, seq] int64 -> [batch, seq, dim]"""
        return self.states(*self._dense(tokens), ops, among_themselves(ops))

    def loss(self, tokens: Tensor, targets: Tensor, ops, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats. tokens and targets [batch, seq] int64"""
        logits = self(*self._dense(tokens), ops, among_themselves(ops))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    def _dense(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Grams and positions of tokens [batch, seq]."""
        return grams_of(tokens, self.config.grams), torch.arange(
            tokens.shape[1], device=tokens.device
        )
