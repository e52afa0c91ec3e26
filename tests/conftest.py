# SPDX-License-Identifier: BSD-3-Clause
"""Shared by all tests: devices, shapes, seeds, the error rule, memory layouts and NaN around
tensors.

Results are compared with `torch_gpukern.reference` on float64 copies of the inputs, with exact sums
(exact.py). The tolerance is never a constant. It is the error that PyTorch's own op in the same
dtype makes on the same inputs (`assert_close_as`).
"""

import collections
import contextlib
import fcntl
import importlib
import itertools
import math
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

# Tests run in one process per core, so a thread that spins while it waits would take a core from
# another process. libgomp reads this variable when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests are about the default instances, whatever was tuned on this machine.
os.environ["GPUKERN_TUNED"] = "off"

import pytest
import python_server
import torch
import torch.nn.functional as F
from exact import Exact, Judge, product  # noqa: F401

import torch_gpukern
from torch_gpukern import reference as statements

ops = torch.ops.gpukern
# The definitions of all ops. In float64 their products and sums are rounded once, so that no result
# depends on PyTorch's order of additions.
reference = Judge(statements)

# Test the whole grid instead of a fixed-seed sample of it.
ALL = os.environ.get("GPUKERN_TEST_ALL") == "1"

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

# Lengths around every power of two that a tile may have, and 0 and 1.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
# Head dimensions of real models, and odd ones.
HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128, 192, 256, 512, 1, 7, 33, 65, 100, 511)


BUILD = Path(__file__).resolve().parent.parent / "build"


@contextlib.contextmanager
def build_alone():
    """Context with a lock on the build folder, since several processes of this suite may configure
    or build there."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --------------------------------------------------------------------------------------------------
# devices and the grid


def pytest_collection_modifyitems(config, items):
    if torch.version.cuda is None:
        why_no_gpu = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        why_no_gpu = f"torch {torch.__version__} finds no CUDA device"
    elif not ops.cuda_kernels():
        why_no_gpu = "the library is built without CUDA kernels"
    else:
        why_no_gpu = None
    for item in items:
        if why_no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=why_no_gpu))
        if not why_no_gpu and torch.cuda.device_count() < 2 and item.get_closest_marker("gpu2"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if not ALL and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with GPUKERN_TEST_ALL=1"))
    items.sort(key=lambda item: any(item.iter_markers("skip")))  # skipped tests come last


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Prints a line, because pytest-xdist is silent until every process has collected the tests."""
    _COLLECTING["since"] = time.monotonic()
    _say(
        config,
        f"{len(specs)} processes import PyTorch and collect the tests: about 20 s, a minute or "
        f"two from a cold disk",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    seconds = time.monotonic() - _COLLECTING["since"]
    _say(node.config, f"{node.gateway.id} has collected {len(ids):,} tests in {seconds:.0f} s")


_COLLECTING = {}


def _say(config, text):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line(text, flush=True)


def pytest_terminal_summary(terminalreporter):
    """Prints each reason for a skip once, with its number of tests, and the time of tests by
    area."""
    reasons = collections.Counter(
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} tests skipped: {reason.removeprefix('Skipped: ')}")
    if len(DEVICES) == 1:
        terminalreporter.write_line(
            f"tests that take a device ran on the CPU alone: torch {torch.__version__} is built "
            f"without CUDA"
        )
    reports = [
        x for found in terminalreporter.stats.values() for x in found if hasattr(x, "duration")
    ]
    areas = collections.Counter()
    for report in reports:
        areas[area_of(report.nodeid)] += report.duration
    terminalreporter.write_line(
        f"{areas.total():.0f} s in all tests, those of every worker summed: "
        + ", ".join(f"{area} {seconds:.0f} s" for area, seconds in areas.most_common())
    )


def area_of(nodeid):
    """The folder of tests/ that a test lies in: ops, nn, distributed, ..."""
    parts = Path(nodeid.split("::")[0]).parts[:-1]
    return "/".join(part for part in parts if part != "tests") or "tests"


def judge(name):
    """Imports a package of requirements-test-nodeps.txt to compare with. If it is missing, the
    tests are skipped with a reason; with GPUKERN_TEST_JUDGES=1, which .ci/run sets, they fail.
    """
    return (
        importlib.import_module(name)
        if os.environ.get("GPUKERN_TEST_JUDGES") == "1"
        else pytest.importorskip(name)
    )


# A torch without CUDA collects no CUDA tests; it would skip four thousand.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.version.cuda else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request):
    """The device that a test runs on. Every test of an op takes this fixture."""
    return request.param


@pytest.fixture(autouse=True)
def _torch_defaults():
    """Restores the thread count and torch's modes before each test, because they are process
    state."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def one_thread():
    """One thread, for the many tiny calls of gradcheck. The thread count is restored after the
    test."""
    torch.set_num_threads(1)


def _name(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "x".join(_name(v) for v in value)
    return str(value)


class Case:
    """One point of a grid. The axes are its attributes, and its id contains all of them."""

    def __init__(self, **axes):
        self.__dict__.update(axes)
        self.id = "-".join(_name(v) for v in axes.values())

    def __repr__(self):
        return self.id


def grid(n, **axes):
    """The product of the axes, or n points of it in which each value of an axis occurs equally
    often.

    The sample depends only on the axes' names and n, so a failing case can be run again by its id.
    """
    if ALL:
        points = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    else:
        rng = random.Random(zlib.crc32(f"{sorted(axes)} {n}".encode()))
        columns = {}
        for name, values in axes.items():
            column = (list(values) * (n // len(values) + 1))[: max(n, len(values))]
            rng.shuffle(column)
            columns[name] = column
        rows = max(len(c) for c in columns.values())
        points = [{name: c[i % len(c)] for name, c in columns.items()} for i in range(rows)]
    unique = {(case := Case(**p)).id: case for p in points}
    return [pytest.param(case, id=name) for name, case in unique.items()]


# --------------------------------------------------------------------------------------------------
# inputs


def generator(*key):
    """A generator whose seed follows from the arguments."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def randn(gen, *shape, dtype=torch.float32, device="cpu", std=1.0):
    """Normal values, drawn in float64 on the CPU, so that all devices and dtypes get the same
    values up to rounding."""
    return (torch.randn(shape, generator=gen, dtype=torch.float64) * std).to(dtype).to(device)


def integers(gen, *shape, low=-4, high=5, dtype=torch.float32, device="cpu"):
    """Small integers, whose sums of products are exact in every dtype, so that results can be
    compared bit for bit."""
    return torch.randint(low, high, shape, generator=gen).to(dtype).to(device)


def f64(x):
    """x with every floating-point tensor in it converted to float64; other values are unchanged."""
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: f64(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(f64(value) for value in x)
    return x


def on_cpu(x):
    """x with every tensor in it moved to the CPU, where yardsticks are computed."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {name: on_cpu(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(on_cpu(value) for value in x)
    return x


def served(dims, device):
    """Head dims that the device supports: on CUDA rounded up to multiples of 8."""
    return dims if device == "cpu" else tuple(-(-d // 8) * 8 for d in dims)


def as_dtype(x, dtype):
    """x with every floating-point tensor in it converted to dtype, as a new contiguous tensor
    without NaN around it."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(dtype).clone() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: as_dtype(value, dtype) for name, value in x.items()}
    return x


# --------------------------------------------------------------------------------------------------
# memory layouts: the same values with other strides, and NaN in all elements between and around
# them


def _poisoned(numel, like):
    return torch.full((numel,), float("nan"), dtype=like.dtype, device=like.device)


def strided(x, order=None, offset=3, pad=0, step=1):
    """A copy of x inside a buffer of NaN.

    order: the dimensions in memory, outermost first. offset: elements before the first one. pad:
    elements added to each row of the innermost dimension. step: the stride of that dimension.
    """
    order = tuple(range(x.dim())) if order is None else order
    stride, strides = step, [0] * x.dim()
    for position, dim in enumerate(reversed(order)):
        strides[dim] = stride
        stride *= max(x.shape[dim], 1)
        if position == 0:
            stride += pad
    buffer = _poisoned(offset + stride + offset, x)
    view = buffer.as_strided(x.shape, strides, offset)
    view.copy_(x)
    return view


def swap_last(x):
    """Stored with the last two dimensions swapped (a transposed matrix)."""
    order = list(range(x.dim()))
    order[-1], order[-2] = order[-2], order[-1]
    return strided(x, order)


def swap_middle(x):
    """[B, H, S, D] stored as [B, S, H, D]; other ranks keep their order."""
    return strided(x, (0, 2, 1, 3) if x.dim() == 4 else None)


def outer_last(x):
    """A copy in which the first dimension is stored next to the last one, outside it."""
    return strided(x, (*range(1, x.dim() - 1), 0, x.dim() - 1) if x.dim() > 2 else None)


LAYOUTS = {
    "dense": lambda x: x,
    "offset": lambda x: strided(x, offset=1),
    "padded": lambda x: strided(x, pad=5),
    "transposed": swap_last,
    "heads_inside": swap_middle,
    "outer_last": outer_last,
    "every_second": lambda x: strided(x, step=2),
}


def guarded(x, width=64):
    """(view, check): x's values inside a buffer with a band of NaN on both sides. check() fails if
    a byte of the bands has changed.
    """
    buffer = _poisoned(x.numel() + 2 * width, x)
    view = buffer[width : width + x.numel()].view(x.shape)
    view.copy_(x)
    bands = [buffer[:width], buffer[width + x.numel() :]]
    before = [band.clone().view(torch.uint8) for band in bands]

    def check():
        for band, old in zip(bands, before):
            assert torch.equal(band.view(torch.uint8), old), "the op wrote outside the tensor"

    return view, check


def far_apart(x, dim, stride=2**31 + 5):
    """x's values with more than 2**31 elements between neighbours along dim.

    Only address space is reserved. Memory is committed only for the pages that contain x's rows.
    """
    rest = [d for d in range(x.dim()) if d != dim]
    strides, inner = [0] * x.dim(), 1
    for d in reversed(rest):
        strides[d] = inner
        inner *= x.shape[d]
    strides[dim] = stride
    nbytes = ((x.shape[dim] - 1) * stride + inner) * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    buffer = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=x.dtype)
    view = buffer.as_strided(x.shape, strides)
    view.copy_(x)
    return view


def snapshot(*args, **kwargs):
    """Copies all tensors among the arguments. Returns a function that checks that they have not
    changed by a bit."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in tensors]

    def check():
        for t, old in zip(tensors, before):
            assert same_bits(t.detach(), old), "an argument changed"

    return check


def same_bits(x, y):
    """Whether two tensors have the same bits, NaN included."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.is_floating_point():
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        x, y = x.contiguous().view(width), y.contiguous().view(width)
    return torch.equal(x, y)


def assert_bits(x, y):
    """Asserts `same_bits`; on failure it prints how many elements differ and by how much."""
    if not same_bits(x, y):
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=0, equal_nan=True)
        raise AssertionError(
            f"{tuple(x.shape)} {x.dtype}, expected {tuple(y.shape)} {y.dtype}, or other NaN or "
            f"zeros"
        )


# --------------------------------------------------------------------------------------------------
# the error rule


def _rms(x):
    return x.square().mean().sqrt().item()


# A yardstick that is a function is called until it has given SAMPLE errors of single values, at
# most MOST_DRAWS times.
SAMPLE, MOST_DRAWS = 4096, 64


def draws_of(values):
    """How often a yardstick is called for a tensor of `values` finite values. This does not depend
    on the result that is tested.

    The largest of a few errors may be far below what the arithmetic makes, because all of them may
    round luckily. With SAMPLE errors this does not happen. So a tensor of that size needs only its
    own inputs, and a single value needs MOST_DRAWS other ones.
    """
    return min(MOST_DRAWS, max(1, -(-SAMPLE // values)))


def shuffled(gen, *tensors):
    """Similar inputs: the values of each tensor in another order, times a number around 1."""

    def one(x):
        order = torch.randperm(x.numel(), generator=gen).to(x.device)
        return x.flatten()[order].view(x.shape) * 2.0 ** (
            0.25 * torch.rand((), generator=gen).item() - 0.125
        )

    return tuple(map(one, tensors))


class Lazily:
    """The values of a generator. Each is computed when it is first asked for, and then kept."""

    def __init__(self, values):
        self._rest, self._known = iter(values), []

    def __iter__(self):
        for i in itertools.count():
            if i == len(self._known):
                try:
                    self._known.append(next(self._rest))
                except StopIteration:
                    return
            yield self._known[i]

    def __getitem__(self, i):
        return next(itertools.islice(self, i, None))


def assert_close_as(yardstick, got, ref, what="out", sources=None):
    """Asserts that `got` is as close to `ref` as PyTorch's own op: its maximum and RMS errors are
    at most twice PyTorch's, plus one rounding. The rounding is one unit in the last place of got's
    dtype at max|ref|.

    Args:
        yardstick: PyTorch's result in got's dtype; or an iterable of such results that differ only
            in the order of a sum, since one result with few elements may be exact by luck; or a
            function. The function returns such an iterable for 0. For 1, 2, .. it returns pairs of
            PyTorch's result and the reference on other, similar inputs, one draw per call. The
            bound is the worst of draws_of(finite values) draws. Each yardstick only raises the
            bound, so no more of them are asked for as soon as got is within it.
        sources: the number of independent errors, if values share roundings. (With few queries, all
            of dk depends on one or two scores.)

    If got is float64, the yardstick is PyTorch's float32 result, with its error scaled by the ratio
    of the two epsilons. PyTorch's own float64 product is not used, because its error is up to four
    times a kernel's on some CPUs. ref must then come from `reference` or `product`, whose sums are
    exact (exact.py). The error counts three times instead of twice, because the float64 kernels,
    which exist for gradcheck, block their sums less than PyTorch's float32 ones.
    """
    assert got.shape == ref.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert ref.dtype == torch.float64, "the reference is float64"
    got_dtype, eps = got.dtype, torch.finfo(got.dtype).eps
    # above 0, since much smaller values round to 0
    least = torch.finfo(got.dtype).smallest_normal * eps
    got, ref = got.detach().double().cpu(), ref.detach().cpu()
    finite = ref.isfinite()
    assert torch.equal(got[~finite].nan_to_num(nan=0.5), ref[~finite].nan_to_num(nan=0.5)), (
        f"{what}: infinities or NaN are not where the reference has them"
    )
    if not finite.any():
        return
    # a mask costs ten times as much as the difference behind it
    chosen = (lambda x: x) if finite.all() else (lambda x: x[finite])
    wanted = chosen(ref)
    error = (chosen(got) - wanted).abs()
    assert error.isfinite().all(), f"{what}: {int((~error.isfinite()).sum())} values are not finite"
    largest = wanted.abs().max().item()
    rounding = eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    mine = {"max": error.max().item(), "RMS": _rms(error)}
    worst = dict.fromkeys(mine, 0.0)
    nonzero = False

    def wrong():
        """How the first error that is beyond the bound compares with it, or None."""
        for name, own in worst.items():
            if mine[name] > (3 if got_dtype == torch.float64 else 2) * own + rounding:
                return (
                    f"{what}: {name} error {mine[name]:.3e}, PyTorch makes {own:.3e}, one rounding "
                    f"is {rounding:.3e}"
                )
        return None

    if wrong() is None:
        return
    for draw in range(
        draws_of(min(wanted.numel(), sources or wanted.numel())) if callable(yardstick) else 1
    ):
        found = yardstick(draw) if callable(yardstick) else yardstick
        for y in [found] if isinstance(found, (torch.Tensor, tuple)) else found:
            y, exact = y if isinstance(y, tuple) else (y, ref)
            assert y.shape == ref.shape, f"{what}: yardstick has shape {tuple(y.shape)}"
            unit = eps / torch.finfo(y.dtype).eps if got_dtype == torch.float64 else 1.0
            y, exact = chosen(y.detach().double().cpu()), chosen(exact.detach().cpu())
            assert y.isfinite().all(), f"{what}: the yardstick itself is not finite"
            if largest >= least and not y.any():
                continue  # its error would be as large as ref
            nonzero = True
            worst["max"] = max(worst["max"], (y - exact).abs().max().item() * unit)
            worst["RMS"] = max(worst["RMS"], _rms(y - exact) * unit)
            if wrong() is None:
                return
        assert nonzero, f"{what}: the yardstick itself is zero"
    raise AssertionError(wrong())


def yard_dtype(dtype):
    """The dtype of the yardstick: float32 for float64, as assert_close_as explains."""
    return torch.float32 if dtype == torch.float64 else dtype


# --------------------------------------------------------------------------------------------------
# gemm: PyTorch's own ops in the same dtype

TORCH_ACTIVATION = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def torch_gemm(
    a, b, bias=None, c=None, alpha=1.0, beta=1.0, activation="none", out_dtype=None, order=None
):
    """gemm by PyTorch's ops in the same dtype. order [K] permutes the sum over K."""
    if order is not None:
        a, b = a[..., order], b[..., order, :]
    dtype = out_dtype or a.dtype
    if (
        a.is_cuda
        and a.dtype in HALF
        and dtype == torch.float32
        and a.dim() == b.dim() == 2
        and a.numel()
        and b.numel()
    ):
        out = torch.mm(a, b, out_dtype=dtype)  # products on tensor cores, kept in float32
    else:
        out = torch.matmul(a.to(dtype), b.to(dtype))
    if alpha != 1.0:
        out = alpha * out
    if c is not None and beta != 0:
        out = out + beta * c.to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    return TORCH_ACTIVATION[activation](out)


def orders(gen, n, count=4):
    """Some permutations of a sum of n terms, the plain one first."""
    return [None] + [torch.randperm(n, generator=gen) for _ in range(count - 1)]


# --------------------------------------------------------------------------------------------------
# other processes


def processes():
    """A multiprocessing context whose processes are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_gpukern.distributed"])
    return context


def run_python(code, env=None, timeout=240, check=True, fresh=False):
    """Runs code in a new process and returns the finished process with its output. PyTorch is
    already imported, and gpukern is not (python_server.py).

    env: variables beside those of this process. A value of None removes one.
    fresh: use a new interpreter, for tests of how a process ends.
    """
    code = textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})}
    env = {name: value for name, value in env.items() if value is not None}
    cwd = os.path.dirname(os.path.abspath(__file__))
    if fresh:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    else:
        done = python_server.run(code, env, cwd, timeout)
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_script(script, *arguments, **how):
    """Runs `python script arguments` by `run_python`. script: a path, or the name of a module, which
    runs as by `python -m`."""
    by_path = isinstance(script, Path)
    return run_python(
        f"""
        import runpy, sys
        sys.argv = {[str(x) for x in (script, *arguments)]}
        sys.path[0] = {str(script.parent) if by_path else ""!r}
        runpy.run_{"path" if by_path else "module"}({str(script)!r}, run_name="__main__"{"" if by_path else ", alter_sys=True"})
        """,  # noqa: E501
        **how,
    )


__all__ = [name for name in dir() if not name.startswith("_")] + ["reference", "torch_gpukern"]
