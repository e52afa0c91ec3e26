# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.profiling.nvtx: the ranges of a call, and that switching it off restores all ops. A
fake NVTX records the ranges."""

import threading
import time

import pytest
import torch
from conftest import generator, randn

import torch_gpukern as tg
from torch_gpukern import profiling
from torch_gpukern.ops.define import Op


@pytest.fixture
def heard(monkeypatch):
    """Names of the ranges in the order in which they begin. At the end, all must have ended."""
    names, open_ranges = [], []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: (names.append(name), open_ranges.append(name))
    )
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)
    yield names
    assert not open_ranges


@pytest.fixture
def ab():
    gen = generator("nvtx")
    return randn(gen, 4, 8), randn(gen, 8, 6)


def attention(requires_grad=False):
    return [torch.randn(1, 2, 5, 8).requires_grad_(requires_grad) for _ in range(3)]


def ways_in():
    """The callables that nvtx replaces, for every op."""
    return [
        (op.unguarded, op.overload._op, getattr(torch.ops.gpukern, op.name)._op) for op in Op.every
    ]


def test_off_there_are_none_and_nothing_is_left(heard, ab):
    before = ways_in()
    with profiling.nvtx():
        assert ways_in() != before
    assert all(x is y for one, other in zip(ways_in(), before) for x, y in zip(one, other))
    tg.gemm(*ab)
    assert heard == []


def test_a_range_a_call(heard, ab):
    with profiling.nvtx():
        tg.gemm(*ab)
        torch.ops.gpukern.gemm(*ab)
        torch.ops.gpukern.gemm.default(*ab)
        torch.ops.gpukern.gemm(*ab, out=torch.empty(4, 6))
        with torch.inference_mode():
            torch.ops.gpukern.gemm(*ab)
        tg.flash_attn(*attention())
    assert heard == 5 * ["gpukern::gemm"] + ["gpukern::flash_attn"]


def test_backward_has_its_own(heard):
    q, k, v = attention(True)
    with profiling.nvtx():
        for _ in range(2):  # the second call takes a shorter way
            tg.flash_attn(q, k, v).sum().backward()
    assert heard == 2 * ["gpukern::flash_attn", "gpukern::flash_attn_bwd"]


def test_shapes(heard, ab):
    with profiling.nvtx(shapes=True):
        tg.gemm(*ab)
    assert heard == ["gpukern::gemm [4, 8] [8, 6]"]


def test_a_range_ends_with_an_error(heard, ab):
    with profiling.nvtx(), pytest.raises(ValueError, match="must match"):
        tg.gemm(ab[0], ab[0])
    assert heard == ["gpukern::gemm"]


def test_started_twice_stops_with_the_second(heard, ab):
    one, two = profiling.nvtx().start(), profiling.nvtx().start()
    one.stop()
    tg.gemm(*ab)
    two.stop()
    tg.gemm(*ab)
    assert heard == ["gpukern::gemm"]
    with pytest.raises(ValueError, match="stop without start"):
        one.stop()


def test_every_thread(heard, ab):
    with profiling.nvtx():
        thread = threading.Thread(target=tg.gemm, args=ab)
        thread.start()
        thread.join()
    assert heard == ["gpukern::gemm"]


def test_without_nvtx_it_says_so(monkeypatch):
    def fails(name):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", fails)
    with pytest.raises(RuntimeError, match="profiling.nvtx: torch .* has no NVTX"):
        profiling.nvtx().start()
    assert not profiling._active


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled(heard, ab, backend):
    """There is no graph break, and switching ranges on and off does not recompile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda a, b: tg.gemm(a, b) * 2, fullgraph=True, backend=backend)
    want = step(*ab)
    assert heard == []
    with profiling.nvtx():
        got = step(*ab)
        assert heard == ["gpukern::gemm"]
    step(*ab)
    assert heard == ["gpukern::gemm"] and torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_inside(heard, ab):
    torch._dynamo.reset()
    with profiling.nvtx():
        step = torch.compile(lambda a, b: tg.gemm(a, b), fullgraph=True, backend="eager")
        step(*ab)
    step(*ab)
    assert heard == ["gpukern::gemm"]


def test_scripted_inside(heard, ab):
    with profiling.nvtx():
        scripted = torch.jit.script(_scripted)
        assert torch.equal(scripted(*ab), tg.gemm(*ab))


def _scripted(a: torch.Tensor, b: torch.Tensor):
    return torch.ops.gpukern.gemm(a, b)


def test_off_costs_nothing(heard, ab):
    """With nvtx off, the same objects are called as before, so a call takes the same host time. The
    time is that of this thread, with a wide margin, because other processes disturb it."""

    def best(repeats=7, calls=400):
        times = []
        for _ in range(repeats):
            begin = time.thread_time()
            for _ in range(calls):
                tg.gemm(*ab)
            times.append(time.thread_time() - begin)
        return min(times)

    before = best()
    with profiling.nvtx():
        tg.gemm(*ab)
    assert best() < 1.5 * before
