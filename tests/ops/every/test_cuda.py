# SPDX-License-Identifier: BSD-3-Clause
"""GPU-only behaviour: graphs, streams, devices, uninitialised memory, and contents of index tensors
that the host does not check.

Everything is skipped, with a reason, if torch finds no CUDA device. The ops' results are tested by
tests/ops/ on both devices.
"""

import json
import math
import os
import re
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Paged
from conftest import (
    TORCH_ACTIVATION,
    assert_close_as,
    generator,
    integers,
    ops,
    orders,
    randn,
    run_python,
    same_bits,
    torch_gemm,
    torch_gpukern,
)
from registry import OPS, VARIANTS, Bound, drawn

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HOPPER = pytest.mark.skipif(
    "torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)",
    reason="Hopper's rows",
)


def on_gpu(*shape, seed=0, dtype=BF16, std=1.0):
    return randn(generator("cuda", shape, seed), *shape, dtype=dtype, device="cuda", std=std)


def in_layout(letter, make, *shape):
    """A matrix [.., rows, columns] made by `make` in the order of its storage; T is stored
    transposed.
    """
    *batch, rows, columns = shape
    return make(*batch, rows, columns) if letter == "N" else make(*batch, columns, rows).mT


def integer_operands(gen, layout, batch, m, n, k, dtype):
    """a [*batch, m, k] and b [*batch, k, n] of small integers, whose products are exact."""

    def make(*shape):
        return integers(gen, *shape, dtype=dtype).cuda()

    return in_layout(layout[0], make, *batch, m, k), in_layout(layout[1], make, *batch, k, n)


def qkv(batch=2, heads=4, heads_kv=2, seq=200, head_dim=64, dtype=BF16, seed=0):
    return (
        on_gpu(batch, heads, seq, head_dim, seed=seed, dtype=dtype),
        on_gpu(batch, heads_kv, seq, head_dim, seed=seed + 1, dtype=dtype),
        on_gpu(batch, heads_kv, seq, head_dim, seed=seed + 2, dtype=dtype),
    )


def paged(lengths, queries=None, seed=0, dtype=BF16, **shape):
    shape = {
        "heads_q": 8,
        "heads_kv": 2,
        "head_dim": 64,
        "head_dim_v": 64,
        "block_size": 16,
        **shape,
    }
    queries = queries or [1] * len(lengths)
    return Paged(generator("paged", seed), lengths, queries, dtype=dtype, device="cuda", **shape)


def registered(name, variant):
    call = drawn(name, variant, "cuda", BF16)
    return partial(getattr(ops, OPS[name].raw or name), **call)


def calls():
    """name -> a small call of each op, without arguments: the calls of the registry, and shapes
    that other kernels serve."""
    a, b, bias = on_gpu(130, 72), on_gpu(72, 96), on_gpu(96)
    x = on_gpu(140, 128, dtype=torch.float32)
    q, k, v = qkv()
    out, lse = ops.flash_attn_fwd(q, k, v, is_causal=True)
    grad = on_gpu(*out.shape, seed=3)
    packed = [on_gpu(300, 4, 64, seed=s) for s in range(3)]
    cu = torch.tensor([0, 100, 130, 300], dtype=torch.int32, device="cuda")
    cache = paged([100, 3, 260])
    slots = torch.tensor([3, 17, 40], device="cuda")
    k_new, v_new = on_gpu(3, 2, 64), on_gpu(3, 2, 64, seed=1)
    every = {f"{name}: {variant}": registered(name, variant) for name, variant in VARIANTS}
    return every | {
        "gemm": lambda: ops.gemm(a, b, bias, activation="gelu"),
        "gemm_tf32": lambda: ops.gemm(x, x[:128], fp32_precision="tf32"),
        "gemm_tf32_copied": lambda: ops.gemm(x.mT, x, fp32_precision="tf32"),
        "gemm_skinny": lambda: ops.gemm(a[:3], b),
        "gemm_act_bwd": lambda: ops.gemm_act_bwd(a, a, "silu"),
        "flash_attn": lambda: ops.flash_attn_fwd(q, k, v, is_causal=True),
        "flash_attn_bwd": lambda: ops.flash_attn_bwd(grad, q, k, v, out, lse, is_causal=True),
        "flash_attn_varlen": lambda: ops.flash_attn_varlen_fwd(
            *packed, cu, cu, 170, 170, is_causal=True
        ),
        "paged_attn": lambda: ops.paged_attn_fwd(*cache.args()),
        "kv_cache_write": lambda: ops.kv_cache_write(
            k_new, v_new, cache.k_cache, cache.v_cache, slots
        ),
        "attn_merge": lambda: ops.attn_merge(out, lse, out.flip(2), lse.flip(2)),
    }


def tensors(result):
    return (
        []
        if result is None
        else [result]
        if isinstance(result, torch.Tensor)
        else [t for t in result if t is not None]
    )


# --------------------------------------------------------------------------------------------------
# graphs


@pytest.mark.parametrize("op", ("gemm", "flash_attn", "paged_attn", "kv_cache_write"))
def test_the_very_first_call_may_stand_in_a_capture(op):
    """Nothing of the plugin has run in the process, so modules, attributes and the error word are
    created inside the capture."""
    code = {
        "gemm": "a, b = r(300, 128), r(128, 200)\nf = lambda: ops.gemm(a, b)\nw = lambda: "
        "a.double() @ b.double()",
        "flash_attn": "q = r(1, 2, 100, 128)\nf = lambda: ops.flash_attn(q, q, q)\n"
        "w = lambda: torch.softmax(q.double() @ q.double().mT / 128**.5, -1) @ q.double()",
        "paged_attn": "q, c = r(1, 2, 128), r(4, 16, 2, 128)\nt = torch.arange(4, "
        "device='cuda').int()[None]\n"
        "n = torch.tensor([64], device='cuda').int()\nf = lambda: ops.paged_attn(q, c, c, t, n)\n"
        "k = c.flatten(0, 1).transpose(0, 1).double()\n"
        "w = lambda: (torch.softmax(q.double().transpose(0, 1) @ k.mT / 128**.5, -1) @ "
        "k).transpose(0, 1)",
        "kv_cache_write": "k, c, d = r(3, 2, 64), r(2, 16, 2, 64), r(2, 16, 2, 64)\n"
        "s = torch.tensor([0, 20, 7], device='cuda')\nf = lambda: (ops.kv_cache_write(k, k, c, d, "
        "s), c.flatten(0, 1)[s])[1]\n"
        "w = lambda: k.double()",
    }[op]
    run_python(
        f"""
import torch, torch_gpukern
ops = torch.ops.gpukern
def r(*shape): return torch.randn(*shape, device="cuda").bfloat16()
{code}
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = f()
graph.replay()
torch.cuda.synchronize()
error = (out.double() - w()).abs().max().item()
assert error < 0.02 * w().abs().max().item(), error
"""
    )


CALLS = (
    "gemm",
    "gemm_skinny",
    "gemm_act_bwd",
    "flash_attn",
    "flash_attn_bwd",
    "flash_attn_varlen",
    "paged_attn",
    "kv_cache_write",
    "attn_merge",
    *(f"{name}: {variant}" for name, variant in VARIANTS),
)


@pytest.mark.parametrize("op", CALLS)
def test_replay_gives_the_bits_of_the_call(op):
    call = calls()[op]
    want = [t.clone() for t in tensors(call())]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(3):
        for t in tensors(got):
            t.fill_(torch.nan if t.is_floating_point() else -1)
        graph.replay()
        assert all(same_bits(g, w) for g, w in zip(tensors(got), want, strict=True))


def test_one_graph_serves_every_length_and_table():
    """seq_lens, block_table, pages and queries change under a captured paged_attn; its results must
    follow."""
    first = paged([64] * 5, seed=1)
    graph = torch.cuda.CUDAGraph()
    ops.paged_attn_fwd(*first.args())
    # a wider pool than any of the batches needs, so that all of them fit into its tensors
    pool = [on_gpu(64, 16, 2, 64, seed=s) for s in (5, 6)]
    table = torch.zeros(5, 16, dtype=torch.int32, device="cuda")
    lens, q = torch.zeros(5, dtype=torch.int32, device="cuda"), first.q.clone()
    with torch.cuda.graph(graph):
        out, lse = ops.paged_attn_fwd(q, *pool, table, lens)
    for seed, lengths in enumerate(([1, 17, 64, 100, 0], [130, 16, 15, 1, 190], [0, 0, 0, 0, 7])):
        one = paged(lengths, seed=seed + 2)
        width = one.block_table.shape[1]
        for held, new in zip(pool, (one.k_cache, one.v_cache), strict=True):
            held[: new.shape[0]] = new
        table[:, :width], lens[:], q[:] = one.block_table, one.seq_lens, one.q
        graph.replay()
        want, want_lse = ops.paged_attn_fwd(*one.args())
        assert same_bits(out, want) or (out - want).abs().max() < 0.02
        torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


def test_one_graph_serves_every_place():
    """q_start and kv_start change under captured attention, dense with backward and paged."""
    q, k, v, grad = (
        on_gpu(3, h, s, 64, seed=h + s) for h, s in ((4, 70), (2, 300), (2, 301), (4, 71))
    )
    v, grad = v[:, :, :300], grad[:, :, :70]
    q_start, kv_start = (torch.zeros(3, dtype=torch.int32, device="cuda") for _ in range(2))
    table, lens = (
        torch.arange(3, dtype=torch.int32, device="cuda")[:, None],
        torch.full_like(q_start, 300),
    )
    pages = k.transpose(1, 2), v.transpose(1, 2)
    rules = dict(is_causal=True, window_left=100, q_start=q_start, kv_start=kv_start)

    def run():
        out, lse = ops.flash_attn_fwd(q, k, v, **rules)
        gradients = ops.flash_attn_bwd(grad, q, k, v, out, lse, **rules)[:3]
        return (
            out,
            lse,
            *gradients,
            *ops.paged_attn_fwd(q[:, :, 0], *pages, table, lens, kv_start=kv_start),
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for stands, firsts in (
        ([0, 230, 10], [0, 7, 50]),
        ([-35, 299, 100], [299, -3, 160]),
        ([300, -80, 5], [0, 0, 0]),
    ):
        q_start.copy_(torch.tensor(stands, dtype=torch.int32))
        kv_start.copy_(torch.tensor(firsts, dtype=torch.int32))
        graph.replay()
        for x, want in zip(results, run(), strict=True):
            torch.testing.assert_close(x, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dim", (64, 128, 192))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "rules",
    (
        dict(is_causal=True),
        dict(is_causal=True, window_left=200),
        dict(window_left=90, window_right=70),
    ),
    ids=str,
)
def test_deterministic_gradients_of_queries_that_stand_anywhere(rules, dtype, dim):
    """With several tiles of queries and keys, each run has the same bits, which are those of the
    sequences computed one by one."""
    stands = [800, 0, -200, 1099, 333]
    shapes = ((8, 600), (2, 1100), (2, 1100), (8, 600))
    q, k, v, grad = (on_gpu(5, h, s, dim, seed=i, dtype=dtype) for i, (h, s) in enumerate(shapes))
    sinks = on_gpu(8, seed=9, dtype=dtype)
    places = torch.tensor(stands, dtype=torch.int32, device="cuda")

    def gradients(x, deterministic, **place):
        q, k, v, grad = x
        out, lse = ops.flash_attn_fwd(q, k, v, sinks=sinks, **rules, **place)
        more = dict(sinks=sinks, **rules, **place, deterministic=deterministic)
        return out, *ops.flash_attn_bwd(grad, q, k, v, out, lse, **more)

    every = gradients((q, k, v, grad), True, q_start=places)
    for x, y in zip(every, gradients((q, k, v, grad), True, q_start=places), strict=True):
        assert same_bits(x, y)
    for x, y in zip(every, gradients((q, k, v, grad), False, q_start=places), strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    alone = [
        gradients([t[b : b + 1] for t in (q, k, v, grad)], True, diagonal=diagonal)
        for b, diagonal in enumerate(stands)
    ]
    for i, x in enumerate(every[:4]):
        torch.testing.assert_close(x, torch.cat([one[i] for one in alone]), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(
        every[4].float(), sum(one[4].float() for one in alone), atol=0.5, rtol=2e-2
    )


def test_one_graph_serves_every_packing():
    q, k, v = (on_gpu(256, 2, 64, seed=s) for s in range(3))
    cu = torch.tensor([0, 64, 128, 256], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    ops.flash_attn_varlen_fwd(q, k, v, cu, cu, 256, 256, is_causal=True)
    with torch.cuda.graph(graph):
        out, lse = ops.flash_attn_varlen_fwd(q, k, v, cu, cu, 256, 256, is_causal=True)
    for ends in ([0, 1, 2, 3], [0, 0, 250, 256], [0, 85, 170, 200]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        q.normal_()
        graph.replay()
        want, want_lse = ops.flash_attn_varlen_fwd(q, k, v, cu, cu, 256, 256, is_causal=True)
        assert same_bits(out, want) and same_bits(lse, want_lse)
        assert out[ends[-1] :].eq(0).all() and lse[ends[-1] :].eq(-torch.inf).all()


@pytest.mark.parametrize("small", [(512, 512, 512), (128, 512, 64)], ids=str)
def test_a_result_is_read_past_a_short_neighbour(small):
    """Launches overlap. The third product reads the first one's result, while the independent
    second product is short enough to be launched beside both."""
    a, b, c = (on_gpu(4096, 1024, seed=1), on_gpu(1024, 1024, seed=2), on_gpu(1024, 512, seed=3))
    m, n, k = small
    d, e = on_gpu(m, k, seed=4), on_gpu(k, n, seed=5)
    want = ops.gemm(ops.gemm(a, b), c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = ops.gemm(a, b)
        y = ops.gemm(d, e)
        z = ops.gemm(x, c)
    for _ in range(50):
        x.fill_(torch.nan), z.fill_(torch.nan)
        graph.replay()
        assert same_bits(z, want) and y.isfinite().all()


def test_two_graphs_replay_at_once():
    """Calls share no state: graphs replayed together on two streams give the results that each
    gives alone."""
    graphs, outs, wants, streams = [], [], [], [torch.cuda.Stream() for _ in range(2)]
    for seed in range(2):
        case = paged([700, 40, 333], seed=seed)
        a, b = on_gpu(64, 512, seed=seed), on_gpu(512, 256, seed=seed)
        wants.append([ops.paged_attn(*case.args()), ops.gemm(a, b)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([ops.paged_attn(*case.args()), ops.gemm(a, b)])
        graphs.append((graph, case, a, b))
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, *_) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(outs, wants, strict=True):
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


def attentions():
    """Calls of flash_attn that differ in how work is shared: rows of a tile, parts of the keys per
    block, heads in a tile."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    cu = torch.tensor([0, 1, 3, 6, 7], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 300, 900, 1000, 1500], dtype=torch.int32, device="cuda")
    return {
        "full": (qkv(seq=300, head_dim=128), ops.flash_attn),
        "causal": (qkv(seq=700), partial(ops.flash_attn, is_causal=True)),
        "window": (
            qkv(seq=700, head_dim=256),
            partial(ops.flash_attn, is_causal=True, window_left=200),
        ),
        "softcap": (qkv(seq=300, head_dim=128), partial(ops.flash_attn, softcap=20.0)),
        "alibi": (
            qkv(seq=700, head_dim=128),
            partial(ops.flash_attn, is_causal=True, alibi_slopes=slopes),
        ),
        "split": (
            (on_gpu(1, 4, 200, 128), *(on_gpu(1, 2, 4000, 128, seed=s) for s in (1, 2))),
            ops.flash_attn,
        ),
        "few queries": (
            (on_gpu(2, 4, 5, 128), *(on_gpu(2, 2, 4000, 128, seed=s) for s in (1, 2))),
            partial(ops.flash_attn, is_causal=True, diagonal=3995),
        ),
        "few queries, packed": (
            (on_gpu(7, 4, 64), *(on_gpu(1500, 2, 64, seed=s) for s in (1, 2))),
            lambda q, k, v: ops.flash_attn_varlen(q, k, v, cu, cu_k, 3, 600, is_causal=True),
        ),
    }


ATTENTIONS = (
    "full",
    "causal",
    "window",
    "softcap",
    "alibi",
    "split",
    "few queries",
    "few queries, packed",
)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="flash_attn_fwd_sm90a promises this, others do not",
)
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_does_not_depend_on_its_neighbours(name, dtype):
    """Every third row keeps its inputs while the others' scores become huge or NaN. It must keep
    its bits, although a warp votes for all of its rows whether a block of keys is computed
    again."""
    (q, k, v), call = attentions()[name]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    want = call(q, k, v)
    rows = -3 if q.dim() == 3 else -2
    stays = torch.arange(q.shape[rows], device="cuda") % 3 == 1
    shown = stays[:, None, None] if q.dim() == 3 else stays[:, None]
    for other in (q * 300, q.new_full((1,), float("nan"))):
        got = call(torch.where(shown, q, other), k, v)
        assert same_bits(torch.where(shown, got, 0), torch.where(shown, want, 0))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_on_two_streams_and_in_two_graphs(name):
    """Calls share no state: concurrent calls and concurrent graph replays give the results that
    each gives alone."""
    (q, k, v), call = attentions()[name]
    inputs = [(q, k, v), (q.flip(0), k * 2, v + 1)]
    wants, streams = [call(*x) for x in inputs], [torch.cuda.Stream() for _ in range(2)]
    graphs, captured, outs = [], [], [[], []]
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(call(*x))
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, x, out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(call(*x))
    torch.cuda.synchronize()
    assert all(same_bits(y, want) for out, want in zip(outs, wants, strict=True) for y in out)
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(y, want) for y, want in zip(captured, wants, strict=True))


# --------------------------------------------------------------------------------------------------
# streams, devices, memory


@pytest.mark.parametrize("name,variant", VARIANTS)
def test_work_stays_on_the_current_stream(name, variant):
    """Inputs are written late on a side stream. An op on another stream would read the old
    contents."""
    call, stream = Bound(name, variant, "cuda", BF16), torch.cuda.Stream()

    def run(leaves):  # the result, or what kv_cache_write has written
        return [*tensors(call.results(*leaves)), *leaves]

    want = run([x.clone() for x in call.leaves])
    blank = [torch.zeros_like(x) for x in call.leaves]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(blank, call.leaves, strict=True):
            x.copy_(y)
        got = run(blank)
    stream.synchronize()
    assert all(map(same_bits, got, want))


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
def test_tensors_on_the_other_device():
    a, b = (on_gpu(128, 64, seed=s) for s in range(2))
    want = ops.gemm(a, b.mT)
    torch.cuda.set_device(0)
    other = ops.gemm(a.to("cuda:1"), b.mT.to("cuda:1"))
    assert (
        other.device.index == 1
        and torch.cuda.current_device() == 0
        and same_bits(other.to("cuda:0"), want)
    )
    q, k, v = qkv()
    want = ops.flash_attn(q, k, v)
    other = ops.flash_attn(*(t.to("cuda:1") for t in (q, k, v)))
    assert (
        other.device.index == 1
        and torch.cuda.current_device() == 0
        and same_bits(other.to("cuda:0"), want)
    )
    for call, words in (
        (
            lambda: ops.flash_attn(q, k.to("cuda:1"), v),
            "flash_attn: k is on cuda:1, q is on cuda:0",
        ),
        (
            lambda: ops.flash_attn(q.to("cuda:1"), k, v),
            "flash_attn: k is on cuda:0, q is on cuda:1",
        ),
        (lambda: ops.gemm(a, b.mT.to("cuda:1")), "gemm: b is on cuda:1, a is on cuda:0"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == f"gpukern::{words}; they must be on one device"


@two_devices
@pytest.mark.parametrize("op", CALLS)
def test_every_op_on_the_other_device(op):
    """Streams, kernel attributes and graphs of a device that is not the current one."""

    def alike(got, want):  # two runs of a backward may add in different orders
        got = got.to("cuda:0")
        return same_bits(got, want) or (
            op == "flash_attn_bwd" and torch.allclose(got, want, rtol=0.02, atol=0.02)
        )

    want = tensors(calls()[op]())
    with torch.cuda.device(1):
        call = calls()[op]
    got = tensors(call())
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in got)
    assert all(alike(g, w) for g, w in zip(got, want, strict=True))
    with torch.cuda.device(1):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late = [t.clone() for t in tensors(call())]
        # torch keeps one stream for captures, of the first device
        with torch.cuda.graph(graph, stream=side):
            got = tensors(call())
        graph.replay()
        torch.cuda.synchronize()
    for results in (late, got):
        assert all(alike(g, w) for g, w in zip(results, want, strict=True))


@two_devices
def test_gradients_on_the_other_device():
    def gradients(device):
        q, k, v = (t.to(device).requires_grad_() for t in qkv())
        w = on_gpu(64, 32).to(device).requires_grad_()
        torch_gpukern.gemm(
            torch_gpukern.flash_attn(q, k, v, is_causal=True), w, activation="gelu"
        ).sum().backward()
        return [t.grad.to("cuda:0") for t in (q, k, v, w)]

    for on_first, on_other in zip(gradients("cuda:0"), gradients("cuda:1"), strict=True):
        torch.testing.assert_close(on_other, on_first, rtol=0.02, atol=0.02)
    assert torch.cuda.current_device() == 0


@two_devices
def test_the_very_first_call_on_the_other_device():
    """Errors that its kernel reports also reach the process."""
    run_python(
        """
import torch, torch_gpukern
ops = torch.ops.gpukern
q, cache = torch.randn(1, 2, 128, device="cuda:1"), torch.randn(4, 16, 2, 128, device="cuda:1")
table = torch.tensor([[0, 1, 2, 9]], dtype=torch.int32, device="cuda:1")
lens = torch.tensor([64], dtype=torch.int32, device="cuda:1")
ops.paged_attn(q, cache, cache, table, lens)
torch.cuda.synchronize(1)
assert torch.cuda.current_device() == 0
try:
    torch_gpukern.check_errors()
except IndexError as error:
    assert "block_table" in str(error)
else:
    raise SystemExit("the page outside the cache was not reported")
"""
    )


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="the device's free memory says nothing beside others",
)
def test_memory_comes_from_torch_alone():
    for call in calls().values():
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    for _ in range(3):
        for call in calls().values():
            call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - free) < 4 << 20


def test_results_and_workspace_are_written_before_they_are_read():
    """All uninitialised memory from torch is filled with NaN here; no result may contain it."""
    want = {
        name: [t.clone() for t in tensors(call())]
        for name, call in calls().items()
        if name != "flash_attn_bwd"
    }
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for name, call in calls().items():
            got = tensors(call())
            assert not any(t.isnan().any() for t in got), name
            if name in want:
                assert all(same_bits(g, w) for g, w in zip(got, want[name], strict=True)), name
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("activation", ("none", "gelu", "gelu_tanh", "silu"))
@pytest.mark.parametrize("n", (1022, 1023), ids=str)
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_the_last_columns_have_the_same_bits_each_time(dtype, n, activation):
    """Leftovers of earlier calls in shared memory, beyond the end of a matrix, do not affect a
    result.
    """
    a, w = on_gpu(512, 1024, dtype=dtype), on_gpu(n, 1024, dtype=dtype, std=0.03)
    want = ops.gemm(a, w.mT, activation=activation)
    for i, std in enumerate((1e-3, 0.03, 30.0)):
        other = on_gpu(1024, 1024, seed=i, dtype=dtype, std=std)
        ops.gemm(a, other.mT)
        assert same_bits(ops.gemm(a, w.mT, activation=activation), want)


@HOPPER
@pytest.mark.parametrize("which", ("a", "b", "both"))
def test_unaligned_operands_are_copied(which):
    """Copies are made in the workspace, and the product runs on the instance of the aligned call.
    With small M, the weights are not copied."""
    m, n, k = 520, 1030, 770
    rows = {"a": on_gpu(m, k + 6)[:, :k], "b": on_gpu(n, k + 6)[:, :k]}
    offset = {
        name: torch.empty(x.numel() + 1, dtype=BF16, device="cuda")[1:].view_as(x)
        for name, x in rows.items()
    }
    aligned, mixed = {"a": rows["a"], "b": rows["b"].mT}, {}
    for name in "ab":
        x = offset[name].copy_(rows[name]) if which in (name, "both") else rows[name]
        mixed[name] = x if name == "a" else x.mT
    plan = torch_gpukern.explain("gemm", **mixed)
    assert (
        "_sm90a_" in plan["instance"]
        and plan["instance"] == torch_gpukern.explain("gemm", **aligned)["instance"]
    )
    bytes_a, bytes_b = m * (k + 6) * 2, n * (k + 6) * 2
    assert (
        plan["workspace_bytes"]
        == {"a": bytes_a, "b": bytes_b, "both": -(-bytes_a // 128) * 128 + bytes_b}[which]
    )
    assert same_bits(ops.gemm(**mixed), ops.gemm(**aligned))
    few = torch_gpukern.explain("gemm", mixed["a"][:16], mixed["b"])
    assert few["instance"].startswith("gemm_swapab_sm90a_") == (which == "a")


@HOPPER
@pytest.mark.parametrize("m", (1, 16, 64))
def test_small_m_of_weights_that_are_nowhere_dense(m):
    """No kernel streams every second element: a copy and a small-M product are faster than plain
    loads."""
    n, k = 4096, 2048
    a, b = on_gpu(m, k), on_gpu(k, 2 * n, seed=1)[:, ::2]
    for weights in (b, on_gpu(n, 2 * k, seed=2)[:, ::2].mT):
        plan = torch_gpukern.explain("gemm", a, weights)
        assert (
            plan["instance"].startswith("gemm_swapab_sm90a_")
            and plan["workspace_bytes"] == n * k * 2
        )
        assert_close_as(torch_gemm(a, weights), ops.gemm(a, weights), a.double() @ weights.double())


def in_nan(dense, beside, offset):
    """The same matrix or batch, `offset` elements after an aligned address, with `beside` more
    elements in each row; all other elements are NaN."""
    rows = torch.full(
        (*dense.shape[:-1], dense.shape[-1] + beside), torch.nan, dtype=dense.dtype, device="cuda"
    )
    memory = torch.cat((rows.new_full((offset,), torch.nan), rows.flatten()))
    return memory[offset:].view_as(rows)[..., : dense.shape[-1]].copy_(dense)


@HOPPER
@pytest.mark.parametrize("beside", (4, 2, 7, 1, 0), ids="beside={}".format)
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
@pytest.mark.parametrize("m", (1, 9, 16, 33, 64))
def test_small_m_of_unaligned_weights(m, dtype, beside):
    """Weights for up to 16 rows are streamed without a copy, for more rows they are copied first:
    along k and n, at every offset and at odd strides, with NaN between."""
    n, k = 3080, 1037
    a = on_gpu(m, k, dtype=dtype)
    name = "gemm_skinny_misaligned_" if m <= 16 else "gemm_swapab_sm90a_"
    for shape, transposed in (((k, n), False), ((n, k), True)):
        dense = on_gpu(*shape, seed=1, dtype=dtype)
        want = exact = None
        for offset in range(8):
            if (shape[1] + beside) % 8 == 0 and offset == 0:
                continue  # aligned
            b = in_nan(dense, beside, offset)
            b = b.mT if transposed else b
            x = in_nan(a, offset % 3, 7 - offset)
            plan = torch_gpukern.explain("gemm", x, b)
            assert plan["instance"].startswith(name) and (plan["workspace_bytes"] == 0) == (m <= 16)
            out = ops.gemm(x, b)
            if want is None:
                want, exact = torch_gemm(a, b), a.double() @ b.double()
            assert_close_as(want, out, exact)
            assert same_bits(out, ops.gemm(x, b)), offset


@HOPPER
@pytest.mark.parametrize("layout", ("NN", "NT"))
@pytest.mark.parametrize("m", (1, 5, 16))
def test_small_m_of_unaligned_weights_with_all_that_may_follow(m, layout):
    """bias, c, an activation and its preact, misaligned results; fewer and more tiles than SMs."""
    for n, k, beside, offset in (
        (2055, 300, 1, 1),
        (4099, 1024, 0, 3),
        (36865, 256, 2, 0),
        (1000, 4096, 8, 5),
    ):
        a = on_gpu(m, k)
        b = in_nan(on_gpu(*((k, n) if layout == "NN" else (n, k)), seed=1), beside, offset)
        b = b if layout == "NN" else b.mT
        bias, c = on_gpu(n, seed=2), on_gpu(m, n, seed=3)
        name = "gemm_skinny_misaligned_" if n >= 1024 else "gemm_sm80_any_"
        assert torch_gpukern.explain("gemm", a, b)["instance"].startswith(name)
        more = {"bias": bias, "c": c, "alpha": 0.5, "beta": -1.5}
        exact = 0.5 * (a.double() @ b.double()) + bias.double() - 1.5 * c.double()
        assert_close_as(torch_gemm(a, b, **more), ops.gemm(a, b, **more), exact)
        out, preact = ops.gemm_fwd(a, b, bias, c, activation="silu", alpha=0.5, beta=-1.5)
        assert same_bits(preact, ops.gemm(a, b, **more))
        assert same_bits(out, ops.gemm(a, b, **more, activation="silu"))
        assert_close_as(
            torch_gemm(a, b, **more, activation="silu"), out, torch.nn.functional.silu(exact)
        )


@HOPPER
def test_few_columns_and_strange_rows_of_unaligned_weights():
    """The transposed product; one row for all tokens; overlapping rows; the first call of a shape
    inside a graph."""
    n, k = 3081, 1100
    weights = in_nan(on_gpu(n, k, seed=1), 1, 3)
    tokens = on_gpu(9, k)
    for x in (tokens.mT, in_nan(tokens, 3, 1).mT):
        assert torch_gpukern.explain("gemm", weights, x)["instance"].startswith(
            "gemm_skinny_misaligned_"
        )
        bias, c = on_gpu(9, seed=2), on_gpu(n, 9, seed=3)
        more = {"bias": bias, "c": c, "beta": 0.5, "activation": "gelu"}
        exact = F.gelu(weights.double() @ x.double() + bias.double() + 0.5 * c.double())
        assert_close_as(torch_gemm(weights, x, **more), ops.gemm(weights, x, **more), exact)
    overlapping = on_gpu(1, k + 40, seed=4)
    for x in (on_gpu(1, k, seed=5).expand(12, k), overlapping.as_strided((7, k), (3, 1), 5)):
        assert torch_gpukern.explain("gemm", x, weights.mT)["instance"].startswith(
            "gemm_skinny_misaligned_"
        )
        assert_close_as(
            torch_gemm(x, weights.mT), ops.gemm(x, weights.mT), x.double() @ weights.double().mT
        )
    graph = torch.cuda.CUDAGraph()
    odd = on_gpu(11, k + 1, seed=6)[:, 1:]
    with torch.cuda.graph(graph):
        out = ops.gemm(odd, weights.mT)
    for again in range(2):
        odd.mul_(-1 - again), graph.replay()
        assert same_bits(out, ops.gemm(odd, weights.mT))


@contextmanager
def preferred(name, *args, preact=0, **more):
    """Makes the instance `name` serve such gemm calls, and returns its plan. explain describes the
    call without preact."""
    plan = json.loads(ops.explain_gemm(*args, **more))
    assert name in plan["instances"]
    asked = plan["device"], plan["class"].replace(" preact=0 ", f" preact={preact} ")
    ops.gemm_prefer(*asked, name)
    try:
        plan = json.loads(ops.explain_gemm(*args, **more))
        assert preact or plan["instance"] == name
        yield plan
    finally:
        ops.gemm_prefer(*asked, "")


@HOPPER
@pytest.mark.parametrize("beside, offset", ((0, 1), (4, 0), (2, 3), (1, 0), (3, 7)), ids=str)
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_misaligned_operands_of_every_layout(dtype, layout, beside, offset):
    """One or both operands are copied first. Every epilogue, misaligned rows of results and c,
    batches of one or both operands, and one graph with changing contents. NaN surrounds the
    operands."""

    def stored(transposed, dense, misaligned):
        dense = dense.mT if transposed else dense
        past = -dense.shape[-1] % 8
        x = in_nan(dense, (past + beside) % 8 if misaligned else past, offset if misaligned else 0)
        return x.mT if transposed else x

    for i, (of_a, of_b, (m, n, k)) in enumerate(
        (
            ((), (), (1027, 515, 700)),
            ((3,), (3,), (264, 250, 185)),
            ((), (2,), (300, 530, 1020)),
            ((2,), (), (301, 700, 65)),
        )
    ):
        dense_a, dense_b = (
            on_gpu(*of_a, m, k, dtype=dtype),
            on_gpu(*of_b, k, n, seed=1, dtype=dtype, std=0.1),
        )
        bias, exact = on_gpu(n, seed=2, dtype=dtype), dense_a.double() @ dense_b.double()
        c = in_nan(on_gpu(m, n, seed=3, dtype=dtype), 1, 3)
        for which in ("a", "b", "both") if i == 0 else ("both",):
            a = stored(layout[0] == "T", dense_a, which != "b")
            b = stored(layout[1] == "T", dense_b, which != "a")
            plan = json.loads(ops.explain_gemm(a, b))
            assert re.match("gemm_(pingpong_|swapab_)?sm", plan["instance"]) and (
                i > 0 or plan["workspace_bytes"] > 0
            )
            for more in (
                {},
                {"bias": bias, "activation": "relu"},
                {"activation": "gelu", "alpha": -0.5},
                {"c": c, "beta": 0.5, "activation": "silu"},
            ):
                want = more.get("alpha", 1.0) * exact + (bias.double() if "bias" in more else 0)
                want = want + (0.5 * c.double() if "c" in more else 0)
                want = TORCH_ACTIVATION[more.get("activation", "none")](want)
                out = ops.gemm(a, b, **more)
                assert same_bits(out, ops.gemm(a, b, **more))
                assert_close_as(torch_gemm(dense_a, dense_b, **more), out, want)
            out, preact = ops.gemm_fwd(a, b, activation="silu")
            assert same_bits(preact, ops.gemm(a, b)) and same_bits(
                out, ops.gemm(a, b, activation="silu")
            )
    a, b = (
        stored(layout[0] == "T", on_gpu(512, 520), True),
        stored(layout[1] == "T", on_gpu(520, 512), True),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gemm(a, b)
    for again in range(2):
        a.mul_(-1 - again), b.add_(1), graph.replay()
        assert same_bits(out, ops.gemm(a, b))


@HOPPER
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_ping_pong(dtype, layout):
    """No tile for the second warpgroup, one tile each, several, an odd number; every epilogue;
    batches.
    """
    name = f"gemm_pingpong_sm90a_{'bf16' if dtype == BF16 else 'f16'}_128x176x64"

    def alternately(call, *args, preact=0, **more):
        with preferred(name, *args, preact=preact, **more):
            out, again = call(*args, **more), call(*args, **more)
        for x, y in zip(out, again, strict=True) if preact else ((out, again),):
            assert same_bits(x, y)
        return out

    for m, n, k in (
        (128, 176, 64),
        (300, 1000, 200),
        (2048, 2816, 136),
        (4000, 4096, 64),
        (6000, 4224, 512),
    ):
        for batch in ((), (3,)) if m < 2048 else ((),):
            a = in_layout(layout[0], partial(on_gpu, dtype=dtype), *batch, m, k)
            b = in_layout(layout[1], partial(on_gpu, seed=1, dtype=dtype, std=0.1), *batch, k, n)
            bias, exact = on_gpu(n, seed=2, dtype=dtype), a.double() @ b.double()
            for more in (
                {},
                {"bias": bias},
                {"bias": bias, "activation": "gelu"},
                {"activation": "relu", "alpha": -0.5},
            ):
                out = alternately(ops.gemm, a, b, **more)
                want = more.get("alpha", 1.0) * exact + (bias.double() if "bias" in more else 0)
                want = TORCH_ACTIVATION[more.get("activation", "none")](want)
                assert_close_as(torch_gemm(a, b, **more), out, want)
            if not batch:
                sums, gated = (
                    alternately(ops.gemm, a, b),
                    alternately(ops.gemm, a, b, activation="silu"),
                )
                out, preact = alternately(ops.gemm_fwd, a, b, activation="silu", preact=1)
                assert same_bits(preact, sums) and same_bits(out, gated)
                for more in (
                    {"c": on_gpu(m, n, seed=3, dtype=dtype), "beta": 1.0},
                    {"out_dtype": torch.float32},
                ):
                    # TMA cannot store it
                    assert name not in json.loads(ops.explain_gemm(a, b, **more))["instances"]


@HOPPER
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize(
    "tile", ("128x256", "128x224", "128x192", "128x176", "128x128", "64x192", "64x128", "64x64")
)
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_clusters_of_1_x_2(dtype, tile, layout):
    """A result of three tiles in height: clusters of 2 x 1 would cover four and take another wave.
    Neither side is a multiple of the tile."""
    family = "gemm_pingpong_sm90a" if tile == "128x176" else "gemm_sm90a"
    name = f"{family}_{'bf16' if dtype == BF16 else 'f16'}_{tile}x64"
    high, wide = map(int, tile.split("x"))
    across = torch.cuda.get_device_properties(0).multi_processor_count // 4 + 2
    m, n, k = 2 * high + 8, (across - 1) * wide + 24, 200
    gen = generator("clusters of 1 x 2", tile)
    for batch in ((), (3,)):
        a, b = integer_operands(gen, layout, batch, m, n, k, dtype)
        with preferred(name, a, b) as plan:
            out = ops.gemm(a, b)
        assert plan["tasks"] == math.prod(batch) * 3 * -(-across // 2) * 2
        assert same_bits(out, (a.double() @ b.double()).to(dtype))


@HOPPER
def test_the_first_call_of_a_thread():
    """The driver makes tensor maps and needs a context, which a new thread, such as autograd's, may
    not have yet."""
    a, b, out = on_gpu(512, 512), on_gpu(512, 512, seed=1), on_gpu(512, 512)
    q, k, v, grad = (on_gpu(2, 4, 256, 64, seed=seed) for seed in range(4))
    attended, lse = ops.flash_attn_fwd(q, k, v)
    calls = {
        "gemm": lambda: ops.gemm.out(a, b, out=out),
        "flash_attn": lambda: ops.flash_attn_fwd(q, k, v),
        "flash_attn_bwd": lambda: ops.flash_attn_bwd(grad, q, k, v, attended, lse),
    }
    for name, call in calls.items():
        call()  # so that the next call finds its memory in torch's cache
        failures = []

        def work(call=call, failures=failures):
            try:
                call()
            except RuntimeError as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start(), worker.join()
        assert not failures, (name, failures)


@HOPPER
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_few_columns_of_many_rows(dtype, layout):
    """Up to 64 columns use narrow tiles if M >= 128 and K >= 512. Just outside each limit other
    kernels serve."""
    name = f"gemm_sm90a_{'bf16' if dtype == BF16 else 'f16'}_64x64x128_k2"
    gen = generator("few columns", layout)
    for m, n, k, narrow in (
        (4096, 8, 1024, True),
        (1000, 24, 1000, True),
        (136, 64, 512, True),
        (8200, 56, 520, True),
        (136, 72, 512, False),
        (136, 64, 504, False),
        (120, 64, 512, False),
    ):
        for batch in ((), (3,)):
            a, b = integer_operands(gen, layout, batch, m, n, k, dtype)
            assert (torch_gpukern.explain("gemm", a, b)["instance"] == name) == narrow, (m, n, k)
            exact = a.double() @ b.double()
            assert same_bits(ops.gemm(a, b), exact.to(dtype))
            bias = integers(gen, n, dtype=dtype).cuda()
            want = torch.nn.functional.relu(exact + bias.double()).to(dtype)
            assert same_bits(ops.gemm(a, b, bias, activation="relu"), want)


# clusters of four tiles and of eight
FOURS, OTHERS = (
    ("64x96x64_t4", "64x160x64_t4"),
    ("64x224x64_t4", "64x256x64_t4", "128x128x64_t8", "128x96x64_t8"),
)


@HOPPER
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize(
    "name",
    [
        f"gemm_sm90a_bf16_{tile}"
        for tile in (
            "128x256x64",
            "128x192x64",
            "64x192x64",
            "128x128x64_k4",
            "64x128x64_k4",
            *FOURS,
            *OTHERS,
        )
    ]
    + [f"gemm_swapab_sm90a_bf16_{tile}" for tile in FOURS],
)
def test_clusters_share_and_split(name, layout):
    """Tiles of the last wave halved along k, after whole waves or alone; k in four parts; four or
    eight tiles that share operands. Odd numbers of steps, parts without a step, edges of the
    result, batches, both cluster orientations, every epilogue. Small integers, whose sums are
    exact."""
    gen = generator("splits of k", name, layout)
    shapes = [(1024, 1024, 4096), (1024, 1024, 2056), (1000, 200, 72)]
    if name.endswith("_t8"):  # an edge of the result must lie in every part of the last tiles
        shapes += [(200, 760, 4104), (264, 2296, 8), (2600, 3832, 1544)]
        a, b = integer_operands(gen, layout, (), 2600, 4000, 64, BF16)
        assert name not in json.loads(ops.explain_gemm(a, b))["instances"]
    else:
        shapes += [(200, 1000, 4104), (264, 2600, 8), (2600, 4000, 1544)]
    for m, n, k in shapes:
        for batch in ((), (2,)) if k < 2000 else ((),):
            a, b = integer_operands(gen, layout, batch, m, n, k, BF16)
            bias = integers(gen, n, dtype=BF16).cuda()
            exact = a.double() @ b.double()
            for more in ({}, {"bias": bias, "activation": "relu"}):
                with preferred(name, a, b, **more):
                    want = torch.relu(exact + bias.double()) if more else exact
                    out = ops.gemm(a, b, **more)
                    assert same_bits(out, want.to(BF16)) and same_bits(out, ops.gemm(a, b, **more))
                    # 32 tiles, 16 pairs; both MN-major: not halved
                    if "128x256x64" in name and k == 4096:
                        halves = 1 if layout == "TN" else 2
                        assert torch_gpukern.explain("gemm", a, b, **more)["tasks"] == halves * 32


@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("tile", ("128x256x16", "128x128x8", "64x64x16"))
def test_float32_tiles(tile, layout):
    """Every tile of plain float32, whatever the estimate would choose: whole and partial tiles,
    misaligned rows, batches, few steps, every epilogue. Small integers, whose sums are exact."""
    name = f"gemm_plain_f32_{tile}"
    gen = generator("float32 tiles", tile, layout)

    def matrix(rows, columns, transposed, batch, pad):
        x = integers(
            gen, *batch, *((columns, rows) if transposed else (rows, columns)), dtype=torch.float32
        ).cuda()
        x = in_nan(x, pad, pad)
        return x.mT if transposed else x

    for (m, n, k), batch, pad in (
        ((256, 512, 64), (), 0),
        ((300, 520, 136), (3,), 0),
        ((131, 257, 1), (), 3),
        ((515, 263, 77), (2, 2), 1),
    ):
        a, b = (
            matrix(m, k, layout[0] == "T", batch, pad),
            matrix(k, n, layout[1] == "T", batch[:1], pad),
        )
        bias, c = (integers(gen, *shape, dtype=torch.float32).cuda() for shape in ((n,), (m, n)))
        exact = a.double() @ b.double()
        for more in ({}, {"bias": bias, "activation": "relu"}, {"c": c, "beta": 0.5, "alpha": 2.0}):
            with preferred(name, a, b, **more):
                out = ops.gemm(a, b, **more)
            want = more.get("alpha", 1.0) * exact + (bias.double() if "bias" in more else 0)
            want = want + (0.5 * c.double() if "c" in more else 0)
            assert same_bits(out, TORCH_ACTIVATION[more.get("activation", "none")](want).float())


@pytest.mark.parametrize("size", ((2048, 1152, 4096), (1000, 2100, 3000)), ids=str)
def test_float32_of_few_large_tiles_errs_as_pytorch_does(size):
    """144 tiles of 128 x 128 are more than an H200's SMs. Smaller tiles spread better, and add k in
    steps."""
    m, n, k = size
    gen = generator("f32 few tiles", size)
    a, b = (randn(gen, *shape, device="cuda") for shape in ((m, k), (k, n)))
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert torch_gpukern.explain("gemm", a, b)["instance"] == "gemm_plain_f32_64x64x16"
    yards = [torch_gemm(a, b, order=order) for order in orders(gen, k)]
    assert_close_as(yards, ops.gemm(a, b), a.double() @ b.double())


@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "size",
    (
        (64, 66056, 512),
        (64, 2056, 1024),
        (7, 4096, 640),
        (512, 512, 512),
        (1000, 1016, 264),
        (1024, 1024, 1024),
    ),
    ids=str,
)
def test_sums_alone_are_stored_as_with_all_that_may_follow(size, dtype):
    """A product with only alpha has a store of its own, and so have large results of small M.
    Batches change all addresses."""
    m, n, k = size
    for batch in ((), (3,)) if n < 60000 else ((),):
        a, b = on_gpu(*batch, m, k, dtype=dtype), on_gpu(*batch, k, n, dtype=dtype, std=0.1)
        zeros = torch.zeros(n, dtype=dtype, device="cuda")
        for alpha in (1.0, -0.375):
            got = ops.gemm(a, b, alpha=alpha)
            assert_close_as(torch_gemm(a, b, alpha=alpha), got, alpha * (a.double() @ b.double()))
            assert torch.equal(got, ops.gemm(a, b, zeros, alpha=alpha)), "bias"
            assert torch.equal(got, ops.gemm(a, b, c=zeros, alpha=alpha, beta=1.0)), "c"
            assert torch.equal(got, ops.gemm_fwd(a, b, activation="gelu", alpha=alpha)[1]), "preact"


def test_more_than_2_31_elements():
    """Offsets are 64 bits wide: the same rows, far apart in one allocation, give the same
    result."""
    big = torch.empty((1 << 31) + (1 << 20), dtype=BF16, device="cuda")
    far = 1 << 31
    a = big.as_strided((2, 64, 64), (far, 64, 1))
    a.copy_(on_gpu(2, 64, 64))
    assert same_bits(ops.gemm(a, a.mT), ops.gemm(a.contiguous(), a.contiguous().mT))
    q = big.as_strided((2, 1, 128, 64), (far, 128 * 64, 64, 1))
    q.copy_(on_gpu(2, 1, 128, 64))
    assert same_bits(ops.flash_attn(q, q, q), ops.flash_attn(*(q.contiguous(),) * 3))
    cache = big.as_strided((2, 16, 1, 64), (far, 64, 64, 1))
    cache.copy_(on_gpu(2, 16, 1, 64))
    table = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([30], dtype=torch.int32, device="cuda")
    query = on_gpu(1, 2, 64)
    dense = cache.contiguous()
    assert same_bits(
        ops.paged_attn(query, cache, cache, table, lens),
        ops.paged_attn(query, dense, dense, table, lens),
    )


# --------------------------------------------------------------------------------------------------
# bad contents


def raised():
    """The text of what the kernels have reported since the last call; resets it."""
    torch.cuda.synchronize()
    try:
        torch_gpukern.check_errors()
    except IndexError as error:
        text = str(error)
    else:
        text = ""
    torch_gpukern.check_errors()
    return text


@pytest.mark.parametrize("value", (-1, -(2**31), 10_000, 2**31 - 1))
def test_a_page_outside_the_cache(value):
    case = paged([100, 40, 64])
    want = ops.paged_attn(*case.args())
    case.block_table[1, 1] = value
    got = ops.paged_attn(*case.args())
    assert "block_table is expected to hold pages of the cache" in raised()
    assert same_bits(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("value", (-5, 100_000, 2**31 - 1, -(2**31)))
def test_a_length_that_cannot_be(value):
    case = paged([100, 40, 64])
    want = ops.paged_attn(*case.args())
    # a clamped length reads the whole row of the table, whose unused entries are invalid
    case.block_table.clamp_(0, case.k_cache.shape[0] - 1)
    case.seq_lens[1] = value
    got = ops.paged_attn(*case.args())
    assert "seq_lens is expected" in raised()
    assert same_bits(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize(
    "ends",
    (
        [0, 90, 30, 200],
        [0, 50, 100, 100_000],
        [-7, 50, 100, 200],
        [5, 50, 100, 200],
        [0, 2**31 - 1, 100, 200],
    ),
)
def test_lengths_of_a_packing_that_cannot_be(ends):
    q = on_gpu(200, 2, 64)
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    ops.flash_attn_varlen(q, q, q, cu, cu, 200, 200)
    assert "cu_seqlens is expected" in raised()
    good = torch.tensor([0, 50, 100, 200], dtype=torch.int32, device="cuda")
    out, lse = ops.flash_attn_varlen_fwd(q, q, q, good, good, 200, 200)
    ops.flash_attn_varlen_bwd(out, q, q, q, out, lse, cu, cu, 200, 200)
    assert "cu_seqlens is expected" in raised()


def test_a_sequence_longer_than_max_seqlen():
    q = on_gpu(200, 2, 64)
    cu = torch.tensor([0, 150, 200], dtype=torch.int32, device="cuda")
    want = ops.flash_attn_varlen(q, q, q, cu, cu, 150, 150)
    got, lse = ops.flash_attn_varlen_fwd(q, q, q, cu, cu, 100, 150)
    assert "at most max_seqlen" in raised()
    assert got[100:150].eq(0).all() and lse[100:150].eq(-torch.inf).all()
    # max_seqlen chooses the tile
    torch.testing.assert_close(got[150:], want[150:], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_a_slot_past_the_cache(dtype):
    k, cache = on_gpu(4, 2, 64), [on_gpu(3, 16, 2, 64, seed=s) for s in (1, 2)]
    before = [c.clone() for c in cache]
    far = 2**31 - 1 if dtype == torch.int32 else 2**62
    slots = torch.tensor([5, 48, -1, far], dtype=dtype, device="cuda")
    ops.kv_cache_write(k, k, *cache, slots)
    assert "slots is expected" in raised()
    for now, was in zip(cache, before, strict=True):
        was.flatten(0, 1)[5] = k[0]
        assert same_bits(now, was)


def test_the_next_call_tells():
    case = paged([100, 40])
    case.block_table[0, 0] = -3
    ops.paged_attn(*case.args())
    torch.cuda.synchronize()
    a = on_gpu(8, 8)
    with pytest.raises(
        IndexError,
        match="^gpukern::gemm: an earlier call met bad contents on the GPU; paged_attn: "
        "block_table",
    ):
        ops.gemm(a, a)
    ops.gemm(a, a)
    assert raised() == ""


# --------------------------------------------------------------------------------------------------
# tf32


def tf32_operands(gen, m, n, k, layout, *batch):
    """a, b of which T is MN-major or K-major."""
    a, b = (randn(gen, *batch, *shape, device="cuda") for shape in ((m, k), (k, n)))
    return tuple(
        x.mT.contiguous().mT if kind == "T" else x for x, kind in zip((a, b), layout, strict=True)
    )


def torch_tf32(call):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


TF32_SIZES = (
    (64, 64, 64),
    (130, 200, 300),
    (512, 384, 1024),
    (33, 20, 72),
    (257, 129, 65),
    (768, 1024, 96),
    (300, 4096, 520),
    (2048, 1536, 160),
    (4100, 2180, 36),
)


@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("size", TF32_SIZES, ids=str)
def test_tf32_errs_as_pytorch_does(size, layout):
    gen = generator("tf32", size)
    k = size[2]
    a, b = tf32_operands(gen, *size, layout)
    got = ops.gemm(a, b, fp32_precision="tf32")
    yards = torch_tf32(lambda: [torch_gemm(a, b, order=order) for order in orders(gen, k)])
    public = torch_tf32(lambda: torch_gpukern.gemm(a, b))
    assert same_bits(public, got), "the public function follows torch's setting"
    assert_close_as(yards, got, a.double() @ b.double())
    plain = ops.gemm(a, b)
    assert (plain.double() - a.double() @ b.double()).abs().max() < 1e-4


@pytest.mark.parametrize("activation", ("none", "relu", "gelu"))
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("n", (384, 381))
def test_tf32_with_all_that_follows(layout, n, activation):
    """bias, c, alpha, beta, preact and a batch. n decides how the kernel stores results."""
    gen = generator("tf32 all", layout, n)
    a, b = tf32_operands(gen, 260, n, 320, layout, 3)
    bias, c = randn(gen, n, device="cuda"), randn(gen, 260, n, device="cuda")
    for more in ({}, {"bias": bias}, {"bias": bias, "c": c, "alpha": -0.75, "beta": 0.5}):
        out, preact = ops.gemm_fwd(a, b, activation=activation, fp32_precision="tf32", **more)
        yards = torch_tf32(
            lambda more=more: [torch_gemm(a, b, order=o, **more) for o in orders(gen, 320)]
        )
        exact = torch_gemm(
            a.double(),
            b.double(),
            **{k: v.double() if k in ("bias", "c") else v for k, v in more.items()},
        )
        if activation == "gelu":
            assert_close_as(yards, preact, exact, "preact")
        act = {"none": lambda x: x, "relu": torch.relu, "gelu": F.gelu}[activation]
        assert_close_as([act(y) for y in yards], out, act(exact))


@HOPPER
def test_tf32_rows_of_hopper():
    """A product is computed transposed (swap-AB) if b is MN-major. An a contiguous along m, and
    misaligned rows, are copied first."""
    gen = generator("tf32 rows")
    for layout, transposed, copies in (
        ("NN", True, 0),
        ("NT", False, 0),
        ("TN", True, 4),
        ("TT", False, 4),
    ):
        a, b = tf32_operands(gen, 1536, 2048, 1024, layout)
        plan = torch_gpukern.explain("gemm", a, b, fp32_precision="tf32")
        assert (
            plan["instance"].startswith("gemm_tf32_sm90a_")
            and ("swapab" in plan["instance"]) == transposed
        )
        assert plan["workspace_bytes"] == copies * 1536 * 1024
        assert "sm90a" not in torch_gpukern.explain("gemm", a, b)["instance"]
        want = ops.gemm(a, b, fp32_precision="tf32")
        for x in ("a", "b"):
            odd = torch.empty(3 + (a if x == "a" else b).numel(), device="cuda")[3:]
            odd = odd.as_strided(
                (a if x == "a" else b).shape, (a if x == "a" else b).stride(), odd.storage_offset()
            )
            odd.copy_(a if x == "a" else b)
            pair = (odd, b) if x == "a" else (a, odd)
            assert (
                torch_gpukern.explain("gemm", *pair, fp32_precision="tf32")["instance"]
                == plan["instance"]
            )
            assert same_bits(ops.gemm(*pair, fp32_precision="tf32"), want)


# --------------------------------------------------------------------------------------------------
# training


def test_a_training_run_follows_the_cpu():
    """A block of attention and linear layers is trained on both devices from the same weights; the
    loss curves agree."""

    def train(device):
        gen = torch.Generator().manual_seed(0)
        wide, heads, seq, batch = 64, 4, 48, 4
        weights = [torch.randn(wide, n, generator=gen) * 0.1 for n in (3 * wide, wide, 4 * wide)]
        weights.append(torch.randn(4 * wide, wide, generator=gen) * 0.1)
        weights = [w.to(device).requires_grad_() for w in weights]
        x, y = (torch.randn(batch, seq, wide, generator=gen).to(device) for _ in range(2))
        optimizer = torch.optim.SGD(weights, lr=0.05)
        losses = []
        for _ in range(30):
            q, k, v = (
                torch_gpukern.gemm(x, weights[0])
                .view(batch, seq, 3, heads, wide // heads)
                .unbind(2)
            )
            out = torch_gpukern.flash_attn(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            h = x + torch_gpukern.gemm(out.transpose(1, 2).reshape(batch, seq, wide), weights[1])
            z = h + torch_gpukern.gemm(
                torch_gpukern.gemm(h, weights[2], activation="gelu"), weights[3]
            )
            loss = F.mse_loss(z, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    on_cpu, on_cuda = train("cpu"), train("cuda")
    assert on_cpu[-1] < 0.9 * on_cpu[0]
    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-4, atol=1e-5)
