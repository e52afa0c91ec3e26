# SPDX-License-Identifier: BSD-3-Clause
"""Runs the requests of `gpukern bench serve --peer` by transformers' `generate_batch`.

It runs in a process of its own, so that a level can be stopped. There is no HTTP: the times are those
that transformers records in the process, from the moment when the requests were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from .random_models import random_model


class Which(NamedTuple):
    directory: str | None
    random: str | None
    device: str
    dtype: str


class Found(NamedTuple):
    """Seconds, as load.Times has them."""

    first: list[float]
    between: list[float]
    tokens: int
    answers: int
    seconds: float


class Peer:
    """The process. `times` runs the requests of a level. It returns the reason as a text if they
    take longer than `limit` seconds or fail."""

    def __init__(self, which: Which) -> None:
        self.which = which
        self.process: Any = None

    def times(self, bodies: Sequence[dict], limit: float) -> Found | str:
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.which), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.pipe.send([(body["prompt"], body["max_tokens"]) for body in bodies])
            if self.pipe.poll(limit):
                return self.pipe.recv()
            why = "the level's time was over"
        except (EOFError, OSError):
            why = "generate_batch's process has ended"
        self.close()
        return why

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _serve(pipe: Any, which: Which) -> None:
    net = _network(which)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_times(net, asked))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _network(which: Which) -> Any:
    import transformers

    dtype = getattr(torch, which.dtype)
    if which.directory is None:
        net = random_model(which.random or "tiny", which.device, dtype)
    else:
        net = transformers.AutoModelForCausalLM.from_pretrained(which.directory, dtype=dtype)
    net.to(which.device).eval().set_attn_implementation("sdpa")
    return net


def _times(net: Any, asked: list[tuple[list[int], int]]) -> Found:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    size = 32
    tokens = asked[0][1]
    # Room for all, so that nobody waits for pages. Without a number transformers takes most of the
    # memory.
    blocks = sum(-(-(len(prompt) + tokens) // size) + 1 for prompt, _ in asked)
    found = net.generate_batch(
        [prompt for prompt, _ in asked],
        GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(num_blocks=blocks, block_size=size),
        record_timestamps=True,
    )
    done = [x for x in found.values() if x.error is None and x.timestamps]
    began = min(x.created_time for x in done)
    return Found(
        [x.timestamps[0] - began for x in done],
        [b - a for x in done for a, b in zip(x.timestamps, x.timestamps[1:])],
        sum(len(x.generated_tokens) for x in done),
        len(done),
        max(x.timestamps[-1] for x in done) - began,
    )
