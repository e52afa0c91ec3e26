# SPDX-License-Identifier: BSD-3-Clause
"""weight_gemm beside torch's own int4 product, and beside the bfloat16 products of the decoded
weight, torch's and ours.

python benchmarks/bench_weight_gemm.py [--quick] [--only int4 int8 e4m3 mxfp4] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference
from torch_gpukern.reference import quantised as reference_quantised

SIZES = {
    "cpu": [(1, 4096, 4096), (4, 4096, 4096), (64, 4096, 4096)],
    "cuda": [
        *((m, 4096, 4096) for m in (1, 16, 64, 512, 4096)),
        *((m, 8192, 8192) for m in (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)),
        *((m, 28672, 4096) for m in (1, 16, 64)),
    ],
}
OTHERS = {
    (1, 8192, 8192),
    (16, 8192, 8192),
    (64, 8192, 8192),
    (2048, 8192, 8192),
}  # what other formats than int4 run on CUDA


def int4_of_torch(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same weight as torch._weight_int4pack_mm takes it. Codes are 0 to 15, of which it
    subtracts 8. The even code of a pair is in the high half of a byte. A scale and an addend
    stand side by side.
    """
    codes = (q + 8).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    return packed, torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()


def case(m: int, n: int, k: int, format: str, device: torch.device) -> Case:
    group = 32 if format == "mxfp4" else 128
    torch_int4 = format == "int4" and device.type == "cuda" and m <= 64
    peers = {
        "torch.matmul, bf16": lambda a, packed, scale, w, *other: a @ w.mT,
        "ours in bf16": lambda a, packed, scale, w, *other: torch_gpukern.gemm(a, w.mT),
    }

    def make():
        low, high = {"int4": (-8, 8), "int8": (-128, 128), "e4m3": (-16, 17)}.get(format, (0, 16))
        q = torch.randint(low, high, (n, k), device=device, dtype=torch.int8)
        q = (
            q.float().to(torch.float8_e4m3fn)
            if format == "e4m3"
            else q.to(torch.uint8)
            if low == 0
            else q
        )
        scale = (torch.rand(k // group, n, device=device) + 0.5) / 64
        scale = (
            torch.exp2(scale.log2().round()).to(torch.float8_e8m0fnu)
            if format == "mxfp4"
            else scale.bfloat16()
        )
        w = reference_quantised.decoded(q, scale, format, dtype=torch.bfloat16)
        other = int4_of_torch(q, scale) if torch_int4 else ()
        return (
            torch.randn(m, k, device=device).bfloat16(),
            torch_gpukern.pack_weight(q, format),
            scale,
            w,
            *other,
        )

    if torch_int4:
        peers["torch._weight_int4pack_mm"] = lambda a, packed, scale, w, other, zeros: (
            torch._weight_int4pack_mm(a, other, 128, zeros)
        )

    return Case(
        group=format,
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, packed, scale, w, *other: torch_gpukern.weight_gemm(
            a, packed, scale, n, format
        ),
        peers=peers,
        reference=lambda a, packed, scale, w, *other: reference.gemm(
            a[:64].double(), w.double().mT
        ),
        compare=lambda out: out[:64],
        flops=2.0 * m * n * k,
        bytes=float(
            n * k * (1 if format in ("int8", "e4m3") else 0.5) + 2 * n * k / group + 2 * m * (n + k)
        ),
        rotate=m <= 64,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("weight_gemm")
    device = open_device(args.device)
    run = Run("weight_gemm", args, device)
    for format in ("int4", "int8", "e4m3", "mxfp4"):
        for m, n, k in SIZES[device.kind]:
            if device.kind == "cuda" and format != "int4" and (m, n, k) not in OTHERS:
                continue
            run.add(case(m, n, k, format, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
