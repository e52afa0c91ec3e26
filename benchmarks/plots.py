# SPDX-License-Identifier: BSD-3-Clause
"""Plots of benchmark results: the rate over the size, one line a provider, one panel for each
group, mask and head_dim.

python benchmarks/plots.py           draws every plot into build/results/, and docs/speed.png,
                                     from benchmarks/results/
python benchmarks/plots.py --check   exits 1 if docs/speed.png shows other results; needs no
                                     matplotlib

docs/speed.png holds a digest of the figures in it, by which --check compares it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from pathlib import Path

from torch_gpukern import results

HERE = Path(__file__).resolve().parent
PLOTS = HERE.parent / "build" / "results"
SPEED = HERE.parent / "docs" / "speed.png"  # the picture of docs/results.md
# Its panels: bench, and how the name of a panel begins. Each shows the GPU measured last.
SPEED_PANELS = (
    ("gemm", "square bf16"),
    ("gemm", "skinny 4096x4096, NT"),
    ("flash_attn", "forward full, d128"),
    ("flash_attn", "forward causal, d128"),
    ("flash_attn", "backward causal, d128"),
    ("paged_attn", "decode, page 16"),
)
OURS = "gpukern"
# A provider has the same color in every plot. No two providers of a picture share one, and those of
# one panel of docs/speed.png are at least 30 apart in CIELAB.
COLORS = {
    OURS: "#d62728",
    "torch.matmul": "#1f77b4",
    "SDPA": "#1f77b4",
    "SDPA cuDNN": "#2ca02c",
    "cuDNN, dense cache": "#17becf",
    "torch built-ins, cuDNN": "#2ca02c",
    "SDPA flash": "#393b79",
    "torch built-ins": "#1f77b4",
    "SDPA efficient": "#a070dc",
    "gather + SDPA": "#7f7f7f",
    "FA3": "#ff7f0e",
    "FA4": "#8c564b",
    "quack": "#006d5b",
    "quack, tuned": "#637939",
    "SDPA in float32": "#7f7f7f",
    "torch built-ins, float32": "#7f7f7f",
    "FlashInfer": "#e377c2",
    "FlexAttention": "#000000",
    "Triton": "#e0b400",
}
SPARE = ("#e7ba52", "#843c39", "#a55194", "#6b6ecf", "#31a354", "#3182bd", "#636363", "#fd8d3c")
STYLE = 4  # incremented when the look of plots changes, so that all are drawn again

# How benches write a label: the part that the panel's name takes, and the size with its name.
FORMS = (
    (re.compile(r"(?P<part>d\d+) B\d+ S(?P<size>\d+)"), "sequence length"),
    (re.compile(r"B\d+ H\d+ S(?P<size>\d+) (?P<part>d\d+)"), "sequence length"),
    (re.compile(r"(?P<layout>[NT]{2}) (?P<size>\d+)x(?P<k>\d+)x(?P<n>\d+)"), "M"),
    (re.compile(r"(?P<size>\d+)"), "M = N = K"),
    (re.compile(r"(?P<size>B\d+ context \d+) (?P<part>page \d+)"), "sequences x keys"),
)


def place(group: str, label: str) -> tuple[str, tuple[int, ...], str]:
    """(panel, size, name of the size) of a row. A label that is no size of a series has () and the
    panel of its group."""
    for form, name in FORMS:
        found = form.fullmatch(label)
        if not found:
            continue
        of = found.groupdict()
        part = of.get("part", "")
        if "layout" in of:  # a group of one weight has its name
            part = (
                of["layout"]
                if f"{of['n']}x{of['k']}" in group
                else f"{of['layout']}, K {of['k']}, N {of['n']}"
            )
        size = tuple(map(int, re.findall(r"\d+", of["size"])))
        return (f"{group}, {part}" if part and part not in group else group), size, name
    return group, (), ""


def panels_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by panel. A panel has one dtype and one unit."""
    panels: dict[str, list[dict]] = {}
    for row in rows:
        name = place(row["group"], row["label"])[0]
        name += "" if row["dtype"] in name else f", {row['dtype']}"
        name += (
            f", {row['unit']}"
            if any(r["unit"] != row["unit"] for r in rows if r["group"] == row["group"])
            else ""
        )
        panels.setdefault(name, []).append(row)
    return panels


def rates(row: dict) -> dict[str, float]:
    """The rate of every provider, ours first."""
    return {OURS: row["rate"]} | {name: peer["rate"] for name, peer in row["peers"].items()}


def color_of(provider: str, spare: dict[str, str]) -> str:
    if provider in COLORS:
        return COLORS[provider]
    return spare.setdefault(provider, SPARE[len(spare) % len(SPARE)])


def draw_panel(axes, name: str, rows: list[dict], spare: dict[str, str]) -> None:
    """Draws one panel: lines over the size, or one mark for each label if labels are no sizes."""
    sizes = [place(row["group"], row["label"])[1] for row in rows]
    over_sizes = all(sizes) and len(set(sizes)) == len(sizes) > 1
    if over_sizes:  # pairs, such as sequences and keys, are sorted by their product
        order = sorted(range(len(rows)), key=lambda i: (math.prod(sizes[i]), sizes[i]))
        rows, sizes = [rows[i] for i in order], [sizes[i] for i in order]
        labels = [" x ".join(map(str, size)) for size in sizes]
        axes.set_xlabel(place(rows[0]["group"], rows[0]["label"])[2], fontsize=8)
    else:
        labels = [row["label"] for row in rows]
    at = range(len(rows))
    unit, one = rows[0]["unit"], 1.0
    if max(max(rates(row).values()) for row in rows) >= 1e4:
        unit, one = unit.replace("G", "T", 1), 1e-3
    for provider in dict.fromkeys(p for row in rows for p in rates(row)):
        points = [
            (x, one * rates(row)[provider])
            for x, row in zip(at, rows, strict=True)
            if provider in rates(row)
        ]
        ours = provider == OURS
        axes.plot(
            *zip(*points, strict=True),
            color=color_of(provider, spare),
            label=provider.lstrip("_"),  # a legend leaves out names with an underscore in front
            marker="o" if ours else ".",
            markersize=4,
            linewidth=(2.0 if ours else 1.0) if over_sizes else 0,
            zorder=3 if ours else 2,
        )
    flat = over_sizes and max(map(len, labels)) < 6 and len(at) < 7
    axes.set_xticks(at, labels, fontsize=8, rotation=0 if flat else 90)
    axes.set_ylim(0, 1.08 * one * max(max(rates(row).values()) for row in rows))
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set_title(name, fontsize=9)
    axes.set_ylabel(unit, fontsize=8)


def speed_panels(saved: list[dict]) -> dict[str, list[dict]]:
    """The panels of docs/speed.png. A bench with a note is marked by a star and comes after one
    without."""
    gpus = [result for result in saved if "NVIDIA" in result["device"]] or saved
    panels = {}
    for bench, begins in SPEED_PANELS:
        found = []
        for result in gpus:
            content = result["benches"].get(bench, {"rows": []})
            for name, rows in panels_of([row for row in content["rows"] if row["peers"]]).items():
                if name.startswith(begins):
                    found.append(
                        (content["date"], "note" not in content, result["device"], name, rows)
                    )
        if found:
            _, clean, device, name, rows = max(found, key=lambda entry: entry[:3])
            panels[f"{bench}, {name}\n{device}{'' if clean else ' *'}"] = rows
    return panels


def digest(panels: dict[str, list[dict]]) -> str:
    """A digest of all that a plot shows."""
    shown = [
        STYLE,
        *(
            (name, [(r["label"], r["unit"], rates(r)) for r in rows])
            for name, rows in panels.items()
        ),
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def digest_in(path: Path) -> str:
    """The digest that a plot was drawn for; "" if it has none."""
    found = re.search(rb"tEXtComment\0([0-9a-f]{64})", path.read_bytes()) if path.exists() else None
    return found[1].decode() if found else ""


def draw(panels: dict[str, list[dict]], title: str, path: Path, columns: int = 3) -> bool:
    """Draws the panels of panels_of(), 380 pixels a column, so that two columns are readable on a
    page of 760 pixels. Returns False without matplotlib, or if no row has a peer."""
    try:
        import matplotlib
    except ImportError:
        print("plot: skipped, matplotlib is not installed (pip install matplotlib)")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not panels:
        return False
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(3.8 * columns, 2.9 * lines + 0.8),
        squeeze=False,
        layout="constrained",
    )
    spare: dict[str, str] = {}
    for axes, (name, members) in zip(grid.flat, panels.items()):
        draw_panel(axes, name, members, spare)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    handles = {}
    for axes in grid.flat:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=min(2 * columns, len(handles)),
        fontsize=8,
    )
    if title:
        figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None, "Comment": digest(panels)})
    plt.close(figure)
    return True


def all_plots() -> dict[Path, tuple[str, dict[str, list[dict]]]]:
    """Title and panels of every plot, by its path."""
    saved, plots = [], {}
    for stored in sorted((HERE / "results").glob("*.csv")):
        result = results.load(stored)
        saved.append(result)
        for bench, content in result["benches"].items():
            panels = panels_of([row for row in content["rows"] if row["peers"] and row["rate"]])
            if panels and bench != "ladder" and not bench.startswith("gemm_random"):
                plots[PLOTS / f"{stored.stem}-{bench}.png"] = (
                    f"{bench} on {result['device']}",
                    panels,
                )
    plots[SPEED] = "", speed_panels(saved)
    return plots


def random_plots() -> None:
    """The plots of the ratios of random products over FLOP a byte."""
    from gemm_random import OP, draw_ratios  # imports torch, which the other plots do not need

    for stored in sorted((HERE / "results").glob("*.csv")):
        result = results.load(stored)
        for bench, content in result["benches"].items():
            if bench.startswith(OP):
                title = f"{len(content['rows'])} random products on {result['device']}"
                draw_ratios(content["rows"], title, PLOTS / f"{stored.stem}-{bench}.png")


def main(argv: list[str]) -> int:
    plots = all_plots()
    old = [path for path, (_, panels) in plots.items() if digest_in(path) != digest(panels)]
    if argv == ["--check"]:
        if SPEED in old:
            print("docs/speed.png is not what the results give; run `make results`")
        return SPEED in old
    for path in old:
        title, panels = plots[path]
        if draw(panels, title, path, columns=2 if path == SPEED else 3):
            print(path.relative_to(HERE.parent))
    random_plots()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
