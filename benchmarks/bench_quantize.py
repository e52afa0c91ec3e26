# SPDX-License-Identifier: BSD-3-Clause
"""quantize, silu_mul_quantize, rms_norm_quantize and dequantize beside the same definition in eager
PyTorch.

python benchmarks/bench_quantize.py [--quick] [--only row 1x128 128x128 tensor 1x32 silu_mul
rms_norm dequantize] [--device cpu|cuda]

The limit is a copy that moves as many bytes. A single scale for a whole tensor needs two passes,
one for amax and one for the codes. A tensor larger than L2 then moves 5 bytes for each 3 that are
counted. Rows that fill the device have a bar.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from harness import Bar, Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference

SIZES = {"cpu": [(1024, 4096)], "cuda": [(8192, 4096), (16384, 7168), (64, 4096)]}
E4M3 = torch.float8_e4m3fn


@dataclass
class Form:
    """Times calls on `inputs` tensors [m, k]. each: bytes read and written for each
    value."""

    group: str
    inputs: int
    each: float
    ours: Callable
    eager: Callable
    reference: Callable
    compare: Callable = lambda out: reference.dequantize(*out[:2])


def forms(m: int, k: int, device: torch.device) -> Iterator[Form]:
    weight = torch.ones(k, device=device, dtype=torch.bfloat16)
    scale = torch.rand(m, -(-k // 128), device=device)

    def plain(granularity, wide=False):
        def call(x):
            return reference.quantize(x.double() if wide else x, E4M3, granularity)

        return call

    def decoded(call):
        return lambda *x: reference.dequantize(*call(*x)[:2])

    for g in ("row", "1x128", "128x128", "tensor", "1x32"):
        yield Form(
            g,
            1,
            3.0,
            partial(torch_gpukern.quantize, dtype=E4M3, granularity=g),
            plain(g),
            decoded(plain(g, True)),
        )
    for g in ("row", "1x128"):
        more = {"dtype": E4M3, "granularity": g}
        yield Form(
            f"silu_mul {g}",
            2,
            5.0,
            partial(torch_gpukern.silu_mul_quantize, **more),
            lambda x, y, g=g: plain(g)(F.silu(x.float()) * y.float()),
            decoded(partial(reference.silu_mul_quantize, **more)),
        )
    yield Form(
        "rms_norm row",
        2,
        7.0,
        lambda x, y: torch_gpukern.rms_norm_quantize(x, weight, y),
        lambda x, y: plain("row")(F.rms_norm((x + y).float(), (k,), weight.float(), 1e-6)),
        decoded(lambda x, y: reference.rms_norm_quantize(x, weight, y)),
    )

    def decode(module, dtype):
        def call(x):
            return module.dequantize(
                x.view(-1)[: m * k // 2].view(E4M3).view(m, k), scale, dtype=dtype
            )

        return call

    yield Form(
        "dequantize 1x128",
        1,
        3.0,
        decode(torch_gpukern, torch.bfloat16),
        decode(reference, torch.bfloat16),
        lambda x: decode(reference, torch.float64)(x).nan_to_num(),
        lambda out: out.nan_to_num(),  # the codes are random bytes, so some decode to NaN
    )


def case(form: Form, m: int, k: int, device: torch.device) -> Case:
    def make():
        drawn = [torch.randn(m, k, device=device).bfloat16() for _ in range(form.inputs)]
        return *drawn, torch.empty(int(form.each * m * k) // 4, dtype=torch.bfloat16, device=device)

    fills = device.type == "cuda" and m > 64
    return Case(
        group=form.group,
        label=f"{m}x{k}",
        dtype="bf16",
        make=make,
        # codes and scales are timed; the error is judged on decoded values
        ours=lambda *x: form.ours(*x[:-1]),
        peers={"eager": lambda *x: form.eager(*x[:-1])},
        reference=lambda *x: form.reference(*x[:-1]),
        compare=form.compare,
        limits={"copy of as many bytes": lambda *x: x[-1].clone()},
        bar=Bar(share=0.85) if fills and form.group != "tensor" else Bar(),
        flops=2.0 * m * k,
        bytes=form.each * m * k,
        rotate=True,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("quantize")
    device = open_device(args.device)
    run = Run("quantize", args, device)
    sizes = SIZES[device.kind]
    for of_sizes in zip(*(forms(m, k, device.device) for m, k in sizes), strict=True):
        for (m, k), form in zip(sizes, of_sizes, strict=True):
            run.add(case(form, m, k, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
