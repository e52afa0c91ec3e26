# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn decoding one token per sequence, beside gathering the pages and calling SDPA.

python benchmarks/bench_paged_attn.py [--quick] [--only decode|prefix|tree|latent|call] [--device cpu|cuda]

Rates are GB/s of keys and values read. The bar is a share of the rate of a loop that only reads
those pages. On CUDA the peers are cuDNN on a dense cache, the gathered pages, and FlashAttention-3
and FlashInfer if they are installed, for latent attention FlashMLA. 8-bit pages, four query tokens, shared
prefixes and masks over new tokens are compared with the op itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import shapes
import torch
import torch.nn.functional as F
from harness import DTYPES, Bar, Case, Run, arguments, open_device, overhead_facts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_gpukern
from torch_gpukern import reference


def make_inputs(batch: int, context: int, page: int, dtype: torch.dtype, device):
    """q [B, Hq, D], k_cache and v_cache [num_blocks, page, Hkv, D], block_table [B, blocks],
    seq_lens [B]. Pages are in random order, as after an hour of serving."""
    heads_q, heads_kv = shapes.PAGED_HEADS_Q, shapes.PAGED_HEADS_KV
    head_dim = shapes.PAGED_HEAD_DIM
    blocks = -(-context // page)
    q = torch.randn(batch, heads_q, head_dim, device=device).to(dtype)
    k_cache, v_cache = (
        torch.randn(batch * blocks, page, heads_kv, head_dim, device=device).to(dtype)
        for _ in range(2)
    )
    table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    return q, k_cache, v_cache, table, seq_lens


def gather_and_sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor):
    """PyTorch's own way: copy the pages into one tensor, then call SDPA. All lengths are equal."""
    batch = table.shape[0]
    k, v = (
        cache[table.long()].view(batch, -1, *cache.shape[2:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
    return out[:, :, 0]


def exact(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, tokens: int = 1
) -> Tensor:
    """The first sequence, of `tokens` query tokens, in float64, from its pages alone."""
    pages = table[0].long()
    own = torch.arange(len(pages), dtype=torch.int32, device=q.device)[None]
    k, v = (cache[pages].double() for cache in (k_cache, v_cache))
    return reference.paged_attn(q[:tokens].double(), k, v, own, lens[:1])


def read_once(run: Run) -> dict[str, Callable]:
    """Ways to read the keys and values of a call once. They read page by page if the device offers
    that, otherwise the whole caches."""
    pages = {
        name: lambda q, k_cache, v_cache, table, lens, read=read: read(k_cache, v_cache, table)
        for name, read in run.device.page_readers().items()
    }
    return pages or {
        name: lambda q, k_cache, v_cache, *_, read=read: (read(k_cache), read(v_cache))
        for name, read in run.device.readers().items()
    }


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
        limits=read_once(run),
    )


def contiguous_sdpa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    """cuDNN on the same bytes, viewed as a dense cache [B, S, Hkv, D] per sequence without
    paging."""
    batch = table.shape[0]
    k, v = (cache.view(batch, -1, *cache.shape[2:]).transpose(1, 2) for cache in (k_cache, v_cache))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def flash_attn_3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache

    out = flash_attn_with_kvcache(
        q[:, None], k_cache, v_cache, cache_seqlens=lens, page_table=table, causal=True
    )
    return out[:, 0]


def flash_infer() -> Callable:
    """FlashInfer's decode, on tensor cores where a group has at least 4 heads, as its documentation
    advises. It plans for each table when it first sees it. The plans share one workspace, since
    their calls run one after the other."""
    plans = {}
    workspaces = []

    def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        plan = plans.get(table.data_ptr())
        if plan is None:
            import flashinfer

            _, page, heads_kv, head_dim = k_cache.shape
            heads = q.shape[1]
            if not workspaces:
                workspaces.append(torch.empty(256 << 20, dtype=torch.uint8, device=q.device))
            plan = plans[table.data_ptr()] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspaces[0], "NHD", use_tensor_cores=heads >= 4 * heads_kv
            )
            used = (lens + page - 1) // page
            ends = F.pad(used.cumsum(0), (1, 0)).int()
            pages = torch.cat([row[:n] for row, n in zip(table, used.tolist())])
            last = (lens - 1) % page + 1
            plan.plan(ends, pages, last, heads, heads_kv, head_dim, page, q_data_type=q.dtype)
        return plan.run(q, (k_cache, v_cache))

    return run


def other_peers() -> dict[str, Callable]:
    """Decoding by other installed projects."""
    peers = {}
    if find_spec("flash_attn_interface"):
        peers["FA3"] = flash_attn_3
    if find_spec("flashinfer"):
        peers["FlashInfer"] = flash_infer()
    return peers


def ragged_case(longest: int, others: int, context: int, page: int, run: Run) -> Case:
    """One long sequence among short ones, which needs an even distribution of all chunks."""
    case = decode_case(1, longest + others * context, page, "bf16", run)
    lengths = [longest] + [context] * others

    def make():
        q, k_cache, v_cache, pages, _ = make_inputs(
            1, sum(lengths), page, torch.bfloat16, run.device.device
        )
        blocks = [-(-n // page) for n in lengths]
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=q.device)
        for row, own in zip(table, pages[0].split(blocks)):
            row[: len(own)] = own
        return (
            q.repeat(len(lengths), 1, 1),
            k_cache,
            v_cache,
            table,
            torch.tensor(lengths, device=q.device).int(),
        )

    case.group, case.label, case.make = (
        "decode, ragged",
        f"{longest} and {others} x {context} page {page}",
        make,
    )
    case.peers = {}
    return case


def beside_itself(name: str, batch: int, context: int, page: int, run: Run) -> Case:
    """Pages of e4m3 beside bfloat16 ones, or four query tokens a sequence beside one. The peer is
    the op itself."""
    case = decode_case(batch, context, page, "bf16", run)

    def make():
        q, k_cache, v_cache, *index = make_inputs(
            batch, context, page, torch.bfloat16, run.device.device
        )
        if name == "4 tokens":
            return q.repeat_interleave(4, 0), k_cache, v_cache, *index, q
        return (
            q,
            k_cache,
            v_cache,
            *index,
            k_cache.to(torch.float8_e4m3fn),
            v_cache.to(torch.float8_e4m3fn),
        )

    def ours(q, k_cache, v_cache, table, lens, *codes):
        return torch_gpukern.paged_attn(
            q, *(codes if name == "e4m3" else (k_cache, v_cache)), table, lens
        )

    def itself(q, k_cache, v_cache, table, lens, one, *_):
        return torch_gpukern.paged_attn(q if name == "e4m3" else one, k_cache, v_cache, table, lens)

    def judged(q, k_cache, v_cache, table, lens, *more):
        return exact(q, *(more if name == "e4m3" else (k_cache, v_cache)), table, lens)

    case.group, case.make, case.ours, case.reference = f"decode, {name}", make, ours, judged
    # the last of the first sequence's four tokens sees what a single token sees; all are equal
    if name == "4 tokens":
        case.compare = lambda out: out[:1] if len(out) == batch else out[3:4]
    case.peers = {"one token" if name == "4 tokens" else "bfloat16 pages": itself}
    if name == "e4m3":
        case.bytes /= 2
    return case


def prefix_case(batch: int, common: int, own: int, page: int, dtype: str, run: Run) -> Case:
    """Sequences that share their first `common` keys, which are read once. The peer is the call
    without `prefix`, which reads them for each sequence. The rate counts what must be read."""
    case = decode_case(1, common + batch * own, page, dtype, run)
    elements = batch * (common + own) * shapes.PAGED_HEADS_Q * shapes.PAGED_HEAD_DIM

    def make():
        device = run.device.device
        q, k_cache, v_cache, pages, _ = make_inputs(
            1, common + batch * own, page, DTYPES[dtype], device
        )
        shared, rest = pages[0, : common // page], pages[0, common // page :]
        table = torch.cat([shared.expand(batch, -1), rest.view(batch, -1)], 1)
        lens = torch.full((batch,), common + own, dtype=torch.int32, device=device)
        prefix = (
            shared[None].contiguous(),
            lens[:1] - own,
            torch.tensor([0, batch], dtype=torch.int32, device=device),
            lens - own,
        )
        q = torch.randn(batch, *q.shape[1:], device=device).to(q.dtype)
        return q, k_cache, v_cache, table.contiguous(), lens, *prefix

    def ours(q, k_cache, v_cache, table, lens, *prefix):
        prefix = torch_gpukern.SharedPrefix(*prefix)
        return torch_gpukern.paged_attn(q, k_cache, v_cache, table, lens, prefix=prefix)

    def without(q, k_cache, v_cache, table, lens, *_):
        return torch_gpukern.paged_attn(q, k_cache, v_cache, table, lens)

    def judged(q, k_cache, v_cache, table, lens, *_):
        return exact(q, k_cache, v_cache, table, lens)

    case.group, case.label = "decode, prefix", f"B{batch} {common} shared + {own} page {page}"
    case.make, case.ours, case.peers = make, ours, {"without prefix": without}
    case.reference, case.flops, case.bar, case.limits = judged, 4.0 * elements, Bar(), {}
    return case


def tree_case(batch: int, old: int, new: int, page: int, dtype: str, run: Run) -> Case:
    """New tokens with a mask over each other. The mask is the causal one, so that the peer, the
    call without a mask, has the same results."""
    case = decode_case(batch, old + new, page, dtype, run)

    def make():
        inputs = make_inputs(batch, old + new, page, DTYPES[dtype], run.device.device)
        q, *rest = inputs
        q = torch.randn(batch * new, *q.shape[1:], device=q.device).to(q.dtype)
        mask = torch.ones(new, new, dtype=torch.bool, device=q.device).tril()
        return q, *rest, mask.repeat(batch, 1)

    def ours(*args):
        return torch_gpukern.paged_attn(*args[:5], attn_mask=args[5])

    def causal(*args):
        return torch_gpukern.paged_attn(*args[:5])

    def judged(*args):
        return exact(*args[:5], tokens=new)

    case.group, case.label = "tree", f"B{batch} {old} old + {new} new page {page}"
    case.make, case.ours, case.peers = make, ours, {"causal rule": causal}
    case.reference, case.compare = judged, lambda out: out[:new]
    case.flops, case.bar, case.limits = case.flops * new, Bar(), {}
    return case


def gather_and_multiply(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Latent attention in PyTorch: SDPA has no fast kernel for head_dim 576. All lengths are
    equal."""
    rows = cache[table.long()].view(table.shape[0], -1, cache.shape[-1])
    weights = torch.softmax(q @ rows.transpose(1, 2) * q.shape[-1] ** -0.5, -1, torch.float32)
    return weights.to(q.dtype) @ rows[..., :512]


def flash_mla() -> Callable:
    """FlashMLA. Its first call with some lengths makes a plan, which is kept here."""
    plans = {}

    def run(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if lens.data_ptr() not in plans:
            plans[lens.data_ptr()] = get_mla_metadata(lens, q.shape[1], 1)
        plan = plans[lens.data_ptr()]
        return flash_mla_with_kvcache(q[:, None], cache, table, lens, 512, *plan)[0][:, 0]

    return run


def latent_case(batch: int, context: int, heads: int, run: Run) -> Case:
    """Latent attention (MLA): a cache [num_blocks, 64, 1, 576] whose first 512 columns are the
    values."""
    device, page, width = run.device.device, 64, 576

    def make():
        blocks = -(-context // page)
        q = torch.randn(batch, heads, width, device=device).bfloat16()
        cache = torch.empty(batch * blocks, page, 1, width, device=device, dtype=q.dtype)
        table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
        return q, cache.normal_(), table, torch.full((batch,), context, device=device).int()

    def ours(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return torch_gpukern.paged_attn(q, cache, cache[..., :512], table, lens)

    def first(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return exact(q, cache, cache[..., :512], table, lens)

    peers = {"FlashMLA": flash_mla()} if find_spec("flash_mla") else {}
    return Case(
        group=f"latent, {heads} heads",
        label=f"B{batch} context {context}",
        dtype="bf16",
        make=make,
        ours=ours,
        peers=peers | {"gather + matmul": gather_and_multiply},
        reference=first,
        compare=lambda out: out[:1],
        flops=2.0 * batch * context * heads * (width + 512),
        bytes=2.0 * batch * (context * width + heads * (width + 512)),
        rotate=True,
        optional=list(peers),
    )


def write_case(tokens: int, device) -> Case:
    """kv_cache_write beside a copy of as many bytes."""
    heads, head_dim, page = shapes.PAGED_HEADS_KV, shapes.PAGED_HEAD_DIM, 16

    def make():
        k, v = (torch.randn(tokens, heads, head_dim, device=device).bfloat16() for _ in range(2))
        caches = [
            torch.empty(tokens // page, page, heads, head_dim, device=device, dtype=k.dtype)
            for _ in range(2)
        ]
        return k, v, *caches, torch.randperm(tokens, device=device)

    def copy(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor):
        k_cache.view_as(k).copy_(k)
        v_cache.view_as(v).copy_(v)

    return Case(
        group="write",
        label=f"{tokens} tokens",
        dtype="bf16",
        make=make,
        ours=torch_gpukern.kv_cache_write,
        peers={},
        reference=None,
        flops=0.0,
        bytes=4.0 * tokens * heads * head_dim * 2,
        rotate=True,
        unit="GB/s",
        bar=shapes.CUDA_WRITE_BAR,
        limits={"copy": copy},
    )


def cuda(run: Run) -> None:
    device = run.device.device
    for page in shapes.PAGED_PAGE_SIZES:
        for batch, context in shapes.CUDA_PAGED_BATCH_CONTEXT:
            case = decode_case(batch, context, page, "bf16", run)
            case.bar = shapes.CUDA_PAGED_BARS.get((batch, context), Bar())
            others = other_peers()
            case.peers = {
                "cuDNN, dense cache": contiguous_sdpa,
                "gather + SDPA": gather_and_sdpa,
            } | others
            case.optional = list(others)
            # it plans for each table on the host, before the first timed call
            case.live = [name for name in others if name == "FlashInfer"]
            if batch > 1 or context > 65536:
                # the dense peer reads other pages for a sequence, so only one of the two is judged
                case.reference = None
            run.add(case)
        run.add(ragged_case(*shapes.CUDA_PAGED_RAGGED, page, run))
    for name in ("e4m3", "4 tokens"):
        for batch, context in shapes.CUDA_PAGED_BATCH_CONTEXT:
            run.add(beside_itself(name, batch, context, 16, run))
    for sizes in shapes.CUDA_PREFIX_CASES:
        run.add(prefix_case(*sizes, "bf16", run))
    for sizes in shapes.CUDA_TREE_CASES:
        run.add(tree_case(*sizes, "bf16", run))
    for heads in shapes.CUDA_LATENT_HEADS:
        for batch, context in shapes.CUDA_LATENT_BATCH_CONTEXT:
            run.add(latent_case(batch, context, heads, run))
    run.add(write_case(shapes.CUDA_WRITE_TOKENS, device))
    if run.wants("call host time"):
        q, caches = torch.randn(1, 1, 8, device=device), torch.randn(1, 8, 1, 8, device=device)
        table, lens = (
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.full((1,), 8, device=device).int(),
        )
        args = (q, caches, caches, table, lens)
        own = ("gather + SDPA", lambda: gather_and_sdpa(*args))
        overhead_facts(
            run, "paged_attn", lambda: torch_gpukern.paged_attn(*args), shapes.CUDA_CALL, own
        )
    run.finish({})


def main() -> None:
    args = arguments("paged_attn")
    device = open_device(args.device)
    run = Run("paged_attn", args, device)
    if device.kind == "cuda":
        return cuda(run)
    for dtype in ("f32", "bf16"):
        for page in shapes.PAGED_PAGE_SIZES:
            for batch, context in shapes.PAGED_BATCH_CONTEXT:
                run.add(decode_case(batch, context, page, dtype, run))
        for sizes in shapes.PREFIX_CASES:
            run.add(prefix_case(*sizes, dtype, run))
        for sizes in shapes.TREE_CASES:
            run.add(tree_case(*sizes, dtype, run))
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
