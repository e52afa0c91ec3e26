# SPDX-License-Identifier: BSD-3-Clause
"""Random configurations of every op, with modifiers combined in ways that no grid lists."""

import math
from functools import cache, partial

import torch
from attention_cases import (
    Paged,
    check_paged,
    for_dtype,
    logit_dtype,
    lse_yardsticks,
    reordered,
    reordered_packed,
    torch_attn,
)
from conftest import (
    ACTIVATIONS,
    ALL,
    LAYOUTS,
    assert_close_as,
    f64,
    generator,
    ops,
    randn,
    reference,
    same_bits,
    shuffled,
    strided,
    torch_gemm,
    torch_gpukern,
    yard_dtype,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# Examples are not shrunk. If an error bound is missed by little, a smaller example explains no more,
# and the search takes minutes.
PHASES = (Phase.explicit, Phase.generate)
COMMON = dict(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=PHASES
)
few = settings(max_examples=300 if ALL else 50, **COMMON)

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64))
layouts = st.sampled_from(tuple(LAYOUTS))
lengths = st.one_of(st.integers(0, 20), st.integers(30, 140))
dims = st.one_of(st.integers(1, 20), st.sampled_from((32, 40, 64, 80, 128, 160)))
seeds = st.integers(0, 2**20)


@st.composite
def attention(draw):
    """Tensors and arguments of one flash_attn call."""
    gen = generator("hypothesis", draw(seeds))
    dtype, hkv = draw(dtypes), draw(st.integers(1, 3))
    hq, sq, sk, d, dv = (
        hkv * draw(st.integers(1, 4)),
        draw(lengths),
        draw(lengths),
        draw(dims),
        draw(dims),
    )
    # Tiny problems get a large batch, because the worst error of a few elements is a poor estimate,
    # for the kernel as for PyTorch.
    batch = draw(st.integers(1, 3)) + min(40, 300 // (hkv * min(sq + 1, sk + 1) * min(d, dv)))
    q, k, v = (
        LAYOUTS[draw(layouts)](randn(gen, batch, h, s, x, dtype=dtype))
        for h, s, x in ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv))
    )
    kwargs = dict(
        is_causal=draw(st.booleans()), diagonal=draw(st.sampled_from((0, 1, -3, sk - sq, 50, -50)))
    )
    kwargs["window_left"] = draw(st.sampled_from((-1, -1, 0, 3, 31, 1000)))
    kwargs["window_right"] = draw(st.sampled_from((-1, -1, 0, 2, 40)))
    kwargs["softcap"] = draw(st.sampled_from((0.0, 0.0, 1.0, 20.0)))
    kwargs["scale"] = draw(st.sampled_from((None, None, 0.1, -0.2)))
    wide = logit_dtype(dtype)
    if draw(st.booleans()):
        shape = (batch, hq) if draw(st.booleans()) else (hq,)
        kwargs["alibi_slopes"] = randn(gen, *shape, dtype=wide, std=0.2)
    if draw(st.booleans()):
        kwargs["sinks"] = randn(gen, hq, dtype=wide).masked_fill(
            torch.rand(hq, generator=gen) < 0.3, -math.inf
        )
    for name in ("kv_start", "kv_end"):
        if draw(st.integers(0, 3)) == 0:
            kwargs[name] = torch.randint(-2, sk + 3, (batch,), generator=gen, dtype=torch.int32)
    if draw(st.integers(0, 3)) == 0:
        kwargs["q_start"] = torch.randint(
            -sq - 2, sk + 3, (batch,), generator=gen, dtype=torch.int32
        )
        kwargs["diagonal"] = 0
    return gen, q, k, v, kwargs


@few
@given(attention())
def test_flash_attn(case):
    gen, q, k, v, kwargs = case
    out, lse = ops.flash_attn_fwd(q, k, v, **kwargs)
    ref, ref_lse = reference.flash_attn(*f64((q, k, v)), **f64(kwargs), return_lse=True)
    dtype = yard_dtype(q.dtype)

    @cache
    def draw_of(draw):
        x = shuffled(gen, q, k, v) if draw else (q, k, v)
        return x, reference.flash_attn(*f64(x), **f64(kwargs), return_lse=True)

    def yards_of_out(draw):
        x, (want, _) = draw_of(draw)
        sdpa = torch_attn(*(t.to(dtype) for t in x), **for_dtype(kwargs, dtype))
        yield from () if sdpa is None else ((sdpa, want),)
        yield from ((run[0], want) for run in reordered(*x, kwargs))

    def yards_of_lse(draw):
        x, (_, want) = draw_of(draw)
        return ((y, want) for y in lse_yardsticks(*x, want, **kwargs))

    # the elements of a row of out share the roundings of its scores
    assert_close_as(yards_of_out, out, ref, sources=lse.numel())
    assert_close_as(yards_of_lse, lse, ref_lse, "lse")
    assert same_bits(ops.flash_attn(q, k, v, **kwargs), out)


@few
@given(attention())
def test_flash_attn_backward(case):
    gen, q, k, v, kwargs = case
    lse = ops.flash_attn_fwd(q, k, v, **kwargs)[1]
    sinks = kwargs.pop("sinks", None)
    grad = randn(gen, *q.shape[:3], v.shape[3], dtype=q.dtype)
    grad_lse = randn(gen, *q.shape[:3], dtype=logit_dtype(q.dtype)).masked_fill(lse == -math.inf, 0)

    def gradients(run, tensors, extra):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, lse = run(
            *leaves[:3], **extra, sinks=leaves[3] if sinks is not None else None, return_lse=True
        )
        torch.autograd.backward((out, lse), (grad.to(out.dtype), grad_lse.to(lse.dtype)))
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]

    @cache
    def draw_of(draw):
        x = shuffled(gen, q, k, v) if draw else (q, k, v)
        want = gradients(reference.flash_attn, f64([*x, *given_sinks]), f64(kwargs))
        return want, [run[2:] for run in reordered(*x, {**kwargs, "sinks": sinks}, grad, grad_lse)]

    given_sinks = () if sinks is None else (sinks,)

    def yards(i, draw):
        want, found = draw_of(draw)
        return [(y[i], want[i]) for y in found]

    for i, got in enumerate(gradients(torch_gpukern.flash_attn, (q, k, v, *given_sinks), kwargs)):
        # with few queries, all of dk depends on the roundings of a few scores
        assert_close_as(
            partial(yards, i),
            got,
            draw_of(0)[0][i],
            ("dq", "dk", "dv", "dsinks")[i],
            sources=lse.numel(),
        )


@st.composite
def product(draw):
    """Tensors and arguments of one gemm call."""
    gen = generator("hypothesis gemm", draw(seeds))
    dtype = draw(dtypes)
    m, n, k = (
        draw(st.one_of(st.integers(0, 40), st.sampled_from((64, 127, 200)))) for _ in range(3)
    )
    batch_a, batch_b = draw(
        st.sampled_from(
            (((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((2, 3), (2, 3)), ((0,), ()))
        )
    )
    a = LAYOUTS[draw(layouts)](randn(gen, *batch_a, m, k, dtype=dtype))
    b = LAYOUTS[draw(layouts)](randn(gen, *batch_b, k, n, dtype=dtype))
    kwargs = dict(
        activation=draw(st.sampled_from(ACTIVATIONS)),
        alpha=draw(st.sampled_from((1.0, -0.5, 0.0, 3.0))),
    )
    kwargs["out_dtype"] = draw(
        st.sampled_from((None, dtype, torch.float32 if dtype != torch.float64 else None))
    )
    kwargs["beta"] = draw(st.sampled_from((1.0, 0.0, -2.0)))
    extra = st.sampled_from((dtype, kwargs["out_dtype"] or dtype))
    if draw(st.booleans()):
        kwargs["bias"] = strided(randn(gen, n, dtype=draw(extra)), step=draw(st.integers(1, 3)))
    batch = torch.broadcast_shapes(batch_a, batch_b)
    shapes = (None, (*batch, m, n), (m, n), (1, n), (m, 1), (n,), ())
    shape = draw(st.sampled_from(shapes))
    if shape is not None:
        kwargs["c"] = (
            LAYOUTS[draw(layouts)](randn(gen, *shape, dtype=draw(extra)))
            if len(shape) > 1
            else randn(gen, *shape, dtype=dtype)
        )
    return a, b, kwargs


@few
@given(product())
def test_gemm(case):
    a, b, kwargs = case
    got = ops.gemm(a, b, **kwargs)

    def exact(a, b):
        return reference.gemm(f64(a), f64(b), **{**f64(kwargs), "out_dtype": torch.float64})

    ref = exact(a, b)
    dtype = yard_dtype(kwargs["out_dtype"] or a.dtype)
    cast = {n: t.to(dtype) if isinstance(t, torch.Tensor) else t for n, t in kwargs.items()} | {
        "out_dtype": dtype
    }
    orders = [None, *(torch.randperm(a.shape[-1], generator=generator(i)) for i in range(5))]

    def yards(draw):
        x, want = (a, b), ref
        if draw:
            x = shuffled(generator("hypothesis draws", draw), a, b)
            want = exact(*x)
        for order in orders:
            yield torch_gemm(*(t.to(dtype) for t in x), order=order, **cast), want

    assert_close_as(yards, got, ref)


@st.composite
def paged(draw):
    """A paged cache and the arguments of one paged_attn call."""
    gen = generator("hypothesis paged", draw(seeds))
    dtype = draw(dtypes)
    hkv = draw(st.integers(1, 3))
    heads = (hkv * draw(st.integers(1, 5)), hkv)
    contexts = draw(
        st.lists(st.one_of(st.integers(0, 40), st.integers(100, 400)), min_size=1, max_size=5)
    )
    queries = [0 if n == 0 else draw(st.integers(0, min(n, 20))) for n in contexts]
    case = Paged(
        gen,
        contexts,
        queries,
        *heads,
        draw(dims),
        draw(dims),
        draw(st.integers(1, 40)),
        dtype,
        order=draw(st.sampled_from(("NHD", "HND", "padded", "shared"))),
    )
    kwargs = dict(
        window_left=draw(st.sampled_from((-1, -1, 0, 7, 90))),
        softcap=draw(st.sampled_from((0.0, 2.0))),
    )
    kwargs["is_causal"] = draw(st.booleans())
    wide = logit_dtype(dtype)
    if draw(st.booleans()):
        shape = (len(contexts), heads[0]) if draw(st.booleans()) else (heads[0],)
        kwargs["alibi_slopes"] = randn(gen, *shape, dtype=wide, std=0.2)
    if draw(st.booleans()):
        kwargs["sinks"] = randn(gen, heads[0], dtype=wide)
    if draw(st.booleans()):
        kwargs["k_scale"] = (
            torch.rand(hkv if draw(st.booleans()) else (), generator=gen).to(wide) + 0.5
        )
        kwargs["v_scale"] = (
            torch.rand(hkv if draw(st.booleans()) else (), generator=gen).to(wide) + 0.5
        )
    return case, kwargs


@few
@given(paged())
def test_paged_attn(drawn):
    case, kwargs = drawn
    if not sum(case.queries):
        return
    out, lse = ops.paged_attn_fwd(
        *case.args(), cu_seqlens_q=case.cu_seqlens_q, max_seqlen_q=max(case.queries), **kwargs
    )
    check_paged(case, out, lse, kwargs)


@few
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=4, max_size=9),
    dtypes,
    dims,
    seeds,
    st.sampled_from((-1, 0, 9)),
    st.booleans(),
    st.sampled_from((0.0, 3.0)),
    st.booleans(),
)
def test_varlen(sequences, dtype, dim, seed, window, causal, softcap, with_sinks):
    gen = generator("hypothesis varlen", seed)
    sequences = sequences * (
        1 + 40 // dim
    )  # many sequences if head_dim is small, as in attention()
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in zip(*sequences))
    q = randn(gen, int(cu_q[-1]), 4, dim, dtype=dtype)
    k, v = (randn(gen, int(cu_k[-1]), 2, n, dtype=dtype) for n in (dim, 24))
    args = (cu_q, cu_k, max(x for x, _ in sequences), max(y for _, y in sequences))
    kwargs = dict(is_causal=causal, window_left=window, softcap=softcap)
    if with_sinks:
        kwargs["sinks"] = randn(gen, 4, dtype=logit_dtype(dtype))
    grad = randn(gen, q.shape[0], 4, 24, dtype=dtype)

    def results(run, tensors, extra):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, lse = run(*leaves, *args, **extra, return_lse=True)
        out.backward(grad.to(out.dtype))
        grads = (torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)
        return [out.detach(), lse.detach(), *grads]

    @cache
    def draw_of(draw):
        x = shuffled(gen, q, k, v) if draw else (q, k, v)
        want = results(reference.flash_attn_varlen, f64(x), f64(kwargs))
        return want, reordered_packed(*x, cu_q, cu_k, kwargs, grad)

    def yards(i, draw):
        want, found = draw_of(draw)
        return ((y[i], want[i]) for y in found)

    for i, got in enumerate(results(torch_gpukern.flash_attn_varlen, (q, k, v), kwargs)):
        assert_close_as(
            partial(yards, i),
            got,
            draw_of(0)[0][i],
            ("out", "lse", "dq", "dk", "dv")[i],
            sources=q[..., 0].numel(),
        )


@few
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 30), dtypes, layouts, st.booleans(), seeds
)
def test_kv_cache_write(blocks, block_size, count, dtype, layout, strided_cache, seed):
    gen = generator("hypothesis write", seed)
    k, v = (LAYOUTS[layout](randn(gen, count, 2, n, dtype=dtype)) for n in (5, 16))
    slots = torch.randperm(max(blocks * block_size, count), generator=gen)[:count]
    slots[slots >= blocks * block_size] = -1
    caches = [randn(gen, blocks, block_size, 2, n, dtype=dtype) for n in (5, 16)]
    if strided_cache:
        caches = [strided(c, (2, 0, 1, 3), pad=2) for c in caches]
    expected = [c.clone() for c in caches]
    reference.kv_cache_write(k, v, *expected, slots)
    ops.kv_cache_write(k, v, *caches, slots)
    assert all(same_bits(x, y) for x, y in zip(caches, expected))
