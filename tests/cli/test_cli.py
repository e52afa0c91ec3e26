# SPDX-License-Identifier: BSD-3-Clause
"""gpukern info, doctor, explain and bench, by the console script's entry point; test_tuning.py
tests tune."""

import contextlib
import io
import json
import re
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run_python, run_script
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gpukern
from torch_gpukern.cli import bench, charts, doctor, explained, main


def run(*args):
    """(exit status, standard output) of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(args)
    return status, out.getvalue()


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"gpukern {torch_gpukern.__version__}\n"


def test_the_console_script_is_this_main(monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^\[project.scripts\]\ngpukern = "torch_gpukern.cli:main"$', text, re.M)
    for name, prog in (("/x/bin/gpukern", "gpukern"), ("-m", "python -m torch_gpukern")):
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(SystemExit):
            main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {prog} ")


def test_info_as_json():
    status, out = run("info", "--json")
    known = json.loads(out)
    assert status == 0 and known == doctor.facts()
    assert known["gpukern"] == torch_gpukern.__version__ and known["torch"] == torch.__version__
    assert known["cpu_isa"] in known["cpu_isas"]
    assert "cpu_isas" not in run("info")[1] and known["library"] in run("info")[1]


def test_explain_as_json():
    status, out = run("explain", "gemm", "5", "6", "7", "--json")
    assert status == 0 and json.loads(out) == torch_gpukern.explain(
        "gemm", torch.empty(5, 7), torch.empty(7, 6)
    )
    found = json.loads(run("explain", "flash_attn", "--seq-q", "32", "--json", "--measure")[1])
    assert found.pop("measured_us") > 0
    q = torch.empty(1, 8, 32, 64)
    assert found == torch_gpukern.explain("flash_attn", q, q, q)


BUILT_FOR_CUDA = pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)


def test_explain_of_few_bits():
    """Scales and packed weights are made from the options. The explanation is that of the same call
    in Python."""
    call = ["scaled_gemm", "70", "130", "300", "--scales", "1x128,128x128", "--json"]
    a, b = (torch.ones(rows, 300, dtype=torch.float8_e4m3fn) for rows in (70, 130))
    want = torch_gpukern.explain("scaled_gemm", a, b.mT, torch.ones(70, 3), torch.ones(2, 3).mT)
    assert json.loads(run("explain", *call)[1]) == want
    if torch.ops.gpukern.cuda_kernels.default():
        assert (
            json.loads(run("explain", *call, "--arch", "sm_90")[1])["instance"]
            == "scaled_gemm_sm90a_e4m3_block_any_128x128"
        )
    assert (
        "_i8_" in json.loads(run("explain", *call[:-3], "--dtype", "int8", "--json")[1])["instance"]
    )
    scales = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
    formats = (("int4", 128), ("uint4", 128), ("mxfp4", 32), ("nvfp4", 16), ("e4m3", 64))
    for format, group in formats:
        more = ["--group", str(group)] if format == "e4m3" else []
        found = json.loads(
            run("explain", "weight_gemm", "3", "100", "300", "--format", format, *more, "--json")[1]
        )
        packed = torch.zeros(2, 5, 4096 if format == "e4m3" else 2048, dtype=torch.uint8)
        a = torch.ones(3, 300, dtype=torch.bfloat16)
        scale = torch.ones(-(-300 // group), 100).to(scales.get(format, a.dtype))
        zero = {"zero": torch.zeros(scale.shape, dtype=torch.uint8)} if format == "uint4" else {}
        assert found == torch_gpukern.explain("weight_gemm", a, packed, scale, 100, format, **zero)
        of_groups = ["weight_gemm", "3", "100", "300", "--format", format, *more, "--groups", "2"]
        found = json.loads(run("explain", *of_groups, "--json")[1])
        many = [x.repeat(1, 3)[:, :256] for x in (scale.view(torch.uint8), *zero.values())]
        if scale.dtype.itemsize > 1:
            many[0] = scale.repeat(1, 3)[:, :256]
        given = dict(zip(zero, many[1:], strict=True)) | {"offs": torch.tensor([1, 3]).int()}
        both = packed.repeat(2, 1, 1), many[0].contiguous().view(scale.dtype)
        assert found == torch_gpukern.explain("weight_gemm", a, *both, 100, format, **given)
        assert found["chunks"] == 2
    if (
        torch.ops.gpukern.cuda_kernels.default()
    ):  # the layers of w4, w4-zero, mxfp4, nvfp4 on Hopper
        for format in ("int4", "uint4", "mxfp4", "nvfp4"):
            call = ["weight_gemm", "1", "4096", "14336", "--format", format, "--arch", "sm_90"]
            assert run("explain", *call)[1].split()[2].startswith("weight_gemm_mma_")
    x = torch.ones(3, 300, dtype=torch.bfloat16)
    found = json.loads(
        run("explain", "quantize", "3", "300", "--granularity", "1x128", "--to", "int8", "--json")[
            1
        ]
    )
    assert found == torch_gpukern.explain("quantize", x, torch.int8, "1x128")
    found = json.loads(run("explain", "sparse_gemm", "3", "100", "300", "--json")[1])
    kept = torch.ones(100, 150, dtype=torch.bfloat16), torch.zeros(100, 38, dtype=torch.uint8)
    assert found == torch_gpukern.explain("sparse_gemm", x, *kept)
    offs = torch.tensor([100, 200, 300], dtype=torch.int32)
    for more, scales in (
        (["--scales", "block"], (torch.ones(300, 3), torch.ones(3, 3, 1))),
        (["--dtype", "bfloat16"], ()),
    ):
        call = [
            "grouped_gemm",
            "300",
            "100",
            "300",
            "--groups",
            "3",
            "--dtype",
            "float8_e4m3fn",
            "--json",
            *more,
        ]
        dtype = torch.float8_e4m3fn if scales else torch.bfloat16
        a, b = torch.ones(300, 300).to(dtype), torch.ones(3, 100, 300).to(dtype)
        assert json.loads(run("explain", *call)[1]) == torch_gpukern.explain(
            "grouped_gemm", a, b.mT, offs, *scales
        )
    with pytest.raises(SystemExit):
        main(["explain", "scaled_gemm", "4", "4", "4", "--scales", "row,row,row"])


def test_every_op_that_is_explained_has_options(monkeypatch):
    """Every op that is explained has options, and the op takes the call that they describe, on the
    CPU and on a described GPU."""
    monkeypatch.setattr(explained.timing, "median_us", lambda call, device: (call(), 2.0)[1])
    assert set(explained.CALLS) == set(torch_gpukern.EXPLAINED)
    more = [
        "grouped_gemm 9 16 256 --dtype float8_e4m3fn --scales block",
        "grouped_gemm 9 16 32 --groups 3 --dtype float32",
    ]
    more += [
        "sparse_gemm 3 16 36",
        "sparse_gemm 3 16 32 --dtype int8",
        "dequantize 200 300 --granularity 128x128",
    ]
    more += [
        "quantize 8 64 --granularity 1x32",
        "rms_norm 4 8 --residual",
        "rope 5 --heads 4 --heads-kv 2",
    ]
    sizes = {"m": "8", "n": "16", "k": "32", "tokens": "5"}
    for op, call in explained.CALLS.items():
        tokens = (
            ["--seq-q", "8", "--seq-k", "16"]
            if op in ("flash_attn", "flash_attn_varlen", "flash_attn_bwd")
            else []
        )
        more.append(" ".join([op, *(sizes[name] for name in call.sizes.split()), *tokens]))
    for line in more:
        status, out = run("explain", *line.split(), "--measure")
        assert status == 0 and re.search(
            r"^measured +2\.0 us, [\d.,]+ GFLOP/s, [\d.,]+ GB/s$", out, re.M
        ), line
        if torch.ops.gpukern.cuda_kernels.default():
            status, out = run("explain", *line.split(), "--arch", "sm_90")
            assert status == 0 and re.search(r"^no faster than +[\d.e-]+ us$", out, re.M), line


def test_explain_says_what_concerns_the_call():
    """A product has no keys. A bound below 0.05 us is no 0. A build for the CPU answers for gemm."""
    _, out = run("explain", "gemm", "64", "64", "64", "--arch", "sm_90")
    (bound,) = re.findall(r"^no faster than +([\d.]+) us$", out, re.M)
    assert float(bound) > 0 and "keys" not in out
    assert re.search(r"^chunks of the keys +1$", run("explain", "paged_attn")[1], re.M)


@BUILT_FOR_CUDA
@pytest.mark.parametrize(
    "call, arch, row",
    [
        (("gemm", "4096", "4096", "4096", "--dtype", "bfloat16"), "sm_90", "gemm_sm90a_bf16_"),
        (("gemm", "4096", "4096", "4096", "--dtype", "bfloat16"), "sm_89", "gemm_sm80_bf16_"),
        (("gemm", "1024", "1024", "1024"), "sm_80", "gemm_sm80_bf16_"),
        (("gemm", "1024", "1024", "1024", "--dtype", "float32"), "sm_80", "gemm_plain_f32_"),
        (
            ("flash_attn", "--dtype", "float16", "--head-dim", "128"),
            "sm_90",
            "flash_attn_fwd_sm90a_f16_",
        ),
        (
            ("flash_attn", "--dtype", "float16", "--head-dim", "128"),
            "sm_86",
            "flash_attn_fwd_sm80_f16_",
        ),
        (("flash_attn_varlen", "--dtype", "bfloat16"), "sm_90", "flash_attn_fwd_"),
        (
            ("flash_attn_bwd", "--dtype", "bfloat16", "--head-dim", "128"),
            "sm_90",
            "flash_attn_bwd_",
        ),
        (
            ("paged_attn", "--dtype", "bfloat16", "--head-dim", "128"),
            "sm_80",
            "paged_attn_sm80_bf16_",
        ),
        (("grouped_gemm", "512", "1024", "1024"), "sm_90", "grouped_gemm_sm90a_bf16_"),
        (
            ("grouped_gemm", "512", "1024", "1024", "--dtype", "float8_e4m3fn"),
            "sm_90",
            "grouped_gemm_fp8_sm90a_e4m3_",
        ),
        (
            ("sparse_gemm", "512", "1024", "1024", "--dtype", "float8_e4m3fn"),
            "sm_90",
            "sparse_gemm_sm90a_e4m3_",
        ),
        (("quantize", "64", "1024"), "sm_90", "quantize_sm90a_bf16"),
    ],
)
def test_explain_for_a_gpu_that_is_not_there(call, arch, row):
    status, out = run("explain", *call, "--arch", arch, "--json")
    found = json.loads(out)
    assert status == 0 and found["instance"].startswith(row), found
    assert found["isa"] == ("sm_90a" if "sm90a" in found["instance"] else "sm_80")
    assert found["bound_us"] > 0 and found["tasks"] > 0 and found["bytes"] > 0
    (bound,) = re.findall(r"no faster than +([\d.]+) us", run("explain", *call, "--arch", arch)[1])
    assert float(bound) == pytest.approx(found["bound_us"], rel=0.06)
    # the next call describes its own tensors again
    assert json.loads(run("explain", *call, "--json")[1])["instance"].startswith(row.split("_")[0])
    assert json.loads(run("explain", *call, "--json")[1])["bound_us"] == 0


@BUILT_FOR_CUDA
def test_a_described_gpu_runs_nothing():
    """Only explain uses the described GPU; refused arguments leave no state behind."""
    a = torch.ones(3, 4)
    with pytest.raises(ValueError, match="b has 3 rows, a has 4 columns"):
        torch_gpukern.explain("gemm", a, a, arch="sm_90")
    assert torch_gpukern.explain("gemm", a, a.t())["bound_us"] == 0
    torch.ops.gpukern.explain_for("sm_90")
    try:
        torch.testing.assert_close(torch_gpukern.gemm(a, a.t()), torch.full((3, 3), 4.0))
    finally:
        torch.ops.gpukern.explain_for("")
    with pytest.raises(
        (ValueError, RuntimeError), match='arch is "sm_75"; expected sm_80, sm_86, sm_89 or sm_90'
    ):
        torch_gpukern.explain("gemm", a, a.t(), arch="sm_75")


@pytest.mark.gpu
def test_a_described_gpu_answers_as_a_real_one():
    """A described GPU gives the kernel and tile of a real one of that architecture, for calls in
    which no estimate of bandwidth decides."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if arch not in torch_gpukern.ARCHS:
        pytest.skip(f"no GPU of {arch} is described")
    x, q = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096, 4096), (2, 16, 4096, 128))
    )
    for op, call in (
        ("gemm", (x, x)),
        ("flash_attn", (q, q, q)),
        ("flash_attn_bwd", (q, q, q, q, q, q[..., 0].float())),
    ):
        here = torch_gpukern.explain(op, *(tensor.cuda() for tensor in call))
        there = torch_gpukern.explain(op, *call, arch=arch)
        assert [here[k] for k in ("instance", "isa", "tile")] == [
            there[k] for k in ("instance", "isa", "tile")
        ]


class Written(TorchDispatchMode):
    """A mode that records the writes to tensors of more than 64 Ki elements, by op."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        reads = func.is_view or func.name().startswith(("aten::empty", "aten::new_empty"))
        if isinstance(made, torch.Tensor) and made.numel() > 1 << 16 and not reads:
            self.found.append(func.name())
        return made


def test_explain_writes_no_large_tensor():
    """explain does not write large tensors, so a product of codes that memory could not hold is
    explained quickly."""
    sizes = {
        "m n k": ("1024", "1024", "1024"),
        "m n": ("1024", "1024"),
        "tokens": ("1024",),
        "tokens n": ("1024", "1024"),
        "": (),
    }
    more = {
        "gemm": ("--layout", "TT"),
        "scaled_gemm": ("--scales", "1x32"),
        "grouped_gemm": ("--scales", "block"),
    }
    for op, call in explained.CALLS.items():
        with Written() as mode:
            status, _ = run(
                "explain",
                op,
                *sizes[call.sizes],
                *more.get(op, ()),
                "--dtype",
                list(call.dtypes)[-1],
            )
        assert (status, mode.found) == (0, []), op


def test_explain_for_an_arch_refuses(capsys):
    for more in (("--measure",), ("--device", "cuda")):
        assert main(["explain", "gemm", "4", "4", "4", "--arch", "sm_90", *more]) == 1
        assert capsys.readouterr().err.startswith(
            "explain: --arch describes a GPU that need not exist"
        )


@pytest.mark.skipif(
    bool(torch.ops.gpukern.cuda_kernels.default()), reason="a build with CUDA kernels"
)
@pytest.mark.parametrize("op", [op for op in explained.CALLS if op != "gemm"])
def test_explain_for_an_arch_without_cuda_kernels(op, capsys):
    """The refusal names the op and the command that builds what is missing."""
    sizes = ["4" for _ in explained.CALLS[op].sizes.split()]
    assert main(["explain", op, *sizes, "--arch", "sm_90"]) == 1
    said = capsys.readouterr().err
    named = {"flash_attn_bwd": "flash_attn"}.get(op, op)
    assert said.startswith(f"explain: gpukern::{named}"), said
    assert "was built without CUDA kernels: it knows it for gemm alone" in said, said
    assert "run `make build GPUKERN_CUDA=1`" in said, said


def test_bench_as_a_page(monkeypatch, tmp_path, capsys):
    """The page has plots and tables of every op in one file without scripts or links. Progress is
    shown while it measures."""
    monkeypatch.setattr(bench.timing, "median_us", lambda call, device: (call(), 10.0)[1])
    for op, found in list(bench.BENCHES.items()):
        sizes = (1, 2) if op in ("paged_attn", "weight_gemm") else (16, 32)
        monkeypatch.setitem(bench.BENCHES, op, replace(found, sizes={"cpu": sizes}))
    path = tmp_path / "page.html"
    assert main(["bench", "--html", str(path)]) == 0
    shown = capsys.readouterr()
    assert (
        "bench" in shown.err
        and "16" in shown.err
        and "float32 and bfloat16 on cpu" in shown.out
        and shown.out.endswith(f"wrote {path}\n")
    )
    text = path.read_text()
    root = xml.etree.ElementTree.fromstring(
        re.sub(r'<!doctype html>|<meta charset="utf-8">', "", text)
    )
    lines = [op for op in bench.BENCHES if op != "flash_attn"]
    lines[1:1] = ["flash_attn", "flash_attn, causal"]
    assert [x.text for x in root.iter("h2")] == lines
    svg = "{http://www.w3.org/2000/svg}"
    # ours and PyTorch's, of which not every build has all
    drawn = len(list(root.iter(f"{svg}polyline")))
    assert drawn >= 2 * len(lines) and len(list(root.iter(f"{svg}circle"))) == 2 * drawn
    assert len(list(root.iter("tr"))) == 3 * len(lines)
    assert not re.search(r"<script|href|src=", text)
    assert "gemm 32 cubed" in text and "matmul" in text and torch.__version__ in text
    assert main(["bench", "gemm", "--small", "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "none" in capsys.readouterr().err


def test_doctor():
    status, out = run("doctor")
    assert status == 0 and out.endswith("all checks passed\n")
    assert "ok      calls on cpu: gemm and flash_attn, forward and backward" in out
    status, out = run("doctor", "--json")
    names = [check["name"] for check in json.loads(out)]
    assert status == 0 and names[:3] == ["library", "cpu", "calls on cpu"] and "cuda" in names
    assert set(json.loads(out)[0]) == {"name", "ok", "found", "todo"}


def test_doctor_finds_what_is_wrong(monkeypatch, tmp_path):
    real = doctor.gemm
    monkeypatch.setattr(doctor, "gemm", lambda *args, **options: real(*args, **options) * 1.01)
    status, out = run("doctor")
    assert (
        status == 1
        and "FAILED  calls on cpu: results are wrong by " in out
        and out.endswith("checks failed\n")
    )
    monkeypatch.setattr(doctor, "gemm", real)
    broken = tmp_path / "tuned.json"
    broken.write_text("{")
    monkeypatch.setenv("GPUKERN_TUNED", str(broken))
    status, out = run("doctor")
    assert (
        status == 1
        and f"FAILED  tuned gemms: {broken}: it is not JSON" in out
        and f"to do: remove {broken}" in out
    )


def test_doctor_of_an_instruction_set_that_is_not_there():
    done = run_python(
        "from torch_gpukern.cli import main; raise SystemExit(main(['doctor']))",
        env={"GPUKERN_CPU": "banana"},
        check=False,
    )
    assert (
        done.returncode == 1
        and "to do: unset GPUKERN_CPU, or name one that this machine has" in done.stdout
    )


def test_doctor_advises_what_can_be_done_here(monkeypatch, tmp_path):
    """Without a GPU, doctor does not advise to tune or to install packages that need one."""
    monkeypatch.setenv("GPUKERN_TUNED", str(tmp_path / "none.json"))
    here = doctor.facts()
    for kernels, devices in (([], []), (["gemm_sm90a_bf16"], [])):
        known = {**here, "cuda_kernels": kernels, "cuda_devices": devices, "torch_cuda": None}
        monkeypatch.setattr(doctor, "facts", lambda known=known: known)
        advice = " ".join(check.todo for check in doctor.checks())
        assert "tune gemm" not in advice and "triton" not in advice and "vllm" not in advice
    assert doctor._tuned(True).todo.startswith("gpukern tune gemm")


def test_layout_prints_its_table():
    assert run("layout", "(4,8):(8,1)")[1].endswith(
        """
     0  1  2  3  4  5  6  7
  +------------------------
0 |  0  1  2  3  4  5  6  7
1 |  8  9 10 11 12 13 14 15
2 | 16 17 18 19 20 21 22 23
3 | 24 25 26 27 28 29 30 31
"""
    )
    assert (
        "0 | 0 2 4 6\n" in run("layout", "4:2")[1]
        and "|" not in run("layout", "4:2", "--access", "2")[1]
    )
    assert "0 | T0 V0 T0 V1" in run("layout", "--atom", "mma.c")[1].replace(
        " 0 |  T0", "0 | T0"
    ).replace("  ", " ")
    assert (
        "64 x" in run("layout", "(100,100):(100,1)")[1]
        and "--svg draws all of it" in run("layout", "(100,100):(100,1)")[1]
    )
    banks = run("layout", "(2,4):(64,1)", "--kind", "banks")[1]
    assert banks.endswith("0 | 0 0 1 1\n1 | 0 0 1 1\n")


@pytest.mark.parametrize(
    "line, text",
    [
        ("layout (4,8):(8,1) --access 4 --elem-bytes 0", "must be 1 or more, got 0"),
        ("layout (4,8):(8,1) --access 0", "argument --access: invalid choice: 0"),
        (
            "layout (99999999,8):(1,1)",
            "layout: (99999999,8):(1,1) has 799999992 elements; at most 1048576",
        ),
        ("layout (4,8:(8,1)", "layout '(4,8:(8,1)': expected ',', found ':'"),
        ("layout (4,0):(1,1)", "layout: shape is (4,0); sizes must be 1 or more"),
        (
            "explain gemm 99999999999999999999 4 4",
            "argument M: must be at most 9223372036854775807",
        ),
        ("explain gemm 9223372036854775807 9223372036854775807 4", "explain: "),
        (
            "explain gemm 10000000 10000000 16",
            "explain: no memory for a tensor of 400000000000000 bytes: explain has",
        ),
        (
            "explain gemm 16 16 100000000000000",
            "explain: no memory for a tensor of 6400000000000000 bytes: explain has",
        ),
        (
            "explain flash_attn --seq-q 100000000000 --seq-k 16",
            "explain: no memory for a tensor of ",
        ),
        (
            "explain flash_attn --window-left 99999999999999999999",
            "must be at most 9223372036854775807",
        ),
        ("explain flash_attn --window-left -2", "must be -1 or more"),
        (
            "occupancy --registers 300 --threads 8",
            "occupancy: registers is 300; a thread has 0 to 255",
        ),
        ("occupancy --registers 30 --threads 0", "occupancy: threads is 0; a block has 1 to 1024"),
        ("occupancy --registers 30", "occupancy: --registers replaces a kernel"),
        ("roofline README.md", "roofline: README.md: no results of benchmarks/results/: "),
        (
            "roofline pyproject.toml",
            "roofline: pyproject.toml: no results of benchmarks/results/: ",
        ),
        (
            "bench gemm --dtype bfloat16 --quick",
            "bench: --quick is an option of the repository's benchmarks",
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(line, text, capsys, monkeypatch):
    """Errors are one line without a traceback, and name the command once."""
    monkeypatch.chdir(Path(__file__).parents[2])
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr().err
    assert status in (1, 2) and text in shown.splitlines()[-1], shown
    command = line.split()[0]
    assert f"{command}: {command}" not in shown.lower() and len(shown.splitlines()[-1]) < 300


def test_the_same_word_is_not_said_twice(capsys, monkeypatch):
    from torch_gpukern.cli import commands

    for text, said in (
        ("occupancy: x", "occupancy: x"),
        ("x", "occupancy: x"),
        ("Occupancy: x", "occupancy: x"),
        ("", "occupancy: ValueError"),
        ("x\nException raised from f at a.cpp:1\nframe #0: g", "occupancy: x"),
    ):
        assert commands._said("occupancy", ValueError(text)) == said


READS_A_LINE = """
import os, runpy, sys
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    while os.read(read, 1) not in (b"\\n", b""):
        pass
    os._exit(0)
os.close(read)
os.dup2(write, 1)
os.close(write)
sys.argv = ["gpukern", *%r]
runpy.run_module("torch_gpukern", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "command", ("info --kernels", "layout (64,64):(64,1)", "occupancy --threads 128")
)
def test_a_reader_that_has_enough(command):
    """`gpukern info | head -1` gives no traceback, and the status that a shell gives."""
    done = run_python(READS_A_LINE % command.split(), check=False)
    assert done.stderr == "" and done.returncode in (0, 141)


def test_bench_in_a_checkout_drops_no_option(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(
        bench.subprocess,
        "run",
        lambda command: called.append(command[1:]) or SimpleNamespace(returncode=7),
    )
    monkeypatch.setattr(
        bench, "_measured", lambda work, device: called.append((work, device.type)) or []
    )
    script = str(Path(__file__).parents[2] / "benchmarks" / "bench_flash_attn.py")
    assert main(["bench", "flash_attn", "--quick", "--device", "cuda", "--only", "full"]) == 7
    assert called.pop() == [script, "--device", "cuda", "--quick", "--only", "full"]
    assert main(["bench", "flash_attn"]) == 7 and called.pop() == [script]
    assert main(["bench", "rows", "--list"]) == 7 and called.pop() == [
        script.replace("flash_attn", "rows"),
        "--list",
    ]
    # the repository's benchmarks measure every dtype
    assert main(["bench", "flash_attn", "--dtype", "bfloat16"]) == 0
    assert called.pop() == ([("flash_attn", 1024, "bfloat16")], "cpu")
    monkeypatch.setattr(bench, "CHECKOUT", Path("/nowhere"))
    assert main(["bench", "flash_attn"]) == 0 and called.pop() == (
        [("flash_attn", 1024, "float32")],
        "cpu",
    )
    assert (
        main(["bench", "flash_attn", "--quick"]) == 2
        and "which are not here" in capsys.readouterr().err
    )
    assert (
        main(["bench", "rows"]) == 1
        and "bench: op is 'rows'; expected one of gemm, " in capsys.readouterr().err
    )


def test_bench_names_what_there_is(capsys):
    """Every file of the repository's benchmarks, and of a file its groups and rows, which the
    harness says and nothing measures."""
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    folder = Path(__file__).parents[2] / "benchmarks"
    for path in folder.glob("bench_*.py"):
        assert re.search(rf"^benchmarks/{path.name} +\w", out, re.M)
    assert all(re.search(rf"^{op} ", out, re.M) for op in bench.BENCHES)
    listed = run_script(folder / "bench_scaled_gemm.py", "--list")
    groups = dict(line.split(": ") for line in listed.stdout.splitlines())
    assert {"tensor", "row", "block", "int8"} <= set(groups) and "1024x1024x1024 bf16" in groups[
        "block"
    ].split(", ")


def test_bench_of_a_dtype_that_an_op_has_not(capsys):
    assert main(["bench", "sparse_gemm", "--dtype", "float32"]) == 1
    assert capsys.readouterr().err == "bench: sparse_gemm is of bfloat16 or float16, got float32\n"
    assert (
        main(["bench", "rows", "--small"]) == 1
        and "rows has no table of its own" in capsys.readouterr().err
    )


@pytest.mark.parametrize("op", [op for op in bench.BENCHES if op != "paged_attn"])
def test_what_bench_compares_is_one_result(op):
    """bench compares equal results: ours agree with PyTorch's within the precision of 8- and 4-bit
    codes."""
    found = bench.BENCHES[op]
    for case in found.cases(16, getattr(torch, found.dtypes[0]), torch.device("cpu")):
        ours = case.ours()
        ours = ours[0] if isinstance(ours, tuple) else ours
        for way, call in case.theirs.items():
            try:
                theirs = call()
            except RuntimeError:  # of a backend that does not serve the call
                continue
            far = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert far < 0.06, way


def test_explain_asks_for_what_models_run_in(monkeypatch):
    """explain's default dtype is bfloat16 on a GPU if the op takes it, float32 on the CPU; --dtype
    overrides it."""
    asked = []

    def explain(op, x, *args, **how):
        asked.append(str(x.dtype).removeprefix("torch."))
        return {}

    monkeypatch.setattr(explained, "explain", explain)
    arch = "--arch", "sm_90"
    for op, sizes, more, dtype in (
        ("gemm", "444", arch, "bfloat16"),
        ("gemm", "444", (), "float32"),
        ("gemm", "444", (*arch, "--dtype", "float32"), "float32"),
        ("flash_attn", "", arch, "bfloat16"),
        ("softmax", "44", arch, "bfloat16"),
        ("scaled_gemm", "444", arch, "float8_e4m3fn"),
    ):
        assert main(["explain", op, *sizes, *more, "--json"]) == 0
        assert asked.pop() == dtype, (op, more)


def test_the_readme_s_own_line_runs_on_every_build():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = re.findall(r"`explain (gemm [^`]*)`", text)
    assert run("explain", *line.split())[0] == 0


def test_unknown_arguments_end_in_the_usage_of_their_command(capsys):
    for line, usage, text in (
        (
            "explain flash_attn 2 32 4096 128",
            "explain flash_attn",
            "unknown argument 2; give sizes by name: --batch 2 --heads 32",
        ),
        ("explain gemm 4 4 4 --hedas 3", "explain gemm", "unknown argument --hedas"),
        ("info --jsn", "info", "unknown argument --jsn"),
        ("tune gemm --shapes 4x4x4 --dtypo x", "tune gemm", "unknown argument --dtypo"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(line.split())
        said = capsys.readouterr().err
        assert re.match(rf"usage: .* {usage} ", said) and text in said, said


def test_a_closed_standard_output(monkeypatch):
    """With `gpukern info >&-`, Python's sys.stdout is None."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 0


def test_ticks_are_even_and_round():
    for top in (0.003, 0.9, 1.0, 7, 73.2, 99.9, 1234, 5e7):
        ticks = charts.even_ticks(top)
        steps = {round((b - a) / (ticks[1] - ticks[0]), 9) for a, b in zip(ticks, ticks[1:])}
        assert (
            steps == {1.0}
            and ticks[0] == 0
            and ticks[-2] < top <= ticks[-1] * (1 + 1e-9)
            and 4 <= len(ticks) <= 7
        )
    assert charts.even_ticks(90) == [0, 20, 40, 60, 80, 100] and charts.even_ticks(0) == [0, 1]
    assert charts.decades(0.5, 120) == [
        (0.5, False),
        (1, True),
        (2, False),
        (5, False),
        (10, True),
        (20, False),
        (50, False),
        (100, True),
    ]
    assert [charts.short(x) for x in (1000.0, 2.5, 0.05, 3.0)] == ["1,000", "2.5", "0.05", "3"]


def test_a_plot_says_what_stands_on_its_axes():
    for op, unit, across in (
        ("gemm", "GFLOP/s", "M = N = K"),
        ("paged_attn", "GB/s", "sequences of 2048 keys"),
    ):
        case = bench.BENCHES[op].cases(
            1 if op == "paged_attn" else 16, torch.float32, torch.device("cpu")
        )[0]
        assert case.unit == unit
        points = [
            bench.Measured(op, size, f"{op} {size}", 1e6, unit, {"gpukern": 9.0, "theirs": 11.0})
            for size in (16, 64)
        ]
        drawn = bench.plot(op, points)
        assert (
            f">{op}: {unit}</text>" in drawn
            and f">{across}</text>" in drawn
            and f">{unit}</text>" in drawn
        )
        assert "<path d=" in drawn and ">0</text>" in drawn
    assert case.work == 2 * 2048 * 8 * 128 * 4  # keys and values that one sequence reads
