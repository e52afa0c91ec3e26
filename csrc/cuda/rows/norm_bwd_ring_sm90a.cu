// SPDX-License-Identifier: BSD-3-Clause
/* norm_bwd_ring_sm90a: RMSNorm and LayerNorm backward of 16-bit rows on Hopper. norm.cuh has the
 * equations. Serves gk_norm_bwd in bfloat16 and float16 for rows of 520 to 131072 columns.
 *
 * Work split. An SM has one block of GROUPS groups of LANES threads. With CLUSTER = 1 each group
 * owns a row. With CLUSTER > 1 each block of the cluster owns a part of one row. Groups are
 * persistent. If there are C clusters, group j of cluster c processes rows j C + c, (j + GROUPS) C
 * + c, and so on. Bulk copies bring g and h of the coming rows into a ring in shared memory, STAGES
 * rows for each group.
 *
 * Each row is read twice from the ring: once for its statistics, and one step later for dx and the
 * sums of dweight and dbias. So the exchange of a row's statistics overlaps the work on the
 * previous row:
 *
 *   copies         row 3         |               row 4         |
 *   all threads    statistics 1 -> send, dx 0 | barrier, receive | statistics 2 -> send, dx 1 | ..
 *
 * A thread keeps the sums of its columns in registers over all its rows. At the end the sums of a
 * block's groups are added in order, through the memory of the ring, and stored as part c of the
 * workspace [C, 2, N]. norm_sums.cu adds the parts in order, so results have the same bits each
 * time.
 *
 * Refused (norm_bwd.cu, norm_sm90a.cu and norm_looped.cu serve them): float32 and float64 tensors;
 * dbias of RMSNorm; rows that are not whole 16-byte vectors at multiples of 16 bytes; a float32
 * weight from 8193 columns on, for which no registers are left. The kernel is bound by reading g
 * and h and writing dx. */
#include "../ptx/bar.cuh"
#include "../ptx/opaque.cuh"
#include "../ptx/regs.cuh"
#include "../ptx/tma.cuh"
#include "norm.cuh"

namespace {

/* Bytes of the rings. The other shared memory of a block takes at most 5 KB. */
constexpr int RING = 208 * 1024;
/* HEAD: bytes of a row's first 32 values, for the pivot */
constexpr int MOST_STAGES = 8, HEAD = 64;
constexpr int VEC = 8;

struct RingParams {
    NormBwdParams p;
    int part; /* columns of a row that one block owns */
    float inverse_n;
};

template <int LANES_, int ITEMS_, int GROUPS_, int CLUSTER_, bool LAYER_> struct Shape {
    static constexpr int LANES = LANES_, ITEMS = ITEMS_, GROUPS = GROUPS_, CLUSTER = CLUSTER_;
    static constexpr bool LAYER = LAYER_;
    static constexpr int THREADS = LANES * GROUPS, WARPS = LANES / 32, PLACES = WARPS * CLUSTER;
    static constexpr int STATS = LAYER ? 4 : 2;
    /* distance in floats from one warp's statistics to the next; st.async always sends 16 bytes */
    static constexpr int PITCH = CLUSTER > 1 ? 4 : STATS;
    /* A stage is [g][h][the row's first 32 values]. The third part is a copy of its own, because a
     * block of a cluster may not own the start of the row. */
    static constexpr int OPERAND = LANES * ITEMS * 16;
    static constexpr bool SENDS_HEAD = LAYER && CLUSTER > 1;
    static constexpr int STAGE = 2 * OPERAND + (SENDS_HEAD ? HEAD : 0);
    static constexpr int FIT = RING / GROUPS / STAGE;
    static constexpr int STAGES = FIT < MOST_STAGES ? FIT : MOST_STAGES;
    static constexpr int BYTES = GROUPS * STAGES * STAGE;
    static_assert(STAGES >= 3, "one row for dx, one for its statistics, one on its way");
    /* with up to 2 vectors a thread keeps its weights as floats, otherwise packed */
    static constexpr bool WIDE_WEIGHTS = ITEMS <= 2;

    struct Shared {
        float place[2][PLACES * PITCH]; /* the warps' statistics, in two alternating sets */
        float about[2];                 /* the pivots of the rows of the two sets */
        uint64_t full[STAGES], met[2];  /* mbarriers: a row arrived, a set arrived */
    };
};

/* The weights of a thread's columns, each with the offset added: floats, or packed as in memory. */
template <class S, class T, bool WIDE = S::WIDE_WEIGHTS> struct Weights {
    float v[S::ITEMS][VEC];
    __device__ __forceinline__ void load(const NormBwdParams &p, int i, int64_t column) {
        if (!p.weight) {
#pragma unroll
            for (int k = 0; k < VEC; ++k) v[i][k] = 1;
            return;
        }
        const NormVec<T> w(p.weight, p.weight_wide, column, (float)p.weight_offset);
#pragma unroll
        for (int k = 0; k < VEC; ++k) v[i][k] = w.v[k];
    }
    __device__ __forceinline__ float2 two(int i, int k) const {
        return make_float2(v[i][2 * k], v[i][2 * k + 1]);
    }
};
template <class S, class T> struct Weights<S, T, false> {
    uint32_t v[S::ITEMS][VEC / 2];
    float offset;
    __device__ __forceinline__ void load(const NormBwdParams &p, int i, int64_t column) {
        offset = p.weight ? (float)p.weight_offset : 0;
        uint4 w = make_uint4(pack2<T>(1, 1), pack2<T>(1, 1), pack2<T>(1, 1), pack2<T>(1, 1));
        if (p.weight) w = *(const uint4 *)((const T *)p.weight + column);
        v[i][0] = w.x;
        v[i][1] = w.y;
        v[i][2] = w.z;
        v[i][3] = w.w;
    }
    __device__ __forceinline__ float2 two(int i, int k) {
        /* hides the value, so that the compiler unpacks it for each row instead of keeping floats
         */
        opaque(v[i][k]);
        const float2 w = unpack2<T>(v[i][k]);
        return make_float2(w.x + offset, w.y + offset);
    }
};

/* The four numbers from which dx of a row is computed: y = rstd g w + slope xhat + base. */
struct RowStats {
    float mean, rstd, slope, base;
};

/* One group of threads, with its ring and its statistics. */
template <class S, class T> struct RingGroup {
    const RingParams &params;
    typename S::Shared &shared;
    smem_addr mine; /* the thread's first vector of the first stage */
    int left;       /* vectors of this block's part from the thread's first on */

    __device__ __forceinline__ RingGroup(const RingParams &params, typename S::Shared *all,
                                         const void *rings)
        : params(params), shared(all[threadIdx.x / S::LANES]) {
        left = vectors() - lane();
        mine = cvta_to_shared(rings) + number() * S::STAGES * S::STAGE + lane() * 16;
        if (lane() == 0) {
            for (int s = 0; s < S::STAGES; ++s) mbarrier_init(cvta_to_shared(&shared.full[s]), 1);
            for (int s = 0; s < 2; ++s) mbarrier_init(cvta_to_shared(&shared.met[s]), 1);
            fence_mbarrier_init();
        }
        __syncthreads();
        if (S::CLUSTER > 1) barrier_cluster();
    }
    __device__ __forceinline__ smem_addr ring() const { return mine - lane() * 16; }
    __device__ __forceinline__ int lane() const { return threadIdx.x % S::LANES; }
    /* The group's index in its block, and the block's rank in its cluster. */
    __device__ __forceinline__ int number() const {
        return S::GROUPS == 1 ? 0 : threadIdx.x / S::LANES;
    }
    __device__ __forceinline__ int rank() const { return S::CLUSTER > 1 ? cluster_ctarank() : 0; }
    /* The first column of this block's part, and its number of vectors. */
    __device__ __forceinline__ int begin() const { return rank() * params.part; }
    __device__ __forceinline__ int vectors() const {
        return min((int)params.p.n - begin(), params.part) / VEC;
    }
    /* The first row of the group and the step to its next one. They are computed where they are
     * used, because registers are scarce. */
    __device__ __forceinline__ uint32_t first() const {
        return number() * (gridDim.x / S::CLUSTER) + blockIdx.x / S::CLUSTER;
    }
    __device__ __forceinline__ uint32_t step() const { return gridDim.x / S::CLUSTER * S::GROUPS; }
    __device__ __forceinline__ void sync() const {
        if (S::GROUPS == 1)
            __syncthreads();
        else if (S::LANES == 32)
            __syncwarp();
        else
            bar_sync(1 + number(), S::LANES);
    }
    /* Starts the copies of a row into a stage. One thread. */
    __device__ __forceinline__ void fetch(uint32_t row, int stage) const {
        const NormBwdParams &p = params.p;
        const smem_addr to = ring() + stage * S::STAGE, full = cvta_to_shared(&shared.full[stage]);
        const int bytes = vectors() * 16;
        const T *h = row_at<T>(p.h, row);
        mbarrier_arrive_expect_tx(full, 2 * bytes + (S::SENDS_HEAD ? HEAD : 0));
        bulk_load(to, row_at<T>(p.grad_out, row) + begin(), bytes, full);
        bulk_load(to + S::OPERAND, h + begin(), bytes, full);
        if (S::SENDS_HEAD) bulk_load(to + 2 * S::OPERAND, h, HEAD, full);
        if (p.grad_sum.data) bulk_prefetch(row_at<T>(p.grad_sum, row) + begin(), bytes);
    }
    __device__ __forceinline__ void wait(int stage, unsigned parity) const {
        while (!mbarrier_try_wait_parity(cvta_to_shared(&shared.full[stage]), parity)) {
        }
    }
    __device__ __forceinline__ uint4 get(int stage, int which, int i) const {
        return ld_shared_128(mine + stage * S::STAGE + which * S::OPERAND + i * S::LANES * 16);
    }
    __device__ __forceinline__ bool in(int i) const { return i * S::LANES < left; }

    /* The pivot of NormRing::pivot: the mean of the row's first 32 values, the same in all threads
     * of the row. */
    __device__ __forceinline__ float pivot(int stage) const {
        const uint2 x = ld_shared_64(ring() + stage * S::STAGE +
                                     (S::SENDS_HEAD ? 2 : 1) * S::OPERAND + lane() % 8 * 8);
        const float2 a = unpack2<T>(x.x), b = unpack2<T>(x.y);
        float sum = (a.x + a.y) + (b.x + b.y);
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
        return sum / 32;
    }

    /* Reduces the statistics over a warp, and writes or sends them to set `set`. In each step of
     * the reduction the lanes divide the statistics among themselves, which halves the shuffles. */
    __device__ __forceinline__ void send(float (&s)[4], int set) const {
        constexpr int N = S::STATS;
        const int my = threadIdx.x % 32;
        float x;
        {
            const bool high = my & 16;
            float keep[N / 2];
#pragma unroll
            for (int k = 0; k < N / 2; ++k) {
                keep[k] = high ? s[N / 2 + k] : s[k];
                keep[k] += __shfl_xor_sync(0xffffffffu, high ? s[k] : s[N / 2 + k], 16);
            }
            x = keep[0];
            if (N == 4) {
                const bool odd = my & 8;
                x = odd ? keep[N / 4] : keep[0];
                x += __shfl_xor_sync(0xffffffffu, odd ? keep[0] : keep[N / 4], 8);
            }
        }
#pragma unroll
        for (int bit = 16 / N; bit >= 1; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
        constexpr int APART = 32 / N; /* afterwards lane k x APART holds statistic k */
        if constexpr (S::CLUSTER == 1) {
            if (my % APART == 0) shared.place[set][lane() / 32 * N + my / APART] = x;
        } else {
            float all[4] = {};
#pragma unroll
            for (int k = 0; k < N; ++k) all[k] = __shfl_sync(0xffffffffu, x, k * APART);
            const smem_addr met = cvta_to_shared(&shared.met[set]);
            if (lane() == 0) mbarrier_arrive_expect_tx(met, S::PLACES * 16);
            if (my < S::CLUSTER)
                st_async_128(
                    mapa(cvta_to_shared(&shared.place[set][(rank() * S::WARPS + lane() / 32) * 4]),
                         my),
                    all[0], all[1], all[2], all[3], mapa(met, my));
        }
    }
    /* Adds the statistics of all warps of the row, in the same order in every thread. */
    __device__ __forceinline__ void receive(float (&s)[4], int set, unsigned parity) const {
        constexpr int N = S::STATS;
        if (S::CLUSTER > 1)
            while (!mbarrier_try_wait_parity(cvta_to_shared(&shared.met[set]), parity)) {
            }
        const float *place = shared.place[set];
        if constexpr (S::PLACES <= 4) {
#pragma unroll
            for (int k = 0; k < N; ++k) s[k] = 0;
#pragma unroll
            for (int at = 0; at < S::PLACES; ++at)
#pragma unroll
                for (int k = 0; k < N; ++k) s[k] += place[at * S::PITCH + k];
        } else {
            const int my = threadIdx.x % 32;
            float x = 0;
#pragma unroll
            for (int at = 0; at < S::PLACES; at += 32 / N)
                if (S::PLACES >= 32 / N || my / N < S::PLACES)
                    x += place[(at + my / N) * S::PITCH + my % N];
#pragma unroll
            for (int bit = N; bit < 32; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
#pragma unroll
            for (int k = 0; k < N; ++k) s[k] = __shfl_sync(0xffffffffu, x, k);
        }
    }
};

template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) norm_bwd_ring_kernel(RingParams params) {
    constexpr int ITEMS = S::ITEMS;
    __shared__ typename S::Shared shared[S::GROUPS];
    extern __shared__ __align__(128) uint4 norm_rings[];
    const NormBwdParams &p = params.p;
    const RingGroup<S, T> group(params, shared, norm_rings);
    const uint32_t rows = (uint32_t)p.rows;
    const float inverse_n = params.inverse_n, eps = (float)p.eps;

    if (group.lane() == 0)
        for (int s = 0; s < S::STAGES; ++s)
            if ((int64_t)group.first() + (int64_t)s * group.step() < p.rows)
                group.fetch(group.first() + s * group.step(), s);

    Weights<S, T> weights;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        weights.load(p, i, group.begin() + (group.in(i) ? i * S::LANES + group.lane() : 0) * VEC);
    float dweight[ITEMS * VEC] = {}, dbias[S::LAYER ? ITEMS * VEC : 1] = {};

    /* Computes the statistics of the row in `stage` over a warp's columns, and sends them.
     * LayerNorm's statistics are those of h - pivot. */
    const auto statistics = [&](int stage, int set) {
        float s[4] = {0, 0, 0, 0};
        const float about = S::LAYER ? group.pivot(stage) : 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!group.in(i)) continue;
            const uint4 g4 = group.get(stage, 0, i), h4 = group.get(stage, 1, i);
#pragma unroll
            for (int k = 0; k < VEC / 2; ++k) {
                const float2 g = unpack2<T>(norm_word(g4, k)), h = unpack2<T>(norm_word(h4, k)),
                             w = weights.two(i, k);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float gw = half ? g.y * w.y : g.x * w.x;
                    const float d = (half ? h.y : h.x) - about;
                    s[0] += d * d;
                    s[1] += gw * d;
                    if (S::LAYER) {
                        s[2] += d;
                        s[3] += gw;
                    }
                }
            }
        }
        group.send(s, set);
        if (S::LAYER && group.lane() == 0) group.shared.about[set] = about;
    };
    /* Receives a row's statistics and turns them into RowStats. The group has passed a barrier
     * before. */
    const auto finish = [&](int set, unsigned parity) {
        float s[4];
        group.receive(s, set, parity);
        RowStats r = {};
        float var = s[0] * inverse_n, cov = s[1] * inverse_n, c1 = 0; /* cov: of g w and h */
        if (S::LAYER) {
            const float off = s[2] * inverse_n;
            c1 = s[3] * inverse_n;
            r.mean = group.shared.about[set] + off;
            var -= off * off;
            cov -= off * c1;
            if (var < 0) var = 0;
        }
        r.rstd = rsqrtf(var + eps);
        r.slope = -(r.rstd * cov) * r.rstd;
        r.base = -c1 * r.rstd;
        return r;
    };

    int stage = 0;
    unsigned parity = 0, it = 0;
    RowStats now = {};
    if (group.first() < rows) {
        group.wait(0, 0);
        statistics(0, 0);
        group.sync();
        now = finish(0, 0);
    }
    for (bool more = group.first() < rows; more; ++it) {
        const uint32_t row = group.first() + it * group.step();
        more = rows - row > group.step();
        const int next = stage + 1 == S::STAGES ? 0 : stage + 1, set = (it + 1) & 1;
        const unsigned next_parity = next == 0 ? parity ^ 1 : parity;
        if (more) {
            group.wait(next, next_parity);
            statistics(next, set);
        }
        T *dx = row_at<T>(p.dx, row) + group.begin();
        const T *grad_sum = p.grad_sum.data ? row_at<T>(p.grad_sum, row) + group.begin() : nullptr;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!group.in(i)) continue;
            const int at = (i * S::LANES + group.lane()) * VEC;
            const uint4 g4 = group.get(stage, 0, i), h4 = group.get(stage, 1, i);
            uint4 add4 = make_uint4(0, 0, 0, 0);
            if (grad_sum) add4 = *(const uint4 *)(grad_sum + at);
            uint32_t y4[VEC / 2];
#pragma unroll
            for (int k = 0; k < VEC / 2; ++k) {
                const float2 g = unpack2<T>(norm_word(g4, k)), h = unpack2<T>(norm_word(h4, k)),
                             w = weights.two(i, k);
                float y[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int column = i * VEC + 2 * k + half;
                    const float gk = half ? g.y : g.x;
                    const float xhat = ((half ? h.y : h.x) - now.mean) * now.rstd;
                    y[half] =
                        fmaf(gk * (half ? w.y : w.x), now.rstd, fmaf(xhat, now.slope, now.base));
                    dweight[column] += gk * xhat;
                    if (S::LAYER) dbias[column] += gk;
                }
                if (grad_sum) {
                    const float2 add = unpack2<T>(norm_word(add4, k));
                    y[0] += add.x;
                    y[1] += add.y;
                }
                y4[k] = pack2<T>(y[0], y[1]);
            }
            /* One 16-byte store. To save registers, the compiler would split some of them into
             * words. */
            st_global_128(dx + at, make_uint4(y4[0], y4[1], y4[2], y4[3]));
        }
        /* All threads of the group have read the stage. If a block owns the row, all statistics of
         * the next row are written, too. */
        group.sync();
        if (group.lane() == (int)(it % S::WARPS) * 32 && rows - row > S::STAGES * group.step())
            group.fetch(row + S::STAGES * group.step(), stage);
        if (more) now = finish(set, (it + 1) >> 1 & 1);
        stage = next;
        parity = next_parity;
    }
    if (!p.sums) return;

    /* Add the sums of the groups in order. The last group stores the result. */
    float *partial = (float *)p.sums + (int64_t)(blockIdx.x / S::CLUSTER) * 2 * p.n + group.begin();
    float *all = (float *)norm_rings; /* [2][columns of the block] */
    constexpr int COLUMNS = S::LANES * ITEMS * VEC;
    for (int g = 0; g < S::GROUPS; ++g) {
        if (S::GROUPS > 1) __syncthreads();
        if (group.number() != g) continue;
#pragma unroll
        for (int s = 0; s < (S::LAYER ? 2 : 1); ++s)
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (!group.in(i)) continue;
                const int at = (i * S::LANES + group.lane()) * VEC;
#pragma unroll
                for (int v = 0; v < VEC; v += 4) {
                    const float *x = (s ? dbias : dweight) + i * VEC + v;
                    float4 sum = make_float4(x[0], x[1], x[2], x[3]);
                    float4 *const between = (float4 *)(all + s * COLUMNS + at + v);
                    if (g > 0) {
                        const float4 y = *between;
                        sum = make_float4(y.x + sum.x, y.y + sum.y, y.z + sum.z, y.w + sum.w);
                    }
                    if (g + 1 < S::GROUPS)
                        *between = sum;
                    else
                        st_global_128(partial + s * p.n + at + v,
                                      make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y),
                                                 __float_as_uint(sum.z), __float_as_uint(sum.w)));
                }
            }
    }
}

template <class T, class S>
gk_status ring_launch(const gk_context *ctx, const gk_norm_bwd_args *a, const gk_plan *plan,
                      void *workspace) {
    RingParams params = {norm_params(a)};
    params.p.sums = a->dweight || a->dbias ? workspace : nullptr;
    params.part = (int)gk_ceil_div(params.p.n, VEC * S::CLUSTER) * VEC;
    params.inverse_n = 1.0f / (float)params.p.n;
    const gk_status status = launch<norm_bwd_ring_kernel<T, S>>(
        "gk_norm_bwd", ctx, dim3((unsigned)plan->tasks * S::CLUSTER), S::THREADS, S::BYTES, params,
        false, S::CLUSTER);
    return status == GK_OK ? norm_add_sums<float>(ctx, a, workspace, plan->tasks) : status;
}

template <class T, int LANES, int ITEMS, int GROUPS, int CLUSTER>
gk_status ring_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    if (a->kind == GK_LAYER_NORM)
        return ring_launch<T, Shape<LANES, ITEMS, GROUPS, CLUSTER, true>>(ctx, a, plan, workspace);
    return ring_launch<T, Shape<LANES, ITEMS, GROUPS, CLUSTER, false>>(ctx, a, plan, workspace);
}

template <class T, int LANES, int ITEMS, int GROUPS, int CLUSTER>
bool ring_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *plan) {
    typedef Shape<LANES, ITEMS, GROUPS, CLUSTER, true> Layer;
    typedef Shape<LANES, ITEMS, GROUPS, CLUSTER, false> Rms;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    if (!rows_fit(instance, a->h, &a->grad_out, a->grad_sum, &a->dx) ||
        !norm_vector_fits(a->weight))
        return false;
    if (a->weight && a->weight->dtype != a->h.dtype && !Layer::WIDE_WEIGHTS) return false;
    if (a->kind != GK_LAYER_NORM && a->dbias) return false;
    if (num_rows(a->h) > INT32_MAX || !smem_fits(ctx, RING + 8 * 1024)) return false;
    int64_t most = gk_gpu_of(ctx->index)->num_sms;
    if constexpr (CLUSTER > 1)
        most = a->kind == GK_LAYER_NORM
                   ? clusters_at_once<norm_bwd_ring_kernel<T, Layer>>(ctx, Layer::THREADS,
                                                                      Layer::BYTES, CLUSTER)
                   : clusters_at_once<norm_bwd_ring_kernel<T, Rms>>(ctx, Rms::THREADS, Rms::BYTES,
                                                                    CLUSTER);
    plan->tasks = gk_clamp_i64(num_rows(a->h), 1, most);
    plan->workspace_bytes = norm_sums_bytes(a, plan->tasks);
    return true;
}

/* The key is a RowKey. Its ROWS is the number of groups, because a block processes one row for
 * each. */
#define RING_SHAPE(T, DTYPE, NAME, LANES, ITEMS, GROUPS, CLUSTER, LEAST)         \
    {"norm_bwd_ring_sm90a_" NAME "_" #LANES "x" #ITEMS "x" #GROUPS "x" #CLUSTER, \
     DTYPE,                                                                      \
     ring_plan<T, LANES, ITEMS, GROUPS, CLUSTER>,                                \
     ring_run<T, LANES, ITEMS, GROUPS, CLUSTER>,                                 \
     {LANES * ITEMS * VEC * CLUSTER, GROUPS, CLUSTER, LEAST},                    \
     NULL},
/* Groups with 4 vectors a thread are faster than groups of twice the threads with 2 vectors
 * (layer_norm 8192 x 4096: 65.7 us instead of 68.4; 4096 x 8192: 65.3 instead of 72.5, H200). But
 * they refuse float32 weights. */
#ifndef RING_SHAPES
#define RING_SHAPES(T, DTYPE, NAME)                 \
    RING_SHAPE(T, DTYPE, NAME, 64, 2, 8, 1, 512)    \
    RING_SHAPE(T, DTYPE, NAME, 128, 2, 4, 1, 1024)  \
    RING_SHAPE(T, DTYPE, NAME, 128, 4, 4, 1, 2048)  \
    RING_SHAPE(T, DTYPE, NAME, 256, 2, 2, 1, 2048)  \
    RING_SHAPE(T, DTYPE, NAME, 256, 4, 2, 1, 4096)  \
    RING_SHAPE(T, DTYPE, NAME, 512, 2, 1, 1, 4096)  \
    RING_SHAPE(T, DTYPE, NAME, 512, 4, 1, 1, 8192)  \
    RING_SHAPE(T, DTYPE, NAME, 512, 4, 1, 2, 16384) \
    RING_SHAPE(T, DTYPE, NAME, 512, 4, 1, 4, 32768) \
    RING_SHAPE(T, DTYPE, NAME, 512, 4, 1, 8, 65536)
#endif

const gk_cuda_instance instances[] = {RING_SHAPES(__nv_bfloat16, GK_BF16, "bf16")
                                          RING_SHAPES(__half, GK_F16, "f16")};

/* Chooses the first instance that serves the call, if each group has at least two rows. With one
 * row there is nothing to overlap, and norm_bwd.cu starts faster. */
bool ring_choose(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    for (const gk_cuda_instance &i : instances)
        if (i.dtype == a->h.dtype && i.plan(&i, ctx, args, plan)) {
            plan->kernel = &i;
            return num_rows(a->h) >= 2 * i.key[RowKey::ROWS] * plan->tasks;
        }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_norm_bwd_ring_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, ring_choose};
