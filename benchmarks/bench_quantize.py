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

    def eager(x):
        return reference.quantize(x, dtype, granularity)

    return Case(
        group=granularity,
        label=f"{m}x{k}",
        dtype="bf16",
        make=lambda: (torch.randn(m, k, device=device).bfloat16(),),
        ours=lambda x: reference.dequantize(*torch_gpukern.quantize(x, dtype, granularity)),
        peers={"eager": lambda x: reference.dequantize(*eager(x))},
        reference=lambda x: reference.dequantize(*eager(x.double())),
        flops=2.0 * m * k,
        bytes=3.0 * m * k,
        rotate=True,
        unit="GB/s",
    )


def alone(made: Case, granularity: str) -> Case:
    """The codes alone are timed; what they are worth was judged by the case that decodes them."""
    dtype = torch.float8_e4m3fn
    made.label += " codes"
    made.ours = lambda x: torch_gpukern.quantize(x, dtype, granularity)[0].view(torch.uint8)
    made.peers = {"eager": lambda x: reference.quantize(x, dtype, granularity)[0].view(torch.uint8)}
    made.reference = None
    made.limits = {"copy": lambda x: x.clone()}
    return made


def main() -> None:
    args = arguments("quantize")
    device = open_device(args.device)
    run = Run("quantize", args, device)
    for granularity in ("row", "1x128", "128x128", "tensor", "1x32"):
        for m, k in SIZES[device.kind]:
            run.add(alone(case(m, k, granularity, device.device), granularity))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
