# SPDX-License-Identifier: BSD-3-Clause
"""cmake/judged.py: which CUDA sources the whole check may leave unoptimised."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import judged  # noqa: E402

SOURCE = "csrc/cuda/a.cu"
RULES = """set(gk_cuda_flags_80 "-gencode=a")
macro(gk_cuda_objects target)
  target_compile_options(${target} PRIVATE --std)
endmacro()
function(other)
endfunction()
"""
FILES = {
    SOURCE: '#include "x.cuh"\n#include <cuda.h>\nint f(int *a) { return a[0] * a[1]; } // no\n',
    "csrc/cuda/x.cuh": '#include "core/y.h"\n#define X 1\nconst char *s = "/* kept */";\n',
    "csrc/core/y.h": "int y;\n",
    "csrc/core/unused.h": "int z;\n",
    judged.ALWAYS: "int x;\n",
    "cmake/GkRules.cmake": RULES,
    "docs/resources.csv": "kernel,registers\na,32\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    judged.write(tmp_path, "13.0")
    return tmp_path


def edited(tree, name, old, new):
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))
    return judged.drafts("13.0", tree)


def test_an_unchanged_source_is_a_draft(tree):
    assert judged.drafts("13.0", tree) == [SOURCE]


@pytest.mark.parametrize(
    "name, old, new",
    [
        (SOURCE, "// no", "/* other\n words */"),
        (SOURCE, " { return", "\n{\n    return"),
        (SOURCE, "int *a", "int * a"),
        ("csrc/cuda/x.cuh", "#define X 1", "#define X 1 /* one */"),
        ("csrc/core/unused.h", "int z", "int zz"),
        ("cmake/GkRules.cmake", "function(other)", "function(another)"),
    ],
)
def test_what_changes_no_code_leaves_it_a_draft(tree, name, old, new):
    assert edited(tree, name, old, new) == [SOURCE]


@pytest.mark.parametrize(
    "name, old, new",
    [
        (SOURCE, "a[1]", "a[2]"),
        ("csrc/cuda/x.cuh", "#define X 1", "#define X 2"),
        ("csrc/cuda/x.cuh", "#define X 1", "#define X\n1"),
        ("csrc/cuda/x.cuh", "/* kept */", "/* other */"),
        ("csrc/core/y.h", "int y", "long y"),
        ("cmake/GkRules.cmake", "-gencode=a", "-gencode=b"),
        ("cmake/GkRules.cmake", "--std", "--std --use_fast_math"),
        ("docs/resources.csv", "a,32", "a,255"),
    ],
)
def test_what_may_change_code_ends_it(tree, name, old, new):
    assert edited(tree, name, old, new) == []


def test_another_compiler_has_no_drafts(tree):
    assert judged.drafts("13.1", tree) == []


def test_without_a_record_there_are_no_drafts(tree):
    (tree / "docs" / "resources.txt").unlink()
    assert judged.drafts("13.0", tree) == []


def test_the_record_names_sources():
    assert set(judged.recorded()) <= set(judged.Tree(ROOT).sources())


def test_a_build_with_drafts_is_not_recorded(tmp_path):
    (tmp_path / "cuda_drafts.txt").write_text(SOURCE)
    with pytest.raises(SystemExit, match="has drafts"):
        judged.record(tmp_path, "13.0")
