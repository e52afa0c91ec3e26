# SPDX-License-Identifier: BSD-3-Clause
"""quantize, silu_mul_quantize, rms_norm_quantize and dequantize beside eager PyTorch of the same definition; the limit is a copy
that moves as many bytes.

python benchmarks/bench_quantize.py [--quick] [--only row 1x128 128x128 tensor 1x32 silu_mul rms_norm dequantize] [--device cpu|cuda]

One scale for a whole tensor needs it twice, for amax and for codes: of a tensor larger than the L2 that is 5 bytes for the 3 that
are counted. Rows that fill the device have a bar.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Bar, Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference

SIZES = {"cpu": [(1024, 4096)], "cuda": [(8192, 4096), (16384, 7168), (64, 4096)]}
E4M3 = torch.float8_e4m3fn


def case(
    group: str,
    m: int,
    k: int,
    inputs: int,
    ours: Callable,
    eager: Callable,
    each: float,
    bar: bool,
    device: torch.device,
) -> Case:
    """inputs: tensors [m, k] that are read; each: bytes a value of the result, read and written."""

    def make():
        drawn = [torch.randn(m, k, device=device).bfloat16() for _ in range(inputs)]
        return *drawn, torch.empty(int(each * m * k) // 4, dtype=torch.bfloat16, device=device)

    return Case(
        group=group,
        label=f"{m}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda *x: ours(*x[:-1]),
        peers={"eager": lambda *x: eager(*x[:-1])},
        reference=None,  # codes and scales are held to those of eager, bit for bit, by tests
        limits={"copy": lambda *x: x[-1].clone()},
        bar=Bar(share=0.85) if bar else Bar(),
        flops=2.0 * m * k,
        bytes=each * m * k,
        rotate=True,
        unit="GB/s",
    )


def cases(m: int, k: int, device: torch.device):
    """group, inputs, bytes a value, ours, eager."""

    weight = torch.ones(k, device=device, dtype=torch.bfloat16)

    def plain(module, granularity):
        return lambda x: module.quantize(x, E4M3, granularity)[0].view(torch.uint8)

    def silu(granularity):
        return lambda x, y: torch_gpukern.silu_mul_quantize(x, y, E4M3, granularity)[0].view(torch.uint8)

    def eager_silu(granularity):
        return lambda x, y: plain(reference, granularity)(F.silu(x.float()) * y.float())

    def norm(x, y):
        return torch_gpukern.rms_norm_quantize(x, weight, y, 1e-6, E4M3, "row")[0].view(torch.uint8)

    def eager_norm(x, y):
        return plain(reference, "row")(F.rms_norm((x + y).float(), (k,), weight.float(), 1e-6))

    def decode(module):
        def call(x):
            codes = x.view(-1)[: m * k // 2].view(E4M3).view(m, k)  # whatever the bytes are
            return module.dequantize(codes, scale, dtype=torch.bfloat16)

        scale = torch.rand(m, -(-k // 128), device=device)
        return call

    for granularity in ("row", "1x128", "128x128", "tensor", "1x32"):
        yield granularity, 1, 3.0, plain(torch_gpukern, granularity), plain(reference, granularity)
    for granularity in ("row", "1x128"):
        yield f"silu_mul {granularity}", 2, 5.0, silu(granularity), eager_silu(granularity)
    yield "rms_norm row", 2, 7.0, norm, eager_norm
    yield "dequantize 1x128", 1, 3.0, decode(torch_gpukern), decode(reference)


def main() -> None:
    args = arguments("quantize")
    device = open_device(args.device)
    run = Run("quantize", args, device)
    sizes = SIZES[device.kind]
    for of_sizes in zip(*(list(cases(m, k, device.device)) for m, k in sizes), strict=True):
        for (m, k), (group, inputs, each, ours, eager) in zip(sizes, of_sizes, strict=True):
            bar = device.kind == "cuda" and m > 64 and group != "tensor"
            run.add(case(group, m, k, inputs, ours, eager, each, bar, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
