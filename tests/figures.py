# SPDX-License-Identifier: BSD-3-Clause
"""Holds figures of pages to the stored results. A failure names each page and line, what the page has
and what the results give.

A module of such tests sets `reported = figures.reported`. Its tests have the mark `figures`: `make
results` and `python tools/results.py` run them after they wrote the generated pages, and print what is
left to correct by hand.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOUND = []  # what the running test found
NUMBER = r"\d[\d,]*(?:\.\d+)?"


class Cell(str):
    """A cell of a table, without marks of bold type. `place` is its page and line."""

    def __new__(cls, text, place):
        cell = super().__new__(cls, text.strip(" *"))
        cell.place = place
        return cell


def lines(page):
    """(page:line, line) of each line. page: a path from the root."""
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        yield f"{page}:{number}", line


def cells(place, line):
    """The cells of a line of a table."""
    return [
        Cell(cell, place) for cell in line.strip().removeprefix("|").removesuffix("|").split("|")
    ]


def tables(page, *start):
    """The rows of each table whose head begins with these cells, as lists of cells."""
    found, rows = [], None
    for place, line in lines(page):
        row = cells(place, line)
        if not line.startswith("|"):
            rows = None
        elif rows is not None:
            rows.append(row)
        elif tuple(row[: len(start)]) == start:
            found.append(rows := [])
    assert found, f"{page} has no table whose head begins with {start}"
    return [rows[1:] for rows in found]  # less the rule under the head


@pytest.fixture(autouse=True)
def reported():
    """A test goes on after a figure that disagrees, so that it finds all of them, and fails at its end."""
    FOUND.clear()
    yield
    if FOUND:
        pytest.fail("\n".join(dict.fromkeys(FOUND)), pytrace=False)


def differ(place, shown, want):
    FOUND.append(f"{place}: has {shown}, the results give {want}")


def equal(cell, want):
    """The cell is this text."""
    if cell != str(want):
        differ(cell.place, cell, want)


def close(cell, value, least=0.501):
    """The cell shows this number, with as many digits as the cell has: to `least` of the last one."""
    digits = len(cell.partition(".")[2])
    if abs(float(cell.replace(",", "")) - value) > least * 10**-digits:
        differ(cell.place, cell, f"{value:.{digits + 1}f}")


def sentence(page, words):
    """The page has these words, wherever its lines break. If it does not, the line is that of the same
    words with other figures."""
    text = (ROOT / page).read_text()
    parts = re.split(rf"({NUMBER})", words)
    texts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts[::2]]
    numbers = [rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)" for number in parts[1::2]]

    def pattern(numbers):
        return "".join(t + n for t, n in zip(texts, [*numbers, ""]))

    if re.search(pattern(numbers), text):
        return
    found = re.search(pattern([NUMBER] * len(numbers)), text)
    if not found:
        FOUND.append(f"{page}:1: has no sentence like '{words}'")
        return
    line = text.count("\n", 0, found.start()) + 1
    differ(f"{page}:{line}", f"'{' '.join(found[0].split())}'", f"'{words}'")
