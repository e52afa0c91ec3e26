# SPDX-License-Identifier: BSD-3-Clause
"""Prints the table of docs/serving.md: how far the logits of random models over pages are from those
of the model alone, with the right attention and with wrong ones. A minute on two cores.

    python tests/serve/probe_margins.py
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from test_probe import WRONG, random_net  # noqa: E402

from torch_gpukern.serve import models, probe, served  # noqa: E402

SIZES = ((512, 2), (512, 8), (512, 32), (1024, 8), (2048, 8), (4096, 2))
FAULTS = ("half the scale", "a window", "another head's keys")


def off(model, want, change=None, layers=lambda layer: True):
    """The distance from the model alone. `change` is made in each layer that `layers` names."""
    attend = models.Step.attend

    def wrong(step, cache, layer, q, **rules):
        if change and layers(layer):
            q, rules = change(q, rules)
        return attend(step, cache, layer, q, **rules)

    models.Step.attend = wrong
    try:
        return f"{probe.apart(probe.over_pages(model), want):.2g}"
    finally:
        models.Step.attend = attend


def main() -> None:
    names = ["columns, layers", "two attentions of transformers", "pages", *FAULTS]
    print(f"torch {torch.__version__}\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for hidden, layers in SIZES:
        net = random_net(hidden, layers)
        want = probe.alone(net, 2048, "eager")
        model = served(net, 16)
        cells = [f"{hidden}, {layers}", f"{probe.rounding(net, want):.2g}", off(model, want)]
        cells += [off(model, want, WRONG[name][0]) for name in FAULTS]
        print(f"| {' | '.join(cells)} |", flush=True)
        if layers == 32:
            change = WRONG["another head's keys"][0]
            last = off(model, want, change, lambda layer, n=layers: layer == n - 1)
            print(f"another head's keys in the last of {layers} layers: {last}")


if __name__ == "__main__":
    main()
