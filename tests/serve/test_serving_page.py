# SPDX-License-Identifier: BSD-3-Clause
"""docs/serving.md: its flags and fields are those of the code, and its programs run."""

import argparse
import re
from pathlib import Path

import pytest

from torch_gpukern.serve import Request, call, command
from torch_gpukern.serve.captured import Shapes

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_table_has_every_flag_and_its_default():
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_arguments(commands)
    flags = {
        a.option_strings[-1]: a for a in commands.choices["serve"]._actions if a.option_strings
    }
    del flags["--help"]
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| ([^|]*?) ?\|", PAGE, re.MULTILINE))
    assert rows.keys() == flags.keys()
    for flag, action in flags.items():
        if action.default is not None:
            assert float_or_text(rows[flag].strip("`")) == float_or_text(action.default), flag


def float_or_text(value):
    try:
        return float(value)
    except ValueError:
        return value


def test_the_table_has_every_field_of_the_drawing():
    table = PAGE.split("Fields of both calls:")[1].split("## What holds")[0]
    named = set(re.findall(r"`(\w+)`", "".join(x.split("|")[1] for x in table.splitlines() if x)))
    assert {*call.DRAWING, "n", "seed", "stop", "stream", "stream_options"} <= named
    assert {n for n in Request.__dataclass_fields__ if n in named} >= set(call.DRAWING)


def test_the_page_counts_the_captured_steps():
    shapes, trees = Shapes.upto(256, 3, 1), Shapes.upto(256, 3, 2)
    gib = sum(shape.rows for shape in shapes.all) * 128256 * 4 / 2**30
    assert f"they are {len(shapes.all)}, and their logits take {gib:.1f} GiB" in PAGE
    of = dict(
        re.findall(
            r"^\| (one|with drafts|with short prompts)[^|]* \| (\d+)[ :]", PAGE, re.MULTILINE
        )
    )
    assert [int(n) for n in of.values()] == [*map(len, shapes)]
    assert f"(`--draft-branches 2`: {len(trees.drafts)})" in PAGE


def test_the_program_runs(model_dir, capsys):
    (program,) = [x for x in CODE if "Engine(" in x]
    exec(program, {"directory": model_dir})
    assert capsys.readouterr().out.startswith("['")


def test_the_official_client_works(chat_served, capsys):
    pytest.importorskip("openai", reason="openai is not installed")
    (program,) = [x for x in CODE if "openai" in x]
    program = program.replace("localhost:8000", f"127.0.0.1:{chat_served.port}")
    exec(program.replace("Llama-3.2-1B", "tiny"), {})
    assert capsys.readouterr().out
