// SPDX-License-Identifier: BSD-3-Clause
/* kl_div_sm90a: the kernel of kl_div.cuh with a cluster of 1, 2, 4 or 8 blocks a row. A block keeps
 * up to KEPT_BYTES of its part of both rows in shared memory, so that the later passes read at most
 * the rest from L2: nothing of 128256 columns in bfloat16, half in float32. Serves gk_kl_div for
 * rows of at least LEAST bytes that begin at multiples of 16 bytes and have whole vectors;
 * kl_div.cu serves the others. No workspace. Bound by reading both logits once and writing dlogits.
 */
#include "clusters.cuh"
#include "kl_div.cuh"

namespace {

using namespace kl_div;

/* Bytes of shared memory for both rows. Each of the BLOCKS blocks of an SM may have some 75 KB.
 * Every launch asks for all KEPT_BYTES, because clusters_at_once asks the driver only once for each
 * kernel. */
constexpr int KEPT_BYTES = 72 * 1024;
/* Bytes of a row. Shorter rows lie in L2 anyway, and do not fill a block's threads. */
constexpr int64_t LEAST = 16 * 1024;

/* Blocks of a cluster: the fewest that can keep their whole part, at most 8. */
int cluster_of(int64_t row_bytes) {
    int cluster = 1;
    while (cluster < 8 && gk_ceil_div(row_bytes, cluster) * 2 > KEPT_BYTES) cluster *= 2;
    return cluster;
}

template <class T, int CLUSTER>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_kl_div_args *a = (const gk_kl_div_args *)args;
    constexpr int V = row_vec<T>, CHUNK = THREADS * AHEAD;
    Params p = params_of(a);
    p.part = gk_ceil_div(p.n / V, CLUSTER);
    /* whole chunks, or all of a part */
    const int room = KEPT_BYTES / 32;
    p.kept = p.part <= room ? (int)p.part : room / CHUNK * CHUNK;
    return of_dtypes<T>(a, [&](auto which) {
        typedef decltype(which) C;
        constexpr auto KERNEL = kl_div_kernel<T, typename C::D, V, CLUSTER, C::KIND>;
        int64_t most = BLOCKS * gk_gpu_of(ctx->index)->num_sms;
        if constexpr (CLUSTER > 1)
            most = clusters_at_once<KERNEL>(ctx, THREADS, KEPT_BYTES, CLUSTER);
        const dim3 grid((unsigned)gk_min_i64(most, p.rows) * CLUSTER);
        return launch<KERNEL>("gk_kl_div", ctx, grid, THREADS, KEPT_BYTES, p, false, CLUSTER);
    });
}

enum {
    KEY_CLUSTER /* blocks of a cluster */
};

bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_kl_div_args *a = (const gk_kl_div_args *)args;
    const int64_t bytes =
        a->logits.shape[a->logits.ndim - 1] * (int64_t)gk_dtype_bytes(a->logits.dtype);
    if (bytes < LEAST || bytes > INT32_MAX || cluster_of(bytes) != instance->key[KEY_CLUSTER] ||
        !rows_whole(a->logits, &a->teacher_logits, a->dlogits) || !smem_fits(ctx, KEPT_BYTES))
        return false;
    to->tasks = num_rows(a->logits);
    return true;
}

#define OF_DTYPE(name, DTYPE, T)                                              \
    {"kl_div_sm90a_" name "_256x1", DTYPE, plan, run<T, 1>, {1}, NULL},       \
        {"kl_div_sm90a_" name "_256x2", DTYPE, plan, run<T, 2>, {2}, NULL},   \
        {"kl_div_sm90a_" name "_256x4", DTYPE, plan, run<T, 4>, {4}, NULL}, { \
        "kl_div_sm90a_" name "_256x8", DTYPE, plan, run<T, 8>, {8}, NULL      \
    }
const gk_cuda_instance rows[] = {OF_DTYPE("f32", GK_F32, float),
                                 OF_DTYPE("bf16", GK_BF16, __nv_bfloat16),
                                 OF_DTYPE("f16", GK_F16, __half)};

} // namespace

extern "C" const gk_cuda_table gk_kl_div_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90,
                                                        NULL};
