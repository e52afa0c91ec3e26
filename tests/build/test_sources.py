# SPDX-License-Identifier: BSD-3-Clause
"""A page says where a measured figure comes from. A section that has a time, a rate or a table of
decimals names its device. It also links to a file of stored results, or it has a date and a script, a
command, a worklog or docs/results.md. The words before the first section count for the whole page.
Figures that follow from others are said to be "computed, not measured".

test_figures.py and its kin compare figures with the stored results. Worklogs are dated notes, and
docs/results.md is generated: both are left out.
"""

import re

import figures
import pytest
from figures import NUMBER, ROOT

reported = figures.reported
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("learn/*.md"), *ROOT.glob("*.md")])
    if "worklog" not in path.parts and path.name not in ("results.md", "CHANGELOG.md")
]
UNIT = (
    r"(?<!\w)(?:[num]s|[GTP]?FLOP/s|[GT]B/s|tokens/s|times (?:as|slower|faster|cuDNN|cuBLAS))(?!\w)"
)
MEASURED = re.compile(
    rf"(?:{NUMBER}|hundreds of|many)\s+{UNIT}"  # a figure with its unit
    rf"|^\|.*{UNIT}.*\n\|[-| ]+\n"  # a table whose head has the unit
    r"|\| \**\d*\.\d*[1-9]",  # a cell that begins with a decimal
    re.MULTILINE,
)
DEVICE = re.compile(r"H100|H200|Zen|EPYC|Xeon|AMD|\bCPU\b")
STORED = re.compile(r"\]\([\w./-]*\.csv\)")
DATE = re.compile(r"20\d\d-\d\d-\d\d")
HOW = re.compile(
    r"worklog/\w+\.md|results\.md|`(?:python|make|gpukern|build/)|\w/\w+\.(?:py|cu)\b|    python "
)
COMPUTED = re.compile(r"computed,\s+not\s+measured|^## Not measured")


def blank(found):
    return "\n" * found[0].count("\n")


def sections(text):
    """(line, text) of each part of a page, from heading to heading. Code and tables of settings,
    which have a column of defaults, are left blank."""
    text = re.sub(r"^```.*?^```", blank, text, flags=re.M | re.S)
    text = re.sub(r"^\|.*\| default \|.*\n(?:\|.*\n)*", blank, text, flags=re.M)
    line = 1
    for part in re.split(r"(?m)^(?=#{1,3} )", text):
        yield line, part
        line += part.count("\n")


def has_source(text):
    named = STORED.search(text) or (DATE.search(text) and HOW.search(text))
    return bool(named and DEVICE.search(text))


def unsourced(text):
    """(line, figure) of the first measured figure of each section that has no source."""
    parts = [(line, part) for line, part in sections(text) if part.strip()]
    if not parts or has_source(parts[0][1]):
        return
    for line, part in parts:
        figure = MEASURED.search(part)
        if figure and not has_source(part) and not COMPUTED.search(part):
            at = line + part.count("\n", 0, figure.start())
            yield at, figure[0].splitlines()[0]


@pytest.mark.parametrize("page", PAGES)
def test_figures_have_a_source(page):
    for line, figure in unsourced((ROOT / page).read_text()):
        figures.FOUND.append(f"{page}:{line}: no source of '{figure}' in its section")


HEAD = "# A page\n\nWhat it is about.\n\n## Speed\n"
SOURCES = [
    "One H200, 2026-11-29, [worklog](worklog/gemm.md).",
    "One H200, 2026-11-29, `python benchmarks/bench_gemm.py`.",
    "One H200 ([stored](../benchmarks/results/nvidia-h200.csv)).",
    "This is computed, not measured.",
]
FIGURES = [
    "It takes 12.5 us.",
    "It is hundreds of\ntimes slower.",
    "| case | TFLOP/s |\n|---|---|\n| 4096 | 700 |",
    "| case | ratio |\n|---|---|\n| 4096 | **1.07** |",
]


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_without_a_source_is_found(figure):
    assert len(list(unsourced(f"{HEAD}{figure}\n"))) == 1
    for source in SOURCES:
        assert not list(unsourced(f"{HEAD}{figure}\n\n{source}\n"))
        elsewhere = f"{HEAD}{figure}\n\n## Another section\n{source}\n"
        assert list(unsourced(elsewhere))


def test_half_a_source_is_none():
    for source in ("One H200, 2026-11-29.", "2026-11-29, `python bench.py`.", "One H200, `make`."):
        assert list(unsourced(f"{HEAD}{FIGURES[0]} {source}\n")), source


def test_a_source_at_the_head_counts_for_the_page():
    assert not list(unsourced(f"# A page\n\n{SOURCES[0]}\n\n## Speed\n{FIGURES[0]}\n"))


def test_code_sizes_and_settings_are_no_figures():
    for words in (
        "```\nsleep 5 ms\n```",
        "| tile | rows |\n|---|---|\n| 1 | 128 |",
        "| flag | default |\n|---|---|\n| `--share` | 0.9 |",
        "It has 3 rows.",
    ):
        assert not list(unsourced(f"{HEAD}{words}\n")), words
