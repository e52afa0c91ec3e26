# SPDX-License-Identifier: BSD-3-Clause
"""The demo's model on a mesh of ranks: which weights each rank has, and how ranks communicate.

    mesh          data x context x tensor x pipeline; each may be 1
    data          ranks have different sequences; gradients are averaged (DDP, or FSDP2 as ZeRO 1-3)
    context       ranks have parts of each sequence; attention is gd.context_parallel_attn
    tensor        ranks have parts of heads, hidden features and classes: columns of the first
                  product of a pair, rows of the second
    sequence      with tensor: between the pairs, each rank has only some of the tokens
    pipeline      ranks have some layers; torch.distributed.pipelining moves microbatches along
    experts       each block's MLP is a mixture of experts, cut over the ranks of data and context

Every rank creates the same whole model from the same seed and keeps its part. Weights and gradients
are float32, so gradients of accumulation steps are summed in float32. `dtype` is that of the
products.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import torch_gpukern as gk
from torch_gpukern import distributed as gd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
from model import GPT, Config, grams_of, rms_norm, rotate  # noqa: E402


@dataclass
class Form:
    """How the model is cut over the ranks. mesh None means one process. batch: the ranks of data
    and context, as one dimension."""

    mesh: DeviceMesh | None = None
    batch: DeviceMesh | None = None
    context_mode: str = "auto"
    sequence: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    experts: int = 0
    top_k: int = 2

    def size(self, name: str) -> int:
        return 1 if self.mesh is None else self.mesh[name].size()

    @property
    def batch_size(self) -> int:
        return 1 if self.batch is None else self.batch.size()

    def rank(self, name: str) -> int:
        return 0 if self.mesh is None else self.mesh[name].get_local_rank()

    def group(self, name: str) -> dist.ProcessGroup:
        return self.mesh[name].get_group()


class Shared(torch.autograd.Function):
    """Marks a tensor that is the same on all ranks and that each rank multiplies with its own
    weights. Backward sums the gradient over ranks, in rank order."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        parts = [
            torch.empty_like(grad, memory_format=torch.contiguous_format)
            for _ in range(ctx.group.size())
        ]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(grad.dtype), None


def part(x: Tensor, dim: int, form: Form) -> Tensor:
    """This rank's share of a tensor-parallel dimension."""
    return x.chunk(form.size("tensor"), dim)[form.rank("tensor")]


class ParallelBlock(nn.Module):
    """The demo's block with this rank's heads and hidden features. Tokens come first: x [seq,
    batch, dim]."""

    def __init__(self, whole: nn.Module, form: Form) -> None:
        super().__init__()
        c, ranks = whole.config, form.size("tensor")
        for name, n in (("heads_q", c.heads_q), ("heads_kv", c.heads_kv), ("hidden", c.hidden)):
            if n % ranks:
                raise SystemExit(f"--tensor {ranks} does not divide the model's {name} of {n}")
        self.form, self.config = form, replace(
            c, heads_q=c.heads_q // ranks, heads_kv=c.heads_kv // ranks, hidden=c.hidden // ranks
        )  # fmt: skip
        sizes = [h * c.head_dim for h in (c.heads_q, c.heads_kv, c.heads_kv)]
        with torch.no_grad():
            qkv = [part(x, 1, form) for x in whole.qkv.split(sizes, 1)]
            self.qkv = nn.Parameter(torch.cat(qkv, 1).contiguous())
            self.attn_out = nn.Parameter(part(whole.attn_out, 0, form).clone())
            if form.experts:  # every rank draws the whole mixture, and keeps its part
                self.moe = gk.nn.MoE(
                    c.dim, c.hidden, form.experts, form.top_k, device=whole.qkv.device
                )
                if form.batch_size > 1:
                    gd.shard_experts(self.moe, form.batch)
            else:
                gate_up = [part(x, 1, form) for x in whole.gate_up.chunk(2, 1)]
                self.gate_up = nn.Parameter(torch.cat(gate_up, 1).contiguous())
                self.mlp_out = nn.Parameter(part(whole.mlp_out, 0, form).clone())

    def columns(self, x: Tensor, w: Tensor) -> Tensor:
        """x w for this rank's columns of w; with sequence parallelism for all ranks' tokens."""
        w, x = w.to(self.form.dtype), x.to(self.form.dtype)
        if self.form.size("tensor") == 1:
            return gk.gemm(x, w)
        group = self.form.group("tensor")
        if not self.form.sequence:
            return gk.gemm(Shared.apply(x, group), w)
        return gd.all_gather_gemm(x.flatten(0, 1), w, group).unflatten(0, (-1, x.shape[1]))

    def rows(self, x: Tensor, w: Tensor) -> Tensor:
        """The sum over ranks of x w, where each rank has some rows of w; with sequence parallelism
        this rank's tokens of it."""
        w = w.to(self.form.dtype)
        if self.form.size("tensor") == 1:
            return gk.gemm(x, w)
        product = gd.gemm_reduce_scatter if self.form.sequence else gd.gemm_all_reduce
        return product(x.flatten(0, 1), w, self.form.group("tensor")).unflatten(0, (-1, x.shape[1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's tokens and heads, [seq, batch, heads, head_dim]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if self.form.size("context") > 1:
            group, mode = self.form.group("context"), self.form.context_mode
            out = gd.context_parallel_attn(q, k, v, group, is_causal=True, mode=mode)
        else:
            out = gk.flash_attn(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        qkv = self.columns(rms_norm(x), self.qkv).unflatten(-1, (-1, c.head_dim))
        q, k, v = qkv.split((c.heads_q, c.heads_kv, c.heads_kv), dim=-2)
        q, k = rotate(rms_norm(q), cos, sin), rotate(rms_norm(k), cos, sin)
        y = self.attend(q.to(v.dtype), k.to(v.dtype), v)
        x = x + self.rows(y.flatten(-2), self.attn_out)
        if self.form.experts:
            with torch.autocast(
                x.device.type, self.form.dtype, enabled=self.form.dtype != torch.float32
            ):
                return x + self.moe(rms_norm(x).to(self.form.dtype))
        gate, up = self.columns(rms_norm(x), self.gate_up).chunk(2, dim=-1)
        return x + self.rows(F.silu(gate) * up, self.mlp_out)


class Stage(nn.Module):
    """Some layers of the model, with the embedding if they are the first and the head if they are
    the last.

    The input is grams [batch, seq, grams] in the first stage, otherwise x [batch, seq, dim], for
    this rank's tokens. The output is x. The last stage's head is applied in `loss`.
    """

    def __init__(self, whole: GPT, form: Form, index: int = 0, stages: int = 1) -> None:
        super().__init__()
        layers = list(whole.blocks)
        if len(layers) % stages:
            raise SystemExit(
                f"the model's {len(layers)} layers cannot be shared out over {stages} stages"
            )
        each = len(layers) // stages
        self.form, self.config = form, whole.config
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.embed = nn.Parameter(whole.embed.detach().clone())
        self.blocks = nn.ModuleList(
            ParallelBlock(b, form) for b in layers[index * each : (index + 1) * each]
        )
        if self.last:  # [classes of this rank, dim]
            self.head = nn.Parameter(part(whole.head.detach().t(), 0, form).contiguous())
        # The rotary tables of the whole context, which are cut in the same way as the tokens.
        self.register_buffer("cos", whole.cos.detach().clone(), persistent=False)
        self.register_buffer("sin", whole.sin.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        form, ranks = self.form, self.form.size("context")
        if self.first:
            tables = self.config.vocab * torch.arange(x.shape[-1], device=x.device)
            x = rms_norm(F.embedding(x + tables, self.embed).sum(dim=-2))
        seq = x.shape[1]
        cos, sin = self.cos[: seq * ranks], self.sin[: seq * ranks]
        if ranks > 1:
            where = gd.positions(seq * ranks, form.group("context"), device=x.device)
            cos, sin = cos[where], sin[where]
        cos, sin = cos[:, None], sin[:, None]  # add a batch dimension
        # tokens first in memory, too: a product over strided rows would be many small ones
        x = x.transpose(0, 1).contiguous()
        tensor = form.group("tensor") if form.size("tensor") > 1 else None
        if form.sequence and tensor is not None:
            x = gd.shard_sequence(x, tensor, 0, "contiguous")
        for block in self.blocks:
            if form.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        if form.sequence and tensor is not None:
            x = gd.gather_sequence(x, tensor, 0, "contiguous", seq_len=seq)
        x = x.transpose(0, 1)
        if self.last:
            return rms_norm(x.contiguous())
        return x.clone(memory_format=torch.contiguous_format)  # a pipeline's backward takes no view

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over this rank's tokens, in nats; x is the output of forward."""
        x, head = x.to(self.form.dtype), self.head.to(self.form.dtype)
        if self.form.size("tensor") == 1:
            return gk.linear_cross_entropy(x, head, targets)
        return gd.vocab_parallel_linear_cross_entropy(x, head, targets, self.form.group("tensor"))


class OneStage(nn.Module):
    """Forward and loss in one call, as DDP and FSDP2 need it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, grams: Tensor, targets: Tensor) -> Tensor:
        return self.stage.loss(self.stage(grams), targets)


def local(x: Tensor, form: Form) -> Tensor:
    """This rank's tokens of [batch, seq, ...]."""
    return (
        gd.shard_sequence(x, form.group("context"), 1).contiguous()
        if form.size("context") > 1
        else x
    )


def inputs(tokens: Tensor, targets: Tensor, form: Form, config: Config) -> tuple[Tensor, Tensor]:
    """A rank's inputs: the grams of its tokens, and their targets. Grams are made before the cut,
    because a gram contains earlier tokens."""
    return local(grams_of(tokens, config.grams), form), local(targets, form)


def experts_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that no other rank has: those of experts."""
    return {
        name: p for name, p in module.named_parameters() if ".moe." in name and "router" not in name
    }


def average_experts(module: nn.Module, form: Form) -> None:
    """Divides the gradients of experts by the number of ranks: they are sums over all ranks'
    tokens, while the loss is a mean over ranks."""
    if form.experts and form.batch_size > 1:
        for p in experts_of(module).values():
            p.grad /= form.batch_size


def sum_shares(module: nn.Module, form: Form) -> None:
    """Sums the embedding's gradient over the tensor ranks, which sequence parallelism leaves as
    shares."""
    for name, p in module.named_parameters():
        if (
            form.sequence
            and form.size("tensor") > 1
            and name.endswith("embed")
            and p.grad is not None
        ):
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(grad, group=form.group("tensor"))
