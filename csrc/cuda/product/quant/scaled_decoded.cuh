/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_decoded.cuh: scaled_gemm as a bfloat16 product, for operands whose scales are powers of
 * two in a byte, mostly MXFP8. scaled_gemm_decoded.cu has the instances for every GPU.
 * scaled_gemm_decoded_sm90a.cu has those for Hopper. There, step 1 overlaps the end of the previous
 * kernel and the launch of step 2 (Begins, tile/begins.cuh).
 *
 *   1. decode   a' = a scale_a   b' = b scale_b   bfloat16, in the workspace
 *   2. multiply out = activation(a' b' + beta c + bias), by gemm's kernels
 *
 * a [M, K], b [K, N]: e4m3 and e5m2 in any mix, or int8. out [M, N]: bfloat16 or float32.
 *
 * Decoding is exact except for tiny values. A code has up to 4 significant bits (int8: 8). bfloat16
 * has 8, and the exponents of float32. Below 2^-126 the last bit of bfloat16 is 2^-133. So e4m3 is
 * exact with scales from 2^-124 on, and e5m2 from 2^-117 on. Smaller values round to nearest even.
 * Values beyond float32 become infinities. NaN codes and NaN scales stay NaN.
 *
 * Decoding moves 3 bytes for each element. The alternative is 8-bit WGMMA with a scale for each 32
 * of k. It needs a multiplication and a multiply-add for every 32 products, which costs more than
 * the tensor cores gain. So with many rows, bfloat16 is faster.
 *
 * In step 1 a thread decodes 16 neighbouring codes. The blocks of b follow those of a. Workspace:
 * a', b', then the workspace of the product. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_DECODED_CUH
#define GPUKERN_CUDA_QUANT_SCALED_DECODED_CUH

#include "../inner_gemm.cuh"
#include "product.cuh"
#include "scaled_kinds.cuh"

namespace {

constexpr int THREADS = 256, EACH = 16;

/* ---- 1. decode ------------------------------------------------------------------------------- */
/* An operand as [high][wide]. If one of its dimensions has stride 1, it is the second. */
struct Codes {
    const uint8_t *from;
    __nv_bfloat16 *to; /* rows of ld, a multiple of EACH */
    gk_dtype dtype;
    int64_t high, wide, row, col, ld;
    gk_scales scale; /* the scales of [high][wide] */
    bool vectors;    /* rows of `from` begin at multiples of 16 bytes */
};

struct DecodeParams {
    Codes of[2];
    unsigned first_of_b; /* index of the first block that decodes b */
};

template <class Value>
__device__ __forceinline__ void decode_each(float (&v)[EACH], const uint32_t (&codes)[4],
                                            const Value &value) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] *= value(codes[i / 4] >> 8 * (i % 4) & 0xff);
}

template <class Begins>
__global__ void __launch_bounds__(THREADS)
    scaled_decode_kernel(const __grid_constant__ DecodeParams p) {
    Begins::begin();
    const bool is_b = blockIdx.x >= p.first_of_b;
    const Codes &x = p.of[is_b];
    const int64_t each = (int64_t)(blockIdx.x - (is_b ? p.first_of_b : 0)) * THREADS + threadIdx.x;
    const int64_t in_row = x.ld / EACH, row = each / in_row, col = each % in_row * EACH;
    if (row >= x.high) return;

    const uint8_t *const from = x.from + row * x.row + col * x.col;
    uint32_t codes[4] = {};
    if (x.vectors && col + EACH <= x.wide) {
        const uint4 all = __ldg((const uint4 *)from);
        codes[0] = all.x;
        codes[1] = all.y;
        codes[2] = all.z;
        codes[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (col + i < x.wide) codes[i / 4] |= (uint32_t)__ldg(from + i * x.col) << 8 * (i % 4);
    }
    float v[EACH];
    if (x.scale.col_log2 >= 5) { /* the 16 neighbours share a scale */
        const float by = scale_of(x.scale, row, col);
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = by;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = scale_of(x.scale, row, min(col + i, x.wide - 1));
    }
    if (x.dtype == GK_E4M3)
        decode_each(v, codes, [](uint32_t c) { return e4m3_to_f32(c); });
    else if (x.dtype == GK_E5M2)
        decode_each(v, codes, [](uint32_t c) { return e5m2_to_f32(c); });
    else
        decode_each(v, codes, [](uint32_t c) { return (float)(int8_t)c; });
    uint4 *const to = (uint4 *)(x.to + row * x.ld + col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float *w = v + 8 * i;
        to[i] = make_uint4(pack2<__nv_bfloat16>(w[0], w[1]), pack2<__nv_bfloat16>(w[2], w[3]),
                           pack2<__nv_bfloat16>(w[4], w[5]), pack2<__nv_bfloat16>(w[6], w[7]));
    }
}

/* An operand t [rows, cols] with its scales, transposed if its rows are the contiguous
 * dimension. */
Codes codes_of(const gk_tensor &t, const gk_scales &scale) {
    const bool across = t.stride[0] == 1 && t.stride[1] != 1;
    const int row = across, col = !across;
    Codes x = {(const uint8_t *)t.data, nullptr,       t.dtype, t.shape[row], t.shape[col],
               t.stride[row],           t.stride[col], 0,       scale,        false};
    if (across) {
        x.scale.row_log2 = scale.col_log2;
        x.scale.col_log2 = scale.row_log2;
        x.scale.row = scale.col;
        x.scale.col = scale.row;
    }
    x.ld = gk_round_up(x.wide, EACH);
    x.vectors = (x.col == 1 || x.wide == 1) && x.row % 16 == 0 && (uintptr_t)x.from % 16 == 0;
    return x;
}

int64_t blocks_of(const Codes &x) { return gk_ceil_div(x.high * (x.ld / EACH), THREADS); }

/* ---- 2. the product -------------------------------------------------------------------------- */
struct Inner {
    DecodeParams decode;
    gk_gemm_args gemm;
    InnerOperands operands;
};

gk_tensor decoded(const gk_tensor &t, const Codes &x) {
    gk_tensor made = t;
    const bool across = t.stride[0] == 1 && t.stride[1] != 1;
    made.data = x.to;
    made.dtype = GK_BF16;
    made.stride[across] = x.ld;
    made.stride[!across] = 1;
    return made;
}

Inner inner_of(const gk_scaled_gemm_args *g, char *workspace) {
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->b.shape[1];
    Inner x = {};
    Codes &a = x.decode.of[0] = codes_of(g->a, gk_scales_of(&g->scale_a, m, k, false));
    Codes &b = x.decode.of[1] = codes_of(g->b, gk_scales_of(&g->scale_b, k, n, true));
    x.decode.first_of_b = (unsigned)blocks_of(a);
    x.operands.base = workspace;
    for (Codes &of : x.decode.of) of.to = (__nv_bfloat16 *)x.operands.take(2 * of.high * of.ld);
    x.gemm.size = sizeof x.gemm;
    x.gemm.a = decoded(g->a, a);
    x.gemm.b = decoded(g->b, b);
    x.gemm.out = g->out;
    x.gemm.bias = g->bias;
    x.gemm.c = g->c;
    x.gemm.alpha = 1;
    x.gemm.beta = g->beta;
    x.gemm.activation = g->activation;
    return x;
}

/* ---- 3. launcher and table ------------------------------------------------------------------- */
bool plan_instance(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (g->scale_a.dtype != GK_E8M0 || g->scale_b.dtype != GK_E8M0 || scales_along_k(g) == 0)
        return false;
    const Inner x = inner_of(g, unplaced_workspace());
    if (!gk_grid_fits(blocks_of(x.decode.of[0]) + blocks_of(x.decode.of[1]))) return false;
    gk_plan inner;
    if (!plan_inner_gemm(ctx, GK_BF16, &x.gemm, &inner)) return false;
    plan_around(inner, x.operands.bytes, to);
    return true;
}

template <class Begins>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const Inner x = inner_of((const gk_scaled_gemm_args *)args, (char *)workspace);
    gk_plan inner;
    if (!plan_inner_gemm(ctx, GK_BF16, &x.gemm, &inner) ||
        !inner_fits(inner, x.operands.bytes, plan))
        return gk_fail(GK_ERR_DEVICE, "the product of the decoded operands could not be planned");
    const unsigned blocks = x.decode.first_of_b + (unsigned)blocks_of(x.decode.of[1]);
    const gk_status status = launch<scaled_decode_kernel<Begins>>(
        "scaled_gemm", ctx, dim3(blocks), THREADS, 0, x.decode, Begins::overlaps);
    if (status != GK_OK) return status;
    return run_inner(ctx, &x.gemm, inner, workspace, x.operands.bytes);
}

/* With fewer rows, kernels that read codes are faster. */
template <const gk_cuda_instance (&INSTANCES)[3]>
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    if (g->a.shape[0] < SCALED_DECODED_ROWS) return false;
    for (const gk_cuda_instance &instance : INSTANCES)
        if (instance.dtype == g->a.dtype &&
            plan_instance(&instance, ctx, args, gk_plan_begin(plan, &instance)))
            return true;
    return false;
}

#define DECODED(name, Begins)                                            \
    {name "_e4m3", GK_E4M3, plan_instance, run<Begins>, {}, NULL},       \
        {name "_e5m2", GK_E5M2, plan_instance, run<Begins>, {}, NULL}, { \
        name "_i8", GK_I8, plan_instance, run<Begins>, {}, NULL          \
    }

} // namespace

#endif
