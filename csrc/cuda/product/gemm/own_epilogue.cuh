/* SPDX-License-Identifier: BSD-3-Clause */
/* own_epilogue.cuh: how an epilogue that a user writes (docs/epilogue.md) reaches the kernels of
 * gemm.
 *
 * A library for such an epilogue compiles the kernels of gemm_sm90a, gemm_pingpong_sm90a and
 * gemm_sm80 once more, with GPUKERN_EPILOGUE defined (csrc/epilogue/call.h). Then OwnProblem is a
 * GemmProblem with the epilogue as its last member, and the epilogue's `finish` replaces the
 * activation. The planners are told that the activation is relu, because it also has few
 * instructions.
 *
 * In libgpukern itself, OwnProblem and OwnPlace are the plain GemmProblem and GemmPlace. */
#ifndef GPUKERN_CUDA_GEMM_OWN_EPILOGUE_CUH
#define GPUKERN_CUDA_GEMM_OWN_EPILOGUE_CUH

#include "../../ptx/prefetch_l2.cuh"
#include "../../ptx/regs.cuh"
#include "problem.cuh"

#ifdef GPUKERN_EPILOGUE

#include "../../../epilogue/call.h"

constexpr bool OWN_EPILOGUE = true;
struct OwnProblem : GemmProblem {
    Epilogue own;
};
struct OwnPlace : GemmPlace {
    Epilogue own;
};
inline OwnProblem own_problem(const GemmProblem &p, const void *args) {
    OwnProblem to;
    static_cast<GemmProblem &>(to) = p;
    to.own = static_cast<const EpilogueCall *>((const gk_gemm_args *)args)->epilogue;
    return to;
}
__device__ __forceinline__ OwnPlace gemm_place(const OwnProblem &p, int64_t batch) {
    OwnPlace at;
    static_cast<GemmPlace &>(at) = gemm_place(static_cast<const GemmProblem &>(p), batch);
    at.own = p.own;
    return at;
}

/* Prefetches the tensors that the epilogue's `finish` reads for a warp's 16 rows x COLS columns, if
 * the columns have stride 1. Vectors are prefetched into L1, matrices into L2. Without this, the
 * first of them arrives 0.4 us after the products. */
template <int COLS> struct OwnPrefetch {
    const int rows, cols, row0, col0, lane; /* rows, cols: size of the result */
    __device__ __forceinline__ int row(int r) const { return min(row0 + r, rows - 1); }
    __device__ __forceinline__ void operator()(float) const {}
    __device__ __forceinline__ void operator()(const gk_per_row &x) const {
        if (lane < 16) prefetch_l1(x.data + row(lane) * x.step);
    }
    __device__ __forceinline__ void operator()(const gk_per_column &x) const {
        if (lane * 8 < COLS) prefetch_l1(x.data + min(col0 + lane * 8, cols - 1) * x.step);
    }
    __device__ __forceinline__ void operator()(const gk_per_element &x) const {
        if (x.column_step != 1 || lane * 8 >= COLS || col0 + lane * 8 >= cols) return;
#pragma unroll 1
        for (int r = 0; r < 16; ++r) prefetch_l2(x.data + row(r) * x.row_step + col0 + lane * 8);
    }
};
template <int COLS>
__device__ __forceinline__ void own_prefetch(const OwnProblem &p, int row0, int col0, int lane) {
    p.own.arguments(OwnPrefetch<COLS>{(int)p.m, (int)p.n, row0, col0, lane});
}

#else

constexpr bool OWN_EPILOGUE = false;
typedef GemmProblem OwnProblem;
typedef GemmPlace OwnPlace;
inline const GemmProblem &own_problem(const GemmProblem &p, const void *) { return p; }
template <int COLS>
__device__ __forceinline__ void own_prefetch(const OwnProblem &, int, int, int) {}

#endif

/* Applies the user's epilogue to the sum at (row, column). x: an OwnProblem or an OwnPlace. */
template <class Owner>
__device__ __forceinline__ float own_finish(const Owner &x, float sum, int row, int column) {
    return x.own.finish(sum, row, column);
}

#endif
