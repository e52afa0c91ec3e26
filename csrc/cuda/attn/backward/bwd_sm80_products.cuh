/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_products.cuh: the products of a step of bwd_sm80.cuh. In all of them the accumulators of
 * a warp have M x 16 rows. */
#ifndef GPUKERN_CUDA_BWD_SM80_PRODUCTS_CUH
#define GPUKERN_CUDA_BWD_SM80_PRODUCTS_CUH

#include "bwd_sm80_smem.cuh"

namespace {

/* ---- 1. S^T, dP^T ---------------------------------------------------------------------------- */
/* S^T += K Q^T. k_base: the A operands of the warp's keys; q_base: the B operands of its rows. */
template <class X, class T, int M, int N>
__device__ __forceinline__ void add_scores(float (&s)[M][N][4], smem_addr k_base,
                                           smem_addr q_base) {
#pragma unroll
    for (int kk = 0; kk < X::D / 16; ++kk)
        mma_rows<typename X::Keys, typename X::Queries, T>(s, X::Keys::along(k_base, 2 * kk),
                                                           X::Queries::along(q_base, 2 * kk));
}
/* dP^T += V dO^T. Calls between(n) for each group n of eight rows, between the products. */
template <class X, class T, int M, int N, class Between>
__device__ __forceinline__ void add_dp(float (&dp)[M][N][4], smem_addr v_base,
                                       smem_addr grad_out_base, const Between &between) {
#pragma unroll
    for (int kk = 0; kk < X::D / 16; ++kk) {
        mma_rows<typename X::Keys, typename X::Queries, T>(
            dp, X::Keys::along(v_base, 2 * kk), X::Queries::along(grad_out_base, 2 * kk));
#pragma unroll
        for (int n = N * kk / (X::D / 16); n < N * (kk + 1) / (X::D / 16); ++n) between(n);
    }
}

/* ---- 2. dV, dK, dQ --------------------------------------------------------------------------- */
/* Loads the A operand of dV += P^T dO or dK += dS^T Q from shared memory, for the 16 rows of
 * queries kk to kk + 15, which are the product's inner dimension. */
template <class Scores, int M>
__device__ __forceinline__ void load_scores(uint32_t (&a)[M][4], smem_addr a_base, int kk) {
#pragma unroll
    for (int m = 0; m < M; ++m)
        load_frag_a(a[m], Scores::down(Scores::along(a_base, 2 * kk), 16 * m));
}
/* The same operand from the warp's own accumulators of P^T or dS^T. */
template <class T, int M, int N>
__device__ __forceinline__ void pack_scores(uint32_t (&a)[M][4], const float (&c)[M][N][4],
                                            int kk) {
#pragma unroll
    for (int m = 0; m < M; ++m) acc_to_a<T>(a[m], c[m][2 * kk], c[m][2 * kk + 1]);
}
/* Computes dQ [BQ][D] of a tile and adds it to dq_sum by atomic adds. Each add of a warp goes to
 * 128 contiguous bytes. */
template <class Tile, class T, bool SCORES = false>
__device__ __forceinline__ void add_dq(float *sum_g, int tile, smem_addr ds_s, smem_addr k_s,
                                       int warp, int lane) {
    typedef Shape<Tile> X;
    float c[X::DQ_M][X::DQ_N][4] = {};
    const int row = warp % Tile::dq_warps * X::DQ_ROWS, col = warp / Tile::dq_warps * X::DQ_COLS;
    const smem_addr a_base = frag_a_trans_base<typename X::Scores>(ds_s, lane, 0, row / 8);
    const smem_addr b_base = frag_b_trans_base<typename X::Keys>(k_s, lane, 0, col / 8);
#pragma unroll
    for (int kk = 0; kk < X::BKV / 16; ++kk) {
        uint32_t a[X::DQ_M][4];
#pragma unroll
        for (int m = 0; m < X::DQ_M; ++m)
            load_frag_a_trans(a[m], X::Scores::down(X::Scores::along(a_base, 2 * m), 16 * kk));
        mma_columns<typename X::Keys, T, SCORES>(c, a, X::Keys::down(b_base, 16 * kk));
    }
    float *to = sum_g + (int64_t)tile * (X::BQ * X::D) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < X::DQ_M; ++m)
#pragma unroll
        for (int n = 0; n < X::DQ_N; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                atomicAdd(to + ((m * X::DQ_N + n) * 4 + r) * X::THREADS, c[m][n][r]);
}

} // namespace

#endif
