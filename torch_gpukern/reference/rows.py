# SPDX-License-Identifier: BSD-3-Clause
"""The definition of the row operations (along the last dimension) in plain PyTorch, part of
`reference`.

Computed in float64 if the input is float64, otherwise in float32; results are rounded once.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attn_dropout import philox

__all__ = [
    "bias_gelu_dropout",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "geglu",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "moe_unpermute",
    "rms_norm",
    "rope",
    "rotated",
    "softmax",
    "swiglu",
]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- norms ---------------------------------------------------------------------------------------


def rms_norm(x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0):
    """``out = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias`` with h = x + residual.
    Returns (out, h) if there is a residual."""
    h = x if residual is None else x + residual
    out = _wide(h)
    out = out / torch.sqrt((out * out).mean(-1, keepdim=True) + eps)
    out = _scaled(out, weight, bias, weight_offset).to(x.dtype)
    return out if residual is None else (out, h)


def layer_norm(x, weight=None, bias=None, *, residual=None, eps=1e-5):
    """``out = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias`` with h = x +
    residual. Returns (out, h) if there is a residual."""
    h = x if residual is None else x + residual
    out = _wide(h) - _wide(h).mean(-1, keepdim=True)
    out = out / torch.sqrt((out * out).mean(-1, keepdim=True) + eps)
    out = _scaled(out, weight, bias, 0.0).to(x.dtype)
    return out if residual is None else (out, h)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    x = x if weight is None else x * (weight.to(x.dtype) + offset)
    return x if bias is None else x + bias.to(x.dtype)


# ---- softmax -------------------------------------------------------------------------------------


def softmax(x: Tensor, *, scale: float = 1.0, lengths: Tensor | None = None) -> Tensor:
    """``exp(scale x) / sum(exp(scale x))`` over the first `lengths` columns of each row; 0 in the
    others."""
    if lengths is None:
        return torch.softmax(scale * _wide(x), -1).to(x.dtype)
    outside = torch.arange(x.shape[-1], device=x.device) >= lengths[..., None]
    seen = (scale * _wide(x)).masked_fill(outside, -torch.inf)
    seen = seen.masked_fill(outside.all(-1, keepdim=True), 0)  # a row of length 0 has no maximum
    return torch.softmax(seen, -1).masked_fill(outside, 0).to(x.dtype)


def log_softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale x - log(sum(exp(scale x)))``."""
    return torch.log_softmax(scale * _wide(x), -1).to(x.dtype)


# ---- gated linear units --------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``. Without up, the first half of gate's columns is the gate, the second
    up."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``, with gate and up as in `swiglu`."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.gelu(_wide(gate), approximate=approximate) * _wide(up)).to(gate.dtype)


# ---- rotary embedding ----------------------------------------------------------------------------


def rope(q, k, cos, sin, positions=None, *, interleaved=False):
    """Rotates each pair (x1, x2) in the first R columns of q and k: ``(x1 cos - x2 sin, x2 cos + x1
    sin)``."""
    tokens = 2 if q.dim() == 4 else 0
    at = torch.arange(q.shape[tokens], device=q.device) if positions is None else positions
    return tuple(rotated(x, cos, sin, at, interleaved).to(x.dtype) for x in (q, k))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, S, D], or packed [T, H, D], rotated and not rounded."""
    # the dimension at which heads are inserted into [.., S, R / 2]
    heads = 1 if x.dim() == 3 or positions.dim() == 2 else 0
    c, s = (table[positions].unsqueeze(heads) for table in (cos, sin))
    x, r = _wide(x), 2 * cos.shape[1]
    x1, x2 = (
        (x[..., 0:r:2], x[..., 1:r:2]) if interleaved else (x[..., : r // 2], x[..., r // 2 : r])
    )
    pair = x1 * c - x2 * s, x2 * c + x1 * s
    first = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((first, x[..., r:]), -1)


# ---- losses --------------------------------------------------------------------------------------


def cross_entropy(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=0.0,
    logit_scale=1.0,
    reduction="mean",
    z_loss=0.0,
):
    """``(1 - e) w[t] (lse - z[t]) + e / V sum over c of w[c] (lse - z[c]) + z_loss lse^2``, where z
    = ``softcap tanh(logit_scale logits / softcap)``, or ``logit_scale logits`` without a soft
    cap."""
    z = logit_scale * _wide(logits)
    z = softcap * torch.tanh(z / softcap) if softcap > 0 else z
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    weight = None if weight is None else weight.to(z.dtype)
    loss = F.cross_entropy(z.reshape(-1, z.shape[-1]), target.reshape(-1), weight, **how)
    if z_loss:
        kept = (target != ignore_index).reshape(-1)
        more = (z_loss * z.reshape(-1, z.shape[-1]).logsumexp(-1).square()).where(kept, 0.0)
        if reduction != "none":
            more = more.sum()
        if reduction == "mean":
            more = more / kept.sum()
        loss = loss + more
    return loss.view(target.shape) if reduction == "none" else loss


def linear_cross_entropy(
    x, weight, target, bias=None, *, class_weight=None, low_memory=False, **rules
):
    """`cross_entropy` of the unrounded logits ``x @ weight.mT + bias``. low_memory has no effect on
    the result."""
    logits = _wide(x) @ _wide(weight).mT
    return cross_entropy(
        logits if bias is None else logits + _wide(bias), target, weight=class_weight, **rules
    )


def kl_div(logits, teacher_logits, *, mask=None, beta=0.0, temperature=1.0):
    """The divergence of each row. S and T are the softmax of logits / temperature of student and
    teacher. beta 0: ``KL(T || S)``. beta 1: ``KL(S || T)``. Between them, with M = beta T +
    (1 - beta) S: ``beta KL(T || M) + (1 - beta) KL(S || M)``. Rows with mask 0 give 0."""
    hidden = None if mask is None else mask == 0
    s, t = (
        (_wide(z) if hidden is None else _wide(z).masked_fill(hidden[..., None], 0.0)) / temperature
        for z in (logits, teacher_logits)
    )
    s, t = s.log_softmax(-1), t.log_softmax(-1)

    def divergence(p, q):
        # p = -inf has the summand 0. Operands and difference are masked, so that neither the
        # summand nor its gradient is NaN.
        zero = p == -torch.inf
        difference = p.masked_fill(zero, 0.0) - q.masked_fill(zero, 0.0)
        return (p.exp() * difference.masked_fill(zero, 0.0)).sum(-1)

    if beta == 0:
        loss = divergence(t, s)
    elif beta == 1:
        loss = divergence(s, t)
    else:
        m = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta))
        loss = beta * divergence(t, m) + (1 - beta) * divergence(s, m)
    return loss if hidden is None else loss.masked_fill(hidden, 0.0)


# ---- mixtures of experts -------------------------------------------------------------------------


def moe_unpermute(rows, place, weight):
    """``sum over j of weight[t, j] * rows[place[t, j]]`` over places that are not below 0."""
    kept = place >= 0
    # both factors are masked: NaN times 0 would be NaN
    picked = _wide(rows)[place.clamp(min=0).long()].masked_fill(~kept[..., None], 0.0)
    by = weight.to(picked.dtype).masked_fill(~kept, 0.0)
    return (picked * by[..., None]).sum(1).to(rows.dtype)


# ---- dropout -------------------------------------------------------------------------------------


def dropout_mask(
    shape: Sequence[int], p: float, seed: Tensor, device: torch.device | str | None = None
) -> Tensor:
    """bool of the given shape. Element i, in row-major order, is kept if word i % 4 of
    Philox4x32-10 with key seed[0] at counter (i // 4, seed[1]) is less than (1 - p) 2^32."""
    n, device = torch.Size(shape).numel(), seed.device if device is None else device
    call = torch.arange((n + 3) // 4, device=device)
    words = torch.stack(philox(seed.to(device), call & 0xFFFFFFFF, call >> 32), -1)
    return (words.flatten()[:n] < int((1 - p) * 2**32 + 0.5)).view(tuple(shape))


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """``x / (1 - p)`` where `dropout_mask` keeps x, otherwise 0."""
    return _dropped(_wide(x), p, seed).to(x.dtype)


def dropout_add(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> Tensor:
    """``dropout(x) + residual``, rounded once."""
    return (_dropped(_wide(x), p, seed) + _wide(residual)).to(x.dtype)


def bias_gelu_dropout(
    x: Tensor, bias: Tensor | None, p: float, seed: Tensor, *, approximate: str = "none"
) -> Tensor:
    """``dropout(gelu(x + bias))``, rounded once."""
    z = _wide(x) if bias is None else _wide(x) + _wide(bias)
    return _dropped(F.gelu(z, approximate=approximate), p, seed).to(x.dtype)


def _dropped(x: Tensor, p: float, seed: Tensor) -> Tensor:
    kept = dropout_mask(x.shape, p, seed, x.device)
    return torch.where(kept, x / (1 - p if p < 1 else 1), 0.0)
