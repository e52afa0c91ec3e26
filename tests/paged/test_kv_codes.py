# SPDX-License-Identifier: BSD-3-Clause
"""8-bit paged caches: writes, reads, PagedKVCache, rope_kv_write, the flash-attn functions."""

import copy
import math
import pickle
from itertools import product

import pytest
import torch
from attention_cases import Paged
from conftest import generator, same_bits

from torch_gpukern import (
    KVCacheScales,
    PagedKVCache,
    check_errors,
    kv_cache_write,
    paged_attn,
    reference,
    rms_norm,
    rope,
    rope_kv_write,
)
from torch_gpukern.integrations.flash_attn import flash_attn_with_kvcache

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
CODES = {E4M3: 448.0, E5M2: 57344.0, I8: 127.0}
KINDS = "none", "all", "head", "page"
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
# (query tokens of a sequence, heads of a group, head_dim)
SIZES = (1, 4, 64), (3, 2, 20), (40, 1, 128)


@pytest.fixture
def on(device):
    """New tensors are on the device."""
    with torch.device(device):
        yield device


each_code = pytest.mark.parametrize("code", CODES, ids=("e4m3", "e5m2", "int8"))


def codes_of(x, scale, code):
    """Codes by torch: x / scale in float32, saturated, rounded to nearest even."""
    y = x.float() / scale
    if code == I8:
        return y.clamp(-128, 127).round().nan_to_num(0).to(I8)
    return y.clamp(-CODES[code], CODES[code]).to(code)


def same_codes(a, b):
    a, b = (x.float() for x in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def scale_like(kind, blocks, heads):
    shape = {"none": None, "all": (), "head": (heads,), "page": (blocks, heads)}[kind]
    return None if shape is None else torch.rand(shape) * 0.05 + 0.005


def dequantised(cache, scale):
    """[num_blocks, block_size, Hkv, D] float64"""
    if scale is None:
        scale = torch.tensor(1.0)
    view = scale.double() if scale.dim() == 0 else scale.double()[..., None]
    return cache.double() * (view[:, None] if scale.dim() == 2 else view)


@pytest.mark.parametrize("code, kind, dtype", tuple(product(CODES, KINDS, DTYPES[:3]))[::2])
def test_write_is_torchs_cast(on, code, kind, dtype):
    """Every element is torch's cast, with odd sizes, strides, subnormals, ties, infinities and NaN.
    Rows without a slot do not change."""
    torch.manual_seed(0)
    blocks, size, heads, dim, tokens = 5, 3, 2, 37 if on == "cpu" else 40, 11
    k = (torch.randn(tokens, heads, dim) * torch.logspace(-6, 3, dim)).to(dtype)
    k[0, 0, :8] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e4, 0.5, 2.5])
    v = torch.randn(heads, tokens, 2 * dim).to(dtype).transpose(0, 1)[..., ::2]
    cache = [torch.full((blocks, size, heads, dim), 3, dtype=torch.int8).to(code) for _ in range(2)]
    scales = [scale_like(kind, blocks, heads) for _ in range(2)]
    slots = torch.randperm(blocks * size)[:tokens]
    slots[4] = -1
    kv_cache_write(k, v, *cache, slots, k_scale=scales[0], v_scale=scales[1])
    kept = slots >= 0
    for x, pages, scale in zip((k, v), cache, scales):
        by = torch.ones(()) if scale is None else scale
        by = by[slots.clamp_min(0) // size] if kind == "page" else by.expand(tokens, heads)
        want = torch.full((blocks * size, heads, dim), 3, dtype=torch.int8).to(code)
        want[slots[kept]] = codes_of(x, by[..., None], code)[kept]
        assert same_codes(pages.flatten(0, 1), want)
    again = [torch.full((blocks, size, heads, dim), 3, dtype=torch.int8).to(code) for _ in range(2)]
    reference.kv_cache_write(
        k.float(), v.float(), *again, slots, k_scale=scales[0], v_scale=scales[1]
    )
    assert all(same_codes(a, b) for a, b in zip(again, cache))


@pytest.mark.parametrize(
    "code, kind, dtype, sizes", tuple(product(CODES, KINDS, DTYPES, SIZES))[::5]
)
def test_read_is_attention_over_what_the_codes_are_worth(on, code, kind, dtype, sizes):
    """Compared with float64 over the dequantised cache, the error is at most twice that of
    PyTorch's attention in q's dtype. Data have a mean; unread rows and pages contain NaN codes."""
    tokens, group, dim = sizes
    if on == "cuda":
        dim = -(-dim // 8) * 8
    torch.manual_seed(tokens)
    heads, size, blocks, lengths = 2, 8 if tokens == 3 else 16, 40, (93, 41, 120)
    scales = [scale_like(kind, blocks, heads) for _ in range(2)]
    top = {E4M3: 40, E5M2: 40, I8: 100}[code] if kind != "none" else 3
    cache = [
        (torch.randn(blocks, size, heads, dim) * 0.2 + 0.3).mul(top).to(code) for _ in range(2)
    ]
    if kind == "page":
        for scale in scales:
            scale[0] = math.nan  # no sequence has page 0
    if code != I8:
        for pages in cache:
            pages[0] = torch.full_like(pages[0].float(), math.nan).to(code)
    free = iter((1 + torch.randperm(blocks - 1)).tolist())
    table = torch.zeros(len(lengths), 16, dtype=torch.int32)
    for b, n in enumerate(lengths):
        table[b, : -(-n // size)] = torch.tensor([next(free) for _ in range(-(-n // size))])
        if code != I8:
            for pages in cache:
                pages[table[b, n // size] if n % size else 0, n % size :] = float("nan")
    q = (torch.randn(len(lengths) * tokens, heads * group, dim) + 0.2).to(dtype)
    named = {"k_scale": scales[0], "v_scale": scales[1]}
    out, lse = paged_attn(
        q, *cache, table, torch.tensor(lengths, dtype=torch.int32), **named, return_lse=True
    )
    assert out.dtype == dtype and out.isfinite().all()
    stated = reference.paged_attn(
        q, *cache, table, torch.tensor(lengths, dtype=torch.int32), **named
    )
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[
        dtype
    ]
    torch.testing.assert_close(out, stated, atol=close * stated.abs().max().item(), rtol=close)
    k, v = (dequantised(pages, scale) for pages, scale in zip(cache, scales))
    for b, n in enumerate(lengths):
        keys, values = (x[table[b].long()].flatten(0, 1)[:n].transpose(0, 1)[None] for x in (k, v))
        mask = torch.arange(n) <= torch.arange(n - tokens, n)[:, None]
        mine = q[b * tokens : (b + 1) * tokens].transpose(0, 1)[None]

        def attend(dtype, of=(mine, keys, values), mask=mask):
            of = (x.to(dtype) for x in of)
            return torch.nn.functional.scaled_dot_product_attention(*of, mask, enable_gqa=True)[
                0
            ].double()

        exact = attend(torch.float64)
        error = (out[b * tokens : (b + 1) * tokens].transpose(0, 1).double() - exact).abs().max()
        peer = (attend(dtype) - exact).abs().max()
        rounding = {
            torch.float64: 1e-14,
            torch.float32: 1e-6,
            torch.float16: 1e-3,
            torch.bfloat16: 8e-3,
        }[dtype]
        assert error <= 2 * peer + rounding * exact.abs().max()
        scores = (mine.double() @ keys.repeat_interleave(group, 1).transpose(-1, -2))[
            0
        ] / math.sqrt(dim)
        want = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
        torch.testing.assert_close(
            lse[b * tokens : (b + 1) * tokens].T.double(),
            want,
            atol=20 * rounding,
            rtol=20 * rounding,
        )


def test_split_contexts_and_rules(on):
    """Long contexts in chunks, with a window, softcap, ALiBi, sinks and kv_start, in both cache
    layouts: the result is that of float pages."""
    torch.manual_seed(1)
    heads, size, n = 2, 16, 2500
    blocks = -(-n // size)
    cache = [torch.randn(blocks, heads, size, 64).to(E4M3).transpose(1, 2) for _ in range(2)]
    plain = [x.float() for x in cache]
    table, lens = (
        torch.randperm(blocks, dtype=torch.int32)[None],
        torch.tensor([n], dtype=torch.int32),
    )
    for q, rules in (
        (torch.randn(1, 4, 64), {}),
        (torch.randn(3, 4, 64), {"window_left": 1500, "softcap": 8.0}),
        (
            torch.randn(20, 4, 64),
            {"sinks": torch.randn(4), "kv_start": torch.tensor([100], dtype=torch.int32)},
        ),
        (torch.randn(2, 4, 64), {"alibi_slopes": torch.rand(4) * 0.01, "is_causal": False}),
    ):
        near = 0 if on == "cpu" else 1e-5
        got, want = (paged_attn(q, *pages, table, lens, **rules) for pages in (cache, plain))
        torch.testing.assert_close(got, want, atol=near, rtol=near)
        if on == "cuda":  # the kernels of 16 bits
            q, rules = q.bfloat16(), {name: x for name, x in rules.items() if name != "sinks"}
            got, want = (
                paged_attn(q, *pages, table, lens, **rules)
                for pages in (cache, [x.bfloat16() for x in plain])
            )
            torch.testing.assert_close(got, want, atol=8e-3, rtol=8e-3)


def test_refused_by_name():
    cache = torch.zeros(2, 4, 2, 8, dtype=E4M3)
    k, slots = torch.randn(3, 2, 8), torch.arange(3)
    table, lens, q = (
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.randn(1, 2, 8),
    )
    before = cache.clone()
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="v_scale must hold finite numbers above 0"):
            kv_cache_write(k, k, cache, cache.clone(), slots, v_scale=torch.tensor([1.0, bad]))
        with pytest.raises(ValueError, match="k_scale must hold finite numbers above 0"):
            paged_attn(q, cache, cache, table, lens, k_scale=torch.tensor(bad))
        with pytest.raises(ValueError, match="k_scale must hold finite numbers above 0"):
            paged_attn(q, cache, cache, table, lens, k_scale=torch.full((2, 2), bad))
    assert same_codes(cache, before)
    with pytest.raises(ValueError, match="v_cache has dtype int8, k_cache has float8_e4m3fn"):
        paged_attn(q, cache, torch.zeros(2, 4, 2, 8, dtype=I8), table, lens)
    plain = torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError, match="v_cache has dtype int8, q has float32"):
        paged_attn(q, plain, torch.zeros(2, 4, 2, 8, dtype=I8), table, lens)
    with pytest.raises(ValueError, match="v_cache has dtype float8_e5m2, k has float32"):
        kv_cache_write(k, k, plain, torch.zeros(2, 4, 2, 8, dtype=E5M2), slots)
    with pytest.raises(ValueError, match=r"k_scale must have shape \[\] or \[2\]"):
        paged_attn(q, plain, plain, table, lens, k_scale=torch.ones(2, 2))
    with pytest.raises(ValueError, match="k_scale must have shape"):
        paged_attn(q, cache, cache, table, lens, k_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"k_scale must have shape .*, here \[2, 2\]"):
        paged_attn(q, cache, cache, table, lens, k_scale=torch.ones(3, 2))
    with pytest.raises(ValueError, match="k_scale must be float32"):
        paged_attn(q, cache, cache, table, lens, k_scale=torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="k_cache has dtype uint8"):
        paged_attn(q, *[torch.zeros(2, 4, 2, 8, dtype=torch.uint8)] * 2, table, lens)
    with pytest.raises(IndexError, match="slots"):
        kv_cache_write(k, k, cache, cache.clone(), slots + 6)
    with pytest.raises(ValueError, match="dtype is torch.float8_e4m3fnuz"):
        PagedKVCache(2, 4, 2, 8, dtype=torch.float8_e4m3fnuz)
    with pytest.raises(ValueError, match="scales are of 8-bit pages"):
        PagedKVCache(2, 4, 2, 8, k_scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"k_scale has shape \[3\]"):
        PagedKVCache(2, 4, 2, 8, dtype=I8, k_scale=torch.ones(3))


@each_code
def test_paged_kv_cache(on, code):
    """Calibrated scales, forks, copies on write with the page's scale, rollback, pickling."""
    torch.manual_seed(2)
    layers, heads, dim = 2, 2, 16
    k, v = (
        torch.randn(layers, 10, heads, dim) * torch.tensor([1.0, 30.0])[:, None] for _ in range(2)
    )
    found = KVCacheScales(layers, heads, code)
    for layer in range(layers):
        found.observe(k[layer, :4], v[layer, :4], layer)
        found.observe(k[layer, 4:], v[layer, 4:], layer)
    scales = found.scales()
    torch.testing.assert_close(scales["k_scale"], k.abs().amax((1, 3)) / CODES[code])
    cache = PagedKVCache(8, 4, heads, dim, layers=layers, dtype=code, device=on, **scales)
    a = cache.allocate()
    cache.append([a], k[:, :6], v[:, :6], 6)
    b = cache.fork(a)
    cache.append([a, b], k[:, 6:8].repeat(1, 2, 1, 1), v[:, 6:].roll(1, 1), 2)
    cache = copy.deepcopy(cache)
    for handle, last in ((a, v[:, [9, 6]]), (b, v[:, [7, 8]])):
        pages = cache.pages(handle)
        for layer in range(layers):
            by = cache.scales(layer)["v_scale"]
            got = cache.v[layer, pages].flatten(0, 1)[:8]
            want = torch.cat((v[layer, :6], last[layer]))
            assert same_codes(got, codes_of(want, by[:, None], code))
            assert ((got.float() * by[:, None] - want).abs() <= want.abs() / 8 + by[:, None]).all()
            out = paged_attn(
                torch.randn(1, 4, dim),
                cache.k[layer],
                cache.v[layer],
                cache.block_table([handle]),
                cache.seq_lens([handle]),
                **cache.scales(layer),
            )
            assert out.isfinite().all()
    by_page = torch.rand(layers, 8, heads) + 0.5
    scales = {"k_scale": by_page, "v_scale": torch.tensor(0.5)}
    cache = PagedKVCache(8, 4, heads, dim, layers=layers, dtype=code, device=on, **scales)
    a = cache.allocate()
    cache.append([a], k[:, :6], v[:, :6], 6)
    b = cache.fork(a)
    cache.append([b], k[:, 6:7], v[:, 6:7])
    old, new = cache.pages(a)[1], cache.pages(b)[1]
    assert old != new and torch.equal(cache.k_scale[:, old], cache.k_scale[:, new])
    assert same_codes(cache.k[:, old, :2], cache.k[:, new, :2])


@each_code
@pytest.mark.parametrize("counts", (1, 3))
@pytest.mark.parametrize("how", ("fork", "fork cut", "truncate", "published", "several"))
def test_append_into_a_shared_page_rounds_by_the_copied_scale(on, code, counts, how):
    """A shared page is copied with its scale, and tokens after the copied ones are rounded by that
    scale.
    """
    # wrong in all pages but one
    scales = {"k_scale": torch.full((2, 8, 1), 0.25), "v_scale": torch.full((2, 8, 1), 0.25)}
    cache = PagedKVCache(8, 4, 1, 2, layers=2, dtype=code, device=on, **scales)
    for scale in (cache.k_scale, cache.v_scale):
        scale[:, 0] = 1.0
    a = cache.allocate()
    first = 4 if how == "published" else 2
    old, new = (torch.full((2, n, 1, 2), value) for n, value in ((first, 2.0), (counts, 3.0)))
    cache.append([a], old, -old, first)
    assert cache.pages(a) == [0]
    growing = [a]
    if how == "fork":
        cache.fork(a)
    elif how == "fork cut":
        growing = [cache.fork(a, 1)]
    elif how == "truncate":
        cache.fork(a)
        cache.truncate(a, 1)
    elif how == "published":
        cache.publish(a, list(range(4)))
        cache.truncate(a, 1)
    else:
        growing = [cache.fork(a), a, cache.fork(a, 1)]
    kept = [cache.length(f) for f in growing]
    before = [x.clone() for x in (cache.k_scale, cache.v_scale)]
    with pytest.raises(NotImplementedError):
        some = torch.ones(2, len(growing) * counts, 1, 2)
        cache.append(growing, some, some.clone().requires_grad_(), counts)
    assert torch.equal(cache.k_scale, before[0]) and torch.equal(cache.v_scale, before[1])
    cache.append(growing, *(x.repeat(1, len(growing), 1, 1) for x in (new, -new)), counts)
    for f, n in zip(growing, kept):
        at = min(n + counts, 4)
        for pages, scale, sign in ((cache.k, cache.k_scale, 1), (cache.v, cache.v_scale, -1)):
            page = cache.pages(f)[0]
            got = pages[:, page].float() * scale[:, page].view(2, 1, 1, 1)
            want = torch.tensor([2.0] * n + [3.0] * (at - n)).view(1, at, 1, 1).expand(2, at, 1, 2)
            torch.testing.assert_close(got[:, :at], sign * want, rtol=0, atol=0)


@pytest.mark.parametrize("code", (None, E4M3, I8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("norm", (False, True))
@pytest.mark.parametrize("dim, rotated", ((24, 16), (20, 12), (128, 128)))
def test_rope_kv_write(on, code, dtype, interleaved, norm, dim, rotated):
    """Norm and rotation against float64, with one rounding. With a negative slot, the query is
    still rotated."""
    torch.manual_seed(3)
    tokens, heads, group = 9, 2, 3
    q = torch.randn(tokens, heads * group, dim).to(dtype)
    k, v = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    angles = torch.rand(50, rotated // 2) * 6
    cos, sin, positions = angles.cos(), angles.sin(), torch.randint(50, (tokens,))
    slots = torch.randperm(20)[:tokens]
    slots[2] = -7
    caches = [torch.zeros(5, 4, heads, dim).to(code or dtype) for _ in range(2)]
    weights = {"q_weight": torch.rand(dim).to(dtype), "k_weight": torch.rand(dim)} if norm else {}
    scales = (
        {"k_scale": torch.tensor(0.03), "v_scale": torch.rand(heads) * 0.02 + 0.02} if code else {}
    )
    got = rope_kv_write(
        q, k, v, cos, sin, positions, *caches, slots, interleaved=interleaved, **weights, **scales
    )
    wide = [x.double() for x in (q, k)]
    if norm:
        wide = [rms_norm(x, w.double(), eps=1e-6) for x, w in zip(wide, weights.values())]
    want_q, want_k = rope(*wide, cos.double(), sin.double(), positions, interleaved=interleaved)
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want_q, atol=step, rtol=step)
    kept = slots >= 0
    for x, pages, scale in (
        (want_k, caches[0], scales.get("k_scale")),
        (v.double(), caches[1], scales.get("v_scale")),
    ):
        held, values = pages.flatten(0, 1)[slots[kept]], x[kept]
        if code is None:
            torch.testing.assert_close(held.double(), values, atol=step, rtol=step)
        else:
            by = scale.double() if scale.dim() == 0 else scale.double()[:, None]
            top, near = CODES[code], 2.0**-4 if code == E4M3 else 0.0
            values = (values / by).clamp(-top - (code == I8), top)
            assert (
                (held.double() - values).abs()
                <= values.abs() * near * 1.01 + (0.51 if code == I8 else 2.0**-9)
            ).all()
        assert pages.flatten(0, 1)[sorted(set(range(20)) - set(slots.tolist()))].float().eq(0).all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=str)
def test_rope_kv_write_forms(on, dtype):
    """Strides, another Dv, both layouts of the cache, int32 slots, and q, k, v that are rows of the
    caches: the result is that of the single ops on copies, in float64."""
    torch.manual_seed(5)
    for dim, dim_v, half, heads_first in (
        (8, 16, 4, True),
        (40, 7, 3, False),
        (256, 512, 64, True),
        (1, 1, 0, False),
    ):
        cache = [torch.randn(6, 2, 8, d).to(dtype) for d in (dim, dim_v)]
        k_cache, v_cache = cache = [
            x.transpose(1, 2) if heads_first else x.view(6, 8, 2, -1) for x in cache
        ]
        fused = torch.randn(5, 4, 2 * dim + dim_v).to(dtype)
        q, k, v = fused[..., :dim], fused[:, ::2, dim : 2 * dim], fused[:, 1::2, 2 * dim :]
        if dim == 40:
            q, k, v = k_cache[2, 1:6], k_cache[1:6, 3], v_cache[:5, 5]
        cos, sin = (torch.rand(9, half) for _ in range(2))
        positions, slots = (
            torch.randint(9, (5,)),
            torch.tensor([3, 19, -1, 33, 9], dtype=torch.int32),
        )
        weight, scale = (
            torch.rand(dim).to(dtype),
            torch.tensor([0.5, 2.0], dtype=cos.dtype if dtype != torch.float64 else dtype),
        )
        again = [x.double().clone() for x in cache]
        rows = rms_norm(q.double(), weight.double(), eps=0.1), k.double()
        want, keys = rope(*rows, cos.double(), sin.double(), positions, interleaved=True)
        kv_cache_write(keys, v.double(), *again, slots, k_scale=scale.double())
        got = rope_kv_write(
            q,
            k,
            v,
            cos,
            sin,
            positions,
            *cache,
            slots,
            q_weight=weight,
            eps=0.1,
            interleaved=True,
            k_scale=scale,
        )
        step = 2.0**-10 if dtype == torch.float16 else 1e-13
        torch.testing.assert_close(got.double(), want, atol=step, rtol=step)
        for x, y in zip(cache, again):
            torch.testing.assert_close(x.double(), y, atol=step, rtol=step)
    empty = rope_kv_write(q[:0], k[:0], v[:0], cos, sin, positions[:0], *cache, slots[:0])
    assert empty.shape == (0, *q.shape[1:])


def test_rope_kv_write_of_bad_contents(on):
    """On CUDA, a bad position uses the last row of cos, a token with a bad slot is not written, and
    the next call raises IndexError."""
    if on == "cpu":
        return  # test_rope_kv_write_refuses
    q, k, cos = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.rand(5, 4)
    caches = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    good = rope_kv_write(
        q, k, k, cos, cos, torch.tensor([0, 4, 4]), *caches, torch.tensor([0, -1, 2])
    )
    check_errors()
    again = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    for positions, slots, said in (
        ([0, 4, 4], [0, 8, 2], "slot"),
        ([0, 5, -1], [0, -1, 2], "position"),
    ):
        got = rope_kv_write(q, k, k, cos, cos, torch.tensor(positions), *again, torch.tensor(slots))
        with pytest.raises(IndexError, match=said):
            torch.cuda.synchronize()
            check_errors()
        assert torch.equal(got, good) and all(torch.equal(a, b) for a, b in zip(again, caches))


def test_rope_kv_write_refuses():
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    cos = torch.ones(5, 4)
    caches = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    rest = cos, cos, torch.arange(3), *caches, torch.arange(3)
    with pytest.raises(NotImplementedError, match="rope_kv_write: it has no backward"):
        rope_kv_write(q.clone().requires_grad_(), k, k, *rest)
    with pytest.raises(ValueError, match="rope_kv_write: k has dtype bfloat16, q has float32"):
        rope_kv_write(q, k.bfloat16(), k, *rest)
    with pytest.raises(
        ValueError, match=r"rope_kv_write: q_weight must have shape \[8\], got \[4\]"
    ):
        rope_kv_write(q, k, k, *rest, q_weight=torch.ones(4))
    with pytest.raises(IndexError, match="positions"):
        rope_kv_write(q, k, k, cos, cos, torch.tensor([0, 1, 5]), *caches, torch.arange(3))
    with pytest.raises(IndexError, match="slots"):
        rope_kv_write(q, k, k, cos, cos, torch.arange(3), *caches, torch.tensor([0, 1, 8]))
    assert all((x == 0).all() for x in caches)


def test_flash_attn_functions_over_codes_and_rotated(on):
    torch.manual_seed(4)
    batch, new, heads, dim = 2, 3, 2, 16
    q = torch.randn(batch, new, 4, dim)
    k, v = (torch.randn(batch, new, heads, dim) for _ in range(2))
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    angles = torch.rand(40, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    scales = {"k_descale": torch.tensor([0.02, 0.03]), "v_descale": torch.tensor(0.02)}
    for causal in (True, False):
        caches = [(torch.randn(batch, 16, heads, dim) * 50).to(E4M3) for _ in range(2)]
        expected = [
            x.float() * s
            for x, s in zip(caches, (scales["k_descale"][:, None], scales["v_descale"]))
        ]
        got = flash_attn_with_kvcache(q, *caches, k, v, cos, sin, lengths, causal=causal, **scales)
        for b, n in enumerate(lengths.tolist()):
            at = torch.arange(n, n + new)
            rotated_q = rope(
                q[b], k[b], cos, sin, at if causal else torch.full((new,), n), interleaved=True
            )[0]
            rotated_k = rope(q[b], k[b], cos, sin, at, interleaved=True)[1]
            for pages, x, scale in (
                (expected[0], rotated_k, scales["k_descale"][:, None]),
                (expected[1], v[b], scales["v_descale"]),
            ):
                pages[b, n : n + new] = codes_of(x, scale, E4M3).float() * scale
            want = flash_attn_with_kvcache(
                rotated_q[None],
                expected[0][b : b + 1],
                expected[1][b : b + 1],
                cache_seqlens=n + new,
                causal=causal,
            )
            torch.testing.assert_close(got[b : b + 1], want, atol=1e-5, rtol=1e-5)


def test_compiled(on):
    """No graph break, and the same bits."""
    caches = [torch.zeros(4, 4, 2, 16, dtype=E4M3) for _ in range(2)]
    again = [x.clone() for x in caches]
    angles = torch.rand(40, 8)
    table, scale = torch.arange(4, dtype=torch.int32)[None], torch.tensor([0.02, 0.05])

    def step(q, k, v, k_cache, v_cache, lens, slots):
        q = rope_kv_write(
            q, k, v, angles.cos(), angles.sin(), slots, k_cache, v_cache, slots, k_scale=scale
        )
        return paged_attn(q, k_cache, v_cache, table, lens, k_scale=scale)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 5):
        q, k = torch.randn(n, 4, 16), torch.randn(n, 2, 16)
        rest = torch.tensor([n], dtype=torch.int32), torch.arange(n)
        assert torch.equal(compiled(q, k, k, *again, *rest), step(q, k, k, *caches, *rest))
        assert all(same_codes(a, b) for a, b in zip(again, caches))


def test_scales_that_were_made_in_inference_mode():
    with torch.inference_mode():
        found = KVCacheScales(1, 2, torch.float8_e4m3fn)
        pages = torch.ones(1, 6, 2)
    k = torch.ones(3, 2, 8)
    found.observe(k, k)
    cache = PagedKVCache(6, 4, 2, 8, dtype=torch.float8_e4m3fn, k_scale=pages, v_scale=pages)
    sequence = cache.allocate()
    cache.append([sequence], k, k, 3)
    pages_of = cache.pages(sequence)
    with torch.inference_mode():
        pages[0, pages_of[0]] = 2
    fork = cache.fork(sequence)
    cache.extend([fork], 1)  # copies the page and its scales
    assert cache.k_scale[0, cache.pages(fork)[0]].tolist() == [2, 2]
    for margin in (0.0, -1.0, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="KVCacheScales.scales: margin is"):
            found.scales(margin)


@each_code
def test_scales_of_what_was_not_observed_are_refused(on, code):
    """A layer or head with only zeros has no scale; 2^-126 would saturate every later key."""
    k, zero_head = torch.ones(3, 2, 8), torch.ones(3, 2, 8)
    zero_head[:, 1] = 0
    for k1, v1, want in (
        (None, None, "k of layer 1, all heads, had no value but 0"),
        (k, torch.zeros(3, 2, 8), "v of layer 1, all heads, had no value but 0"),
        (zero_head, k, r"k of layer 1, heads \[1\], had no value but 0"),
        (k, k * math.inf, "v of layer 1, all heads, had a value that is infinite or NaN"),
        (
            zero_head / zero_head,
            k,
            r"k of layer 1, heads \[1\], had a value that is infinite or NaN",
        ),
    ):
        found = KVCacheScales(2, 2, code)
        found.observe(k, k, 0)
        if k1 is not None:
            found.observe(k1, v1, 1)
        with pytest.raises(ValueError, match=f"KVCacheScales.scales: {want}"):
            found.scales()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_cache_is_pickled(dtype):
    cache = PagedKVCache(6, 4, 2, 8, dtype=dtype, k_scale=torch.full((2,), 0.5))
    cache.append([cache.allocate()], torch.ones(3, 2, 8), torch.ones(3, 2, 8), 3)
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert other.k.dtype is dtype and other.k.data_ptr() != cache.k.data_ptr()
        assert torch.equal(other.k.view(torch.uint8), cache.k.view(torch.uint8))
        assert other.pages(other.sequences[0]) == cache.pages(cache.sequences[0])


# name -> lengths, query tokens, heads, head_dim, tokens of a page, a mask over new tokens
FORMS = {
    "decode": ([300, 70, 5], [1, 1, 1], (4, 2), 128, 16, False),
    "more rows": ([300, 70, 5], [3, 3, 3], (16, 2), 128, 16, False),
    "small pages": ([300, 70, 5], [2, 1, 1], (4, 2), 64, 8, False),
    "odd pages": ([300, 70, 5], [1, 1, 1], (4, 2), 32, 5, False),
    "prefill": ([300, 200], [130, 130], (4, 2), 128, 16, False),
    "tree": ([300, 70, 129], [4, 4, 4], (4, 2), 64, 16, True),
    "short tree": ([5, 9, 12], [4, 8, 12], (4, 2), 128, 8, True),
}


def scaled_case(form, code, dtype, device):
    """A cache of codes that reach the ends of their range in v, and the arguments of a call."""
    lengths, queries, heads, dim, size, tree = FORMS[form]
    gen = generator("scales", form, code, dtype)
    case = Paged(gen, lengths, queries, *heads, dim, dim, size, torch.float32, device)
    most = {E4M3: 100, E5M2: 100, I8: 30}[code]
    case.q = case.q.to(dtype)
    case.k_cache, case.v_cache = (
        (c * by).nan_to_num(0).clamp(-127, 127).to(code)
        for c, by in ((case.k_cache, 1 if code != I8 else 20), (case.v_cache, most))
    )
    rules = {"k_scale": torch.full((len(case.k_cache), heads[1]), 1.0 if code != I8 else 0.05)}
    rules["k_scale"] = rules["k_scale"].to(device)
    if tree:
        masks = [torch.rand(n, max(queries), generator=gen) < 0.6 for n in queries]
        rules["attn_mask"] = (torch.cat(masks)).to(device)
    if len(set(queries)) > 1:
        rules |= {"cu_seqlens_q": case.cu_seqlens_q, "max_seqlen_q": max(queries)}
    return case, rules


@each_code
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("scales", ("far apart", "tiny", "huge"))
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_pages_far_apart(form, scales, dtype, code, device):
    """v_scale of 1e-6, of 100, and from 1e-4 to 100 in one sequence. Products stay in the range of
    float16. Weights times such scales would not: float16 has 17 steps up to 1e-6."""
    case, rules = scaled_case(form, code, dtype, device)
    shape, gen = (len(case.k_cache), 2), generator("scales", form, scales)
    powers = torch.randint(-4, 3, shape, generator=gen).double()
    powers = {"tiny": powers * 0 - 6, "huge": powers * 0 + 2}.get(scales, powers)
    rules["v_scale"] = (10**powers).float().to(device)
    out = paged_attn(*case.args(), **rules)
    args = case.q.double(), *case.args()[1:]
    want = reference.paged_attn(*args, **{n: wide(x) for n, x in rules.items()})
    largest = want.abs().amax(-1)
    error = (out.double() - want).abs().amax(-1)
    close = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= close * largest + least).all(), (error / largest).nan_to_num(0).max()


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@pytest.mark.gpu
@each_code
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_pages_that_the_cpu_refuses(form, dtype, code):
    """CUDA does not read scales on the host. If all are 0, so is the result. NaN and infinity show
    in the sequence that has the page, and in no other one."""
    case, rules = scaled_case(form, code, dtype, "cuda")
    scale = rules["v_scale"] = torch.zeros(len(case.k_cache), 2, device="cuda")
    out, lse = paged_attn(*case.args(), **rules, return_lse=True)
    assert not out.any()
    scale.fill_(0.01)
    before = paged_attn(*case.args(), **rules, return_lse=True)
    assert same_bits(lse, before[1]) and before[0].isfinite().all()
    scale[case.block_table[1].long()[:1], 0] = 0
    some, _ = paged_attn(*case.args(), **rules, return_lse=True)
    assert some.isfinite().all()
    n = case.queries[0]
    for bad in (math.nan, math.inf):
        scale[case.block_table[0, 0].long(), 0] = bad
        out, lse = paged_attn(*case.args(), **rules, return_lse=True)
        group = out.shape[1] // 2
        assert not out[:n, :group].isfinite().any(-1).any()
        assert same_bits(out[n:], some[n:]) and same_bits(out[:, group:], some[:, group:])
        assert same_bits(lse, before[1])
