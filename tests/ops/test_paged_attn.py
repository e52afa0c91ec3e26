# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn, kv_cache_write and attn_merge."""

import json
import math
from functools import partial

import pytest
import torch
from attention_cases import Paged, check_paged, logit_dtype, paged_modifiers, torch_attn
from conftest import (
    FLOATS,
    HEAD_DIMS,
    assert_close_as,
    f64,
    far_apart,
    generator,
    grid,
    guarded,
    ops,
    randn,
    reference,
    same_bits,
    snapshot,
    strided,
    torch_gpukern,
    yard_dtype,
)

HEADS = ((1, 1), (4, 2), (8, 1), (6, 2), (8, 2), (3, 3))  # heads_q, heads_kv
DIM_PAIRS = tuple((d, d) for d in HEAD_DIMS) + (
    (64, 32),
    (32, 64),
    (192, 128),
    (8, 512),
    (512, 8),
    (576, 512),
    (7, 80),
)
BLOCK_SIZES = (1, 3, 8, 16, 64, 256)

# Context lengths and query tokens of each sequence.
BATCHES = {
    "decode": ([1, 15, 16, 17, 130], [1, 1, 1, 1, 1]),
    "decode_long": ([2500, 700], [1, 1]),
    "decode_one": ([33], [1]),
    "inactive": ([0, 40, 0, 7], [1, 1, 1, 1]),
    "speculative": ([4, 70, 129], [4, 4, 4]),
    "prefill": ([65, 31], [65, 31]),
    "mixed": ([1, 200, 64, 0, 33], [1, 17, 64, 0, 2]),
    "chunk": ([300, 90], [128, 33]),
}

MODIFIERS = (
    "none",
    "full",
    "scale",
    "window",
    "window_zero",
    "softcap",
    "alibi",
    "alibi_batch",
    "sinks",
    "sinks_off",
    "scales",
    "scales_head",
    "all",
)
# later ones, which tests sample by themselves
MORE_MODIFIERS = ("sinks_own", "kv_start", "kv_start_window")


def make(gen, batch, heads, dims, block_size, dtype, device, order="NHD", **kwargs):
    return Paged(gen, *BATCHES[batch], *heads, *dims, block_size, dtype, device, order, **kwargs)


def call(case, ragged=True, fn=None, **kwargs):
    """paged_attn_fwd of a case. With `ragged` it passes cu_seqlens_q; otherwise all sequences have
    the same number of tokens."""
    fn = ops.paged_attn_fwd if fn is None else fn
    if ragged:
        kwargs.update(cu_seqlens_q=case.cu_seqlens_q, max_seqlen_q=max(case.queries))
    return fn(*case.args(), **kwargs)


def even(name):
    return len(set(BATCHES[name][1])) == 1


# --------------------------------------------------------------------------------------------------
# paged_attn


@pytest.mark.parametrize(
    "case",
    grid(
        96,
        mods=MODIFIERS,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=HEADS,
        block_size=BLOCK_SIZES,
        dims=((64, 64), (32, 48), (80, 80)),
        order=("NHD", "HND", "padded", "shared"),
    )
    + grid(
        32,
        mods=MORE_MODIFIERS,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=HEADS,
        block_size=BLOCK_SIZES,
        dims=((64, 64), (32, 48), (128, 128)),
        order=("NHD", "HND"),
    ),
)
def test_forward(case, device):
    gen = generator("paged", case.id)
    paged = make(
        gen, case.batch, case.heads, case.dims, case.block_size, case.dtype, device, case.order
    )
    kwargs = paged_modifiers(case.mods, len(paged.lengths), case.heads, gen, case.dtype, device)
    unchanged = snapshot(*paged.args(), **kwargs)
    out, lse = call(paged, **kwargs)
    unchanged()
    check_paged(paged, out, lse, kwargs)
    assert same_bits(call(paged, fn=ops.paged_attn, **kwargs), out)  # where lse is not wanted
    if even(case.batch):
        for x, y in zip(call(paged, ragged=False, **kwargs), (out, lse)):
            assert same_bits(x, y)
        assert same_bits(call(paged, ragged=False, fn=ops.paged_attn, **kwargs), out)


@pytest.mark.parametrize(
    "case",
    grid(
        44,
        dims=DIM_PAIRS,
        dtype=FLOATS,
        batch=("decode", "mixed"),
        mods=("none", "all"),
        heads=((4, 2), (3, 3), (8, 1)),
        block_size=(16, 5),
    ),
)
def test_head_dims(case, device):
    if device == "cuda" and any(d % 8 for d in case.dims):
        pytest.skip("CUDA serves multiples of 8 up to 576")
    gen = generator("paged dims", case.id)
    paged = make(gen, case.batch, case.heads, case.dims, case.block_size, case.dtype, device)
    kwargs = paged_modifiers(case.mods, len(paged.lengths), case.heads, gen, case.dtype, device)
    check_paged(paged, *call(paged, **kwargs), kwargs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("softcap", (1e4, 1e6, 1e8))
def test_large_softcaps(softcap, dtype, device):
    """Softcaps far above the scores. tanh must be precise near 0 to preserve the scores."""
    paged = make(generator("large softcap", dtype), "mixed", (4, 2), (64, 64), 16, dtype, device)
    kwargs = dict(softcap=softcap, scale=0.5)
    check_paged(paged, *call(paged, **kwargs), kwargs)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("block_size", (1, 16, 48))
def test_every_context_length(dtype, block_size, device):
    """Context lengths around pages, tiles and the chunks into which a long context is split."""
    gen = generator("contexts", dtype, block_size)
    q = torch.zeros(1, 4, 32, dtype=dtype, device=device)
    cache = torch.zeros(512, 16, 2, 32, dtype=dtype, device=device)
    table = torch.arange(512, dtype=torch.int32, device=device)[None]
    row = json.loads(
        ops.explain_paged_attn(
            q, cache, cache, table, torch.tensor([8192], dtype=torch.int32, device=device)
        )
    )
    sizes = {n for n in row["tile"] if 1 < n <= 1024} | {block_size, 64, 128, 512}
    lengths = sorted({max(n + e, 1) for n in sizes for e in (-1, 0, 1)})
    paged = Paged(gen, lengths, [1] * len(lengths), 4, 2, 32, 32, block_size, dtype, device)
    check_paged(paged, *call(paged, ragged=False), {})


def test_pages_left_of_the_window_may_hold_anything(device):
    """Their table entries are not read, so they may be -1."""
    gen = generator("window pages")
    for dtype in (torch.float32, torch.bfloat16):
        paged = Paged(gen, [300, 65, 40], [1, 3, 1], 4, 2, 32, 32, 16, dtype, device)
        window = 37
        kwargs = dict(window_left=window)
        expected = call(paged, **kwargs)
        for b, (length, n) in enumerate(zip(paged.lengths, paged.queries)):
            first = max(length - n - window, 0)  # the first key that the earliest query sees
            for page in range(first // 16):
                paged.k_cache[paged.block_table[b, page]] = math.nan
                paged.v_cache[paged.block_table[b, page]] = math.inf
                paged.block_table[b, page] = -1
        for x, y in zip(call(paged, **kwargs), expected):
            assert same_bits(x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", ([1, 1, 1, 1], [40, 3, 17, 1]), ids=("decode", "prefill"))
def test_pages_left_of_kv_start_may_hold_anything(queries, dtype, device):
    """Table entries of pages before kv_start may be -1, and out is attention over the other
    keys."""
    gen = generator("kv_start pages", queries, dtype)
    lengths, starts = [300, 65, 40, 2500], [37, 64, 30, 2000]
    paged = Paged(gen, lengths, queries, 4, 2, 32, 32, 16, dtype, device)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    expected = call(paged, kv_start=start)
    check_paged(paged, *expected, dict(kv_start=start))
    for b, first in enumerate(starts):
        for page in range(first // 16):
            paged.k_cache[paged.block_table[b, page]] = math.nan
            paged.v_cache[paged.block_table[b, page]] = math.inf
            paged.block_table[b, page] = -1
        if first % 16:
            paged.k_cache[paged.block_table[b, first // 16], : first % 16] = math.nan
            paged.v_cache[paged.block_table[b, first // 16], : first % 16] = math.nan
    for x, y in zip(call(paged, kv_start=start), expected):
        assert same_bits(x, y)


def test_kv_start_beyond_the_keys_leaves_none(device):
    paged = Paged(
        generator("kv_start beyond"), [30, 20], [1, 1], 4, 2, 32, 32, 16, torch.bfloat16, device
    )
    start = torch.tensor([30, -5], dtype=torch.int32, device=device)
    out, lse = call(paged, ragged=False, kv_start=start)
    plain_out, plain_lse = call(paged, ragged=False)
    assert not out[0].count_nonzero() and (lse[0] == -math.inf).all()
    assert same_bits(out[1], plain_out[1]) and same_bits(lse[1], plain_lse[1])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("batch", ("decode_long", "chunk"))
def test_sinks_in_the_dtype_of_q(batch, dtype, device):
    """Results have the bits of the same sinks in float32."""
    gen = generator("paged own sinks", batch, dtype)
    paged = make(gen, batch, (8, 2), (64, 64), 16, dtype, device)
    sinks = randn(gen, 8, dtype=dtype, device=device)
    sinks[::3] = -math.inf
    for x, y in zip(call(paged, sinks=sinks), call(paged, sinks=sinks.float())):
        assert same_bits(x, y)


def test_shared_pages(device):
    """Two sequences with a shared prefix, and a page that occurs twice in a sequence."""
    gen = generator("shared")
    paged = Paged(gen, [64, 64], [1, 1], 4, 2, 16, 16, 16, torch.float32, device)
    apart = call(paged, ragged=False)
    for page in range(3):
        paged.k_cache[paged.block_table[1, page]] = paged.k_cache[paged.block_table[0, page]]
        paged.v_cache[paged.block_table[1, page]] = paged.v_cache[paged.block_table[0, page]]
    copied = call(paged, ragged=False)
    paged.block_table[1, :3] = paged.block_table[0, :3]
    for x, y, z in zip(call(paged, ragged=False), copied, apart):
        assert same_bits(x, y) and not torch.equal(x, z)
    paged.block_table[0, 1] = paged.block_table[0, 0]
    paged.keys[0][16:32], paged.values[0][16:32] = paged.keys[0][:16], paged.values[0][:16]
    paged.keys[1][:16], paged.values[1][:16] = paged.keys[0][:16], paged.values[0][:16]
    paged.keys[1][16:32] = paged.k_cache[paged.block_table[1, 1]].cpu()
    paged.values[1][16:32] = paged.v_cache[paged.block_table[1, 1]].cpu()
    paged.keys[1][32:48] = paged.keys[0][32:48]
    paged.values[1][32:48] = paged.values[0][32:48]
    check_paged(paged, *call(paged, ragged=False), {})


def test_page_order_does_not_matter(device):
    """Other pages and another page size give the same bits."""
    gen = generator("order")
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for block_size, seed in ((16, 1), (16, 2), (4, 3), (256, 4)):
            paged = Paged(
                generator("same values"), [300, 77], [1, 1], 4, 2, 32, 32, block_size, dtype, device
            )
            pages = torch.randperm(paged.k_cache.shape[0], generator=generator(seed))
            moved = pages.argsort()
            paged.k_cache, paged.v_cache = paged.k_cache[pages], paged.v_cache[pages]
            used = paged.block_table < paged.k_cache.shape[0]
            table = paged.block_table.clamp(0, paged.k_cache.shape[0] - 1).long().cpu()
            paged.block_table = torch.where(
                used, moved[table].to(device).to(torch.int32), paged.block_table
            )
            paged.q = randn(generator("q"), 2, 4, 32, dtype=dtype, device=device)
            for b in range(2):  # the inputs must not depend on the page size
                n = paged.lengths[b]
                k, v = (randn(generator("kv", b, x), n, 2, 32, dtype=dtype) for x in "kv")
                for t in range(n):
                    page = paged.block_table[b, t // block_size]
                    paged.k_cache[page, t % block_size], paged.v_cache[page, t % block_size] = (
                        k[t],
                        v[t],
                    )
            results.append(call(paged, ragged=False))
        for other in results[1:2]:
            assert same_bits(other[0], results[0][0]) and same_bits(other[1], results[0][1])
        for other in results[2:]:
            assert torch.allclose(
                other[0].float(),
                results[0][0].float(),
                atol=2e-2 if dtype != torch.float32 else 1e-5,
            )
    assert gen is not None


def test_contiguous_cache_is_one_page_per_sequence(device):
    """A dense cache [B, Hkv, S, D] can be used as a view with one page of S rows per sequence."""
    gen = generator("dense cache")
    k, v = (randn(gen, 3, 2, 50, 16, device=device) for _ in range(2))
    q = randn(gen, 3, 4, 16, device=device)
    lens = torch.tensor([50, 7, 31], dtype=torch.int32, device=device)
    table = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    got = ops.paged_attn(q, k.transpose(1, 2), v.transpose(1, 2), table, lens)
    ref = reference.flash_attn(*f64((q[:, :, None], k, v)), kv_end=lens)[:, :, 0]
    yard = torch_attn(q[:, :, None], k, v, kv_end=lens)[:, :, 0]
    assert_close_as(yard, got, ref)


def test_agrees_with_flash_attn(device):
    """Prefill through pages equals causal flash_attn over the same keys."""
    gen = generator("prefill")
    paged = Paged(gen, [70], [70], 4, 2, 32, 32, 16, torch.float32, device)
    dense = [
        t.transpose(0, 1)[None].to(device) for t in (paged.q.cpu(), paged.keys[0], paged.values[0])
    ]
    flash = ops.flash_attn(*dense, is_causal=True)[0].transpose(0, 1)
    ref = reference.flash_attn(*f64(dense), is_causal=True)[0].transpose(0, 1)
    assert_close_as(flash, call(paged)[0], ref)


def test_strided_inputs(device):
    gen = generator("paged strided")
    for dtype in (torch.float32, torch.bfloat16):
        paged = make(gen, "mixed", (4, 2), (16, 16), 8, dtype, device)
        expected = call(paged)
        every = lambda t: torch.stack([t, t * 0 + 99], -1).flatten(-2)[..., ::2]  # noqa: E731
        qkv = paged.q
        fused = torch.full((qkv.shape[0], 8, 16), math.nan, dtype=dtype, device=device)
        fused[:, :4] = qkv
        paged.q = fused[:, :4]
        paged.block_table, paged.seq_lens = every(paged.block_table), every(paged.seq_lens)
        paged.cu_seqlens_q = every(paged.cu_seqlens_q)
        for x, y in zip(call(paged), expected):
            assert same_bits(x, y)
        paged.q = strided(qkv, step=2)
        for x, y in zip(call(paged), expected):
            assert same_bits(x, y)
        row = paged.block_table[4:5].clone()
        paged.block_table = row.expand(5, -1)  # one table row for all sequences
        lens = torch.tensor([33], dtype=torch.int32, device=device).expand(5)
        q = qkv[:5]
        got = ops.paged_attn(q, paged.k_cache, paged.v_cache, paged.block_table, lens)
        want = ops.paged_attn(
            q, paged.k_cache, paged.v_cache, paged.block_table.contiguous(), lens.contiguous()
        )
        assert same_bits(got, want)


def test_expanded_cache(device):
    """A cache with stride 0: all heads are the same."""
    gen = generator("paged expanded")
    k = randn(gen, 4, 8, 1, 16, device=device)
    q = randn(gen, 1, 4, 16, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([30], dtype=torch.int32, device=device)
    got = ops.paged_attn(q, k.expand(4, 8, 2, 16), k.expand(4, 8, 2, 16), table, lens)
    wide = k.expand(4, 8, 2, 16).contiguous()
    assert same_bits(got, ops.paged_attn(q, wide, wide, table, lens))


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_far_strides(dim):
    """A cache of more than 2**31 elements between pages, rows or heads."""
    gen = generator("paged far", dim)
    k, v = (
        randn(gen, 3, 2, 2, 4, dtype=torch.bfloat16),
        randn(gen, 3, 2, 2, 4, dtype=torch.bfloat16),
    )
    q = randn(gen, 1, 4, 4, dtype=torch.bfloat16)
    table, lens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    expected = ops.paged_attn(q, k, v, table, lens)
    far_k, far_v = far_apart(k, dim), far_apart(v, dim)
    assert same_bits(ops.paged_attn(q, far_k, far_v, table, lens), expected)
    new_k, new_v = (
        randn(gen, 1, 2, 4, dtype=torch.bfloat16),
        randn(gen, 1, 2, 4, dtype=torch.bfloat16),
    )
    ops.kv_cache_write(new_k, new_v, far_k, far_v, torch.tensor([5]))
    assert same_bits(far_k[2, 1], new_k[0]) and same_bits(far_v[2, 1], new_v[0])
    assert same_bits(far_k[:2].clone(), k[:2])


def test_more_than_65536_pages(device):
    gen = generator("many pages")
    k, v = (torch.zeros(70_001, 1, 1, 8, device=device) for _ in range(2))
    pages = torch.tensor([[70_000, 65_536, 3, 65_535]], dtype=torch.int32, device=device)
    k[pages[0].long()], v[pages[0].long()] = (
        randn(gen, 4, 1, 1, 8, device=device) for _ in range(2)
    )
    q, lens = (
        randn(gen, 1, 1, 8, device=device),
        torch.tensor([4], dtype=torch.int32, device=device),
    )
    small = torch.arange(4, dtype=torch.int32, device=device)[None]
    picked = pages[0].long()
    assert same_bits(
        ops.paged_attn(q, k, v, pages, lens), ops.paged_attn(q, k[picked], v[picked], small, lens)
    )


def test_inactive_rows_and_empty_batches(device):
    gen = generator("inactive")
    paged = make(gen, "inactive", (4, 2), (16, 16), 8, torch.float32, device)
    out, lse = call(paged, ragged=False)
    for b in (0, 2):
        assert torch.equal(out[b], torch.zeros_like(out[b])) and (lse[b] == -math.inf).all()
    sinks = randn(gen, 4, device=device)
    out, lse = call(paged, ragged=False, sinks=sinks)
    for b in (0, 2):
        assert torch.equal(out[b], torch.zeros_like(out[b])) and torch.allclose(
            lse[b], sinks, rtol=1e-6
        )
    none = torch.zeros(0, dtype=torch.int32, device=device)
    cache = torch.zeros(3, 8, 2, 16, device=device)
    q = torch.zeros(0, 4, 16, device=device)
    assert ops.paged_attn(q, cache, cache, none.view(0, 5), none).shape == (0, 4, 16)
    zero = torch.zeros(2, dtype=torch.int32, device=device)
    empty_cache = torch.zeros(0, 8, 2, 16, device=device)
    q = torch.ones(2, 4, 16, device=device)
    out, lse = ops.paged_attn_fwd(q, empty_cache, empty_cache, zero.view(2, 1), zero)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()
    out, lse = ops.paged_attn_fwd(q, cache, cache, zero.view(2, 1)[:, :0], zero)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()


def test_tokens_of_no_sequence(device):
    """Rows of q at or after cu_seqlens_q[B] give out 0, lse -inf."""
    gen = generator("slack")
    paged = make(gen, "mixed", (4, 2), (16, 16), 8, torch.float32, device)
    expected = call(paged)
    used = paged.q.shape[0]
    paged.q = torch.cat([paged.q, torch.full((3, 4, 16), math.nan, device=device)])
    out, lse = call(paged)
    assert same_bits(out[:used], expected[0]) and same_bits(lse[:used], expected[1])
    assert torch.equal(out[used:], torch.zeros_like(out[used:])) and (lse[used:] == -math.inf).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_pages_of_a_sequence_without_queries_may_hold_anything(dtype, device):
    """Its row of the table is not read, whatever its length, so it may be -1."""
    paged = Paged(
        generator("no queries"), [81, 155, 300, 0], [0, 2, 0, 1], 8, 1, 128, 128, 16, dtype, device
    )
    expected = call(paged)
    check_paged(paged, *expected, {})
    for b in (0, 2):
        pages = paged.block_table[b, : -(-paged.lengths[b] // 16)].long()
        paged.k_cache[pages], paged.v_cache[pages] = math.nan, math.inf
        paged.block_table[b] = -1
    for x, y in zip(call(paged), expected):
        assert same_bits(x, y)
    torch_gpukern.check_errors()


def test_max_seqlen_q_is_an_upper_bound_and_unread_without_lengths(device):
    gen = generator("bound")
    paged = make(gen, "speculative", (4, 2), (16, 16), 8, torch.float32, device)
    expected = call(paged)[0]
    assert same_bits(
        ops.paged_attn(*paged.args(), cu_seqlens_q=paged.cu_seqlens_q, max_seqlen_q=1000), expected
    )
    assert same_bits(ops.paged_attn(*paged.args(), max_seqlen_q=0), expected)


def test_public_function(device):
    gen = generator("paged public")
    paged = make(gen, "decode", (4, 2), (16, 16), 8, torch.float32, device)
    kwargs = paged_modifiers("all", 5, (4, 2), gen, torch.float32, device)
    out, lse = torch_gpukern.paged_attn(*paged.args(), return_lse=True, **kwargs)
    raw_out, raw_lse = ops.paged_attn_fwd(*paged.args(), **kwargs)
    assert same_bits(out, raw_out) and same_bits(lse, raw_lse)
    assert same_bits(torch_gpukern.paged_attn(*paged.args(), **kwargs), out)
    assert same_bits(ops.paged_attn(*paged.args(), **kwargs), out)


def test_backward_is_refused(device):
    gen = generator("paged grad")
    paged = make(gen, "decode", (4, 2), (16, 16), 8, torch.float32, device)
    q = paged.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="gpukern::paged_attn"):
        ops.paged_attn(q, *paged.args()[1:]).sum().backward()
    with pytest.raises(NotImplementedError, match="gpukern::paged_attn"):
        torch_gpukern.paged_attn(q, *paged.args()[1:], return_lse=True)[1].sum().backward()
    with torch.no_grad():
        assert same_bits(
            ops.paged_attn(q, *paged.args()[1:]), ops.paged_attn(q.detach(), *paged.args()[1:])
        )
    k = torch.ones(1, 2, 16, device=device, requires_grad=True)
    caches = [torch.zeros(2, 8, 2, 16, device=device) for _ in range(2)]
    with pytest.raises(NotImplementedError, match="gpukern::kv_cache_write"):
        ops.kv_cache_write(k, k.detach(), *caches, torch.tensor([3], device=device))
        (caches[0].sum() + caches[1].sum()).backward()


# --------------------------------------------------------------------------------------------------
# kv_cache_write


@pytest.mark.parametrize(
    "case",
    grid(
        40,
        dtype=FLOATS,
        slots=(torch.int32, torch.int64),
        dims=((16, 16), (7, 80), (128, 64)),
        order=("NHD", "HND", "padded", "interleaved"),
        block_size=(1, 4, 16),
        layout=("dense", "transposed", "every_second"),
        scale=(None, "one", "head"),
    ),
)
def test_write(case, device):
    """Every written row has the right bits, and nothing else changes, not even around the
    caches."""
    gen = generator("write", case.id)
    tokens, heads, blocks = 11, 3, 6
    (d, dv), rows = case.dims, blocks * case.block_size
    k, v = (randn(gen, tokens, heads, n, dtype=case.dtype, device=device) for n in case.dims)
    count = min(tokens, rows)
    slots = torch.full((tokens,), -1, dtype=case.slots)
    slots[:count] = torch.randperm(rows, generator=gen)[:count]
    slots[2] = -7
    slots = slots.to(device)
    caches = [
        randn(gen, blocks, case.block_size, heads, n, dtype=case.dtype, device=device)
        for n in case.dims
    ]
    checks = []
    if case.order == "HND":
        caches = [strided(c, (0, 2, 1, 3)) for c in caches]
    elif case.order == "padded":
        caches = [strided(c, pad=3) for c in caches]
    elif case.order == "interleaved":
        both = torch.full(
            (blocks, 2, case.block_size, heads, max(d, dv)),
            math.nan,
            dtype=case.dtype,
            device=device,
        )
        both[:, 0, ..., :d], both[:, 1, ..., :dv] = caches
        caches = [both[:, 0, ..., :d], both[:, 1, ..., :dv]]
    else:
        caches, checks = zip(*(guarded(c) for c in caches))
    expected = [c.clone() for c in caches]
    kwargs = {}
    if case.scale is not None:
        n = (heads,) if case.scale == "head" else ()
        kwargs = {
            s: (torch.rand(n, generator=gen) + 0.5).to(logit_dtype(case.dtype)).to(device)
            for s in ("k_scale", "v_scale")
        }
    if case.layout == "transposed":
        k, v = strided(k, (1, 0, 2)), strided(v, (2, 1, 0))
    elif case.layout == "every_second":
        k, v = strided(k, step=2), strided(v, step=2)
        slots = torch.stack([slots, slots + 3], 1)[:, 0]
    unchanged = snapshot(k, v, slots, **kwargs)
    assert ops.kv_cache_write(k, v, *caches, slots, **kwargs) is None
    unchanged()
    for x, cache, scale in zip((k, v), expected, (kwargs.get("k_scale"), kwargs.get("v_scale"))):
        if scale is not None:
            wide = torch.float64 if case.dtype == torch.float64 else torch.float32
            x = (x.to(wide) / scale[..., None]).to(case.dtype)
        for t, s in enumerate(slots.tolist()):
            if s >= 0:
                cache[s // case.block_size, s % case.block_size] = x[t]
    for cache, want in zip(caches, expected):
        assert same_bits(cache, want)
    for check_band in checks:
        check_band()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_write_saturates(dtype, device):
    """k / k_scale beyond the cache's range is stored as the largest finite value."""
    largest = torch.finfo(dtype).max
    k = torch.tensor([largest, -largest, 1.0, largest / 4], dtype=dtype, device=device).view(
        1, 1, 4
    )
    caches = [torch.zeros(1, 2, 1, 4, dtype=dtype, device=device) for _ in range(2)]
    scale = torch.tensor(0.25, device=device)
    ops.kv_cache_write(k, k, *caches, torch.tensor([1], device=device), scale, scale)
    assert caches[0][0, 1, 0].tolist() == [largest, -largest, 4.0, largest]
    assert not caches[0][0, 0].any()


def test_write_rounds_to_nearest_even(device):
    """x / scale in float32, then one rounding."""
    gen = generator("rounding")
    for dtype in (torch.bfloat16, torch.float16):
        k = randn(gen, 64, 2, 40, dtype=dtype, device=device)
        caches = [torch.zeros(8, 8, 2, 40, dtype=dtype, device=device) for _ in range(2)]
        scale = torch.tensor([0.3, 1.7], device=device)
        ops.kv_cache_write(k, k, *caches, torch.arange(64, device=device), scale, None)
        assert same_bits(caches[0].view(64, 2, 40), (k.float() / scale[:, None]).to(dtype))
        assert same_bits(caches[1].view(64, 2, 40), k)


def test_write_keeps_nan_and_inf(device):
    k = torch.tensor([math.nan, math.inf, -math.inf, -0.0], device=device).view(1, 1, 4)
    caches = [torch.zeros(1, 1, 1, 4, device=device) for _ in range(2)]
    ops.kv_cache_write(k, k, *caches, torch.tensor([0], device=device))
    assert same_bits(caches[0].view(1, 1, 4), k)


def test_write_then_read(device):
    """Tokens written one by one give the result of one dense call."""
    gen = generator("write read")
    length, block_size = 21, 4
    k, v = (randn(gen, length, 2, 16, device=device) for _ in range(2))
    q = randn(gen, length, 4, 16, device=device)
    caches = [torch.full((9, block_size, 2, 16), math.nan, device=device) for _ in range(2)]
    table = torch.randperm(9, generator=gen)[:6].to(torch.int32)[None]
    outs = []
    for t in range(length):
        slot = int(table[0, t // block_size]) * block_size + t % block_size
        ops.kv_cache_write(k[t : t + 1], v[t : t + 1], *caches, torch.tensor([slot], device=device))
        lens = torch.tensor([t + 1], dtype=torch.int32, device=device)
        outs.append(ops.paged_attn(q[t : t + 1], *caches, table.to(device), lens))
    dense = [t.transpose(0, 1)[None] for t in (q, k, v)]
    ref = reference.flash_attn(*f64(dense), is_causal=True)[0].transpose(0, 1)
    yard = torch_attn(*dense, is_causal=True)[0].transpose(0, 1)
    assert_close_as(yard, torch.cat(outs), ref)


def test_write_nothing(device):
    caches = [torch.ones(2, 4, 2, 8, device=device) for _ in range(2)]
    unchanged = snapshot(*caches)
    none = torch.zeros(0, 2, 8, device=device)
    ops.kv_cache_write(none, none, *caches, torch.zeros(0, dtype=torch.int64, device=device))
    k = torch.zeros(3, 2, 8, device=device)
    ops.kv_cache_write(k, k, *caches, torch.full((3,), -1, device=device))
    empty = torch.zeros(0, 4, 2, 8, device=device)
    ops.kv_cache_write(k, k, empty, empty.clone(), torch.full((3,), -1, device=device))
    unchanged()


def shifts(rows):
    """Writes from views of a pool [rows, 2, heads, d] into the pool: name -> a function from the
    pool to (k, v, slots)."""
    order = torch.randperm(rows, generator=generator("shifts", rows))
    return {
        "reversed": lambda k, v: (k, v, torch.arange(rows).flip(0)),
        "rotated": lambda k, v: (k, v, torch.arange(rows).roll(1)),
        "permuted": lambda k, v: (k, v, order),
        "one down": lambda k, v: (k[:-1], v[:-1], torch.arange(1, rows)),
        "one up": lambda k, v: (k[1:], v[1:], torch.arange(rows - 1)),
        "k and v exchanged": lambda k, v: (v, k, torch.arange(rows)),
        "one head for both": lambda k, v: (
            k[:, :1].expand(-1, 2, -1),
            v[:, 1:].expand(-1, 2, -1),
            order,
        ),
        "disjoint rows": lambda k, v: (k[:3], v[:3], torch.arange(rows - 3, rows)),
        "only v": lambda k, v: (k + 1, v, order),
        "lanes as tokens": lambda k, v: (k[:16].transpose(0, 2), v[:16], torch.arange(16)),
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", shifts(24))
def test_write_from_views_of_the_caches(name, dtype, device):
    """All of k and v is read before anything is written."""
    pool = randn(generator("aliases"), 6, 4, 2, 2, 16, dtype=dtype, device=device)
    k_cache, v_cache = pool[:, :, 0], pool[:, :, 1]
    k, v, slots = shifts(24)[name](*pool.view(24, 2, 2, 16).unbind(1))
    assert name == "only v" or k.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    want = pool.clone()
    reference.kv_cache_write(k.clone(), v.clone(), want[:, :, 0], want[:, :, 1], slots.to(device))
    ops.kv_cache_write(k, v, k_cache, v_cache, slots.to(device))
    assert same_bits(pool, want)


def test_a_write_between_disjoint_rows_copies_nothing():
    """On the CPU, slots can be read, so no copy is needed if k and v are other rows of the caches
    or other parts of their tensor."""
    pool = randn(generator("no copy"), 40, 2, 2, 512)
    caches = pool[8:, 0].view(8, 4, 2, 512), pool[8:, 1].view(8, 4, 2, 512)
    rows = [c.flatten(0, 1) for c in caches]
    for k, v, slots in (
        (pool[:8, 0], pool[:8, 1], torch.arange(8)),
        (rows[0][:8], rows[1][:8], torch.arange(8, 16)),
        (rows[0][:8], rows[1][:8], torch.tensor([9, -1, 30, 8, -1, 10, 29, 31], dtype=torch.int32)),
    ):
        taken = slots >= 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            ops.kv_cache_write(k, v, *caches, slots)
        assert not [e.key for e in seen.key_averages() if e.key.startswith("aten::")]
        assert torch.equal(rows[0][slots[taken].long()], k[taken])
        assert torch.equal(rows[1][slots[taken].long()], v[taken])


def test_slots_and_scales_must_not_lie_in_the_caches(device):
    k_cache, v_cache = (torch.zeros(2, 4, 1, 8, device=device) for _ in range(2))
    k, slots = torch.ones(2, 1, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    inside = v_cache.view(-1)
    text = "gpukern::kv_cache_write: {} shares memory with v_cache; it must not, since v_cache is written"
    for name, change in (
        ("slots", dict(slots=inside.view(torch.int64)[:2])),
        ("k_scale", dict(k_scale=inside[3])),
        ("v_scale", dict(v_scale=inside[5:6])),
    ):
        with pytest.raises(ValueError) as caught:
            ops.kv_cache_write(
                **dict(k=k, v=k, k_cache=k_cache, v_cache=v_cache, slots=slots) | change
            )
        assert str(caught.value) == text.format(name)
    assert not v_cache.any()
    # k and v may lie between the elements of a cache, whatever their sizes
    pool = torch.zeros(2, 4, 1, 32, device=device)
    apart = pool.view(-1).view(torch.int64)[12:109:96]
    apart.copy_(torch.tensor([0, -1]))
    ops.kv_cache_write(k, k, k_cache, pool[..., :8], apart, v_scale=pool[0, 0, 0, 31].fill_(0.5))
    assert (pool[0, 0, 0, :8] == 2).all() and k_cache[0, 0].eq(1).all()
    with pytest.raises(ValueError, match="slots shares memory with v_cache"):
        ops.kv_cache_write(k, k, k_cache, pool[..., :8], pool.view(-1).view(torch.int64)[15:33:17])


# --------------------------------------------------------------------------------------------------
# attn_merge


def sides(gen, shape, dtype, device, std=3.0):
    """out_a, lse_a, out_b, lse_b with out [*shape] and lse [*shape[:-1]]."""
    out_a, out_b = (randn(gen, *shape, dtype=dtype, device=device) for _ in range(2))
    lse_a, lse_b = (
        randn(gen, *shape[:-1], dtype=logit_dtype(dtype), device=device, std=std) for _ in range(2)
    )
    return out_a, lse_a, out_b, lse_b


def torch_merge(out_a, lse_a, out_b, lse_b):
    """attn_merge by PyTorch's ops in the same dtypes."""
    lse = torch.logaddexp(lse_a, lse_b)
    w_a, w_b = ((x - lse).exp()[..., None] for x in (lse_a, lse_b))
    return (w_a * out_a + w_b * out_b).to(out_a.dtype), lse


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 33, 64), (70, 3, 80), (5, 1, 1), (2, 1, 1, 511), (0, 4, 8), (3, 0, 2, 8)],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ("dense", "strided"))
def test_merge(shape, dtype, layout, device):
    gen = generator("merge", shape, dtype)
    args = sides(gen, shape, dtype, device)
    if layout == "strided":
        reverse = tuple(reversed(range(len(shape) - 1)))
        args = (
            strided(args[0], step=2),
            strided(args[1], reverse),
            strided(args[2], pad=3),
            strided(args[3], step=3),
        )
    unchanged = snapshot(*args)
    out, lse = ops.attn_merge(*args)
    unchanged()
    assert (
        out.is_contiguous()
        and lse.is_contiguous()
        and out.dtype == dtype
        and lse.dtype == logit_dtype(dtype)
    )
    ref, ref_lse = reference.attn_merge(*f64(args))
    if dtype == torch.float64:
        yard, yard_lse = torch_merge(*(t.float() for t in args))
    else:
        yard, yard_lse = torch_merge(*args)
    assert_close_as(yard, out, ref)
    assert_close_as(yard_lse, lse, ref_lse, "lse")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_with_an_empty_side(dtype, device):
    """If lse is -inf on one side, the result has the bits of the other side, whatever the empty
    side's out is. If it is -inf on both, out is 0 and lse -inf."""
    gen = generator("merge empty", dtype)
    out_a, lse_a, out_b, lse_b = sides(gen, (4, 3, 16), dtype, device)
    lse_a[0], lse_b[1] = -math.inf, -math.inf
    lse_a[2], lse_b[2] = -math.inf, -math.inf
    out_a[0, 1], out_b[1, 1], out_a[2, 0] = math.nan, math.inf, math.nan
    out, lse = ops.attn_merge(out_a, lse_a, out_b, lse_b)
    assert same_bits(out[0], out_b[0]) and same_bits(lse[0], lse_b[0])
    assert same_bits(out[1], out_a[1]) and same_bits(lse[1], lse_a[1])
    assert torch.equal(out[2], torch.zeros_like(out[2])) and (lse[2] == -math.inf).all()
    assert out[3].isfinite().all()


def test_merge_far_apart(device):
    """exp(lse) would overflow; exp of the difference does not."""
    gen = generator("merge far")
    out_a, lse_a, out_b, lse_b = sides(gen, (3, 2, 8), torch.float32, device)
    lse_a += torch.tensor([500.0, -500.0, 1000.0], device=device)[:, None]
    lse_b += torch.tensor([500.0, 500.0, -1000.0], device=device)[:, None]
    out, lse = ops.attn_merge(out_a, lse_a, out_b, lse_b)
    ref, ref_lse = reference.attn_merge(*f64((out_a, lse_a, out_b, lse_b)))
    yard, yard_lse = torch_merge(out_a, lse_a, out_b, lse_b)
    assert_close_as(yard, out, ref)
    assert_close_as(yard_lse, lse, ref_lse, "lse")


def test_merge_of_parts_is_the_whole(device):
    """Merged attention over two halves of the keys, and its gradients, equal attention over all
    keys."""
    gen = generator("parts")
    tensors = dict(
        zip("qkv", (randn(gen, 2, 4, 20, 16), randn(gen, 2, 2, 50, 16), randn(gen, 2, 2, 50, 16)))
    )
    tensors = {n: t.to(device) for n, t in tensors.items()}
    grad = randn(gen, 2, 4, 20, 16, device=device)

    def halves(q, k, v):
        a = torch_gpukern.flash_attn(q, k[:, :, :30], v[:, :, :30], return_lse=True)
        b = torch_gpukern.flash_attn(q, k[:, :, 30:], v[:, :, 30:], return_lse=True)
        return ops.attn_merge(*a, *b)[0]

    results = []
    for run, dtype in (
        (halves, torch.float32),
        (torch_attn, torch.float32),
        (reference.flash_attn, torch.float64),
    ):
        leaves = {n: t.to(dtype).clone().requires_grad_() for n, t in tensors.items()}
        out = run(**leaves)
        out.backward(grad.to(dtype))
        results.append([out.detach(), *(t.grad for t in leaves.values())])
    for name, got, yard, ref in zip(("out", "dq", "dk", "dv"), *results):
        assert_close_as(yard, got, ref, name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_backward(dtype, device):
    gen = generator("merge backward", dtype)
    args = sides(gen, (6, 3, 24), dtype, device)
    grad, grad_lse = (
        randn(gen, 6, 3, 24, dtype=dtype, device=device),
        randn(gen, 6, 3, dtype=logit_dtype(dtype), device=device),
    )
    narrow = yard_dtype(dtype)
    results = []
    for run, tensors in (
        (ops.attn_merge, args),
        (torch_merge, [t.to(narrow) if t.dim() == 3 else t.float() for t in args]),
        (reference.attn_merge, f64(args)),
    ):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out, lse = run(*leaves)
        torch.autograd.backward((out, lse), (grad.to(out.dtype), grad_lse.to(lse.dtype)))
        results.append([t.grad for t in leaves])
    for name, t, got, yard, ref in zip(("out_a", "lse_a", "out_b", "lse_b"), args, *results):
        assert got.dtype == t.dtype
        assert_close_as(yard, got, ref, f"d{name}")


def test_merge_gradcheck(device, one_thread):
    gen = generator("merge gradcheck")
    args = [t.requires_grad_() for t in sides(gen, (3, 2, 4), torch.float64, device, std=1.0)]
    assert torch.autograd.gradcheck(ops.attn_merge, args)


def test_merge_gradients_of_an_empty_side(device):
    """-inf gives no NaN: the empty side's gradient is 0, and the other side gets the whole
    gradient."""
    gen = generator("merge empty grad")
    out_a, lse_a, out_b, lse_b = sides(gen, (3, 2, 8), torch.float32, device)
    lse_a[0], lse_b[1] = -math.inf, -math.inf
    lse_a[2], lse_b[2] = -math.inf, -math.inf
    leaves = [t.requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]
    out, lse = ops.attn_merge(*leaves)
    grad, grad_lse = randn(gen, 3, 2, 8, device=device), randn(gen, 3, 2, device=device)
    got = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    assert all(g.isfinite().all() for g in got)
    d_out_a, d_lse_a, d_out_b, d_lse_b = got
    assert (
        torch.equal(d_out_b[0], grad[0])
        and torch.equal(d_lse_b[0], grad_lse[0])
        and not d_out_a[0].any()
    )
    assert (
        torch.equal(d_out_a[1], grad[1])
        and torch.equal(d_lse_a[1], grad_lse[1])
        and not d_out_b[1].any()
    )
    assert not d_out_a[2].any() and not d_out_b[2].any()
    assert not d_lse_a[0].any() and not d_lse_b[1].any()


@pytest.mark.parametrize("bad", (math.inf, math.nan), ids=str)
def test_merge_gives_an_empty_side_nothing_whatever_arrives(bad, device):
    gen = generator("merge wild")
    out_a, lse_a, out_b, lse_b = (
        t.requires_grad_() for t in sides(gen, (2, 2, 8), torch.float32, device)
    )
    with torch.no_grad():
        lse_a[0], lse_a[1], lse_b[1] = -math.inf, -math.inf, -math.inf
    leaves = out_a, lse_a, out_b, lse_b
    out, lse = ops.attn_merge(*leaves)
    d_out_a, d_lse_a, d_out_b, d_lse_b = torch.autograd.grad(
        (out, lse), leaves, (torch.full_like(out, bad), torch.full_like(lse, bad))
    )
    assert not d_out_a.any() and not d_lse_a.any() and not d_out_b[1].any() and not d_lse_b[1].any()
    assert not d_out_b[0].isfinite().any()


def test_merge_far_strides():
    gen = generator("merge far")
    args = sides(gen, (3, 2, 4), torch.bfloat16, "cpu")
    expected = ops.attn_merge(*args)
    got = ops.attn_merge(far_apart(args[0], 0), args[1], far_apart(args[2], 1), args[3])
    assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1])


RIGHT = {
    "causal": {},
    "all": {"is_causal": False},
    "right": {"is_causal": False, "window_right": 2},
    "both": {"is_causal": False, "window_left": 3, "window_right": 1},
    "causal wins": {"window_right": 4},
    "diagonal": {"is_causal": False, "window_right": 0},
    "far": {"is_causal": False, "window_right": 2**40},
}


@pytest.mark.parametrize("rules", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("short", (False, True))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_to_the_right_and_short_lengths(dtype, short, rules, device):
    """Equals flash_attn_varlen over the keys in the pages, with few and many lanes, for sequences
    that are inactive or have fewer keys than queries."""
    right = rules.get("is_causal", True) or rules.get("window_right") == 0
    if device == "cuda" and short and not right:
        with pytest.raises(ValueError, match="allow_short on CUDA needs is_causal"):
            tokens, cache = (
                torch.ones(2, 2, 16, device=device),
                torch.ones(1, 4, 2, 16, device=device),
            )
            i32 = partial(torch.tensor, dtype=torch.int32, device=device)
            ops.paged_attn(tokens, cache, cache, i32([[0]]), i32([1]), **rules, allow_short=True)
        return
    gen = generator("right", dtype, short)
    for counts, lens in (
        ((3, 5, 2, 1), (2 if short else 9, 8, 0, 30)),
        ((40, 17), (21 if short else 50, 33)),
    ):
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (counts, lens))
        q, k, v = (
            randn(gen, sum(n), h, 16, dtype=dtype, device=device)
            for n, h in ((counts, 4), (lens, 2), (lens, 2))
        )
        pages = -(-max(lens) // 4)
        table = torch.randperm(len(lens) * pages, generator=gen).int().view(-1, pages)
        k_cache, v_cache = (
            torch.full((table.numel(), 4, 2, 16), math.nan, dtype=dtype, device=device)
            for _ in range(2)
        )
        for b, n in enumerate(lens):
            for j in range(n):
                k_cache[table[b, j // 4], j % 4], v_cache[table[b, j // 4], j % 4] = (
                    k[cu_k[b] + j],
                    v[cu_k[b] + j],
                )
        args = (
            q,
            k_cache,
            v_cache,
            table.to(device),
            torch.tensor(lens, dtype=torch.int32, device=device),
        )
        queries = {"cu_seqlens_q": cu_q, "max_seqlen_q": max(counts)}
        got = torch_gpukern.paged_attn(
            *args, **queries, **rules, allow_short=short, return_lse=True
        )
        lengths = cu_q, cu_k, max(counts), max(lens)

        def run(to, given=(q, k, v), lengths=lengths):
            return reference.flash_attn_varlen(
                *(x.to(to) for x in given),
                *lengths,
                **({"is_causal": True} | rules),
                return_lse=True,
            )

        for x, yard, ref in zip(got, run(yard_dtype(dtype)), run(torch.float64), strict=True):
            assert_close_as([yard], x, ref)
        if short and device == "cpu":
            with pytest.raises(IndexError, match="seq_lens is expected to count the query tokens"):
                ops.paged_attn(*args, **queries, **rules)


@pytest.mark.parametrize("tokens", (1, 40))
@pytest.mark.parametrize("scale", (1e20, -1e20))
@pytest.mark.parametrize("cache", (None, torch.float8_e4m3fn))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dim", (16, 24, 64))
def test_scales_whose_product_is_infinite(tokens, scale, cache, dtype, dim, device):
    """A score of zero codes is 0, and not 0 times inf. head_dim chooses the kernel."""
    q = torch.ones(tokens, 2, dim, device=device, dtype=dtype)
    k_cache = torch.zeros(4, 16, 2, dim, device=device).to(cache or dtype)
    v_cache = torch.ones(4, 16, 2, dim, device=device).to(cache or dtype)
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    lens = torch.tensor([64], dtype=torch.int32, device=device)
    more = {}
    if tokens > 1:
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        more = {"cu_seqlens_q": starts, "max_seqlen_q": tokens, "is_causal": False}
    out, lse = torch_gpukern.paged_attn(
        q,
        k_cache,
        v_cache,
        table,
        lens,
        scale=scale,
        k_scale=torch.tensor(1e30, device=device),
        return_lse=True,
        **more,
    )
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(64)))
