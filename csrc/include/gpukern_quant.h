/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_quant.h: quantised and sparse products. gpukern.h has the conventions. */
#ifndef GPUKERN_QUANT_H
#define GPUKERN_QUANT_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- quantised products ---------------------------------------------------------------------- */
/* A quantised matrix consists of codes and scales; an element is code * scale. The scales are one
 * number, [] or [1], or a matrix [Sm, Sk]. Along each dimension there is one scale for each
 * element, one for each block of 128, or one for all. Along K, the dimension of the sum, a block
 * may also be 32. Scales are float32 or GK_E8M0. */
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
    /* h / sqrt(mean(h^2) + eps) * weight, with h = x + residual rounded to x's dtype */
    GK_QUANTIZE_RMS_NORM = 2
} gk_quantized;

/* Quantises x, silu(x) * up or an RMSNorm of x. For each block of values with largest magnitude
 * amax:
 *   scale = max(amax / q, 2^-126),  q = 448 (e4m3), 57344 (e5m2) or 127 (int8)
 *   codes = value / scale, rounded to nearest even, saturated
 * The division is in float32, or float64 for a float64 x. The scale of a block of zeros is 2^-126.
 * A block that holds an infinity or NaN has scale NaN. */
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
    /* the scales to use, with the shape and dtype of `scale`; NULL = compute them from amax */
    const gk_tensor *given;
    gk_tensor codes; /* x's shape, contiguous, GK_E4M3, GK_E5M2 or GK_I8 */
    /* contiguous, float32; GK_PER_1X32: GK_E8M0 or float32; not written if scales are given */
    gk_tensor scale;
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
    /* sums with fewer bits than float32 span at most 128 elements of k */
    GK_PRECISE = 0,
    /* such sums may span all of k; has an effect on 8-bit floats with one scale along k */
    GK_FAST = 1
} gk_accumulate;

/* out = activation(sum_k a scale_a b scale_b + beta c + bias), computed in float32. Products of
 * int8 are summed exactly, in int32, within the block of one scale. */
typedef struct gk_scaled_gemm_args {
    size_t size;
    gk_tensor a;                /* [M, K] GK_E4M3 or GK_E5M2, or GK_I8; any strides */
    gk_tensor b;                /* [K, N] GK_E4M3 or GK_E5M2, or GK_I8 if a is; any strides */
    gk_tensor scale_a, scale_b; /* one number, or [Sm, Sk] and [Sk, Sn]; any strides */
    /* [N] float32 or 16-bit: the dtype of a 16-bit out, either 16-bit dtype with any other out;
     * NULL = none */
    const gk_tensor *bias;
    const gk_tensor *c; /* broadcasts to out, dtypes as bias; not read if beta == 0; NULL = none */
    double beta;
    /* [] or [1] float32: divides an 8-bit result; NULL if out has 16 or 32 bits */
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

/* 4-bit and 8-bit weights, packed once into tiles. q [N, K] holds one code for each element. packed
 * is [ceil(N / 64), ceil(K / 64), bytes of a tile] uint8. A slice of its first two dimensions is a
 * shard of the weight. A tile holds 64 x 64 codes, in the order of the fragments of a 16 x 16
 * operand of mma (docs/kernels/gemm_quantised.md). Codes past N and K are 0. */
typedef enum gk_weight_format {
    GK_INT4 = 0,   /* q int8, -8 .. 7 */
    GK_UINT4 = 1,  /* q uint8, 0 .. 15; a zero point is subtracted */
    GK_INT8 = 2,   /* q int8 */
    GK_W_E4M3 = 3, /* q GK_E4M3 */
    /* q uint8: a sign and e2m1 (0 .5 1 1.5 2 3 4 6); groups of 32 share a power of two */
    GK_MXFP4 = 4,
    GK_NVFP4 = 5 /* the same codes; groups of 16 share an e4m3 scale; one global scale */
} gk_weight_format;

enum {
    GK_TILE = 64,
    GK_TILE_BYTES_4 = 2048, /* a tile of 4-bit codes */
    GK_TILE_BYTES_8 = 4096  /* a tile of 8-bit codes */
};

typedef struct gk_pack_weight_args {
    size_t size;
    gk_tensor q; /* [N, K], any strides; 4-bit formats read the low four bits */
    gk_weight_format format;
    gk_tensor packed; /* contiguous */
} gk_pack_weight_args;

#define GK_PACK_WEIGHT_ARGS_INIT {.size = sizeof(gk_pack_weight_args)}

GK_API gk_status gk_pack_weight(const gk_context *, const gk_pack_weight_args *);
GK_API gk_status gk_explain_pack_weight(const gk_context *, const gk_pack_weight_args *,
                                        gk_explanation *);

/* Unpacks a weight to the codes that it was packed from. */
typedef struct gk_unpack_weight_args {
    size_t size;
    gk_tensor packed; /* tiles are contiguous; the first two dimensions have any strides */
    int64_t n, k;
    gk_weight_format format;
    gk_tensor q; /* [N, K] contiguous, int8, uint8 or GK_E4M3 according to the format */
} gk_unpack_weight_args;

#define GK_UNPACK_WEIGHT_ARGS_INIT {.size = sizeof(gk_unpack_weight_args)}

GK_API gk_status gk_unpack_weight(const gk_context *, const gk_unpack_weight_args *);
GK_API gk_status gk_explain_unpack_weight(const gk_context *, const gk_unpack_weight_args *,
                                          gk_explanation *);

/* out = activation(a w^T + bias) with w [N, K] = (code - zero) * scale * global_scale, summed in
 * float32. A kernel either rounds each weight to a's dtype once, or applies the scales to the
 * float32 sum of each group. Kernels do the latter for an e4m3 a, and where it is faster. */
typedef struct gk_weight_gemm_args {
    size_t size;
    /* [..., M, K] bfloat16, float16 or GK_E4M3; any strides if 2-dimensional, else contiguous */
    gk_tensor a;
    gk_tensor packed; /* [ceil(N / 64), ceil(K / 64), bytes] */
    /* [ceil(K / g), N], any strides. Groups of g = 16, 32, 64, 128, 256 or K elements; GK_MXFP4 has
     * g = 32 and GK_NVFP4 has g = 16. float32, or: GK_E8M0 with GK_MXFP4, GK_E4M3 with GK_NVFP4,
     * with other formats a's dtype (bfloat16 if a is GK_E4M3). */
    gk_tensor scale;
    int64_t n;
    gk_weight_format format;
    const gk_tensor *zero;         /* GK_UINT4: uint8, scale's shape; NULL = 8 */
    const gk_tensor *global_scale; /* GK_NVFP4: float32 [] or [1]; NULL = 1 */
    const gk_tensor *scale_a;      /* required if a is GK_E4M3: float32, one number or [M, 1] */
    const gk_tensor *bias;         /* [N], as in gk_scaled_gemm_args */
    gk_activation activation;
    /* [..., M, N] contiguous; float32, or a's dtype (bfloat16 or float16 if a is GK_E4M3) */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
    /* [G] int32: the ends of groups of rows of a, as in gk_grouped_gemm_args; NULL = one group.
     * a is then 2-dimensional. Group g multiplies by n rows of the weight from row g n' on, where
     * n' is n rounded up to 64: packed is [G n' / 64, ceil(K / 64), bytes], scale and zero are
     * [ceil(K / g), G n'], bias is [N] or [G, N]. Rows at or past the last end are 0 in out. */
    const gk_tensor *offs;
} gk_weight_gemm_args;

#define GK_WEIGHT_GEMM_ARGS_INIT {.size = sizeof(gk_weight_gemm_args)}

GK_API size_t gk_weight_gemm_workspace_bytes(const gk_context *, const gk_weight_gemm_args *);
GK_API gk_status gk_weight_gemm(const gk_context *, const gk_weight_gemm_args *);
GK_API gk_status gk_explain_weight_gemm(const gk_context *, const gk_weight_gemm_args *,
                                        gk_explanation *);

/* One product for each of G groups. offs holds the end of each group; groups may be empty.
 *
 * b [G, K, N]: the groups are ranges of rows. out[i] = a[i] b[g] for rows i of group g. Rows at or
 * past the last end are 0 in out, and their contents in a have no effect.
 * b [K, N]: the groups are ranges of k. out[g] = a[:, range] b[range], and out is [G, M, N]. */
typedef struct gk_grouped_gemm_args {
    size_t size;
    /* [M, K] float32, bfloat16 or float16, or GK_E4M3, GK_E5M2, GK_I8; any strides */
    gk_tensor a;
    /* [G, K, N] or [K, N], any strides; of a's dtype, but one 8-bit float may meet another */
    gk_tensor b;
    gk_tensor offs; /* [G] int32: the ends of groups, not decreasing; the first begins at 0 */
    /* 8-bit a: one number or [Sm, Sk] for all of a; with groups of k one number or [M, 1] */
    const gk_tensor *scale_a;
    /* 8-bit b: one number or [G, Sk, Sn]; with groups of k one number or [1, N] */
    const gk_tensor *scale_b;
    const gk_tensor *bias; /* [N] or [G, N], as in gk_scaled_gemm_args; NULL = none */
    gk_activation activation;
    gk_accumulate accumulate;
    /* [M, N] or [G, M, N] contiguous; float32, or a's dtype (bfloat16 or float16 if a is 8-bit) */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
} gk_grouped_gemm_args;

#define GK_GROUPED_GEMM_ARGS_INIT {.size = sizeof(gk_grouped_gemm_args)}

GK_API size_t gk_grouped_gemm_workspace_bytes(const gk_context *, const gk_grouped_gemm_args *);
GK_API gk_status gk_grouped_gemm(const gk_context *, const gk_grouped_gemm_args *);
GK_API gk_status gk_explain_grouped_gemm(const gk_context *, const gk_grouped_gemm_args *,
                                         gk_explanation *);

/* Packs a weight with 2:4 sparsity: at most two of every four elements along k are not zero.
 *
 * values [N, K / 2] holds the two values of each group of four, in order. If a group has fewer than
 * two, zeros from its lowest free positions fill up. meta [N, ceil(K / 8)] holds four bits for each
 * group, low bits first: the positions of its two values, the first in the low two bits. A NaN
 * counts as a value. */
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
    gk_tensor a;              /* [M, K], w's dtype, or any 8-bit float if w is one; any strides */
    gk_tensor values, meta;   /* from gk_sparse_pack; last strides 1 */
    const gk_tensor *scale_a; /* 8-bit a: one number or [M, 1]; NULL = 1 */
    const gk_tensor *scale_b; /* 8-bit w: one number or [1, N]; NULL = 1 */
    const gk_tensor *bias;    /* [N], as in gk_scaled_gemm_args; NULL = none */
    gk_activation activation;
    /* [M, N] contiguous; float32, or a's dtype (bfloat16 or float16 if a is 8-bit) */
    gk_tensor out;
    void *workspace;
    size_t workspace_bytes;
    gk_accumulate accumulate;
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
