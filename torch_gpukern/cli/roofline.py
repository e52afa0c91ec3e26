# SPDX-License-Identifier: BSD-3-Clause
"""``gpukern roofline``: a roofline chart of saved benchmark rows, as PNG and HTML.

A row is one case of a benchmark. It is drawn at its FLOPs per byte and its rate, under two kinds of
ceilings: those measured in the same run and, for a known machine, the nominal ones. Bytes are the
least that an op must move: inputs read once, outputs written once.

The saved files do not have FLOPs per byte. They follow from

- the row's percent of the roofline, if bandwidth bounds it;
- otherwise its shape: M, N and K of gemm, the sequence length of attention (as if there were as many
  key heads as query heads).

A row with neither is counted, but not drawn.
"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path

from .. import results
from .charts import decades, short
from .terminal import table

# Nominal, dense: TFLOP/s and GB/s of the vendor's data sheet.
NOMINAL = {
    "NVIDIA H200": {"bf16": 989.4, "f16": 989.4, "tf32": 494.7, "f32": 66.9, "read": 4800.0},
    "NVIDIA H100 80GB HBM3": {
        "bf16": 989.4,
        "f16": 989.4,
        "tf32": 494.7,
        "f32": 66.9,
        "read": 3350.0,
    },
    "NVIDIA A100-SXM4-80GB": {
        "bf16": 312.0,
        "f16": 312.0,
        "tf32": 156.0,
        "f32": 19.5,
        "read": 2039.0,
    },
}
# The clock in GHz at which the nominal rates hold. A number of cycles divided by it is a time.
GHZ = {"NVIDIA H200": 1.83, "NVIDIA H100 80GB HBM3": 1.83, "NVIDIA A100-SXM4-80GB": 1.41}
# The time of a kernel that does almost nothing, measured on an H200 and an H100: its start and end in
# a graph take 1.1 us, one access to busy memory takes 0.9 us (learn/patterns.md, graph and occupancy).
# If a call's ceilings allow less time than that, its bound is latency.
LATENCY_US = 2.0
ELEM_BYTES = {"f32": 4, "tf32": 4, "bf16": 2, "f16": 2}
COLORS = {
    "gemm": "#d62728",
    "flash_attn": "#1f77b4",
    "paged_attn": "#2ca02c",
    "model": "#9467bd",
    "memory": "#d62728",
    "L2": "#1f77b4",
}
_GEMM = re.compile(r"(?:[NT]{2} )?(\d+)x(\d+)x(\d+)(?: .*)?|(?:[NT]{2} )?(\d+)")
_ATTENTION = re.compile(r"(forward|backward) (full|causal)\b.*")


@dataclass(frozen=True)
class Point:
    """A row in the chart: its intensity (FLOPs per byte), its rate in GFLOP/s, the percent of its
    roofline that it reaches, and its bound, "memory", "compute" or "latency"."""

    bench: str
    name: str
    dtype: str
    intensity: float
    gflops: float
    percent: float
    bound: str


def _intensity_of_shape(bench: str, row: dict) -> float | None:
    """FLOPs per byte from the row's label; None if the label does not contain the shape."""
    size = ELEM_BYTES[row["dtype"]]
    if bench == "gemm" and (found := _GEMM.fullmatch(row["label"])):
        m, k, n = map(int, found.groups()[:3]) if found[1] else (int(found[4]),) * 3
        return 2.0 * m * n * k / (size * (m * k + k * n + m * n))
    kind, length = _ATTENTION.fullmatch(row["group"]), re.search(r"\bS(\d+)\b", row["label"])
    if bench == "flash_attn" and kind and length:
        # products of S x S x D, and tensors of S x D that are read or written
        products, tensors = (2, 4) if kind[1] == "forward" else (5, 8)
        halved = 2 if kind[2] == "causal" else 1
        return products * 2.0 * int(length[1]) / (tensors * size) / halved
    return None


def point_of(bench: str, row: dict, peaks: dict, latency_us: float = 0.0) -> Point | None:
    """The `Point` of a saved row. None if its FLOPs per byte do not follow from the file.

    latency_us: the time of a call that does almost nothing, as LATENCY_US.
    """
    percent, us = row.get("roofline_percent"), row["us"]
    if not percent or row["dtype"] not in peaks or row["dtype"] not in ELEM_BYTES:
        return None
    of_shape = _intensity_of_shape(bench, row)
    ridge = peaks[row["dtype"]] / peaks["read"]
    if row["unit"] == "GFLOP/s":
        gflops = row["rate"]
        # If the row reaches more percent of its roofline than of the peak FLOP/s, its ceiling is
        # lower than the peak: bandwidth is the bound. 101 instead of 100 allows for rounding.
        if percent > 101 * gflops / peaks[row["dtype"]]:
            intensity = gflops / (percent / 100 * peaks["read"])
        elif of_shape is None:
            return None
        else:
            intensity = max(of_shape, ridge)
    elif row["unit"] == "GB/s" and of_shape is not None:
        intensity, gflops = of_shape, row["rate"] * of_shape
    else:
        return None
    bound = "memory" if intensity < ridge else "compute"
    if us * percent / 100 < latency_us:
        bound = "latency"
    name = f"{row['group']}, {row['label']}: {us:.4g} us"
    return Point(bench, name, row["dtype"], intensity, gflops, percent, bound)


def read_points(path: Path, benches: list[str] | None = None) -> tuple[str, dict, list[Point], int]:
    """(device, peaks by dtype, points, number of rows that cannot be drawn) of a file in
    benchmarks/results/."""
    saved = results.load(path)
    peaks: dict[str, float] = {}
    points, without = [], 0
    latency_us = LATENCY_US if saved["device"] in NOMINAL else 0.0
    for bench, run_ in saved["benches"].items():
        if benches and bench not in benches:
            continue
        mine = run_["peaks"]
        peaks.update({name: max(peaks.get(name, 0.0), peak) for name, peak in mine.items()})
        for row in run_["rows"]:
            point = point_of(bench, row, mine, latency_us) if mine and row["unit"] else None
            if point:
                points.append(point)
            without += point is None
    if not points:
        raise ValueError(f"{path}: no row of {', '.join(benches or saved['benches'])} can be drawn")
    return saved["device"], peaks, points, without


def _ceilings(
    device: str, peaks: dict, points: list[Point]
) -> list[tuple[str, float, float, bool]]:
    """The ceilings of the points' dtypes: (name, GFLOP/s, GB/s, whether measured)."""
    found: list[tuple[str, float, float, bool]] = []
    dtypes = sorted({p.dtype for p in points})
    kinds = [(True, {d: peaks[d] for d in dtypes}, peaks["read"])] if peaks else []
    if device in NOMINAL:
        kinds.append(
            (False, {d: NOMINAL[device][d] * 1e3 for d in dtypes}, NOMINAL[device]["read"])
        )
    for measured, flops, bandwidth in kinds:
        for name in dtypes:  # ceilings within 5 % become one line, at the highest
            group = [d for d in dtypes if abs(flops[d] / flops[name] - 1) < 0.05]
            if group[0] == name:
                text = f"{', '.join(group)} {'measured' if measured else 'nominal'}"
                found.append((text, max(flops[d] for d in group), bandwidth, measured))
    return found


def draw(device: str, peaks: dict, points: list[Point], path: Path) -> None:
    """Writes the chart as PNG or SVG, by the path's suffix. RuntimeError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "roofline: matplotlib is not installed; pip install matplotlib"
        ) from error
    figure = Figure(figsize=(9, 6), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    low, high = min(p.intensity for p in points) / 2, max(p.intensity for p in points) * 2
    for name, flops, bandwidth, measured in _ceilings(device, peaks, points):
        xs = sorted({low, min(max(flops / bandwidth, low), high), high})
        ys = [min(flops, x * bandwidth) for x in xs]
        axes.plot(
            xs,
            ys,
            "-" if measured else "--",
            color="#444444" if measured else "#aaaaaa",
            linewidth=1,
        )
        axes.annotate(name, (high, ys[-1]), fontsize=7, ha="right", va="bottom")
    for bench in dict.fromkeys(p.bench for p in points):
        mine = [p for p in points if p.bench == bench]
        color = COLORS.get(bench, "#7f7f7f")
        axes.scatter(
            [p.intensity for p in mine], [p.gflops for p in mine], s=14, color=color, label=bench
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte that must move")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{device}: {len(points)} rows under their ceilings")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


# ---- the page ------------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN = 900, 560, 60  # of the SVG chart, in pixels
LEFT, TOP, RIGHT, FLOOR = MARGIN, MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN


@dataclass(frozen=True)
class _Axes:
    """The ranges of both logarithmic axes, as powers of ten."""

    x0: float
    x1: float
    y0: float
    y1: float

    def at(self, x: float, y: float) -> str:
        """The place of a value in the SVG, "x,y" in pixels."""
        right = (log10(x) - self.x0) / (self.x1 - self.x0) * (WIDTH - 2 * MARGIN)
        up = (log10(y) - self.y0) / (self.y1 - self.y0) * (HEIGHT - 2 * MARGIN)
        return f"{MARGIN + right:.1f},{HEIGHT - MARGIN - up:.1f}"


def _grid(axes: _Axes) -> list[str]:
    """Both axes with their titles, ticks and grid lines."""
    shapes = []
    for x, labelled in decades(10**axes.x0, 10**axes.x1):
        to = axes.at(x, 10**axes.y0).split(",")[0]
        shapes.append(
            f'<line x1="{to}" x2="{to}" y1="{TOP}" y2="{FLOOR}" '
            f'stroke="{"#ccc" if labelled else "#eee"}"/>'
        )
        shapes.append(
            f'<text x="{to}" y="{FLOOR + 16}" font-size="11" text-anchor="middle">{short(x)}</text>'
        )
    for y, labelled in decades(10**axes.y0, 10**axes.y1):
        to = axes.at(10**axes.x0, y).split(",")[1]
        shapes.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{to}" y2="{to}" '
            f'stroke="{"#ccc" if labelled else "#eee"}"/>'
        )
        if labelled:
            shapes.append(
                f'<text x="{LEFT - 6}" y="{float(to) + 4:.1f}" font-size="11" '
                f'text-anchor="end">{short(y)}</text>'
            )
    shapes.append(f'<path d="M{LEFT},{TOP}V{FLOOR}H{RIGHT}" fill="none" stroke="#444"/>')
    shapes.append(
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 18}" font-size="12" '
        f'text-anchor="middle">FLOPs per byte that must move</text>'
    )
    middle = HEIGHT // 2
    shapes.append(
        f'<text x="12" y="{middle}" font-size="12" text-anchor="middle" transform="rotate(-90 12 '
        f'{middle})">GFLOP/s</text>'
    )
    return shapes


def _legend(points: list[Point]) -> list[str]:
    shapes = []
    for i, bench in enumerate(dict.fromkeys(p.bench for p in points)):
        box = f'x="{LEFT + 10}" y="{TOP + 8 + 16 * i}" width="9" height="9"'
        shapes.append(f'<rect {box} fill="{COLORS.get(bench, "#7f7f7f")}"/>')
        shapes.append(
            f'<text x="{LEFT + 24}" y="{TOP + 16 + 16 * i}" font-size="11">{escape(bench)}</text>'
        )
    return shapes


def _ceiling_lines(ceilings: list[tuple[str, float, float, bool]], axes: _Axes) -> list[str]:
    shapes = []
    for name, flops, bandwidth, measured in ceilings:
        ridge = min(max(log10(flops / bandwidth), axes.x0), axes.x1)
        ends = (axes.x0, ridge, axes.x1)
        line = " ".join(axes.at(10**x, min(flops, 10**x * bandwidth)) for x in ends)
        dash = "" if measured else ' stroke-dasharray="4"'
        shapes.append(
            f'<polyline points="{line}" fill="none" '
            f'stroke="#444"{dash}><title>{escape(name)}</title></polyline>'
        )
        x, y = axes.at(10**axes.x1, min(flops, 10**axes.x1 * bandwidth)).split(",")
        shapes.append(
            f'<text x="{x}" y="{float(y) - 3:.1f}" font-size="10" '
            f'text-anchor="end">{escape(name)}</text>'
        )
    return shapes


def _circles(points: list[Point], axes: _Axes) -> list[str]:
    """The points, each with its name as a tooltip."""
    shapes = []
    for p in points:
        x, y = axes.at(p.intensity, p.gflops).split(",")
        text = escape(
            f"{p.bench}, {p.name}: {p.gflops:,.0f} GFLOP/s, {p.percent:.0f} % of its roofline"
        )
        color = COLORS.get(p.bench, "#7f7f7f")
        shapes.append(
            f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"><title>{text}</title></circle>'
        )
    return shapes


def _svg(points: list[Point], ceilings: list[tuple[str, float, float, bool]]) -> str:
    axes = _Axes(
        x0=log10(min(p.intensity for p in points)) - 0.3,
        x1=log10(max(p.intensity for p in points)) + 0.3,
        y0=log10(min(p.gflops for p in points)) - 0.3,
        y1=log10(max(flops for _, flops, _, _ in ceilings)) + 0.3,
    )
    shapes = _grid(axes) + _legend(points) + _ceiling_lines(ceilings, axes) + _circles(points, axes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="sans-serif">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _html_table(points: list[Point]) -> str:
    """The points as a table, worst first."""
    heads = ("bench", "row", "dtype", "FLOPs/byte", "GFLOP/s", "% of roofline", "bound")
    rows = "".join(
        f"<tr><td>{escape(p.bench)}</td><td>{escape(p.name)}</td><td>{p.dtype}</td><td>{p.intensity:,.1f}</td>"
        f"<td>{p.gflops:,.0f}</td><td>{p.percent:.1f}</td><td>{p.bound}</td></tr>\n"
        for p in sorted(points, key=lambda p: p.percent)
    )
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f"<table>\n<tr>{head}</tr>\n{rows}</table>\n"


def html(device: str, peaks: dict, points: list[Point], without: int, source: str) -> str:
    """A page without scripts or links. It has the chart as SVG, with the rows' names as tooltips, and
    a table of the rows, worst first."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Roofline of '
        f"{escape(device)}</title>\n"
        "<style>body{font-family:sans-serif}td,th{padding:1px 8px;text-align:right}</style>\n"
        f"<h1>{escape(device)}</h1>\n<p>{len(points)} rows of {escape(source)}. {without} more rows "
        f"are not drawn, because their FLOPs per byte are unknown. "
        f"Solid ceilings were measured in the same run, dashed ones are nominal. Across: FLOPs "
        f"per byte; up: GFLOP/s.</p>\n"
        + _svg(points, _ceilings(device, peaks, points))
        + _html_table(points)
        + "</html>\n"
    )


# ---- counters ------------------------------------------------------------------------------------


def _counted_bound(flops: float, read_bytes: float, device: str) -> str:
    """The bound of a launch with these FLOPs and bytes, by the device's nominal ceilings."""
    nominal = NOMINAL[device]
    compute_us, memory_us = flops / nominal["bf16"] / 1e6, read_bytes / nominal["read"] / 1e3
    if max(compute_us, memory_us) < LATENCY_US:
        return "latency"
    return "memory" if memory_us > compute_us else "compute"


def counted(path: Path, flops: float, what: str = "") -> list[tuple[str, ...]]:
    """A table of FLOPs per byte by the bytes that were really read from L2 and from memory, which ncu
    counted. The file has the columns of learn/counters.csv. Bytes that are written are not counted.

    flops: the FLOPs of one launch.
    what: only rows whose name contains this text are used.

    Raises ValueError if no row can be used.
    """
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    needed = {"device", "what", "lts__t_sectors_srcunit_tex.sum", "dram__bytes_read.sum"}
    if not rows or not needed <= rows[0].keys():
        raise ValueError(f"{path}: expected the columns {', '.join(sorted(needed))}")
    found = [
        ("what", "FLOPs/byte of L2", "of memory", "ridge of memory", "if nothing else bounds it")
    ]
    for row in rows:
        l2, memory = (
            unit * float(row[column] or 0)
            for column, unit in (
                ("lts__t_sectors_srcunit_tex.sum", 32),
                ("dram__bytes_read.sum", 1),
            )
        )
        nominal = NOMINAL.get(row["device"])
        if what not in row["what"] or not l2 or not memory or not nominal:
            continue
        ridge = nominal["bf16"] * 1e3 / nominal["read"]
        bound = _counted_bound(flops, memory, row["device"])
        found.append(
            (row["what"], f"{flops / l2:.1f}", f"{flops / memory:.1f}", f"{ridge:.0f}", bound)
        )
    if len(found) == 1:
        raise ValueError(
            f"{path}: no row '{what}' has both counters, of a device with a nominal rate"
        )
    return found


def counted_points(path: Path, flops: float, what: str = "") -> tuple[str, list[Point]]:
    """(device, points) of the same file. A row gives two points, one at its FLOPs per byte of L2 and
    one at those of memory. Its rate follows from the counted cycles and the clock in GHZ.

    Only rows of one device are used, the first one in NOMINAL: another device has other ceilings.
    """
    cycles = "sm__cycles_elapsed.max"
    with path.open() as lines:
        rows = [
            row for row in csv.DictReader(lines) if what in row["what"] and row["device"] in GHZ
        ]
    rows = [row for row in rows if float(row.get(cycles) or 0)]
    if not rows:
        raise ValueError(f"{path}: no row '{what}' has {cycles}, of a device with a nominal rate")
    device, points = rows[0]["device"], []
    peak, read = NOMINAL[device]["bf16"] * 1e3, NOMINAL[device]["read"]
    for row in rows:
        if row["device"] != device:  # another device has another roofline
            continue
        gflops = flops / (float(row[cycles]) / GHZ[device])
        for name, column, unit in (
            ("L2", "lts__t_sectors_srcunit_tex.sum", 32),
            ("memory", "dram__bytes_read.sum", 1),
        ):
            if moved := unit * float(row[column] or 0):
                ceiling = min(peak, flops / moved * read) if name == "memory" else peak
                bound = _counted_bound(flops, moved if name == "memory" else 0, device)
                percent = 100 * gflops / ceiling
                points.append(
                    Point(name, row["what"], "bf16", flops / moved, gflops, percent, bound)
                )
    return device, points


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


_positive.__name__ = "float"  # argparse's error text has this name if float() fails


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "roofline", help="saved benchmark rows under measured and nominal ceilings"
    )
    p.set_defaults(run=run)
    p.add_argument("results", type=Path, nargs="?", help="a file of benchmarks/results/")
    p.add_argument(
        "--counters",
        type=Path,
        metavar="CSV",
        help="instead of results: FLOPs per byte from ncu's counters, as learn/counters.csv",
    )
    p.add_argument(
        "--flops", type=_positive, metavar="N", help="FLOPs of one launch; needed with --counters"
    )
    p.add_argument(
        "--what", default="", metavar="TEXT", help="only rows of --counters whose name has TEXT"
    )
    p.add_argument(
        "--bench", nargs="+", help="only these benchmarks: gemm, flash_attn, paged_attn, model"
    )
    p.add_argument("--png", type=Path, metavar="FILE", help="needs matplotlib")
    p.add_argument(
        "--html", type=Path, metavar="FILE", help="a page with the rows' names and a table"
    )


def run(args: argparse.Namespace) -> int:
    if (args.results is None) == (args.counters is None) or (args.counters is None) != (
        args.flops is None
    ):
        raise ValueError("roofline: give a file of results, or --counters with --flops")
    if args.counters:
        print(table(counted(args.counters, args.flops, args.what)))
        if args.png or args.html:
            device, points = counted_points(args.counters, args.flops, args.what)
            if args.png:
                draw(device, {}, points, args.png)
            if args.html:
                args.html.write_text(html(device, {}, points, 0, args.counters.name))
        return 0
    device, peaks, points, without = read_points(args.results, args.bench)
    memory, latency = (sum(p.bound == bound for p in points) for bound in ("memory", "latency"))
    bounds = f"{memory} bound by memory" + (f", {latency} by latency" if latency else "")
    print(f"{device}: {len(points)} rows, {bounds}; {without} without FLOPs per byte in the file")
    for p in sorted(points, key=lambda p: p.percent)[:5]:
        print(
            f"  {p.percent:5.1f} % of its roofline  {p.bench}: {p.name}, {p.intensity:.3g} "
            f"FLOPs/byte, {p.bound}"
        )
    if args.png:
        draw(device, peaks, points, args.png)
    if args.html:
        args.html.write_text(html(device, peaks, points, without, args.results.name))
    return 0
