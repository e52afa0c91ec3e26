# SPDX-License-Identifier: BSD-3-Clause
"""The forward of attention, softmax(q k^T / sqrt(D)) v, in Triton. To be read beside
csrc/cuda/attn/forward/flash_attn_fwd_sm90a.cu. Needs triton and a GPU, or TRITON_INTERPRET=1. Dao 2023,
arXiv:2307.08691, Algorithm 1."""

import math

import torch
import triton
import triton.language as tl

TILES = [(128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 4)]  # BQ, BKV, warps, stages


@triton.autotune(
    [triton.Config({"BQ": q, "BKV": kv}, num_warps=w, num_stages=s) for q, kv, w, s in TILES],
    key=["seq_q", "seq_k", "D", "CAUSAL"],
)
@triton.jit
def kernel(
    q,
    k,
    v,
    out,
    scale_log2,
    seq_q,
    seq_k,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
    BKV: tl.constexpr,
):
    """A program has BQ queries of one head; keys come in steps of BKV. Weights are 2^(score -
    peak)."""
    head = tl.program_id(1).to(tl.int64)
    row, dim = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    at_q = head * seq_q * D + row[:, None] * D + dim[None, :]
    x = tl.load(q + at_q, mask=row[:, None] < seq_q, other=0.0)
    peak = tl.full((BQ,), -1e30, tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    sums = tl.zeros((BQ, D), tl.float32)
    last = seq_k
    if CAUSAL:
        last = min(seq_k, (tl.program_id(0) + 1) * BQ)
    for j0 in range(0, last, BKV):
        key = j0 + tl.arange(0, BKV)
        at_k = head * seq_k * D + key[:, None] * D + dim[None, :]
        y = tl.load(k + at_k, mask=key[:, None] < seq_k, other=0.0)
        seen = key[None, :] < seq_k
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        score = tl.where(seen, tl.dot(x, tl.trans(y)) * scale_log2, -1e30)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.math.exp2(score - higher[:, None])
        factor = tl.math.exp2(peak - higher)
        total = total * factor + tl.sum(weight, 1)
        z = tl.load(v + at_k, mask=key[:, None] < seq_k, other=0.0)
        sums = tl.dot(weight.to(v.dtype.element_ty), z, sums * factor[:, None])
        peak = higher
    tl.store(
        out + at_q, (sums / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < seq_q
    )


def flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """q [B, H, Sq, D], k and v [B, H, Sk, D] of 16 bits. D is a power of two, 16 or more. If is_causal,
    query i sees the keys j <= i."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    kernel[lambda tile: (triton.cdiv(seq_q, tile["BQ"]), batch * heads)](
        q, k, v, out, math.log2(math.e) / math.sqrt(head_dim), seq_q, seq_k, head_dim, is_causal
    )
    return out
