# SPDX-License-Identifier: BSD-3-Clause
"""grouped_gemm beside a loop of products, and beside torch's _grouped_mm and _scaled_grouped_mm if
these run.

python benchmarks/bench_grouped_gemm.py [--quick] [--device cpu|cuda]

On CUDA the shapes are groups of rows from mixture-of-experts layers, with random sizes. Three
products are measured: the forward, the gradient of the rows (the same with transposed weights), and
the gradient of the weights (groups of k). Two more have 8-bit floats: with one scale a row, beside
torch's op, and with scales of blocks, beside our own bfloat16 product of the decoded operands. The
loop knows the ends of the groups on the host, which spares it a wait.
"""

import itertools
import random
import sys

import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern

# experts, rows of all experts together, n, k
LAYERS = {
    "cpu": [(8, 512, 1024, 1024)],
    "cuda": [
        (8, 1024, 28672, 4096),  # Mixtral: 512, 2048, 8192 tokens, 2 of 8
        (8, 4096, 28672, 4096),
        (8, 16384, 28672, 4096),
        (8, 4096, 4096, 14336),
        (8, 16384, 4096, 14336),
        (128, 4096, 1536, 2048),  # Qwen3-30B: 512, 4096, 16384 tokens, 8 of 128
        (128, 32768, 1536, 2048),
        (128, 131072, 1536, 2048),
        (128, 4096, 2048, 768),
        (128, 32768, 2048, 768),
        (64, 4096, 2816, 2048),  # DeepSeek-V2-Lite, Moonlight
        (64, 32768, 2816, 2048),
        (64, 32768, 2048, 1408),
        (8, 8192, 4096, 7168),
    ],
}
# shapes of torch's own benchmarks, whose groups have equal sizes
EVEN = {"cpu": [], "cuda": [(8, 1024, 4096, 7168), (32, 16384, 4096, 2048)]}
# 8-bit floats: a layer, and whether its groups have equal sizes
OF_8_BITS = [
    ((8, 65536, 4096, 7168), True),
    ((8, 1024, 4096, 7168), True),
    ((32, 16384, 4096, 2048), True),
    ((8, 4096, 28672, 4096), False),
    ((128, 32768, 1536, 2048), True),
]
MOST_RESULTS = 1 << 27  # elements of the gradient of the rows, at most, to keep the run short
E4M3 = torch.float8_e4m3fn
COLUMNS = 64  # columns that are compared in float64


def ends_of(groups: int, rows: int, even: bool) -> list[int]:
    """Where groups end: at equal distances, or as an unbiased router would draw them."""
    if even:
        return [rows // groups * (g + 1) for g in range(groups)]
    draw, counts = random.Random(groups * rows), [0] * groups
    for _ in range(rows):
        counts[draw.randrange(groups)] += 1
    return list(itertools.accumulate(counts))


def spans(ends: list[int]):
    """(group, (first row, end)) of each group."""
    return enumerate(zip([0, *ends], ends, strict=False))


def loop(a, b, ends):
    return torch.cat([a[lo:hi] @ b[g] for g, (lo, hi) in spans(ends)])


def loop_of_k(a, b, ends):
    return torch.stack([a[:, lo:hi] @ b[lo:hi] for _, (lo, hi) in spans(ends)])


def case(
    kind: str, groups: int, rows: int, n: int, k: int, even: bool, device: torch.device
) -> Case:
    """kind: forward, grad a (weights transposed), grad b (groups of k)."""
    ends = ends_of(groups, rows, even)
    of_k = kind == "grad b"

    def make():
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        a = torch.randn(rows, n if kind == "grad a" else k, device=device).bfloat16()
        if of_k:
            return a.mT, torch.randn(rows, n, device=device).bfloat16(), offs
        w = torch.randn(groups, n, k, device=device).bfloat16()
        return a, w if kind == "grad a" else w.mT, offs

    by_hand = loop_of_k if of_k else loop
    return Case(
        group=kind,
        label=f"{groups} x {rows // groups}{'' if even else ' drawn'} {n}x{k}",
        dtype="bf16",
        make=make,
        ours=torch_gpukern.grouped_gemm,
        peers={
            "loop": lambda a, b, offs: by_hand(a, b, ends),
            "torch._grouped_mm": lambda a, b, offs: torch._grouped_mm(a, b, offs),
        },
        optional=["torch._grouped_mm"],
        reference=lambda a, b, offs: by_hand(
            (a[:COLUMNS] if of_k else a).double(), b[..., :COLUMNS].double(), ends
        ),
        compare=lambda out: out[:, :COLUMNS, :COLUMNS] if of_k else out[:, :COLUMNS],
        flops=2.0 * rows * n * k,
        bytes=2.0 * (rows * (n + k) + groups * n * k),
    )


def case_of_8_bits(
    form: str, groups: int, rows: int, n: int, k: int, even: bool, device: torch.device
) -> Case:
    """form: row (one scale for each row of a and each column of a weight) or block (1x128 by
    128x128)."""
    ends, block = ends_of(groups, rows, even), form == "block"

    def make():
        a, scale_a = torch_gpukern.quantize(
            torch.randn(rows, k, device=device), E4M3, "1x128" if block else "row"
        )
        w = torch.randn(groups * n, k, device=device)
        b, scale_b = torch_gpukern.quantize(w, E4M3, "128x128" if block else "row")
        decoded = ()
        if block:
            a16, b16 = (
                torch_gpukern.dequantize(*x, dtype=torch.bfloat16)
                for x in ((a, scale_a), (b, scale_b))
            )
            decoded = a16, b16.unflatten(0, (groups, n)).mT
        b, scale_b = b.unflatten(0, (groups, n)).mT, scale_b.unflatten(0, (groups, -1)).mT
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        return (a, b, scale_a, scale_b, offs, *decoded)

    def of_torch(fast):
        return lambda a, b, sa, sb, offs: torch._scaled_grouped_mm(
            a, b, sa.squeeze(1), sb.squeeze(1), offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def reference(a, b, sa, sb, offs, *_):
        some = sb[..., :1] if block else sb[..., :COLUMNS]
        x, y = a.double(), b[..., :COLUMNS].double()
        spread_a = sa.double().repeat_interleave(128, 1)[:, :k] if block else sa.double()
        spread_b = some.double().repeat_interleave(128, 1)[:, :k] if block else some.double()
        return loop(x * spread_a, y * spread_b, ends)

    names = ("torch._scaled_grouped_mm", "torch._scaled_grouped_mm, fast")
    bf16 = {
        "ours in bf16": lambda a, b, sa, sb, offs, a16, b16: torch_gpukern.grouped_gemm(
            a16, b16, offs
        )
    }
    return Case(
        group=f"e4m3 {form}",
        label=f"{groups} x {rows // groups}{'' if even else ' drawn'} {n}x{k}",
        dtype="bf16",
        make=make,
        ours=lambda a, b, sa, sb, offs, *_: torch_gpukern.grouped_gemm(
            a, b, offs, scale_a=sa, scale_b=sb
        ),
        peers=bf16 if block else {name: of_torch("fast" in name) for name in names},
        optional=names,
        reference=reference,
        compare=lambda out: out[:, :COLUMNS],
        flops=2.0 * rows * n * k,
        bytes=float(rows * k + groups * n * k + 2 * rows * n),
    )


def main() -> None:
    args = arguments("grouped_gemm")
    device = open_device(args.device)
    run = Run("grouped_gemm", args, device)
    layers = LAYERS[device.kind]
    for kind in ("forward", "grad a", "grad b"):
        for layer in layers:
            groups, rows, n, _ = layer
            if kind == "forward" or (rows >= 256 * groups and rows * n <= MOST_RESULTS):
                run.add(case(kind, *layer, False, device.device))
        for layer in EVEN[device.kind] if kind == "forward" else ():
            run.add(case(kind, *layer, True, device.device))
    for form in ("row", "block") if device.kind == "cuda" else ():
        for layer, even in OF_8_BITS:
            run.add(case_of_8_bits(form, *layer, even, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
