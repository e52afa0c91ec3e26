/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_stream.cuh: what a warp of paged_attn_sm90a loads, and in which order.
 *
 * A share is a warp's part of one tile (paged_plan.cuh). A Source yields the shares of a block one
 * after the other: those of the flat list, or the single share of a block in a cluster. Each warp
 * has two sources, one for what it multiplies and one, some steps ahead, for what it loads. So the
 * ring of a warp runs on from one sequence into the next.
 *
 *  ring of a warp   stages x (K KEYS rows, V KEYS rows) with a full barrier each; lane 0 issues;
 *                   no block-wide barrier
 *  page numbers     32 boxes by one load, one for each lane, while the next 32 are in flight. A box
 *                   is the part of a step that lies in one page. A box without a page lies outside
 *                   the tensor, and TMA fills it with zeros */
#ifndef GPUKERN_CUDA_PAGED_STREAM_CUH
#define GPUKERN_CUDA_PAGED_STREAM_CUH

#include "../../host/tensormap.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../tile/tma_ring.cuh"
#include "paged_plan.cuh"
#include "paged_tiles.h"

namespace {

struct StreamParams {
    Call c; /* c.shared is NULL */
    /* workspace, [blocks][LIST_WARPS]: for each head, how many splits are stored of the tile that
     * this block began */
    unsigned *arrived;
    CUtensorMap k, v;
    CodeScale k_scale, v_scale; /* of codes, per page */
    bool by_page;               /* at least one of them exists */
    /* blocks of a cluster that share a tile; 1: one block for each tile; 0: the flat list */
    int ranks;
    int warps, stages, boxes; /* boxes of a step, that is pages that it spans */
    /* both clusters and the list are launched, and by_clusters decides which one works */
    bool both_launched;
    float ns_per_key, ns_per_total;
};

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* Byte offsets. The ring [warps][stages][2 tiles] comes first. In a cluster, O of the warps
 * overlays their rings. */
struct SmemMap {
    int o, stats, barriers, scales, inbox_barrier, inbox, chunks, total;
};
constexpr int LIST_WARPS = 8;

constexpr GK_HD SmemMap smem_map(int tile_bytes, int head_dim, int lanes, int warps, int stages,
                                 bool cluster) {
    SmemMap m = {};
    const int ring = warps * stages * 2 * tile_bytes, o = warps * 8 * (head_dim + 4) * 4;
    m.o = cluster ? 0 : ring;
    m.stats = cluster ? ring : ring + o;
    m.barriers = m.stats + warps * 8 * 8;
    m.scales = m.barriers + warps * stages * 8;
    m.inbox_barrier = m.scales + warps * stages * 16;
    m.inbox = m.chunks = (m.inbox_barrier + 8 + 15) / 16 * 16;
    m.total = cluster ? m.inbox + lanes * head_dim * 8 : m.chunks + (int)sizeof(Chunks<LIST_WARPS>);
    return m;
}

/* ---- 2. shares ------------------------------------------------------------------------------- */
struct Share {
    TileShare x;
    int stride;  /* keys from step to step */
    int64_t own; /* the tile's first chunk in the list; its number of chunks */
    int chunks;
};

__device__ __forceinline__ void see_keys(TileShare &x, const Paged &p) {
    x.lo = x.s.lo(x.row0 / p.group);
    x.hi = x.s.hi(x.last_row / p.group);
    x.inner_lo = x.s.lo(x.last_row / p.group);
    x.inner_hi = x.s.hi(x.row0 / p.group);
}

/* Finds the first step that reaches a visible key, and the end of the steps. */
template <int STEP_KEYS>
__device__ __forceinline__ void see_steps(TileShare &x, int stride, int most) {
    x.step0 = x.first_key + STEP_KEYS <= x.lo ? (x.lo - x.first_key - STEP_KEYS) / stride + 1 : 0;
    x.steps = min(most, x.hi > x.first_key ? (x.hi - x.first_key - 1) / stride + 1 : 0);
}

template <int STEP_KEYS> struct Source {
    int b, tile;   /* the next tile; tile -1: sequence b has not been looked at yet */
    int64_t first; /* first chunk of sequence b */

    __device__ __forceinline__ void begin(const StreamParams &a, const Chunks<LIST_WARPS> &plan) {
        b = 0;
        tile = -1;
        first = 0;
        if (a.ranks == 0) {
            b = plan.found;
            first = plan.found_at;
        }
    }

    /* The single share of a block in a cluster. */
    __device__ __forceinline__ bool of_cluster(const StreamParams &a, Share &share) {
        const Paged &p = a.c.p;
        if (tile >= 0) return false;
        tile = 0;
        const int tile_of_cluster = blockIdx.x / a.ranks, warp = threadIdx.x / 32;
        TileShare &x = share.x;
        x.b = tile_of_cluster / p.heads_kv;
        x.head_kv = x.head_set = tile_of_cluster - x.b * p.heads_kv;
        x.s = paged_sequence(p, x.b);
        x.row0 = 0;
        x.last_row = x.s.rows * p.group - 1;
        x.leading = false;
        x.whole = true;
        see_keys(x, p);
        /* without a query, no key is seen and no page is read */
        if (x.s.rows == 0) x.lo = x.hi = 0;
        share.stride = a.ranks * a.warps * STEP_KEYS;
        x.first_key =
            x.lo / STEP_KEYS * STEP_KEYS + (cluster_ctarank() * a.warps + warp) * STEP_KEYS;
        see_steps<STEP_KEYS>(x, share.stride, INT32_MAX);
        return true;
    }

    /* The next tile of which the block has chunks, or a tile without keys that the block must
     * write. */
    __device__ __forceinline__ bool of_list(const StreamParams &a, const Chunks<LIST_WARPS> &plan,
                                            Share &share) {
        const Call &c = a.c;
        const Paged &p = c.p;
        TileShare &x = share.x;
        for (; first < plan.end; ++b, tile = -1) {
            const PagedSequence s = paged_sequence(p, b);
            const Work w = work_of(c, s);
            if (tile < 0)
                tile = w.cost ? (int)(max(plan.begin - first, (int64_t)0) / w.cost_of_tile) : 0;
            const int num_tiles = w.row_groups * c.head_sets;
            for (; tile < num_tiles; ++tile) {
                const int64_t own = first + tile * w.cost_of_tile + TILE_COST;
                const bool empty =
                    w.chunks == 0 && own - TILE_COST >= plan.begin && own - TILE_COST < plan.end;
                if (own >= plan.end && !empty) return false; /* later tiles begin even later */
                const int chunk0 = (int)max(plan.begin - own, (int64_t)0),
                          chunk1 = (int)min(plan.end - own, (int64_t)w.chunks);
                if (chunk0 >= chunk1 && !empty) continue;
                const int row_group = tile / c.head_sets, warp = threadIdx.x / 32;
                x.s = s;
                x.b = b;
                x.head_set = tile - row_group * c.head_sets;
                x.row0 = row_group * c.lanes;
                x.last_row = min(x.row0 + c.lanes, w.rows) - 1;
                x.leading = !empty && own < plan.begin;
                x.whole = empty || (!x.leading && own + w.chunks <= plan.end);
                x.head_kv = x.head_set * c.block_heads + warp % c.block_heads;
                see_keys(x, p);
                share.stride = c.chunk_keys;
                share.own = own;
                share.chunks = w.chunks;
                x.first_key =
                    (w.first_chunk + chunk0) * c.chunk_keys + warp / c.block_heads * STEP_KEYS;
                see_steps<STEP_KEYS>(x, share.stride, chunk1 - chunk0);
                ++tile;
                return true;
            }
            first += w.cost;
        }
        return false;
    }

    __device__ __forceinline__ bool next(const StreamParams &a, const Chunks<LIST_WARPS> &plan,
                                         Share &share) {
        return a.ranks > 0 ? of_cluster(a, share) : of_list(a, plan, share);
    }
};

/* ---- 3. the ring ----------------------------------------------------------------------------- */
template <class Pages> struct Loader {
    static constexpr int stage_bytes = 2 * Pages::tile_bytes;
    Source<Pages::KEYS> source;
    /* of the share that is being loaded */
    int b, head_kv, first_key, stride, step, steps, lo, hi;
    int base;                           /* step of the first box that the lanes hold */
    int page, row, next_page, next_row; /* this lane's box, and the one 32 boxes later */
    float k_scale, v_scale, next_k, next_v;
    int stage, on_the_way;
    /* two bits for each stage: whether each box has a page, or lies outside the visible keys */
    unsigned here;
    smem_addr ring_s, barriers_s, scales_s;
    uint64_t policy; /* L2 policy: evict first, since pages are read once */

    __device__ __forceinline__ void begin(const StreamParams &a, const Chunks<LIST_WARPS> &plan,
                                          smem_addr ring_, smem_addr barriers_, smem_addr scales_) {
        source.begin(a, plan);
        ring_s = ring_;
        barriers_s = barriers_;
        scales_s = scales_;
        policy = l2_first_out();
        step = steps = base = 0;
        stage = on_the_way = 0;
        here = 0;
    }

    /* Looks up this lane's box among those from step `from` on. */
    __device__ __forceinline__ void look_up(const StreamParams &a, int from, int &page_, int &row_,
                                            float &k_, float &v_) {
        const Paged &p = a.c.p;
        const int lane = threadIdx.x % 32, box_keys = Pages::KEYS / a.boxes;
        const int at = from + lane / a.boxes,
                  key = first_key + at * stride + lane % a.boxes * box_keys;
        const int entry = key / p.block_size;
        row_ = key - entry * p.block_size;
        page_ = p.num_blocks;
        k_ = v_ = 1;
        if (at >= steps || key >= hi || key + box_keys <= lo) return;
        page_ = p.table[b * p.table_row + entry * p.table_entry];
        if ((unsigned)page_ >= (unsigned)p.num_blocks) {
            report(p.error_word, GK_BAD_BLOCK_TABLE);
            page_ = -1;
            return;
        }
        if (!Pages::CODES || !a.by_page) return;
        k_ = a.k_scale.at<float>(page_, head_kv), v_ = a.v_scale.at<float>(page_, head_kv);
    }

    /* Fills the free stages of the ring. All lanes take part. */
    __device__ __forceinline__ void fill(const StreamParams &a, const Chunks<LIST_WARPS> &plan) {
        while (on_the_way < a.stages) {
            while (step >= steps) {
                Share share;
                if (!source.next(a, plan, share)) return;
                const TileShare &x = share.x;
                b = x.b;
                head_kv = x.head_kv;
                first_key = x.first_key;
                stride = share.stride;
                step = base = x.step0;
                steps = x.steps;
                lo = x.lo;
                hi = x.hi;
                if (step >= steps) continue;
                look_up(a, base, page, row, k_scale, v_scale);
                look_up(a, base + 32 / a.boxes, next_page, next_row, next_k, next_v);
            }
            if (step - base >= 32 / a.boxes) {
                base += 32 / a.boxes;
                page = next_page;
                row = next_row;
                k_scale = next_k;
                v_scale = next_v;
                look_up(a, base + 32 / a.boxes, next_page, next_row, next_k, next_v);
            }
            issue(a);
            ++step;
            ++on_the_way;
            stage = stage + 1 == a.stages ? 0 : stage + 1;
        }
    }

    __device__ __forceinline__ void issue(const StreamParams &a) {
        const smem_addr full_s = barriers_s + stage * 8, k_s = ring_s + stage * stage_bytes;
        const int box_bytes = Pages::tile_bytes / a.boxes;
        const bool leads = elect_one();
        if (leads) mbarrier_arrive_expect_tx(full_s, stage_bytes);
        unsigned there = 0;
        for (int i = 0; i < a.boxes; ++i) {
            const int from = (step - base) * a.boxes + i;
            const int its_page = __shfl_sync(0xffffffffu, page, from),
                      its_row = __shfl_sync(0xffffffffu, row, from);
            there |= (unsigned)(its_page >= 0) << i;
            if (leads) {
                const tma_at at = {{0, its_row, 0, head_kv, its_page}};
                tma_load_5d_by(k_s + i * box_bytes, &a.k, at, full_s, policy);
                tma_load_5d_by(k_s + Pages::tile_bytes + i * box_bytes, &a.v, at, full_s, policy);
            }
            if (Pages::CODES && a.by_page) {
                const float its_k = __shfl_sync(0xffffffffu, k_scale, from);
                const float its_v = __shfl_sync(0xffffffffu, v_scale, from);
                if (leads) st_shared_64(scales_s + stage * 16 + i * 8, make_float2(its_k, its_v));
            }
        }
        here = (here & ~(3u << 2 * stage)) | there << 2 * stage;
    }
};

/* ---- 4. which launch serves the call --------------------------------------------------------- */
/* Estimates whether clusters, which divide each sequence on its own, finish before the list,
 * which divides all sequences together. Every warp of both launches gets the same answer. */
__device__ __forceinline__ bool by_clusters(const StreamParams &a) {
    int longest = 0, total = 0;
    for (int b = threadIdx.x % 32; b < a.c.p.batch; b += 32) {
        const PagedSequence s = paged_sequence(a.c.p, b);
        const int keys = s.rows ? max(s.hi(s.rows - 1) - s.lo(0), 0) : 0;
        longest = max(longest, keys);
        total += min(keys, (1 << 30) / a.c.p.batch);
    }
    longest = __reduce_max_sync(0xffffffffu, longest);
    total = __reduce_add_sync(0xffffffffu, total);
    return longest * a.ns_per_key <= total * a.ns_per_total + paged_hopper::list_costs_ns;
}

} // namespace

#endif
