# SPDX-License-Identifier: BSD-3-Clause
"""docs/add_a_kernel.md: its commands add a kernel to a copy of the tree, and the result works."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_packaging import check_flags_and_static_library

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add_a_kernel.md"
KERNEL = ROOT / "examples" / "add_a_kernel" / "gemm_dot.c"

# prints the kernel that gk_explain_gemm names for a product of one row and N columns
WHICH = r"""
#include "gpukern.h"
#include <stdio.h>
int main(void) {
    for (int64_t n = 1; n < 3; ++n) {
        float a[9] = {0}, b[18] = {0}, out[2];
        gk_context ctx = GK_CONTEXT_INIT;
        gk_gemm_args args = GK_GEMM_ARGS_INIT;
        gk_explanation e = GK_EXPLANATION_INIT;
        args.a = (gk_tensor){.data = a, .ndim = 2, .shape = {1, 9}, .stride = {9, 1}};
        args.b = (gk_tensor){.data = b, .ndim = 2, .shape = {9, n}, .stride = {n, 1}};
        args.out = (gk_tensor){.data = out, .ndim = 2, .shape = {1, n}, .stride = {n, 1}};
        if (gk_explain_gemm(&ctx, &args, &e) != GK_OK) return puts(gk_last_error()), 1;
        puts(e.instance);
    }
}
"""


def commands():
    """The lines of the page's shell block."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block.splitlines()


def test_the_page_shows_the_kernel_as_it_is():
    """Every line of C on the page is a line of the file, in the same order. Two dots stand for what
    the page leaves out."""
    for block in re.findall(r"^```c\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        shown = block.split("    ..\n")[0]
        assert shown in KERNEL.read_text(), shown


# Files that may name an op of ops.def although the page does not list them: they serve its callers,
# tune it or draw it.
USERS = re.compile(
    r"torch_gpukern/(integrations|distributed|paged|tuning|nn|layout|cli|serve)/|torch_gpukern/(profiling|masks)\.py"
    r"|(csrc|ops)/epilogue/|csrc/core/(prefer|plan|internal|dispatch|status)\.|csrc/c(pu|uda)/kernels\.h|torch_gpukern/_library\.py|csrc/api/gemm_prefer\.c"
)


@functools.cache
def sources():
    """The text of each file of csrc, ops and the package, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for room in ("csrc", "ops", "torch_gpukern")
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".c", ".h", ".def", ".cu", ".cuh", ".cpp", ".py"}
    }


@pytest.mark.parametrize(
    "op",
    re.findall(
        r"^OP\w*\(\w+, (\w+),", (ROOT / "csrc" / "core" / "ops.def").read_text(), re.MULTILINE
    ),
)
def test_the_page_lists_every_file_of_an_op(op):
    """Every file of csrc, ops and the package that names an op or one of its passes has a line in
    the page's table. A kernel file may serve several ops, so for a path with `<op>` only the folder
    and a header beside the file count."""
    table = PAGE.read_text().split("## An op")[1].split("\n## ")[0]
    listed = re.findall(r"`([\w./<>]+/[\w./<>]+)`", table)
    patterns = [
        re.compile(
            re.sub(r"<op>\\\.\w+", r"\\w+\\.\\w+", re.escape(x))
            .replace("<room>", r"[\w/]+")
            .replace("<family>", r"\w+")
        )
        for x in listed
    ]
    named = re.compile(rf"\bgk_(\w+_)?{op}(?![a-z])|\bGK_OP_{op.upper()}\b|\"{op}[\"_(.]")
    found = [
        name
        for name, text in sources().items()
        # a search for the op alone is a hundred times as fast
        if (op in text or op.upper() in text) and named.search(text)
    ]
    assert len(found) >= 6, found
    assert [
        x for x in found if not USERS.search(x) and not any(p.fullmatch(x) for p in patterns)
    ] == []


# A stand-in for gcc. If this tree's own build has an object that is newer than all CPU sources, it
# copies that object; otherwise it calls the machine's gcc.
COMPILER = """#!/bin/sh
for argument; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
case $object in
*/csrc/cpu/isa/*.o | */csrc/cpu/amx/*.o)
    [ "{build}/$object" -nt "{newest}" ] && cp "{build}/$object" "$object" && exit
    ;;
esac
exec {compiler} "$@"
"""


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_copy_of_the_tree_gets_the_kernel(tmp_path):
    """The new kernel builds, is right on every instruction set, serves calls, and obeys the laws of
    the rooms. The build uses flags that users have, and ends as a static library
    (tests/build/test_packaging.py).

    Existing CPU kernels come from the build of this tree. The new one is compiled in every set, and
    vec.h keeps each set to its own instructions.
    """
    flags = "-march=native -ffast-math"
    debug = "-DCMAKE_C_FLAGS_DEBUG=-Ofast -O0"  # -O0 wins and compiles in a tenth of the time
    for name in ("csrc", "cmake", "tests/csrc", "examples/add_a_kernel", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    real = Path(shutil.which("gcc") or shutil.which("cc"))
    compiler = tmp_path / "bin" / real.name
    compiler.parent.mkdir()
    sources = [
        *(
            x
            for room in ("include", "core", "formats", "cpu")
            for x in (ROOT / "csrc" / room).rglob("*.*")
        )
    ]
    newest = max(sources, key=lambda x: x.stat().st_mtime)
    compiler.write_text(COMPILER.format(build=ROOT / "build", newest=newest, compiler=real))
    compiler.chmod(0o755)
    environment = os.environ | {
        "CC": str(compiler),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CMAKE_BUILD_TYPE": "Debug",
        "CFLAGS": flags,
        "GK_CHECK_SMALL": "1",
    }

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("git", "init", "--quiet")  # otherwise git apply would use the repository around the copy
    said = [
        run(*command.split(), *([debug] if command.startswith("cmake -B") else []))
        for command in commands()
    ]
    assert ", 0 failed" in said[4]
    (tmp_path / "which.c").write_text(WHICH)
    library = tmp_path / "build" / "kernel"
    run(
        "cc",
        "which.c",
        "-Icsrc/include",
        f"-L{library}",
        f"-Wl,-rpath,{library}",
        "-lgpukern",
        "-o",
        "which",
    )
    dot, other = run("./which").splitlines()
    assert dot.startswith("gemm_dot_f32_") and other.startswith("gemm_skinny_f32_")
    check_flags_and_static_library(tmp_path, library, flags, tmp_path / "installed")
