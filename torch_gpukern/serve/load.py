# SPDX-License-Identifier: BSD-3-Clause
"""Puts a load on a server and says how long its answers took.

    python -m torch_gpukern.serve.load --requests 200 --rate 20 --plot latency.png

Requests arrive at random, `rate` a second (0: all at once), with prompts and answers of random
lengths; a share of the prompts begins alike. Prints tokens per second and the times to the first
token and between tokens; the plot has both as distributions. A request that is refused or breaks
off is counted by its error. Needs nothing but Python; tqdm shows a progress bar and matplotlib
draws.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Times:
    first: list[float] = field(default_factory=list)  # seconds to the first token, of each request
    between: list[float] = field(default_factory=list)  # seconds between parts of a stream
    tokens: int = 0
    failed: collections.Counter = field(default_factory=collections.Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def ask(host: str, port: int, body: dict, times: Times) -> None:
    began = last = time.perf_counter()
    first, between, tokens, failure = None, [], 0, "the stream broke off"
    try:
        connection = http.client.HTTPConnection(host, port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        answer = connection.getresponse()
        if answer.status != 200:
            failure = f"{answer.status} {json.loads(answer.read())['error']['message']}"
        else:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    failure = None
                elif line.startswith(b"data: "):
                    now = time.perf_counter()
                    if first is None:
                        first = now - began
                    else:
                        between.append(now - last)
                    last = now
                    tokens += json.loads(line[6:]).get("usage", {}).get("completion_tokens", 0)
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        failure = f"{type(error).__name__}: {error}"
    with times.lock:
        if failure:
            times.failed[failure] += 1
        if first is not None:
            times.first.append(first)
        times.between += between
        times.tokens += tokens


def percentiles(values: list[float]) -> str:
    ordered = sorted(values) or [float("nan")]
    at = (ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.9, 0.99))
    return ", ".join(f"p{q} {1e3 * x:.1f} ms" for q, x in zip((50, 90, 99), at))


def plot(times: Times, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, values, title in (
        (axes[0], times.first, "time to the first token"),
        (axes[1], times.between, "time between tokens"),
    ):
        ordered = sorted(1e3 * x for x in values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(
            title=title,
            xlabel="ms",
            ylabel="share of them that is at most this",
            xscale="log",
            ylim=(0, 1),
        )
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="arrivals a second; 0 is all at once"
    )
    parser.add_argument("--prompt", type=int, default=200, help="mean bytes of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens of an answer")
    parser.add_argument(
        "--shared", type=float, default=0.5, help="share of the prompts that begin alike"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default=None, help="where to write the latency plot")
    args = parser.parse_args()
    try:
        from tqdm import tqdm
    except ImportError:

        def tqdm(x, **_):
            return x

    rng = random.Random(args.seed)
    letters = "abcdefghijklmnopqrstuvwxyz     \n"
    common = "".join(rng.choices(letters, k=args.prompt // 2))
    times, threads = Times(), []
    began = time.perf_counter()
    for i in tqdm(range(args.requests), desc="sent"):
        prompt = "".join(rng.choices(letters, k=max(1, int(rng.uniform(0.5, 1.5) * args.prompt))))
        if rng.random() < args.shared:
            prompt = common + prompt[len(common) :]
        body = {
            "prompt": prompt,
            "max_tokens": max(1, int(rng.uniform(0.5, 1.5) * args.tokens)),
            "temperature": args.temperature,
            "seed": i,
        }
        threads.append(threading.Thread(target=ask, args=(args.host, args.port, body, times)))
        threads[-1].start()
        if args.rate:
            time.sleep(rng.expovariate(args.rate))
    for thread in tqdm(threads, desc="done"):
        thread.join()
    seconds = time.perf_counter() - began
    print(f"{args.requests} requests in {seconds:.2f} s: {times.tokens / seconds:.1f} tokens/s")
    print(f"first token:    {percentiles(times.first)}")
    print(f"between tokens: {percentiles(times.between)}")
    for failure, n in times.failed.most_common():
        print(f"{n} failed: {failure}")
    if args.plot and times.first:
        plot(times, args.plot)


if __name__ == "__main__":
    main()
