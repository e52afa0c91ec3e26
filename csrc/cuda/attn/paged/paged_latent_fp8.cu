/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_latent_fp8: latent attention over a paged cache with 8-bit rows (656 bytes,
 * formats/latent_row.h). It decodes the rows that the call reads. Then it calls a kernel for rows
 * of q's dtype: paged_latent_sm90a, or paged_attn_plain for calls that paged_latent_sm90a refuses.
 *
 *  1. decode   k'[:512] = codes x scales, k'[512:] = rotary     q's dtype, rounded once
 *  2. attend   out, lse = paged_attn(q, k', k'[:512]) with every rule of the call
 *
 * k_cache uint8 [num_blocks, block_size, 1, 656], rows aligned to 16 bytes.
 *
 * Work split of step 1: a warp decodes a row, and each lane 16 codes and 2 rotary columns. Step 2
 * is planned again at run time. Its operands are in the workspace, whose address the plan does not
 * know.
 *
 * The workspace holds k' [pages, block_size, 1, 576] and table' [B, max_blocks] int32. It has a
 * page for each page of the cache, at the same index. If the block table has fewer entries than the
 * cache has pages, it has a page for each entry instead. Rows that no query sees are not decoded,
 * and their values are undefined.
 *
 * In 16 bits a key costs 656 bytes read, 1152 written, and 1152 read again. A kernel that decodes
 * in shared memory would only read 656. */
#include "../../../core/paged.h"
#include "../../../formats/latent_row.h"
#include "../../host/inner_call.cuh"
#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"
#include "../kv.cuh"

extern "C" const gk_cuda_table gk_paged_latent_sm90a_table, gk_paged_attn_plain_table;

namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int BLOCKS_PER_SM = 8;
static_assert(GK_LATENT_DIM == 32 * 16 && GK_LATENT_ROPE == 32 * 2, "columns of a lane");

/* ---- 1. rows of 8 bits to q's dtype ---------------------------------------------------------- */
struct DecodeParams {
    Paged p;
    const uint8_t *rows;
    int64_t page, row; /* strides in bytes */
    void *to;          /* [pages, block_size, 576] */
    /* [B, max_blocks]; NULL: decoded pages keep their index, and the call's own table serves */
    int32_t *to_table;
    int max_blocks, blocks; /* entries of a row of the table; thread blocks of a sequence */
};

template <class T> __global__ void __launch_bounds__(THREADS) latent_decode_kernel(DecodeParams x) {
    typedef typename element<T>::acc W;
    const Paged &p = x.p;
    const int b = blockIdx.x / x.blocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PagedSequence s = paged_sequence(p, b);
    if (s.rows <= 0) return;
    const int first = s.lo(0), end = s.hi(s.rows - 1);
    for (int key = first + (int)(blockIdx.x % x.blocks) * WARPS + warp; key < end;
         key += x.blocks * WARPS) {
        const int entry = key / p.block_size, in_page = key - entry * p.block_size;
        const int page = page_of_key(p, b, key);
        const int64_t of_entry = (int64_t)b * x.max_blocks + entry;
        if (x.to_table && lane == 0 && (in_page == 0 || key == first))
            x.to_table[of_entry] = page < 0 ? -1 : (int32_t)of_entry;
        if (page < 0) continue;
        const uint8_t *from = x.rows + page * x.page + in_page * x.row;
        /* sequences that share a page all write the same values */
        T *to = (T *)x.to +
                ((x.to_table ? of_entry : page) * p.block_size + in_page) * GK_CACHE_HEAD_DIM;
        const uint4 codes = *(const uint4 *)(from + lane * 16);
        const uint32_t four[4] = {codes.x, codes.y, codes.z, codes.w};
        const W scale =
            *(const float *)(from + GK_LATENT_SCALES_AT + lane * 16 / GK_LATENT_BLOCK * 4);
        T values[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            values[i] = from_acc<T>((W)e4m3_to_f32(four[i / 4] >> i % 4 * 8 & 0xff) * scale);
#pragma unroll
        for (int i = 0; i < (int)sizeof values; i += 16) {
            uint4 part;
            memcpy(&part, (const char *)values + i, 16);
            *(uint4 *)((char *)(to + lane * 16) + i) = part;
        }
        const uint32_t two = *(const uint32_t *)(from + GK_LATENT_ROPE_AT + lane * 4);
        to[GK_LATENT_DIM + lane * 2] = from_acc<T>((W)__uint_as_float(two << 16));
        to[GK_LATENT_DIM + lane * 2 + 1] = from_acc<T>((W)__uint_as_float(two & 0xffff0000u));
    }
}

/* ---- 2. the inner call ----------------------------------------------------------------------- */
struct Own {
    bool by_page;
};

/* The call over decoded rows, with its operands in the workspace. */
struct Inner {
    gk_paged_attn_args args;
    InnerOperands operands;

    Inner(const gk_paged_attn_args *a, bool by_page, char *workspace)
        : args(*a), operands{workspace} {
        const int64_t entries = a->block_table.shape[0] * a->block_table.shape[1];
        gk_tensor &k = args.k_cache;
        k.dtype = a->q.dtype;
        k.shape[0] = by_page ? k.shape[0] : entries;
        k.shape[3] = GK_CACHE_HEAD_DIM;
        k.stride[3] = 1;
        k.stride[1] = k.stride[2] = GK_CACHE_HEAD_DIM;
        k.stride[0] = k.shape[1] * GK_CACHE_HEAD_DIM;
        k.data = operands.take(gk_numel(&k) * (int64_t)gk_dtype_bytes(k.dtype));
        args.v_cache = k;
        args.v_cache.shape[3] = GK_LATENT_DIM;
        if (by_page) return;
        args.block_table.stride[0] = a->block_table.shape[1];
        args.block_table.stride[1] = 1;
        args.block_table.data = operands.take(entries * 4);
    }
};

bool plan_inner(const gk_context *ctx, const gk_paged_attn_args *a, gk_plan *to) {
    const gk_cuda_table *const tables[] = {&gk_paged_latent_sm90a_table,
                                           &gk_paged_attn_plain_table};
    for (const gk_cuda_table *table : tables) {
        /* paged_latent_sm90a divides the keys by the lengths of all sequences, so it is not
         * batch-invariant */
        if (table->arch == 90 &&
            (gk_gpu_of(ctx->index)->arch != 90 || (a->flags & GK_PAGED_BATCH_INVARIANT)))
            continue;
        for (int i = 0; i < table->num_instances; ++i) {
            const gk_cuda_instance *instance = table->instances + i;
            if (instance->dtype == a->q.dtype &&
                instance->plan(instance, ctx, a, gk_plan_begin(to, instance)))
                return true;
        }
    }
    return false;
}

/* ---- 3. launcher and table ------------------------------------------------------------------- */
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const int64_t pages = a->k_cache.shape[0],
                  entries = a->block_table.shape[0] * a->block_table.shape[1];
    if (pages >= INT32_MAX || entries >= INT32_MAX) return false;
    Own &own = gk_own<Own>(to) = {};
    own.by_page = pages <= entries;
    const Inner call(a, own.by_page, unplaced_workspace());
    gk_plan inner;
    if (!plan_inner(ctx, &call.args, &inner)) return false;
    plan_around(inner, call.operands.bytes, to);
    return true;
}

template <class T>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const Own &own = gk_own<Own>(plan);
    const Inner call(a, own.by_page, (char *)workspace);
    gk_plan inner;
    if (!plan_inner(ctx, &call.args, &inner) || !inner_fits(inner, call.operands.bytes, plan))
        return gk_fail(GK_ERR_DEVICE, "the attention over decoded rows could not be planned");
    DecodeParams x = {};
    x.p = paged_of(ctx, a);
    x.rows = (const uint8_t *)a->k_cache.data;
    x.page = a->k_cache.stride[0];
    x.row = a->k_cache.stride[1];
    x.to = call.args.k_cache.data;
    x.to_table = own.by_page ? NULL : (int32_t *)call.args.block_table.data;
    x.max_blocks = (int)a->block_table.shape[1];
    const int64_t batch = a->seq_lens.shape[0];
    const int64_t most = gk_gpu_of(ctx->index)->num_sms * BLOCKS_PER_SM;
    x.blocks = (int)gk_clamp_i64(gk_ceil_div(x.p.capacity, WARPS), 1,
                                 gk_max_i64(1, most / gk_max_i64(1, batch)));
    if (a->q.shape[0] > 0 && x.p.capacity > 0) {
        const dim3 grid((unsigned)(batch * x.blocks));
        const gk_status status = launch<latent_decode_kernel<T>>(op, ctx, grid, THREADS, 0, x);
        if (status != GK_OK) return status;
    }
    return run_inner(ctx, &call.args, inner, workspace, call.operands.bytes);
}

const gk_cuda_instance instances[] = {
    {"paged_latent_fp8_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"paged_latent_fp8_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"paged_latent_fp8_f32", GK_F32, plan, run<float>, {}, NULL},
    {"paged_latent_fp8_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_paged_latent_fp8_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
