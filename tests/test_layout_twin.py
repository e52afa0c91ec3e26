"""torch_gpukern.layout beside csrc/cuda/tile/layout.cuh: the same answers, and the same refusals.

Where several modes are to blame, they may name different ones."""

import random

import pytest
import test_layout
from test_layout import any_layout, ask, program, text  # noqa: F401  program is a fixture

from torch_gpukern import layout as L
from torch_gpukern.layout import Layout, Refusal


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


@pytest.mark.parametrize(
    "function", ["size", "cosize", "coalesce", "right_inverse", "complement", "compose", "divide", "product"]
)
def test_twin(program, function):  # noqa: F811
    rng, questions, calls = random.Random(function), [], []
    for _ in range(400):
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
