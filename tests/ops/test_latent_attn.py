# SPDX-License-Identifier: BSD-3-Clause
"""Latent attention (MLA): paged_attn whose value rows are the beginning of its key rows."""

import json
import math

import pytest
import torch
from attention_cases import Paged, check_paged
from conftest import (
    FLOATS,
    HALF,
    generator,
    grid,
    ops,
    randn,
    reference,
    same_bits,
    snapshot,
    torch_gpukern,
)

LATENT, ROPE = 512, 64
WIDE = LATENT + ROPE

# Context lengths and query tokens of each sequence.
BATCHES = {
    "decode": ([1, 63, 64, 65, 200], [1, 1, 1, 1, 1]),
    "inactive": ([0, 40, 0, 129], [1, 1, 1, 1]),
    "one_long": ([1100], [1]),
    "speculative": ([4, 130, 300], [4, 4, 4]),
    "ragged": ([1, 200, 64, 0, 33], [1, 3, 4, 0, 2]),
}


def latent(gen, batch, heads, block_size, dtype, device, dims=(WIDE, LATENT), order="NHD"):
    """A Paged whose v_cache is a view of k_cache."""
    lengths, queries = BATCHES[batch] if isinstance(batch, str) else batch
    case = Paged(gen, lengths, queries, heads, 1, *dims, block_size, dtype, device, order)
    case.v_cache = case.k_cache[..., : dims[1]]
    case.values = [k[..., : dims[1]] for k in case.keys]
    return case


def call(case, ragged=True, **kwargs):
    if ragged:
        kwargs.update(cu_seqlens_q=case.cu_seqlens_q, max_seqlen_q=max(case.queries))
    return ops.paged_attn_fwd(*case.args(), **kwargs)


def even(case):
    return len(set(case.queries)) == 1


def with_tensors(kwargs, gen, heads, device):
    """kwargs, with tensors for sinks, slopes, starts and scales."""
    given = dict(kwargs)
    for name in ("sinks", "alibi_slopes"):
        if name in given:
            given[name] = randn(gen, heads, dtype=torch.float32, device=device).abs()
    if "kv_start" in given:
        given["kv_start"] = torch.tensor(given["kv_start"], dtype=torch.int32, device=device)
    for name in ("k_scale", "v_scale"):
        if name in given:
            given[name] = torch.tensor(given[name], device=device)
    return given


@pytest.mark.parametrize(
    "case",
    grid(
        20,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=(16, 64, 128, 5, 20),
        block_size=(16, 64, 32, 1, 128),
        order=("NHD", "padded"),
    ),
)
def test_forward(case, device):
    gen = generator("latent", case.id)
    paged = latent(gen, case.batch, case.heads, case.block_size, case.dtype, device, order="NHD")
    if case.order == "padded":  # rows of a wider tensor, as when other data shares the pages
        wide = torch.full((*paged.k_cache.shape[:-1], WIDE + 64), math.nan, dtype=case.dtype)
        wide = wide.to(device)
        wide[..., :WIDE] = paged.k_cache
        paged.k_cache, paged.v_cache = wide[..., :WIDE], wide[..., :LATENT]
    kwargs = dict(scale=WIDE**-0.5 * 1.3)
    unchanged = snapshot(*paged.args())
    out, lse = call(paged, **kwargs)
    unchanged()
    check_paged(paged, out, lse, kwargs)
    if even(paged):
        for x, y in zip(call(paged, ragged=False, **kwargs), (out, lse)):
            assert same_bits(x, y)


@pytest.mark.parametrize(
    "lengths, heads",
    (
        ((2400,), 16),  # more splits than a warp adds at once
        ((640,) * 3, 16),
        ((640,) * 2, 128),
        ((1000, 700, 1020, 960), 16),  # nearly equal: each is cut into as many parts
        ((1500, 3, 0, 64), 16),  # not equal: shares of one list
        ((130,) * 12, 16),  # whole sequences
    ),
    ids=str,
)
def test_split_sequences(lengths, heads, device):
    """The ways in which the Hopper kernel divides the keys, with and without a merge."""
    gen = generator("latent splits", lengths, heads)
    batch = list(lengths), [1] * len(lengths)
    paged = latent(gen, batch, heads, 64, torch.bfloat16, device)
    check_paged(paged, *call(paged, ragged=False), {})


@pytest.mark.parametrize(
    "kwargs",
    (
        dict(is_causal=False),
        dict(scale=-0.02),
        dict(scale=0.0),
        dict(window_left=40),
        dict(softcap=3.0),
        dict(kv_start=(3, 40, -2, 0, 70)),
        dict(sinks=True),
        dict(alibi_slopes=True),
        dict(k_scale=0.7, v_scale=1.6),
        dict(scale=1.0),  # nearly one-hot: the maximum jumps
    ),
    ids=lambda kwargs: "-".join(kwargs),
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rules(kwargs, dtype, device):
    gen = generator("latent rules", list(kwargs), dtype)
    batch = "decode" if "kv_start" in kwargs else "speculative"
    paged = latent(gen, batch, 16, 64, dtype, device)
    given = with_tensors(kwargs, gen, 16, device)
    check_paged(paged, *call(paged, **given), given)


@pytest.mark.parametrize("dims", ((WIDE, WIDE), (WIDE, 64), (320, 256), (24, 8)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_other_widths(dims, dtype, device):
    """Any D up to 576 and any Dv up to D, views of one cache or two tensors."""
    gen = generator("latent widths", dims, dtype)
    paged = latent(gen, "ragged", 16, 16, dtype, device, dims=dims)
    check_paged(paged, *call(paged), {})
    paged.v_cache = paged.v_cache.contiguous()
    check_paged(paged, *call(paged), {})


def test_a_view_and_a_copy_agree(device):
    """Results do not depend on whether v_cache shares memory with k_cache, beyond the rounding of
    another kernel."""
    paged = latent(generator("latent copy"), "speculative", 16, 64, torch.float32, device)
    out, lse = call(paged)
    paged.v_cache = paged.v_cache.contiguous()
    other, other_lse = call(paged)
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(lse, other_lse)


def check_bad_page(paged, call):
    """A page outside the cache raises on the CPU. On CUDA its keys are missing, and the next call
    raises. The first sequence has 300 tokens in pages of 64."""
    paged.block_table[0, 2] = 1 << 30
    if not paged.q.is_cuda:
        with pytest.raises(IndexError, match="block_table"):
            call(paged)
        return
    out, lse = call(paged)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="block_table"):
        torch_gpukern.check_errors()
    keys = paged.keys[0]
    paged.keys[0] = torch.cat([keys[:128], keys[192:]])
    paged.values[0] = paged.keys[0][..., :LATENT]
    paged.lengths[0] = 236
    check_paged(paged, out, lse, {})


def test_bad_pages(device):
    gen = generator("latent pages")
    check_bad_page(latent(gen, ([300, 200], [1, 1]), 16, 64, torch.bfloat16, device), call)


def test_a_hidden_row_stays_hidden(device):
    """Tokens past seq_lens may hold NaN, and so may queries of other sequences."""
    gen = generator("latent hidden")
    paged = latent(gen, ([70, 130, 64], [2, 2, 2]), 32, 64, torch.bfloat16, device)
    want = call(paged)
    paged.q[2:4] = math.nan
    out, lse = call(paged)
    for x, y in zip((out, lse), want):
        assert same_bits(x[:2], y[:2]) and same_bits(x[4:], y[4:])
        assert x[2:4].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block_size", (16, 5))
def test_writes_of_both_parts(dtype, block_size, device):
    """kv_cache_write puts the compressed part and the rotary part into views of one cache."""
    gen = generator("latent writes", dtype, block_size)
    cache = torch.full((7, block_size, 1, WIDE), math.nan, dtype=dtype, device=device)
    c = randn(gen, 9, 1, LATENT, dtype=dtype, device=device)
    k_pe = randn(gen, 9, 1, ROPE, dtype=dtype, device=device)
    slots = torch.randperm(7 * block_size, generator=gen)[:9].to(device)
    slots[4] = -1
    torch_gpukern.kv_cache_write(c, k_pe, cache[..., :LATENT], cache[..., LATENT:], slots)
    want = torch.full_like(cache, math.nan).view(-1, WIDE)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot] = torch.cat([c[t, 0], k_pe[t, 0]])
    assert same_bits(cache.view(-1, WIDE), want)


def test_whole_rows_are_written(device):
    gen = generator("latent whole")
    cache = torch.zeros(3, 16, 1, WIDE, device=device)
    other = torch.zeros(3, 16, 1, WIDE, device=device)
    rows = randn(gen, 4, 1, WIDE, dtype=torch.float32, device=device)
    slots = torch.tensor([3, 17, 40, 0], device=device)
    torch_gpukern.kv_cache_write(rows, rows, cache, other, slots)
    assert same_bits(cache.view(-1, WIDE)[slots], rows[:, 0]) and same_bits(cache, other)


def test_overlapping_writes_are_refused(device):
    cache = torch.zeros(3, 16, 1, WIDE, device=device)
    c = torch.zeros(2, 1, LATENT, device=device)
    slots = torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="v_cache overlaps k_cache"):
        torch_gpukern.kv_cache_write(c, c, cache[..., :LATENT], cache[..., ROPE:], slots)


@pytest.mark.parametrize("head_dim", (577, 584, 1024))
def test_wider_rows_are_refused(head_dim, device):
    paged = latent(
        generator("latent wide"), "decode", 4, 16, torch.float32, device, dims=(head_dim, 8)
    )
    law = "it must be 1 to 576"
    if device == "cuda":
        law = "supported on CUDA are multiples of 8 from 8 to 576"
    with pytest.raises(ValueError, match=f"q has head_dim {head_dim}; {law}"):
        call(paged)


def test_opcheck(device):
    paged = latent(generator("latent opcheck"), ([20, 70], [1, 1]), 4, 16, torch.float32, device)
    torch.library.opcheck(ops.paged_attn.default, paged.args(), dict(scale=0.1))
    torch.library.opcheck(ops.paged_attn_fwd.default, paged.args(), dict(scale=0.1))


def test_compiled(device):
    """One graph for views of one cache, with the bits of the eager call."""
    paged = latent(generator("latent compiled"), ([20, 70], [1, 1]), 16, 64, torch.bfloat16, device)

    def attend(q, cache, table, lens):
        return torch_gpukern.paged_attn(q, cache, cache[..., :LATENT], table, lens, scale=0.05)

    args = paged.q, paged.k_cache, paged.block_table, paged.seq_lens
    assert same_bits(torch.compile(attend, fullgraph=True)(*args), attend(*args))


def test_absorbed_weights_give_the_expanded_attention(device):
    """The identity behind latent attention: with the projections absorbed into q and out, attention
    over the latent cache equals attention over expanded keys and values of every head."""
    gen = generator("latent absorbed")
    heads, nope, dv, length = 4, 32, 24, 50
    c, k_pe = randn(gen, length, LATENT), randn(gen, length, ROPE)
    up_k, up_v = randn(gen, heads, nope, LATENT), randn(gen, heads, dv, LATENT)
    q_nope, q_pe = randn(gen, 1, heads, nope), randn(gen, 1, heads, ROPE)
    scale = (nope + ROPE) ** -0.5 * 0.05
    cache = torch.cat([c, k_pe], dim=-1).view(1, length, 1, WIDE).to(device)
    q = torch.cat([torch.einsum("thn,hnc->thc", q_nope, up_k), q_pe], dim=-1).to(device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    mixed = torch_gpukern.paged_attn(q, cache, cache[..., :LATENT], table, lens, scale=scale)
    out = torch.einsum("thc,hvc->thv", mixed.cpu(), up_v)

    keys = torch.cat(
        [torch.einsum("hnc,jc->hjn", up_k, c), k_pe.expand(heads, length, ROPE)], dim=-1
    )
    want, _ = reference.flash_attn(
        torch.cat([q_nope, q_pe], dim=-1).transpose(0, 1)[None].double(),
        keys[None].double(),
        torch.einsum("hvc,jc->hjv", up_v, c)[None].double(),
        scale=scale,
        return_lse=True,
    )
    torch.testing.assert_close(out.double(), want[0].transpose(0, 1), rtol=1e-3, atol=1e-3)


def test_the_cost_counts_a_latent_row_once(device):
    """explain counts the bytes of shared rows once, and the FLOPs of both products."""
    q = torch.zeros(1, 16, WIDE, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(4, 64, 1, WIDE, dtype=torch.bfloat16, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([256], dtype=torch.int32, device=device)

    def cost(v):
        return json.loads(ops.explain_paged_attn(q, cache, v, table, lens))

    view, copy = cost(cache[..., :LATENT]), cost(cache[..., :LATENT].contiguous())
    assert copy["bytes"] - view["bytes"] == 256 * LATENT * 2
    assert view["flops"] == copy["flops"] == 2 * 256 * 16 * (WIDE + LATENT)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rotary_rows_as_wide_as_a_latent(dtype, device):
    """rope_kv_write takes rows as wide as kv_cache_write does."""
    gen = generator("wide rope", dtype)
    q, k, v = (randn(gen, 3, heads, WIDE, dtype=dtype, device=device) for heads in (2, 1, 1))
    angles = torch.randn(9, ROPE // 2, generator=gen, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(wide).to(device), angles.sin().to(wide).to(device)
    at, slots = torch.tensor([4, 0, 8], device=device), torch.tensor([5, 2, 0], device=device)

    def written(run, of):
        caches = [torch.zeros(2, 4, 1, WIDE, dtype=of, device=device) for _ in range(2)]
        rows = (x.to(of) for x in (q, k, v))
        tables = (x.to(torch.promote_types(of, torch.float32)) for x in (cos, sin))
        return run(*rows, *tables, at, *caches, slots), *caches

    # a number of at most |x1| + |x2|, below 16, rounded once
    bound = 16 * torch.finfo(dtype).eps
    for got, want in zip(
        written(torch_gpukern.rope_kv_write, dtype),
        written(reference.rope_kv_write, torch.float64),
        strict=True,
    ):
        assert (got.double() - want).abs().max() <= bound
