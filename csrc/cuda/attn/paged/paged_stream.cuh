/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_stream.cuh: what a warp of paged_attn_sm90a loads, and in which order.
 *
 * A share is a warp's part of one tile (paged_plan.cuh). A block of a cluster has a single share. A
 * block of the list has several, and a Source yields them one after the other. Each warp then has
 * two Sources: one for the step that it multiplies, and one for the step that it loads, which is
 * some steps further. So the warp's ring continues from one sequence into the next without a gap.
 *
 *  ring of a warp   `stages` stages of KEYS rows of K and KEYS rows of V, each with a full barrier.
 *                   One lane issues the copies. There is no block-wide barrier.
 *  page numbers     Each lane looks up one box, so a load finds 32 boxes. The table entries of the
 *                   next 32 boxes are in flight. A box is the part of a step that is in one page. A
 *                   box without a page gets coordinates outside the tensor, so that TMA fills it
 *                   with zeros.
 */
#ifndef GPUKERN_CUDA_PAGED_STREAM_CUH
#define GPUKERN_CUDA_PAGED_STREAM_CUH

#include "../../host/tensormap.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/prefetch_l2.cuh"
#include "../../ptx/tma.cuh"
#include "../../tile/divisor.h"
#include "../../tile/tma_ring.cuh"
#include "paged_plan.cuh"
#include "paged_tiles.h"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* Byte offsets. The rings [warps][stages][K, V] come first. In a cluster, the warps' O overlays the
 * rings. */
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
    /* the inbox: each block of the cluster sends 32 bytes for each quad of columns that this block
     * merges */
    m.total = cluster ? m.inbox + lanes * head_dim * 8 + 8 * 32
                      : m.chunks + (int)sizeof(Chunks<LIST_WARPS, int>);
    return m;
}

struct StreamParams {
    Call c; /* c.shared is NULL */
    /* Workspace, [blocks][LIST_WARPS]. For the tile that a block began, and for each of its heads:
     * the number of splits that have been stored so far. */
    unsigned *arrived;
    CUtensorMap k, v;
    CodeScale k_scale, v_scale; /* scales of codes for each page and head */
    bool by_page;               /* at least one of the two exists */
    /* The form of the kernel. 2 to 8: that many blocks of a cluster share a tile. 1: one block for
     * each tile. 0: the list. */
    int ranks;
    int ranks_log2;
    int first_b;               /* clusters: the sequence of blockIdx.z == 0 */
    int warps, stages, boxes;  /* boxes: 1 or 2, the number of pages that a step spans */
    Divisor of_page, of_group; /* by block_size; by the number of heads that share a kv head */
    Divisor of_step;           /* clusters: by the keys from a warp's step to its next one */
    Divisor of_chunk;          /* list: by the keys of a chunk */
    /* no window, no kv_start, no cu_q: the keys of a sequence are [0, its length) */
    bool plain;
    bool is_f16;      /* with EitherHalf: q and out are float16, otherwise bfloat16 */
    Divisor of_quads; /* by head_dim / 4 */
    SmemMap map;
};

/* ---- 2. shares ------------------------------------------------------------------------------- */
struct Share {
    TileShare x;
    int stride;      /* keys from step to step */
    int own, chunks; /* the tile's first chunk in the list; its number of chunks */
};

/* The query token to which a row of a sequence belongs. */
__device__ __forceinline__ int token_of(const StreamParams &a, int row) {
    return (int)a.of_group.into((uint32_t)row);
}

/* Computes the range of keys that some row of the tile sees, and the range that all its rows see.
 */
__device__ __forceinline__ void see_keys(TileShare &x, const StreamParams &a) {
    const int first = token_of(a, x.row0), last = token_of(a, x.last_row);
    x.lo = x.s.lo(first);
    x.hi = x.s.hi(last);
    x.inner_lo = x.s.lo(last);
    x.inner_hi = x.s.hi(first);
}

/* Finds the first step that reaches a visible key, and the end of the steps. */
template <int STEP_KEYS>
__device__ __forceinline__ void see_steps(TileShare &x, int stride, int most) {
    x.step0 = x.first_key + STEP_KEYS <= x.lo ? (x.lo - x.first_key - STEP_KEYS) / stride + 1 : 0;
    x.steps = min(most, x.hi > x.first_key ? (x.hi - x.first_key - 1) / stride + 1 : 0);
}

/* Computes a warp's steps over the visible keys of a tile, in the cluster form. */
template <int STEP_KEYS>
__device__ __forceinline__ void cluster_steps(const StreamParams &a, Share &share) {
    TileShare &x = share.x;
    const int warp = threadIdx.x / 32;
    share.stride = (int)a.of_step.by;
    x.first_key = x.lo / STEP_KEYS * STEP_KEYS + ((int)blockIdx.x * a.warps + warp) * STEP_KEYS;
    /* step 0 of the first warp of the first block holds key lo */
    x.step0 = 0;
    x.steps = x.hi > x.first_key ? (int)a.of_step.into(x.hi - x.first_key - 1) + 1 : 0;
}

/* The single share of a block in a cluster. The grid is [batch][heads_kv][ranks]. */
template <int STEP_KEYS>
__device__ __forceinline__ void cluster_share(const StreamParams &a, Share &share) {
    const Paged &p = a.c.p;
    TileShare &x = share.x;
    x.b = a.first_b + blockIdx.z;
    x.head_kv = x.head_set = blockIdx.y;
    x.s = paged_sequence(p, x.b);
    x.row0 = 0;
    x.last_row = x.s.rows * p.group - 1;
    x.leading = false;
    x.whole = true;
    see_keys(x, a);
    /* without a query, no key is seen and no page is read */
    if (x.s.rows == 0) x.lo = x.hi = 0;
    cluster_steps<STEP_KEYS>(a, share);
}

/* The part of cluster_share that the loader needs, for a plain call. It reads only the length,
 * because its instructions delay the first copy. */
template <int STEP_KEYS>
__device__ __forceinline__ void plain_share(const StreamParams &a, Share &share) {
    const Paged &p = a.c.p;
    TileShare &x = share.x;
    x.b = a.first_b + blockIdx.z;
    x.head_kv = blockIdx.y;
    x.lo = 0;
    x.hi = min(max(p.lens[x.b * p.lens_step], 0), p.capacity);
    cluster_steps<STEP_KEYS>(a, share);
}

/* The cost of one tile of a plain call, from the sequence's length alone (see work_of). */
__device__ __forceinline__ int plain_cost_of_tile(const StreamParams &a, int length) {
    const int keys = min(max(length, 0), a.c.p.capacity);
    return (int)a.of_chunk.into(keys + a.of_chunk.by - 1) + TILE_COST;
}
__device__ __forceinline__ int plain_tiles(const StreamParams &a) {
    return (a.c.p.seq_q * a.c.p.group + a.c.lanes - 1) / a.c.lanes * a.c.head_sets;
}

/* The length of the sequence that this thread counts. The load must bypass L1, because the previous
 * kernel may still write the length. */
__device__ __forceinline__ int own_length(const StreamParams &a) {
    const Paged &p = a.c.p;
    return threadIdx.x < p.batch ? __ldcg(p.lens + threadIdx.x * p.lens_step) : 0;
}

/* Prefetches the table entries and q of the block's first share into L2. The share is a guess,
 * because the lengths may change before the kernel reads them. It is never out of bounds. */
template <class Pages>
__device__ __forceinline__ void prefetch_share(const StreamParams &a,
                                               const Chunks<LIST_WARPS, int> &plan) {
    const Call &c = a.c;
    const Paged &p = c.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, two = a.boxes - 1;
    const int cost = plain_cost_of_tile(a, __ldcg(p.lens + plan.found * p.lens_step));
    const int tile = (plan.begin - plan.found_at) / cost, group = tile / c.head_sets;
    const int chunk = max(plan.begin - plan.found_at - tile * cost - TILE_COST, 0);
    const int key = (chunk + (lane >> two)) * c.chunk_keys + warp / c.block_heads * Pages::KEYS +
                    (lane & two) * (Pages::KEYS >> two);
    if (key < p.capacity)
        prefetch_l2(p.table + plan.found * p.table_row + a.of_page.into(key) * p.table_entry);
    const int row = group * c.lanes + lane, token = token_of(a, row);
    const int head_kv = (tile - group * c.head_sets) * c.block_heads + warp % c.block_heads;
    if (warp < c.block_heads && lane < c.lanes && token < p.seq_q)
        for (int line = 0; line < p.head_dim * 2; line += 128)
            prefetch_l2((const char *)((const uint16_t *)p.q.data +
                                       (plan.found * p.seq_q + token) * p.q.row +
                                       (head_kv * p.group + row - token * p.group) * p.q.head) +
                        line);
}

/* Yields the shares of the list, one after the other. */
template <int STEP_KEYS> struct Source {
    int b, tile; /* the next tile; tile -1: sequence b has not been looked at yet */
    int first;   /* first chunk of sequence b */

    __device__ __forceinline__ void begin(const Chunks<LIST_WARPS, int> &plan) {
        b = plan.found;
        tile = -1;
        first = plan.found_at;
    }

    /* Finds the next tile of which the block has chunks, or the next tile without keys whose result
     * the block must write. Returns false if there is no such tile. */
    __device__ __forceinline__ bool next(const StreamParams &a, const Chunks<LIST_WARPS, int> &plan,
                                         Share &share) {
        const Call &c = a.c;
        const Paged &p = c.p;
        TileShare &x = share.x;
        for (; first < plan.end; ++b, tile = -1) {
            const PagedSequence s = paged_sequence(p, b);
            const Work w = work_of(c, s);
            if (tile < 0) tile = w.cost ? max(plan.begin - first, 0) / (int)w.cost_of_tile : 0;
            const int num_tiles = w.row_groups * c.head_sets;
            for (; tile < num_tiles; ++tile) {
                const int own = first + tile * (int)w.cost_of_tile + TILE_COST;
                const bool begins = own - TILE_COST >= plan.begin && own - TILE_COST < plan.end,
                           empty = w.chunks == 0 && begins;
                /* all later tiles begin after the block's share */
                if (own - (c.whole_tiles ? TILE_COST : 0) >= plan.end && !empty) return false;
                int chunk0 = max(plan.begin - own, 0), chunk1 = min(plan.end - own, w.chunks);
                if (c.whole_tiles) {
                    chunk0 = 0;
                    chunk1 = begins ? w.chunks : 0;
                }
                if (chunk0 >= chunk1 && !empty) continue;
                const int row_group = tile / c.head_sets, warp = threadIdx.x / 32;
                x.s = s;
                x.b = b;
                x.head_set = tile - row_group * c.head_sets;
                x.row0 = row_group * c.lanes;
                x.last_row = min(x.row0 + c.lanes, w.rows) - 1;
                x.leading = !empty && !c.whole_tiles && own < plan.begin;
                x.whole = empty || c.whole_tiles || (!x.leading && own + w.chunks <= plan.end);
                x.head_kv = x.head_set * c.block_heads + warp % c.block_heads;
                see_keys(x, a);
                share.stride = c.chunk_keys;
                share.own = own;
                share.chunks = w.chunks;
                x.first_key =
                    (w.first_chunk + chunk0) * c.chunk_keys + warp / c.block_heads * STEP_KEYS;
                see_steps<STEP_KEYS>(x, share.stride, chunk1 - chunk0);
                ++tile;
                return true;
            }
            first += (int)w.cost;
        }
        return false;
    }
};

/* ---- 3. the ring ----------------------------------------------------------------------------- */
template <class Pages, bool CLUSTERS> struct Loader {
    static constexpr int stage_bytes = 2 * Pages::tile_bytes;
    Source<Pages::KEYS> source; /* used by the list only */
    /* of the share that is being loaded */
    int b, head_kv, first_key, stride, step, steps, lo, hi;
    int base;      /* the step of lane 0's box */
    int page, row; /* this lane's box */
    /* the box that is 32 boxes further, not checked yet; next_row -1: there is no box */
    int next_page, next_row;
    bool ahead; /* next_page and next_row are loaded */
    float k_scale, v_scale;
    /* clusters: a table entry that was loaded before the length was known, and its key */
    int early_page, early_key;
    int stage, on_the_way;
    /* Two bits for each stage, one for each box. 0: the box has visible keys, but no valid page. */
    unsigned here;
    smem_addr ring_s, barriers_s, scales_s;
    uint64_t policy; /* L2 policy: evict first, since pages are read once */

    __device__ __forceinline__ void begin(const StreamParams &a,
                                          const Chunks<LIST_WARPS, int> &plan, smem_addr ring_,
                                          smem_addr barriers_, smem_addr scales_) {
        if (!CLUSTERS) source.begin(plan);
        ring_s = ring_;
        barriers_s = barriers_;
        scales_s = scales_;
        policy = l2_first_out();
        step = steps = base = 0;
        stage = on_the_way = 0;
        here = 0;
        ahead = false;
        early_key = -1;
        if (CLUSTERS) load_early(a);
    }

    /* The key of this lane's first box in a cluster without a window, and its table entry. */
    static __device__ __forceinline__ int early_place(const StreamParams &a, const int **entry) {
        const Paged &p = a.c.p;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, two = a.boxes - 1;
        const int key = ((int)blockIdx.x * a.warps + warp) * Pages::KEYS +
                        (lane >> two) * (int)a.of_step.by + (lane & two) * (Pages::KEYS >> two);
        *entry = p.table + (a.first_b + (int)blockIdx.z) * p.table_row +
                 a.of_page.into(key) * p.table_entry;
        return key < p.capacity ? key : -1;
    }

    /* Loads the first table entries at the same time as the length instead of after it. Entries
     * past the length are not used. With a window look_up needs other keys, and loads their entries
     * itself. */
    __device__ __forceinline__ void load_early(const StreamParams &a) {
        const int *entry;
        early_key = early_place(a, &entry);
        if (early_key >= 0) early_page = *entry;
    }

    /* Loads the table entry of this lane's box among those from step `from` on. */
    __device__ __forceinline__ void look_up(const StreamParams &a, int from, int &page_,
                                            int &row_) {
        const Paged &p = a.c.p;
        const int lane = threadIdx.x % 32, two = a.boxes - 1, box_keys = Pages::KEYS >> two;
        const int at = from + (lane >> two),
                  key = first_key + at * stride + (lane & two) * box_keys;
        const int entry = (int)a.of_page.into(key);
        row_ = -1;
        if (at >= steps || key >= hi || key + box_keys <= lo) return;
        row_ = key - entry * p.block_size;
        if (CLUSTERS && key == early_key)
            page_ = early_page;
        else
            page_ = p.table[b * p.table_row + entry * p.table_entry];
    }

    /* Checks a table entry that look_up has loaded. A box without keys or without a valid page gets
     * coordinates outside the tensor. Its scale of v is set to 0, so that it does not raise v_base
     * of the rows. */
    __device__ __forceinline__ void accept(const StreamParams &a, int page_, int row_) {
        const Paged &p = a.c.p;
        k_scale = v_scale = 0;
        page = p.num_blocks;
        row = 0;
        if (row_ < 0) return;
        row = row_;
        page = page_;
        if ((unsigned)page_ >= (unsigned)p.num_blocks) {
            report(p.error_word, GK_BAD_BLOCK_TABLE);
            page = -1;
        } else if (Pages::CODES && a.by_page) {
            k_scale = a.k_scale.at<float>(page, head_kv);
            v_scale = a.v_scale.at<float>(page, head_kv);
        }
    }

    __device__ __forceinline__ void look_ahead(const StreamParams &a) {
        if (!ahead) look_up(a, base + (32 >> (a.boxes - 1)), next_page, next_row);
        ahead = true;
    }

    __device__ __forceinline__ void take(const StreamParams &a, const Share &share) {
        const TileShare &x = share.x;
        b = x.b;
        head_kv = x.head_kv;
        first_key = x.first_key;
        stride = share.stride;
        step = base = x.step0;
        steps = x.steps;
        lo = x.lo;
        hi = x.hi;
        ahead = false;
        if (step >= steps) return;
        int page_, row_;
        look_up(a, base, page_, row_);
        accept(a, page_, row_);
    }

    /* Fills the free stages of the ring. All lanes take part. */
    __device__ __forceinline__ void fill(const StreamParams &a,
                                         const Chunks<LIST_WARPS, int> &plan) {
        while (on_the_way < a.stages) {
            while (step >= steps) {
                Share share;
                if (CLUSTERS || !source.next(a, plan, share)) return;
                take(a, share);
            }
            if (step - base >= 32 >> (a.boxes - 1)) {
                look_ahead(a);
                base += 32 >> (a.boxes - 1);
                accept(a, next_page, next_row);
                ahead = false;
            }
            issue(a);
            ++step;
            ++on_the_way;
            stage = stage + 1 == a.stages ? 0 : stage + 1;
        }
        look_ahead(a); /* issued after the copies, which then do not wait for it */
    }

    __device__ __forceinline__ void issue(const StreamParams &a) {
        const smem_addr full_s = barriers_s + stage * 8, k_s = ring_s + stage * stage_bytes;
        constexpr int COPY_BYTES = Pages::tile_bytes / Pages::COPIES;
        const int box_bytes = COPY_BYTES >> (a.boxes - 1);
        const bool leads = elect_one();
        if (leads) mbarrier_arrive_expect_tx(full_s, stage_bytes);
        unsigned there = 0;
#pragma unroll 1
        for (int i = 0; i < a.boxes; ++i) {
            const int from = (step - base) * a.boxes + i;
            const int its_page = __shfl_sync(0xffffffffu, page, from),
                      its_row = __shfl_sync(0xffffffffu, row, from);
            there |= (unsigned)(its_page >= 0) << i;
            if (leads) {
#pragma unroll
                for (int copy = 0; copy < Pages::COPIES; ++copy) {
                    const tma_at at = {{copy * Pages::COLS, its_row, 0, head_kv, its_page}};
                    const smem_addr to = k_s + copy * COPY_BYTES + i * box_bytes;
                    tma_load_5d_by(to, &a.k, at, full_s, policy);
                    tma_load_5d_by(to + Pages::tile_bytes, &a.v, at, full_s, policy);
                }
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

} // namespace

#endif
