# SPDX-License-Identifier: BSD-3-Clause
"""Latents in 8 bits: paged_attn over rows of 656 bytes, and kv_cache_write_latent.

The rows are made and decoded here by the definition of the format. Results are compared with
float64, and bit for bit with those over a cache of the decoded rows in q's dtype.
"""

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
    run_python,
    same_bits,
    snapshot,
    torch_gpukern,
)
from test_latent_attn import BATCHES, LATENT, ROPE, WIDE, check_bad_page, with_tensors
from torch._subclasses.fake_tensor import FakeTensorMode

BYTES = LATENT + 4 * 4 + 2 * ROPE
FORMAT = dict(latent_format="fp8_656")
NARROW = (torch.float32, *HALF)


def e4m3(code):
    """The value of a code: sign, 4 bits of exponent with bias 7, 3 bits of fraction."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return math.nan if code & 127 == 127 else -size if code & 128 else size


VALUES = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def decoded(rows):
    """Rows [..., 656] as float64 [..., 576]."""
    scales = rows[..., 512:528].clone(memory_format=torch.contiguous_format).view(torch.float32)
    rotary = rows[..., 528:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    codes = VALUES.to(rows.device)[rows[..., :512].long()]
    return torch.cat([codes * scales.double().repeat_interleave(128, -1), rotary.double()], -1)


def encoded(c, k_pe):
    """Rows [..., 656] of c [..., 512] and k_pe [..., 64]: scales of amax / 448, the nearest codes,
    of two the even one."""
    blocks = c.float().unflatten(-1, (4, 128))
    scales = (blocks.abs().amax(-1) / torch.tensor(448.0)).clamp(min=2.0**-126)
    quotient = (blocks / scales[..., None]).flatten(-2).double()
    finite = VALUES[:127]  # ascending
    above = torch.searchsorted(finite, quotient.abs().contiguous()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    far, near = finite[above] - quotient.abs(), quotient.abs() - finite[below]
    code = torch.where((near < far) | ((near == far) & (below % 2 == 0)), below, above)
    codes = (code + 128 * quotient.signbit()).to(torch.uint8)
    return torch.cat(
        [codes, scales.view(torch.uint8), k_pe.to(torch.bfloat16).contiguous().view(torch.uint8)],
        dim=-1,
    )


def rows_in_use(gen, *shape):
    """Rows of random codes, and of scales that no writer of ours makes."""
    codes = torch.randint(0, 256, (*shape, LATENT), generator=gen, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0x80
    scales = torch.rand(*shape, 4, generator=gen).mul(6).sub(12).exp2()  # 2^-12 to 2^-6
    rotary = randn(gen, *shape, ROPE, dtype=torch.bfloat16)
    return torch.cat([codes, scales.view(torch.uint8), rotary.view(torch.uint8)], dim=-1)


class Latents(Paged):
    """A Paged of latents in 8 bits. Every byte that no query may read is 255, so that codes, scales
    and rotary columns there are NaN."""

    def __init__(self, gen, batch, heads, block_size, dtype, device, pad=0):
        lengths, queries = BATCHES[batch] if isinstance(batch, str) else batch
        super().__init__(gen, lengths, queries, heads, 1, WIDE, LATENT, block_size, dtype)
        pages = self.k_cache.shape[0]
        cache = torch.full((pages, block_size, 1, BYTES + pad), 255, dtype=torch.uint8)
        self.keys = []
        for b, n in enumerate(lengths):
            token, rows = torch.arange(n), rows_in_use(gen, n, 1)
            cache[
                self.block_table[b].long()[token // block_size], token % block_size, :, :BYTES
            ] = rows
            self.keys.append(decoded(rows))
        self.values = [k[..., :LATENT] for k in self.keys]
        self.plain = decoded(cache[..., :BYTES]).to(dtype).to(device)  # the same in q's dtype
        self.k_cache = cache.to(device)[..., :BYTES]
        self.v_cache = self.k_cache[..., :LATENT]
        for name in ("q", "block_table", "seq_lens", "cu_seqlens_q"):
            setattr(self, name, getattr(self, name).to(device))


def call(case, **kwargs):
    kwargs = dict(cu_seqlens_q=case.cu_seqlens_q, max_seqlen_q=max(case.queries)) | kwargs
    return ops.paged_attn_fwd(*case.args(), **FORMAT, **kwargs)


def call_plain(case, **kwargs):
    """The same attention over decoded rows."""
    kwargs = dict(cu_seqlens_q=case.cu_seqlens_q, max_seqlen_q=max(case.queries)) | kwargs
    table = case.block_table, case.seq_lens
    return ops.paged_attn_fwd(case.q, case.plain, case.plain[..., :LATENT], *table, **kwargs)


@pytest.mark.parametrize(
    "case",
    grid(
        16,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=(16, 64, 128, 5),
        block_size=(16, 32, 64, 1),
        pad=(0, 112),  # bytes after each row that belong to something else
    ),
)
def test_forward(case, device):
    gen = generator("latent fp8", case.id)
    latents = Latents(gen, case.batch, case.heads, case.block_size, case.dtype, device, case.pad)
    kwargs = dict(scale=WIDE**-0.5 * 1.3)
    unchanged = snapshot(*latents.args())
    out, lse = call(latents, **kwargs)
    unchanged()
    check_paged(latents, out, lse, kwargs)
    if case.dtype != torch.float64:  # whose decoded rows are the values themselves
        for x, y in zip((out, lse), call_plain(latents, **kwargs), strict=True):
            assert same_bits(x, y)


@pytest.mark.parametrize(
    "kwargs",
    (
        dict(is_causal=False),
        dict(scale=-0.02),
        dict(window_left=40),
        dict(window_left=40, softcap=3.0),
        dict(kv_start=(3, 40, 0)),
        dict(sinks=True),
        dict(alibi_slopes=True),
        dict(batch_invariant=True),
    ),
    ids=lambda kwargs: "-".join(kwargs),
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rules(kwargs, dtype, device):
    gen = generator("latent fp8 rules", list(kwargs), dtype)
    latents = Latents(gen, "speculative", 16, 64, dtype, device)
    given = with_tensors(dict(scale=0.05) | kwargs, gen, 16, device)
    out, lse = call(latents, **given)
    for x, y in zip((out, lse), call_plain(latents, **given), strict=True):
        assert same_bits(x, y)
    given.pop("batch_invariant", None)
    check_paged(latents, out, lse, given)


def test_a_prefix_is_read_once(device):
    """Keys that two sequences share, as `prefix` says them."""
    gen = generator("latent fp8 prefix")
    latents = Latents(gen, ([100, 130], [1, 1]), 16, 64, torch.float32, device)
    latents.block_table[1, 0] = latents.block_table[0, 0]
    latents.keys[1][:64] = latents.keys[0][:64]

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    prefix = torch_gpukern.SharedPrefix(
        latents.block_table[:1, :1], i32(64), i32(0, 2), i32(64, 64)
    )
    out, lse = torch_gpukern.paged_attn(
        *latents.args(), **FORMAT, scale=0.04, prefix=prefix, return_lse=True
    )
    want, want_lse = call(latents, scale=0.04)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


EVERY_ISA = """
import torch, torch_gpukern
from test_latent_fp8 import *
for dtype in NARROW:
    for batch, heads in (("speculative", 16), ("decode", 5), (([300], [40]), 16)):
        latents = Latents(generator("isa", dtype, heads), batch, heads, 32, dtype, "cpu")
        for x, y in zip(call(latents), call_plain(latents), strict=True):
            assert same_bits(x, y)
        check_paged(latents, *call(latents), {{}})
    c, k_pe = written_values(dtype)
    cache = torch.zeros(2, 8, 1, BYTES, dtype=torch.uint8)
    torch_gpukern.kv_cache_write_latent(c, k_pe, cache, torch.arange(9))
    assert torch.equal(cache.view(-1, BYTES)[:9], encoded(c, k_pe)[:, 0])
print("all good on", torch.ops.gpukern.cpu_isa())
"""


@pytest.mark.parametrize("isa", [*ops.cpu_isas().split(","), "amx_emulated"])
def test_every_instruction_set(isa):
    if isa == "amx_emulated" and "avx512bf16" not in ops.cpu_isas():
        pytest.skip("the emulation needs avx512bf16")
    path = __file__.rpartition("/")[0]
    code = f"import sys; sys.path[:0] = [{path!r}, {path!r} + '/..']\n" + EVERY_ISA.format()
    assert f"all good on {isa}" in run_python(code, {"GPUKERN_CPU": isa}).stdout


# ---- writes --------------------------------------------------------------------------------------


def written_values(dtype, device="cpu"):
    """Nine tokens: among them blocks of zeros, of tiny and of large numbers, and a lone peak."""
    gen = generator("latent fp8 writes", dtype)
    c, k_pe = randn(gen, 9, 1, LATENT, dtype=dtype), randn(gen, 9, 1, ROPE, dtype=dtype)
    c[1, 0, :128] = 0
    c[2, 0, 128:256] *= 2.0**-20
    c[3] *= 500
    c[4, 0, 300] = 40
    return c.to(device), k_pe.to(device)


@pytest.mark.parametrize("index", (torch.int64, torch.int32), ids=str)
@pytest.mark.parametrize("block_size", (16, 5))
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_writes(dtype, block_size, index, device):
    c, k_pe = written_values(dtype, device)
    cache = torch.full((7, block_size, 1, BYTES + 16), 255, dtype=torch.uint8, device=device)
    slots = torch.randperm(7 * block_size, generator=generator("slots"))[:9].to(index).to(device)
    slots[4] = -1
    unchanged = snapshot(c, k_pe, slots)
    torch_gpukern.kv_cache_write_latent(c, k_pe, cache[..., :BYTES], slots)
    unchanged()
    rows = encoded(c.cpu(), k_pe.cpu())
    want = torch.full((7 * block_size, BYTES + 16), 255, dtype=torch.uint8)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot, :BYTES] = rows[t, 0]
    assert torch.equal(cache.cpu().view(-1, BYTES + 16), want)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_codes_are_those_of_quantize(dtype, device):
    c, k_pe = written_values(dtype, device)
    c[5, 0, 7], c[6, 0, 200] = math.inf, math.nan  # their blocks become NaN, no others
    cache = torch.zeros(1, 9, 1, BYTES, dtype=torch.uint8, device=device)
    torch_gpukern.kv_cache_write_latent(c, k_pe, cache, torch.arange(9, device=device))
    codes, scales = torch_gpukern.quantize(c, torch.float8_e4m3fn, "1x128")
    assert same_bits(cache[0, ..., :512].contiguous(), codes.view(torch.uint8))
    got = cache[0, ..., 512:528].contiguous().view(torch.float32)
    assert torch.equal(got.isnan(), scales.isnan()) and got.isnan().sum() == 2
    assert torch.equal(got.nan_to_num(), scales.nan_to_num()) and (got.nan_to_num(1) > 0).all()


@pytest.mark.parametrize("of", (torch.uint8, torch.bfloat16), ids=str)
def test_strided_inputs_are_written(of, device):
    c, k_pe = written_values(torch.bfloat16, device)
    wide = torch.zeros(9, WIDE, 2, dtype=torch.bfloat16, device=device)
    wide[:, :LATENT, 1], wide[:, LATENT:, 1] = c[:, 0], k_pe[:, 0]
    strided = wide[:, None, :LATENT, 1], wide[:, None, LATENT:, 1]
    row = BYTES if of == torch.uint8 else WIDE
    caches = [torch.zeros(2, 8, 1, row, dtype=of, device=device) for _ in range(2)]
    slots = torch.arange(9, device=device)
    torch_gpukern.kv_cache_write_latent(c, k_pe, caches[0], slots)
    torch_gpukern.kv_cache_write_latent(*strided, caches[1], slots)
    assert same_bits(*caches)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_elements_are_those_of_kv_cache_write(dtype, device):
    gen = generator("latent elements", dtype)
    c = randn(gen, 9, 1, LATENT, dtype=dtype, device=device)
    k_pe = randn(gen, 9, 1, ROPE, dtype=dtype, device=device)
    slots = torch.randperm(35, generator=gen)[:9].to(device)
    slots[4] = -1
    caches = [torch.full((7, 5, 1, WIDE), 7, dtype=dtype, device=device) for _ in range(2)]
    torch_gpukern.kv_cache_write_latent(c, k_pe, caches[0], slots)
    torch_gpukern.kv_cache_write(c, k_pe, caches[1][..., :LATENT], caches[1][..., LATENT:], slots)
    assert same_bits(*caches)


def test_rows_of_the_cache_move_within_it(device):
    """c and k_pe are views of rows that are written: all are read first."""
    cache = torch.randn(2, 4, 1, WIDE, device=device)
    want = cache.flatten(0, 1)[[1, 2, 3, 0, 4, 5, 6, 7]]
    rows = cache.flatten(0, 1)[:4]
    slots = torch.tensor([3, 0, 1, 2], device=device)
    torch_gpukern.kv_cache_write_latent(rows[..., :LATENT], rows[..., LATENT:], cache, slots)
    assert same_bits(cache.flatten(0, 1), want)


def test_bytes_of_the_cache_may_be_inputs(device):
    cache = torch.zeros(2, 4, 1, BYTES, dtype=torch.uint8, device=device)
    rows = cache.view(-1).view(torch.bfloat16).view(8, 1, BYTES // 2)
    rows.copy_(torch.randn(8, 1, BYTES // 2))
    c, k_pe = rows[:4, :, :256].repeat(1, 1, 2), rows[:4, :, 264:]
    want = encoded(c.cpu(), k_pe.cpu())
    slots = torch.tensor([3, 0, 1, 2], device=device)
    torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
    assert torch.equal(cache.view(8, BYTES)[slots].cpu(), want[:, 0])


# ---- masks over new tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block_size", (64, 5))
@pytest.mark.parametrize("window", (-1, 9))
def test_masks(window, block_size, dtype, device):
    """Beside the same call over decoded rows. The two differ by roundings of either part."""
    gen = generator("latent masks", window, block_size)
    batch = ([40, 7, 0, 3, 130], [6, 7, 4, 3, 40])
    latents = Latents(gen, batch, 16, block_size, dtype, device)
    starts = dict(cu_seqlens_q=latents.cu_seqlens_q, max_seqlen_q=40, scale=WIDE**-0.5)
    mask = (torch.rand(len(latents.q), 40, generator=gen) < 0.4).to(device)
    rules = starts | dict(attn_mask=mask, window_left=window, return_lse=True)
    plain = latents.plain, latents.plain[..., :LATENT]
    got = torch_gpukern.paged_attn(*latents.args(), **FORMAT, **rules)
    want = torch_gpukern.paged_attn(
        latents.q, *plain, latents.block_table, latents.seq_lens, **rules
    )
    eps = torch.finfo(dtype).eps
    for x, y in zip(got, want):
        assert x.dtype is y.dtype and not x.isnan().any()
        assert torch.equal(x.isinf(), y.isinf())
        x, y = (z.double().masked_fill(z.isinf(), 0) for z in (x, y))
        assert (x - y).abs().max() <= 8 * eps * y.abs().max().clamp(min=1)


# ---- refusals ------------------------------------------------------------------------------------


def test_what_is_refused(device):
    latents = Latents(generator("latent refused"), "decode", 4, 16, torch.bfloat16, device)
    q, k_cache, v_cache, *table = latents.args()

    def refuses(text, k=k_cache, v=v_cache, q=q, **kwargs):
        with pytest.raises(ValueError, match=f"^gpukern::paged_attn: {text}"):
            ops.paged_attn(q, k, v, *table, **(FORMAT | kwargs))

    one = torch.ones((), device=device)
    moved = torch.zeros(k_cache.numel() + 16, dtype=torch.uint8, device=device)
    loose = torch.zeros(*k_cache.shape[:3], BYTES + 8, dtype=torch.uint8, device=device)
    refuses("k_cache has dtype uint8, expected bfloat16, .* latent_format", latent_format="none")
    refuses("latent_format must be none or fp8_656, got 'fp8'", latent_format="fp8")
    refuses("k_cache has dtype bfloat16, latent_format fp8_656 expects uint8", k=k_cache.bfloat16())
    refuses("q has head_dim 512, latent_format fp8_656 expects 576", q=q[..., :512])
    refuses("k_cache of uint8 must have shape .*, got .*655", k=k_cache[..., :655])
    refuses("v_cache must be k_cache", v=v_cache.clone())
    refuses("v_cache must be k_cache", v=k_cache[..., :256])
    refuses("v_cache must be k_cache", v=k_cache[..., 16:528])
    refuses("v_cache must be k_cache", v=v_cache[:-1])
    refuses("k_scale is given with latent_format", k_scale=one)
    refuses("v_scale is given with latent_format", v_scale=one)
    for k in (moved[8:-8].view(k_cache.shape), loose[..., :BYTES]):
        refuses("k_cache has rows that do not begin at multiples of 16 bytes", k, k[..., :LATENT])
    mask = torch.ones(q.shape[0], 1, dtype=torch.bool, device=device)
    slopes = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="paged_attn: .*alibi_slopes"):
        torch_gpukern.paged_attn(*latents.args(), **FORMAT, attn_mask=mask, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="kv_cache_write: k_cache has dtype uint8, .* latent"):
        ops.kv_cache_write(q, q, k_cache, k_cache, torch.arange(q.shape[0], device=device))


def test_bad_slots(device):
    c, k_pe = written_values(torch.bfloat16, device)
    for of, row in ((torch.uint8, BYTES), (torch.bfloat16, WIDE)):
        cache = torch.zeros(2, 8, 1, row, dtype=of, device=device)
        slots = torch.arange(9, device=device)
        slots[8] = 16
        if device == "cpu":
            with pytest.raises(IndexError, match="slots"):
                torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
            assert not cache.any()
        else:
            torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match="slot"):
                torch_gpukern.check_errors()
            assert cache[0].any() and not cache[1].any()


def test_bad_pages(device):
    gen = generator("latent fp8 pages")
    check_bad_page(Latents(gen, ([300], [1]), 16, 64, torch.bfloat16, device), call)


# ---- compilers -----------------------------------------------------------------------------------


def test_opcheck(device):
    """For paged_attn the fake alone: opcheck copies each tensor, and a copy of v_cache is no view of
    k_cache."""
    latents = Latents(generator("latent opcheck"), ([20, 70], [1, 1]), 4, 16, torch.float32, device)
    args = *written_values(torch.bfloat16, device), latents.k_cache, torch.arange(9, device=device)
    torch.library.opcheck(ops.kv_cache_write_latent.default, args)
    want = call(latents)
    with FakeTensorMode() as mode:
        q, cache, table, lens = (
            mode.from_tensor(x)
            for x in (latents.q, latents.k_cache, latents.block_table, latents.seq_lens)
        )
        got = ops.paged_attn_fwd(q, cache, cache[..., :LATENT], table, lens, **FORMAT)
        with pytest.raises(ValueError, match="v_cache must be k_cache"):
            ops.paged_attn_fwd(q, cache, cache[..., :256], table, lens, **FORMAT)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()
        assert x.device == y.device


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled(dynamic, device):
    """A write and the attention that reads it in one graph, with the bits of the eager calls."""
    latents = Latents(
        generator("latent compiled"), ([20, 70], [1, 1]), 16, 64, torch.bfloat16, device
    )
    c, k_pe = (x[:2] for x in written_values(torch.bfloat16, device))
    table, lens = latents.block_table, latents.seq_lens
    slots = table[torch.arange(2), (lens.long() - 1) // 64].long() * 64 + (lens.long() - 1) % 64

    def attend(q, c, k_pe, cache):
        torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
        return torch_gpukern.paged_attn(
            q, cache, cache[..., :LATENT], table, lens, scale=0.05, **FORMAT
        )

    caches = [latents.k_cache.clone() for _ in range(2)]
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    got = compiled(latents.q, c, k_pe, caches[0])
    assert same_bits(got, attend(latents.q, c, k_pe, caches[1])) and same_bits(*caches)
    assert not same_bits(caches[0], latents.k_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", (10, 40))
def test_one_graph_serves_other_lengths(pages):
    """A captured write and the attention that reads it, replayed for other lengths, tables and slots.
    The table has 12 entries, so that decoded rows have a place by page or by entry."""
    gen = generator("latent graph", pages)
    cases = [
        Latents(gen, (lengths, [2, 2]), 16, 64, torch.bfloat16, "cuda")
        for lengths in ([300, 90], [150, 220])
    ]
    cache = torch.zeros(pages, 64, 1, BYTES, dtype=torch.uint8, device="cuda")
    table = torch.zeros(2, 6, dtype=torch.int32, device="cuda")
    q, lens = torch.zeros_like(cases[0].q), torch.zeros_like(cases[0].seq_lens)
    c, k_pe = (x[:4].clone() for x in written_values(torch.bfloat16, "cuda"))
    slots = torch.zeros(4, dtype=torch.int64, device="cuda")

    def step():
        torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
        return torch_gpukern.paged_attn(
            q, cache, cache[..., :LATENT], table, lens, scale=0.05, return_lse=True, **FORMAT
        )

    def place(case):
        cache[:10] = case.k_cache
        table[:, : case.block_table.shape[1]] = case.block_table
        q.copy_(case.q)
        lens.copy_(case.seq_lens)
        newest = (lens.long()[:, None] + torch.tensor([-2, -1], device="cuda")).flatten()
        sequence = torch.tensor([0, 0, 1, 1], device="cuda")
        slots.copy_(table[sequence, newest // 64].long() * 64 + newest % 64)

    place(cases[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for case in (*cases, cases[0]):
        place(case)
        graph.replay()
        place(case)
        for x, y in zip(got, step(), strict=True):
            assert same_bits(x, y) and x.isfinite().all()
    torch_gpukern.check_errors()


def test_no_gradient_is_lost(device):
    c, k_pe = written_values(torch.float32, device)
    cache = torch.zeros(2, 8, 1, BYTES, dtype=torch.uint8, device=device)
    slots = torch.arange(9, device=device)
    with pytest.raises(NotImplementedError, match="kv_cache_write_latent"):
        torch_gpukern.kv_cache_write_latent(c.requires_grad_(), k_pe, cache, slots)
    with torch.no_grad():
        torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)


def test_the_cost_counts_bytes_of_rows(device):
    latents = Latents(generator("latent cost"), ([256], [1]), 16, 64, torch.bfloat16, device)
    latents.block_table = latents.block_table[:, :4].contiguous()
    table = latents.block_table, latents.seq_lens
    plain = json.loads(
        ops.explain_paged_attn(latents.q, latents.plain, latents.plain[..., :LATENT], *table)
    )
    cost = json.loads(ops.explain_paged_attn(*latents.args(), **FORMAT))
    assert plain["bytes"] - cost["bytes"] == 256 * (2 * WIDE - BYTES)
    assert cost["flops"] == plain["flops"]


def test_the_two_functions_agree(device):
    """The result of a cache of elements, within the rounding of the codes."""
    gen = generator("latent fp8 both")
    c = randn(gen, 100, 1, LATENT, dtype=torch.float32, device=device)
    k_pe = randn(gen, 100, 1, ROPE, dtype=torch.float32, device=device).bfloat16().float()
    q = randn(gen, 1, 16, WIDE, dtype=torch.float32, device=device)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    lens, slots = torch.tensor([100], dtype=torch.int32, device=device), torch.arange(100)
    slots = torch.where(slots < 64, 64 + slots, slots - 64).to(device)
    outs = []
    for of, row in ((torch.uint8, BYTES), (torch.float32, WIDE)):
        cache = torch.zeros(2, 64, 1, row, dtype=of, device=device)
        torch_gpukern.kv_cache_write_latent(c, k_pe, cache, slots)
        kwargs = FORMAT if of == torch.uint8 else {}
        outs.append(
            torch_gpukern.paged_attn(
                q, cache, cache[..., :LATENT], table, lens, scale=0.002, **kwargs
            )
        )
    # a code is off by at most 2^-4 of itself; sums of 100 values with signs of their own
    assert (outs[0] - outs[1]).norm() <= 2**-4 * outs[1].norm()
