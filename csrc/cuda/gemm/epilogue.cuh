/* epilogue.cuh: what every gemm kernel does with its sums:
 *   preact = alpha sum + beta c + bias     out = activation(preact)     in float (double for float64), rounded once */
#ifndef GPUKERN_CUDA_GEMM_EPILOGUE_CUH
#define GPUKERN_CUDA_GEMM_EPILOGUE_CUH

#include "../tile/convert.cuh"
#include "activation.cuh"
#include "problem.cuh"

/* COLS neighbours of a row; with `vectors` they are dense, aligned and all valid. */
template <class S, int COLS, class W>
__device__ __forceinline__ void read_cols(const S *from_g, int64_t step, bool vectors, int valid, W *v) {
    constexpr int BYTES = COLS * (int)sizeof(S), WIDE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : (int)sizeof(S);
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
__device__ __forceinline__ void write_cols(S *to_g, int64_t step, bool vectors, int valid, const W *v) {
    constexpr int BYTES = COLS * (int)sizeof(S), WIDE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : (int)sizeof(S);
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

/* A tensor of dtype T or float32. */
template <class T, int COLS, class W>
__device__ __forceinline__ void read_any(const void *data, gk_dtype dtype, int64_t at, int64_t step, bool vectors,
                                         int valid, W *v) {
    if (sizeof(T) == 2 && dtype == GK_F32) {
        if constexpr (sizeof(T) == 2) read_cols<float, COLS>((const float *)data + at, step, vectors, valid, v);
    } else {
        read_cols<T, COLS>((const T *)data + at, step, vectors, valid, v);
    }
}

template <class T, int COLS, class W>
__device__ __forceinline__ void write_any(void *data, gk_dtype dtype, int64_t at, int64_t step, bool vectors, int valid,
                                          const W *v) {
    if (sizeof(T) == 2 && dtype == GK_F32) {
        if constexpr (sizeof(T) == 2) write_cols<float, COLS>((float *)data + at, step, vectors, valid, v);
    } else {
        write_cols<T, COLS>((T *)data + at, step, vectors, valid, v);
    }
}

/* The bias of COLS columns; kernels whose lanes keep their columns read it once. */
template <class T, int COLS, class W>
__device__ __forceinline__ void epilogue_bias(const GemmEpilogue &e, int64_t row, int64_t col, int valid, W *bias) {
#pragma unroll
    for (int i = 0; i < COLS; ++i) bias[i] = 0;
    if (e.bias)
        read_any<T, COLS>(e.bias, e.bias_dtype, row * e.bias_row + col * e.bias_col, e.bias_col, e.bias_vectors, valid,
                          bias);
}

/* v: the sums of COLS columns from `col` on (a multiple of COLS) in one row, `valid` of them inside the matrix. */
template <class T, int COLS, class W>
__device__ __forceinline__ void epilogue_cols(const GemmEpilogue &e, const GemmPlace &at, int64_t row, int64_t col,
                                              int valid, W *v, const W *bias) {
    const W alpha = (W)e.alpha;
#pragma unroll
    for (int i = 0; i < COLS; ++i) v[i] *= alpha;
    if (e.c) {
        const W beta = (W)e.beta;
        W x[COLS];
        read_any<T, COLS>(e.c, e.c_dtype, at.c + row * e.c_row + col * e.c_col, e.c_col, e.c_vectors, valid, x);
#pragma unroll
        for (int i = 0; i < COLS; ++i) v[i] += beta * x[i];
    }
    if (e.bias) { /* not + 0: -0 stays */
#pragma unroll
        for (int i = 0; i < COLS; ++i) v[i] += bias[i];
    }
    if (e.preact)
        write_any<T, COLS>(e.preact, e.out_dtype, at.preact + row * e.preact_row + col * e.preact_col, e.preact_col,
                           e.out_vectors, valid, v);
    if (e.activation != GK_ACT_NONE) activate_in_place<COLS>(e.activation, v);
    write_any<T, COLS>(e.out, e.out_dtype, at.out + row * e.out_row + col * e.out_col, e.out_col, e.out_vectors, valid,
                       v);
}

template <class T, int COLS, class W>
__device__ __forceinline__ void epilogue_cols(const GemmEpilogue &e, const GemmPlace &at, int64_t row, int64_t col,
                                              int valid, W *v) {
    W bias[COLS];
    epilogue_bias<T, COLS>(e, row, col, valid, bias);
    epilogue_cols<T, COLS>(e, at, row, col, valid, v, bias);
}

#endif
