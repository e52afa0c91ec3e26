/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_decoded_sm90a: weight_gemm in two steps, for many rows of a and every form of weight.
 *
 *   1. decode    w [N, K] = (code - zero) scale global_scale, in a's dtype, in the workspace
 *   2. multiply  out = activation(a w^T + bias), by gemm's kernels
 *
 * Decoding reads the packed weight and writes 2 bytes for each element, whatever M is. It takes 46
 * us for 8192 x 8192 of 4 bits, as long as a copy (H200). The product then runs at gemm's speed.
 *
 * A warp decodes 16 rows x 64 of k. It writes the fragments of a packed tile
 * (csrc/formats/weight_tile.h) to shared memory by stmatrix and stores rows of 128 bytes. Scales
 * and zero points may have any strides and dtype.
 *
 * Workspace: w, then the workspace of the product. Refuses: 8-bit a and groups of rows. */
#include "../ptx/stmatrix.cuh"
#include "quant/tiles.h"
#include "quant/weight_decode.cuh"
#include "inner_gemm.cuh"
#include "weight_price.cuh"

namespace {

constexpr int ROW_BYTES = 128;

struct DecodeParams {
    Weight w;
    void *to; /* [n][ld] */
    int64_t n, ld, groups;
    int strips, cols; /* strips of 16 rows; tiles along k */
    uint32_t whole;   /* constant for decode_nibbles */
};

/* ---- 1 decode -------------------------------------------------------------------------------- */
template <class T, Code C>
__global__ void __launch_bounds__(32 * WEIGHT_DECODE_WARPS) weight_decode_kernel(DecodeParams p) {
    __shared__ __align__(1024) unsigned char rows[WEIGHT_DECODE_WARPS][16 * ROW_BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const smem_addr rows_s = cvta_to_shared(rows[warp]);
    const float global = p.w.global_scale ? *p.w.global_scale : 1.f;
    const bool has_global = p.w.global_scale != nullptr;
    const int64_t all = (int64_t)p.strips * p.cols;
    for (int64_t i = (int64_t)blockIdx.x * WEIGHT_DECODE_WARPS + warp; i < all;
         i += (int64_t)gridDim.x * WEIGHT_DECODE_WARPS) {
        /* The four strips of a packed tile are consecutive. */
        const int strip = (int)(i / 4 / p.cols * 4 + i % 4), col = (int)(i / 4 % p.cols);
        const uint8_t *from = p.w.packed + strip / 4 * p.w.tile_row + col * p.w.tile_col +
                              (strip % 4 * 32 + lane) * 16;
        constexpr int QUADS = C == NIBBLES || C == E2M1 ? 1 : 2;
        uint32_t words[4 * QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const uint4 quad = __ldg((const uint4 *)(from + 2048 * q));
            words[4 * q] = quad.x;
            words[4 * q + 1] = quad.y;
            words[4 * q + 2] = quad.z;
            words[4 * q + 3] = quad.w;
        }
        const int64_t row0 = (int64_t)strip * 16;
        float scale[2] = {};
        uint32_t zero[2] = {Two<T>::NOTHING, Two<T>::NOTHING};
        __syncwarp();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if (s == 0 || p.w.group_log2 < 6) {
                const int64_t group = ((int64_t)col * GK_TILE + 16 * s) >> p.w.group_log2;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int64_t n = min(row0 + lane / 4 + 8 * h, p.n - 1);
                    const bool in_k = group < p.groups;
                    scale[h] = in_k ? scale_value(p.w.scale, p.w.scale_dtype,
                                                  group * p.w.scale_k + n * p.w.scale_n)
                                    : 0.f;
                    if (C == NIBBLES && p.w.zero)
                        zero[h] = zero_bits<T>(
                            in_k ? __ldg(p.w.zero + group * p.w.zero_k + n * p.w.zero_n) : 0);
                }
            }
            uint32_t a[4];
            decode_step<T, C>(a, words, s, p.whole, zero);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float2 two = unpack2<T>(a[q]);
                two.x *= scale[q % 2];
                two.y *= scale[q % 2];
                if (has_global) {
                    two.x *= global;
                    two.y *= global;
                }
                a[q] = pack2<T>(two.x, two.y);
            }
            stmatrix_x4(rows_s + lane % 16 * ROW_BYTES + ((2 * s + lane / 16) ^ lane % 8) * 16, a);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 4 * j + lane / 8, chunk = lane % 8;
            const uint4 v = ld_shared_128(rows_s + row * ROW_BYTES + (chunk ^ row % 8) * 16);
            if (row0 + row < p.n)
                *(uint4 *)((T *)p.to + (row0 + row) * p.ld + (int64_t)col * GK_TILE + 8 * chunk) =
                    v;
        }
    }
}

/* ---- 2 the product --------------------------------------------------------------------------- */
gk_gemm_args inner_of(const gk_weight_gemm_args *g, void *w) {
    const int nd = g->a.ndim;
    const int64_t k = g->a.shape[nd - 1], ld = gk_round_up(k, GK_TILE);
    gk_gemm_args x = {};
    x.size = sizeof x;
    x.a = g->a;
    x.a.ndim = 2;
    x.a.shape[0] = weight_rows(g->a);
    x.a.shape[1] = k;
    x.a.stride[0] = g->a.stride[nd - 2];
    x.a.stride[1] = g->a.stride[nd - 1];
    x.b = x.a;
    x.b.data = w;
    x.b.shape[0] = k;
    x.b.shape[1] = g->n;
    x.b.stride[0] = 1;
    x.b.stride[1] = ld;
    x.out = g->out;
    x.out.ndim = 2;
    x.out.shape[0] = x.a.shape[0];
    x.out.shape[1] = g->n;
    x.out.stride[0] = g->n;
    x.out.stride[1] = 1;
    x.bias = g->bias;
    x.alpha = 1;
    x.activation = g->activation;
    return x;
}

size_t decoded_bytes(const gk_weight_gemm_args *g) {
    return (size_t)gk_round_up(2 * g->n * gk_round_up(g->a.shape[g->a.ndim - 1], GK_TILE),
                               WORKSPACE_ALIGN);
}

enum {
    KEY_CODE /* the format of the packed weight */
};

bool plan_decoded(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                  gk_plan *to) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const int64_t m = weight_rows(g->a), n = g->n, k = g->a.shape[g->a.ndim - 1], most = 1 << 30;
    if (g->offs || code_of(g->format) != instance->key[KEY_CODE] || m == 0 || n == 0 || k == 0 ||
        m > most || n > most || k > most)
        return false;
    if ((uintptr_t)g->packed.data % 16 || g->packed.stride[0] % 16 || g->packed.stride[1] % 16)
        return false;
    const gk_gemm_args gemm = inner_of(g, unplaced_workspace());
    gk_plan inner;
    if (!plan_inner_gemm(ctx, g->a.dtype, &gemm, &inner)) return false;
    plan_around(inner, decoded_bytes(g), to);
    return true;
}

template <class T, Code C>
gk_status run_decoded(const gk_context *ctx, const void *args, const gk_plan *plan,
                      void *workspace) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const gk_gemm_args gemm = inner_of(g, workspace);
    gk_plan inner;
    if (!plan_inner_gemm(ctx, g->a.dtype, &gemm, &inner) ||
        !inner_fits(inner, decoded_bytes(g), plan))
        return gk_fail(GK_ERR_DEVICE,
                       "weight_gemm: the product of the decoded weight could not be planned");
    DecodeParams p = {};
    p.w = weight_of(g);
    p.to = workspace;
    p.n = g->n;
    p.ld = gemm.b.stride[1];
    p.groups = g->scale.shape[0];
    p.strips = (int)gk_ceil_div(g->n, GK_TILE) * 4;
    p.cols = (int)(p.ld / GK_TILE);
    p.whole = Two<T>::WHOLE ^ (g->format == GK_INT4 ? 0x00080008u : 0);
    const int64_t blocks = gk_min_i64(gk_ceil_div((int64_t)p.strips * p.cols, WEIGHT_DECODE_WARPS),
                                      6 * gk_gpu_of(ctx->index)->num_sms);
    const gk_status status = launch<weight_decode_kernel<T, C>>(
        "weight_gemm", ctx, dim3((unsigned)blocks), 32 * WEIGHT_DECODE_WARPS, 0, p);
    if (status != GK_OK) return status;
    return run_inner(ctx, &gemm, inner, workspace, decoded_bytes(g));
}

#define DECODED(name, T, C) \
    {"weight_gemm_decoded_" name, element<T>::dtype, plan_decoded, run_decoded<T, C>, {C}, NULL}
const gk_cuda_instance instances[] = {
    DECODED("bf16_int4", __nv_bfloat16, NIBBLES),
    DECODED("bf16_e2m1", __nv_bfloat16, E2M1),
    DECODED("bf16_int8", __nv_bfloat16, INT8),
    DECODED("bf16_e4m3", __nv_bfloat16, E4M3),
    DECODED("f16_int4", __half, NIBBLES),
    DECODED("f16_e2m1", __half, E2M1),
    DECODED("f16_int8", __half, INT8),
    DECODED("f16_e4m3", __half, E4M3),
};

/* Serves calls of at least WEIGHT_DECODED_ROWS rows. If weight_mma and weight_wgmma refuse the form
 * of the call, it serves the call from WEIGHT_GENERAL_ROWS rows on. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (weight_rows(g->a) < WEIGHT_GENERAL_ROWS) return false;
    for (const gk_cuda_instance &instance : instances)
        if (instance.dtype == g->a.dtype &&
            plan_decoded(&instance, ctx, args, gk_plan_begin(plan, &instance)))
            return true;
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_weight_decoded_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
