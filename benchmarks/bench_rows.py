# SPDX-License-Identifier: BSD-3-Clause
"""Operations along the last dimension beside torch's own, forward and backward.

python benchmarks/bench_rows.py [--quick] [--only rms_norm layer_norm softmax swiglu cross_entropy
    rope rope_kv_write] [--device cpu|cuda] [--compile]
    norms, softmax, gated units, rotary embedding and loss. On CUDA --compile adds torch.compile of
    torch's own.
python benchmarks/bench_rows.py --device cuda --only linear_cross_entropy [--rows 8192x4096x131072]
    a head and its loss, in FLOPs of three products, beside logits in memory, eager and compiled
python benchmarks/bench_rows.py --device cuda --peers
    Liger and quack, if they import, beside norms, softmax and the loss

With --peers the results are stored under the name rows_peers. Liger's loss leaves its gradient in
the logits, so it runs last. Liger's swiglu and rope are left out: the first takes two tensors, and
the second writes into its inputs.

GB/s counts the bytes that an op must move: inputs read once, results written once. On CUDA operands
are cold.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from harness import DTYPES, Case, Run, arguments, open_device
from torch import Tensor

import torch_gpukern as gk

# the shapes of --peers
LOSSES_BESIDE, SHAPES_BESIDE = ((8192, 32000), (4096, 131072)), ((8192, 4096), (1024, 65536))
HEADS = {
    "cpu": ((512, 512, 16384),),
    "cuda": ((8192, 4096, 32000), (8192, 2048, 131072), (4096, 2048, 151936), (8192, 4096, 131072)),
}
LOSSES = {"cpu": ((256, 32000), (64, 131072)), "cuda": ((8192, 32000), (4096, 131072))}
SHAPES = {
    "cpu": ((1024, 4096), (4096, 128), (64, 50257), (16, 262144)),
    "cuda": ((8192, 4096), (4096, 16384), (1024, 65536), (512, 131072)),
}


def with_gradient(fn):
    """Forward and backward by all inputs. The first input serves as the gradient of the result. The
    gradient of a sum would be 1 everywhere, for which softmax has no gradient, and it would be no
    tensor in memory."""

    def step(*inputs: Tensor):
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = fn(*leaves)
        given = inputs[0][..., : out.shape[-1]].to(out.dtype) if out.dim() else None
        return torch.autograd.grad(out, [x for x in leaves if x.requires_grad], given)

    return step


def others(group: str) -> dict:
    """An op by quack and by Liger, if they import."""
    found = {}
    if find_spec("quack"):
        import quack

        quacks = {"rms_norm": lambda x, w: quack.rmsnorm(x, w, eps=1e-6), "softmax": quack.softmax}
        quacks["cross_entropy"] = lambda x, t: quack.cross_entropy(x, t, reduction="mean")
        found |= {"quack": quacks[group]} if group in quacks else {}
    if find_spec("liger_kernel"):
        from liger_kernel.transformers import functional as liger

        ligers = {
            "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
            "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
            "softmax": liger.liger_softmax,
            "cross_entropy": liger.liger_cross_entropy,
        }
        found |= {"Liger": ligers[group]} if group in ligers else {}
    return found


def pair(
    group: str,
    label: str,
    dtype: str,
    make,
    ours,
    theirs,
    read: int,
    compiled: bool,
    beside: bool = False,
):
    """The forward, and the forward with backward, which counts three times the bytes of the
    forward."""
    guests = others(group) if beside else {}
    for name, wrap, times in (("", lambda f: f, 1), (" forward+backward", with_gradient, 3)):
        peers, judge = {"torch": wrap(theirs)}, wrap(theirs)
        peers |= {guest: wrap(fn) for guest, fn in guests.items()}
        if compiled:
            peers["torch.compile"] = wrap(torch.compile(theirs, dynamic=False))
        yield Case(
            group=group + name,
            label=label,
            dtype=dtype,
            make=make,
            ours=wrap(ours),
            peers=peers,
            reference=lambda *x, f=judge: f(
                *(y.double() if y.is_floating_point() else y for y in x)
            ),
            flops=0.0,
            bytes=float(times * read * DTYPES[dtype].itemsize),
            rotate=True,
            unit="GB/s",
            optional=list(guests),
        )


def cases_beside(device: torch.device, quick: bool, compiled: bool):
    """The cases that Liger or quack also has."""
    of = {"device": device, "dtype": torch.bfloat16}
    for m, n in SHAPES_BESIDE:
        for case in row_cases(m, n, "bf16", of, compiled, beside=True):
            if not case.group.startswith("swiglu"):
                yield case
    for m, v in LOSSES_BESIDE:
        yield from loss_cases(m, v, "bf16", of, compiled, beside=True)


def cases(device: torch.device, quick: bool, compiled: bool):
    for dtype in ("bf16",) if quick else ("f32", "bf16"):
        of = {"device": device, "dtype": DTYPES[dtype]}
        for m, n in SHAPES[device.type][: 2 if quick else None]:
            yield from row_cases(m, n, dtype, of, compiled)
        for m, v in LOSSES[device.type]:
            yield from loss_cases(m, v, dtype, of, compiled)
        for m, h, v in HEADS[device.type] if dtype == "bf16" else ():
            yield head_case(m, h, v, dtype, of)
        yield rope_case(8192 if device.type == "cuda" else 1024, dtype, device)
        for tokens in (1, 64, 8192) if device.type == "cuda" else (1, 64):
            yield rope_write_case(tokens, dtype, device)


def loss_cases(m: int, v: int, dtype: str, of: dict, compiled: bool, beside: bool = False):
    def make():
        return torch.randn(m, v, **of), torch.randint(v, (m,), device=of["device"])

    ours, theirs = gk.cross_entropy, F.cross_entropy
    yield from pair("cross_entropy", f"{m}x{v}", dtype, make, ours, theirs, m * v, compiled, beside)


def head_case(m: int, h: int, v: int, dtype: str, of: dict) -> Case:
    """Loss and gradients of a head: m rows, hidden size h, vocabulary v."""

    def make():
        weight = torch.randn(v, h, **of) / h**0.5
        return torch.randn(m, h, **of), weight, torch.randint(v, (m,), device=of["device"])

    def step(fn):
        def run(x: Tensor, weight: Tensor, target: Tensor):
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = fn(*leaves, target)
            return loss, *torch.autograd.grad(loss, leaves)

        return run

    def logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), target
        )

    def low(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return gk.linear_cross_entropy(x, weight, target, low_memory=True)

    peers = {
        "torch": step(logits),
        "torch.compile": step(torch.compile(logits, dynamic=False)),
        "low_memory": step(low),
    }
    if of["device"].type == "cpu":
        del peers["torch.compile"]
    return Case(
        group="linear_cross_entropy",
        label=f"{m}x{h}x{v}",
        dtype=dtype,
        make=make,
        ours=step(gk.linear_cross_entropy),
        peers=peers,
        reference=lambda x, w, t: logits(x.double(), w.double(), t),
        compare=lambda y: y[0],
        flops=6.0 * m * h * v,
        bytes=0.0,
        live=("gpukern", *peers),
    )


def row_cases(m: int, n: int, dtype: str, of: dict, compiled: bool, beside: bool = False):
    """The cases of m rows of n columns."""
    label, half = f"{m}x{n}", n // 2

    def make(vectors: int):
        return lambda: (torch.randn(m, n, **of), *(torch.randn(n, **of) for _ in range(vectors)))

    def rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (n,), w, 1e-6)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (n,), w, b)

    yield from pair(
        "rms_norm", label, dtype, make(1), gk.rms_norm, rms, 2 * m * n, compiled, beside
    )
    yield from pair(
        "layer_norm", label, dtype, make(2), gk.layer_norm, layer, 2 * m * n, compiled, beside
    )
    soft = gk.softmax, lambda x: F.softmax(x, -1)
    yield from pair("softmax", label, dtype, make(0), *soft, 2 * m * n, compiled, beside)
    if n % 2 == 0:
        yield from pair(
            "swiglu",
            label,
            dtype,
            make(0),
            gk.swiglu,
            lambda x: F.silu(x[:, :half]) * x[:, half:],
            3 * m * half,
            compiled,
        )


def rope_case(tokens: int, dtype: str, device: torch.device) -> Case:
    def make():
        q, k = (
            torch.randn(1, tokens, h, 128, device=device, dtype=DTYPES[dtype]).transpose(1, 2)
            for h in (32, 8)
        )
        angle = torch.rand(tokens, 64, device=device)
        return q, k, angle.cos(), angle.sin()

    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor):
        """Rotary embedding as in transformers: cos and sin repeated for both halves, in the dtype
        of q."""
        c, s = (torch.cat((y, y), -1).to(q.dtype) for y in (cos, sin))
        return tuple(x * c + torch.cat((-x[..., 64:], x[..., :64]), -1) * s for x in (q, k))

    return Case(
        group="rope",
        label=f"32/8 heads of 128, {tokens} tokens",
        dtype=dtype,
        make=make,
        ours=gk.rope,
        peers={"torch": eager},
        reference=lambda q, k, c, s: gk.rope(q.double(), k.double(), c, s),
        flops=0.0,
        bytes=2.0 * 40 * tokens * 128 * DTYPES[dtype].itemsize,
        rotate=True,
        unit="GB/s",
    )


def rope_write_case(tokens: int, dtype: str, device: torch.device) -> Case:
    """rope_kv_write with QK norm into pages of 16, beside the same by one op after the other."""

    def make():
        q, k, v = (
            torch.randn(tokens, h, 128, device=device, dtype=DTYPES[dtype]) for h in (32, 8, 8)
        )
        angle = torch.rand(4096, 64, device=device)
        caches = (
            torch.zeros(2 * tokens // 16 + 1, 16, 8, 128, device=device, dtype=q.dtype)
            for _ in range(2)
        )
        slots = torch.randperm(2 * tokens, device=device)[:tokens]
        positions = torch.randint(4096, (tokens,), device=device)
        return (
            q,
            k,
            v,
            angle.cos(),
            angle.sin(),
            positions,
            *caches,
            slots,
            torch.rand(128, device=device, dtype=q.dtype),
        )

    def ours(*args: Tensor):
        return gk.rope_kv_write(*args[:9], q_weight=args[9], k_weight=args[9])

    def apart(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Tensor
    ):
        q, k = gk.rope(gk.rms_norm(q, rest[3]), gk.rms_norm(k, rest[3]), cos, sin, positions)
        gk.kv_cache_write(k, v, *rest[:3])
        return q

    def exact(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Tensor
    ):
        w = rest[3].double()
        return gk.rope(gk.rms_norm(q.double(), w), gk.rms_norm(k.double(), w), cos, sin, positions)[
            0
        ]

    return Case(
        group="rope_kv_write",
        label=f"32/8 heads of 128, {tokens} tokens",
        dtype=dtype,
        make=make,
        ours=ours,
        peers={"apart": apart},
        reference=exact,
        flops=0.0,
        bytes=96.0 * tokens * 128 * DTYPES[dtype].itemsize,
        rotate=True,
        unit="GB/s",
    )


def own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile of torch's own beside it"
    )
    parser.add_argument(
        "--peers", action="store_true", help="cases that Liger or quack also has, beside them"
    )


def run_all(name: str, cases, beside=None) -> None:
    """Measures `cases(device, quick, compiled)` and stores them under this name. With --peers it
    measures the cases of `beside` and stores them as NAME_peers."""
    args = arguments(name, more=own_options)
    device = open_device(args.device)
    if args.peers:
        if beside is None:
            raise SystemExit(f"bench_{name}: --peers: no other library is beside these")
        name, cases = f"{name}_peers", beside
    run = Run(name, args, device)
    for case in cases(device.device, args.quick, args.compile):
        run.add(case)
    run.finish({})


def main() -> None:
    run_all("rows", cases, cases_beside)


if __name__ == "__main__":
    sys.exit(main())
