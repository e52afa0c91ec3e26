"""The benchmark tables of README.md and docs/ladder.md say what the committed results say."""

import copy
import importlib.util
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPEC = importlib.util.spec_from_file_location("readme_tables", os.path.join(ROOT, "tools", "readme_tables.py"))
readme_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_tables)

BENCHES = ("gemm", "flash_attn", "paged_attn", "model")
LADDER = readme_tables.PAGES[1]


@pytest.fixture
def results():
    return readme_tables.load_results()


def test_every_bench_has_a_table_and_results(results):
    names = [m["name"] for m in readme_tables.MARKED.finditer(readme_tables.README.read_text())]
    assert sorted(names) == sorted(BENCHES)
    for name in BENCHES:
        assert any(name in result["benches"] for result in results), name


def test_tables_are_up_to_date(results):
    text = readme_tables.README.read_text()
    assert readme_tables.out_of_date(text, results) == []
    assert readme_tables.rendered(text, results) == text


@pytest.mark.parametrize("name", BENCHES)
def test_a_changed_result_is_noticed(results, name):
    text = readme_tables.README.read_text()
    changed = copy.deepcopy(results)
    for result in changed:
        for row in result["benches"].get(name, {"rows": []})["rows"]:
            row["rate"] *= 2
    assert readme_tables.out_of_date(text, changed) == [name]


def test_the_ladders_page_is_up_to_date(results):
    text = LADDER.read_text()
    assert [m["name"] for m in readme_tables.MARKED.finditer(text)] == list(readme_tables.LADDER_TABLES)
    assert readme_tables.out_of_date(text, results) == []


@pytest.mark.parametrize("name", readme_tables.LADDER_TABLES)
def test_a_changed_ladder_is_noticed(results, name):
    changed = copy.deepcopy(results)
    for result in changed:
        if bench := result["benches"].get("ladder"):
            for row in bench["rows"] if name != "ladder_counters" else ():
                if row["group"] == ("4096 cubed" if name == "ladder" else "16384 cubed"):
                    row["rate"] *= 2
            if name == "ladder_counters":
                bench["counters"]["13"]["smsp__inst_executed.sum"] *= 2
    assert readme_tables.out_of_date(LADDER.read_text(), changed) == [name]


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
                drift = row["ratio_spread"] + row["spread"] + row["peers"][row["best_peer"]]["spread"]
                assert abs(row["ratio"] / (best / row["us"]) - 1) < 0.02 + 2 * drift, row
            for group in bench["groups"]:
                ratios = [row["ratio"] for row in bench["rows"] if row["group"] == group["group"] and row["ratio"]]
                if ratios:  # else rows of one dtype
                    assert abs(group["worst"] / min(ratios) - 1) < 1e-3


def test_a_table_names_every_best_peer():
    rows = [{"best_peer": name} for name in ("a", "b", "b", "")]
    assert readme_tables._best_peers(rows) == "b in 2, a in 1"
    assert readme_tables._best_peers(rows[1:]) == "b"


def test_every_row_states_error_and_roofline(results):
    for result in results:
        for bench in result["benches"].values():
            assert bench["rows"] or bench["facts"]
            for row in bench["rows"]:
                assert row["roofline_percent"] > 0
                if (
                    row["error"] is None
                ):  # on a GPU some cases are too large for float64; others of their group are judged
                    group = [r for r in bench["rows"] if r["group"] == row["group"]]
                    assert "NVIDIA" in result["device"] and (group[0]["error"] is not None or row["group"] == "write")
                    continue
                assert row["error"] < 0.1, row
                assert all(peer["error"] is not None for peer in row["peers"].values())
