# SPDX-License-Identifier: BSD-3-Clause
"""sparse_gemm beside our own dense product of the same weight.

python benchmarks/bench_sparse_gemm.py [--quick] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern

SIZES = {"cpu": [(16, 1024, 1024), (256, 1024, 1024)], "cuda": [(4096, 4096, 4096)]}


def case(m: int, n: int, k: int, device: torch.device) -> Case:
    def make():
        w = torch.randn(n, k // 4, 4, device=device)
        w = w.masked_fill(w.abs().argsort(-1).argsort(-1) < 2, 0).reshape(n, k).bfloat16()
        return torch.randn(m, k, device=device).bfloat16(), *torch_gpukern.sparse_pack(w), w

    return Case(
        group="bf16",
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, values, meta, w: torch_gpukern.sparse_gemm(a, values, meta),
        peers={"dense": lambda a, values, meta, w: torch_gpukern.gemm(a, w.mT)},
        reference=lambda a, values, meta, w: a.double() @ w.double().mT,
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + n * k / 2 + m * n),
    )


def main() -> None:
    args = arguments("sparse_gemm")
    device = open_device(args.device)
    run = Run("sparse_gemm", args, device)
    for m, n, k in SIZES[device.kind]:
        run.add(case(m, n, k, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
