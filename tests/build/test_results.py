# SPDX-License-Identifier: BSD-3-Clause
"""docs/results.md and the tables of learn/ladder.md and docs/integrations.md agree with the
committed results.
"""

import copy
import importlib.util
import os
import subprocess
from statistics import geometric_mean

import pytest

from torch_gpukern import results as saved

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


def test_the_table_of_models_is_that_of_the_stored_runs(results):
    text = tool.INTEGRATIONS.read_text()
    assert tool.integrations_page(text, results) == text, "run `make results`"
    peer = {"us": 3000.0, "spread": None, "error": None}
    row = {
        "group": "llama",
        "label": "prefill",
        "us": 1500.0,
        "spread": None,
        "error": None,
        "peers": {"sdpa": peer},
    }
    exact = {
        "error": 0.0151,
        "spread": 1 / 6,
        "peers": {"sdpa": peer | {"error": 0.02, "spread": 1 / 6}},
    }
    bench = {"torch": "3", "transformers": "6", "date": "2027-01-01", "command": "python bench.py"}
    bench |= {"rows": [row, row | exact], "facts": [{"group": "llama", "label": "decode"}]}
    table = tool.integrations_table([{"device": "NVIDIA B300", "benches": {"transformers": bench}}])
    assert "| llama | prefill | 1.5 | sdpa 3 | 2.00x |  |" in table
    assert (
        "| 1.5 +- 0.25 | sdpa 3 +- 0.5 | 2.00x | 1.5e-02, 2.0e-02 |\n| llama | decode | failed |"
        in table
    )


def test_the_pictures_are_few():
    listed = subprocess.run(
        ["git", "ls-files", "*.png", "*.jpg"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        assert len(listed.stdout.splitlines()) <= 8, listed.stdout


@pytest.mark.parametrize("name", tool.ORDER)
def test_a_changed_result_is_noticed(results, name):
    changed = copy.deepcopy(results)
    for result in changed:
        for row in result["benches"].get(name, {"rows": []})["rows"]:
            row["us"] *= 2
    assert tool.page(changed) != tool.page(results)


def row_of(label, us, **peers):
    return {
        "group": "a group", "label": label, "dtype": "bf16", "us": us, "rate": 2e4 / us,
        "unit": "GFLOP/s", "share": None,
        "peers": {name: {"us": peer, "rate": 2e4 / peer} for name, peer in peers.items()}, "roofline_percent": 50.0,
        "beside": {}, "ratio_spread": 0.012, "bar": "", "verdict": "", "host_bound": "",
        "date": "2027-01-01",
    }  # fmt: skip


def test_what_is_new_appears_by_itself(results):
    """A new device, bench, group or peer appears without a change of the code, and each case is
    compared with its own best peer."""
    rows = [
        row_of("small", 1.0, fa3=2.0, fa4=0.5),
        row_of("large", 2.0, fa3=1.5),
        row_of("alone", 1.0),
    ]
    rows[1]["host_bound"] = "yes"
    bench = {"date": "2027-01-01", "torch": "3", "driver": "999", "command": "python bench.py", "peaks": {"read": 5e3},
             "rows": rows, "groups": [], "facts": []}  # fmt: skip
    new = {"stem": "b300", "device": "NVIDIA B300", "benches": {"layernorm": bench}}
    page = tool.page([new, *results])
    line = "| NVIDIA B300 | 2027-01-01 | 2 | 0 | 0.61x | 0.50x | a group, small, bf16 | 1; 1 not recorded |"
    assert f"| [layernorm](../learn/benchmarks/bench_layernorm.py) {line}" in page
    full = tool.full_page(new)
    assert (
        "## layernorm\n\nNVIDIA B300; driver 999; torch 3; 2027-01-01; `python bench.py`. " in full
    )
    assert (
        "| a group | 3 | 10 - 20 TFLOP/s | 13.3 - 40 (fa4 in 1, fa3 in 1) | 0.61x, worst 0.50x |  "
        "|  |" in full
    )
    assert "| small | bf16 | 1 | 2 | **0.5** | 0.50x +- 1.2 % | 20 TFLOP/s | 50 |" in full
    assert "| large | bf16 | 2 | **1.5** |  | 0.75x +- 1.2 % | 10 TFLOP/s | 50 |" in full
    assert "| alone | bf16 | 1 |  |  |  | 20 TFLOP/s | 50 |" in full


def test_cases_of_older_kernels_are_marked(tmp_path):
    """A later run of such a case removes the mark from it."""
    rows = [measured("small", 4.0, fa3=2.0), measured("large", 9.0, "b group", fa3=8.0)]
    bench = run_of("2027-01-01", rows) | {"older": "a group"}
    saved.store(tmp_path, "NVIDIA B300", "gemm", bench)

    def lines():
        result = {"stem": "b"} | saved.load(tmp_path / "nvidia-b300.csv")
        page = tool.page([result])
        return [line for line in page.splitlines() if line.startswith("|") and "B300" in line]

    marked = [line for line in lines() if "older" in line]
    assert [line.count("| 2, 1 of older kernels |") for line in marked] == [1, 0, 0]
    assert "| a group, small, bf16, older kernels |" in marked[1]
    assert "| a group, older kernels |" in marked[2]
    again = run_of("2027-02-02", [measured("small", 1.0, fa3=2.5)])
    found, _ = saved.merged(saved.stored(tmp_path, "NVIDIA B300")["gemm"], again)
    saved.store(tmp_path, "NVIDIA B300", "gemm", found)
    assert not [line for line in lines() if "older" in line]


def test_a_file_is_read_as_it_was_written(results, tmp_path):
    for result in results:
        path = tool.RESULTS / f"{result['stem']}.csv"
        saved.save(tmp_path / "again.csv", saved.load(path))
        assert (tmp_path / "again.csv").read_text() == path.read_text()
        assert path.stem == saved.slug(result["device"])


def test_names_that_would_split_a_cell_are_refused(tmp_path):
    row = row_of("small", 1.0) | {"peers": {"a=b": {"us": 1.0}}}
    bench = {"date": "", "command": "", "rows": [row]}
    with pytest.raises(ValueError, match="the name of a peer must not contain"):
        saved.store(tmp_path, "any", "gemm", bench)


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
            for fact in bench["facts"] if name == "ladder_counters" else ():
                if (fact["label"], fact["unit"]) == ("13", "smsp__inst_executed.sum"):
                    fact["value"] *= 2
    text = tool.LADDER.read_text()
    old = [m["table"] for m in tool.MARKED.finditer(text)]
    new = [m["table"] for m in tool.MARKED.finditer(tool.ladder_page(text, changed))]
    assert [a == b for a, b in zip(old, new, strict=True)] == [
        table != name for table in (*tool.LADDER_TABLES, *tool.FILE_TABLES)
    ]


def test_every_ratio_is_the_fastest_peer_s_time_over_ours(results):
    """The ratio follows from the medians of the same line. Limits are no peers."""
    for result in results:
        for bench in result["benches"].values():
            for row in bench["rows"]:
                if not row["peers"]:
                    assert row["ratio"] is None and row["best_peer"] == ""
                    continue
                best = min(row["peers"], key=lambda name: row["peers"][name]["us"])
                assert row["best_peer"] == best and "ours, aligned" not in row["peers"]
                assert row["ratio"] == pytest.approx(
                    row["peers"][best]["us"] / row["us"], rel=6e-4
                ), row
                assert row["host_bound"] in ("", "yes", "no")
            for group in bench["groups"]:
                ratios = [
                    row["ratio"]
                    for row in bench["rows"]
                    if row["group"] == group["group"] and row["ratio"]
                ]
                if ratios:  # otherwise rows of one dtype
                    assert group["worst"] == pytest.approx(min(ratios), rel=1e-3)
                    assert group["geomean"] == pytest.approx(geometric_mean(ratios), rel=1e-3)
            for fact in bench["facts"]:
                if fact["group"] == "random":
                    ratios = [row["ratio"] for row in bench["rows"]]
                    whole = {"geomean": geometric_mean(ratios), "worst": min(ratios)}
                    assert fact["value"] == pytest.approx(
                        whole.get(fact["label"], fact["value"]), rel=1e-3
                    )


def test_a_table_names_every_best_peer():
    rows = [row_of("", 1.0, **{name: 1.0}) for name in ("a", "b", "b")] + [row_of("", 1.0)]
    assert tool._best_peers(rows) == "b in 2, a in 1"
    assert tool._best_peers(rows[1:]) == "b"


def test_every_row_states_error_and_roofline(results):
    for result in results:
        for bench in result["benches"].values():
            assert bench["rows"] or bench["facts"]
            for row in bench["rows"]:
                if not row["rate"]:  # a whole step, whose FLOPs are not counted
                    continue
                assert row["roofline_percent"] > 0
                if (
                    row["error"] is None
                    # on a GPU some cases are too large for float64; others of their group are
                    # judged
                ):
                    group = [r for r in bench["rows"] if r["group"] == row["group"]]
                    assert "NVIDIA" in result["device"] and (
                        group[0]["error"] is not None
                        or row["group"] == "write"
                        # every contestant draws a mask of its own
                        or row["group"].startswith("dropout")
                    )
                    continue
                assert row["error"] < 0.1, row
                assert all(peer["error"] is not None for peer in row["peers"].values())


def run_of(date, rows, facts=(), **more):
    """A bench of one run."""
    command = f"python bench.py --only {date}"
    said = {"date": date, "command": command, "torch": "3", "peaks": {"read": 5e3}}
    return said | {"rows": rows, "facts": list(facts), "groups": []} | more


def measured(label, us, group="a group", **peers):
    """A row as a benchmark gives it, without a date of its own."""
    row = row_of(label, us, **peers) | {"group": group}
    del row["date"]
    return row


def test_a_part_of_the_rows_replaces_those_alone(tmp_path):
    """Through a file, as a benchmark stores it. The rows that the second run did not measure keep
    their figures, peers, date and command."""
    rows = [
        measured("small", 4.0, fa3=2.0, other=3.0),
        measured("large", 9.0, fa3=8.0),
        measured("last", 5.0, "b group", fa3=6.0),
    ]
    fact = {"group": "host", "label": "call", "value": 5.0, "unit": "us"}
    saved.store(tmp_path, "a GPU", "attn", run_of("2027-01-01", rows, [fact], driver="1"))
    saved.store(tmp_path, "a GPU", "gemm", run_of("2027-01-01", rows))
    before = saved.stored(tmp_path, "a GPU")
    new = [measured("small", 1.0, fa3=2.5, other=3.5), measured("new", 7.0, fa3=7.0)]
    part = run_of("2027-02-02", new, [fact | {"value": 4.0}, fact | {"label": "b"}], driver="2")
    bench, said = saved.merged(before["attn"], part)
    path = saved.store(tmp_path, "a GPU", "attn", bench)
    after = saved.load(path)["benches"]
    assert said == [] and after["gemm"] == before["gemm"]
    found = {row["label"]: row for row in after["attn"]["rows"]}
    assert list(found) == ["small", "large", "new", "last"]
    assert (
        found["large"] == before["attn"]["rows"][1] and found["last"] == before["attn"]["rows"][2]
    )
    small = found["small"]
    assert (small["us"], small["ratio"], small["date"]) == (1.0, 2.5, "2027-02-02")
    assert {name: peer["us"] for name, peer in small["peers"].items()} == {"fa3": 2.5, "other": 3.5}
    assert [(f["label"], f["value"], f["date"]) for f in after["attn"]["facts"]] == [
        ("call", 4.0, "2027-02-02"),
        ("b", 5.0, "2027-02-02"),
    ]
    assert (after["attn"]["driver"], after["attn"]["date"]) == ("1", "2027-01-01")
    (later,) = after["attn"]["later"]
    assert later["driver"] == "2" and later["peaks"] == {"read": 5e3}
    text = path.read_text()
    saved.save(path, saved.load(path))
    assert path.read_text() == text
    # the page says which rows are of which day
    page = tool.full_page({"stem": "a", "device": "a GPU", "benches": after})
    assert "2 of 4 cases are of another run: driver 2; torch 3; 2027-02-02; " in page
    assert "| 7 | **7** |  | 1.00x +- 1.2 % | 2857 GFLOP/s | 50 | 2027-02-02 |" in page
    assert "| 2027-01-01 to 2027-02-02 | 4 |" in tool._overview(
        [{"stem": "a", "device": "a GPU", "benches": after}]
    )


def test_a_row_is_not_stored_without_its_fastest_peer():
    """A ratio would rise because that peer is missing. A slower peer that did not run leaves the
    row with its figure of another day."""
    bench = run_of("2027-01-01", [measured("small", 4.0, fa3=2.0, other=3.0)])
    found, (said,) = saved.merged(bench, run_of("2027-02-02", [measured("small", 1.0, other=3.0)]))
    assert "a group small bf16: not stored, because fa3 did not run" in said
    assert (
        found["rows"] == [bench["rows"][0] | {"date": "2027-01-01", "command": bench["command"]}]
        and "later" not in found
    )
    found, (said,) = saved.merged(bench, run_of("2027-02-02", [measured("small", 1.0, fa3=2.2)]))
    assert said == "a group small bf16: stored without other, which did not run"
    (row,) = found["rows"]
    assert list(row["peers"]) == ["fa3"] and row["date"] == "2027-02-02"
    # no row of the first run remains, so its properties go
    assert found["date"] == "2027-02-02" and "later" not in found


def test_the_first_part_of_an_op_is_stored_as_it_is(tmp_path):
    part = run_of("2027-01-01", [measured("small", 1.0)])
    assert saved.stored(tmp_path, "a GPU") == {}
    assert saved.merged(None, part) == (part, [])
