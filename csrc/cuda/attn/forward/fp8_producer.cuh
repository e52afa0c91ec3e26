/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_producer.cuh: the producer warpgroup of flash_attn_fp8_sm90a, and the layout of its shared
 * memory. One thread loads Q, K and V by TMA. Two warps transpose V. Another warp finds tiles and
 * their keys as in flash_attn_fwd_sm90a (find_tiles in fwd_producer.cuh). */
#ifndef GPUKERN_CUDA_ATTN_FP8_PRODUCER_CUH
#define GPUKERN_CUDA_ATTN_FP8_PRODUCER_CUH

#include "../../ptx/cp_async.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/opaque.cuh"
#include "../../ptx/stmatrix.cuh"
#include "fp8.cuh"
#include "fp8_tiles.h"
#include "fwd_producer.cuh"

/* ---- 1. parameters and shared memory --------------------------------------------------------- */
struct Fp8HopperParams {
    FwdHopperParams f; /* q, k, v: boxes of 128 columns; out is not stored by TMA */
    gk_attn_scale q_scale, k_scale, v_scale;
    gk_attn_mean mean; /* can be read as vectors of four floats, aligned to 16 bytes */
    gk_dtype out_dtype;
};

constexpr int FP8_BOX = 128; /* columns of a TMA box and of a panel */

/* A WGMMA operand of ROWS rows and COLS codes, where columns are k. Columns from head_dim on are
 * zeros. Panels of 128 columns follow each other. */
template <int ROWS, int COLS> struct Fp8Rows {
    typedef wgmma_tile<ROWS, false, FP8_BOX> panel;
    static constexpr int panels = (COLS + FP8_BOX - 1) / FP8_BOX, panel_bytes = panel::bytes,
                         bytes = panels * panel_bytes;
    static constexpr GK_HD smem_box box() { return wgmma_box(1, ROWS); }
    /* The descriptor of the 32 columns from `col` on and of the rows from `row` on. */
    static constexpr GK_HD uint64_t k_major(uint32_t tile_s, int row, int col) {
        return wgmma_descriptor_add(panel::descriptor(tile_s), col / FP8_BOX * panel_bytes +
                                                                   panel::offset(row) +
                                                                   col % FP8_BOX);
    }
};

template <class Tile> struct Fp8Smem {
    static constexpr int BQ = Tile::WARPGROUPS * 64, THREADS = (Tile::WARPGROUPS + 1) * 128;
    static constexpr int TRANSPOSERS = 2; /* warps */
    typedef Fp8Rows<BQ, Tile::HEAD_DIM> Q;
    typedef Fp8Rows<Tile::BKV, Tile::HEAD_DIM> K;
    typedef Fp8Rows<Tile::BKV, Tile::HEAD_DIM_V> V; /* V as TMA loads it */
    /* V transposed: a row of 128 bytes has BKV keys */
    typedef Fp8Rows<Tile::HEAD_DIM_V, Tile::BKV> Vt;
    typedef tma_ring<Tile::Q_BUFFERS> QRing;
    static constexpr int TILE_STAGES = Tile::TILE_STAGES;
    typedef tma_ring<TILE_STAGES> TileRing;
    typedef tma_ring<Tile::STAGES> Ring;
    typedef tma_ring<Tile::RAW_STAGES> RawRing;
    static constexpr int K_AT = Tile::Q_BUFFERS * Q::bytes, RAW_AT = K_AT + Tile::STAGES * K::bytes;
    static constexpr int VT_AT = RAW_AT + Tile::RAW_STAGES * V::bytes,
                         Q_RING = VT_AT + Tile::STAGES * Vt::bytes;
    static constexpr int K_RING = Q_RING + QRing::bytes, RAW_RING = K_RING + Ring::bytes;
    static constexpr int VT_RING = RAW_RING + RawRing::bytes, TILE_RING = VT_RING + Ring::bytes;
    static constexpr int OVER = TILE_RING + TileRing::bytes, TILES = OVER + 16;
    static constexpr int MEANS = TILES + TILE_STAGES * (int)sizeof(FwdTile),
                         MEAN_BYTES = Tile::HEAD_DIM_V * 4;
    /* MEANS: v_mean of each described tile's head */
    static constexpr int BYTES = MEANS + TILE_STAGES * MEAN_BYTES;
    static_assert(MEANS % 16 == 0, "vectors of four");
    static_assert(BYTES <= 227 * 1024, "a block has an SM's shared memory");
    static_assert(Tile::BKV % 32 == 0 && Tile::BKV <= 128, "a row holds the keys of a tile");
    static_assert(Tile::WARPGROUPS * Tile::CONSUMER_REGISTERS + Tile::PRODUCER_REGISTERS <=
                      65536 / THREADS / 8 * 8 * (Tile::WARPGROUPS + 1),
                  "registers are moved, not made: setmaxnreg would wait for ever");
};
template <> struct Smem<Fp8Hopper128> : Fp8Smem<Fp8Hopper128> {};
template <> struct Smem<Fp8Hopper128Wide> : Fp8Smem<Fp8Hopper128Wide> {};
template <> struct Smem<Fp8Hopper64> : Fp8Smem<Fp8Hopper64> {};
template <> struct Smem<Fp8Hopper192> : Fp8Smem<Fp8Hopper192> {};
template <> struct Smem<Fp8Hopper256> : Fp8Smem<Fp8Hopper256> {};

/* Initialises the barriers. The caller must synchronise the block afterwards. */
template <class Tile> __device__ __forceinline__ void fp8_begin_block(smem_addr smem_s) {
    typedef Smem<Tile> S;
    if (threadIdx.x != 0) return;
    typename S::QRing(smem_s + S::Q_RING).init(Tile::WARPGROUPS);
    typename S::TileRing(smem_s + S::TILE_RING).init(Tile::WARPGROUPS * 4 + 1 + S::TRANSPOSERS);
    typename S::Ring(smem_s + S::K_RING).init(Tile::WARPGROUPS);
    typename S::RawRing(smem_s + S::RAW_RING).init(S::TRANSPOSERS);
    typename S::Ring(smem_s + S::VT_RING).init(Tile::WARPGROUPS, S::TRANSPOSERS);
    mbarrier_init(smem_s + S::OVER, 1);
    fence_mbarrier_init();
    /* completes the only phase of this barrier (see Fp8Consumer::take_block) */
    mbarrier_arrive(smem_s + S::OVER);
}

/* ---- 2. one thread loads --------------------------------------------------------------------- */
/* Loads K and V in the order in which the consumers read them. With two Q buffers, the next tile's
 * Q follows after the second key block. With one, a tile's Q follows after its first key block,
 * since the buffer is free only after the previous tile's last scores. */
template <class Tile>
__device__ __forceinline__ void fp8_load_tiles(const FwdHopperParams &x, const FwdTile *tiles,
                                               smem_addr smem_s) {
    typedef Smem<Tile> S;
    constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<Tile::STAGES> k = {smem_s + S::K_RING};
    const tma_steps<Tile::RAW_STAGES> raw = {smem_s + S::RAW_RING};
    described.wait_full(0);
    if (AHEAD) load_q<Tile, FP8_BOX>(x, tiles[0], smem_s, 0);
    int n = 0;
#pragma unroll 1
    for (int step = 0; tiles[n % S::TILE_STAGES].steps.blocks >= 0; ++n) {
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
#pragma unroll 1
        for (int j = 0; j < blocks; ++j) {
            const int at = step + j, row = t.from.k_row + j * Tile::BKV;
            k.wait_empty(at);
            mbarrier_arrive_expect_tx(k.full(at), S::K::bytes);
            load_panels<typename S::K, FP8_BOX>(smem_s + S::K_AT + k.stage(at) * S::K::bytes, &x.k,
                                                row, t.from.head_kv, t.from.b, k.full(at));
            raw.wait_empty(at);
            mbarrier_arrive_expect_tx(raw.full(at), S::V::bytes);
            load_panels<typename S::V, FP8_BOX>(smem_s + S::RAW_AT + raw.stage(at) * S::V::bytes,
                                                &x.v, row, t.from.head_kv, t.from.b, raw.full(at));
            if (AHEAD && j == min(1, blocks - 1)) {
                described.wait_full(n + 1);
                load_q<Tile, FP8_BOX>(x, tiles[(n + 1) % S::TILE_STAGES], smem_s, n + 1);
            }
            if (!AHEAD && j == 0) load_q<Tile, FP8_BOX>(x, t, smem_s, n);
        }
        if (AHEAD && blocks == 0) {
            described.wait_full(n + 1);
            load_q<Tile, FP8_BOX>(x, tiles[(n + 1) % S::TILE_STAGES], smem_s, n + 1);
        }
        if (!AHEAD && blocks == 0) load_q<Tile, FP8_BOX>(x, t, smem_s, n);
        step += blocks;
        mbarrier_arrive(described.empty(n));
        if (!AHEAD) described.wait_full(n + 1);
    }
    /* the end marker, which signals the end to the consumers */
    if (!AHEAD) load_q<Tile, FP8_BOX>(x, tiles[n % S::TILE_STAGES], smem_s, n);
}

/* ---- 3. warps that transpose V --------------------------------------------------------------- */
/* The order in which pairs of 16 columns are transposed: 0, 1, 3, 2, 4, 5, 7, 6. From one pair to
 * the next a single bit pattern of the swizzled address changes, so one register serves for all
 * addresses. */
constexpr GK_HD int fp8_pair(int i) { return i ^ i / 2 % 2; }

/* Transposes V [keys][columns] to [columns][keys], because WGMMA reads 8-bit operands along k only.
 * ldmatrix.trans gives a lane two keys of two columns in a register. Two registers give four keys
 * of each column. Keys and columns are permuted, so that no other data must be moved:
 *
 *  place 16 m + 4 t + e of a row    key 16 m + 2 t + e % 2 + 8 (e / 2), which is where a lane has
 *                                   its weights in S: weights need no exchange
 *  row 16 c + 8 h + g               column 16 c + 2 g + h: no bank conflict, and a lane's columns
 *                                   of O are four neighbours
 *
 * One warp. It transposes the groups of 16 keys number part, part + TRANSPOSERS, and so on. */
template <class Tile>
__device__ __forceinline__ void fp8_transpose(smem_addr raw_s, smem_addr vt_s, int part) {
    constexpr int PAIRS = Tile::HEAD_DIM_V / 32; /* pairs of 16 columns */
    const int lane = laneid(), r = lane % 8, half = lane / 8 % 2, next = lane / 16;
    smem_addr in_s = raw_s + (16 * part + 8 * half + r) * WGMMA_ROW_BYTES + (next ^ r) * 16;
    const smem_addr to_s = vt_s + (16 * next + 8 * half + r) * WGMMA_ROW_BYTES;
#pragma unroll 1
    for (int m = part; m < Tile::BKV / 16; m += Smem<Tile>::TRANSPOSERS) {
        const smem_addr out_s = to_s + (m ^ r) * 16;
        uint32_t x[2][4], y[4]; /* one load is in flight while the previous one is stored */
        ldmatrix_x4_trans(x[0], in_s);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int c = fp8_pair(i), then = fp8_pair(i + 1), now = i % 2;
            if (i + 1 < PAIRS) {
                in_s ^= (c ^ then) % 4 * 32;
                opaque(in_s);
                ldmatrix_x4_trans(x[1 - now], in_s + then / 4 * Smem<Tile>::V::panel_bytes);
            }
            y[0] = prmt(x[now][0], x[now][1], 0x6420);
            y[1] = prmt(x[now][0], x[now][1], 0x7531);
            y[2] = prmt(x[now][2], x[now][3], 0x6420);
            y[3] = prmt(x[now][2], x[now][3], 0x7531);
            stmatrix_x4(out_s + c * 32 * WGMMA_ROW_BYTES, y);
        }
        in_s =
            (in_s ^ fp8_pair(PAIRS - 1) % 4 * 32) + Smem<Tile>::TRANSPOSERS * 16 * WGMMA_ROW_BYTES;
    }
}

/* Copies v_mean of a tile's head. One lane. */
template <class Tile>
__device__ __forceinline__ void fp8_copy_mean(const Fp8HopperParams &x, const FwdTile &t,
                                              smem_addr mean_s) {
    const float *mean_g = x.mean.data + t.work.b * x.mean.batch + t.from.head_kv * x.mean.head;
#pragma unroll 1
    for (int d = 0; d < x.f.fwd.problem.head_dim_v; d += 4)
        cp_async_cg_16(mean_s + d * 4, mean_g + d);
    cp_async_commit_group();
}

/* Transposes V of tile after tile. Keys past the end of the sequence become zeros, because a weight
 * of 0 times NaN would be NaN. The first warp also copies the tile's v_mean. It is complete when
 * the last block of the tile is. */
template <class Tile>
__device__ __forceinline__ void fp8_transpose_tiles(const Fp8HopperParams &x, const FwdTile *tiles,
                                                    smem_addr smem_s, int part) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<Tile::RAW_STAGES> raw = {smem_s + S::RAW_RING};
    const tma_steps<Tile::STAGES> vt = {smem_s + S::VT_RING};
    uint32_t step = 0; /* key block, counted over all tiles */
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        int left = t.steps.blocks;
        if (left < 0) break;
        /* the lane that copies the mean is also the one that arrives below */
        if (left > 0 && part == 0 && laneid() == 0 && x.mean.data)
            fp8_copy_mean<Tile>(x, t, smem_s + S::MEANS + n % S::TILE_STAGES * S::MEAN_BYTES);
#pragma unroll 1
        for (; left > 0; --left, ++step) {
            const smem_addr raw_s = smem_s + S::RAW_AT + raw.stage(step) * S::V::bytes;
            raw.wait_full(step);
            vt.wait_empty(step);
            if (left == 1) cp_async_wait_group<0>();
            if (const int incomplete = left == 1 ? tiles[n % S::TILE_STAGES].incomplete : 0;
                incomplete > 0) {
#pragma unroll 1
                for (int i = incomplete * 8 + laneid(); i < Tile::BKV * 8; i += 32)
                    if (i / 128 % S::TRANSPOSERS == part)
#pragma unroll
                        for (int c = 0; c < S::V::panels; ++c)
                            st_shared_128(raw_s + c * S::V::panel_bytes + i * 16,
                                          make_uint4(0, 0, 0, 0));
                __syncwarp();
            }
            fp8_transpose<Tile>(raw_s, smem_s + S::VT_AT + vt.stage(step) * S::Vt::bytes, part);
            /* orders this lane's stores before WGMMA's reads and before TMA's next writes */
            fence_proxy_async();
            __syncwarp(); /* waits for the stores of all lanes */
            opaque(step);
            /* makes the compiler recompute addresses, for which there are no registers in
             * between */
            opaque(n);
            if (laneid() == 0) {
                mbarrier_arrive(vt.full(step));
                mbarrier_arrive(raw.empty(step));
            }
        }
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
}

#endif
