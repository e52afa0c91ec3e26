/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped.cuh: grouped_gemm on Hopper as a policy of shell.cuh. A Kind supplies the products
 * (`take`): grouped_gemm_sm90a.cu for 16 bits, grouped_gemm_fp8_sm90a.cu for e4m3,
 * grouped_gemm_int8_sm90a.cu for int8. Gale et al. 2022, arXiv:2211.15841.
 *
 * Grid: clusters of one block, or of two blocks whose tiles lie side by side. The two share rows
 * of a: each copies half of them to both. Tasks are those of groups.cuh. A cluster takes every
 * p.clusters-th of them, and of the last ones those that grouped_balance.cuh assigns to it. Rows
 * after the last group's end are tasks that store zeros.
 *
 * A block takes tiles of 256 x 128. A stage holds 128 bytes of k of each row. Two warpgroups
 * multiply; warpgroup w takes the blocks of 64 rows w and w + 2. Blocks of rows after the
 * group's end are neither copied nor multiplied, so a group of one row costs a quarter of a
 * tile's products. A copy may bring rows of the next group, but no stored result depends on
 * them.
 *
 * Groups of k: a group's last step may bring rows of k of another group, which may hold NaN. They
 * are overwritten with zeros in shared memory before they are multiplied.
 *
 * 16-bit results go through a warp's staging tile in rows of 128 bytes, clipped to the group's
 * rows. Results with a bias or an activation, float32 results and misaligned ones go through it
 * as floats, and a lane stores four columns. */
#ifndef GPUKERN_CUDA_PRODUCT_GROUPED_CUH
#define GPUKERN_CUDA_PRODUCT_GROUPED_CUH

#include "../host/tensormap.cuh"
#include "gemm/panels.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/wgmma.cuh"
#include "quant/groups.cuh"
#include "quant/product.cuh"
#include "grouped_balance.cuh"
#include "shell.cuh"

namespace {

/* Shared memory of a Kind. Elements have BYTES bytes. a is M-major (groups of k) or K-major, b
 * N-major or K-major. */
template <int BYTES, bool BY_K_, bool ALONG_N_> struct GroupedTile {
    static constexpr bool BY_K = BY_K_, ALONG_M = BY_K, ALONG_N = ALONG_N_;
    static constexpr int BM = GROUPED_BM, BN = GROUPED_BN, BK = WGMMA_ROW_BYTES / BYTES;
    /* A quarter of the tile's rows: one copy and one WGMMA. */
    typedef wgmma_tile<64, ALONG_M, BK> TileA;
    typedef wgmma_tile<BN, ALONG_N, BK> TileB;
    typedef smem_tile<16, 128> Panel; /* a warp's staging tile of 16 rows */
    static constexpr int A_BYTES = 4 * TileA::bytes, STAGE_BYTES = A_BYTES + TileB::bytes,
                         STAGES = GROUPED_STAGES;
    static constexpr int STAGING = STAGES * STAGE_BYTES,
                         SCALES = STAGING + 8 * Panel::bytes, /* 8 bits: columns of two tiles */
        LIST = SCALES + (BYTES == 1 ? 2 * BN * 4 : 0);
};

struct GroupedParams {
    CUtensorMap a, b; /* a: [rows][k] or [k][rows]; b: [groups][n][k], [groups][k][n] or [k][n] */
    Groups groups;
    Finish f;
    int64_t bias_group;          /* elements of bias from group to group */
    int m, n, k, pair, clusters; /* pair: blocks of a cluster */
    int steps;                   /* of k; 0: all tasks are taken in turn (grouped_balance.cuh) */
    bool no_epilogue;            /* no epilogue: rounds to 16 bits, and rows are whole 16 bytes */
    bool fours;                  /* otherwise: four results of a row are aligned */
    gk_scales sa, sb;            /* 8 bits */
    bool apart;                  /* 8 bits: as in ScaledParams */
    /* Distances in elements: of b's scales from group to group; of both operands' scales from one
     * block of k to the next. */
    int64_t scale_group, step_a, step_b;
};

/* ---- 1. the epilogue ------------------------------------------------------------------------- */
__device__ __forceinline__ float bias_at(const Finish &f, int64_t at) {
    if (f.bias_dtype == GK_F32) return ((const float *)f.bias)[at];
    return f.bias_dtype == GK_BF16 ? to_f32(((const __nv_bfloat16 *)f.bias)[at])
                                   : to_f32(((const __half *)f.bias)[at]);
}

template <class R>
__device__ __forceinline__ void write_four(R *to, bool at_once, int cols, const float (&v)[4]) {
    if (at_once && cols >= 4 && sizeof(R) == 2) {
        *(uint2 *)to = make_uint2(pack2<R>(v[0], v[1]), pack2<R>(v[2], v[3]));
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < cols) to[e] = from_f32<R>(v[e]);
}
template <>
__device__ __forceinline__ void write_four(float *to, bool at_once, int cols, const float (&v)[4]) {
    if (at_once && cols >= 4) {
        *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < cols) to[e] = v[e];
}

/* Stores any kind of result: 16 rows x 32 columns of sums from a warp's staging tile, from row
 * `row` and column `col0` on. A lane takes 4 columns of every fourth row. */
template <class R, class Panel>
__device__ __forceinline__ void finish_some(const GroupedParams &p, int group, int64_t row,
                                            int rows, int col0, smem_addr panel_s, int lane) {
    const int col = col0 + lane % 8 * 4, cols = p.n - col;
    const bool given = group < p.groups.count; /* rows of no group are zeros */
    float bias[4] = {};
    if (p.f.bias && given)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (e < cols) bias[e] = bias_at(p.f, group * p.bias_group + (col + e) * p.f.bias_step);
#pragma unroll 1
    for (int r = lane / 8; r < min(rows, 16); r += 4) {
        const uint4 x = ld_shared_128(panel_s + Panel::offset(r, lane % 8));
        float v[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                      __uint_as_float(x.w)};
        if (p.f.bias && given) /* a branch, since adding 0 would turn -0 into +0 */
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] += bias[e];
        const int64_t at = (row + r) * p.n + col;
        if (p.f.out_dtype == GK_F32) {
            if (given) activate_in_place<4>(p.f.activation, v);
            write_four((float *)p.f.out + at, p.fours, cols, v);
        } else {
            if (given) activate_16<4>(p.f.activation, v);
            write_four((R *)p.f.out + at, p.fours, cols, v);
        }
    }
}

/* Stores a warp's 16 x 128 sums. R: 16-bit type of results. row: the first row in the result.
 * rows: how many of the 16 belong to the group. */
template <class R, class Panel>
__device__ __forceinline__ void store_sums(const GroupedParams &p, float (&v)[64], int group,
                                           int64_t row, int rows, int col0, smem_addr panel_s) {
    const int lane = laneid(); /* read again, so that no register holds it over the products */
    if (rows <= 0) return;
    if (p.no_epilogue) {
        uint16_t *const to = (uint16_t *)p.f.out + row * p.n + col0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            put_panels<R, Panel, 32, false>(v + 32 * i, panel_s, lane);
            send_chunks<Panel, 64>(to + 64 * i, p.n, rows, p.n - col0 - 64 * i, panel_s, lane);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) { /* not unrolled: shifts the values down */
        __syncwarp();             /* the panel's last contents have been read */
        put_floats<Panel>(panel_s, v, lane);
        __syncwarp();
        finish_some<R, Panel>(p, group, row, rows, col0 + 32 * i, panel_s, lane);
#pragma unroll
        for (int j = 0; j < 48; ++j) v[j] = v[j + 16];
    }
}

/* ---- 2. a block ------------------------------------------------------------------------------ */
/* A task, as both producer and consumers see it. */
template <class K> struct Work {
    Task task;
    /* row: the tile's first row, in a and in a group's result. blocks: blocks of 64 rows that have
     * rows of the group. steps: of k. */
    int row, blocks, steps;
    int valid; /* groups of k: rows of k in the last step */

    __device__ __forceinline__ Work(const GroupedParams &p, const GroupList &list, int t)
        : task(find_task<K::BY_K, K::BM>(p.groups, list, t, p.clusters)) {
        const int k = K::BY_K ? task.end - task.begin : task.group < p.groups.count ? p.k : 0;
        row = (K::BY_K ? 0 : task.begin) + task.row;
        blocks = (task.limit - task.row + 63) / 64;
        steps = (k + K::BK - 1) / K::BK;
        valid = k - (steps - 1) * K::BK;
    }

    /* Turns this into a task without rows and without k. */
    __device__ __forceinline__ void clear() {
        blocks = 0;
        steps = 0;
    }

    /* Leaves a half of the rows. */
    __device__ __forceinline__ void halve(bool top) {
        const int half = (blocks + 1) / 2;
        if (top) {
            task.limit = task.row + 64 * half;
            blocks = half;
        } else {
            task.row += 64 * half;
            row += 64 * half;
            blocks -= half;
        }
    }
};

/* Releases a stage to each block of the cluster; all consumer threads call it. */
struct Releaser {
    const GroupedParams &p;

    __device__ __forceinline__ void operator()(smem_addr empty_s) const {
        const unsigned rank = threadIdx.x % 128;
        if (p.pair == 1) {
            if (rank == 0) mbarrier_arrive(empty_s);
        } else if (rank < 2) {
            mbarrier_arrive_cluster(empty_s, rank);
        }
    }
};

/* 128 threads set rows `valid` to 63 of a panel of [64][64] elements to zero. */
__device__ __forceinline__ void clear_rows(smem_addr panel_s, int valid) {
    for (int i = valid * 8 + (int)threadIdx.x % 128; i < 64 * 8; i += 128)
        st_shared_128(panel_s + 16 * i, make_uint4(0, 0, 0, 0));
}

/* In the last step of a group of k, sets the rows of k after the group's end to zero: in this
 * warpgroup's blocks of a, and in half of b. */
template <class K>
__device__ __forceinline__ void clear_rest(smem_addr a_s, smem_addr b_s, int warpgroup, int blocks,
                                           int valid) {
    for (int m = 0; m < blocks; ++m) clear_rows(a_s + 2 * m * K::TileA::bytes, valid);
    clear_rows(b_s + warpgroup * K::TileB::panel_bytes, valid);
    fence_proxy_async();
    bar_sync(1, 256);
}

/* A warpgroup without rows in the task: it multiplies nothing but must still release every
 * stage. */
template <class K>
__device__ __forceinline__ void pass(tma_ring<K::STAGES> &ring, smem_addr ring_s, const Work<K> &x,
                                     const Releaser &release) {
    const int warpgroup = threadIdx.x / 128;
    for (int step = 0; step < x.steps; ++step) {
        ring.wait_full();
        const smem_addr b_s = ring_s + ring.stage * K::STAGE_BYTES + K::A_BYTES;
        if (K::BY_K && step == x.steps - 1 && x.valid < K::BK)
            clear_rest<K>(0, b_s, warpgroup, 0, x.valid);
        release(ring.empty());
        ring.advance();
    }
}

/* Rows of this warp's block m of 64 rows: the first row in a and in the result, and how many of
 * the warp's 16 belong to the tile. */
struct WarpRows {
    int64_t out;
    int a, count;
};
template <class K>
__device__ __forceinline__ WarpRows warp_rows(const GroupedParams &p, const Work<K> &x, int m,
                                              unsigned thread) {
    const int at = 64 * ((int)thread / 128 + 2 * m) + (int)thread / 32 % 4 * 16;
    return {(K::BY_K ? (int64_t)x.task.group * p.m : 0) + x.row + at, x.row + at,
            min(16, x.task.limit - x.task.row - at)};
}
template <class K> __device__ __forceinline__ smem_addr staging(smem_addr ring_s, unsigned thread) {
    return ring_s + K::STAGING + thread / 32 * K::Panel::bytes;
}

/* ---- scales of 8-bit operands that do not change along k ------------------------------------- */
/* Reads the scales of a tile's columns into shared memory. All consumer threads call it. */
template <class K>
__device__ __forceinline__ void read_column_scales(const GroupedParams &p, const Work<K> &x,
                                                   int col0, float *scales) {
    const int i = (int)threadIdx.x;
    if (i < K::BN) {
        gk_scales sb = p.sb;
        sb.data = (const float *)sb.data + min(x.task.group, p.groups.count - 1) * p.scale_group;
        scales[i] = scale_of(sb, 0, min(col0 + i, p.n - 1));
    }
    bar_sync(1, 256);
}

/* Multiplies a thread's sums of 16 x 128 by the scales of its two rows and of its columns. scales:
 * from the thread's first column on. */
__device__ __forceinline__ void scale_sums(float (&sum)[64], const float (&sa)[2],
                                           const float *scales) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 sb = *(const float2 *)(scales + 8 * j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[4 * j + 2 * h] = times_scales(sum[4 * j + 2 * h], sa[h], sb.x);
            sum[4 * j + 2 * h + 1] = times_scales(sum[4 * j + 2 * h + 1], sa[h], sb.y);
        }
    }
}

/* Sums COUNT blocks of 64 rows of a warpgroup over all of k, in WGMMA's accumulators. One step is
 * in flight while the next is issued. K::issue issues one product of 64 rows. D: a sum. */
template <class K, int COUNT, class D>
__device__ __forceinline__ void sum_over_k(tma_ring<K::STAGES> &ring, smem_addr ring_s,
                                           D (&sum)[COUNT][64], const Work<K> &x,
                                           const Releaser &release) {
    const int warpgroup = threadIdx.x / 128;
    /* a group without k and rows of no group have sums of 0 */
#pragma unroll
    for (int i = 0; i < COUNT * 64; ++i) sum[i / 64][i % 64] = 0;
    for (int step = 0; step < x.steps; ++step) {
        ring.wait_full();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
        if constexpr (K::BY_K) {
            /* Computed anew: with stage_s the compiler orders the loop of groups of k otherwise. */
            const smem_addr a_s =
                                ring_s + ring.stage * K::STAGE_BYTES + warpgroup * K::TileA::bytes,
                            b_s = ring_s + ring.stage * K::STAGE_BYTES + K::A_BYTES;
            if (step == x.steps - 1 && x.valid < K::BK)
                clear_rest<K>(a_s, b_s, warpgroup, COUNT, x.valid);
        }
        const uint64_t a = K::TileA::descriptor(stage_s + warpgroup * K::TileA::bytes),
                       b = K::TileB::descriptor(stage_s + K::A_BYTES);
#pragma unroll
        for (int m = 0; m < COUNT; ++m) wgmma_pin(sum[m]);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
                K::issue(
                    sum[m],
                    wgmma_descriptor_add(a, 2 * m * K::TileA::bytes + kk * K::TileA::step_bytes),
                    wgmma_descriptor_add(b, kk * K::TileB::step_bytes));
        wgmma_commit_group();
        wgmma_wait_group<1>(); /* the previous step has finished reading its stage */
        if (step > 0) release(ring.before());
        ring.advance();
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int m = 0; m < COUNT; ++m) wgmma_pin(sum[m]);
    if (x.steps > 0) release(ring.before());
}

/* The policy of shell.cuh. K: a Kind, which has `prepare` and `take`. */
template <class K> struct Grouped : OneResult {
    typedef GroupedParams Params;
    typedef Work<K> Tile;
    /* With block scales, no register is left for an opaque base. */
    static constexpr bool SHARES = true, LISTS = true, OPAQUE_BASE = false;
    static constexpr int CONSUMERS = 2, PRODUCER_WARPS = 4, PER_SM = 1, CONSUMER_REGS = 240,
                         PRODUCER_REGS = 24;
    static constexpr int STAGES = K::STAGES, EMPTY_ARRIVALS = 2;
    /* Groups of k have tasks of equal height. */
    static constexpr bool HELPERS = !K::BY_K;
    static constexpr int MORE_BARRIERS = HELPERS;
    static constexpr int BALANCE = K::LIST + (int)sizeof(GroupList);
    static constexpr int BARRIERS_AT =
        (BALANCE + (HELPERS ? (int)sizeof(Balance) : 0) + 15) / 16 * 16;
    static constexpr int BALANCED_AT = BARRIERS_AT + tma_ring<STAGES>::bytes; /* the barrier */
    static GK_HD int cluster(const Params &p) { return p.pair; }
    static __device__ __forceinline__ unsigned stride(const Params &p) {
        return (unsigned)p.clusters;
    }

    static __device__ __forceinline__ void begin(const Params &p, smem_addr base_s) {
        if (HELPERS) mbarrier_init(base_s + BALANCED_AT, 1);
        prefetch_tensormap(&p.a);
        prefetch_tensormap(&p.b);
    }
    template <class S> static __device__ __forceinline__ GroupList &list_of(const S &shell) {
        return *(GroupList *)(shell.base + K::LIST);
    }
    template <class S> static __device__ __forceinline__ Balance &balance_of(const S &shell) {
        return *(Balance *)(shell.base + BALANCE);
    }
    template <class S> static __device__ __forceinline__ void list(const S &shell) {
        const Params &p = shell.p;
        list_groups<K::BY_K, K::BM>(p.groups, list_of(shell), threadIdx.x % 32);
        if constexpr (HELPERS) {
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                balance_begin(balance_of(shell), tasks_in(p.groups, list_of(shell)), p.clusters,
                              p.steps);
        }
    }
    template <class S> static __device__ __forceinline__ unsigned tiles(const S &shell) {
        if constexpr (HELPERS) return balance_of(shell).ends;
        return (unsigned)tasks_in(shell.p.groups, list_of(shell));
    }
    template <class S> static __device__ __forceinline__ Tile tile(const S &shell, unsigned t) {
        int task = (int)t, part = BALANCE_WHOLE;
        if constexpr (HELPERS) {
            const Balance &balance = balance_of(shell);
            if (task >= balance.first) {
                mbarrier_wait(shell.base_s + BALANCED_AT, 0);
                const int *mine = balance.mine[balance.chosen];
                for (int i = task - balance.first; i >= shell.p.clusters; i -= shell.p.clusters)
                    ++mine;
                task = *mine / BALANCE_PARTS;
                part = *mine < 0 ? -1 : *mine % BALANCE_PARTS;
            }
        }
        Tile tile(shell.p, list_of(shell), task);
        if constexpr (HELPERS) {
            if (part < 0)
                tile.clear();
            else if (part != BALANCE_WHOLE)
                tile.halve(part == BALANCE_TOP);
        }
        return tile;
    }
    /* One warp of the producers assigns the last tasks. */
    template <class S> static __device__ __forceinline__ void help(const S &shell) {
        Balance &balance = balance_of(shell);
        if (shell.warp != 4 * CONSUMERS + 1 || balance.first == INT32_MAX) return;
        balance_tasks<K::BM>(shell.p.groups, list_of(shell), shell.p.clusters, (int)shell.first(),
                             balance);
        if (laneid() == 0) mbarrier_arrive(shell.base_s + BALANCED_AT);
    }
    template <class S> static __device__ __forceinline__ int steps(const S &, const Tile &x) {
        return x.steps;
    }

    struct Source {
        const Tile &x;
        int rank, col, k0;

        template <class S>
        __device__ __forceinline__ Source(const Params &p, const S &shell, const Tile &tile)
            : x(tile), rank((int)shell.rank),
              col((tile.task.col * p.pair + (int)shell.rank) * K::BN),
              k0(K::BY_K ? tile.task.begin : 0) {}

        __device__ __forceinline__ void fill(const Params &p, const ProductStage &s) const {
            const smem_addr a_s = s.base_s + s.stage * K::STAGE_BYTES, b_s = a_s + K::A_BYTES;
            const int k = k0 + s.step * K::BK;
            mbarrier_arrive_expect_tx(s.full_s, x.blocks * K::TileA::bytes + K::TileB::bytes);
#pragma unroll
            for (int i = 0; i < K::TileB::panels; ++i) {
                const int n = col + 64 * i;
                const tma_at at = {
                    {K::ALONG_N ? n : k, K::ALONG_N ? k : n, K::BY_K ? 0 : x.task.group}};
                tma_load_5d(b_s + i * K::TileB::panel_bytes, &p.b, at, s.full_s);
            }
            for (int i = rank; i < x.blocks; i += p.pair) {
                const int row = x.row + 64 * i;
                const tma_at at = {{K::ALONG_M ? row : k, K::ALONG_M ? k : row}};
                if (p.pair == 1)
                    tma_load_5d(a_s + i * K::TileA::bytes, &p.a, at, s.full_s);
                else
                    tma_load_5d_multicast(a_s + i * K::TileA::bytes, &p.a, at, s.full_s, 3);
            }
        }
    };

    struct Consumer {
        Releaser release;

        template <class S>
        __device__ __forceinline__ explicit Consumer(const S &shell) : release{shell.p} {}

        template <class S> __device__ __forceinline__ void take(S &shell, const Tile &x, int turn) {
            const Params &p = shell.p;
            const int warpgroup = (int)threadIdx.x / 128,
                      rank = p.pair == 1 ? 0 : (int)cluster_ctarank();
            const int col0 = (x.task.col * p.pair + rank) * K::BN;
            float *const scales = (float *)(shell.base + K::SCALES) + turn % 2 * K::BN;
            /* Two sets of scales: a warpgroup may be one tile ahead of the other. */
            K::prepare(p, x, col0, scales);
            if (x.blocks + 1 - warpgroup >= 4)
                K::template take<2>(p, shell.ring, shell.base_s, x, col0, scales, release);
            else if (x.blocks + 1 - warpgroup >= 2)
                K::template take<1>(p, shell.ring, shell.base_s, x, col0, scales, release);
            else
                pass<K>(shell.ring, shell.base_s, x, release);
        }
        template <class S> __device__ __forceinline__ void end(const S &) const {}
    };
};

/* ---- 3. plan and run ------------------------------------------------------------------------- */
/* x [rows][cols], or `groups` of them, as a tensor for TMA, with dense columns. */
TensorShape shape_of(const gk_tensor &t, bool transposed) {
    const int r = t.ndim - 2 + transposed, c = t.ndim - 1 - transposed;
    TensorShape s = {
        t.data, t.dtype, {t.shape[c], t.shape[r], 1, 1, 1}, {1, t.stride[r], 0, 0, 0}, false};
    if (t.ndim == 3) {
        s.size[2] = t.shape[0];
        s.stride[2] = t.stride[0];
    }
    return s;
}

bool reads(const gk_tensor &t, bool transposed) {
    const int c = t.ndim - 1 - transposed;
    return (t.stride[c] == 1 || t.shape[c] == 1) && tensor_map_fits(shape_of(t, transposed));
}

/* The conditions that every Kind has in common. */
inline bool grouped_fits(const gk_grouped_gemm_args *g, bool by_k, bool along_n, gk_plan *plan) {
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->b.shape[g->b.ndim - 1],
                  groups = g->offs.shape[0];
    if (by_k != (g->b.ndim == 2) || groups < 1 || groups > GROUPED_MOST) return false;
    if (m < 1 || n < 1 || k < 1 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (!reads(g->a, by_k) || !reads(g->b, !along_n)) return false;
    const int64_t across = gk_ceil_div(n, GROUPED_BN),
                  down = gk_ceil_div(m, GROUPED_BM) * (by_k ? groups : 1) + groups;
    if (!gk_grid_fits(2 * across * down)) return false;
    plan->tile[0] = GROUPED_BM;
    plan->tile[1] = GROUPED_BN;
    plan->tasks = across * down;
    return true;
}

/* Fills in the scales of 8-bit operands. */
inline void set_scales(const gk_grouped_gemm_args *g, GroupedParams &p) {
    p.sa = gk_scales_of(g->scale_a, g->a.shape[0], g->a.shape[1], false);
    p.sb = gk_scales_of(g->scale_b, g->a.shape[1], g->b.shape[2], true);
    p.scale_group = g->scale_b->ndim == 3 ? g->scale_b->stride[0] : 0;
}

/* Fills in all of p but the scales, and launches. */
template <class K>
gk_status run_grouped(const gk_context *ctx, const gk_grouped_gemm_args *g, const gk_plan *plan,
                      GroupedParams &p) {
    const int bytes = (int)gk_dtype_bytes(g->a.dtype);
    gk_status status =
        make_tensor_map("grouped_gemm", shape_of(g->a, K::ALONG_M), wgmma_box(bytes, 64), &p.a);
    if (status == GK_OK)
        status = make_tensor_map("grouped_gemm", shape_of(g->b, !K::ALONG_N),
                                 wgmma_box(bytes, K::ALONG_N ? 64 : K::BN), &p.b);
    if (status != GK_OK) return status;
    p.m = (int)g->a.shape[0];
    p.k = (int)g->a.shape[1];
    p.n = (int)g->b.shape[g->b.ndim - 1];
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    if (g->bias) {
        p.f.bias_step = g->bias->stride[g->bias->ndim - 1];
        if (g->bias->ndim == 2) p.bias_group = g->bias->stride[0];
    }
    const bool aligned = (uintptr_t)g->out.data % 16 == 0;
    p.no_epilogue = !g->bias && g->activation == GK_ACT_NONE && g->out.dtype != GK_F32 &&
                    p.n % 8 == 0 && aligned;
    p.fours = p.n % 4 == 0 && aligned;
    const int tiles_n = (int)gk_ceil_div(p.n, K::BN), sms = gk_gpu_of(ctx->index)->num_sms;
    p.pair = tiles_n % 2 == 0 || tiles_n > GROUPED_PAIRS ? 2 : 1;
    p.groups = {(const int32_t *)g->offs.data,
                g->offs.stride[0],
                K::BY_K ? p.k : p.m,
                (int)g->offs.shape[0],
                p.m,
                (int)gk_ceil_div(tiles_n, p.pair),
                ctx->error_word};
    p.clusters = (int)gk_min_i64(gk_ceil_div(plan->tasks, p.pair) + 1, gk_clusters_of(sms, p.pair));
    const int steps = (int)gk_ceil_div(p.k, K::BK);
    if (!K::BY_K && balance_pays(p.m, p.groups.count, p.groups.across, p.clusters, steps))
        p.steps = steps;
    return launch_clusters<Grouped<K>>("grouped_gemm", ctx, p, p.clusters);
}

} // namespace

#endif
