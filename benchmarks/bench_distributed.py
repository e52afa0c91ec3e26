# SPDX-License-Identifier: BSD-3-Clause
"""Functions of torch_gpukern.distributed beside one GPU, NCCL with torch.mm, and torch's own
context_parallel and symmetric memory.

NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 torchrun --nproc-per-node 2
benchmarks/bench_distributed.py [--quick] [--parts products,decode] [--out FOLDER]

A time is the median over rounds of the slowest rank's time. Each round runs all contestants in a
random order that is the same on all ranks.

Attention and large products run without the check that all ranks make the same call
(GPUKERN_DIST_CHECK=0); the cost of that check is a line of the table. Small products and decoding
are replayed from CUDA graphs, peers too. Without a GPU for each rank the benchmark only shows, over
gloo, that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_gpukern as gk
from torch_gpukern import distributed as gd
from torch_gpukern import results
from torch_gpukern.distributed.sequence import Cut

CUDA = torch.cuda.is_available() and torch.cuda.device_count() >= int(
    os.environ.get("LOCAL_WORLD_SIZE", 1)
)
DTYPE = torch.bfloat16 if CUDA else torch.float32
SLOW = 0.2  # seconds of a call, or of all contestants, from which on fewer calls are made
RATE = 1.0  # scales the sizes; on a CPU the run only shows that everything works
rows: list[dict] = []
order = random.Random(0)


# ---- times ---------------------------------------------------------------------------------------


def seconds(call, repeats: int) -> float:
    """Seconds of one call on the slowest rank. The call runs inside its context `around`, if it has
    one."""
    with getattr(call, "around", contextlib.nullcontext)():
        took = of_a_call(call, repeats)
    slowest = torch.tensor([took], dtype=torch.float64, device="cuda" if CUDA else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def of_a_call(call, repeats: int) -> float:
    dist.barrier()
    if CUDA:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def captured(call):
    """The call as a replay of a CUDA graph."""
    if not CUDA:
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(
    group: str,
    label: str,
    calls: dict,
    *,
    graph: bool = False,
    rounds: int = 5,
    budget: float = 0.4,
) -> dict:
    """us of each contestant. A peer that does not run is stored with the reason."""
    ready, failed = {}, {}
    for name, call in calls.items():
        error = None
        try:
            with getattr(call, "around", contextlib.nullcontext)():
                call()
            ready[name] = captured(call) if graph else call
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0][:150]}"
        bad = torch.tensor([error is not None], dtype=torch.int32, device="cuda" if CUDA else "cpu")
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            ready.pop(name, None)
            failed[name] = error or "failed on another rank"
    found = {name: [] for name in ready}
    first = {}
    for name, call in ready.items():
        # a first call allocates buffers and would make `repeats` too small
        first[name] = seconds(call, 1)
        if first[name] < SLOW:
            first[name] = seconds(call, 2)
    rounds = min(rounds, 3) if sum(first.values()) > SLOW else rounds
    for _ in range(rounds):
        # the order is random, because a call inherits the clock of the call before it
        for name in order.sample(list(ready), len(ready)):
            repeats = max(1, min(50, int(budget / rounds / len(ready) / first[name])))
            found[name].append(seconds(ready[name], repeats))
    us = {name: round(statistics.median(times) * 1e6, 2) for name, times in found.items()}
    row = {"group": group, "label": label, "us": us, "failed": failed}
    rows.append(row)
    if dist.get_rank() == 0:
        print(
            f"{group:<22}{label:<26}" + "  ".join(f"{n} {t:.1f}" for n, t in us.items()), flush=True
        )
        for name, why in failed.items():
            print(f"    {name}: {why}", flush=True)
    return row


# ---- attention -----------------------------------------------------------------------------------

HEADS_Q, HEADS_KV, DIM = 32, 8, 128


PEERS = ("torch CP cuDNN", "torch CP cuDNN, expanded", "torch CP flash", "torch CP flash, expanded")


def fits(mode: str) -> bool:
    """Whether every rank gets as many heads as the others, as ulysses needs."""
    return mode != "ulysses" or HEADS_KV % dist.get_world_size() == 0


def both_ways(call):
    """Forward and backward of call(q, k, v), with a fixed gradient of out."""

    def step(leaves, grad):
        leaves = [x.detach().requires_grad_() for x in leaves]
        return torch.autograd.grad(call(*leaves), leaves, grad)

    return step


def attention(tokens_a_rank: int, device, alone_only: bool = False) -> None:
    """alone_only: for lengths at which one GPU would take many seconds. The contestants are then
    the modes, torch's fastest kernel, and a rank's attention without communication."""
    ranks = dist.get_world_size()
    total = tokens_a_rank * ranks
    torch.manual_seed(0)
    whole = [
        torch.randn(1, h, total, DIM, device=device, dtype=DTYPE)
        for h in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]
    grad = torch.randn_like(whole[0])
    part, part_grad = (
        [gd.shard_sequence(x, None, 2) for x in whole],
        gd.shard_sequence(grad, None, 2),
    )

    def one(q, k, v):
        return gk.flash_attn(q, k, v, is_causal=True)

    def ours(mode):
        return lambda q, k, v: gd.context_parallel_attn(q, k, v, is_causal=True, mode=mode)

    cut = Cut(total, ranks, "zigzag").segments(dist.get_rank())
    runs = [part[0][:, :, at : at + end - start] for at, start, end in cut]

    def alone(*_):
        """Attention of this rank's queries over all keys, without communication."""
        return [
            gk.flash_attn(q, *whole[1:], is_causal=True, diagonal=start)
            for q, (_, start, _) in zip(runs, cut, strict=True)
        ]

    want = torch.cat(alone(), 2) if alone_only else gd.shard_sequence(one(*whole), None, 2)
    same = torch.equal(want, ours("all_gather")(*part))
    worst = (ours("ring")(*part).float() - want.float()).abs().max().item()
    del want
    label = f"{tokens_a_rank} tokens a rank"
    forward, step = {"attention alone": alone}, {}
    if not alone_only:
        forward |= {"one GPU": lambda: one(*whole)}
        step |= {"one GPU": lambda: both_ways(one)(whole, grad)}
    modes = {m: ours(m) for m in ("all_gather", "ring", "ulysses") if fits(m)}
    forward |= {m: lambda f=f: f(*part) for m, f in modes.items()}
    step |= {m: lambda f=f: both_ways(f)(part, part_grad) for m, f in modes.items()}
    kernels = ("torch CP cuDNN",) if alone_only else PEERS
    rounds = 1 if alone_only else 5
    row = measure("cp forward", label, forward | torch_peers(part, None, kernels), rounds=rounds)
    row |= {"all_gather bit for bit": same, "ring's largest difference": worst}
    measure(
        "cp forward+backward", label, step | torch_peers(part, part_grad, kernels), rounds=rounds
    )
    if tokens_a_rank <= 8192:
        os.environ["GPUKERN_DIST_CHECK"] = "1"
        measure("cp forward, compared", label, {"all_gather": lambda: ours("all_gather")(*part)})
        os.environ["GPUKERN_DIST_CHECK"] = "0"


def crossover(tokens_a_rank: int, heads_kv: int, device) -> None:
    """Compares the modes, forward and with backward, to find which one ``mode="auto"`` should
    take."""
    torch.manual_seed(0)
    heads = (HEADS_Q, heads_kv, heads_kv)
    part = [torch.randn(1, h, tokens_a_rank, DIM, device=device, dtype=DTYPE) for h in heads]
    grad = torch.randn_like(part[0])
    label = f"{tokens_a_rank} tokens a rank, {HEADS_Q} heads over {heads_kv}"
    modes = {
        m: functools.partial(gd.context_parallel_attn, is_causal=True, mode=m)
        for m in ("all_gather", "ring", "ulysses")
        if fits(m)
    }
    measure(
        "cp modes, forward",
        label,
        {m: lambda f=f: f(*part) for m, f in modes.items()},
        rounds=3,
        budget=0.1,
    )
    step = {m: lambda f=f: both_ways(f)(part, grad) for m, f in modes.items()}
    measure("cp modes, forward+backward", label, step, rounds=3, budget=0.2)


def torch_peers(part, grad, wanted=PEERS) -> dict:
    """torch's context_parallel with each of its kernels. Its load balancing cuts the sequence as
    our zigzag does. K and V keep their own heads if the kernel accepts that; otherwise they are
    expanded to one head for each of q's ("expanded")."""
    if not CUDA:
        return {}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import context_parallel

    mesh, usual = init_device_mesh("cuda", (dist.get_world_size(),)), F.scaled_dot_product_attention
    table = DTensor._op_dispatcher._custom_op_handlers
    wide = part
    if any("expanded" in name for name in wanted):
        wide = [part[0], *(x.repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in part[1:])]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1]
        )

    def run(given):
        return attend(*given) if grad is None else both_ways(attend)(given, grad)

    @contextlib.contextmanager
    def around(backend):
        unused = torch.zeros(2 * dist.get_world_size(), device="cuda")
        try:
            with (
                sdpa_kernel(backend),
                context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]),
            ):
                yield
        finally:  # after an exception torch leaves its replacements in place
            F.scaled_dot_product_attention = usual
            DTensor._op_dispatcher._custom_op_handlers = table

    backends = {
        "torch CP cuDNN": SDPBackend.CUDNN_ATTENTION,
        "torch CP flash": SDPBackend.FLASH_ATTENTION,
    }
    calls = {}
    for name, backend in backends.items():
        for more, given in (("", part), (", expanded", wide)):
            if name + more not in wanted:
                continue
            calls[name + more] = functools.partial(run, given)
            calls[name + more].around = functools.partial(around, backend)
    return calls


def decode(keys: int, device) -> None:
    """Decodes one new token of one sequence."""
    ranks, block = dist.get_world_size(), 64
    torch.manual_seed(0)  # the same on every rank
    q = torch.randn(1, HEADS_Q, DIM, device=device, dtype=DTYPE)
    pages = keys // block
    cache = [torch.randn(pages, block, HEADS_KV, DIM, device=device, dtype=DTYPE) for _ in range(2)]
    table = torch.randperm(pages, device=device).to(torch.int32)
    mine = table.tensor_split(ranks)[dist.get_rank()]
    lens, local = (
        torch.tensor([n], dtype=torch.int32, device=device) for n in (keys, mine.numel() * block)
    )
    calls = {
        "one GPU": lambda: gk.paged_attn(q, *cache, table[None], lens),
        "ours": lambda: gd.context_parallel_paged_attn(q, *cache, mine[None], local),
    }
    worst = (calls["ours"]().float() - calls["one GPU"]().float()).abs().max().item()
    row = measure("cp decode", f"1 x {keys} keys", calls, graph=True)
    row["largest difference"] = worst


# ---- products ------------------------------------------------------------------------------------


def symmetric(name: str):
    """An op of torch's symmetric memory with the group's name as last argument. If torch lacks the
    op, the call raises an error that says so."""
    return getattr(torch.ops.symm_mem, name)


def products(m: int, k: int, n: int, device) -> None:
    import torch.distributed._symmetric_memory  # noqa: F401  defines the ops

    ranks, name, group = dist.get_world_size(), f"{m} {k} {n}", dist.group.WORLD.group_name
    of = dict(device=device, dtype=DTYPE)
    a, b = torch.randn(m // ranks, k, **of), torch.randn(k, n // ranks, **of)
    met = torch.empty(m, k, **of)

    def nccl_gather():
        dist.all_gather_into_tensor(met, a)
        return torch.mm(met, b)

    calls = {"ours": lambda: gd.all_gather_gemm(a, b), "NCCL + mm": nccl_gather}
    if CUDA:
        calls["symm_mem"] = lambda: symmetric("fused_all_gather_matmul")(a, [b], 0, group)
    calls["gemm alone"] = lambda: gk.gemm(met, b)
    calls["mm alone"] = lambda: torch.mm(met, b)
    calls["own, then rest"] = as_before(lambda: gd.all_gather_gemm(a, b))
    same_as_peers("all_gather_gemm", calls)
    measure("all_gather_gemm", name, calls)

    a2, b2 = torch.randn(m, k // ranks, **of), torch.randn(k // ranks, n, **of)
    kept = torch.empty(m // ranks, n, **of)

    def nccl_scatter():
        dist.reduce_scatter_tensor(kept, torch.mm(a2, b2))
        return kept

    calls = {"ours": lambda: gd.gemm_reduce_scatter(a2, b2), "NCCL + mm": nccl_scatter}
    if CUDA:
        calls["symm_mem"] = lambda: symmetric("fused_matmul_reduce_scatter")(
            a2, b2, "sum", 0, group
        )
    calls["gemm alone"] = lambda: gk.gemm(a2, b2)
    calls["mm alone"] = lambda: torch.mm(a2, b2)
    calls["sums sent"] = as_before(lambda: gd.gemm_reduce_scatter(a2, b2))
    same_as_peers("gemm_reduce_scatter", calls)
    measure("gemm_reduce_scatter", name, calls)


def as_before(call):
    """The call in the other form that products.py has: gathered rows are multiplied as this rank's
    and then the rest, and float32 sums are sent in place of operands."""
    from torch_gpukern.distributed import products

    def own_then_rest(cut, rank, *_):
        ((start, end),) = cut.spans[rank]
        runs = ((start, end, 0), (0, start, cut.size - 1), (end, cut.length, cut.size - 1))
        return [run for run in runs if run[0] < run[1]]

    def run():
        usual = products._as_they_arrive, products._fetches
        products._as_they_arrive, products._fetches = own_then_rest, lambda *_: False
        try:
            return call()
        finally:
            products._as_they_arrive, products._fetches = usual

    return run


def same_as_peers(what: str, calls: dict) -> None:
    """Raises if ours differs from NCCL + mm by more than the rounding of its sums."""
    ours, theirs = (calls[name]().float() for name in ("ours", "NCCL + mm"))
    off = (ours - theirs).norm() / theirs.norm()
    if not off < (1e-2 if CUDA else 1e-5):
        raise AssertionError(f"{what}: ours and NCCL + mm differ by {off:.3g}")


def all_reduce(m: int, device) -> None:
    ranks, size, of = dist.get_world_size(), int(8192 * RATE), dict(device=device, dtype=DTYPE)
    a, b = torch.randn(m, size // ranks, **of), torch.randn(size // ranks, size, **of)

    def nccl():
        out = torch.mm(a, b)
        dist.all_reduce(out)
        return out

    calls = {"ours": lambda: gd.gemm_all_reduce(a, b), "NCCL + mm": nccl}
    if CUDA:
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD.group_name
        room = symm_mem.empty(m, size, **of)
        symm_mem.rendezvous(room, group)

        def shot(kind):
            def call():
                torch.mm(a, b, out=room)
                return getattr(torch.ops.symm_mem, kind)(room, "sum", group)

            return call

        calls |= {"one-shot": shot("one_shot_all_reduce"), "two-shot": shot("two_shot_all_reduce_")}
    calls["gemm alone"] = lambda: gk.gemm(a, b)
    same_as_peers("gemm_all_reduce", calls)
    measure("gemm_all_reduce", f"{m} {size} {size}", calls, graph=True, budget=0.2)


# ---- loss and experts ----------------------------------------------------------------------------


def loss(rows_: int, hidden: int, classes: int, device) -> None:
    """Forward and backward of a head whose classes are cut over ranks, beside the same head on one
    GPU, and beside torch's loss_parallel, which makes the logits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    ranks, rank, of = dist.get_world_size(), dist.get_rank(), dict(device=device, dtype=DTYPE)
    torch.manual_seed(0)  # the same on every rank
    x = torch.randn(rows_, hidden, **of).requires_grad_()
    whole = (torch.randn(classes, hidden, **of) * 0.02).requires_grad_()
    own = whole.detach().tensor_split(ranks)[rank].clone().requires_grad_()
    target = torch.randint(0, classes, (rows_,), device=device)
    mesh = init_device_mesh(device.type, (ranks,))

    def one():
        value = gk.linear_cross_entropy(x, whole, target, low_memory=True)
        return torch.autograd.grad(value, (x, whole))

    def ours():
        value = gd.vocab_parallel_linear_cross_entropy(x, own, target, classes=classes)
        return torch.autograd.grad(value, (x, own))

    def theirs():
        logits = DTensor.from_local(torch.mm(x, own.t()), mesh, [Shard(1)])
        with loss_parallel():
            value = F.cross_entropy(logits, target)
            dx, dw = torch.autograd.grad(value, (x, own))
        dist.all_reduce(dx)  # the share of this rank's classes
        return dx, dw

    want, got = one(), ours()
    off = (got[0].float() - want[0].float()).norm() / want[0].float().norm()
    label = f"{rows_} rows, {hidden} to {classes}"
    row = measure(
        "vocabulary-parallel loss, forward+backward",
        label,
        {"ours": ours, "torch loss_parallel": theirs, "one GPU": one},
        budget=0.3,
    )
    row["difference from one GPU"] = off.item()


def experts(tokens: int, hidden: int, inner: int, number: int, each: int, device) -> None:
    """Forward and backward of a mixture whose experts are cut over ranks. tokens: of a rank.
    "experts alone" has the same products without communication; the peer makes the same exchange by
    NCCL, and grouped products by torch."""
    ranks, of = dist.get_world_size(), dict(device=device, dtype=DTYPE)
    torch.manual_seed(dist.get_rank())
    x, own = torch.randn(tokens, hidden, **of).requires_grad_(), number // ranks
    up = (torch.randn(own, hidden, 2 * inner, **of) * hidden**-0.5).requires_grad_()
    down = (torch.randn(own, inner, hidden, **of) * inner**-0.5).requires_grad_()
    score, expert_of = torch.rand(tokens, number, device=device).topk(each)
    weight_of, grad = score.softmax(-1), torch.randn(tokens, hidden, **of)

    def ours():
        out = gd.expert_parallel(x, expert_of, weight_of, up, down)
        return out.detach(), *torch.autograd.grad(out, (x, up, down), grad)

    def alone():
        out = gk.nn.grouped_experts(x, expert_of % own, weight_of, up, down)
        return torch.autograd.grad(out, (x, up, down), grad)

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, sent, met):
            ctx.back = met, sent
            out = x.new_empty(sum(met), x.shape[1])
            dist.all_to_all_single(out, x.contiguous(), met, sent)
            return out

        @staticmethod
        def backward(ctx, grad):
            return Swap.apply(grad, *ctx.back), None, None

    def theirs():
        sorted_, order = expert_of.flatten().sort(stable=True)
        counts = torch.bincount(sorted_, minlength=number)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        sent, met = (n.view(ranks, own) for n in (counts, incoming))
        sent, per_expert = sent.sum(1).tolist(), met
        met = met.sum(1).tolist()
        rows_ = Swap.apply(x[order // each], sent, met)
        here = torch.arange(own, device=device).repeat(ranks)
        here = here.repeat_interleave(per_expert.flatten(), output_size=sum(met))
        here, place = here.sort(stable=True)
        ends = torch.bincount(here, minlength=own).cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(rows_[place], up, offs=ends).chunk(2, -1)
        back = torch._grouped_mm(F.silu(gate) * value, down, offs=ends)
        rows_ = Swap.apply(torch.zeros_like(back).index_copy(0, place, back), met, sent)
        rows_ = torch.zeros_like(rows_).index_copy(0, order, rows_).view(tokens, each, hidden)
        out = (rows_ * weight_of.unsqueeze(-1).to(rows_.dtype)).sum(1)
        return out.detach(), *torch.autograd.grad(out, (x, up, down), grad)

    calls = {"ours": ours, "experts alone": alone}
    if CUDA:
        calls["NCCL + torch grouped_mm"] = theirs
    label = f"{tokens} tokens a rank, {each} of {number} experts, {hidden} to {inner}"
    row = measure("expert parallel, forward+backward", label, calls, budget=0.3)
    if "NCCL + torch grouped_mm" in row["us"]:
        a, b = ours(), theirs()
        offs = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(a, b)]
        row["largest difference from the peer"] = max(offs).item()


def links(device) -> None:
    """The numbers of a Machine: bytes a second that a GPU sends by both methods in use, and the
    rate of a product."""
    ranks, each = dist.get_world_size(), int((32 << 20) * RATE)
    x, met = (
        torch.randn(each, device=device, dtype=DTYPE),
        torch.empty(ranks * each, device=device, dtype=DTYPE),
    )
    sent = x.numel() * x.element_size() * (ranks - 1)
    row = measure(
        "links",
        f"{x.numel() * x.element_size() >> 20} MiB a rank",
        {
            "NCCL all_gather": lambda: dist.all_gather_into_tensor(met, x),
            "gather_sequence": lambda: gd.gather_sequence(x, dim=0),
        },
    )
    row["GB/s"] = {name: round(sent / us / 1e3, 1) for name, us in row["us"].items()}
    if dist.get_rank() == 0:
        print(f"    GB/s a direction: {row['GB/s']}", flush=True)


def training(device, trace: Path | None) -> None:
    """The forms of the example: tokens a second, bytes that a rank sends, and how much
    communication overlaps kernels."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "distributed"))
    import train

    os.environ["GPUKERN_DIST_CHECK"] = "0"
    config, ranks = train.CONFIG[device.type], dist.get_world_size()
    text = torch.randint(0, 256, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    alone = train.Form(dtype=DTYPE)
    pair = ranks // 2
    forms = {
        "one GPU": "",
        "data": "",
        "zero 3": "--zero 3",
        "tensor, sequence": f"--tensor {ranks} --sequence",
        "context": f"--context {ranks} --mode all_gather",
        "pipeline": f"--pipeline {ranks} --microbatches 8",
    }
    if ranks >= 4 and ranks % 2 == 0:  # two forms at a time
        forms |= {
            "data 2, tensor": f"--tensor {pair} --sequence",
            "pipeline 2, tensor": f"--pipeline 2 --tensor {pair} --sequence --microbatches 8",
            "data 2, context": f"--context {pair} --mode all_gather",
            "context 2, tensor": f"--context 2 --tensor {pair} --sequence",
        }
    if ranks == 8:
        forms["pipeline 2, data 2, tensor 2"] = "--pipeline 2 --tensor 2 --sequence"
        forms["data 2, context 2, tensor 2"] = "--context 2 --tensor 2 --sequence"
    for name, flags in forms.items():
        try:
            options = train.parse(["--steps", "5", "--batch", "8", *flags.split()])
            if trace and name in ("data", "tensor, sequence"):
                options.trace = trace.with_name(f"{trace.stem}_{name.split(',')[0]}.json")
            losses, told = train.losses_of(
                options, text, config, device, alone if name == "one GPU" else None
            )
            told["last_loss"] = losses[-1]
            rows.append({"group": "training", "label": name, "losses": losses, "told": told})
            if dist.get_rank() == 0:
                print(f"training, {name}: losses {losses}", flush=True)
        except Exception as raised:
            print(f"training, {name}: {type(raised).__name__}: {raised}", flush=True)
            rows.append({"group": "training", "label": name, "failed": str(raised)[:200]})
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


OURS = ("ours", "all_gather", "ring", "ulysses", "gather_sequence")
NO_PEERS = ("one GPU", "attention alone", "experts alone", "gemm alone", "mm alone")
NO_PEERS += ("own, then rest", "sums sent")


def stored() -> dict:
    """The rows in the form of results.py: the fastest of our modes beside its peers. The other
    modes, one GPU and the bounds of a call are stored as facts."""
    cases, facts = [], []
    for row in rows:
        fact = {"group": row["group"], "unit": ""}
        if row["group"] == "training":
            told = row.get("told", {})
            facts += [
                fact | {"label": f"{row['label']}: {k}", "value": v}
                for k, v in told.items()
                if v is not None
            ]
            continue
        us = row["us"]
        facts += [
            fact | {"label": f"{row['label']}: {key}", "value": float(value)}
            for key, value in row.items()
            if isinstance(value, (bool, int, float))
        ]
        modes = [name for name in OURS if name in us]
        if not modes:
            facts += [
                fact | {"label": f"{row['label']}: {n}", "value": t, "unit": "us"}
                for n, t in us.items()
            ]
            continue
        best = min(modes, key=us.get)
        calls = {name: {"us": t} for name, t in us.items() if name != best}
        case = {
            "group": row["group"],
            "label": row["label"],
            "dtype": "bf16" if CUDA else "f32",
            "us": us[best],
        }
        case["peers"] = {name: call for name, call in calls.items() if name not in OURS + NO_PEERS}
        case["beside"] = {name: call for name, call in calls.items() if name not in case["peers"]}
        cases.append(case | {"unit": "", "note": f"ours: {best}"})
    return {"rows": cases, "facts": facts}


def write(out: Path | None) -> None:
    if dist.get_rank() != 0 or out is None:
        return
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = (
        subprocess.run(ask, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
        if CUDA
        else ("cpu", "")
    )
    facts = {
        "driver": driver,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if CUDA else "",
        "date": datetime.date.today().isoformat(),
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} "
        f"benchmarks/bench_distributed.py "
        + " ".join(x for x in sys.argv[1:] if x.startswith("--quick")),
    }
    results.store(out, f"{dist.get_world_size()} x {name}", "distributed", facts | stored())


PARTS = ["links", "attention", "products", "all_reduce", "decode", "loss", "experts"]
PARTS += ["attention_32k", "crossover", "training", "attention_128k"]


def of_part(name: str, options, device) -> list:
    """The measurements of a part, as functions of no argument."""
    quick, many = options.quick, lambda n: int(n * RATE)  # noqa: E731

    def calls(measured, *given, **more):
        return [functools.partial(measured, *args, device, **more) for args in given]

    if name == "links":
        return [functools.partial(links, device)]
    if name.startswith("attention"):
        thousands = int(name.partition("_")[2].removesuffix("k") or 8)
        if quick and thousands > 8:
            return []
        return calls(attention, (many(thousands << 10),), alone_only=thousands > 32)
    if name == "products":
        shapes = ((8192, 10240),) if quick else ((8192, 10240), (8192, 57344), (4096, 6144))
        return calls(products, *((many(8192), many(k), many(n)) for k, n in shapes))
    if name == "all_reduce":
        return calls(all_reduce, *((m,) for m in ((1, 64) if quick else (1, 8, 16, 64))))
    if name == "decode":
        return calls(decode, *((many(n << 20),) for n in ((1,) if quick else (1, 4))))
    if name == "loss":
        return calls(loss, (many(8192), many(4096), many(128 << 10)))
    if name == "experts":
        return calls(experts, (many(8192), many(2048), many(768) // 8 * 8, 64, 8))
    if name == "crossover":
        cases = ((1024, 8), (1024, 32), (4096, 8), (4096, 32), (16384, 32))
        return calls(crossover, *((many(n), heads) for n, heads in cases if not quick or n == 1024))
    return [functools.partial(training, device, options.trace)] if CUDA else []


def main() -> None:
    global RATE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        default="",
        help=f"only these of {','.join(PARTS)}, comma-separated, in this order",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument(
        "--out", type=Path, help="the folder of the results, such as benchmarks/results"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="beginning of the names of timelines, Chrome traces of training steps",
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(
            "bench_distributed: measures several ranks, which torchrun starts: torchrun "
            "--nproc-per-node 2 benchmarks/bench_distributed.py"
        )
    os.environ["GPUKERN_DIST_CHECK"] = "0"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=datetime.timedelta(seconds=60))
    RATE = 1.0 if CUDA else 1 / 64
    names = options.parts.split(",") if options.parts else PARTS
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"bench_distributed: --parts takes {','.join(PARTS)}, got {unknown}")
    parts = [part for name in names for part in of_part(name, options, device)]
    failed = 0
    for part in parts:
        try:
            part()
        except Exception:
            failed += 1
            print(f"rank {dist.get_rank()}:\n{traceback.format_exc()}", flush=True)
        write(options.out)  # keep what is measured, even if a later part fails
        if CUDA:
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"bench_distributed: {failed} of {len(parts)} measurements failed")


if __name__ == "__main__":
    main()
