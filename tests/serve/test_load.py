# SPDX-License-Identifier: BSD-3-Clause
"""The load test: its figures, its end, and what it says of requests that fail."""

import csv
import time

import pytest

from torch_gpukern.cli.commands import main
from torch_gpukern.serve import load

pytest.importorskip("transformers", reason="transformers is not installed")
for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=f"{package} is not installed")
pytest_plugins = ("serve_fixtures",)


def approximately(tokens, seconds):
    """A rate as the table has it: of seconds with three decimals, rounded to one."""
    rate = tokens / seconds
    return pytest.approx(rate, abs=0.051 + rate * 0.00051 / seconds)


def test_the_command_prints_a_level_a_line(tmp_path, capfd):
    path = tmp_path / "load.csv"
    flags = ["--at-once", "2", "5", "--tokens", "6", "--prompt", "20", "--csv", str(path)]
    assert main(["bench", "serve", *flags, "--pages", "64"]) == 0
    shown = capfd.readouterr().out
    assert "cache: 64 pages" in shown
    heads, *rows = csv.reader(path.open())
    assert tuple(heads) == load.HEADS and [row[:2] for row in rows] == [["2", "2"], ["5", "5"]]
    for row in rows:
        seconds, rate, first, last, between, most = map(float, row[2:8])
        assert rate == approximately(int(row[0]) * 6, seconds)
        assert 0 < first <= last and between <= most
        assert row[3] in shown


def test_transformers_beside_it(tmp_path, capfd):
    """The same requests by generate_batch: as many tokens, and times that are possible."""
    path = tmp_path / "load.csv"
    flags = ["--at-once", "3", "--tokens", "5", "--prompt", "20", "--csv", str(path), "--peer"]
    assert main(["bench", "serve", *flags]) == 0
    _, ours, peer = csv.reader(path.open())
    assert [ours[-1], peer[-1]] == [load.OURS, load.PEER] and ours[:2] == peer[:2] == ["3", "3"]
    seconds, rate, first, last, between, most = map(float, peer[2:8])
    assert rate == approximately(15, seconds)
    assert 0 < first <= last <= 1e3 * seconds and 0 < between <= most


def test_a_level_has_an_end(served):
    """Requests that are not done by then are given up, and the server drops them."""
    bodies = load.bodies_of(3, 20, 900, seed=0)
    began = time.perf_counter()
    times = load.at_once(("127.0.0.1", served.port), bodies, 0.1)  # too few ms for 900 tokens
    assert time.perf_counter() - began < 10
    assert times.failed == {"the level's time was over": 3} and times.answers == 0
    deadline = time.time() + 20
    while served.engine.running and time.time() < deadline:
        time.sleep(0.01)
    assert not served.engine.running


def test_failures_are_named(served):
    served.engine.max_waiting = 0
    times = load.at_once(("127.0.0.1", served.port), load.bodies_of(4, 20, 5, seed=0), 20)
    ((failure, count),) = times.failed.items()
    assert count == 4 and failure.startswith("503 ") and not times.first
    assert times.row(4)[1:2] == ("0",)
    nobody = load.at_once(("127.0.0.1", 1), load.bodies_of(1, 20, 5, seed=0), 20)
    assert list(nobody.failed)[0].startswith("ConnectionRefusedError")


def test_a_server_that_does_not_start_is_said(capfd, tmp_path):
    assert main(["bench", "serve", str(tmp_path / "none")]) == 1
    shown = capfd.readouterr().err
    assert "which is no directory" in shown and "bench: the server did not start" in shown
    assert main(["bench", "serve", "x", "--random", "tiny"]) == 1
    assert "not both" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--at-once", "0"])
    assert "argument --at-once: must be 1 or more, got 0" in capfd.readouterr().err
