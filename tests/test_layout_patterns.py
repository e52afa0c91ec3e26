"""examples/patterns: they compile without a warning, say their predictions, and on a GPU their results are right."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.stem for path in (ROOT / "examples" / "patterns").glob("*.cu"))


def build_and_run(name, tmp_path):
    if not shutil.which(os.environ.get("NVCC", "nvcc")):
        pytest.skip("nvcc is not installed")
    made = subprocess.run(
        ["make", f"BUILD={tmp_path}", f"{tmp_path}/patterns/{name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run([tmp_path / "patterns" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SOURCES)
def test_patterns_say_their_predictions(name, tmp_path):
    lines = build_and_run(name, tmp_path).splitlines()
    page = (ROOT / "docs" / "patterns.md").read_text()
    assert len(lines) >= 3
    for line in lines[1:]:
        found = re.match(r"  (.+?) +predicted +(\d+) (GB/s|us), by (.+?) +(measured .*|)see (.+)$", line)
        assert found, line
        if not found[5]:  # on a GPU the predictions are those of that GPU
            variant, number, unit, limiter, _, counter = found.groups()
            assert f"{variant} | {number} {unit} | {limiter} |" in page and counter in page


def test_the_page_has_every_pattern():
    page = (ROOT / "docs" / "patterns.md").read_text()
    assert set(re.findall(r"\.\./examples/patterns/(\w+)\.cu", page)) == set(SOURCES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_patterns_are_right(name, tmp_path):
    """Every variant on awkward sizes, its output poisoned before."""
    text = build_and_run(name, tmp_path)
    assert "WRONG" not in text and "measured" in text


def test_no_pattern_is_long():
    for path in (ROOT / "examples" / "patterns").iterdir():
        assert len(path.read_text().splitlines()) <= 150, path
