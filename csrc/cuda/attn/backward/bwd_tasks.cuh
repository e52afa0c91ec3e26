/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_tasks.cuh: the rows and rounding tasks of the Hopper backward (bwd_order.cuh), which the
 * kernel of bwd_consumer.cuh runs in some of its blocks.
 *
 * A rows task computes lse and delta of some tiles of rows and zeroes their dq_sum, before the keys
 * tasks that need them. A rounding task scales and rounds dQ after all keys tasks of its unit have
 * added to it. Both are bound by memory bandwidth. They run while other blocks multiply, so their
 * time is hidden. */
#ifndef GPUKERN_CUDA_BWD_TASKS_CUH
#define GPUKERN_CUDA_BWD_TASKS_CUH

#include "../../ptx/stmatrix.cuh"
#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "../../tile/reduce.cuh"
#include "bwd_producer.cuh"

/* ---- 1. shapes ------------------------------------------------------------------------------- */
/* The layout of dq_sum. A warpgroup computes dQ^T [64][N]: 64 columns of d and all rows or, if
 * head_dim is at most 64, all of d and half of the rows. A tile of dq_sum consists of blocks, one
 * from each warp: 16 columns of d by N rows, in the order of the warp's accumulators, which have
 * groups of 8 rows. */
template <class Tile> struct DqShape {
    static constexpr bool BY_D = Tile::HEAD_DIM > 64;
    static constexpr int N = BY_D ? Tile::BQ : Tile::BQ / 2;
    /* blocks of a tile, each from one warp */
    static constexpr int BLOCKS = BY_D ? Tile::HEAD_DIM / 16 : 8;
    static constexpr int FLOATS = Tile::BQ * Tile::HEAD_DIM;
    static_assert(BLOCKS * N * 16 == FLOATS && N % 16 == 0, "blocks make up the tile");
};

/* ---- 2. rows --------------------------------------------------------------------------------- */
/* The dot product of eight 16-bit elements, summed in float32. */
template <class T> __device__ __forceinline__ float dot8(const uint4 &a, const uint4 &b) {
    union Eight {
        uint4 bits;
        T x[8];
        __device__ Eight(const uint4 &from) : bits(from) {}
    } left(a), right(b);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += to_acc(left.x[e]) * to_acc(right.x[e]);
    return sum;
}

/* What a thread loads for PASSES rows, which are STEP rows apart. */
template <int PASSES> struct BwdRowLoads {
    uint4 out[PASSES], grad[PASSES];
    float lse[PASSES];
};

/* Computes the stats of `count` tiles of a head, as flash_attn_bwd_pre does, and zeroes their
 * dq_sum. LANES threads work on a row. The loads of the next PASSES rows are in flight while this
 * code sums the present ones. */
template <class T, class Tile, int THREADS>
__device__ __forceinline__ void rows_of_tiles(const Bwd &g, int b, int head, int tile0, int count,
                                              smem_addr smem_s) {
    constexpr int BQ = Tile::BQ, LANES = Tile::HEAD_DIM_V > 128  ? 32
                                         : Tile::HEAD_DIM_V > 64 ? 16
                                                                 : 8;
    constexpr int STEP = THREADS / LANES, PASSES = 6;
    const Sequence s = sequence_of(g.p, b);
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES, i0 = tile0 * BQ;
    /* rows of the workspace, some of them past the sequence */
    const int rows = min(count, g.tiles - tile0) * BQ;
    const int64_t tile = (int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile0;
    const T *out = (const T *)g.p.out.data + b * g.p.out.batch + head * g.p.out.head + lane * 8;
    const T *grad_out =
        (const T *)g.grad_out.data + b * g.grad_out.batch + head * g.grad_out.head + lane * 8;
    const float *lse = (const float *)g.p.lse.data + b * g.p.lse.batch + head * g.p.lse.head;
    const float *grad_lse =
        (const float *)g.grad_lse.data + b * g.grad_lse.batch + head * g.grad_lse.head;
    const int end = min(i0 + rows, s.seq_q);
    const bool has_columns = lane * 8 < g.p.head_dim_v;

    BwdRowLoads<PASSES> now, next;
    const auto load = [&](BwdRowLoads<PASSES> &x, int i) {
#pragma unroll
        for (int p = 0; p < PASSES; ++p, i += STEP) {
            x.out[p] = x.grad[p] = make_uint4(0, 0, 0, 0);
            x.lse[p] = -INFINITY;
            if (i < end) x.lse[p] = lse[i * g.p.lse.row];
            if (i < end && has_columns) {
                x.out[p] = *(const uint4 *)(out + i * g.p.out.row);
                x.grad[p] = *(const uint4 *)(grad_out + i * g.grad_out.row);
            }
        }
    };
    load(now, i0 + first);
    /* One tile of zeros in shared memory is copied to every tile by bulk copies. Stores from
     * registers would delay the loads. */
    for (int n = threadIdx.x; n < BQ * Tile::HEAD_DIM / 4; n += THREADS)
        st_shared_128(smem_s + n * 16, make_uint4(0, 0, 0, 0));
    fence_proxy_async();
    __syncthreads(); /* the zeros are complete */
    if (threadIdx.x == 0) {
        for (int n = 0; n < rows / BQ; ++n)
            bulk_store(g.dq_sum + (tile + n) * BQ * Tile::HEAD_DIM, smem_s,
                       BQ * Tile::HEAD_DIM * 4);
        tma_store_commit_group();
    }
    float *stats = (float *)g.stats + tile * BQ * 2;
#pragma unroll 1
    for (int at = 0; at < rows; at += PASSES * STEP) {
        load(next, i0 + first + at + PASSES * STEP);
        /* All sums are computed before the first store. Their shuffles are independent and overlap,
         * so their latency is paid once. */
        float delta[PASSES];
#pragma unroll
        for (int p = 0; p < PASSES; ++p)
            delta[p] = lanes_sum<1, LANES>(dot8<T>(now.out[p], now.grad[p]));
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int r = at + first + p * STEP, i = i0 + r;
            if (lane > 0 || r >= rows) continue;
            /* a row without keys contributes nothing, whatever its grad_out holds */
            const bool alive = now.lse[p] != -INFINITY && s.span.lo(i) < s.span.hi(i);
            if (alive && g.grad_lse.data) delta[p] -= grad_lse[i * g.grad_lse.row];
            float *to = stats + r / BQ * BQ * 2 + r % BQ;
            to[0] = alive ? now.lse[p] * (float)g.lse_factor : INFINITY;
            to[BQ] = alive ? delta[p] : 0;
        }
        now = next;
    }
    if (threadIdx.x == 0) tma_store_wait_group<0>();
}

/* ---- 3. dq = scale * dq_sum ------------------------------------------------------------------ */
/* Writes dq in float32 from dq_sum; eight lanes write 32 bytes of a row. */
template <class Tile, int THREADS>
__device__ __forceinline__ void scale_tiles(const Bwd &g, int b, int head, int tile, int count) {
    typedef DqShape<Tile> Dq;
    /* groups of 8 rows in a block; groups in a tile */
    constexpr int EIGHTS = Dq::N / 8, PARTS = Dq::BLOCKS * EIGHTS;
    const Sequence s = sequence_of(g.p, b);
    const int lane = threadIdx.x % 32, i0 = tile * Tile::BQ;
    if (i0 >= s.seq_q) return;
    const float *from = g.dq_sum +
                        ((int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile) * Dq::FLOATS +
                        lane * 4;
    float *dq = (float *)g.dq.data + b * g.dq.batch + head * g.dq.head + (int64_t)s.q0 * g.dq.row;
    const float scale = (float)g.p.rules.scale;
    const int tiles = min(count, (s.seq_q - i0 + Tile::BQ - 1) / Tile::BQ);
#pragma unroll 4
    for (int i = threadIdx.x / 32; i < tiles * PARTS; i += THREADS / 32) {
        const int n = i / PARTS, block = i % PARTS / EIGHTS, eight = i % EIGHTS;
        const float4 d =
            __ldcg((const float4 *)(from + n * Dq::FLOATS + block * (Dq::N * 16) + eight * 128));
        const coord c = dq_sum_place(lane, block, eight, Dq::N, Dq::BY_D);
        const int row = i0 + n * Tile::BQ + c.row;
        float *to = dq + row * g.dq.row + c.col;
        if (c.col < g.p.head_dim && row < s.seq_q) to[0] = d.x * scale;
        if (c.col < g.p.head_dim && row + 1 < s.seq_q) to[g.dq.row] = d.y * scale;
        if (c.col + 8 < g.p.head_dim && row < s.seq_q) to[8] = d.z * scale;
        if (c.col + 8 < g.p.head_dim && row + 1 < s.seq_q) to[g.dq.row + 8] = d.w * scale;
    }
}

/* Writes dq in 16 bits, for `count` <= COUNT tiles of a head from `tile` on. The tiles are
 * transposed in shared memory, which has room for COUNT of them. spoilt: see BwdHopperParams. */
template <class T, class Tile, int THREADS, int COUNT>
__device__ __forceinline__ void round_tiles(const Bwd &g, int b, int head, int tile, int count,
                                            smem_addr smem_s, unsigned *spoilt = NULL) {
    typedef DqShape<Tile> Dq;
    typedef smem_tile<Tile::BQ, Tile::HEAD_DIM * 2> Queries;
    static_assert(COUNT * Queries::bytes <= BwdSmem<Tile>::RING,
                  "the tiles lie where the products' would");
    constexpr int PAIRS = Dq::N / 16; /* pairs of 8 rows in a block */
    const Sequence s = sequence_of(g.p, b);
    const int lane = threadIdx.x % 32, i0 = tile * Tile::BQ;
    if (i0 >= s.seq_q) return;
    const float *from = g.dq_sum +
                        ((int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile) * Dq::FLOATS +
                        lane * 4;
    const float scale = (float)g.p.rules.scale;
    const int tiles = min(count, (s.seq_q - i0 + Tile::BQ - 1) / Tile::BQ);
    constexpr int PARTS = Dq::BLOCKS * PAIRS; /* pairs in a tile, one for each warp */
#pragma unroll COUNT> 1 ? 8 : 1
    for (int i = threadIdx.x / 32; i < tiles * PARTS; i += THREADS / 32) {
        const int n = i / PARTS, block = i % PARTS / PAIRS, pair = i % PAIRS;
        const float *part = from + n * Dq::FLOATS + block * (Dq::N * 16) + 2 * pair * 128;
        uint32_t four[4];
#pragma unroll
        /* read from L2, where the additions were made */
        for (int j = 0; j < 2; ++j) {
            const float4 d = __ldcg((const float4 *)(part + j * 128));
            if (bwd_masked<Tile> && !isfinite(d.x + d.y + d.z + d.w)) *spoilt = 1;
            four[2 * j] = pack2<T>(d.x * scale, d.y * scale);
            four[2 * j + 1] = pack2<T>(d.z * scale, d.w * scale);
        }
        const coord c = dq_place(lane, block, pair, Dq::N, Dq::BY_D);
        stmatrix_x4_trans(smem_s + n * Queries::bytes + Queries::offset(c.row, c.col / 8), four);
    }
    __syncthreads(); /* all rows are complete */
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
        const int row = i0 + n * Tile::BQ;
        copy_tile_out<Queries, THREADS>(
            (T *)g.dq.data + b * g.dq.batch + head * g.dq.head + ((int64_t)s.q0 + row) * g.dq.row,
            g.dq.row, smem_s + n * Queries::bytes, s.seq_q - row, g.p.head_dim, threadIdx.x);
    }
}

/* ---- 4. a block with a rows or rounding task ------------------------------------------------- */
/* Runs a rows or rounding task. Each block of the cluster takes TASK_TILES tiles of rows of one
 * head. The last task of a head, and the last parts of a task, may have no tiles left. */
template <class T, class Tile, class Grad>
__device__ __forceinline__ void other_task(const BwdHopperParams &x, const BwdWork &w,
                                           smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    constexpr int THREADS = S::THREADS;
    const int a_head = x.grid.rows / x.g.p.group;
    const int head = w.kv_head * x.g.p.group + w.task.index / a_head,
              first = (w.task.index % a_head * S::BLOCKS + (Tile::PAIR ? w.rank : 0)) *
                      Tile::TASK_TILES;
    static_assert(Tile::TASK_TILES % BwdGrid::PARTS == 0, "parts are equal");
    const int count = w.task.parts > 1 ? Tile::TASK_TILES / BwdGrid::PARTS : Tile::TASK_TILES,
              tile = first + w.task.part * count;
    if (w.task.kind == BWD_ROWS) {
        if (tile < x.g.tiles) rows_of_tiles<T, Tile, THREADS>(x.g, w.b, head, tile, count, smem_s);
        __syncthreads(); /* all stats and zeros are written */
        if (threadIdx.x == 0)
            red_add_release(x.rows_done + w.task.unit, w.task.parts > 1 ? 1 : BwdGrid::PARTS);
    } else {
        if (threadIdx.x == 0) wait_count(x.keys_done + w.task.unit, x.grid.keys * S::BLOCKS);
        __syncthreads(); /* all keys tasks have made their additions */
        if constexpr (sizeof(Grad) == 4)
            scale_tiles<Tile, THREADS>(x.g, w.b, head, tile, count);
        else
            round_tiles<T, Tile, THREADS, Tile::TASK_TILES>(x.g, w.b, head, tile, count, smem_s,
                                                            x.spoilt);
    }
}

#endif
