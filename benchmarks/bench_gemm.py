"""gemm beside torch.matmul (MKL and oneDNN on the CPU, cuBLAS on CUDA).

python benchmarks/bench_gemm.py [--quick] [--only square|skinny|odd|call|isa] [--device cpu|cuda]
"""

from __future__ import annotations

import sys

import shapes
import torch
from harness import DTYPES, Case, Run, arguments, isa_shares, open_device, overhead_facts
from torch import Tensor

import torch_gpukern


def make_inputs(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, layout: str):
    """a [M, K]; b [K, N], stored [K, N] for NN and [N, K] for NT."""
    a = torch.randn(m, k, device=device).to(dtype)
    if layout == "NT":
        return a, torch.randn(n, k, device=device).to(dtype).t()
    return a, torch.randn(k, n, device=device).to(dtype)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def case(group: str, m: int, k: int, n: int, dtype: str, device: torch.device, layout: str = "NN") -> Case:
    label = f"{m}" if m == k == n else f"{layout} {m}x{k}x{n}"
    torch_dtype = DTYPES[dtype]
    skinny = group == "skinny"
    return Case(
        group=group,
        label=label,
        dtype=dtype,
        make=lambda: make_inputs(m, k, n, torch_dtype, device, layout),
        ours=torch_gpukern.gemm,
        peers={"torch.matmul": torch.matmul},
        reference=exact,
        flops=2.0 * m * n * k,
        bytes=float((m * k + k * n + m * n) * torch_dtype.itemsize),
        rotate=skinny,
        unit="GB/s" if skinny else "GFLOP/s",
    )


def call_case(device: torch.device) -> Case:
    """Forward and backward of a call so small that only its cost of use counts."""

    def make():
        a, b = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
        return a.requires_grad_(), b.requires_grad_()

    def step(fn):
        def run(a: Tensor, b: Tensor):
            return torch.autograd.grad(fn(a, b).sum(), (a, b))

        return run

    def reference(a: Tensor, b: Tensor):
        a, b = (x.detach().double().requires_grad_() for x in (a, b))
        return torch.autograd.grad((a @ b).sum(), (a, b))

    return Case(
        group="call forward+backward",
        label="8x8x8",
        dtype="f32",
        make=make,
        ours=step(torch_gpukern.gemm),
        peers={"torch.matmul": step(torch.matmul)},
        reference=reference,
        flops=6.0 * 8**3,
        bytes=6.0 * 64 * 4,
    )


def main() -> None:
    args = arguments("gemm")
    device = open_device(args.device)
    run = Run("gemm", args, device)
    dtypes = ("f32", "bf16")
    for dtype in dtypes:
        for n in shapes.GEMM_SQUARE:
            run.add(case("square", n, n, n, dtype, device.device))
    for dtype in dtypes:
        for k, n in shapes.GEMM_SKINNY_KN:
            for layout in ("NN", "NT"):
                for m in shapes.GEMM_SKINNY_M:
                    run.add(case("skinny", m, k, n, dtype, device.device, layout))
    for dtype in dtypes:
        for n in shapes.GEMM_ODD:
            run.add(case("odd", n, n, n, dtype, device.device))
    run.add(call_case(device.device))
    if run.wants("call host time"):
        a, b = (torch.randn(8, 8, device=device.device) for _ in range(2))
        overhead_facts(run, "gemm", lambda: torch_gpukern.gemm(a, b), shapes.CALL_OVER_MUL)
    if run.wants("isa", slow=True) and device.kind == "cpu":
        n = shapes.GEMM_ISA_SIZE
        statement = (
            f"a, b = torch.randn({n}, {n}).to(dtype), torch.randn({n}, {n}).to(dtype)\n"
            "call = lambda: torch_gpukern.gemm(a, b)\n"
            f"flops = 2.0 * {n}**3"
        )
        isa_shares(run, f"gemm {n}", statement, shapes.ISA_SHARE["gemm"])
    run.finish(shapes.GEMM_BARS)


if __name__ == "__main__":
    sys.exit(main())
