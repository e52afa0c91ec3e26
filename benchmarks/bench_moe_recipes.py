# SPDX-License-Identifier: BSD-3-Clause
"""Experts in few bits beside the same experts in bfloat16: `torch_gpukern.nn.grouped_experts`, forward.

python benchmarks/bench_moe_recipes.py [--device cpu|cuda] [--models Mixtral-8x7B] [--recipes fp8 w4]
[--tokens 1 16 256]

A line has the time of bfloat16, and of each recipe with its ratio to bfloat16. On CUDA calls are
replayed from graphs. The relative error is that of the first 8 tokens beside float64 experts with the
decoded weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from bench_moe import MODELS

from torch_gpukern import nn as gnn
from torch_gpukern.nn.quant.experts import SERVED, PackedExperts, pack_experts

SIZES = {
    "cpu": MODELS["cpu"],
    "cuda": {
        "Mixtral-8x7B": MODELS["cuda"]["Mixtral-8x7B"],
        "Qwen3-30B-A3B": MODELS["cuda"]["Qwen3-30B-A3B"],
        "small": (1024, 2048, 8, 2),
    },
}
TOKENS = {"cpu": (1, 16), "cuda": (1, 16, 64, 256, 1024, 4096)}
COMPARED = 8  # tokens
ROUNDS = 7


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    call()
    times = []
    if device.type == "cpu":
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def by_hand(x, expert_of, weight_of, up: PackedExperts, down: PackedExperts) -> torch.Tensor:
    """The first tokens in float64, with the decoded weights."""
    out = []
    for t in range(min(COMPARED, x.shape[0])):
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for e, p in zip(expert_of[t].tolist(), weight_of[t], strict=True):
            one, two = (w._slice(e, 1) for w in (up, down))
            one, two = (
                PackedExperts(w.recipe, part, (1, *w.shape[1:])).decoded()[0].double()
                for w, part in ((up, one), (down, two))
            )
            gate, value = (one @ x[t].double()).chunk(2)
            total += p.double() * (two @ (torch.nn.functional.silu(gate) * value))
        out.append(total)
    return torch.stack(out)


@torch.no_grad()
def run(name: str, sizes: tuple, recipes: list[str], tokens: list[int], device: torch.device):
    hidden, inner, experts, each = sizes
    print(f"{name}: {experts} experts of {hidden} x {inner}, {each} a token", flush=True)
    up = torch.randn(experts, 2 * inner, hidden, device=device).bfloat16() / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=device).bfloat16() / inner**0.5
    packed = {
        recipe: [
            PackedExperts(recipe, pack_experts(recipe, w), (experts, w.shape[2], w.shape[1]))
            for w in (up, down)
        ]
        for recipe in recipes
    }
    for count in tokens:
        x = torch.randn(count, hidden, device=device).bfloat16()
        weight_of, expert_of = torch.rand(count, experts, device=device).softmax(-1).topk(each)

        def of(one, two, given=(x, expert_of, weight_of)):
            return gnn.grouped_experts(*given, one, two)

        base = median_ms(lambda: of(up.mT, down.mT), device)
        line = f"  {count} tokens: bfloat16 {base:.3f} ms"
        for recipe, (one, two) in packed.items():
            want = by_hand(x, expert_of, weight_of, one, two)
            error = (of(one, two)[:COMPARED].double() - want).norm() / want.norm()
            ms = median_ms(lambda one=one, two=two: of(one, two), device)
            line += f" | {recipe} {ms:.3f} ms ({base / ms:.2f}), error {error:.1e}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--recipes", nargs="+", default=["fp8", "w4"], choices=SERVED)
    parser.add_argument("--tokens", nargs="+", type=int)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    for name, sizes in SIZES[args.device].items():
        if not args.models or name in args.models:
            run(name, sizes, args.recipes, args.tokens or TOKENS[args.device], device)


if __name__ == "__main__":
    sys.exit(main())
