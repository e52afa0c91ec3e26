# SPDX-License-Identifier: BSD-3-Clause
"""Every header of csrc and ops compiles alone, no header includes itself through others, and every
#include is at the top of its file. No build is needed: the compiler only checks the syntax."""

import functools
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# of headers; only nvcc reads a .cuh
SUFFIXES = ("*.h", "*.cuh")
X86 = platform.machine() in ("x86_64", "AMD64")

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function")
BASE = ("-march=x86-64",) if X86 else ()
AVX512 = (
    *BASE,
    *"-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl".split(),
    *"-mavx512bf16 -mavx512vnni".split(),
)
# The instruction sets whose headers differ most: floats as cells; pairs of bfloat16, on tiles.
ISAS = {"base": (*BASE, "-DGK_ISA=base")}
if X86:
    ISAS["amx_emulated"] = (*AVX512, "-DGK_ISA=amx_emulated", "-DAMX_TILES=0")


def headers(folder, suffix="*.h"):
    return sorted(p.relative_to(ROOT) for p in (ROOT / folder).rglob(suffix))


@functools.cache
def planned_in_c():
    """The headers that C files of csrc/cuda include, directly or through other headers."""
    found, left = set(), headers("csrc/cuda", "*.c")
    while left:
        there = {path for _, path in includes(left.pop())} - found
        found |= there
        left += there
    return found


def variants(header):
    """The ways in which a header is compiled: (compiler, flags)."""
    name = header.as_posix()
    if name.startswith("csrc/cuda/"):
        both = [("c++", ("-std=c++17",)), ("cc", ("-std=gnu11",))]
        return both if header in planned_in_c() else both[:1]
    if name.startswith("csrc/cpu/isa/"):
        return [("cc", ("-std=gnu11", *flags)) for flags in ISAS.values()]
    if name.startswith("csrc/cpu/amx/"):
        return [("cc", ("-std=gnu11", *ISAS["amx_emulated"]))] if X86 else []
    if name.startswith("csrc/include/"):  # users' programs: both languages, no warning
        return [("cc", ("-std=c11", "-pedantic")), ("c++", ("-std=c++17",))]
    if name.startswith("csrc/epilogue/"):  # with a user's epilogue, which is C++
        own = ROOT / "examples" / "epilogue" / "squared_relu.h"
        flags = (f"-I{CSRC / 'epilogue'}", "-DGPUKERN_EPILOGUE=squared_relu")
        return [("c++", ("-std=c++17", *flags, f'-DGPUKERN_EPILOGUE_HEADER="{own}"'))]
    return [("cc", ("-std=gnu11",))]


def errors(header, compiler, flags):
    found = os.environ.get({"cc": "CC", "c++": "CXX"}[compiler]) or compiler
    language = {"cc": "c", "c++": "c++"}[compiler]
    ran = subprocess.run(
        [*found.split(), "-fsyntax-only", f"-x{language}", *flags, *WARNINGS]
        + [f"-I{CSRC}", f"-I{CSRC / 'include'}", "-"],
        input=f'#include "{ROOT / header}"\n',
        capture_output=True,
        text=True,
    )
    return f"{header} {' '.join(flags)}\n{ran.stderr}" if ran.returncode else ""


def test_a_header_compiles_alone():
    for compiler in ("cc", "c++"):
        if not shutil.which(compiler):
            pytest.skip(f"no {compiler} on the path")
    jobs = [(h, *way) for h in headers("csrc") for way in variants(h)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [text for text in pool.map(lambda job: errors(*job), jobs) if text]
    assert not failed, "\n".join(failed)


def includes(path):
    """The files of ours that a file includes, with their line numbers."""
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        named = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not named:
            continue
        for folder in ((ROOT / path).parent, CSRC, CSRC / "include", ROOT / "ops"):
            if (folder / named[1]).is_file():
                yield number, (folder / named[1]).resolve().relative_to(ROOT)
                break


def test_no_header_includes_itself_through_others():
    @functools.cache
    def below(path):
        return tuple(there for _, there in includes(path))

    def visit(path, way):
        assert path not in way, " includes ".join(str(p) for p in (*way, path))
        if path not in done:
            for there in below(path):
                visit(there, (*way, path))
            done.add(path)

    done = set()
    for folder in ("csrc", "ops"):
        for suffix in SUFFIXES:
            for header in headers(folder, suffix):
                visit(header, ())


def late_includes(text):
    """Numbers of the lines with an #include behind code. A table of X-macros (.def) is exempt: it is
    included where it is used. Comments and macros do not count as code."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    text = re.sub(r"\\\n", "  ", text)
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r'\s*#\s*include\s+["<].*(?<!\.def)[">]', line) and code:
            yield number
        code = code or bool(line.strip() and not line.lstrip().startswith("#"))


def test_includes_are_at_the_top():
    assert list(late_includes('int f(void);\n#include "x.h"\n')) == [2]
    assert not list(
        late_includes('#define A \\\n 1\n/* head\n*/\n#include "x.h"\nA\n#include "o.def"')
    )
    suffixes = {".c", ".h", ".cpp", ".cu", ".cuh"}
    late = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("csrc", "ops")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes
        for number in late_includes(path.read_text())
    ]
    assert not late, f"an #include behind code: {late}"
