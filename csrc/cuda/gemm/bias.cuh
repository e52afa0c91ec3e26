/* SPDX-License-Identifier: BSD-3-Clause */
/* bias.cuh: the bias as the accumulators' lanes want it, and what the stores will ask of memory, asked early. */
#ifndef GPUKERN_CUDA_GEMM_BIAS_CUH
#define GPUKERN_CUDA_GEMM_BIAS_CUH

#include "../ptx/regs.cuh"
#include "epilogue.cuh"

/* The bias of a lane's columns from col0 on, two of every eight, all read before one is used; what lies past the last column
 * is not stored. ANY: one that cannot be read in pairs, too. */
template <class R, bool ANY, int N>
__device__ __forceinline__ void read_bias(const GemmProblem &p, int64_t col0, int lane, float (&bias)[N]) {
    const GemmEpilogue &e = p.epilogue;
    const int64_t col = col0 + lane % 4 * 2, last = p.n - 2;
    if (ANY && !e.bias_vectors) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const int64_t first = min(col + i * 4, p.n - 1);
            read_any<R, 2>(e.bias, e.bias_dtype, first * e.bias_col, e.bias_col, false, first < p.n - 1 ? 2 : 1,
                           bias + i);
        }
    } else if (e.bias_dtype == GK_F32) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 two = *(const float2 *)((const float *)e.bias + min(col + i * 4, last));
            bias[i] = two.x, bias[i + 1] = two.y;
        }
    } else if constexpr (element<R>::bits == 16) {
        uint32_t two[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) two[i] = *(const uint32_t *)((const R *)e.bias + min(col + i * 8, last));
#pragma unroll
        for (int i = 0; i < N; ++i) bias[i] = to_acc(((const R *)&two[i / 2])[i % 2]);
    }
}

/* Brings the bias of BN columns from col0 on into L1, where the stores will look for it. */
template <int BN> __device__ __forceinline__ void touch_bias(const GemmProblem &p, int64_t col0, int lane) {
    const GemmEpilogue &e = p.epilogue;
    const int bytes = e.bias_dtype == GK_F32 ? 4 : 2;
    static_assert(BN * 4 <= 32 * 32, "a sector a lane");
    if (e.bias_vectors && lane < BN * bytes / 32)
        touch_global((const char *)e.bias + min(col0 * bytes + lane * 32, p.n * bytes - bytes));
}

/* Brings what the stores ask of the call into the constant cache. */
__device__ __forceinline__ void touch_epilogue(const GemmEpilogue &e) {
    have(e.alpha), have(e.out), have(e.out_row), have((int)e.activation);
}

#endif
