# SPDX-License-Identifier: BSD-3-Clause
"""Draws learn/latency.png and learn/attn_ladder.png from the H100's columns of learn/patterns.md
and its stored results.

python learn/benchmarks/pattern_charts.py    needs matplotlib
"""

from __future__ import annotations

import re
from pathlib import Path

from torch_gpukern import results

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "learn"
SAVED = ROOT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3.csv"
LAST_RUNG = (
    "forward full",
    "d64 B4 S4096",
)  # last rung of the attention ladder: the library's kernel, same length and head_dim


def measured(page: str, source: str) -> dict[str, tuple[float, float]]:
    """variant -> (predicted, measured) on the H100, of the pattern of this source."""
    rows = page[page.index(f"(patterns/{source}.cu) |") - 40 :].splitlines()[1:]
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        if len(cells) != 10 or (cells[0] and found) or (not cells[0] and not found):
            if found:
                break
            continue
        found[cells[1]] = (float(cells[6]), float(cells[7]))
    return found


def bars(
    names: list[str],
    values: list[float],
    predicted: list[float | None],
    unit: str,
    title: str,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    axes.bar(range(len(names)), values, color="#4269d0", width=0.65)
    marks = [(i, value) for i, value in enumerate(predicted) if value is not None]
    axes.plot(
        *zip(*marks), "k_", markersize=24, markeredgewidth=1.6, label="predicted, before measuring"
    )
    axes.set_yscale("log")
    lowest = min(values) / 2
    axes.set_ylim(bottom=lowest)
    for i, value in enumerate(values):  # at the foot of a bar no prediction covers its figure
        axes.annotate(
            f"{value:.3g}",
            (i, lowest),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color="white",
            fontsize=8,
        )
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylabel(unit)
    axes.set_xticks(
        range(len(names)), [re.sub(r"[ ,]+", "\n", name, count=1) for name in names], fontsize=8
    )
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    # a test compares them with the results
    shown = ", ".join(
        f"{name.replace(', ', ' ')} {value:.4g}" for name, value in zip(names, values)
    )
    figure.savefig(path, dpi=100, metadata={"Comment": f"figures: {shown}; end"})
    plt.close(figure)
    print(path.relative_to(ROOT))


def main() -> None:
    page = (PAGES / "patterns.md").read_text()
    loads = sorted(measured(page, "latency").items(), key=lambda item: item[1][1])
    bars(
        [name for name, _ in loads],
        [got for _, (_, got) in loads],
        [predicted for _, (predicted, _) in loads],
        "ns",
        "A load that the next one waits for, H100",
        PAGES / "latency.png",
    )
    rungs = {**measured(page, "attn_ladder"), **measured(page, "attn_mma")}
    rows = results.load(SAVED)["benches"]["flash_attn"]["rows"]
    (row,) = [
        row for row in rows if (row["group"], row["label"]) == LAST_RUNG and row["dtype"] == "bf16"
    ]
    bars(
        [*rungs, "flash_attn", "cuDNN"],
        [
            *(got / 1e3 for _, got in rungs.values()),
            row["rate"] / 1e3,
            row["peers"]["SDPA cuDNN"]["rate"] / 1e3,
        ],
        [*(predicted / 1e3 for predicted, _ in rungs.values()), None, None],
        "TFLOP/s",
        "Attention, 16 heads of 4096 queries and keys, head_dim 64, H100",
        PAGES / "attn_ladder.png",
    )


if __name__ == "__main__":
    main()
