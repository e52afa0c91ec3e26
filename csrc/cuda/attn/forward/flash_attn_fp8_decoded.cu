/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fp8_decoded: attention of e4m3 codes by the float16 forward kernels, for calls whose
 * products take much longer than two more passes over q, k, v and out. Sums are float32 for any
 * `accumulate`.
 *
 *  1. decode    q' = q q_scale k_largest   k' = k (k_scale / k_largest)
 *               v' = v (v_scale / v_largest)   float16, in the workspace
 *  2. attend    out', lse = flash_attn_fwd(q', k', v') with every rule of the call; WGMMA on Hopper
 *  3. finish    out = v_largest out' + v_mean (1 - e^(sink - lse)); 0 if the row saw no key
 *
 * k_largest and v_largest are the largest scales of the blocks of one sequence and head. With one
 * scale a head, k' and v' are the codes themselves, which float16 represents exactly. Elements of
 * q' beyond float16's largest number, 65504, become that number. Scores that large give all weight
 * to one key anyway. The plan cannot refuse such calls, because the scales are on the device.
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv] e4m3; out [.., Sq, Dv] bf16, f16 or f32; lse [..,
 * Sq] float32.
 *
 * Workspace: q', k', v', out' contiguous; lse, if the caller wants none; then the workspace of step
 * 2. Work split of steps 1 and 3: grid x = (block of 128 tokens, head, sequence). If no float16
 * kernel serves the inner call, the plan refuses. */
#include "../../host/inner_call.cuh"
#include "../softmax.cuh"
#include "fp8.cuh"
#include "fp8_tiles.h"

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm90a_table, gk_flash_attn_fwd_sm80_table;

namespace {

/* a block of tokens shares one scale */
constexpr int THREADS = 128, TOKENS = GK_ATTN_SCALE_TOKENS;

/* ---- 1. codes to float16 --------------------------------------------------------------------- */
enum operand {
    OPERAND_Q,
    OPERAND_K,
    OPERAND_V
};

struct DecodeParams {
    Fp8Params call;
    operand which;
    Rows to; /* contiguous */
    int blocks;
    bool aligned; /* rows of codes begin at multiples of 8 bytes */
};

__device__ __forceinline__ uint2 load_eight(const uint8_t *at, bool aligned) {
    if (aligned) return *(const uint2 *)at;
    uint2 codes = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes.x |= (uint32_t)at[i] << 8 * i;
        codes.y |= (uint32_t)at[4 + i] << 8 * i;
    }
    return codes;
}

/* Clamps x to the finite numbers of float16. NaN stays NaN. */
__device__ __forceinline__ float half_range(float x) {
    return x > 65504 ? 65504 : x < -65504 ? -65504 : x;
}

__global__ void __launch_bounds__(THREADS) fp8_decode_kernel(DecodeParams x) {
    const Fp8Params &c = x.call;
    const Problem &p = c.problem;
    const bool is_q = x.which == OPERAND_Q;
    const int heads = is_q ? p.heads_q : p.heads_kv,
              dim = x.which == OPERAND_V ? p.head_dim_v : p.head_dim;
    const int i0 = blockIdx.x % x.blocks * TOKENS, rest = blockIdx.x / x.blocks,
              head = rest % heads, b = rest / heads;
    const Sequence seq = sequence_of(p, b);
    const int rows = min(TOKENS, (is_q ? seq.seq_q : seq.seq_k) - i0),
              first = (is_q ? seq.q0 : seq.k0) + i0;
    if (rows <= 0) return;

    const gk_attn_scale &its = x.which == OPERAND_V ? c.v_scale : c.k_scale;
    const float largest = fp8_largest(its, b, is_q ? head / p.group : head, 0, seq.seq_k);
    const float factor = is_q ? fp8_saturated(largest, fp8_scale(c.q_scale, b, head, i0))
                              : fp8_share(its, largest, b, head, i0);
    const Rows &from = is_q ? p.q : x.which == OPERAND_K ? p.k : p.v;
    const uint8_t *from_g = (const uint8_t *)from.data + from.at(b, head, first);
    __half *to_g = (__half *)x.to.data + x.to.at(b, head, first);
    const int eights = dim / 8;
    for (int at = threadIdx.x; at < rows * eights; at += THREADS) {
        const int row = at / eights, col = at % eights * 8;
        const uint2 codes = load_eight(from_g + row * from.row + col, x.aligned);
        uint32_t h[4];
        e4m3x4_to_f16x4(h, codes.x);
        e4m3x4_to_f16x4(h + 2, codes.y);
        if (factor != 1) /* true for NaN, too */
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = unpack2<__half>(h[i]);
                h[i] = pack2<__half>(half_range(two.x * factor), half_range(two.y * factor));
            }
        *(uint4 *)(to_g + row * x.to.row + col) = make_uint4(h[0], h[1], h[2], h[3]);
    }
}

/* ---- 3. results ------------------------------------------------------------------------------ */
struct FinishParams {
    Fp8Params call;
    Rows from; /* float16, contiguous */
    const float *lse;
    int blocks;
    bool vectors; /* 16-bit rows of out begin at multiples of 16 bytes */
};

__global__ void __launch_bounds__(THREADS) fp8_finish_kernel(FinishParams x) {
    const Fp8Params &c = x.call;
    const Problem &p = c.problem;
    const int i0 = blockIdx.x % x.blocks * TOKENS, rest = blockIdx.x / x.blocks;
    const int head = rest % p.heads_q, b = rest / p.heads_q, head_kv = head / p.group;
    const Sequence seq = sequence_of(p, b);
    const int rows = min(TOKENS, seq.seq_q - i0), first = seq.q0 + i0;
    if (rows <= 0) return;
    const float largest = fp8_largest(c.v_scale, b, head_kv, 0, seq.seq_k), sink = sink_of(p, head);
    const float *mean = c.mean.data ? c.mean.data + b * c.mean.batch + head_kv * c.mean.head : NULL;
    const __half *from_g = (const __half *)x.from.data + x.from.at(b, head, first);
    const float *lse_g = x.lse + b * p.lse.batch + head * p.lse.head + (int64_t)first * p.lse.row;
    const int eights = p.head_dim_v / 8;
    for (int at = threadIdx.x; at < rows * eights; at += THREADS) {
        const int row = at / eights, col = at % eights * 8;
        const uint4 halves = *(const uint4 *)(from_g + row * x.from.row + col);
        const uint32_t h[4] = {halves.x, halves.y, halves.z, halves.w};
        const float lse = lse_g[row * p.lse.row];
        const float seen = lse == -INFINITY ? 0.f : 1.f - expf(sink - lse);
        const int64_t to = p.out.at(b, head, first + row) + col;
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 two = unpack2<__half>(h[i / 2]);
            y[i] = (i % 2 ? two.y : two.x) * largest;
            if (lse == -INFINITY) y[i] = 0; /* also if the scale is NaN */
            if (mean) y[i] += seen * mean[(col + i) * c.mean.column];
        }
        if (x.vectors && c.out_dtype == GK_BF16) {
            *(uint4 *)((__nv_bfloat16 *)p.out.data + to) =
                make_uint4(pack2<__nv_bfloat16>(y[0], y[1]), pack2<__nv_bfloat16>(y[2], y[3]),
                           pack2<__nv_bfloat16>(y[4], y[5]), pack2<__nv_bfloat16>(y[6], y[7]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) fp8_store((void *)p.out.data, c.out_dtype, to + i, y[i]);
        }
    }
}

/* ---- 2. the inner attention ------------------------------------------------------------------ */
/* A contiguous float16 tensor of t's shape, with `last` columns. */
gk_tensor half_like(const gk_tensor &t, int64_t last, void *data) {
    gk_tensor made = t;
    made.dtype = GK_F16;
    made.data = data;
    made.shape[t.ndim - 1] = last;
    for (int64_t d = t.ndim - 1, step = 1; d >= 0; step *= made.shape[d--]) made.stride[d] = step;
    return made;
}

struct InnerCall {
    gk_flash_attn_args args;
    InnerOperands operands;
};

/* The inner call, with its operands in the workspace. */
InnerCall inner_call(const gk_flash_attn_fp8_args *a, char *workspace) {
    const gk_flash_attn_args &f = a->fwd;
    const int last = f.q.ndim - 1;
    InnerCall x = {f, {workspace}};
    auto take = [&](gk_tensor &to, const gk_tensor &like, int64_t columns) {
        to = half_like(like, columns, NULL);
        to.data = x.operands.take(2 * gk_numel(&to));
    };
    take(x.args.q, f.q, f.q.shape[last]);
    take(x.args.k, f.k, f.k.shape[last]);
    take(x.args.v, f.v, f.v.shape[last]);
    take(x.args.out, f.q, f.v.shape[last]);
    if (!f.lse.data) {
        int64_t rows = 1;
        for (int d = 0; d < last; ++d) rows *= f.q.shape[d];
        x.args.lse.data = x.operands.take(4 * rows);
        x.args.lse.dtype = GK_F32;
    }
    return x;
}

bool plan_inner(const gk_context *ctx, const gk_flash_attn_args *f, gk_plan *to) {
    const gk_cuda_table *hopper = &gk_flash_attn_fwd_sm90a_table,
                        *any = &gk_flash_attn_fwd_sm80_table;
    /* the Hopper kernels have no plan in a build for compute capability 8.0 alone */
    if (gk_gpu_of(ctx->index)->arch == hopper->arch && hopper->plan &&
        hopper->plan(ctx, f, gk_plan_begin(to, NULL)))
        return true;
    for (int i = 0; i < any->num_instances; ++i) {
        const gk_cuda_instance *instance = &any->instances[i];
        if (instance->dtype == GK_F16 &&
            instance->plan(instance, ctx, f, gk_plan_begin(to, instance)))
            return true;
    }
    return false;
}

/* ---- 4. launcher and table ------------------------------------------------------------------- */
struct Own {
    Fp8Params call;
};

bool in_eights(const gk_tensor &t) {
    bool all = (uintptr_t)t.data % 8 == 0;
    for (int d = 0; d < t.ndim - 1; ++d) all = all && (t.shape[d] <= 1 || t.stride[d] % 8 == 0);
    return all;
}

bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_fp8_args *a = (const gk_flash_attn_fp8_args *)args;
    Own &own = gk_own<Own>(to) = {fp8_params(ctx, a, TOKENS)};
    const Problem &p = own.call.problem;
    if (p.seq_k < fp8_decoded::least_keys || (int64_t)p.seq_q * p.group < fp8_decoded::least_rows)
        return false;
    /* all blocks of a grid must fit in its x */
    const int64_t tiles_k = gk_ceil_div(p.seq_k, TOKENS);
    if (!gk_grid_fits(gk_max_i64(own.call.tiles_q * (int64_t)p.heads_q, tiles_k * p.heads_kv) *
                      p.batch))
        return false;
    const InnerCall x = inner_call(a, unplaced_workspace());
    gk_plan inner;
    if (!plan_inner(ctx, &x.args, &inner)) return false;
    plan_around(inner, x.operands.bytes, to);
    return true;
}

gk_status decode(const gk_context *ctx, const Fp8Params &call, operand which, const gk_tensor &from,
                 const gk_tensor &to) {
    const Problem &p = call.problem;
    const int64_t tokens = which == OPERAND_Q ? p.seq_q : p.seq_k,
                  heads = which == OPERAND_Q ? p.heads_q : p.heads_kv;
    const DecodeParams x = {call, which, rows_of(to), (int)gk_ceil_div(tokens, TOKENS),
                            in_eights(from)};
    return launch<fp8_decode_kernel>("gk_flash_attn_fp8", ctx,
                                     dim3((unsigned)(x.blocks * heads * p.batch)), THREADS, 0, x);
}

gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_flash_attn_fp8";
    const gk_flash_attn_fp8_args *a = (const gk_flash_attn_fp8_args *)args;
    const Own &own = gk_own<Own>(plan);
    Fp8Params call = own.call;
    const InnerCall x = inner_call(a, (char *)workspace);
    gk_plan inner;
    if (!plan_inner(ctx, &x.args, &inner) || !inner_fits(inner, x.operands.bytes, plan))
        return gk_fail(GK_ERR_DEVICE, "the attention between the passes could not be planned");
    gk_status status = decode(ctx, call, OPERAND_Q, a->fwd.q, x.args.q);
    if (status == GK_OK) status = decode(ctx, call, OPERAND_K, a->fwd.k, x.args.k);
    if (status == GK_OK) status = decode(ctx, call, OPERAND_V, a->fwd.v, x.args.v);
    if (status == GK_OK) status = run_inner(ctx, &x.args, inner, workspace, x.operands.bytes);
    if (status != GK_OK) return status;
    const Problem &p = call.problem;
    const FinishParams finish = {call, rows_of(x.args.out), (const float *)x.args.lse.data,
                                 call.tiles_q, rows_aligned(a->fwd.out)};
    status = launch<fp8_finish_kernel>(
        op, ctx, dim3((unsigned)((int64_t)call.tiles_q * p.heads_q * p.batch)), THREADS, 0, finish);
    return status == GK_OK ? fp8_finish(op, ctx, call) : status;
}

const gk_cuda_instance instances[] = {{"flash_attn_fp8_decoded", GK_E4M3, plan, run, {}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fp8_decoded_table = {instances, 1, 80, NULL};
