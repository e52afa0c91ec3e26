/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_results.cuh: how a consumer warp of Hopper's forward kernels writes O and lse of its 16 rows,
 * to the tensors or to a partial result in the workspace.
 *
 * With two Q buffers, O is stored to the warp's own rows of Q in shared memory, and TMA stores it
 * from there. With one, the next Q may already be arriving in that space, so O is stored from
 * registers. */
#ifndef GPUKERN_CUDA_FWD_RESULTS_CUH
#define GPUKERN_CUDA_FWD_RESULTS_CUH

#include "../../ptx/stmatrix.cuh"
#include "../../tile/fragment.cuh"
#include "fwd_producer.cuh"
#include "../softmax.cuh"
#include "../stale_softmax.cuh"

/* This lane's first row of the tile; the second is 8 further. It is computed at each use,
 * because the loop has no register for it. */
__device__ __forceinline__ int own_row() {
    const int thread = mov_tid_x();
    return thread / 32 * 16 + frag_row(thread % 32, 0);
}

/* One of a lane's two rows of a tile: its head and query, whether that query exists, and the
 * index of its lse. */
struct FwdResult {
    FwdRow at;
    bool real;
    int64_t lse;
};
__device__ __forceinline__ FwdResult result_of(const FwdHopperParams &x, const FwdTile &t, int r) {
    const Stats &lse = x.fwd.problem.lse;
    const int row = own_row() + 8 * r;
    FwdResult y;
    y.at = row_of(x, t, row);
    y.real = row < t.rows && y.at.i < t.seq.seq_q;
    y.lse = t.work.b * lse.batch + y.at.head * lse.head + (int64_t)(t.seq.q0 + y.at.i) * lse.row;
    return y;
}

/* Writes a warp's 16 rows of O, times factor, into its rows of Q. */
template <class T, class Tile>
__device__ __forceinline__ void stage_rows(const float (&o)[Tile::HEAD_DIM_V / 2],
                                           const float (&factor)[2], smem_addr q_s) {
    typedef typename Smem<Tile>::Q Q;
    const int warp = mov_tid_x() / 32, lane = laneid();
    /* stmatrix stores 8 x 8 blocks: rows 0-7 and 8-15 of one group of 8 columns, then of the
     * next group. All addresses follow from the first one. */
    const smem_addr first_s = q_s + Q::offset_of(16 * warp + lane % 16, lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < Tile::HEAD_DIM_V / 8; n += 2) {
        uint32_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            four[e] =
                pack2<T>(o[4 * n + 2 * e] * factor[e & 1], o[4 * n + 2 * e + 1] * factor[e & 1]);
        stmatrix_x4(Q::along(first_s, n), four);
    }
}

/* Stores the rows that a warp has staged. */
template <class T, class Tile>
__device__ __forceinline__ void store_rows(const FwdHopperParams &x, const FwdTile &t,
                                           smem_addr q_s) {
    typedef typename Smem<Tile>::Q Q;
    const Problem &p = x.fwd.problem;
    const int warp = mov_tid_x() / 32, lane = laneid(), first = t.work.i0 + 16 * warp;
    /* TMA skips rows past the end of a dense tensor, but in a packed one those rows belong to the
     * next sequence. The vote shows the compiler that all lanes agree. */
    if (__all_sync(0xffffffffu, x.tile_heads == 1 && (!p.cu_q || first + 16 <= t.seq.seq_q))) {
        fence_proxy_async(); /* orders this lane's writes before TMA's read */
        __syncwarp();        /* waits for the writes of all lanes */
        if (lane == 0 && first < t.seq.seq_q) {
#pragma unroll
            for (int d = 0; d < Tile::HEAD_DIM_V; d += 64)
                if (d < p.head_dim_v)
                    tma_store_5d(&x.out,
                                 {{d, t.seq.q0 + first, t.work.head, p.cu_q ? 0 : t.work.b, 0}},
                                 q_s + Q::offset(16 * warp, d));
        }
        if (lane == 0) tma_store_commit_group();
    } else {
        __syncwarp();
        T *out_g = (T *)p.out.data + t.work.b * p.out.batch + (int64_t)t.seq.q0 * p.out.row;
#pragma unroll 1
        for (int i = 0; i < 16 * (Tile::HEAD_DIM_V / 8); i += 32) {
            const int row = 16 * warp + (i + lane) / (Tile::HEAD_DIM_V / 8),
                      col = (i + lane) % (Tile::HEAD_DIM_V / 8) * 8;
            const FwdRow at = row_of(x, t, row);
            if (row < t.rows && at.i < t.seq.seq_q && col < p.head_dim_v)
                st_global_128(out_g + at.head * p.out.head + (int64_t)at.i * p.out.row + col,
                              ld_shared_128(q_s + Q::offset_of(row, col)));
        }
        fence_proxy_async(); /* orders these accesses before TMA's next load of Q */
        __syncwarp();
    }
}

/* Stores O through the rows of Q, in any call with one split. */
template <class T, class Tile>
__device__ __forceinline__ void store_tile(const FwdHopperParams &x, const FwdTile &t,
                                           const StaleSoftmax<T, Tile::BKV> &softmax,
                                           const float (&o)[Tile::HEAD_DIM_V / 2], smem_addr q_s) {
    const Problem &p = x.fwd.problem;
    RowSum sum[2];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdResult y = result_of(x, t, r);
        sum[r] = softmax.result(r, y.real ? sink_of(p, y.at.head) : -INFINITY);
        /* rows that no head fills must stay finite, because they are rows of Q */
        factor[r] = y.real && sum[r].sum != 0 ? __fdividef(sum[r].share, sum[r].sum) : 0.f;
    }
    stage_rows<T, Tile>(o, factor, q_s);
    store_rows<T, Tile>(x, t, q_s);
    /* lse comes last: the fence before TMA waits for all earlier stores */
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdResult y = result_of(x, t, r);
        if (y.real && laneid() % 4 == 0 && p.lse.data) ((float *)p.lse.data)[y.lse] = sum[r].lse();
    }
}

/* store_tile for a call that is `simple` (FwdHopperParams). It takes a third of the
 * instructions. */
template <class T, class Tile>
__device__ __forceinline__ void
store_simple(const FwdHopperParams &x, const FwdTile &t, const StaleSoftmax<T, Tile::BKV> &softmax,
             const float (&o)[Tile::HEAD_DIM_V / 2], smem_addr q_s) {
    const Stats &lse = x.fwd.problem.lse;
    const float sum[2] = {softmax.sum_of(0), softmax.sum_of(1)};
    const float factor[2] = {sum[0] > 0 ? __fdividef(1.f, sum[0]) : 0.f,
                             sum[1] > 0 ? __fdividef(1.f, sum[1]) : 0.f};
    stage_rows<T, Tile>(o, factor, q_s);
    store_rows<T, Tile>(x, t, q_s);
    if (!lse.data || laneid() % 4 != 0) return;
    const int i = t.work.i0 + own_row();
    float *lse_g = (float *)lse.data + t.work.b * lse.batch + t.work.head * lse.head +
                   (int64_t)(t.seq.q0 + i) * lse.row;
    if (i < t.seq.seq_q) lse_g[0] = softmax.lse_of(0, sum[0]);
    if (i + 8 < t.seq.seq_q) lse_g[8 * lse.row] = softmax.lse_of(1, sum[1]);
}

/* Stores O from registers, in any call with one split. */
template <class T, class Tile>
__device__ __forceinline__ void store_direct(const FwdHopperParams &x, const FwdTile &t,
                                             const StaleSoftmax<T, Tile::BKV> &softmax,
                                             const float (&o)[Tile::HEAD_DIM_V / 2]) {
    const Problem &p = x.fwd.problem;
    const int lane = laneid(), odd = lane & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdResult y = result_of(x, t, r);
        const RowSum sum = softmax.result(r, y.real ? sink_of(p, y.at.head) : -INFINITY);
        const float factor = sum.sum != 0 ? __fdividef(sum.share, sum.sum) : 0.f;
        T *out_g = (T *)p.out.data + t.work.b * p.out.batch + y.at.head * p.out.head +
                   (int64_t)(t.seq.q0 + y.at.i) * p.out.row;
        /* A lane has two columns of each group of 8. It exchanges two columns of one group for
         * its neighbour's two of the other group, and stores four columns. */
        const int col = 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int n = 0; n < Tile::HEAD_DIM_V / 8; n += 2) {
            const float *two = o + 4 * n + 2 * r;
            const uint32_t first = pack2<T>(two[0] * factor, two[1] * factor);
            const uint32_t second = pack2<T>(two[4] * factor, two[5] * factor);
            const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
            if (y.real && 8 * n + col < p.head_dim_v)
                *(uint2 *)(out_g + 8 * n + col) =
                    odd ? make_uint2(theirs, second) : make_uint2(first, theirs);
        }
        if (y.real && lane % 4 == 0 && p.lse.data) ((float *)p.lse.data)[y.lse] = sum.lse();
    }
}

/* Stores O and lse in float32 from registers. If fwd.lse_splits is set, out and lse hold the
 * attention over other keys, which is merged with this result. The old value is not read if it saw
 * no key. */
template <class T, class Tile>
__device__ __forceinline__ void store_partial(const FwdHopperParams &x, const FwdTile &t,
                                              const StaleSoftmax<T, Tile::BKV> &softmax,
                                              const float (&o)[Tile::HEAD_DIM_V / 2]) {
    const Problem &p = x.fwd.problem;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdResult y = result_of(x, t, r);
        const RowSum sum = softmax.result(r, y.real ? sink_of(p, y.at.head) : -INFINITY);
        float factor = sum.sum != 0 ? __fdividef(sum.share, sum.sum) : 0.f, lse = sum.lse(),
              share = 0;
        if (x.fwd.lse_splits) {
            const float old_lse = y.real ? x.fwd.lse_splits[y.lse] : -INFINITY;
            __syncwarp(); /* all lanes of the row have read old_lse before it is overwritten */
            if (old_lse != -INFINITY) {
                const float peak = fmaxf(old_lse, lse), a = __expf(old_lse - peak),
                            b = __expf(lse - peak);
                share = __fdividef(a, a + b);
                factor *= __fdividef(b, a + b);
                lse = peak + __logf(a + b);
            }
        }
        if (y.real && laneid() % 4 == 0 && p.lse.data) ((float *)p.lse.data)[y.lse] = lse;
        float *out_g = (float *)p.out.data + t.work.b * p.out.batch + y.at.head * p.out.head +
                       (int64_t)(t.seq.q0 + y.at.i) * p.out.row + frag_col(laneid(), 0);
#pragma unroll
        for (int n = 0; n < Tile::HEAD_DIM_V / 8; ++n) {
            if (!y.real || 8 * n + frag_col(laneid(), 0) >= p.head_dim_v) continue;
            float2 *to = (float2 *)(out_g + 8 * n);
            float2 z = make_float2(o[4 * n + 2 * r] * factor, o[4 * n + 2 * r + 1] * factor);
            if (share != 0) {
                const float2 old_out = *to;
                z.x = fmaf(share, old_out.x, z.x);
                z.y = fmaf(share, old_out.y, z.y);
            }
            *to = z;
        }
    }
}

/* Stores O and lse over one split of the keys to the workspace, in float32. */
template <class T, class Tile>
__device__ __forceinline__ void store_part(const FwdHopperParams &x, const FwdTile &t,
                                           const StaleSoftmax<T, Tile::BKV> &softmax,
                                           const float (&o)[Tile::HEAD_DIM_V / 2]) {
    const FwdParams &f = x.fwd;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdResult y = result_of(x, t, r);
        const RowSum sum = softmax.result(r, -INFINITY);
        const float factor = sum.sum != 0 ? __fdividef(sum.share, sum.sum) : 0.f;
        if (!y.real) continue;
        const int64_t row = t.work.split * f.split_rows + y.lse;
        if (laneid() % 4 == 0 && f.lse_splits) f.lse_splits[row] = sum.lse();
        float *part = f.out_splits + row * f.problem.head_dim_v;
#pragma unroll
        for (int n = 0; n < Tile::HEAD_DIM_V / 8; ++n) {
            const int col = 8 * n + frag_col(laneid(), 0);
            if (col < f.problem.head_dim_v)
                *(float2 *)(part + col) =
                    make_float2(o[4 * n + 2 * r] * factor, o[4 * n + 2 * r + 1] * factor);
        }
    }
}

#endif
