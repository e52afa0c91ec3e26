# SPDX-License-Identifier: BSD-3-Clause
"""csrc/cuda/layout, compiled for the host: its own test programs, and a comparison with
torch_gpukern.layout, which must put elements at the same places.

tests/data/layout.golden has questions and the answers that both must give: the current offsets,
fragments and descriptors. It is written by:

    PYTHONPATH=tests python tests/layout/test_layout_headers.py > tests/data/layout.golden
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from host_program import assert_passes, compiled

from torch_gpukern import layout as L
from torch_gpukern.layout import Layout, atoms

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "layout.golden"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled("check_layout", tmp_path_factory.mktemp("layout"))


def ask(program, questions):
    """The headers' answers to lines "what name ..."."""
    result = subprocess.run(
        [program, "dump"], input="\n".join(questions) + "\n", capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-300:]
    answers = result.stdout.splitlines()
    assert len(answers) == len(questions)
    return answers


def test_definitions(program):
    assert_passes(program)


# ---- the golden file -----------------------------------------------------------------------------

_MMA16, _MMA32 = atoms.mma_sync(16, 16), atoms.mma_sync(8, 32)
FRAGMENTS = {
    "c": _MMA16.c,
    "a16": _MMA16.a,
    "b16": _MMA16.b,
    "a32": _MMA32.a,
    "b32": _MMA32.b,
    "ldmatrix": atoms.ldmatrix(1).dst,
    "ldmatrix.trans": atoms.ldmatrix(1, trans=True).dst,
    "movmatrix": atoms.movmatrix().dst,
}
# (m or n, k) in elements, and the bytes of one. MN-major needs two panels for its leading offset to
# mean anything.
OPERANDS = {
    "k64": ("Sw<3,3,3> o 0 o (64,64):(64,1)", 2),
    "k128": ("Sw<3,3,3> o 0 o (128,64):(64,1)", 2),
    "mn128": ("Sw<3,3,3> o 0 o ((64,2),64):((1,4096),64)", 2),
    "tf32": ("Sw<3,2,3> o 0 o (64,32):(32,1)", 4),
}
# (columns, rows, planes) in elements, the bytes of one, and the swizzle's span in bytes.
BOXES = {
    "operand": ((64, 128, 1), 2, 128),
    "operand_tf32": ((32, 128, 1), 4, 128),
    "keys": ((64, 128, 1), 2, 128),
    "stacked": ((64, 16, 8), 2, 128),
    "results": ((64, 16, 1), 2, 128),
    "results_narrow": ((32, 16, 1), 2, 64),
    "plain": ((256, 8, 1), 4, 0),
}
TILES = {32: (1, 4, 3), 64: (2, 4, 3), 128: (3, 4, 3), 256: (3, 4, 4), 512: (3, 4, 5)}


def answer_of(question):
    """The answer by torch_gpukern.layout, in the format of the header's program."""
    kind, what, *more = question.split()
    if kind == "fragment":
        numbers = FRAGMENTS[what].offsets
    elif kind == "operand":
        operand, size = L.parse(OPERANDS[what][0]), OPERANDS[what][1]
        every = 16 // size
        numbers = [L.wgmma_descriptor(operand, elem_bytes=size, address=1024).bits]
        numbers += [operand(4 * x, k) * size for x in range(16) for k in range(0, 8 * every, every)]
    elif kind == "box":
        size, elem_bytes, span = BOXES[what]
        tensor = Layout((4096, 512, 64), (1, 4096, 4096 * 512))
        box = L.tma_box(tensor, size, elem_bytes=elem_bytes, swizzle=span)
        numbers = [box.smem, ",".join(map(str, box.box)), box.swizzle, box.bytes]
    elif kind == "ways":
        numbers = [L.ways([lane * int(more[0]) for lane in range(32)], int(what))]
    else:
        row_bytes = int(what)
        tile = L.Swizzled(L.Swizzle(*TILES[row_bytes]), Layout((16, row_bytes), (row_bytes, 1)))
        numbers = [tile(row, 16 * chunk) for row in range(16) for chunk in range(row_bytes // 16)]
    return " ".join(map(str, numbers))


PLACES = [
    *(f"fragment {name}" for name in FRAGMENTS),
    *(f"operand {name}" for name in OPERANDS),
    *(f"box {name}" for name in BOXES),
    *(f"tile {row_bytes}" for row_bytes in TILES),
    *(
        f"ways {access} {stride}"
        for access in (2, 4, 8, 16)
        for stride in (access, 3 * access, 128, 144)
    ),
]


def golden():
    return [line.split(" = ") for line in GOLDEN.read_text().splitlines()]


def test_golden_file_has_the_answers_of_torch_gpukern():
    pairs = golden()
    assert {question for question, _ in pairs} == set(PLACES)
    for question, want in pairs:
        assert answer_of(question) == want, question


@pytest.fixture(scope="module")
def box_program(tmp_path_factory):
    """tests/csrc/check_tma_box.cpp, compiled."""
    return compiled("check_tma_box", tmp_path_factory.mktemp("layout"))


def test_boxes_of_the_kernels(box_program):
    """Tiles have the layout of their boxes, tensor maps have the same fields as before, and boxes
    that TMA cannot describe are refused."""
    assert_passes(box_program)


def test_golden_boxes_are_the_headers(box_program):
    pairs = [pair for pair in golden() if pair[0].startswith("box ")]
    assert len(pairs) == len(BOXES)
    assert ask(box_program, [question for question, _ in pairs]) == [want for _, want in pairs]


def test_golden_file_is_the_headers(program):
    pairs = [pair for pair in golden() if not pair[0].startswith("box ")]
    assert ask(program, [question for question, _ in pairs]) == [want for _, want in pairs]


if __name__ == "__main__":
    print("\n".join(f"{question} = {answer_of(question)}" for question in PLACES))


# ---- device_print --------------------------------------------------------------------------------


def printed():
    """The expected output of tests/csrc/check_print.cpp, by torch_gpukern.layout."""
    lines = []
    for text in ("(4,8):(8,1)", "(5):(3)", "(2,2,2):(1,4,2)"):
        found = Layout(text)
        lines.append(text)
        if found.rank == 1:
            lines.append("".join(f"{o:5}" for o in found.offsets))
        elif found.rank == 2:
            lines += [
                "".join(f"{found(i, j):5}" for j in range(found[1].size))
                for i in range(found[0].size)
            ]
    tile = L.Swizzled(L.tma.span_swizzle(64), Layout((8, 64), (64, 1)))
    lines += [
        "8 rows of 64 bytes",
        *("".join(f"{tile(row, 16 * c):5}" for c in range(4)) for row in range(8)),
    ]
    return lines


def test_what_is_printed_on_the_host(tmp_path_factory):
    path = compiled("check_print", tmp_path_factory.mktemp("layout"))
    assert (
        subprocess.run([path], capture_output=True, text=True, check=True).stdout.splitlines()
        == printed()
    )


@pytest.mark.gpu
def test_what_is_printed_from_inside_a_kernel(tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not here")
    if not (ROOT / "csrc" / "cuda").is_dir():
        pytest.skip("csrc/cuda is not here")
    source, path = ROOT / "tests" / "csrc" / "check_print.cpp", tmp_path / "check_print"
    subprocess.run(
        [
            "nvcc",
            "-x",
            "cu",
            "-arch=native",
            "-I",
            ROOT / "csrc",
            "-I",
            ROOT / "csrc" / "include",
            source,
            "-o",
            path,
        ],
        check=True,
    )
    assert (
        subprocess.run([path], capture_output=True, text=True, check=True).stdout.splitlines()
        == printed()
    )
