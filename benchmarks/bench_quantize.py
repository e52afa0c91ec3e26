# SPDX-License-Identifier: BSD-3-Clause
"""quantize beside eager PyTorch and torch.compile of the same definition; the limit is a copy of as many bytes.

python benchmarks/bench_quantize.py [--quick] [--only row 1x128 128x128 tensor 1x32] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference

SIZES = {"cpu": [(1024, 4096)], "cuda": [(8192, 4096), (16384, 7168), (64, 4096)]}


def case(m: int, k: int, granularity: str, device: torch.device) -> Case:
    dtype = torch.float8_e4m3fn

    # the codes and scales are timed; what they are worth is judged decoded
    return Case(
        group=granularity,
        label=f"{m}x{k}",
        dtype="bf16",
        make=lambda: (torch.randn(m, k, device=device).bfloat16(),),
        ours=lambda x: torch_gpukern.quantize(x, dtype, granularity),
        peers={"eager": lambda x: reference.quantize(x, dtype, granularity)},
        reference=lambda x: reference.dequantize(*reference.quantize(x.double(), dtype, granularity)),
        compare=lambda out: reference.dequantize(*out),
        limits={"copy of as many bytes": lambda x: x.view(torch.uint8)[: 3 * m // 4].clone()},
        flops=2.0 * m * k,
        bytes=3.0 * m * k,
        rotate=True,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("quantize")
    device = open_device(args.device)
    run = Run("quantize", args, device)
    for granularity in ("row", "1x128", "128x128", "tensor", "1x32"):
        for m, k in SIZES[device.kind]:
            run.add(case(m, k, granularity, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
