# SPDX-License-Identifier: BSD-3-Clause
"""grouped_gemm beside torch's _grouped_mm, where it runs, and beside a loop of products.

python benchmarks/bench_grouped_gemm.py [--quick] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern

SIZES = {"cpu": [(8, 64, 1024, 1024)], "cuda": [(8, 1024, 4096, 4096), (32, 128, 4096, 2048)]}


def loop(a, b, offs, ends):
    return torch.cat([a[lo:hi] @ b[g] for g, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False))])


def case(groups: int, rows: int, n: int, k: int, device: torch.device) -> Case:
    ends = [rows * (g + 1) for g in range(groups)]

    def make():
        a, b = (
            torch.randn(groups * rows, k, device=device).bfloat16(),
            torch.randn(groups, n, k, device=device).bfloat16(),
        )
        return a, b.mT, torch.tensor(ends, dtype=torch.int32, device=device)

    return Case(
        group="bf16",
        label=f"{groups} of {rows}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=torch_gpukern.grouped_gemm,
        peers={
            "loop": lambda a, b, offs: loop(a, b, offs, ends),
            "torch._grouped_mm": lambda a, b, offs: torch._grouped_mm(a, b, offs),
        },
        optional=["torch._grouped_mm"],
        reference=lambda a, b, offs: loop(a.double(), b.double(), offs, ends),
        flops=2.0 * groups * rows * n * k,
        bytes=2.0 * groups * (rows * (n + k) + n * k),
    )


def main() -> None:
    args = arguments("grouped_gemm")
    device = open_device(args.device)
    run = Run("grouped_gemm", args, device)
    for groups, rows, n, k in SIZES[device.kind]:
        run.add(case(groups, rows, n, k, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
