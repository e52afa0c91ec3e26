# SPDX-License-Identifier: BSD-3-Clause
"""scaled_gemm beside torch's _scaled_mm and _int_mm, and beside our own bfloat16 product of the same shape.

python benchmarks/bench_scaled_gemm.py [--quick] [--only tensor row block int8] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference

SIZES = {
    "cpu": [(1, 4096, 4096), (16, 4096, 4096), (256, 2048, 2048), (1024, 1024, 1024)],
    "cuda": [
        (1024,) * 3,
        (2048,) * 3,
        (4096,) * 3,
        (8192,) * 3,
        (4096, 7168, 16384),
        (16, 4096, 4096),
        (64, 28672, 4096),
    ],
}
FORMS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128"), "int8": ("row", "row")}


def torch_scaled(form: str):
    """torch's product of the same operands; None where it has none."""
    if form == "int8":
        return lambda a, b, sa, sb: (torch._int_mm(a, b).float() * sa * sb).bfloat16()
    if form == "block":
        return None
    return lambda a, b, sa, sb: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16)


def case(m: int, n: int, k: int, form: str, device: torch.device, accumulate: str = "precise") -> Case:
    dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
    rows = slice(0, min(m, 64))

    def make():
        a, sa = torch_gpukern.quantize(torch.randn(m, k, device=device), dtype, FORMS[form][0])
        b, sb = torch_gpukern.quantize(torch.randn(n, k, device=device), dtype, FORMS[form][1])
        return a, b.mT, sa, sb.mT if sb.dim() == 2 else sb

    peer = torch_scaled(form)
    bf16 = {"ours in bf16": lambda a, b, sa, sb: torch_gpukern.gemm(a.bfloat16(), b.bfloat16())}
    return Case(
        group=form if accumulate == "precise" else f"{form}, fast",
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, b, sa, sb: torch_gpukern.scaled_gemm(a, b, sa, sb, accumulate=accumulate),
        peers={"torch": peer} if peer else bf16,
        optional=["torch"],
        reference=lambda a, b, sa, sb: reference.scaled_gemm(
            a[rows], b, sa[rows] if sa.dim() and sa.shape[0] == m else sa, sb, out_dtype=torch.float64
        ),
        compare=lambda out: out[rows],
        flops=2.0 * m * n * k,
        bytes=float(m * k + n * k + 2 * m * n),
        rotate=m <= 64,
    )


def main() -> None:
    args = arguments("scaled_gemm")
    device = open_device(args.device)
    run = Run("scaled_gemm", args, device)
    for form in FORMS:
        for m, n, k in SIZES[device.kind]:
            if form == "int8" and device.kind == "cuda" and m <= 16:
                continue  # _int_mm wants more rows
            run.add(case(m, n, k, form, device.device))
            if form in ("tensor", "row") and device.kind == "cuda":
                run.add(case(m, n, k, form, device.device, "fast"))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
