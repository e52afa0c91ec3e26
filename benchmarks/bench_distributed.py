# SPDX-License-Identifier: BSD-3-Clause
"""Functions of torch_gpukern.distributed beside one GPU, NCCL with torch.mm, and torch's own
context_parallel and symmetric memory.

NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 torchrun --nproc-per-node 2
benchmarks/bench_distributed.py [--quick] [--out FOLDER]

A time is the median of some rounds, of the rank that takes longest; each round has all contestants,
in an order drawn anew, the same on all ranks. Attention and the large products are called without
the comparison of the ranks' calls (GPUKERN_DIST_CHECK=0), whose own cost is a line of the table;
small products and decoding are replayed from CUDA graphs, peers too. Without a GPU a rank it shows
by gloo that everything runs.
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
RATE = 1.0  # of the sizes; a CPU shows that all runs
rows: list[dict] = []
order = random.Random(0)


# ---- times ---------------------------------------------------------------------------------------


def seconds(call, repeats: int) -> float:
    """The time of one call on the slowest rank, within the contexts that the call needs."""
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
    """A call that replays `call` from a CUDA graph."""
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
    """Times in us by contestant. A peer that does not run says why."""
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
        seconds(call, 2)  # a first call makes buffers: it would say that few repeats fit
        first[name] = seconds(call, 2)
    for _ in range(rounds):
        # who follows whom decides whose clocks are low
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


def both_ways(call):
    """Forward and backward of call(q, k, v), with a fixed gradient of out."""

    def step(leaves, grad):
        leaves = [x.detach().requires_grad_() for x in leaves]
        return torch.autograd.grad(call(*leaves), leaves, grad)

    return step


def attention(tokens_a_rank: int, device) -> None:
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

    want, got = one(*whole), ours("all_gather")(*part)
    same = torch.equal(gd.shard_sequence(want, None, 2), got)
    worst = (
        (ours("ring")(*part).float() - gd.shard_sequence(want, None, 2).float()).abs().max().item()
    )
    cut = Cut(total, ranks, "zigzag").segments(dist.get_rank())
    runs = [part[0][:, :, at : at + end - start] for at, start, end in cut]

    def alone(*_):
        """This rank's queries over all keys, which are already here."""
        return [
            gk.flash_attn(q, *whole[1:], is_causal=True, diagonal=start)
            for q, (_, start, _) in zip(runs, cut, strict=True)
        ]

    label = f"{tokens_a_rank} tokens a rank"
    forward = {"one GPU": lambda: one(*whole), "attention alone": alone}
    modes = {m: ours(m) for m in ("all_gather", "ring", "ulysses")}
    forward |= {m: lambda f=f: f(*part) for m, f in modes.items()}
    row = measure("cp forward", label, forward | torch_peers(part, None))
    row |= {"all_gather bit for bit": same, "ring's largest difference": worst}
    step = {"one GPU": lambda: both_ways(one)(whole, grad)}
    step |= {m: lambda f=f: both_ways(f)(part, part_grad) for m, f in modes.items()}
    measure("cp forward+backward", label, step | torch_peers(part, part_grad))
    if tokens_a_rank <= 8192:
        os.environ["GPUKERN_DIST_CHECK"] = "1"
        measure("cp forward, compared", label, {"all_gather": lambda: ours("all_gather")(*part)})
        os.environ["GPUKERN_DIST_CHECK"] = "0"


def crossover(tokens_a_rank: int, heads_kv: int, device) -> None:
    """The modes beside each other, forward and with backward: which one ``mode="auto"`` should
    take."""
    torch.manual_seed(0)
    heads = (HEADS_Q, heads_kv, heads_kv)
    part = [torch.randn(1, h, tokens_a_rank, DIM, device=device, dtype=DTYPE) for h in heads]
    grad = torch.randn_like(part[0])
    label = f"{tokens_a_rank} tokens a rank, {HEADS_Q} heads over {heads_kv}"
    modes = {
        m: functools.partial(gd.context_parallel_attn, is_causal=True, mode=m)
        for m in ("all_gather", "ring", "ulysses")
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


def torch_peers(part, grad) -> dict:
    """torch's context_parallel with each of its kernels; its balanced split is that of zigzag. K
    and V keep their own heads if the kernel takes that, else they are expanded to q's.
    """
    if not CUDA:
        return {}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import context_parallel

    mesh, usual = init_device_mesh("cuda", (dist.get_world_size(),)), F.scaled_dot_product_attention
    table = DTensor._op_dispatcher._custom_op_handlers
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
        finally:  # an exception leaves its replacements in place
            F.scaled_dot_product_attention = usual
            DTensor._op_dispatcher._custom_op_handlers = table

    backends = {
        "torch CP cuDNN": SDPBackend.CUDNN_ATTENTION,
        "torch CP flash": SDPBackend.FLASH_ATTENTION,
    }
    calls = {}
    for name, backend in backends.items():
        for more, given in (("", part), (", expanded", wide)):
            calls[name + more] = functools.partial(run, given)
            calls[name + more].around = functools.partial(around, backend)
    return calls


def decode(keys: int, device) -> None:
    """One sequence, one new token."""
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
    """An op of torch's symmetric memory, with the group's name last; a stand-in that raises if
    torch lacks it.
    """
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
    measure("gemm_reduce_scatter", name, calls)


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
    measure("gemm_all_reduce", f"{m} {size} {size}", calls, graph=True, budget=0.2)


def links(device) -> None:
    """Bytes a second that a GPU sends, by both ways in use, and the rate of a product: the numbers
    of a Machine.
    """
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
    """The example's forms: tokens a second, bytes that a rank sends, and how much of the
    communication overlaps with kernels.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "distributed"))
    import train

    os.environ["GPUKERN_DIST_CHECK"] = "0"
    config, ranks = train.CONFIG[device.type], dist.get_world_size()
    text = torch.randint(0, 256, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    alone = train.Form(dtype=DTYPE)
    forms = {
        "one GPU": "",
        "data": "",
        "zero 3": "--zero 3",
        "tensor, sequence": f"--tensor {ranks} --sequence",
        "context": f"--context {ranks} --mode all_gather",
        "pipeline": f"--pipeline {ranks} --microbatches 8",
    }
    for name, flags in forms.items():
        try:
            options = train.parse(["--steps", "5", "--batch", "8", *flags.split()])
            if trace and name in ("data", "tensor, sequence"):
                options.trace = trace.with_name(f"{trace.stem}_{name.split(',')[0]}.json")
            losses, told = train.losses_of(
                options, text, config, device, alone if name == "one GPU" else None
            )
            rows.append({"group": "training", "label": name, "losses": losses, "told": told})
        except Exception as raised:
            print(f"training, {name}: {type(raised).__name__}: {raised}", flush=True)
            rows.append({"group": "training", "label": name, "failed": str(raised)[:200]})
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


OURS = ("ours", "all_gather", "ring", "ulysses", "gather_sequence")
NO_PEERS = ("one GPU", "attention alone", "gemm alone", "mm alone")


def stored() -> dict:
    """The rows as results.py writes them: the fastest of our modes beside its peers; the other
    modes, one GPU and what bounds a call stand apart."""
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


def main() -> None:
    global RATE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    links(device)
    parts = [functools.partial(attention, int(8192 * RATE), device)]
    for k, n in ((8192, 10240),) if options.quick else ((8192, 10240), (8192, 57344), (4096, 6144)):
        parts.append(
            functools.partial(products, int(8192 * RATE), int(k * RATE), int(n * RATE), device)
        )
    parts += [
        functools.partial(all_reduce, m, device)
        for m in ((1, 64) if options.quick else (1, 8, 16, 64))
    ]
    parts.append(functools.partial(decode, int((1 << 20) * RATE), device))
    if not options.quick:
        parts.append(functools.partial(attention, int(32768 * RATE), device))
    for tokens, heads_kv in ((1024, 8), (1024, 32), (4096, 8), (4096, 32), (16384, 32)):
        if not options.quick or tokens == 1024:
            parts.append(functools.partial(crossover, int(tokens * RATE), heads_kv, device))
    for part in parts:
        part()
        write(options.out)  # what is measured stays, whatever comes later
    if CUDA:
        training(device, options.trace)
    write(options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
