# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes measured results: one CSV file per device, one line per case.

Benchmarks write the files of benchmarks/results/ with save(). Tools, tests and the commands
`device` and `roofline` read them with load(). The kind of a line says what it contains:

    case    a measurement: us of one call, ours and each peer's
    group   geomean and worst ratio of the cases of a group, and the bar that they must reach
    fact    one figure that is not a ratio of two times
    peak    what the device reached in the same run: GFLOP/s of a dtype, or GB/s of reading
    run     a property of a run: torch, driver, threads, ..; `older` names the groups whose kernels
            were replaced after the run, separated by "; ", or is all
    device  the first line: the device's name

Each line has the date and the command of its run. Most ops have one run. A run of some rows replaces
those alone (`merged`), and the properties of both runs remain.

The cells `peers` and `beside` hold several calls, separated by "; ", each as
`name=us/spread/error/MHz`; unknown figures are empty. `beside` has calls that were timed in the
same rounds but are not peers, such as one GPU beside two. `ratio` is the fastest peer's median time
over ours. `ratio_spread` is half the interquartile range of the ratios of single rounds, over their
median. `host_bound` is yes if ours or that peer waited for the host, no if not, and empty if it was
not recorded. `roofline_percent` compares with the measured peak of `dtype`, which is bf16 for products
of 8-bit codes and of 2:4 sparse weights, so theirs may exceed 100. Figures have four significant
digits.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

COLUMNS = (
    "op", "kind", "group", "case", "dtype", "ours", "unit", "spread", "peers", "beside",
    "best_peer", "ratio", "ratio_spread", "rate", "rate_unit", "roofline_percent", "share", "error",
    "clock_mhz", "watts", "host_bound", "bar", "verdict", "note", "date", "command",
)  # fmt: skip
NUMBERS = {"spread", "ratio", "ratio_spread", "rate", "roofline_percent", "share", "error"}
NUMBERS |= {"clock_mhz", "watts"}
NEEDED = ("ours", "rate", "roofline_percent")  # what a case needs to be drawn in a roofline
CALL = ("us", "spread", "error", "clock_mhz")
LISTS = ("rows", "groups", "facts", "peaks", "later")  # what a bench has beside properties


def ratio_of(row: dict[str, Any]) -> float | None:
    """The fastest peer's median time over ours; None without a peer."""
    if not row["peers"]:
        return None
    return min(peer["us"] for peer in row["peers"].values()) / row["us"]


def best_peer(row: dict[str, Any]) -> str:
    """The name of the fastest peer; "" without a peer."""
    return min(row["peers"], key=lambda name: row["peers"][name]["us"], default="")


def _number(text: str) -> float | None:
    return float(text) if text else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        short = f"{value:.4g}"
        return str(int(float(short))) if "e+" in short else short
    return str(value)


def _calls(text: str) -> dict[str, dict[str, float | None]]:
    """The calls in a cell: name -> us, spread, error, clock_mhz."""
    found = {}
    for call in filter(None, text.split("; ")):
        name, _, figures = call.rpartition("=")
        found[name] = dict(zip(CALL, map(_number, figures.split("/")), strict=True))
    return found


def _cell(calls: dict[str, dict]) -> str:
    for name in calls:
        if "; " in name or "=" in name:
            raise ValueError(f"the name of a peer must not contain '; ' or '=', got {name!r}")
    cells = ("/".join(_text(call.get(key)) for key in CALL) for call in calls.values())
    return "; ".join(f"{name}={cell}" for name, cell in zip(calls, cells, strict=True))


def _as_stored(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its times rounded as in the file, so that the ratio is that of the rounded
    times."""
    peers = {
        name: peer | {"us": float(_text(float(peer["us"])))} for name, peer in row["peers"].items()
    }
    return row | {"us": float(_text(float(row["us"]))), "peers": peers}


def _case(line: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": line["group"], "label": line["case"], "dtype": line["dtype"]}
    row |= {key: _number(line[key]) for key in NUMBERS}
    row |= {key: line[key] for key in ("best_peer", "bar", "verdict", "host_bound", "note")}
    row |= {"us": float(line["ours"]), "unit": line["rate_unit"]}
    row |= {"peers": _calls(line["peers"]), "beside": _calls(line["beside"])}
    row |= {"date": line["date"], "command": line["command"]}
    if row["rate"] is not None:
        for call in row["peers"].values():
            call["rate"] = row["rate"] * row["us"] / call["us"]
    return row


def load(path: Path) -> dict[str, Any]:
    """The results of one device: {"device": name, "benches": {op: bench}}. A bench has the
    properties of its run, "peaks", "rows" (the cases), "groups" and "facts". If other runs measured
    some of the rows, "later" has the properties of each. Rows and facts have their own date and
    command.

    Raises:
        ValueError: the file has another form; the text names the line.
    """
    result: dict[str, Any] = {"device": "", "benches": {}}
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        head = lines.fieldnames or []
        if missing := [name for name in COLUMNS if name not in head]:
            raise ValueError(
                f"{path}: no results of benchmarks/results/: expected a CSV file whose first line "
                f"names the "
                f"columns {', '.join(COLUMNS[:6])}, ..; it has no {', '.join(missing[:3])}"
            )
        for line in lines:
            try:
                _take(line, result)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: line {lines.line_num}: {error}") from None
    if not result["device"]:
        raise ValueError(f"{path}: no line of kind device names the device")
    return result


def _take(line: dict[str, str], result: dict[str, Any]) -> None:
    """Adds one line of the file to the result."""
    kind, op = line["kind"], line["op"]
    if kind == "device":
        result["device"] = line["case"]
        return
    empty: dict[str, Any] = {"date": line["date"], "command": line["command"], "peaks": {}}
    bench = result["benches"].setdefault(op, empty | {"rows": [], "groups": [], "facts": []})
    run = bench
    if kind in ("peak", "run") and _run_of(line) != _run_of(bench):
        later = bench.setdefault("later", [])
        run = next((of for of in later if _run_of(of) == _run_of(line)), empty)
        if run is empty:
            later.append(run)
    if kind == "case":
        needed = NEEDED if line["rate_unit"] else ("ours",)
        if lacking := [name for name in needed if not line[name]]:
            raise ValueError(f"a case of {op} has no {', '.join(lacking)}")
        bench["rows"].append(_case(line))
    elif kind == "group":
        group = {
            "group": line["group"],
            "rows": int(line["note"].split()[0]),
            "geomean": float(line["ours"]),
        }
        bench["groups"].append(
            group | {"worst": float(line["ratio"])} | {k: line[k] for k in ("bar", "verdict")}
        )
    elif kind == "fact":
        fact = {
            "group": line["group"],
            "label": line["case"],
            "value": float(line["ours"]),
            "unit": line["unit"],
        }
        said = ("bar", "verdict", "note", "date", "command")
        bench["facts"].append(fact | {key: line[key] for key in said})
    elif kind == "peak":
        run["peaks"][line["case"]] = float(line["ours"])
    elif kind == "run":
        value = line["note"]
        run[line["case"]] = float(value) if line["case"] == "others_percent" else value
    else:
        raise ValueError(f"kind must be device, case, group, fact, peak or run, got {kind!r}")


def _run_of(line: dict[str, Any]) -> tuple[str, str]:
    """What tells the runs of an op apart."""
    return line["date"], line["command"]


def _properties(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of one run's properties and peaks."""
    said = {"date": run["date"], "command": run["command"]}
    lines: list[dict[str, Any]] = [
        said | {"kind": "run", "case": key, "note": value}
        for key, value in run.items()
        if key not in (*LISTS, *said) and value not in ("", None)
    ]
    for name, peak in run.get("peaks", {}).items():
        if isinstance(peak, (int, float)):
            unit = "GB/s" if name == "read" else "GFLOP/s"
            lines.append(said | {"kind": "peak", "case": name, "ours": float(peak), "unit": unit})
    return lines


def _lines(op: str, bench: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of one op."""
    lines = [line for run in (bench, *bench.get("later", ())) for line in _properties(run)]
    for row in map(_as_stored, bench["rows"]):
        line = {key: row.get(key) for key in NUMBERS}
        line |= {"kind": "case", "group": row["group"], "case": row["label"], "dtype": row["dtype"]}
        line |= {
            "ours": float(row["us"]),
            "unit": "us",
            "rate_unit": row["unit"],
            "ratio": ratio_of(row),
        }
        line |= {"peers": _cell(row["peers"]), "beside": _cell(row.get("beside", {}))}
        line |= {key: row.get(key, "") for key in ("bar", "verdict", "host_bound", "note")}
        line |= {key: row[key] for key in ("date", "command") if key in row}
        lines.append(line | {"best_peer": best_peer(row)})
    for group in bench.get("groups", ()):
        line = {
            "kind": "group",
            "group": group["group"],
            "ours": float(group["geomean"]),
            "unit": "x",
        }
        line |= {"ratio": float(group["worst"]), "note": f"{group['rows']} rows"}
        lines.append(line | {key: group[key] for key in ("bar", "verdict")})
    for fact in bench.get("facts", ()):
        line = {
            "kind": "fact",
            "group": fact["group"],
            "case": fact["label"],
            "ours": float(fact["value"]),
        }
        line |= {key: fact[key] for key in ("date", "command") if key in fact}
        lines.append(line | {key: fact.get(key, "") for key in ("unit", "bar", "verdict", "note")})
    return [{"op": op, "date": bench["date"], "command": bench["command"]} | line for line in lines]


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as load() returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "device", "case": result["device"]}]
    for op, bench in result["benches"].items():
        lines += _lines(op, bench)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        for line in lines:
            writer.writerow({key: _text(value) for key, value in line.items()})


def slug(device: str) -> str:
    """The name of a device's file without its suffix: "NVIDIA H200" is nvidia-h200."""
    return "-".join(
        filter(None, "".join(c if c.isalnum() else "-" for c in device.lower()).split("-"))
    )


def store(folder: Path, device: str, op: str, bench: dict[str, Any]) -> Path:
    """Replaces one op's lines in the file of a device."""
    path = folder / f"{slug(device)}.csv"
    result = load(path) if path.exists() else {"device": device, "benches": {}}
    result["benches"][op] = bench
    save(path, result)
    return path


def stored(folder: Path, device: str) -> dict[str, Any]:
    """The benches in the file of a device; empty without a file."""
    path = folder / f"{slug(device)}.csv"
    return load(path)["benches"] if path.exists() else {}


def merged(bench: dict[str, Any] | None, part: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A bench with the rows and facts of a run that measured some of them, and what is to be said.

    A row of the same group, case and dtype is replaced as a whole, with its peers: a peer that did
    not run has no figure of another day beside ours. If it was the fastest, the ratio would rise
    because it is missing, so the stored row stays. All other rows stay as they are. The groups of
    the result are those of the bench; whoever measures judges them again.
    """
    if bench is None:
        return part | {"groups": []}, []
    said: list[str] = []
    own = {"date": part["date"], "command": part["command"]}
    same = {"date": bench["date"], "command": bench["command"]}
    rows = [same | row for row in bench["rows"]]
    for new in part["rows"]:
        at = _place(rows, new, ("group", "label", "dtype"))
        name = f"{new['group']} {new['label']} {new['dtype']}"
        if at is None:
            after = [i for i, row in enumerate(rows) if row["group"] == new["group"]]
            rows.insert(after[-1] + 1 if after else len(rows), new | own)
            continue
        missing = [peer for peer in rows[at]["peers"] if peer not in new["peers"]]
        if best_peer(rows[at]) in missing:
            said.append(
                f"{name}: not stored, because {best_peer(rows[at])} did not run: it is the fastest "
                f"peer of the row of {rows[at]['date']}, which stays"
            )
            continue
        if missing:
            said.append(f"{name}: stored without {', '.join(missing)}, which did not run")
        rows[at] = new | own
    facts = [same | fact for fact in bench["facts"]]
    for new in part["facts"]:
        at = _place(facts, new, ("group", "label", "unit"))
        if at is None:
            facts.append(new | own)
        else:
            facts[at] = new | own
    # the properties of each run that still has a row or a fact
    of_run = (
        {k: v for k, v in run.items() if k not in LISTS or k == "peaks"}
        for run in (bench, *bench.get("later", ()), part)
    )
    runs = {_run_of(run): run for run in of_run}
    used = {_run_of(line) for line in (*rows, *facts)} or {_run_of(part)}
    first, *later = (run for key, run in runs.items() if key in used)
    found = first | {"rows": rows, "facts": facts, "groups": bench["groups"]}
    return found | ({"later": later} if later else {}), said


def _place(lines: list[dict[str, Any]], new: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Where the line with the same keys is; None if there is none."""
    return next((i for i, line in enumerate(lines) if all(line[k] == new[k] for k in keys)), None)
