# SPDX-License-Identifier: BSD-3-Clause
"""Times every gemm instance that serves a product, on random products of a seed. The chooser's
figures are fitted to these times.

python benchmarks/gemm_instances.py --random 150 --seed 1 [--seconds 80] > instances.json python
benchmarks/gemm_instances.py --judge instances.json

The JSON has device, seed, and for each product its sizes, the chosen instance (chosen), us by
instance, and cuBLAS's us. Inputs are not rotated, as in bench_gemm.py --random. --judge works on
any machine and prints what the choice loses to the best instance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import gemm_random
import torch

from torch_gpukern._library import ops
from torch_gpukern.tuning import timing
from torch_gpukern.tuning.gemm import Problem

NAMES = {"bf16": "bfloat16", "f16": "float16", "tf32": "float32"}
ROUNDS = 5


def problem_of(x: gemm_random.Shape) -> Problem:
    precision = "tf32" if x.dtype == "tf32" else "ieee"
    return Problem(x.m, x.n, x.k, x.layout, dtype=NAMES[x.dtype], fp32_precision=precision)


def times_of(problem: Problem, device: torch.device) -> dict:
    """us of every instance and of cuBLAS: medians over rounds, measured alternately."""
    inputs = problem.inputs(device)
    plan = problem.explain(inputs)

    pool, first_looks, replays = torch.cuda.graph_pool_handle(), [], {}

    def replay(call) -> timing.Replay:
        # this graph keeps the memory pool alive; a pool ends with its last graph
        first_looks.append(timing.Replay([call], 1, pool))
        # the first measurement of the first contestant may be long, and its graph would then hold
        # too few calls
        us = min(first_looks[-1].us() for _ in range(3))
        return timing.Replay([call], timing.calls_for(us, 500.0), pool)

    try:
        for row in plan["instances"]:
            ops.gemm_prefer.default(plan["device"], plan["class"], row)
            replays[row] = replay(lambda: problem.ours(inputs))
    finally:
        ops.gemm_prefer.default(plan["device"], plan["class"], "")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = problem.fp32_precision == "tf32"
    replays["cublas"] = replay(lambda: problem.torch(inputs))
    torch.backends.cuda.matmul.allow_tf32 = before
    us = {
        name: round(statistics.median(x), 3)
        for name, x in timing.rounds_us(replays, ROUNDS).items()
    }
    return {"chosen": plan["instance"], "cublas_us": us.pop("cublas"), "us": us}


def judged(stored: dict) -> list[str]:
    """Lines that say what the chosen and the best instances reach of cuBLAS, and the ten choices
    that lose the most."""
    rows = stored["products"]
    kept = [row["cublas_us"] / row["us"][row["chosen"]] for row in rows]
    best = [row["cublas_us"] / min(row["us"].values()) for row in rows]
    lines = []
    for name, ratios in (("chosen", kept), ("best instance", best)):
        mean, fifth = gemm_random.geomean(ratios), gemm_random.fifth_percentile(ratios)
        lines.append(
            f"{name:<14} geomean {mean:.3f}  5th percentile {fifth:.3f}  worst {min(ratios):.3f}"
        )
    for loss, i in sorted((kept[i] / best[i], i) for i in range(len(rows)))[:10]:
        row = rows[i]
        name = f"{row['layout']} {row['m']}x{row['k']}x{row['n']} {row['dtype']}"
        lines.append(
            f"{name:<32} {loss:.2f} of {min(row['us'], key=row['us'].get)} by {row['chosen']}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="times of every gemm instance on random products")
    parser.add_argument("--random", type=int, default=150, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=80.0, help="no product starts after")
    parser.add_argument(
        "--judge", type=Path, metavar="JSON", help="a stored run, instead of a new one"
    )
    args = parser.parse_args()
    if args.judge:
        print("\n".join(judged(json.loads(args.judge.read_text()))))
        return
    device, end, products = torch.device("cuda"), time.monotonic() + args.seconds, []
    with torch.no_grad():
        for x in gemm_random.draw_shapes("cuda", args.random, args.seed):
            if time.monotonic() > end:
                print(
                    f"{args.seconds:.0f} s were spent after {len(products)} products",
                    file=sys.stderr,
                )
                break
            products.append(asdict(x) | times_of(problem_of(x), device))
    json.dump(
        {"device": torch.cuda.get_device_name(), "seed": args.seed, "products": products},
        sys.stdout,
    )


if __name__ == "__main__":
    sys.exit(main())
