# SPDX-License-Identifier: BSD-3-Clause
"""The demo: its first lines of output, what it needs of the build, and the peers that it compares
with.
"""

import csv
import importlib
import importlib.util
import itertools
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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    yield importlib.import_module("train")
    for name in ("train", "curves", "data", "generate", "model"):
        sys.modules.pop(name, None)


def test_the_fastest_built_ins_are_the_peer(train, monkeypatch, capsys):
    """The second call is timed, and built-ins that fail are left out by name."""
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
    assert capsys.readouterr().out == "left out: built-ins in cuDNN: No available kernel\n"


def test_a_call_that_fails_the_second_time_is_not_the_fastest(train, monkeypatch, capsys):
    """Its first time does not count, and the line says whose call failed."""
    monkeypatch.setattr(train, "synchronize", lambda model: None)
    runs = []

    def breaks():
        runs.append(None)
        if len(runs) == 2:
            raise RuntimeError("out of memory")

    best, times = train.fastest({"a": breaks, "b": lambda: time.sleep(0.01)}, None, "gpukern")
    assert best == "b" and "a " not in times
    assert capsys.readouterr().out == "left out: gpukern in a: out of memory\n"
    with pytest.raises(SystemExit, match="gpukern: every one of a failed"):
        runs.clear()
        train.fastest({"a": breaks}, None, "gpukern")


def test_the_built_ins_are_measured_in_each_dtype_on_the_cpu(train):
    assert {dtype for dtype, _ in train.BUILT_INS["cpu"].values()} == {
        torch.bfloat16,
        torch.float32,
    }
    assert any(backend is not None for _, backend in train.BUILT_INS["cuda"].values())


def test_muon_of_float32_built_ins(train):
    """Products are in float32, results in the dtype that Muon keeps."""
    a, b, c = (torch.randn(8, 8).bfloat16() for _ in range(3))
    with train.ProductsOnGemm(train.float32_product):
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
        got = torch.addmm(c, a, b, beta=0.5, alpha=2)
    want = 2 * (a.float() @ b.float()) + 0.5 * c.float()
    assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())


def test_loss_curves_alone(train, monkeypatch, capsys, tmp_path):
    """--compare-only does not compile, generate or time. Built-ins that fail are left out by name,
    and all steps are made."""
    text = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()), dtype=torch.uint8)
    monkeypatch.setattr(train, "load_corpus", lambda: train.Corpus(text, text, [], 1.0))
    config = train.Config(
        context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32
    )
    monkeypatch.setitem(train.CONFIG, "cpu", config)
    ways = {**train.BUILT_INS["cpu"], "cuDNN": (torch.bfloat16, train.SDPBackend.CUDNN_ATTENTION)}
    monkeypatch.setitem(train.BUILT_INS, "cpu", ways)
    for name in ("compiled_loss", "compare_generation", "train"):
        monkeypatch.delattr(train, name)
    arguments = [
        "train.py",
        "--device",
        "cpu",
        "--compare-only",
        "--compare-steps",
        "5",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    out = capsys.readouterr().out
    assert "built-ins, cuDNN: left out: " in out and "step 5 of 5" in out
    with (tmp_path / "curves.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert (
        list(steps[0]) == ["step", "gpukern", "built-ins, bfloat16", "built-ins, float32"]
        and len(steps) == 5
    )
    losses = [[float(row[name]) for row in steps] for name in list(steps[0])[1:]]
    assert losses[0][0] == pytest.approx(8, abs=0.01) and losses[0][-1] < 7.9  # the loss falls
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, abs=0.02)
    assert (tmp_path / "curves.png").exists() == (
        importlib.util.find_spec("matplotlib") is not None
    )


@pytest.fixture
def small(train, monkeypatch):
    """The whole program with a model of one layer and a text of 3,000 bytes."""
    text = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()[:3000]), dtype=torch.uint8)
    monkeypatch.setattr(train, "load_corpus", lambda: train.Corpus(text, text, ["README"], 1.0))
    config = train.Config(
        context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32
    )
    monkeypatch.setitem(train.CONFIG, "cpu", config)
    # the demo's prompts are longer than this context
    monkeypatch.setattr(train, "compare_generation", lambda *args: None)
    return train


def test_a_slow_machine_makes_as_many_steps_as_a_fast_one(small, monkeypatch, capsys, tmp_path):
    """No time limit ends the training or the comparison."""
    clock = itertools.count(step=1000)  # each reading is much later than the last
    monkeypatch.setattr(small, "missing_header", lambda: "/no/Python.h")
    monkeypatch.setattr(
        small, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock)))
    )
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--device", "cpu", "--steps", "3", "--out", str(tmp_path)]
    )
    small.main()
    out = capsys.readouterr().out
    assert (
        "after 3 steps" in out and f"training: {small.COMPARED} steps from the same weights" in out
    )
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + small.COMPARED


def test_the_curves_have_the_steps_that_their_mean_is_of(train):
    assert importlib.import_module("curves").SMOOTH <= min(train.COMPARED, train.COMPARED_ALONE)


def test_without_python_h_the_demo_goes_on(small, monkeypatch, capsys, tmp_path):
    """torch.compile is not called, and one line names the missing package."""
    monkeypatch.setattr(
        small.sysconfig, "get_paths", lambda: {"include": str(tmp_path / "include")}
    )
    monkeypatch.setattr(
        small.torch, "compile", lambda *args, **how: pytest.fail("compiled without Python.h")
    )
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "train.py",
            "--device",
            "cpu",
            "--steps",
            "2",
            "--compare-steps",
            "2",
            "--out",
            str(tmp_path),
        ],
    )
    small.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "Python.h" in line]
    assert (
        len(lines) == 1
        and lines[0].startswith(str(tmp_path / "include" / "Python.h"))
        and "python3-dev" in lines[0]
    )


def test_waiting_shows_that_it_goes_on(train, capsys):
    with train.waiting("compiling ours", 2.0):
        time.sleep(1.2)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) >= 3 and all(line.startswith("compiling ours: [") for line in shown)
    assert "2/2 s" in shown[-1] and "just begun" in shown[0]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("goal", ("test", "test-all"))
def test_make_test_asks_for_python_h_before_it_builds(tmp_path, goal):
    """With a Python without headers, make stops with an error that names the package, before it
    installs or builds anything."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    prelude = "import sys, sysconfig; sysconfig.get_paths = lambda: {'include': '/no/such'}; exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ echo "ran $*"; exit 1; }}\nexec {sys.executable} -c '
        f'"{prelude}" "$2"\n'
    )
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", goal, f"VENV={tmp_path / 'venv'}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=clean(),
    )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode and "ran " not in done.stdout
    assert (
        "gpukern: /no/such/Python.h is missing" in done.stderr
        and f"apt-get install python{version}-dev" in done.stderr
    )


def clean():
    """The environment without variables that another make or the build set."""
    return {
        name: x
        for name, x in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "GPUKERN", "CMAKE"))
    }


def makes(folder, goal, gpu, **variables):
    """The output of `make -n` in a tree with nothing built, on a machine with or without a GPU."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in (
        "requirements-demo.txt",
        "requirements-test.txt",
        "requirements-test-nodeps.txt",
        "pyproject.toml",
    ):
        shutil.copy(ROOT / name, folder)
    (folder / "csrc" / "include").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "csrc" / "include" / "gpukern.h", folder / "csrc" / "include")
    (folder / "bin").mkdir(exist_ok=True)
    driver = folder / "bin" / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + ("echo 'GPU 0: H200 (UUID: GPU-1)'\n" if gpu else "exit 9\n"))
    driver.chmod(0o755)
    settings = [f"{name}={value}" for name, value in {"VENV": folder / "venv", **variables}.items()]
    environment = {**clean(), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "-n", goal, *settings], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LEFT_OUT = "gpukern: no NVIDIA GPU here: the CUDA half is left out; GPUKERN_CUDA=1 builds it\n"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("goal", ("demo", "test", "build"))
def test_make_builds_the_cuda_half_where_it_can_run(tmp_path, goal):
    """demo and test build the CUDA half if there is a GPU, or if they are told to. build leaves the
    decision to CMake."""
    out = makes(tmp_path, goal, gpu=False)
    assert (LEFT_OUT in out) == ("-DGPUKERN_CUDA=0" in out) == (goal != "build")
    for out in (
        makes(tmp_path, goal, gpu=True),
        makes(tmp_path, goal, gpu=False, GPUKERN_CUDA="1"),
    ):
        assert LEFT_OUT not in out and "-DGPUKERN_CUDA=0" not in out
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "CMakeCache.txt").touch()  # already configured, so the choice is kept
    assert "-DGPUKERN_CUDA" not in makes(tmp_path, goal, gpu=False)


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_demo_says_first_how_long_it_takes(tmp_path):
    first = makes(tmp_path, "demo", gpu=False).splitlines()[0]
    assert (
        first
        == "gpukern: the demo takes 3 to 10 minutes on two cores; before it about 3 to install "
        "torch and build"
    )
    assert "about 20 more for the CUDA half" in makes(tmp_path, "demo", gpu=True).splitlines()[0]
    stamp = tmp_path / "venv" / ".gpukern" / "requirements"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    first = makes(tmp_path, "demo", gpu=False).splitlines()[0]
    assert first == "gpukern: the demo takes 3 to 10 minutes on two cores"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_test_says_how_long_it_takes(tmp_path):
    first = makes(tmp_path, "test", gpu=False).splitlines()[0]
    assert first.startswith(
        "gpukern: the tests take about 12 minutes on two cores; before them about 3 to install torch"
    )
    assert makes(tmp_path, "build", gpu=False).splitlines()[0] != first


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_demo_alone_installs_what_it_needs(tmp_path):
    """It installs neither mypy nor hypothesis nor transformers. In the tests' environment it
    installs nothing."""
    out = makes(tmp_path, "demo", gpu=False)
    assert "-r requirements-demo.txt" in out and "requirements-test" not in out
    assert "-r requirements-test.txt" in makes(tmp_path, "test", gpu=False)
    needed = {
        line.partition("==")[0]
        for line in (ROOT / "requirements-demo.txt").read_text().splitlines()
        if "==" in line
    }
    assert needed == {"torch", "numpy", "scikit-build-core", "matplotlib", "tqdm"}
    assert "-r requirements-demo.txt" in (ROOT / "requirements-test.txt").read_text().splitlines()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "venv" / ".gpukern").mkdir()
    stamp = tmp_path / "venv" / ".gpukern" / "requirements"
    stamp.touch()
    os.utime(stamp, (time.time() + 1000,) * 2)  # later than the files copied beside it
    assert "pip install --disable-pip-version-check -r" not in makes(tmp_path, "demo", gpu=False)


def test_ours_computes_in_the_fastest_dtype(train, monkeypatch):
    """On a CPU with slow bfloat16 that is float32."""
    took = {torch.bfloat16: 0.4, torch.float32: 0.0}
    model = train.GPT(
        train.Config(context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32)
    )
    text = torch.zeros(200, dtype=torch.uint8)
    corpus = train.Corpus(text, text, [], 1.0)
    monkeypatch.setattr(
        train, "gradient_step", lambda loss, x, y, device, dtype: time.sleep(took[dtype])
    )
    assert train.fastest_of_ours(model, train.OPS["gpukern"](), corpus)[0] == "float32"
    took.update({torch.bfloat16: 0.0, torch.float32: 0.4})
    assert train.fastest_of_ours(model, train.OPS["gpukern"](), corpus)[0] == "bfloat16"


def test_the_evaluation_shows_how_far_it_is(train, capsys):
    config = train.Config(
        context=32, layers=1, dim=32, heads_q=2, heads_kv=1, head_dim=16, hidden=32
    )
    text = torch.arange(3000, dtype=torch.uint8)
    bits = train.held_out_bits(
        train.GPT(config), train.OPS["gpukern"](), train.Corpus(text, text, [], 1.0)
    )
    shown = capsys.readouterr().out.splitlines()
    assert (
        len(shown) > 5
        and shown[-1].startswith("evaluating: [##############################]    3/3 KiB")
        and bits > 7
    )
