# SPDX-License-Identifier: BSD-3-Clause
"""gemm beside torch.matmul: MKL and oneDNN on the CPU, cuBLAS on CUDA.

python benchmarks/bench_gemm.py [--quick] [--only square skinny odd call isa] [--device cpu|cuda]
python benchmarks/bench_gemm.py --device cuda [--quick] [--quack default|tuned|none]
    [--only square tall skinny layouts f16 f32 LoRA router unaligned gelu call]
python benchmarks/bench_gemm.py [--device cpu|cuda] --random 300 --seed 7

On CUDA in 16 bits, quack and our own gemm in Triton (peers/) join if they import. The lines of code
of ours and of the one in Triton are stored beside the rates.

A quick run on CUDA starts no row after a minute (--budget). --rows selects rows of a group by their
label: --only skinny --rows NT. On CUDA, products of small M, LoRA and router products rotate over
cold operands. All others find their operands where the last call left them. --random measures
random products instead and reports the spread of their ratios (gemm_random.py).
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

import gemm_random
import peers
import shapes
import torch
import torch.nn.functional as F
from harness import DTYPES, Case, Run, arguments, isa_shares, open_device, overhead_facts
from torch import Tensor

import torch_gpukern


def make_inputs(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, layout: str):
    """a [M, K] and b [K, N]. A T in the layout means that the operand is stored transposed."""
    a, b = ((m, k) if layout[0] == "N" else (k, m)), ((k, n) if layout[1] == "N" else (n, k))
    a, b = (torch.randn(*shape, device=device).to(dtype) for shape in (a, b))
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def case(
    group: str, m: int, k: int, n: int, dtype: str, device: torch.device, layout: str = "NN"
) -> Case:
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
    """Forward and backward of a call so small that only the cost of a call counts."""

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


def sample(size: int, device: torch.device) -> Tensor:
    """At most 128 indices of a dimension, with both ends among them."""
    return (
        torch.linspace(0, size - 1, min(size, 128), device=device, dtype=torch.float64)
        .round()
        .long()
    )


def cuda_case(
    group: str,
    m: int,
    k: int,
    n: int,
    dtype: str,
    device: torch.device,
    layout: str = "NN",
    **options,
):
    """case() on a GPU. Memory-bound cases rotate over cold operands, and the float64 product covers
    a sample of rows and columns."""
    made = case(group, m, k, n, dtype, device, layout)
    made.rotate = group.startswith(("skinny", "LoRA", "router"))
    made.unit = "GB/s" if made.rotate else "GFLOP/s"
    if m == k == n and layout != "NN":
        made.label = f"{layout} {m}"
    rows, columns = sample(m, device), sample(n, device)
    made.reference = lambda a, b: exact(a[rows], b[:, columns])
    made.compare = lambda out: out[rows][:, columns]
    made.ours = lambda a, b: torch_gpukern.gemm(a, b, **options)
    return made


def beside_quack(made: Case, how: str) -> Case:
    """Adds quack's gemm (CuTe DSL) as a peer if it imports. Its kernels are compiled, and tuned if
    asked, at the first call of a shape."""

    def quack(a: Tensor, b: Tensor) -> Tensor:
        from quack.gemm_interface import gemm

        return gemm(a, b, tuned=how == "tuned")

    if how != "none" and find_spec("quack"):
        name = "quack, tuned" if how == "tuned" else "quack"
        made.peers[name] = quack
        made.optional = [name]
    return made


def beside_triton(made: Case) -> Case:
    """Adds our own gemm in Triton (peers/triton_gemm.py) as a peer if Triton imports. It is tuned
    at the first call of a shape."""

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        from peers.triton_gemm import gemm

        return gemm(a, b)

    if peers.HAVE_TRITON:
        made.peers["Triton"] = theirs
        made.optional = [*made.optional, "Triton"]
    return made


def tf32_case(group: str, m: int, k: int, n: int, layout: str, device: torch.device) -> Case:
    made = cuda_case(group, m, k, n, "f32", device, layout, fp32_precision="tf32")
    made.dtype = "tf32"  # the roofline is that of TF32

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        out = torch.matmul(a, b)
        torch.backends.cuda.matmul.allow_tf32 = False
        return out

    made.peers = {"torch.matmul": theirs}
    return made


def fused_case(n: int, device: torch.device) -> Case:
    """gelu(x @ w + b) of a linear layer, beside PyTorch's two and three kernels and its own fusion.
    cuBLAS's product alone is the limit."""
    made = cuda_case("bias + gelu", n, n, n, "bf16", device)
    rows, columns = sample(n, device), sample(n, device)
    bias = torch.randn(n, device=device).bfloat16()
    made.ours = lambda a, b: torch_gpukern.gemm(a, b, bias, activation="gelu_tanh")
    made.peers = {
        "gelu(addmm)": lambda a, b: F.gelu(torch.addmm(bias, a, b), approximate="tanh"),
        "_addmm_activation": lambda a, b: torch._addmm_activation(bias, a, b, use_gelu=True),
        "mm + add + gelu": lambda a, b: F.gelu(torch.mm(a, b) + bias, approximate="tanh"),
    }
    made.limits = {"mm alone": torch.mm}
    made.bar = shapes.CUDA_GEMM_FUSED_BAR
    made.reference = lambda a, b: F.gelu(
        exact(a[rows], b[:, columns]) + bias[columns].double(), approximate="tanh"
    )
    return made


def beside_aligned(
    label: str, odd: tuple, aligned: tuple, device: torch.device, place=lambda x: x, layout="NN"
) -> Case:
    """A product whose sizes or addresses allow no vector loads. The limit is ours on the aligned
    neighbour; `odd` and `aligned` are (M, N, K). place(x) returns the values of x, as it is stored,
    at other addresses. If one of the two is longer along K, its extra values are 0, so that both
    results agree where they overlap.
    """
    (m, n, k), (m_al, n_al, k_al) = odd, aligned
    made = cuda_case("unaligned bf16", m, k, n, "bf16", device)
    made.label, made.rotate = label, m <= 64
    made.unit = "GB/s" if made.rotate else "GFLOP/s"
    rows, columns = sample(min(m, m_al), device), sample(min(n, n_al), device)

    def make():
        a, b = make_inputs(max(m, m_al), max(k, k_al), max(n, n_al), torch.bfloat16, device, "NN")
        a[:, min(k, k_al) :], b[min(k, k_al) :] = 0, 0

        def stored(pair: tuple[Tensor, Tensor], place) -> list[Tensor]:
            return [
                place(x.contiguous()) if side == "N" else place(x.mT.contiguous()).mT
                for x, side in zip(pair, layout, strict=True)
            ]

        return *stored((a[:m, :k], b[:k, :n]), place), *stored(
            (a[:m_al, :k_al], b[:k_al, :n_al]), lambda x: x
        )

    made.make = make
    made.ours = lambda a, b, *_: torch_gpukern.gemm(a, b)
    made.peers = {"torch.matmul": lambda a, b, *_: torch.matmul(a, b)}
    made.limits = {"ours, aligned": lambda _a, _b, a, b: torch_gpukern.gemm(a, b)}
    made.bar = shapes.CUDA_GEMM_UNALIGNED_BAR
    made.reference = lambda a, b, *_: exact(a[rows], b[:, columns])
    made.compare = lambda out: out[rows][:, columns]
    return made


def padded(x: Tensor) -> Tensor:
    """The same values in rows that start an odd number of elements apart."""
    return torch.cat((x, x[:, :1]), 1)[:, :-1]


def shifted(x: Tensor) -> Tensor:
    """The same matrix, one element past an aligned address."""
    whole = x.new_empty(x.numel() + 1)
    whole[1:] = x.reshape(-1)
    return whole[1:].view_as(x)


def spread(x: Tensor) -> Tensor:
    """The same matrix in every second element."""
    return x.repeat_interleave(2, 1)[:, ::2]


def lora(run: Run, device: torch.device) -> None:
    """The products of a LoRA adapter of rank r beside a square weight: y = (x a^T) b^T forward, the
    part of dx that goes through the adapter, and both gradients. x [tokens, width], a [r, width], b
    [width, r]."""
    width = shapes.CUDA_GEMM_ONE
    for tokens in shapes.CUDA_GEMM_LORA_M:
        for rank in shapes.CUDA_GEMM_LORA_RANKS:
            for group, m, k, n, layout in (
                ("LoRA forward", tokens, width, rank, "NT"),  # h = x a^T
                ("LoRA forward", tokens, rank, width, "NT"),  # y = h b^T
                ("LoRA backward", tokens, width, rank, "NN"),  # dh = dy b
                ("LoRA backward", tokens, rank, width, "NN"),  # dx = dh a
                ("LoRA gradients", rank, tokens, width, "TN"),  # da = dh^T x
                ("LoRA gradients", width, tokens, rank, "TN"),  # db = dy^T h
            ):
                run.add(cuda_case(group, m, k, n, "bf16", device, layout))


def router(run: Run, device: torch.device) -> None:
    """Router scores of tokens by experts, and a value head with one column: x [tokens, width] @ w
    [experts, width]^T."""
    for tokens in shapes.CUDA_GEMM_LORA_M:
        for experts in shapes.CUDA_GEMM_EXPERTS:
            run.add(
                cuda_case("router", tokens, shapes.CUDA_GEMM_ONE, experts, "bf16", device, "NT")
            )


def random_products(run: Run, device: torch.device) -> None:
    """--random: the products of a seed, and the spread of their ratios."""
    run.args.effort, kernels = gemm_random.EFFORT[device.type], {}
    for x in gemm_random.draw_shapes(device.type, run.args.random, run.args.seed):
        if x.dtype == "tf32":
            made = tf32_case("random", x.m, x.k, x.n, x.layout, device)
        else:
            made = cuda_case("random", x.m, x.k, x.n, x.dtype, device, x.layout)
        made.label = f"{x.layout} {x.m}x{x.k}x{x.n}"
        if run.add(made):
            options = {"fp32_precision": "tf32"} if x.dtype == "tf32" else {}
            kernels[f"{made.label} {x.dtype}"] = torch_gpukern.explain(
                "gemm", *made.make(), **options
            )["instance"]
    gemm_random.report(run, kernels)


def cuda(run: Run, device: torch.device) -> None:
    one, quack = shapes.CUDA_GEMM_ONE, run.args.quack
    for n in shapes.CUDA_GEMM_SQUARE:
        run.add(
            beside_triton(beside_quack(cuda_case("square bf16", n, n, n, "bf16", device), quack))
        )
    for n, k in shapes.CUDA_GEMM_WEIGHTS:
        for m in shapes.CUDA_GEMM_TALL_M:
            for layout in ("NT", "NN"):
                run.add(
                    beside_quack(cuda_case("tall bf16", m, k, n, "bf16", device, layout), quack)
                )
    for n, k in shapes.CUDA_GEMM_WEIGHTS:
        for m in shapes.CUDA_GEMM_SKINNY_M:
            for layout in ("NT", "NN"):
                run.add(
                    beside_quack(
                        cuda_case(f"skinny {n}x{k}", m, k, n, "bf16", device, layout), quack
                    )
                )
    for layout in ("NT", "TN", "TT"):
        run.add(
            beside_quack(cuda_case("layouts bf16", one, one, one, "bf16", device, layout), quack)
        )
    for n in shapes.CUDA_GEMM_F16:
        run.add(beside_quack(cuda_case("f16", n, n, n, "f16", device), quack))
    for layout in ("NN", "NT"):
        run.add(cuda_case("f32 ieee", one, one, one, "f32", device, layout))
    for layout in ("NN", "NT"):
        run.add(tf32_case("f32 tf32", one, one, one, layout, device))
    run.add(fused_case(one, device))
    lora(run, device)
    router(run, device)
    for odd, aligned in shapes.CUDA_GEMM_UNALIGNED:
        run.add(beside_aligned("x".join(map(str, odd)) + " MNK", odd, aligned, device))
    for label, place in (("row stride +1", padded), ("offset +1", shifted), ("step 2", spread)):
        run.add(beside_aligned(f"{one}, {label}", (one,) * 3, (one,) * 3, device, place))
        run.add(
            beside_aligned(f"16 of {one}, {label}", (16, one, one), (16, one, one), device, place)
        )
    for n in shapes.CUDA_GEMM_PADDED:
        for layout in ("NN", "NT"):
            run.add(
                beside_aligned(
                    f"{layout} {n}, row stride +1", (n,) * 3, (n,) * 3, device, padded, layout
                )
            )
    if run.wants("call host time"):
        a, b = (torch.randn(8, 8, device=device) for _ in range(2))
        own = ("torch.mm", lambda: torch.mm(a, b))
        overhead_facts(run, "gemm", lambda: torch_gpukern.gemm(a, b), shapes.CUDA_CALL, own)
    for name, lines in peers.lines_of("gemm").items():
        run.fact("lines of code", f"gemm, {name}", lines, "lines")
    run.finish(shapes.CUDA_GEMM_BARS)


def own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quack",
        choices=("default", "tuned", "none"),
        default="default",
        help="its configuration; tuning takes minutes",
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="measure N random products instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random products")


def main() -> None:
    args = arguments("gemm", more=own_options)
    if args.device == "cuda" and args.quick and args.budget is None:
        args.budget = shapes.CUDA_GEMM_QUICK_SECONDS
    device = open_device(args.device)
    run = Run("gemm", args, device)
    if args.random:
        return random_products(run, device.device)
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
