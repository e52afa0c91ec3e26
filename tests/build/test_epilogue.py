# SPDX-License-Identifier: BSD-3-Clause
"""An epilogue of the user's: the installed CMake package makes an op of a header (docs/epilogue.md)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ALL, generator, randn
from test_packaging import built, must, needed, undefined  # noqa: F401, a fixture

import torch_gpukern  # noqa: F401, the CPU's sums

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "epilogue"
TIME_LIMIT = 900  # seconds; the example takes one minute of one core
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

# A project with every kind of argument, for the CPU alone.
PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(mine LANGUAGES C CXX)
find_package(gpukern REQUIRED)
gpukern_add_epilogue({target} NAME {name} HEADER {header} NAMESPACE {namespace})
"""


@pytest.fixture(scope="module")
def prefix(built, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("prefix")
    must("cmake", "--install", built, "--component", "c", "--prefix", path)
    return path


def configure(source, build, prefix, *options):
    return subprocess.run(
        [
            "cmake",
            "-S",
            source,
            "-B",
            build,
            f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            *options,
        ],
        capture_output=True,
        text=True,
    )


def make(source, build, prefix, *options):
    done = configure(source, build, prefix, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["cmake", "--build", build, "-j", "2"], capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def project(folder, **words):
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT.format(**words))
    return folder


@pytest.fixture(scope="module")
def every_argument(prefix, tmp_path_factory):
    """The op of every_argument.h, on the CPU."""
    folder = tmp_path_factory.mktemp("every")
    header = ROOT / "tests" / "build" / "every_argument.h"
    source = project(
        folder / "source",
        target="every",
        name="every_argument",
        header=header,
        namespace="of_a_user",
    )
    make(source, folder / "build", prefix)
    torch.ops.load_library(folder / "build" / "libevery.so")
    return torch.ops.of_a_user.every_argument


def arguments(m, n, k, dtype):
    g = generator(m * n + k)
    a, b = randn(g, m, k).to(dtype), randn(g, k, n).to(dtype)
    return a, b, randn(g, m), randn(g, n), 0.75, randn(g, n, m).T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 19, 65), (130, 70, 256)])
def test_every_kind_of_argument(every_argument, shape, dtype):
    a, b, scale, shift, most, gate = arguments(*shape, dtype)
    out = every_argument(a, b, scale, shift, most, gate)
    assert out.dtype == dtype and out.shape == shape[:2]
    a, b = a.double(), b.double()
    sums = scale.double()[:, None] * (a @ b)
    exact = (sums + shift.double()).clamp(max=most) * gate.double()
    # one rounding of the result, and those of float32 sums
    noise = (scale.double().abs()[:, None] * (a.abs() @ b.abs()) + 1) * gate.double().abs()
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + noise * 2.0**-19
    allowed += torch.finfo(dtype).smallest_normal
    assert ((out.double() - exact).abs() <= allowed).all()
    assert str(every_argument.default._schema) == (
        "of_a_user::every_argument(Tensor a, Tensor b, Tensor scale, Tensor shift, float most, "
        "Tensor gate) -> Tensor"
    )


def test_strides_and_empty_results(every_argument):
    a, b, scale, shift, most, gate = arguments(30, 20, 40, torch.bfloat16)
    out = every_argument(a, b, scale, shift, most, gate)
    wide = torch.stack([scale, scale], 1)[:, 0]
    assert torch.equal(
        every_argument(a.T.contiguous().T, b.T.contiguous().T, wide, shift, most, gate), out
    )
    assert every_argument(a[:0], b, scale[:0], shift, most, gate[:0]).shape == (0, 20)
    none = every_argument(a[:, :0], b[:0], scale, shift, most, gate)
    exact = shift.double().clamp(max=most) * gate.double()
    assert ((none.double() - exact).abs() <= 2.0**-8 * exact.abs()).all()


def test_nan_and_inf(every_argument):
    a, b, scale, shift, most, gate = arguments(30, 20, 40, torch.float16)
    a[3, 4], a[7] = float("nan"), float("inf")
    out = every_argument(a, b, scale, shift, float("inf"), gate)
    sums = scale.double()[:, None] * (a.double() @ b.double()) + shift.double()
    exact = sums * gate.double()
    assert torch.equal(out.isnan(), exact.isnan()) and out[3].isnan().all()
    assert torch.equal(out.isinf(), exact.isinf())


@pytest.mark.parametrize(
    "change, text",
    [
        ({"a": lambda x: x.float()}, "b has dtype bfloat16, a has float32; they must match"),
        ({"a": lambda x: x[None]}, "a must have 2 dimensions, got 3"),
        ({"b": lambda x: x[1:]}, "b has 39 rows, a has 40 columns; they must match"),
        ({"scale": lambda x: x.half()}, "scale must be float32, got float16; pass scale.float()"),
        ({"shift": lambda x: x[1:]}, "shift must have the shape [20], got [19]"),
        ({"gate": lambda x: x.T}, "gate must have the shape [30, 20], got [20, 30]"),
    ],
)
def test_refused_by_name(every_argument, change, text):
    names = ["a", "b", "scale", "shift", "most", "gate"]
    call = dict(zip(names, arguments(30, 20, 40, torch.bfloat16), strict=True))
    call |= {name: f(call[name]) for name, f in change.items()}
    with pytest.raises(ValueError) as error:
        every_argument(*call.values())
    assert str(error.value) == f"of_a_user::every_argument: {text}"


def test_float32_is_refused(every_argument):
    call = [x.float() if torch.is_tensor(x) else x for x in arguments(30, 20, 40, torch.bfloat16)]
    with pytest.raises(ValueError, match="a must be bfloat16 or float16, got float32$"):
        every_argument(*call)


@pytest.mark.parametrize(
    "words, text",
    [
        ({"header": "missing.h"}, "gpukern: there is no header "),
        ({"name": "squared-relu"}, "gpukern: 'squared-relu' is no name of an op or a namespace"),
        ({"header": ""}, "gpukern: expected gpukern_add_epilogue(target NAME op HEADER file"),
    ],
)
def test_a_project_that_cannot_work_says_why(prefix, tmp_path, words, text):
    given = {
        "target": "x",
        "name": "squared_relu",
        "header": EXAMPLE / "squared_relu.h",
        "namespace": "x",
    }
    source = project(tmp_path / "source", **given | words)
    done = configure(source, tmp_path / "build", prefix)
    assert done.returncode != 0 and text in done.stderr, done.stderr


def test_plans_find_what_they_ask_for(tmp_path):
    """The C files of a library with kernels, compiled without nvcc: what they ask of csrc/core is
    among them."""
    made = (ROOT / "cmake" / "GpukernEpilogue.cmake").read_text()
    words = [words.split() for words in re.findall(r"foreach\(name ([a-z][^)]*)\)", made)]
    names = {f"core/{name}" for name in words[0]} | set(words[1]) | {"api/gemm", "cpu/features"}
    objects = []
    for name in sorted(names):
        objects.append(tmp_path / f"{name.replace('/', '_')}.o")
        must(
            *("cc", "-std=gnu11", "-O1", "-c", f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include"),
            *("-DGPUKERN_HAS_CUDA=1", "-DGPUKERN_HAS_SM90A=1", "-DGPUKERN_EPILOGUE=squared_relu"),
            f'-DGPUKERN_EPILOGUE_HEADER="{EXAMPLE / "squared_relu.h"}"',
            *("-o", objects[-1], ROOT / "csrc" / f"{name}.c"),
        )

    def symbols(option):
        listed = subprocess.run(["nm", option, *objects], capture_output=True, text=True).stdout
        return set(re.findall(r" [A-Z] (gk_\w+)$", listed, re.M))

    missing = symbols("--undefined-only") - symbols("--defined-only")
    assert missing, "the kernels' launches are in .cu files"
    core = "".join(f.read_text() for f in (ROOT / "csrc" / "core").glob("*.c"))
    assert not [x for x in missing if re.search(rf"^[a-z].*\b{x}(\(|;| = )", core, re.M)]


@pytest.mark.skipif(not NVCC, reason="nvcc is not installed, so an epilogue has no CUDA kernels")
def test_the_example(prefix, tmp_path):
    """The example's library compiles, has the kernels of its op, and is right on the CPU, and on a GPU
    if there is one. Without a GPU nvcc checks the kernels' source and makes no machine code, which
    takes a third of the time; GPUKERN_TEST_ALL=1 makes it."""
    options = ["-DGPUKERN_EPILOGUE_ARCHS=90a", f"-DCMAKE_CUDA_COMPILER={NVCC}"]
    if not (ALL or torch.cuda.is_available()):
        options.append("-DCMAKE_CUDA_FLAGS=-fdevice-syntax-only")
    make(EXAMPLE, tmp_path, prefix, *options)
    library = tmp_path / "libmy_ops.so"
    kernels = library.read_bytes()
    for name in (b"GemmCooperative", b"GemmPingPong", b"gemm_sm80_kernel"):
        assert name in kernels
    assert not [x for x in needed(library) if "cuda" in x or "gpukern" in x]
    assert not [x for x in undefined(library) if x.startswith("gk_")]
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py", library],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "squared_relu on cpu: within one rounding of float64" in done.stdout
