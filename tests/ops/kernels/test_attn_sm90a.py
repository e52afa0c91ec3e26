# SPDX-License-Identifier: BSD-3-Clause
"""Parts of flash_attn_fwd_sm90a, compiled for the host: its tile order
(csrc/cuda/attn/forward/fwd_schedule.cuh), its operands in shared memory (wgmma_panels of
csrc/cuda/layout/wgmma.cuh), and the registers that two products share. test_pipeline_attn.py tests
its barriers.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_tiles_operands_and_registers(tmp_path):
    compiler = shlex.split(os.environ.get("CXX", "")) or [
        shutil.which("g++") or shutil.which("clang++")
    ]
    if compiler[0] is None:
        pytest.skip("no C++ compiler: install g++ or clang++, or set CXX")
    program = tmp_path / "check_attn_sm90a"
    source = ROOT / "tests" / "csrc" / "check_attn_sm90a.cpp"
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
