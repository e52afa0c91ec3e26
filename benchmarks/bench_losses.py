# SPDX-License-Identifier: BSD-3-Clause
"""Preference, policy and distillation losses of hidden states, with the gradients of the hidden
states and the head's weight, beside torch with logits in memory and beside Liger's chunked losses
if they import (liger-kernel 0.8.5).

python benchmarks/bench_losses.py [--device cpu|cuda] [--only dpo grpo kl] [--quick] [--seconds 1]

- dpo: `linear_dpo_loss`, chosen and rejected sequences.
- grpo: `grpo_loss` of `linear_log_probs`, one gradient step behind the policy that sampled, with
  the reference's log-probabilities.
- kl: `linear_kl_div`, KL(teacher || student).

All contestants get the same inputs and run alternately in one process; Liger compiles its chunks
with torch.compile on CUDA. Printed are medians, half the interquartile range, on CUDA the peak
memory beyond the inputs, and the error: the largest difference from float64 of the loss and of both
gradients, each over its largest value.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_gpukern.nn as gnn

# sequences, tokens of each, H, V
SIZES = {"cuda": (8, 1024, 4096, 128256), "quick": (4, 512, 2048, 32000), "cpu": (4, 16, 64, 1000)}
IGNORED = -100
Inputs = dict[str, Tensor]


def inputs(size: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> Inputs:
    batch, tokens, hidden, classes = size
    gen = torch.Generator(device).manual_seed(0)
    of = {"generator": gen, "device": device}
    made = {n: torch.randn(batch, tokens, hidden, **of) for n in ("x", "ref_x")}
    made |= {n: torch.randn(classes, hidden, **of) * 0.02 for n in ("weight", "ref_weight")}
    made = {name: x.to(dtype) for name, x in made.items()}
    target = torch.randint(0, classes, (batch, tokens), **of)
    target[:, : tokens // 4] = IGNORED  # a prompt
    advantages = torch.randn(batch, **of)
    return made | {"target": target, "advantages": advantages}


def log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The log-probabilities of the targets by torch, with logits in memory; 0 where ignored."""
    logits = (x @ weight.mT).to(torch.promote_types(x.dtype, torch.float32))
    found = logits.log_softmax(-1).gather(-1, target.clamp_min(0)[..., None])[..., 0]
    return found.masked_fill(target == IGNORED, 0.0)


def policy(own: Tensor, given: Inputs, old: Tensor, ref: Tensor) -> Tensor:
    """The GRPO loss of the model's own log-probabilities."""
    mask = given["target"] != IGNORED
    return gnn.grpo_loss(
        own, given["advantages"].to(own.dtype), mask, old_log_probs=old, ref_log_probs=ref,
        beta=0.04, loss_type="bnpo",
    )  # fmt: skip


def around(own: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the policy that sampled, and of the reference: near the model's own."""
    step = torch.linspace(-0.1, 0.1, own.shape[-1], device=own.device, dtype=own.dtype)
    return own.detach() + step, own.detach() - step


def ours(name: str, g: Inputs, default: bool = True) -> Tensor:
    """The loss by gpukern. default: low_memory has its default, which is False for kl and True for
    the others; otherwise it has the other value."""
    x, w, target = g["x"], g["weight"], g["target"]
    how = {"low_memory": default != (name == "kl")}
    if name == "dpo":
        return gnn.linear_dpo_loss(x, w, target, g["ref_x"], g["ref_weight"], **how).loss
    if name == "kl":
        return gnn.linear_kl_div(x, w, g["ref_x"], g["ref_weight"], target=target, **how)
    return policy(gnn.linear_log_probs(x, w, target, **how), g, g["old"], g["ref"])


def with_logits(name: str, g: Inputs) -> Tensor:
    """The loss by torch, with logits in memory."""
    x, w, target = g["x"], g["weight"], g["target"]
    if name == "kl":
        wide = torch.promote_types(x.dtype, torch.float32)
        student, teacher = (
            (a @ b.mT).to(wide).log_softmax(-1) for a, b in ((x, w), (g["ref_x"], g["ref_weight"]))
        )
        rows = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        kept = target != IGNORED
        return rows[kept].sum() / kept.sum()
    own = log_probs(x, w, target)
    if name == "grpo":
        return policy(own, g, g["old"].to(own.dtype), g["ref"].to(own.dtype))
    with torch.no_grad():
        ref = log_probs(g["ref_x"], g["ref_weight"], target)
    return gnn.dpo_loss(*own.sum(1).chunk(2), *ref.sum(1).chunk(2)).loss


def liger(name: str, compiled: bool) -> Callable[[Inputs], Tensor]:
    from liger_kernel import chunked_loss

    if name == "dpo":
        dpo = chunked_loss.LigerFusedLinearDPOLoss(compiled=compiled)
        return lambda g: dpo(
            g["weight"], g["x"], g["target"], ref_input=g["ref_x"], ref_weight=g["ref_weight"]
        )[0]
    if name == "kl":
        jsd = chunked_loss.LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=compiled
        )

        def divergence(g: Inputs) -> Tensor:
            flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
            return jsd(
                flat(g["x"]), g["weight"], flat(g["ref_x"]), g["ref_weight"],
                g["target"].reshape(-1),
            )  # fmt: skip

        return divergence
    grpo = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.04, loss_type="bnpo", compiled=compiled)
    return lambda g: grpo(
        g["x"], g["weight"], g["target"].clamp_min(0), (g["target"] != IGNORED).to(torch.int64),
        g["advantages"], ref_per_token_logps=g["ref"], old_per_token_logps=g["old"],
    )[0]  # fmt: skip


def differentiated(loss: Callable[[Inputs], Tensor], given: Inputs) -> list[Tensor]:
    """The loss, and the gradients of x and weight."""
    g = dict(given)
    for name in ("x", "weight"):
        g[name] = g[name].detach().requires_grad_()
    value = loss(g)
    return [value.detach(), *torch.autograd.grad(value, (g["x"], g["weight"]))]


def exact(name: str, given: Inputs, device: str) -> list[Tensor]:
    """`differentiated` in float64, or [] if that does not fit."""
    wide = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    if device == "cpu" or given["weight"].shape[0] <= 32000:
        return differentiated(lambda g: with_logits(name, g), wide)
    return []  # float64 logits of the large size do not fit beside their gradients


def timed(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def contestants(name: str, device: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """The losses that are compared, by label."""
    other = "low_memory=True" if name == "kl" else "low_memory=False"
    found = {
        "gpukern": lambda g: ours(name, g),
        "torch, logits": lambda g: with_logits(name, g),
        f"gpukern, {other}": lambda g: ours(name, g, False),
    }
    try:
        found["liger"] = liger(name, device == "cuda")
    except ImportError as error:
        print(f"{name}: without liger: {error}")
    return found


def errors_of(got: list[Tensor], want: list[Tensor]) -> str:
    """The largest difference over the largest value, of each tensor; "" without a reference."""
    errors = (((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want))
    return " ".join(f"{error:.1e}" for error in errors)


def peak_gb(call: Callable[[], object], device: str) -> str:
    """The GB of GPU memory that a call needs beyond the inputs."""
    if device != "cuda":
        return ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e9:.2f}"


def alternate(
    calls: dict[str, Callable[[], object]], device: str, seconds: float
) -> dict[str, list[float]]:
    """The times in ms of all calls, which run alternately, at least three times each."""
    times: dict[str, list[float]] = {label: [] for label in calls}
    until = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < until or min(map(len, times.values())) < 3:
        for label, call in calls.items():
            times[label].append(timed(call, device))
    return times


def measure(name: str, given: Inputs, device: str, seconds: float) -> None:
    """Measures all contestants of a loss and prints a line of the table for each."""
    with torch.no_grad():
        found = gnn.linear_log_probs(given["x"], given["weight"], given["target"])
    given = given | dict(zip(("old", "ref"), around(found), strict=True))
    want = exact(name, given, device)
    calls: dict[str, Callable[[], list[Tensor]]] = {}
    cells: dict[str, list[str]] = {}
    for label, loss in contestants(name, device).items():
        call = lambda loss=loss: differentiated(loss, given)  # noqa: E731
        try:
            errors = errors_of(call(), want)
            cells[label] = [peak_gb(call, device), errors]
            calls[label] = call
        except RuntimeError as error:  # out of memory, or a compiler that does not take it
            print(f"{name}: {label} left out: {str(error).splitlines()[0][:150]}")
    times = alternate(calls, device, seconds)
    base = statistics.median(times["gpukern"])
    for label, ms in times.items():
        low, middle, high = statistics.quantiles(ms, n=4)
        spread = f"{middle:.4g} +- {(high - low) / 2:.2g}"
        print(
            f"| {' | '.join([name, label, spread, f'{middle / base:.2f}', *cells[label]])} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="losses of hidden states, with gradients")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("dpo", "grpo", "kl"), default=["dpo", "grpo", "kl"]
    )
    parser.add_argument("--quick", action="store_true", help="a size with float64 as the judge")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant")
    args = parser.parse_args()
    size = SIZES["quick" if args.quick and args.device == "cuda" else args.device]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{device}; torch {torch.__version__}; {datetime.date.today()}; sequences, tokens, H, V: {size}; {dtype}\n"
    )
    names = ["loss", "by", "ms", "times gpukern", "GB", "errors: loss, dx, dweight"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    given = inputs(size, args.device, dtype)
    for name in args.only:
        measure(name, given, args.device, args.seconds)


if __name__ == "__main__":
    main()
