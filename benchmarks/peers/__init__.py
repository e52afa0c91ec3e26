# SPDX-License-Identifier: BSD-3-Clause
"""Readable counterparts of the kernels in other languages, and how many lines each has: what a
peer's speed costs to read."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
CUDA = CSRC / "cuda"
HAVE_TRITON = find_spec("triton") is not None


def python_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text()
    said = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
            said.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and i not in said
        for i, line in lines
    )


def own_lines(path: Path) -> int:
    """Lines of one CUDA file, without comments and blank lines."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.splitlines())


def cuda_lines(source: str) -> int:
    """Lines of a kernel file and of all that it includes from csrc/cuda and its own folder, without
    comments and blank lines.
    """
    todo, seen, count = [ROOT / source], set(), 0
    rooms = CUDA, (ROOT / source).parent
    while todo:
        path = todo.pop().resolve()
        if path in seen or not any(map(path.is_relative_to, rooms)):
            continue
        seen.add(path)
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        count += own_lines(path)
        for name in re.findall(r'#include "([^"]+)"', text):
            todo += [p for p in (CSRC / name, path.parent / name) if p.exists()]
    return count


def lines_of(op: str) -> dict[str, int]:
    """Lines of code of an op's forward kernel: ours for Hopper, with all that it stands on, and
    Triton's."""
    ours = {
        "gemm": "csrc/cuda/product/gemm/gemm_sm90a.cu",
        "flash_attn": "csrc/cuda/attn/forward/flash_attn_fwd_sm90a.cu",
    }[op]
    return {"gpukern": cuda_lines(ours), "Triton": python_lines(HERE / f"triton_{op}.py")}


def lines_of_languages() -> dict[str, int]:
    """Lines of code of each way to a @ b and a + b of bench_languages. A Python file counts as a
    whole. Our CUDA counts twice: the file alone, and with all that it includes.
    """
    short, vector = "learn/ladder/18_short_sm90a.cu", "learn/patterns/vector_add.cu"
    found = {
        "a @ b, gpukern": cuda_lines("csrc/cuda/product/gemm/gemm_sm90a.cu"),
        "a @ b, rung 18": own_lines(ROOT / short),
    }
    found["a @ b, rung 18 with its headers"] = cuda_lines(short)
    found["a @ b, CUTLASS"] = own_lines(HERE / "cutlass_gemm.cu")
    for name, module in (
        ("CuTe DSL", "cute_gemm"),
        ("Triton", "triton_gemm"),
        ("Triton, persistent", "triton_persistent_gemm"),
    ):
        found[f"a @ b, {name}"] = python_lines(HERE / f"{module}.py")
    found["a + b, CUDA C, three ways"] = own_lines(ROOT / vector)
    found["a + b, CuTe DSL, both ways"] = python_lines(HERE / "cute_add.py")
    found["a + b, Triton, the kernel"] = kernel_lines(HERE / "triton_rows.py")["add"]
    return found


def kernel_lines(path: Path) -> dict[str, int]:
    """Lines of code of each Triton kernel in a file, by its name without `_kernel`, and without
    what it calls."""
    text = path.read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            said = ast.get_docstring(node) is not None
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            docs = node.body[0].end_lineno - node.body[0].lineno + 1 if said else 0
            found[node.name.removesuffix("_kernel")] = (
                sum(bool(line.strip()) for line in lines) - docs
            )
    return found
