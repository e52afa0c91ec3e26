"""Writes the benchmark tables of README.md and docs/ladder.md from the committed results.

python tools/readme_tables.py           rewrites the pages between their markers
python tools/readme_tables.py --check   exits 1 and names the tables that are out of date

A table stands between `<!-- benchmarks:NAME begin -->` and `<!-- benchmarks:NAME end -->`, where
NAME is a bench of benchmarks/results/*.json. Several devices give several tables, in the order of
their file names. The ladder has tables of its own, LADDER_TABLES below.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "ladder.md")
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(
    r"(<!-- benchmarks:(?P<name>\w+) begin -->\n)(?P<table>.*?)(<!-- benchmarks:(?P=name) end -->)",
    re.DOTALL,
)


def load_results(folder: Path = RESULTS) -> list[dict]:
    """One dict per device."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(head: list[str]) -> str:
    return _line(["---"] * len(head))


def _span(values: list[float]) -> str:
    """A figure, or the range of several."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} - {high}"


def _rates(rows: list[dict], rate: Callable[[dict], float], with_unit: bool) -> str:
    """The range of the rates in each unit of the rows; T where ours are ten thousand G."""
    spans = []
    for unit in dict.fromkeys(row["unit"] for row in rows):
        members = [row for row in rows if row["unit"] == unit]
        large = max(row["rate"] for row in members) >= 1e4
        span = _span([(1e-3 if large else 1.0) * rate(row) for row in members])
        spans.append(f"{span} {unit.replace('G', 'T', 1) if large else unit}" if with_unit else span)
    return "; ".join(spans)


def _best_peers(rows: list[dict]) -> str:
    """The fastest peer, or, where rows differ, each with the number of its rows."""
    counts = Counter(row["best_peer"] for row in rows if row["best_peer"])
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} in {count}" for name, count in counts.most_common())


def _group_lines(bench: dict) -> list[str]:
    """A line per group and dtype: our rates, the best peer's, the geomean and worst ratio."""
    lines = []
    bars = {group["group"]: group for group in bench["groups"]}
    for name in dict.fromkeys(row["group"] for row in bench["rows"]):
        members = [row for row in bench["rows"] if row["group"] == name]
        group = bars.get(name)
        ours = _rates(members, lambda row: row["rate"], with_unit=True)
        rated = [row for row in members if row["best_peer"]]
        theirs = _rates(rated, lambda row: row["peers"][row["best_peer"]]["rate"], with_unit=False)
        theirs += f" ({_best_peers(rated)})" if rated else ""
        shares = [row["share"] for row in members if row.get("share") is not None]
        ratio = f"{group['geomean']:.2f}x, worst {group['worst']:.2f}x" if group else ""
        bar, verdict = (group["bar"], group["verdict"]) if group else ("", "")
        if shares:
            ratio += f"{'; ' if ratio else ''}{min(shares):.2f} - {max(shares):.2f} of the limit"
            judged = [row for row in members if row["bar"]]
            if len({row["bar"] for row in judged}) == 1 and len(judged) == len(members):
                bar = members[0]["bar"]
                missed = [row["verdict"] for row in members if row["verdict"] != "held"]
                verdict = f"missed in {len(missed)} of {len(members)}" if missed else "held"
        if not bar and (own := [row for row in members if row["bar"]]):
            bar = "; ".join(f"{row['label']}: {row['bar']}" for row in own)
            missed = [row["label"] for row in own if row["verdict"] != "held"]
            verdict = f"missed: {', '.join(missed)}" if missed else "held"
        lines.append(_line([name, str(len(members)), ours, theirs, ratio, bar, verdict]))
    return lines


def _fact_lines(bench: dict) -> list[str]:
    return [
        _line(
            [
                f"{fact['group']}: {fact['label']}",
                f"{fact['value']:.3g} {fact['unit']}",
                fact["note"],
                fact["bar"],
                fact["verdict"],
            ]
        )
        for fact in bench["facts"]
    ]


# ---- the ladder -----------------------------------------------------------------------------------

# counter -> its name and unit in the tables, and what it is divided by
COUNTERS = {
    "smsp__inst_executed.sum": ("instructions of warps, M", 1e6),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue slots used, %", 1),
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("loads from global memory, M", 1e6),
    "l1tex__data_pipe_lsu_wavefronts.sum": ("clocks of L1 and shared memory, M", 1e6),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("clocks of shared memory, M", 1e6),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("clocks of bank conflicts, M", 1e6),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("tensor pipe busy, %", 1),
    "lts__t_sectors_srcunit_tex.sum": ("asked of L2, GB", 1e9 / 32),
    "dram__bytes_read.sum": ("read from memory, GB", 1e9),
}


def _count(profile: dict, counter: str) -> str:
    value = profile[counter] / COUNTERS[counter][1]
    return f"{value:.0f}" if value >= 1000 else f"{value:.2g}" if value < 10 else f"{value:.3g}"


def _ladder_lines(bench: dict, rows: list[dict], rungs: list[dict]) -> list[str]:
    """What a rung should reach and did, beside cuBLAS in the same minutes."""
    head = [
        "rung",
        "change",
        "predicted, by",
        "measured, TFLOP/s",
        "of cuBLAS",
        "SM clock, power",
        "counter that moved",
    ]
    lines = [_line(head), _rule(head)]
    for row, rung in zip(rows, rungs, strict=True):
        assert row["label"] == f"{rung['number']} {rung['name']}"
        moved = ""
        if rung["moved"] and str(rung["number"] - 1) in bench["counters"]:
            before, now = (bench["counters"][str(rung["number"] - i)] for i in (1, 0))
            moved = f"{COUNTERS[rung['moved']][0]}: {_count(before, rung['moved'])} to {_count(now, rung['moved'])}"
        ratio = f"{row['ratio']:.4f}" if row["ratio"] < 0.01 else f"{row['ratio']:.3f}"
        cells = [
            f"[{row['label']}](../{rung['source']})",
            rung["change"],
            f"{rung['predicted']:.3g}, {rung['limiter']}",
            f"{row['rate'] / 1e3:.3g}",
            ratio,
            f"{row['clock_mhz']:.0f} MHz, {row['watts']:.0f} W",
            moved,
        ]
        lines.append(_line(cells))
    return lines


def _members(bench: dict, size: str) -> list[dict]:
    return [row for row in bench["rows"] if row["group"] == f"{size} cubed"]


def _ladder(result: dict) -> str:
    bench = result["benches"]["ladder"]
    members = _members(bench, "4096")
    cublas = [row["peers"]["torch.matmul"]["rate"] / 1e3 for row in members]
    said = (
        f"{result['device']}; torch {bench['torch']}; {bench['date']}; `{bench['command']}`.\n"
        f"Beside the rungs cuBLAS reached {min(cublas):.0f} to {max(cublas):.0f} TFLOP/s, the less the warmer the board was.\n"
        f"Largest error of any rung {max(row['error'] for row in members):.1e} of the largest value, cuBLAS's "
        f"{max(row['peers']['torch.matmul']['error'] for row in members):.1e}: the rounding to bfloat16.\n"
    )
    return "\n".join([said, *_ladder_lines(bench, members, bench["rungs"])]) + "\n"


def _ladder_large(result: dict) -> str:
    bench = result["benches"]["ladder"]
    head = ["rung", "predicted", "measured, TFLOP/s", "of cuBLAS", "SM clock, power", "read from memory, GB"]
    memory, lines = "dram__bytes_read.sum", [_line(head), _rule(head)]
    for row, rung in zip(_members(bench, "16384"), bench["large"], strict=True):
        cells = [
            row["label"],
            f"{rung['predicted']:.3g}",
            f"{row['rate'] / 1e3:.3g}",
            f"{row['ratio']:.3f}",
            f"{row['clock_mhz']:.0f} MHz, {row['watts']:.0f} W",
            _count(bench["counters_large"][str(rung["number"])], memory),
        ]
        lines.append(_line(cells))
    lines.append(_line(["cuBLAS", "", "", "", "", _count(bench["counters_large"]["cuBLAS"], memory)]))
    return "\n".join(lines) + "\n"


def _ladder_counters(result: dict) -> str:
    profiles = result["benches"]["ladder"]["counters"]
    head = ["4096 cubed", *profiles]
    lines = [_line(head), _rule(head)]
    for counter, (name, _) in COUNTERS.items():
        lines.append(_line([name, *(_count(profile, counter) for profile in profiles.values())]))
    return "\n".join(lines) + "\n"


LADDER_TABLES = {"ladder": _ladder, "ladder_counters": _ladder_counters, "ladder_large": _ladder_large}


def table(name: str, results: list[dict]) -> str:
    """The tables of one bench, one per device that has it."""
    parts = []
    for result in results:
        if name in LADDER_TABLES and "ladder" in result["benches"]:
            parts.append(LADDER_TABLES[name](result))
            continue
        bench = result["benches"].get(name)
        if bench is None:
            continue
        note = bench.get("note", "")  # of what was changed since the run
        peaks = ", ".join(
            f"{key} {value:.0f} {'GB/s' if key == 'read' else 'GFLOP/s'}"
            for key, value in bench["peaks"].items()
            if key != "isa"
        )
        parts.append(
            f"{result['device']}; torch {bench['torch']}; {bench['date']}; "
            f"measured peaks: {peaks}; `{bench['command']}`{'; ' * bool(note) + note}\n"
        )
        if bench["rows"]:
            head = ["rows", "cases", "gpukern", "best peer", "ratio, geomean", "bar", ""]
            parts.append("\n".join([_line(head), _rule(head), *_group_lines(bench)]) + "\n")
        if bench["facts"]:
            head = ["figure", "value", "from", "bar", ""]
            parts.append("\n".join([_line(head), _rule(head), *_fact_lines(bench)]) + "\n")
    if not parts:
        raise SystemExit(f"a page asks for a table of '{name}', and no result file has it")
    return "\n".join(parts)


def rendered(text: str, results: list[dict]) -> str:
    """A page with every marked table rewritten."""
    return MARKED.sub(lambda found: found[1] + "\n" + table(found["name"], results) + "\n" + found[4], text)


def out_of_date(text: str, results: list[dict]) -> list[str]:
    """Names of the marked tables that differ from what the results give."""
    return [
        found["name"]
        for found in MARKED.finditer(text)
        if found["table"] != "\n" + table(found["name"], results) + "\n"
    ]


def main(argv: list[str]) -> int:
    results, old = load_results(), []
    for page in PAGES:
        text = page.read_text()
        if argv == ["--check"]:
            old += [f"{page.name}: {name}" for name in out_of_date(text, results)]
        else:
            page.write_text(rendered(text, results))
    if old:
        print(f"out of date: {', '.join(old)}; run python tools/readme_tables.py")
    return bool(old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
