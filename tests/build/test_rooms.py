# SPDX-License-Identifier: BSD-3-Clause
"""The laws of the rooms hold in this tree, and tools/check_rooms.py finds each kind of breach."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_gpukern

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_rooms.py"


def check_rooms(root):
    """Exit status and output lines of tools/check_rooms.py on a tree."""
    result = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True)
    return result.returncode, result.stdout.splitlines()


LICENSE = "SPDX-License-Identifier: BSD-3-Clause"


def test_this_tree():
    status, lines = check_rooms(ROOT)
    assert status == 0, "\n".join(lines)


BREACHES = {
    "torch in csrc": ("csrc/a.c", "#include <torch/csrc/stable/c/shim.h>\n", "law 1"),
    "C++ in csrc": ("csrc/a.c", "#include <vector>\n", "law 1"),
    "ATen in ops": ("ops/checks.h", "#include <ATen/ATen.h>\n", "law 1"),
    "csrc's inside in ops": ("ops/checks.h", '#include "core/internal.h"\n', "law 1"),
    "the ladder in a kernel": (
        "csrc/cuda/product/gemm/a.cu",
        '#include "../ladder/rungs.cuh"\n',
        "law 1",
    ),
    "ctypes in Python": ("torch_gpukern/a.py", "import ctypes\n", "law 1"),
    "asm in a kernel": ("csrc/cuda/product/gemm/a_sm80.cu", 'asm volatile("nop;");\n', "law 2"),
    "arch macro": ("csrc/cuda/product/gemm/a.cu", "#if __CUDA_ARCH__ >= 900\n#endif\n", "law 3"),
    "arch suffix": ("csrc/cuda/product/gemm/a_sm75.cu", "\n", "law 3"),
    "ISA macro": ("csrc/cpu/gemm.c", "#ifdef __AVX2__\n#endif\n", "law 3"),
    "tile number": ("csrc/cpu/gemm.c", "#define KC 256\n", "law 4"),
    "row without reason": ("csrc/cpu/blocks.h", "\nstatic const blocks x = {1, 2};\n", "law 4"),
    "missing companions": ("ops/a.cpp", "\n", "law 5"),
    "vague name": ("csrc/utils.c", "\n", "a file says what it holds"),
    "no license": ("tests/test_a.py", '"""Says."""\n', "begins with its SPDX line"),
    "no license in C": ("csrc/a.c", "/* a.c: what it is. */\n", "begins with its SPDX line"),
    "dead code": ("csrc/a.c", "// x = f(y);\n", "commented-out"),
    "retired word": ("csrc/a.c", "/* The product is turned. */\n", "say: swap-AB"),
    "retired words": ("tests/test_a.py", '"""Rows that begin anywhere."""\n', "say: misaligned"),
    "retired name": ("torch_gpukern/a.py", "def let_go():\n    pass\n", "say: release"),
    "retired in a name": ("csrc/cpu/isa/a.c", "int GK_FEW_ROWS4;\n", "say: small M"),
    "retired in comments": ("csrc/a.c", "/* the class of a call */\n", "say: tuning key"),
    "unfinished": ("docs/a.md", "TO" + "DO: all of it\n", "unfinished"),
    "default of a dtype": (
        "csrc/a.c",
        "int f(int x) {\n    switch (x) {\n    case GK_BF16: return 2;\n    default: return 4;\n  "
        "  }\n}\n",
        "a dtype without a case",
    ),
    "entry of a docstring": (
        "torch_gpukern/a.py",
        'def f(x, y):\n    """Adds.\n\n    Args:\n        x: one\n        number. y: another.\n    """\n',
        "indent the lines of an entry",
    ),
    "blanks": ("docs/a.md", "a \n", "blanks"),
    "no newline": ("docs/a.md", "a", "no newline"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_breach_is_seen(tmp_path, name):
    path, text, law = BREACHES[name]
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    status, lines = check_rooms(tmp_path)
    assert status == 1
    assert all(line.startswith(path) for line in lines[:-1]), lines
    assert any(law in line for line in lines), lines


def test_what_is_allowed(tmp_path):
    """Each line is allowed in the file where it stands; the same lines in other files are breaches
    above."""
    allowed = {
        "csrc/cuda/ptx/mma.cuh": 'asm volatile("nop;");\n',
        "csrc/cpu/isa/vec.h": "#if defined(__AVX2__)\n#include <immintrin.h>\n#endif\n#define MR "
        "6 /* why */\n",
        "csrc/cpu/blocks.h": "#define KC 256 /* fits L2 */\nstatic const blocks x = {1, 2}; /* "
        "why */\n",
        "csrc/a.c": '#include "internal.h"\n\n#include <stdatomic.h>\n\n/* asm() in a comment '
        "*/\n// why: f(x) may fail;\n",
        "csrc/cuda/a.cuh": "struct a {  // no function\n    int f() {\n"
        + "        g();\n" * 120
        + "    }\n};\n",
        "ops/schema.cpp": "#include <torch/csrc/stable/library.h>\n\n#include "
        '<string>\n\n#include "gpukern.h"\n',
        "torch_gpukern/a.py": "import torch\n\n\nclass A:\n    slots = 1  # of a cache\n",
        "csrc/b.c": 'f("it is not a class, turned"); /* it is turned off */\n',
        "docs/worklog/a.md": "A skewed row in turns.\n",
    }
    for path, text in allowed.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        license = {".md": "", ".py": f"# {LICENSE}\n"}.get(Path(path).suffix, f"/* {LICENSE} */\n")
        (tmp_path / path).write_text(license + text)
    assert check_rooms(tmp_path) == (0, ["0 breaches of the laws of the rooms"])


def test_five_companions(tmp_path):
    """An op with its five companion files and its schema passes. Without any one of them it does
    not."""
    stem = "flash_attn"
    files = [
        f"torch_gpukern/ops/{stem}.py",
        f"tests/ops/test_{stem}.py",
        f"benchmarks/bench_{stem}.py",
        f"docs/worklog/{stem}.md",
        f"ops/{stem}.cpp",
        "ops/schema.cpp",
    ]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "ops/schema.cpp").write_text(
        f'// {LICENSE}\nm.def("{stem}(Tensor q) -> Tensor");\n'
    )
    assert check_rooms(tmp_path)[0] == 0
    for path in files[:4]:
        one_less = tmp_path.with_name("one_less")
        shutil.copytree(tmp_path, one_less)
        (one_less / path).unlink()
        assert check_rooms(one_less) == (
            1,
            [f"ops/{stem}.cpp:1: law 5: {path} is missing", "1 breaches of the laws of the rooms"],
        )
        shutil.rmtree(one_less)


def reached(needs, name):
    """All modules that a module imports, directly or through others."""
    found, ahead = set(), list(needs[name])
    while ahead:
        if (next_ := ahead.pop()) not in found:
            found.add(next_)
            ahead += needs[next_]
    return found


def test_no_module_imports_what_imports_it():
    """No import cycles, not even inside a function or for types only: a module can be read without
    the modules that use it."""
    package = ROOT / "torch_gpukern"
    files = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in package.rglob("*.py")
    }
    needs = {name: set() for name in files}
    for name, file in files.items():
        here = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = (
                    here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
                )
                source = ".".join([*base, *filter(None, [node.module])])
                found = {f"{source}.{alias.name}" for alias in node.names} & files.keys()
                needs[name] |= found or ({source} & files.keys())
    reach = {name: reached(needs, name) for name in needs}
    circles = {
        frozenset(x for x in reach[name] if name in reach[x])
        for name in reach
        if name in reach[name]
    }
    assert [sorted(x) for x in circles] == []


# --------------------------------------------------------------------------------------------------
# the figures of docs/decisions.md, "What a change costs"


def figures(row):
    """The last column of a row of that table."""
    (found,) = re.findall(
        rf"^\| {row} \|.*\| (.*) \|$", (ROOT / "docs" / "decisions.md").read_text(), re.MULTILINE
    )
    return found


def test_functions_of_an_eager_call(monkeypatch):
    """Counts Python's functions from the public one to the op, in a process without DTensor."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    a, q = torch.randn(8, 8), torch.randn(1, 2, 8, 8)
    calls = (lambda: torch_gpukern.gemm(a, a)), (lambda: torch_gpukern.flash_attn(q, q, q))
    found = []
    for call in calls:
        call()  # the first call fills caches
        seen = set()

        def note(frame, event, _, seen=seen):
            code = frame.f_code
            if (
                event == "call"
                and "torch_gpukern" in code.co_filename
                and not code.co_name.startswith("<")
            ):
                seen.add((code.co_filename, code.co_name))

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        found.append((len(seen), len({file for file, _ in seen})))
    said = re.match(
        r"(\d+) functions in (\d+) files, (\d+) in (\d+)",
        figures("an eager gemm, an eager flash_attn in Python"),
    )
    assert found == [tuple(map(int, said.groups()[:2])), tuple(map(int, said.groups()[2:]))]


def test_the_life_of_a_call_names_what_is_there():
    """Each function of that table is in the file beside it, or in the file that its cell names."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rows = page.partition("| file | function | does |")
    rows = rows[: rows.index("\n\n")].strip().split("\n")[1:]
    assert len(rows) == 6
    for row in rows:
        file, functions, does = (cell.strip() for cell in row.strip("|").split(" | "))
        file = Path(file.strip("`"))
        names = [
            (rf"\b{name}\b", file.with_name(other) if other else file)
            for name, other in re.findall(r"`(\w+)`(?: \(`([\w.]+)`\))?", functions)
        ]
        for owner, method, there in re.findall(r"`(\w+)\.(\w+)` in `([\w/.]+)`", does):
            names += [(rf"class {owner}\b[\s\S]*def {method}\b", f"torch_gpukern/{there}")]
        for name, there in names:
            assert re.search(name, (ROOT / there).read_text()), f"{name} is not in {there}"


def test_sources_that_name_an_op_or_an_activation():
    """The page gives bounds, so that a change fails only if it makes them wrong."""
    kinds = {".c", ".h", ".def", ".cu", ".cuh", ".cpp", ".py"}
    sources = [
        x.read_text().lower()
        for room in ("csrc", "ops", "torch_gpukern")
        for x in (ROOT / room).rglob("*")
        if x.suffix in kinds
    ]
    for row, word, said in (
        ("an op", "dropout_add", r"at most (\d+) sources name it"),
        ("an activation", "gelu_tanh", r"at most (\d+): "),
    ):
        found = sum(word in text for text in sources)
        bound = int(re.search(said, figures(row))[1])
        assert 0 < found <= bound, f"{found} sources name {word}, not at most {bound}"
