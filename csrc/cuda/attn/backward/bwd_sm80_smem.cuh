/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_smem.cuh: the tiles of the kernel of bwd_sm80.cuh, how its warps divide them, and the
 * block's shared memory: the layout, the copies into it, and the values that the loop reads from it
 * because registers are few. */
#ifndef GPUKERN_CUDA_BWD_SM80_SMEM_CUH
#define GPUKERN_CUDA_BWD_SM80_SMEM_CUH

#include "bwd_mma.cuh"

namespace {

/* ---- 1. tiles -------------------------------------------------------------------------------- */
template <class Tile> struct Shape {
    static constexpr int D = Tile::head_dim, BQ = Tile::bq, BKV = Tile::bkv;
    static constexpr int WARPS = Tile::warps, THREADS = WARPS * 32, WARPS_KV = Tile::warps_kv;
    static constexpr int SHARERS = WARPS / WARPS_KV;
    static constexpr int M = BKV / WARPS_KV / 16;       /* a warp has M x 16 keys */
    static constexpr int ROWS_W = BQ / SHARERS;         /* rows of queries of a warp in S and dP */
    static constexpr int COLS_W = D / SHARERS;          /* columns of a warp in dK and dV */
    static constexpr int DQ_ROWS = BQ / Tile::dq_warps; /* rows of a warp in dQ */
    static constexpr int DQ_COLS = D / (WARPS / Tile::dq_warps);  /* columns of a warp in dQ */
    static constexpr int DQ_M = DQ_ROWS / 16, DQ_N = DQ_COLS / 8; /* accumulators of dQ */
    typedef smem_tile<BKV, D * 2> Keys;                           /* K, V [BKV][D] */
    typedef smem_tile<BQ, D * 2> Queries;                         /* Q, dO [BQ][D] */
    typedef smem_tile<BKV, BQ * 2> Scores;                        /* P^T, dS^T [BKV][BQ] */
    static_assert(WARPS_KV * M * 16 == BKV && SHARERS * WARPS_KV == WARPS,
                  "warps share the keys evenly");
    static_assert(ROWS_W % 16 == 0 && COLS_W % 16 == 0 && DQ_ROWS % 16 == 0 && DQ_COLS % 16 == 0,
                  "operands are loaded 16 x 16");
    static_assert((BQ * 8) % 16 == 0 && BQ * 8 / 16 <= THREADS, "one pass copies a tile of stats");
};

/* ---- 2. shared memory ------------------------------------------------------------------------ */
/* Byte offsets in the block's dynamic shared memory. */
template <class Tile> struct Smem {
    typedef Shape<Tile> X;
    /* if several warps have the same keys: P^T and dS^T; otherwise dS^T of this step and of the
     * previous one */
    static constexpr int score_tiles = 2;
    static constexpr int k = 0, v = k + X::Keys::bytes;
    static constexpr int q = v + X::Keys::bytes, grad_out = q + Tile::stages * X::Queries::bytes;
    static constexpr int scores = grad_out + Tile::stages * X::Queries::bytes;
    /* [stages][BQ] of {lse, delta} */
    static constexpr int stats = scores + score_tiles * X::Scores::bytes;
    /* the bounds of Mask, which only steps with hidden pairs read */
    static constexpr int span = stats + Tile::stages * X::BQ * 8;
    /* values that copies and modified scores read (store_source) */
    static constexpr int source = span + 16;
    /* values that the end of the kernel reads: addresses and number of rows of dk and dv */
    static constexpr int target = source + 32;
    /* StepRange: the bounds of the loop */
    static constexpr int range = target + 32;
    static constexpr int bytes = range + 16;
    static_assert(v % 128 == 0 && q % 128 == 0 && grad_out % 128 == 0 && scores % 128 == 0,
                  "tiles start at 128 bytes");
};

/* The number of bank conflicts of a store of P^T or dS^T. A warp stores c[0] and c[1] of an
 * accumulator as 4 bytes of a row of Scores. These are 8 rows and 4 neighbours of a 16-byte
 * chunk. */
template <class Scores> constexpr int store_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        at[lane] = Scores::offset_of(frag_c(lane, 0).row, frag_c(lane, 0).col, 2);
    return ways(at, 4);
}
static_assert(store_ways<Shape<Bwd64>::Scores>() == 1 && store_ways<Shape<Bwd128>::Scores>() == 1 &&
                  store_ways<Shape<Bwd256>::Scores>() == 1 &&
                  store_ways<Shape<Bwd128Small>::Scores>() == 1,
              "stores of dS meet no bank conflicts");

/* ---- 3. values that only some steps or the end of the kernel read ---------------------------- */
/* Stores two addresses as 16 bytes of shared memory. */
__device__ __forceinline__ void store_pair(smem_addr at_s, const void *first, const void *second) {
    const uint64_t a = (uint64_t)first, b = (uint64_t)second;
    st_shared_128(at_s,
                  make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32)));
}

template <class T> __device__ __forceinline__ T *first_of(uint4 pair) {
    return (T *)((uint64_t)pair.y << 32 | pair.x);
}
template <class T> __device__ __forceinline__ T *second_of(uint4 pair) {
    return (T *)((uint64_t)pair.w << 32 | pair.z);
}

/* Stores the values that only copies and modified scores read: the addresses of row 0 of head 0 of
 * q and grad_out, the rows that see any key (other rows may hold NaN), position0 and the batch
 * index. */
template <class T>
__device__ __forceinline__ void store_source(smem_addr at_s, const T *q, const T *grad_out,
                                             Interval rows, int position0, int b) {
    store_pair(at_s, q, grad_out);
    st_shared_128(at_s + 16, make_uint4(rows.lo, rows.hi, position0, b));
}

__device__ __forceinline__ int load_batch(smem_addr source_s) {
    return (int)ld_shared_128(source_s + 16).w;
}

__device__ __forceinline__ void store_span(smem_addr at_s, const Span &x) {
    st_shared_128(at_s, make_uint4(x.lo_off, x.hi_off - x.lo_off, x.key_lo, x.key_hi));
}

/* The steps of the block: tiles [tile_lo, tile_hi) of each head below head_end. row_tile: the
 * sequence's first tile in stats and dq_sum. */
struct StepRange {
    int tile_lo, tile_hi, head_end, row_tile;
};
__device__ __forceinline__ StepRange load_range(smem_addr at_s) {
    const uint4 x = ld_shared_128(at_s);
    return {(int)x.x, (int)x.y, (int)x.z, (int)x.w};
}

/* The tiles in which every row sees all of the block's keys. They are stored after the addresses of
 * dk and dv. */
__device__ __forceinline__ Interval load_full(smem_addr at_s) {
    const uint2 x = ld_shared_64(at_s + 16);
    return {(int)x.x, (int)x.y};
}

/* ---- 4. the copies of a step ----------------------------------------------------------------- */
/* Copies Q, dO and stats of one tile of rows of one head into a stage. stats_tile counts tiles
 * over all heads. */
template <class T, class Tile>
__device__ __forceinline__ void copy_step(const Bwd &g, smem_addr smem_s, int stage, int head,
                                          int tile, int stats_tile) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    const uint4 from = ld_shared_128(smem_s + S::source),
                rows = ld_shared_128(smem_s + S::source + 16);
    const T *q_g = first_of<const T>(from), *grad_out_g = second_of<const T>(from);
    const int64_t i0 = (int64_t)tile * X::BQ;
    const int first = (int)rows.x - (int)i0, end = (int)rows.y - (int)i0;
    copy_rows<typename X::Queries, X::THREADS>(smem_s + S::q + stage * X::Queries::bytes,
                                               q_g + head * g.p.q.head + i0 * g.p.q.row, g.p.q.row,
                                               first, end, g.p.head_dim);
    copy_rows<typename X::Queries, X::THREADS>(smem_s + S::grad_out + stage * X::Queries::bytes,
                                               grad_out_g + head * g.grad_out.head +
                                                   i0 * g.grad_out.row,
                                               g.grad_out.row, first, end, g.p.head_dim_v);
    if (threadIdx.x < X::BQ * 8 / 16)
        cp_async_cg_16(smem_s + S::stats + stage * X::BQ * 8 + threadIdx.x * 16,
                       (const float2 *)g.stats + (int64_t)stats_tile * X::BQ + threadIdx.x * 2);
}

} // namespace

#endif
