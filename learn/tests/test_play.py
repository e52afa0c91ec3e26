# SPDX-License-Identifier: BSD-3-Clause
"""learn/play.html: its formulas and costs are those of torch_gpukern.layout.

The functions of the page run in node, the page itself in a browser, where they are installed.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import browser
import pytest

from torch_gpukern import layout as L
from torch_gpukern.layout.pictures import MAX_CELLS

LEARN = Path(__file__).resolve().parents[1]
PAGE = LEARN / "play.html"
sys.path.insert(0, str(LEARN / "benchmarks"))
import play_tables  # noqa: E402

DRIVER = """
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = asked.map(([layout, swizzle, element, access]) => {
  let offsets = null;
  try {
    const made = parse(layout, swizzle);
    offsets = made.offsets;
    return [offsets, accesses(made, element, access).map(saying)];
  } catch (error) {
    return [offsets, null];
  }
});
console.log(JSON.stringify(answers));
"""


def in_node(asked):
    """[offsets, what is said of the accesses] of each (layout, swizzle, element, access); None where
    the page refuses."""
    node = shutil.which("node") or shutil.which("nodejs")
    if not node:
        pytest.skip("node is not installed")
    script = re.search(r'<script id="model">\n(.*?)</script>', PAGE.read_text(), re.DOTALL)[1]
    done = subprocess.run(
        [node, "-e", script + DRIVER], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_python(layout, swizzle, element, access):
    try:
        made = L.parse(f"{swizzle} o {layout}" if swizzle else layout)
        if made.size > MAX_CELLS:
            return [None, None]
        offsets = list(made.offsets)
    except ValueError:
        return [None, None]
    try:
        return [offsets, [str(a) for a in L.banks.accesses(made, element, access)]]
    except ValueError:
        return [offsets, None]


def shapes(rng, depth=0):
    """(shape, stride) of random nesting, as text."""
    if depth == 2 or rng.random() < 0.4:
        return str(rng.choice((1, 2, 3, 4, 8, 16))), str(
            rng.choice((0, 1, 1, 2, 4, 5, 8, 16, 33, 64, -1))
        )
    parts = [shapes(rng, depth + 1) for _ in range(rng.choice((1, 2, 2, 3)))]
    return tuple("(" + ",".join(p[i] for p in parts) + ")" for i in (0, 1))


def formulas():
    rng = random.Random(20261128)
    for _ in range(600):
        shape, stride = shapes(rng)
        bits = rng.randint(0, 4)
        swizzle = f"Sw<{bits},{rng.randint(0, 4)},{rng.choice((-1, 1)) * rng.randint(bits, 6)}>"
        element = rng.choice((1, 2, 4, 8, 16))
        layout = shape if rng.random() < 0.1 else f"{shape}:{stride}"
        yield layout, rng.choice(("", swizzle)), element, rng.choice((1, 2, 4, 8, 16))


# What a person may type: refused by both, or taken by both.
TYPED = [
    (text, "", 2, 2)
    for text in (
        "", "(", "4:", "(4,8):(8)", "4:1:2", "(4,8)(8,1)", "4 8", "(0,2):(1,2)", "m=4:1", "()",
        "(m=4,n=8):(8,1)", "(m=4,m=8):(8,1)", "(4,(m=2,3))", "(4,8):(m=8,1)", "(m=4,8):(8,1)",
        " ( 4 , 8 ) : ( 8 , 1 ) ", "4,8", "((4,2),8):((1,4),8)", "-4:1", "x",
        "Sw<3,3,3> o 0 o (8,64):(64,1)", "Sw<3,3,3> o (8,64):(64,1)", "Swizzle<1,2,3> o 5 o 8:1",
        "Sw<3,3,2> o 8:1", "Sw<3,3> o 8:1", "Sw<1,0,1> o x o 8:1",
    )
]  # fmt: skip


def test_the_tables_are_those_of_python():
    page = PAGE.read_text()
    assert play_tables.with_tables(page) == page, "run python learn/benchmarks/play_tables.py"


def test_the_functions_are_those_of_python():
    asked = [*formulas(), *TYPED]
    answers = in_node(asked)
    taken = 0
    for one, answer in zip(asked, answers, strict=True):
        assert answer == in_python(*one), one
        taken += answer[1] is not None
    assert taken > 100


def test_the_examples_in_node():
    examples = play_tables.tables()["examples"]
    asked = [(e["layout"], e["swizzle"], e["element"], e["access"]) for e in examples]
    for example, (_, said) in zip(examples, in_node(asked), strict=True):
        assert said == example["says"], example["name"]
        # the name tells the walk that it draws
        (figure,) = re.findall(r"(\d+)-way|: (free)", example["name"]) or [("", "")]
        line = said[example["walk"]]
        assert figure == ("", "") or (f"{figure[0]}-way" if figure[0] else "free") in line


@pytest.mark.parametrize(
    "layout, swizzle, outlined",
    [("(8,64):(64,1)", "", 64), ("(8,64):(64,1)", "3,3,3", 64), ("(4,8):(1,8)", "", 0)],
)
def test_the_page_draws(layout, swizzle, outlined, tmp_path):
    """Its result, its cells, and the elements that the first phase reads, or why there are none."""
    state = f"#l={quote(layout)}&s={quote(swizzle)}&e=2&a=16&k=banks"
    page = browser.dom(PAGE.as_uri() + state, tmp_path)
    whole = L.parse(f"Sw<{swizzle}> o {layout}") if swizzle else L.Layout(layout)
    size = whole.size
    assert page.count('stroke="#777"') == size
    assert page.count('stroke="#c00000"') == outlined
    if outlined:
        said = "\n".join(str(a) for a in L.banks.accesses(whole, 2, 16))
        assert browser.text_of(page, "result") == said
    else:
        fault = "access: vectors of 8 elements do not divide the mode of stride 1"
        assert browser.text_of(page, "fault") == fault


def test_the_page_says_what_it_refuses(tmp_path):
    page = browser.dom(PAGE.as_uri() + "#l=(4,8):(8)", tmp_path)
    assert browser.text_of(page, "fault") == "Layout: the stride is not nested as the shape"
    assert page.count('stroke="#777"') == 0
