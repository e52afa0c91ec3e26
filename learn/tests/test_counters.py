# SPDX-License-Identifier: BSD-3-Clause
"""learn/benchmarks/counters.py: the command that it gives ncu, and how it reads ncu's log."""

import csv
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counters():
    sys.path.insert(0, str(ROOT / "learn" / "benchmarks"))
    try:
        import counters
    finally:
        sys.path.pop(0)
    if not counters.ladder.LIBRARY.exists():
        pytest.skip(f"{counters.ladder.LIBRARY.name} is not built")
    return counters


def write(path, kernels, metrics):
    """Writes a log as ncu does: its own messages, a header for each process, ids that restart in
    each."""
    head = ["ID", "Process ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"]
    with path.open("w") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        for process, names in kernels.items():
            file.write("==PROF== Connected\n")
            writer.writerow(head)
            for i, name in enumerate(names):
                for j, metric in enumerate(metrics):
                    writer.writerow([i, process, name, metric, "", f"1,{i:03}.{j}"])


def test_a_profile_becomes_rows(counters, tmp_path):
    rungs = [
        f"void ladder_{rung.name}_kernel<bf16>(const bf16 *, int)"
        for rung in counters.ladder.rungs()
    ]
    reads = [
        f"void read_kernel<Bytes<{i}>, 4>(const float *)" for i, _ in enumerate(counters.accesses())
    ]
    log = tmp_path / "ncu.csv"
    write(log, {7: [*rungs, "nvjet_hsh"], 8: reads}, counters.METRICS)
    rows = counters.rows(log)
    assert [row["what"] for row in rows] == [
        *(f"rung {rung.number} {rung.name}" for rung in counters.ladder.rungs()),
        "cuBLAS",
        *counters.accesses(),
    ]
    assert rows[13]["kernel"] == "ladder_column_kernel<bf16>" and rows[-1]["kernel"].startswith(
        "read_kernel<Bytes<"
    )
    for i, row in enumerate(rows):
        launch = i if i < len(rungs) + 1 else i - len(rungs) - 1
        assert [row[metric] for metric in counters.METRICS] == [
            1000 + launch + j / 10 for j in range(10)
        ]


def test_a_kernel_too_few_is_named(counters, tmp_path):
    log = tmp_path / "ncu.csv"
    write(log, {7: ["void ladder_naive_kernel<bf16>(int)"]}, counters.METRICS)
    with pytest.raises(
        SystemExit,
        match=r"1 kernels, \['ladder_naive_kernel<bf16>'\]; expected one for each of rung 1",
    ):
        counters.rows(log)


def test_every_access_is_launched_by_name(counters):
    source = (ROOT / "learn" / "patterns" / "banks.cu").read_text()
    assert len(counters.accesses()) == len(re.findall(r"^        of<", source, re.MULTILINE)) == 16


def test_what_is_missing_is_named(counters, monkeypatch):
    monkeypatch.setattr(counters.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="counters: torch finds no CUDA device"):
        counters.main([])
    with pytest.raises(SystemExit, match="ladder: torch finds no CUDA device"):
        counters.ladder.main([])
    monkeypatch.setattr(counters.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="counters: ncu is not on the path"):
        counters.main([])
    monkeypatch.setattr(counters.ladder, "LIBRARY", Path("/nowhere/libgpukern_ladder.so"))
    counters.ladder.library.cache_clear()
    with pytest.raises(
        OSError,
        match="ladder: /nowhere/libgpukern_ladder.so is not there; `make learn GPUKERN_CUDA=1`",
    ):
        counters.ladder.rungs()


def test_the_command_is_one_run(counters, capsys):
    assert counters.main(["--command"]) == 0
    command = capsys.readouterr().out
    assert (
        command.count("ncu --") == 1 and "4096 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17" in command
    )
    assert ",".join(counters.METRICS) in command
