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
    for variant, gbs in re.findall(r"^  (.+?) +predicted +(\d+) GB/s", "\n".join(lines), re.MULTILINE):
        assert f"{variant} | {gbs} |" in page
    assert len(lines) >= 3 and all(re.search(r"predicted +\d+ GB/s, by .* see \w+", line) for line in lines[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_patterns_are_right(name, tmp_path):
    """Every variant on awkward sizes, its output poisoned before."""
    text = build_and_run(name, tmp_path)
    assert "WRONG" not in text and "measured" in text


def test_no_pattern_is_long():
    for path in (ROOT / "examples" / "patterns").iterdir():
        assert len(path.read_text().splitlines()) <= 150, path
