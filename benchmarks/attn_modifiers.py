# SPDX-License-Identifier: BSD-3-Clause
"""What windows, softcap and ALiBi cost the forward pass on a GPU: TFLOP/s of the visible pairs,
beside the plain call.

python benchmarks/attn_modifiers.py [--rounds 12] [--only d128]

Calls alternate in an order drawn anew each round, with a pause before each, so that none inherits
the clock that another left. First each call is compared with float64 on a small problem.
"""

import argparse
import math
import random
import statistics
import time

import torch

import torch_gpukern
from torch_gpukern import reference

TOKENS, HIDDEN, CALLS, PAUSE = 16384, 2048, 4, 0.012


def slopes(heads: int) -> torch.Tensor:
    return torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)], device="cuda")


def rules(name: str, heads: int) -> dict:
    """causal+window1024+softcap50+alibi, in parts"""
    found = {}
    for part in name.split("+"):
        if part == "causal":
            found["is_causal"] = True
        elif part.startswith("window"):
            found["window_left"] = int(part.removeprefix("window")) - 1
        elif part.startswith("softcap"):
            found["softcap"] = float(part.removeprefix("softcap"))
        elif part == "alibi":
            found["alibi_slopes"] = slopes(heads)
    return found


def seen(seq: int, rule: dict) -> int:
    """Visible pairs of a query and a key."""
    if not rule.get("is_causal"):
        return seq * seq
    window = min(rule.get("window_left", seq - 1) + 1, seq)
    return window * (window + 1) // 2 + (seq - window) * window


def errors(head_dim: int, dtype: torch.dtype, name: str) -> tuple[float, float]:
    """The largest errors of out and of lse; q is three times as large as usual."""
    gen = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(1, 2, 1500, head_dim, device="cuda", generator=gen) for _ in range(3))
    q, k, v = (3 * q).to(dtype), k.to(dtype), (v + 0.5).to(dtype)
    rule = rules(name, 2)
    out, lse = torch.ops.gpukern.flash_attn_fwd(q, k, v, **rule)
    exact, exact_lse = reference.flash_attn(
        *(x.double() for x in (q, k, v)), return_lse=True, **rule
    )
    return (out - exact).abs().max().item(), (lse - exact_lse).abs().max().item()


CASES = [
    (d, 8192, name)
    for d in (128, 64, 256)
    for name in ("causal", "causal+window1024", "causal+softcap50", "causal+alibi")
]
CASES += [
    (128, 8192, name)
    for name in (
        "full",
        "full+softcap50",
        "full+alibi",
        "causal+softcap2",
        "causal+softcap50+alibi",
        "causal+window128",
        "causal+window4096+softcap50",
    )
]
CASES += [
    (128, seq, name) for seq in (512, 2048, 4224, 16384) for name in ("causal", "causal+window1024")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    cases = [case for case in CASES if f"d{case[0]} {case[1]} {case[2]}".startswith(args.only)]
    for dtype in (torch.bfloat16, torch.float16):
        worst = {}
        for head_dim, _, name in cases:
            worst[head_dim, name] = errors(head_dim, dtype, name)
        print(
            dtype,
            "worst error of out and lse",
            *(f"{max(e[i] for e in worst.values()):.3g}" for i in (0, 1)),
        )
    runs = []
    for head_dim, seq, name in cases:
        heads, batch = HIDDEN // head_dim, TOKENS // seq
        q, k, v = (
            torch.randn(batch, heads, seq, head_dim, device="cuda").bfloat16() for _ in range(3)
        )
        rule = rules(name, heads)
        torch_gpukern.flash_attn(q, k, v, **rule)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                torch_gpukern.flash_attn(q, k, v, **rule)
        # the graph reads them as long as it is replayed
        runs.append((graph, 4.0 * batch * heads * head_dim * seen(seq, rule), [], (q, k, v, rule)))
    for _ in range(args.rounds):
        for i in random.sample(range(len(runs)), len(runs)):
            graph, _, times, _ = runs[i]
            time.sleep(PAUSE)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(), graph.replay(), end.record(), end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    rates = {
        case: flops / statistics.median(times) / 1e6
        for case, (_, flops, times, _) in zip(cases, runs)
    }
    for (head_dim, seq, name), rate in rates.items():
        plain = rates.get((head_dim, seq, name.split("+")[0]), math.nan)
        print(f"d{head_dim} {seq} {name:28} {rate:6.0f} TFLOP/s  {rate / plain:.3f} of plain")


if __name__ == "__main__":
    main()
