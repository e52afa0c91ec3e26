/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_latent_sm90a: latent attention (MLA, DeepSeek-V2 2024, arXiv:2405.04434) over a paged cache
 * on Hopper. The projections are absorbed into q and out. So there is one kv head, and its values
 * are the first 512 columns of its keys.
 *
 *  out[t] = sum_j softmax_j(scale q[t] k[j], sink) k[j][:512] v_scale,  j < hi(t)
 *
 * q [T, Hq, 576]; k_cache [num_blocks, block_size, 1, 576], v_cache a view of its first 512
 * columns; block_table [B, max_blocks], seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, 512],
 * lse [T, Hq]. FlashMLA (DeepSeek 2025) exchanges P between two warpgroups in the same way.
 *
 * Work split (latent_plan.cuh). A block takes 64 rows (tokens x heads) of a sequence and a range of
 * its keys. If a sequence has more than 64 rows, two neighbouring blocks take the same keys. That
 * is 2 to 3 % faster than a cluster of two with multicast. In a block two warpgroups multiply, and
 * one warp loads (latent_loop.cuh). A second kernel merges the tiles that were split. Its launch
 * overlaps the end of the first kernel.
 *
 * Refused, served by paged_attn_plain: other head_dims, values in a tensor of their own, 8-bit
 * caches, pages that are not a multiple of 16 keys, batch-invariant calls, left windows, kv_start,
 * softcap, ALiBi, k_scale, and a `scale` that is not above 0. */
#include "../../../core/paged.h"
#include "../../ptx/cluster.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "latent_loop.cuh"

namespace {

/* ---- 1. results ------------------------------------------------------------------------------ */
/* Writes out and lse of the rows of a tile without keys. */
template <class T>
__device__ __forceinline__ void write_no_keys(const LatentParams &a, const LatentTile &x,
                                              const LatentRows &rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int r = warp; r < min(LATENT_ROWS, rows.left); r += 4) {
        const int64_t at = (int64_t)x.s.q0 * a.p.heads_q + rows.in_sequence + r;
        uint4 *const out = (uint4 *)((T *)a.p.out + at * LATENT_DIM_V);
        for (int i = lane; i < LATENT_DIM_V / 8; i += 32) out[i] = make_uint4(0, 0, 0, 0);
        const int head = (rows.in_sequence + r) % a.p.heads_q;
        if (lane == 0 && a.p.lse) ((float *)a.p.lse)[at] = finish(a.p, head, -INFINITY, 0).lse;
    }
}

/* Transposes a 4 x 4 matrix of words. Before the call lane i of each quad holds column i,
 * afterwards row i. */
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
    const bool odd = threadIdx.x % 2, high = threadIdx.x % 4 / 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        (high ? w[i] : w[i + 2]) = got;
    }
}

/* Writes 256 columns of a row of out. A lane has columns 8 n + 2 (lane % 4) and the next one, in
 * o[4 n + 2 R] and o[4 n + 2 R + 1]. The lanes of a quad exchange values first, so that each lane
 * stores 16 bytes and the quad 64 consecutive bytes. `there` is false if the row does not exist. */
template <class T, int R>
__device__ __forceinline__ void write_out(T *out, const float (&o)[128], float factor, bool there) {
    uint4 *const to = (uint4 *)out + threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            w[i] = pack2<T>(o[4 * (n + i) + 2 * R] * factor, o[4 * (n + i) + 2 * R + 1] * factor);
        quad_transpose(w);
        if (there) to[n] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Writes columns 256 W .. 256 W + 255 of row R of a thread's two rows. If the worker has the whole
 * tile, they go to out and lse, otherwise to the worker's split. */
template <class T, int W, int R>
__device__ __forceinline__ void write_row_of(const LatentParams &a, const LatentTile &x,
                                             const LatentRows &rows, int worker, int rank,
                                             const float (&o)[128], float m, float sum) {
    const bool there = rows.at[R] < rows.left, leads = there && W == 0 && threadIdx.x % 4 == 0;
    if (x.whole()) {
        const int in_sequence = rows.in_sequence + rows.at[R];
        const int64_t at = (int64_t)x.s.q0 * a.p.heads_q + in_sequence;
        const RowResult f = finish(a.p, in_sequence % a.p.heads_q, m * LN_2, sum);
        write_out<T, R>((T *)a.p.out + at * LATENT_DIM_V + W * 256, o, f.factor, there);
        if (leads && a.p.lse) ((float *)a.p.lse)[at] = f.lse;
    } else {
        const int64_t at = ((worker * 2 + (x.t0 == 0)) * a.side + rank) * LATENT_ROWS + rows.at[R];
        float2 *const sums = (float2 *)(a.sums + at * LATENT_DIM_V + W * 256) + threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < 32; ++n)
            if (there) sums[4 * n] = make_float2(o[4 * n + 2 * R], o[4 * n + 2 * R + 1]);
        if (leads) a.stats[at] = make_float2(m, sum);
    }
}

/* ---- 2. the kernel --------------------------------------------------------------------------- */
template <class T, int W>
__device__ __forceinline__ void latent_consume(const LatentParams &a, const LatentShare &share,
                                               smem_addr smem_s, int worker, int rank) {
    typedef LatentSmem S;
    const float scale = (float)a.p.rules.scale * LOG2_E;
    LatentParity parity = {};
    LatentRecord record = {};
    unsigned turn = 0;
    float o[128];
    each_latent_tile(a, share, [&](const LatentTile &x) {
        LatentRows rows;
        rows.begin(a, x, rank);
        if (x.w.chunks == 0) {
            if (W == 0) write_no_keys<T>(a, x, rows);
            return;
        }
        if (x.t0 == 0 && x.t1 < x.w.chunks) { /* the first block of the worker writes the record */
            record.first_row = x.s.q0 * a.p.heads_q + rows.in_sequence;
            record.rows = min(rows.left, LATENT_ROWS * a.side);
        }
        if (x.t0 > 0 && x.t1 == x.w.chunks) record.ends = true;
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
        attend_chunks<T, W>(a, x, rows, smem_s, scale, parity, o, m, l);

        /* Adds the sums of both warpgroups. Tiles alternate between two buffers, so that one
         * barrier a tile is enough. */
        const smem_addr sums_s = smem_s + S::SUMS + 512 * turn;
        turn ^= 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = quad_sum(l[r]);
            if (threadIdx.x % 4 == 0) st_shared_f32(sums_s + 256 * W + rows.at[r] * 4, l[r]);
        }
        bar_sync(BAR_BOTH, 256);
        float sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            sum[r] = l[r] + ld_shared_f32(sums_s + 256 * (1 - W) + rows.at[r] * 4);
        write_row_of<T, W, 0>(a, x, rows, worker, rank, o, m[0], sum[0]);
        write_row_of<T, W, 1>(a, x, rows, worker, rank, o, m[1], sum[1]);
    });
    if (W == 0 && rank == 0 && threadIdx.x == 0) a.records[worker] = record;
}

constexpr int LATENT_THREADS = 384;

template <class T>
__global__ void __launch_bounds__(LATENT_THREADS, 1)
    paged_latent_sm90a_kernel(const __grid_constant__ LatentParams a) {
    typedef LatentSmem S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int rank = blockIdx.x % a.side, worker = blockIdx.x / a.side;
    if (threadIdx.x == 0) {
        for (int w = 0; w < 2; ++w) {
            for (int panel = 0; panel < LatentPanels::panels; ++panel)
                mbarrier_init(smem_s + S::FULL + S::FULL_OF_CHUNK * w + 8 * panel, 1);
            for (int part = 0; part < 3; ++part)
                mbarrier_init(smem_s + S::EMPTY + 24 * w + 8 * part, 4);
            mbarrier_init(smem_s + S::READY + 8 * w, 128);
        }
        mbarrier_init(smem_s + S::Q_FULL, 1);
        mbarrier_init(smem_s + S::Q_EMPTY, 8);
        fence_mbarrier_init();
        prefetch_tensormap(&a.q);
        prefetch_tensormap(&a.cache);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    LatentShare &share = *(LatentShare *)(smem + S::SHARE);
    if (threadIdx.x / 32 == 1) latent_plan(a, worker, &share);
    __syncthreads(); /* the barriers are initialised, the share is found */
    if (warpgroup == 2) {
        setmaxnreg_dec<latent_tiles::producer_registers>();
        if (threadIdx.x / 32 == 8) latent_produce(a, share, smem_s, rank);
    } else if (warpgroup == 0) {
        setmaxnreg_inc<latent_tiles::consumer_registers>();
        latent_consume<T, 0>(a, share, smem_s, worker, rank);
    } else {
        setmaxnreg_inc<latent_tiles::consumer_registers>();
        latent_consume<T, 1>(a, share, smem_s, worker, rank);
    }
}

/* ---- 3. the merge ---------------------------------------------------------------------------- */
/* The grid has a fixed number of blocks, which take tasks. A task is the work of a block's 16
 * warps.
 *
 * If a tile has few splits, each warp adds all splits of one, two or four quarters of a row, so
 * that it has eight loads in flight. If it has more than many_splits, the task is a quarter of one
 * row, and each warp adds every 16th split. */
constexpr int MERGE_WARPS = 16, MERGE_THREADS = MERGE_WARPS * 32;
constexpr int MERGE_QUARTER = LATENT_DIM_V / 4; /* columns: four for each lane */
constexpr int MERGE_WORKERS = 160;              /* the most workers: five for each lane of a warp */

struct LatentMerge {
    float4 sums[MERGE_WARPS - 1][MERGE_QUARTER / 4];
    float total[MERGE_WARPS - 1];
    LatentRecord records[MERGE_WORKERS];
    unsigned enders[MERGE_WORKERS / 32]; /* one bit for each worker whose record has `ends` */
    int last[MERGE_WORKERS];             /* the worker that ends the tile that worker i begins */
    int first_task[MERGE_WORKERS + 1];   /* first task of the tile that worker i begins */
};

/* Quarters of a row that a warp adds; 0: the 16 warps divide the splits of one quarter. */
__device__ __forceinline__ int quarters_of(int splits) {
    constexpr int most = latent_tiles::many_splits;
    return splits <= most / 4 ? 4 : splits <= most / 2 ? 2 : splits <= most ? 1 : 0;
}

__device__ __forceinline__ int tasks_of(int rows, int splits) {
    const int quarters = quarters_of(splits), rows_at_once = MERGE_WARPS / 4 * quarters;
    return quarters ? (rows + rows_at_once - 1) / rows_at_once : rows * 4;
}

/* Finds the tiles that were split and numbers their tasks. All threads. */
__device__ __forceinline__ void find_tasks(const LatentParams &a, LatentMerge &m) {
    const int i = threadIdx.x, lane = i % 32;
    if (i < MERGE_WORKERS) {
        LatentRecord record = {};
        if (i < a.workers) record = a.records[i];
        m.records[i] = record;
        const unsigned ends = __ballot_sync(0xffffffffu, record.ends);
        if (lane == 0) m.enders[i / 32] = ends;
    }
    __syncthreads(); /* the records are read */
    if (i < MERGE_WORKERS) {
        int last = i;
        for (int word = i / 32; m.records[i].rows > 0 && word < MERGE_WORKERS / 32; ++word) {
            unsigned ends = m.enders[word];
            if (word == i / 32) ends &= lane == 31 ? 0u : ~0u << (lane + 1);
            if (!ends) continue;
            last = word * 32 + __ffs(ends) - 1;
            break;
        }
        m.last[i] = last;
        m.first_task[i + 1] = tasks_of(m.records[i].rows, last - i + 1);
    }
    if (i == 0) m.first_task[0] = 0;
    __syncthreads(); /* each tile's tasks are counted */
    constexpr int each = MERGE_WORKERS / 32;
    if (i < 32) {
        int count[each], sum = 0;
        for (int n = 0; n < each; ++n) sum += count[n] = m.first_task[i * each + n + 1];
        int upto = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += left;
        }
        upto -= sum;
        for (int n = 0; n < each; ++n) m.first_task[i * each + n + 1] = upto += count[n];
    }
    __syncthreads(); /* the tasks are numbered */
}

/* A tile that was split. Worker `first` begins it. */
struct LatentSplits {
    const LatentParams &a;
    LatentRecord record;
    int first, count;

    /* index of a row of a split in sums and stats */
    __device__ __forceinline__ int64_t at(int split, int row) const {
        /* a worker's half 1 is the split that begins a tile, half 0 one that continues or ends it
         */
        const int half = split == 0;
        return ((int64_t)((first + split) * 2 + half) * a.side + row / LATENT_ROWS) * LATENT_ROWS +
               row % LATENT_ROWS;
    }
};

/* The sum of some quarters of a row over some of its splits. peak: the row's maximum in log2.
 */
template <int QUARTERS> struct LatentSums {
    float4 sums[QUARTERS];
    float total, peak;

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int j = 0; j < QUARTERS; ++j) sums[j] = make_float4(0, 0, 0, 0);
        total = 0;
        peak = -INFINITY;
    }

    /* Adds COUNT splits from `from` on, in steps of `step`. All loads are issued before the first
     * value is used. quad: the lane's four columns of the first quarter. If KNOWN, peak was set
     * before. Otherwise the call covers all splits of the row, and sets peak. */
    template <int COUNT, bool KNOWN>
    __device__ __forceinline__ void add(const LatentSplits &x, int row, int from, int step,
                                        int quad) {
        float2 stats[COUNT];
        float4 y[COUNT][QUARTERS];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int split = from + i * step;
            const int64_t at = x.at(split, row);
            stats[i] = make_float2(-INFINITY, 0);
            if (split < x.count) stats[i] = x.a.stats[at];
#pragma unroll
            for (int j = 0; j < QUARTERS; ++j) {
                y[i][j] = make_float4(0, 0, 0, 0);
                if (split < x.count)
                    y[i][j] = ((const float4 *)(x.a.sums + at * LATENT_DIM_V))[quad + 32 * j];
            }
        }
#pragma unroll
        for (int i = 0; !KNOWN && i < COUNT; ++i) peak = fmaxf(peak, stats[i].x);
        const float base = peak == -INFINITY ? 0.f : peak;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float factor = ex2_approx_ftz(stats[i].x - base);
            total += factor * stats[i].y;
#pragma unroll
            for (int j = 0; j < QUARTERS; ++j) add_4(sums[j], y[i][j], factor);
        }
    }

    template <class T>
    __device__ __forceinline__ void write(const LatentSplits &x, int row, int quad) const {
        const Paged &p = x.a.p;
        const int64_t to = x.record.first_row + row;
        const RowResult f = finish(p, (int)(to % p.heads_q), peak * LN_2, total);
#pragma unroll
        for (int j = 0; j < QUARTERS; ++j)
            store_4<T>((T *)p.out + to * LATENT_DIM_V + (quad + 32 * j) * 4, sums[j], f.factor);
        if (quad == 0 && p.lse) ((float *)p.lse)[to] = f.lse;
    }
};

/* A task of a tile with few splits: each warp merges QUARTERS quarters of a row. */
template <class T, int QUARTERS>
__device__ __forceinline__ void merge_few(const LatentSplits &x, int task) {
    constexpr int warps_of_row = 4 / QUARTERS;
    const int warp = threadIdx.x / 32;
    const int row = (task * MERGE_WARPS + warp) / warps_of_row;
    const int quad = warp % warps_of_row * QUARTERS * 32 + threadIdx.x % 32;
    if (row >= x.record.rows) return;
    LatentSums<QUARTERS> all;
    all.begin();
    all.template add<latent_tiles::many_splits / QUARTERS, false>(x, row, 0, 1, quad);
    all.template write<T>(x, row, quad);
}

/* A task of a tile with many splits: the warps divide the splits of a quarter of a row. */
template <class T>
__device__ __forceinline__ void merge_many(const LatentSplits &x, int task, LatentMerge &shared) {
    constexpr int at_once = 5;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = task / 4, quad = task % 4 * 32 + lane;
    LatentSums<1> all;
    all.begin();
#pragma unroll
    for (int i = 0; i < MERGE_WORKERS / 32; ++i)
        if (lane + 32 * i < x.count)
            all.peak = fmaxf(all.peak, x.a.stats[x.at(lane + 32 * i, row)].x);
    all.peak = warp_max(all.peak);
#pragma unroll 1
    for (int from = warp; from < x.count; from += MERGE_WARPS * at_once)
        all.template add<at_once, true>(x, row, from, MERGE_WARPS, quad);
    if (warp > 0) {
        shared.sums[warp - 1][lane] = all.sums[0];
        if (lane == 0) shared.total[warp - 1] = all.total;
    }
    __syncthreads(); /* the warps' sums are written */
    if (warp == 0) {
#pragma unroll
        for (int other = 0; other < MERGE_WARPS - 1; ++other) {
            add_4(all.sums[0], shared.sums[other][lane], 1);
            all.total += shared.total[other];
        }
        all.template write<T>(x, row, quad);
    }
    __syncthreads(); /* the warps' sums are read */
}

template <class T>
__global__ void __launch_bounds__(MERGE_THREADS, latent_tiles::merge_blocks)
    paged_latent_merge_kernel(const LatentParams a) {
    __shared__ LatentMerge shared;
    griddepcontrol_wait();
    const int blocks = (int)gridDim.x - a.token_blocks;
    if ((int)blockIdx.x >= blocks) {
        clear_unowned_token<T>(a.p,
                               ((int)blockIdx.x - blocks) * MERGE_WARPS + (int)threadIdx.x / 32);
        return;
    }
    find_tasks(a, shared);
    for (int task = blockIdx.x; task < shared.first_task[MERGE_WORKERS]; task += blocks) {
        int w = 0; /* the worker that begins the tile: the last one with first_task[w] <= task */
#pragma unroll
        for (int step = 128; step > 0; step /= 2)
            if (w + step < MERGE_WORKERS && shared.first_task[w + step] <= task) w += step;
        const LatentSplits x = {a, shared.records[w], w, shared.last[w] - w + 1};
        const int in_tile = task - shared.first_task[w], quarters = quarters_of(x.count);
        if (quarters == 4)
            merge_few<T, 4>(x, in_tile);
        else if (quarters == 2)
            merge_few<T, 2>(x, in_tile);
        else if (quarters == 1)
            merge_few<T, 1>(x, in_tile);
        else
            merge_many<T>(x, in_tile, shared);
    }
}

/* ---- 4. launch ------------------------------------------------------------------------------- */
struct LatentPlan {
    Paged p;
    int workers, side, page_box, q_box; /* as in LatentParams */
    bool q_flat;
    int64_t records_bytes, stats_bytes;
};

/* The TMA shape of rows of 576 columns. Dimensions: columns of a panel, rows, panels, and pages or
 * tokens. */
TensorShape latent_shape(const gk_tensor &t, int64_t rows, int64_t row_step, int64_t outer,
                         int64_t outer_step) {
    TensorShape x = {};
    x.data = t.data;
    x.dtype = t.dtype;
    x.size[0] = 64;
    x.size[1] = rows;
    x.size[2] = LATENT_DIM / 64;
    x.size[3] = outer;
    x.size[4] = 1;
    x.stride[1] = row_step;
    x.stride[2] = 64;
    x.stride[3] = outer_step;
    return x;
}

TensorShape cache_shape(const gk_tensor &t) {
    return latent_shape(t, t.shape[1], t.stride[1], t.shape[0], t.stride[0]);
}

/* flat: tokens and heads are one dimension, which the strides must allow. */
TensorShape q_shape(const gk_tensor &t, bool flat) {
    const int64_t tokens = t.shape[0], heads = t.shape[1];
    if (!flat) return latent_shape(t, heads, t.stride[1], tokens, t.stride[0]);
    return latent_shape(t, tokens * heads, heads == 1 ? t.stride[0] : t.stride[1], 1, 1);
}

bool plain_rules(const gk_paged_attn_args *a) {
    const gk_attn_rules &r = a->rules;
    return r.window_left < 0 && !r.kv_start && !r.alibi_slopes && r.softcap == 0 && !a->k_scale &&
           r.scale > 0 && (float)r.scale > 0;
}

bool plan_latent(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const gk_tensor &q = a->q, &cache = a->k_cache;
    const int64_t tokens = q.shape[0], heads = q.shape[1], batch = a->seq_lens.shape[0];
    if (q.shape[2] != LATENT_DIM || a->v_cache.shape[3] != LATENT_DIM_V || cache.shape[2] != 1 ||
        cache.dtype != instance->dtype || !gk_is_latent(a) || !plain_rules(a))
        return false;
    if (cache.shape[1] % 16 != 0 || cache.shape[0] >= INT32_MAX || tokens * heads > INT32_MAX ||
        !in_16_bytes(a->out) || !smem_fits(ctx, LatentSmem::total))
        return false;
    LatentPlan &own = gk_own<LatentPlan>(to);
    own = {};
    own.p = paged_of(ctx, a);
    own.page_box = cache.shape[1] % 64 == 0 ? 64 : cache.shape[1] % 32 == 0 ? 32 : 16;
    own.q_flat = heads == 1 || tokens <= 1 || q.stride[0] == heads * q.stride[1];
    own.q_box = own.q_flat ? 64 : (int)gk_min_i64(heads, 64);
    /* a box of q holds heads of one token only */
    if (!own.q_flat && (64 % own.q_box != 0 || heads % own.q_box != 0)) return false;
    if (tokens > 0 && heads > 0 && !tensor_map_fits(q_shape(q, own.q_flat))) return false;
    if (!tensor_map_fits(cache_shape(cache))) return false;
    own.side = own.p.seq_q * heads > LATENT_ROWS ? 2 : 1;
    own.workers = gk_gpu_of(ctx->index)->num_sms / own.side;
    if (own.workers < 1 || own.workers > MERGE_WORKERS) return false;
    /* the kernel counts the list's weight in 32 bits */
    const int64_t weight = own.p.capacity / LATENT_KEYS + 1 + latent_tiles::tile_cost;
    const int64_t groups = own.p.seq_q * heads / (LATENT_ROWS * own.side) + 1;
    if (batch * groups > INT32_MAX || batch * groups * weight > INT32_MAX) return false;
    const int64_t rows = (int64_t)own.workers * 2 * own.side * LATENT_ROWS;
    own.records_bytes = gk_round_up(own.workers * (int64_t)sizeof(LatentRecord), 64);
    own.stats_bytes = rows * (int64_t)sizeof(float2);
    to->workspace_bytes = (size_t)(own.records_bytes + own.stats_bytes + rows * LATENT_DIM_V * 4);
    to->tile[0] = LATENT_ROWS;
    to->tile[1] = LATENT_KEYS;
    to->tasks = own.workers * own.side;
    to->waves = 1;
    return true;
}

template <class T>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const char *const op = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const LatentPlan &own = gk_own<LatentPlan>(plan);
    if (own.p.tokens == 0 || own.p.heads_q == 0) return GK_OK;
    LatentParams x = {};
    x.p = own.p;
    x.q_box = own.q_box;
    x.q_flat = own.q_flat;
    x.page_box = own.page_box;
    x.box_bits = own.page_box == 64 ? 6 : own.page_box == 32 ? 5 : 4;
    x.workers = own.workers;
    x.side = own.side;
    x.records = (LatentRecord *)workspace;
    x.stats = (float2 *)((char *)workspace + own.records_bytes);
    x.sums = (float *)((char *)x.stats + own.stats_bytes);
    const int merges = gk_gpu_of(ctx->index)->num_sms * latent_tiles::merge_blocks;
    x.token_blocks = x.p.cu_q ? (int)gk_ceil_div(x.p.tokens, MERGE_WARPS) : 0;
    const TensorShape cache = cache_shape(a->k_cache), q = q_shape(a->q, own.q_flat);
    const int q_panels = own.q_box == 64 ? 3 : 1; /* panels in a box */
    gk_status status = make_tensor_map(op, q, wgmma_box(2, own.q_box, q_panels), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, cache, wgmma_box(2, own.page_box), &x.cache);
    if (status != GK_OK) return status;
    status = launch<paged_latent_sm90a_kernel<T>>(op, ctx, dim3(own.workers * own.side),
                                                  LATENT_THREADS, LatentSmem::total, x, true);
    if (status != GK_OK) return status;
    return launch<paged_latent_merge_kernel<T>>(op, ctx, dim3(merges + x.token_blocks),
                                                MERGE_THREADS, 0, x, true);
}

const gk_cuda_instance instances[] = {
    {"paged_latent_sm90a_bf16", GK_BF16, plan_latent, run<__nv_bfloat16>, {0}, NULL},
    {"paged_latent_sm90a_f16", GK_F16, plan_latent, run<__half>, {0}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_paged_latent_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
