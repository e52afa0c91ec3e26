/* SPDX-License-Identifier: BSD-3-Clause */
/* store_transposed.cuh: the store of 16-bit swap-AB products (gemm_swapab_sm90a.cu), whose
 * accumulators hold the transposed result. It transposes them through shared memory: a warpgroup's
 * 64 rows become 64 columns of the result.
 *
 * tf32 has a store of its own (tf32.cuh), because its lanes hold four neighbouring results. */
#ifndef GPUKERN_CUDA_GEMM_STORE_TRANSPOSED_CUH
#define GPUKERN_CUDA_GEMM_STORE_TRANSPOSED_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/smem.cuh"
#include "../../layout/wgmma.cuh"
#include "epilogue.cuh"

/* The Where of epilogue.cuh that stores eight neighbouring sums times alpha as one 16-byte chunk.
 * keep: ask L2 to keep the chunk for the next kernel. */
template <class R> struct SumsChunk : EveryEpilogue {
    static constexpr bool C = false, PREACT = false, OWN_BIAS = true;
    const GemmEpilogue &e;
    const GemmPlace &at;
    const int row0, col0;
    const bool keep;
    __device__ __forceinline__ SumsChunk(const GemmEpilogue &epilogue, const GemmPlace &place,
                                         int row, int col, bool keep_it)
        : e(epilogue), at(place), row0(row), col0(col), keep(keep_it) {}
    __device__ __forceinline__ void alpha_and_bias(float alpha, float *v) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= alpha;
    }
    __device__ __forceinline__ void activate(float *) const {}
    __device__ __forceinline__ void write(bool, const float *v) const {
        uint32_t two[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) two[j] = pack2<R>(v[2 * j], v[2 * j + 1]);
        R *const to_g = (R *)e.out + at.out + row0 * e.out_row + col0;
        const uint4 chunk = make_uint4(two[0], two[1], two[2], two[3]);
        if (keep)
            st_global_128_by(to_g, chunk, l2_last_out());
        else
            st_global_128(to_g, chunk);
    }
};

/* Stores a warpgroup's 64 rows as columns of the result, and its COLS columns as rows. All 128
 * threads call it. no_epilogue: the epilogue only multiplies by alpha, and rows of the result are
 * whole 16-byte chunks. */
template <class R, int COLS, int LD>
__device__ __forceinline__ void store_transposed(const GemmProblem &p, const OwnPlace &at,
                                                 const float (&sum)[COLS / 2], float *staging,
                                                 int row0, int col0, bool no_epilogue, bool keep) {
    static_assert(wgmma_transposed_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const GemmEpilogue &e = p.epilogue;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        staging[d.col * LD + d.row] = sum[i];
    }
    bar_sync(1, 128); /* all sums have been written */
    const auto store = [&](int i, const auto &leave) {
        const int row = col0 + i / 8, col = row0 + i % 8 * 8,
                  valid = (int)min((int64_t)8, p.m - col);
        const float4 x = *(const float4 *)(staging + i / 8 * LD + i % 8 * 8),
                     y = *(const float4 *)(staging + i / 8 * LD + i % 8 * 8 + 4);
        float v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        if (row < p.n && valid > 0) leave(row, col, valid, v);
    };
    if (!OWN_EPILOGUE && no_epilogue) {
        const float alpha = (float)e.alpha;
#pragma unroll
        for (int i = 0; i < COLS * 8; i += 128)
            if (i + thread < COLS * 8)
                store(i + thread, [&](int row, int col, int, float *v) {
                    const SumsChunk<R> where(e, at, row, col, keep);
                    finish<8>(e, alpha, where, v);
                });
    } else {
#pragma unroll 1
        for (int i = thread; i < COLS * 8; i += 128)
            store(i, [&](int row, int col, int valid, float *v) {
                epilogue_row<R, 8>(e, at, row, col, valid, v);
            });
    }
    bar_sync(1, 128); /* all sums have been read */
}

#endif
