# SPDX-License-Identifier: BSD-3-Clause
"""Plots of a bench: TFLOP/s, GFLOP/s or GB/s over the size, a line a provider, a panel for each
group, mask and head_dim.

python benchmarks/plots.py           draws every plot, and docs/speed.png of README.md, again from benchmarks/results/
python benchmarks/plots.py --check   exits 1 and names the plots that other results were drawn for; needs no matplotlib

A plot's file holds the digest of the figures in it, by which it is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLOTS = HERE / "plots"
SPEED = HERE.parent / "docs" / "speed.png"  # the picture of README.md
# Its panels: bench, and how the name of a panel begins. Each is of the GPU that was measured last.
SPEED_PANELS = (
    ("gemm", "square bf16"),
    ("gemm", "skinny 4096x4096, NT"),
    ("flash_attn", "forward full, d128"),
    ("flash_attn", "forward causal, d128"),
    ("flash_attn", "backward causal, d128"),
    ("paged_attn", "decode, page 16"),
)
OURS = "gpukern"
# a provider has one color in every panel and plot, and no two of a picture share one
COLORS = {
    OURS: "#d62728",
    "torch.matmul": "#1f77b4",
    "SDPA": "#1f77b4",
    "SDPA cuDNN": "#2ca02c",
    "cuDNN, dense cache": "#17becf",
    "torch built-ins, cuDNN": "#2ca02c",
    "SDPA flash": "#393b79",
    "torch built-ins": "#1f77b4",
    "SDPA efficient": "#9467bd",
    "gather + SDPA": "#7f7f7f",
    "FA3": "#ff7f0e",
    "FA4": "#8c564b",
    "quack": "#bcbd22",
    "quack, tuned": "#637939",
    "SDPA in float32": "#7f7f7f",
    "torch built-ins, float32": "#7f7f7f",
    "FlashInfer": "#e377c2",
    "FlexAttention": "#ad494a",
}
SPARE = ("#e7ba52", "#843c39", "#a55194", "#6b6ecf", "#31a354", "#3182bd", "#636363", "#fd8d3c")
STYLE = 2  # counts changes of how plots look: with one they are all drawn again

# How the benches write a label: what the panel says beyond its group, and the size, whose name
# stands beside.
FORMS = (
    (re.compile(r"(?P<part>d\d+) B\d+ S(?P<size>\d+)"), "sequence length"),
    (re.compile(r"B\d+ H\d+ S(?P<size>\d+) (?P<part>d\d+)"), "sequence length"),
    (re.compile(r"(?P<layout>[NT]{2}) (?P<size>\d+)x(?P<k>\d+)x(?P<n>\d+)"), "M"),
    (re.compile(r"(?P<size>\d+)"), "M = N = K"),
    (re.compile(r"(?P<size>B\d+ context \d+) (?P<part>page \d+)"), "sequences x keys"),
)


def place(group: str, label: str) -> tuple[str, tuple[int, ...], str]:
    """(panel, size, name of the size) of a row; a label that is no size of a series has () and its
    group's panel."""
    for form, name in FORMS:
        found = form.fullmatch(label)
        if not found:
            continue
        of = found.groupdict()
        part = of.get("part", "")
        if "layout" in of:  # a group of one weight names it
            part = (
                of["layout"]
                if f"{of['n']}x{of['k']}" in group
                else f"{of['layout']}, K {of['k']}, N {of['n']}"
            )
        size = tuple(map(int, re.findall(r"\d+", of["size"])))
        return (f"{group}, {part}" if part and part not in group else group), size, name
    return group, (), ""


def panels_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by panel; one dtype and one unit a panel."""
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
    """One panel: lines over the size, or, where labels are no sizes, a mark for each."""
    sizes = [place(row["group"], row["label"])[1] for row in rows]
    over_sizes = all(sizes) and len(set(sizes)) == len(sizes) > 1
    if over_sizes:  # two numbers, as of sequences and keys, are in the order of their product
        order = sorted(range(len(rows)), key=lambda i: (math.prod(sizes[i]), sizes[i]))
        rows, sizes = [rows[i] for i in order], [sizes[i] for i in order]
        labels = [" x ".join(map(str, size)) for size in sizes]
        axes.set_xlabel(place(rows[0]["group"], rows[0]["label"])[2], fontsize=7)
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
            label=provider.lstrip("_"),  # a legend leaves out what begins so
            marker="o" if ours else ".",
            markersize=4,
            linewidth=(2.0 if ours else 1.0) if over_sizes else 0,
            zorder=3 if ours else 2,
        )
    axes.set_xticks(at, labels, fontsize=6, rotation=0 if over_sizes and len(at) < 7 else 90)
    axes.set_ylim(0, 1.08 * one * max(max(rates(row).values()) for row in rows))
    axes.tick_params(axis="y", labelsize=6)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set_title(name, fontsize=8)
    axes.set_ylabel(unit, fontsize=7)


def speed_panels(results: list[dict]) -> dict[str, list[dict]]:
    """The panels of README.md's picture. A bench with a note, marked by a star, goes behind one
    without."""
    gpus = [result for result in results if "NVIDIA" in result["device"]] or results
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
    """Of all that a plot shows."""
    shown = [
        STYLE,
        *(
            (name, [(r["label"], r["unit"], rates(r)) for r in rows])
            for name, rows in panels.items()
        ),
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def digest_in(path: Path) -> str:
    """The digest that a plot was drawn for; "" where it has none."""
    found = re.search(rb"tEXtComment\0([0-9a-f]{64})", path.read_bytes()) if path.exists() else None
    return found[1].decode() if found else ""


def draw(panels: dict[str, list[dict]], title: str, path: Path) -> bool:
    """A plot of panels_of() some rows; False without matplotlib or without rows that have a peer."""
    try:
        import matplotlib
    except ImportError:
        print("plot: skipped, matplotlib is not installed (pip install matplotlib)")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not panels:
        return False
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(4.2 * columns, 2.7 * lines + 0.6),
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
        ncols=min(6, len(handles)),
        fontsize=8,
    )
    if title:
        figure.suptitle(title, fontsize=10)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None, "Comment": digest(panels)})
    plt.close(figure)
    return True


def all_plots() -> dict[Path, tuple[str, dict[str, list[dict]]]]:
    """Every plot's title and panels by its path."""
    results, plots = [], {}
    for stored in sorted((HERE / "results").glob("*.json")):
        result = json.loads(stored.read_text())
        results.append(result)
        for bench, content in result["benches"].items():
            panels = panels_of([row for row in content["rows"] if row["peers"]])
            if bench != "ladder" and panels:
                plots[PLOTS / f"{stored.stem}-{bench}.png"] = (
                    f"{bench} on {result['device']}",
                    panels,
                )
    plots[SPEED] = "", speed_panels(results)
    return plots


def main(argv: list[str]) -> int:
    plots = all_plots()
    old = [path for path, (_, panels) in plots.items() if digest_in(path) != digest(panels)]
    if argv == ["--check"]:
        for path in old:
            print(
                f"{path.relative_to(HERE.parent)} is not what the results give; run `make results`"
            )
        return bool(old)
    for path in old:
        title, panels = plots[path]
        if draw(panels, title, path):
            print(path.relative_to(HERE.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
