// SPDX-License-Identifier: BSD-3-Clause
/* cross_entropy_sm90a: the loss of each row of float32 logits and its gradient in one pass over the
 * logits; cross_entropy.cu has the equations. Serves gk_cross_entropy_fwd when the caller wants
 * dlogits [M, V], in float32, bfloat16 or float16.
 *
 * A cluster of 1, 2, 4 or 8 blocks shares a row; each block owns a contiguous part of its columns.
 * Clusters are persistent and take every grid-th row. A block keeps its parts of several rows in a
 * ring in shared memory (`stages` parts, at most RING bytes), which bulk copies fill ahead of use.
 * Every part is read twice from shared memory, once for the sums and once for dlogits:
 *
 *   thread 0      copy row 0, 1, 2 |                    copy row 3 |
 *   all threads   row 0: max, sum  | exchange | dlogits | row 1: max, sum | exchange | ..
 *
 * In the exchange, each warp sends its maximum and sum to every block of the cluster.
 *
 * Refused (cross_entropy.cu serves them): V below 4096, above 212992 or no multiple of 8; a soft
 * cap; label smoothing together with weights; rows that do not start at multiples of 16 bytes. No
 * workspace. Bound by reading logits once and writing dlogits: 6 bytes per column with a 16-bit
 * gradient. */
#include "gpukern_train.h"
#include "../ptx/regs.cuh"
#include "../ptx/tma.cuh"
#include "clusters.cuh"
#include "row_block.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / 32;
/* Bytes of the ring. The other shared memory of a block (struct Shared) takes 13 KB. */
constexpr int RING = 208 * 1024;
/* Parts in the ring: the most, and the fewest with which instances of 1, 2 and 4 blocks serve. */
constexpr int MOST_STAGES = 8, WHOLE_STAGES = 3;
/* Fewest columns. Shorter rows are left to cross_entropy.cu, whose second pass finds them in L2. */
constexpr int LEAST = 4096;
constexpr int BULK_BYTES = 16 * 1024; /* bytes per bulk copy */
constexpr float LOG2_E = 1.44269504f;

struct Params {
    RowTensor logits, target, dlogits;
    const float *weight;
    float *loss, *lse;
    int64_t rows, weight_stride, ignore_index;
    int n, part, stages; /* columns of a row; columns of a block; parts in the ring */
    float smoothing, scale, z_loss;
    uint8_t *error_word;
};

/* The statistics of some columns: the maximum of z, the sum of exp(z - peak), the sum of z. */
struct Sums {
    float peak, sum, z;
};

/* The statistics of a thread's share of x, which is a block's part of a row, of `vectors` vectors
 * of 4 floats. A step computes 16 values z and their maximum before their exponentials, so that it
 * rescales the sum once. A NaN makes the sum NaN. */
__device__ __forceinline__ Sums sums_of(const float4 *x, int vectors, float scale) {
    Sums s = {-INFINITY, 0, 0};
    for (int first = threadIdx.x; first < vectors; first += 4 * THREADS) {
        float z[16];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const bool in = first + u * THREADS < vectors;
            const float4 v = in ? x[first + u * THREADS] : make_float4(0, 0, 0, 0);
            const float of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                z[4 * u + k] = in ? __fmul_rn(scale, of[k]) : -INFINITY;
                s.z += in ? z[4 * u + k] : 0;
            }
        }
        float top = s.peak;
#pragma unroll
        for (int k = 0; k < 16; ++k) top = fmaxf(top, z[k]);
        const float base = top == -INFINITY ? 0 : top;
        s.sum *= ex2_approx_ftz((s.peak - base) * LOG2_E);
        s.peak = top;
#pragma unroll
        for (int k = 0; k < 16; ++k) s.sum += ex2_approx_ftz((z[k] - base) * LOG2_E);
    }
    return s;
}

/* Merges the statistics of a warp's 32 lanes; every lane has the result. */
__device__ __forceinline__ Sums of_warp(const Sums &s) {
    const float peak = warp_max(s.peak), base = peak == -INFINITY ? 0 : peak;
    return {peak, warp_sum(s.sum * ex2_approx_ftz((s.peak - base) * LOG2_E)), warp_sum(s.z)};
}

template <int CLUSTER> struct Shared {
    static constexpr int PLACES = WARPS * CLUSTER; /* warps that share a row */
    int64_t target[2][THREADS];                    /* of THREADS rows, and of the THREADS after */
    float4 sent[2][PLACES];                        /* each warp's Sums, in two alternating sets */
    uint64_t full[MOST_STAGES], met[2];            /* mbarriers: a part arrived, a set arrived */
};

/* Merges the Sums of all threads that share a row; all have the result. `round` counts the
 * exchanges before this one, and selects the set of places: RowGroup says why two suffice. */
template <int CLUSTER>
__device__ __forceinline__ Sums exchange(Shared<CLUSTER> &shared, const Sums &mine, int rank,
                                         unsigned round) {
    constexpr int PLACES = Shared<CLUSTER>::PLACES;
    const int set = round & 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Sums s = of_warp(mine);
    if constexpr (CLUSTER == 1) {
        if (lane == 0) shared.sent[set][warp] = make_float4(s.peak, s.sum, s.z, 0);
        __syncthreads();
    } else {
        const smem_addr met = cvta_to_shared(&shared.met[set]);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(met, PLACES * 16);
        if (lane < CLUSTER)
            st_async_128(mapa(cvta_to_shared(&shared.sent[set][rank * WARPS + warp]), lane), s.peak,
                         s.sum, s.z, 0, mapa(met, lane));
        while (!mbarrier_try_wait_parity(met, round >> 1 & 1)) {
        }
    }
    Sums all = {-INFINITY, 0, 0};
#pragma unroll
    for (int at = lane; at < PLACES; at += 32) {
        const float4 v = shared.sent[set][at];
        const float top = fmaxf(all.peak, v.x), base = top == -INFINITY ? 0 : top;
        all.sum = all.sum * ex2_approx_ftz((all.peak - base) * LOG2_E) +
                  v.y * ex2_approx_ftz((v.x - base) * LOG2_E);
        all.peak = top;
        all.z += v.z;
    }
    return of_warp(all);
}

__device__ __forceinline__ float exp_of(float x, __nv_bfloat16 *) {
    return ex2_approx_ftz(x * LOG2_E);
}
__device__ __forceinline__ float exp_of(float x, __half *) { return ex2_approx_ftz(x * LOG2_E); }
__device__ __forceinline__ float exp_of(float x, float *) { return expf(x); }

/* Eight gradients, stored as one or two 16-byte vectors. */
template <class D> union Eight {
    uint4 bits[sizeof(D) / 2];
    D v[8];
    __device__ __forceinline__ Eight() {}
};

template <class D> __device__ __forceinline__ void put(D *to, int i, const Eight<D> &d) {
#pragma unroll
    for (int k = 0; k < (int)sizeof(D) / 2; ++k)
        ((uint4 *)to)[i * (int)(sizeof(D) / 2) + k] = d.bits[k];
}

template <class D, int CLUSTER>
__global__ void __launch_bounds__(THREADS, 1) cross_entropy_once_kernel(Params p) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ Shared<CLUSTER> shared;
    const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, begin = rank * p.part,
              here = min(p.n - begin, p.part);
    const int64_t first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) mbarrier_init(cvta_to_shared(&shared.full[i]), 1);
        for (int i = 0; i < 2; ++i) mbarrier_init(cvta_to_shared(&shared.met[i]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    /* No block may send before every block of the cluster runs and has initialised its barriers. */
    if constexpr (CLUSTER > 1) barrier_cluster();

    const auto target_of = [&](int64_t it) {
        return shared.target[it / THREADS & 1][it % THREADS];
    };
    const auto has_loss = [&](int64_t target) {
        return target != p.ignore_index && target >= 0 && target < p.n;
    };
    unsigned used = 0, issued = 0; /* rows consumed, and rows copied (thread 0 only) */
    int stage = 0, parity = 0;     /* of the row in use */
    int64_t ahead = 0;             /* the next row to copy */
    int ahead_stage = 0;
    /* Thread 0 starts the copies of coming rows while the ring has room. It skips rows without a
     * loss. The targets of rows below `known` are in shared memory. */
    const auto copy_ahead = [&](int64_t known) {
        for (; issued - used < (unsigned)p.stages && ahead < known && first + ahead * step < p.rows;
             ++ahead) {
            if (!has_loss(target_of(ahead))) continue;
            const char *from =
                (const char *)(row_at<float>(p.logits, first + ahead * step) + begin);
            const smem_addr to = cvta_to_shared(ring + (size_t)ahead_stage * p.part * 4);
            const smem_addr full = cvta_to_shared(&shared.full[ahead_stage]);
            mbarrier_arrive_expect_tx(full, here * 4);
            for (int at = 0; at < here * 4; at += BULK_BYTES)
                bulk_load(to + at, from + at, min(BULK_BYTES, here * 4 - at), full);
            ++issued;
            ahead_stage = ahead_stage + 1 == p.stages ? 0 : ahead_stage + 1;
        }
    };

    for (int64_t it = 0; first + it * step < p.rows; ++it) {
        const int64_t row = first + it * step;
        if (it % THREADS ==
            0) { /* load the targets of THREADS rows ahead (at first of 2 THREADS) */
            __syncthreads();
            for (int64_t more = it == 0 ? 0 : THREADS; more <= THREADS; more += THREADS) {
                const int64_t at = first + (it + more + threadIdx.x) * step;
                shared.target[(it + more) / THREADS & 1][threadIdx.x] =
                    at < p.rows ? *row_at<int64_t>(p.target, at) : p.ignore_index;
            }
            __syncthreads();
            if (threadIdx.x == 0) copy_ahead(it + 2 * THREADS);
        }
        const int64_t target = target_of(it);
        D *dx = row_at<D>(p.dlogits, row) + begin;
        if (!has_loss(target)) {
            const bool bad = target != p.ignore_index;
            if (bad && threadIdx.x == 0) report(p.error_word, GK_BAD_TARGETS);
            if (rank == 0 && threadIdx.x == 0) p.loss[row] = p.lse[row] = bad ? NAN : 0;
            Eight<D> d;
#pragma unroll
            for (int k = 0; k < 8; ++k) d.v[k] = from_acc<D>(bad ? NAN : 0);
            for (int i = threadIdx.x; i < here / 8; i += THREADS) put(dx, i, d);
            continue;
        }
        const float own = (1 - p.smoothing) * (p.weight ? p.weight[target * p.weight_stride] : 1);
        const float *x = (const float *)(ring + (size_t)stage * p.part * 4);
        while (!mbarrier_try_wait_parity(cvta_to_shared(&shared.full[stage]), parity)) {
        }
        const Sums s =
            exchange<CLUSTER>(shared, sums_of((const float4 *)x, here / 4, p.scale), rank, used);
        const float log_sum = logf(s.sum), lse = s.peak + log_sum;
        const int mine = target >= begin && target < begin + here ? (int)target - begin : -1;
        if (mine >= 0 && threadIdx.x == 0) {
            float loss = own * (s.peak - p.scale * x[mine] + log_sum) + p.z_loss * lse * lse;
            if (p.smoothing != 0) loss += p.smoothing * (lse - s.z / (float)p.n);
            p.loss[row] = loss;
            p.lse[row] = lse;
        }
        const float of_p = own + p.smoothing + 2 * p.z_loss * lse, each = p.smoothing / (float)p.n;
#pragma unroll 2
        for (int i = threadIdx.x; i < here / 8; i += THREADS) {
            const float4 lo = ((const float4 *)x)[2 * i], hi = ((const float4 *)x)[2 * i + 1];
            const float of[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
            float y[8];
#pragma unroll
            for (int k = 0; k < 8; ++k)
                y[k] = exp_of(__fmul_rn(p.scale, of[k]) - lse, (D *)nullptr) * of_p - each;
            if (i == mine >> 3) /* never true for mine = -1 */
#pragma unroll
                for (int k = 0; k < 8; ++k) y[k] -= k == (mine & 7) ? own : 0;
            Eight<D> d;
#pragma unroll
            for (int k = 0; k < 8; ++k) d.v[k] = from_acc<D>(p.scale * y[k]);
            put(dx, i, d);
        }
        ++used;
        if (++stage == p.stages) {
            stage = 0;
            parity ^= 1;
        }
        __syncthreads(); /* all threads have read the part, so a copy may overwrite it */
        if (threadIdx.x == 0) copy_ahead(it / THREADS * THREADS + 2 * THREADS);
    }
}

/* Columns per block: n / cluster, rounded up to a multiple of 8. */
int part_of(int64_t n, int cluster) { return (int)gk_ceil_div(n, 8 * cluster) * 8; }
int stages_of(int part) { return (int)gk_min_i64(MOST_STAGES, RING / (4 * part)); }

template <class D, int CLUSTER>
gk_status once_launch(const gk_context *ctx, const gk_cross_entropy_args *a, const gk_plan *plan) {
    const gk_loss_more more = gk_more_of_fwd(a);
    Params p = {row_tensor(a->logits), row_elements(&a->target), row_tensor(more.dlogits)};
    if (a->weight) {
        p.weight = (const float *)a->weight->data;
        p.weight_stride = a->weight->stride[0];
    }
    p.loss = (float *)a->loss.data;
    p.lse = (float *)a->lse.data;
    p.rows = plan->tasks;
    p.n = (int)gk_classes_of(a);
    p.part = part_of(p.n, CLUSTER);
    p.stages = stages_of(p.part);
    p.ignore_index = a->ignore_index;
    p.smoothing = (float)a->label_smoothing;
    p.scale = (float)a->logit_scale;
    p.z_loss = (float)more.z_loss;
    p.error_word = ctx->error_word;
    int64_t most = gk_gpu_of(ctx->index)->num_sms;
    if constexpr (CLUSTER > 1)
        most = clusters_at_once<cross_entropy_once_kernel<D, CLUSTER>>(ctx, THREADS, RING, CLUSTER);
    const dim3 grid((unsigned)gk_min_i64(most, p.rows) * CLUSTER);
    return launch<cross_entropy_once_kernel<D, CLUSTER>>("gk_cross_entropy_fwd", ctx, grid, THREADS,
                                                         RING, p, false, CLUSTER);
}

template <int CLUSTER>
gk_status once_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_cross_entropy_args *a = (const gk_cross_entropy_args *)args;
    const gk_dtype dtype = gk_more_of_fwd(a).dlogits->dtype;
    if (dtype == GK_BF16) return once_launch<__nv_bfloat16, CLUSTER>(ctx, a, plan);
    if (dtype == GK_F16) return once_launch<__half, CLUSTER>(ctx, a, plan);
    return once_launch<float, CLUSTER>(ctx, a, plan);
}

/* An instance's key. */
struct OnceKey {
    enum {
        CLUSTER,     /* blocks of a cluster */
        LEAST_STAGES /* the fewest parts of a row that its ring must hold */
    };
};

bool once_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *plan) {
    const gk_cross_entropy_args *a = (const gk_cross_entropy_args *)args;
    const gk_tensor *dlogits = gk_more_of_fwd(a).dlogits;
    const int64_t n = gk_classes_of(a);
    if (!dlogits || n < LEAST || n > RING || n % 8 != 0 || !rows_whole(a->logits, dlogits))
        return false;
    if (a->softcap != 0 || (a->weight && a->label_smoothing != 0)) return false;
    if (stages_of(part_of(n, instance->key[OnceKey::CLUSTER])) <
            instance->key[OnceKey::LEAST_STAGES] ||
        !smem_fits(ctx, RING + (int)sizeof(Shared<8>)))
        return false;
    plan->tasks = num_rows(a->logits);
    return true;
}

const gk_cuda_instance fwd[] = {
    {"cross_entropy_fwd_sm90a_f32_512x1", GK_F32, once_plan, once_run<1>, {1, WHOLE_STAGES}, NULL},
    {"cross_entropy_fwd_sm90a_f32_512x2", GK_F32, once_plan, once_run<2>, {2, WHOLE_STAGES}, NULL},
    {"cross_entropy_fwd_sm90a_f32_512x4", GK_F32, once_plan, once_run<4>, {4, WHOLE_STAGES}, NULL},
    {"cross_entropy_fwd_sm90a_f32_512x8", GK_F32, once_plan, once_run<8>, {8, 2}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_cross_entropy_fwd_sm90a_table = {fwd, sizeof fwd / sizeof fwd[0],
                                                                   90, NULL};
