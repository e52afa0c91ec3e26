/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_sm90a: attention of a few query tokens a sequence over a paged cache, on Hopper. q has
 * 16 bits; pages have q's dtype or 8-bit codes. Reading the cache bounds the time.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale
 *  with j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D]; block_table [B, max_blocks],
 * seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, D], lse [T, Hq]. Pages: Kwon et al. 2023;
 * online softmax: Milakov and Gimelshein 2018.
 *
 * Work split. The kernel has three forms, and choose_ranks picks one from the shapes.
 *
 *  list      One block of 8 warps on each SM. The chunks of keys of all tiles form one list
 *            (paged_plan.cuh), and each block takes an equal share of it. The last block of a tile
 *            merges its splits (paged_join.cuh). For any lengths and any number of tokens.
 *  clusters  A cluster of 2, 4 or 8 blocks for each sequence and kv head. Its blocks exchange sums
 *            through shared memory, so there is one launch and no workspace. For few sequences, and
 *            for many long ones.
 *  tiles     A block of 4 warps for each sequence and kv head, with three or more blocks on an SM.
 *            There is no scan of the lengths, no split and no merge. For many sequences with short
 *            block tables.
 *
 * A batch-invariant call takes clusters of eight for any batch. If a sequence has too many rows for
 * a cluster, the call takes the list, without splitting a tile.
 *
 * Each warp works alone. It has its own ring of TMA boxes (paged_stream.cuh), and its own maximum
 * and sums (paged_step.cuh). A step of a warp is: wait for the keys; S^T = K Q^T; update the
 * maximum if needed; P; O^T += V^T P^T; refill the ring.
 *
 * Refused: pages that are not a multiple of 16 keys; Dv != D; 16-bit pages of a head_dim other than
 * 64 and 128, which paged_attn_sm80 serves; codes of a head_dim that is no multiple of 16 or more
 * than 256, which paged_attn_plain serves. */
#include "../../ptx/griddepcontrol.cuh"
#include "paged_join.cuh"
#include "paged_step.cuh"

namespace {

/* ---- 1. results ------------------------------------------------------------------------------ */
/* Columns are merged in quads, groups of four. quads_of is the number of quads of a row, and
 * line_of the row of quad i of a tile. */
template <class Pages> __device__ __forceinline__ int quads_of(const StreamParams &a) {
    return Pages::CODES ? (int)a.of_quads.by : Pages::HEAD_DIM / 4;
}
template <class Pages> __device__ __forceinline__ int line_of(const StreamParams &a, int i) {
    return Pages::CODES ? (int)a.of_quads.into(i) : i / (Pages::HEAD_DIM / 4);
}

/* The blocks of a cluster divide the tile's `total` quads: block r merges quads r, r + ranks, and
 * so on. Returns the number of this block's quads. */
__device__ __forceinline__ int owned_quads(const StreamParams &a, int total) {
    return (total - (int)blockIdx.x + a.ranks - 1) >> a.ranks_log2;
}

/* Merges the sums of the block's warps through shared memory, eight rows at a time. Writes the
 * result to out, to the workspace if it is a split, or to the block of the cluster that merges
 * those columns. */
template <class T, class Pages, int N, bool CLUSTERS>
__device__ __forceinline__ void finish_share(const StreamParams &a, const TileShare &x,
                                             RowsOf<Pages, N> &r, unsigned char *smem,
                                             const SmemMap &map, const Team &team) {
    constexpr int PITCH = Pages::HEAD_DIM + 4;
    const int quads = quads_of<Pages>(a);
    const Call &c = a.c;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = x.last_row - x.row0 + 1;
    const bool sends = CLUSTERS && a.ranks > 1;
    const int per_rank = (rows * quads + a.ranks - 1) >> a.ranks_log2;
    float *const o_s = (float *)(smem + map.o);
    float2 *const stats_s = (float2 *)(smem + map.stats);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int rows_here = min(rows - n * 8, 8);
        if (n > 0 && rows_here <= 0) break; /* the same in all threads */
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = warp * 8 + lane % 4 * 2 + e;
            const float all = octet_sum(r.sum[n][e]);
            if (lane < 4) stats_s[row] = make_float2(r.peak[n][e] * LN_2, all);
            if (row % 8 >= rows_here) continue;
#pragma unroll
            for (int i = 0; i < Pages::STEPS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    o_s[row * PITCH + Pages::out_col(i, half, lane)] =
                        r.o[i][n][half * 2 + e] * r.v_base;
        }
        team.sync(); /* the sums are written */
        for (int i = team.thread; i < team.heads * rows_here * quads; i += team.threads) {
            const int line = line_of<Pages>(a, i), quad = i - line * quads,
                      its_head = CLUSTERS ? 0 : line / rows_here;
            const int block_head = team.head0 + its_head, row = line - its_head * rows_here;
            const int from = block_head * 8 + row, step = c.block_heads * 8;
            const int count = a.warps / c.block_heads;
            const Merged all = CLUSTERS || count > 4
                                   ? merge_4_at_once<LIST_WARPS>(stats_s + from, step,
                                                                 o_s + from * PITCH + quad * 4,
                                                                 step * PITCH, count)
                                   : merge_4<1>(stats_s + from, step, o_s + from * PITCH + quad * 4,
                                                step * PITCH, count);
            const int row_of_tile = n * 8 + row;
            if (sends) {
                const int quad_of_tile = row_of_tile * quads + quad,
                          owner = quad_of_tile & (a.ranks - 1);
                const uint32_t inbox = mapa(cvta_to_shared(smem + map.inbox), owner);
                const uint32_t barrier = mapa(cvta_to_shared(smem + map.inbox_barrier), owner);
                const uint32_t to =
                    inbox + ((int)blockIdx.x * per_rank + (quad_of_tile >> a.ranks_log2)) * 32;
                st_async_128(to, all.y.x, all.y.y, all.y.z, all.y.w, barrier);
                st_async_128(to + 16, all.row.peak, all.row.sum, 0, 0, barrier);
            } else if (CLUSTERS || x.whole) {
                write_row<T>(a, x, x.head_set * c.block_heads + block_head, x.row0 + row_of_tile,
                             quad * 4, all);
            } else {
                const int64_t split =
                    ((int64_t)blockIdx.x * 2 + !x.leading) * c.block_heads + block_head;
                const int64_t at = split * c.lanes + row_of_tile;
                *(float4 *)(c.sums + at * quads * 4 + quad * 4) = all.y;
                if (quad == 0) c.stats[at] = make_float2(all.row.peak, all.row.sum);
            }
        }
        team.sync(); /* the sums are read */
    }
}

/* Merges the sums that all blocks of the cluster have sent to this block, in the order of ranks,
 * and writes out. */
template <class T, class Pages>
__device__ __forceinline__ void receive(const StreamParams &a, const TileShare &x,
                                        unsigned char *smem, const SmemMap &map) {
    const int rank = blockIdx.x, total = (x.last_row + 1) * quads_of<Pages>(a),
              per_rank = (total + a.ranks - 1) >> a.ranks_log2;
    mbarrier_wait(cvta_to_shared(smem + map.inbox_barrier), 0);
    const float *const inbox = (const float *)(smem + map.inbox);
    for (int i = threadIdx.x; i < owned_quads(a, total); i += blockDim.x) {
        const int quad_of_tile = (i << a.ranks_log2) + rank, row = line_of<Pages>(a, quad_of_tile);
        const float *const its = inbox + i * 8;
        const Merged all = merge_4_at_once<paged_hopper::most_ranks>(
            (const float2 *)(its + 4), per_rank * 4, its, per_rank * 8, a.ranks);
        write_row<T>(a, x, x.head_kv, row, (quad_of_tile - row * quads_of<Pages>(a)) * 4, all);
    }
}

/* ---- 2. the kernel --------------------------------------------------------------------------- */
template <class Pages, int N, bool CLUSTERS>
constexpr int BLOCKS_AN_SM = CLUSTERS && !Pages::CODES && Pages::HEAD_DIM == 64 && N == 1 ? 2 : 1;

/* Prefetches into L2 what a cluster's first loads will read. The previous kernel may still be
 * writing that data. This is safe, because no value is returned. */
template <class Pages> __device__ __forceinline__ void prefetch_tile(const StreamParams &a) {
    const Paged &p = a.c.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = a.first_b + blockIdx.z;
    const int *entry;
    if (Loader<Pages, true>::early_place(a, &entry) >= 0) prefetch_l2(entry);
    if (threadIdx.x == 0) prefetch_l2(p.lens + b * p.lens_step);
    if (warp == 1 && !p.cu_q) {
        constexpr int LINES = (Pages::HEAD_DIM * 2 + 127) / 128;
        for (int i = lane; i < p.seq_q * p.group * LINES; i += 32) {
            if (i % LINES * 64 >= p.head_dim) continue;
            const int row = i / LINES, token = token_of(a, row);
            prefetch_l2((const uint16_t *)p.q.data + (b * p.seq_q + token) * p.q.row +
                        ((int)blockIdx.y * p.group + row - token * p.group) * p.q.head +
                        i % LINES * 64);
        }
    }
}

template <class T, class Pages, int N, bool CLUSTERS>
__global__ void __launch_bounds__(LIST_WARPS * 32, BLOCKS_AN_SM<Pages, N, CLUSTERS>)
    paged_attn_sm90a_kernel(const __grid_constant__ StreamParams a) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Call &c = a.c;
    const Paged &p = c.p;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const SmemMap &map = a.map;
    const smem_addr smem_s = cvta_to_shared(smem),
                    barriers_s = smem_s + map.barriers + warp * a.stages * 8;
    if (lane == 0) {
        for (int i = 0; i < a.stages; ++i) mbarrier_init(barriers_s + i * 8, 1);
        if (warp == 0) mbarrier_init(smem_s + map.inbox_barrier, 1);
        fence_mbarrier_init();
        prefetch_tensormap(&a.k);
        prefetch_tensormap(&a.v);
    }
    __syncwarp(); /* the warp's barriers are initialised */
    typedef Chunks<LIST_WARPS, int> Plan;
    Plan &plan = *(Plan *)(smem + map.chunks);
    if constexpr (CLUSTERS) {
        prefetch_tile<Pages>(a);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        /* announces that this block's inbox barriers are initialised */
        if (a.ranks > 1) barrier_cluster_arrive();
    } else {
        /* A plain call is planned before the previous kernel has ended, although that kernel may
         * still write the lengths. After the wait, the block plans again if its lengths have
         * changed. */
        const bool early = a.plain && p.batch <= LIST_WARPS * 32;
        int length = 0;
        bool works = false;
#pragma unroll 1
        for (int round = early ? 0 : 1; round < 2; ++round) {
            if (round == 1) {
                griddepcontrol_wait();
                griddepcontrol_launch_dependents();
            }
            int cost;
            if (early) {
                const int now = own_length(a);
                if (round == 1 && !__syncthreads_or(now != length)) break;
                length = now;
                cost = threadIdx.x < p.batch ? plain_tiles(a) * plain_cost_of_tile(a, now) : 0;
            } else {
                cost = (int)own_cost(c);
            }
            works = find_chunks<LIST_WARPS, int>(c, plan, cost);
            if (round == 0 && works) prefetch_share<Pages>(a, plan);
        }
        if (!works) return;
    }

    typedef Loader<Pages, CLUSTERS> Ring;
    Ring loader;
    loader.begin(a, plan, smem_s + warp * a.stages * Ring::stage_bytes, barriers_s,
                 smem_s + map.scales + warp * a.stages * 16);
    Share share;
    Source<Pages::KEYS> source;
    if constexpr (CLUSTERS) {
        if (a.plain)
            plain_share<Pages::KEYS>(a, share);
        else
            cluster_share<Pages::KEYS>(a, share);
        loader.take(a, share);
    } else {
        source.begin(plan);
    }
    loader.fill(a, plan);
    if constexpr (CLUSTERS)
        if (a.plain) cluster_share<Pages::KEYS>(a, share);
    const bool alone = !CLUSTERS && c.block_heads == LIST_WARPS;
    const Team team = {alone ? lane : (int)threadIdx.x, alone ? 32 : (int)blockDim.x,
                       alone ? warp : 0, alone ? 1 : c.block_heads};
    int stage = 0;
    unsigned parity = 0;
    RowsOf<Pages, N> rows;
    while (CLUSTERS || source.next(a, plan, share)) {
        const TileShare &x = share.x;
        rows.template begin<T>(a, x);
#pragma unroll 1
        for (int step = x.step0; step < x.steps; ++step) {
            __syncwarp(); /* the scales that lane 0 stored are visible */
            mbarrier_wait(barriers_s + stage * 8, parity);
            attend_step<Pages, N>(a, x, rows, loader.ring_s + stage * Ring::stage_bytes,
                                  loader.scales_s + stage * 16, x.first_key + step * share.stride,
                                  loader.here >> 2 * stage & 3);
            __syncwarp(); /* all lanes have read the stage */
            --loader.on_the_way;
            loader.fill(a, plan);
            if (++stage == a.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (CLUSTERS && a.ranks > 1) {
            if (threadIdx.x == 0)
                mbarrier_arrive_expect_tx(smem_s + map.inbox_barrier,
                                          owned_quads(a, (x.last_row + 1) * quads_of<Pages>(a)) *
                                              a.ranks * 32);
            barrier_cluster_wait();
        }
        if (CLUSTERS) __syncthreads(); /* every warp has read its ring, which O overwrites next */
        finish_share<T, Pages, N, CLUSTERS>(a, x, rows, smem, map, team);
        if (CLUSTERS) {
            if (a.ranks > 1) receive<T, Pages>(a, x, smem, map);
            return;
        } else if (!x.whole) {
            join_splits<T>(a, x, share.own / plan.share,
                           (share.own + share.chunks - 1) / plan.share, team);
        }
    }
}

/* ---- 3. launch ------------------------------------------------------------------------------- */
struct StreamPlan {
    Planned planned;
    int ranks, boxes; /* as in StreamParams */
};

/* The TMA shape of a cache. Dimensions: columns of a panel, keys, panels, heads, pages. Pages of
 * codes have a single panel of head_dim columns; wide ones are read by two copies. */
template <class Pages> TensorShape pages_shape(const gk_tensor &t) {
    const int64_t cols = Pages::CODES ? t.shape[3] : Pages::COLS;
    TensorShape x = {};
    x.data = t.data;
    x.dtype = t.dtype;
    x.size[0] = cols;
    x.size[1] = t.shape[1];
    x.size[2] = t.shape[3] / cols;
    x.size[3] = t.shape[2];
    x.size[4] = t.shape[0];
    x.stride[1] = t.stride[1];
    x.stride[2] = cols;
    x.stride[3] = t.stride[2];
    x.stride[4] = t.stride[0];
    return x;
}

CodeScale page_scale(const gk_tensor *t) { return t && t->ndim == 2 ? code_scale(t) : CodeScale(); }

/* True if a block of the list takes several neighbouring kv heads. */
template <class Pages> bool side_by_side(const gk_paged_attn_args *a) {
    const int64_t rows = paged_seq_q(a) * (a->q.shape[1] / a->k_cache.shape[2]);
    return Pages::CODES && rows <= 8 && a->seq_lens.shape[0] >= paged_hopper::side_by_side_batch;
}

/* Returns 2, 4 or 8 for clusters of that many blocks, 1 for tiles, 0 for the list. The choice
 * depends on shapes only: the lengths are on the device, and the host knows only their limit
 * `capacity`. Launching both kernels and leaving the choice to the device costs more than it gains
 * (measured: 3 us at 6 x 9k, 9 us at 200 x 1.2k, H200). */
template <class Pages> int choose_ranks(const gk_context *ctx, const Paged &p) {
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const float keys = (float)p.capacity,
                key_bytes = 2.f * (float)p.head_dim * (Pages::CODES ? 1 : 2);
    const float of_device = paged_hopper::share_of_peak * (float)gpu->memory_gbs;
    const float of_sm =
        Pages::CODES ? paged_hopper::sm_code_bytes_per_ns : paged_hopper::sm_bytes_per_ns;
    const float slack = Pages::CODES ? paged_hopper::code_slack_ns : paged_hopper::slack_ns;
    const bool wide = !Pages::CODES && p.seq_q * p.group > 8; /* tiles of 16 rows */
    const float list_costs =
        wide ? paged_hopper::list_costs_ns_16_rows : paged_hopper::list_costs_ns;
    const int64_t tiles = (int64_t)p.batch * p.heads_kv;
    /* the list's time per key of one sequence, in ns, without the cost of splits */
    const float of_list = key_bytes * (float)p.heads_kv / of_device;
    int least = 1;
    for (int n = 2; n <= paged_hopper::most_ranks; n *= 2)
        if (tiles * n <= (n == 2 ? gpu->num_sms : gpu->num_sms / 2)) least = n;
    for (int n = least; n <= paged_hopper::most_ranks; n *= 2) {
        if (n == 2 && least < 2) continue; /* a block of a pair fills an SM */
        /* Clusters of eight that need more than half of the SMs are slower than the list: 164 us
         * instead of 134 at 2 x 64k, 140 instead of 134 at 4 x 32k (H200). */
        if (n > 4 && least < n) break;
        /* with 16 rows an SM holds one block of a cluster, so nothing hides its start and end */
        if (n > least && p.seq_q * p.group > 8) break;
        /* with an SM limit, the list keeps to it */
        if (gk_sm_limit() > 0 && tiles * n > gpu->num_sms) break;
        const int on_sm = n == 1 ? paged_hopper::tiles_an_sm : n == 2 ? 1 : 2;
        const float at_once = (float)gk_min_i64(tiles * n, on_sm * gpu->num_sms);
        const float of_block = n == 1 ? of_sm / 2 : of_sm; /* tiles have half the warps */
        const float of_six = wide && n > 2 ? paged_hopper::sm_bytes_per_ns_16_rows : of_block;
        /* time per key if all sequences are full, and if one full sequence is among empty ones */
        const float full = key_bytes / (float)n / min(of_six, of_device / at_once),
                    alone = key_bytes / (float)n / of_block;
        if (keys * (full - (float)p.batch * of_list) <= list_costs &&
            keys * (alone - of_list) <= slack)
            return n;
        if (Pages::CODES) break;
    }
    return 0;
}

constexpr int MOST_BLOCKS_YZ = 65535; /* of a grid along y and along z */

template <class Pages>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const int64_t head_dim = a->q.shape[2];
    const bool fits = Pages::CODES ? head_dim <= Pages::HEAD_DIM && head_dim % 16 == 0
                                   : head_dim == Pages::HEAD_DIM;
    if (a->k_cache.dtype != Pages::stored || !fits || a->v_cache.shape[3] != head_dim ||
        a->k_cache.shape[1] % 16 != 0 || a->k_cache.shape[0] >= INT32_MAX ||
        !serves(instance, ctx, a) || !tensor_map_fits(pages_shape<Pages>(a->k_cache)) ||
        !tensor_map_fits(pages_shape<Pages>(a->v_cache)))
        return false;
    StreamPlan &own = gk_own<StreamPlan>(to);
    own = {};
    gk_cuda_instance as_planned = *instance;
    /* sizes_of takes the largest number of kv heads of a block from this key: 1 unless a block
     * takes neighbouring heads */
    const bool fixed = a->flags & GK_PAGED_BATCH_INVARIANT;
    if (fixed || !side_by_side<Pages>(a)) as_planned.key[PagedKey::WARPS] = 1;
    const Sizes &z = own.planned.sizes = sizes_of(&as_planned, ctx, a);
    Call &c = own.planned.call;
    c.p = paged_of(ctx, a);
    c.block_heads = z.block_heads;
    c.head_sets = c.p.heads_kv / z.block_heads;
    c.blocks = z.blocks;
    c.lanes = instance->key[PagedKey::LANES];
    c.chunk_keys = Pages::KEYS * (LIST_WARPS / z.block_heads);
    own.boxes = a->k_cache.shape[1] % Pages::KEYS == 0 ? 1 : Pages::KEYS / 16;
    if (a->k_scale && a->k_scale->ndim == 2) c.p.k_scale = NULL;
    if (a->v_scale && a->v_scale->ndim == 2) c.p.v_scale = NULL;

    const int64_t tiles = (int64_t)c.p.batch * c.p.heads_kv;
    const int64_t rows = c.p.seq_q * c.p.group;
    /* clusters and tiles are a grid [batch][heads_kv] */
    const bool in_clusters = rows <= c.lanes && c.p.heads_kv <= MOST_BLOCKS_YZ;
    /* In a batch-invariant call the split of a sequence must not depend on the others: clusters of
     * one size, in several launches if there are many sequences, or whole tiles. */
    own.ranks = !in_clusters                  ? 0
                : fixed                       ? paged_hopper::fixed_ranks
                : c.p.batch <= MOST_BLOCKS_YZ ? choose_ranks<Pages>(ctx, c.p)
                                              : 0;
    /* the list counts chunks in 32 bits */
    const int64_t chunks_of_tile = c.p.capacity / c.chunk_keys + 1 + TILE_COST;
    if (own.ranks == 0 &&
        gk_ceil_div(rows, c.lanes) * tiles / z.block_heads * chunks_of_tile > INT32_MAX)
        return false;
    c.whole_tiles = fixed && own.ranks == 0;
    /* for 16-bit pages and many small tiles, paged_attn_sm80 is as fast as the list or faster */
    const bool small = Pages::HEAD_DIM == 64
                           ? c.p.batch >= paged_hopper::narrow_batch
                           : rows <= 8 && (c.p.group == 1 || c.p.batch > paged_hopper::wide_batch);
    if (!Pages::CODES && own.ranks == 0 && small && !fixed) return false;
    to->tile[0] = instance->key[PagedKey::LANES];
    to->tile[1] = Pages::KEYS;
    to->tile[2] = c.chunk_keys;
    to->tasks = own.ranks ? tiles * own.ranks : z.blocks;
    to->waves = 1;
    if (!own.ranks) to->workspace_bytes = (size_t)(z.shared_bytes + z.stats_bytes + z.sums_bytes);
    return true;
}

template <class T, class Pages, int N, bool CLUSTERS>
gk_status start(const gk_context *ctx, StreamParams &x, dim3 grid, int warps, int stages,
                int ranks) {
    x.warps = warps;
    x.stages = stages;
    x.ranks = ranks;
    /* A call with pairs overlaps the previous one only if its grid fills at most half of the SMs
     * (21.4 us instead of 22.7, 4 x 4k). A larger grid must not start early on idle SMs, because
     * the rest of it would then be placed unevenly (68.4 us instead of 61.0, 6 x 9k, H200). */
    const bool overlap =
        ranks != 2 || (int)(grid.x * grid.y * grid.z) * 2 <= gk_gpu_of(ctx->index)->num_sms;
    x.ranks_log2 = ranks == 8 ? 3 : ranks == 4 ? 2 : ranks == 2 ? 1 : 0;
    x.of_step = divisor_of(max(ranks, 1) * warps * Pages::KEYS);
    x.map = smem_map(Pages::tile_bytes, Pages::HEAD_DIM, N * 8, warps, stages, CLUSTERS);
    return launch<paged_attn_sm90a_kernel<T, Pages, N, CLUSTERS>>(
        "gk_paged_attn", ctx, grid, warps * 32, x.map.total, x, overlap, ranks);
}

template <class T, class Pages, int N>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    constexpr int stage_bytes = 2 * Pages::tile_bytes,
                  stages = paged_hopper::ring_bytes / stage_bytes;
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const StreamPlan &own = gk_own<StreamPlan>(plan);
    const Sizes &z = own.planned.sizes;
    StreamParams x = {};
    x.c = own.planned.call;
    if (x.c.p.tokens == 0 || x.c.p.heads_q == 0) return GK_OK;
    if (!own.ranks && z.combines) {
        static_assert(2 * sizeof(SharedTile) >= LIST_WARPS * sizeof(unsigned),
                      "the counts lie where others note tiles");
        place_splits(x.c, z, workspace);
        x.arrived = (unsigned *)x.c.shared;
        x.c.shared = NULL;
    }
    const smem_box page_box = Pages::box(Pages::KEYS / own.boxes);
    gk_status status =
        make_tensor_map("gk_paged_attn", pages_shape<Pages>(a->k_cache), page_box, &x.k);
    if (status == GK_OK)
        status = make_tensor_map("gk_paged_attn", pages_shape<Pages>(a->v_cache), page_box, &x.v);
    if (status != GK_OK) return status;
    x.boxes = own.boxes;
    x.of_page = divisor_of(x.c.p.block_size);
    x.of_group = divisor_of(x.c.p.group);
    x.of_quads = divisor_of(x.c.p.head_dim / 4);
    x.is_f16 = a->q.dtype == GK_F16;
    x.k_scale = page_scale(a->k_scale);
    x.v_scale = page_scale(a->v_scale);
    x.by_page = x.k_scale.data || x.v_scale.data;
    x.plain = !x.c.p.cu_q && x.c.p.rules.left < 0 && !x.c.p.rules.kv_start;
    x.of_chunk = divisor_of(x.c.chunk_keys);
    /* zeroes the list's counters, and the results of tokens that belong to no sequence */
    if (x.arrived || x.c.p.cu_q) status = launch_begin(ctx, x.c, x.arrived);
    if (status != GK_OK) return status;
    if (!own.ranks)
        return start<T, Pages, N, false>(ctx, x, dim3((unsigned)z.blocks), LIST_WARPS, stages, 0);
    x.c.block_heads = 1;
    x.c.head_sets = x.c.p.heads_kv;
    const bool small = own.ranks > 2, is_tile = own.ranks == 1;
    const int warps = small     ? paged_hopper::few_warps
                      : is_tile ? paged_hopper::tile_warps
                                : LIST_WARPS;
    const int its_stages = small     ? stages
                           : is_tile ? paged_hopper::tile_stages
                                     : paged_hopper::pair_ring_bytes / stage_bytes;
    for (; status == GK_OK && x.first_b < x.c.p.batch; x.first_b += MOST_BLOCKS_YZ) {
        const dim3 grid(own.ranks, x.c.p.heads_kv,
                        (unsigned)gk_min_i64(x.c.p.batch - x.first_b, MOST_BLOCKS_YZ));
        status = start<T, Pages, N, true>(ctx, x, grid, warps, its_stages, own.ranks);
    }
    return status;
}

/* serves() adds these bytes, for the static shared memory of paged_attn_sm80 */
constexpr int STATIC_BYTES = 1024;
#define INSTANCE(NAME, DTYPE, T, PAGES, LANES, MOST)                      \
    {"paged_attn_sm90a_" NAME,                                            \
     DTYPE,                                                               \
     plan<PAGES>,                                                         \
     run<T, PAGES, LANES / 8>,                                            \
     {PAGES::HEAD_DIM, LANES, LIST_WARPS, 1,                              \
      smem_map(PAGES::tile_bytes, PAGES::HEAD_DIM, LANES, LIST_WARPS,     \
               paged_hopper::ring_bytes / (2 * PAGES::tile_bytes), false) \
              .total -                                                    \
          STATIC_BYTES,                                                   \
      MOST},                                                              \
     NULL},
#define BOTH(NAME, DTYPE, T, PAGES) \
    INSTANCE(NAME "x8", DTYPE, T, PAGES, 8, 8) INSTANCE(NAME "x16", DTYPE, T, PAGES, 16, 0)
typedef WidePages<__nv_bfloat16, 128> Bf16Pages128;
typedef WidePages<__half, 128> F16Pages128;
typedef WidePages<__nv_bfloat16, 64> Bf16Pages64;
typedef WidePages<__half, 64> F16Pages64;
typedef CodePages<GK_E4M3, 64> E4m3Pages64;
typedef CodePages<GK_E4M3, 128> E4m3Pages128;
typedef CodePages<GK_E4M3, 256> E4m3Pages256;
typedef CodePages<GK_E5M2, 128> E5m2Pages128;
typedef CodePages<GK_E5M2, 256> E5m2Pages256;
typedef CodePages<GK_I8, 128> I8Pages128;
typedef CodePages<GK_I8, 256> I8Pages256;
#define CODES(NAME, PAGES, LANES, MOST)                             \
    INSTANCE("bf16_" NAME, GK_BF16, EitherHalf, PAGES, LANES, MOST) \
    INSTANCE("f16_" NAME, GK_F16, EitherHalf, PAGES, LANES, MOST)
/* Pages of codes: the first instance whose head_dim is large enough serves. */
/* clang-format off */
const gk_cuda_instance instances[] = {
    BOTH("bf16_128", GK_BF16, __nv_bfloat16, Bf16Pages128)
    BOTH("f16_128", GK_F16, __half, F16Pages128)
    BOTH("bf16_64", GK_BF16, __nv_bfloat16, Bf16Pages64)
    BOTH("f16_64", GK_F16, __half, F16Pages64)
    CODES("e4m3_64x16", E4m3Pages64, 16, 0)
    CODES("e4m3_128x8", E4m3Pages128, 8, 8)
    CODES("e4m3_128x16", E4m3Pages128, 16, 0)
    CODES("e4m3_256x8", E4m3Pages256, 8, 0)
    CODES("e5m2_128x16", E5m2Pages128, 16, 0)
    CODES("e5m2_256x8", E5m2Pages256, 8, 0)
    CODES("int8_128x16", I8Pages128, 16, 0)
    CODES("int8_256x8", I8Pages256, 8, 0)
};
/* clang-format on */
#undef BOTH
#undef CODES
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
