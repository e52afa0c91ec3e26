# SPDX-License-Identifier: BSD-3-Clause
"""The random products of bench_gemm.py --random: how they are drawn, a report on their ratios, and
a picture of them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import shapes
from harness import QUICK, RESULTS, Effort, Row, Run, geomean

from torch_gpukern import results

OP = "gemm_random"  # followed by the seed

LAYOUTS = ("NN", "NT", "TN", "TT")
# the dtypes and their weights in the draw
DTYPES_OF = {"cuda": {"bf16": 0.7, "f16": 0.15, "tf32": 0.15}, "cpu": {"f32": 0.5, "bf16": 0.5}}
# Many shapes with few rounds each tell more than many rounds of few shapes. On a GPU 300 shapes should
# take about a minute.
EFFORT = {"cuda": Effort(block_us=3_000, min_rounds=3, max_rounds=5, seconds=0.05), "cpu": QUICK}
COLORS = {"bf16": "#d62728", "f16": "#ff7f0e", "tf32": "#1f77b4", "f32": "#1f77b4"}


@dataclass(frozen=True)
class Shape:
    """out [m, n] = a [m, k] @ b [k, n]. The layout is that of bench_gemm: T means stored
    transposed."""

    m: int
    n: int
    k: int
    layout: str
    dtype: str


def draw_shapes(kind: str, count: int, seed: int) -> list[Shape]:
    """The first `count` products of a seed: m, n and k log-uniform in multiples of 8. They are the
    same on every machine, and a longer draw starts with a shorter one. kind: "cpu" or "cuda"."""
    least, most = shapes.GEMM_RANDOM_SIZES
    draw = random.Random(seed)

    def size() -> int:
        drawn = math.exp(draw.uniform(math.log(least), math.log(most)))
        return min(max(8 * round(drawn / 8), least), most)

    dtypes = DTYPES_OF[kind]
    return [
        Shape(
            size(),
            size(),
            size(),
            draw.choice(LAYOUTS),
            draw.choices([*dtypes], [*dtypes.values()])[0],
        )
        for _ in range(count)
    ]


def fifth_percentile(ratios: Sequence[float]) -> float:
    """95 % of the ratios are at least this."""
    return (
        statistics.quantiles(ratios, n=20, method="inclusive")[0] if len(ratios) > 1 else ratios[0]
    )


def report(run: Run, kernels: dict[str, str]) -> None:
    """Prints geomean, 5th percentile, the worst ratio, and the ten worst products with the kernels
    that served them. Stores all and draws the picture if the run is to be saved. kernels: the
    instance's name by label and dtype."""
    rows = [row for row in run.rows if row.ratio is not None]
    if not rows:
        print("no random product was measured")
        return
    ratios, bars = [row.ratio for row in rows], shapes.GEMM_RANDOM_BARS[run.device.kind]
    print()
    for of in ("dtype", "layout"):
        parts: dict[str, list[float]] = {}
        for row in rows:
            parts.setdefault(row.dtype if of == "dtype" else row.label.split()[0], []).append(
                row.ratio
            )
        for name, part in sorted(parts.items()):
            of_all = f"{len(part):>4} rows  geomean {geomean(part):5.2f}x  worst {min(part):5.2f}x"
            print(f"{f'random, {name} alone':<28} {of_all}")
    for name, value in (
        ("geomean", geomean(ratios)),
        ("5th percentile", fifth_percentile(ratios)),
        ("worst", min(ratios)),
    ):
        run.fact("random", name, value, "x", bars.get(name, shapes.Bar()), f"{len(ratios)} rows")
    print("ten worst:")
    for row in sorted(rows, key=lambda row: row.ratio)[:10]:
        peer = row.peers[row.best_peer]["us"]
        kernel = kernels.get(f"{row.label} {row.dtype}", "")
        print(
            f"  {row.label + ' ' + row.dtype:<34} {row.ratio:5.2f}x  {row.us:9.1f} us, "
            f"{peer:9.1f}  {kernel}"
        )
    if run.left_out:
        print(
            f"{run.left_out} rows left out, the budget of {run.args.budget:.0f} s was spent: "
            f"nothing is stored"
        )
    elif run.args.save and not run.args.part:
        store(run, rows, kernels)


def store(run: Run, rows: list[Row], kernels: dict[str, str]) -> None:
    """Stores each seed as an op of its own in the device's file, because each seed draws other
    products."""
    stored = run.stamp() | {"facts": run.facts, "groups": []}
    stored["rows"] = [
        asdict(row) | {"note": kernels.get(f"{row.label} {row.dtype}", "")} for row in rows
    ]
    op = f"{OP}_{run.args.seed}"
    print(
        f"results: {results.store(RESULTS, run.device.name(), op, stored)}; `make results` draws "
        f"the picture"
    )


def intensity(label: str, element: int) -> float:
    """FLOP a byte of a product that reads its operands and writes its result once. label is that of
    bench_gemm: "NN MxKxN", or "NN N" for cubes."""
    sizes = [int(x) for x in label.split()[-1].split("x")]
    m, k, n = sizes if len(sizes) == 3 else sizes * 3
    return 2.0 * m * n * k / (element * (m * k + k * n + m * n))


def draw_ratios(rows: list[dict], title: str, path: Path) -> bool:
    """Draws the ratio to the best peer over arithmetic intensity, one mark a product. Returns False
    without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("plot: skipped, matplotlib is not installed (pip install matplotlib)")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        part = [row for row in rows if row["dtype"] == dtype]
        at = [intensity(row["label"], 2 if dtype in ("bf16", "f16") else 4) for row in part]
        axes.plot(
            at, [row["ratio"] for row in part], ".", color=COLORS[dtype], label=dtype, alpha=0.7
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("FLOP a byte")
    axes.set_ylabel(f"speed beside {rows[0]['best_peer']}")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return True
