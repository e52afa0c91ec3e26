# SPDX-License-Identifier: BSD-3-Clause
"""learn/patterns: the programs compile without a warning and print their predictions; on a GPU
their results are right.
"""

import csv
import os
import re
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path.stem for path in (ROOT / "learn" / "patterns").glob("*.cu"))


def build_and_run(name, tmp_path):
    if not shutil.which(os.environ.get("NVCC", "nvcc")):
        pytest.skip("nvcc is not installed")
    made = subprocess.run(
        ["make", f"BUILD={tmp_path}", f"{tmp_path}/patterns/{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run([tmp_path / "patterns" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_pattern_compiles(tmp_path):
    """Compiles all patterns as one source, each in its own namespace. Headers are read once, so all
    together take as long as four alone. The machine code is not run, so it is not optimised."""
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    if not nvcc:
        pytest.skip("nvcc is not installed")
    headers, bodies = {}, []
    for name in SOURCES:
        path = ROOT / "learn" / "patterns" / f"{name}.cu"
        lines = path.read_text().splitlines()
        headers |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body = "\n".join("" if line.startswith("#include") else line for line in lines)
        bodies.append(f'namespace in_{name} {{\n#line 1 "{path}"\n{body}\n}}')
    (tmp_path / "all.cu").write_text("\n".join([*headers, *bodies, ""]))
    words = [
        "-std=c++17",
        "-arch=sm_90",
        "-Xcicc",
        "-O1",
        "-Xptxas",
        "-O1",
        "-Werror",
        "all-warnings",
        f"-I{ROOT}/csrc",
        f"-I{ROOT}/csrc/include",
        f"-I{ROOT}/learn/patterns",
    ]
    command = [nvcc, *words, "-cubin", tmp_path / "all.cu", "-o", tmp_path / "all.cubin"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    kernels = (tmp_path / "all.cubin").read_bytes()
    assert all(f"{len(name) + 3}in_{name}".encode() in kernels for name in SOURCES)


def sample(day, count=2):
    """The patterns that are built and run on a day, a few of all in turn: each takes one to four
    seconds. GPUKERN_TEST_ALL: all."""
    return [SOURCES[(day * count + i) % len(SOURCES)] for i in range(count)]


COMPILED = SOURCES if os.environ.get("GPUKERN_TEST_ALL") else sample(date.today().toordinal())


def test_every_pattern_has_its_day():
    days = -(-len(SOURCES) // 2)
    assert {name for day in range(days) for name in sample(day)} == set(SOURCES)


@pytest.mark.parametrize("name", COMPILED)
def test_patterns_say_their_predictions(name, tmp_path):
    lines = build_and_run(name, tmp_path).splitlines()
    page = (ROOT / "learn" / "patterns.md").read_text()
    assert len(lines) >= 3
    for line in lines[1:]:
        found = re.match(
            r"  (.+?) +predicted +(\d+) (GB/s|GFLOP/s|us|ns), by (.+?) +(measured .*|)see (.+)$",
            line,
        )
        assert found, line
        if not found[5]:  # on a GPU the predictions are those of that GPU
            variant, number, unit, limiter, _, counter = found.groups()
            assert f"{variant} | {number} {unit} | {limiter} |" in page and counter in page


def rows_of_the_page():
    """(pattern, cells) of each variant in the page's table."""
    page, name = (ROOT / "learn" / "patterns.md").read_text(), ""
    for line in page[
        page.index("<!-- patterns begin") : page.index("<!-- patterns end")
    ].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and re.match(r"[\d.]+ ", cells[2]):
            name = re.sub(r"\[(.*)\].*", r"\1", cells[0]) or name
            yield name, cells


def h100_rows():
    """(pattern, variant, unit, predicted, measured, share) of the page's table for the H100, of the
    rows that were measured."""
    for name, cells in rows_of_the_page():
        if cells[7]:
            yield name, cells[1], cells[2].split()[1], *map(float, cells[6:9])


@pytest.mark.figures
def test_the_table_is_that_of_the_file():
    """learn/patterns.csv has what was measured, with device and date. The page shows the same."""
    with (ROOT / "learn" / "patterns.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["share"]]
    columns = {"NVIDIA H200": (2, 4, 5), "NVIDIA H100 80GB HBM3": (6, 7, 8)}
    assert {line["device"] for line in lines} == set(columns)
    assert {line["date"] for line in lines} == {"2026-11-26", "2026-11-29"}
    stored = {
        (line["device"], line["pattern"], line["variant"]): [
            line[name] for name in ("unit", "limit", "predicted", "measured", "share")
        ]
        for line in lines
    }
    shown = {}
    for name, cells in rows_of_the_page():
        for device, (predicted, measured, share) in columns.items():
            if cells[measured]:
                shown[device, name, cells[1]] = [
                    cells[2].split()[1],
                    cells[3],
                    cells[predicted].split()[0],
                    cells[measured],
                    cells[share],
                ]
    assert shown == stored and len(shown) == len(lines) > 200


@pytest.mark.figures
def test_shares_follow_from_what_was_measured():
    """The share of a rate is measured over predicted; that of a time is predicted over measured.
    All three are rounded."""
    rows = list(h100_rows())
    assert len(rows) > 130
    for name, variant, unit, predicted, measured, share in rows:
        more, less = (predicted, measured) if unit in ("us", "ns") else (measured, predicted)
        assert (
            (more - 0.5) / (less + 0.5) - 0.006 <= share <= (more + 0.5) / (less - 0.5) + 0.006
        ), (name, variant)


@pytest.mark.figures
def test_every_prediction_that_was_wrong_is_named():
    """For each prediction that was wrong by more than a fifth, a paragraph names the pattern and
    has the share, alone or in a range."""
    page = (ROOT / "learn" / "patterns.md").read_text()
    section = page.partition("## Predictions that were wrong")[2].partition("`PATTERN_CHECK=")[0]
    paragraphs = [text.lower() for text in section.split("\n- ")[1:]]
    wrong = [row for row in h100_rows() if not 0.8 <= row[-1] <= 1.25]
    assert len(wrong) > 50 and len(paragraphs) > 20
    for name, variant, *_, share in wrong:
        about = " ".join(text for text in paragraphs if re.match(r"\w+", name)[0].lower() in text)
        ranges = [
            (float(a), float(b or a))
            for a, b in re.findall(r"(\d\.\d\d)\b(?: to (\d\.\d\d)\b)?", about)
        ]
        assert any(min(pair) <= share <= max(pair) for pair in ranges), (name, variant, share)


def test_the_page_has_every_pattern():
    page = (ROOT / "learn" / "patterns.md").read_text()
    assert set(re.findall(r"\]\(patterns/(\w+)\.cu", page)) == set(SOURCES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_patterns_are_right(name, tmp_path):
    """Every variant is right on awkward sizes; its output holds NaN before."""
    text = build_and_run(name, tmp_path)
    assert "WRONG" not in text and "measured" in text


def test_pictures_have_the_kernels_constants():
    page = (ROOT / "learn" / "patterns.md").read_text()
    transpose = (ROOT / "learn" / "patterns" / "transpose.cu").read_text()
    side = int(re.search(r"SIDE = (\d+)", transpose)[1])
    padding = int(re.search(r"row \* \(SIDE \+ (\d+)\)", transpose)[1])
    bits, base, shift = re.search(r"swizzle<(\d+), (\d+), (\d+)>", transpose).groups()
    # TMA's swizzle of 128-byte rows, <3,4,3> of bytes
    assert "typedef smem_tile<SIDE, SIDE * 4> Box" in transpose
    for words in (
        f'"({side},{side}):({side + padding},1)" --access 4',
        f'"({side},{side}):({side},1)" --swizzle {bits},{base},{shift} --access 4',
        f'"({side},{side}):({side},1)" --swizzle 3,2,3 --access 16',
    ):
        assert words in page


def examples(tmp_path, nvcc):
    command = ["make", "-C", ROOT / "examples", f"BUILD={tmp_path}", f"NVCC={nvcc}", "test"]
    return subprocess.run(command, capture_output=True, text=True)


def test_examples_without_a_compiler_or_the_library(tmp_path):
    done = examples(tmp_path, "no-nvcc-of-this-name")
    assert done.returncode == 0, done.stderr
    assert (
        "without patterns, no-nvcc-of-this-name was not found" in done.stdout
        and "without c" in done.stdout
    )
    assert "examples: 0 programs" in done.stdout


@pytest.mark.parametrize(
    "gbs, says",
    [(4250, "programs say what they should"), (4251, "not in learn/patterns.md: 16 bytes")],
)
def test_examples_hold_predictions_to_the_page(gbs, says, tmp_path):
    """`true` stands in for nvcc, and prepared programs stand in for the patterns."""
    (tmp_path / "patterns").mkdir()
    for name in SOURCES:
        program = tmp_path / "patterns" / name
        line = f"  16 bytes                   predicted  {gbs if name == 'copy_widths' else 4250} GB/s, by memory           see a counter"  # noqa: E501
        program.write_text(f"#!/bin/sh\necho title\necho '{line}'\n")
        program.chmod(0o755)
    done = examples(tmp_path, "true")
    assert says in done.stdout and (done.returncode == 0) == (gbs == 4250), (
        done.stdout + done.stderr
    )
