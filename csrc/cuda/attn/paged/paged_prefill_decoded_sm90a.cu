/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_prefill_decoded_sm90a: attention with many query tokens a sequence over a paged cache of
 * 8-bit codes, on Hopper. It decodes the pages to q's dtype and then calls paged_prefill_sm90a. It
 * serves calls with so many rows that decoding costs less than the products on 8-bit pages would.
 *
 *  1. decode   k' = k k_scale   v' = v v_scale    q's dtype, rounded once; exact without a scale
 *  2. attend   out, lse = paged_attn(q, k', v') with every rule of the call
 *
 * k_cache, v_cache [num_blocks, block_size, Hkv, D] e4m3, e5m2 or int8; k_scale, v_scale [], [Hkv]
 * or [num_blocks, Hkv]. In float16, finite products beyond its range become its largest number.
 *
 * Work split of step 1: grid y is the sequence, x groups of 16 keys. A thread decodes 16 codes of K
 * and 16 of V.
 *
 * The workspace holds k', v' [pages, heads, block_size, D] and table' [B, max_blocks] int32. It has
 * a page for each page of the cache, at the same index. If the block table has fewer entries than
 * the cache has pages, it has a page for each entry instead. If the pages of all heads do not fit
 * into the workspace's limit, heads are processed in rounds.
 *
 * A key of one head costs D + Dv bytes read, twice that written, and read again. */
#include "../../host/inner_call.cuh"
#include "../../layout/banks.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../../tile/convert.cuh"
#include "../kv.cuh"
#include "paged_pages.cuh"
#include "prefill_call.cuh"
#include "prefill_tiles.h"

extern "C" const gk_cuda_table gk_paged_prefill_sm90a_table;

namespace {

/* Keys of a block. With more, a short context would give too few blocks. */
constexpr int THREADS = 256, KEYS = 16;
/* decoded ranges begin and end at boundaries of the longest box */
constexpr int BOX = PREFILL_LONGEST_BOX;

/* ---- 1. codes to q's dtype ------------------------------------------------------------------- */
struct DecodeParams {
    Problem problem; /* lengths and rules */
    PrefillPages pages;
    Rows k, v; /* the caches */
    CodeScale k_scale, v_scale;
    void *to_k, *to_v; /* [pages, heads, block_size, head_dim] */
    /* [B, max_blocks]; NULL: decoded pages keep their index, and the call's own table serves */
    int32_t *to_table;
    int max_blocks, head_dim, chunks_log2; /* chunks of 16 columns */
    int head0, heads;                      /* kv heads of this round */
    Divisor by_heads;
};

/* Clamps finite values to float16's range; infinities and NaN pass. */
__device__ __forceinline__ float within_f16(float x) {
    return fabsf(x) < INFINITY ? fminf(fmaxf(x, -65504.f), 65504.f) : x;
}

template <class T, gk_dtype CODE>
__device__ __forceinline__ void decode_16(void *to, int64_t at, const Rows &from, int64_t from_at,
                                          float scale) {
    const uint4 codes = *(const uint4 *)((const uint8_t *)from.data + from_at);
    const uint32_t four[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t pair[2];
        codes_to_f16<CODE>(&pair[0], &pair[1], four[i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float2 y = unpack2<__half>(pair[e]);
            y.x *= scale;
            y.y *= scale;
            if (element<T>::dtype == GK_F16) {
                y.x = within_f16(y.x);
                y.y = within_f16(y.y);
            }
            h[2 * i + e] = pack2<T>(y.x, y.y);
        }
    }
    T *to_g = (T *)to + at;
    st_global_128(to_g, make_uint4(h[0], h[1], h[2], h[3]));
    st_global_128(to_g + 8, make_uint4(h[4], h[5], h[6], h[7]));
}

template <class T, gk_dtype CODE>
__global__ void __launch_bounds__(THREADS) decode_pages_kernel(DecodeParams x) {
    griddepcontrol_launch_dependents(); /* the attention kernel waits for the end of this grid */
    const Problem &p = x.problem;
    const PrefillPages &pages = x.pages;
    const int b = blockIdx.y, block_size = (int)pages.by_block.by;
    const Sequence s = prefill_sequence(p, pages, b);
    const int first = s.span.lo(0), end = s.seq_q > 0 ? s.span.hi(s.seq_q - 1) : 0;
    if (end <= first) return;
    const int32_t *table = pages.table + (int64_t)b * pages.table_row;
    const int past = min((end + BOX - 1) / BOX * BOX, p.seq_k);
    for (int key0 = first / BOX * BOX + (int)blockIdx.x * KEYS; key0 < past;
         key0 += (int)gridDim.x * KEYS) {
        const int keys = min(KEYS, past - key0);
        for (int i = threadIdx.x; i < keys * x.heads << x.chunks_log2; i += THREADS) {
            const int row = i >> x.chunks_log2, chunk = i - (row << x.chunks_log2);
            const int in_tile = (int)x.by_heads.into((uint32_t)row);
            const int head = row - in_tile * x.heads, key = key0 + in_tile;
            const int entry = (int)pages.by_block.into((uint32_t)key),
                      in_page = key - entry * block_size;
            const int page = table[entry * pages.table_entry];
            const bool there = (unsigned)page < (unsigned)pages.num_blocks;
            const int64_t to_page = x.to_table ? (int64_t)b * x.max_blocks + entry : page;
            /* blocks that share a page all write the same value */
            if (x.to_table && head == 0 && chunk == 0 && (in_page == 0 || in_tile == 0))
                x.to_table[(int64_t)b * x.max_blocks + entry] = there ? (int32_t)to_page : -1;
            if (!there) continue;
            const int64_t to =
                ((to_page * x.heads + head) * block_size + in_page) * x.head_dim + chunk * 16;
            const int head_kv = x.head0 + head;
            decode_16<T, CODE>(x.to_k, to, x.k, x.k.at(page, head_kv, in_page) + chunk * 16,
                               x.k_scale.at<float>(page, head_kv));
            decode_16<T, CODE>(x.to_v, to, x.v, x.v.at(page, head_kv, in_page) + chunk * 16,
                               x.v_scale.at<float>(page, head_kv));
        }
    }
}

/* ---- 2. the inner call ----------------------------------------------------------------------- */
struct Own {
    int heads; /* kv heads of a round */
    bool by_page;
};

/* Heads [head0, head0 + heads) of a tensor, which are its dimension `dim`. */
gk_tensor heads_of(const gk_tensor &t, int64_t head0, int64_t heads, int dim) {
    gk_tensor x = t;
    x.shape[dim] = heads;
    if (x.data) x.data = (char *)x.data + head0 * x.stride[dim] * (int64_t)gk_dtype_bytes(x.dtype);
    return x;
}

/* The call of one round, with its operands in the workspace. */
struct Round {
    gk_paged_attn_args args;
    gk_tensor slopes, sinks;
    InnerOperands operands;

    Round(const gk_paged_attn_args *a, const Own &own, int head0, char *workspace)
        : args(*a), operands{workspace} {
        const int64_t group = a->q.shape[1] / a->k_cache.shape[2], first = head0 * group,
                      count = own.heads * group;
        const bool all = own.heads == a->k_cache.shape[2];
        const int64_t entries = a->block_table.shape[0] * a->block_table.shape[1];
        args.k_scale = args.v_scale = NULL;
        args.q = heads_of(a->q, first, count, 1);
        args.out = heads_of(a->out, first, count, 1);
        gk_tensor *const caches[2] = {&args.k_cache, &args.v_cache};
        for (gk_tensor *t : caches) {
            const int64_t dim = t->shape[3], size = t->shape[1];
            t->dtype = a->q.dtype;
            t->shape[0] = own.by_page ? t->shape[0] : entries;
            t->shape[2] = own.heads;
            t->stride[0] = own.heads * size * dim;
            t->stride[1] = dim;
            t->stride[2] = size * dim;
            t->stride[3] = 1;
            t->data = operands.take(gk_numel(t) * 2);
        }
        if (!own.by_page) {
            args.block_table.stride[0] = a->block_table.shape[1];
            args.block_table.stride[1] = 1;
            args.block_table.data = operands.take(entries * 4);
        }
        if (!all && a->lse.data) {
            args.lse.shape[1] = args.lse.stride[0] = count;
            args.lse.data = operands.take(a->lse.shape[0] * count * 4);
        }
        if (a->rules.alibi_slopes) {
            slopes =
                heads_of(*a->rules.alibi_slopes, first, count, a->rules.alibi_slopes->ndim - 1);
            args.rules.alibi_slopes = &slopes;
        }
        if (a->rules.sinks) {
            sinks = heads_of(*a->rules.sinks, first, count, 0);
            args.rules.sinks = &sinks;
        }
    }
    Round(const Round &) = delete; /* holds pointers to its own members */
};

bool plan_round(const gk_context *ctx, const Round &round, gk_plan *to) {
    return gk_paged_prefill_sm90a_table.plan(ctx, &round.args, gk_plan_begin(to, NULL));
}

/* ---- 3. launcher and table ------------------------------------------------------------------- */
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const int64_t batch = a->seq_lens.shape[0], heads_kv = a->k_cache.shape[2],
                  pages = a->k_cache.shape[0];
    if (!gk_is_code(a->k_cache.dtype) || heads_kv == 0 || a->q.shape[1] == 0 ||
        pages >= INT32_MAX || batch > 65535 || a->v_cache.shape[3] != a->q.shape[2] ||
        !rows_aligned(a->k_cache) || !rows_aligned(a->v_cache) || !in_32_bits(a->block_table) ||
        a->q.shape[0] * (a->q.shape[1] / heads_kv) < prefill_decoded::least_rows * batch)
        return false;
    Own &own = gk_own<Own>(to) = {};
    const int64_t entries = batch * a->block_table.shape[1];
    own.by_page = pages <= entries;
    const double of_head = 4.0 * gk_min_i64(pages, entries) * a->k_cache.shape[1] * a->q.shape[2];
    if (of_head > prefill_decoded::most_bytes) return false;
    own.heads = (int)heads_kv;
    while (own.heads > 1 &&
           (heads_kv % own.heads != 0 || of_head * own.heads > prefill_decoded::round_bytes))
        --own.heads;
    const Round round(a, own, 0, unplaced_workspace());
    gk_plan inner;
    if (!plan_round(ctx, round, &inner)) return false;
    plan_around(inner, round.operands.bytes, to);
    to->tasks *= heads_kv / own.heads;
    return true;
}

template <class T>
gk_status decode(const char *op, const gk_context *ctx, gk_dtype code, const DecodeParams &x) {
    const int sms = gk_gpu_of(ctx->index)->num_sms, batch = x.problem.batch;
    const int64_t each = gk_ceil_div(prefill_decoded::blocks_per_sm * sms, gk_max_i64(batch, 1));
    const dim3 grid((unsigned)gk_clamp_i64(gk_ceil_div(x.problem.seq_k, KEYS), 0, each),
                    (unsigned)batch);
    switch (code) {
    case GK_E4M3: return launch<decode_pages_kernel<T, GK_E4M3>>(op, ctx, grid, THREADS, 0, x);
    case GK_E5M2: return launch<decode_pages_kernel<T, GK_E5M2>>(op, ctx, grid, THREADS, 0, x);
    default: return launch<decode_pages_kernel<T, GK_I8>>(op, ctx, grid, THREADS, 0, x);
    }
}

/* Copies a round's lse into its columns of the call's lse. */
gk_status place_lse(const char *op, const gk_context *ctx, const gk_tensor &to,
                    const gk_tensor &from, int64_t first) {
    const size_t width = (size_t)from.shape[1] * sizeof(float);
    const cudaError_t error = cudaMemcpy2DAsync(
        (float *)to.data + first, (size_t)to.shape[1] * sizeof(float), from.data, width, width,
        (size_t)to.shape[0], cudaMemcpyDeviceToDevice, (cudaStream_t)ctx->stream);
    if (error == cudaSuccess) return GK_OK;
    (void)cudaGetLastError();
    return gk_fail(GK_ERR_DEVICE, "lse of %s could not be copied: %s", op,
                   cudaGetErrorString(error));
}

template <class T>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const Own &own = gk_own<Own>(plan);
    if (a->q.shape[0] == 0 || a->seq_lens.shape[0] == 0) return GK_OK;
    const gk_flash_attn_args flash = as_flash(a);
    DecodeParams x = {};
    x.problem = problem_of(ctx, &flash);
    as_paged(&x.problem, a);
    x.pages = prefill_pages(a);
    x.k = pages_of(a->k_cache);
    x.v = pages_of(a->v_cache);
    x.k_scale = code_scale(a->k_scale);
    x.v_scale = code_scale(a->v_scale);
    x.max_blocks = (int)a->block_table.shape[1];
    x.head_dim = (int)a->q.shape[2];
    while (16 << x.chunks_log2 < x.head_dim) ++x.chunks_log2;
    x.heads = own.heads;
    x.by_heads = divisor_of((uint32_t)own.heads);
    for (x.head0 = 0; x.head0 < a->k_cache.shape[2]; x.head0 += own.heads) {
        const Round round(a, own, x.head0, (char *)workspace);
        gk_plan inner;
        if (!plan_round(ctx, round, &inner) || !inner_fits(inner, round.operands.bytes, plan))
            return gk_fail(GK_ERR_DEVICE, "the attention over decoded pages could not be planned");
        x.to_k = round.args.k_cache.data;
        x.to_v = round.args.v_cache.data;
        x.to_table = own.by_page ? NULL : (int32_t *)round.args.block_table.data;
        gk_status status = decode<T>(op, ctx, a->k_cache.dtype, x);
        if (status == GK_OK)
            status = run_inner(ctx, &round.args, inner, workspace, round.operands.bytes);
        if (status == GK_OK && round.args.lse.data && round.args.lse.data != a->lse.data)
            status = place_lse(op, ctx, a->lse, round.args.lse,
                               x.head0 * (a->q.shape[1] / a->k_cache.shape[2]));
        if (status != GK_OK) return status;
    }
    return GK_OK;
}

const gk_cuda_instance instances[] = {
    {"paged_prefill_decoded_sm90a_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"paged_prefill_decoded_sm90a_f16", GK_F16, plan, run<__half>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_paged_prefill_decoded_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
