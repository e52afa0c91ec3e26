"""gemm beside torch.matmul (MKL and oneDNN on the CPU, cuBLAS on CUDA).

python benchmarks/bench_gemm.py [--quick] [--only square|skinny|odd|call|isa] [--device cpu|cuda]
"""

from __future__ import annotations

import sys

import shapes
import torch
import torch.nn.functional as F
from harness import DTYPES, Case, Run, arguments, isa_shares, open_device, overhead_facts
from torch import Tensor

import torch_gpukern


def make_inputs(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, layout: str):
    """a [M, K], b [K, N]; T: stored transposed."""
    a, b = ((m, k) if layout[0] == "N" else (k, m)), ((k, n) if layout[1] == "N" else (n, k))
    a, b = (torch.randn(*shape, device=device).to(dtype) for shape in (a, b))
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


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


def cuda_case(group: str, m: int, k: int, n: int, dtype: str, device: torch.device, layout: str = "NN", **options):
    """case() on a GPU: few rows rotate over cold weights, and a float64 product is cut to 256 rows."""
    made = case(group, m, k, n, dtype, device, layout)
    made.rotate = group.startswith("skinny")
    made.unit = "GB/s" if made.rotate else "GFLOP/s"
    made.reference = lambda a, b: exact(a[:256], b)
    made.compare = lambda out: out[:256]
    made.ours = lambda a, b: torch_gpukern.gemm(a, b, **options)
    return made


def fused_case(n: int, device: torch.device) -> Case:
    """gelu(x @ w + b) of a linear layer, beside PyTorch's two kernels and its own fusion."""
    made = cuda_case("bias + gelu", n, n, n, "bf16", device)
    bias = torch.randn(n, device=device).bfloat16()
    made.ours = lambda a, b: torch_gpukern.gemm(a, b, bias, activation="gelu_tanh")
    made.peers = {
        "gelu(addmm)": lambda a, b: F.gelu(torch.addmm(bias, a, b), approximate="tanh"),
        "_addmm_activation": lambda a, b: torch._addmm_activation(bias, a, b, use_gelu=True),
    }
    made.reference = lambda a, b: F.gelu(exact(a[:256], b) + bias.double(), approximate="tanh")
    return made


def cuda(run: Run, device: torch.device) -> None:
    for n in shapes.CUDA_GEMM_SMALL:
        run.add(cuda_case("small bf16", n, n, n, "bf16", device))
    for n in shapes.CUDA_GEMM_SQUARE:
        run.add(cuda_case("square bf16", n, n, n, "bf16", device))
    n = shapes.CUDA_GEMM_SQUARE[1]
    for layout in ("NT", "TN", "TT"):
        run.add(cuda_case("layouts bf16", n, n, n, "bf16", device, layout))
    run.add(cuda_case("f16", n, n, n, "f16", device))
    run.add(cuda_case("odd bf16", n + 1, n - 1, n + 3, "bf16", device))
    n = shapes.CUDA_GEMM_F32
    run.add(cuda_case("f32 ieee", n, n, n, "f32", device))
    torch.backends.cuda.matmul.allow_tf32 = True
    run.add(cuda_case("f32 tf32", n, n, n, "f32", device, fp32_precision="tf32"))
    torch.backends.cuda.matmul.allow_tf32 = False
    run.add(fused_case(n, device))
    for n, k in shapes.CUDA_GEMM_SKINNY_NK:
        for m in shapes.CUDA_GEMM_SKINNY_M:
            for layout in ("NT", "NN"):
                group = f"skinny {n}x{k}, M {'<= 16' if m <= 16 else '> 16'}"
                run.add(cuda_case(group, m, k, n, "bf16", device, layout))
    if run.wants("call host time"):
        a, b = (torch.randn(8, 8, device=device) for _ in range(2))
        overhead_facts(run, "gemm", lambda: torch_gpukern.gemm(a, b), shapes.CUDA_CALL)
    run.finish(shapes.CUDA_GEMM_BARS)


def main() -> None:
    args = arguments("gemm")
    device = open_device(args.device)
    run = Run("gemm", args, device)
    if device.kind == "cuda":
        return cuda(run, device.device)
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
