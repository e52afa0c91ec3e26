# SPDX-License-Identifier: BSD-3-Clause
"""Tokens a second of a Llama by recipe of torch_gpukern.nn.quantize: decoding steps of
examples/serve, captured on CUDA.

python benchmarks/bench_recipes.py [--quick] [--device cpu|cuda] [--model 8b] [--recipes w4 fp8]
[--requests 1 16 64] [--save]

Random weights, norms and MLPs by `torch_gpukern.nn.patch`, prompts of 64 tokens; `lm_head` and
embedding are not quantised. A figure is the requests over the median time of a step, host and
sampling included. Beside it stands how far the recipe moves the logits behind the first prompt, of
their own RMS: with random weights that says that the layers compute, no more (docs/quantise.md has
bits per byte). bfloat16 comes first and once more at the end: where the two differ, the card's
clock moved.
On CUDA the shape is Llama 3 8B's; the weights take 16 GB, and 5 to 16 more with a recipe.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import torch
from harness import Run, arguments, open_device
from torch import Tensor

import torch_gpukern.nn as gnn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "serve"))
from engine import Engine, Request  # noqa: E402
from models import SIZES, TransformersModel, random_llama  # noqa: E402

BASE = "bfloat16"
RECIPES = (
    "fp8",
    "fp8-block",
    "mxfp8",
    "int8",
    "w8",
    "w4",
    "w4-zero",
    "mxfp4",
    "nvfp4",
    "2:4",
    "2:4-fp8",
)
# the model, requests at once
CASES = {"cpu": ("small", (1, 4)), "cuda": ("8b", (1, 16, 64))}
PROMPT = 64  # tokens
WARM = 3  # steps before the first that counts; the first of them is captured
STEPS = {True: 12, False: 32}  # of a quick run, of a full one


class Heard(TransformersModel):
    """Keeps the first prompt's last logits."""

    first: Tensor | None = None

    def forward(self, *args) -> Tensor:
        logits = super().forward(*args)
        if self.first is None:
            self.first = logits[0].float().clone()
        return logits


def decoding(net: torch.nn.Module, requests: int, steps: int) -> tuple[float, Tensor]:
    """(median seconds of a step in which each request gets a token, logits behind the first
    prompt)"""
    length = PROMPT + WARM + steps + 2
    model = Heard(net, requests * -(-length // 16))
    engine = Engine(model, max_batch=requests, max_step_tokens=requests * PROMPT, max_drafts=0)
    rng = random.Random(0)
    asked = []
    for _ in range(requests):
        prompt = [rng.randrange(1, net.config.vocab_size) for _ in range(PROMPT)]
        asked.append(engine.submit(Request(prompt, max_tokens=WARM + steps + 1)))
    while not all(request.answer for request in asked):
        engine.step()
    times = []
    for _ in range(WARM + steps):
        began = time.perf_counter()  # a step ends when its tokens are on the host
        engine.step()
        times.append(time.perf_counter() - began)
    while engine.step():
        pass
    assert model.first is not None and all(request.finish == "length" for request in asked)
    return statistics.median(times[WARM:]), model.first


def moved(logits: Tensor, base: Tensor) -> float:
    """The difference in percent of the logits' RMS."""
    return 100 * ((logits - base).square().mean() / base.square().mean()).sqrt().item()


def measure(
    run: Run, net: torch.nn.Module, name: str, recipe: str, requests: tuple[int, ...], base: dict
) -> None:
    """A line for each number of requests. `base` holds the logits of bfloat16, which the first run
    fills in.
    """
    group = f"tokens a second, {name}"
    wanted = [n for n in requests if run.asks(group, f"{recipe}, {n} requests", "bf16")]
    if not wanted:
        return
    began = time.perf_counter()
    done = None if recipe.startswith(BASE) else gnn.quantize(net, recipe, say=None)
    run.device.sync()
    made = time.perf_counter() - began
    for n in wanted:
        seconds, logits = decoding(net, n, STEPS[run.args.quick])
        if not logits.isfinite().all():
            raise ValueError(f"{recipe}: logits are not finite")
        note = f"{1e3 * seconds:.2f} ms a step; logits moved by {moved(logits, base.setdefault(n, logits)):.1f} %"
        if done is not None:
            note += f"; quantised in {made:.1f} s to {done.bytes_after / 2**20:.0f} MiB"
        run.fact(group, f"{recipe}, {n} requests", n / seconds, "tokens/s", note=note)
    if done is not None:
        done.restore()


def main() -> None:
    def more(parser) -> None:
        parser.add_argument(
            "--model", choices=tuple(SIZES), help="a size of examples/serve/models.py"
        )
        parser.add_argument("--recipes", nargs="+", choices=(BASE, *RECIPES), default=RECIPES)
        parser.add_argument("--requests", nargs="+", type=int, help="requests that decode at once")

    args = arguments("recipes", more=more)
    device = open_device(args.device)
    model, requests = CASES[device.kind]
    model, requests = args.model or model, tuple(args.requests or requests)
    run = Run("recipes", args, device)
    net, base = random_llama(model, device.kind, torch.bfloat16), {}
    gnn.patch(net, say=None)
    for recipe in (BASE, *(r for r in args.recipes if r != BASE), f"{BASE} again"):
        measure(run, net, model, recipe, requests, base)
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
