# SPDX-License-Identifier: BSD-3-Clause
"""Checks the op of squared_relu.h against float64, and times it beside two launches on a GPU.

python examples/epilogue/run.py build/epilogue/libmy_ops.so
"""

import statistics
import sys

import torch

import torch_gpukern as gk

SHAPES = [(4096, 4096, 4096), (8192, 8192, 1024), (512, 4096, 4096)]


def load(library):
    """Returns the op. The fake function gives torch.compile the result's shape and dtype."""
    torch.ops.load_library(library)

    @torch.library.register_fake("my_ops::squared_relu")
    def _(a, b, scale):
        return a.new_empty(a.shape[0], b.shape[1])

    return torch.ops.my_ops.squared_relu


def inputs(m, n, k, dtype, device):
    a = torch.randn(m, k, device=device).to(dtype)
    b = (torch.randn(k, n, device=device) / k**0.5).to(dtype)
    return a, b, torch.rand(m, device=device) + 0.5


def excess(out, a, b, scale):
    """The largest error as a multiple of what is allowed: one rounding of the result, and the
    rounding of the float32 sums, at most 2^-16 of the sum of magnitudes."""
    a, b, scale = a.double(), b.double(), scale.double()[:, None]
    kept = (a @ b).relu()
    sums = (a.abs() @ b.abs()) * 2.0**-16
    exact = scale * kept**2
    info = torch.finfo(out.dtype)
    allowed = info.eps * exact + scale * (2 * kept * sums + sums**2) + info.smallest_normal
    return float(((out.double() - exact).abs() / allowed).max())


def check(squared_relu, device):
    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in [(1, 1, 1), (37, 19, 65), (100, 300, 1000), (384, 512, 256)]:
            a, b, scale = inputs(m, n, k, dtype, device)
            most = excess(squared_relu(a, b, scale), a, b, scale)
            assert most <= 1, (dtype, m, n, k, most)
    print(f"squared_relu on {device}: within one rounding of float64")


def microseconds(functions, rounds=15, calls=20):
    """The median time of a call of each function. The functions are measured alternately."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, mine in zip(functions, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) * 1000 / calls)
    return [statistics.median(x) for x in times]


@torch.compile
def second_launch(sums, scale):
    return (scale[:, None] * sums.float().relu() ** 2).to(sums.dtype)


def time(squared_relu):
    print(f"{'M x N x K':20} {'fused':>9} {'gemm':>9} {'two':>9}  us, bfloat16")
    for m, n, k in SHAPES:
        a, b, scale = inputs(m, n, k, torch.bfloat16, "cuda")
        one, alone, two = microseconds(
            [
                lambda a=a, b=b, scale=scale: squared_relu(a, b, scale),
                lambda a=a, b=b: gk.gemm(a, b),
                lambda a=a, b=b, scale=scale: second_launch(gk.gemm(a, b), scale),
            ]
        )
        print(f"{f'{m} x {n} x {k}':20} {one:9.1f} {alone:9.1f} {two:9.1f}")


def main():
    squared_relu = load(sys.argv[1])
    check(squared_relu, "cpu")
    if torch.cuda.is_available():
        check(squared_relu, "cuda")
        time(squared_relu)
    else:
        print("no GPU: its times beside two launches were not measured")


if __name__ == "__main__":
    main()
