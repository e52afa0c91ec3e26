# SPDX-License-Identifier: BSD-3-Clause
"""A call is planned once: gk_count_calls (csrc/core/plan.h) counts checks and plans around one call
of each op."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import Paged
from conftest import generator, ops, randn
from registry import OPS

import torch_gpukern
from torch_gpukern import _library


class Counts(ctypes.Structure):
    """gk_call_counts"""

    _fields_ = [
        ("checks", ctypes.c_int64),
        ("plans", ctypes.c_int64),
        ("kernel_plans", ctypes.c_int64),
    ]

    def values(self):
        return {name: getattr(self, name) for name, _ in self._fields_}


def counted(call):
    """How often `call` checked arguments, planned, and used a kernel's plan, on this thread."""
    count = ctypes.CDLL(_library.FILE).gk_count_calls
    before, after = Counts(), Counts()
    count(ctypes.byref(before))
    call()
    count(ctypes.byref(after))
    return {name: after.values()[name] - value for name, value in before.values().items()}


def calls(device, dtype):
    """A call of every op that csrc runs, by name; several of gemm, for its families."""
    gen = generator("plan", dtype, 0)

    def new(*shape):
        return randn(gen, *shape, dtype=dtype, device=device)

    for m, n, k in ((1, 512, 512), (16, 513, 511), (200, 130, 70), (256, 256, 256), (0, 8, 8)):
        a, b = new(m, k), new(k, n)
        yield f"gemm {m}x{n}x{k}", lambda a=a, b=b: ops.gemm(a, b, activation="gelu"), int(m > 0)
    x = new(40, 50)
    yield "gemm_act_bwd", lambda: ops.gemm_act_bwd(x, x, "gelu"), 1
    q, k, v = (new(2, 4, 70, 64) for _ in range(3))
    out, lse = ops.flash_attn_fwd(q, k, v, is_causal=True)
    yield "flash_attn", lambda: ops.flash_attn(q, k, v, is_causal=True), 1
    yield "flash_attn softcap", lambda: ops.flash_attn(q, k, v, softcap=1e38), 1
    yield "flash_attn_bwd", lambda: ops.flash_attn_bwd(out, q, k, v, out, lse, is_causal=True), 1
    packed, cu = new(90, 4, 64), torch.tensor([0, 11, 90], dtype=torch.int32, device=device)
    yield (
        "flash_attn_varlen",
        lambda: ops.flash_attn_varlen(packed, packed, packed, cu, cu, 80, 80),
        1,
    )
    paged = Paged(gen, [300, 7, 50], [1, 1, 1], 8, 2, 64, 64, 16, dtype, device)
    yield "paged_attn", lambda: ops.paged_attn(*paged.args()), 1
    parts = (*ops.paged_attn_fwd(*paged.args()), *ops.paged_attn_fwd(*paged.args(), window_left=9))
    yield "attn_merge", lambda: ops.attn_merge(*parts), 1
    tokens, caches = new(40, 2, 64), [new(10, 4, 2, 64) for _ in range(2)]
    slots = torch.arange(40, device=device)
    yield "kv_cache_write", lambda: ops.kv_cache_write(tokens, tokens, *caches, slots), 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_call_is_checked_and_planned_once(device, dtype):
    for name, call, times in calls(torch.device(device), dtype):
        assert counted(call) == {"checks": 1, "plans": times, "kernel_plans": times}, name


def test_a_refused_call_is_checked_once_and_not_planned():
    q = torch.randn(1, 2, 5, 8)
    cu = torch.tensor([0, 7], dtype=torch.int32)

    def call():
        with pytest.raises(IndexError, match="cu_seqlens"):
            ops.flash_attn_varlen(q[0], q[0], q[0], cu, cu, 5, 5)

    assert counted(call) == {"checks": 1, "plans": 0, "kernel_plans": 0}


def asked(call):
    """How many kernels and tables of kernels were asked to plan `call`, including those that did
    not."""
    count = ctypes.CDLL(_library.FILE).gk_count_asked
    count.restype = ctypes.c_int64
    before = count()
    call()
    return count() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_few_kernels_are_asked(dtype):
    """On the CPU, gemm asks the kernels for small M and for tiles, and with AMX also that for its
    tiles. With AMX, decoding also asks the kernel for few lanes. Other ops ask one kernel."""
    lanes = 2 if torch.ops.gpukern.cpu_isa() == "amx" else 1
    for name, call, times in calls(torch.device("cpu"), dtype):
        most = 3 if name.startswith("gemm ") else lanes if name == "paged_attn" else 1
        assert times <= asked(call) <= most, (name, asked(call))


def described(m, n, k, layout, dtype, **options):
    """The plan of a product for an sm_90 that need not exist, with uninitialised operands."""
    a, b = (
        torch.empty(shape if side == "N" else shape[::-1], dtype=dtype)
        for side, shape in zip(layout, ((m, k), (k, n)), strict=True)
    )
    a, b = (x if side == "N" else x.t() for side, x in zip(layout, (a, b), strict=True))
    return torch_gpukern.explain("gemm", a, b, arch="sm_90", **options)


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
def test_every_cuda_kernel_is_listed():
    """A whole build has 27 KB of names. The last kernel of the last op of csrc/core/ops.def is
    there."""
    assert torch.ops.gpukern.cuda_kernels.default().split(",")[-1] == "moe_unpermute_bwd_f64"


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_a_window_that_ends_nowhere_is_dealt_as_causal(head_dim):
    """A window as wide as the sequence hides no key: tiles are scheduled in pairs with equal work,
    as with a causal mask."""
    q = torch.empty(2, 4, 4096, head_dim, dtype=torch.bfloat16)

    def tasks(**rules):
        return torch_gpukern.explain("flash_attn", q, q, q, arch="sm_90", is_causal=True, **rules)[
            "tasks"
        ]

    assert tasks(window_left=4095) == tasks(window_left=1 << 40) == tasks()
    assert tasks() < tasks(window_left=100)


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
def test_a_choice_does_not_depend_on_the_calls_before():
    """A thread caches the choices of its last calls. Plans must not depend on the cache: with more
    calls than it holds, in another order, on a new thread, and for problems that differ only in
    layout, dtype, activation, misaligned rows or batch."""
    sizes = [
        (m, n, k) for m in (64, 200, 1024, 4096) for n in (48, 264, 2048) for k in (72, 640, 4096)
    ]
    problems = [
        (*s, layout, dtype, {})
        for s in sizes
        for layout in ("NN", "TT")
        for dtype in (torch.bfloat16, torch.float16)
    ]
    problems += [(*s, "NT", torch.bfloat16, {"activation": "gelu"}) for s in sizes]
    problems += [(*s, "NT", torch.float32, {"fp32_precision": "tf32"}) for s in sizes]
    problems += [(m + 1, n + 1, k, "NN", torch.bfloat16, {}) for m, n, k in sizes]

    def plans(order):
        found = {i: described(*problems[i][:5], **problems[i][5]) for i in order}
        return [found[i] for i in sorted(found)]

    forward = range(len(problems))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(plans, forward).result()
    assert first == plans(reversed(forward)) == plans(forward)
    for i in forward[::7]:  # each as the first call of a thread
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(plans, [i]).result() == [first[i]]


def test_every_op_with_a_plan_is_explained():
    """torch_gpukern.explain offers exactly the ops that the library explains. A call of each names
    an instance and its bytes."""
    known = {
        name.removeprefix("gpukern::explain_")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("gpukern::explain_") and not name.endswith(("_for", "_fp8", "_masked"))
    }
    assert known == set(torch_gpukern.EXPLAINED)
    x, codes, scale = torch.randn(4, 256), torch.zeros(4, 256, dtype=torch.int8), torch.ones(4, 1)
    calls = {
        "quantize": ((x, torch.int8, "row"), 4 * 256 * (4 + 1) + 4 * 4),
        "silu_mul_quantize": ((x, x, torch.int8, "row"), 4 * 256 * (8 + 1) + 4 * 4),
        "rms_norm_quantize": (
            (x, torch.ones(256), None, 1e-6, torch.int8, "row"),
            4 * 256 * (4 + 1) + 4 * 4 + 256 * 4,
        ),
        "dequantize": ((codes, scale, torch.float32), 4 * 256 * (4 + 1) + 4 * 4),
    }
    for op, (args, moved) in calls.items():
        found = torch_gpukern.explain(op, *args)
        assert found["instance"] != ""
        assert found["tasks"] > 0 and found["bytes"] == moved, (op, found)
    for op in (
        "rms_norm",
        "layer_norm",
        "softmax",
        "log_softmax",
        "swiglu",
        "rope",
        "dropout",
        "cross_entropy",
        "kl_div",
    ):
        found = torch_gpukern.explain(op, **OPS[op].make())
        assert found["instance"] and found["bytes"] > 0, (op, found)
