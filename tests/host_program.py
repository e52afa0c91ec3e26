# SPDX-License-Identifier: BSD-3-Clause
"""Compiles and runs tests/csrc/*.cpp: test programs of code in csrc/cuda that also runs on the CPU."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"


def compiled(name: str, folder: Path) -> Path:
    """tests/csrc/NAME.cpp, compiled into the folder. Skips the test without a C++ compiler."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [
        shutil.which("g++") or shutil.which("clang++")
    ]
    if compiler[0] is None:
        pytest.skip("no C++ compiler: install g++ or clang++, or set CXX")
    program = folder / name
    source = ROOT / "tests" / "csrc" / f"{name}.cpp"
    folders = "-I", ROOT / "csrc", "-I", ROOT / "csrc" / "include"
    result = subprocess.run(
        [*compiler, *FLAGS, *folders, source, "-o", program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return program


def assert_passes(program: Path) -> None:
    """Runs a test program that ends with a line "N passed, 0 failed"."""
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith(" passed, 0 failed")
