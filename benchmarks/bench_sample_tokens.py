# SPDX-License-Identifier: BSD-3-Clause
"""sample_tokens beside its definition in eager PyTorch, which sorts, and beside FlashInfer's
samplers.

python benchmarks/bench_sample_tokens.py [--quick] [--only greedy all top_k top_p min_p penalties]
[--device cpu|cuda]

The limit is the maximum of each row, which reads the logits once. FlashInfer draws other tokens of
the same distribution by other random numbers, so its tokens are not compared. Its calls take no
temperature: the logits are taken as they are. sample_tokens is compared with the definition, token
by token, before the clock starts.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from harness import Case, Run, arguments, open_device
from torch import Tensor

import torch_gpukern
from torch_gpukern import reference

SIZES = {
    "cpu": [(8, 32_000), (8, 128_256)],
    "cuda": [(1, 128_256), (64, 128_256), (256, 128_256), (64, 32_000), (64, 262_144)],
}
TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05


def settings(group: str, rows: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a group but for the logits."""
    one = torch.ones(rows, dtype=torch.float64, device=device)
    number = torch.rand(rows, dtype=torch.float64, device=device)
    given = {"temperature": 0 * one if group == "greedy" else one, "number": number}
    if group in ("top_k", "penalties"):
        given["top_k"] = (TOP_K * one).long()
    if group in ("top_k", "top_p", "penalties"):
        given["top_p"] = TOP_P * one
    if group == "min_p":
        given["min_p"] = MIN_P * one
    if group == "penalties":
        given |= {
            "counts": (torch.rand(rows, vocab, device=device) < 0.01).int(),
            "prompt": torch.rand(rows, vocab, device=device) < 0.01,
            "slots": torch.arange(rows, device=device),
            "presence_penalty": one,
            "frequency_penalty": 0.5 * one,
            "repetition_penalty": 1.2 * one,
        }
    return given


def flashinfer_calls(group: str) -> dict[str, Callable]:
    if not find_spec("flashinfer"):
        return {}

    def call(logits: Tensor) -> Tensor:
        from flashinfer import sampling

        if group == "all":
            return sampling.sampling_from_logits(logits)
        if group == "top_k":
            return sampling.top_k_top_p_sampling_from_logits(logits, TOP_K, TOP_P)
        if group == "top_p":
            return sampling.top_p_sampling_from_probs(logits.softmax(-1), TOP_P)
        return sampling.min_p_sampling_from_probs(logits.softmax(-1), MIN_P)

    return {"FlashInfer": call} if group in ("all", "top_k", "top_p", "min_p") else {}


def case(group: str, rows: int, vocab: int, device: torch.device) -> Case:
    given = settings(group, rows, vocab, device)

    def make() -> tuple[Tensor]:
        return (3 * torch.randn(rows, vocab, device=device),)

    (logits,) = make()
    tokens = torch_gpukern.sample_tokens(logits, **given)
    if not torch.equal(tokens, reference.sample_tokens(logits, **given)):
        raise AssertionError(f"{group} {rows}x{vocab}: the tokens are not the definition's")
    values = rows * vocab
    return Case(
        group=group,
        label=f"{rows}x{vocab}",
        dtype="f32",
        make=make,
        ours=lambda x: torch_gpukern.sample_tokens(x, **given),
        peers={"eager": lambda x: reference.sample_tokens(x, **given), **flashinfer_calls(group)},
        reference=lambda x: reference.sample_tokens(x, **given).double(),
        limits={"maximum of each row": lambda x: x.amax(-1)},
        optional=("FlashInfer",),
        live=("eager",),  # it copies a table from the host
        flops=20.0 * values,
        bytes=(9.0 if group == "penalties" else 4.0) * values,
        unit="GB/s",
    )


def main() -> None:
    args = arguments("sample_tokens")
    device = open_device(args.device)
    run = Run("sample_tokens", args, device)
    for group in ("greedy", "all", "top_k", "top_p", "min_p", "penalties"):
        for rows, vocab in SIZES[device.kind]:
            run.add(case(group, rows, vocab, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
