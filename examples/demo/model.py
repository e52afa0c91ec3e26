# SPDX-License-Identifier: BSD-3-Clause
"""A byte-level GPT whose matrix products and attention all go through an exchangeable `Ops`.

It is a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU, after
Vaswani et al. 2017 (arXiv:1706.03762), Su et al. 2021 (RoPE, arXiv:2104.09864), Ainslie et al. 2023
(GQA, arXiv:2305.13245) and Shazeer 2020 (SwiGLU, arXiv:2002.05202).

Weights are stored [in, out], so that a layer is `gemm(x, w)` with both operands row-major. The same
`forward` trains on dense tokens [batch, seq] and generates on packed tokens [tokens]. Only `attend`
differs, which computes attention for the queries. An `attend` that writes keys to a cache may
rotate them itself, so that norm, rotation and write are one kernel.

The embedding of a position is the sum of three: of its byte and of the two bytes before it. Every
key then contains the pair before its byte, so that one attention layer can already look up what
followed the same pair earlier. Without it, two layers must first learn to cooperate, which takes
most of a short training.
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
    """The arguments with which `torch_gpukern.rope_kv_write` normalises and rotates the queries and
    keys of packed tokens."""

    cos: Tensor  # [context, head_dim / 2]
    sin: Tensor
    positions: Tensor  # [tokens], the rows of cos and sin
    gain: Tensor  # [head_dim] ones: the norm has no weight

    def norm(self) -> dict:
        """The keyword arguments of the norm of queries and keys."""
        return {"q_weight": self.gain, "k_weight": self.gain, "eps": torch.finfo(torch.float32).eps}


# Called with (layer, q, k, v), and with Positions if q and k are not normalised and rotated yet.
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `grams` is the number of bytes that a position's embedding covers."""

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
    """The same on PyTorch's built-ins, for comparison. backend: SDPA's backend; None is PyTorch's
    choice."""

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
    """Scales the last dimension to a root mean square of 1. A gain is not needed, because the
    product that follows can learn it."""
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x [..., seq, heads, head_dim], cos and sin [seq, 1, head_dim / 2]"""
    lo, hi = x.chunk(2, dim=-1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)


def among_themselves(ops) -> Attend:
    """Causal attention within each sequence. q, k and v are [batch, seq, heads, head_dim]."""

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
        # zeros: every block starts as the identity, so the first steps are stable without warmup
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
    """Maps bytes to logits of the next byte."""

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
        """grams [..., seq, grams] int64, positions [seq] int64 -> float32 logits [..., seq,
        vocab]"""
        return ops.linear(self.states(grams, positions, ops, attend, rotated), self.head).float()

    def states(
        self, grams: Tensor, positions: Tensor, ops, attend: Attend, rotated: bool = True
    ) -> Tensor:
        """The input of the head, [..., seq, dim].

        attend(layer, q, k, v) gets q [..., seq, heads_q, head_dim] and k, v [..., seq, heads_kv,
        head_dim], and returns q's shape. If q and k are not rotated here, attend(layer, q, k, v,
        positions) gets them as the product returned them."""
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
