# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.layout beside csrc/cuda/layout: the same answers, and the same refusals.

Where several modes are to blame, they may name different ones. tests/data/layout.golden holds questions and answers that
both are held to, today's offsets, fragments and descriptors among them:

    python tests/test_layout_twin.py > tests/data/layout.golden
"""

import random
import subprocess
from pathlib import Path

import pytest
import test_layout
from test_layout import any_layout, ask, compiled, program, text  # noqa: F401  program is a fixture

from torch_gpukern import layout as L
from torch_gpukern.layout import Layout, Refusal, atoms

GOLDEN = Path(__file__).resolve().parent / "data" / "layout.golden"
FUNCTIONS = ("size", "cosize", "coalesce", "right_inverse", "complement", "compose", "divide", "product")


def ours(function, *arguments):
    calls = {
        "coalesce": L.coalesce,
        "right_inverse": L.right_inverse,
        "complement": L.complement,
        "compose": L.compose,
        "divide": L.logical_divide,
        "product": L.logical_product,
        "size": L.size,
        "cosize": L.cosize,
    }
    try:
        answer = calls[function](*arguments)
    except Refusal as no:
        return f"none {no.mode}"
    return answer


def asked(function, count):
    """Random questions, as lines for the header's program and as arguments."""
    rng, questions, calls = random.Random(function), [], []
    for _ in range(count):
        first = any_layout(rng)
        arguments = [Layout(*first)]
        words = [function, text(first)]
        if function == "complement":
            arguments.append(rng.randint(1, 200))
            words.append(str(arguments[-1]))
        elif function in ("compose", "divide", "product"):
            second = any_layout(rng)
            arguments.append(Layout(*second))
            words.append(text(second))
        questions.append(" ".join(words))
        calls.append(arguments)
    return questions, calls


@pytest.mark.parametrize("function", FUNCTIONS)
def test_twin(program, function):  # noqa: F811
    questions, calls = asked(function, 400)
    differ = []
    for question, arguments, answer in zip(questions, calls, ask(program, questions)):
        mine = ours(function, *arguments)
        if isinstance(mine, int):
            same = answer == str(mine)
        elif isinstance(mine, str):
            same = answer.startswith("none")
        else:
            theirs = test_layout.parse(answer)
            flat = mine.flat()
            same = theirs is not None and theirs == (tuple(s for s, _ in flat.leaves), tuple(d for _, d in flat.leaves))
        if not same:
            differ.append((question, answer, str(mine)))
    assert not differ, differ[:5]


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
# (m or n, k) in elements, and the bytes of one. MN-major needs two panels for its leading offset to mean anything.
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


def placed(words):
    """What lies where, by the twin, as the header's program prints it."""
    kind, what, *more = words
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
    *(f"ways {access} {stride}" for access in (2, 4, 8, 16) for stride in (access, 3 * access, 128, 144)),
]


def answer_of(question):
    """The twin's answer as the program prints it; of a refusal the word alone, since they may blame different modes."""
    function, *words = question.split()
    if function not in FUNCTIONS:
        return placed([function, *words])
    answer = ours(function, *(Layout(w) if ":" in w else int(w) for w in words))
    if isinstance(answer, int):
        return str(answer)
    if isinstance(answer, str):
        return "none"
    flat = answer.flat()
    return text((tuple(s for s, _ in flat.leaves), tuple(d for _, d in flat.leaves)))


def golden():
    return [line.split(" = ") for line in GOLDEN.read_text().splitlines()]


def test_golden_file_is_the_twins():
    pairs = golden()
    assert {q.split()[0] for q, _ in pairs} == {*FUNCTIONS, "fragment", "operand", "box", "tile", "ways"}
    assert not {question for question in PLACES} - {question for question, _ in pairs}
    for question, want in pairs:
        assert answer_of(question) == want, question


@pytest.fixture(scope="module")
def box_program(tmp_path_factory):
    """tests/csrc/check_tma_box.cpp, compiled."""
    return compiled("check_tma_box", tmp_path_factory)


def test_boxes_of_the_kernels(box_program):
    """Tiles lie as their boxes say, tensor maps have the fields that they had, and what TMA cannot lay is refused."""
    result = subprocess.run([box_program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith(" passed, 0 failed")


def test_golden_boxes_are_the_headers(box_program):
    pairs = [pair for pair in golden() if pair[0].startswith("box ")]
    assert len(pairs) == len(BOXES)
    assert ask(box_program, [question for question, _ in pairs]) == [want for _, want in pairs]


def test_golden_file_is_the_headers(program):  # noqa: F811
    pairs = [pair for pair in golden() if not pair[0].startswith("box ")]
    for (question, want), answer in zip(pairs, ask(program, [question for question, _ in pairs])):
        if want == "none":
            assert answer.startswith("none "), question
        elif ":" in want:
            assert test_layout.parse(answer) == test_layout.parse(want), question
        else:
            assert answer == want, question


if __name__ == "__main__":
    questions = PLACES + [question for function in FUNCTIONS for question in asked(function, 25)[0]]
    print("\n".join(f"{question} = {answer_of(question)}" for question in questions))
