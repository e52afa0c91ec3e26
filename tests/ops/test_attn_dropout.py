# SPDX-License-Identifier: BSD-3-Clause
"""Dropout in attention: the mask is computed with Python integers, results and gradients by the
float64 reference with that mask."""

import math
import warnings

import pytest
import torch
from attention_cases import flash_gradients, for_dtype, modifiers
from conftest import (
    assert_close_as,
    f64,
    generator,
    on_cpu,
    randn,
    reference,
    same_bits,
    yard_dtype,
)
from test_dropout import philox
from torch.utils.checkpoint import checkpoint

import torch_gpukern as gk

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def seed_of(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def stated_row(row, keys, p, seed):
    """The kept keys of row `row`: a call of Philox covers eight keys, with the low and the high
    half of each word."""
    s, o = (int(x) & 2**64 - 1 for x in seed)
    words = [w for g in range((keys + 7) // 8) for w in philox(s, o, row << 29 | g)]
    halves = [h for w in words for h in (w & 0xFFFF, w >> 16)]
    return [h < int((1 - p) * 65536 + 0.5) for h in halves[:keys]]


# ---- the mask ------------------------------------------------------------------------------------


def test_the_mask_is_the_stated_one():
    seed = seed_of(-(2**62) + 12345, 2**40 + 7)
    mask = gk.attn_dropout_mask(torch.empty(2, 3, 9, 8), torch.empty(2, 1, 37, 8), 0.3, seed)
    want = [
        [[stated_row((b * 3 + h) * 9 + i, 37, 0.3, seed) for i in range(9)] for h in range(3)]
        for b in range(2)
    ]
    assert torch.equal(mask, torch.tensor(want))
    packed = gk.attn_dropout_mask(torch.empty(11, 2, 8), torch.empty(20, 1, 8), 0.3, seed)
    want = [[stated_row(t * 2 + h, 20, 0.3, seed) for t in range(11)] for h in range(2)]
    assert torch.equal(packed, torch.tensor(want))


def test_the_mask_is_random():
    """The rate is right, and rows, heads, neighbouring keys and neighbouring seeds are
    uncorrelated."""
    q, n = torch.empty(2, 4, 256, 1), 2 * 4 * 256 * 256
    for p in (0.1, 0.5, 0.9):
        mask = gk.attn_dropout_mask(q, q, p, seed_of(3, 0)).double()
        assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
        per_row = (mask.mean(-1) - (1 - p)) / math.sqrt(p * (1 - p) / 256)
        assert 0.9 < per_row.square().mean() < 1.1
        x = (mask - (1 - p)) / math.sqrt(p * (1 - p))
        shifts = [x.roll(1, d) for d in range(4)] + [x.roll(d, 3) for d in (2, 4, 8, 16)]
        others = [
            (gk.attn_dropout_mask(q, q, p, s).double() - (1 - p)) / math.sqrt(p * (1 - p))
            for s in (seed_of(4, 0), seed_of(3, 1))
        ]
        for y in shifts + others:
            assert abs((x * y).mean()) < 5 / math.sqrt(n)


# ---- values and gradients ------------------------------------------------------------------------

CASES = (  # modifiers, B, Hq, Hkv, Sq, Sk, D, Dv
    ("none", 2, 4, 2, 67, 131, 32, 32),
    ("causal_end", 1, 2, 2, 40, 200, 64, 64),
    ("window", 2, 2, 1, 150, 150, 16, 24),
    ("all", 2, 4, 2, 70, 90, 40, 16),
    ("sinks_own", 1, 6, 2, 33, 65, 64, 64),
    ("kv_bounds", 2, 2, 2, 129, 77, 64, 128),
    ("q_start_all", 2, 2, 1, 30, 300, 128, 128),
    ("none", 1, 2, 1, 1, 1, 8, 8),
    ("none", 1, 16, 2, 1, 400, 64, 64),
    ("scale_negative", 1, 2, 2, 130, 130, 256, 256),
)


def close(yard, mine, exact, what, dtype=None):
    if mine.numel() >= 1 << 14:
        return assert_close_as([yard], mine, exact, what)
    # with few values, PyTorch's errors may be small by luck, so allow some more
    room = 64 * torch.finfo(dtype or mine.dtype).eps * (1 + exact.abs().max())
    assert (mine.cpu().double() - exact).abs().max() <= room, what


def within(q, k, v, rules, grad, grad_lse, p, seed, got, what):
    """out, lse and gradients against the float64 reference; PyTorch's own products in the same
    dtype are the yardstick."""
    kept = gk.attn_dropout_mask(q, k, p, seed).cpu()
    q, k, v, grad, grad_lse, rules, got = on_cpu((q, k, v, grad, grad_lse, rules, got))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = f64(rules)
    if "sinks" in wide:
        wide["sinks"] = wide["sinks"].requires_grad_()
        leaves.append(wide["sinks"])
    out, lse = reference.flash_attn(*leaves[:3], **wide, kept=kept, dropout_p=p, return_lse=True)
    seen = lse.isfinite()
    loss = (out * grad.double()).sum() + (lse[seen] * grad_lse.double()[seen]).sum()
    want = torch.autograd.grad(loss, leaves)
    dtype = yard_dtype(q.dtype)
    low = for_dtype(rules, dtype) | dict(kept=kept, dropout_p=p)
    yard = [x.to(dtype) for x in (q, k, v)]
    close(reference.flash_attn(*yard, **low), got[0], out, f"{what} out")
    far = (got[1].double() - lse)[seen].abs()
    assert torch.equal(got[1].isfinite(), seen) and (not far.numel() or far.max() < 2**-16), (
        f"{what} lse"
    )
    grads = flash_gradients(*yard, grad.to(dtype), grad_lse.float(), **low)
    for name, mine, yard_grad, exact in zip(("dq", "dk", "dv", "dsinks"), got[2:], grads, want):
        close(yard_grad, mine, exact, f"{what} {name}", q.dtype)


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=str)
def test_values_and_gradients(case, dtype, device):
    name, batch, heads, heads_kv, seq_q, seq_k, dim, dim_v = CASES[case]
    if device == "cuda" and (dim % 8 or dim_v % 8):
        pytest.skip("not served")
    gen = generator("attn dropout", case, str(dtype))
    q = randn(gen, batch, heads, seq_q, dim, dtype=dtype, device=device)
    k, v = (
        randn(gen, batch, heads_kv, seq_k, d, dtype=dtype, device=device) + 0.25
        for d in (dim, dim_v)
    )
    rules = for_dtype(modifiers(name, batch, heads, seq_q, seq_k, gen, dtype, device), dtype)
    p, seed = (0.1, 0.5, 0.25)[case % 3], seed_of(case, 77, device=device)
    x, y, z = (t.clone().requires_grad_() for t in (q, k, v))
    leaves = [x, y, z]
    live = dict(rules)
    if "sinks" in rules:
        live["sinks"] = rules["sinks"].clone().requires_grad_()
        leaves.append(live["sinks"])
    out, lse = gk.flash_attn(x, y, z, **live, dropout_p=p, dropout_seed=seed, return_lse=True)
    assert same_bits(lse, gk.flash_attn(q, k, v, **rules, return_lse=True)[1]) or device == "cuda"
    grad, grad_lse = (
        randn(gen, *out.shape, dtype=dtype, device=device),
        randn(gen, *lse.shape, dtype=lse.dtype, device=device),
    )
    grads = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    within(q, k, v, rules, grad, grad_lse, p, seed, (out, lse, *grads), f"{name} {dtype}")


@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_packed(dtype, causal, device):
    """Sequences of different lengths, an empty one and one without keys: each uses its rows of the
    mask."""
    gen = generator("attn dropout packed", str(dtype), causal)
    cu_q, cu_k = ([0, 5, 5, 75, 80, 81], [0, 9, 20, 90, 90, 130])
    q = randn(gen, 83, 4, 32, dtype=dtype, device=device)
    k, v = (randn(gen, 132, 2, 32, dtype=dtype, device=device) for _ in range(2))
    lengths = (*(torch.tensor(c, dtype=torch.int32, device=device) for c in (cu_q, cu_k)), 70, 70)
    seed, p = seed_of(1, 2, device=device), 0.3
    x, y, z = (t.clone().requires_grad_() for t in (q, k, v))
    out = gk.flash_attn_varlen(x, y, z, *lengths, is_causal=causal, dropout_p=p, dropout_seed=seed)
    grad = randn(gen, *out.shape, dtype=dtype, device=device)
    got = torch.autograd.grad(out, (x, y, z), grad)
    mask = gk.attn_dropout_mask(q, k, p, seed)
    for b in range(5):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        n = keys.stop - keys.start
        if rows.stop == rows.start or n == 0:
            assert not out[rows].any() and not got[0][rows].any() and not got[1][keys].any()
            continue
        one = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys], grad[rows])]
        kept = mask[None, :, rows, :n].cpu()
        wide, low = (
            [t.cpu().to(d).requires_grad_() for t in one[:3]] for d in (F64, yard_dtype(dtype))
        )
        rules = dict(is_causal=causal, diagonal=n - (rows.stop - rows.start))
        want = reference.flash_attn(*wide, **rules, kept=kept, dropout_p=p)
        exact = torch.autograd.grad(want, wide, one[3].cpu().double())
        low = [t.detach() for t in low]
        yard = flash_gradients(*low, one[3].cpu().to(low[0].dtype), **rules, kept=kept, dropout_p=p)
        close(
            reference.flash_attn(*low, **rules, kept=kept, dropout_p=p),
            out[rows].transpose(0, 1)[None],
            want,
            f"out {b}",
        )
        for name, mine, own, ref in zip(
            "qkv", (got[0][rows], got[1][keys], got[2][keys]), yard, exact
        ):
            close(own, mine.transpose(0, 1)[None], ref, f"d{name} {b}")


def test_gradcheck():
    gen = generator("attn dropout gradcheck")
    q, k, v = (randn(gen, 1, 2, n, 4, dtype=F64).requires_grad_() for n in (5, 7, 7))
    seed = seed_of(9, 9)
    assert torch.autograd.gradcheck(
        lambda *x: gk.flash_attn(*x, is_causal=True, diagonal=2, dropout_p=0.4, dropout_seed=seed),
        (q, k, v),
    )


@pytest.mark.parametrize("seq_q", (1, 3, 40))
def test_a_row_of_one_key_has_no_gradient_of_its_score(seq_q):
    """dS is exactly 0, whether the key is kept or not, because the softmax has a single key."""
    gen = generator("attn dropout alone", seq_q)
    for dtype in (F32, BF16):
        q, v = (randn(gen, 1, 3, seq_q, 32, dtype=dtype).requires_grad_() for _ in range(2))
        k = randn(gen, 1, 3, seq_q, 32, dtype=dtype).requires_grad_()
        out = gk.flash_attn(
            q, k, v, window_left=0, window_right=0, dropout_p=0.5, dropout_seed=seed_of(1, 1)
        )
        dq, dk = torch.autograd.grad(out, (q, k), randn(gen, *out.shape, dtype=dtype))
        assert not dq.any() and not dk.any()


# ---- the same mask, everywhere -------------------------------------------------------------------


def test_without_dropout_the_bits_are_the_same(device):
    q = randn(generator("attn no dropout"), 1, 2, 70, 64, dtype=BF16, device=device)
    assert same_bits(
        gk.flash_attn(q, q, q),
        gk.flash_attn(q, q, q, dropout_p=0.0, dropout_seed=seed_of(1, 2, device=device)),
    )


def test_the_seed_is_drawn_from_torchs_generator(device):
    q = randn(generator("attn drawn"), 1, 2, 70, 64, device=device)
    runs = []
    for s in (1, 1, 2):
        torch.manual_seed(s)
        runs.append(gk.flash_attn(q, q, q, dropout_p=0.5))
    assert same_bits(runs[0], runs[1]) and not same_bits(runs[0], runs[2])


def test_checkpoint(device):
    q = randn(generator("attn checkpoint"), 1, 2, 70, 64, device=device).requires_grad_()

    def attend(x):
        return gk.flash_attn(x, x, x, dropout_p=0.5)

    grads = []
    for run in (attend, lambda x: checkpoint(attend, x, use_reentrant=False)):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(run(q).sum(), q)[0])
    assert same_bits(*grads)


def test_compiled(device):
    q = randn(generator("attn dropout compile"), 1, 2, 70, 64, device=device).requires_grad_()
    seed = seed_of(3, 4, device=device)
    run = torch.compile(
        lambda x, s: gk.flash_attn(x, x, x, is_causal=True, dropout_p=0.25, dropout_seed=s),
        fullgraph=True,
    )
    mine, eager = (
        run(q, seed),
        gk.flash_attn(q, q, q, is_causal=True, dropout_p=0.25, dropout_seed=seed),
    )
    assert same_bits(mine, eager)
    assert same_bits(*(torch.autograd.grad(y.sum(), q)[0] for y in (mine, eager)))
    drawn = torch.compile(lambda x: gk.flash_attn(x, x, x, dropout_p=0.5), fullgraph=True)
    a, b = drawn(q), drawn(q)
    assert not same_bits(a, b)


def test_vmap_draws_the_same_mask_for_each_slice():
    gen = generator("attn dropout vmap")
    q = randn(gen, 3, 1, 2, 10, 8)
    seed = seed_of(3, 4)
    got = torch.vmap(lambda x: gk.flash_attn(x, x, x, dropout_p=0.5, dropout_seed=seed))(q)
    for x, y in zip(q, got):
        assert same_bits(y, gk.flash_attn(x, x, x, dropout_p=0.5, dropout_seed=seed))
    two = torch.stack([seed, seed_of(5, 6), seed_of(7, 8)])
    got = torch.vmap(lambda x, s: gk.flash_attn(x, x, x, dropout_p=0.5, dropout_seed=s))(q, two)
    assert same_bits(got[1], gk.flash_attn(q[1], q[1], q[1], dropout_p=0.5, dropout_seed=two[1]))


def test_opcheck():
    q = randn(generator("attn dropout opcheck"), 1, 2, 10, 8).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(
            torch.ops.gpukern.flash_attn.default,
            (q, q, q),
            dict(dropout_p=0.5, dropout_seed=seed_of(1, 2)),
        )


@pytest.mark.parametrize("p", (-0.1, 1.5, math.nan, math.inf))
def test_p_is_refused_by_name(p):
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"flash_attn: dropout_p must be between 0 and 1, got"):
        gk.flash_attn(q, q, q, dropout_p=p)
    with pytest.raises(ValueError, match=r"attn_dropout_mask: p must be between 0 and 1, got"):
        gk.attn_dropout_mask(q, q, p, seed_of(1, 2))


def test_more_refusals():
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match="dropout_seed must be int64, got int32"):
        gk.flash_attn(q, q, q, dropout_p=0.5, dropout_seed=seed_of(1, 2).int())
    with pytest.raises(ValueError, match="dropout_seed is missing where dropout_p is 0.5"):
        torch.ops.gpukern.flash_attn(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="dropout_p must be 0 where is_part is true"):
        lse = torch.zeros(1, 1, 2)
        torch.ops.gpukern.flash_attn_bwd(
            q, q, q, q, q, lse, is_part=True, dropout_p=0.5, dropout_seed=seed_of(1, 2)
        )
    x = q.clone().requires_grad_()
    dq = torch.autograd.grad(gk.flash_attn(x, x, x, dropout_p=0.5).sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="twice differentiable"):
        dq.sum().backward()


@pytest.mark.gpu
def test_a_captured_graph_reads_the_seed():
    q = randn(generator("attn dropout graph"), 1, 2, 200, 64, dtype=BF16, device="cuda")
    seed, graph = seed_of(1, 2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gk.flash_attn(q, q, q, dropout_p=0.5, dropout_seed=seed)
    for values in ((1, 2), (3, 4)):
        seed.copy_(seed_of(*values))
        graph.replay()
        assert same_bits(out, gk.flash_attn(q, q, q, dropout_p=0.5, dropout_seed=seed))


# ---- Hopper's kernels ----------------------------------------------------------------------------


def rules_of(name, seq_q, seq_k):
    """The rules of a call, and the pairs that they show, [seq_q, seq_k]."""
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    ahead = j - i - (seq_k - seq_q)
    return {
        "full": (dict(), ahead == ahead),
        "causal": (dict(is_causal=True, diagonal=seq_k - seq_q), ahead <= 0),
        "window": (
            dict(window_left=301, window_right=20, diagonal=seq_k - seq_q),
            (ahead <= 20) & (ahead >= -301),
        ),
    }[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("full", "causal", "window"))
@pytest.mark.parametrize("dim", (64, 96, 128))
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_every_bit_of_the_mask_on_a_gpu(name, dim, dtype):
    """q of 0 makes the weights of a row equal. V of one-hot rows then shows which keys forward
    keeps, and dO of one-hot rows which pairs backward keeps: 0 or not, pair by pair."""
    batch, heads, seq_q, seq_k, p = 2, 4, 500, 700, 0.3
    rules, shown = rules_of(name, seq_q, seq_k)
    q = torch.zeros(batch, heads, seq_q, dim, dtype=dtype, device="cuda").requires_grad_()
    k = torch.zeros(batch, 2, seq_k, dim, dtype=dtype, device="cuda").requires_grad_()
    seed = seed_of(-5, 2**33 + 1, device="cuda")
    kept = gk.attn_dropout_mask(q, k, p, seed).cpu() & shown
    seen = torch.empty(batch, heads, seq_q, 0, dtype=torch.bool)
    for j in range(0, seq_k, dim):
        v = torch.zeros(batch, 2, seq_k, dim, dtype=dtype, device="cuda")
        v[:, :, j : j + dim] = torch.eye(min(dim, seq_k - j), dim, device="cuda", dtype=dtype)
        out = gk.flash_attn(q, k, v, **rules, dropout_p=p, dropout_seed=seed)
        seen = torch.cat([seen, out.cpu() != 0], -1)
    assert torch.equal(seen[..., :seq_k], kept) and not seen[..., seq_k:].any()
    # the first of the two query heads that share a kv head
    v = torch.zeros_like(k).requires_grad_()
    out = gk.flash_attn(q, k, v, **rules, dropout_p=p, dropout_seed=seed)
    for i in range(0, seq_q, dim):
        grad = torch.zeros_like(out)
        grad[:, ::2, i : i + dim] = torch.eye(min(dim, seq_q - i), dim, device="cuda", dtype=dtype)
        dv = torch.autograd.grad(out, v, grad, retain_graph=True)[0].cpu() != 0
        n = min(dim, seq_q - i)
        assert torch.equal(dv[..., :n].transpose(-1, -2), kept[:, ::2, i : i + n])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_fifty_calls_give_the_same_bits(causal, dim, dtype):
    """Of forward, and of dk and dv; dq is added up in any order. Each block takes several tiles."""
    gen = generator("attn dropout fifty", causal, dim)
    q = randn(gen, 4, 16, 1000, dim, dtype=dtype, device="cuda").requires_grad_()
    k, v = (
        randn(gen, 4, 4, 1000, dim, dtype=dtype, device="cuda").requires_grad_() for _ in range(2)
    )
    given = dict(is_causal=causal, dropout_p=0.1, dropout_seed=seed_of(1, dim, device="cuda"))
    out = gk.flash_attn(q, k, v, **given)
    grad = randn(gen, *out.shape, dtype=dtype, device="cuda")
    grads = torch.autograd.grad(out, (k, v), grad, retain_graph=True)
    for _ in range(50):
        assert same_bits(gk.flash_attn(q, k, v, **given), out)
        again = torch.autograd.grad(out, (k, v), grad, retain_graph=True)
        assert same_bits(again[0], grads[0]) and same_bits(again[1], grads[1])
