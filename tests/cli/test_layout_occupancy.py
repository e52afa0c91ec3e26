# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern occupancy: the rules of an SM against cases worked out by hand, and what
it reads of a library."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from torch_gpukern import cli
from torch_gpukern.cli.occupancy import occupancy, parse_bounds, parse_usage

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "registers, threads, shared, arch, blocks, limiter",
    [
        (32, 256, 0, "sm_90", 8, "warps, registers"),  # 64 warps of 1024 registers fill both
        (168, 384, 220 << 10, "sm_90a", 1, "registers, shared memory"),  # 48 KB of registers
        (255, 128, 0, "sm_90", 2, "registers"),  # 8192 registers a warp: 8 warps
        (96, 128, 0, "sm_90", 5, "registers"),  # 3072 a warp: 21 warps, of which 20 lie in fours
        (16, 32, 0, "sm_90", 32, "blocks"),
        (16, 32, 0, "sm_86", 16, "blocks"),
        (64, 128, 80 << 10, "sm_80", 2, "shared memory"),  # 2 x 81 KB of 164
        (64, 128, 82 << 10, "sm_80", 1, "shared memory"),  # the reserved 1 KB of each does not fit
        (32, 1024, 0, "sm_86", 1, "warps"),
        (128, 1024, 0, "sm_90", 0, "registers"),  # cannot be launched
    ],
)
def test_blocks_of_an_sm(registers, threads, shared, arch, blocks, limiter):
    o = occupancy(registers, threads, shared, arch)
    assert (o.blocks, o.limiter) == (blocks, limiter)
    assert o.warps == blocks * -(-threads // 32)


def test_what_cuobjdump_says():
    usage = "arch = sm_90\n Function _Z3bigPf:\n  REG:12 STACK:0 SHARED:5120 LOCAL:0\n"
    assert parse_usage(iter(usage.splitlines())) == {("sm_90", "_Z3bigPf"): (12, 5120)}
    elf = ".nv.info._Z3bigPf\n\tAttribute:\tEIATTR_MAX_THREADS\n\tFormat:\tEIFMT_SVAL\n\tValue:\t0x180 0x1 0x1 \n"
    assert parse_bounds(iter(elf.splitlines())) == {"_Z3bigPf": 384}


def test_command_line(capsys, tmp_path):
    assert (
        cli.main(["occupancy", "--registers", "168", "--threads", "384", "--shared", "200000"]) == 0
    )
    assert "registers, shared memory" in capsys.readouterr().out
    assert cli.main(["occupancy", "GemmCooperative", "--threads", "384"]) == 0
    assert "GemmCooperative<bf16" in capsys.readouterr().out
    for wrong, text in (
        (["GemmCooperative"], "give --threads"),
        (["no such kernel", "--threads", "32"], "no kernel"),
        (["--registers", "300", "--threads", "32"], "0 to 255"),
        (["GemmCooperative", "--threads", "0"], "threads is 0; a block has 1 to 1024"),
        (["--from", str(tmp_path / "none.so")], "does not exist"),
    ):
        assert cli.main(["occupancy", *wrong]) == 1 and text in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("occupancy")
    del sys.modules["occupancy"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_measuring_needs_a_gpu(measured, tmp_path):
    with pytest.raises(RuntimeError, match="it asks the driver of a GPU; torch finds none"):
        measured.main([str(tmp_path / "x.cubin"), "--threads", "32"])


@pytest.mark.gpu
def test_the_driver_agrees_with_the_calculator(measured):
    """The occupancy of every rung of the ladder, with its static shared memory alone."""
    library = ROOT / "build" / "libgpukern_ladder.so"
    if not library.exists():
        pytest.skip(f"{library.name} is not built")
    _, *rows = measured.rows(library, "ladder_", None, 0)
    assert len(rows) == 22 and all(row[4] == row[5] for row in rows), rows


def test_an_installed_package_names_no_file_that_it_has_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys.modules["torch_gpukern.cli.occupancy"], "TABLE", tmp_path / "docs" / "resources.csv"
    )
    assert cli.main(["occupancy"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) not in said and "--from, or give --registers and --threads" in said
    assert (
        cli.main(["occupancy", "--from", str(tmp_path / "none.so")]) == 1
        and "none.so does not exist" in capsys.readouterr().err
    )
