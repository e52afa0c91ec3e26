/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_quant.h: quantised and sparse products. gpukern.h has the conventions. */
#ifndef GPUKERN_QUANT_H
#define GPUKERN_QUANT_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- quantised products ---------------------------------------------------------------------- */
/* A quantised matrix is codes, and scales that say what a code is worth: the element is code *
 * scale. A scale tensor is one number ([] or [1]) or a matrix with a scale for each row, or block
 * of 128 of them, or for all, and likewise across; along the dimension that is summed over a block
 * may also be of 32. float32, or GK_E8M0. */
typedef enum gk_granularity {
    GK_PER_TENSOR = 0,  /* scale [] */
    GK_PER_ROW = 1,     /* [..., M, 1] */
    GK_PER_1X128 = 2,   /* [..., M, ceil(K / 128)] */
    GK_PER_128X128 = 3, /* [..., ceil(M / 128), ceil(K / 128)] */
    GK_PER_1X32 = 4     /* [..., M, ceil(K / 32)], powers of two rounded up */
} gk_granularity;

typedef enum gk_quantized {
    GK_QUANTIZE_X = 0,        /* x */
    GK_QUANTIZE_SILU_MUL = 1, /* silu(x) * up */
    GK_QUANTIZE_RMS_NORM =
        2 /* h / sqrt(mean(h^2) + eps) * weight, h = x + residual rounded to x's dtype */
} gk_quantized;

/* Of each block: scale = max(amax / q, 2^-126), q = 448 (e4m3), 57344 (e5m2) or 127; codes = x /
 * scale in float32, to nearest even, saturated. A block of zeros has a finite scale, one that holds
 * an infinity or NaN the scale NaN. */
typedef struct gk_quantize_args {
    size_t size;
    gk_quantized what;
    /* [..., M, K] float32, bfloat16, float16, and float64 for GK_QUANTIZE_X; any strides */
    gk_tensor x;
    const gk_tensor *up;       /* GK_QUANTIZE_SILU_MUL: x's shape and dtype */
    const gk_tensor *weight;   /* GK_QUANTIZE_RMS_NORM: [K], x's dtype or float32; NULL = 1 */
    const gk_tensor *residual; /* GK_QUANTIZE_RMS_NORM: x's shape and dtype; NULL = 0 */
    double eps;                /* GK_QUANTIZE_RMS_NORM */
    gk_granularity granularity;
    const gk_tensor *scale_ub; /* [] or [1] float32: an upper bound of amax; NULL = none */
    const gk_tensor
        *given;      /* the scales to use, with the shape and dtype of `scale`; NULL = from amax */
    gk_tensor codes; /* x's shape, contiguous, GK_E4M3, GK_E5M2 or GK_I8 */
    gk_tensor scale; /* contiguous, float32; GK_PER_1X32: GK_E8M0 or float32; unused where scales
                        are given */
    const gk_tensor *sum; /* x + residual, like x, contiguous; NULL = not wanted */
    void *workspace;
    size_t workspace_bytes;
} gk_quantize_args;

#define GK_QUANTIZE_ARGS_INIT {.size = sizeof(gk_quantize_args), .eps = 1e-6}

GK_API size_t gk_quantize_workspace_bytes(const gk_context *, const gk_quantize_args *);
GK_API gk_status gk_quantize(const gk_context *, const gk_quantize_args *);
GK_API gk_status gk_explain_quantize(const gk_context *, const gk_quantize_args *,
                                     gk_explanation *);

/* out = codes * scale, rounded once. */
typedef struct gk_dequantize_args {
    size_t size;
    gk_tensor codes; /* [..., M, K] GK_E4M3, GK_E5M2 or GK_I8, any strides */
    gk_tensor scale; /* [] or [1], or the codes' leading dimensions and [Sm, Sk]; any strides */
    gk_tensor out;   /* the codes' shape, contiguous, float32, bfloat16, float16 or float64 */
} gk_dequantize_args;

#define GK_DEQUANTIZE_ARGS_INIT {.size = sizeof(gk_dequantize_args)}

GK_API gk_status gk_dequantize(const gk_context *, const gk_dequantize_args *);
GK_API gk_status gk_explain_dequantize(const gk_context *, const gk_dequantize_args *,
                                       gk_explanation *);

typedef enum gk_accumulate {
    GK_PRECISE = 0, /* no sum in fewer bits than float32 spans more than 128 of k */
    GK_FAST = 1     /* such a sum may span all of k: 8-bit floats with one scale along k */
} gk_accumulate;

/* out = activation(sum_k a scale_a b scale_b + beta c + bias), in float32; of int8 exact int32 sums
 * within one scale's block. */
typedef struct gk_scaled_gemm_args {
    size_t size;
    gk_tensor a;                /* [M, K] GK_E4M3 or GK_E5M2, or GK_I8; any strides */
    gk_tensor b;                /* [K, N] likewise, GK_I8 with GK_I8 alone */
    gk_tensor scale_a, scale_b; /* one number, or [Sm, Sk] and [Sk, Sn]; any strides */
    const gk_tensor *bias; /* [N]: float32, or of 16 bits: a 16-bit result's dtype, any beside 8 or
                              32 bits; NULL = none */
    const gk_tensor *c;    /* broadcasts to out, likewise; not read when beta == 0; NULL = none */
    double beta;
    /* [] or [1] float32: an 8-bit result is divided by it; NULL = other results */
    const gk_tensor *out_scale;
    gk_activation activation;
    gk_accumulate accumulate;
    gk_tensor out; /* [M, N], last stride 1; float32, bfloat16, float16, GK_E4M3, GK_E5M2, GK_I8 */
    void *workspace;
    size_t workspace_bytes;
} gk_scaled_gemm_args;

#define GK_SCALED_GEMM_ARGS_INIT {.size = sizeof(gk_scaled_gemm_args), .beta = 1.0}

GK_API size_t gk_scaled_gemm_workspace_bytes(const gk_context *, const gk_scaled_gemm_args *);
GK_API gk_status gk_scaled_gemm(const gk_context *, const gk_scaled_gemm_args *);
GK_API gk_status gk_explain_scaled_gemm(const gk_context *, const gk_scaled_gemm_args *,
                                        gk_explanation *);

/* Weights of few bits, packed once. q [N, K] holds a code an element; packed [ceil(N / 64), ceil(K
 * / 64), bytes of a tile] uint8, whose first two dimensions may be narrowed: a shard is a slice. A
 * tile is 64 x 64 codes in the order in which the fragments of a 16 x 16 operand hold them
 * (docs/kernels/gemm_quantised.md); codes beyond N and K are 0. */
typedef enum gk_weight_format {
    GK_INT4 = 0,   /* q int8, -8 .. 7 */
    GK_UINT4 = 1,  /* q uint8, 0 .. 15; less a zero point */
    GK_INT8 = 2,   /* q int8 */
    GK_W_E4M3 = 3, /* q GK_E4M3 */
    GK_MXFP4 = 4, /* q uint8: sign and e2m1, 0 .5 1 1.5 2 3 4 6; groups of 32 with a power of two */
    GK_NVFP4 = 5  /* the same; groups of 16 with an e4m3 scale, and one scale of all */
} gk_weight_format;

enum {
    GK_TILE = 64,
    GK_TILE_BYTES_4 = 2048, /* of 4-bit codes */
    GK_TILE_BYTES_8 = 4096
};

typedef struct gk_pack_weight_args {
    size_t size;
    gk_tensor q; /* [N, K], any strides; of 4-bit formats the low four bits count */
    gk_weight_format format;
    gk_tensor packed; /* contiguous */
} gk_pack_weight_args;

#define GK_PACK_WEIGHT_ARGS_INIT {.size = sizeof(gk_pack_weight_args)}

GK_API gk_status gk_pack_weight(const gk_context *, const gk_pack_weight_args *);
GK_API gk_status gk_explain_pack_weight(const gk_context *, const gk_pack_weight_args *,
                                        gk_explanation *);

/* The way back, bit for bit. */
typedef struct gk_unpack_weight_args {
    size_t size;
    gk_tensor packed; /* tiles contiguous, the first two dimensions at any strides */
    int64_t n, k;
    gk_weight_format format;
    gk_tensor q; /* [N, K] contiguous, int8, uint8 or GK_E4M3, as the format has it */
} gk_unpack_weight_args;

#define GK_UNPACK_WEIGHT_ARGS_INIT {.size = sizeof(gk_unpack_weight_args)}

GK_API gk_status gk_unpack_weight(const gk_context *, const gk_unpack_weight_args *);
GK_API gk_status gk_explain_unpack_weight(const gk_context *, const gk_unpack_weight_args *,
                                          gk_explanation *);

/* out = activation(a w^T + bias), w [N, K] = (code - zero) * scale * global_scale, sums in float32.
 * Each weight is rounded to a's dtype once, or the scales meet the float32 sums of their group: so
 * of an e4m3 a, and where a kernel is faster by it. */
typedef struct gk_weight_gemm_args {
    size_t size;
    gk_tensor a;      /* [..., M, K] bfloat16 or float16, any strides; or GK_E4M3 */
    gk_tensor packed; /* [ceil(N / 64), ceil(K / 64), bytes] */
    gk_tensor scale;  /* [ceil(K / g), N], g = 16, 32, 64, 128, 256 or K; a's dtype or float32,
                         GK_MXFP4 also GK_E8M0, GK_NVFP4 also  GK_E4M3; any strides */
    int64_t n;
    gk_weight_format format;
    const gk_tensor *zero;         /* GK_UINT4: uint8 like scale; NULL = 8 */
    const gk_tensor *global_scale; /* GK_NVFP4: float32 [] or [1]; NULL = 1 */
    const gk_tensor *scale_a;      /* GK_E4M3 a: float32, one number or [M, 1]; else NULL */
    const gk_tensor *bias;         /* [N], as of gk_scaled_gemm_args */
    gk_activation activation;
    /* [..., M, N] contiguous, a's dtype (of an e4m3 a bfloat16 or float16) or float32 */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
} gk_weight_gemm_args;

#define GK_WEIGHT_GEMM_ARGS_INIT {.size = sizeof(gk_weight_gemm_args)}

GK_API size_t gk_weight_gemm_workspace_bytes(const gk_context *, const gk_weight_gemm_args *);
GK_API gk_status gk_weight_gemm(const gk_context *, const gk_weight_gemm_args *);
GK_API gk_status gk_explain_weight_gemm(const gk_context *, const gk_weight_gemm_args *,
                                        gk_explanation *);

/* Products of groups, in one call. b [G, K, N]: rows [ends[g - 1], ends[g]) of a with b[g]; rows at
 * or past the last end are 0, and what a holds there has no effect. b [K, N]: columns of a and rows
 * of b likewise, out [G, M, N]. Groups may be empty. */
typedef struct gk_grouped_gemm_args {
    size_t size;
    /* [M, K] float32, bfloat16 or float16, or GK_E4M3, GK_E5M2; any strides */
    gk_tensor a;
    gk_tensor b;    /* [G, K, N] or [K, N], of a's dtype, of 8-bit floats any; any strides */
    gk_tensor offs; /* [G] int32: where groups end; 0 before the first, not decreasing */
    const gk_tensor
        *scale_a; /* 8 bits: one number or [Sm, Sk], counted over all of a; groups of k: [M, 1] */
    const gk_tensor *scale_b; /* 8 bits: one number or [G, Sk, Sn]; groups of k: [1, N] */
    const gk_tensor *bias;    /* [N] or [G, N], as of gk_scaled_gemm_args; NULL = none */
    gk_activation activation;
    gk_accumulate accumulate;
    /* [M, N] or [G, M, N] contiguous; a's dtype or float32, of 8 bits bfloat16, float16 or
     * float32 */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
} gk_grouped_gemm_args;

#define GK_GROUPED_GEMM_ARGS_INIT {.size = sizeof(gk_grouped_gemm_args)}

GK_API size_t gk_grouped_gemm_workspace_bytes(const gk_context *, const gk_grouped_gemm_args *);
GK_API gk_status gk_grouped_gemm(const gk_context *, const gk_grouped_gemm_args *);
GK_API gk_status gk_explain_grouped_gemm(const gk_context *, const gk_grouped_gemm_args *,
                                         gk_explanation *);

/* A weight of which two of every four along k are zero. values [N, K / 2]: the others in order,
 * zeros at the lowest free places where there are fewer. meta [N, ceil(K / 8)]: four bits a group,
 * low ones first: the places of its two values, the first in the low two bits. A NaN counts as a
 * value. */
typedef struct gk_sparse_pack_args {
    size_t size;
    /* [N, K], K a multiple of 4, bfloat16, float16, GK_E4M3, GK_E5M2 or GK_I8; any strides */
    gk_tensor w;
    gk_tensor values; /* contiguous, w's dtype */
    gk_tensor meta;   /* contiguous, uint8 */
} gk_sparse_pack_args;

#define GK_SPARSE_PACK_ARGS_INIT {.size = sizeof(gk_sparse_pack_args)}

GK_API gk_status gk_sparse_pack(const gk_context *, const gk_sparse_pack_args *);
GK_API gk_status gk_explain_sparse_pack(const gk_context *, const gk_sparse_pack_args *,
                                        gk_explanation *);

/* out = activation((a w^T) scale_a scale_b + bias) */
typedef struct gk_sparse_gemm_args {
    size_t size;
    gk_tensor a;              /* [M, K] of w's dtype (of 8-bit floats any); any strides */
    gk_tensor values, meta;   /* of gk_sparse_pack; last strides 1 */
    const gk_tensor *scale_a; /* 8 bits: one number or [M, 1]; NULL = 1 */
    const gk_tensor *scale_b; /* 8 bits: one number or [1, N]; NULL = 1 */
    const gk_tensor *bias;    /* [N], as of gk_scaled_gemm_args; NULL = none */
    gk_activation activation;
    /* [M, N] contiguous; a's dtype or float32, of 8 bits bfloat16, float16 or float32 */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
} gk_sparse_gemm_args;

#define GK_SPARSE_GEMM_ARGS_INIT {.size = sizeof(gk_sparse_gemm_args)}

GK_API size_t gk_sparse_gemm_workspace_bytes(const gk_context *, const gk_sparse_gemm_args *);
GK_API gk_status gk_sparse_gemm(const gk_context *, const gk_sparse_gemm_args *);
GK_API gk_status gk_explain_sparse_gemm(const gk_context *, const gk_sparse_gemm_args *,
                                        gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
