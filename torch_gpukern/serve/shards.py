# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism of a network of transformers: each rank keeps its heads and its columns of the
MLPs (Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053).

The model's configuration says which layers are split: it has a plan for transformers' own tensor
parallelism (`base_model_tp_plan`). A layer whose result is split keeps its rows of the weight. A
layer whose input is split keeps its columns, and its results are added over the ranks. The head
keeps its rows, and the logits are gathered. All other layers are on every rank. A rank's layers are
plain nn.Linear, so they are quantised and fused as those of one rank. Each expert of a mixture is
divided as an MLP is, so every rank has a part of every expert.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.ranks import all_gather
from ..nn import Linear

SPLIT_ROWS, SPLIT_COLUMNS = "colwise", "rowwise"  # transformers name the sides of weight^T
SPLIT_HALVES, EXPERTS = "packed_colwise", "moe_tp_experts"  # gate and up in one; the mixture's sum
WHOLE = "replicated_with_grad_allreduce", "mla_kv_a_proj"
HEADS = "num_attention_heads", "num_key_value_heads"


class Summed(nn.Module):
    """A layer whose input is split: its results are added over the ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.total(self.inner(*args))

    @staticmethod
    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


class Gathered(nn.Module):
    """A layer whose result is split: each rank gets all columns of it."""

    def __init__(self, inner: nn.Module, ranks: int) -> None:
        super().__init__()
        self.inner, self.ranks = inner, ranks

    @property
    def weight(self) -> Tensor:
        return self.inner.weight  # transformers looks at the head's dtype

    def forward(self, x: Tensor) -> Tensor:
        part = self.inner(x)
        rows = part.reshape(-1, part.shape[-1]).contiguous()
        whole = rows.new_empty(self.ranks * rows.shape[0], rows.shape[1])
        all_gather(whole, rows)
        whole = whole.view(self.ranks, *rows.shape).transpose(0, 1)
        return whole.reshape(*part.shape[:-1], self.ranks * part.shape[-1])


def shard(net: Any, rank: int, ranks: int) -> None:
    """Makes the network the rank's part of it, in place.

    Raises:
        ValueError: its configuration has no plan, or one that is not served; heads or columns that
            the ranks do not divide.
    """
    if ranks == 1:
        return
    name, config = type(net).__name__, net.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tensor parallelism: {name} has no base_model_tp_plan; serve it on 1 rank"
        )
    for key, style in plan.items():
        if style not in (SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_HALVES, EXPERTS, *WHOLE):
            raise ValueError(
                f"tensor parallelism: the plan of {name} has {style} for {key}; expected "
                f"{SPLIT_ROWS}, {SPLIT_COLUMNS}, or those of experts; serve it on 1 rank"
            )
    for key in HEADS:
        heads = getattr(config, key, None)
        if heads is not None and heads % ranks:
            raise ValueError(
                f"tensor parallelism: {name} has {key} {heads}, which {ranks} ranks do not divide"
            )
    base = net.base_model
    # a mixture is wrapped last, because names of its weights go through it
    for key, style in sorted(plan.items(), key=lambda item: item[1] == EXPERTS):
        if style in WHOLE:
            continue
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        layers = [n for n, _ in base.named_modules() if pattern.fullmatch(n)]
        weights = [n for n, _ in base.named_parameters() if pattern.fullmatch(n)]
        if not layers and not weights and not _is_optional(key, plan, base):
            raise ValueError(f"tensor parallelism: {name} has no layer {key}, which its plan names")
        for weight in weights:
            parent, _, last = weight.rpartition(".")
            keep_experts(weight, base.get_submodule(parent), last, style, rank, ranks)
        for layer in layers:
            parent, _, last = layer.rpartition(".")
            holder, module = base.get_submodule(parent), base.get_submodule(layer)
            if style == EXPERTS:
                setattr(holder, last, Summed(module))
                continue
            if type(module) not in (nn.Linear, Linear):
                raise ValueError(
                    f"tensor parallelism: {layer} is {type(module).__name__}; expected nn.Linear. "
                    f"A directory of few bits is served on 1 rank; or serve the directory that it "
                    f"was made from, with --recipe"
                )
            keep(layer, module, style, rank, ranks)
            if style == SPLIT_COLUMNS:
                setattr(holder, last, Summed(module))
    head = net.get_output_embeddings()
    if type(head) in (nn.Linear, Linear) and head.out_features % ranks == 0:
        own = Linear(head.in_features, head.out_features, device="meta")
        own.weight, own.bias = head.weight, head.bias
        keep("lm_head", own, SPLIT_ROWS, rank, ranks)
        net.set_output_embeddings(Gathered(own, ranks))


def _is_optional(key: str, plan: dict[str, str], base: Any) -> bool:
    """Whether a plan names layers that this model has in another form: dense MLPs where all layers
    are mixtures or the other way round, and one of two ways to make queries."""
    names = [n for n, _ in (*base.named_modules(), *base.named_parameters())]
    last = key.rpartition(".")[2]
    others = {"q_proj": ("q_b_proj",), "q_b_proj": ("q_proj",)}.get(last, ())
    if ".mlp." in key and any(".experts" in other for other in plan):
        others = ("experts", "gate_proj", "up_proj", "down_proj")
    return any(n.rpartition(".")[2] in others for n in names)


def keep_experts(name: str, experts: Any, which: str, style: str, rank: int, ranks: int) -> None:
    """The rank's part of the weights of all experts, [E, rows, columns] as in nn.Linear. Of gate and
    up in one weight it is a part of both."""
    halves = type(experts)._apply_gate.__name__ == "_default_apply_gate" and experts.has_gate
    if experts.is_transposed or experts.has_bias or not halves:
        raise ValueError(
            f"tensor parallelism: {name} has biases, is transposed, or has a gate of its own; "
            f"expected gate and up in halves of one weight; serve it on 1 rank"
        )
    weight, dim = getattr(experts, which), 1 if style == SPLIT_HALVES else 2
    parts = weight.detach().chunk(2 if style == SPLIT_HALVES else 1, dim)
    if style not in (SPLIT_HALVES, SPLIT_COLUMNS) or parts[0].shape[dim] % ranks:
        raise ValueError(
            f"tensor parallelism: {name} has {parts[0].shape[dim]} columns of an expert, by {style}, "
            f"which {ranks} ranks do not divide"
        )
    mine = torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)
    setattr(experts, which, nn.Parameter(mine.contiguous(), requires_grad=False))


def keep(name: str, module: Any, style: str, rank: int, ranks: int) -> None:
    """The rank's part of a layer's weight and bias. Copies it, so that the whole is freed."""
    dim, side = (0, "out_features") if style == SPLIT_ROWS else (1, "in_features")
    size = getattr(module, side)
    if size % ranks:
        raise ValueError(
            f"tensor parallelism: {name} has {side} {size}, which {ranks} ranks do not divide"
        )

    def part(x: Tensor, dim: int) -> nn.Parameter:
        mine = x.detach().chunk(ranks, dim)[rank]
        return nn.Parameter(mine.clone(memory_format=torch.contiguous_format), requires_grad=False)

    bias = module.bias
    module.weight = part(module.weight, dim)
    setattr(module, side, size // ranks)
    if bias is not None and dim == 0:
        module.bias = part(bias, 0)
    elif bias is not None and rank > 0:
        module.bias = None  # rank 0 adds it
