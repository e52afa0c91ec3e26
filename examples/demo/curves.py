# SPDX-License-Identifier: BSD-3-Clause
"""Compares the loss curves of the same training on torch_gpukern and on PyTorch's built-ins, as a
table and a picture."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

# Curves are also compared by their mean over this many steps. Single steps of two runs differ more
# and more, because training amplifies rounding errors, although both runs learn the same.
SMOOTH = 20
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")


def compare_curves(
    sides: dict[str, Callable[[Tensor, Tensor, float], Tensor]],
    feed: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    began: float,
) -> dict[str, list[float]]:
    """Bits per byte of every step, by side.

    sides: by name, a function of (tokens, targets, share of the run that is done) that makes a step
    and returns the loss in nats; a GPU may still be computing it. The first side is ours. Another
    side that fails at the first step is left out, for example a backend that does not support these
    shapes. began: time.perf_counter() at the start of the program."""
    losses: dict[str, list[Tensor]] = {name: [] for name in sides}
    shown = max(1, steps // 10)
    print(f"training: {steps} steps from the same weights on the same batches, not compiled")
    for i in range(steps):
        tokens, targets = next(feed)
        for name in list(losses):
            try:
                losses[name].append(sides[name](tokens, targets, i / steps))
            except RuntimeError as error:
                if i or name == next(iter(sides)):
                    raise
                print(f"{name}: left out: {str(error).splitlines()[0]}")
                del losses[name]
        if (i + 1) % shown == 0 or i + 1 == steps:
            last = ", ".join(
                f"{name} {values[-1].item() / math.log(2):.4f}" for name, values in losses.items()
            )
            print(
                f"{time.perf_counter() - began:4.0f} s  step {i + 1} of {steps}  bits per byte: "
                f"{last}",
                flush=True,
            )
    found = {
        name: (torch.stack(values).double() / math.log(2)).tolist()
        for name, values in losses.items()
    }
    for a, b in itertools.combinations(found, 2):
        print(apart(a, found[a], b, found[b]))
    return found


def smooth(values: list[float]) -> list[float]:
    """The running mean over SMOOTH values."""
    return [statistics.fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def apart(a: str, of_a: list[float], b: str, of_b: list[float]) -> str:
    """A line of text on how much two curves differ."""
    single = [abs(x - y) for x, y in zip(of_a, of_b)]
    mean = [abs(x - y) for x, y in zip(smooth(of_a), smooth(of_b))]
    return (
        f"{a} and {b}: first step {single[0]:.5f} apart, a step at most {max(single):.4f}, means "
        f"of {SMOOTH} steps at most "
        f"{max(mean):.4f}, at the end {mean[-1]:.4f} of {smooth(of_b)[-1]:.3f} bits per byte"
    )


def write_curves(losses: dict[str, list[float]], folder: Path) -> str:
    """Writes curves.csv and, if matplotlib is installed, curves.png. Returns the files' names."""
    path = folder / "curves.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *losses])
        for i, row in enumerate(zip(*losses.values())):
            writer.writerow([i + 1, *(f"{value:.6f}" for value in row)])
    try:
        import matplotlib
    except ImportError:
        return f"{path}, without a picture: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5), layout="constrained", sharex=True, height_ratios=(2, 1)
    )
    (ours, ours_values), *others = losses.items()
    steps = range(1, len(ours_values) + 1)
    # wide and pale, because the other curves are drawn over it
    above.plot(steps, ours_values, color=COLORS[0], label=ours, linewidth=5, alpha=0.35)
    for (name, values), color in zip(others, itertools.cycle(COLORS[1:])):
        above.plot(steps, values, color=color, label=name, linewidth=1.2, linestyle="--")
    for (name, values), color in zip(others, itertools.cycle(COLORS[1:])):
        difference = [x - y for x, y in zip(smooth(ours_values), smooth(values))]
        below.plot(steps, difference, color=color, label=f"{ours} - {name}", linewidth=1)
    below.axhline(0, color="black", linewidth=0.5)
    above.set(ylabel="bits per byte")
    below.set(xlabel="step", ylabel=f"difference,\nmean of {SMOOTH} steps")
    for axes in (above, below):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3, linewidth=0.5)
    figure.savefig(folder / "curves.png", dpi=120)
    plt.close(figure)
    return f"{path} and {folder / 'curves.png'}"


def plot(curve: list[tuple[float, float]], held_out: float, gzip_bits: float, path: Path) -> bool:
    """The loss curve, with the held-out result and gzip's as lines; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    seconds, bits = zip(*curve)
    width = max(1, len(bits) // 50)
    smooth = [statistics.fmean(bits[max(0, i - width) : i + 1]) for i in range(len(bits))]
    axes.plot(seconds, bits, color="#4269d0", alpha=0.25, linewidth=0.7)
    axes.plot(seconds, smooth, color="#4269d0", label="training")
    axes.axhline(held_out, color="#3ca951", label=f"held out: {held_out:.3f}")
    axes.axhline(gzip_bits, color="black", linestyle=":", label=f"gzip -9: {gzip_bits:.3f}")
    axes.set(xlabel="seconds of training", ylabel="bits per byte", ylim=(1, 5))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
