# SPDX-License-Identifier: BSD-3-Clause
"""Prints gd.estimate for a model of 8 billion weights that trains on sequences of 1M tokens, on 8,
64 and 1024 GPUs.

    python examples/distributed/scale.py [--out PICTURE]

The table includes the assumptions. --out draws the time of one layer's attention over ranks: the
estimate, and the measurements on several GPUs (benchmarks/results/N-x-*.csv).
"""

import argparse
import dataclasses
from pathlib import Path

from torch_gpukern import distributed as gd
from torch_gpukern import results

MODEL = dict(layers=32, hidden=4096, intermediate=14336, heads_q=32, heads_kv=8, head_dim=128)
TOKENS = 1 << 20
FORMS = (
    dict(context=8),
    dict(tensor=8, context=8),
    dict(data=8, tensor=8, context=16),
)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def table() -> str:
    lines = [
        "GPUs  data tensor context  step s  FLOPs  tokens/s a GPU  GB sent a GPU: context, "
        "tensor, data"
    ]
    for form in FORMS:
        form = dict(data=1, tensor=1, context=1) | form
        step = gd.estimate(**MODEL, seq_len=TOKENS, sequences=8, **form)
        rate = 8 * TOKENS / step.step_ms * 1e3 / step.gpus
        sent = (step.context_bytes, step.tensor_bytes, step.data_bytes)
        lines.append(
            f"{step.gpus:>4}  {form['data']:>4} {form['tensor']:>6} {form['context']:>7}  "
            f"{step.step_ms / 1e3:>6.1f}  "
            f"{step.efficiency:>5.0%}  {rate:>14.0f}  " + ", ".join(f"{x / 1e9:.1f}" for x in sent)
        )
    machine = ", ".join(
        f"{key} {value:g}" for key, value in dataclasses.asdict(gd.Machine()).items()
    )
    assumed = (
        "8 sequences a step; norms, embeddings, the loss, the optimizer and bubbles take "
        "no time; FLOPs hide up to 90 % of what is "
        "sent beside them; activations are recomputed in no form, whether they fit is not asked."
    )
    return "\n".join([*lines, f"Assumed: {assumed}", f"Machine: {machine}"])


def measured() -> list[tuple[str, int, dict[int, float]]]:
    """The measurements: (GPU, tokens, ms by number of ranks) of a layer's attention, forward and
    backward."""
    found = []
    for path in sorted(RESULTS.glob("[0-9]*-x-*.csv")):
        ranks, saved = int(path.name.split("-")[0]), results.load(path)
        card = saved["device"].split("NVIDIA ")[1].split()[0]
        for row in saved["benches"]["distributed"]["rows"]:
            if row["group"] == "cp forward+backward" and "one GPU" in row["beside"]:
                tokens = ranks * int(row["label"].split()[0])
                times = {1: row["beside"]["one GPU"]["us"] / 1e3, ranks: row["us"] / 1e3}
                found.append((card, tokens, times))
    return found


def draw(out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = [1 << i for i in range(11)]
    # 760 pixels wide: as wide as a page shows it
    figure, axes = pyplot.subplots(figsize=(7.6, 4.4), layout="constrained")
    cards = {"H100": ("--", "s"), "H200": ("-", "o")}
    for card, tokens, times in measured():
        (line_of, mark), color = cards[card], "C0" if tokens < 1 << 15 else "C3"
        layer = MODEL | dict(layers=1, hidden=1, intermediate=1)
        one = gd.estimate(
            **layer, seq_len=tokens, sequences=1, machine=gd.Machine(attn_tflops=1)
        ).attention_ms
        machine = gd.Machine(attn_tflops=one / times[1])
        steps = [
            gd.estimate(**layer, seq_len=tokens, sequences=1, context=n, machine=machine)
            for n in ranks
        ]
        line = [step.attention_ms + step.context_ms for step in steps]
        axes.plot(ranks, line, line_of, color=color)
        label = f"{tokens:,} tokens, {card}: estimated (line), measured (mark)"
        axes.plot(*zip(*times.items()), mark, color=color, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="GPUs (context ranks)",
        ylabel="ms, forward and backward of a layer's attention",
    )
    axes.set_xticks(ranks, map(str, ranks))
    axes.set_yticks((2, 5, 10, 20, 50, 100, 200), map(str, (2, 5, 10, 20, 50, 100, 200)))
    axes.minorticks_off()
    axes.grid(alpha=0.2)
    axes.legend(fontsize=9)
    # a test compares them with the results
    shown = ", ".join(
        f"{card} {tokens} {n} {ms:.4g}"
        for card, tokens, times in measured()
        for n, ms in times.items()
    )
    figure.savefig(out, dpi=100, metadata={"Comment": f"figures: {shown}; end"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the picture is written")
    options = parser.parse_args()
    print(table())
    if options.out:
        draw(options.out)


if __name__ == "__main__":
    main()
