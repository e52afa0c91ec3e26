# SPDX-License-Identifier: BSD-3-Clause
"""Pytest collects every test file. `make test` says at the start that tests are being collected, and
runs tests before it reports skipped ones.

This file is in tests/ itself, because pytest may ignore a folder for its name.
"""

from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder", ("tests", "learn/tests"))
def test_every_test_file_is_collected(pytestconfig, folder):
    """`norecursedirs` of pytest has `build` by default, so it once left out all of tests/build."""
    files = sorted((ROOT / folder).rglob("test_*.py"))
    assert files

    def left_out(path):
        return pytestconfig.hook.pytest_ignore_collect(collection_path=path, config=pytestconfig)

    for file in files:
        path = file
        while path != ROOT:
            assert not left_out(path), f"{file} is not collected because of {path}"
            path = path.parent
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert "test_*.py" in pytestconfig.getini("python_files")


def test_collecting_is_not_silent():
    lines = []
    reporter = SimpleNamespace(
        ensure_newline=lambda: None, write_line=lambda text, flush: lines.append(text)
    )
    config = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: reporter))
    conftest.pytest_xdist_setupnodes(config, [None, None])
    node = SimpleNamespace(config=config, gateway=SimpleNamespace(id="gw1"))
    conftest.pytest_xdist_node_collection_finished(node, ["a", "b", "c"])
    assert lines[0].startswith("2 processes import PyTorch and collect the tests")
    assert lines[1].startswith("gw1 has collected 3 tests in ")


class Item:
    def __init__(self, name, *marks):
        self.name, self.marks = name, list(marks)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def iter_markers(self, name):
        return iter([mark for mark in self.marks if mark.name == name])

    def add_marker(self, mark):
        self.marks.append(mark.mark)


def test_tests_that_run_come_first(monkeypatch):
    monkeypatch.setattr(conftest, "ALL", False)
    monkeypatch.setattr(conftest.torch.version, "cuda", None)
    gpu, slow = pytest.mark.gpu.mark, pytest.mark.slow.mark
    items = [
        Item("a", gpu),
        Item("b"),
        Item("c", slow),
        Item("d"),
        Item("e", pytest.mark.skipif(False, reason="").mark),
    ]
    conftest.pytest_collection_modifyitems(None, items)
    assert [item.name for item in items] == ["b", "d", "e", "a", "c"]
