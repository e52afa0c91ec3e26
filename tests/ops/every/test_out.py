# SPDX-License-Identifier: BSD-3-Clause
"""The .out overloads: results in the caller's memory, which is checked."""

import pytest
import torch
from conftest import generator, ops, randn, same_bits
from registry import OPS, VARIANTS, drawn

OUT = [(name, variant) for name, variant in VARIANTS if OPS[name].has_out]
NAMES = sorted({name for name, _ in OUT})


def call_of(name, variant="", device="cpu", dtype=torch.float32):
    """(its .out, a call without out, the result)"""
    call = drawn(name, variant, device, dtype)
    return getattr(ops, name).out, call, getattr(ops, name)(**call)


@pytest.mark.parametrize("name,variant", OUT)
def test_the_bits_of_the_op(name, variant, device):
    out_op, call, want = call_of(name, variant, device)
    out = torch.full_like(want, float("nan"))
    version, pointer = out._version, out.data_ptr()
    assert out_op(**call, out=out) is out  # as torch's own
    assert same_bits(out, want) and out.data_ptr() == pointer and out._version == version + 1
    other = torch.empty_like(want)
    assert getattr(ops, name)(**call, out=other) is other  # the packet finds it


@pytest.mark.parametrize("name", NAMES)
def test_out_is_checked(name, device):
    out_op, call, want = call_of(name, device=device)
    shape = list(want.shape)
    wrong = {
        f"out must have shape {shape}, got {[1, *shape]}": want[None],
        f"out must have shape {shape}, got [0]": want.new_empty(0),
        "out must be float32, got bfloat16": want.bfloat16(),
        "out must be float32, got float64": want.double(),
        "out must be contiguous": want.new_zeros(*shape[:-1], 2 * shape[-1])[..., ::2],
    }
    for text, out in wrong.items():
        before = out.clone()
        with pytest.raises(ValueError) as caught:
            out_op(**call, out=out)
        assert str(caught.value) == f"gpukern::{name}: {text}" and torch.equal(out, before)


@pytest.mark.parametrize("name", NAMES)
def test_out_may_not_share_memory_with_an_input(name, device):
    out_op, call, want = call_of(name, device=device)
    for argument, x in call.items():
        if not isinstance(x, torch.Tensor) or x.dtype != want.dtype:
            continue
        both = randn(generator("out"), max(x.numel(), want.numel()), device=device)
        given = both[: x.numel()].view(x.shape)
        with pytest.raises(ValueError) as caught:
            out_op(**call | {argument: given}, out=both[: want.numel()].view(want.shape))
        assert (
            str(caught.value) == f"gpukern::{name}: out shares memory with {argument}; it must not"
        )


def test_an_addend_is_no_out(device):
    a, c = torch.rand(4, 4, device=device), torch.rand(4, 4, device=device)
    with pytest.raises(ValueError, match="gpukern::gemm: out shares memory with c; it must not"):
        ops.gemm.out(a, a, c=c, out=c)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_refused(name, device):
    out_op, call, want = call_of(name, device=device)
    first = next(iter(call))
    leaf = call | {first: call[first].requires_grad_()}
    with pytest.raises(
        NotImplementedError, match=f"gpukern::{name}.out: it has no backward and an input requires"
    ):
        out_op(**leaf, out=torch.empty_like(want))
    with torch.no_grad():
        out = torch.empty_like(want)
        out_op(**leaf, out=out)
    assert same_bits(out, want)


def test_a_number_with_a_gradient_is_refused(device):
    a, alpha = torch.rand(4, 4, device=device), torch.tensor(2.0, requires_grad=True)
    for op in (ops.gemm, ops.gemm.out):
        with pytest.raises(ValueError, match="gpukern::gemm: alpha is a number without a gradient"):
            op(a, a, alpha=alpha, out=torch.empty_like(a))


@pytest.mark.parametrize("name", NAMES)
def test_out_in_a_graph(name, device):
    """Compiled: the caller sees what was written, and a wrong shape is refused when it is traced."""
    out_op, call, want = call_of(name, device=device)

    def fn(out):
        out_op(**call, out=out)
        return out * 2

    torch._dynamo.reset()
    out = torch.empty_like(want)
    assert same_bits(torch.compile(fn, fullgraph=True, backend="aot_eager")(out), want * 2)
    assert same_bits(out, want)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    with pytest.raises(ValueError, match="out must have shape"):
        out_op(**meta, out=torch.empty(1, 2, 3, 4, 5, device="meta"))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ("gemm", "flash_attn_varlen", "paged_attn"))
def test_out_in_a_graph_of_inductor(name):
    out_op, call, want = call_of(name)

    def fn(out):
        out_op(**call, out=out)
        return out * 2

    torch._dynamo.reset()
    out = torch.empty_like(want)
    assert same_bits(torch.compile(fn, fullgraph=True)(out), want * 2) and same_bits(out, want)

    def into_a_view(both):
        out_op(**call, out=both[1])
        return both * 2

    both = torch.zeros(2, *want.shape)
    doubled = torch.compile(into_a_view, fullgraph=True, dynamic=False)(both)
    assert same_bits(both, torch.stack([torch.zeros_like(want), want]))
    assert same_bits(doubled, both * 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ("gemm", "flash_attn_varlen", "paged_attn"))
def test_out_in_a_dynamic_graph_of_inductor(name):
    """A result of the graph's own, whose sizes are symbols."""
    out_op, call, want = call_of(name)

    def fn(like):
        out = torch.empty_like(like)
        out_op(**call, out=out)
        return out * 2

    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, dynamic=True)
    assert same_bits(compiled(torch.empty_like(want)), want * 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NAMES)
def test_out_below_a_dispatch_mode(name, device):
    """A mode calls the op again from within the call; torch wants nothing returned there."""

    class Watches(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += func.namespace == "gpukern"
            return func(*args, **(kwargs or {}))

    out_op, call, want = call_of(name, device=device)
    out = torch.empty_like(want)
    with Watches() as mode:
        assert out_op(**call, out=out) is out
    assert mode.seen and same_bits(out, want)
    assert out_op(**call, out=out) is out


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allocated_for_the_result(name):
    """In a captured graph: a second call of the same shape takes no more memory than its workspace,
    which goes back."""
    out_op, call, want = call_of(name, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(want)
    out_op(**call, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        out_op(**call, out=out)
    assert torch.cuda.memory_allocated() == before and same_bits(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_op(**call, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, want)
