/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_products.cuh: the WGMMA products that the consumers of Hopper's forward kernels issue, the
 * order in which warpgroups issue them, and functions that zero registers and rows of V. */
#ifndef GPUKERN_CUDA_FWD_PRODUCTS_CUH
#define GPUKERN_CUDA_FWD_PRODUCTS_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/opaque.cuh"
#include "../../ptx/wgmma.cuh"
#include "fwd_producer.cuh"

/* turn_begin waits until the previous warpgroup has issued its products. turn_end lets the next one
 * issue. This order keeps the warpgroups out of phase, so that one multiplies while another
 * computes weights. */
template <class Tile> __device__ __forceinline__ void turn_begin(int warpgroup) {
    bar_sync(1 + warpgroup, 256);
}
template <class Tile> __device__ __forceinline__ void turn_end(int warpgroup) {
    bar_arrive(1 + (warpgroup + 1) % Tile::WARPGROUPS, 256);
}

/* S [64][BKV] = Q K^T for this warpgroup's rows, or with TABLE S += Q K^T. lift_s: LIFT's
 * additional columns of K. */
template <class T, class Tile>
__device__ __forceinline__ void issue_scores(float (&s)[Tile::BKV / 2], smem_addr q_s,
                                             smem_addr k_s, int row, smem_addr lift_s,
                                             smem_addr ones_s) {
    typedef Smem<Tile> S;
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Tile::HEAD_DIM; kk += 16)
        wgmma_ss<T, Tile::BKV, 0, 0>(s, S::Q::k_major(q_s, row, kk), S::K::k_major(k_s, 0, kk),
                                     S::TABLE || kk > 0);
    if constexpr (S::LIFT)
        wgmma_ss<T, Tile::BKV, 0, 0>(s, wgmma_plain_descriptor(ones_s, 128, 0),
                                     wgmma_plain_descriptor(lift_s, 128, 256), true);
    wgmma_commit_group();
}

/* O [64][HEAD_DIM_V] += P V, with P in registers. */
template <class T, class Tile>
__device__ __forceinline__ void issue_values(float (&o)[Tile::HEAD_DIM_V / 2],
                                             const uint32_t (&p)[Tile::BKV / 4], smem_addr v_s) {
    typedef Smem<Tile> S;
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Tile::BKV; kk += 16)
        wgmma_rs<T, Tile::HEAD_DIM_V, 1>(o, p + kk / 4, S::V::mn_major(v_s, kk), true);
    wgmma_commit_group();
}

/* Zeroes d at this point of the program. The compiler may not delay it to the first use of d. */
template <int N> __device__ __forceinline__ void clear(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) zero_here(d[i]);
}

/* Zeroes rows [from, end) of V, because a weight of 0 times NaN would be NaN. */
template <class Tile>
__device__ __forceinline__ void clear_rows(smem_addr v_s, int from, int warpgroup,
                                           int end = Tile::BKV) {
    typedef typename Smem<Tile>::V V;
    for (int i = from * 8 + threadIdx.x % 128; i < end * 8; i += 128)
#pragma unroll
        for (int c = 0; c < V::panels; ++c)
            st_shared_128(v_s + c * V::panel_bytes + i * 16, make_uint4(0, 0, 0, 0));
    fence_proxy_async(); /* orders this thread's zeros before WGMMA's reads */
    bar_sync(4 + warpgroup, 128);
}

#endif
