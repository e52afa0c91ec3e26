/* SPDX-License-Identifier: BSD-3-Clause */
/* weight.cuh: reads codes of a packed weight (csrc/formats/weight_tile.h) on the device and
 * computes their values. */
#ifndef GPUKERN_CUDA_QUANT_WEIGHT_CUH
#define GPUKERN_CUDA_QUANT_WEIGHT_CUH

#include "../../../formats/weight_tile.h"
#include "product.cuh"

__device__ __forceinline__ int tile_bit(bool is_4_bit, int r, int k) {
    const int w = r >> 4, g = r & 7, h = r >> 3 & 1, s = k >> 4, j = k >> 3 & 1, t = k >> 1 & 3,
              i = k & 1;
    const int thread = 32 * w + 4 * g + t;
    if (is_4_bit) return 32 * (4 * thread + s) + 4 * (h + 2 * j + 4 * i);
    return 32 * (4 * (128 * (s >> 1) + thread) + 2 * (s & 1) + j) + 8 * (2 * h + i);
}

struct Weight {
    const uint8_t *packed;
    const void *scale;
    const uint8_t *zero;        /* NULL: 8 */
    const float *global_scale;  /* NULL: 1 */
    int64_t tile_row, tile_col; /* bytes from one tile to the next, along n and along k */
    int64_t scale_k, scale_n, zero_k, zero_n;
    int group_log2;
    gk_weight_format format;
    /* round: the dtype to which a value is rounded, GK_BF16 or GK_F16. GK_F32: values are not
     * multiplied by their scale. */
    gk_dtype scale_dtype, round;
    bool is_4_bit;
};

__device__ __forceinline__ uint32_t weight_code(const Weight &w, int64_t n, int64_t k) {
    const int bit = tile_bit(w.is_4_bit, (int)(n % GK_TILE), (int)(k % GK_TILE));
    const uint32_t byte =
        __ldg(w.packed + n / GK_TILE * w.tile_row + k / GK_TILE * w.tile_col + bit / 8);
    return w.is_4_bit ? byte >> bit % 8 & 15 : byte;
}

__device__ __forceinline__ float e2m1_to_f32(uint32_t code) {
    const uint32_t size = code & 7;
    const float f = size < 2 ? 0.5f * (float)size : __uint_as_float((size << 22) + (126u << 23));
    return code & 8 ? -f : f;
}

__device__ __forceinline__ float weight_value(const Weight &w, int64_t n, int64_t k) {
    const uint32_t code = weight_code(w, n, k);
    const int64_t group = k >> w.group_log2;
    float v;
    switch (w.format) {
    case GK_INT4: v = (float)((int)(code ^ 8) - 8); break;
    case GK_UINT4:
        v = (float)code - (w.zero ? (float)w.zero[group * w.zero_k + n * w.zero_n] : 8.f);
        break;
    case GK_INT8: v = (float)(int8_t)code; break;
    case GK_W_E4M3: v = e4m3_to_f32(code); break;
    default: v = e2m1_to_f32(code);
    }
    if (w.round == GK_F32) return v;
    v *= scale_value(w.scale, w.scale_dtype, group * w.scale_k + n * w.scale_n);
    if (w.global_scale) v *= *w.global_scale;
    return w.round == GK_BF16 ? to_f32(from_f32<__nv_bfloat16>(v)) : to_f32(from_f32<__half>(v));
}

/* Rows of a over all leading dimensions. */
inline int64_t weight_rows(const gk_tensor &a) {
    int64_t m = 1;
    for (int d = 0; d < a.ndim - 1; ++d) m *= a.shape[d];
    return m;
}

inline Weight weight_of(const gk_weight_gemm_args *g) {
    Weight w = {};
    w.packed = (const uint8_t *)g->packed.data;
    w.tile_row = g->packed.stride[0];
    w.tile_col = g->packed.stride[1];
    w.scale = g->scale.data;
    w.scale_dtype = g->scale.dtype;
    w.scale_k = g->scale.stride[0];
    w.scale_n = g->scale.stride[1];
    if (g->zero) {
        w.zero = (const uint8_t *)g->zero->data;
        w.zero_k = g->zero->stride[0];
        w.zero_n = g->zero->stride[1];
    }
    w.global_scale = g->global_scale ? (const float *)g->global_scale->data : nullptr;
    w.group_log2 = gk_group_log2(g->a.shape[g->a.ndim - 1], g->scale.shape[0]);
    w.format = g->format;
    w.is_4_bit = gk_is_4_bit(g->format);
    w.round = g->a.dtype == GK_E4M3 ? GK_F32 : g->a.dtype;
    return w;
}

#endif
