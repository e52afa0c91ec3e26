# SPDX-License-Identifier: BSD-3-Clause
"""Mixtures of experts: transformers' experts over gpukern beside transformers' own over
torch._grouped_mm.

python benchmarks/bench_moe.py [--quick] [--device cpu|cuda]

The layer behind the router: sort, two grouped products with SwiGLU between them, weighted sum;
forward, and with all gradients.
"""

import copy
import sys

import torch
from harness import Case, Run, arguments, open_device

# hidden size, intermediate size, experts, experts a token
MODELS = {
    "cpu": {"small": (256, 128, 8, 2)},
    "cuda": {
        "Mixtral-8x7B": (4096, 14336, 8, 2),
        "Qwen3-30B-A3B": (2048, 768, 128, 8),
        "DeepSeek-V2-Lite": (2048, 1408, 64, 8),
    },
}
TOKENS = {"cpu": (64,), "cuda": (512, 4096, 16384)}
COMPARED = 8  # tokens, in float64


def layer(
    hidden: int, inner: int, experts: int, each: int, device: torch.device
) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=each,
    )
    with torch.device(device):
        module = Qwen3MoeExperts(config).bfloat16()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return module


def with_leaves(module: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The module with fresh leaf weights. Older leaves remember a stream that no graph captures."""
    shell = copy.copy(module)
    leaves = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    shell.__dict__ |= {"_parameters": {}, **leaves}
    return shell, list(leaves.values())


@torch.no_grad()
def by_hand(module, x, expert_of, weight_of):
    """The first tokens' result, one expert at a time."""
    out = torch.zeros(COMPARED, x.shape[1], dtype=torch.float64, device=x.device)
    for t in range(COMPARED):
        for e, w in zip(expert_of[t].tolist(), weight_of[t], strict=True):
            gate, up = (module.gate_up_proj[e].double() @ x[t].double()).chunk(2)
            out[t] += w.double() * (
                module.down_proj[e].double() @ (torch.nn.functional.silu(gate) * up)
            )
    return out


def case(
    model: str,
    tokens: int,
    backward: bool,
    module: torch.nn.Module,
    sizes: tuple,
    device: torch.device,
) -> Case:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    hidden, inner, experts, each = sizes

    def make():
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        weight_of, expert_of = torch.randn(tokens, experts, device=device).softmax(-1).topk(each)
        return (
            x,
            expert_of,
            (weight_of / weight_of.sum(-1, keepdim=True)).bfloat16(),
            torch.randn_like(x),
        )

    def by(name):
        experts_of = ALL_EXPERTS_FUNCTIONS[name]

        def forward(x, expert_of, weight_of, grad):
            with torch.no_grad():
                return experts_of(module, x, expert_of, weight_of)

        def both(x, expert_of, weight_of, grad):
            experts, leaves = with_leaves(module)
            x = x.detach().requires_grad_()
            out = experts_of(experts, x, expert_of, weight_of)
            return out, *torch.autograd.grad(out, (x, *leaves), grad)

        return both if backward else forward

    products = (2 + 1) * hidden * inner * (3 if backward else 1)
    return Case(
        group="forward and backward" if backward else "forward",
        label=f"{model} {tokens}",
        dtype="bf16",
        make=make,
        ours=by("gpukern"),
        peers={"transformers' grouped_mm": by("grouped_mm")},
        reference=lambda x, e, w, _: by_hand(module, x, e, w),
        compare=lambda out: (out[0] if backward else out)[:COMPARED],
        flops=2.0 * tokens * each * products,
        bytes=float(2 * experts * 3 * hidden * inner),
    )


def main() -> None:
    from torch_gpukern.integrations import transformers_experts

    transformers_experts.register_experts()
    args = arguments("moe")
    device = open_device(args.device)
    run = Run("moe", args, device)
    for model, sizes in MODELS[device.kind].items():
        module = layer(*sizes, device.device)
        for backward in (False, True):
            for tokens in TOKENS[device.kind]:
                run.add(case(model, tokens, backward, module, sizes, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
