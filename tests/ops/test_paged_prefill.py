# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn with many query tokens on Hopper: which kernel serves which call; windows, softcap,
ALiBi, kv_start and 8-bit caches against float64."""

import math

import pytest
import torch

import torch_gpukern
from torch_gpukern import paged_attn

BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
WIDE, DECODED = "paged_prefill_sm90a", "paged_prefill_decoded_sm90a"


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
@pytest.mark.parametrize(
    "tokens, heads, head_dim, page, stored, rules, row",
    (
        (512, (32, 8), 128, 16, None, {"window_left": 100}, WIDE + "_bf16_d128"),
        (512, (32, 8), 64, 16, None, {"softcap": 30.0}, WIDE + "_bf16_d64_score"),
        (
            512,
            (32, 8),
            128,
            16,
            None,
            {"softcap": 30.0, "window_left": 0},
            WIDE + "_bf16_d128_score",
        ),
        (512, (32, 8), 256, 16, None, {}, WIDE + "_bf16_d256"),
        (512, (32, 8), 256, 8, None, {"softcap": 30.0}, WIDE + "_bf16_d256_score"),
        (512, (32, 8), 128, 16, None, {"is_causal": False, "window_right": 0}, WIDE + "_bf16_d128"),
        (
            512,
            (32, 8),
            128,
            16,
            None,
            {"is_causal": False, "window_right": 5},
            "paged_attn_sm90a_bf16_128x16",
        ),
        (512, (32, 8), 128, 16, E4M3, {}, DECODED + "_bf16"),
        (512, (32, 8), 256, 8, E5M2, {"softcap": 30.0}, DECODED + "_bf16"),
        (40, (32, 8), 64, 24, I8, {"window_left": 100}, DECODED + "_bf16"),
        (20, (32, 8), 128, 16, E4M3, {}, "paged_attn_sm90a_bf16_e4m3_128x16"),
        (512, (32, 8), 128, 12, E4M3, {}, "paged_codes_sm80_bf16_e4m3_128x16"),
    ),
)
def test_kernel(tokens, heads, head_dim, page, stored, rules, row):
    q = torch.empty(2 * tokens, heads[0], head_dim, dtype=BF16)
    cache = torch.empty(2, page, heads[1], head_dim, dtype=stored or BF16)
    table, lens = (
        torch.zeros(2, 1024 // page, dtype=torch.int32),
        torch.full((2,), 900, dtype=torch.int32),
    )
    assert (
        torch_gpukern.explain("paged_attn", q, cache, cache, table, lens, arch="sm_90", **rules)[
            "instance"
        ]
        == row
    )


LENGTHS, QUERIES, HEADS_KV = (900, 0, 64, 2000, 77, 700), (130, 5, 64, 700, 0, 1), 4
STARTS = [sum(QUERIES[:b]) for b in range(len(QUERIES) + 1)]
NOBODYS = 3  # tokens after the last sequence


def make(lengths, queries, first, head_dim, page, group, stored, dtype, spare=2, heads_kv=HEADS_KV):
    """q, caches, table, lens on the GPU. first: the first key of each sequence that a query sees.
    Keys before it and after the length are NaN (int8: -1). Pages without a visible key are not in
    the table.
    """
    blocks = [-(-n // page) for n in lengths]
    total = sum(blocks) + spare
    q = (torch.randn(sum(queries) + NOBODYS, heads_kv * group, head_dim, device="cuda") + 0.2).to(
        dtype
    )
    top = 20 if stored == I8 else 1
    caches = [
        (torch.randn(total, page, heads_kv, head_dim, device="cuda") * 0.8 + 0.3)
        .mul(top)
        .to(stored or dtype)
        for _ in range(2)
    ]
    pages = torch.randperm(total, device="cuda").int()
    table = torch.full((len(lengths), max(blocks) + 1), -7, dtype=torch.int32, device="cuda")
    for b, own in enumerate(pages[: sum(blocks)].split(blocks)):
        if not queries[b]:
            continue
        table[b, first[b] // page : len(own)] = own[first[b] // page :]
        for cache in caches if len(own) else ():
            raw = cache.view(torch.uint8)
            raw[own[: first[b] // page].long()] = 0xFF
            raw[own[min(first[b] // page, len(own) - 1)].long(), : first[b] % page] = 0xFF
            if lengths[b] % page:
                raw[own[-1].long(), lengths[b] % page :] = 0xFF
    for cache in caches:
        cache.view(torch.uint8)[pages[sum(blocks) :].long()] = 0xFF
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def values(cache, scale, pages, first, end):
    """Keys [first, end) in these pages, in float64 as [heads, keys, head_dim]."""
    x = cache[pages].double()
    if scale is not None:
        x = x * (scale[pages][:, None, :, None] if scale.dim() == 2 else scale.view(-1, 1)).double()
    return x.flatten(0, 1)[first:end].transpose(0, 1)


def exact(q, k_cache, v_cache, table, b, n, first, rules):
    """A sequence's out and lse in float64, over its keys [first, n)."""
    page, group, tokens = k_cache.shape[1], q.shape[1] // k_cache.shape[2], len(q)
    own = table[b, first // page : -(-n // page)].long()
    k, v = (
        values(
            cache, rules.get(name), own, first % page, n - first // page * page
        ).repeat_interleave(group, 0)
        for cache, name in ((k_cache, "k_scale"), (v_cache, "v_scale"))
    )
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    if rules.get("softcap"):
        scores = rules["softcap"] * (scores / rules["softcap"]).tanh()
    at = torch.arange(n - tokens, n, device="cuda")[:, None]
    key = torch.arange(first, n, device="cuda")
    if "alibi_slopes" in rules:
        slopes = rules["alibi_slopes"].double()
        scores = (
            scores - (slopes[b] if slopes.dim() == 2 else slopes)[:, None, None] * (at - key).abs()
        )
    seen = torch.ones(tokens, n - first, dtype=torch.bool, device="cuda")
    if rules.get("is_causal", True) or rules.get("window_right", -1) == 0:
        seen &= key <= at
    if rules.get("window_left", -1) >= 0:
        seen &= key >= at - rules["window_left"]
    scores = scores.masked_fill(~seen, -math.inf)
    if "sinks" in rules:
        scores = torch.cat(
            (scores, rules["sinks"].double()[:, None, None].expand(-1, tokens, 1)), 2
        )
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)[..., : n - first]
    return (weights @ v).transpose(0, 1), lse.T


def firsts(lengths, queries, rules):
    left = rules.get("window_left", -1)
    first = [max(n - tokens - left, 0) if left >= 0 else 0 for n, tokens in zip(lengths, queries)]
    start = rules["kv_start"].tolist() if "kv_start" in rules else [0] * len(lengths)
    return [min(max(a, b), n) for a, b, n in zip(first, start, lengths)]


RULES = {
    "plain": {},
    "window": {"window_left": 100},
    "window_self": {"window_left": 0},
    "window_wide": {"window_left": 701},
    "window_full": {"window_left": 130, "is_causal": False},
    "right": {"is_causal": False, "window_right": 0},
    "softcap": {"softcap": 2.0},
    "softcap_window": {"softcap": 1.5, "window_left": 333},
    "alibi": {"alibi_slopes": 2},
    "alibi_full": {"alibi_slopes": 1, "is_causal": False},
    "alibi_window": {"alibi_slopes": 1, "window_left": 200},
    "kv_start": {"kv_start": True},
    "kv_start_full": {"kv_start": True, "is_causal": False, "sinks": True},
    "all": {"kv_start": True, "alibi_slopes": 2, "softcap": 2.0, "sinks": True, "window_left": 500},
}
# head_dim, page, heads of a group, stored, dtype, pages of nobody (with many of them, decoded
# pages are kept by entry of the table)
FORMS = (
    (64, 8, 4, None, BF16, 2),
    (128, 16, 4, None, F16, 2),
    (128, 24, 1, None, BF16, 2),
    (128, 256, 8, None, BF16, 2),
    (256, 64, 2, None, BF16, 2),
    (128, 16, 4, E4M3, BF16, 2),
    (128, 32, 4, E5M2, F16, 400),
    (64, 8, 8, I8, F16, 2),
    (256, 16, 2, E4M3, BF16, 800),
)


def draw(rules, heads_kv, group, stored, pages):
    """The tensors among the rules, and scales of codes in one of their forms."""
    rules = dict(rules)
    heads = heads_kv * group
    if "alibi_slopes" in rules:
        shape = (heads,) if rules["alibi_slopes"] == 1 else (len(LENGTHS), heads)
        rules["alibi_slopes"] = torch.rand(shape, device="cuda") * 0.2
    if "sinks" in rules:
        rules["sinks"] = torch.randn(heads, device="cuda")
    if "kv_start" in rules:
        rules["kv_start"] = torch.tensor(
            [37, 4, 64, 777, -2, 699], dtype=torch.int32, device="cuda"
        )
    shape = {E4M3: (pages, heads_kv), E5M2: (heads_kv,), I8: ()}.get(stored)
    if shape is not None:
        size = 0.02 if stored == I8 else 0.5
        for name in ("k_scale", "v_scale"):
            rules[name] = (torch.rand(shape, device="cuda") + 1) * size
    return rules


@pytest.mark.gpu
@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("name", RULES)
def test_rules(name, form):
    """Packed sequences: one without keys, one without queries, one with one token; and tokens of no
    sequence."""
    torch.manual_seed(form)
    head_dim, page, group, stored, dtype, spare = FORMS[form]
    pages = sum(-(-n // page) for n in LENGTHS) + spare
    rules = draw(RULES[name], HEADS_KV, group, stored, pages)
    first = firsts(LENGTHS, QUERIES, rules)
    given = make(LENGTHS, QUERIES, first, head_dim, page, group, stored, dtype, spare)
    cu = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
    how = dict(rules, cu_seqlens_q=cu, max_seqlen_q=700)
    served = torch_gpukern.explain("paged_attn", *given, **how)["instance"]
    assert served.startswith(DECODED if stored else WIDE)
    out, lse = paged_attn(*given, **how, return_lse=True)
    torch_gpukern.check_errors()
    assert torch.equal(paged_attn(*given, **how), out)
    for b, (n, tokens) in enumerate(zip(LENGTHS, QUERIES)):
        rows = slice(STARTS[b], STARTS[b + 1])
        if n and tokens:
            want, want_lse = exact(given[0][rows], *given[1:4], b, n, first[b], rules)
            assert (out[rows].double() - want).norm() <= (
                6e-3 if dtype == BF16 else 1.5e-3
            ) * want.norm()
            torch.testing.assert_close(
                lse[rows].double(), want_lse, atol=1e-2 if stored else 1e-3, rtol=1e-4
            )
    nothing = (
        rules["sinks"].expand(5, -1)
        if "sinks" in rules
        else torch.full_like(lse[130:135], -math.inf)
    )
    assert (out[130:135] == 0).all() and torch.allclose(lse[130:135], nothing)
    assert (out[STARTS[-1] :] == 0).all() and (lse[STARTS[-1] :] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("stored", (None, E4M3))
@pytest.mark.parametrize(
    "rules", ({}, {"window_left": 5003}, {"softcap": 2.0, "window_left": 5003})
)
def test_splits(rules, stored):
    """Few tiles, so that keys are split and the heads of a group share a tile. Also in a graph."""
    torch.manual_seed(0)
    lengths, queries = (9000,), (32,)
    first = firsts(lengths, queries, rules)
    q, *given = make(lengths, queries, first, 128, 16, 4, stored, BF16)
    q = q[:32].contiguous()
    out, lse = paged_attn(q, *given, **rules, return_lse=True)
    want, want_lse = exact(q, *given[:3], 0, 9000, first[0], rules)
    assert (out.double() - want).norm() <= 6e-3 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = paged_attn(q, *given, **rules, return_lse=True)
    graph.replay()
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.gpu
def test_decoded_in_rounds():
    """Decoded pages that do not fit the workspace at once: heads are computed in rounds, with each
    head's slopes, sinks and scales."""
    torch.manual_seed(0)
    lengths, queries, spare = (700, 300), (200, 130), 80_000 // 16
    rules = {
        "alibi_slopes": torch.rand(32, device="cuda") * 0.2,
        "sinks": torch.randn(32, device="cuda"),
    }
    rules["k_scale"], rules["v_scale"] = (torch.rand(8, device="cuda") + 0.5 for _ in range(2))
    q, k, v, table, lens = make(lengths, queries, (0, 0), 128, 16, 4, E4M3, F16, spare, heads_kv=8)
    wide = torch.full((2, 6000), -7, dtype=torch.int32, device="cuda")
    wide[:, : table.shape[1]] = table
    cu = torch.tensor([0, 200, 330], dtype=torch.int32, device="cuda")
    how = dict(rules, cu_seqlens_q=cu, max_seqlen_q=200)
    plan = torch_gpukern.explain("paged_attn", q, k, v, wide, lens, **how)
    assert plan["instance"].startswith(DECODED) and plan["workspace_bytes"] < 300 << 20
    out, lse = paged_attn(q, k, v, wide, lens, **how, return_lse=True)
    for b, rows in enumerate((slice(0, 200), slice(200, 330))):
        want, want_lse = exact(q[rows], k, v, table, b, lengths[b], 0, rules)
        assert (out[rows].double() - want).norm() <= 1.5e-3 * want.norm()
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=1e-3, rtol=1e-4)
    assert (out[330:] == 0).all() and (lse[330:] == -math.inf).all()
    assert torch.equal(paged_attn(q, k, v, wide, lens, **how), out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (BF16, F16))
@pytest.mark.parametrize("stored", (E4M3, E5M2, I8))
def test_decoded_errs_as_torch_does(stored, dtype):
    """The error is at most twice that of torch's attention over the cache in q's dtype. Without a
    scale, or with a power of two, decoding adds no error."""
    torch.manual_seed(0)
    q, k, v, table, lens = make((1500,), (300,), (0,), 128, 16, 4, stored, dtype)
    q = q[:300].contiguous()
    for scale in (None, 0.03, 2.0**-5):
        rules = (
            {}
            if scale is None
            else {n: torch.full((), scale, device="cuda") for n in ("k_scale", "v_scale")}
        )
        own = table[0, :94].long()
        seen = torch.arange(1500, device="cuda") <= torch.arange(1200, 1500, device="cuda")[:, None]
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            *(
                values(x, rules.get(n), own, 0, 1500).to(dtype)[None]
                for x, n in ((k, "k_scale"), (v, "v_scale"))
            ),
            attn_mask=seen,
            enable_gqa=True,
        )
        out, want = (
            paged_attn(q, k, v, table, lens, **rules),
            exact(q, k, v, table, 0, 1500, 0, rules)[0],
        )
        assert (out.double() - want).norm() <= 2 * (
            theirs[0].transpose(0, 1).double() - want
        ).norm()
        if scale != 0.03:  # decoded pages hold what the cache does
            wide = [
                values(x, rules.get(n), own, 0, 1504).transpose(0, 1).to(dtype)
                for x, n in ((k, "k_scale"), (v, "v_scale"))
            ]
            wide = [x.reshape(94, 16, HEADS_KV, 128).contiguous() for x in wide]
            straight = torch.arange(94, device="cuda", dtype=torch.int32)[None]
            assert torch.equal(paged_attn(q, *wide, straight, lens), out)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", (None, E4M3))
def test_bad_contents_are_reported(stored):
    """Invalid pages and lengths with a window are reported. No other sequence changes, and pages
    before the window are not read."""
    torch.manual_seed(0)
    rules = {"window_left": 300}
    first = firsts(LENGTHS, QUERIES, rules)
    q, k, v, table, lens = make(LENGTHS, QUERIES, first, 128, 16, 4, stored, BF16)
    how = dict(
        rules, cu_seqlens_q=torch.tensor(STARTS, dtype=torch.int32, device="cuda"), max_seqlen_q=700
    )
    out = paged_attn(q, k, v, table, lens, **how)
    torch_gpukern.check_errors()
    for change in ("page", "length"):
        bad_table, bad_lens = table.clone(), lens.clone()
        if change == "page":
            bad_table[3, 1900 // 16] = k.shape[0] + 3
        else:
            bad_lens[3] = 699
        got = paged_attn(q, k, v, bad_table, bad_lens, **how)
        with pytest.raises(IndexError):
            torch.cuda.synchronize()
            torch_gpukern.check_errors()
        for rows in (slice(0, STARTS[3]), slice(STARTS[4], None)):
            assert torch.equal(got[rows], out[rows])
