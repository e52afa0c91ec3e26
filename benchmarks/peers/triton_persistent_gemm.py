# SPDX-License-Identifier: BSD-3-Clause
"""a @ b in Triton by persistent programs, one an SM, that compute tile after tile. To be read
beside learn/ladder/10_persistent_sm90a.cu. Needs triton and a GPU, or TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl

TILE = {"BM": 128, "BN": 256, "BK": 64}


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
    PROGRAMS,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """Program p has tiles p, p + PROGRAMS, and so on. Programs take tiles in groups of GROUP rows,
    for L2."""
    tiles_m, tiles_n, step = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        rows_here = min(tiles_m - first, GROUP)
        row = (first + tile % (GROUP * tiles_n) % rows_here) * BM + tl.arange(0, BM)
        col = tile % (GROUP * tiles_n) // rows_here * BN + tl.arange(0, BN)
        a_at = a + row[:, None].to(tl.int64) * am + step[None, :] * ak
        b_at = b + step[:, None].to(tl.int64) * bk + col[None, :] * bn
        total = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, k, BK):
            x = tl.load(a_at, mask=(row[:, None] < m) & (k0 + step[None, :] < k), other=0.0)
            y = tl.load(b_at, mask=(k0 + step[:, None] < k) & (col[None, :] < n), other=0.0)
            total = tl.dot(x, y, total)
            a_at += BK * ak
            b_at += BK * bk
        at = out + row[:, None].to(tl.int64) * n + col[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (col[None, :] < n))


def gemm(a: torch.Tensor, b: torch.Tensor, programs: int | None = None) -> torch.Tensor:
    """a [M, K] @ b [K, N] of 16 bits and any strides, with float32 sums. programs: by default one
    an SM."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    programs = programs or torch.cuda.get_device_properties(a.device).multi_processor_count
    tiles = triton.cdiv(m, TILE["BM"]) * triton.cdiv(n, TILE["BN"])
    kernel[(min(programs, tiles),)](
        a,
        b,
        out,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        min(programs, tiles),
        **TILE,
        num_warps=8,
        num_stages=3,
    )
    return out
