# SPDX-License-Identifier: BSD-3-Clause
"""The ops in a process: threads, forks, repeatability, memory, instruction sets, chosen
instances."""

import json
import sys
import threading

import pytest
import torch
from attention_cases import Paged, modifiers
from conftest import ALL, FLOATS, generator, grid, ops, randn, run_python, same_bits, torch_gpukern
from registry import IN_PLACE, OPS, VARIANTS, Bound
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

ISAS = ("base", "avx2", "avx512", "avx512bf16", "amx")
MACHINE = tuple(torch.ops.gpukern.cpu_isas().split(","))


def everything(device="cpu", dtype=torch.float32, size=150):
    """One result of every kernel, forward and backward, on sizes that several threads share."""
    gen = generator("everything", dtype, size)
    results = []
    for m, n, k in ((size, size + 7, 90), (1, 700, 300), (5, 300, 257)):
        a, b = (
            randn(gen, m, k, dtype=dtype, device=device),
            randn(gen, k, n, dtype=dtype, device=device),
        )
        bias = randn(gen, n, dtype=dtype, device=device)
        a.requires_grad_(), b.requires_grad_(), bias.requires_grad_()
        out = ops.gemm(a, b, bias, activation="gelu")
        results += [out.detach(), *torch.autograd.grad(out.sum(), (a, b, bias))]
    for name in ("none", "causal_end", "all"):
        kwargs = modifiers(name, 2, 4, size, size + 30, gen, dtype, device)
        q = randn(gen, 2, 4, size, 64, dtype=dtype, device=device).requires_grad_()
        k, v = (
            randn(gen, 2, 2, size + 30, 64, dtype=dtype, device=device).requires_grad_()
            for _ in range(2)
        )
        out, lse = torch_gpukern.flash_attn(q, k, v, return_lse=True, **kwargs)
        results += [out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
    x = randn(gen, 3 * size, 4, 32, dtype=dtype, device=device).requires_grad_()
    cu = torch.tensor([0, 11, size, 3 * size], dtype=torch.int32, device=device)
    out = ops.flash_attn_varlen(x, x, x, cu, cu, 2 * size, 2 * size, is_causal=True)
    results += [out.detach(), *torch.autograd.grad(out.sum(), x)]
    paged = Paged(gen, [3000, 7, 500], [1, 1, 1], 8, 2, 64, 64, 16, dtype, device)
    results += ops.paged_attn_fwd(*paged.args())
    results += ops.attn_merge(
        *ops.paged_attn_fwd(*paged.args()), *ops.paged_attn_fwd(*paged.args(), window_left=9)
    )
    k, v = (
        randn(gen, 40, 2, 64, dtype=dtype, device=device),
        randn(gen, 40, 2, 64, dtype=dtype, device=device),
    )
    caches = [torch.zeros(10, 4, 2, 64, dtype=dtype, device=device) for _ in range(2)]
    ops.kv_cache_write(k, v, *caches, torch.randperm(40, generator=gen).to(device))
    return results + caches


# --------------------------------------------------------------------------------------------------
# repeatability


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_do_not_depend_on_the_thread_count(dtype):
    want = everything(dtype=dtype)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for i, (x, y) in enumerate(zip(everything(dtype=dtype), want)):
            assert same_bits(x, y), f"result {i} differs with {threads} threads"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_bits_repeat(dtype, device):
    want = everything(device, dtype)
    for _ in range(20 if ALL else 5):
        assert all(same_bits(x, y) for x, y in zip(everything(device, dtype), want))


def test_bits_do_not_depend_on_where_the_tensors_lie(device):
    """Bits do not depend on alignment; on CUDA, not on alignment beyond 16 bytes."""
    gen = generator("alignment")
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (
            randn(gen, 33, 70, dtype=dtype, device=device),
            randn(gen, 70, 45, dtype=dtype, device=device),
        )
        q = randn(gen, 1, 2, 70, 64, dtype=dtype, device=device)
        want = ops.gemm(a, b), ops.flash_attn(q, q, q)
        # on CUDA, the instance that loads 16 bytes at once serves only aligned rows
        step = 1 if device == "cpu" else 16 // dtype.itemsize
        for offset in range(step, 16 * step, step):
            moved = []
            for x in (a, b, q):
                buffer = torch.full((x.numel() + offset,), float("nan"), dtype=dtype, device=device)
                moved.append(buffer[offset:].view(x.shape).copy_(x))
            a2, b2, q2 = moved
            assert same_bits(ops.gemm(a2, b2), want[0]) and same_bits(
                ops.flash_attn(q2, q2, q2), want[1]
            )


# --------------------------------------------------------------------------------------------------
# threads and processes


def test_threads_calling_at_once():
    """Eight Python threads, each with its own data, forward and backward."""
    wants = [everything(size=60 + 10 * i) for i in range(8)]
    failures = []

    def work(i):
        try:
            for _ in range(3):
                for x, y in zip(everything(size=60 + 10 * i), wants[i]):
                    assert same_bits(x, y)
        except BaseException as error:
            failures.append((i, error))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not failures, failures


def test_a_call_leaves_autograd_as_it_was():
    """A call disables autograd only while it runs, even if it raises and its frame stays alive in
    the traceback."""
    key, excluded = (
        torch._C.DispatchKey.AutogradFunctionality,
        torch._C._dispatch_tls_is_dispatch_key_excluded,
    )
    a = torch.ones(2, 3)
    with torch.no_grad():
        torch_gpukern.gemm(a, a.mT)
        assert not excluded(key)
        with pytest.raises(ValueError) as raised:
            torch_gpukern.gemm(a, a)
        assert raised.value.__traceback__ is not None and not excluded(key)
    x = torch.ones(1, 2, 3, 4, requires_grad=True)
    with pytest.raises(ValueError) as raised:
        torch_gpukern.flash_attn(x, x[..., :2], x)
    assert raised.value.__traceback__ is not None and not excluded(key)
    guard = torch_gpukern._library.below_autograd()
    assert excluded(key), "what Op.below_autograd relies on"
    del guard
    assert not excluded(key)


class Seen(TorchFunctionMode):
    """A mode that records the names of the functions that it gets."""

    def __init__(self):
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


# every op with a result; "lse": also call its public function with return_lse
CALLS = [(name, variant) for name, variant in VARIANTS if name not in IN_PLACE | {"rope_kv_write"}]
CALLS += [(name, "lse") for name, op in OPS.items() if op.has_lse]


def bound(name, variant, device):
    more = {"return_lse": True} if variant == "lse" else {}
    return Bound(name, "" if more else variant, device, **more)


def seen_as(name, variant):
    return f"gpukern.{OPS[name].raw if variant == 'lse' else name}"


@pytest.mark.parametrize("name,variant", [c for c in CALLS if OPS[c[0]].gradients])
def test_a_public_function_hands_on_what_wants_a_gradient(name, variant, device):
    """A public function calls the Autograd kernel directly. It gives the bits and gradients of the
    op and of torch.func, and modes and autocast still see the op."""
    call = bound(name, variant, device)
    leaves, wanted = call.leaves, call.want_gradients()
    out = call(*leaves)
    grads = torch.autograd.grad(out.sum(), wanted)
    with Seen() as seen:
        other = call(*leaves)
    assert f"{seen_as(name, variant)}.default" in seen.names
    assert other.grad_fn is not None and same_bits(out, other)
    assert all(map(same_bits, grads, torch.autograd.grad(other.sum(), wanted)))
    if OPS[name].cast:
        with torch.autocast(device, torch.bfloat16):
            cast = call(*leaves)
        assert cast.dtype == torch.bfloat16
        assert all(
            g.dtype == torch.float32 for g in torch.autograd.grad(cast.float().sum(), wanted)
        )
    places = tuple(i for i, x in enumerate(leaves) if x.requires_grad)
    transformed = torch.func.grad(lambda *xs: call(*xs).sum(), argnums=places)(
        *(x.detach() for x in leaves)
    )
    assert all(map(same_bits, transformed, grads))
    with torch.no_grad():
        assert call(*leaves).grad_fn is None


class Dispatched(TorchDispatchMode):
    """A dispatch mode that records the names of the ops that it gets."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("wants", ("nothing", "no gradient", "a gradient"))
@pytest.mark.parametrize("name,variant", CALLS)
def test_who_looks_at_calls_sees_the_op(name, variant, wants, device):
    """A call without a wanted gradient skips the Autograd kernel. This must not be visible: modes,
    subclasses, autocast, fake and meta tensors and tracers see the op, also products inside an
    Autograd kernel."""
    if wants == "a gradient" and not OPS[name].gradients:
        pytest.skip("has no gradient")
    call, op = bound(name, variant, device), seen_as(name, variant)
    leaves = call.leaves
    if wants == "a gradient":
        call.want_gradients()
    with torch.set_grad_enabled(wants != "nothing"):
        want = call(*leaves)
        assert want.requires_grad == (wants == "a gradient")
        with Dispatched() as dispatched:
            assert same_bits(call(*leaves), want)
        with Seen() as seen:
            assert same_bits(call(*leaves), want)
        ours = [n for n in dispatched.names if "gpukern" in n]
        assert len(ours) == 1 and ours[0].removesuffix(".default") in (op, f"{op}_fwd")
        assert [n for n in seen.names if "gpukern" in n] == [f"{op}.default"]
        if wants == "nothing":
            pair = call(*(TwoTensor(x, x.clone()) for x in leaves))
            assert type(pair) is TwoTensor and same_bits(pair.a, want)
            assert f"{op.replace('.', '::')}(" in str(
                torch.jit.trace(lambda *xs: call(*xs), tuple(leaves)).graph
            )
        if OPS[name].cast:
            with torch.autocast(device, torch.bfloat16):
                assert call(*leaves).dtype == torch.bfloat16
        plain = [x.detach() for x in leaves]
        assert call(*(x.to("meta") for x in plain)).shape == want.shape
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert call(*map(fake.from_tensor, plain)).shape == want.shape
        assert "gpukern._" not in make_fx(call)(*plain).code


@pytest.mark.parametrize("name,variant", CALLS)
def test_transforms_see_the_op(name, variant, device):
    """Transforms see the op, also outer ones: an outer transform may differentiate what an inner
    one does not."""
    call = bound(name, variant, device)
    x, *rest = call.leaves
    batch = torch.vmap(call)(*(torch.stack((y, 2 * y)) for y in call.leaves))
    assert same_bits(batch[0], call(*call.leaves)) and same_bits(
        batch[1], call(*(2 * y for y in call.leaves))
    )

    def inner(w, y):  # its gradient by y is call(w) summed, itself a function of w
        return (call(w, *rest).sum() * y).sum()

    y = torch.ones((), device=device)
    if OPS[name].gradients:
        w = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(call(w, *rest).sum(), w)
        (got,) = torch.autograd.grad(torch.func.grad(inner, argnums=1)(w, y), w)
        assert same_bits(got, want)
        assert same_bits(
            torch.func.grad(lambda w: torch.func.grad(inner, argnums=1)(w, y))(x), want
        )
    elif call(*call.leaves).is_floating_point():  # integers have no gradient that could be lost
        with pytest.raises(NotImplementedError, match="it has no backward"):
            torch.func.grad(lambda w: torch.func.grad(inner, argnums=1)(w, y))(x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda w: torch.func.grad(inner, argnums=1)(w, y), (x,), (x,))


@pytest.mark.parametrize("grad", (False, True))
def test_types_that_a_schema_does_not_take(grad, device):
    """Errors name the op."""
    x = randn(generator("types"), 1, 2, 6, 8, device=device).requires_grad_(grad)
    a, nested = x[0, 0], torch.nested.nested_tensor([x[0, 0].detach()])
    calls = {
        "gemm": (
            lambda: torch_gpukern.gemm(a, 3),
            lambda: torch_gpukern.gemm(a, a.mT, alpha="x"),
            lambda: torch_gpukern.gemm(a, a.mT, activation=None),
            lambda: torch_gpukern.gemm(a.detach().to_sparse(), a.mT),
            lambda: torch_gpukern.gemm(nested, a.mT),
        ),
        "flash_attn": (
            lambda: torch_gpukern.flash_attn(x, x, x, is_causal="x"),
            lambda: torch_gpukern.flash_attn(x, x, x, diagonal=1.5),
            lambda: torch_gpukern.flash_attn(x, x, x, scale="x"),
            lambda: torch_gpukern.flash_attn(x, x, x, is_causal="x", return_lse=True),
        ),
        "paged_attn": (lambda: torch_gpukern.paged_attn(x[0], x, x, 1, 2),),
    }
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises((RuntimeError, ValueError), match=rf"gpukern::{name}\b") as raised:
                call()
            assert "gpukern::_" not in str(raised.value)


def test_errors_belong_to_their_thread():
    """The detail text of one thread's failure does not reach another's."""
    x = torch.ones(3, 2, 8)
    failures = []

    def work(n):
        caches = torch.zeros(n, 4, 2, 8), torch.zeros(n, 4, 2, 8)
        for _ in range(200):
            try:
                ops.kv_cache_write(x, x, *caches, torch.tensor([0, 1, 1000 + n]))
                failures.append("no error")
            except IndexError as error:
                if f"below {4 * n} " not in str(error) or f"= {1000 + n}" not in str(error):
                    failures.append(str(error))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not failures, failures[:3]


FORK = """
import io, os
import torch
import torch_gpukern
from test_runtime import everything
from conftest import same_bits

if {warm}:
    want = everything()
read, write = os.pipe()
child = os.fork()
if child == 0:
    torch.set_num_threads({threads})  # torch's own pool does not survive a fork; its DataLoader does the same
    results = everything()
    with os.fdopen(write, "wb") as pipe:
        torch.save(results, pipe)
    os._exit(0)
os.close(write)
with os.fdopen(read, "rb") as pipe:
    got = torch.load(io.BytesIO(pipe.read()))
assert os.waitpid(child, 0)[1] == 0
if not {warm}:
    want = everything()
assert len(got) == len(want) and all(same_bits(x, y) for x, y in zip(got, want))
print("same bits")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.parametrize("warm,threads", [(True, 1), (False, 2)], ids=("after use", "before use"))
def test_forked_child(warm, threads):
    assert (
        run_python(FORK.format(warm=warm, threads=threads), timeout=120).stdout.strip()
        == "same bits"
    )


def test_fresh_threads_and_a_thread_count_of_their_own():
    """A thread that asks for one thread gets the same bits."""
    want, got = everything(), []

    def work():
        torch.set_num_threads(1)
        got.extend(everything())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert all(same_bits(x, y) for x, y in zip(got, want))


# --------------------------------------------------------------------------------------------------
# memory

MEMORY = """
import gc, re, resource
import torch
import torch_gpukern
ops = torch.ops.gpukern
torch.set_num_threads(2)

def mib():
    # not ru_maxrss: a process inherits that from the one that started it
    with open("/proc/self/status") as f:
        return int(re.search(r"VmHWM:\\s+(\\d+)", f.read())[1]) / 1024

def now():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20

def rand(*shape, dtype=torch.float32):
    # filled in place, so that nothing but the tensor itself was ever allocated. A large tensor repeats
    # few values, because a normal value takes as long as a hundred products
    x = torch.empty(shape, dtype=dtype)
    rows = x.view(-1, shape[-1])
    rows[:64].normal_()
    done = 64
    while done < len(rows):
        rows[done : 2 * done] = rows[: min(done, len(rows) - done)]
        done *= 2
    return x

def warm(dtype):
    q = rand(1, 2, 130, 64, dtype=dtype).requires_grad_()
    ops.flash_attn(q, q, q, is_causal=True).sum().backward()
    ops.gemm(q, q.mT)

def measure(fn):
    gc.collect()
    before = mib()
    assert before - now() < 24, f"the peak before, {before} MiB, hides {before - now()} MiB"
    with open("/proc/self/statm") as f:
        mapped = int(f.read().split()[0]) * resource.getpagesize()
    # a kernel that asks for gigabytes gets an error, not the machine
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**30, resource.RLIM_INFINITY))
    result = fn()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return mib() - before
"""


def memory(code):
    """The numbers that `code` prints: the peak resident memory in MiB that a call added."""
    return [float(x) for x in run_python(MEMORY + code, timeout=600).stdout.split()]


@pytest.mark.parametrize("dtype,seq", (("float32", 32768), ("bfloat16", 65536)))
def test_long_sequence_runs_in_little_memory(dtype, seq):
    """head_dim 64, with 4 and 8 GB of scores, takes less than 200 MB beyond its tensors, out
    included."""
    (used,) = memory(f"""
dtype = torch.{dtype}
warm(dtype)
q, k, v = (rand(1, 1, {seq}, 64, dtype=dtype) for _ in range(3))
with torch.no_grad():
    print(measure(lambda: ops.flash_attn(q, k, v, is_causal=True)))
""")
    out = seq * 64 * (4 if dtype == "float32" else 2) / 2**20
    assert used < out + 200, f"{used:.0f} MiB"
    assert used < out + 48, f"{used:.0f} MiB: more than out, lse and tiles"


@pytest.mark.parametrize("seq,kwargs", [
    (10000, "softcap=5.0"), (6000, "alibi_slopes=torch.rand(2)"), (6000, "sinks=torch.rand(2)"),
    (6000, "window_left=500, window_right=20"),
    (6000, "kv_start=torch.tensor([9], dtype=torch.int32), kv_end=torch.tensor([5000], "
           "dtype=torch.int32)"),
    (10000, "is_causal=True, diagonal=77, softcap=2.0, alibi_slopes=torch.rand(1, 2), "
            "sinks=torch.rand(2), window_left=4000"),
])  # fmt: skip
def test_no_modifier_materialises_the_scores(seq, kwargs):
    """Forward and backward at S = 10000 and 6000, where one head's scores are 400 and 144 MB."""
    dtype = "bfloat16" if "softcap" in kwargs else "float32"
    forward, backward = memory(f"""
dtype = torch.{dtype}
warm(dtype)
q, k, v = (rand(1, 2, {seq}, 64, dtype=dtype) for _ in range(3))
kwargs = dict({kwargs})
out, lse = ops.flash_attn_fwd(q[:, :, :200], k, v, **kwargs)
ops.flash_attn_bwd(out, q[:, :, :200], k, v, out, lse, **kwargs)
del out, lse
kept = []
print(measure(lambda: kept.extend(ops.flash_attn_fwd(q, k, v, **kwargs))))
out, lse = kept
print(measure(lambda: ops.flash_attn_bwd(out, q, k, v, out, lse, **kwargs)))
""")
    tensor = 2 * seq * 64 * (2 if dtype == "bfloat16" else 4) / 2**20
    assert forward < tensor + 40 and backward < 8 * tensor + 60, (forward, backward)


@pytest.mark.parametrize("layout", ("NN", "NT"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_gemm_converts_and_copies_no_operand(dtype, layout):
    """Small and medium M, and so large an M that all tasks share the packed operand, with a matrix
    of 128 MiB or more."""
    used = memory(f"""
dtype = torch.{dtype}
warm(dtype)
b = rand(8192, 8192, dtype=dtype)
b = b.T if "{layout}" == "NT" else b
a = rand(400, 8192, dtype=dtype)
ops.gemm(a[:, :64], b[:64, :64])
print(*(measure(lambda: ops.gemm(a[:rows], b)) for rows in (4, 300, 400)))
""")
    assert max(used) < 48, used


@pytest.mark.parametrize(
    "m,n,k",
    (
        (400, 16, 2**27),
        (2**22, 64, 512),
        (2**14, 2**14, 64),
        (64, 2**20, 2**20),
        (337, 2**20, 4096),
    ),
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gemm_workspace_is_bounded(dtype, m, n, k):
    """For every shape, the workspace is at most 8 MiB of b that all tasks share, and 8 MiB per
    worker."""
    row = json.loads(
        ops.explain_gemm(
            torch.ones((), dtype=dtype).expand(m, k), torch.ones((), dtype=dtype).expand(k, n)
        )
    )
    assert 0 < row["workspace_bytes"] <= (1 + torch.get_num_threads()) * 2**23, row


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_paged_attn_gathers_no_pages(dtype):
    """256 MiB of cache, read in place, in both layouts and with a k_scale."""
    used = memory(f"""
dtype = torch.{dtype}
warm(dtype)
pages = 256 * 2**20 // 2 // (16 * 4 * 128 * dtype.itemsize)
k, v = (rand(pages, 16, 4, 128, dtype=dtype) for _ in range(2))
table = torch.randperm(pages, dtype=torch.int32).view(4, -1)
lens = torch.full((4,), table.shape[1] * 16, dtype=torch.int32)
q = rand(4, 16, 128, dtype=dtype)
ops.paged_attn(q, k, v, table, lens // 16)
scale = torch.rand(4)
print(measure(lambda: ops.paged_attn(q, k, v, table, lens)))
print(measure(lambda: ops.paged_attn(q, k, v, table, lens, k_scale=scale, v_scale=scale, softcap=3.0)))
heads_first = [x.view(pages, 4, 16, 128).transpose(1, 2) for x in (k, v)]
print(measure(lambda: ops.paged_attn(q, *heads_first, table, lens)))
""")
    assert max(used) < 24, used


def test_strided_inputs_are_not_copied():
    """[B, S, H, D] storage, GQA and slices of a fused projection are read without a copy."""
    used = memory("""
warm(torch.float32)
qkv = rand(1, 8192, 16, 128)
q, k, v = qkv.split((8, 4, 4), 2)
q, k, v = (t.transpose(1, 2) for t in (q, k, v))
ops.flash_attn(q[:, :, :300], k[:, :, :300], v[:, :, :300])
print(measure(lambda: ops.flash_attn(q, k, v, window_left=200, is_causal=True)))
""")
    assert used[0] < 32 + 24, used


def test_inference_stores_no_preact():
    """gemm without gradients allocates only its result."""
    (used,) = memory("""
warm(torch.float32)
a, b = rand(8192, 64), rand(64, 4096)
ops.gemm(a[:99], b, activation="gelu")
with torch.no_grad():
    print(measure(lambda: ops.gemm(a, b, activation="gelu")))
""")
    assert 120 < used < 128 + 32, used


def test_no_leak():
    """A thousand calls of everything end with the memory they began with."""
    grown = memory("""
def calls(n):
    x = rand(2, 2, 40, 64).requires_grad_()
    caches = [torch.zeros(10, 4, 2, 64) for _ in range(2)]
    table, lens = torch.zeros(40, 1, dtype=torch.int32), torch.full((40,), 4, dtype=torch.int32)
    for _ in range(n):
        out = ops.flash_attn(ops.gemm(x, x.mT, activation="silu") @ x, x, x, sinks=torch.ones(2))
        out.sum().backward()
        rows = x.detach()[0].transpose(0, 1)
        ops.kv_cache_write(rows, rows, *caches, torch.arange(40))
        ops.paged_attn(rows, *caches, table, lens, alibi_slopes=torch.ones(2))
        try:
            ops.gemm(x, x.mT, activation="unknown" * 30)
        except ValueError:
            pass
calls(200)
before = now()
calls(800)
print(now() - before)
""")
    assert grown[0] < 4, grown


# --------------------------------------------------------------------------------------------------
# instruction sets

EACH_ISA = """
import torch
import torch_gpukern
from attention_cases import Paged, modifiers, reordered
from conftest import assert_close_as, f64, generator, ops, randn, reference, torch_gemm
import json

assert ops.cpu_isa() == "{isa}", ops.cpu_isa()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    gen = generator("isa", dtype)
    for m, n, k in ((70, 65, 129), (1, 300, 257), (5, 33, 64), (129, 17, 40)):
        a, b, bias = randn(gen, m, k, dtype=dtype), randn(gen, k, n, dtype=dtype), randn(gen, n, dtype=dtype)
        for x, y in ((a, b), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
            ref = reference.gemm(f64(x), f64(y), f64(bias), activation="gelu")
            assert_close_as(torch_gemm(x, y, bias, activation="gelu"), ops.gemm(x, y, bias, activation="gelu"), ref)
        row = json.loads(ops.explain_gemm(a, b))
        assert row["isa"] in {allowed}, row
    for name in ("none", "causal_end", "all"):
        for d, dv in ((64, 64), (80, 33), (128, 128)):
            q, k, v = randn(gen, 2, 4, 70, d, dtype=dtype), randn(gen, 2, 2, 131, d, dtype=dtype), randn(gen, 2, 2, 131, dv, dtype=dtype)
            kwargs = modifiers(name, 2, 4, 70, 131, gen, dtype)
            results = []
            grad = randn(generator("grad"), 2, 4, 70, dv, dtype=dtype)
            for run, to, kw in ((torch_gpukern.flash_attn, dtype, kwargs), (reference.flash_attn, torch.float64, f64(kwargs))):
                leaves = [t.detach().to(to).clone().requires_grad_() for t in (q, k, v)]
                out, lse = run(*leaves, **kw, return_lse=True)
                out.backward(grad.to(to))
                results.append([out, lse, *(t.grad for t in leaves)])
            yards = reordered(q, k, v, kwargs, grad)
            for i, (what, got, ref) in enumerate(zip(("out", "lse", "dq", "dk", "dv"), *results)):
                assert_close_as((y[i] for y in yards), got, ref, f"{{dtype}} {{name}} {{what}}")
    paged = Paged(gen, [700, 33, 1], [1, 3, 1], 8, 2, 64, 48, 16, dtype)
    got = ops.paged_attn_fwd(*paged.args(), cu_seqlens_q=paged.cu_seqlens_q, max_seqlen_q=3)
    run = lambda q, k, v, **kw: reference.flash_attn(q, k, v, **kw, return_lse=True)
    ref, yard = paged.dense(torch.float64, run), paged.dense(dtype, run)
    for what, x, y, z in zip(("out", "lse"), got, ref, yard):
        assert_close_as(z, x, y, f"{{dtype}} paged {{what}}")
    # an odd number of rows: what shares a cell or a tile with the last one spoils nothing, whatever an infinite score makes there
    q, k, v = (randn(gen, 1, 1, s, 72, dtype=dtype) for s in (17, 33, 33))
    k[..., 3, 5] = float("inf")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torch_gpukern.flash_attn(*leaves, softcap=5.0)
    dk, dv = torch.autograd.grad(out, leaves[1:], torch.ones_like(out))
    assert out.isfinite().all() and dk.isfinite().all() and dv.isfinite().all(), dtype
print("ok")
"""  # noqa: E501


@pytest.mark.parametrize("isa", (*ISAS, "amx_emulated"))
def test_every_isa(isa):
    """GPUKERN_CPU runs all ops on one instruction set; a set that the machine lacks is an error.
    AMX's
    emulation is not listed: it is available if avx512bf16 is."""
    if isa not in MACHINE and not (isa == "amx_emulated" and "avx512bf16" in MACHINE):
        done = run_python("import torch, torch_gpukern; torch.ops.gpukern.gemm(torch.ones(2, 2), "
                          "torch.ones(2, 2))",
                          {"GPUKERN_CPU": isa}, check=False)  # fmt: skip
        assert done.returncode == 1 and isa in done.stderr and "GPUKERN_CPU" in done.stderr
        return
    allowed = ("avx512", isa) if isa.startswith("amx") else ISAS[: ISAS.index(isa) + 1][-2:]
    done = run_python(EACH_ISA.format(isa=isa, allowed=allowed), {"GPUKERN_CPU": isa})
    assert done.stdout.strip() == "ok"


def test_isas_of_this_machine():
    """The list is in order, the last is the default unless a reason is given, and it agrees with
    what the kernel says of the processor."""
    assert MACHINE == tuple(isa for isa in ISAS if isa in MACHINE) and MACHINE[0] == "base"
    show = "import torch, torch_gpukern; print(ops := torch.ops.gpukern, ops.cpu_isa(), ops.cpu_isa_reason(), sep='|')"
    _, default, reason = run_python(show, {"GPUKERN_CPU": ""}).stdout.strip().split("|")
    assert default in MACHINE and (default == MACHINE[-1]) == (reason == "")
    assert not reason or (MACHINE[-1] in reason and default in ("avx512", "avx512bf16"))
    assert run_python(show, {"GPUKERN_CPU": MACHINE[-1]}).stdout.strip().split("|")[1:] == [
        MACHINE[-1],
        "",
    ]
    try:
        with open("/proc/cpuinfo") as f:
            flags = next((line.split() for line in f if line.startswith("flags")), None)
    except OSError:
        flags = None
    if flags:
        assert ("avx2" in MACHINE) == ({"avx2", "fma"} <= set(flags))
        assert ("avx512" in MACHINE) == (
            {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags)
        )
        assert ("avx512bf16" in MACHINE) == ("avx512_bf16" in flags and "avx512" in MACHINE)
        # a system may refuse what the processor has
        assert "amx" not in MACHINE or {"amx_tile", "amx_bf16"} <= set(flags)


@pytest.mark.parametrize("name", ("sse9", "AVX2 ", "avx512,avx2", "neon"))
def test_an_unknown_isa_is_an_error(name):
    """It names the variable, what it holds and what the machine has."""
    done = run_python("import torch, torch_gpukern; torch.ops.gpukern.gemm(torch.ones(2, 2), "
                      "torch.ones(2, 2))",
                      {"GPUKERN_CPU": name}, check=False)  # fmt: skip
    assert done.returncode == 1, f"exit {done.returncode}: {done.stdout}"
    last = done.stderr.strip().splitlines()[-1]
    assert "GPUKERN_CPU" in last and name in last and all(isa in last for isa in MACHINE), last


# --------------------------------------------------------------------------------------------------
# the rows that are chosen

MICRO = (torch.float32, torch.bfloat16, torch.float16)


def check_row(row, dtype, few=False):
    """Checks that an instance is for this dtype and an instruction set of this machine. few: M is
    so small that AMX leaves the call to avx512, as it does for other dtypes than bfloat16."""
    assert {"instance", "isa", "bytes", "flops", "tile"} <= set(row), row
    assert "ref" not in row["instance"] and row["isa"] in MACHINE, row
    short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert short in row["instance"].split("_"), row
    assert row["isa"] in row["instance"].split("_"), row
    usual = ops.cpu_isa()
    best = (
        "avx512"
        if usual in ("avx512bf16", "amx") and dtype != torch.bfloat16 or usual == "amx" and few
        else usual
    )
    assert row["isa"] == best, f"{row['instance']} though the machine's default is {best}"
    assert any(n > 0 for n in row["tile"]) and row["bytes"] > 0


@pytest.mark.parametrize(
    "case",
    grid(
        60,
        dtype=MICRO,
        size=(
            (1, 1, 1),
            (1, 4096, 4096),
            (4, 1025, 4097),
            (64, 64, 64),
            (257, 129, 1023),
            (2, 3, 0),
        ),
        layout=("NN", "NT", "TN", "strided"),
        activation=("none", "gelu"),
        out=("same", "float32"),
        batch=((), (3,)),
    ),
)
def test_gemm_rows(case):
    m, n, k = case.size
    a, b = torch.zeros(*case.batch, m, k, dtype=case.dtype), torch.zeros(k, n, dtype=case.dtype)
    if case.layout == "strided":
        a, b = (
            torch.zeros(*case.batch, m, 2 * k, dtype=case.dtype)[..., ::2],
            torch.zeros(k, 3 * n, dtype=case.dtype)[:, ::3],
        )
    else:
        a = a.mT.contiguous().mT if case.layout[0] == "T" else a
        b = b.mT.contiguous().mT if case.layout[1] == "T" else b
    out_dtype = torch.float32 if case.out == "float32" else case.dtype
    bias = torch.zeros(n, dtype=case.dtype)
    row = json.loads(ops.explain_gemm(a, b, bias, activation=case.activation, out_dtype=out_dtype))
    check_row(row, case.dtype, few=m <= 8 and "skinny" in row["instance"])
    products = m * n * k * (case.batch or (1,))[0]
    assert 2 * products <= row["flops"] <= 2 * products + 64 * m * n * (case.batch or (1,))[0] + 64
    least = (a.numel() + b.numel()) * case.dtype.itemsize + m * n * out_dtype.itemsize * (
        case.batch or (1,)
    )[0]
    assert 0.99 * least <= row["bytes"] <= 1.5 * least + 8 * n


MODS = (
    "none",
    "causal",
    "causal_end",
    "window",
    "softcap",
    "alibi",
    "alibi_batch",
    "sinks",
    "kv_bounds",
    "all",
)


@pytest.mark.parametrize(
    "case",
    grid(
        60,
        dtype=MICRO,
        mods=MODS,
        dims=((64, 64), (128, 128), (7, 9), (511, 80), (1, 512), (192, 128)),
        heads=((1, 1), (8, 2), (6, 1)),
        lengths=((1, 1), (1, 5000), (300, 300), (4096, 1)),
    ),
)
def test_attention_rows(case):
    """Forward and backward, alone and with every modifier, contiguous in the last dimension or
    not."""
    gen = generator("rows", case.id)
    (hq, hkv), (sq, sk), (d, dv) = case.heads, case.lengths, case.dims
    q = torch.zeros(2, hq, sq, d, dtype=case.dtype)
    k, v = (
        torch.zeros(2, hkv, sk, d, dtype=case.dtype),
        torch.zeros(2, hkv, sk, dv, dtype=case.dtype),
    )
    kwargs = modifiers(case.mods, 2, hq, sq, sk, gen, case.dtype)
    row = json.loads(ops.explain_flash_attn(q, k, v, **kwargs))
    check_row(row, case.dtype)
    assert torch_gpukern.explain("flash_attn", q, k, v, **kwargs) == row
    full = 2 * 2 * hq * sq * sk * (d + dv)
    assert row["flops"] <= full * 1.01 and (
        case.mods not in ("none", "softcap", "sinks") or row["flops"] >= full * 0.99
    )
    out, lse = torch.zeros(2, hq, sq, dv, dtype=case.dtype), torch.zeros(2, hq, sq)
    back = json.loads(ops.explain_flash_attn_bwd(out, q, k, v, out, lse, **kwargs))
    check_row(back, case.dtype)
    assert back["flops"] * (d + dv) == pytest.approx(row["flops"] * (3 * d + 2 * dv))
    wide = torch.zeros(2, hq, sq, 2 * d, dtype=case.dtype)[..., ::2]
    check_row(json.loads(ops.explain_flash_attn(wide, k, v, **kwargs)), case.dtype)


@pytest.mark.parametrize("dtype", MICRO, ids=str)
@pytest.mark.parametrize("mods", ("none", "window", "softcap", "alibi_batch", "sinks"))
def test_packed_and_paged_rows(dtype, mods):
    gen = generator("packed rows")
    kwargs = {
        n: v
        for n, v in modifiers(mods, 2, 4, 9, 9, gen, dtype).items()
        if n not in ("diagonal", "kv_start", "kv_end", "q_start")
    }
    x = torch.zeros(20, 4, 64, dtype=dtype)
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    check_row(json.loads(ops.explain_flash_attn_varlen(x, x, x, cu, cu, 13, 13, **kwargs)), dtype)
    kwargs.pop("window_right", None)
    cache = torch.zeros(30, 16, 2, 64, dtype=dtype)
    table = torch.arange(30, dtype=torch.int32).view(2, 15)
    lens = torch.tensor([240, 9], dtype=torch.int32)
    for q in (torch.zeros(2, 4, 64, dtype=dtype), torch.zeros(8, 4, 64, dtype=dtype)):
        few = len(q) == len(lens)  # a token of two heads a group; four tokens are eight lanes
        for x in (cache, cache.transpose(1, 2).contiguous().transpose(1, 2)):
            check_row(
                json.loads(ops.explain_paged_attn(q, x, cache, table, lens, **kwargs)), dtype, few
            )


def test_causal_counts_half_the_work():
    """Keys that no query sees do not count as work."""
    q = torch.zeros(1, 1, 4096, 64)
    full = json.loads(ops.explain_flash_attn(q, q, q))["flops"]
    causal = json.loads(ops.explain_flash_attn(q, q, q, is_causal=True))["flops"]
    window = json.loads(ops.explain_flash_attn(q, q, q, is_causal=True, window_left=63))["flops"]
    assert full == 4 * 4096 * 4096 * 64
    assert causal == pytest.approx(full / 2, rel=0.01) and window == pytest.approx(
        full / 64, rel=0.02
    )


def test_float64_is_the_reference_row():
    a = torch.zeros(4, 4, dtype=torch.float64)
    assert "ref" in json.loads(ops.explain_gemm(a, a))["instance"]


def test_a_small_call_asks_nothing_of_the_machine():
    """The host time of an 8 x 8 product: a call that asks the processor what it has takes 100 us
    under a hypervisor."""
    code = """
import time, torch, torch_gpukern
torch.set_num_threads(1)
x = torch.rand(8, 8)
def least(call):
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    return min(times)
print(least(lambda: torch_gpukern.gemm(x, x)), least(lambda: torch.mul(x, x)))
"""
    ours, theirs = map(float, run_python(code).stdout.split())
    assert ours < theirs + 30, f"{ours:.1f} us, torch.mul {theirs:.1f} us"


def test_version():
    assert torch_gpukern.__version__ == ops.version()
    assert len(ops.version().split(".")) == 3 and ops.cpu_isa() in MACHINE


def tiny_calls():
    """Every multi-threaded CPU kernel, on values whose products are subnormal."""
    gen = generator("subnormal")

    def r(*shape, dtype=torch.float32, std=1e-20):
        return randn(gen, *shape, dtype=dtype, std=std)

    a, b = r(400, 64), r(64, 400)
    wide_a, wide_b = (
        r(100, 16, dtype=torch.float64, std=1e-155),
        r(16, 100, dtype=torch.float64, std=1e-155),
    )
    half = r(64, 400, dtype=torch.bfloat16), r(3, 64, dtype=torch.bfloat16)
    q, k, v = (r(2, 4, 150, 32, std=s) for s in (1.0, 1.0, 1e-38))
    out, lse = ops.flash_attn_fwd(q, k, v)
    grad = r(2, 4, 150, 32)
    cache = r(40, 16, 2, 32), r(40, 16, 2, 32, std=1e-38)
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    lens = torch.tensor([160, 90, 3, 130], dtype=torch.int32)
    return {
        "gemm": lambda: ops.gemm(a, b),
        "gemm of small M": lambda: ops.gemm(half[1], half[0], out_dtype=torch.float32),
        "gemm of float64": lambda: ops.gemm(wide_a, wide_b),
        "gemm_act_bwd": lambda: ops.gemm_act_bwd(a, torch.full_like(a, 1e-20) - 90, "silu"),
        "flash_attn": lambda: ops.flash_attn_fwd(q, k, v),
        "flash_attn_bwd": lambda: ops.flash_attn_bwd(grad, q, k, v, out, lse),
        "paged_attn": lambda: ops.paged_attn_fwd(torch.ones(4, 4, 32), *cache, table, lens),
        "attn_merge": lambda: ops.attn_merge(out, lse, out * 0.5, lse - 3),
    }


@pytest.mark.parametrize("flush", (True, False))
def test_bits_do_not_depend_on_the_thread_whatever_the_mode(flush):
    """Workers use the caller's flush-to-zero mode, so a pool created in the other mode computes the
    same bits."""
    code = f"""
import torch
from test_runtime import tiny_calls
torch.set_num_threads(4)
if not torch.set_flush_denormal(not {flush}):
    raise SystemExit
calls = tiny_calls()
for call in calls.values():
    call()
torch.randn(1 << 20).exp().sum()  # the pool is there, and its threads have this mode
torch.set_flush_denormal({flush})
def tensors(x):
    return [x] if isinstance(x, torch.Tensor) else [t for t in x if t is not None]
for name, call in calls.items():
    torch.set_num_threads(1)
    want = tensors(call())
    torch.set_num_threads(4)
    for _ in range(12):
        for got, expected in zip(tensors(call()), want):
            assert torch.equal(got, expected), name
"""
    run_python(code)


def test_a_worker_keeps_its_own_mode():
    """The flush-to-zero mode of a pool's threads is restored after our call."""
    code = """
import torch, torch_gpukern
torch.set_num_threads(4)
x = torch.full((1 << 22,), 1e-20)
y = x * x  # threads without flush-to-zero
assert (y != 0).all()
if torch.set_flush_denormal(True):
    a = torch.full((400, 64), 1e-20)
    assert not torch.ops.gpukern.gemm(a, a.mT).any()
    torch.set_flush_denormal(False)
    assert (x * x != 0).all()
"""
    run_python(code)
