# SPDX-License-Identifier: BSD-3-Clause
"""flash-attn's three functions against its documented conventions, written out in float64."""

import itertools
import re
from functools import cache

import pytest
import torch
from conftest import assert_close_as, generator, randn

import torch_gpukern
from torch_gpukern.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def judge(
    q,
    k,
    v,
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    alibi_slopes=None,
    first=0,
):
    """One sequence: q [Sq, Hq, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv] -> (out [Sq, Hq, Dv], lse [Hq,
    Sq]) in q's dtype."""
    (sq, heads, d), sk = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    score = torch.einsum("ihd,jhd->hij", q, k) * (
        d**-0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    i, j = torch.arange(sq, device=q.device)[:, None] + sk - sq, torch.arange(sk, device=q.device)
    if alibi_slopes is not None:
        score = score - alibi_slopes[:, None, None].to(q.dtype) * (i - j).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = j >= first
    seen = seen & (j >= i - left) if left >= 0 else seen
    seen = seen & (j <= i + right) if right >= 0 else seen
    score = score.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(score, -1)
    weights = torch.exp(score - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def compare(got, dtype, run):
    """Compares `got` with run(float64); run(dtype) is the yardstick."""
    for name, g, yard, ref in zip(("out", "lse"), got, run(dtype), run(torch.float64)):
        assert g.dtype == (torch.float32 if name == "lse" else dtype)
        assert_close_as(yard, g, ref, name)


RULES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3), "softcap": 3.0},
    "causal window": {"causal": True, "window_size": (6, 4), "softmax_scale": 0.3},
    "left window": {"window_size": (4, -1)},
    "alibi": {"causal": True, "alibi_slopes": True},
}


def rules_for(name, heads, device):
    rules = dict(RULES[name])
    if "alibi_slopes" in rules:
        rules["alibi_slopes"] = torch.linspace(0.1, 0.4, heads, device=device)
    return rules


def serves_short(rules, device):
    """Whether paged_attn serves sequences with fewer keys than queries: on CUDA only if no query
    sees to its right."""
    return (
        device == "cpu" or rules.get("causal", False) or rules.get("window_size", (-1, -1))[1] == 0
    )


def stacked(parts, dim_out=0, dim_lse=1):
    outs, lses = zip(*parts)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [(9, 21), (21, 9), (17, 17)], ids=str)
def test_func(rule, lengths, device):
    gen, rules = generator("func"), rules_for(rule, 4, device)
    (sq, sk), dtype = lengths, torch.float32
    q, k, v = (randn(gen, 2, s, h, 16, device=device) for s, h in ((sq, 4), (sk, 2), (sk, 2)))
    out, lse, probabilities = flash_attn_func(q, k, v, **rules, return_attn_probs=True)
    assert probabilities is None and out.shape == q.shape and lse.shape == (2, 4, sq)
    compare(
        (out, lse),
        dtype,
        lambda t: stacked([judge(*(x[b].to(t) for x in (q, k, v)), **rules) for b in range(2)]),
    )
    assert torch.equal(flash_attn_func(q, k, v, **rules), out)


def test_func_gradients(device):
    shapes = ((2, 9, 4, 16), (2, 14, 2, 16), (2, 14, 2, 8), (2, 9, 4, 8))

    def grads(draw, dtype, call):
        gen = generator("gradients", draw) if draw else generator("gradients")
        *leaves, grad = (randn(gen, *s, device=device).to(dtype) for s in shapes)
        xs = [x.requires_grad_() for x in leaves]
        return torch.autograd.grad(call(*xs), xs, grad)

    def ours(q, k, v):
        return flash_attn_func(
            q, k, v, causal=True, window_size=(7, 0), deterministic=device == "cpu"
        )

    def theirs(q, k, v):
        return torch.stack(
            [judge(q[b], k[b], v[b], causal=True, window_size=(7, 0))[0] for b in range(2)]
        )

    @cache
    def pairs(draw):
        return list(
            zip(grads(draw, torch.float32, theirs), grads(draw, torch.float64, theirs), strict=True)
        )

    for i, got in enumerate(grads(0, torch.float32, ours)):
        ref = pairs(0)[i][1]
        assert_close_as(
            lambda draw, i=i: [pairs(draw)[i]], got, ref, f"d{'qkv'[i]}", sources=2 * 9 * 4
        )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_varlen(rule, paged, device):
    gen, rules = generator("varlen"), rules_for(rule, 4, device)
    sq, sk = [3, 0, 8, 5], [7, 4, 8, 2 if serves_short(rules, device) or not paged else 6]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (sq, sk))
    q, k, v = (
        randn(gen, n, h, 16, device=device) for n, h in ((16, 4), (sum(sk), 2), (sum(sk), 2))
    )
    keys, values, extra = k, v, {}
    if paged:
        keys, values = (torch.full((8, 4, 2, 16), float("nan"), device=device) for _ in range(2))
        table = torch.randperm(8, generator=gen).int().view(4, 2).to(device)
        for b in range(4):
            for j in range(sk[b]):
                at = table[b, j // 4], j % 4
                keys[at], values[at] = k[cu_k[b] + j], v[cu_k[b] + j]
        extra = {"block_table": table}
    out, lse, _ = flash_attn_varlen_func(
        q, keys, values, cu_q, cu_k, 8, 8, **rules, return_attn_probs=True, **extra
    )
    assert out.shape == q.shape and lse.shape == (4, 16)

    def run(dtype):
        parts = []
        for b in range(4):
            rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            parts.append(judge(q[rows].to(dtype), k[cols].to(dtype), v[cols].to(dtype), **rules))
        return torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts], 1)

    compare((out, lse), torch.float32, run)


@pytest.mark.parametrize(
    "layout", ["rows", "batch_idx", "leftpad", "leftpad_idx", "pages", "leftpad_pages"]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seq_q", [1, 3])
def test_with_kvcache(seq_q, rule, layout, device):
    """New keys are written in place at each sequence's length and are seen. Rows and pages of other
    sequences stay unchanged."""
    gen, rules = generator("kvcache"), rules_for(rule, 4, device)
    lengths, rows, size = [5, 0, 9], 5, 16
    old, new = (
        randn(gen, 2, rows, size, 2, 16, device=device),
        randn(gen, 2, 3, seq_q, 2, 16, device=device),
    )
    q = randn(gen, 3, seq_q, 4, 16, device=device)
    first, extra, idx = [0, 0, 0], {}, [0, 1, 2]
    k_cache, v_cache = (x.clone() for x in old)
    if layout.endswith("idx"):
        idx = [4, 0, 2]
        extra["cache_batch_idx"] = torch.tensor(idx, device=device)
    if layout.startswith("leftpad"):
        first = [2, 0, 9]
        extra["cache_leftpad"] = torch.tensor(first, dtype=torch.int32, device=device)
    if layout.endswith("pages"):
        table = torch.randperm(rows * 4, generator=gen).int().view(rows, 4).to(device)
        k_cache, v_cache = (torch.empty(rows * 4, 4, 2, 16, device=device) for _ in range(2))
        for cache, x in ((k_cache, old[0]), (v_cache, old[1])):
            cache[table.flatten().long()] = x.view(rows * 4, 4, 2, 16)
        extra["block_table"] = table[:3]
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *new,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        **rules,
        **extra,
        return_softmax_lse=True,
        num_splits=2,
    )
    want = old.clone()
    for b, n in enumerate(lengths):
        want[:, idx[b], n : n + seq_q] = new[:, b]
    stored = [
        c[table.flatten().long()].view(rows, size, 2, 16) if layout.endswith("pages") else c
        for c in (k_cache, v_cache)
    ]
    assert torch.equal(torch.stack(stored), want)

    def run(dtype):
        return stacked(
            [
                judge(
                    q[b].to(dtype),
                    *(x[idx[b], : n + seq_q].to(dtype) for x in want),
                    **rules,
                    first=first[b],
                )
                for b, n in enumerate(lengths)
            ]
        )

    assert out.shape == q.shape and lse.shape == (3, 4, seq_q)
    compare((out, lse), torch.float32, run)


@pytest.mark.parametrize("layout", ["rows", "batch_idx", "pages"])
@pytest.mark.parametrize("rule", RULES)
def test_with_kvcache_of_fewer_keys_than_queries(rule, layout, device):
    """The same value as flash_attn_func: a query before key 0 sees the keys that causal and the
    windows allow. If it sees none, its result is 0."""
    gen, rules = generator("short cache"), rules_for(rule, 4, device)
    if layout == "pages" and not serves_short(rules, device):
        pytest.skip("over pages on CUDA short lengths are served where causal")
    lengths, q = [2, 6, 1, 0], randn(gen, 4, 5, 4, 16, device=device)
    k, v = (randn(gen, 4, 8, 2, 16, device=device) for _ in range(2))
    k_cache, v_cache, extra = k, v, {}
    if layout == "batch_idx":
        idx = torch.tensor([3, 1, 0, 2], device=device)
        k_cache, v_cache = (torch.empty_like(x).index_copy_(0, idx, x) for x in (k, v))
        extra["cache_batch_idx"] = idx
    elif layout == "pages":
        k_cache, v_cache = (x.view(8, 4, 2, 16) for x in (k, v))
        extra["block_table"] = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        **rules, **extra, return_softmax_lse=True,
    )  # fmt: skip

    def run(dtype):
        return stacked(
            [
                judge(q[b].to(dtype), *(x[b, :n].to(dtype) for x in (k, v)), **rules)
                for b, n in enumerate(lengths)
            ]
        )

    compare((out, lse), torch.float32, run)
    assert not out[3].any() and bool((lse[3] == -torch.inf).all())


def test_with_kvcache_without_new_keys(device):
    gen = generator("whole")
    q, k, v = (randn(gen, 2, s, h, 16, device=device) for s, h in ((3, 4), (8, 2), (8, 2)))
    for lengths, keys in ((None, 8), (6, 6)):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        torch.testing.assert_close(out, flash_attn_func(q, k[:, :keys], v[:, :keys], causal=True))


@pytest.mark.parametrize("of_cache", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_the_dtype_of_a_result_is_one_on_every_path(of_cache, device):
    """Inside autocast the dtype is that of the cache, which is not cast."""
    pages = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    layouts = {}, {"cache_batch_idx": torch.tensor([0], device=device)}, {"block_table": pages}
    for to, seq_q, extra, causal in itertools.product(
        (torch.bfloat16, torch.float16), (1, 3), layouts, (False, True)
    ):
        cache = torch.ones(
            (2, 4, 2, 8) if "block_table" in extra else (1, 8, 2, 8), dtype=of_cache, device=device
        )
        with torch.autocast(device, to):
            out = flash_attn_with_kvcache(
                torch.ones(1, seq_q, 2, 8, device=device),
                cache,
                cache,
                cache_seqlens=5,
                causal=causal,
                **extra,
            )
        assert out.dtype == of_cache


def test_a_key_past_the_cache_is_an_error():
    q, k = torch.zeros(2, 1, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises(IndexError):
        flash_attn_with_kvcache(q, k, k.clone(), q, q, cache_seqlens=4)
    assert not k.any()


def test_dropout():
    """The seed is torch's, and the mask is ours."""
    q = torch.randn(2, 9, 3, 16)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,))
    x = q.transpose(1, 2)
    want = torch_gpukern.flash_attn(
        x, x, x, is_causal=True, dropout_p=0.5, dropout_seed=seed
    ).transpose(1, 2)
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(q, q, q, 0.5, causal=True), want)
    y = q.flatten(0, 1)
    torch.manual_seed(3)
    got = flash_attn_varlen_func(y, y, y, cu, cu, 9, 9, 0.5, causal=True)
    assert torch.equal(
        got,
        torch_gpukern.flash_attn_varlen(
            y, y, y, cu, cu, 9, 9, is_causal=True, dropout_p=0.5, dropout_seed=seed
        ),
    )
    with pytest.raises(ValueError, match="dropout_p is 0.5 beside a block_table"):
        table = torch.zeros(2, 1, dtype=torch.int32)
        flash_attn_varlen_func(y, q, q, cu, cu, 9, 9, 0.5, block_table=table)


def test_refusals():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="flash_attn: dropout_p must be between 0 and 1, got 1.5"):
        flash_attn_func(q, q, q, 1.5)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin come together"):
        flash_attn_with_kvcache(q, q, q, rotary_cos=q)
    with pytest.raises(ValueError, match="rotary_cos is given and k is not"):
        flash_attn_with_kvcache(q, q, q, rotary_cos=q, rotary_sin=q)
    with pytest.raises(ValueError, match="k and v come together"):
        flash_attn_with_kvcache(q, q, q, k=q)
    with pytest.raises(ValueError, match="k is given and cache_seqlens is not"):
        flash_attn_with_kvcache(q, q, q, k=q, v=q)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_batch_idx is for caches without a block_table"):
        flash_attn_with_kvcache(q, q, q, block_table=table, cache_batch_idx=table[0])


@pytest.mark.parametrize("rotary", (False, True))
@pytest.mark.parametrize("paged", (True, False))
def test_tokens_past_the_cache_name_what_the_caller_passed(paged, rotary):
    """On the CPU. kv_cache_write, which finds the error, would speak of slots."""
    from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

    q, k, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.zeros(4, 16, 2, 8)
    more = {"rotary_cos": torch.ones(64, 4), "rotary_sin": torch.zeros(64, 4)} if rotary else {}
    if paged:
        more["block_table"] = torch.tensor([[0, 1]], dtype=torch.int32)
    wrong = torch.tensor([32 if paged else 16], dtype=torch.int32)
    name = (
        "block_table is expected to hold pages in \\[0, 4\\)"
        if paged
        else "cache_seqlens is expected to leave room"
    )
    with pytest.raises(IndexError, match=f"gpukern flash_attn_with_kvcache: {name}") as caught:
        flash_attn_with_kvcache(
            q, cache, cache.clone(), k, k, cache_seqlens=wrong, causal=True, **more
        )
    assert "slots" not in str(caught.value)
    right = flash_attn_with_kvcache(
        q, cache, cache.clone(), k, k, cache_seqlens=wrong - 1, causal=True, **more
    )
    assert right.shape == q.shape


@pytest.mark.parametrize(
    ("how", "says"),
    (
        ({"cache_seqlens": [-1], "block_table": [[0, 1]]}, "block_table is expected to hold"),
        ({"cache_seqlens": [3], "block_table": [[-1, 1]]}, "block_table is expected to hold"),
        ({"cache_seqlens": [0], "block_table": [[]]}, "block_table is expected to hold"),
        ({"cache_seqlens": [-1]}, "cache_seqlens is expected to leave room"),
        ({"cache_seqlens": [3], "cache_batch_idx": [-1]}, "cache_seqlens is expected to leave"),
        ({"cache_seqlens": [1, 1]}, r"cache_seqlens must have shape \[1\]"),
    ),
)
def test_tokens_before_the_cache_are_refused(how, says):
    """A page of -1 and row 3 of 4 made slot -1, which kv_cache_write skips. A length of -1 was an
    index of torch's gather, which on CUDA ends the process."""
    from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

    how = {name: torch.tensor(x, dtype=torch.int32) for name, x in how.items()}
    q, k, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises((IndexError, ValueError), match=f"gpukern flash_attn_with_kvcache: {says}"):
        flash_attn_with_kvcache(q, cache, cache.clone(), k, k, **how)
    assert cache.count_nonzero() == 0


def test_a_row_that_the_cache_has_not_gives_nan(device, monkeypatch):
    """Several queries without causal, as CUDA takes them: torch's own indexing would end the
    process there, or take the last row for -1."""
    from torch_gpukern.integrations import flash_attn as module

    monkeypatch.setattr(module, "_short", lambda *_: False)
    gen = generator("rows of a cache")
    q, cache = (randn(gen, *shape, device=device) for shape in ((4, 3, 2, 16), (3, 8, 2, 16)))
    lengths = torch.tensor([8, 5, 8, 6], dtype=torch.int32, device=device)

    def call(rows):
        rows = torch.tensor(rows, dtype=torch.int32, device=device)
        how = {"cache_seqlens": lengths, "cache_batch_idx": rows, "return_softmax_lse": True}
        return flash_attn_with_kvcache(q, cache, cache, **how)

    for got, right in zip(call([2, -1, 0, 3]), call([2, 1, 0, 1]), strict=True):
        assert torch.equal(got[::2], right[::2])
        assert got[1::2].isnan().all() and not right.isnan().any()


@pytest.mark.parametrize(
    ("how", "says"),
    (
        ({"cache_seqlens": [-1]}, r"cache_seqlens is expected not to be negative"),
        ({"cache_seqlens": [5]}, r"cache_seqlens is expected to fit a row of k_cache \(4 keys\)"),
        (
            {"cache_seqlens": [3], "cache_batch_idx": [7]},
            r"cache_batch_idx is expected in \[0, 2\)",
        ),
        ({"cache_seqlens": [3], "block_table": [[5]]}, r"block_table is expected to hold pages"),
    ),
)
def test_lengths_of_a_cache_are_named_as_the_caller_does(how, says):
    from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

    how = {name: torch.tensor(x, dtype=torch.int32) for name, x in how.items()}
    q, cache = torch.ones(1, 1, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises(IndexError, match=f"gpukern flash_attn_with_kvcache: {says}"):
        flash_attn_with_kvcache(q, cache, cache.clone(), **how)


_ONE = {"cache_seqlens": torch.tensor([1], dtype=torch.int32)}
_TURNS = {"rotary_cos": torch.ones(2, 4), "rotary_sin": torch.zeros(2, 4)}


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("how", "says"),
    (
        (
            _TURNS | {"cache_seqlens": torch.tensor([2], dtype=torch.int32)},
            r"cache_seqlens and the tokens behind are expected to have rows of rotary_cos, "
            r"\[0, 2\), got 2",
        ),
        (_TURNS | _ONE | {"rotary_sin": torch.zeros(3, 4)}, r"rotary_sin must have shape \[2, 4\]"),
        (_ONE | {"block_table": torch.zeros(2, 1).int()}, r"block_table must have shape \[1, max_"),
        (_ONE | {"block_table": torch.zeros(1).int()}, r"block_table must have shape \[1, max_"),
        (_ONE | {"block_table": torch.zeros(1, 1).long()}, r"block_table must be int32, got int64"),
        (
            _ONE | {"cache_batch_idx": torch.zeros(2).int()},
            r"cache_batch_idx must have shape \[1\]",
        ),
        (_ONE | {"cache_leftpad": torch.zeros(2).int()}, r"cache_leftpad must have shape \[1\]"),
        (
            _ONE | {"k_descale": torch.ones(3)},
            r"k_descale must have shape \[\] or \[2\], got \[3\]",
        ),
    ),
)
def test_errors_of_the_ops_name_what_the_caller_passed(how, says, causal):
    """Both with new tokens, which rope and kv_cache_write look at, and without."""
    from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

    codes = {"k_descale"} & how.keys()
    cache = torch.zeros(2, 4, 2, 8).to(torch.float8_e4m3fn if codes else torch.float32)
    q, k = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8)
    for new in ((k, k), ()) if "rotary_cos" not in how else ((k, k),):
        with pytest.raises((IndexError, ValueError)) as caught:
            flash_attn_with_kvcache(q, cache, cache.clone(), *new, **how, causal=causal)
        assert re.match(f"gpukern flash_attn_with_kvcache: {says}", str(caught.value))
    assert cache.view(torch.uint8).count_nonzero() == 0


def test_lengths_that_are_no_integers_are_refused():
    from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

    q, cache = torch.ones(1, 1, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError, match="cache_seqlens must be int32 or int64, got float32"):
        flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=torch.tensor([1.5]))
