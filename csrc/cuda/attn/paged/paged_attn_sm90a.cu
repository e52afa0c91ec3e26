/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_sm90a: attention of a few query tokens a sequence over a paged cache, bound by reading
 * the cache, on Hopper. q has 16 bits; pages have q's dtype or 8-bit codes.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale,  j in [lo(t),
 * hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D]; block_table [B, max_blocks],
 * seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, D], lse [T, Hq]. Pages: Kwon et al. 2023;
 * online softmax: Milakov and Gimelshein 2018.
 *
 * Work split: one kernel in three forms, chosen by StreamParams::ranks.
 *
 *  list      One block of 8 warps an SM. Each takes an even share of the flat list of chunks
 *            (paged_plan.cuh). The last block of a tile merges its splits (paged_join.cuh). For any
 *            lengths and any number of tokens.
 *  clusters  A cluster for each sequence and kv head. Its blocks exchange sums through shared
 * memory: one launch, no workspace. For few sequences of similar lengths. If only the lengths can
 *            tell, both forms are launched, and one of them exits at once (by_clusters).
 *  tiles     A block of 4 warps for each sequence and kv head, three or more on an SM: no scan, no
 *            split, no merge. For many sequences with block tables so short that the longest
 * sequence does not delay the end.
 *
 * Each warp works alone, with its own ring of TMA boxes (paged_stream.cuh), maximum and sums
 * (paged_step.cuh). A step: wait, S^T = K Q^T, lazy maximum, P, O^T += V^T P^T, fill.
 *
 * Not handled: pages that are not a multiple of 16 keys; head_dim other than 64 and 128 (e5m2 and
 * int8: other than 128); Dv != D; many small tiles of 16-bit pages, which paged_attn_sm80 reads as
 * fast (paged_tiles.h). paged_attn_plain serves the other code caches. */
#include "../../ptx/griddepcontrol.cuh"
#include "paged_join.cuh"
#include "paged_step.cuh"

namespace {

/* ---- 1. results ------------------------------------------------------------------------------ */
/* Merges the warps' sums in shared memory, eight rows at a time, and writes them to out, to the
 * workspace or to the other blocks of the cluster. */
template <class T, class Pages, int N>
__device__ __forceinline__ void finish_share(const StreamParams &a, const TileShare &x,
                                             RowsOf<Pages, N> &r, unsigned char *smem,
                                             const SmemMap &map, const Team &team) {
    constexpr int HEAD_DIM = Pages::HEAD_DIM, PITCH = HEAD_DIM + 4, QUADS = HEAD_DIM / 4;
    const Call &c = a.c;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = x.last_row - x.row0 + 1;
    const int ranks = max(a.ranks, 1), rank = ranks > 1 ? cluster_ctarank() : 0,
              per_rank = rows * QUADS / ranks;
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
#pragma unroll
            for (int i = 0; i < Pages::STEPS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    o_s[row * PITCH + Pages::out_col(i, half, lane)] =
                        r.o[i][n][half * 2 + e] * r.v_base;
        }
        team.sync(); /* the sums are written */
        for (int i = team.thread; i < team.heads * rows_here * QUADS; i += team.threads) {
            const int line = i / QUADS, quad = i % QUADS;
            const int block_head = team.head0 + line / rows_here, row = line % rows_here;
            const int from = block_head * 8 + row, step = c.block_heads * 8;
            const Merged all = merge_4<1>(stats_s + from, step, o_s + from * PITCH + quad * 4,
                                          step * PITCH, a.warps / c.block_heads);
            const int row_of_tile = n * 8 + row;
            if (ranks > 1) {
                const int quad_of_tile = row_of_tile * QUADS + quad, owner = quad_of_tile % ranks;
                const uint32_t inbox = mapa(cvta_to_shared(smem + map.inbox), owner);
                const uint32_t barrier = mapa(cvta_to_shared(smem + map.inbox_barrier), owner);
                const uint32_t to = inbox + (rank * per_rank + quad_of_tile / ranks) * 32;
                st_async_128(to, all.y.x, all.y.y, all.y.z, all.y.w, barrier);
                st_async_128(to + 16, all.row.peak, all.row.sum, 0, 0, barrier);
            } else if (x.whole) {
                write_row<T>(c.p, x, x.head_set * c.block_heads + block_head, x.row0 + row_of_tile,
                             quad * 4, all);
            } else {
                const int64_t split =
                    ((int64_t)blockIdx.x * 2 + !x.leading) * c.block_heads + block_head;
                const int64_t at = split * c.lanes + row_of_tile;
                *(float4 *)(c.sums + at * HEAD_DIM + quad * 4) = all.y;
                if (quad == 0) c.stats[at] = make_float2(all.row.peak, all.row.sum);
            }
        }
        team.sync(); /* the sums are read */
    }
}

/* Merges what the blocks of the cluster have sent for this block's part of the tile, in rank
 * order. */
template <class T, int HEAD_DIM>
__device__ __forceinline__ void receive(const StreamParams &a, const TileShare &x,
                                        unsigned char *smem, const SmemMap &map) {
    constexpr int QUADS = HEAD_DIM / 4;
    const int rank = cluster_ctarank(), per_rank = (x.last_row - x.row0 + 1) * QUADS / a.ranks;
    mbarrier_wait(cvta_to_shared(smem + map.inbox_barrier), 0);
    const float *const inbox = (const float *)(smem + map.inbox);
    for (int i = threadIdx.x; i < per_rank; i += blockDim.x) {
        const int quad_of_tile = i * a.ranks + rank;
        Merged all = {{-INFINITY, 0}, make_float4(0, 0, 0, 0)};
        for (int of = 0; of < a.ranks; ++of)
            all.row.peak = fmaxf(all.row.peak, inbox[(of * per_rank + i) * 8 + 4]);
        for (int of = 0; of < a.ranks; ++of) {
            const float *const its = inbox + (of * per_rank + i) * 8;
            add_4(all.y, *(const float4 *)its, all.row.join(its[4], its[5]));
        }
        write_row<T>(a.c.p, x, x.head_kv, x.row0 + quad_of_tile / QUADS, quad_of_tile % QUADS * 4,
                     all);
    }
}

/* ---- 2. the kernel --------------------------------------------------------------------------- */
template <class Pages, int N>
constexpr int BLOCKS_AN_SM = !Pages::CODES && Pages::HEAD_DIM == 64 && N == 1 ? 2 : 1;

template <class T, class Pages, int N>
__global__ void __launch_bounds__(LIST_WARPS * 32, BLOCKS_AN_SM<Pages, N>)
    paged_attn_sm90a_kernel(const __grid_constant__ StreamParams a) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Call &c = a.c;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const bool clusters = a.ranks > 0; /* or tiles */
    const SmemMap map =
        smem_map(Pages::tile_bytes, Pages::HEAD_DIM, N * 8, a.warps, a.stages, clusters);
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
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Chunks<LIST_WARPS> &plan = *(Chunks<LIST_WARPS> *)(smem + map.chunks);
    if (a.both_launched && by_clusters(a) != clusters) return;
    /* the inbox barriers of all blocks are initialised */
    if (a.ranks > 1) barrier_cluster_arrive();
    if (!clusters && !find_chunks<LIST_WARPS>(c, plan)) return;

    Loader<Pages> loader;
    loader.begin(a, plan, smem_s + warp * a.stages * Loader<Pages>::stage_bytes, barriers_s,
                 smem_s + map.scales + warp * a.stages * 16);
    loader.fill(a, plan);
    Source<Pages::KEYS> source;
    source.begin(a, plan);
    const bool alone = !clusters && c.block_heads == LIST_WARPS;
    const Team team = {alone ? lane : (int)threadIdx.x, alone ? 32 : (int)blockDim.x,
                       alone ? warp : 0, alone ? 1 : c.block_heads};
    int stage = 0;
    unsigned parity = 0;
    Share share;
    RowsOf<Pages, N> rows;
    while (source.next(a, plan, share)) {
        const TileShare &x = share.x;
        rows.template begin<T>(a, x);
#pragma unroll 1
        for (int step = x.step0; step < x.steps; ++step) {
            __syncwarp(); /* the scales that lane 0 stored are visible */
            mbarrier_wait(barriers_s + stage * 8, parity);
            attend_step<Pages, N>(a, x, rows, loader.ring_s + stage * Loader<Pages>::stage_bytes,
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
        if (a.ranks > 1) {
            if (threadIdx.x == 0)
                mbarrier_arrive_expect_tx(smem_s + map.inbox_barrier,
                                          (x.last_row + 1) * Pages::HEAD_DIM * 8);
            barrier_cluster_wait();
        }
        if (clusters) __syncthreads(); /* every warp has read its ring */
        finish_share<T, Pages, N>(a, x, rows, smem, map, team);
        if (a.ranks > 1)
            receive<T, Pages::HEAD_DIM>(a, x, smem, map);
        else if (!x.whole)
            join_splits<T, Pages::HEAD_DIM>(a, x, (int)(share.own / plan.share),
                                            (int)((share.own + share.chunks - 1) / plan.share),
                                            team);
    }
}

/* ---- 3. launch ------------------------------------------------------------------------------- */
struct StreamPlan {
    Planned planned;
    int ranks, boxes; /* ranks 0: the list only */
    bool list;
};

/* The TMA shape of a cache: columns of a panel, keys, panels, heads, pages. */
TensorShape pages_shape(const gk_tensor &t, int cols) {
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

/* True if a block of the list takes neighbouring kv heads. */
template <class Pages> bool side_by_side(const gk_paged_attn_args *a) {
    const int64_t rows = paged_seq_q(a) * (a->q.shape[1] / a->k_cache.shape[2]);
    return Pages::CODES && rows <= 8 && a->seq_lens.shape[0] >= paged_hopper::side_by_side_batch;
}

template <class Pages>
bool plan(const gk_cuda_instance *row, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->k_cache.dtype != Pages::stored || a->q.shape[2] != Pages::HEAD_DIM ||
        a->v_cache.shape[3] != Pages::HEAD_DIM || a->k_cache.shape[1] % 16 != 0 ||
        a->k_cache.shape[0] >= INT32_MAX || !serves(row, ctx, a) ||
        !tensor_map_fits(pages_shape(a->k_cache, Pages::COLS)) ||
        !tensor_map_fits(pages_shape(a->v_cache, Pages::COLS)))
        return false;
    StreamPlan &own = gk_own<StreamPlan>(to);
    own = {};
    gk_cuda_instance as_planned = *row;
    /* heads of a block are at most its warps */
    if (!side_by_side<Pages>(a)) as_planned.key[2] = 1;
    const Sizes &z = own.planned.sizes = sizes_of(&as_planned, ctx, a);
    Call &c = own.planned.call;
    c.p = paged_of(ctx, a);
    c.block_heads = z.block_heads;
    c.head_sets = c.p.heads_kv / z.block_heads;
    c.blocks = z.blocks;
    c.lanes = row->key[1];
    c.chunk_keys = Pages::KEYS * (LIST_WARPS / z.block_heads);
    own.boxes = a->k_cache.shape[1] % Pages::KEYS == 0 ? 1 : Pages::KEYS / 16;
    if (a->k_scale && a->k_scale->ndim == 2) c.p.k_scale = NULL;
    if (a->v_scale && a->v_scale->ndim == 2) c.p.v_scale = NULL;

    const int64_t tiles = (int64_t)c.p.batch * c.p.heads_kv, sms = gk_gpu_of(ctx->index)->num_sms;
    const int64_t rows = c.p.seq_q * c.p.group;
    own.ranks = !c.p.cu_q && rows <= c.lanes ? 1 : 0;
    for (int n = 2; n <= paged_hopper::most_ranks && tiles * n <= sms && rows <= c.lanes; n *= 2)
        own.ranks = n;
    const bool soon = c.p.capacity <= paged_hopper::tile_keys * own.ranks;
    if (own.ranks == 1 && !soon) own.ranks = 0;
    /* with 16-bit pages and many small tiles, paged_attn_sm80 is as fast as the list or faster */
    const bool small = Pages::HEAD_DIM == 64
                           ? c.p.batch >= paged_hopper::narrow_batch
                           : rows <= 8 && (c.p.group == 1 || c.p.batch > paged_hopper::wide_batch);
    if (!Pages::CODES && own.ranks == 0 && small) return false;
    const bool one = c.p.batch == 1 && c.p.capacity <= paged_hopper::cluster_keys;
    own.list = own.ranks == 0 || c.p.cu_q || !(soon || one);
    to->tile[0] = row->key[1];
    to->tile[1] = Pages::KEYS;
    to->tile[2] = c.chunk_keys;
    to->tasks = own.list ? z.blocks : tiles * own.ranks;
    to->waves = 1;
    if (own.list) to->workspace_bytes = (size_t)(z.shared_bytes + z.stats_bytes + z.sums_bytes);
    return true;
}

template <class T, class Pages, int N>
gk_status start(const gk_context *ctx, StreamParams &x, dim3 grid, int warps, int stages,
                int ranks) {
    x.warps = warps;
    x.stages = stages;
    x.ranks = ranks;
    const int bytes =
        smem_map(Pages::tile_bytes, Pages::HEAD_DIM, N * 8, warps, stages, ranks > 0).total;
    return launch<paged_attn_sm90a_kernel<T, Pages, N>>("gk_paged_attn", ctx, grid, warps * 32,
                                                        bytes, x, true, ranks);
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
    if (own.list && z.combines) {
        static_assert(2 * sizeof(SharedTile) >= LIST_WARPS * sizeof(unsigned),
                      "the counts lie where others note tiles");
        place_splits(x.c, z, workspace);
        x.arrived = (unsigned *)x.c.shared;
        x.c.shared = NULL;
    }
    const smem_box page_box = Pages::box(Pages::KEYS / own.boxes);
    gk_status status =
        make_tensor_map("gk_paged_attn", pages_shape(a->k_cache, Pages::COLS), page_box, &x.k);
    if (status == GK_OK)
        status =
            make_tensor_map("gk_paged_attn", pages_shape(a->v_cache, Pages::COLS), page_box, &x.v);
    if (status != GK_OK) return status;
    x.boxes = own.boxes;
    x.k_scale = page_scale(a->k_scale);
    x.v_scale = page_scale(a->v_scale);
    x.by_page = x.k_scale.data || x.v_scale.data;
    if (x.arrived && (status = launch_begin<T>(ctx, x.c, x.arrived)) != GK_OK) return status;
    if (own.ranks > 0) {
        x.both_launched = own.list;
        const float key_bytes = 2.f * Pages::HEAD_DIM * gk_dtype_bytes(a->k_cache.dtype);
        const float of_sm =
            Pages::CODES ? paged_hopper::sm_code_bytes_per_ns : paged_hopper::sm_bytes_per_ns;
        x.ns_per_key = key_bytes / of_sm / own.ranks;
        x.ns_per_total = key_bytes * x.c.p.heads_kv / paged_hopper::device_bytes_per_ns;
        const bool small = own.ranks > 2, tiles = own.ranks == 1;
        const int warps = small   ? paged_hopper::few_warps
                          : tiles ? paged_hopper::tile_warps
                                  : LIST_WARPS;
        const int its_stages = small   ? stages
                               : tiles ? paged_hopper::tile_stages
                                       : paged_hopper::pair_ring_bytes / stage_bytes;
        StreamParams of = x;
        of.c.block_heads = 1;
        of.c.head_sets = x.c.p.heads_kv;
        const dim3 grid((unsigned)(x.c.p.batch * x.c.p.heads_kv * own.ranks));
        status = start<T, Pages, N>(ctx, of, grid, warps, its_stages, own.ranks);
    }
    if (status == GK_OK && own.list)
        status = start<T, Pages, N>(ctx, x, dim3((unsigned)z.blocks), LIST_WARPS, stages, 0);
    return status;
}

/* serves() adds this much for the static shared memory of paged_attn_sm80 */
constexpr int STATIC_BYTES = 1024;
#define ROW(NAME, DTYPE, T, PAGES, LANES, MOST)                           \
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
    ROW(NAME "x8", DTYPE, T, PAGES, 8, 8) ROW(NAME "x16", DTYPE, T, PAGES, 16, 0)
typedef WidePages<__nv_bfloat16, 128> Bf16Pages128;
typedef WidePages<__half, 128> F16Pages128;
typedef WidePages<__nv_bfloat16, 64> Bf16Pages64;
typedef WidePages<__half, 64> F16Pages64;
typedef CodePages<GK_E4M3, 128> E4m3Pages128;
typedef CodePages<GK_E5M2, 128> E5m2Pages128;
typedef CodePages<GK_I8, 128> I8Pages128;
typedef CodePages<GK_E4M3, 64> E4m3Pages64;
/* clang-format off */
const gk_cuda_instance instances[] = {
    BOTH("bf16_128", GK_BF16, __nv_bfloat16, Bf16Pages128)
    BOTH("f16_128", GK_F16, __half, F16Pages128)
    BOTH("bf16_64", GK_BF16, __nv_bfloat16, Bf16Pages64)
    BOTH("f16_64", GK_F16, __half, F16Pages64)
    BOTH("bf16_e4m3_128", GK_BF16, __nv_bfloat16, E4m3Pages128)
    BOTH("f16_e4m3_128", GK_F16, __half, E4m3Pages128)
    ROW("bf16_e5m2_128x16", GK_BF16, __nv_bfloat16, E5m2Pages128, 16, 0)
    ROW("f16_e5m2_128x16", GK_F16, __half, E5m2Pages128, 16, 0)
    ROW("bf16_int8_128x16", GK_BF16, __nv_bfloat16, I8Pages128, 16, 0)
    ROW("f16_int8_128x16", GK_F16, __half, I8Pages128, 16, 0)
    ROW("bf16_e4m3_64x16", GK_BF16, __nv_bfloat16, E4m3Pages64, 16, 0)
    ROW("f16_e4m3_64x16", GK_F16, __half, E4m3Pages64, 16, 0)
};
/* clang-format on */
#undef BOTH
#undef ROW

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
