/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_sm90a: grouped_gemm of bfloat16 and float16 on Hopper, by WGMMA and TMA. One
 * launch reads the groups' ends itself (grouped.cuh).
 *
 *   groups of rows   out[rows of g] = activation(a[rows of g] b[g] + bias)
 *   groups of k      out[g] = activation(a[:, k of g] b[k of g] + bias)
 *
 * Groups of rows: a is K-major, b[g] K-major or N-major. Groups of k: a is M-major, b N-major, and
 * groups may end at any k.
 *
 * Refuses: K = 0, other layouts, rows that TMA cannot read, more than 1024 groups, float32
 * (grouped_gemm_plain), 8 bits (grouped_gemm_fp8_sm90a, grouped_gemm_int8_sm90a). */
#include "grouped.cuh"

namespace {

template <class T, bool BY_K_, bool ALONG_N_> struct Kind : GroupedTile<2, BY_K_, ALONG_N_> {
    typedef GroupedTile<2, BY_K_, ALONG_N_> Tile;
    typedef typename Tile::TileA A;
    typedef typename Tile::TileB B;
    typedef tma_ring<Tile::STAGES> Ring;

    static __device__ __forceinline__ void prepare(const GroupedParams &, const Work<Kind> &, int,
                                                   float *) {}

    static __device__ __forceinline__ void issue(float (&sum)[64], uint64_t a, uint64_t b) {
        wgmma_ss<T, Tile::BN, Tile::ALONG_M, Tile::ALONG_N>(sum, a, b, true);
    }

    template <int COUNT>
    static __device__ __forceinline__ void take(const GroupedParams &p, Ring &ring,
                                                smem_addr ring_s, const Work<Kind> &x, int col0,
                                                const float *, const Releaser &release) {
        float sum[COUNT][64];
        sum_over_k<Kind>(ring, ring_s, sum, x, release);
        /* Read again, so that no register holds it over the products. */
        const unsigned thread = mov_tid_x();
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const WarpRows rows = warp_rows<Kind>(p, x, m, thread);
            store_sums<T, typename Tile::Panel>(p, sum[m], x.task.group, rows.out, rows.count, col0,
                                                staging<Kind>(ring_s, thread));
        }
    }
};

enum {
    KEY_OF_K,   /* the groups divide k */
    KEY_N_MAJOR /* b is N-major */
};

bool plan_16(const gk_cuda_instance *instance, const gk_context *, const void *args,
             gk_plan *plan) {
    plan->tile[2] = WGMMA_ROW_BYTES / 2;
    return grouped_fits((const gk_grouped_gemm_args *)args, instance->key[KEY_OF_K],
                        instance->key[KEY_N_MAJOR], plan);
}

template <class K>
gk_status run_16(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    GroupedParams p = {};
    return run_grouped<K>(ctx, (const gk_grouped_gemm_args *)args, plan, p);
}

#define INSTANCES(name, dtype, T)                                                             \
    {"grouped_gemm_sm90a_" name "_256x128", dtype,  plan_16,                                  \
     run_16<Kind<T, false, false>>,         {0, 0}, NULL},                                    \
        {"grouped_gemm_sm90a_" name "_256x128_n",                                             \
         dtype,                                                                               \
         plan_16,                                                                             \
         run_16<Kind<T, false, true>>,                                                        \
         {0, 1},                                                                              \
         NULL},                                                                               \
    {                                                                                         \
        "grouped_gemm_sm90a_" name "_256x128_k", dtype, plan_16, run_16<Kind<T, true, true>>, \
            {1, 1}, NULL                                                                      \
    }

const gk_cuda_instance instances[] = {INSTANCES("bf16", GK_BF16, __nv_bfloat16),
                                      INSTANCES("f16", GK_F16, __half)};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
