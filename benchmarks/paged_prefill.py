# SPDX-License-Identifier: BSD-3-Clause
"""Prefill and chunked prefill over a paged cache on a GPU, by modifier and kind of cache.

python benchmarks/paged_prefill.py [--rounds 8] [--only d128]

Beside each time stand the dense forward on the same keys in q's dtype, and the kernels that stream
a cache for 16 rows at a time. The benchmark gets the streaming kernels by a table whose rows are
2^31 entries apart; for one sequence that changes nothing else. Calls run in a random order each
round with a pause before each.
"""

import argparse
import random
import statistics
import time

import torch

import torch_gpukern
from torch_gpukern import flash_attn, paged_attn

PAGE, CALLS, PAUSE = 16, 3, 0.005
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
# sequences, query tokens, keys, query heads, kv heads, head_dim
SHAPES = {
    "d128 512 x 8k": (1, 512, 8192, 32, 8, 128),
    "d128 2k x 2k": (4, 2048, 2048, 32, 8, 128),
    "d128 8 of 64 x 8k": (8, 64, 8192, 32, 8, 128),
    "d64 2k x 8k": (1, 2048, 8192, 64, 8, 64),
    "d256 2k x 8k": (1, 2048, 8192, 16, 8, 256),
}
CASES = [
    (shape, what)
    for shape in list(SHAPES)[:3]
    for what in ("", "window1024", "softcap50", "alibi", "e4m3", "e4m3+window1024")
]
CASES += [
    ("d128 512 x 8k", "int8"),
    ("d64 2k x 8k", ""),
    ("d64 2k x 8k", "window128+sinks"),
    ("d64 2k x 8k", "e4m3+window128+sinks"),
    ("d256 2k x 8k", ""),
    ("d256 2k x 8k", "softcap50"),
    ("d256 2k x 8k", "softcap50+window4096"),
    ("d256 2k x 8k", "e4m3+softcap50"),
]


def rules(what: str, heads: int) -> dict:
    """The arguments of a name such as "e4m3+window1024+softcap50+alibi+sinks"."""
    found = {}
    for part in what.split("+"):
        if part.startswith("window"):
            found["window_left"] = int(part.removeprefix("window")) - 1
        elif part.startswith("softcap"):
            found["softcap"] = float(part.removeprefix("softcap"))
        elif part == "alibi":
            found["alibi_slopes"] = torch.tensor(
                [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)], device="cuda"
            )
        elif part == "sinks":
            found["sinks"] = torch.randn(heads, device="cuda")
    return found


def graph_of(call) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def calls_of(shape: str, what: str) -> tuple[dict, tuple]:
    """The calls of a case as CUDA graphs by name with the tensors that they read, and the names of
    the instances that serve the first and the last call."""
    batch, tokens, keys, heads, heads_kv, head_dim = SHAPES[shape]
    q = torch.randn(batch * tokens, heads, head_dim, device="cuda").bfloat16()
    stored = next((CODES[part] for part in what.split("+") if part in CODES), torch.bfloat16)
    caches = [
        torch.randn(batch * keys // PAGE, PAGE, heads_kv, head_dim, device="cuda").to(stored)
        for _ in range(2)
    ]
    table = torch.randperm(batch * keys // PAGE, device="cuda").int().view(batch, -1)
    lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    rule, scales = rules(what, heads), {}
    if stored != torch.bfloat16:
        scales = {name: torch.tensor(0.7, device="cuda") for name in ("k_scale", "v_scale")}
    dense = [x[table.long()].flatten(1, 2).transpose(1, 2).bfloat16().contiguous() for x in caches]
    q4 = q.view(batch, tokens, heads, head_dim).transpose(1, 2)
    found = {
        "paged": lambda: paged_attn(q, *caches, table, lens, **rule, **scales),
        "dense": lambda: flash_attn(q4, *dense, is_causal=True, diagonal=keys - tokens, **rule),
    }
    rows = [
        torch_gpukern.explain("paged_attn", q, *caches, table, lens, **rule, **scales)["instance"]
    ]
    if batch == 1:
        far = table.as_strided(table.shape, (1 << 31, 1))
        found["streamed"] = lambda: paged_attn(q, *caches, far, lens, **rule, **scales)
        rows.append(
            torch_gpukern.explain("paged_attn", q, *caches, far, lens, **rule, **scales)["instance"]
        )
    return {name: graph_of(call) for name, call in found.items()}, (
        q,
        q4,
        caches,
        table,
        lens,
        dense,
        rule,
        scales,
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    for shape in SHAPES:
        cases = [
            case
            for case in CASES
            if case[0] == shape and f"{case[0]} {case[1]}".startswith(args.only)
        ]
        made = {case: calls_of(*case) for case in cases}
        runs = [
            (case, name, graph, [])
            for case, (graphs, _) in made.items()
            for name, graph in graphs.items()
        ]
        for _ in range(args.rounds):
            for _, _, graph, times in random.sample(runs, len(runs)):
                time.sleep(PAUSE)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(), graph.replay(), end.record(), end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        took = {(case, name): statistics.median(times) for case, name, _, times in runs}
        for case in cases:
            paged, dense, streamed = (
                took.get((case, name)) for name in ("paged", "dense", "streamed")
            )
            line = f"{' '.join(case):40} {paged:8.1f} us  dense {dense:8.1f} ({dense / paged:.2f})"
            if streamed:
                line += f"  streamed {streamed:8.1f} ({streamed / paged:.1f})"
            print(line, *made[case][1][-1], flush=True)
        del made, runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
