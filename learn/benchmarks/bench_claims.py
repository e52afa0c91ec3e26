# SPDX-License-Identifier: BSD-3-Clause
"""Figures of learn/claims.md that no other benchmark measures: the size of L2, the cost of paging,
and what a split of the keys gains in decoding.

python learn/benchmarks/bench_claims.py --device cuda [--quick]

The cost of paging compares keys and values in pages of 16 in random order with the same bytes in
pages of 256 in order, as a dense cache has them. The kernel, the splits and the bytes read are the
same.

The gain of a split is FlashAttention-3's, if it imports, because it can be told not to split. One
sequence of few heads leaves most of the GPU idle if its keys are not split.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch  # noqa: E402
from harness import Case, Run, arguments, open_device  # noqa: E402

import torch_gpukern  # noqa: E402

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE, LARGE = 32, 8, 128, 16, 256


def exact(q, k, v, table, whole_k, whole_v, in_order, lens):
    """The first sequence in float64."""
    keys, values = (
        x.flatten(0, 1)[: int(lens[0])].double().repeat_interleave(HEADS_Q // HEADS_KV, 1)
        for x in (whole_k, whole_v)
    )
    weights = (torch.einsum("hd,nhd->hn", q[0].double(), keys) / HEAD_DIM**0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)[None]


def paging(batch: int, context: int, device: torch.device) -> Case:
    def make():
        q = torch.randn(batch, HEADS_Q, HEAD_DIM, device=device).bfloat16()
        k, v = (
            torch.randn(batch * context, HEADS_KV, HEAD_DIM, device=device).bfloat16()
            for _ in range(2)
        )
        pages = torch.randperm(batch * context // PAGE, device=device)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        whole = [x.view(-1, LARGE, HEADS_KV, HEAD_DIM) for x in (k, v)]
        in_order = torch.arange(batch * context // LARGE, device=device, dtype=torch.int32).view(
            batch, -1
        )
        parts = []
        for x in (k, v):  # page pages[i] of the cache holds the i-th page of tokens
            cache = torch.empty(
                batch * context // PAGE, PAGE, HEADS_KV, HEAD_DIM, device=device, dtype=x.dtype
            )
            cache[pages] = x.view_as(cache)
            parts.append(cache)
        return q, *parts, pages.int().view(batch, -1), *whole, in_order, lens

    def dense(q, k, v, table, whole_k, whole_v, in_order, lens):
        return torch_gpukern.paged_attn(q, whole_k, whole_v, in_order, lens)

    return Case(
        group="paging",
        label=f"B{batch} context {context}, pages of {PAGE}",
        dtype="bf16",
        make=make,
        ours=lambda q, k, v, table, whole_k, whole_v, in_order, lens: torch_gpukern.paged_attn(
            q, k, v, table, lens
        ),
        peers={f"pages of {LARGE} in order": dense},
        reference=exact,
        compare=lambda out: out[:1],
        flops=0.0,
        bytes=4.0 * batch * context * HEADS_KV * HEAD_DIM,
        rotate=True,
        unit="GB/s",
    )


def splitting(context: int, device: torch.device) -> Case:
    """One sequence, one token: FlashAttention-3 with as many parts as it likes, and with one."""
    from flash_attn_interface import flash_attn_with_kvcache

    def make():
        q = torch.randn(1, HEADS_Q, HEAD_DIM, device=device).bfloat16()
        k, v = (
            torch.randn(context // LARGE, LARGE, HEADS_KV, HEAD_DIM, device=device).bfloat16()
            for _ in range(2)
        )
        table = torch.arange(context // LARGE, device=device, dtype=torch.int32)[None]
        return q, k, v, table, torch.tensor([context], device=device, dtype=torch.int32)

    def by(parts: int):
        def run(q, k, v, table, lens):
            return flash_attn_with_kvcache(
                q[:, None], k, v, cache_seqlens=lens, page_table=table, causal=True,
                num_splits=parts,
            )[:, 0]  # fmt: skip

        return run

    def float64(q, k, v, table, lens):
        return exact(q, None, None, None, k, v, table, lens)

    return Case(
        group="split keys",
        label=f"B1 context {context}",
        dtype="bf16",
        make=make,
        ours=torch_gpukern.paged_attn,
        peers={"FlashAttention-3": by(0), "FlashAttention-3, not split": by(1)},
        reference=float64,
        flops=0.0,
        bytes=4.0 * context * HEADS_KV * HEAD_DIM,
        rotate=True,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("what learn/claims.md stands on")
    if args.device != "cuda":
        raise SystemExit("bench_claims: these are figures of a GPU: --device cuda")
    run = Run("claims", args, open_device(args.device))
    properties = torch.cuda.get_device_properties(0)
    run.fact("device", "L2", properties.L2_cache_size / 2**20, "MiB")
    run.fact(
        "device", "shared memory of a block", properties.shared_memory_per_block_optin, "bytes"
    )
    for batch, context in ((1, 16384), (16, 4096), (64, 8192)):
        run.add(paging(batch, context, run.device.device))
    if find_spec("flash_attn_interface"):
        for context in (4096, 16384, 131072):
            run.add(splitting(context, run.device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
