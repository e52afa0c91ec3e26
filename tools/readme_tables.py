"""Writes the README's benchmark tables from the committed results.

python tools/readme_tables.py           rewrites README.md between its markers
python tools/readme_tables.py --check   exits 1 and names the tables that are out of date

A table stands between `<!-- benchmarks:NAME begin -->` and `<!-- benchmarks:NAME end -->`, where
NAME is a bench of benchmarks/results/*.json. Several devices give several tables, in the order of
their file names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
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


def _group_lines(bench: dict) -> list[str]:
    """A line per group and dtype: our rates, the best peer's, the geomean and worst ratio."""
    lines = []
    bars = {group["group"]: group for group in bench["groups"]}
    for name in dict.fromkeys(row["group"] for row in bench["rows"]):
        members = [row for row in bench["rows"] if row["group"] == name]
        group = bars.get(name)
        unit, one = members[0]["unit"], 1.0
        if max(row["rate"] for row in members) >= 1e4:
            unit, one = unit.replace("G", "T", 1), 1e-3
        ours = _span([one * row["rate"] for row in members])
        rates = [one * row["peers"][row["best_peer"]]["rate"] for row in members if row["best_peer"]]
        theirs = f"{_span(rates)} ({members[0]['best_peer']})" if rates else ""
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
        lines.append(_line([name, str(len(members)), f"{ours} {unit}", theirs, ratio, bar, verdict]))
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


def table(name: str, results: list[dict]) -> str:
    """The tables of one bench, one per device that has it."""
    parts = []
    for result in results:
        bench = result["benches"].get(name)
        if bench is None:
            continue
        peaks = ", ".join(
            f"{key} {value:.0f} {'GB/s' if key == 'read' else 'GFLOP/s'}"
            for key, value in bench["peaks"].items()
            if key != "isa"
        )
        parts.append(
            f"{result['device']}; torch {bench['torch']}; {bench['date']}; "
            f"measured peaks: {peaks}; `{bench['command']}`\n"
        )
        if bench["rows"]:
            head = ["rows", "cases", "gpukern", "best peer", "ratio, geomean", "bar", ""]
            parts.append("\n".join([_line(head), _rule(head), *_group_lines(bench)]) + "\n")
        if bench["facts"]:
            head = ["figure", "value", "from", "bar", ""]
            parts.append("\n".join([_line(head), _rule(head), *_fact_lines(bench)]) + "\n")
    if not parts:
        raise SystemExit(f"README.md asks for a table of '{name}', and no result file has it")
    return "\n".join(parts)


def rendered(text: str, results: list[dict]) -> str:
    """The README with every marked table rewritten."""
    return MARKED.sub(lambda found: found[1] + "\n" + table(found["name"], results) + "\n" + found[4], text)


def out_of_date(text: str, results: list[dict]) -> list[str]:
    """Names of the marked tables that differ from what the results give."""
    return [
        found["name"]
        for found in MARKED.finditer(text)
        if found["table"] != "\n" + table(found["name"], results) + "\n"
    ]


def main(argv: list[str]) -> int:
    text, results = README.read_text(), load_results()
    if argv == ["--check"]:
        old = out_of_date(text, results)
        if old:
            print(f"README.md: out of date: {', '.join(old)}; run python tools/readme_tables.py")
        return bool(old)
    README.write_text(rendered(text, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
