# SPDX-License-Identifier: BSD-3-Clause
"""The ops inside PyTorch's tools: torch.compile, export, AOTInductor, checkpoint, autocast,
inference mode, FLOP counter."""

import importlib
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Paged
from conftest import (
    ALL,
    FLOATS,
    assert_close_as,
    generator,
    ops,
    randn,
    run_python,
    same_bits,
    swap_last,
    swap_middle,
    torch_gpukern,
)
from registry import OPS, VARIANTS, Bound, drawn, public
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs unchanged and counts them, forward and backward."""

    def __init__(self):
        self.forward = self.backward = 0

    def __call__(self, graph, inputs):
        def count(which):
            def compiler(graph, inputs):
                setattr(self, which, getattr(self, which) + 1)
                return graph.forward

            return compiler

        return aot_autograd(fw_compiler=count("forward"), bw_compiler=count("backward"))(
            graph, inputs
        )


def block(x, w_qkv, w_out, bias, sinks):
    """Projection, attention, projection, with all gradients of gemm and flash_attn in one graph."""
    b, s, _ = x.shape
    q, k, v = ops.gemm(x, w_qkv).view(b, s, 8, 16).split((4, 2, 2), 2)
    out = ops.flash_attn(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        window_left=20,
        sinks=sinks,
    )
    return ops.gemm(out.transpose(1, 2).reshape(b, s, 64), w_out, bias, c=x, activation="gelu")


def block_inputs(s, device="cpu", dtype=torch.float32):
    gen = generator("block", s)
    shapes = ((2, s, 32), (32, 128), (64, 32), (32,), (4,))
    return [
        randn(gen, *shape, dtype=dtype, device=device, std=0.3).requires_grad_() for shape in shapes
    ]


def run_block(fn, s, device):
    tensors = block_inputs(s, device)
    out = fn(*tensors)
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in tensors)]


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-5), (x - y).abs().max()


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_train_block(dynamic, device):
    """Forward and backward through Inductor in one graph."""
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for s in (40, 57) if dynamic else (40,):
        assert_same(run_block(compiled, s, device), run_block(block, s, device))


def every_gradient(x, w_qkv, w_out, bias, sinks):
    """block, and what it lacks: attention without sinks, dense and packed, a used lse,
    attn_merge."""
    rows = block(x, w_qkv, w_out, bias, sinks).view(-1, 2, 16)
    heads = rows.view(2, -1, 2, 16).transpose(1, 2)
    dense, lse = torch_gpukern.flash_attn(heads, heads, heads, return_lse=True)
    merged, _ = torch_gpukern.attn_merge(dense, lse, dense, lse)
    cu = torch.tensor([0, rows.shape[0]], dtype=torch.int32, device=x.device)
    packed = torch_gpukern.flash_attn_varlen(rows, rows, rows, cu, cu, rows.shape[0], rows.shape[0])
    out = torch_gpukern.gemm(
        merged.flatten(0, 2), packed.flatten(0, 1).mT, alpha=0.01, activation="relu"
    )
    return out + 0.01 * lse.mean()


def test_train_through_the_cpp_wrapper(device):
    """Inductor's C++ wrapper can call the raw ops, forward and backward, whichever results are not
    wanted."""
    with torch._inductor.config.patch(cpp_wrapper=True):
        got = run_block(torch.compile(every_gradient, fullgraph=True), 12, device)
    assert_same(got, run_block(every_gradient, 12, device))


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "no_grad"))
def test_jit_trace(grad, device):
    """A trace records the public ops, with or without wanted gradients, and is differentiable."""
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(every_gradient, tuple(block_inputs(12, device)))
    nodes = {node.kind() for node in traced.graph.nodes() if node.kind().startswith("gpukern")}
    assert nodes == {
        f"gpukern::{op}"
        for op in ("gemm", "flash_attn", "flash_attn_fwd", "flash_attn_varlen", "attn_merge")
    }
    assert_same(run_block(traced, 12, device), run_block(every_gradient, 12, device))


RAW = [op.raw for op in OPS.values() if op.raw] + ["flash_attn_bwd", "flash_attn_varlen_bwd"]


@pytest.mark.parametrize("name", RAW)
def test_raw_ops_return_tensors(name):
    """Raw ops never return None, because neither the C++ wrapper nor a trace can hold an optional
    result."""
    assert all(
        str(result.type) == "Tensor" for result in getattr(ops, name).default._schema.returns
    )


def with_gradients(call: Bound) -> list:
    """All results, then the gradients of a weighted sum of them, whose incoming gradients are
    dense."""
    results = call.results(*(x.clone() for x in call.leaves))
    wanted = [x for x in call.leaves if x.requires_grad]
    grads = (
        torch.autograd.grad(sum((1.5 * r).sum() for r in results if r.requires_grad), wanted)
        if wanted
        else ()
    )
    return [*(r.detach() for r in results if r is not None), *grads]


@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("name,variant", VARIANTS)
def test_every_op_in_one_graph(name, variant, grad, device):
    """Every op compiles into one graph, with the bits of the eager call."""
    if grad and not OPS[name].gradients:
        pytest.skip("has no gradient")
    counting = Counting()
    compiled = torch.compile(public(name), fullgraph=True, backend=counting)
    got, want = (Bound(name, variant, device, fn=fn) for fn in (compiled, public(name)))
    for call in (got, want):
        if grad:
            call.want_gradients()
    for x, y in zip(with_gradients(got), with_gradients(want), strict=True):
        assert same_bits(x, y) and x.stride() == y.stride()
    for n, x in got.call.items():  # what kv_cache_write has written
        assert not isinstance(x, torch.Tensor) or same_bits(x.detach(), want.call[n].detach())
    assert counting.forward == 1 and counting.backward == grad


def opchecks():
    """The opcheck cases: both forms of an op's valid call, and alternately one form of its
    variants; with ALL both forms of all. Every variant runs in both forms in the test above."""
    for name, op in OPS.items():
        for i, variant in enumerate(op.variants):
            both = (torch.float32, True), (torch.bfloat16, False)
            forms = (
                itertools.product((torch.float32, torch.bfloat16), (True, False)) if ALL else both
            )
            yield from (
                (name, variant, *form) for form in (forms if ALL or i == 0 else both[i % 2 :][:1])
            )


@pytest.mark.parametrize("name,variant,dtype,grad", opchecks())
def test_opcheck(name, variant, dtype, grad, device):
    """opcheck of the op, and of the raw op without gradients; also in bfloat16 with permuted
    storage."""
    grad = grad and bool(OPS[name].gradients)
    call = Bound(name, variant, device, dtype)
    for n, x in call.call.items():
        if dtype == torch.bfloat16 and n in call.names and x.dim() > 1:
            call.call[n] = swap_last(x) if x.dim() == 2 else swap_middle(x)
    if grad:
        call.want_gradients()
    for packet in [getattr(ops, name)] + (
        [getattr(ops, OPS[name].raw)] if OPS[name].raw and not grad else []
    ):
        torch.library.opcheck(packet.default, (), call.call)


def varlen_step(q, k, v, cu, max_seqlen, slopes, sinks):
    out = ops.flash_attn_varlen(
        q * 2,
        k,
        v,
        cu,
        cu,
        max_seqlen,
        max_seqlen,
        is_causal=True,
        alibi_slopes=slopes,
        sinks=sinks,
    )
    return out * 3


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_varlen(dynamic, device):
    compiled = torch.compile(varlen_step, fullgraph=True, dynamic=dynamic)
    for n in (30, 41) if dynamic else (30,):
        results = []
        for fn in (compiled, varlen_step):
            gen = generator("varlen compile", n)
            t = [randn(gen, n, h, 16, device=device).requires_grad_() for h in (4, 2, 2)]
            sinks = randn(gen, 4, device=device).requires_grad_()
            cu = torch.tensor([0, 10, 10, n], dtype=torch.int32, device=device)
            out = fn(*t, cu, n - 10, torch.full((4,), 0.1, device=device), sinks)
            out.sum().backward()
            results.append([out.detach(), sinks.grad, *(x.grad for x in t)])
        assert_same(*results)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_merge(dynamic, device):
    def fn(q, k, v, n):
        parts = [
            torch_gpukern.flash_attn(q, k[:, :, x], v[:, :, x], return_lse=True)
            for x in (slice(0, n), slice(n, None))
        ]
        out, lse = ops.attn_merge(*parts[0], *parts[1])
        return out, lse

    compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
    for s in (20, 33) if dynamic else (20,):
        results = []
        for f in (compiled, fn):
            gen = generator("merge compile", s)
            t = [randn(gen, 2, h, s, 16, device=device).requires_grad_() for h in (4, 2, 2)]
            out, lse = f(*t, 7)
            (out.sum() + lse.sum()).backward()
            results.append([out.detach(), lse.detach(), *(x.grad for x in t)])
        assert_same(*results)


def decode(q, k, v, k_cache, v_cache, slots, table, lens):
    ops.kv_cache_write(k, v, k_cache, v_cache, slots)
    return ops.paged_attn(q, k_cache, v_cache, table, lens, window_left=30) + 1


def decode_inputs(batch, device, dtype=torch.float32):
    gen = generator("decode", batch)
    paged = Paged(gen, [20 + b for b in range(batch)], [1] * batch, 4, 2, 16, 16, 8, dtype, device)
    paged.block_table = torch.nn.functional.pad(paged.block_table, (0, 8))[:, :8].contiguous()
    last = torch.tensor([n - 1 for n in paged.lengths], device=device)
    page = paged.block_table[torch.arange(batch, device=device), last // 8].long()
    k, v = (randn(gen, batch, 2, 16, dtype=dtype, device=device) for _ in range(2))
    return [
        paged.q,
        k,
        v,
        paged.k_cache,
        paged.v_cache,
        page * 8 + last % 8,
        paged.block_table,
        paged.seq_lens,
    ]


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_decode_step(dynamic, device):
    """kv_cache_write and paged_attn in one graph. Both the read and the caller see the write."""
    compiled = torch.compile(decode, fullgraph=True, dynamic=dynamic)
    for batch in (3, 5) if dynamic else (3,):
        eager, fast = decode_inputs(batch, device), decode_inputs(batch, device)
        want, got = decode(*eager), compiled(*fast)
        assert same_bits(got, want)
        for x, y in zip(fast[3:5], eager[3:5]):
            assert same_bits(x, y)


def test_cache_write_compiles_without_cloning_the_caches(device):
    """The op gets the caller's tensors, and the generated code has no buffer as large as a
    cache."""
    inputs = decode_inputs(3, device)
    cache_numel = inputs[3].numel()
    pointers = [t.data_ptr() for t in inputs[3:5]]
    _, (code, *_) = run_and_get_code(torch.compile(decode, fullgraph=True), *inputs)
    (call,) = re.findall(r"gpukern\.kv_cache_write\.default\(([^)]*)\)", code)
    assert [name.strip()[:3] for name in call.split(",")][:5] == ["arg"] * 5, call
    for shape in re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code):
        assert math.prod(int(n) for n in shape.split(",") if n.strip()) < cache_numel, (
            f"a buffer of {shape}"
        )
    assert not re.search(r"\.clone\(|copy_\(", code)
    assert [t.data_ptr() for t in inputs[3:5]] == pointers


LENGTHS = (16, 17, 31, 40, 64, 65, 90, 111, 128, 200)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_write_from_views_of_its_cache(backend, device):
    """All of k is read before a row is written, even if the compiler writes in place."""

    def turn(k_cache, v_cache, slots):
        ops.kv_cache_write(k_cache.view(4, 1, 8), v_cache.view(4, 1, 8), k_cache, v_cache, slots)

    caches = [torch.arange(32.0, device=device).view(2, 2, 1, 8) for _ in range(2)]
    want = caches[0].view(4, 8).flip(0)
    torch.compile(turn, backend=backend, fullgraph=True)(
        *caches, torch.arange(4, device=device).flip(0)
    )
    assert all(torch.equal(c.view(4, 8), want) for c in caches)


def test_ten_lengths_with_a_diagonal_of_lengths_make_two_graphs(device):
    """diagonal = k.shape[2] - q.shape[2] and a length in gemm stay symbols, forward and
    backward."""

    def fn(q, k, v, w):
        q = ops.gemm(q, w)
        return ops.flash_attn(
            q, k, v, is_causal=True, diagonal=k.shape[2] - q.shape[2], window_left=k.shape[2] // 2
        )

    counting = Counting()
    compiled = torch.compile(fn, fullgraph=True, backend=counting)
    for n in LENGTHS:
        results = []
        for f in (compiled, fn):
            gen = generator("ten", n)
            q, k, v = (
                randn(gen, 2, 2, s, 16, device=device).requires_grad_()
                for s in (n, n + n // 3, n + n // 3)
            )
            w = randn(gen, 16, 16, device=device).requires_grad_()
            out = f(q, k, v, w)
            out.sum().backward()
            results.append([out.detach(), q.grad, k.grad, v.grad, w.grad])
        assert_same(*results)
    assert 1 <= counting.forward <= 2 and 1 <= counting.backward <= 2, vars(counting)


def test_other_places_make_no_other_graph(device):
    """q_start and kv_start are tensor contents: one graph serves all of them, forward and backward,
    and so does an export."""

    def fn(q, k, v, q_start, kv_start):
        out = torch_gpukern.flash_attn(
            q, k, v, is_causal=True, window_left=20, q_start=q_start, kv_start=kv_start
        )
        row = q[:, :, 0].detach()
        table = torch.arange(2, dtype=torch.int32, device=q.device)[:, None]
        pages = k.detach().transpose(1, 2), v.detach().transpose(1, 2)
        lengths = torch.full((2,), k.shape[2], dtype=torch.int32, device=q.device)
        return out, torch_gpukern.paged_attn(row, *pages, table, lengths, kv_start=kv_start)

    class Module(torch.nn.Module):
        forward = staticmethod(fn)

    def inputs(seed, *places):
        gen = generator("places", seed)
        tensors = (
            randn(gen, 2, h, s, 16, device=device).requires_grad_()
            for h, s in ((4, 9), (2, 30), (2, 30))
        )
        return (*tensors, *(torch.tensor(p, dtype=torch.int32, device=device) for p in places))

    counting = Counting()
    compiled = torch.compile(fn, fullgraph=True, backend=counting)
    program = torch.export.export(Module(), inputs(0, [0, 0], [0, 0])).module()
    for places in (([0, 0], [0, 0]), ([21, 3], [0, 4]), ([-4, 40], [29, -1])):
        results = []
        for f in (fn, compiled, program):
            x = inputs(1, *places)
            out, decoded = f(*x)
            out.sum().backward()
            results.append([out.detach(), decoded, *(t.grad for t in x[:3])])
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])
    assert counting.forward == counting.backward == 1, vars(counting)


def attention_of_lengths(name, q, k, window):
    """Calls of public functions in which every number is a length or a difference of lengths, and
    takes its default value for some lengths."""
    if name == "flash_attn":
        return torch_gpukern.flash_attn(q, k, k, is_causal=True, diagonal=k.shape[2] - q.shape[2])
    if name == "windows":
        return torch_gpukern.flash_attn(q, k, k, window_left=window - 4, window_right=window - 4)
    rows, keys = q[0].transpose(0, 1), k[0].transpose(0, 1)
    if name == "flash_attn_varlen":
        lengths = (torch.arange(2, dtype=torch.int32) * x.shape[0] for x in (rows, keys))
        return torch_gpukern.flash_attn_varlen(
            rows,
            keys,
            keys,
            *lengths,
            rows.shape[0],
            keys.shape[0],
            window_left=window - 4,
            window_right=window - 4,
        )
    pages = keys[:, None], keys[:, None], torch.arange(keys.shape[0], dtype=torch.int32)[None]
    return torch_gpukern.paged_attn(
        rows[:1], *pages, torch.ones(1, dtype=torch.int32), window_left=window - 4
    )


# lengths of queries and keys; the window becomes 7, 3, 5, 4, 6
LENGTH_PAIRS = ((10, 14), (12, 12), (12, 15), (13, 13), (30, 20))


@pytest.mark.parametrize("name", ("flash_attn", "windows", "flash_attn_varlen", "paged_attn"))
def test_public_functions_compare_no_symbol(name):
    """One dynamic graph serves a diagonal and windows on both sides of their defaults, and so does
    one export."""

    def fn(q, k, window):
        return attention_of_lengths(name, q, k, window.shape[0])

    def inputs(queries, keys, window):
        gen = generator("symbols", queries, keys)
        return randn(gen, 1, 2, queries, 8), randn(gen, 1, 2, keys, 8), torch.empty(window)

    class Module(torch.nn.Module):
        forward = staticmethod(fn)

    shapes = [
        {d: torch.export.Dim(x, min=2, max=50)}
        for d, x in ((2, "queries"), (2, "keys"), (0, "window"))
    ]
    programs = [
        torch.export.export(
            Module(), inputs(10, 14, 7), dynamic_shapes=tuple(shapes), strict=strict
        ).module()
        for strict in (False, True)
    ]
    counting = Counting()
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=counting)
    for (queries, keys), window in zip(LENGTH_PAIRS, (7, 3, 5, 4, 6), strict=True):
        given = inputs(queries, keys, window)
        want = fn(*given)
        for program in (compiled, *programs):
            assert same_bits(program(*given), want)
    assert counting.forward == 1


def test_ten_lengths_of_varlen_make_two_graphs(device):
    counting = Counting()
    compiled = torch.compile(varlen_step, fullgraph=True, backend=counting)
    for n in LENGTHS:
        results = []
        for f in (compiled, varlen_step):
            gen = generator("ten varlen", n)
            t = [randn(gen, n, h, 16, device=device).requires_grad_() for h in (4, 2, 2)]
            cu = torch.tensor([0, n // 3, n], dtype=torch.int32, device=device)
            out = f(*t, cu, n - n // 3, torch.full((4,), 0.1, device=device), None)
            out.sum().backward()
            results.append([out.detach(), *(x.grad for x in t)])
        assert_same(*results)
    assert 1 <= counting.forward <= 2 and 1 <= counting.backward <= 2, vars(counting)


def test_ten_batches_of_paged_attention_make_two_graphs(device):
    def fn(q, k, v, k_cache, v_cache, slots, table, lens, cu, max_seqlen):
        ops.kv_cache_write(k, v, k_cache, v_cache, slots)
        return ops.paged_attn(q, k_cache, v_cache, table, lens, cu, max_seqlen)

    counting = Counting()
    compiled = torch.compile(fn, fullgraph=True, backend=counting)
    for batch in range(2, 12):
        inputs = decode_inputs(batch, device)
        cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
        assert same_bits(compiled(*inputs, cu, batch), fn(*decode_inputs(batch, device), cu, batch))
    assert 1 <= counting.forward <= 2, vars(counting)


def test_layouts_survive_the_compiler(device):
    """Results have the strides of eager calls, also if q is stored [B, S, H, D]."""

    def fn(q, k, v):
        out, lse = ops.flash_attn_fwd(q + 0, k, v)
        return out, lse, ops.gemm(out, k.mT)

    gen = generator("strides")
    for dynamic in (False, True):
        compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for swap in (False, True):
            q, k, v = (randn(gen, 2, 4, 9, 8, device=device) for _ in range(3))
            q = swap_middle(q) if swap else q
            for x, y in zip(compiled(q, k, v), fn(q, k, v)):
                assert x.stride() == y.stride() and same_bits(x, y)


def test_graph_has_no_foreign_ops(device):
    """Without gradients, each compiled public op is one node."""
    seen = []

    def backend(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    x = torch.ones(2, 2, 8, 8, device=device)
    torch.compile(lambda x: ops.flash_attn(ops.gemm(x, x), x, x), fullgraph=True, backend=backend)(
        x
    )
    assert len([t for t in seen if "gpukern" in t]) == 2, seen


class Model(torch.nn.Module):
    """A module with every op of inference."""

    def __init__(self):
        super().__init__()
        gen = generator("model")
        self.w = torch.nn.Parameter(randn(gen, 16, 16))
        self.bias = torch.nn.Parameter(randn(gen, 16))

    def forward(self, q, k, v, k_cache, v_cache, table, lens):
        b, h, s, d = q.shape
        q = ops.gemm(q, self.w, self.bias, activation="silu")
        dense, lse = ops.flash_attn_fwd(q, k, v, is_causal=True, diagonal=k.shape[2] - s)
        rows = q.transpose(1, 2).reshape(b * s, h, d)
        paged, paged_lse = ops.paged_attn_fwd(rows, k_cache, v_cache, table, lens)
        cu = torch.arange(b + 1, dtype=torch.int32, device=q.device) * s
        packed = ops.flash_attn_varlen(rows, rows, rows, cu, cu, s, s)
        merged, _ = ops.attn_merge(
            dense.transpose(1, 2).reshape(b * s, h, d),
            lse.transpose(1, 2).reshape(b * s, h),
            paged,
            paged_lse,
        )
        return merged + packed


def model_inputs(s, device="cpu"):
    gen = generator("model", s)
    q, k, v = (randn(gen, 2, 2, n, 16, device=device) for n in (s, s + 3, s + 3))
    paged = Paged(gen, [40, 50], [s, s], 2, 2, 16, 16, 8, torch.float32, device)
    return q, k, v, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens


def exported(s=10):
    length = torch.export.Dim("length", min=2, max=35)
    other = length + 3
    shapes = ({2: length}, {2: other}, {2: other}, None, None, None, None)
    with torch.no_grad():
        return torch.export.export(Model(), model_inputs(s), dynamic_shapes=shapes, strict=False)


def test_export():
    """One exported program serves every length."""
    program, model = exported(), Model()
    nodes = {str(n.target) for n in program.graph.nodes}
    for op in ("gemm", "flash_attn_fwd", "paged_attn_fwd", "flash_attn_varlen", "attn_merge"):
        assert f"gpukern.{op}.default" in nodes
    for s in (10, 4, 33):
        with torch.no_grad():
            assert same_bits(program.module()(*model_inputs(s)), model(*model_inputs(s)))


def test_aotinductor(tmp_path):
    """The exported program can be compiled ahead of time to a shared library and loaded again."""
    path = torch._inductor.aoti_compile_and_package(
        exported(), package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    model = Model()
    for s in (10, 25):
        with torch.no_grad():
            assert torch.allclose(
                loaded(*model_inputs(s)), model(*model_inputs(s)), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(reentrant, device):
    want = run_block(block, 33, device)
    got = run_block(lambda *t: checkpoint(block, *t, use_reentrant=reentrant), 33, device)
    for x, y in zip(got, want):
        assert same_bits(x, y)


@pytest.mark.parametrize("op", ("flash_attn", "gemm", "rms_norm"))
def test_checkpoint_around_a_first_call(op, device, monkeypatch):
    """A call with types that no call has had goes by the dispatcher, which drops defaults, and the
    call that is made again does not. Both must keep the same tensors, given equal defaults, too."""
    holder = sys.modules[f"torch_gpukern.ops.{'norm' if op == 'rms_norm' else op}"]
    monkeypatch.setattr(getattr(holder, f"_{op}"), "_served", {})
    x = torch.randn(2, 4, 16, 16, device=device, requires_grad=True)
    zero, one = float("0"), float("1")  # other objects than the defaults
    calls = {
        "flash_attn": lambda x: torch_gpukern.flash_attn(x, x, x, is_causal=True, dropout_p=zero),
        "gemm": lambda x: torch_gpukern.gemm(x[0, 0], x[0, 1], alpha=one),
        "rms_norm": lambda x: torch_gpukern.rms_norm(x, weight_offset=zero),
    }
    for _ in range(2):
        checkpoint(calls[op], x, use_reentrant=False).sum().backward()
    assert x.grad.isfinite().all()


def test_selective_checkpoint_sees_the_raw_op(device):
    """A policy by op name keeps the results of flash_attn_fwd and recomputes everything else."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    saw = set()

    def policy(ctx, op, *args, **kwargs):
        saw.add(str(op))
        return (
            CheckpointPolicy.MUST_SAVE
            if op is ops.flash_attn_fwd.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def context():
        return create_selective_checkpoint_contexts(policy)

    got = run_block(
        lambda *t: checkpoint(block, *t, use_reentrant=False, context_fn=context), 33, device
    )
    for x, y in zip(got, run_block(block, 33, device)):
        assert same_bits(x, y)
    assert "gpukern.flash_attn_fwd.default" in saw


def test_inference_mode(device):
    with torch.inference_mode():
        tensors = block_inputs(30, device)
        out = block(*tensors)
        assert out.is_inference()
        inputs = decode_inputs(3, device)
        got = decode(*inputs)
        out_a, lse_a = torch_gpukern.flash_attn(
            *(torch.ones(1, 2, 4, 8, device=device) for _ in range(3)), return_lse=True
        )
        ops.attn_merge(out_a, lse_a, out_a, lse_a)
    assert torch.equal(out, block(*block_inputs(30, device)).detach())
    assert same_bits(got, decode(*decode_inputs(3, device)))


# every op with a backward and every branch of the backwards
BATCHED = [(name, variant) for name, variant in VARIANTS if OPS[name].gradients]
BATCHED += [(name, "lse") for name, op in OPS.items() if op.has_lse and op.gradients] + [
    ("gemm", "float32 of bfloat16")
]


@pytest.mark.parametrize("name,variant", BATCHED)
def test_batches_of_gradients(name, variant, device):
    """is_grads_batched and jacobian(vectorize=True), which run a backward under vmap, give the
    results of single backwards."""
    if variant == "lse":
        call = Bound(name, "", device, torch.float64, return_lse=True)
    elif variant == "float32 of bfloat16":
        call = Bound(name, "", device, torch.bfloat16, out_dtype=torch.float32)
    else:
        call = Bound(name, variant, device, torch.float64)
    wanted = [n for n in call.names if n in OPS[name].gradients]

    def fn(*leaves):
        given = dict(zip(wanted, leaves, strict=True))
        return call.results(*(given.get(n, call.call[n]) for n in call.names))[
            1 if variant == "lse" else 0
        ]

    leaves = call.want_gradients()
    out = fn(*leaves)
    grads = torch.stack(
        [randn(generator("cotangent", i), *out.shape, device=device) for i in range(3)]
    ).to(out.dtype)
    # lse does not depend on v
    one_by_one = [
        torch.autograd.grad(out, leaves, grad, retain_graph=True, materialize_grads=True)
        for grad in grads
    ]
    want = [torch.stack(x) for x in zip(*one_by_one, strict=True)]
    for create_graph in (False, True):
        options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
        got = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, **options)
        for x, y in zip(got, want, strict=True):
            assert same_bits(x.detach(), y)
    vectorized = torch.autograd.functional.jacobian(fn, tuple(leaves), vectorize=True)
    for x, y in zip(vectorized, torch.autograd.functional.jacobian(fn, tuple(leaves)), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "no_grad"))
@pytest.mark.parametrize("via", (ops, torch_gpukern), ids=("op", "function"))
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.gradients])
def test_forward_mode_is_refused(name, via, grad, device):
    """A call with a tangent is refused by name. The result would otherwise have no tangent, which
    means zero."""
    call = Bound(name, "", device, fn=getattr(via, name))
    leaves = tuple(call.leaves)
    refused = pytest.raises(
        NotImplementedError, match=f"gpukern::{name}: it has no forward-mode derivative"
    )
    with torch.set_grad_enabled(grad):
        want = call(*leaves)
        with refused:
            torch.func.jvp(call, leaves, tuple(torch.ones_like(x) for x in leaves))
        with forward_ad.dual_level():
            for i, x in enumerate(leaves):
                with refused:
                    call(*leaves[:i], forward_ad.make_dual(x, torch.ones_like(x)), *leaves[i + 1 :])
            assert same_bits(call(*leaves), want)  # without a tangent


def test_tf32_is_asked_of_torch():
    """TF32 follows torch's documented attribute, or the more general setting if that is not set."""
    from torch_gpukern.ops.gemm import _torch_allows_tf32

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee", "none", "tf32"):
            matmul.fp32_precision = precision
            assert _torch_allows_tf32() == (matmul.fp32_precision == "tf32")
    finally:
        matmul.fp32_precision = before


def test_without_a_wanted_gradient_there_is_no_graph(device):
    """This holds in grad mode, too, and the bits are those of a call with a graph."""
    a, b = torch.rand(5, 7, device=device), torch.rand(7, 3, device=device)
    out = torch_gpukern.gemm(a, b)
    assert not out.requires_grad and out.grad_fn is None
    for x in (a, b):
        x.requires_grad_()
        assert torch_gpukern.gemm(a, b).grad_fn is not None and same_bits(
            torch_gpukern.gemm(a, b).detach(), out
        )
        with torch.no_grad():
            assert torch_gpukern.gemm(a, b).grad_fn is None
        x.requires_grad_(False)


# --------------------------------------------------------------------------------------------------
# autocast


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "name,variant", [(name, variant) for name, variant in VARIANTS if OPS[name].cast]
)
def test_autocast_casts_the_matrices(name, variant, dtype, device):
    """Autocast casts the matrices, whatever their dtypes, and nothing else; in the op and the raw
    op."""
    call = drawn(name, variant, device, torch.float32)
    low = call | {n: x.to(dtype) for n, x in call.items() if n in OPS[name].cast}
    last = next(n for n in reversed(call) if n in OPS[name].cast)
    with torch.autocast(device, dtype=dtype):
        got = [getattr(ops, name)(**x) for x in (call, call | {last: low[last]})]
    for x in got:
        assert x.dtype == dtype and same_bits(x, getattr(ops, name)(**low))
    if OPS[name].has_lse:
        with torch.autocast(device, dtype=dtype):
            got = public(name)(**call, return_lse=True)
        assert all(map(same_bits, got, getattr(ops, OPS[name].raw)(**low)))


def test_autocast_leaves_out_dtype_alone(device):
    call = drawn("gemm", "bias and c", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        wide = ops.gemm(**call, out_dtype=torch.float32)
    low = {n: x.bfloat16() for n, x in call.items()}
    assert wide.dtype == torch.float32 and same_bits(wide, ops.gemm(**low, out_dtype=torch.float32))


@pytest.mark.parametrize("name,variant", VARIANTS)
def test_autocast_leaves_the_rest_alone(name, variant, device):
    """float64 is never cast, and ops without a rule cast nothing. paged_attn follows its cache."""
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float32 and OPS[name].cast:
            continue
        want, got = (
            Bound(name, variant, device, dtype, fn=getattr(ops, OPS[name].raw or name))
            for _ in range(2)
        )
        with torch.autocast(device, dtype=torch.bfloat16):
            results = got.results(*got.leaves)
        for x, y in zip(results, want.results(*want.leaves), strict=True):
            assert x is y is None or same_bits(x, y)
        for x, y in zip(got.leaves, want.leaves, strict=True):
            assert same_bits(x, y)
    with torch.autocast(device, enabled=False):
        plain = Bound(name, variant, device)
        wanted = (None, torch.float32, torch.int64)  # int64: sample_tokens
        assert all(getattr(x, "dtype", x) in wanted for x in plain.results(*plain.leaves))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_autocast_of_paged_attn_follows_the_cache(dtype, device):
    """q is cast to the cache's dtype if that has 16 bits. Caches and scales are never cast."""
    gen = generator("autocast paged")
    paged = Paged(gen, [20, 9], [1, 1], 4, 2, 16, 16, 8, dtype, device)
    want = ops.paged_attn(*paged.args())
    with torch.autocast(device, dtype=torch.bfloat16):
        got = ops.paged_attn(paged.q.float(), *paged.args()[1:])
    assert got.dtype == dtype and same_bits(got, want)


# For ops that join tensors: a call with 16-bit tensors and a float32 stream, and whether the result
# has 16 bits.
JOINS = {
    "rms_norm": (lambda x, y, w: torch_gpukern.rms_norm(x, w, residual=y), False),
    "layer_norm": (lambda x, y, w: torch_gpukern.layer_norm(x, w, w, residual=y), False),
    "swiglu": (lambda x, y, w: torch_gpukern.swiglu(x, y), False),
    "geglu": (lambda x, y, w: torch_gpukern.geglu(x, y), False),
    "dropout_add": (lambda x, y, w: torch_gpukern.dropout_add(x, y, 0.5, SEED.to(x.device)), False),
    "bias_gelu_dropout": (
        lambda x, y, w: torch_gpukern.bias_gelu_dropout(x, w, 0.5, SEED.to(x.device)),
        True,
    ),
    "rope": (
        lambda x, y, w: torch_gpukern.rope(
            x[None], y[None], *w.detach().expand(5, 16).chunk(2, -1)
        ),
        False,
    ),
    "attn_merge": (
        lambda x, y, w: torch_gpukern.attn_merge(
            x[None], x[None, ..., 0].float(), y[None], y[None, ..., 0].float()
        ),
        False,
    ),
    "silu_mul_quantize": (
        lambda x, y, w: torch_gpukern.silu_mul_quantize(x, y, torch.int8, "row"),
        None,
    ),
    "rms_norm_quantize": (
        lambda x, y, w: torch_gpukern.rms_norm_quantize(x, w, y, 1e-6, torch.int8),
        None,
    ),
    "grouped_gemm": (
        lambda x, y, w: torch_gpukern.grouped_gemm(x[0], y.mT, ENDS.to(x.device)),
        True,
    ),
}
SEED, ENDS = torch.tensor([3, 5]), torch.tensor([2, 5], dtype=torch.int32)


@pytest.mark.parametrize("name", JOINS)
def test_autocast_where_16_bits_meet_a_float32_stream(name, device):
    """The widest dtype wins, as in PyTorch's own ops, except in products and their bias. Each
    tensor's gradient has its own dtype."""
    call, short_wins = JOINS[name]
    gen = generator("joins", name)
    x, y, w = (randn(gen, *shape, device=device) for shape in ((2, 5, 16), (2, 5, 16), (16,)))
    x = x.bfloat16()
    for first, second in (
        ((x, y), (y, x)) if name not in ("bias_gelu_dropout", "grouped_gemm") else ((x, y),)
    ):
        leaves = [t.clone().requires_grad_(short_wins is not None) for t in (first, second, w)]
        dtype = torch.bfloat16 if short_wins else torch.float32
        with torch.autocast(device, dtype=torch.bfloat16):
            got = call(*leaves)
            want = call(*(t.to(dtype) for t in (first, second, w)))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
            assert a.dtype == b.dtype and same_bits(a, b)
        if short_wins is not None:
            got = got if isinstance(got, tuple) else (got,)
            assert got[0].dtype == dtype
            sum(r.float().square().sum() for r in got).backward()
            given = [t.grad for t in leaves[: 2 if name != "bias_gelu_dropout" else 1]]
            assert all(g.dtype == t.dtype and g.abs().sum() > 0 for g, t in zip(given, leaves))


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_autocast_backward(compiled, device):
    """Gradients have the parameters' dtype and are close to those of float32."""

    def step(*tensors):
        with torch.autocast(device, dtype=torch.bfloat16):
            return block(*tensors)

    fn = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    got = run_block(fn, 40, device)
    want = run_block(block, 40, device)
    assert got[0].dtype == torch.bfloat16
    for x, y in zip(got[1:], want[1:]):
        assert x.dtype == torch.float32
        assert (x - y).norm() < 0.05 * y.norm() + 1e-3


# --------------------------------------------------------------------------------------------------
# FLOP counter


def flops(fn):
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def test_flops_of_gemm(device):
    gen = generator("flops")
    a, b = randn(gen, 3, 5, 7, device=device), randn(gen, 7, 11, device=device)
    assert flops(lambda: ops.gemm(a, b)) == flops(lambda: torch.matmul(a, b)) == 2 * 3 * 5 * 7 * 11
    assert flops(lambda: ops.gemm_fwd(a, b, activation="gelu")) == 2 * 3 * 5 * 7 * 11
    leaf = [t.clone().requires_grad_() for t in (a, b)]
    assert flops(lambda: ops.gemm(*leaf).sum().backward()) == 3 * 2 * 3 * 5 * 7 * 11


def test_flops_of_attention(device):
    """FLOPs are counted as for SDPA: 4 B H Sq Sk D forward, 2.5 times that backward."""
    gen = generator("flops attention")
    q, k, v = (randn(gen, 2, h, s, 16, device=device) for h, s in ((4, 10), (2, 30), (2, 30)))
    forward = 4 * 2 * 4 * 10 * 30 * 16
    assert (
        flops(lambda: ops.flash_attn(q, k, v))
        == flops(lambda: ops.flash_attn_fwd(q, k, v))
        == forward
    )
    leaf = [t.clone().requires_grad_() for t in (q, k, v)]
    assert flops(lambda: ops.flash_attn(*leaf).sum().backward()) == 3.5 * forward
    out, lse = ops.flash_attn_fwd(q, k, v)
    assert flops(lambda: ops.flash_attn_bwd(out, q, k, v, out, lse)) == 2.5 * forward
    # q_start on a device is not read; it counts as the bottom-right diagonal
    places = torch.zeros(2, dtype=torch.int32, device=device)
    bottom_right = flops(lambda: ops.flash_attn(q, k, v, is_causal=True, diagonal=20))
    assert flops(lambda: ops.flash_attn(q, k, v, is_causal=True, q_start=places)) == bottom_right


def test_flops_of_packed_and_paged_attention(device):
    """FLOP formulas exist, grow with the work, and agree with flash_attn's in the dense case."""
    gen = generator("flops packed")
    x = randn(gen, 12, 4, 16, device=device)
    one = torch.tensor([0, 12], dtype=torch.int32, device=device)
    dense = 4 * 4 * 12 * 12 * 16
    assert flops(lambda: ops.flash_attn_varlen(x, x, x, one, one, 12, 12)) == dense
    leaf = x.clone().requires_grad_()
    assert (
        flops(lambda: ops.flash_attn_varlen(leaf, leaf, leaf, one, one, 12, 12).sum().backward())
        == 3.5 * dense
    )
    paged = Paged(gen, [16, 16], [1, 1], 4, 2, 16, 16, 8, torch.float32, device)
    assert flops(lambda: ops.paged_attn(*paged.args())) > 0


# --------------------------------------------------------------------------------------------------
# loading


def test_fake_functions_need_no_data(device):
    """Under FakeTensorMode, every op returns the kernel's shapes, dtypes and strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, inputs = Model().to(device), [t.to(device) for t in model_inputs(10)]
    real = model(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = model(*(mode.from_tensor(t) for t in inputs))
    assert fake.shape == real.shape and fake.dtype == real.dtype and fake.stride() == real.stride()


def test_a_second_copy_is_refused():
    """A second definition of the namespace gives an ImportError that names both files, not a crash
    of the interpreter."""
    done = run_python(
        """
        import torch
        lib = torch.library.Library("gpukern", "DEF")
        lib.define("gemm(Tensor a) -> Tensor")
        try:
            import torch_gpukern
        except ImportError as error:
            assert "gpukern" in str(error), error
            print("refused")
        """
    )
    assert done.stdout.strip() == "refused"


def test_a_second_import_takes_over():
    """After a second import, for example by a tool that reloads modules, functions of both imports
    work, and so do the ops."""
    run_python(
        """
        import gc, sys, torch
        import torch_gpukern as first
        from torch.utils.flop_counter import FlopCounterMode

        x = torch.rand(4, 4, requires_grad=True)
        q = torch.rand(1, 2, 5, 8, requires_grad=True)

        def results(module):
            out = module.gemm(x, x, activation="silu").sum() + module.flash_attn(q, q, q).sum()
            with FlopCounterMode(display=False) as counter:
                module.gemm(x, x)
            with torch.autocast("cpu", torch.bfloat16):
                low = torch.ops.gpukern.gemm(x, x)
            meta = torch.ops.gpukern.gemm(torch.ones(2, 3, device="meta"), torch.ones(3, 4, device="meta"))
            compiled = torch.compile(lambda x: module.gemm(x, x), backend="aot_eager", fullgraph=True)(x)
            assert counter.get_total_flops() == 128 and low.dtype == torch.bfloat16 and meta.shape == (2, 4)
            return [*torch.autograd.grad(out + compiled.sum(), (x, q))]

        want = results(first)
        for _ in range(2):
            for name in [name for name in sys.modules if name.split(".")[0] == "torch_gpukern"]:
                del sys.modules[name]
            import torch_gpukern as again
            assert again is not first
            gc.collect()
            for module in (first, again):
                torch._dynamo.reset()
                assert all(map(torch.equal, results(module), want))
        """
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "name,variant", [("gemm", "bias, silu"), *((n, "") for n, op in OPS.items() if op.gradients)]
)
def test_compiled_gradients_keep_the_dtype(name, variant, dtype, device):
    compiled = torch.compile(public(name), fullgraph=True, backend="aot_eager")
    grads = []
    for fn in (compiled, public(name)):
        call = Bound(name, variant, device, dtype, fn=fn)
        wanted = call.want_gradients()
        grads.append(torch.autograd.grad(sum(r.sum() for r in call.results(*call.leaves)), wanted))
        assert [x.dtype for x in grads[-1]] == [x.dtype for x in wanted]
    for x, y in zip(*grads, strict=True):
        assert_close_as(y, x, y.double())


def test_cached_code_is_that_of_this_version():
    """torch's cache keys contain only an op's name, so code cached before an upgrade would run with
    another schema. A tag prevents it."""
    from torch_gpukern.ops.define import _schemas, tag_compiled_code, tag_of

    every = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("gpukern::")]
    assert sorted(_schemas()) == sorted(every)

    config = torch.compiler.config
    tag = config.cache_key_tag.split("+")[-1]
    assert tag.startswith(f"gpukern-{torch_gpukern.__version__}-")
    schemas = ["gpukern::gemm(Tensor a) -> Tensor", "gpukern::attn_merge(Tensor a) -> Tensor"]
    assert (
        tag_of(schemas)
        == tag_of(schemas[::-1])
        != tag_of([schemas[0].replace("a)", "a, int b=0)"), schemas[1]])
    )
    with config.patch(cache_key_tag="mine"):
        for _ in range(2):
            tag_compiled_code()
            assert config.cache_key_tag == f"mine+{tag}"
    assert config.cache_key_tag.split("+")[-1] == tag


def test_an_upgrade_compiles_anew():
    """With another tag, as in an earlier version, nothing is found in the cache; with the same tag
    it is."""

    def hits():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(lambda a: torch_gpukern.gemm(a, a), fullgraph=True)
        with torch.no_grad():
            compiled(torch.ones(4, 4))
        return counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache():
        with torch.compiler.config.patch(cache_key_tag="gpukern-0.0.9-0"):
            assert hits() == 0
        assert [hits(), hits()] == [0, 1]


def compiled_anew():
    """Compiles without graphs of earlier runs. Precompiled headers, which a new cache would lack,
    may be used."""
    return torch._inductor.config.patch(force_disable_caches=True)


@pytest.mark.parametrize("second", ("linear", "gemm of both transposed"))
def test_casts_of_transposed_operands_in_compiled_code(second, device):
    """Inductor's CPU code is wrong if it casts several transposed views in one kernel, so our ops
    cast the stored tensor instead."""
    gen = generator("transposed casts", second)
    leaves = [
        randn(gen, *s, device=device).requires_grad_() for s in ((96, 192), (192, 192), (192, 192))
    ]

    def layers(x, w, w2):
        if second == "linear":
            return torch_gpukern.linear(torch_gpukern.linear(x, w), w2)
        return torch_gpukern.gemm(torch_gpukern.gemm(x, w.mT).mT.contiguous().mT, w2.mT)

    def step(fn):
        with torch.autocast(device, torch.bfloat16):
            out = fn(*leaves)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    with compiled_anew():
        got = step(torch.compile(layers, fullgraph=True))
    for x, y, leaf in zip(got, step(layers), leaves, strict=True):
        assert x.stride() == leaf.stride() and y.stride() == leaf.stride(), (
            "a gradient is stored as its parameter is"
        )
        assert torch.allclose(x, y, rtol=2e-2, atol=2e-2 * y.abs().max().item())


def test_compiled_autocast_step_of_the_demos_model(device, monkeypatch):
    """The compiled step is as close to the eager one as bfloat16 allows."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    demo = importlib.import_module("model")
    monkeypatch.delitem(sys.modules, "model")
    torch.manual_seed(0)
    config = demo.Config(
        vocab=64, context=32, layers=2, dim=64, heads_q=2, heads_kv=1, head_dim=32, hidden=96
    )
    model, ours = demo.GPT(config).to(device), demo.GpukernOps()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=p.shape[0] ** -0.5)
    tokens, targets = torch.randint(64, (2, 4, 32), device=device)

    def step(loss):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            value = loss(tokens, targets, ours)
        value.backward()
        return {"loss": value.detach(), **{n: p.grad for n, p in model.named_parameters()}}

    want = step(model.loss)
    with compiled_anew():
        got = step(torch.compile(model.loss, fullgraph=True))
    for name, x in want.items():
        assert (got[name] - x).norm() <= 0.05 * x.norm(), name


class NamedRMSNorm(torch.nn.Module):
    """RMSNorm as in transformers."""

    def __init__(self, n):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(n)), 1e-6

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        )


@pytest.mark.parametrize("what", ("attention", "int8", "norms"))
def test_defaults_in_two_subgraphs(what):
    """In a graph with dynamic shapes, a default that two checkpointed blocks or two autograd
    Functions read is a constant."""
    gen = generator("subgraphs", 0)
    x = randn(gen, 1, 2, 8, 64, dtype=torch.float32, device="cpu").requires_grad_()
    if what == "attention":
        as_there = torch_gpukern.integrations.flash_attn.flash_attn_func
        layers = [
            lambda q: torch_gpukern.flash_attn(q, q, q, is_causal=True),
            lambda q: as_there(q, q, q),
        ] * 2
    elif what == "norms":
        layers = [lambda q: torch_gpukern.layer_norm(torch_gpukern.rms_norm(q))] * 2
        layers += [
            kind(64, eps=1e-5)
            for kind in (torch_gpukern.nn.RMSNorm, torch_gpukern.nn.LayerNorm) * 2
        ]
        net = torch.nn.Sequential(*(NamedRMSNorm(64) for _ in range(2)))
        torch_gpukern.nn.patch(net, say=None)
        assert all("Similar" in str(type(norm).__mro__) for norm in net)
        layers += list(net)
    else:
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        torch_gpukern.nn.quantize(net, what)
        layers = list(net)

    def step(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def gradient(run):
        return torch.autograd.grad(run(x).square().sum(), x)[0]

    found = gradient(torch.compile(step, dynamic=True, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, gradient(step))
