# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/peers: how lines of code are counted, and the Triton kernels in Triton's
interpreter."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import judge, run_python

from torch_gpukern import results

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("peers")
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        del sys.modules[name]


def test_a_judge_that_is_missing(monkeypatch):
    """A test whose judge is missing is skipped, and fails in .ci/run."""
    monkeypatch.delenv("GPUKERN_TEST_JUDGES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_judge"):
        judge("no_such_judge")
    assert "\nexport GPUKERN_TEST_JUDGES=1\n" in (BENCHMARKS.parent / ".ci" / "run").read_text()
    monkeypatch.setenv("GPUKERN_TEST_JUDGES", "1")
    with pytest.raises(ModuleNotFoundError, match="no_such_judge"):
        judge("no_such_judge")


def test_lines_are_those_of_code(peers, tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""Said\nin two lines."""\n\n# why\nx = 1\n\n\ndef f():\n    """Says."""\n    return x\n'
    )
    assert peers.python_lines(path) == 3
    for op in ("gemm", "flash_attn"):
        lines = peers.lines_of(op)
        assert 20 < lines["Triton"] < 80 and lines["gpukern"] > 500


def test_kernels_are_counted_by_name(peers):
    lines = peers.kernel_lines(BENCHMARKS / "peers" / "triton_rows.py")
    assert set(lines) == {"add", "relu", "gelu", "bias_gelu_dropout", "softmax", "layer_norm"}
    assert all(lines.values())


@pytest.mark.figures
def test_the_page_of_languages_has_the_saved_rates(peers):
    page = (BENCHMARKS.parent / "learn" / "languages.md").read_text()
    assert all(peers.lines_of_languages().values())
    path = BENCHMARKS / "results" / "nvidia-h100-80gb-hbm3.csv"
    saved = results.load(path)["benches"]["languages"]["rows"]
    for size in ("4096", "8192"):
        (row,) = [r for r in saved if (r["group"], r["label"]) == ("a @ b", size)]
        rates = {"the library's": row["rate"]} | {
            name: peer["rate"] for name, peer in row["peers"].items()
        }
        assert f"{rates.pop('torch.matmul') / 1e3:.0f}" in page
        for name, rate in rates.items():
            cells = re.search(rf"^\| \[{name}\]\(.*$", page, re.M)[0].split("|")
            assert cells[3 + (size == "8192")].strip() == f"{rate / 1e3:.0f}", (name, size)
    (row,) = [r for r in saved if r["group"] == "a + b"]
    for name in (
        "CuTe DSL, an element a thread",
        "CuTe DSL, 16 bytes a thread",
        "Triton",
        "torch.add",
    ):
        assert f"{row['peers'][name]['rate']:.0f}" in page, name


# One configuration: the interpreter has nothing to measure the others by.
PROGRAM = """
import torch
from peers import triton_flash_attn, triton_gemm, triton_persistent_gemm

torch.manual_seed(0)
triton_persistent_gemm.TILE.update(BM=32, BN=32, BK=32)
triton_gemm.kernel.configs[:] = triton_gemm.kernel.configs[-1:]
triton_flash_attn.kernel.configs[:] = triton_flash_attn.kernel.configs[-1:]
for m, n, k in ((8, 8, 8), (33, 200, 70), (64, 128, 128)):
    a, b = torch.randn(m, k).half(), torch.randn(n, k).half().t()
    want = a.double() @ b.double()
    assert (triton_gemm.gemm(a, b) - want).abs().max() < 2e-3 * want.abs().max(), (m, n, k)
    assert (triton_persistent_gemm.gemm(a, b, programs=3) - want).abs().max() < 2e-3 * want.abs().max(), (m, n, k)
for seq_q, seq_k, causal in ((5, 5, False), (100, 70, False), (130, 130, True)):
    q, k, v = (torch.randn(1, 2, s, 16).half() for s in (seq_q, seq_k, seq_k))
    out = triton_flash_attn.flash_attn(q, k, v, causal)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=causal)
    assert (out - want).abs().max() < 2e-3, (seq_q, seq_k, causal)
print("right")
"""


ROWS_PROGRAM = """
import torch
from peers import triton_rows as T
torch.manual_seed(0)
F = torch.nn.functional
for dtype, tol in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
    for shape in ((1,), (3, 70), (5, 1025), (0, 4)):
        x, y = (2 + torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
        w, b = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
        d = x.double()
        pairs = {
            "add": (T.add(x, y), d + y.double()),
            "relu": (T.relu(y), F.relu(y.double())),
            "gelu": (T.gelu(y), F.gelu(y.double())),
            "softmax": (T.softmax(x), d.softmax(-1)),
            "layer_norm": (T.layer_norm(x, w, b), F.layer_norm(d, shape[-1:], w.double(), b.double())),
            "no dropout": (T.bias_gelu_dropout(x, b, 0.0, 1), F.gelu(d + b.double())),
        }
        for name, (got, want) in pairs.items():
            torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol, msg=lambda text: f"{name} {shape} {dtype}: {text}")
x, b = torch.randn(64, 100), torch.randn(100)
kept = F.gelu(x + b)
out = T.bias_gelu_dropout(x, b, 0.25, 7)
dropped = out == 0
assert 0.22 < dropped.float().mean() < 0.28
torch.testing.assert_close(out[~dropped], (kept / 0.75)[~dropped], rtol=1e-5, atol=1e-6)
assert torch.equal(out, T.bias_gelu_dropout(x, b, 0.25, 7)) and not torch.equal(out, T.bias_gelu_dropout(x, b, 0.25, 8))
assert T.relu(torch.tensor([float("nan"), -1.0])).isnan().tolist() == [True, False]
print("right")
"""  # noqa: E501


@pytest.mark.parametrize("program", [PROGRAM, ROWS_PROGRAM], ids=["products", "rows"])
def test_triton_is_right(program):
    """GPUKERN_TRITON: a folder that has Triton and is on no other path; .ci/run makes one."""
    path = [str(BENCHMARKS), *filter(None, sys.path)]
    if folder := os.environ.get("GPUKERN_TRITON"):
        path.insert(0, folder)
        assert (Path(folder) / "triton").is_dir(), folder
    elif importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    elif tuple(map(int, (version := importlib.metadata.version("triton")).split(".")[:2])) < (3, 7):
        pytest.skip(
            f"the interpreter of Triton {version} cannot loop up to an argument under numpy 2.4"
        )
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    done = run_python(program, env=env, check=False)
    assert done.stdout == "right\n", done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_on_the_gpu(peers):
    from peers import triton_flash_attn, triton_gemm, triton_persistent_gemm, triton_rows

    x = torch.randn(33, 1000, device="cuda")
    torch.testing.assert_close(triton_rows.softmax(x), x.softmax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        triton_rows.gelu(x), torch.nn.functional.gelu(x), rtol=1e-5, atol=1e-6
    )
    a, b = (
        torch.randn(1000, 776, device="cuda").bfloat16(),
        torch.randn(776, 328, device="cuda").bfloat16(),
    )
    want = a.double() @ b.double()
    for gemm in (triton_gemm.gemm, triton_persistent_gemm.gemm):
        assert (gemm(a, b) - want).abs().max() < 1e-2 * want.abs().max()
    q, k, v = (torch.randn(2, 3, 300, 64, device="cuda").bfloat16() for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    assert (triton_flash_attn.flash_attn(q, k, v, True) - want).abs().max() < 2e-2


# Less than a tile, many with ends in both directions, and a k of less than one step.
SIZES = [(8, 8, 8), (128, 256, 64), (264, 520, 200), (1000, 776, 328), (2048, 4096, 512)]


def assert_product(gemm, m, n, k):
    a, b = (
        torch.randn(m, k, device="cuda").bfloat16() + 0.5,
        torch.randn(k, n, device="cuda").bfloat16(),
    )
    out, want = gemm(a, b), a.double() @ b.double()
    bound = 2 * (torch.matmul(a, b) - want).abs().max() + 1e-3 * want.abs().max()
    assert out.shape == want.shape and (out - want).abs().max() <= bound, (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", SIZES)
def test_cutlass_on_the_gpu(peers, m, n, k):
    from peers import cutlass_gemm

    if why := cutlass_gemm.missing():
        pytest.skip(f"CUTLASS: {why}")
    assert_product(cutlass_gemm.gemm, m, n, k)


def need_cute():
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", SIZES)
def test_the_product_in_cute_on_the_gpu(peers, m, n, k):
    need_cute()
    from peers import cute_gemm

    assert_product(cute_gemm.gemm, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 8, 4097, 1 << 20])
@pytest.mark.parametrize("vectorised", [False, True])
def test_the_sum_in_cute_on_the_gpu(peers, dtype, length, vectorised):
    need_cute()
    from peers import cute_add

    a, b = (torch.randn(length, device="cuda").to(dtype) for _ in range(2))
    assert torch.equal(cute_add.add(a, b, vectorised=vectorised), a + b)


def test_what_cutlass_lacks_is_named(peers, monkeypatch, tmp_path):
    from peers import cutlass_gemm

    monkeypatch.setattr(cutlass_gemm, "LIBRARY", tmp_path / "libcutlass_gemm.so")
    monkeypatch.setattr(cutlass_gemm.shutil, "which", lambda name: None)
    monkeypatch.setattr(cutlass_gemm, "headers", lambda: None)
    with pytest.raises(OSError, match="is not built, and there is no nvcc and no nvidia-cutlass"):
        cutlass_gemm.library()
