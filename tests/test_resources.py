"""What ptxas made of the CUDA kernels: no local memory, and the registers that docs/resources.csv says.

Needs the compiled library and the disassemblers, no GPU.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(os.environ.get("GPUKERN_BUILD_DIR", ROOT / "build")) / "libgpukern.so"
LISTED = ROOT / "docs" / "resources.csv"


def rows(text):
    return {row["kernel"]: row for row in csv.DictReader(text.splitlines())}


@pytest.fixture(scope="module")
def report():
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    command = [sys.executable, ROOT / "tools" / "ptxas_report.py", LIBRARY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = rows(text)
    if not found:
        pytest.skip("this build has no CUDA kernels")
    return found


def test_no_kernel_uses_local_memory(report):
    spilled = {n: r for n, r in report.items() if int(r["local_bytes"]) or int(r["LDL"]) or int(r["STL"])}
    assert not spilled, spilled


def test_every_kernel_is_listed(report):
    """After a change: python tools/ptxas_report.py build/libgpukern.so > docs/resources.csv"""
    assert set(report) == set(rows(LISTED.read_text()))


def test_registers_are_those_listed(report):
    """Another compiler may need some more, and some fewer blocks would fit; far more is another kernel."""
    listed = rows(LISTED.read_text())
    assert {
        n: (int(r["registers"]), int(listed[n]["registers"]))
        for n, r in report.items()
        if n in listed and int(r["registers"]) > int(listed[n]["registers"]) + 8
    } == {}


def test_matrix_kernels_multiply_on_tensor_cores(report):
    """A kernel named for sm80 has mma.sync in its hot loop, fed by ldmatrix."""
    tensor = {n: r for n, r in report.items() if re.search(r"_sm80_kernel", n)}
    assert not {n for n, r in tensor.items() if not int(r["HMMA"])}
