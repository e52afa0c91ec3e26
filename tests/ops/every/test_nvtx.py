# SPDX-License-Identifier: BSD-3-Clause
"""GPUKERN_NVTX: the C library's ranges are there when they are asked for, balanced, and without a
trace otherwise."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
CC = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")

# Stands for the toolkit's header.
HEADER = "int nvtxRangePushA(const char *name);\nint nvtxRangePop(void);\n"
PROGRAM = """
#include <stdio.h>
#include "core/nvtx.h"
static int depth;
int nvtxRangePushA(const char *name) { return printf("%d %s\\n", ++depth, name); }
int nvtxRangePop(void) { return depth--; }
static int inner(int x) { printf("run\\n"); return x + 1; }
static int outer(int x) { int status; GK_IN_RANGE(status, "inner", inner(x)); return status; }
int main(void) {
    int status;
    GK_IN_RANGE(status, "outer", outer(1));
    printf("%d\\n", status);
    return depth;
}
"""


@pytest.fixture
def compiled(tmp_path):
    def compile_(source, *options):
        (tmp_path / "nvtx3").mkdir(exist_ok=True)
        (tmp_path / "nvtx3" / "nvToolsExt.h").write_text(HEADER)
        made = tmp_path / "made"
        command = [
            CC,
            "-std=c11",
            "-O2",
            "-Wall",
            "-Werror",
            f"-I{CSRC}",
            f"-I{CSRC}/include",
            f"-isystem{tmp_path}",
            *options,
            source,
            "-o",
            made,
        ]
        subprocess.run(command, check=True)
        return made

    return compile_


@pytest.mark.parametrize("on", [False, True])
def test_the_library_names_nvtx_only_when_asked(on, compiled):
    made = compiled(CSRC / "core" / "dispatch.c", "-c", *(["-DGPUKERN_NVTX"] if on else []))
    assert (b"nvtxRangePushA" in made.read_bytes()) == on


@pytest.mark.parametrize("on", [False, True])
def test_ranges_nest_and_end(on, compiled, tmp_path):
    source = tmp_path / "program.c"
    source.write_text(
        PROGRAM
        if on
        else PROGRAM.replace(
            "static int depth;", "#include <nvtx3/nvToolsExt.h>\nstatic int depth;"
        )
    )
    program = compiled(source, *(["-DGPUKERN_NVTX"] if on else []))
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == ("1 outer\n2 inner\nrun\n2\n" if on else "run\n2\n")
