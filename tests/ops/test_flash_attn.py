# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn and flash_attn_varlen, forward and backward."""

import itertools
import json
import math
import warnings
from functools import cache, partial

import pytest
import torch
from attention_cases import (
    MODIFIERS,
    MORE_MODIFIERS,
    for_dtype,
    logit_dtype,
    lse_yardsticks,
    modifiers,
    reordered,
    reordered_packed,
    torch_attn,
    visible,
)
from conftest import (
    ALL,
    FLOATS,
    HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    Lazily,
    assert_close_as,
    f64,
    far_apart,
    generator,
    grid,
    on_cpu,
    ops,
    orders,
    randn,
    reference,
    same_bits,
    served,
    shuffled,
    snapshot,
    strided,
    swap_middle,
    torch_gpukern,
    yard_dtype,
)

from torch_gpukern.ops import attention

HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1), (3, 3))  # heads_q, heads_kv
LENGTH_PAIRS = (
    tuple(zip(LENGTHS, reversed(LENGTHS)))
    + tuple((n, n) for n in LENGTHS)
    + ((1, 300), (300, 1), (5, 513))
)
DIM_PAIRS = tuple((d, d) for d in HEAD_DIMS) + (
    (64, 32),
    (32, 64),
    (192, 128),
    (8, 512),
    (512, 8),
    (7, 80),
    (96, 1),
)


def qkv(gen, batch, heads, lengths, dims, dtype, device="cpu"):
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]."""
    (hq, hkv), (sq, sk), (d, dv) = heads, lengths, served(dims, device)
    shapes = ((batch, hq, sq, d), (batch, hkv, sk, d), (batch, hkv, sk, dv))
    return tuple(randn(gen, *s, dtype=dtype, device=device) for s in shapes)


def skip_unserved(dims, device):
    if device == "cuda" and served(dims, device) != tuple(dims):
        pytest.skip("CUDA serves multiples of 8")


def drawn(key, case, device, batch=2):
    """(generator, (q, k, v), arguments) of a case with mods, heads, lengths, dims and dtype."""
    gen = generator(key, case.id)
    inputs = qkv(gen, batch, case.heads, case.lengths, case.dims, case.dtype, device)
    rules = modifiers(case.mods, batch, case.heads[0], *case.lengths, gen, case.dtype, device)
    return gen, inputs, rules


def on_device(run, q, k, v, kwargs, gen):
    """Results of run on the inputs' GPU, in several orders of keys and head_dim, if they are
    finite: SDPA's GPU kernels give NaN for a row without keys. Nothing for inputs on the CPU, since
    the other yardsticks are computed there."""
    if not q.is_cuda:
        return []
    dtype = yard_dtype(q.dtype)
    (q, k, v), narrow = [t.detach().to(dtype) for t in (q, k, v)], for_dtype(kwargs, dtype)
    results = []
    for order in orders(gen, k.shape[2]):
        columns = (
            torch.arange(q.shape[3]) if order is None else torch.randperm(q.shape[3], generator=gen)
        )
        result = run(q[..., columns], k[..., columns], v, order=order, **narrow)
        if isinstance(result, dict):
            back = columns.argsort()
            result = {**result, "q": result["q"][..., back], "k": result["k"][..., back]}
        if result is not None:
            results.append(result)
    return [
        r
        for r in results
        if all(t.isfinite().all() for t in (r.values() if isinstance(r, dict) else [r]))
    ]


def yardsticks(q, k, v, kwargs, gen):
    """PyTorch's forward results in q's dtype (float32 for float64): SDPA's for a few orders of the
    keys, or the reference's if SDPA cannot express the call.

    SDPA has no 16-bit kernel for Dv != D or few keys and computes in float32 there. Then both are
    used.
    """
    dtype = yard_dtype(q.dtype)
    own = on_device(torch_attn, q, k, v, kwargs, gen)
    q, k, v, kwargs = on_cpu((q, k, v, kwargs))
    cast, narrow = [t.to(dtype) for t in (q, k, v)], for_dtype(kwargs, dtype)
    chosen = orders(gen, k.shape[2])

    def each():
        expressed = False
        for order in chosen:
            if (y := torch_attn(*cast, order=order, **narrow)) is not None:
                expressed = True
                yield y
        yield from own
        if not expressed or (dtype != torch.float32 and q.shape[3] != v.shape[3]):
            yield from (run[0] for run in reordered(q, k, v, kwargs))

    return Lazily(each())


def check_forward(q, k, v, gen, **kwargs):
    """Checks flash_attn_fwd against the float64 reference and returns (out, lse)."""
    out, lse = ops.flash_attn_fwd(q, k, v, **kwargs)
    assert out.dtype == q.dtype and lse.dtype == logit_dtype(q.dtype) and lse.is_contiguous()
    ref, ref_lse = reference.flash_attn(*f64((q, k, v)), **f64(kwargs), return_lse=True)

    def yards(draw, of_lse):
        x, want = (q, k, v), (ref, ref_lse)
        if draw:
            x = shuffled(gen, *x)
            want = reference.flash_attn(*f64(x), **f64(kwargs), return_lse=True)
        found = lse_yardsticks(*x, want[1], **kwargs) if of_lse else yardsticks(*x, kwargs, gen)
        return ((y, want[of_lse]) for y in found)

    assert_close_as(partial(yards, of_lse=False), out, ref, sources=lse.numel())
    assert_close_as(partial(yards, of_lse=True), lse, ref_lse, "lse")
    return out, lse


def tiles(device, dtype=torch.float32, head_dim=64):
    """Lengths around the tile sizes of the chosen kernel."""
    q = torch.zeros(1, 2, 512, head_dim, dtype=dtype, device=device)
    row = json.loads(ops.explain_flash_attn(q, q, q))
    sizes = {n for n in row["tile"][:2] if 1 < n <= 512}
    assert sizes, f"row {row['instance']} names no tile"
    return sorted({n + e for n in sizes for e in (-1, 0, 1)})


# --------------------------------------------------------------------------------------------------
# forward


@pytest.mark.parametrize(
    "case",
    grid(
        96,
        mods=MODIFIERS,
        dtype=FLOATS,
        heads=HEADS,
        lengths=((17, 33), (64, 64), (65, 130), (129, 70), (3, 257)),
        dims=((64, 64), (32, 48), (80, 80), (7, 9)),
    )
    + grid(
        32,
        mods=MORE_MODIFIERS,
        dtype=FLOATS,
        heads=HEADS[:4],
        lengths=((17, 33), (65, 130), (129, 70), (3, 257)),
        dims=((64, 64), (128, 128), (32, 48), (80, 80)),
    ),
)
def test_modifiers(case, device):
    gen, (q, k, v), kwargs = drawn("modifiers", case, device, batch=3)
    unchanged = snapshot(q, k, v, **kwargs)
    out, lse = check_forward(q, k, v, gen, **kwargs)
    unchanged()
    assert same_bits(ops.flash_attn(q, k, v, **kwargs), out)


@pytest.mark.parametrize(
    "case",
    grid(
        80,
        lengths=LENGTH_PAIRS,
        dtype=FLOATS,
        mods=("none", "causal", "causal_end", "window"),
        heads=HEADS[:3],
        dims=((64, 64), (24, 40)),
    ),
)
def test_lengths(case, device):
    gen, (q, k, v), kwargs = drawn("lengths", case, device)
    check_forward(q, k, v, gen, **kwargs)


@pytest.mark.parametrize(
    "case",
    grid(
        56,
        dims=DIM_PAIRS,
        dtype=FLOATS,
        lengths=((19, 37), (66, 65), (1, 130)),
        mods=("none", "causal_end", "all"),
        heads=((4, 2), (2, 2)),
    ),
)
def test_head_dims(case, device):
    skip_unserved(case.dims, device)
    gen, (q, k, v), kwargs = drawn("dims", case, device)
    check_forward(q, k, v, gen, **kwargs)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("mods", ("none", "causal"))
def test_around_the_tiles(dtype, mods, device):
    """Every pair of lengths that are one below, at, or one above a tile of the chosen instance."""
    gen = generator("tiles", dtype, mods)
    sizes = tiles(device, dtype)
    pairs = list(itertools.product(sizes, sizes))
    for sq, sk in pairs if ALL else pairs[:: max(1, len(pairs) // 9)]:
        q, k, v = qkv(gen, 1, (2, 1), (sq, sk), (64, 64), dtype, device)
        check_forward(q, k, v, gen, **modifiers(mods, 1, 2, sq, sk, gen, dtype, device))


@pytest.mark.parametrize(
    "case",
    grid(
        36,
        dtype=FLOATS,
        q=tuple(LAYOUTS),
        k=tuple(LAYOUTS),
        v=tuple(LAYOUTS),
        mods=("none", "causal", "all"),
    ),
)
def test_strides(case, device):
    """Any strides and offsets, with NaN between and around the elements."""
    gen = generator("attn strides", case.id)
    q, k, v = qkv(gen, 2, (4, 2), (33, 41), (24, 16), case.dtype, device)
    q, k, v = LAYOUTS[case.q](q), LAYOUTS[case.k](k), LAYOUTS[case.v](v)
    check_forward(q, k, v, gen, **modifiers(case.mods, 2, 4, 33, 41, gen, case.dtype, device))


def test_expanded_and_strided_modifiers(device):
    gen = generator("expanded")
    q, k, v = qkv(gen, 3, (4, 2), (20, 30), (16, 16), torch.float32, device)
    one = randn(gen, 1, 2, 30, 16, device=device)
    check_forward(q, one.expand(3, 2, 30, 16), one.expand(3, 2, 30, 16), gen)
    check_forward(q[:, :1].expand(3, 4, 20, 16), k[:, :, :1].expand(3, 2, 30, 16), v, gen)
    slopes = strided(torch.rand(3, 4, generator=gen).to(device), (1, 0), step=2)
    sinks = strided(randn(gen, 4, device=device), step=3)
    start = torch.tensor([1, 9, 2, 9, 3, 9], dtype=torch.int32, device=device)[::2]
    end = torch.tensor(25, dtype=torch.int32, device=device).expand(3)
    check_forward(q, k, v, gen, alibi_slopes=slopes, sinks=sinks, kv_start=start, kv_end=end)
    check_forward(q, k, v, gen, alibi_slopes=slopes[:1].expand(3, 4), sinks=sinks[:1].expand(4))


@pytest.mark.parametrize(
    "which,dim", [("q", 0), ("q", 2), ("k", 0), ("k", 1), ("k", 2), ("v", 2), ("v", 3)]
)
def test_far_strides(which, dim):
    """Offsets beyond 2**31 elements, the last dimension included."""
    gen = generator("far")
    t = dict(zip("qkv", qkv(gen, 2, (2, 2), (3, 3), (2, 2), torch.bfloat16)))
    expected = ops.flash_attn(**t, is_causal=True)
    t[which] = far_apart(t[which], dim)
    assert same_bits(ops.flash_attn(**t, is_causal=True), expected)


def test_result_layout(device):
    """out is dense, stored [B, Sq, Hq, Dv] if q.stride(1) < q.stride(2), otherwise [B, Hq, Sq, Dv].
    Gradients are stored like their tensors."""
    gen = generator("layout")
    q, k, v = qkv(gen, 2, (4, 2), (5, 6), (8, 16), torch.float32, device)
    for inside in itertools.product((False, True), repeat=3):
        leaves = [
            (swap_middle(t) if i else t).detach().requires_grad_()
            for t, i in zip((q, k, v), inside)
        ]
        out, lse = ops.flash_attn_fwd(*(t.detach() for t in leaves))
        public = ops.flash_attn(*leaves)
        public.sum().backward()
        for x in (out, public):
            assert (x.transpose(1, 2) if inside[0] else x).is_contiguous()
        for t in leaves:
            assert t.grad.shape == t.shape
        raw = ops.flash_attn_bwd(torch.ones_like(out), *(t.detach() for t in leaves), out, lse)
        for x, i in zip(raw, inside):
            assert (x.transpose(1, 2) if i else x).is_contiguous()
        assert raw[3].shape == (0,) and raw[3].dtype == torch.float32 and raw[3].device == q.device
        with torch.device("meta"):
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in leaves]
        fake_out, fake_lse = ops.flash_attn_fwd(*fakes)
        assert fake_out.stride() == out.stride() and fake_lse.stride() == lse.stride()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_without_keys(dtype, device):
    """Rows without keys give out 0, lse -inf (or the sink) and zero gradients, and do not affect
    other rows."""
    gen = generator("no keys", dtype)
    q, k, v = (t.requires_grad_() for t in qkv(gen, 2, (2, 1), (40, 30), (16, 16), dtype, device))
    sinks = randn(gen, 2, dtype=logit_dtype(dtype), device=device)
    for kwargs in (
        dict(is_causal=True, diagonal=-20),
        dict(window_right=0, diagonal=-20),
        dict(is_causal=True, diagonal=-99),
    ):
        seen = visible(q.shape, k.shape, **kwargs).any(-1).expand(2, 2, 40).to(device)
        out, lse = torch_gpukern.flash_attn(q, k, v, return_lse=True, **kwargs)
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
        assert (lse[~seen] == -math.inf).all() and lse[seen].isfinite().all()
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert torch.equal(dq[~seen], torch.zeros_like(dq[~seen]))
        assert all(g.isfinite().all() for g in (dq, dk, dv))
        out, lse = ops.flash_attn_fwd(q.detach(), k.detach(), v.detach(), sinks=sinks, **kwargs)
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
        assert torch.allclose(
            lse.masked_fill(seen, 0),
            sinks[None, :, None].expand_as(lse).masked_fill(seen, 0),
            rtol=1e-6,
        )


@pytest.mark.parametrize("shape", ["B", "Sq", "Sk", "B Sq", "Sq Sk", "B Sk"])
@pytest.mark.parametrize("sink", (False, True))
def test_empty(shape, sink, device):
    gen = generator("empty")
    batch, sq, sk = (
        0 if name in shape.split() else n for name, n in (("B", 2), ("Sq", 5), ("Sk", 6))
    )
    q, k, v = (
        t.requires_grad_()
        for t in qkv(gen, batch, (4, 2), (sq, sk), (8, 16), torch.float32, device)
    )
    sinks = randn(gen, 4, device=device).requires_grad_() if sink else None
    out, lse = torch_gpukern.flash_attn(q, k, v, sinks=sinks, return_lse=True)
    assert out.shape == (batch, 4, sq, 16) and lse.shape == (batch, 4, sq)
    if sk == 0:
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(
            lse, sinks[None, :, None].expand_as(lse) if sink else torch.full_like(lse, -math.inf)
        )
    out.sum().backward()
    for t in (q, k, v):
        assert t.grad.shape == t.shape and not t.grad.count_nonzero() or sk > 0
    if sink:
        assert sinks.grad.shape == (4,)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("poison", (math.nan, math.inf))
def test_keys_that_nobody_sees_may_be_poison(dtype, poison, device):
    """NaN in keys that no query sees, because of kv_start, kv_end, a causal mask or windows,
    reaches no result."""
    gen = generator("poison", dtype)
    q, k, v = qkv(gen, 3, (4, 2), (37, 150), (32, 24), dtype, device)
    start = torch.tensor([0, 70, 12], dtype=torch.int32, device=device)
    end = torch.tensor([61, 150, 13], dtype=torch.int32, device=device)
    grad = randn(gen, 3, 4, 37, 24, dtype=dtype, device=device)
    for kwargs in (
        dict(kv_start=start, kv_end=end),
        dict(kv_end=end),
        dict(is_causal=True),
        dict(window_left=3, window_right=2),
        dict(is_causal=True, window_left=9, diagonal=100, kv_start=start),
    ):
        hidden = ~visible(q.shape, k.shape, **kwargs).any(2)[:, 0].to(device)  # [B, Sk]
        hidden = hidden.expand(3, 150)[:, None, :, None]
        assert hidden.any()
        clean = [q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)]
        dirty = [q, k.masked_fill(hidden, poison), v.masked_fill(hidden, poison)]
        results = []
        for tensors in (clean, dirty):
            leaves = [t.detach().requires_grad_() for t in tensors]
            out, lse = torch_gpukern.flash_attn(*leaves, return_lse=True, **kwargs)
            out.backward(grad)
            results.append([out, lse, *(t.grad for t in leaves)])
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), *results):
            assert x.isfinite().all() or name == "lse"
            assert same_bits(x.detach(), y.detach()), (
                f"{name} depends on a key that no query sees ({kwargs})"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_alibi_over_parts_of_the_keys(head_dim):
    """Few queries, so that keys are split into parts. Queries lie before and among a part's keys,
    and places after the last key are masked."""
    gen = generator("alibi parts", head_dim)
    q, k, v = qkv(gen, 1, (2, 1), (70, 2003), (head_dim, head_dim), torch.bfloat16, "cuda")
    slopes = torch.tensor([0.01, 0.002], device="cuda")
    end = torch.tensor([1990], dtype=torch.int32, device="cuda")
    k[:, :, 1990:] = math.nan
    v[:, :, 1990:] = math.nan
    for kwargs in (dict(), dict(diagonal=900), dict(diagonal=1950), dict(softcap=2.0)):
        out, lse = ops.flash_attn_fwd(q, k, v, alibi_slopes=slopes, kv_end=end, **kwargs)
        exact, exact_lse = torch_gpukern.reference.flash_attn(
            *(x.double() for x in (q, k[:, :, :1990], v[:, :, :1990])),
            alibi_slopes=slopes.double(),
            return_lse=True,
            **kwargs,
        )
        assert (out.double() - exact).norm() < 6e-3 * exact.norm()
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-4)


def test_extreme_logits(device):
    """Scores far beyond exp's range, all equal scores, and one winner among -1e30."""
    gen = generator("extreme")
    q, k, v = qkv(gen, 1, (2, 2), (33, 70), (32, 32), torch.float32, device)
    for scale in (300.0, -300.0, 1e-30, 0.0):
        out, lse = check_forward(q, k, v, gen, scale=scale)
        assert out.isfinite().all() and lse.isfinite().all()
    k = k.clone()
    k[:, :, 40] = -q[:, :, 0] * 1e3
    check_forward(q, k, v, gen, scale=1.0)
    check_forward(q, k, v, gen, scale=50.0, softcap=30.0)
    sinks = torch.tensor([200.0, -200.0], device=device)
    check_forward(q, k, v, gen, sinks=sinks)
    check_forward(
        q,
        k,
        v,
        gen,
        alibi_slopes=torch.tensor([50.0, 0.0], device=device),
        is_causal=True,
        diagonal=37,
    )


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_alibi_of_keys_on_one_side(dtype, head_dim, device):
    """Blocks of keys that lie before or after all rows, for which a kernel may add the bias per
    block: more rows than keys, and rows far away from all keys."""
    gen = generator("one side", dtype, head_dim)
    slopes = torch.tensor([0.1, 0.02], device=device)
    for seq_k, diagonal in ((100, 0), (300, 400), (300, -200)):
        q, k, v = qkv(gen, 1, (2, 2), (260, seq_k), (head_dim, head_dim), dtype, device)
        check_forward(q, k, v, gen, alibi_slopes=slopes, diagonal=diagonal)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("kind", ("growing", "fading", "spikes", "late", "wide", "minus_infinity"))
def test_scores_whose_maximum_moves(kind, causal, dtype, device):
    """Scores that grow or fall by e^100 along the keys, rise at single keys or at one of the last
    keys, are 1e4, or are -inf. A kernel that keeps a row's reference maximum over several blocks
    must notice them."""
    gen = generator("maximum moves", kind, causal, dtype)
    q, k, v = qkv(gen, 1, (4, 2), (70, 600), (64, 64), dtype, device)
    q[..., 0] = 4
    if kind in ("growing", "fading"):
        ramp = torch.linspace(0, 200, 600, device=device)
        k[..., 0] = (ramp if kind == "growing" else ramp.flip(0)).to(dtype)
    elif kind == "spikes":
        k[:, :, [5, 130, 131, 300, 555], 0] = torch.tensor(
            [40, 90, 150, 300, 200], dtype=dtype, device=device
        )
    elif kind == "late":
        k[:, :, -3, 0] = 1e3
    elif kind == "minus_infinity":
        k[:, :, 3:400, 0] = -math.inf
    check_forward(
        q, k, v, gen, is_causal=causal, diagonal=530, scale=1e4 if kind == "wide" else None
    )


def test_large_diagonals_and_windows(device):
    """Bounds near the ends of int64 do not wrap."""
    gen = generator("large")
    q, k, v = qkv(gen, 1, (1, 1), (9, 12), (8, 8), torch.float32, device)
    full, none = ops.flash_attn(q, k, v), torch.zeros(1, 1, 9, 8, device=device)
    huge = 2**62
    assert same_bits(ops.flash_attn(q, k, v, is_causal=True, diagonal=huge), full)
    assert same_bits(ops.flash_attn(q, k, v, window_left=huge, window_right=huge), full)
    assert same_bits(ops.flash_attn(q, k, v, window_left=2**63 - 1, window_right=2**63 - 1), full)
    assert torch.equal(ops.flash_attn(q, k, v, is_causal=True, diagonal=-huge), none)
    assert torch.equal(ops.flash_attn(q, k, v, window_left=3, window_right=3, diagonal=huge), none)
    assert same_bits(
        ops.flash_attn(q, k, v, window_left=2**63 - 1, window_right=2**63 - 1, diagonal=5), full
    )


def test_gqa_is_an_index(device):
    """Query head h reads key head h // (Hq / Hkv)."""
    gen = generator("gqa")
    for hq, hkv in ((6, 2), (6, 3), (8, 1), (5, 5)):
        q, k, v = qkv(gen, 2, (hq, hkv), (20, 30), (16, 16), torch.float32, device)
        wide = [t.repeat_interleave(hq // hkv, 1) for t in (k, v)]
        check = ops.flash_attn(q, *wide)
        ref = reference.flash_attn(*f64((q, *wide)))
        assert_close_as(check, ops.flash_attn(q, k, v), ref)


def test_public_function(device):
    gen = generator("public")
    q, k, v = qkv(gen, 2, (4, 2), (9, 11), (8, 8), torch.float32, device)
    kwargs = modifiers("all", 2, 4, 9, 11, gen, device=device)
    out, lse = torch_gpukern.flash_attn(q, k, v, return_lse=True, **kwargs)
    raw_out, raw_lse = ops.flash_attn_fwd(q, k, v, **kwargs)
    assert same_bits(out, raw_out) and same_bits(lse, raw_lse)
    assert same_bits(torch_gpukern.flash_attn(q, k, v, **kwargs), out)
    assert same_bits(ops.flash_attn(q, k, v, **kwargs), out)


# --------------------------------------------------------------------------------------------------
# backward


def backward(run, tensors, grad_out, grad_lse=None, want_lse=True):
    """The gradients by name of run(**leaves), which returns (out, lse) or out."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    result = run(**leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    pairs = [(out, grad_out)] + ([] if grad_lse is None else [(lse, grad_lse)])
    pairs = [(y, g.to(y.dtype)) for y, g in pairs if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}


def gradient_yardsticks(q, k, v, gen, grad_out, grad_lse, sinks, kwargs):
    """PyTorch's gradients in q's dtype (float32 for float64), by name, like `yardsticks` for
    results."""
    dtype = yard_dtype(q.dtype)
    cast, narrow = (
        {n: t.cpu().to(dtype) for n, t in zip("qkv", (q, k, v))},
        for_dtype(on_cpu(kwargs), dtype),
    )
    plain = grad_lse is None and sinks is None and torch_attn(*cast.values(), **narrow) is not None
    # each order of the keys with an order of the features: in rows with few keys, only the latter
    # changes a sum
    chosen = list(zip(orders(gen, k.shape[2]), orders(gen, q.shape[3]))) if plain else []

    def on_gpu(*qkv, order, **rules):
        return backward(partial(torch_attn, order=order, **rules), dict(zip("qkv", qkv)), grad_out)

    own = on_device(on_gpu, q, k, v, kwargs, gen) if plain else []

    def each():
        for order, by in chosen:
            by = torch.arange(q.shape[3]) if by is None else by
            permuted = {"q": cast["q"][..., by], "k": cast["k"][..., by], "v": cast["v"]}
            yard = backward(partial(torch_attn, order=order, **narrow), permuted, grad_out.cpu())
            yield {n: y[..., by.argsort()] if n in "qk" else y for n, y in yard.items()}
        yield from own
        if not plain or (dtype != torch.float32 and q.shape[3] != v.shape[3]):
            for run in reordered(q, k, v, {**kwargs, "sinks": sinks}, grad_out, grad_lse):
                yield dict(zip(("q", "k", "v", "sinks"), run[2:]))

    return Lazily(each())


def rules_of_draw(rules, draw):
    """The rules of draw 0, except for a scale of 0: every lse would then be the logarithm of a
    number of keys, which may round luckily."""
    return {**rules, "scale": 1e-3} if draw and rules.get("scale") == 0 else dict(rules)


def check_backward(q, k, v, gen, grad_out, grad_lse=None, what="", **kwargs):
    """Checks all gradients of flash_attn against autograd through the float64 reference."""
    tensors = dict(q=q, k=k, v=v)
    sinks = kwargs.pop("sinks", None)
    if sinks is not None:
        tensors["sinks"] = sinks
    lse_too = grad_lse is not None

    def ours(**t):
        return torch_gpukern.flash_attn(**t, **kwargs, return_lse=lse_too)

    @cache
    def draw_of(draw):
        x = shuffled(gen, q, k, v) if draw else (q, k, v)
        rules = rules_of_draw(kwargs, draw)
        run = partial(reference.flash_attn, **f64(rules), return_lse=True)
        want = backward(run, f64({**tensors, **dict(zip("qkv", x))}), f64(grad_out), f64(grad_lse))
        return want, gradient_yardsticks(*x, gen, grad_out, grad_lse, sinks, rules)

    got = backward(ours, tensors, grad_out, grad_lse)
    ref = draw_of(0)[0]

    def yards(draw, name):
        want, found = draw_of(draw)
        return ((y[name], want[name]) for y in found)

    for name, t in tensors.items():
        assert got[name].dtype == t.dtype and got[name].shape == t.shape
        rows = grad_out[..., 0].numel()
        assert_close_as(
            partial(yards, name=name), got[name], ref[name], f"{what}d{name}", sources=rows
        )
    return got


@pytest.mark.parametrize(
    "case",
    grid(
        96,
        mods=MODIFIERS,
        dtype=FLOATS,
        heads=HEADS,
        lengths=((17, 33), (64, 64), (65, 130), (129, 70), (3, 257)),
        dims=((64, 64), (32, 48), (80, 80), (7, 9)),
        lse=(False, True),
    )
    + grid(
        32,
        mods=MORE_MODIFIERS,
        dtype=FLOATS,
        heads=HEADS[:4],
        lengths=((17, 33), (65, 130), (129, 70), (3, 257)),
        dims=((64, 64), (128, 128), (32, 48), (80, 80)),
        lse=(False, True),
    ),
)
def test_backward_modifiers(case, device):
    gen, (q, k, v), kwargs = drawn("backward", case, device, batch=3)
    grad = randn(gen, *q.shape[:3], v.shape[3], dtype=case.dtype, device=device)
    grad_lse = (
        randn(gen, *q.shape[:3], dtype=logit_dtype(case.dtype), device=device) if case.lse else None
    )
    if case.lse:
        lse = ops.flash_attn_fwd(q, k, v, **kwargs)[1]
        grad_lse = grad_lse.masked_fill(lse == -math.inf, 0)
    check_backward(q, k, v, gen, grad, grad_lse, **kwargs)


@pytest.mark.parametrize("seq_q", (1, 3, 7))
def test_backward_of_few_queries(seq_q, one_thread):
    """Over many draws, the RMS error of each gradient is about PyTorch's, and the largest error is
    at most twice PyTorch's plus a rounding. Errors are relative to the largest gradient of their
    sequence; otherwise only the sequences with the largest gradients would count.

    PyTorch sums the scores of few queries in short runs over head_dim. Long runs err 1.5 times as
    much.
    """
    draws, squares, largest = 16, dict.fromkeys("qkv", (0.0, 0.0)), dict.fromkeys("qkv", (0.0, 0.0))
    for draw in range(draws):
        gen = generator("few queries", seq_q, draw)
        q, k, v = qkv(gen, 24, (1, 1), (seq_q, 129), (80, 80), torch.float32)
        grad = randn(gen, 24, 1, seq_q, 80)
        tensors = dict(q=q, k=k, v=v)
        want = backward(reference.flash_attn, f64(tensors), f64(grad))
        pair = (
            backward(torch_gpukern.flash_attn, tensors, grad),
            gradient_yardsticks(q, k, v, gen, grad, None, None, {})[0],
        )
        for name in tensors:
            errors = [(x[name].double() - want[name]).abs() for x in pair]
            squares[name] = tuple(
                s + e.square().mean().item() for s, e in zip(squares[name], errors)
            )
            size = want[name].abs().amax((1, 2, 3), keepdim=True)
            largest[name] = tuple(
                max(m, (e / size).max().item()) for m, e in zip(largest[name], errors)
            )
    for name in tensors:
        mine, own = (math.sqrt(s / draws) for s in squares[name])
        assert mine <= 1.25 * own, f"d{name}: RMS error {mine:.3e}, PyTorch makes {own:.3e}"
        mine, own = largest[name]
        assert mine <= 2 * own + 2.0**-23, f"d{name}: max error {mine:.3e}, PyTorch makes {own:.3e}"


@pytest.mark.parametrize(
    "case",
    grid(
        48,
        lengths=LENGTH_PAIRS,
        dtype=FLOATS,
        mods=("none", "causal", "causal_end", "window"),
        heads=HEADS[:3],
        dims=((64, 64), (24, 40)),
    ),
)
def test_backward_lengths(case, device):
    gen, (q, k, v), kwargs = drawn("backward lengths", case, device)
    grad = randn(gen, *q.shape[:3], v.shape[3], dtype=case.dtype, device=device)
    check_backward(q, k, v, gen, grad, **kwargs)


@pytest.mark.parametrize(
    "case",
    grid(
        40,
        dims=DIM_PAIRS,
        dtype=FLOATS,
        lengths=((19, 37), (66, 65), (1, 130)),
        mods=("none", "causal_end", "all"),
        heads=((4, 2), (2, 2)),
    ),
)
def test_backward_head_dims(case, device):
    skip_unserved(case.dims, device)
    gen, (q, k, v), kwargs = drawn("backward dims", case, device)
    grad = randn(gen, *q.shape[:3], v.shape[3], dtype=case.dtype, device=device)
    check_backward(q, k, v, gen, grad, **kwargs)


@pytest.mark.parametrize(
    "case",
    grid(
        24,
        dtype=FLOATS,
        q=tuple(LAYOUTS),
        k=tuple(LAYOUTS),
        v=tuple(LAYOUTS),
        grad=(*LAYOUTS, "expanded"),
        mods=("none", "all"),
    ),
)
def test_backward_strides(case, device):
    gen = generator("backward strides", case.id)
    q, k, v = qkv(gen, 2, (4, 2), (33, 41), (24, 16), case.dtype, device)
    q, k, v = LAYOUTS[case.q](q), LAYOUTS[case.k](k), LAYOUTS[case.v](v)
    grad = randn(gen, 2, 4, 33, 16, dtype=case.dtype, device=device)
    if case.grad == "expanded":
        grad = randn(gen, 16, dtype=case.dtype, device=device).expand(2, 4, 33, 16)
    else:
        grad = LAYOUTS[case.grad](grad)
    check_backward(
        q, k, v, gen, grad, **modifiers(case.mods, 2, 4, 33, 41, gen, case.dtype, device)
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("softcap", (1e4, 1e6, 1e8))
def test_large_softcaps(softcap, dtype, device):
    """Softcaps far above the scores, forward and backward. tanh must be precise near 0 to preserve
    the scores."""
    gen = generator("large softcap", softcap, dtype)
    q, k, v = qkv(gen, 2, (4, 2), (70, 130), (64, 64), dtype, device)
    grad_out = randn(gen, 2, 4, 70, 64, dtype=dtype, device=device)
    check_backward(q, k, v, gen, grad_out, softcap=softcap, scale=0.5, is_causal=True, diagonal=60)
    out, _ = check_forward(q, k, v, gen, softcap=softcap, scale=0.5)
    plain = ops.flash_attn(q, k, v, scale=0.5)
    if softcap > 1e5 and dtype != torch.float64:  # (s / softcap)^2 / 3 is negligible
        assert_close_as([plain], out, reference.flash_attn(*f64((q, k, v)), scale=0.5))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_sum_backward(dtype, device):
    """out.sum() gives the op a gradient with stride 0."""
    gen = generator("sum", dtype)
    tensors = dict(zip("qkv", qkv(gen, 2, (2, 1), (70, 70), (64, 64), dtype, device)))
    got = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    ops.flash_attn(**got, is_causal=True).sum().backward()
    dense = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    ops.flash_attn(**dense, is_causal=True).backward(
        torch.ones(2, 2, 70, 64, dtype=dtype, device=device)
    )
    assert all(same_bits(got[n].grad, dense[n].grad) for n in "qkv")


def test_only_lse_gets_a_gradient(device):
    gen = generator("lse only")
    q, k, v = qkv(gen, 2, (4, 2), (30, 50), (16, 16), torch.float32, device)
    sinks = randn(gen, 4, device=device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    weight = randn(gen, 2, 4, 30, device=device)
    (
        torch_gpukern.flash_attn(*leaves[:3], is_causal=True, sinks=leaves[3], return_lse=True)[1]
        * weight
    ).sum().backward()
    wide = [f64(t).requires_grad_() for t in (q, k, v, sinks)]
    (
        reference.flash_attn(*wide[:3], is_causal=True, sinks=wide[3], return_lse=True)[1]
        * weight.double()
    ).sum().backward()
    yard = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    (
        reference.flash_attn(*yard[:3], is_causal=True, sinks=yard[3], return_lse=True)[1] * weight
    ).sum().backward()
    for name, x, ref, y in zip(
        ("dq", "dk", "dsinks"), *([ts[0], ts[1], ts[3]] for ts in (leaves, wide, yard))
    ):
        assert_close_as(y.grad, x.grad, ref.grad, name)
    assert leaves[2].grad is None or not leaves[2].grad.count_nonzero()


def test_gradient_of_lse_where_no_key_is_seen_is_dropped(device):
    """lse is -inf in such a row, so its gradient must not reach q or k, whatever it is."""
    gen = generator("lse -inf")
    q, k, v = (
        t.requires_grad_() for t in qkv(gen, 1, (1, 1), (10, 6), (8, 8), torch.float32, device)
    )
    out, lse = torch_gpukern.flash_attn(q, k, v, is_causal=True, diagonal=-5, return_lse=True)
    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    assert torch.equal(dq[:, :, :5], torch.zeros_like(dq[:, :, :5]))
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", (math.inf, math.nan), ids=str)
def test_rows_without_keys_give_no_gradient_whatever_arrives(bad, dtype, device):
    """Rows without keys give no gradient to q, k, v or sinks. Only grad_lse reaches the sink,
    because lse is the sink."""
    gen = generator("no keys", dtype)
    q, k, v = qkv(gen, 2, (4, 2), (70, 90), (64, 64), dtype, device)
    sinks = randn(gen, 4, dtype=logit_dtype(dtype), device=device)
    start = torch.tensor([0, 40], dtype=torch.int32, device=device)
    rules = dict(is_causal=True, diagonal=-20, window_right=0, kv_start=start)
    none = torch.arange(70, device=device) < torch.tensor([[20], [60]], device=device)  # [B, Sq]
    grad_out = randn(gen, 2, 4, 70, 64, dtype=dtype, device=device)
    clean = grad_out.masked_fill(none[:, None, :, None], 0)
    wild = grad_out.masked_fill(none[:, None, :, None], bad)
    grad_lse = randn(gen, 2, 4, 70, dtype=logit_dtype(dtype), device=device)

    def gradients(grad, grad_lse=None, sinks=sinks):
        leaves = [
            t.detach().clone().requires_grad_()
            for t in (q, k, v) + (() if sinks is None else (sinks,))
        ]
        tail = {} if sinks is None else dict(sinks=leaves[3])
        out, lse = torch_gpukern.flash_attn(*leaves[:3], **rules, **tail, return_lse=True)
        heads = (out,) if grad_lse is None else (out, lse)
        return torch.autograd.grad(heads, leaves, (grad,) if grad_lse is None else (grad, grad_lse))

    for lse_too in (None, grad_lse):
        for x, y in zip(gradients(wild, lse_too), gradients(clean, lse_too)):
            assert y.isfinite().all() and same_bits(x, y)
    for x, y in zip(gradients(wild, sinks=None), gradients(clean, sinks=None)):
        assert same_bits(x, y)
    # an infinite gradient of lse, which only the sink gets
    *others, dsinks = gradients(wild, grad_lse.masked_fill(none[:, None], bad))
    assert all(same_bits(x, y) for x, y in zip(others, gradients(clean, grad_lse)[:3]))
    assert not dsinks.isfinite().any()
    *_, more = gradients(clean, grad_lse + none[:, None].to(grad_lse.dtype))
    want = none.sum().to(more.dtype).expand(4)  # d lse / d sink = 1
    assert_close_as([want], more - gradients(clean, grad_lse)[3], want.double().cpu(), "dsinks")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_sink_alone(dtype, device):
    """One row, one key that it does not see, and an infinite gradient of out: the sink's gradient
    is 0, dense and packed."""
    zero = torch.zeros(1, 1, 1, 8, dtype=dtype, device=device)
    end = torch.zeros(1, dtype=torch.int32, device=device)
    for packed in (False, True):
        sinks = torch.zeros(1, dtype=logit_dtype(dtype), device=device, requires_grad=True)
        if packed:
            cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
            empty = torch.zeros(0, 1, 8, dtype=dtype, device=device)
            out = ops.flash_attn_varlen(zero[0], empty, empty, cu, cu * 0, 1, 0, sinks=sinks)
        else:
            out = ops.flash_attn(zero, zero, zero, sinks=sinks, kv_end=end)
        out.backward(torch.full_like(out, math.inf))
        assert sinks.grad.item() == 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("layout", ("dense", "offset"))
@pytest.mark.parametrize(
    "dims", [(8, 8), (64, 64), (64, 40), (80, 80), (128, 96), (64, 200), (256, 256)], ids=str
)
def test_a_row_that_sees_one_key_has_no_gradient_of_scores(dims, layout, dtype, device):
    """out = v in such a row, so dP and delta are the same sum. If both are added in the same order,
    they are equal and dS = 0."""
    gen = generator("one key", dims)
    tensors = [LAYOUTS[layout](t) for t in qkv(gen, 2, (4, 2), (70, 70), dims, dtype, device)]
    grad = LAYOUTS[layout](randn(gen, 2, 4, 70, dims[1], dtype=dtype, device=device))
    for keys in (70, 1):
        q, k, v = tensors[0], tensors[1][:, :, :keys], tensors[2][:, :, :keys]
        got = backward(partial(ops.flash_attn, is_causal=True), dict(q=q, k=k, v=v), grad)
        rows = 1 if keys > 1 else 70
        assert not got["q"][:, :, :rows].count_nonzero()
        assert keys > 1 or not got["k"].count_nonzero()


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sinks",), ("k", "v")], ids=str)
def test_only_the_wanted_gradients(wanted, device):
    gen = generator("wanted")
    t = dict(
        zip("qkv", qkv(gen, 2, (2, 1), (20, 25), (16, 16), torch.float32, device)),
        sinks=randn(gen, 2, device=device),
    )
    full = {n: x.clone().requires_grad_() for n, x in t.items()}
    part = {n: x.clone().requires_grad_(n in wanted) for n, x in t.items()}
    ops.flash_attn(**full).square().sum().backward()
    ops.flash_attn(**part).square().sum().backward()
    for n, x in part.items():
        assert (x.grad is not None) == (n in wanted)
        assert x.grad is None or same_bits(x.grad, full[n].grad)


def test_same_tensor_as_q_k_and_v(device):
    gen = generator("self")
    x = randn(gen, 2, 2, 30, 16, device=device)
    grad = randn(gen, 2, 2, 30, 16, device=device)
    leaf, wide, yard = (
        x.clone().requires_grad_(),
        f64(x).requires_grad_(),
        x.clone().requires_grad_(),
    )
    ops.flash_attn(leaf, leaf, leaf, is_causal=True).backward(grad)
    reference.flash_attn(wide, wide, wide, is_causal=True).backward(grad.double())
    torch_attn(yard, yard, yard, is_causal=True).backward(grad)
    assert_close_as(yard.grad, leaf.grad, wide.grad)


@pytest.mark.parametrize("mods", (*MODIFIERS, *MORE_MODIFIERS))
def test_gradcheck(mods, device, one_thread):
    gen = generator("gradcheck", mods)
    t = [x.requires_grad_() for x in qkv(gen, 2, (4, 2), (5, 6), (3, 2), torch.float64, device)]
    kwargs = modifiers(mods, 2, 4, 5, 6, gen, torch.float64, device)
    sinks = kwargs.pop("sinks", None)
    seen = (
        visible(t[0].shape, t[1].shape, **{n: x for n, x in kwargs.items() if n in SPAN}).any(-1)
    ).to(device)

    def run(q, k, v, sinks=None):
        out, lse = torch_gpukern.flash_attn(q, k, v, **kwargs, sinks=sinks, return_lse=True)
        return out, torch.where(seen.expand_as(lse), lse, 0.0)

    assert torch.autograd.gradcheck(run, t)
    if sinks is not None:
        finite = sinks.isfinite()
        leaf = torch.where(finite, sinks, 0.0).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda *a: run(*a[:3], torch.where(finite, a[3], -math.inf)), (*t, leaf)
        )


SPAN = ("is_causal", "diagonal", "window_left", "window_right", "kv_start", "kv_end", "q_start")


def test_sink_of_minus_infinity_has_no_gradient(device):
    gen = generator("sink -inf")
    q, k, v = qkv(gen, 2, (4, 2), (20, 30), (16, 16), torch.float32, device)
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, -1.0], device=device, requires_grad=True)
    out = ops.flash_attn(q, k, v, sinks=sinks)
    out.square().sum().backward()
    assert sinks.grad[0] == 0 and sinks.grad[2] == 0 and sinks.grad[1] != 0 and sinks.grad[3] != 0
    plain = ops.flash_attn(q, k, v)
    assert_close_as(plain[:, ::2], out[:, ::2], reference.flash_attn(*f64((q, k, v)))[:, ::2])


@pytest.mark.parametrize("kind", ("forward", "backward", "varlen"))
def test_backward_of_backward_is_refused(kind, device):
    q = torch.ones(1, 1, 4, 8, device=device, requires_grad=True)
    if kind == "varlen":
        q = torch.ones(4, 1, 8, device=device, requires_grad=True)
        cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
        out = ops.flash_attn_varlen(q, q, q, cu, cu, 4, 4)
    else:
        out = ops.flash_attn(q, q, q)
    name = "gpukern::flash_attn_varlen" if kind == "varlen" else "gpukern::flash_attn"
    if kind == "backward":
        lse = torch.zeros(1, 1, 4, device=device)
        with pytest.raises(NotImplementedError, match=name):
            ops.flash_attn_bwd(out, q, q, q, out, lse)[0].sum().backward()
        return
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=name):
        grad.sum().backward()


def test_slopes_that_require_a_gradient_are_refused(device):
    q = torch.ones(1, 2, 4, 8, device=device)
    slopes = torch.ones(2, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="gpukern::flash_attn: alibi_slopes"):
        ops.flash_attn(q, q, q, alibi_slopes=slopes)


@pytest.mark.parametrize("op", ("flash_attn_fwd", "flash_attn_varlen_fwd", "gemm_fwd"))
def test_raw_forward_never_loses_a_gradient_silently(op, device):
    """A raw op with an input that requires a gradient is differentiable or says that it is not."""
    gen = generator("raw")
    if op == "gemm_fwd":
        x = randn(gen, 4, 4, device=device).requires_grad_()
        y = ops.gemm_fwd(x, x, activation="silu")[0]
        wide = f64(x).requires_grad_()
        ref = reference.gemm(wide, wide, activation="silu")
    elif op == "flash_attn_fwd":
        x = randn(gen, 1, 2, 5, 8, device=device).requires_grad_()
        y = ops.flash_attn_fwd(x, x, x)[0]
        wide = f64(x).requires_grad_()
        ref = reference.flash_attn(wide, wide, wide)
    else:
        x = randn(gen, 5, 2, 8, device=device).requires_grad_()
        cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
        y = ops.flash_attn_varlen_fwd(x, x, x, cu, cu, 5, 5)[0]
        wide = f64(x).requires_grad_()
        ref = reference.flash_attn_varlen(wide, wide, wide, cu, cu, 5, 5)
    try:
        y.square().sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        assert "gpukern::" in str(error)
        return
    assert x.grad is not None, "the gradient was lost without a word"
    ref.square().sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("mods", ("none", "causal_end", "all"))
def test_opcheck_of_the_backward(dtype, mods, device):
    gen = generator("opcheck", mods)
    q, k, v = qkv(gen, 2, (4, 2), (5, 7), (8, 16), dtype, device)
    q = swap_middle(q)
    kwargs = modifiers(mods, 2, 4, 5, 7, gen, dtype, device)
    out, lse = ops.flash_attn_fwd(q, k, v, **kwargs)
    grad = strided(torch.ones_like(out), step=2)
    torch.library.opcheck(
        ops.flash_attn_bwd.default, (grad, q, k, v, out, lse, torch.ones_like(lse)), kwargs
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("lengths", ((70, 90), (1, 600), (300, 200)), ids=str)
@pytest.mark.parametrize(
    "rules", (dict(is_causal=True), dict(window_left=20, window_right=9)), ids=str
)
def test_q_start_is_a_diagonal_for_each_sequence(rules, lengths, dtype, device):
    """Forward and backward have the bits of calls with `diagonal`, for any value of q_start."""
    gen = generator("q_start", lengths, dtype)
    q, k, v = qkv(gen, 5, (4, 2), lengths, (64, 64), dtype, device)
    grad = randn(gen, *q.shape, dtype=dtype, device=device)
    slopes = torch.rand(4, generator=gen).to(logit_dtype(dtype)).to(device)
    far = 2**31 - 1
    for stands in (
        [lengths[1] - lengths[0], -7, 40, lengths[1] - 1, 0],
        [far, -far - 1, lengths[1], -lengths[0], 1],
    ):
        more = {"alibi_slopes": slopes} if max(map(abs, stands)) < far else {}
        q_start = torch.tensor(stands, dtype=torch.int32, device=device)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        results = torch_gpukern.flash_attn(
            *leaves, q_start=q_start, **rules, **more, return_lse=True
        )
        results += torch.autograd.grad(results[0], leaves, grad)
        for b, diagonal in enumerate(stands):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            want = torch_gpukern.flash_attn(
                *leaves, diagonal=diagonal, **rules, **more, return_lse=True
            )
            want += torch.autograd.grad(want[0], leaves, grad)
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), results, want):
                x, y = x[b].detach(), y[b].detach()
                if device == "cpu" or name in ("out", "lse"):
                    assert same_bits(x, y), (name, diagonal)
                else:  # additions may happen in any order
                    assert torch.allclose(x.float(), y.float(), rtol=0.02, atol=0.02), (
                        name,
                        diagonal,
                    )


def test_q_start_is_read_through_its_stride(device):
    gen = generator("q_start stride")
    q, k, v = qkv(gen, 3, (4, 2), (20, 30), (16, 16), torch.float32, device)
    starts = torch.tensor([1, 99, 10, 99, -3, 99], dtype=torch.int32, device=device)[::2]
    check_forward(q, k, v, gen, is_causal=True, q_start=starts)
    check_forward(q, k, v, gen, is_causal=True, q_start=starts[1:2].expand(3))


def test_q_start_places_a_chunk_in_a_static_cache(device):
    """A buffer has more keys than are written, and the chunk's queries are at the end of the
    written ones. NaN after them reaches no result."""
    gen = generator("static cache")
    whole = qkv(gen, 2, (4, 2), (40, 40), (32, 32), torch.bfloat16, device)
    want = ops.flash_attn(*whole, is_causal=True)
    buffers = [
        torch.full((2, 2, 64, 32), math.nan, dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    position = torch.zeros(2, dtype=torch.int32, device=device)
    for first, end in ((0, 17), (17, 18), (18, 40)):
        for buffer, t in zip(buffers, whole[1:]):
            buffer[:, :, first:end] = t[:, :, first:end]
        out = ops.flash_attn(whole[0][:, :, first:end], *buffers, is_causal=True, q_start=position)
        assert out.isfinite().all() and torch.allclose(
            out.float(), want[:, :, first:end].float(), rtol=0.02, atol=0.02
        )
        position += end - first


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("packed_batch", (False, True), ids=("dense", "varlen"))
def test_sinks_in_the_dtype_of_q(packed_batch, dtype, device):
    """Results have the bits of the same sinks in float32. The gradient is that of float32, rounded
    once."""
    gen = generator("own sinks", dtype)
    if packed_batch:
        x = packed(gen, *BATCHES["ragged"], (4, 2), (64, 64), dtype, device)
        call = partial(torch_gpukern.flash_attn_varlen, *x, is_causal=True)
    else:
        x = qkv(gen, 2, (4, 2), (33, 700), (64, 64), dtype, device)
        call = partial(torch_gpukern.flash_attn, *x)
    sinks = randn(gen, 4, dtype=dtype, device=device)
    sinks[1] = -math.inf
    grads = []
    for s in (sinks, sinks.float()):
        leaf = s.detach().requires_grad_()
        out, lse = call(sinks=leaf, return_lse=True)
        out.float().square().sum().backward()
        grads.append([out.detach(), lse.detach(), leaf.grad])
        assert leaf.grad.dtype == s.dtype
    own, wide = grads
    assert same_bits(own[0], wide[0]) and same_bits(own[1], wide[1])
    assert same_bits(own[2], wide[2].to(dtype)) and wide[2].count_nonzero() == 3


# --------------------------------------------------------------------------------------------------
# varlen

BATCHES = {
    "one": ([70], [70]),
    "even": ([32, 32], [32, 32]),
    "ragged": ([1, 65, 33, 64], [130, 65, 7, 1]),
    "empty": ([0, 17, 0, 5], [3, 0, 0, 40]),
    "none": ([], []),
    "zeros": ([0, 0], [0, 0]),
    "long": ([3, 129, 257], [300, 255, 31]),
}


def packed(gen, lengths_q, lengths_k, heads, dims, dtype, device, slack=0):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, with `slack` tokens of NaN
    after the last sequence."""
    (hq, hkv), (d, dv) = heads, served(dims, device)
    tensors = []
    for lengths, h, dim in ((lengths_q, hq, d), (lengths_k, hkv, d), (lengths_k, hkv, dv)):
        t = randn(gen, sum(lengths) + slack, h, dim, dtype=dtype)
        t[sum(lengths) :] = math.nan
        tensors.append(t.to(device))
    cu = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
        for n in (lengths_q, lengths_k)
    ]
    return *tensors, *cu, max([*lengths_q, 0]), max([*lengths_k, 0])


def varlen_kwargs(name, batch, heads_q, gen, dtype, device):
    """The modifiers that flash_attn_varlen supports."""
    kwargs = modifiers(name, batch, heads_q, 9, 9, gen, dtype, device)
    return {
        n: v for n, v in kwargs.items() if n not in ("diagonal", "kv_start", "kv_end", "q_start")
    }


def per_sequence(run, q, k, v, cu_q, cu_k, alibi_slopes=None, **kwargs):
    """Calls run on each sequence and packs the results. Tokens of no sequence are 0."""
    outs = []
    for b, ((q0, q1), (k0, k1)) in enumerate(
        zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()))
    ):
        one = [t[None].transpose(1, 2) for t in (q[q0:q1], k[k0:k1], v[k0:k1])]
        slopes = (
            alibi_slopes[b]
            if alibi_slopes is not None and alibi_slopes.dim() == 2
            else alibi_slopes
        )
        outs.append(
            run(*one, diagonal=(k1 - k0) - (q1 - q0), alibi_slopes=slopes, **kwargs)[0].transpose(
                0, 1
            )
        )
    rest = q.shape[0] - (int(cu_q[-1]) if len(cu_q) else 0)
    return torch.cat([*outs, q.new_zeros(rest, q.shape[1], v.shape[2])])


def sdpa_or_reference(q, k, v, **kwargs):
    out = torch_attn(q, k, v, **kwargs)
    return reference.flash_attn(q, k, v, **kwargs) if out is None else out


def check_varlen(args, kwargs, gen, what=""):
    """Checks flash_attn_varlen and its gradients against the float64 reference."""
    q, k, v, cu_q, cu_k, max_q, max_k = args
    out, lse = ops.flash_attn_varlen_fwd(*args, **kwargs)
    assert (
        out.dtype == q.dtype
        and out.is_contiguous()
        and lse.is_contiguous()
        and lse.dtype == logit_dtype(q.dtype)
    )
    clean = [t.nan_to_num(nan=0.0) for t in (q, k, v)]
    grad = randn(gen, *out.shape, dtype=q.dtype, device=q.device)
    sinks = kwargs.get("sinks")
    rest = {n: t for n, t in kwargs.items() if n != "sinks"}
    tensors = dict(q=q, k=k, v=v) | ({} if sinks is None else dict(sinks=sinks))
    tail = args[3:]
    dtype = yard_dtype(q.dtype)

    def split(run, rest):
        return lambda q, k, v, sinks=None: run(q, k, v, *tail, **rest, sinks=sinks)

    got = backward(split(ops.flash_attn_varlen, rest), tensors, grad)
    mine = dict(out=out, lse=lse) | got

    @cache
    def draw_of(draw):
        """The reference's results and lists of PyTorch's, by name, for these inputs or similar
        ones."""
        x = shuffled(gen, *clean) if draw else clean
        rules, plain = rules_of_draw(kwargs, draw), rules_of_draw(rest, draw)
        run = reference.flash_attn_varlen(*f64(x), *tail, **f64(rules), return_lse=True)
        wide = f64({**tensors, **dict(zip("qkv", x))})
        want = dict(
            zip(
                mine,
                (
                    *run,
                    *backward(
                        split(reference.flash_attn_varlen, f64(plain)), wide, f64(grad)
                    ).values(),
                ),
            )
        )
        if len(cu_q) == 1:  # no sequence
            return want, [mine]
        runs = reordered_packed(*x, cu_q, cu_k, rules, grad)
        x, *cu, narrow = on_cpu((list(x), cu_q, cu_k, for_dtype(rules, dtype)))

        def each():
            yield from (dict(zip(mine, run)) for run in runs)
            yield {"out": per_sequence(sdpa_or_reference, *(t.to(dtype) for t in x), *cu, **narrow)}

        return want, Lazily(each())

    def yards(draw, name):
        want, found = draw_of(draw)
        return ((y[name], want[name]) for y in found if name in y)

    for name, t in mine.items():
        assert_close_as(
            partial(yards, name=name),
            t,
            draw_of(0)[0][name],
            what + (name if name in ("out", "lse") else f"d{name}"),
        )
    return out, lse, got


@pytest.mark.parametrize(
    "case",
    grid(
        64,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=HEADS[1:4],
        dims=((64, 64), (24, 40), (80, 80)),
        mods=[m for m in MODIFIERS if not m.startswith("kv_")],
        slack=(0, 5),
    )
    + grid(
        8,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=HEADS[1:4],
        dims=((64, 64), (24, 40)),
        mods=("sinks_own",),
        slack=(0, 5),
    ),
)
def test_varlen(case, device):
    gen = generator("varlen", case.id)
    args = packed(gen, *BATCHES[case.batch], case.heads, case.dims, case.dtype, device, case.slack)
    kwargs = varlen_kwargs(
        case.mods, len(BATCHES[case.batch][0]), case.heads[0], gen, case.dtype, device
    )
    unchanged = snapshot(*args, **kwargs)
    out, lse, grads = check_varlen(args, kwargs, gen)
    unchanged()
    used_q, used_k = (sum(n) for n in BATCHES[case.batch])
    assert (
        torch.equal(out[used_q:], torch.zeros_like(out[used_q:]))
        and (lse[used_q:] == -math.inf).all()
    )
    for name, used in (("q", used_q), ("k", used_k), ("v", used_k)):
        assert torch.equal(grads[name][used:], torch.zeros_like(grads[name][used:]))


@pytest.mark.parametrize("layout", ("padded", "every_second", "heads_outside", "offset"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_varlen_strides(layout, dtype, device):
    gen = generator("varlen strides", layout)
    q, k, v, *rest = packed(gen, *BATCHES["ragged"], (4, 2), (32, 24), dtype, device)
    move = (lambda t: strided(t, (1, 0, 2))) if layout == "heads_outside" else LAYOUTS[layout]
    rest[:2] = [torch.stack([t, t + 7], 1)[:, 0] for t in rest[:2]]
    check_varlen((move(q), move(k), move(v), *rest), dict(is_causal=True), gen)


@pytest.mark.parametrize(
    "mods", ("none", "causal", "window_causal", "softcap", "alibi_batch", "window_sinks")
)
def test_varlen_is_flash_attn_of_each_sequence(mods, device):
    """flash_attn_varlen is flash_attn of each sequence with the bottom-right diagonal."""
    gen = generator("varlen dense", mods)
    args = packed(gen, *BATCHES["ragged"], (4, 2), (32, 32), torch.float32, device)
    kwargs = varlen_kwargs(mods, 4, 4, gen, torch.float32, device)
    dense = per_sequence(ops.flash_attn, *args[:5], **kwargs)
    ref = reference.flash_attn_varlen(*f64(args), **f64(kwargs))
    assert_close_as(dense, ops.flash_attn_varlen(*args, **kwargs), ref)


def test_varlen_neighbours_do_not_leak(device):
    """NaN in one sequence does not reach another, forward and backward."""
    gen = generator("leak")
    args = list(packed(gen, [20, 33, 15], [40, 33, 70], (2, 1), (16, 16), torch.float32, device))
    clean_q, clean_k, clean_v = (t.clone() for t in args[:3])
    results = []
    for poison in (False, True):
        leaves = [t.clone() for t in (clean_q, clean_k, clean_v)]
        if poison:
            leaves[1][40:73], leaves[2][40:73] = math.nan, math.nan
        leaves = [t.requires_grad_() for t in leaves]
        out = ops.flash_attn_varlen(*leaves, *args[3:], is_causal=True)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(t.grad for t in leaves)])
    rows = [i for i in range(68) if not 20 <= i < 53]
    keys = [i for i in range(143) if not 40 <= i < 73]
    for x, y, keep in zip(*results, (rows, rows, keys, keys)):
        assert same_bits(x[keep], y[keep])


def test_varlen_bounds_may_be_larger(device):
    gen = generator("bounds")
    *args, max_q, max_k = packed(gen, *BATCHES["ragged"], (2, 1), (16, 16), torch.float32, device)
    exact = ops.flash_attn_varlen(*args, max_q, max_k, is_causal=True)
    loose = ops.flash_attn_varlen(*args, 10_000, 2**40, is_causal=True)
    assert torch.equal(exact, loose)


def test_varlen_far_strides():
    gen = generator("varlen far")
    q, k, v, *rest = packed(gen, [2, 1], [2, 2], (2, 2), (2, 2), torch.bfloat16, "cpu")
    expected = ops.flash_attn_varlen(q, k, v, *rest)
    for dim in (0, 1):
        assert same_bits(ops.flash_attn_varlen(far_apart(q, dim), k, v, *rest), expected)
        assert same_bits(ops.flash_attn_varlen(q, far_apart(k, dim), v, *rest), expected)
        assert same_bits(ops.flash_attn_varlen(q, k, far_apart(v, dim), *rest), expected)


@pytest.mark.parametrize("mods", ("none", "causal", "window", "softcap", "alibi_batch", "sinks"))
def test_varlen_gradcheck(mods, device, one_thread):
    gen = generator("varlen gradcheck", mods)
    q, k, v, *rest = packed(gen, [3, 0, 4], [4, 2, 3], (2, 1), (3, 2), torch.float64, device)
    kwargs = varlen_kwargs(mods, 3, 2, gen, torch.float64, device)
    sinks = kwargs.pop("sinks", None)
    t = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]

    def run(q, k, v, sinks=None):
        out, lse = torch_gpukern.flash_attn_varlen(
            q, k, v, *rest, **kwargs, sinks=sinks, return_lse=True
        )
        return out, lse.masked_fill(lse.detach() == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, t)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_varlen_opcheck_of_the_backward(dtype, device):
    gen = generator("varlen opcheck")
    q, k, v, *rest = packed(gen, [3, 0, 5], [4, 2, 5], (4, 2), (8, 16), dtype, device)
    kwargs = varlen_kwargs("window_sinks", 3, 4, gen, dtype, device)
    out, lse = ops.flash_attn_varlen_fwd(q, k, v, *rest, **kwargs)
    grad = strided(torch.ones_like(out), step=2)
    torch.library.opcheck(
        ops.flash_attn_varlen_bwd.default, (grad, q, k, v, out, lse, *rest), kwargs
    )


def _parts_of_sinks(q, k, v, grad, parts):
    """The sinks' gradient from parts of the keys. On the CPU, the parts' shares correct for the
    rounding of out (gpukern.h)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sinks = torch.linspace(-1, 1, q.shape[1], device=q.device, dtype=wide)
    sinks[-1] = -torch.inf
    dlse = torch.randn(q.shape[:3], dtype=wide, generator=torch.Generator().manual_seed(1)).to(
        q.device
    )
    rules = dict(is_causal=True, softcap=3.0, sinks=sinks)
    out, lse = ops.flash_attn_fwd(q, k, v, **rules)
    want = ops.flash_attn_bwd(grad, q, k, v, out, lse, dlse, **rules)[3]
    p = torch.exp(sinks[:, None] - lse)
    delta = (grad.to(wide) * out.to(wide)).sum(-1) - dlse
    got = -(p * (delta * (1 - p) - dlse)).sum((0, 2))
    for first, keys in parts:
        more = dict(diagonal=-first, grad_dtype=wide, is_part=True)
        got = (
            got
            + ops.flash_attn_bwd(
                grad, q, k[:, :, keys], v[:, :, keys], out, lse, dlse, **rules, **more
            )[3]
        )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_parts_of_the_keys_refuse_sinks_on_a_gpu():
    q, lse = torch.zeros(1, 4, 8, 32, device="cuda"), torch.zeros(1, 4, 8, device="cuda")
    with pytest.raises(ValueError, match="sinks must be missing where is_part is true"):
        ops.flash_attn_bwd(q, q, q, q, q, lse, sinks=torch.zeros(4, device="cuda"), is_part=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("cut", (1, 40, 64))
def test_two_parts_of_the_keys_make_the_whole(dtype, cut):
    """Merged float32 results of two parts of the keys are those of all keys. So are gradients of
    parts, computed with out and lse of all keys."""
    gen = generator("parts", cut)
    q, k, v = qkv(gen, 2, (4, 2), (65, 65), (32, 24), dtype)
    grad = randn(gen, 2, 4, 65, 24, dtype=dtype)
    parts = [(0, slice(None, cut)), (cut, slice(cut, None))]
    joined = None
    for first, keys in parts:
        part = ops.flash_attn_fwd(
            q, k[:, :, keys], v[:, :, keys], True, diagonal=-first, out_dtype=torch.float32
        )
        assert part[0].dtype == torch.float32
        joined = part if joined is None else ops.attn_merge(*joined, *part)
    whole = ops.flash_attn_fwd(q, k, v, True, out_dtype=torch.float32)
    torch.testing.assert_close(
        joined[0], whole[0], atol=4e-6 if dtype == torch.float32 else 4e-3, rtol=1e-5
    )
    torch.testing.assert_close(joined[1], whole[1])
    out, lse = ops.flash_attn_fwd(q, k, v, True)
    assert torch.equal(whole[0].to(dtype), out)
    want = ops.flash_attn_bwd(grad, q, k, v, out, lse, is_causal=True, grad_dtype=torch.float32)
    dq, dk, dv = 0, [], []
    for first, keys in parts:
        got = ops.flash_attn_bwd(
            grad,
            q,
            k[:, :, keys],
            v[:, :, keys],
            out,
            lse,
            is_causal=True,
            diagonal=-first,
            grad_dtype=torch.float32,
            is_part=True,
        )
        dq, dk, dv = dq + got[0], [*dk, got[1]], [*dv, got[2]]
    close = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
    for got, ref in zip((dq, torch.cat(dk, 2), torch.cat(dv, 2)), want):
        assert ref.dtype == torch.float32
        torch.testing.assert_close(got, ref, **close)
    for kind in (dtype, torch.float16, torch.float64):  # float64 uses plain loops
        _parts_of_sinks(*(x.to(kind) for x in (q, k, v, grad)), parts)
    for wrong in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match="out_dtype must be"):
            ops.flash_attn_fwd(q, k, v, out_dtype=wrong)


def test_swapped_dimensions_are_warned_of_when_asked(monkeypatch):
    """GPUKERN_DEBUG=1, which is read at import, warns of swapped dimensions. Decoding, and more
    queries than heads, give no warning."""
    swapped, right, decoding = (
        torch.zeros(1, 300, 4, 8),
        torch.zeros(1, 4, 300, 8),
        torch.zeros(1, 32, 1, 8),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_gpukern.flash_attn(swapped, swapped, swapped)
        monkeypatch.setattr(attention, "_DEBUG", True)
        torch_gpukern.flash_attn(right, right, right)
        torch_gpukern.flash_attn(decoding, right[:, :1], right[:, :1])
        first_token = torch.zeros(1, 32, 1, 8)
        torch_gpukern.flash_attn(first_token, first_token, first_token)
        # fewer tokens than heads, as a projection stores them
        prompt = torch.zeros(1, 5, 32, 8).transpose(1, 2)
        torch_gpukern.flash_attn(prompt, prompt, prompt)
        torch_gpukern.flash_attn(torch.zeros(1, 32, 3, 8), *2 * (torch.zeros(1, 8, 5, 8),))
    for q, k in (
        ((1, 300, 4, 8), (1, 300, 4, 8)),
        ((2, 1024, 8, 64), (2, 1024, 8, 64)),
        ((2, 64, 8, 32), (2, 64, 8, 32)),
        ((2, 128, 16, 64), (2, 128, 4, 64)),
        ((1, 64, 4, 8), (1, 64, 1, 8)),
    ):
        with pytest.warns(UserWarning, match="are dimensions 1 and 2 swapped"):
            torch_gpukern.flash_attn(torch.zeros(q), *2 * (torch.zeros(k),))
