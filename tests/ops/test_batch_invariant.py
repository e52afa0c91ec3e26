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
