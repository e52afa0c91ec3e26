/* SPDX-License-Identifier: BSD-3-Clause */
/* epilogue.cuh: the epilogue of every gemm kernel:
 *
 *   preact = alpha sum + beta c + bias     out = activation(preact)
 *
 * It is computed in float32 (float64 for float64 products) and rounded once.
 *
 * `finish` is the only place that has this formula. Its parameter `Where` supplies the bias and c,
 * and stores the results. One Where is RowCols below, for neighbours of a row. The others are for a
 * warp's accumulators (store_panels.cuh, store_transposed.cuh, tf32.cuh).
 *
 * R is the narrow type of results. Each of out, c and bias has type R or float32. If R has 8 bits,
 * each may also be bfloat16. */
#ifndef GPUKERN_CUDA_GEMM_EPILOGUE_CUH
#define GPUKERN_CUDA_GEMM_EPILOGUE_CUH

#include "../../tile/convert.cuh"
#include "activation.cuh"
#include "own_epilogue.cuh"

/* Reads COLS neighbours of a row, `valid` of them inside the matrix. vectors: they have stride 1
 * and are aligned. */
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

/* Reads COLS neighbours of a row of a tensor whose dtype is R's or a wider one. */
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

/* ---- the formula ----------------------------------------------------------------------------- */
/* Defaults of a Where. C and PREACT say at compile time whether its code has c and preact at all.
 * If it does, the call still decides whether they are used. */
struct EveryEpilogue {
    static constexpr bool C = true, PREACT = true;
    /* True if alpha_and_bias multiplies by alpha and adds the bias, if any. */
    static constexpr bool OWN_BIAS = false;
    /* True if one copy of the code writes both preact and out. */
    static constexpr bool ONE_WRITE = false;
    template <int N>
    static constexpr int C_AT_ONCE = N; /* values of c that are read before the first is used */
    __device__ __forceinline__ float bias(int) const { return 0; }
    template <class W> __device__ __forceinline__ void alpha_and_bias(W, W *) const {}
    template <class W> __device__ __forceinline__ void read_c(int, W *) const {}
};

/* Applies the epilogue to N sums v. `where` has bias(i) or alpha_and_bias(alpha, v), read_c(i,
 * x) for values from i on, write(to_preact, v) and activate(v). */
template <int N, class Where, class W>
__device__ __forceinline__ void finish(const GemmEpilogue &e, W alpha, const Where &where, W *v) {
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
    if (!Where::OWN_BIAS && e.bias) { /* a branch, because adding 0 would turn -0 into +0 */
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += where.bias(i);
    }
    if (Where::PREACT && Where::ONE_WRITE) {
#pragma unroll 1
        for (int left = e.preact ? 2 : 1; left > 0; --left) {
            const bool to_preact = left == 2;
            if (!to_preact) where.activate(v);
            where.write(to_preact, v);
        }
        return;
    }
    if (Where::PREACT && e.preact) where.write(true, v);
    where.activate(v);
    where.write(false, v);
}

/* ---- neighbours of a row --------------------------------------------------------------------- */
/* Reads the bias of COLS columns of a row. Kernels whose lanes keep their columns call it once. */
template <class R, int COLS, class W>
__device__ __forceinline__ void epilogue_bias(const GemmEpilogue &e, int64_t row, int64_t col,
                                              int valid, W *bias) {
#pragma unroll
    for (int i = 0; i < COLS; ++i) bias[i] = 0;
    if (e.bias)
        read_any<R, COLS>(e.bias, e.bias_dtype, row * e.bias_row + col * e.bias_col, e.bias_col,
                          e.bias_vectors, valid, bias);
}

/* The Where for COLS columns of one row, from `col` on (a multiple of COLS). `valid` of them lie
 * inside the matrix. */
template <class R, int COLS, class W> struct RowCols : EveryEpilogue {
    const GemmEpilogue &e;
    const OwnPlace &at;
    const int64_t row0, col0;
    const int valid;
    const W *const biases;

    __device__ __forceinline__ RowCols(const GemmEpilogue &epilogue, const OwnPlace &place,
                                       int64_t row, int64_t col, int inside, const W *of_cols)
        : e(epilogue), at(place), row0(row), col0(col), valid(inside), biases(of_cols) {}
    __device__ __forceinline__ W bias(int i) const { return biases[i]; }
    __device__ __forceinline__ void read_c(int, W *x) const {
        read_any<R, COLS>(e.c, e.c_dtype, at.c + row0 * e.c_row + col0 * e.c_col, e.c_col,
                          e.c_vectors, valid, x);
    }
    __device__ __forceinline__ void activate(W *v) const {
        if constexpr (OWN_EPILOGUE) {
            const int last = (int)col0 + valid - 1;
#pragma unroll
            for (int i = 0; i < COLS; ++i)
                v[i] = own_finish(at, v[i], (int)row0, min((int)col0 + i, last));
        } else if (e.activation != GK_ACT_NONE) {
            activate_in_place<COLS>(e.activation, v);
        }
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

/* Applies the epilogue to the sums v of COLS columns of one row, from `col` on (a multiple of
 * COLS), and stores the results. `valid` of the columns lie inside the matrix. */
template <class R, int COLS, class W>
__device__ __forceinline__ void epilogue_cols(const GemmEpilogue &e, const OwnPlace &at,
                                              int64_t row, int64_t col, int valid, W *v,
                                              const W *bias) {
    const RowCols<R, COLS, W> where(e, at, row, col, valid, bias);
    finish<COLS>(e, (W)e.alpha, where, v);
}

/* Reads the bias of these columns, then does the same. */
template <class R, int COLS, class W>
__device__ __forceinline__ void epilogue_row(const GemmEpilogue &e, const OwnPlace &at, int64_t row,
                                             int64_t col, int valid, W *v) {
    W bias[COLS];
    epilogue_bias<R, COLS>(e, row, col, valid, bias);
    epilogue_cols<R, COLS>(e, at, row, col, valid, v, bias);
}

#endif
