// SPDX-License-Identifier: BSD-3-Clause
/* softmax_ring_sm90a: softmax and log_softmax of long 16-bit rows on Hopper, through a ring in
 * shared memory. softmax.cuh has the equations. Serves gk_softmax_fwd and gk_softmax_bwd in
 * bfloat16 and float16.
 *
 * Work split. A cluster of 1, 2, 4 or 8 blocks shares a row. Each block owns a contiguous part of
 * its columns. Clusters are persistent, and each processes every grid-th row. Bulk copies bring the
 * parts of coming rows into a ring of `stages` parts. In backward each part has g and out.
 *
 * Each part is read twice from the ring: once for its statistics, and one step later for the
 * result. So the exchange of a row's statistics overlaps the work on the previous row:
 *
 *   thread 0      copy row 3              |                         copy row 4 |
 *   all threads   statistics 1, result 0  | exchange | statistics 2, result 1  | exchange | ..
 *
 * The statistics of forward are a running maximum and the sum of exponentials relative to it. A
 * thread rescales the sum when its maximum grows (Milakov and Gimelshein 2018, arXiv:1805.02867).
 *
 * Refused (softmax.cu, softmax_sm90a.cu and softmax_looped.cu serve them): calls with lengths,
 * float32 and float64, rows that are not whole 16-byte vectors at multiples of 16 bytes. No
 * workspace. The kernel is bound by reading each operand once and writing the result. */
#include "../../core/invariant.h"
#include "../ptx/tma.cuh"
#include "clusters.cuh"
#include "softmax.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / 32, VEC = 8;
/* Bytes of all rings on an SM. The other shared memory of each block takes at most 3 KB. */
constexpr int RING_OF_SM = 208 * 1024;
constexpr int MOST_STAGES = 8, LEAST_STAGES = 3;
constexpr float LOG2_E = 1.44269504f;

struct RingParams {
    SoftmaxParams p;
    int part, stages; /* columns of a block; parts in the ring */
};

template <int CLUSTER> struct Shared {
    static constexpr int PLACES = WARPS * CLUSTER; /* warps that share a row */
    float4 sent[2][PLACES];                        /* their statistics, in two alternating sets */
    uint64_t full[MOST_STAGES], met[2];            /* mbarriers: a part arrived, a set arrived */
};

/* The statistics of some columns. Backward uses `sum` alone. */
struct Sums {
    float peak, sum;
};

/* exp(a - b), where a = -inf gives 0 even if b is -inf too */
__device__ __forceinline__ float weight_of(float a, float b) {
    return ex2_approx_ftz((a - (b == -INFINITY ? 0 : b)) * LOG2_E);
}

template <bool BACKWARD> __device__ __forceinline__ Sums of_warp(const Sums &s) {
    if (BACKWARD) return {0, warp_sum(s.sum)};
    const float peak = warp_max(s.peak);
    return {peak, warp_sum(s.sum * weight_of(s.peak, peak))};
}

template <class T> union Eight {
    uint4 bits;
    uint32_t word[VEC / 2];
    __device__ __forceinline__ Eight() {}
    __device__ __forceinline__ explicit Eight(smem_addr at) : bits(ld_shared_128(at)) {}
    __device__ __forceinline__ void values(float *x) const {
#pragma unroll
        for (int k = 0; k < VEC / 2; ++k) {
            const float2 two = unpack2<T>(word[k]);
            x[2 * k] = two.x;
            x[2 * k + 1] = two.y;
        }
    }
};

/* A thread's statistics of a part. A step of forward takes the maximum of 16 values before their
 * exponentials, so that it rescales the sum once. A NaN makes the sum NaN. */
template <class T, bool BACKWARD, bool LOG>
__device__ __forceinline__ Sums sums_of(smem_addr part, smem_addr second, int vectors,
                                        float scale) {
    Sums s = {-INFINITY, 0};
    if constexpr (BACKWARD) {
        float more = 0;
#pragma unroll 4
        for (int i = threadIdx.x; i < vectors; i += THREADS) {
            float g[VEC], y[VEC];
            Eight<T>(part + i * 16).values(g);
            if (!LOG) Eight<T>(second + i * 16).values(y);
#pragma unroll
            for (int k = 0; k < VEC; k += 2) {
                s.sum += LOG ? g[k] : g[k] * y[k];
                more += LOG ? g[k + 1] : g[k + 1] * y[k + 1];
            }
        }
        s.sum += more;
        return s;
    }
    constexpr int AT_ONCE = 2;
    const auto step = [&](int first, int count) {
        float z[AT_ONCE * VEC];
        float top = s.peak;
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u)
            if (u < count) {
                Eight<T>(part + (first + u * THREADS) * 16).values(z + u * VEC);
#pragma unroll
                for (int k = u * VEC; k < (u + 1) * VEC; ++k) {
                    z[k] = row_scaled(scale, z[k]);
                    top = fmaxf(top, z[k]);
                }
            }
        const float base = top == -INFINITY ? 0 : top;
        float more = 0;
        s.sum *= ex2_approx_ftz((s.peak - base) * LOG2_E);
        s.peak = top;
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u)
            if (u < count)
#pragma unroll
                for (int k = u * VEC; k < (u + 1) * VEC; k += 2) {
                    s.sum += ex2_approx_ftz((z[k] - base) * LOG2_E);
                    more += ex2_approx_ftz((z[k + 1] - base) * LOG2_E);
                }
        s.sum += more;
    };
    int i = threadIdx.x;
    for (; i + (AT_ONCE - 1) * THREADS < vectors; i += AT_ONCE * THREADS) step(i, AT_ONCE);
    if (i < vectors) step(i, 1);
    return s;
}

/* Writes a thread's results of a part. */
template <class T, bool BACKWARD, bool LOG>
__device__ __forceinline__ void write_part(T *out, smem_addr part, smem_addr second, int vectors,
                                           float scale, const Sums &s) {
    const float inverse = 1 / s.sum, log_sum = LOG && !BACKWARD ? logf(s.sum) : 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        float x[VEC], y[VEC];
        Eight<T>(part + i * 16).values(x);
        if (BACKWARD) Eight<T>(second + i * 16).values(y);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            if (BACKWARD) {
                x[k] = scale * (LOG ? x[k] - row_exp<T>(y[k]) * s.sum : y[k] * (x[k] - s.sum));
            } else {
                const float z = row_scaled(scale, x[k]) - s.peak;
                x[k] = LOG ? z - log_sum : row_exp<T>(z) * inverse;
            }
        }
        st_global_128(out + i * VEC, make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]),
                                                pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7])));
    }
}

template <class T, int CLUSTER, int BLOCKS, bool BACKWARD, bool LOG>
__global__ void __launch_bounds__(THREADS, BLOCKS) softmax_ring_kernel(RingParams params) {
    constexpr int OPERANDS = BACKWARD ? 2 : 1, PLACES = Shared<CLUSTER>::PLACES;
    extern __shared__ __align__(128) unsigned char softmax_ring[];
    __shared__ Shared<CLUSTER> shared;
    const SoftmaxParams &p = params.p;
    const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, begin = rank * params.part,
              vectors = min((int)p.n - begin, params.part) / VEC;
    const uint32_t first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER,
                   rows = (uint32_t)p.rows;
    const int stages = params.stages;
    const unsigned operand = params.part * (unsigned)sizeof(T); /* bytes of an operand's part */
    const smem_addr ring = cvta_to_shared(softmax_ring);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)p.scale;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) mbarrier_init(cvta_to_shared(&shared.full[i]), 1);
        for (int i = 0; i < 2; ++i) mbarrier_init(cvta_to_shared(&shared.met[i]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (CLUSTER > 1) barrier_cluster();

    /* Starts the copies of a row into a stage. One thread. */
    const auto fetch = [&](uint32_t row, int stage) {
        const smem_addr to = ring + stage * OPERANDS * operand,
                        full = cvta_to_shared(&shared.full[stage]);
        mbarrier_arrive_expect_tx(full, OPERANDS * vectors * 16);
        bulk_load(to, row_at<T>(p.x, row) + begin, vectors * 16, full);
        if (BACKWARD) bulk_load(to + operand, row_at<T>(p.y, row) + begin, vectors * 16, full);
    };
    /* Waits for the part of a row, computes its statistics, and sends them from each warp to set
     * `set` of all blocks. */
    const auto statistics = [&](int stage, unsigned parity, int set) {
        while (!mbarrier_try_wait_parity(cvta_to_shared(&shared.full[stage]), parity)) {
        }
        const smem_addr part = ring + stage * OPERANDS * operand;
        const Sums s =
            of_warp<BACKWARD>(sums_of<T, BACKWARD, LOG>(part, part + operand, vectors, scale));
        if constexpr (CLUSTER == 1) {
            if (lane == 0) shared.sent[set][warp] = make_float4(s.peak, s.sum, 0, 0);
        } else {
            const smem_addr met = cvta_to_shared(&shared.met[set]);
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(met, PLACES * 16);
            if (lane < CLUSTER)
                st_async_128(mapa(cvta_to_shared(&shared.sent[set][rank * WARPS + warp]), lane),
                             s.peak, s.sum, 0, 0, mapa(met, lane));
        }
    };
    /* Merges the statistics of all warps of the row. Two sets suffice: row_block.cuh says why. */
    const auto finish = [&](int set, unsigned parity) {
        if (CLUSTER > 1)
            while (!mbarrier_try_wait_parity(cvta_to_shared(&shared.met[set]), parity)) {
            }
        Sums all = {-INFINITY, 0};
#pragma unroll
        for (int at = 0; at < PLACES; at += 32) {
            if (PLACES < 32 && lane >= PLACES) break;
            const float4 v = shared.sent[set][at + lane];
            if (BACKWARD) {
                all.sum += v.y;
            } else {
                const float top = fmaxf(all.peak, v.x);
                all.sum = all.sum * weight_of(all.peak, top) + v.y * weight_of(v.x, top);
                all.peak = top;
            }
        }
        return of_warp<BACKWARD>(all);
    };

    if (threadIdx.x == 0)
        for (int s = 0; s < stages; ++s)
            if ((int64_t)first + (int64_t)s * step < p.rows) fetch(first + s * step, s);
    int stage = 0;
    unsigned parity = 0, it = 0;
    bool more = first < rows;
    Sums now = {};
    if (more) {
        statistics(0, 0, 0);
        __syncthreads();
        now = finish(0, 0);
    }
    for (; more; ++it) {
        const uint32_t row = first + it * step;
        const int next = stage + 1 == stages ? 0 : stage + 1, set = (it + 1) & 1;
        const unsigned next_parity = next == 0 ? parity ^ 1 : parity;
        more = rows - row > step;
        if (more) statistics(next, next_parity, set);
        const smem_addr part = ring + stage * OPERANDS * operand;
        write_part<T, BACKWARD, LOG>(row_at<T>(p.out, row) + begin, part, part + operand, vectors,
                                     scale, now);
        __syncthreads(); /* all threads have read the part, so a copy may overwrite it */
        if ((int)threadIdx.x == (int)(it % WARPS) * 32 && rows - row > stages * step)
            fetch(row + stages * step, stage);
        if (more) now = finish(set, (it + 1) >> 1 & 1);
        stage = next;
        parity = next_parity;
    }
}

/* Columns per block, a multiple of VEC, and the number of parts that its ring holds. */
int part_of(int64_t n, int cluster) { return (int)gk_ceil_div(n, VEC * cluster) * VEC; }
int stages_of(int64_t part, int blocks, int operands) {
    return (int)gk_min_i64(MOST_STAGES, RING_OF_SM / blocks / (2 * part * operands));
}

template <class T, int CLUSTER, int BLOCKS, bool BACKWARD, bool LOG>
gk_status ring_launch(const gk_context *ctx, const SoftmaxParams &p) {
    RingParams params = {p};
    params.part = part_of(p.n, CLUSTER);
    params.stages = stages_of(params.part, BLOCKS, 1 + BACKWARD);
    constexpr int BYTES = RING_OF_SM / BLOCKS;
    int64_t most = (int64_t)gk_gpu_of(ctx->index)->num_sms * BLOCKS;
    if constexpr (CLUSTER > 1)
        most = clusters_at_once<softmax_ring_kernel<T, CLUSTER, BLOCKS, BACKWARD, LOG>>(
            ctx, THREADS, BYTES, CLUSTER);
    const dim3 grid((unsigned)gk_min_i64(most, p.rows) * CLUSTER);
    return launch<softmax_ring_kernel<T, CLUSTER, BLOCKS, BACKWARD, LOG>>(
        BACKWARD ? "gk_softmax_bwd" : "gk_softmax_fwd", ctx, grid, THREADS, BYTES, params, false,
        CLUSTER);
}

template <class T, int CLUSTER, int BLOCKS>
gk_status fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_softmax_args *a = (const gk_softmax_args *)args;
    return a->log ? ring_launch<T, CLUSTER, BLOCKS, false, true>(ctx, softmax_params(a))
                  : ring_launch<T, CLUSTER, BLOCKS, false, false>(ctx, softmax_params(a));
}
template <class T, int CLUSTER, int BLOCKS>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_softmax_bwd_args *a = (const gk_softmax_bwd_args *)args;
    return a->log ? ring_launch<T, CLUSTER, BLOCKS, true, true>(ctx, softmax_params(a))
                  : ring_launch<T, CLUSTER, BLOCKS, true, false>(ctx, softmax_params(a));
}

/* An instance's key. */
struct RingKey {
    enum {
        CLUSTER, /* blocks of a cluster */
        BLOCKS,  /* blocks on an SM */
        LEAST    /* the fewest columns of a row that the instance serves */
    };
};

bool ring_fits(const gk_cuda_instance *instance, const gk_context *ctx, int64_t n, int64_t rows,
               int operands) {
    return n >= instance->key[RingKey::LEAST] && rows <= INT32_MAX &&
           smem_fits(ctx, RING_OF_SM / instance->key[RingKey::BLOCKS] + 8192) &&
           stages_of(part_of(n, instance->key[RingKey::CLUSTER]), instance->key[RingKey::BLOCKS],
                     operands) >= LEAST_STAGES;
}
bool ring_fwd_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                   gk_plan *plan) {
    const gk_softmax_args *a = (const gk_softmax_args *)args;
    plan->tasks = num_rows(a->x);
    return !a->lengths && rows_whole(a->x, &a->out) &&
           ring_fits(instance, ctx, a->x.shape[a->x.ndim - 1], plan->tasks, 1);
}
bool ring_bwd_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                   gk_plan *plan) {
    const gk_softmax_bwd_args *a = (const gk_softmax_bwd_args *)args;
    plan->tasks = num_rows(a->out);
    return !a->lengths && rows_whole(a->out, &a->grad_out, &a->dx) &&
           ring_fits(instance, ctx, a->out.shape[a->out.ndim - 1], plan->tasks, 2);
}

#define RING(PASS, T, DTYPE, NAME, CLUSTER, BLOCKS, LEAST)              \
    {"softmax_" #PASS "_ring_sm90a_" NAME "_512x" #CLUSTER "x" #BLOCKS, \
     DTYPE,                                                             \
     ring_##PASS##_plan,                                                \
     PASS##_run<T, CLUSTER, BLOCKS>,                                    \
     {CLUSTER, BLOCKS, LEAST},                                          \
     NULL},
/* In order of preference. Two blocks on an SM overlap better, and a small cluster exchanges faster.
 * Measured on an H200 (cluster size x blocks on an SM): forward of 1024 x 65536 takes 75.8 us with
 * 2 x 1 and 81.3 with 4 x 2; forward of 4096 x 16384 takes 75.2 us with 1 x 2 and 77.9 with 1 x 1.
 * Forward of shorter rows is faster in registers (8192 x 4096: 56.8 us instead of 58.7). */
#ifndef FWD_RINGS
#define FWD_RINGS(T, DTYPE, NAME)          \
    RING(fwd, T, DTYPE, NAME, 1, 2, 8192)  \
    RING(fwd, T, DTYPE, NAME, 2, 2, 8192)  \
    RING(fwd, T, DTYPE, NAME, 2, 1, 16384) \
    RING(fwd, T, DTYPE, NAME, 4, 1, 32768) RING(fwd, T, DTYPE, NAME, 8, 1, 65536)
#define BWD_RINGS(T, DTYPE, NAME)         \
    RING(bwd, T, DTYPE, NAME, 1, 2, 4096) \
    RING(bwd, T, DTYPE, NAME, 1, 1, 4096) \
    RING(bwd, T, DTYPE, NAME, 2, 1, 8192) \
    RING(bwd, T, DTYPE, NAME, 4, 1, 16384) RING(bwd, T, DTYPE, NAME, 8, 1, 32768)
#endif

const gk_cuda_instance fwd[] = {FWD_RINGS(__nv_bfloat16, GK_BF16, "bf16")
                                    FWD_RINGS(__half, GK_F16, "f16")};
const gk_cuda_instance bwd[] = {BWD_RINGS(__nv_bfloat16, GK_BF16, "bf16")
                                    BWD_RINGS(__half, GK_F16, "f16")};

/* Chooses the first instance that serves the call, if each block has at least two rows. With one
 * row there is nothing to overlap, and the kernels in registers start faster. A batch-invariant
 * call takes it for any number of rows, because a row's bits must not depend on that number. */
template <int COUNT>
bool choose(const gk_cuda_instance (&instances)[COUNT], gk_dtype dtype, const gk_context *ctx,
            const void *args, gk_plan *plan) {
    for (const gk_cuda_instance &i : instances)
        if (i.dtype == dtype && i.plan(&i, ctx, args, plan)) {
            plan->kernel = &i;
            return gk_batch_invariant() ||
                   plan->tasks * i.key[RingKey::CLUSTER] >=
                       2 * (int64_t)i.key[RingKey::BLOCKS] * gk_gpu_of(ctx->index)->num_sms;
        }
    return false;
}
bool choose_fwd(const gk_context *ctx, const void *args, gk_plan *plan) {
    return choose(fwd, ((const gk_softmax_args *)args)->x.dtype, ctx, args, plan);
}
bool choose_bwd(const gk_context *ctx, const void *args, gk_plan *plan) {
    return choose(bwd, ((const gk_softmax_bwd_args *)args)->out.dtype, ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_softmax_fwd_ring_sm90a_table = {fwd, sizeof fwd / sizeof fwd[0],
                                                                  90, choose_fwd};
extern "C" const gk_cuda_table gk_softmax_bwd_ring_sm90a_table = {bwd, sizeof bwd / sizeof bwd[0],
                                                                  90, choose_bwd};
