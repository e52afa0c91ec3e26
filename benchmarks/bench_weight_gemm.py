# SPDX-License-Identifier: BSD-3-Clause
"""weight_gemm beside the bfloat16 product of the decoded weight.

python benchmarks/bench_weight_gemm.py [--quick] [--only int4 int8 mxfp4] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference, reference_quantised

SIZES = {
    "cpu": [(1, 4096, 4096), (4, 4096, 4096), (64, 4096, 4096)],
    "cuda": [(1, 8192, 8192), (16, 8192, 8192), (64, 8192, 8192)],
}


def case(m: int, n: int, k: int, format: str, device: torch.device) -> Case:
    group = 32 if format == "mxfp4" else 128

    def make():
        low, high = {"int4": (-8, 8), "int8": (-128, 128)}.get(format, (0, 16))
        q = torch.randint(low, high, (n, k), device=device).to(torch.uint8 if low == 0 else torch.int8)
        scale = (torch.rand(k // group, n, device=device) + 0.5) / 64
        scale = torch.exp2(scale.log2().round()) if format == "mxfp4" else scale.bfloat16()
        w = reference_quantised.decoded(q, scale, format, dtype=torch.bfloat16)
        return torch.randn(m, k, device=device).bfloat16(), torch_gpukern.pack_weight(q, format), scale, w

    return Case(
        group=format,
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, packed, scale, w: torch_gpukern.weight_gemm(a, packed, scale, n, format),
        peers={"torch.matmul, bf16": lambda a, packed, scale, w: a @ w.mT},
        reference=lambda a, packed, scale, w: reference.gemm(a.double(), w.double().mT),
        flops=2.0 * m * n * k,
        bytes=float(n * k * (1 if format == "int8" else 0.5) + 2 * n * k / group + 2 * m * (n + k)),
        rotate=m <= 64,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("weight_gemm")
    device = open_device(args.device)
    run = Run("weight_gemm", args, device)
    for format in ("int4", "int8", "mxfp4"):
        for m, n, k in SIZES[device.kind]:
            run.add(case(m, n, k, format, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
