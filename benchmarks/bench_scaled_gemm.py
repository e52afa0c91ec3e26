# SPDX-License-Identifier: BSD-3-Clause
"""scaled_gemm beside torch's _scaled_mm and _int_mm, and beside our own bfloat16 product of the
same shape.

python benchmarks/bench_scaled_gemm.py [--quick] [--only tensor row block mx int8] [--device
cpu|cuda]
"""

import sys

import torch
import torch.nn.functional as F
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
        *(
            (m, n, k)
            for n, k in ((4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336))
            for m in (1, 64)
        ),
        (16, 8192, 8192),
    ],
}
FORMS = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("1x128", "128x128"),
    "mx": ("1x32", "1x32"),
    "int8": ("row", "row"),
    "int8 block": ("1x128", "128x128"),
}


def torch_scaled(form: str, accumulate: str):
    """torch's product of the same operands."""
    if form == "int8":
        return lambda a, b, sa, sb, *_: (torch._int_mm(a, b).float() * sa * sb).bfloat16()
    if form == "block":
        from torch.nn.functional import ScalingType, scaled_mm

        return lambda a, b, sa, sb, sa_t, sb_t, *_: scaled_mm(
            a,
            b,
            sa_t,
            ScalingType.BlockWise1x128,
            sb_t,
            ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
    return lambda a, b, sa, sb: torch._scaled_mm(
        a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=accumulate == "fast"
    )


def as_torch_wants(sa: torch.Tensor, sb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales [M, K / 128] and [K / 128, N / 128] in the layouts that torch takes: the first
    M-major, the second K-major with K / 128 padded to a multiple of 4."""
    return sa.mT.contiguous().mT, F.pad(sb.mT, (0, -sb.shape[0] % 4)).mT[: sb.shape[0]]


def case(
    m: int, n: int, k: int, form: str, device: torch.device, accumulate: str = "precise"
) -> Case:
    dtype = torch.int8 if form.startswith("int8") else torch.float8_e4m3fn
    beside_bf16 = form in ("block", "mx", "int8 block")  # torch has no product for all sizes
    rows = slice(0, min(m, 64))

    def make():
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        a, sa = torch_gpukern.quantize(x, dtype, FORMS[form][0])
        b, sb = torch_gpukern.quantize(w, dtype, FORMS[form][1])
        sb = sb.mT if sb.dim() == 2 else sb
        wanted = as_torch_wants(sa, sb) if form == "block" else (sa, sb)
        more = (*wanted, x.bfloat16(), w.bfloat16()) if beside_bf16 else ()
        return a, b.mT, sa, sb, *more

    bf16 = {"ours in bf16": lambda a, b, sa, sb, sa_t, sb_t, x, w: torch_gpukern.gemm(x, w.mT)}
    return Case(
        group=form if accumulate == "precise" else f"{form}, fast",
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, b, sa, sb, *_: torch_gpukern.scaled_gemm(
            a, b, sa, sb, accumulate=accumulate
        ),
        peers=({} if form in ("mx", "int8 block") else {"torch": torch_scaled(form, accumulate)})
        | (bf16 if beside_bf16 else {}),
        optional=["torch"],
        reference=lambda a, b, sa, sb, *_: reference.scaled_gemm(
            a[rows],
            b,
            sa[rows] if sa.dim() and sa.shape[0] == m else sa,
            sb,
            out_dtype=torch.float64,
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
                continue  # _int_mm needs more rows
            both = form in ("tensor", "row") and device.kind == "cuda"
            # ours has one kernel for precise and fast below; torch's fast is the faster peer
            if not both or m > 64:
                run.add(case(m, n, k, form, device.device))
            if both:
                run.add(case(m, n, k, form, device.device, "fast"))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
