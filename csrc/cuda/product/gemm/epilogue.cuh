/* SPDX-License-Identifier: BSD-3-Clause */
/* epilogue.cuh: what every gemm kernel does with its sums:
 *   preact = alpha sum + beta c + bias     out = activation(preact)     in float (double for float64), rounded once
 * and where there are scales (GemmScales): sum is the product of codes times its row's and its
 * column's scale, and out is divided by its own. `finish` is the one body of it. What its values
 * are, where what joins them is read and where they go, says the caller's `Where`: neighbours of a
 * row (RowCols), or a warp's accumulators (store_panels.cuh, store_transposed.cuh).
 * R: the narrow type of results; each of out, c and bias is of R or float32, beside an R of 8 bits
 * also bfloat16. */
#ifndef GPUKERN_CUDA_GEMM_EPILOGUE_CUH
#define GPUKERN_CUDA_GEMM_EPILOGUE_CUH

#include "../../tile/convert.cuh"
#include "activation.cuh"
#include "problem.cuh"

/* COLS neighbours of a row; with `vectors` they are dense, aligned and all valid. */
template <class S, int COLS, class W>
__device__ __forceinline__ void read_cols(const S *from_g, int64_t step, bool vectors, int valid,
                                          W *v) {
    constexpr int BYTES = COLS * (int)sizeof(S), WIDE = BYTES % 16 == 0  ? 16
                                                        : BYTES % 8 == 0 ? 8
                                                                         : (int)sizeof(S);
    if (WIDE > (int)sizeof(S) && vectors && valid == COLS) {
        constexpr int EACH = WIDE / (int)sizeof(S);
#pragma unroll
        for (int i = 0; i < COLS; i += EACH) {
            union {
                uint4 quad;
                uint2 pair;
                unsigned char bytes[16];
            } u;
            if (WIDE == 16)
                u.quad = *(const uint4 *)(from_g + i);
            else
                u.pair = *(const uint2 *)(from_g + i);
#pragma unroll
            for (int j = 0; j < EACH; ++j) v[i + j] = to_acc(((const S *)u.bytes)[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COLS; ++i) v[i] = i < valid ? to_acc(from_g[i * step]) : W(0);
    }
}

template <class S, int COLS, class W>
__device__ __forceinline__ void write_cols(S *to_g, int64_t step, bool vectors, int valid,
                                           const W *v) {
    constexpr int BYTES = COLS * (int)sizeof(S), WIDE = BYTES % 16 == 0  ? 16
                                                        : BYTES % 8 == 0 ? 8
                                                                         : (int)sizeof(S);
    if (WIDE > (int)sizeof(S) && vectors && valid == COLS) {
        constexpr int EACH = WIDE / (int)sizeof(S);
#pragma unroll
        for (int i = 0; i < COLS; i += EACH) {
            union {
                uint4 quad;
                uint2 pair;
                unsigned char bytes[16];
            } u;
#pragma unroll
            for (int j = 0; j < EACH; ++j) ((S *)u.bytes)[j] = from_acc<S>(v[i + j]);
            if (WIDE == 16)
                *(uint4 *)(to_g + i) = u.quad;
            else
                *(uint2 *)(to_g + i) = u.pair;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COLS; ++i)
            if (i < valid) to_g[i * step] = from_acc<S>(v[i]);
    }
}

/* A tensor of R or a wider dtype. */
template <class R, int COLS, class W>
__device__ __forceinline__ void read_any(const void *data, gk_dtype dtype, int64_t at, int64_t step,
                                         bool vectors, int valid, W *v) {
    if (element<R>::bits <= 16 && dtype == GK_F32) {
        if constexpr (element<R>::bits <= 16)
            read_cols<float, COLS>((const float *)data + at, step, vectors, valid, v);
    } else if (element<R>::bits <= 8 && dtype == GK_BF16) {
        if constexpr (element<R>::bits <= 8)
            read_cols<__nv_bfloat16, COLS>((const __nv_bfloat16 *)data + at, step, vectors, valid,
                                           v);
    } else {
        read_cols<R, COLS>((const R *)data + at, step, vectors, valid, v);
    }
}

template <class R, int COLS, class W>
__device__ __forceinline__ void write_any(void *data, gk_dtype dtype, int64_t at, int64_t step,
                                          bool vectors, int valid, const W *v) {
    if (element<R>::bits <= 16 && dtype == GK_F32) {
        if constexpr (element<R>::bits <= 16)
            write_cols<float, COLS>((float *)data + at, step, vectors, valid, v);
    } else if (element<R>::bits <= 8 && dtype == GK_BF16) {
        if constexpr (element<R>::bits <= 8)
            write_cols<__nv_bfloat16, COLS>((__nv_bfloat16 *)data + at, step, vectors, valid, v);
    } else {
        write_cols<R, COLS>((R *)data + at, step, vectors, valid, v);
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */
struct NoScales {};

/* Of rows and columns of the product, and of the result, by which it is divided; a missing one is
 * 1, its step 0. shift: one counts for 2^shift rows or columns. */
struct GemmScales {
    const float *row, *col, *out;
    int64_t row_step, col_step;
    int row_shift, col_shift;
};

template <int N, class Where, class W>
__device__ __forceinline__ void scale_sums(const NoScales &, const Where &, W *) {}
template <int N, class Where, class W>
__device__ __forceinline__ void scale_sums(const GemmScales &s, const Where &where, W *v) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        v[i] = v[i] * (W)s.row[(where.row(i) >> s.row_shift) * s.row_step] *
               (W)s.col[(where.col(i) >> s.col_shift) * s.col_step];
}

template <int N, class W> __device__ __forceinline__ void scale_results(const NoScales &, W *) {}
template <int N, class W> __device__ __forceinline__ void scale_results(const GemmScales &s, W *v) {
    const W inverse = W(1) / (W)*s.out;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= inverse;
}

/* ---- the body -------------------------------------------------------------------------------- */
/* What a Where may leave out at compile time; what it may have is asked of the call. */
struct EveryEpilogue {
    static constexpr bool C = true, PREACT = true;
    /* alpha_and_bias does both at once, or no bias */
    static constexpr bool OWN_BIAS = false;
    /* one copy of the code writes both results */
    static constexpr bool ONE_WRITE = false;
    template <int N>
    static constexpr int C_AT_ONCE = N; /* values of c, all read before one is used */
    __device__ __forceinline__ float bias(int) const { return 0; }
    template <class W> __device__ __forceinline__ void alpha_and_bias(W, W *) const {}
    template <class W> __device__ __forceinline__ void read_c(int, W *) const {}
};

/* v: N sums. where: bias(i) or alpha_and_bias(alpha, v), read_c(i, x) from value i on, and, once
 * the values are final, write(to_preact, v); activate(v); and row(i), col(i) of value i, inside the
 * matrix, for scales. */
template <int N, class Where, class Scales, class W>
__device__ __forceinline__ void finish(const GemmEpilogue &e, W alpha, const Scales &scales,
                                       const Where &where, W *v) {
    scale_sums<N>(scales, where, v);
    if (Where::OWN_BIAS) {
        where.alpha_and_bias(alpha, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= alpha;
    }
    if (Where::C && e.c) {
        const W beta = (W)e.beta;
        constexpr int SOME = Where::template C_AT_ONCE<N>;
#pragma unroll
        for (int j = 0; j < N; j += SOME) {
            W x[SOME];
            where.read_c(j, x);
#pragma unroll
            for (int i = 0; i < SOME; ++i) v[j + i] += beta * x[i];
        }
    }
    if (!Where::OWN_BIAS && e.bias) { /* not + 0: -0 stays */
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += where.bias(i);
    }
    if (Where::PREACT && Where::ONE_WRITE) {
#pragma unroll 1
        for (int left = e.preact ? 2 : 1; left > 0; --left) {
            const bool to_preact = left == 2;
            if (!to_preact) {
                where.activate(v);
                scale_results<N>(scales, v);
            }
            where.write(to_preact, v);
        }
        return;
    }
    if (Where::PREACT && e.preact) where.write(true, v);
    where.activate(v);
    scale_results<N>(scales, v);
    where.write(false, v);
}

/* ---- neighbours of a row --------------------------------------------------------------------- */
/* The bias of COLS columns; kernels whose lanes keep their columns read it once. */
template <class R, int COLS, class W>
__device__ __forceinline__ void epilogue_bias(const GemmEpilogue &e, int64_t row, int64_t col,
                                              int valid, W *bias) {
#pragma unroll
    for (int i = 0; i < COLS; ++i) bias[i] = 0;
    if (e.bias)
        read_any<R, COLS>(e.bias, e.bias_dtype, row * e.bias_row + col * e.bias_col, e.bias_col,
                          e.bias_vectors, valid, bias);
}

/* COLS columns from `col` on (a multiple of COLS) in one row, `valid` of them inside the matrix. */
template <class R, int COLS, class W> struct RowCols : EveryEpilogue {
    const GemmEpilogue &e;
    const GemmPlace &at;
    const int64_t row0, col0;
    const int valid;
    const W *const biases;

    __device__ __forceinline__ RowCols(const GemmEpilogue &epilogue, const GemmPlace &place,
                                       int64_t row, int64_t col, int inside, const W *of_cols)
        : e(epilogue), at(place), row0(row), col0(col), valid(inside), biases(of_cols) {}
    __device__ __forceinline__ int64_t row(int) const { return row0; }
    __device__ __forceinline__ int64_t col(int i) const { return col0 + min(i, valid - 1); }
    __device__ __forceinline__ W bias(int i) const { return biases[i]; }
    __device__ __forceinline__ void read_c(int, W *x) const {
        read_any<R, COLS>(e.c, e.c_dtype, at.c + row0 * e.c_row + col0 * e.c_col, e.c_col,
                          e.c_vectors, valid, x);
    }
    __device__ __forceinline__ void activate(W *v) const {
        if (e.activation != GK_ACT_NONE) activate_in_place<COLS>(e.activation, v);
    }
    __device__ __forceinline__ void write(bool to_preact, const W *v) const {
        if (to_preact)
            write_any<R, COLS>(e.preact, e.out_dtype,
                               at.preact + row0 * e.preact_row + col0 * e.preact_col, e.preact_col,
                               e.out_vectors, valid, v);
        else
            write_any<R, COLS>(e.out, e.out_dtype, at.out + row0 * e.out_row + col0 * e.out_col,
                               e.out_col, e.out_vectors, valid, v);
    }
};

/* v: the sums of COLS columns from `col` on (a multiple of COLS) in one row, `valid` of them inside
 * the matrix. */
template <class R, int COLS, class W, class Scales = NoScales>
__device__ __forceinline__ void epilogue_cols(const GemmEpilogue &e, const GemmPlace &at,
                                              int64_t row, int64_t col, int valid, W *v,
                                              const W *bias, const Scales &scales = {}) {
    const RowCols<R, COLS, W> where(e, at, row, col, valid, bias);
    finish<COLS>(e, (W)e.alpha, scales, where, v);
}

/* The same; the bias is read for these columns alone. */
template <class R, int COLS, class W, class Scales = NoScales>
__device__ __forceinline__ void epilogue_row(const GemmEpilogue &e, const GemmPlace &at,
                                             int64_t row, int64_t col, int valid, W *v,
                                             const Scales &scales = {}) {
    W bias[COLS];
    epilogue_bias<R, COLS>(e, row, col, valid, bias);
    epilogue_cols<R, COLS>(e, at, row, col, valid, v, bias, scales);
}

#endif
