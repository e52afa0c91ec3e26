# SPDX-License-Identifier: BSD-3-Clause
"""Compares context-parallel attention with attention on one rank: error, bits, bytes sent and time
of each mode.

    torchrun --nproc-per-node 2 examples/distributed/context_parallel.py
    torchrun --nproc-per-node 4 examples/distributed/context_parallel.py --dtype bfloat16

With a GPU per rank it uses NCCL, otherwise gloo on the CPU.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import torch_gpukern as gk
from torch_gpukern import distributed as gd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 4), metavar=("Hq", "Hkv"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--steps", type=int, default=3, help="of which the fastest counts")
    return parser.parse_args()


def step(call, leaves, weight):
    """Attention's out, and the gradients of a weighted sum of it."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)


def timed(call, args, steps, device):
    """The result, and the time in ms of the fastest of several steps on the slowest rank."""
    best = float("inf")
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        result = step(call, *args)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    slowest = torch.tensor([best * 1e3], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return result, slowest.item()


def sent_bytes(mode, k, v, q, ranks):
    """The bytes that a rank sends in a forward and a backward."""
    wide = 4
    own_kv, own_q, others = k.numel() + v.numel(), q.numel(), ranks - 1
    if mode == "all_gather":  # K and V twice, their float32 gradients back
        return others * own_kv * (2 * k.element_size() + wide)
    if mode == "ring":  # the gradients make one step more
        return others * own_kv * 2 * k.element_size() + ranks * own_kv * wide
    # Forward: q, k, v and out. Backward: those, grad_out and the gradients. A rank keeps 1 / ranks
    # of each.
    return others / ranks * (3 * own_kv + 5 * own_q) * k.element_size()


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dtype = getattr(torch, options.dtype)
    (hq, hkv), d, tokens = options.heads, options.head_dim, options.tokens

    torch.manual_seed(0)  # the same tensors on every rank
    q, k, v, weight = (
        torch.randn(1, h, tokens, d, device=device).to(dtype) for h in (hq, hkv, hkv, hq)
    )
    exact = step(
        lambda q, k, v: gk.flash_attn(q, k, v, is_causal=True),
        [x.double() for x in (q, k, v)],
        weight.double(),
    )
    whole, alone = timed(
        lambda q, k, v: gk.flash_attn(q, k, v, is_causal=True),
        ([q, k, v], weight),
        options.steps,
        device,
    )

    def error(got, layout):
        """The root-mean-square error over all ranks of out, dq, dk and dv, relative to one rank's
        values."""
        ratios = []
        for x, one, ref in zip(got, whole, exact, strict=True):
            ref, one = (gd.shard_sequence(t, None, 2, layout).double() for t in (ref, one))
            sums = torch.stack([(x.double() - ref).square().sum(), (one - ref).square().sum()])
            dist.all_reduce(sums)
            ratios.append((sums[0] / sums[1]).sqrt().item())
        return max(ratios)

    if rank == 0:
        print(
            f"{tokens} tokens, {hq} heads over {hkv}, head_dim {d}, {options.dtype}, causal, "
            f"forward and backward; "
            f"{ranks} ranks, {'nccl' if cuda else 'gloo'}; one rank alone {alone:.1f} ms"
        )
        print(
            f"{'mode':<12}{'layout':<12}{'ms':>9}{'of ideal':>10}{'MB sent':>10}{'error of one rank':>20}  out bit for bit"  # noqa: E501
        )
    for mode in ("all_gather", "ring", "ulysses"):
        if mode == "ulysses" and (hq % ranks or hkv % ranks):
            continue
        for layout in ("contiguous", "zigzag"):
            parts = [gd.shard_sequence(x, None, 2, layout) for x in (q, k, v, weight)]

            def call(q, k, v, mode=mode, layout=layout):
                return gd.context_parallel_attn(
                    q, k, v, is_causal=True, mode=mode, layout=layout, seq_len=tokens
                )

            got, ms = timed(call, (parts[:3], parts[3]), options.steps, device)
            same = torch.tensor(
                [torch.equal(got[0], gd.shard_sequence(whole[0], None, 2, layout))],
                dtype=torch.int32,
                device=device,
            )
            dist.all_reduce(same, op=dist.ReduceOp.MIN)
            worst, sent = (
                error(got, layout),
                sent_bytes(mode, parts[1], parts[2], parts[0], ranks) / 1e6,
            )
            if rank == 0:
                print(
                    f"{mode:<12}{layout:<12}{ms:>9.1f}{alone / ranks / ms:>10.2f}{sent:>10.1f}{worst:>20.3f}  {'yes' if same.item() else 'no'}"  # noqa: E501
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
