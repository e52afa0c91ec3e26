# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn beside F.scaled_dot_product_attention, forward and backward, full and causal.

python benchmarks/bench_flash_attn.py [--quick] [--only forward backward dropout call isa memory]
[--rows d128 ...] [--device cpu|cuda] [--compiled some|all|none]

On CUDA the peers are SDPA's flash, cuDNN and efficient backends. FlashAttention-3 (FA3),
FlashAttention-4 (FA4) and FlashInfer join if they import. Compiled FlexAttention joins in the rows
that --compiled selects. The compilation of a peer is not timed.

Rows named dropout have dropout_p 0.1. Every contestant draws its own mask there, so no result is
compared; tests/ops/test_attn_dropout.py compares ours.

Rows named wide have head_dim 512 and 8 query heads a kv head, as Gemma's global layers. There the
peers are SDPA's efficient and math backends, the first on repeated keys and values.

FLOPs: 4 * batch * heads * seq_q * seq_k * head_dim, half of it when causal. Backward counts 2.5
times forward.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import peers
import shapes
import torch
import torch.nn.functional as F
from harness import DTYPES, Case, Run, arguments, isa_shares, open_device, overhead_facts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_gpukern
from torch_gpukern import reference


def make_qkv(batch: int, heads: int, seq: int, head_dim: int, dtype: torch.dtype, device):
    """q, k, v [batch, heads, seq, head_dim]"""
    shape = (batch, heads, seq, head_dim)
    return tuple(torch.randn(shape, device=device).to(dtype) for _ in range(3))


def sdpa(causal: bool):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_in_float32(causal: bool):
    """SDPA in float32 on 16-bit tensors, casts included. On a CPU without 16-bit products it is the
    faster way."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal).to(
            q.dtype
        )

    return run


def forward_case(seq: int, head_dim: int, causal: bool, dtype: str, device) -> Case:
    batch, heads = shapes.ATTN_TOKENS // seq, shapes.ATTN_HEADS
    torch_dtype = DTYPES[dtype]
    mask = "causal" if causal else "full"
    # full rows form one group per head_dim; causal rows form one group over all
    group = f"forward {mask}, {dtype}" if causal else f"forward {mask} d{head_dim}, {dtype}"

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The first batch entry: a whole result would be minutes of float64."""
        return reference.flash_attn(*(x[:1].double() for x in (q, k, v)), is_causal=causal)

    return Case(
        group=group,
        label=f"B{batch} H{heads} S{seq} d{head_dim}",
        dtype=dtype,
        make=lambda: make_qkv(batch, heads, seq, head_dim, torch_dtype, device),
        ours=lambda q, k, v: torch_gpukern.flash_attn(q, k, v, is_causal=causal),
        peers={"SDPA": sdpa(causal)}
        | ({"SDPA in float32": sdpa_in_float32(causal)} if dtype != "f32" else {}),
        reference=exact,
        compare=lambda out: out[:1],
        flops=4.0 * batch * heads * seq * seq * head_dim / (2 if causal else 1),
        bytes=4.0 * batch * heads * seq * head_dim * torch_dtype.itemsize,
    )


def backward_case(seq: int, head_dim: int, causal: bool, dtype: str, device) -> Case:
    batch, heads = shapes.ATTN_TOKENS // seq, shapes.ATTN_HEADS
    torch_dtype = DTYPES[dtype]

    def make():
        """q, k, v, the gradient of out, and out of every side with its autograd graph."""
        q, k, v = make_qkv(batch, heads, seq, head_dim, torch_dtype, device)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        ours = torch_gpukern.flash_attn(q, k, v, is_causal=causal)
        theirs = [peer(q, k, v) for peer in (sdpa(causal), sdpa_in_float32(causal))]
        return q, k, v, torch.randn_like(ours), ours, *theirs

    def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *_):
        q, k, v = (x[:1].detach().double().requires_grad_() for x in (q, k, v))
        out = reference.flash_attn(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), grad[:1].double())

    def backward(which: int):
        def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *outs: Tensor):
            return torch.autograd.grad(outs[which], (q, k, v), grad, retain_graph=True)

        return run

    flops = 2.5 * 4.0 * batch * heads * seq * seq * head_dim / (2 if causal else 1)
    return Case(
        group=f"backward {'causal' if causal else 'full'}, {dtype}",
        label=f"B{batch} H{heads} S{seq} d{head_dim}",
        dtype=dtype,
        make=make,
        ours=backward(0),
        peers={"SDPA": backward(1)} | ({"SDPA in float32": backward(2)} if dtype != "f32" else {}),
        reference=exact,
        compare=lambda grads: tuple(g[:1] for g in grads),
        flops=flops,
        bytes=8.0 * batch * heads * seq * head_dim * torch_dtype.itemsize,
    )


def call_case(device) -> Case:
    """Forward and backward of a call so small that only the cost of a call counts."""

    def step(fn):
        def run(q: Tensor, k: Tensor, v: Tensor):
            return torch.autograd.grad(fn(q, k, v, is_causal=True).sum(), (q, k, v))

        return run

    def exact(*qkv: Tensor):
        return step(reference.flash_attn)(*(x.detach().double().requires_grad_() for x in qkv))

    return Case(
        group="call forward+backward",
        label="B1 H1 S8 d8",
        dtype="f32",
        make=lambda: tuple(x.requires_grad_() for x in make_qkv(1, 1, 8, 8, torch.float32, device)),
        ours=step(torch_gpukern.flash_attn),
        peers={"SDPA": step(F.scaled_dot_product_attention)},
        reference=exact,
        flops=3.5 * 2.0 * 8 * 8 * 8,
        bytes=8.0 * 64 * 4,
    )


MEMORY_CHILD = """
import torch, torch_gpukern

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

torch.set_num_threads({threads})
q, k, v = (torch.randn(1, 1, {seq}, 64) for _ in range(3))
torch_gpukern.flash_attn(q[:, :, :256], k[:, :, :256], v[:, :, :256])
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
before = status("VmRSS")
out = torch_gpukern.flash_attn(q, k, v, is_causal=True)
print(status("VmHWM") - before - out.nbytes / 2**20)
"""


def memory_fact(run: Run) -> None:
    """MB of resident memory that a long forward takes beyond its tensors, in a new process."""
    seq = shapes.ATTN_MEMORY_LENGTH
    code = MEMORY_CHILD.format(seq=seq, threads=torch.get_num_threads())
    child = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True
    )
    if child.returncode:
        raise SystemExit(f"flash_attn at S = {seq} failed:\n{child.stderr}")
    megabytes = float(child.stdout)
    run.fact("memory", f"forward causal S{seq} d64", megabytes, "MB", shapes.MEMORY_BEYOND_TENSORS)


def sdpa_on(backend: SDPBackend, causal: bool, dropout_p: float = 0.0):
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout_p)

    return run


CUDA_PEERS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def flex_attention(causal: bool):
    """FlexAttention, compiled for the first shapes that it gets. Its block mask is made at the same
    time."""
    made = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            import torch._dynamo
            from torch._functorch import config
            from torch.nn.attention import flex_attention as flex

            # torch limits the shapes that one function is compiled for
            torch._dynamo.reset()
            config.donated_buffer = False  # each backward is called many times here
            made["call"] = torch.compile(flex.flex_attention, dynamic=False)
            made["mask"] = None
            if causal:
                sizes = q.shape[2], k.shape[2]
                made["mask"] = flex.create_block_mask(
                    lambda b, h, i, j: i >= j, None, None, *sizes, device=q.device.type
                )
        return made["call"](q, k, v, block_mask=made["mask"])

    return run


def flash_attn_project(find: Callable[[], Callable], causal: bool):
    """flash_attn_func of one version of FlashAttention, whose tensors are [B, S, H, D]."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = find()(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def flash_attn_3(causal: bool):
    def find() -> Callable:
        from flash_attn_interface import flash_attn_func

        return flash_attn_func

    return flash_attn_project(find, causal)


def flash_attn_4(causal: bool):
    """FlashAttention-4, which compiles each kernel at its first call."""

    def find() -> Callable:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func

    return flash_attn_project(find, causal)


def flash_infer(causal: bool):
    """FlashInfer's ragged prefill on copies of shape [tokens, H, D]. The copies and its plan are
    made at the first call."""
    made = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, seq, head_dim = q.shape
        if not made:
            import flashinfer

            workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
            made["call"] = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            ends = seq * torch.arange(batch + 1, device=q.device, dtype=torch.int32)
            made["call"].plan(
                ends, ends, heads, heads, head_dim, causal=causal, q_data_type=q.dtype
            )
            made["packed"] = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
        return made["call"].run(*made["packed"]).unflatten(0, (batch, seq)).transpose(1, 2)

    return run


def triton_flash_attn(causal: bool):
    """Our own kernel in Triton, peers/triton_flash_attn.py. It has no backward."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from peers.triton_flash_attn import flash_attn

        return flash_attn(q, k, v, causal)

    return run


def other_peers(seq: int, head_dim: int, causal: bool, compiled: str) -> dict[str, Callable]:
    """Forward passes of other installed projects. FlexAttention and our kernel in Triton join only
    if `compiled` asks for them."""
    others = {}
    if find_spec("flash_attn_interface"):
        others["FA3"] = flash_attn_3(causal)
    if find_spec("flash_attn") and find_spec("flash_attn.cute"):
        others["FA4"] = flash_attn_4(causal)
    if find_spec("flashinfer"):
        others["FlashInfer"] = flash_infer(causal)
    if compiled == "all" or (compiled == "some" and (head_dim, seq) in shapes.CUDA_ATTN_COMPILED):
        if peers.HAVE_TRITON and head_dim & (head_dim - 1) == 0:
            others["Triton"] = triton_flash_attn(causal)
        others["FlexAttention"] = flex_attention(causal)
    return others


def through_autograd(forward: Callable, more: Sequence[Tensor] = ()) -> Callable:
    """backward(q, k, v, grad, ...) of a forward that runs at the first call. It also returns the
    gradients of `more`, leaves that forward reads."""
    made = {}

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *_):
        if not made:
            made["leaves"] = [x.detach().requires_grad_() for x in (q, k, v)]
            made["out"] = forward(*made["leaves"])
            made["leaves"] += more
            made["grad"] = torch.empty_like(made["out"]).copy_(grad)
        return torch.autograd.grad(made["out"], made["leaves"], made["grad"], retain_graph=True)

    return run


def cuda_forward(seq: int, head_dim: int, causal: bool, compiled: str, device) -> Case:
    batch, heads = shapes.CUDA_ATTN_TOKENS // seq, shapes.CUDA_ATTN_HIDDEN // head_dim

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One head, its first queries: the float64 scores of all would not fit."""
        return reference.flash_attn(
            q[:1, :1, :512].double(), *(x[:1, :1].double() for x in (k, v)), is_causal=causal
        )

    others = other_peers(seq, head_dim, causal, compiled)
    return Case(
        group=f"forward {'causal' if causal else 'full'}",
        label=f"d{head_dim} B{batch} S{seq}",
        dtype="bf16",
        make=lambda: make_qkv(batch, heads, seq, head_dim, torch.bfloat16, device),
        ours=lambda q, k, v: torch_gpukern.flash_attn(q, k, v, is_causal=causal),
        peers={name: sdpa_on(backend, causal) for name, backend in CUDA_PEERS.items()} | others,
        reference=exact,
        compare=lambda out: out[:1, :1, :512],
        flops=4.0 * batch * heads * seq * seq * head_dim / (2 if causal else 1),
        bytes=8.0 * batch * heads * seq * head_dim,
        live=[name for name in others if name == "FlexAttention"],
        optional=list(others),
    )


def cuda_backward(seq: int, head_dim: int, causal: bool, compiled: str, device) -> Case:
    """The backward pass of ours and FlashAttention-2 by their raw ops, because autograd cannot run
    inside a capture on another stream than the forward's. The other peers go through autograd,
    whose host time is short beside their kernels from 1k tokens on."""
    batch, heads = shapes.CUDA_ATTN_TOKENS // seq, shapes.CUDA_ATTN_HIDDEN // head_dim
    aten, ops = torch.ops.aten, torch.ops.gpukern

    def make():
        q, k, v = make_qkv(batch, heads, seq, head_dim, torch.bfloat16, device)
        out, lse = ops.flash_attn_fwd(q, k, v, is_causal=causal)
        theirs = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        grad = torch.randn_like(out)
        # each side gets grad in the layout of its own out, as its autograd would pass it
        return q, k, v, grad, out, lse, theirs, torch.empty_like(theirs[0]).copy_(grad)

    def ours(q, k, v, grad, out, lse, theirs, their_grad):
        return ops.flash_attn_bwd(grad, q, k, v, out, lse, is_causal=causal)[:3]

    def flash(q, k, v, grad, out, lse, theirs, their_grad):
        return aten._scaled_dot_product_flash_attention_backward(
            their_grad,
            q,
            k,
            v,
            theirs[0],
            theirs[1],
            theirs[2],
            theirs[3],
            theirs[4],
            theirs[5],
            0.0,
            causal,
            theirs[6],
            theirs[7],
        )

    def exact(q, k, v, grad, *_):
        q, k, v = (x[:1, :1].double().requires_grad_() for x in (q, k, v))
        out = reference.flash_attn(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), grad[:1, :1].double())

    forwards = {
        name: sdpa_on(backend, causal)
        for name, backend in CUDA_PEERS.items()
        if name != "SDPA flash"
    }
    forwards |= other_peers(seq, head_dim, causal, compiled)
    for name in ("FlashInfer", "Triton"):  # these have no backward
        forwards.pop(name, None)
    return Case(
        group=f"backward {'causal' if causal else 'full'}",
        label=f"d{head_dim} B{batch} S{seq}",
        dtype="bf16",
        make=make,
        ours=ours,
        peers={"SDPA flash": flash}
        | {name: through_autograd(forward) for name, forward in forwards.items()},
        reference=exact if seq <= 8192 else None,
        compare=lambda grads: tuple(g[:1, :1] for g in grads),
        flops=2.5 * 4.0 * batch * heads * seq * seq * head_dim / (2 if causal else 1),
        bytes=16.0 * batch * heads * seq * head_dim,
        live=list(forwards),
        optional=list(forwards),
    )


def dropout_case(seq: int, head_dim: int, causal: bool, backward: bool, device) -> Case:
    """Forward, or backward with ours by the raw op and the peers through autograd."""
    batch, heads = shapes.CUDA_ATTN_TOKENS // seq, shapes.CUDA_ATTN_HIDDEN // head_dim
    ops, p = torch.ops.gpukern, 0.1
    own = dict(is_causal=causal, dropout_p=p, dropout_seed=torch.tensor([1, 2], device=device))
    others = {name: sdpa_on(backend, causal, p) for name, backend in CUDA_PEERS.items()}

    def make():
        q, k, v = make_qkv(batch, heads, seq, head_dim, torch.bfloat16, device)
        if not backward:
            return q, k, v
        out, lse = ops.flash_attn_fwd(q, k, v, **own)
        return q, k, v, torch.randn_like(out), out, lse

    def forward(q, k, v):
        return torch_gpukern.flash_attn(q, k, v, **own)

    def gradients(q, k, v, grad, out, lse):
        return ops.flash_attn_bwd(grad, q, k, v, out, lse, **own)[:3]

    pairs = batch * heads * seq * seq * head_dim / (2 if causal else 1)
    return Case(
        group=f"dropout {'backward' if backward else 'forward'} {'causal' if causal else 'full'}",
        label=f"d{head_dim} B{batch} S{seq}",
        dtype="bf16",
        make=make,
        ours=gradients if backward else forward,
        peers={n: through_autograd(f) for n, f in others.items()} if backward else others,
        reference=None,
        flops=(10.0 if backward else 4.0) * pairs,
        bytes=(16.0 if backward else 8.0) * batch * heads * seq * head_dim,
        live=list(others),
        optional=list(others),
    )


def make_wide(batch: int, seq: int, device):
    """q [batch, 8, seq, 512], k and v [batch, 1, seq, 512]"""
    dim, (heads, heads_kv) = shapes.CUDA_ATTN_WIDE_DIM, shapes.CUDA_ATTN_WIDE_HEADS
    q = make_qkv(batch, heads, seq, dim, torch.bfloat16, device)[0]
    return q, *make_qkv(batch, heads_kv, seq, dim, torch.bfloat16, device)[1:]


def wide_peers(causal: bool) -> dict[str, Callable]:
    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return sdpa_on(SDPBackend.EFFICIENT_ATTENTION, causal)(q, k, v)

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return {"SDPA efficient": repeated, "SDPA math": math}


def wide_case(seq: int, causal: bool, backward: bool, device) -> Case:
    """Forward, or backward with ours by the raw op and the peers through autograd."""
    batch, heads = shapes.CUDA_ATTN_TOKENS // seq, shapes.CUDA_ATTN_WIDE_HEADS[0]
    ops, others = torch.ops.gpukern, wide_peers(causal)
    pairs = batch * heads * seq * seq * shapes.CUDA_ATTN_WIDE_DIM / (2 if causal else 1)

    def make():
        q, k, v = make_wide(batch, seq, device)
        if not backward:
            return q, k, v
        out, lse = ops.flash_attn_fwd(q, k, v, is_causal=causal)
        return q, k, v, torch.randn_like(out), out, lse

    def forward(q, k, v):
        return torch_gpukern.flash_attn(q, k, v, is_causal=causal)

    def gradients(q, k, v, grad, out, lse):
        return ops.flash_attn_bwd(grad, q, k, v, out, lse, is_causal=causal)[:3]

    def exact(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        """The first rows of one head, or of its dq."""
        rows = q[:1, :1, :512].double().requires_grad_(backward)
        out = reference.flash_attn(rows, *(x[:1].double() for x in (k, v)), is_causal=causal)
        return (
            torch.autograd.grad(out, rows, more[0][:1, :1, :512].double())[0] if backward else out
        )

    name = "backward" if backward else "forward"
    return Case(
        group=f"wide {name} {'causal' if causal else 'full'}",
        label=f"d{shapes.CUDA_ATTN_WIDE_DIM} B{batch} S{seq}",
        dtype="bf16",
        make=make,
        ours=gradients if backward else forward,
        peers={n: through_autograd(f) for n, f in others.items()} if backward else others,
        reference=exact,
        compare=lambda out: (out[0] if backward else out)[:1, :1, :512],
        flops=(10.0 if backward else 4.0) * pairs,
        bytes=(16.0 if backward else 8.0) * batch * heads * seq * shapes.CUDA_ATTN_WIDE_DIM,
        live=list(others) if backward else [],
        optional=list(others),
    )


def cuda(run: Run, device) -> None:
    for build in (cuda_forward, cuda_backward):
        for causal in (False, True):
            for head_dim in shapes.CUDA_ATTN_HEAD_DIMS:
                for seq in shapes.CUDA_ATTN_LENGTHS:
                    run.add(build(seq, head_dim, causal, run.args.compiled, device))
    for backward in (False, True):
        for causal in (False, True):
            for head_dim in shapes.CUDA_ATTN_DROPOUT_DIMS:
                for seq in shapes.CUDA_ATTN_DROPOUT_LENGTHS:
                    run.add(dropout_case(seq, head_dim, causal, backward, device))
            for seq in shapes.CUDA_ATTN_WIDE_LENGTHS:
                run.add(wide_case(seq, causal, backward, device))
    if run.wants("call host time"):
        qkv = make_qkv(1, 1, 8, 8, torch.bfloat16, device)
        own = ("SDPA", lambda: F.scaled_dot_product_attention(*qkv))
        overhead_facts(
            run, "flash_attn", lambda: torch_gpukern.flash_attn(*qkv), shapes.CUDA_CALL, own
        )
    for name, lines in peers.lines_of("flash_attn").items():
        run.fact("lines of code", f"flash_attn forward, {name}", lines, "lines")
    run.finish(shapes.CUDA_ATTN_BARS)


def own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compiled",
        choices=("some", "all", "none"),
        default="some",
        help="rows with FlexAttention",
    )


def main() -> None:
    args = arguments("flash_attn", more=own_options)
    device = open_device(args.device)
    run = Run("flash_attn", args, device)
    if device.kind == "cuda":
        return cuda(run, device.device)
    for build in (forward_case, backward_case):
        for causal in (False, True):
            for dtype in ("f32", "bf16"):
                for head_dim in shapes.ATTN_HEAD_DIMS:
                    for seq in shapes.ATTN_LENGTHS:
                        run.add(build(seq, head_dim, causal, dtype, device.device))
    run.add(call_case(device.device))
    if run.wants("call host time"):
        qkv = make_qkv(1, 1, 8, 8, torch.float32, device.device)
        overhead_facts(
            run, "flash_attn", lambda: torch_gpukern.flash_attn(*qkv), shapes.CALL_OVER_MUL
        )
    if device.kind == "cpu":
        if run.wants("isa", slow=True):
            seq = shapes.ATTN_ISA_LENGTH
            statement = (
                f"q, k, v = (torch.randn(2, 4, {seq}, 64).to(dtype) for _ in range(3))\n"
                "call = lambda: torch_gpukern.flash_attn(q, k, v)\n"
                f"flops = 4.0 * 2 * 4 * {seq}**2 * 64"
            )
            isa_shares(run, f"flash_attn S{seq}", statement, shapes.ISA_SHARE["flash_attn"])
        if run.wants("memory", slow=True) and sys.platform == "linux":
            memory_fact(run)
    run.finish(shapes.FLASH_ATTN_BARS)


if __name__ == "__main__":
    sys.exit(main())
