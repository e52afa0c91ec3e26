/* SPDX-License-Identifier: BSD-3-Clause */
/* kv_cache_write_latent: writes new rows of latent attention in 8 bits (formats/latent_row.h) into
 * a paged cache.
 *
 *  codes, scales = quantize(c[t], e4m3, 1x128)    rotary = bfloat16(k_pe[t])
 *
 * c [T, 1, 512], k_pe [T, 1, 64], any strides; slots [T] int64 or int32. The cache has rows of 656
 * bytes, aligned to 16. k_cache is the part with codes and scales, v_cache the rotary part. A
 * negative slot is skipped; a slot past the cache is skipped and reported. If several tokens have
 * the same slot, its row is undefined: it may mix them.
 *
 * Work split: a block owns a token. Each of four warps owns 128 latent columns, four a lane, and
 * the fifth warp the rotary columns, two a lane. */
#include "../../../formats/latent_row.h"
#include "../../host/launch.cuh"
#include "../../tile/reduce.cuh"
#include "kv_store.cuh"

namespace {

constexpr int WARPS = GK_LATENT_DIM / GK_LATENT_BLOCK, THREADS = (WARPS + 1) * 32;
static_assert(GK_LATENT_BLOCK == 32 * 4 && GK_LATENT_ROPE == 32 * 2, "columns of a lane");

struct Params {
    const void *c, *k_pe;
    int64_t c_token, c_col, k_pe_token, k_pe_col; /* strides */
    uint8_t *latents, *rotary;                    /* the parts of row 0 of page 0 */
    int64_t page, row;                            /* strides in bytes, of both parts */
    const void *slots;
    int64_t slot_step, capacity;
    int64_t block_size;
    bool slots_64;
    uint8_t *error_word;
};

template <class T>
__global__ void __launch_bounds__(THREADS) kv_cache_write_latent_kernel(Params p) {
    const int64_t token = blockIdx.x, slot_at = token * p.slot_step;
    const int64_t slot =
        p.slots_64 ? ((const int64_t *)p.slots)[slot_at] : ((const int32_t *)p.slots)[slot_at];
    if (slot < 0 || slot >= p.capacity) {
        if (slot >= 0 && threadIdx.x == 0) report(p.error_word, GK_BAD_SLOTS);
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t page = slot / p.block_size;
    const int64_t to = page * p.page + (slot - page * p.block_size) * p.row;
    if (warp == WARPS) {
        const T *x = (const T *)p.k_pe + token * p.k_pe_token + lane * 2 * p.k_pe_col;
        *(uint32_t *)(p.rotary + to + lane * 4) =
            pack2<__nv_bfloat16>(to_f32(x[0]), to_f32(x[p.k_pe_col]));
        return;
    }
    const int column = warp * GK_LATENT_BLOCK + lane * 4;
    const T *x = (const T *)p.c + token * p.c_token + column * p.c_col;
    float v[4];
    /* the largest magnitude, compared as bits, where infinities and NaN are largest */
    int most = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        v[e] = to_f32(x[e * p.c_col]);
        most = max(most, __float_as_int(v[e]) & 0x7fffffff);
    }
    most = warp_max(most);
    const float scale = most >= 0x7f800000
                            ? __int_as_float(0x7fc00000)
                            : fmaxf(__fdiv_rn(__int_as_float(most), GK_E4M3_MAX), 0x1p-126f);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = __fdiv_rn(v[e], scale);
    *(uint32_t *)(p.latents + to + column) = codes_x4<CodesBySoftware>(GK_E4M3, v);
    if (lane == 0) *(float *)(p.latents + to + GK_LATENT_SCALES_AT + warp * 4) = scale;
}

/* ---- launch ---------------------------------------------------------------------------------- */
bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_kv_cache_write_args *a = (const gk_kv_cache_write_args *)args;
    to->tasks = a->k.shape[0];
    return a->k_cache.dtype == GK_U8;
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_kv_cache_write_args *a = (const gk_kv_cache_write_args *)args;
    Params p = {};
    p.c = a->k.data;
    p.c_token = a->k.stride[0];
    p.c_col = a->k.stride[2];
    p.k_pe = a->v.data;
    p.k_pe_token = a->v.stride[0];
    p.k_pe_col = a->v.stride[2];
    p.latents = (uint8_t *)a->k_cache.data;
    p.rotary = (uint8_t *)a->v_cache.data;
    p.page = a->k_cache.stride[0];
    p.row = a->k_cache.stride[1];
    p.slots = a->slots.data;
    p.slot_step = a->slots.stride[0];
    p.slots_64 = a->slots.dtype == GK_I64;
    p.capacity = a->k_cache.shape[0] * a->k_cache.shape[1];
    p.block_size = a->k_cache.shape[1];
    p.error_word = ctx->error_word;
    return launch<kv_cache_write_latent_kernel<T>>("gk_kv_cache_write_latent", ctx,
                                                   dim3((unsigned)a->k.shape[0]), THREADS, 0, p);
}

const gk_cuda_instance instances[] = {
    {"kv_cache_write_latent_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"kv_cache_write_latent_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"kv_cache_write_latent_f32", GK_F32, plan, run<float>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_kv_cache_write_latent_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
