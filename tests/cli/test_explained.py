# SPDX-License-Identifier: BSD-3-Clause
"""`explain gemm --arch` gives the same answers in a build with nvcc and in one without.

`explained.jsonl` has the answers of a build with nvcc, and every build must give them. After a
change of instances or of the planner's numbers, `python tests/cli/test_explained.py` writes the
file again."""

import contextlib
import ctypes
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torch_gpukern import _library
from torch_gpukern.cli import main

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = Path(__file__).with_name("explained.jsonl")
CALLS = 5_000  # random calls that the two libraries must answer alike


def answer(call):
    """The answer to a call of `explain gemm`, without the list of other instances."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["explain", "gemm", *call.split(), "--json"]) == 0
    found = json.loads(said.getvalue())
    return {key: found[key] for key in found if key not in ("instances", "rows", "row")}


def lines():
    return [json.loads(line) for line in ANSWERS.read_text().splitlines()]


@pytest.mark.parametrize("expected", lines(), ids=lambda line: line["call"])
def test_every_build_gives_the_same_answer(expected):
    assert answer(expected["call"]) == expected["answer"]


def without_nvcc(folder):
    """Builds a library of the sources that explain a gemm in a build without nvcc. It lacks the CPU
    kernels: their symbols are bound lazily, and nothing calls them."""
    compiler = shutil.which((os.environ.get("CC") or "cc").split()[0])
    if not compiler:
        pytest.skip("no C compiler on the path")
    csrc = ROOT / "csrc"
    sources = [
        *(csrc / "core").glob("*.c"),
        *(csrc / "api").glob("*.c"),
        *(csrc / "cuda").rglob("*.c"),
        csrc / "cpu" / "features.c",
        Path(__file__).with_name("explain_twice.c"),
    ]
    built = folder / "libexplains.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-fno-fast-math", "-ffp-contract=fast", "-shared"]
    linked = ["-Wl,-Bsymbolic", "-Wl,-z,lazy", "-lm", "-lpthread", "-o", built]
    command = [compiler, *flags, f"-I{csrc}", f"-I{csrc / 'include'}", *sources, *linked]
    subprocess.run(command, check=True)
    return built


class Library(ctypes.Structure):
    """The struct `library` of explain_twice.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("arch", "explain", "instances", "error")]


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
def test_tables_without_nvcc_answer_as_those_with_it(tmp_path):
    with_nvcc = ctypes.CDLL(_library.FILE)
    names = ("gk_cuda_arch", "gk_explain_gemm", "gk_gemm_instances", "gk_last_error")
    other = Library(*(ctypes.cast(getattr(with_nvcc, name), ctypes.c_void_p) for name in names))
    explain_twice = ctypes.CDLL(without_nvcc(tmp_path), mode=os.RTLD_LAZY).explain_twice
    explain_twice.restype = ctypes.c_int64
    difference = ctypes.create_string_buffer(3 * 8192)
    different = explain_twice(ctypes.byref(other), ctypes.c_int64(CALLS), difference)
    assert different == 0, difference.value.decode()


if __name__ == "__main__":
    asked = [line["call"] for line in lines()]
    made = [json.dumps({"call": call, "answer": answer(call)}) + "\n" for call in asked]
    ANSWERS.write_text("".join(made))
