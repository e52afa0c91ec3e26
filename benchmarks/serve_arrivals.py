# SPDX-License-Identifier: BSD-3-Clause
"""Time to the first token and tokens/s where requests come one by one, with steps that have prompts
captured and not.

    python benchmarks/serve_arrivals.py --random 8b --device cuda
    python benchmarks/serve_arrivals.py                            # tiny, on a CPU, which captures nothing

One request comes every so many steps. So most steps decode some requests beside the prompt of one.
The weights are random, the prompts too, and answers are greedy without drafts. There is no HTTP.
"""

from __future__ import annotations

import argparse
import gc
import random
import time

import torch

from torch_gpukern.cli.terminal import table
from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, Request, TransformersModel
from torch_gpukern.serve.load import PLAIN
from torch_gpukern.serve.random_models import SIZES, random_llama

HEADS = (
    "a request each",
    "prompts",
    "steps",
    "tokens/s",
    "first token p50 ms",
    "p90 ms",
)
AT_ONCE = 64


def served(
    model: TransformersModel, prompts: list[list[int]], every: int, tokens: int
) -> tuple[Engine, float]:
    """The engine after a request for each prompt, and the seconds that they took."""
    engine = Engine(model, max_batch=AT_ONCE, max_step_tokens=512, max_drafts=0)
    model.cache.forget()
    began, step = time.perf_counter(), 0
    while True:
        if step % every == 0 and step // every < len(prompts):
            engine.submit(Request(prompts[step // every], max_tokens=tokens))
        step += 1
        if not engine.step() and step // every >= len(prompts):
            break
    seconds = time.perf_counter() - began
    assert engine.metrics.new_tokens == len(prompts) * tokens and engine.used_pages == 0
    return engine, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompt", type=int, nargs=2, default=[65, 192], metavar="TOKENS")
    parser.add_argument("--every", type=int, nargs="+", default=[4, 1], metavar="STEPS")
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    net = random_llama(args.random, args.device, dtype)
    patch(net, say=None)
    model = TransformersModel(net, AT_ONCE * -(-(max(args.prompt) + args.tokens + 1) // 16))
    model.prepare(AT_ONCE)
    gc.collect()
    gc.freeze()  # as the server does: no collection looks at the network
    draw = random.Random(0)
    lengths = [draw.randint(*args.prompt) for _ in range(args.requests)]
    prompts = [[draw.randrange(*PLAIN) for _ in range(n)] for n in lengths]
    shapes, rows = model.shapes, []
    kinds = ("not captured", "captured") * 2 if model.captured_batch else ("not captured",)
    for every in args.every:
        served(model, prompts[:4], every, 4)  # libraries set themselves up
        for kind in kinds:
            model.shapes = shapes if kind == "captured" else shapes._replace(prompts=[])
            engine, seconds = served(model, prompts, every, args.tokens)
            done = engine.metrics
            row = (every, kind, done.steps, f"{done.new_tokens / seconds:.0f}")
            row += tuple(f"{1e3 * done.first_token.percentile(q):.1f}" for q in (50, 90))
            rows.append(tuple(map(str, row)))
    print(table([HEADS, *rows]))


if __name__ == "__main__":
    main()
