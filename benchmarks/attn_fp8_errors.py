# SPDX-License-Identifier: BSD-3-Clause
"""The error of FP8 attention: prints the table of docs/numerics.md.

It compares flash_attn on quantize_attn(q, k, v) with float64 attention on the original q, k, v.

python benchmarks/attn_fp8_errors.py [--keys 2048] [--head-dim 128] [--device cpu|cuda]

It compares flash_attn of quantize_attn(q, k, v) with float64 attention of q, k, v."""

import argparse

import torch

import torch_gpukern
from torch_gpukern import reference


def normal(*shape):
    return torch.randn(shape)


def outliers(*shape):
    """Normal values, of which one in a thousand is about ten times as large."""
    return normal(*shape) + 10 * normal(*shape) * (torch.rand(shape) < 1e-3)


def shifted(*shape):
    """Normal values with a different mean for each channel."""
    return normal(*shape) + 2 * normal(*shape[:-2], 1, shape[-1])


def one_sign(*shape):
    return normal(*shape).abs()


DATA = {
    "normal": (normal, normal),
    "outliers in q and k": (outliers, normal),
    "outliers in q, k and v": (outliers, outliers),
    "v with a mean": (normal, shifted),
    "v of one sign": (normal, one_sign),
}
WAYS = {
    "head": dict(),
    "head, rotated": dict(hadamard=True),
    "block": dict(per="block"),
    "block, rotated": dict(per="block", hadamard=True),
    "head, v not centred": dict(center_v=False),
}


def error(make_qk, make_v, how, args) -> float:
    torch.manual_seed(0)
    q, k = (make_qk(1, 4, n, args.head_dim).to(args.device) for n in (256, args.keys))
    v = make_v(1, 4, args.keys, args.head_dim).to(args.device)
    want = reference.flash_attn(q.double(), k.double(), v.double())
    quantized = torch_gpukern.quantize_attn(q, k, v, **how)._asdict()
    got = torch_gpukern.flash_attn(**quantized, out_dtype=torch.float32)
    return ((got - want).norm() / want.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"| data, {args.keys} keys, head_dim {args.head_dim} | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    for name, data in DATA.items():
        cells = (f"{error(*data, how, args):.1e}" for how in WAYS.values())
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
