# SPDX-License-Identifier: BSD-3-Clause
"""`gpukern bench serve`: a server on loopback under many requests at once.

Each level starts its requests together, streams their answers, and ends when all have ended or its
time is over. The client measures: the time to the first token begins before the connection is made, and
times between tokens are times between the events of a stream.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import http.client
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cli.terminal import progress, table, whole
from .eight_bit import CACHES
from .loading import RECIPES
from .metrics import percentile
from .peer import Peer, Which
from .random_models import SHAPES

LEVELS = (32, 128, 512)
HEADS = (
    "requests at once",
    "answers",
    "seconds",
    "tokens/s",
    "first token p50 ms",
    "p99 ms",
    "between tokens p50 ms",
    "p99 ms",
    "by",
)
OURS, PEER = "gpukern serve", "generate_batch"
HANDED = (
    "batch",
    "pages",
    "memory",
    "step_tokens",
    "drafts",
    "draft_branches",
    "recipe",
    "kv_cache",
    "tensor_parallel",
)
PLAIN = (3, 250)  # token ids of prompts: every tokenizer has them


@dataclass
class Times:
    """What the answers of a level took, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    seconds: float = 0.0
    failed: collections.Counter = field(default_factory=collections.Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def row(self, level: int, by: str = OURS) -> tuple[str, ...]:
        ms = [
            f"{1e3 * percentile(values, q, math.nan):.1f}"
            for values in (self.first, self.between)
            for q in (50, 99)
        ]
        rate = f"{self.tokens / self.seconds:.1f}" if self.seconds else "nan"
        return (str(level), str(self.answers), f"{self.seconds:.3f}", rate, *ms, by)


def ask(address: tuple[str, int], body: dict, end: float, times: Times) -> None:
    """One answer, streamed. `end` is when it is given up, by time.perf_counter."""
    began = last = time.perf_counter()
    first, between, tokens = None, [], 0
    failure: str | None = "the stream broke off"
    connection = http.client.HTTPConnection(*address, timeout=max(end - began, 0.01))
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            failure = f"{answer.status} {json.loads(answer.read())['error']['message']}"
        else:
            for line in answer:
                now = time.perf_counter()
                if now > end:
                    raise TimeoutError
                if line.startswith(b"data: [DONE]"):
                    failure = None
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
                        continue
                    if first is None:
                        first = now - began
                    else:
                        between.append(now - last)
                    last = now
    except TimeoutError:
        failure = "the level's time was over"
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    with times.lock:
        if failure:
            times.failed[failure] += 1
        else:
            times.answers += 1
        if first is not None:
            times.first.append(first)
        times.between += between
        times.tokens += tokens


def at_once(address: tuple[str, int], bodies: Sequence[dict], limit: float) -> Times:
    """All requests together; at most `limit` seconds."""
    times = Times()
    began = time.perf_counter()
    threads = [
        threading.Thread(target=ask, args=(address, body, began + limit, times)) for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in progress(threads, f"{len(bodies)} at once", "answer"):
        thread.join()
    times.seconds = time.perf_counter() - began
    return times


def bodies_of(count: int, prompt: int, tokens: int, seed: int) -> list[dict]:
    """Prompts of half to one and a half times so many random tokens."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(*PLAIN) for _ in range(rng.randint(prompt // 2 + 1, 3 * prompt // 2))],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]  # fmt: skip


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[tuple[tuple[str, int], str]]:
    """`gpukern serve` in a process of its own, on a free port of loopback: (its address, its first
    line)."""
    command = [sys.executable, "-m", "torch_gpukern", "serve", *flags, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        says = process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)/v1", says)
        if not found:
            raise RuntimeError(f"the server did not start: {' '.join(command[3:])}")
        yield (found[1], int(found[2])), says.strip()
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="gpukern bench serve",
        description="Throughput, first-token and inter-token times of a server on loopback.",
    )
    p.add_argument("model", nargs="?", metavar="MODEL_DIR", help="default: --random tiny")
    p.add_argument("--random", choices=SHAPES, help="random weights in this shape")
    p.add_argument(
        "--at-once",
        type=whole(1, 4096),
        nargs="+",
        default=LEVELS,
        metavar="N",
        help=f"requests at once, a level each; default: {' '.join(map(str, LEVELS))}",
    )
    p.add_argument("--prompt", type=whole(1), default=128, help="mean tokens of a prompt")
    p.add_argument("--tokens", type=whole(1), default=64, help="tokens of an answer")
    p.add_argument("--limit", type=whole(1), default=300, help="seconds of a level, at most")
    p.add_argument("--csv", type=Path, metavar="FILE", help="where the table is written, too")
    p.add_argument(
        "--peer",
        action="store_true",
        help="the same requests by transformers' generate_batch, in a process without HTTP",
    )
    p.add_argument("--batch", type=whole(1), help="as of gpukern serve")
    p.add_argument("--pages", type=whole(1), help="as of gpukern serve")
    p.add_argument("--memory", type=float, help="as of gpukern serve")
    p.add_argument("--step-tokens", type=whole(1), help="as of gpukern serve")
    p.add_argument("--drafts", type=whole(0), help="as of gpukern serve")
    p.add_argument("--draft-branches", type=whole(1, 16), help="as of gpukern serve")
    p.add_argument("--recipe", choices=("auto", *RECIPES), help="as of gpukern serve")
    p.add_argument("--kv-cache", choices=tuple(CACHES), help="as of gpukern serve")
    p.add_argument("--tensor-parallel", type=whole(1, 64), help="as of gpukern serve")
    return p


def beside(which: Which, args: argparse.Namespace) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows of the peer, and what failed."""
    peer, rows, failures = Peer(which), [], []
    try:
        peer.times(bodies_of(min(args.at_once), args.prompt, 4, 0), args.limit)
        for i, level in enumerate(args.at_once):
            found = peer.times(bodies_of(level, args.prompt, args.tokens, 1 + i), args.limit)
            if isinstance(found, str):
                failures.append(f"{level} at once, {PEER}: {found}")
            else:
                first, between, tokens, answers, took = found
                rows.append(Times(first, between, tokens, answers, took).row(level, PEER))
    finally:
        peer.close()
    return rows, failures


def dtype_of(device: str | None) -> str:
    return "float32" if (device or "cpu") == "cpu" else "bfloat16"


def main(argv: Sequence[str], device: str | None = None, dtype: str | None = None) -> int:
    """device and dtype are those of `gpukern bench`."""
    args = parser().parse_args(argv)
    if args.model and args.random:
        raise ValueError("bench serve takes MODEL_DIR or --random, not both")
    flags = [args.model] if args.model else ["--random", args.random or "tiny"]
    handed = {"device": device, "dtype": dtype} | {name: getattr(args, name) for name in HANDED}
    for name, value in handed.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    rows, failures = [], []
    with server(flags) as (address, says):
        print(says)
        # Graphs are captured and libraries set themselves up before the first level.
        at_once(address, bodies_of(min(args.at_once), args.prompt, 4, 0), args.limit)
        for i, level in enumerate(args.at_once):
            bodies = bodies_of(level, args.prompt, args.tokens, 1 + i)
            times = at_once(address, bodies, args.limit)
            rows.append(times.row(level))
            failures += [f"{level} at once: {n} failed: {x}" for x, n in times.failed.items()]
    if args.peer:
        which = Which(args.model, args.random, device or "cpu", dtype or dtype_of(device))
        more, said = beside(which, args)
        rows += more
        failures += said
        rows.sort(key=lambda row: int(row[0]))
    print(f"prompts of {args.prompt} tokens on average, answers of {args.tokens}")
    print(table([HEADS, *rows]))
    for failure in failures:
        print(failure, file=sys.stderr)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADS, *rows])
    return int(bool(failures))
