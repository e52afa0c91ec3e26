/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_scores.cuh: how bwd_sm80.cuh computes P and dS from S and dP, in the accumulators.
 * Element [m][n][r] of a lane is key `key` + 16 m + 8 (r / 2) and row `row` + 8 n + r % 2. */
#ifndef GPUKERN_CUDA_BWD_SM80_SCORES_CUH
#define GPUKERN_CUDA_BWD_SM80_SCORES_CUH

#include "bwd_sm80_smem.cuh"
#include "../drop.cuh"

namespace {

/* ---- 1. which pairs are visible -------------------------------------------------------------- */
/* Which of a lane's pairs are visible: row i sees keys i + lo_off .. i + lo_off + width - 1
 * within [key_lo, key_hi). */
struct Mask {
    int key, row; /* of element [0][0][0] */
    int lo_off, key_lo, key_hi;
    unsigned width;

    __device__ __forceinline__ bool sees(int m, int n, int r) const {
        const int j = key + m * 16 + r / 2 * 8;
        return j >= key_lo && j < key_hi && (unsigned)(j - (row + n * 8 + r % 2) - lo_off) < width;
    }
};

__device__ __forceinline__ Mask load_mask(smem_addr span_s, int key, int row) {
    const uint4 x = ld_shared_128(span_s);
    return {key, row, (int)x.x, (int)x.z, (int)x.w, x.y};
}

template <int M, int N>
__device__ __forceinline__ void mask_scores(float (&s)[M][N][4], const Mask &mask) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) s[m][n][r] = mask.sees(m, n, r) ? s[m][n][r] : -INFINITY;
}

/* ---- 2. P and dS ----------------------------------------------------------------------------- */
/* P = 2^(scale qk - lse), in place of S, for the n-th group of eight rows. stats: {lse, delta} of
 * the lane's two rows. */
template <int M, int N>
__device__ __forceinline__ void probabilities(float (&s)[M][N][4], int n, uint4 stats,
                                              float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            s[m][n][r] = ex2_approx_ftz(s[m][n][r] * scale_log2 -
                                        __uint_as_float(r & 1 ? stats.z : stats.x));
}

/* dS = P (dP - delta), in place of dP. */
template <int M, int N>
__device__ __forceinline__ void score_gradients(const float (&w)[M][N][4], float (&dp)[M][N][4],
                                                int n, uint4 stats) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            dp[m][n][r] = w[m][n][r] * (dp[m][n][r] - __uint_as_float(r & 1 ? stats.w : stats.y));
}

/* ---- 3. softcap, ALiBi, dropout -------------------------------------------------------------- */
__device__ __forceinline__ Score load_score(smem_addr at_s, const Bwd &g, int head) {
    const uint4 x = ld_shared_128(at_s + 16);
    return {g.scale, g.softcap, slope_of<float>(g.p.rules, (int)x.w, head), (int)x.z};
}

/* The dropout bits of the n-th group of eight rows. The batch index is in shared memory. */
template <int M>
__device__ __forceinline__ uint2 keep_eight(const Dropping<Bwd> &g, smem_addr source_s, int head,
                                            int n, const Mask &mask) {
    const Problem &p = g.p;
    const int b = load_batch(source_s), lane = threadIdx.x % 32;
    const int64_t row0 =
        drop_row0(p, b, head, drop_q0(p, b)) + (int64_t)(mask.row - lane % 4 * 2) * p.lse.row;
    return keep_of_rows<M>(g.drop, row0, p.lse.row, mask.key - lane / 4, n);
}
template <int M>
__device__ __forceinline__ uint2 keep_eight(const Bwd &, smem_addr, int, int, const Mask &) {
    return make_uint2(0, 0);
}

/* P and dS with softcap, ALiBi and, with DROP, dropout, in place of S and dP. factor: 1 / (1 -
 * p). With dropout, P of a dropped pair becomes 0 after dS is computed, because only dV uses it
 * then. */
template <bool DROP, int M, int N>
__device__ __forceinline__ void modified_gradients(float (&s)[M][N][4], float (&dp)[M][N][4], int n,
                                                   uint4 stats, const Score &score, float distance0,
                                                   const Mask &mask, uint2 keep, float factor) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float distance = distance0 + (n * 8 + r % 2 - m * 16 - r / 2 * 8);
            float derivative;
            const float logit = score_fast(score, s[m][n][r], distance, &derivative);
            const float w =
                ex2_approx_ftz(logit * LOG2_E - __uint_as_float(r & 1 ? stats.z : stats.x));
            s[m][n][r] = mask.sees(m, n, r) ? w : 0;
            const bool kept = !DROP || ((r & 1 ? keep.y : keep.x) & 1u << (16 * m + 8 * (r / 2)));
            if (DROP) dp[m][n][r] = kept ? dp[m][n][r] * factor : 0;
            dp[m][n][r] = s[m][n][r] * (dp[m][n][r] - __uint_as_float(r & 1 ? stats.w : stats.y)) *
                          derivative;
            if (DROP && !kept) s[m][n][r] = 0;
        }
}

/* ---- 4. P^T or dS^T into shared memory ------------------------------------------------------- */
/* Stores the n-th group of eight rows. lane_at: the address of the lane's first accumulator. */
template <class Scores, class T, int M, int N>
__device__ __forceinline__ void store_scores(smem_addr lane_at, const float (&c)[M][N][4], int n) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const smem_addr at = Scores::down(Scores::along(lane_at, n), 16 * m);
        st_shared_32(at, pack2<T>(c[m][n][0], c[m][n][1]));
        st_shared_32(Scores::down(at, 8), pack2<T>(c[m][n][2], c[m][n][3]));
    }
}

} // namespace

#endif
