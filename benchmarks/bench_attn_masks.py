# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn with masks and biases beside compiled FlexAttention and SDPA with attn_mask, on CUDA.

python benchmarks/bench_attn_masks.py [--quick] [--only forward wide backward builder rule] [--rows 8192 ...]

FLOPs count visible pairs alone: 4 * batch * heads * pairs * head_dim. Masks are built before the
clock starts, ours and FlexAttention's; the group "builder" times ours. The group "wide" is the
forward with head_dim 256. The group "rule" compares a mask with gpukern's own rule for the same
pairs, and a bias with the call without it. All backward passes go through autograd, and "grad" in a
bias's name says that its gradient is computed, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import shapes
import torch
import torch.nn.functional as F
from bench_flash_attn import through_autograd
from harness import Case, Run, arguments, open_device
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_gpukern as gk
from torch_gpukern import reference

HEAD_DIM, WINDOW, GLOBAL, TILE = 128, 1024, 64, 128
COMPARED = 256  # queries that are compared with float64
RULES = {  # masks that are a rule of gpukern
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_left": WINDOW - 1},
}


class Mask:
    """A mask as AttnMask, as FlexAttention's mask_mod, and its number of visible pairs."""

    def __init__(self, name: str, seq: int, device: torch.device):
        self.name, self.seq = name, seq
        self.i = torch.arange(seq, device=device)
        self.columns, self.mod = getattr(self, name)()

    def stored(self) -> gk.AttnMask:
        if self.columns is None:
            return gk.attn_mask_of(self.dense())
        return gk.attn_mask_ranges(self.ranges(), self.seq)

    def ranges(self) -> Tensor:
        full = [x if isinstance(x, Tensor) else torch.full_like(self.i, x) for x in self.columns]
        return torch.stack(full, -1).to(torch.int32)

    def dense(self) -> Tensor:
        rows = self.i[:, None]
        return self.mod(0, 0, rows, self.i[None, :]).expand(self.seq, self.seq)

    def pairs(self) -> int:
        return int(
            sum(self.mod(0, 0, rows[:, None], self.i[None, :]).sum() for rows in self.i.split(1024))
        )

    # each: columns of ranges, and mask_mod

    def causal(self):
        return (0, self.i + 1), lambda b, h, q, k: q >= k

    def documents(self):
        """Eight documents of different lengths, causal inside."""
        ends = torch.tensor([3, 11, 13, 24, 37, 41, 57, 64], device=self.i.device) * self.seq // 64
        which = torch.searchsorted(ends, self.i, right=True)
        begin = torch.cat([ends.new_zeros(1), ends])[which]
        return (begin, self.i + 1), lambda b, h, q, k: (q >= k) & (which[q] == which[k])

    def prefix(self):
        n = self.seq // 4
        return (0, (self.i + 1).clamp(min=n)), lambda b, h, q, k: (q >= k) | (k < n)

    def window(self):
        return (
            ((self.i - WINDOW + 1).clamp(min=0), self.i + 1),
            lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        )

    def sliding_global(self):
        late = (self.i - WINDOW + 1).clamp(min=GLOBAL)
        return (
            (late, self.i + 1, 0, (self.i + 1).clamp(max=GLOBAL)),
            lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < GLOBAL)),
        )

    def images(self):
        """Causal; every second block of 576 tokens sees itself."""
        end = torch.where(self.i // 576 % 2 == 1, (self.i // 576 + 1) * 576, 0).clamp(max=self.seq)
        return (0, torch.maximum(self.i + 1, end)), lambda b, h, q, k: (q >= k) | (k < end[q])

    def question(self):
        """A question of half of the tokens and four answers that do not see each other."""
        half = self.seq // 2
        part = half // 4
        begin = torch.where(self.i < half, 0, half + (self.i - half) // part * part)
        return (
            (0, (self.i + 1).clamp(max=half), begin, self.i + 1),
            lambda b, h, q, k: (q >= k) & ((k < half) | (k >= begin[q])),
        )

    def tiles(self):
        """A random half of the tiles of 128 x 128."""
        n = -(-self.seq // TILE)
        seen = torch.rand(n, n, generator=torch.Generator().manual_seed(1)).lt(0.5)
        seen = seen.to(self.i.device)
        return None, lambda b, h, q, k: seen[q // TILE, k // TILE]


def flex(mod: Callable | None, score: Callable | None, seq: int, kept: dict) -> Callable:
    """FlexAttention, compiled at its first call."""

    def run(q: Tensor, k: Tensor, v: Tensor, *_):
        if not kept:
            import torch._dynamo
            from torch.nn.attention import flex_attention as f

            torch._dynamo.reset()
            kept["call"] = torch.compile(f.flex_attention, dynamic=False)
            kept["mask"] = None
            if mod is not None:
                kept["mask"] = f.create_block_mask(mod, None, None, seq, seq, device="cuda")
        return kept["call"](q, k, v, score_mod=score, block_mask=kept["mask"])

    return run


def sdpa(backend: SDPBackend, mask: Tensor) -> Callable:
    def run(q: Tensor, k: Tensor, v: Tensor, *_):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def make_qkv(seq: int, device, head_dim: int = HEAD_DIM) -> tuple[Tensor, ...]:
    batch = max(1, shapes.CUDA_ATTN_TOKENS // seq)
    shape = (batch, shapes.CUDA_ATTN_HIDDEN // head_dim, seq, head_dim)
    return tuple(torch.randn(shape, device=device).bfloat16() for _ in range(3))


def case(
    group: str,
    label: str,
    seq: int,
    pairs: int,
    ours: Callable,
    peers: dict,
    exact: Callable,
    device,
    head_dim: int = HEAD_DIM,
) -> Case:
    batch = max(1, shapes.CUDA_ATTN_TOKENS // seq)
    last = slice(seq - COMPARED, seq)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[:1, :1].double() for x in (q, k, v))
        return exact(q[:, :, last], k, v, last)

    return Case(
        group=group,
        label=f"{label} B{batch} S{seq}",
        dtype="bf16",
        make=lambda: make_qkv(seq, device, head_dim),
        ours=ours,
        peers=peers,
        reference=expected,
        compare=lambda out: out[:1, :1, last],
        flops=4.0 * batch * shapes.CUDA_ATTN_HIDDEN * pairs,
        bytes=8.0 * batch * shapes.CUDA_ATTN_HIDDEN * seq,
        live=[name for name in peers if name == "FlexAttention"],
        optional=list(peers),
    )


def named(name: str, head_dim: int) -> tuple[str, str]:
    """The group and the label of a forward case."""
    return ("forward", name) if head_dim == HEAD_DIM else ("wide", f"{name} d{head_dim}")


def mask_rows(run: Run, name: str, seq: int, device, head_dim: int = HEAD_DIM) -> None:
    group, label = named(name, head_dim)
    if not (
        run.asks(group, f"{label} S{seq}", "bf16") or run.asks("rule", f"{label} S{seq}", "bf16")
    ):
        return
    mask = Mask(name, seq, device)
    stored, pairs = mask.stored(), mask.pairs()
    bits = mask.dense() if seq <= 8192 else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gk.flash_attn(q, k, v, attn_mask=stored)

    def exact(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        seen = mask.mod(0, 0, mask.i[rows, None], mask.i[None, :])
        return reference.flash_attn(q, k, v, attn_mask=seen)

    peers: dict[str, Callable] = {"FlexAttention": flex(mask.mod, None, seq, {})}
    if bits is not None and name in ("causal", "documents"):
        peers["SDPA efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, bits)
        peers["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION, bits)
    run.add(case(group, label, seq, pairs, ours, peers, exact, device, head_dim))
    if name in RULES:
        rule = {"gpukern's rule": lambda q, k, v: gk.flash_attn(q, k, v, **RULES[name])}
        run.add(case("rule", label, seq, pairs, ours, rule, exact, device, head_dim))


def bias_rows(run: Run, name: str, seq: int, device, head_dim: int = HEAD_DIM) -> None:
    group, label = named(name, head_dim)
    if not (
        run.asks(group, f"{label} S{seq}", "bf16") or run.asks("rule", f"{label} S{seq}", "bf16")
    ):
        return
    heads = shapes.CUDA_ATTN_HIDDEN // head_dim
    batch = max(1, shapes.CUDA_ATTN_TOKENS // seq)
    causal = name.startswith("causal")
    given: dict = {"is_causal": True} if causal else {}
    if name.endswith("keys' bias"):
        t = torch.randn(batch, 1, 1, seq, device=device).bfloat16()
        given["bias"] = t

        def score(s, b, h, q, k):
            return s + t[b, 0, 0, k]

    elif name.endswith("distance"):
        t = torch.randn(heads, 2 * seq - 1, device=device)
        given["distance_bias"] = t

        def score(s, b, h, q, k):
            return s + t[h, k - q + seq - 1]

    else:
        t = torch.randn(1, heads, seq, seq, device=device).bfloat16()
        given["bias"] = t

        def score(s, b, h, q, k):
            return s + t[0, h, q, k]

    def exact(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        i, j = torch.arange(seq, device=device)[rows, None], torch.arange(seq, device=device)
        zeros = torch.zeros(COMPARED, seq, device=device, dtype=torch.float64)
        bias = score(zeros, 0, 0, i, j)[None, None]
        hidden = (i < j) if causal else torch.zeros_like(i < j)
        return reference.flash_attn(q, k, v, attn_mask=~hidden, bias=bias)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gk.flash_attn(q, k, v, **given)

    mod = (lambda b, h, q, k: q >= k) if causal else None
    peers: dict[str, Callable] = {"FlexAttention": flex(mod, score, seq, {})}
    if "bias" in given and not causal:
        full = t.expand(batch, heads, seq, seq)
        peers["SDPA efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, full)
        peers["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION, full)
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    run.add(case(group, label, seq, pairs, ours, peers, exact, device, head_dim))
    plain = {"without bias": lambda q, k, v: gk.flash_attn(q, k, v, is_causal=causal)}
    if run.asks("rule", f"{label} S{seq}", "bf16"):
        # the call without bias computes something else, so it is not compared
        one = case("rule", label, seq, pairs, ours, plain, exact, device, head_dim)
        one.reference = None
        run.add(one)


def backward_case(
    group: str,
    label: str,
    seq: int,
    pairs: int,
    ours: Callable,
    peers: dict,
    exact,
    device,
    more=(),
    head_dim: int = HEAD_DIM,
) -> Case:
    """A case of gradients: of q, k, v, and of the leaves `more`, which are not compared."""

    def make():
        q, k, v = make_qkv(seq, device, head_dim)
        return q, k, v, torch.randn_like(q)

    def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor):
        q, k, v = (x[:1, :1].double().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(exact(q, k, v), (q, k, v), grad[:1, :1].double())

    one = case(group, label, seq, pairs, ours, peers, lambda *_: None, device, head_dim)
    one.make = make
    one.ours = through_autograd(ours, more)
    one.peers = {name: through_autograd(peer, more) for name, peer in peers.items()}
    one.reference, one.compare = expected, lambda grads: tuple(g[:1, :1] for g in grads[:3])
    one.flops, one.bytes = 2.5 * one.flops, 2 * one.bytes
    one.live = ["gpukern", *peers]
    return one


def mask_backward(run: Run, name: str, seq: int, device) -> None:
    if not run.asks("backward", f"{name} S{seq}", "bf16"):
        return
    mask = Mask(name, seq, device)
    stored, pairs, dense = mask.stored(), mask.pairs(), mask.dense()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gk.flash_attn(q, k, v, attn_mask=stored)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.flash_attn(q, k, v, attn_mask=dense)

    peers: dict[str, Callable] = {"FlexAttention": flex(mask.mod, None, seq, {})}
    if name in ("causal", "documents"):
        peers["SDPA efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, dense)
    run.add(backward_case("backward", name, seq, pairs, ours, peers, exact, device))
    if name in RULES and run.asks("rule", f"{name} grad S{seq}", "bf16"):
        rule = {"gpukern's rule": lambda q, k, v: gk.flash_attn(q, k, v, **RULES[name])}
        run.add(backward_case("rule", f"{name} grad", seq, pairs, ours, rule, exact, device))


def bias_backward(run: Run, name: str, seq: int, device, head_dim: int = HEAD_DIM) -> None:
    wide = head_dim != HEAD_DIM
    group, label = ("wide backward", f"{name} d{head_dim}") if wide else ("backward", name)
    if not run.asks(group, f"{label} S{seq}", "bf16"):
        return
    heads = shapes.CUDA_ATTN_HIDDEN // head_dim
    batch = max(1, shapes.CUDA_ATTN_TOKENS // seq)
    distance = name.startswith("distance")
    if distance:
        leaf = torch.randn(heads, 2 * seq - 1, device=device)
    elif name.startswith("keys' bias"):
        leaf = torch.randn(batch, 1, 1, seq, device=device).bfloat16()
    else:
        of = 1 if name.startswith("shared") else batch
        leaf = torch.randn(of, heads, seq, seq, device=device).bfloat16()
    more = [leaf.requires_grad_()] if name.endswith("grad") else []

    def score(s, b, h, q, k):
        if distance:
            return s + leaf[h, k - q + seq - 1]
        at = zip((b, h, q, k), leaf.shape, strict=True)
        return s + leaf[tuple(i if n > 1 else 0 for i, n in at)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {"distance_bias": leaf} if distance else {"bias": leaf}
        return gk.flash_attn(q, k, v, **given)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = leaf[:1].detach().double() if distance else leaf[:1, :1].detach().double()
        given = {"distance_bias": one} if distance else {"bias": one}
        return reference.flash_attn(q, k, v, **given)

    peers: dict[str, Callable] = {"FlexAttention": flex(None, score, seq, {})}
    if not distance:
        full = leaf.expand(batch, heads, seq, seq)
        peers["SDPA efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, full)
        peers["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION, full)
    args = (group, label, seq, seq * seq, ours, peers, exact, device, more, head_dim)
    run.add(backward_case(*args))


def builder(run: Run, name: str, seq: int, device) -> None:
    if not run.wants("builder"):
        return
    mask = Mask(name, seq, device)
    if mask.columns is None or seq <= 8192:
        bits = mask.dense().contiguous()
        us = run.device.time_block(lambda: gk.attn_mask_of(bits), 16)
        run.fact("builder", f"{name} of bools S{seq}", us, "us", shapes.CUDA_MASK_BUILDER)
    if mask.columns is not None:
        ranges = mask.ranges()
        us = run.device.time_block(lambda: gk.attn_mask_ranges(ranges, seq), 16)
        run.fact("builder", f"{name} of ranges S{seq}", us, "us", shapes.CUDA_MASK_BUILDER)


def main() -> None:
    args = arguments("attn_masks")
    device = open_device(args.device)
    run = Run("attn_masks", args, device)
    for name, seq in shapes.CUDA_ATTN_MASKS:
        mask_rows(run, name, seq, device.device)
    for name, seq in shapes.CUDA_ATTN_BIASES:
        bias_rows(run, name, seq, device.device)
    for name, seq in shapes.CUDA_ATTN_MASKS_WIDE:
        mask_rows(run, name, seq, device.device, shapes.CUDA_ATTN_MASKS_WIDE_DIM)
    for name, seq in shapes.CUDA_ATTN_BIASES_WIDE:
        bias_rows(run, name, seq, device.device, shapes.CUDA_ATTN_MASKS_WIDE_DIM)
    for name, seq in shapes.CUDA_ATTN_MASKS_BACKWARD:
        mask_backward(run, name, seq, device.device)
    for name, seq in shapes.CUDA_ATTN_BIASES_BACKWARD:
        bias_backward(run, name, seq, device.device)
    for name, seq in shapes.CUDA_ATTN_BIASES_BACKWARD_WIDE:
        bias_backward(run, name, seq, device.device, shapes.CUDA_ATTN_MASKS_WIDE_DIM)
    for name, seq in (("causal", 8192), ("documents", 8192), ("causal", 32768)):
        builder(run, name, seq, device.device)
    run.finish(shapes.CUDA_ATTN_MASK_BARS)


if __name__ == "__main__":
    sys.exit(main())
