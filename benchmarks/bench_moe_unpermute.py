# SPDX-License-Identifier: BSD-3-Clause
"""Times moe_unpermute, forward and backward, against the same in eager PyTorch and under
torch.compile.

python benchmarks/bench_moe_unpermute.py [--quick] [--only forward backward] [--device cpu|cuda]

Rows are those of Mixtral (2 experts a token, 4096 columns) and Qwen3-30B-A3B (8 and 2048), in the
order in which grouped products return them. GB/s counts one read of every row and one write of
every result; the backward also reads the rows and writes their gradient.
"""

import sys

import torch
from harness import Case, Run, arguments, open_device
from torch import Tensor

MODELS = {"Mixtral": (2, 4096), "Qwen3": (8, 2048)}
TOKENS = {"cpu": (1, 256), "cuda": (1, 16, 256, 4096)}


def composed(rows: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    picked = rows.index_select(0, place.view(-1)).unflatten(0, place.shape)
    return (picked * weight.unsqueeze(-1)).sum(1).to(rows.dtype)


def composed_backward(
    rows: Tensor, place: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients by rows and by weight; every row has one place."""
    picked = rows.index_select(0, place.view(-1)).unflatten(0, place.shape)
    of_choices = (weight.unsqueeze(-1) * grad.unsqueeze(1)).to(rows.dtype).flatten(0, 1)
    drows = torch.empty_like(rows).index_copy_(0, place.view(-1).long(), of_choices)
    return drows, (picked.float() * grad.float().unsqueeze(1)).sum(-1)


def case(group: str, model: str, tokens: int, device: torch.device) -> Case:
    each, columns = MODELS[model]
    backward = group == "backward"

    def make() -> tuple[Tensor, ...]:
        rows = torch.randn(tokens * each, columns, device=device).bfloat16()
        place = torch.randperm(tokens * each, device=device).int().view(tokens, each)
        weight = torch.rand(tokens, each, device=device)
        grad = torch.randn(tokens, columns, device=device).bfloat16()
        return (rows, place, weight, grad) if backward else (rows, place, weight)

    def gradients(rows: Tensor, place: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        return torch.ops.gpukern.moe_unpermute_bwd(grad, rows, place, weight, True, True)

    eager = composed_backward if backward else composed
    peers = {"eager": eager}
    if device.type == "cuda":
        peers["torch.compile"] = torch.compile(eager, dynamic=False)
    values = tokens * each * columns
    return Case(
        group=group,
        label=f"{model} {tokens}",
        dtype="bf16",
        make=make,
        ours=gradients if backward else torch.ops.gpukern.moe_unpermute,
        peers=peers,
        reference=None,
        limits={"copy of the rows": lambda rows, *_: rows.clone()},
        flops=(3.0 if backward else 2.0) * values,
        bytes=2.0 * ((2 if backward else 1) * values + tokens * columns),
        unit="GB/s",
    )


def main() -> None:
    args = arguments("moe_unpermute")
    device = open_device(args.device)
    run = Run("moe_unpermute", args, device)
    for group in ("forward", "backward"):
        for model in MODELS:
            for tokens in TOKENS[device.kind]:
                run.add(case(group, model, tokens, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
