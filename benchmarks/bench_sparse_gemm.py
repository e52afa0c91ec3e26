# SPDX-License-Identifier: BSD-3-Clause
"""sparse_gemm beside the dense products of the same weight, ours and torch's, and beside cuSPARSELt
through torch.

python benchmarks/bench_sparse_gemm.py [--quick] [--only bf16 f16 e4m3 int8] [--device cpu|cuda]
"""

import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern

SIZES = {
    "cpu": [(16, 1024, 1024), (256, 1024, 1024)],
    "cuda": [(2048,) * 3, (4096,) * 3, (8192,) * 3, (64, 8192, 8192)],
}
DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e4m3, fast": torch.float8_e4m3fn,
    "int8": torch.int8,
}
ROWS = 64  # rows that are compared in float64


def case(name: str, m: int, n: int, k: int, device: torch.device) -> Case:
    dtype = DTYPES[name]
    eight = dtype.itemsize == 1
    how = {"accumulate": "fast"} if "fast" in name else {}

    def make():
        w = torch.randn(n, k // 4, 4, device=device)
        w = w.masked_fill(w.abs().argsort(-1).argsort(-1) < 2, 0).reshape(n, k)
        a = torch.randn(m, k, device=device)
        if dtype is torch.int8:
            a, w = (a * 30).clamp(-127, 127), (w * 30).clamp(-127, 127)
        w = w.to(dtype)
        one = torch.ones((), device=device)
        packed = (torch._cslt_compress(w),) if device.type == "cuda" else ()
        return a.to(dtype), *torch_gpukern.sparse_pack(w), w, one, *packed

    def dense(a, values, meta, w, one, *_):
        return (
            torch_gpukern.scaled_gemm(a, w.mT, one, one, **how)
            if eight
            else torch_gpukern.gemm(a, w.mT)
        )

    def dense_of_torch(a, values, meta, w, one, *_):
        if dtype is torch.int8:
            return torch._int_mm(a, w.mT)
        if not eight:
            return a @ w.mT
        return torch._scaled_mm(
            a, w.mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=bool(how)
        )

    def sparse_of_torch(a, values, meta, w, one, packed):
        out = torch.bfloat16 if eight else None
        return torch._cslt_sparse_mm(packed, a.mT, out_dtype=out, transpose_result=True)

    peers = {"ours, dense": dense}
    if device.type == "cuda":
        peers |= {"torch, dense": dense_of_torch, "torch._cslt_sparse_mm": sparse_of_torch}
    return Case(
        group=name,
        label=f"{m}x{n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, values, meta, *_: torch_gpukern.sparse_gemm(a, values, meta, **how),
        peers=peers,
        optional=["torch, dense", "torch._cslt_sparse_mm"],
        reference=lambda a, values, meta, w, *_: a[:ROWS].double() @ w.double().mT,
        compare=lambda out: out[:ROWS],
        flops=2.0 * m * n * k,
        bytes=float(dtype.itemsize * (m * k + n * k / 2) + n * k / 8 + 2 * m * n),
        rotate=m <= 64,
    )


def main() -> None:
    args = arguments("sparse_gemm")
    device = open_device(args.device)
    run = Run("sparse_gemm", args, device)
    for name in DTYPES if device.kind == "cuda" else ("bf16",):
        for m, n, k in SIZES[device.kind]:
            run.add(case(name, m, n, k, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
