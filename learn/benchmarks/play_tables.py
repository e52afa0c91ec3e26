# SPDX-License-Identifier: BSD-3-Clause
"""Writes the tables of learn/play.html into the page: the shades of the banks, and the examples with
their results.

    python learn/benchmarks/play_tables.py

learn/tests/test_play.py checks that the page has these tables.
"""

import json
import re
from pathlib import Path

from torch_gpukern import layout as L
from torch_gpukern.layout.pictures import _shade

PAGE = Path(__file__).resolve().parents[1] / "play.html"
TABLES = re.compile(r'(<script id="tables" type="application/json">\n).*?(\n</script>)', re.DOTALL)

# name, layout, swizzle, bytes of an element, bytes of an access, mode along which lanes are numbered
EXAMPLES = (
    ("rows of 64 halves, no swizzle: a column of 16 bytes is 8-way", "(8,64):(64,1)", "", 2, 16, 0),
    ("rows of 64 halves by <3,3,3>: free", "(8,64):(64,1)", "3,3,3", 2, 16, 0),
    ("rows of 128 halves by <3,3,3>: still 2-way", "(8,128):(128,1)", "3,3,3", 2, 16, 0),
    ("rows of 128 halves by <3,3,4>: free", "(8,128):(128,1)", "3,3,4", 2, 16, 0),
    ("a column of float [32][32]: 32-way", "(32,32):(32,1)", "", 4, 4, 0),
    ("the same padded to [32][33]: free", "(32,32):(33,1)", "", 4, 4, 0),
    ("the same by col ^ row: free", "(32,32):(32,1)", "5,0,5", 4, 4, 0),
    ("TMA's 128-byte swizzle, floats: 4-way down a column", "(32,32):(32,1)", "3,2,3", 4, 4, 0),
    ("16 bytes on end: 4 passes, none fewer", "(8,32):(1,8)", "", 2, 16, 0),
    ("a nested layout: tiles of 4 x 4 in 16 x 16", "((4,4),(4,4)):((1,16),(4,64))", "", 4, 4, 1),
)


def tables() -> dict:
    found = []
    for name, layout, swizzle, element, access, walk in EXAMPLES:
        whole = L.parse(f"Sw<{swizzle}> o {layout}") if swizzle else L.Layout(layout)
        said = [str(a) for a in L.banks.accesses(whole, element, access)]
        found.append(
            {"name": name, "layout": layout, "swizzle": swizzle, "element": element}
            | {"access": access, "walk": walk, "says": said}
        )
    return {"shades": [_shade(bank, 32) for bank in range(32)], "examples": found}


def with_tables(page: str) -> str:
    """The page with new tables."""
    rows = ",\n".join(json.dumps(row) for row in tables()["examples"])
    text = f'{{"shades": {json.dumps(tables()["shades"])},\n"examples": [\n{rows}\n]}}'
    return TABLES.sub(lambda m: m[1] + text.replace("<", "\\u003c") + m[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
