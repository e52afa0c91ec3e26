"""A gradient step of the demo's model on our ops beside the same step on PyTorch's built-ins.

python benchmarks/bench_model.py [--quick] [--rows eager compiled] [--device cpu|cuda]
Forward, loss and backward under bf16 autocast, eager and compiled; the optimizer, which is the
same on both sides, is left out. FLOPs: 6 per weight and token, and attention's.
On CUDA either is called, launches and all, and run as CUDA graphs: the whole eager step captured by hand, the compiled
one through mode="reduce-overhead"; and once more with our gemm between PyTorch's attention.
"""

from __future__ import annotations

import sys
from pathlib import Path

import shapes
import torch
from harness import Case, Run, arguments, open_device
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "demo"))
from model import GPT, GpukernOps, TorchOps  # noqa: E402
from train import CONFIG  # noqa: E402

# label -> torch.compile's options (None: eager), whether the harness replays the step from a graph of its own
MODES = {
    "cpu": {"eager": (None, False), "compiled": ({}, False)},
    "cuda": {
        "eager": (None, False),
        "eager, CUDA graph": (None, True),
        "compiled": ({}, False),
        "compiled, reduce-overhead": ({"mode": "reduce-overhead"}, False),
    },
}


class OurGemm(GpukernOps):
    """PyTorch's attention between our products, for what these alone do to a step."""

    causal_attention = TorchOps.causal_attention


# group -> whose operations are ours
GROUPS = {"gradient step": GpukernOps, "gradient step, gemm alone": OurGemm}


def gradient_step(model: GPT, ops, device: torch.device, options: dict | None):
    """(tokens, targets) -> (loss, gradient of every parameter)"""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(tokens, targets, ops)

    forward = loss if options is None else torch.compile(loss, fullgraph=True, **options)
    parameters = list(model.parameters())

    def run(tokens: Tensor, targets: Tensor):
        if options:  # the last step's results may be overwritten
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            value = forward(tokens, targets)
        return value, *torch.autograd.grad(value, parameters)

    return run


def model_case(group: str, label: str, device: torch.device) -> Case:
    options, replayed = MODES[device.type][label]
    if options is not None:
        torch.compiler.reset()  # or each step would first ask whether an earlier row's graph fits
    torch.manual_seed(0)
    config = CONFIG[device.type]
    model = GPT(config).to(device)
    for block in model.blocks:  # their start is zero, which would leave gradients zero
        torch.nn.init.normal_(block.attn_out, std=0.02)
        torch.nn.init.normal_(block.mlp_out, std=0.02)
    torch.nn.init.normal_(model.head, std=0.02)
    batch, seq = shapes.MODEL_BATCH[device.type], config.context

    def make():
        tokens = torch.randint(config.vocab, (batch, seq + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def exact(tokens: Tensor, targets: Tensor):
        """The same step in float64 on PyTorch's own products."""
        twin = GPT(config).to(device).double()
        twin.load_state_dict(model.state_dict())
        value = twin.loss(tokens, targets, TorchOps())
        grads = torch.autograd.grad(value, list(twin.parameters()))
        return value.detach(), *(g.double() for g in grads)

    weights = sum(p.numel() for p in model.parameters()) - model.embed.numel()
    attention = 4.0 * config.layers * config.heads_q * seq * config.head_dim / 2 * 3.5
    return Case(
        group=group,
        label=label,
        dtype="bf16",
        make=make,
        ours=gradient_step(model, GROUPS[group](), device, options),
        peers={"torch built-ins": gradient_step(model, TorchOps(), device, options)},
        reference=exact,
        flops=batch * seq * (6.0 * weights + attention),
        bytes=3.0 * 4 * weights,
        live=() if replayed else ("gpukern", "torch built-ins"),
    )


def main() -> None:
    args = arguments("model")
    device = open_device(args.device)
    run = Run("model", args, device)
    for group in GROUPS if device.kind == "cuda" else ("gradient step",):
        for label in MODES[device.kind]:
            if run.wants(group):
                run.add(model_case(group, label, device.device))
    run.finish(shapes.MODEL_BARS if device.kind == "cpu" else {})


if __name__ == "__main__":
    sys.exit(main())
