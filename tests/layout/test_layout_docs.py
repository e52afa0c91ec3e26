# SPDX-License-Identifier: BSD-3-Clause
"""docs/layout.md, learn/claims.md and learn/patterns.md agree with the code: every command draws
the picture shown with it, and every example runs."""

import csv
import doctest
import re
import shlex
from pathlib import Path

import pytest

from torch_gpukern import cli
from torch_gpukern import layout as L

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "layout.md").read_text()
PICTURES = PAGE + (ROOT / "learn" / "patterns.md").read_text().replace("](../docs/", "](")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PICTURES, re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_pictures_are_those_of_their_commands(command, tmp_path):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "torch_gpukern"] and words[-2] == "--svg"
    assert cli.main([*words[3:-1], str(tmp_path / "out.svg")]) == 0
    drawn = ROOT / words[-1]
    assert (tmp_path / "out.svg").read_text() == drawn.read_text()
    assert f"({Path(words[-1]).relative_to('docs')})" in PICTURES


def test_no_picture_without_a_command():
    assert {f"docs/layout/{p.name}" for p in (ROOT / "docs" / "layout").glob("*.svg")} == {
        shlex.split(c)[-1] for c in COMMANDS
    }


def test_the_stage_is_the_kernels():
    """The page's picture and tensor map of a panel of K show the box that the kernels' header
    prints (tests/data/layout.golden)."""
    golden = (ROOT / "tests" / "data" / "layout.golden").read_text()
    cols, rows, stride = re.search(
        r"^box keys = Sw<3,3,3> o 0 o \((\d+),(\d+),1\):\(1,(\d+),\d+\) \1,\2,1 128 \d+$",
        golden,
        re.M,
    ).groups()
    assert f"shared memory   Sw<3,3,3> o 0 o (d={cols},keys={rows}):(1,{stride})" in PAGE
    assert f'layout "(16,{cols}):({stride},1)" --swizzle 3,3,3 --access 16' in PAGE


def test_examples():
    text = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(text, {}, "layout.md", None, 0)
    assert (
        doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(examples).failed == 0
    )


def column(offset, elem_bytes, lanes=32):
    return L.ways([offset(row) * elem_bytes for row in range(lanes)], elem_bytes)


def test_claims():
    chunk = [16 * i for i in range(32)]
    assert L.ways(chunk, 16) == 1 and L.wavefronts(chunk, 16) == 4
    assert column(lambda i: 2 * i, 4) == 2 and column(lambda i: 0, 4) == 1
    assert [column(lambda r, p=p: r * p, 4) for p in (32, 33)] == [32, 1]
    assert [column(lambda r, p=p: r * p, 2) for p in (129, 130)] == [2, 1]
    down = {
        x: L.banks.accesses(x, 2, 16)[0].ways
        for x in ("(64,64):(64,1)", "Sw<3,3,3> o 0 o (64,64):(64,1)")
    }
    assert list(down.values()) == [8, 1]
    assert L.banks.accesses("Sw<3,3,3> o 0 o (64,128):(128,1)", 2, 16)[0].ways == 2
    assert L.banks.accesses("Sw<3,3,4> o 0 o (64,128):(128,1)", 2, 16)[0].ways == 1
    assert L.ways([row * 128 + (row >> 3) * 16 for row in range(8)], 16) == 8
    assert (
        column(lambda r: r * 32 + (0 ^ (r >> 5 & 7)), 4) == 32
        and column(lambda r: r * 32 + (0 ^ r), 4) == 1
    )
    assert str(L.tma.span_swizzle(64, 2)) == "Sw<2,3,3>"
    with pytest.raises(ValueError):
        L.Swizzle(4, 3, 3)


def test_claims_were_counted():
    """Every access on the page is one of banks.cu's. Its clocks equal those of the model and those
    in learn/counters.csv."""
    with (ROOT / "learn" / "counters.csv").open() as file:
        counted = {row["what"]: row for row in csv.DictReader(file)}
    rows = re.findall(
        r"^\|[^|]*\|[^|]*\| ([^|]+?) \| (\d+) \| (\d+) \|$",
        (ROOT / "learn" / "claims.md").read_text(),
        re.M,
    )
    accesses = {  # the byte of each lane, and the access width
        "16 bytes on end": (lambda lane: 16 * lane, 16),
        "4 bytes on end": (lambda lane: 4 * lane, 4),
        "stride 2": (lambda lane: 8 * lane, 4),
        "column, rows of 32": (lambda lane: 128 * lane, 4),
        "column, rows of 33": (lambda lane: 132 * lane, 4),
        "halves, rows of 129": (lambda lane: 258 * lane, 2),
        "halves, rows of 130": (lambda lane: 260 * lane, 2),
        "ldmatrix, rows of 64": (lambda lane: 128 * lane, 16),
        "ldmatrix, 64 by 3,3,3": (lambda lane: L.Swizzle(3, 4, 3)(128 * lane), 16),
        "ldmatrix, 128 by 3,3,3": (lambda lane: L.Swizzle(3, 4, 3)(256 * lane), 16),
        "ldmatrix, 128 by 3,3,4": (lambda lane: L.Swizzle(3, 4, 4)(256 * lane), 16),
        "ldmatrix, 64 by row / 8": (lambda lane: 128 * lane + 16 * (lane // 8), 16),
        "column, col ^ row >> 5": (lambda lane: 128 * lane + 4 * (lane >> 5), 4),
        "column, col ^ row": (lambda lane: 128 * lane + 4 * lane, 4),
        "one word": (lambda lane: 0, 4),
        "one chunk of 16 bytes": (lambda lane: 0, 16),
    }
    assert {name for name, _, _ in rows} == set(accesses) and len(rows) == len(accesses)
    for name, model, clocks in rows:
        byte, width = accesses[name]
        assert L.wavefronts([byte(lane) for lane in range(32)], width) == int(model), name
        all_of_it = int(counted[name]["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"])
        assert divmod(all_of_it, 8192) == (int(clocks), 107), name
    assert [name for name, model, clocks in rows if model != clocks] == ["one chunk of 16 bytes"]


def test_profiling_page(capsys):
    """The commands of learn/profiling.md whose output the page shows."""
    page = (ROOT / "learn" / "profiling.md").read_text()
    shown = 0
    for block in re.findall(r"```console\n\$ (.*?)```", page, re.DOTALL):
        command, _, output = block.partition("\n")
        if command.startswith("python -m torch_gpukern ") and output:
            assert cli.main(shlex.split(command)[3:]) == 0
            assert capsys.readouterr().out == output
            shown += 1
    assert shown == 2
