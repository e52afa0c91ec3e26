# SPDX-License-Identifier: BSD-3-Clause
"""The bits of a sequence or row must not depend on the others of the call (docs/numerics.md)."""

import random

import pytest
import torch
from conftest import generator, randn

import torch_gpukern as gk
from torch_gpukern.ops import switches

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def batch_of(gen, lengths, tokens, heads, head_dim, page, dtype, code, device):
    """q, caches, block table and lengths of sequences whose pages are consecutive."""
    heads_q, heads_kv = heads
    blocks = [-(-n // page) for n in lengths]
    caches = [
        randn(gen, sum(blocks), page, heads_kv, head_dim, dtype=torch.float32, device=device)
        .mul(4 if code == torch.int8 else 1)
        .to(code or dtype)
        for _ in range(2)
    ]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    pages = torch.arange(sum(blocks), dtype=torch.int32, device=device)
    for row, own in zip(table, pages.split(blocks)):
        row[: len(own)] = own
    q = randn(gen, len(lengths) * tokens, heads_q, head_dim, dtype=dtype, device=device)
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", (1, 3, 20))
def test_paged_attn(tokens, dtype, device):
    draw = random.Random(f"{tokens} {dtype}")
    gen = generator("batch invariant", tokens, dtype)
    for code in (None, torch.float8_e4m3fn) if dtype != torch.float64 else (None,):
        lengths = [draw.randint(tokens, draw.choice((60, 400, 2500))) for _ in range(7)]
        heads, head_dim = draw.choice((((8, 2), 64), ((4, 1), 128), ((3, 3), 32)))
        page = draw.choice((16, 64))
        q, k_cache, v_cache, table, lens = batch_of(
            gen, lengths, tokens, heads, head_dim, page, dtype, code, device
        )
        with gk.batch_invariant():
            out, lse = gk.paged_attn(q, k_cache, v_cache, table, lens, return_lse=True)
        for b, n in enumerate(lengths):
            its = slice(b * tokens, (b + 1) * tokens)
            alone, alone_lse = gk.paged_attn(
                q[its],
                k_cache,
                v_cache,
                table[b : b + 1, : -(-n // page)],
                lens[b : b + 1],
                batch_invariant=True,
                return_lse=True,
            )
            assert torch.equal(alone, out[its])
            assert torch.equal(alone_lse, lse[its])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_paged_attn_beside_longer_ones(dtype):
    """On the CPU a sequence with few tokens beside one with many, and the same alone."""
    gen = generator("beside longer ones", dtype)
    for heads, tokens in (((8, 2), 2), ((8, 2), 3), ((16, 2), 7), ((2, 2), 5)):
        q, *caches, table, lens = batch_of(gen, [70, 200], 40, heads, 80, 16, dtype, None, "cpu")
        q, starts = q[: tokens + 40], torch.tensor([0, tokens, tokens + 40], dtype=torch.int32)
        how = {"cu_seqlens_q": starts, "max_seqlen_q": 40, "batch_invariant": True}
        out = gk.paged_attn(q, *caches, table, lens, **how)
        alone = gk.paged_attn(q[:tokens], *caches, table[:1], lens[:1], batch_invariant=True)
        assert torch.equal(alone, out[:tokens])


def test_paged_attn_in_a_large_table():
    """On the CPU chunks of a context keep their length in an invariant call, however many keys the
    table has room for."""
    gen = generator("large table")
    q, *caches, table, lens = batch_of(
        gen, [3000, 900], 1, (4, 2), 64, 16, torch.float32, None, "cpu"
    )
    wide = torch.zeros(2, 300_000, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    plain = gk.paged_attn(q, *caches, table, lens)
    assert torch.equal(gk.paged_attn(q, *caches, wide, lens, batch_invariant=True), plain)
    assert not torch.equal(gk.paged_attn(q, *caches, wide, lens), plain)


def test_paged_attn_of_many_sequences(device):
    """More sequences than a dimension of a CUDA grid has blocks."""
    gen, many = generator("many sequences"), 65535 + 3
    q = randn(gen, many, 1, 64, dtype=torch.bfloat16, device=device)
    cache = randn(gen, 9, 16, 1, 64, dtype=torch.bfloat16, device=device)
    table = (torch.arange(2 * many, dtype=torch.int32, device=device) % 9).view(many, 2)
    lens = (torch.arange(many, dtype=torch.int32, device=device) % 32) + 1
    out, lse = gk.paged_attn(q, cache, cache, table, lens, return_lse=True, batch_invariant=True)
    for b in (0, 1, 65534, 65535, many - 1):
        its = slice(b, b + 1)
        alone, alone_lse = gk.paged_attn(
            q[its],
            cache,
            cache,
            table[its],
            lens[its],
            return_lse=True,
            batch_invariant=True,
        )
        assert torch.equal(alone, out[its])
        assert torch.equal(alone_lse, lse[its])


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", ("rms_norm", "layer_norm", "softmax", "log_softmax", "swiglu"))
def test_rows(name, dtype):
    """On the CPU a row of these ops has the same bits in every batch."""
    gen = generator("rows", name, dtype)
    for rows, cols in ((2, 64), (33, 768), (200, 4096)):
        x = randn(gen, rows, cols, dtype=dtype)
        weight = randn(gen, cols, dtype=dtype)
        weights = {"rms_norm": (weight,), "layer_norm": (weight, weight)}.get(name, ())
        whole = getattr(gk, name)(x, *weights)
        for row in {0, 1, rows // 2, rows - 1}:
            assert torch.equal(getattr(gk, name)(x[row : row + 1], *weights)[0], whole[row])


PRODUCTS = ("gemm", "gemm_nt", "gemm_tn", "linear", "int4", "mxfp4", "int8")


def product_of(name, gen, k, n, dtype):
    """A function of a [M, k] that multiplies it by one and the same matrix."""
    if name in ("int4", "mxfp4", "int8"):
        k_groups = k // 64 if name != "mxfp4" else k // 32
        low, high = {"int4": (-8, 8), "mxfp4": (0, 16), "int8": (-127, 128)}[name]
        codes = torch.randint(low, high, (n, k), generator=gen)
        packed = gk.pack_weight(codes.to(torch.uint8 if name == "mxfp4" else torch.int8), name)
        scale = torch.rand(k_groups, n, generator=gen) + 0.1
        scale = scale.log2().floor().exp2() if name == "mxfp4" else scale.to(dtype)
        return lambda a: gk.weight_gemm(a, packed, scale, n, name)
    b = randn(gen, k, n, dtype=dtype)
    if name == "linear":
        weight, bias = b.t().contiguous(), randn(gen, n, dtype=dtype)
        return lambda a: gk.linear(a, weight, bias, activation="gelu")
    if name == "gemm_nt":
        b = b.t().contiguous().t()
    if name == "gemm_tn":
        return lambda a: gk.gemm(a.t().contiguous().t(), b)
    return lambda a: gk.gemm(a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_the_cpu(name, dtype):
    """With the switch on, a row has the same bits alone and in batches of every kind of plan: read
    in place, small, packed, with a shared b."""
    if name in PRODUCTS[4:] and dtype not in FLOATS[1:3]:
        pytest.skip("weight_gemm takes 16-bit a")
    gen, draw = generator("products", name, dtype), random.Random(name)
    differ = 0
    for rows, k, n in ((40, 64, 96), (300, 2048, 160), (130, 1088, 1), (400, 1344, 520)):
        f, a = product_of(name, gen, k, n, dtype), randn(gen, rows, k, dtype=dtype)
        with gk.batch_invariant():
            whole = f(a)
        for size in (1, 2, 5, 9, 20, 70, 129):
            low = draw.randint(0, max(rows - size, 0))
            part = a[low : low + size]
            with gk.batch_invariant():
                assert torch.equal(f(part), whole[low : low + size]), (rows, k, n, size)
            differ += not torch.equal(f(part), f(a)[low : low + size])
    # without the switch they do differ; 16 bits round most of it away
    assert differ or dtype != torch.float32


def test_switch():
    assert not switches.is_batch_invariant
    gk.batch_invariant(True)
    try:
        with gk.batch_invariant(False):
            assert not switches.is_batch_invariant
        assert switches.is_batch_invariant
    finally:
        gk.batch_invariant(False)
    with pytest.raises(TypeError, match="batch_invariant: on is expected to be a bool, got int"):
        gk.batch_invariant(1)
