# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn of float8_e4m3fn beside FlashAttention-3's, if it imports, and beside our own 16-bit
kernel on the same shape.

python benchmarks/bench_flash_attn_fp8.py [--quick] [--device cpu|cuda]
FLOPs: 4 * batch * heads * seq_q * seq_k * head_dim, half when causal."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import shapes
import torch
from harness import Case, Run, arguments, open_device

import torch_gpukern
from torch_gpukern import reference

LENGTHS = {"cpu": (512, 2048), "cuda": (1536, 4096, 7680, 15360)}


def of_fa3(causal: bool) -> Callable | None:
    """FlashAttention-3's forward of the same codes, [B, S, H, D], whose sums are one-level."""
    if find_spec("flash_attn_interface") is None:
        return None
    fa3 = import_module("flash_attn_interface").flash_attn_func

    def run(q, k, v, q_scale, k_scale, v_scale, v_mean):
        scales = {f"{n}_descale": s for n, s in (("q", q_scale), ("k", k_scale), ("v", v_scale))}
        out = fa3(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def case(
    seq: int, head_dim: int, causal: bool, accumulate: str, kind: str, device: torch.device
) -> Case:
    heads = shapes.CUDA_ATTN_HIDDEN // head_dim if kind == "cuda" else 4
    batch = max(1, shapes.CUDA_ATTN_TOKENS // seq) if kind == "cuda" else 1

    def make():
        x = (
            torch.randn(batch, seq, heads, head_dim, device=device).bfloat16().transpose(1, 2)
            for _ in range(3)
        )
        made = torch_gpukern.quantize_attn(*x, center_v=False)
        # FlashAttention-3 adds none; ours does the work
        mean = torch.zeros(batch, heads, head_dim, device=device)
        return *(c.transpose(1, 2).contiguous().transpose(1, 2) for c in made[:3]), *made[3:6], mean

    def ours(q, k, v, q_scale, k_scale, v_scale, v_mean):
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, v_mean=v_mean)
        return torch_gpukern.flash_attn(q, k, v, is_causal=causal, accumulate=accumulate, **scales)

    def exact(q, k, v, q_scale, k_scale, v_scale, v_mean):
        scales = dict(
            q_scale=q_scale[:1], k_scale=k_scale[:1], v_scale=v_scale[:1], v_mean=v_mean[:1]
        )
        return reference.flash_attn(
            q[:1, :1],
            k[:1, :1],
            v[:1, :1],
            is_causal=causal,
            out_dtype=torch.float64,
            **{n: s[:, :1] for n, s in scales.items()},
        )

    def in_16_bits(q, k, v, *_):
        return torch_gpukern.flash_attn(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=causal)

    fa3 = of_fa3(causal)
    return Case(
        group=f"{'causal' if causal else 'full'} d{head_dim}, {accumulate}",
        label=f"{seq}",
        dtype="bf16",
        make=make,
        ours=ours,
        peers={"FA3": fa3} if fa3 else {"ours in bf16, casts included": in_16_bits},
        optional=["FA3"],
        reference=exact,
        compare=lambda out: out[:1, :1],
        flops=4.0 * batch * heads * seq * seq * head_dim / (2 if causal else 1),
        bytes=float(batch * heads * seq * head_dim * 5),
    )


def main() -> None:
    args = arguments("flash_attn_fp8")
    device = open_device(args.device)
    run = Run("flash_attn_fp8", args, device)
    for head_dim in (64, 128, 256):
        sums = (
            ("precise",)
            if device.kind == "cpu"
            else ("fast", "precise")
            if head_dim == 128
            else ("fast",)
        )
        for causal in (False, True):
            for seq in LENGTHS[device.kind]:
                for accumulate in sums:
                    run.add(case(seq, head_dim, causal, accumulate, device.kind, device.device))
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
