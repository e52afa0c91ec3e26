# SPDX-License-Identifier: BSD-3-Clause
"""The demo: what it says first, what of the build it asks for, and whom it compares with."""

import csv
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    yield importlib.import_module("train")
    for name in ("train", "curves", "data", "generate", "model"):
        sys.modules.pop(name, None)


def test_the_fastest_built_ins_are_the_peer(train, monkeypatch, capsys):
    """The second call counts, and one that fails is left out by name."""
    monkeypatch.setattr(train, "synchronize", lambda model: None)
    now, slow = [0.0], iter((0.0, 0.05))
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds):
        now[0] += seconds

    def broken():
        raise RuntimeError("No available kernel\nmore")

    ways = {"bfloat16": lambda: takes(next(slow)), "float32": lambda: takes(0.005), "cuDNN": broken}
    best, times = train.fastest(ways, None)
    took = dict(re.findall(r"(\w+) (\d+) ms", times))
    assert best == "float32" and took == {"bfloat16": "50", "float32": "5"} and "cuDNN" not in times
    assert capsys.readouterr().out == "built-ins in cuDNN are left out: No available kernel\n"


def test_the_built_ins_are_measured_in_each_dtype_on_the_cpu(train):
    assert {dtype for dtype, _ in train.BUILT_INS["cpu"].values()} == {torch.bfloat16, torch.float32}
    assert any(backend is not None for _, backend in train.BUILT_INS["cuda"].values())


def test_muon_of_float32_built_ins(train):
    """Products in float32, results in the dtype that Muon keeps."""
    a, b, c = (torch.randn(8, 8).bfloat16() for _ in range(3))
    with train.ProductsOnGemm(train.float32_product):
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
        got = torch.addmm(c, a, b, beta=0.5, alpha=2)
    want = 2 * (a.float() @ b.float()) + 0.5 * c.float()
    assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())


def test_loss_curves_alone(train, monkeypatch, capsys, tmp_path):
    """--compare-only compiles, generates and times nothing; built-ins that fail are left out by name; all steps are made."""
    text = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()), dtype=torch.uint8)
    monkeypatch.setattr(train, "load_corpus", lambda: train.Corpus(text, text, [], 1.0))
    config = train.Config(context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32)
    monkeypatch.setitem(train.CONFIG, "cpu", config)
    ways = {**train.BUILT_INS["cpu"], "cuDNN": (torch.bfloat16, train.SDPBackend.CUDNN_ATTENTION)}
    monkeypatch.setitem(train.BUILT_INS, "cpu", ways)
    for name in ("compiled_loss", "compare_generation", "train"):
        monkeypatch.delattr(train, name)
    arguments = ["train.py", "--device", "cpu", "--compare-only", "--compare-steps", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    out = capsys.readouterr().out
    assert "built-ins, cuDNN: left out: " in out and "step 5 of 5" in out
    with (tmp_path / "curves.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert list(steps[0]) == ["step", "gpukern", "built-ins, bfloat16", "built-ins, float32"] and len(steps) == 5
    losses = [[float(row[name]) for row in steps] for name in list(steps[0])[1:]]
    assert losses[0][0] == pytest.approx(8, abs=0.01) and losses[0][-1] < 7.9  # it learns
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, abs=0.02)
    assert (tmp_path / "curves.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_steps_that_were_asked_for_are_made(train, monkeypatch, tmp_path):
    """The clock bounds the default alone."""
    bounds = []
    monkeypatch.setattr(train, "load_corpus", lambda: train.Corpus(torch.zeros(9), torch.zeros(9), [], 1.0))
    monkeypatch.setattr(train, "fastest_of_ours", lambda *args: ("float32", "float32 1 ms"))
    for name in ("compile_now", "compare_generation"):
        monkeypatch.setattr(train, name, lambda *args: 0)
    monkeypatch.setattr(train, "train", lambda *args: [(0.0, 8.0)])
    monkeypatch.setattr(train, "held_out_bits", lambda *args: 8.0)
    monkeypatch.setattr(train, "plot", lambda *args: False)
    monkeypatch.setattr(train, "fastest_built_ins", lambda *args: ("float32", ""))
    monkeypatch.setattr(
        train, "compare_training", lambda *args: bounds.append(args[3:]) or {"gpukern": [8.0], "torch": [8.0]}
    )
    command = ["train.py", "--device", "cpu", "--seconds", "4", "--out", str(tmp_path)]
    for more in ([], ["--compare-steps", "200"]):
        monkeypatch.setattr(sys, "argv", command + more)
        train.main()
    assert bounds == [(16, 1.0), (200, float("inf"))]


def makes(folder, goal, gpu, **variables):
    """The output of `make -n` in a tree with nothing built, on a machine with or without a GPU."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("requirements-demo.txt", "requirements-test.txt", "requirements-test-nodeps.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "csrc").mkdir(exist_ok=True)
    shutil.copy(ROOT / "csrc" / "gpukern.h", folder / "csrc")
    (folder / "bin").mkdir(exist_ok=True)
    driver = folder / "bin" / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + ("echo 'GPU 0: H200 (UUID: GPU-1)'\n" if gpu else "exit 9\n"))
    driver.chmod(0o755)
    settings = [f"{name}={value}" for name, value in {"VENV": folder / "venv", **variables}.items()]
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GPUKERN", "CMAKE"))}
    environment = {**kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-n", goal, *settings], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LEFT_OUT = "gpukern: no NVIDIA GPU here: the CUDA half is left out; GPUKERN_CUDA=1 builds it\n"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("goal", ("demo", "test", "build"))
def test_make_builds_the_cuda_half_where_it_can_run(tmp_path, goal):
    """demo and test: where there is a GPU, or where they are told to. build: as CMake decides."""
    out = makes(tmp_path, goal, gpu=False)
    assert (LEFT_OUT in out) == ("-DGPUKERN_CUDA=0" in out) == (goal != "build")
    for out in (makes(tmp_path, goal, gpu=True), makes(tmp_path, goal, gpu=False, GPUKERN_CUDA="1")):
        assert LEFT_OUT not in out and "-DGPUKERN_CUDA=0" not in out
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "CMakeCache.txt").touch()  # configured before: it keeps what it has
    assert "-DGPUKERN_CUDA" not in makes(tmp_path, goal, gpu=False)


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_demo_says_first_how_long_it_takes(tmp_path):
    first = makes(tmp_path, "demo", gpu=False).splitlines()[0]
    assert first == "gpukern: the demo takes about 3 minutes on two cores; before it about 3 to install torch and build"
    assert "up to 8 more for the CUDA half" in makes(tmp_path, "demo", gpu=True).splitlines()[0]
    stamp = tmp_path / "venv" / ".gpukern" / "requirements"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    first = makes(tmp_path, "demo", gpu=False).splitlines()[0]
    assert first == "gpukern: the demo takes about 3 minutes on two cores"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_test_says_how_long_it_takes(tmp_path):
    first = makes(tmp_path, "test", gpu=False).splitlines()[0]
    assert first.startswith(
        "gpukern: the tests take about 8 minutes on two cores; before them about 3 to install torch"
    )
    assert makes(tmp_path, "build", gpu=False).splitlines()[0] != first


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_demo_alone_installs_what_it_needs(tmp_path):
    """Neither mypy nor hypothesis nor transformers; in an environment of the tests' it installs nothing."""
    out = makes(tmp_path, "demo", gpu=False)
    assert "-r requirements-demo.txt" in out and "requirements-test" not in out
    assert "-r requirements-test.txt" in makes(tmp_path, "test", gpu=False)
    needed = {
        line.partition("==")[0] for line in (ROOT / "requirements-demo.txt").read_text().splitlines() if "==" in line
    }
    assert needed == {"torch", "numpy", "scikit-build-core", "matplotlib"}
    assert "-r requirements-demo.txt" in (ROOT / "requirements-test.txt").read_text().splitlines()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "venv" / ".gpukern").mkdir()
    stamp = tmp_path / "venv" / ".gpukern" / "requirements"
    stamp.touch()
    os.utime(stamp, (time.time() + 1000,) * 2)  # later than the files that are copied beside it
    assert "pip install --quiet --disable-pip-version-check -r" not in makes(tmp_path, "demo", gpu=False)


def test_ours_computes_in_the_fastest_dtype(train, monkeypatch):
    """On a CPU whose bfloat16 is slow that is float32."""
    took = {torch.bfloat16: 0.4, torch.float32: 0.0}
    model = train.GPT(train.Config(context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32))
    text = torch.zeros(200, dtype=torch.uint8)
    corpus = train.Corpus(text, text, [], 1.0)
    monkeypatch.setattr(train, "gradient_step", lambda loss, x, y, device, dtype: time.sleep(took[dtype]))
    assert train.fastest_of_ours(model, train.OPS["gpukern"](), corpus)[0] == "float32"
    took.update({torch.bfloat16: 0.0, torch.float32: 0.4})
    assert train.fastest_of_ours(model, train.OPS["gpukern"](), corpus)[0] == "bfloat16"


def test_the_evaluation_shows_how_far_it_is(train, capsys):
    config = train.Config(context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32)
    text = torch.arange(3000, dtype=torch.uint8)
    bits = train.held_out_bits(train.GPT(config), train.OPS["gpukern"](), train.Corpus(text, text, [], 1.0))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) > 5 and shown[-1].startswith("[##############################]    3/3 KiB") and bits > 7
