# SPDX-License-Identifier: BSD-3-Clause
"""Tokens a step with drafts of one and of more branches, where the answer is a known text.

    python benchmarks/serve_drafts.py                                          # counts, seconds on a CPU
    python benchmarks/serve_drafts.py --random 8b --device cuda --at-once 1 8  # with a network: tokens/s

The model's next token is that of a file of this repository, whatever its network computes. So the
acceptance of prompt lookup is that of real text, and needs no trained weights. Tokens are words,
white space and single marks. Each request has the beginning of the text as its prompt, at a length
of its own, and is answered greedily by what follows. Without --random there is no network, requests
run one by one, and times mean nothing. With it the weights are random, and the prompts are found in
the cache.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_gpukern import PagedKVCache
from torch_gpukern.cli.terminal import table
from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, Model, Request, TransformersModel
from torch_gpukern.serve.random_models import SIZES, random_llama

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {
    "prose": "docs/serving.md",
    "code": "torch_gpukern/serve/engine.py",
    "table": "benchmarks/results/nvidia-h200.csv",
}
PROMPT, APART = 1024, 61  # tokens of the shortest prompt, and how far the others are apart


def tokens_of(name: str, most: int) -> list[int]:
    """The first tokens of a text, as numbers from 1 on."""
    with (ROOT / TEXTS[name]).open() as file:
        words = re.findall(r"\w+|\s+|[^\w\s]", file.read(32 * most))
    ids: dict[str, int] = {}
    return [ids.setdefault(word, len(ids) + 1) for word in words[:most]]


def put(logits: Tensor, text: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Makes the token behind each row's position the most likely one."""
    at = (positions[rows] + 1).clamp(max=len(text) - 1)
    return logits.scatter_(1, text[at][:, None], 1e9)


class Text(Model):
    """A text without a network."""

    def __init__(self, text: list[int], pages: int) -> None:
        super().__init__(PagedKVCache(pages, 16, 1, 8), max(text) + 1, len(text))
        self.text = torch.tensor(text)

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return put(torch.zeros(len(rows), self.vocab), self.text, positions, rows)


class Read(TransformersModel):
    """A network whose tokens are those of a text."""

    def __init__(self, net: Any, text: list[int], pages: int) -> None:
        if max(text) >= net.config.vocab_size:
            raise ValueError(
                f"the text has {max(text)} different tokens, and the network {net.config.vocab_size}; "
                f"take a larger network, or fewer --at-once and --tokens"
            )
        self.text = torch.tensor(text, device=next(net.parameters()).device)
        super().__init__(net, pages)

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return put(super().run(tokens, positions, rows), self.text, positions, rows)


def answered(
    model: Model, text: list[int], requests: int, tokens: int, **settings: int
) -> tuple[Engine, float]:
    """The engine after the requests, and the seconds that they took."""
    engine = Engine(model, max_step_tokens=8192, **settings)
    asked = [Request(text[: PROMPT + APART * i], max_tokens=tokens) for i in range(requests)]
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.submit_all(asked)
    while engine.step():
        pass
    seconds = time.perf_counter() - began
    for request in asked:
        at = len(request.prompt)
        assert request.answer == text[at : at + tokens], "the answer is another text"
    assert engine.used_pages == 0
    return engine, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", choices=tuple(SIZES), help="a network of this shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", nargs="+", choices=tuple(TEXTS), default=tuple(TEXTS))
    parser.add_argument("--at-once", type=int, nargs="+", default=[16], metavar="N")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a branch")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="on a GPU also without captured steps, and with drafts in every step; by default they are "
        "made where they pay",
    )
    parser.add_argument(
        "--branches", type=int, nargs="+", default=[0, 1, 2, 4], help="0: no drafts"
    )
    args = parser.parse_args()
    most = max(args.at_once)
    length = PROMPT + APART * most + args.tokens
    pages = most * -(-(length + 4 * args.drafts * max(args.branches)) // 16)
    heads = ["text", "requests", "branches", "steps", "tokens/step", "drafted/step", "right"]
    rows = [tuple(heads + ["ms/step", "tokens/s"] * bool(args.random))]
    net = None
    if args.random:
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        net = random_llama(args.random, args.device, dtype)
        patch(net, say=None)
    gc.collect()
    gc.freeze()  # as the server does: no collection looks at the network
    for name in args.texts:
        text = tokens_of(name, length)
        if len(text) < length:
            parser.error(f"{TEXTS[name]} has {len(text)} tokens, and {length} are needed")
        model = Text(text, pages) if net is None else Read(net, text, pages)
        captured = [model.captured_batch] + [0] * args.eager
        for level, model.captured_batch in [(n, c) for n in args.at_once for c in captured]:
            batch = 1 if net is None else level
            model.follows = model.captured_batch > 0
            if net is not None:
                answered(model, text, level, 4, max_batch=batch, max_drafts=0)
            for branches in args.branches:
                drafts = {"max_drafts": args.drafts * bool(branches)}
                drafts["draft_branches"] = max(branches, 1)
                model.prepare(level, *drafts.values())
                engine, seconds = answered(
                    model, text, level, args.tokens, max_batch=batch, **drafts
                )
                done = engine.metrics
                # the step of a prompt gives a token without drafts
                first = level if batch == 1 else 1
                steps, new = done.steps - first, done.new_tokens - level
                row = [
                    name + " (eager)" * (model.captured_batch < captured[0]),
                    level,
                    branches,
                    done.steps,
                    f"{new / steps / batch:.2f}",
                ]
                row += [f"{done.drafted / steps / batch:.2f}"]
                row += [f"{done.accepted / max(done.drafted, 1):.2f}"]
                if net is not None:
                    row += [f"{1e3 * seconds / done.steps:.2f}", f"{done.new_tokens / seconds:.0f}"]
                rows.append(tuple(map(str, row)))
    print(table(rows))


if __name__ == "__main__":
    main()
