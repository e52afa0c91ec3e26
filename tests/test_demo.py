"""The demo: what it says first, what of the build it asks for, and whom it compares with."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    yield importlib.import_module("train")
    for name in ("train", "data", "generate", "model"):
        sys.modules.pop(name, None)


def test_the_fastest_built_ins_are_the_peer(train, monkeypatch, capsys):
    """The second call counts, and one that fails is left out by name."""
    monkeypatch.setattr(train, "synchronize", lambda model: None)
    slow = iter((0.0, 0.05))

    def broken():
        raise RuntimeError("No available kernel\nmore")

    ways = {"bfloat16": lambda: time.sleep(next(slow)), "float32": lambda: time.sleep(0.005), "cuDNN": broken}
    best, times = train.fastest(ways, None)
    took = dict(re.findall(r"(\w+) (\d+) ms", times))
    assert best == "float32" and int(took["bfloat16"]) >= 50 and "float32" in took and "cuDNN" not in times
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


def makes(folder, goal, gpu, **variables):
    """The output of `make -n` in a tree with nothing built, on a machine with or without a GPU."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("requirements-test.txt", "requirements-test-nodeps.txt", "pyproject.toml"):
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
