# SPDX-License-Identifier: BSD-3-Clause
"""cmake/release.py: checksums and the index page of a release, which pip installs from."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("release", ROOT / "cmake" / "release.py")
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

WHEEL, SDIST = "gpukern-9.8.7-py3-none-any.whl", "gpukern-9.8.7.tar.gz"


@pytest.fixture
def dist(tmp_path):
    """A folder as `make release` has it, with a wheel of one empty module."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    info = "gpukern-9.8.7.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, text in (
            ("gpukern_stand_in.py", ""),
            (
                f"{info}/METADATA",
                "Metadata-Version: 2.1\nName: gpukern\nVersion: 9.8.7\nRequires-Python: >=3.10\n",
            ),
            (f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            (f"{info}/RECORD", ""),
        ):
            archive.writestr(name, text)
    (folder / SDIST).write_bytes(b"sources")
    release.write_sums(folder)
    release.write_index(folder)
    return folder


def install(dist, target):
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
        + ["--disable-pip-version-check", "--only-binary", ":all:", "--target", target]
        + ["--index-url", (dist / "simple").as_uri(), "gpukern"],
        env=os.environ
        | {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
    )


def test_sums(dist):
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256((dist / name).read_bytes()).hexdigest()}  {name}"
        for name in (WHEEL, SDIST)
    ]


def test_pip_installs_by_the_index(dist, tmp_path):
    done = install(dist, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "gpukern_stand_in.py").exists()


def test_pip_refuses_a_file_that_changed(dist, tmp_path):
    with zipfile.ZipFile(dist / WHEEL, "a") as archive:
        archive.writestr("more.py", "")
    done = install(dist, tmp_path / "target")
    assert done.returncode != 0 and "HASH" in done.stderr.upper()


def test_two_versions_are_no_release(dist):
    (dist / "gpukern-9.8.6.tar.gz").write_bytes(b"older")
    with pytest.raises(SystemExit, match="expected one wheel and one sdist .*9.8.6"):
        release.write_sums(dist)
