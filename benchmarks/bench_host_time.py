# SPDX-License-Identifier: BSD-3-Clause
"""Host time of an eager call on tiny tensors, beside PyTorch's own op of that kind: without
gradients, a forward that records one, and forward with backward.

The last group shows the floor of the road that our ops take. torch's boxed call is what every op of
a library goes through, and an autograd.Function is the only node that the stable ABI leaves to one
(torch 2.10 to 2.13).

Each round runs a block of every call, in an order that is drawn anew. On a machine that others use
the lower quantile says more than the median, so both are printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_gpukern as gk
from torch_gpukern.cli.terminal import table, with_progress

Call = Callable[[], object]
BLOCK_US = 200  # of a timed block: short beside a time slice of a machine that others use


def forward_backward(forward: Call, leaves: tuple[Tensor, ...], grad: Tensor) -> Call:
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def op_pairs(device: str) -> Iterator[tuple[str, Call, Call]]:
    """(label, ours, PyTorch's) of tensors that want no gradient."""
    x, w, bias = (torch.randn(s, device=device) for s in ((8, 8), (8, 8), (8,)))
    q = torch.randn(1, 2, 4, 16, device=device)
    yield "gemm", lambda: gk.gemm(x, w), lambda: torch.mm(x, w)
    yield "gemm, bias", lambda: gk.gemm(x, w, bias), lambda: torch.addmm(bias, x, w)
    yield "linear", lambda: gk.linear(x, w), lambda: F.linear(x, w)
    yield "rms_norm", lambda: gk.rms_norm(x, bias), lambda: F.rms_norm(x, (8,), bias)
    yield (
        "layer_norm",
        lambda: gk.layer_norm(x, bias, bias),
        lambda: F.layer_norm(x, (8,), bias, bias),
    )
    yield (
        "flash_attn",
        lambda: gk.flash_attn(q, q, q),
        lambda: F.scaled_dot_product_attention(q, q, q),
    )
    cache = torch.randn(4, 16, 2, 16, device=device)
    flat = cache.view(64, 2, 16)
    pages = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    lens = torch.full((1,), 20, dtype=torch.int32, device=device)
    token, slot = torch.randn(1, 2, 16, device=device), torch.tensor([3], device=device)

    def read_pages() -> Tensor:
        rows = cache[pages[0]].view(1, 64, 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(token[:, :, None], rows, rows)

    def write_rows() -> None:
        flat.index_copy_(0, slot, token)
        flat.index_copy_(0, slot, token)

    yield "paged_attn", lambda: gk.paged_attn(token, cache, cache, pages, lens), read_pages
    other = cache.clone()
    yield (
        "kv_cache_write",
        lambda: gk.kv_cache_write(token, token, cache, other, slot),
        write_rows,
    )


def gradient_pairs(device: str) -> Iterator[tuple[str, tuple[Tensor, ...], Tensor, Call, Call]]:
    """(label, leaves, gradient of the result, ours, PyTorch's)."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    x, w, one = leaf(8, 8), leaf(8, 8), leaf(8)
    grad = torch.ones(8, 8, device=device)
    yield "gemm", (x, w), grad, lambda: gk.gemm(x, w), lambda: torch.mm(x, w)
    yield "linear", (x, w), grad, lambda: gk.linear(x, w), lambda: F.linear(x, w)
    yield (
        "rms_norm",
        (x, one),
        grad,
        lambda: gk.rms_norm(x, one),
        lambda: F.rms_norm(x, (8,), one),
    )
    yield (
        "layer_norm",
        (x, one),
        grad,
        lambda: gk.layer_norm(x, one, one),
        lambda: F.layer_norm(x, (8,), one, one),
    )
    q, k, v = (leaf(1, 2, 4, 16) for _ in range(3))
    yield (
        "flash_attn",
        (q, k, v),
        torch.ones(1, 2, 4, 16, device=device),
        lambda: gk.flash_attn(q, k, v),
        lambda: F.scaled_dot_product_attention(q, k, v),
    )


class ProductInPython(torch.autograd.Function):
    """torch.mm with a node in Python."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.mm(a, b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return torch.mm(grad, b.mT), torch.mm(a.mT, grad)


def floor_pairs(device: str) -> Iterator[tuple[str, Call, Call]]:
    a, b = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    boxed = torch.ops.aten.mm.default._op
    yield "torch.mm as a library's op", lambda: boxed(a, b), lambda: torch.mm(a, b)
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    # apply without the preparation for torch.func, as our ops call it
    apply = super(torch.autograd.Function, ProductInPython).apply
    yield "torch.mm in a Function, forward", lambda: apply(x, w), lambda: torch.mm(x, w)
    grad = torch.ones(8, 8, device=device)
    yield (
        "torch.mm in a Function, both",
        forward_backward(lambda: apply(x, w), (x, w), grad),
        forward_backward(lambda: torch.mm(x, w), (x, w), grad),
    )


def rows_of(device: str) -> list[tuple[str, str, Call, Call]]:
    rows = [("no gradient", *pair) for pair in op_pairs(device)]
    for label, leaves, grad, ours, theirs in gradient_pairs(device):
        rows.append(("forward", label, ours, theirs))
        both = [forward_backward(call, leaves, grad) for call in (ours, theirs)]
        rows.append(("forward and backward", label, *both))
    return rows + [("floor", *pair) for pair in floor_pairs(device)]


def timed(call: Call, count: int, device: str) -> float:
    """us of a call, whose work on the device is not waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def measure(calls: list[Call], rounds: int, device: str) -> list[list[float]]:
    """us of a call in each round."""
    times: list[list[float]] = [[] for _ in calls]
    counts = []
    for call in calls:
        best = min(timed(call, 1, device) for _ in range(20))
        counts.append(max(1, round(BLOCK_US / best)))
    order = list(range(len(calls)))
    for _ in with_progress(range(rounds), "host time"):
        random.shuffle(order)
        for i in order:
            times[i].append(timed(calls[i], counts[i], device))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="host time of eager calls on tiny tensors")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--list", action="store_true", help="print the rows, measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(args.device)
    if args.list:
        for group in dict.fromkeys(row[0] for row in rows):
            print(f"{group}: {'; '.join(label for g, label, *_ in rows if g == group)}")
        return
    times = measure([call for row in rows for call in row[2:]], args.rounds, args.device)
    lines = [["case", "ours 5 %", "torch 5 %", "times", "ours median", "torch median", "times"]]
    for i, (group, label, *_) in enumerate(rows):
        cells = []
        for of in (lambda t: sorted(t)[len(t) // 20], statistics.median):
            ours, theirs = of(times[2 * i]), of(times[2 * i + 1])
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        lines.append([f"{group}: {label}", *cells])
    print(f"torch {torch.__version__}, {args.device}, us of a call, {args.rounds} rounds")
    print(table(lines))


if __name__ == "__main__":
    sys.exit(main())
