# SPDX-License-Identifier: BSD-3-Clause
"""A pytest plugin for runs that may be cut off: it prints each failure as it happens and stores
each result at once. tools/check_on_gpu.sh runs it, and reads its files again for a summary.

    PYTHONPATH=tests python -m pytest -p gpu_report ...    with GPU_REPORT=folder
    python tests/gpu_report.py folder                      what ran, what failed, what did not run

The folder gets `collected` (a test a line), `results` (outcome, seconds, test, and of a failure its
message) and `failures` (whole tracebacks).
"""

from __future__ import annotations

import collections
import os
import sys
import time
from pathlib import Path

FAILED, SLOWEST = ("failed", "error"), 12


class Report:
    """In the process that the user started; xdist's workers send it their reports."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.results = (folder / "results").open("a")

    def collected(self, ids) -> None:
        (self.folder / "collected").write_text("".join(f"{x}\n" for x in ids))

    def pytest_collection_finish(self, session) -> None:
        self.collected(item.nodeid for item in session.items)

    def pytest_xdist_node_collection_finished(self, ids) -> None:
        self.collected(ids)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        words = message_of(report) if report.failed else ""
        self.write(outcome, report.duration, report.nodeid, words)
        if report.failed:
            print(f"\n{outcome.upper()} {report.nodeid}\n    {words}", flush=True)
            with (self.folder / "failures").open("a") as failures:
                failures.write(f"{outcome.upper()} {report.nodeid}\n{report.longreprtext}\n\n")

    def write(self, *words) -> None:
        outcome, seconds, test, message = words
        self.results.write(f"{outcome}\t{seconds:.3f}\t{test}\t{message}\n")
        self.results.flush()


class Worker:
    """In a worker of xdist. After an error that CUDA does not forget, such as an illegal address,
    every later test of the process would fail, so the worker ends and xdist starts another."""

    def __init__(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report) -> None:
        self.failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if not self.failed:
            return
        self.failed = False
        import torch

        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            time.sleep(1)  # the report is on its way
            os._exit(3)


def message_of(report) -> str:
    """The first lines of the error, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " | ".join(text.strip().splitlines()[:4])[:600]


def pytest_configure(config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker())
    elif os.environ.get("GPU_REPORT"):
        config.pluginmanager.register(Report(Path(os.environ["GPU_REPORT"])))


def summary(folder: Path) -> int:
    """Prints what ran. Returns 0 if every test ran and none failed."""
    if not (folder / "collected").exists():
        print("pytest: no tests were collected")
        return 1
    tests = (folder / "collected").read_text().splitlines()
    lines = [x.split("\t") for x in (folder / "results").read_text().splitlines()]
    lines = [x for x in lines if len(x) == 4]
    ran = {test: outcome for outcome, _, test, _ in lines}
    counts = collections.Counter(outcome for outcome, *_ in lines)
    missing = collections.Counter(x.split("::")[0] for x in tests if x not in ran)
    print(
        f"pytest: {len(ran):,} of {len(tests):,} tests ran: "
        + ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(counts.items()))
    )
    if missing:
        print("not run: " + ", ".join(f"{file} {n}" for file, n in missing.most_common()))
    times = collections.Counter()
    for _, seconds, test, _ in lines:
        times[test] += float(seconds)
    print(f"{times.total():.0f} s in tests; the slowest:")
    for test, seconds in times.most_common(SLOWEST):
        print(f"    {seconds:6.1f} s {test}")
    bad = [x for x in lines if x[0] in FAILED]
    for outcome, _, test, message in bad:
        print(f"{outcome.upper()} {test}\n    {message}")
    return int(bool(bad or missing))


if __name__ == "__main__":
    sys.exit(summary(Path(sys.argv[1])))
