# SPDX-License-Identifier: BSD-3-Clause
"""Times kl_div, with the gradient of the student's logits, against the same formulas in eager
PyTorch and under torch.compile.

python benchmarks/bench_kl_div.py [--quick] [--only forward reverse mixed] [--device cpu|cuda]

forward is KL(teacher || student), reverse is KL(student || teacher), and mixed is the
Jensen-Shannon divergence with beta 0.5. The gradient is bfloat16 for float32 logits, too, as in
linear_kl_div. GB/s counts one read of both logits and one write of the gradient.
"""

import sys

import torch
from harness import Case, Run, arguments, open_device
from torch import Tensor

SIZES = {"cpu": [(64, 32_000), (16, 128_256)], "cuda": [(2048, 128_256), (8192, 32_000)]}
BETAS = {"forward": 0.0, "reverse": 1.0, "mixed": 0.5}


def formulas(student: Tensor, teacher: Tensor, beta: float, dtype: torch.dtype) -> tuple:
    """(loss [rows], gradient of its sum by the student's logits [rows, columns] in `dtype`)"""
    s, t = (x.float().log_softmax(-1) for x in (student, teacher))
    p, q = s.exp(), t.exp()
    if beta == 0:
        return (q * (t - s)).sum(-1), (p - q).to(dtype)
    if beta == 1:
        loss = (p * (s - t)).sum(-1)
        return loss, (p * (s - t - loss[:, None])).to(dtype)
    m = (beta * q + (1 - beta) * p).log()
    own = (p * (s - m)).sum(-1)
    loss = beta * (q * (t - m)).sum(-1) + (1 - beta) * own
    return loss, ((1 - beta) * p * (s - m - own[:, None])).to(dtype)


def case(group: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Case:
    beta, size = BETAS[group], dtype.itemsize
    loss = torch.empty(rows, device=device)
    grad = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    def make() -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, columns, device=device)
        return (2 * x).to(dtype), (x + torch.randn_like(x)).to(dtype)

    def ours(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        torch.ops.gpukern.kl_div_grad(x, y, loss, grad, None, beta, 1.0)
        return loss, grad

    def eager(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return formulas(x, y, beta, torch.bfloat16)

    peers = {"eager": eager}
    if device.type == "cuda":
        peers["torch.compile"] = torch.compile(eager, dynamic=False)
    values = rows * columns
    return Case(
        group=group,
        label=f"{rows}x{columns}",
        dtype="f32" if size == 4 else "bf16",
        make=make,
        ours=ours,
        peers=peers,
        reference=None,
        limits={"copy of the logits": lambda x, y: x.clone()},
        flops=20.0 * values,
        bytes=(2.0 * size + 2) * values,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("kl_div")
    device = open_device(args.device)
    run = Run("kl_div", args, device)
    for group in BETAS:
        for rows, columns in SIZES[device.kind]:
            for dtype in (torch.float32, torch.bfloat16):
                run.add(case(group, rows, columns, dtype, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
