# SPDX-License-Identifier: BSD-3-Clause
"""Dropout and the AdamW step beside torch's own. On CUDA --compile adds torch.compile of torch's
own.

python benchmarks/bench_train.py [--quick] [--only dropout bias_gelu_dropout adamw] [--device
cpu|cuda] [--compile]

GB/s counts the bytes that an op must move: inputs read once, results written once. On CUDA operands
are cold.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from bench_rows import run_all
from harness import DTYPES, Case
from torch import Tensor

import torch_gpukern as gk

SHAPES = {"cpu": (1024, 4096), "cuda": (8192, 4096)}
PARAMETERS = {"cpu": (4, 512), "cuda": (64, 2048)}  # tensors of n x n


def cases(device: torch.device, quick: bool, compiled: bool):
    for dtype in ("bf16",) if quick else ("f32", "bf16"):
        of = {"device": device, "dtype": DTYPES[dtype]}
        yield from dropout_cases(*SHAPES[device.type], dtype, of, compiled)
        yield adamw_case(*PARAMETERS[device.type], dtype, of)


def dropout_cases(m: int, n: int, dtype: str, of: dict, compiled: bool):
    """Every contestant draws its own mask, so the mean square is compared: that of the kept values,
    times 1 / (1 - p)."""
    seed = torch.tensor([1, 2], device=of["device"])
    ops = {
        "dropout": (
            lambda x, r, b: gk.dropout(x, 0.1, seed),
            lambda x, r, b: F.dropout(x, 0.1),
            2,
            lambda x, r, b: (x, 0 * x),
        ),
        "dropout_add": (
            lambda x, r, b: gk.dropout_add(x, r, 0.1, seed),
            lambda x, r, b: F.dropout(x, 0.1) + r,
            3,
            lambda x, r, b: (x, r),
        ),
        "bias_gelu_dropout": (
            lambda x, r, b: gk.bias_gelu_dropout(x, b, 0.1, seed),
            lambda x, r, b: F.dropout(F.gelu(x + b), 0.1),
            2,
            lambda x, r, b: (F.gelu(x + b), 0 * x),
        ),
    }

    def square(out: Tensor) -> Tensor:
        return out.double().square().mean()

    for name, (ours, theirs, tensors, parts) in ops.items():

        def exact(*inputs: Tensor, parts=parts) -> Tensor:
            dropped, added = parts(*(x.double() for x in inputs))
            return square(dropped) / 0.9 + square(added)

        peers = {"torch": theirs}
        if compiled:
            peers["torch.compile"] = torch.compile(theirs, dynamic=False)
        yield Case(
            group=name,
            label=f"{m}x{n}",
            dtype=dtype,
            make=lambda: (torch.randn(m, n, **of), torch.randn(m, n, **of), torch.randn(n, **of)),
            ours=ours,
            peers=peers,
            reference=exact,
            compare=square,
            flops=0.0,
            bytes=float(tensors * m * n * DTYPES[dtype].itemsize),
            rotate=True,
            unit="GB/s",
        )


def adamw_case(many: int, n: int, dtype: str, of: dict) -> Case:
    """The op beside torch's fused one, without the host work of either optimiser. Both write into
    their inputs, so torch's error is that of a second step."""
    numbers = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, maximize=False)

    def make():
        p, g, m = (torch.randn(many, n, n, **of) for _ in range(3))
        return p, g, m, m * m, torch.ones(many, device=of["device"])

    def lists(*tensors: Tensor) -> list[list[Tensor]]:
        return [list(x.unbind()) for x in tensors]

    def ours(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        torch.ops.gpukern.adamw_(*lists(p, g, m, v), [], [], list(steps.unbind()), **numbers)
        return p

    def fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        torch._fused_adamw_(*lists(p, g, m, v), [], list(steps.unbind()), amsgrad=False, **numbers)
        return p

    def exact(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        p, g, m, v = (x.double() for x in (p, g, m, v))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p * (1 - 1e-5) - 1e-3 / 0.1 * m / ((v / 0.001).sqrt() + 1e-8)  # the first step

    return Case(
        group="adamw",
        label=f"{many} x {n}x{n}",
        dtype=dtype,
        make=make,
        ours=ours,
        peers={"torch": fused},
        reference=exact,
        flops=0.0,
        bytes=7.0 * many * n * n * DTYPES[dtype].itemsize,
        unit="GB/s",
    )


def main() -> None:
    run_all("train", cases)


if __name__ == "__main__":
    sys.exit(main())
