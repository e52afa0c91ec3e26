# SPDX-License-Identifier: BSD-3-Clause
"""a @ b in Triton, to be read beside csrc/cuda/product/gemm/gemm_sm90a.cu. Needs triton and a GPU,
or TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl

TILES = [  # BM, BN, BK, warps, stages
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (16, 128, 128, 4, 4),
]


@triton.autotune(
    [
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=w, num_stages=s)
        for m, n, k, w, s in TILES
    ],
    key=["m", "n", "k"],
)
@triton.jit
def kernel(
    a,
    b,
    out,
    m,
    n,
    k,
    am,
    ak,
    bk,
    bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """A program computes a tile BM x BN of out. Programs take tiles in groups of GROUP rows, for
    L2."""
    tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = tile // (GROUP * tiles_n) * GROUP
    rows_here = min(tiles_m - first, GROUP)
    row = (first + tile % (GROUP * tiles_n) % rows_here) * BM + tl.arange(0, BM)
    col = tile % (GROUP * tiles_n) // rows_here * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, k, BK):
        depth = k0 + step
        x = tl.load(
            a + row[:, None].to(tl.int64) * am + depth[None, :] * ak,
            mask=(row[:, None] < m) & (depth[None, :] < k),
            other=0.0,
        )
        y = tl.load(
            b + depth[:, None].to(tl.int64) * bk + col[None, :] * bn,
            mask=(depth[:, None] < k) & (col[None, :] < n),
            other=0.0,
        )
        total = tl.dot(x, y, total)
    at = out + row[:, None].to(tl.int64) * n + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (col[None, :] < n))


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] of 16 bits and any strides, with float32 sums."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    kernel[lambda tile: (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]),)](
        a, b, out, m, n, k, *a.stride(), *b.stride()
    )
    return out
