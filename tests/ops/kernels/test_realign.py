# SPDX-License-Identifier: BSD-3-Clause
"""Misaligned matrices, with the kernels' code compiled for the host: copies of them
(csrc/cuda/product/gemm/realign.cuh) and loads of their rows to shared memory (misaligned.cuh).
Contents must be right, and nothing outside may be read.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_misaligned_on_the_host(tmp_path):
    compiler = shlex.split(os.environ.get("CXX", "")) or [
        shutil.which("g++") or shutil.which("clang++")
    ]
    if compiler[0] is None:
        pytest.skip("no C++ compiler: install g++ or clang++, or set CXX")
    program = tmp_path / "check_realign"
    source = ROOT / "tests" / "csrc" / "check_realign.cpp"
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        ROOT / "csrc",
        "-I",
        ROOT / "csrc" / "include",
    ]
    result = subprocess.run(
        [*compiler, *flags, source, "-o", program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith(" passed, 0 failed")
