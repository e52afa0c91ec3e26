"""paged_attn decode, one token per sequence, beside gathering the pages and calling SDPA.

python benchmarks/bench_paged_attn.py [--quick] [--only decode|call] [--device cpu|cuda]
Rates are GB/s of keys and values read; the bar is a share of the measured read bandwidth.
"""

from __future__ import annotations

import sys

import shapes
import torch
import torch.nn.functional as F
from harness import DTYPES, Case, Run, arguments, open_device, overhead_facts
from torch import Tensor

import torch_gpukern
from torch_gpukern import reference


def make_inputs(batch: int, context: int, page: int, dtype: torch.dtype, device):
    """q [B, Hq, D], k_cache and v_cache [num_blocks, page, Hkv, D], block_table [B, blocks],
    seq_lens [B]; pages lie in a random order, as they do after an hour of serving."""
    heads_q, heads_kv = shapes.PAGED_HEADS_Q, shapes.PAGED_HEADS_KV
    head_dim = shapes.PAGED_HEAD_DIM
    blocks = -(-context // page)
    q = torch.randn(batch, heads_q, head_dim, device=device).to(dtype)
    k_cache, v_cache = (
        torch.randn(batch * blocks, page, heads_kv, head_dim, device=device).to(dtype) for _ in range(2)
    )
    table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    return q, k_cache, v_cache, table, seq_lens


def gather_and_sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor):
    """What PyTorch alone offers: pages copied into one tensor, then SDPA. Lengths are equal."""
    batch = table.shape[0]
    k, v = (cache[table.long()].view(batch, -1, *cache.shape[2:]).transpose(1, 2) for cache in (k_cache, v_cache))
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
    return out[:, :, 0]


def exact(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """The first sequence, its pages alone in float64."""
    pages = table[0].long()
    own = torch.arange(len(pages), dtype=torch.int32, device=q.device)[None]
    k, v = (cache[pages].double() for cache in (k_cache, v_cache))
    return reference.paged_attn(q[:1].double(), k, v, own, lens[:1])


def decode_case(batch: int, context: int, page: int, dtype: str, run: Run) -> Case:
    torch_dtype = DTYPES[dtype]
    elements = batch * context * shapes.PAGED_HEADS_KV * shapes.PAGED_HEAD_DIM
    return Case(
        group="decode",
        label=f"B{batch} context {context} page {page}",
        dtype=dtype,
        make=lambda: make_inputs(batch, context, page, torch_dtype, run.device.device),
        ours=torch_gpukern.paged_attn,
        peers={"gather + SDPA": gather_and_sdpa},
        reference=exact,
        compare=lambda out: out[:1],
        flops=4.0 * elements * shapes.PAGED_HEADS_Q / shapes.PAGED_HEADS_KV,
        bytes=2.0 * elements * torch_dtype.itemsize,
        rotate=True,
        unit="GB/s",
        bar=shapes.PAGED_BAR,
        limits={
            name: lambda q, k_cache, v_cache, *_, read=read: (read(k_cache), read(v_cache))
            for name, read in run.device.readers().items()
        },
    )


def main() -> None:
    args = arguments("paged_attn")
    device = open_device(args.device)
    run = Run("paged_attn", args, device)
    for dtype in ("f32", "bf16"):
        for page in shapes.PAGED_PAGE_SIZES:
            for batch, context in shapes.PAGED_BATCH_CONTEXT:
                run.add(decode_case(batch, context, page, dtype, run))
    if run.wants("call host time"):
        dtype = torch.float32
        heads, head_dim = 1, 8
        q = torch.randn(1, heads, head_dim, device=device.device, dtype=dtype)
        cache = torch.randn(1, 8, heads, head_dim, device=device.device, dtype=dtype)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device.device)
        lens = torch.full((1,), 8, dtype=torch.int32, device=device.device)
        overhead_facts(
            run,
            "paged_attn",
            lambda: torch_gpukern.paged_attn(q, cache, cache, table, lens),
            shapes.CALL_OVER_MUL,
        )
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
