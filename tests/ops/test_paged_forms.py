# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn on Hopper: which kernel serves which decode call, and every form against float64."""

import math

import pytest
import torch

import torch_gpukern
from torch_gpukern import paged_attn

E4M3 = torch.float8_e4m3fn


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
@pytest.mark.parametrize(
    "batch, tokens, heads, head_dim, page, stored, row",
    (
        (1, 1, (32, 8), 128, 16, None, "paged_attn_sm90a_bf16_128x8"),
        (8, 4, (32, 8), 128, 64, None, "paged_attn_sm90a_bf16_128x16"),
        (64, 1, (32, 8), 128, 16, None, "paged_attn_sm90a_bf16_128x8"),
        (256, 1, (32, 8), 128, 16, None, "paged_attn_sm90a_bf16_128x8"),
        (256, 4, (32, 8), 128, 16, None, "paged_attn_sm90a_bf16_128x16"),
        (16, 1, (32, 32), 128, 16, None, "paged_attn_sm90a_bf16_128x8"),
        (1, 1, (32, 8), 128, 8, None, "paged_attn_sm80_bf16_128x8"),
        (1, 1, (32, 8), 64, 8, None, "paged_attn_sm80_bf16_64x8"),
        (1, 1, (32, 8), 64, 16, None, "paged_attn_sm90a_bf16_64x8"),
        (8, 1, (12, 4), 64, 16, None, "paged_attn_sm90a_bf16_64x8"),
        (64, 1, (12, 4), 64, 16, None, "paged_attn_sm90a_bf16_64x8"),
        (64, 4, (32, 8), 64, 16, None, "paged_attn_sm90a_bf16_64x16"),
        (256, 1, (32, 8), 128, 16, E4M3, "paged_attn_sm90a_bf16_e4m3_128x8"),
        (1, 30, (32, 8), 128, 48, E4M3, "paged_attn_sm90a_bf16_e4m3_128x16"),
        (4, 1, (32, 8), 64, 16, E4M3, "paged_attn_sm90a_bf16_e4m3_64x16"),
        (4, 1, (32, 8), 128, 16, torch.int8, "paged_attn_sm90a_bf16_int8_128x16"),
        (4, 1, (32, 8), 128, 16, torch.float8_e5m2, "paged_attn_sm90a_bf16_e5m2_128x16"),
        (4, 1, (32, 8), 128, 8, E4M3, "paged_codes_sm80_bf16_e4m3_128x8"),
        (4, 1, (32, 8), 256, 16, torch.int8, "paged_attn_sm90a_bf16_int8_256x8"),
        (4, 4, (32, 8), 192, 16, E4M3, "paged_attn_sm90a_bf16_e4m3_256x8"),
        (4, 1, (32, 8), 96, 16, E4M3, "paged_attn_sm90a_bf16_e4m3_128x8"),
        (4, 4, (32, 8), 96, 64, E4M3, "paged_attn_sm90a_bf16_e4m3_128x16"),
        (4, 1, (32, 8), 80, 16, torch.float8_e5m2, "paged_attn_sm90a_bf16_e5m2_128x16"),
        (4, 1, (32, 8), 64, 16, torch.int8, "paged_attn_sm90a_bf16_int8_128x16"),
        (4, 1, (32, 8), 72, 16, torch.int8, "paged_attn_plain_bf16_codes"),
        # prefill from 32 rows of a kv head on, tokens times heads of a group
        (4, 7, (32, 8), 128, 16, None, "paged_attn_sm90a_bf16_128x16"),
        (4, 8, (32, 8), 128, 16, None, "paged_prefill_sm90a_bf16_d128"),
        (4, 2, (32, 2), 64, 16, None, "paged_prefill_sm90a_bf16_d64"),
        (4, 16, (32, 32), 128, 16, None, "paged_attn_sm90a_bf16_128x16"),
        (4, 17, (32, 32), 128, 16, None, "paged_prefill_sm90a_bf16_d128"),
        (1, 512, (32, 8), 64, 8, None, "paged_prefill_sm90a_bf16_d64"),
        (1, 512, (32, 8), 128, 12, None, "paged_attn_sm80_bf16_128x16"),
    ),
)
def test_kernel(batch, tokens, heads, head_dim, page, stored, row):
    heads_q, heads_kv = heads
    q = torch.empty(batch * tokens, heads_q, head_dim, dtype=torch.bfloat16)
    cache = torch.empty(2, page, heads_kv, head_dim, dtype=stored or torch.bfloat16)
    table = torch.zeros(batch, 1024 // page, dtype=torch.int32)
    lens = torch.full((batch,), 900, dtype=torch.int32)
    assert (
        torch_gpukern.explain("paged_attn", q, cache, cache, table, lens, arch="sm_90")["instance"]
        == row
    )
    # larger tables take clusters of the same kernel
    if batch * heads_kv > 132 and tokens == 1 and not stored:
        wide = torch.zeros(batch, 4096 // page, dtype=torch.int32)
        told = torch_gpukern.explain("paged_attn", q, cache, cache, wide, lens, arch="sm_90")[
            "instance"
        ]
        assert told == row


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
@pytest.mark.parametrize(
    "tokens, page, dtype, row",
    (
        (1, 16, torch.bfloat16, "paged_attn_sm90a_bf16_128x8"),
        (64, 16, torch.bfloat16, "paged_attn_sm90a_bf16_128x16"),
        (1, 8, torch.bfloat16, "paged_attn_plain_bf16"),
        (1, 16, torch.float32, "paged_attn_plain_f32"),
    ),
)
def test_kernel_of_a_batch_invariant_call(tokens, page, dtype, row):
    cache = torch.empty(2, page, 8, 128, dtype=dtype)
    for batch, keys in ((1, 256), (3, 100_000), (300, 2048)):
        q = torch.empty(batch * tokens, 32, 128, dtype=dtype)
        table = torch.zeros(batch, keys // page, dtype=torch.int32)
        lens = torch.full((batch,), 200, dtype=torch.int32)
        told = torch_gpukern.explain(
            "paged_attn", q, cache, cache, table, lens, batch_invariant=True, arch="sm_90"
        )
        assert told["instance"] == row


def inputs(lengths, tokens, group, page, dtype, stored, heads_kv=8, head_dim=128):
    """q, caches, table, lens. Rows of pages after the lengths, and pages of no sequence, are NaN
    (int8: -1)."""
    blocks = [-(-n // page) for n in lengths]
    total = sum(blocks) + 2
    q = (torch.randn(len(lengths) * tokens, heads_kv * group, head_dim, device="cuda") + 0.2).to(
        dtype
    )
    top = 1 if stored in (None, E4M3) else 20
    caches = [
        (torch.randn(total, page, heads_kv, head_dim, device="cuda") * 0.8 + 0.3)
        .mul(top)
        .to(stored or dtype)
        for _ in range(2)
    ]
    pages = torch.randperm(total, device="cuda").int()
    table = torch.full((len(lengths), max(blocks) + 1), -7, dtype=torch.int32, device="cuda")
    for b, own in enumerate(pages[: sum(blocks)].split(blocks)):
        table[b, : len(own)] = own
        for cache in caches if lengths[b] % page else ():
            cache.view(torch.uint8)[own[-1].long(), lengths[b] % page :] = 0xFF
    for cache in caches:
        cache.view(torch.uint8)[pages[sum(blocks) :].long()] = 0xFF
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def exact(b, n, tokens, q, k_cache, v_cache, table, lens, k_scale=None, v_scale=None):
    """out and lse of sequence b with n keys, in float64."""
    page, heads_kv = k_cache.shape[1:3]
    own = table[b, : -(-n // page)].long()

    def values(cache, scale):
        x = cache[own].double()
        if scale is not None:
            by = scale[own][:, None, :, None] if scale.dim() == 2 else scale.view(-1, 1)
            x = x * by.double()
        return x.flatten(0, 1)[:n].transpose(0, 1).repeat_interleave(q.shape[1] // heads_kv, 0)

    k, v = values(k_cache, k_scale), values(v_cache, v_scale)
    scores = (
        q[b * tokens : (b + 1) * tokens].double().transpose(0, 1)
        @ k.transpose(1, 2)
        / math.sqrt(q.shape[2])
    )
    seen = torch.arange(n, device="cuda") <= torch.arange(n - tokens, n, device="cuda")[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


FORMS = (
    ((6000,), 1, 4, 16),  # a cluster of 8 for each head
    ((40000,), 1, 4, 64),
    ((2000, 1990), 4, 4, 64),
    ((12000, 11000), 1, 4, 16),
    ((70_000, 200) + (40,) * 70, 1, 4, 64),  # the list, or paged_attn_sm80
    ((20000, 5, 300), 1, 5, 48),
    ((513, 600) * 35, 1, 8, 16),  # a block for each sequence and head
    ((3, 40, 1100) * 20, 2, 2, 16),
    ((1500, 700) * 20, 1, 4, 16),  # the list, with adjacent heads for codes
    ((900, 33, 4000, 77, 3) * 6, 3, 4, 16),  # two tiles of rows
    ((131,), 40, 4, 32),
    ((2500, 300), 260, 4, 64),  # the following use the forward's kernel
    ((9000,), 64, 4, 16),  # heads of a group in one tile, keys in splits
    ((700, 300, 141), 129, 1, 24),
)
CODES = {"wide": None, "e4m3": E4M3, "e5m2": torch.float8_e5m2, "int8": torch.int8}
CASES = (
    tuple((*form, 128, code) for form in FORMS for code in CODES)
    + tuple((*form, 64, code) for form in FORMS[:9] for code in CODES)
    # codes of other head_dims: TMA fills the columns past head_dim
    + tuple(
        (*form, head_dim, code)
        for form in FORMS[::2]
        for head_dim, code in ((96, "e4m3"), (80, "int8"), (192, "e5m2"), (256, "int8"))
    )
    + tuple((*form, 256, "e4m3") for form in FORMS[1::2])
    # pages that Hopper's kernels do not take: paged_codes_sm80
    + tuple(
        (*form, head_dim, code)
        for form in (
            ((6000,), 1, 4, 8),
            ((2000, 1990), 4, 4, 8),
            ((70_000, 200) + (40,) * 70, 1, 8, 24),
            ((900, 33, 4000, 77, 3) * 6, 3, 4, 40),
        )
        for head_dim in (64, 96, 128, 192, 256)
        for code in ("e4m3", "e5m2", "int8")
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, tokens, group, page, head_dim, code", CASES)
def test_forms(lengths, tokens, group, page, head_dim, code):
    torch.manual_seed(0)
    stored = CODES[code]
    dtype = torch.bfloat16 if tokens == 1 else torch.float16
    given = inputs(lengths, tokens, group, page, dtype, stored, head_dim=head_dim)
    scales = {}
    if stored is not None:
        shape = {1: (), 4: (given[1].shape[0], 8)}.get(tokens, (8,))
        scales = {
            name: torch.rand(shape, device="cuda") * 0.04 + 0.01 for name in ("k_scale", "v_scale")
        }
    out, lse = paged_attn(*given, **scales, return_lse=True)
    again = paged_attn(*given, **scales)
    assert torch.equal(out, again)  # in whichever order blocks end
    for b in sorted({0, 1, len(lengths) - 1} & set(range(len(lengths)))):
        rows = slice(b * tokens, (b + 1) * tokens)
        want, want_lse = exact(b, lengths[b], tokens, *given, *scales.values())
        error = (out[rows].double() - want).norm() / want.norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1.5e-3)
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (128, 192))
@pytest.mark.parametrize("page", (8, 16, 64))
@pytest.mark.parametrize("kind", ("negative", "tiny", "zero"))
def test_scales_of_pages(kind, page, head_dim):
    """Scales of pages may have any sign and size. The last step of a sequence covers a page and a
    box without a page, whose scale must not be used."""
    torch.manual_seed(1)
    for lengths in ((100, 37, 1, 4096, 700, 16, 33, 48), (6000,), (500, 3000) * 40):
        given = inputs(lengths, 1, 4, page, torch.bfloat16, E4M3, head_dim=head_dim)
        shape = given[1].shape[0], 8
        k_scale, v_scale = (torch.randn(shape, device="cuda").exp() * by for by in (0.3, 1.0))
        if kind == "negative":
            k_scale = k_scale * torch.randn_like(k_scale).sign()
            v_scale = v_scale * torch.randn_like(v_scale).sign()
        elif kind == "tiny":
            v_scale = v_scale * 1e-6
        else:
            v_scale = v_scale * (torch.rand_like(v_scale) < 0.6)
        out = paged_attn(*given, k_scale=k_scale, v_scale=v_scale)
        for b in {0, 2, len(lengths) - 1} & set(range(len(lengths))):
            want, _ = exact(b, lengths[b], 1, *given, k_scale, v_scale)
            error = (out[b].double() - want[0]).norm()
            assert error <= 8e-3 * want.norm() + 1e-30


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, group, page, head_dim, code, dtype",
    (
        (1, 4, 16, 128, "wide", torch.bfloat16),
        (1, 8, 64, 64, "wide", torch.float16),
        (2, 4, 16, 128, "e4m3", torch.bfloat16),
        (1, 4, 16, 192, "int8", torch.float16),
        (5, 4, 16, 128, "wide", torch.float16),  # more rows than a tile has: the list
        (40, 2, 16, 128, "wide", torch.bfloat16),
        (1, 4, 8, 128, "wide", torch.bfloat16),  # paged_attn_plain
        (1, 2, 16, 64, "wide", torch.float32),
    ),
)
def test_batch_invariant(tokens, group, page, head_dim, code, dtype):
    """A sequence has the bits that it has alone, in every batch and order."""
    torch.manual_seed(2)
    lengths = (3000, 41, 900, 12_000, 64, 2047, 40, 5001) + (300, 1500) * 20
    given = inputs(lengths, tokens, group, page, dtype, CODES[code], head_dim=head_dim)
    q, k_cache, v_cache, table, lens = given
    scale = torch.rand(k_cache.shape[0], 8, device="cuda") * 0.03 + 0.01
    scales = {} if code == "wide" else {"k_scale": scale, "v_scale": scale}
    q_of = q.view(len(lengths), tokens, *q.shape[1:])

    def of(rows):
        most = -(-max(lengths[b] for b in rows) // page)
        at = torch.tensor(rows, device="cuda")
        return paged_attn(
            q_of[at].flatten(0, 1),
            k_cache,
            v_cache,
            table[at, :most],
            lens[at],
            **scales,
            batch_invariant=True,
            return_lse=True,
        )

    alone = {b: of([b]) for b in range(len(lengths))}
    want, want_lse = exact(3, lengths[3], tokens, *given, *scales.values())
    assert (alone[3][0].double() - want).norm() < 6e-3 * want.norm()
    torch.testing.assert_close(alone[3][1].double(), want_lse, atol=1e-3, rtol=1e-4)
    for rows in ([0, 1], [5, 3, 1], list(range(8)), list(range(len(lengths)))[::-1]):
        out, lse = of(rows)
        for place, b in enumerate(rows):
            its = slice(place * tokens, (place + 1) * tokens)
            assert torch.equal(out[its], alone[b][0])
            assert torch.equal(lse[its], alone[b][1])
    # packed tokens, one sequence without any
    at = [0, 1, 2, 5]
    counts = torch.tensor([0] + [tokens] * 2 + [0] + [tokens] * 2, device="cuda").cumsum(0).int()
    rows = torch.tensor([0, 1, 4, 2, 5], device="cuda")
    out = paged_attn(
        q_of[torch.tensor(at, device="cuda")].flatten(0, 1),
        k_cache,
        v_cache,
        table[rows],
        lens[rows],
        cu_seqlens_q=counts,
        max_seqlen_q=tokens,
        **scales,
        batch_invariant=True,
    )
    for place, b in enumerate(at):
        assert torch.equal(out[place * tokens : (place + 1) * tokens], alone[b][0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, page, causal", ((64, 8, True), (128, 16, True), (128, 256, False))
)
def test_packed_prefill(head_dim, page, causal):
    """Sequences of many lengths, one without keys, one without queries and with an invalid table,
    and tokens of no sequence, with NaN after every length. Also in a graph. Invalid pages and
    lengths are reported and do not change another sequence."""
    torch.manual_seed(2)
    lengths, queries = [900, 0, 64, 2000, 77], [130, 5, 64, 700, 0]
    _, k_cache, v_cache, table, lens = inputs(
        lengths, 1, 4, page, torch.float16, None, head_dim=head_dim
    )
    table[4] = -1
    starts = [sum(queries[:b]) for b in range(6)]
    q = torch.randn(starts[5] + 3, 32, head_dim, device="cuda").half()
    cu, sinks = (
        torch.tensor(starts, dtype=torch.int32, device="cuda"),
        torch.randn(32, device="cuda"),
    )
    how = dict(cu_seqlens_q=cu, max_seqlen_q=700, sinks=sinks, is_causal=causal, return_lse=True)
    out, lse = paged_attn(q, k_cache, v_cache, table, lens, **how)
    torch_gpukern.check_errors()
    for b in (0, 2, 3):
        rows, n, pages = (
            slice(*starts[b : b + 2]),
            lengths[b],
            table[b, : -(-lengths[b] // page)].long(),
        )
        k, v = (
            x[pages].double().flatten(0, 1)[:n].transpose(0, 1).repeat_interleave(4, 0)
            for x in (k_cache, v_cache)
        )
        scores = q[rows].double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)
        if causal:
            after = (
                torch.arange(n, device="cuda")
                > torch.arange(n - queries[b], n, device="cuda")[:, None]
            )
            scores = scores.masked_fill(after, -math.inf)
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, queries[b], 1)), 2)
        want = (scores.softmax(-1)[..., :-1] @ v).transpose(0, 1)
        assert (out[rows].double() - want).norm() / want.norm() < 1.5e-3
        torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1).T, atol=1e-3, rtol=1e-4)
    assert (out[130:135] == 0).all() and torch.allclose(lse[130:135], sinks.expand(5, 32))
    assert (out[starts[5] :] == 0).all() and (lse[starts[5] :] == -math.inf).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = paged_attn(q, k_cache, v_cache, table, lens, **how)
    graph.replay()
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    for change in ("page", "length"):
        bad_table, bad_lens = table.clone(), lens.clone()
        if change == "page":
            bad_table[2, 63 // page] = k_cache.shape[0] + 3
        else:
            bad_lens[2] = 63
        got = paged_attn(q, k_cache, v_cache, bad_table, bad_lens, **how)[0]
        with pytest.raises(IndexError):
            torch.cuda.synchronize()
            torch_gpukern.check_errors()
        assert torch.equal(got[:135], out[:135]) and torch.equal(got[199:], out[199:])


@pytest.mark.gpu
def test_two_streams_and_two_graphs_at_once():
    """Calls share no state: overlapping calls on two streams, and replays of two graphs, give the
    results that each gives alone."""
    torch.manual_seed(1)
    shapes = (
        ((3000,) * 40, E4M3, 128),
        ((9000, 20), E4M3, 128),
        ((700, 1000) * 32, None, 64),
        ((5000,), None, 64),
    )
    calls = [
        inputs(lengths, 1, 4, 16, torch.bfloat16, stored, head_dim=dim)
        for lengths, stored, dim in shapes
    ]
    # prefill
    calls += [inputs((400, 300), 64, 4, 16, torch.bfloat16, stored) for stored in (None, E4M3)]
    cos, sin = (torch.rand(10_000, 8, device="cuda") for _ in range(2))

    def step(q, k_cache, v_cache, table, lens):
        """A token's keys and values are written, then read."""
        tokens = len(q) // len(lens)
        last = (lens.repeat_interleave(tokens) - 1).long()
        page = k_cache.shape[1]
        slots = (
            table.repeat_interleave(tokens, 0).gather(1, (last // page)[:, None])[:, 0] * page
            + last % page
        )
        new = q[:, :8].contiguous()
        first = torch.arange(len(slots), device="cuda") % tokens == 0
        slots = torch.where(first, slots, -1)  # one token per slot; several would race
        rotated = torch_gpukern.rope_kv_write(q, new, new, cos, sin, last, k_cache, v_cache, slots)
        return paged_attn(rotated, k_cache, v_cache, table, lens)

    wants = [step(*given) for given in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    outs = [[] for _ in calls]
    for _ in range(4):
        for stream, given, of in zip(streams, calls, outs):
            with torch.cuda.stream(stream):
                of.append(step(*given))
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in calls]
    for graph, given, of in zip(graphs, calls, outs):
        with torch.cuda.graph(graph):
            of += [step(*given) for _ in range(4)]
    for _ in range(5):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for want, of in zip(wants, outs):
        assert len(of) == 8 and all(torch.equal(out, want) for out in of)
