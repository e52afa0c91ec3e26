# SPDX-License-Identifier: BSD-3-Clause
"""Every rung of the gemm ladder at sizes 64 to 8192, beside torch.matmul (cuBLAS), in one picture.

The rungs without tensor cores are measured in float32, too.

python learn/benchmarks/ladder_sizes.py [--out FOLDER]   measures; writes ladder_sizes.csv and
                                                         ladder_sizes.png there (learn/)
python learn/benchmarks/ladder_sizes.py --stored         draws learn/ladder_sizes.csv again, on any
                                                         machine

A cell is the median of 15 replays of a CUDA graph that holds 2 ms of calls, so launches do not
count. A call over 20 ms is timed once. Operands are in L2 if they fit. Clocks are not fixed, so
only ratios within a size compare; cuBLAS is measured at every size.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ladder
import torch

from torch_gpukern.tuning import timing

PAGES = Path(__file__).resolve().parents[1]
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CUBLAS = "cuBLAS"


def in_order(rungs: list[ladder.Rung]) -> list[ladder.Rung]:
    """The rungs with 14 to 18 behind the rungs that they follow."""
    return sorted(rungs, key=lambda rung: (rung.after or rung.number, rung.after != 0, rung.number))


def median_us(call: Callable[[], object]) -> float:
    """us of a call, by the replay of a graph. A call over 20 ms is timed once by a pair of events;
    its launch is negligible."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    us = begin.elapsed_time(end) * 1e3
    return us if us > 2e4 else timing.median_us(call, torch.device("cuda"))


def measure() -> list[dict]:
    rows = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (torch.bfloat16, torch.float32):
        rungs = [
            rung
            for rung in in_order(ladder.rungs())
            if dtype == torch.bfloat16 or rung.number in ladder.F32
        ]
        for size in SIZES:
            a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            calls = [(rung.name, partial(ladder.gemm, rung.number, a, b, out)) for rung in rungs]
            calls.append((CUBLAS, partial(torch.matmul, a, b, out=out)))
            for _, call in calls if size == SIZES[0] else ():
                call()  # loads kernels and libraries
            for name, call in calls:
                us = median_us(call)
                rows.append({"dtype": str(dtype)[6:], "size": size, "rung": name})
                rows[-1] |= {"us": f"{us:.2f}", "tflops": f"{2 * size**3 / us / 1e6:.4g}"}
                print(*rows[-1].values(), flush=True)
    return rows


def draw(rows: list[dict], path: Path, device: str) -> None:
    """One panel a dtype, one line a rung over the size. Rungs between others are dashed, cuBLAS is
    black."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["rung"] for row in rows))
    between = {"column", "warp_tile", "wmma", "double_buffer"}
    # 760 pixels wide: as wide as a page shows it
    figure, panels = plt.subplots(
        2, 1, figsize=(7.6, 10.4), height_ratios=(6, 4), layout="constrained"
    )
    colors = plt.get_cmap("tab10")
    for dtype, axes in zip(("bfloat16", "float32"), panels):
        for i, name in enumerate(names):
            points = [
                (int(r["size"]), float(r["tflops"]))
                for r in rows
                if (r["dtype"], r["rung"]) == (dtype, name)
            ]
            look = (
                {"color": "black", "linewidth": 2.2}
                if name == CUBLAS
                else {"color": colors(i % 10)}
            )
            look["marker"] = "os^"[i // 10]  # no two lines have the same color and marker
            look["linestyle"] = "--" if name in between else "-"
            if points:
                axes.plot(*zip(*points), markersize=4, label=name, **look)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="M = N = K",
            ylabel="TFLOP/s",
            title=f"{dtype} on {device}",
        )
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=9, reverse=True, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGES)
    parser.add_argument(
        "--stored", action="store_true", help="measure nothing, draw learn/ladder_sizes.csv"
    )
    args = parser.parse_args(argv)
    path = args.out / "ladder_sizes.csv"
    if not args.stored:
        if not torch.cuda.is_available():
            raise SystemExit(
                "ladder_sizes: torch finds no CUDA device; --stored draws the stored figures"
            )
        device = torch.cuda.get_device_name()
        when = {"device": device, "date": datetime.date.today().isoformat()}
        rows = [when | row for row in measure()]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with path.open() as file:
        stored = list(csv.DictReader(file))
    try:
        draw(stored, path.with_suffix(".png"), stored[0]["device"])
    except ImportError:
        print("plot: skipped, matplotlib is not installed (pip install matplotlib)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
