# SPDX-License-Identifier: BSD-3-Clause
"""The gemm ladder beside torch.matmul (cuBLAS): every rung at 4096 cubed, rungs 11 to 13 at 16384,
too.

python learn/benchmarks/bench_ladder.py --device cuda [--counters FILE LARGE]
    measures, and stores the results beside the predictions
python learn/benchmarks/bench_ladder.py --stored [--counters FILE LARGE]
    draws the stored results again, on any machine
python learn/benchmarks/bench_ladder.py --metrics
    prints the counters that a profiler should take

FILE is the profiler's log of one call of every rung and of torch.matmul. LARGE is the same for
`ladder.py 16384 11 12 13`. This command makes FILE:
  ncu --clock-control none --csv --print-units base --kernel-name 'regex:ladder_|gemm|nvjet' \\
      --metrics $(python learn/benchmarks/bench_ladder.py --metrics) --log-file FILE python
      learn/benchmarks/ladder.py

Results are stored as the op "ladder" in benchmarks/results/<device>.csv and drawn to
learn/ladder.png. tools/results.py writes the tables of learn/ladder.md from them.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ladder  # noqa: E402
import ladder_model  # noqa: E402
import torch  # noqa: E402
from harness import HERE, RESULTS, Bar, Case, Run, arguments, open_device  # noqa: E402
from torch import Tensor  # noqa: E402

from torch_gpukern import results  # noqa: E402

SIZE, LARGE, LARGE_RUNGS = 4096, 16384, (11, 12, 13)
PNG = HERE.parent / "learn" / "ladder.png"

TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
L1, SHARED = "l1tex__data_pipe_lsu_wavefronts.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
LOADS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
INSTRUCTIONS, ISSUE = (
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
L2, MEMORY, CYCLES = (
    "lts__t_sectors_srcunit_tex.sum",
    "dram__bytes_read.sum",
    "sm__cycles_elapsed.max",
)
METRICS = (CYCLES, TENSOR, L1, SHARED, CONFLICTS, LOADS, INSTRUCTIONS, ISSUE, L2, MEMORY)
# the one counter that each rung's change was meant to move
MOVED = {
    2: L1,
    3: LOADS,
    4: SHARED,
    5: CONFLICTS,
    6: INSTRUCTIONS,
    7: TENSOR,
    8: INSTRUCTIONS,
    9: L2,
    10: TENSOR,
    11: TENSOR,
    12: MEMORY,
    13: TENSOR,
}


def sample(size: int) -> Tensor:
    """At most 512 indices of a dimension, with both ends among them."""
    return (
        torch.linspace(0, size - 1, min(size, 512), device="cuda", dtype=torch.float64)
        .round()
        .long()
    )


def case(rung: ladder.Rung, size: int) -> Case:
    places = sample(size)

    def make() -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))

    return Case(
        group=f"{size} cubed",
        label=f"{rung.number} {rung.name}",
        dtype="bf16",
        make=make,
        ours=lambda a, b: ladder.gemm(rung.number, a, b),
        peers={"torch.matmul": torch.matmul},
        reference=lambda a, b: a[places].double() @ b[:, places].double(),
        compare=lambda out: out[places][:, places],
        flops=2.0 * size**3,
        bytes=6.0 * size**2,
        bar=Bar(),
    )


def profile(path: Path) -> list[dict]:
    """The kernels of ncu's log in the order of their launches: {"kernel": its name, metric: value,
    ..}."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    # ncu repeats the header line for each process
    rows = csv.DictReader([line for i, line in enumerate(lines) if i == 0 or line != lines[0]])
    kernels: dict[tuple, dict] = {}
    for row in rows:
        key = row.get("Process ID", ""), row["ID"]
        values = kernels.setdefault(key, {"kernel": re.sub(r"^void |\(.*", "", row["Kernel Name"])})
        if row["Metric Name"] in METRICS:
            values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(kernels.values())


def counters(path: Path, numbers: Sequence[int]) -> dict[str, dict]:
    """Rung's number, or cuBLAS -> metric -> value. The log must have one kernel for each rung in
    the order of the launches, and torch.matmul's last."""
    kernels = profile(path)
    names = [*map(str, numbers), "cuBLAS"]
    if len(kernels) != len(names):
        raise SystemExit(
            f"{path}: {len(kernels)} kernels; expected one for each of {', '.join(names)}"
        )
    return dict(zip(names, kernels))


def draw(bench: dict, device: str, path: Path) -> None:
    """Above: every rung on a logarithmic scale with cuBLAS beside it. Below: the ratios of rungs 6 to
    13. 760 pixels wide, as wide as a page shows it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def color(number: int) -> str:
        return "#97a6c4" if number < 6 else "#4269d0" if number < 8 else "#efb118"

    rows = [row for row in bench["rows"] if row["group"] == f"{SIZE} cubed"]
    expected = [fact for fact in bench["facts"] if fact["group"] == f"predicted, {SIZE} cubed"]
    numbers, places = [int(row["label"].split()[0]) for row in rows], range(len(rows))
    figure, (all_of_them, near) = plt.subplots(
        2, 1, figsize=(7.6, 7.6), height_ratios=(5, 4), layout="constrained"
    )
    rates = [row["rate"] / 1e3 for row in rows]
    cublas = [row["peers"]["torch.matmul"]["rate"] / 1e3 for row in rows]
    all_of_them.bar(places, rates, color=[color(number) for number in numbers], width=0.7)
    all_of_them.plot(
        places,
        [fact["value"] for fact in expected],
        "k_",
        markersize=18,
        markeredgewidth=1.6,
        label="predicted, before measuring",
    )
    all_of_them.step(
        places, cublas, where="mid", color="#c0392b", linewidth=1.2, label="cuBLAS beside the rung"
    )
    for i, rate in enumerate(rates):
        text = f"{rate:.3g}"
        all_of_them.annotate(
            text, (i, rate), (0, -14), textcoords="offset points", ha="center", fontsize=8
        )
    all_of_them.set_yscale("log")
    all_of_them.set_ylim(0.2, 1500)
    all_of_them.set_ylabel("TFLOP/s")
    all_of_them.legend(loc=(0.03, 0.72), fontsize=8)

    close = [i for i in places if numbers[i] >= 6]
    near.bar(
        range(len(close)),
        [rows[i]["ratio"] for i in close],
        color=[color(numbers[i]) for i in close],
    )
    for at, i in enumerate(close):
        near.annotate(
            f"{rows[i]['ratio']:.3f}", (at, rows[i]["ratio"]), ha="center", va="bottom", fontsize=8
        )
    near.axhline(1, color="#c0392b", linewidth=1.2)
    near.set_ylim(0, 1.15)
    near.set_ylabel("of cuBLAS's speed in the same run")
    for panel, members in ((all_of_them, places), (near, close)):
        labels = [rows[i]["label"].replace(" ", "\n") for i in members]
        panel.set_xticks(range(len(members)), labels, fontsize=8)
        panel.tick_params(axis="x", rotation=0 if panel is near else 45)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"The {len(rows)} rungs: bfloat16, {SIZE} cubed, {device}",
        fontsize=10,
    )
    path.parent.mkdir(exist_ok=True)
    # a test compares them with the results
    shown = ", ".join(f"{row['label']} {row['rate'] / 1e3:.3g} {row['ratio']:.3f}" for row in rows)
    figure.savefig(path, dpi=100, metadata={"Comment": f"figures: {shown}; end"})
    plt.close(figure)


def predicted(rungs: Sequence[ladder.Rung], size: int) -> list[dict]:
    """The predictions of rungs as facts: TFLOP/s, the limiting unit, the counter that the change
    was meant to move, the source, the change."""
    facts = []
    for rung in rungs:
        found = ladder_model.predict(rung.number, size, size, size)
        note = (found.limiter, MOVED.get(rung.number, ""), rung.source, rung.change)
        fact = {
            "group": f"predicted, {size} cubed",
            "label": f"{rung.number} {rung.name}",
            "unit": "TFLOP/s",
        }
        facts.append(fact | {"value": float(f"{found.tflops:.3g}"), "note": " | ".join(note)})
    return facts


def counted(paths: Sequence[Path]) -> list[dict]:
    """Both profiles as facts: one for each rung and counter."""
    facts = []
    profiles = zip((SIZE, LARGE), paths, (tuple(MOVED | {1: ""}), LARGE_RUNGS))
    for size, path, numbers in profiles:
        for name, profile_ in counters(path, sorted(numbers)).items():
            fact = {"group": f"counted, {size} cubed", "label": name, "note": profile_["kernel"]}
            facts += [
                fact | {"value": v, "unit": metric}
                for metric, v in profile_.items()
                if metric != "kernel"
            ]
    return facts


class LadderRun(Run):
    """A run that stores predictions and counters beside the measurements."""

    takes_parts = False

    def _store(self, groups: list) -> None:
        # the folder of the profile is left out
        stamp = self.stamp() | {"command": re.sub(r"\S+/(?=\w+\.csv)", "", self.stamp()["command"])}
        bench = stamp | {"rows": [asdict(row) for row in self.rows], "facts": self.facts}
        bench["groups"] = [asdict(group) for group in groups]
        path = results.store(RESULTS, self.device.name(), "ladder", bench)
        print(f"results: {path}")
        redraw(path)


def redraw(path: Path) -> None:
    saved = results.load(path)
    try:
        draw(saved["benches"]["ladder"], saved["device"], PNG)
    except ImportError:
        print("plot: skipped, matplotlib is not installed (pip install matplotlib)")


def main() -> None:
    def more(parser) -> None:
        parser.add_argument(
            "--counters", type=Path, nargs=2, default=[], help="what ncu wrote: FILE LARGE"
        )
        parser.add_argument(
            "--stored", action="store_true", help="measure nothing, draw the stored results"
        )
        parser.add_argument(
            "--metrics", action="store_true", help="print the names that ncu should count"
        )

    args = arguments("the gemm ladder", more=more)
    if args.metrics:
        print(",".join(METRICS))
        return
    if args.stored:
        for path in sorted(RESULTS.glob("*.csv")):
            saved = results.load(path)
            if bench := saved["benches"].get("ladder"):
                kept = [
                    fact
                    for fact in bench["facts"]
                    if not (args.counters and fact["group"].startswith("counted"))
                ]
                bench["facts"] = kept + counted(args.counters)
                results.save(path, saved)
                redraw(path)
        return
    if args.device != "cuda":
        raise SystemExit("bench_ladder: the ladder has CUDA kernels alone: --device cuda")
    run = LadderRun("ladder", args, open_device(args.device))
    # ladder_sizes.py has the rungs between them
    rungs = [rung for rung in ladder.rungs() if rung.after == 0]
    run.facts += predicted(rungs, SIZE) + predicted(
        [rungs[number - 1] for number in LARGE_RUNGS], LARGE
    )
    run.facts += counted(args.counters)
    for rung in rungs:
        run.add(case(rung, SIZE))
    for number in LARGE_RUNGS:
        run.add(case(rungs[number - 1], LARGE))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
