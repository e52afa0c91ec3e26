# SPDX-License-Identifier: BSD-3-Clause
"""learn/quiz.md: there are twenty questions, every command prints its answer, and every named test
exists.
"""

import re
import shlex
from pathlib import Path

import pytest

from torch_gpukern import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "learn" / "quiz.md").read_text()
QUESTIONS = re.findall(r"^(\d+)\. (\*\*.*?)(?=^\d+\. |^## |\Z)", PAGE, re.M | re.DOTALL)
COMMANDS = [
    (number, *found[0])
    for number, text in QUESTIONS
    if (found := re.findall(r"`(python .*)` prints `(.*)`", text))
]


def test_there_are_twenty():
    assert [int(number) for number, _ in QUESTIONS] == list(range(1, 21))
    tests = "".join(
        path.read_text()
        for path in (
            *(ROOT / "tests").rglob("test_*.py"),
            *(ROOT / "learn" / "tests").glob("test_*.py"),
        )
    )
    for number, text in QUESTIONS:
        assert re.match(r"\*\*[^*]+\?\*\* \S", text), number
        found = re.findall(r"^ +`(test_\w+)`$", text, re.M)
        assert len(found) + (number in {n for n, *_ in COMMANDS}) == 1, number
        assert all(f"def {name}(" in tests for name in found), (number, found)


@pytest.mark.parametrize(
    "number, command, answer", COMMANDS, ids=[number for number, *_ in COMMANDS]
)
def test_the_command_prints_the_answer(number, command, answer, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "torch_gpukern"] and cli.main(words[3:]) == 0
    assert answer in capsys.readouterr().out
