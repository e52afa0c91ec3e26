# SPDX-License-Identifier: BSD-3-Clause
"""docs/results.md and the tables of learn/ladder.md and docs/integrations.md say what the committed
results say."""

import copy
import importlib.util
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SPEC = importlib.util.spec_from_file_location("results", os.path.join(ROOT, "tools", "results.py"))
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


@pytest.fixture
def results():
    return tool.load_results()


def test_the_pages_are_what_the_tool_writes(results):
    assert tool.PAGE.read_text() == tool.page(results), "run `make results`"
    assert tool.main(["--check"]) == 0


def test_the_table_of_models_is_that_of_the_stored_runs():
    text, runs = tool.INTEGRATIONS.read_text(), tool.load_integrations()
    assert runs and tool.integrations_page(text, runs) == text, "run `make results`"
    for run in runs:
        for name in ("device", "driver", "torch", "transformers", "date", "command"):
            assert run[name] in text or run["device"] == "CPU"
        for row in run["rows"]:
            assert (
                "failed" in row or abs(row["ratio"] * row["ours_ms"] / row["peer_ms"] - 1) < 0.03
            ), row
    row = {
        "family": "llama",
        "step": "prefill",
        "peer": "sdpa",
        "ours_ms": 1.5,
        "peer_ms": 3.0,
        "ratio": 2.0,
    }
    rows = [
        row,
        row
        | {
            "error": 0.0151,
            "peer_error": 0.02,
            "worst": 0.1,
            "peer_worst": 0.3,
            "ours_spread": 0.25,
            "peer_spread": 0.5,
        },
    ]
    rows.append({"family": "llama", "step": "decode", "failed": "a | b"})
    table = tool.integrations_table([runs[0] | {"rows": rows}])
    assert "| llama | prefill | 1.5 | sdpa 3 | 2.00x |  |  |" in table
    assert (
        "| llama | prefill | 1.5 +- 0.25 | sdpa 3 +- 0.5 | 2.00x | 1.5e-02, 2.0e-02 | 1.0e-01, "
        "3.0e-01 |\n| llama | decode | failed |" in table
    )


@pytest.mark.parametrize("name", tool.TITLES)
def test_a_changed_result_is_noticed(results, name):
    changed = copy.deepcopy(results)
    for result in changed:
        for row in result["benches"].get(name, {"rows": []})["rows"]:
            row["rate"] *= 2
    assert tool.page(changed) != tool.page(results)


def row_of(label, us, **peers):
    return {
        "group": "a group",
        "label": label,
        "dtype": "bf16",
        "us": us,
        "rate": 2e4 / us,
        "unit": "GFLOP/s",
        "share": None,
        "peers": {name: {"us": peer, "rate": 2e4 / peer} for name, peer in peers.items()},
        "roofline_percent": 50.0,
        "best_peer": "",
        "ratio": None,
        "bar": "",
        "verdict": "",
    }


def test_what_is_new_appears_by_itself(results):
    """A device, a bench, a group and peers that no file has had; each case against its own best
    peer."""
    rows = [
        row_of("small", 1.0, fa3=2.0, fa4=0.5),
        row_of("large", 2.0, fa3=1.5),
        row_of("alone", 1.0),
    ]
    bench = {
        "date": "2027-01-01",
        "torch": "3",
        "driver": "999",
        "command": "python bench.py",
        "peaks": {"read": 5e3},
        "rows": rows,
        "groups": [],
        "facts": [],
    }
    page = tool.page(
        [{"stem": "b300", "device": "NVIDIA B300", "benches": {"layernorm": bench}}, *results]
    )
    assert (
        "### layernorm on NVIDIA B300\n\nNVIDIA B300; driver 999; torch 3; 2027-01-01; `python "
        "bench.py`. " in page
    )
    assert (
        "| [layernorm](#layernorm-on-nvidia-b300) | NVIDIA B300 | 2027-01-01 | 2 | 0 | 0.61x | "
        "0.50x |" in page
    )
    assert (
        "| a group | 3 | 10 - 20 TFLOP/s | 13.3 - 40 (fa4 in 1, fa3 in 1) | 0.61x, worst 0.50x |  "
        "|  |" in page
    )
    assert "| small | bf16 | 1 | TFLOP/s | 20 | 10 | **40** | 0.50x | 50 |" in page
    assert "| large | bf16 | 2 | TFLOP/s | 10 | **13.3** |  | 0.75x | 50 |" in page
    assert "| alone | bf16 | 1 | TFLOP/s | 20 |  |  |  | 50 |" in page


def test_a_ratio_is_the_measured_one_where_it_was_taken_against_the_best_peer():
    row = row_of("small", 1.0, fa3=2.0, fa4=0.5)
    assert tool.best_peer(row) == "fa4" and tool.ratio_of(row) == 0.5
    assert tool.ratio_of(row | {"best_peer": "fa3", "ratio": 2.0}) == 0.5
    assert tool.ratio_of(row | {"best_peer": "fa4", "ratio": 0.51}) == 0.51


def test_the_ladders_page_has_every_table(results):
    tables = [*tool.LADDER_TABLES, *tool.FILE_TABLES]
    assert [m["name"] for m in tool.MARKED.finditer(tool.LADDER.read_text())] == tables


@pytest.mark.parametrize("name", tool.LADDER_TABLES)
def test_a_changed_ladder_is_noticed(results, name):
    changed = copy.deepcopy(results)
    for result in changed:
        if bench := result["benches"].get("ladder"):
            for row in bench["rows"] if name != "ladder_counters" else ():
                if row["group"] == ("4096 cubed" if name == "ladder" else "16384 cubed"):
                    row["rate"] *= 2
            if name == "ladder_counters":
                bench["counters"]["13"]["smsp__inst_executed.sum"] *= 2
    text = tool.LADDER.read_text()
    old = [m["table"] for m in tool.MARKED.finditer(text)]
    new = [m["table"] for m in tool.MARKED.finditer(tool.ladder_page(text, changed))]
    assert [a == b for a, b in zip(old, new, strict=True)] == [
        table != name for table in (*tool.LADDER_TABLES, *tool.FILE_TABLES)
    ]


def test_every_ratio_is_against_the_fastest_peer(results):
    """Of its row, whoever that is; what a case is held against beside its peers is a limit."""
    for result in results:
        for bench in result["benches"].values():
            for row in bench["rows"]:
                if not row["peers"]:
                    continue
                best = row["peers"][row["best_peer"]]["us"]
                assert best == min(peer["us"] for peer in row["peers"].values()), row
                assert "ours, aligned" not in row["peers"]
                drift = (
                    row["ratio_spread"] + row["spread"] + row["peers"][row["best_peer"]]["spread"]
                )
                assert abs(row["ratio"] / (best / row["us"]) - 1) < 0.02 + 2 * drift, row
            for group in bench["groups"]:
                ratios = [
                    row["ratio"]
                    for row in bench["rows"]
                    if row["group"] == group["group"] and row["ratio"]
                ]
                if ratios:  # else rows of one dtype
                    assert abs(group["worst"] / min(ratios) - 1) < 1e-3


def test_a_table_names_every_best_peer():
    rows = [row_of("", 1.0, **{name: 1.0}) for name in ("a", "b", "b")] + [row_of("", 1.0)]
    assert tool._best_peers(rows) == "b in 2, a in 1"
    assert tool._best_peers(rows[1:]) == "b"


def test_every_row_states_error_and_roofline(results):
    for result in results:
        for bench in result["benches"].values():
            assert bench["rows"] or bench["facts"]
            for row in bench["rows"]:
                assert row["roofline_percent"] > 0
                if (
                    row["error"] is None
                    # on a GPU some cases are too large for float64; others of their group are
                    # judged
                ):
                    group = [r for r in bench["rows"] if r["group"] == row["group"]]
                    assert "NVIDIA" in result["device"] and (
                        group[0]["error"] is not None or row["group"] == "write"
                    )
                    continue
                assert row["error"] < 0.1, row
                assert all(peer["error"] is not None for peer in row["peers"].values())
