# SPDX-License-Identifier: BSD-3-Clause
"""Tokens per second of the engine beside transformers' own, on one model with random weights and
the same greedy requests.

    python benchmarks/serve_peers.py [--model small] [--device cpu] [--requests 32]

The engine's copy of the model is patched (`torch_gpukern.nn.patch`). Peers: `generate` of all
prompts as one batch, padded on the left, with PyTorch's attention; `generate_batch`, transformers'
continuous batching, with PyTorch's attention. All get the same prompts and lengths; each runs once
to warm up, then as often as --rounds says, one after the other in turn, and the median counts. Says
of how many requests all tokens are equal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from transformers import GenerationConfig

from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, Request, TransformersModel
from torch_gpukern.serve.random_models import random_llama


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--prompt", type=int, default=128, help="tokens of a prompt, at most; at least half of it"
    )
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    net, patched = (random_llama(args.model, args.device, dtype) for _ in range(2))
    patch(patched, say=None)
    rng = random.Random(0)
    lengths = [rng.randint(args.prompt // 2, args.prompt) for _ in range(args.requests)]
    prompts = [[rng.randrange(1, net.config.vocab_size) for _ in range(n)] for n in lengths]
    pages = args.requests * -(-(args.prompt + args.tokens) // 16)

    def engine(drafts: int):
        model = TransformersModel(patched, pages)

        def run():
            patched.set_attn_implementation("gpukern_paged")
            model.cache.forget()  # each round computes its prompts
            served = Engine(model, max_batch=args.requests, max_step_tokens=512, max_drafts=drafts)
            requests = [
                served.submit(Request(prompt, max_tokens=args.tokens)) for prompt in prompts
            ]
            while served.step():
                pass
            return [request.answer for request in requests]

        return run

    settings = {
        "max_new_tokens": args.tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def padded():
        net.set_attn_implementation("sdpa")
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=args.device)
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=args.device)
        out = net.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**settings))
        return out[:, width:].tolist()

    def continuous():
        net.set_attn_implementation("sdpa")
        out = net.generate_batch(
            prompts, generation_config=GenerationConfig(**settings), progress_bar=False
        )
        return [list(x.generated_tokens) for x in out.values()]

    ways = {
        "engine": engine(0),
        "engine, drafts": engine(4),
        "transformers generate, one padded batch": padded,
        "transformers generate_batch": continuous,
    }
    answers, times = {}, {}
    for name, run in list(ways.items()):
        try:
            answers[name] = run()
            times[name] = []
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {error}")
    for _ in range(args.rounds):
        for name in times:
            began = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - began)
    made = args.requests * args.tokens
    print(
        f"{args.requests} requests, prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{args.tokens} new ones each"
    )
    print("| way | tokens/s | requests equal to generate's |\n|---|---|---|")
    want = answers.get("transformers generate, one padded batch")
    for name, seconds in times.items():
        equal = sum(a == b for a, b in zip(answers[name], want)) if want else 0
        print(f"| {name} | {made / statistics.median(seconds):.0f} | {equal} of {args.requests} |")


if __name__ == "__main__":
    main()
