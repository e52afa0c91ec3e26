/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_drop.cuh: the dropout of flash_attn_fwd_drop_sm90a. A consumer warp draws the bits of a block
 * of keys while its products run (../drop_pairs.cuh), and zeroes the packed weights that are
 * dropped. At the end of a tile it multiplies O by 1 / (1 - p). The sum of a row counts all
 * weights, also dropped ones. */
#ifndef GPUKERN_CUDA_FWD_DROP_CUH
#define GPUKERN_CUDA_FWD_DROP_CUH

#include "../../ptx/opaque.cuh"
#include "../drop_pairs.cuh"
#include "../tiles.h"
#include "fwd_consumer.cuh"

struct FwdDropParams : FwdHopperParams {
    Dropout drop;
};

/* A tile of flash_attn_fwd_drop_sm90a. The weights of a block do not overlap P V, because Philox
 * needs the registers for that. TOGETHER: the Philox calls that a lane computes at a time. */
template <class Base, int TOGETHER_> struct FwdDrop : Base {
    static constexpr bool OVERLAP = false;
    static constexpr int TOGETHER = TOGETHER_;
};
template <class Base, int TOGETHER> struct ParamsOf<FwdDrop<Base, TOGETHER>, false> {
    typedef FwdDropParams type;
};
/* A tile's keys begin at a multiple of eight, because one Philox call serves eight keys. */
constexpr int FWD_DROP_BOX_LOG2 = 3;
template <class Base, int TOGETHER> struct InBoxes<FwdDrop<Base, TOGETHER>> {
    static constexpr bool value = true;
};

template <class Base, int TOGETHER> struct DropOf<FwdDrop<Base, TOGETHER>> {
    typedef FwdDrop<Base, TOGETHER> Tile;
    static constexpr bool ON = true;
    const PhiloxSeed seed;
    DropPairs kept;
    __device__ __forceinline__ DropOf(const FwdDropParams &x)
        : seed(x.drop.seed, x.drop.seed_step) {}

    /* Draws the bits of a key block for the lane's two rows. */
    __device__ __forceinline__ void draw(const FwdDropParams &x, const FwdTile &t, int block) {
        const Problem &p = x.fwd.problem;
        const uint32_t row = drop_row(p, t.work.b, t.work.head, t.seq.q0 + t.work.i0 + own_row());
        kept.template draw_rows<Tile::BKV / 32, TOGETHER>(
            seed, x.drop.most, row, (uint32_t)p.lse.row,
            (uint32_t)(t.keys.lo + block * Tile::BKV) / 8);
        opaque(kept.word[0]);
        opaque(kept.word[1]);
    }
    __device__ __forceinline__ void drop(uint32_t (&p)[Tile::BKV / 4]) const { kept.drop(p); }

    /* Multiplies O by 1 / (1 - p). A row with a NaN among its scores becomes NaN, even if that pair
     * is dropped. */
    template <int M>
    static __device__ __forceinline__ void scale(const FwdDropParams &x, const float (&total)[2],
                                                 float (&o)[M]) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = fmaf(quad_sum(total[r]), 0.f, x.drop.factor);
#pragma unroll
        for (int i = 0; i < M; ++i) o[i] *= factor[i / 2 & 1];
    }
};

#endif
