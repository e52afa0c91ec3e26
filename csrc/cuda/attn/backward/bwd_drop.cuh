/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_drop.cuh: the dropout of flash_attn_bwd_drop_sm90a. Philox gives one bit for each pair
 * (../drop_pairs.cuh). A consumer warp draws the bits of the next step's pairs while dK's product
 * runs. At that time no S and dP are in registers. */
#ifndef GPUKERN_CUDA_BWD_DROP_CUH
#define GPUKERN_CUDA_BWD_DROP_CUH

#include "../../ptx/opaque.cuh"
#include "../drop_pairs.cuh"
#include "bwd_keys.cuh"

struct BwdDropParams : BwdHopperParams {
    Dropout drop;
    Divisor by_row_tiles; /* tiles of rows of a head */
};

/* A tile of flash_attn_bwd_drop_sm90a. TOGETHER: the number of Philox calls that a lane computes at
 * a time. */
template <class Base, int TOGETHER_> struct BwdDrop : Base {
    static constexpr int TOGETHER = TOGETHER_;
};
/* With K in registers, 92 bytes spilled. Measured: 2037 us at 2k full, where 96 rows and K in
 * registers take 2236 us (one H200, 16,384 tokens of 2,048 columns). At head_dim 128, 64 rows take
 * 1665 us. 80 rows take 1901 us, because their Philox calls cover 96 rows. */
struct BwdDropHopper64 : BwdHopper64 {
    static constexpr bool K_REGISTERS = false;
};

namespace {

template <class Base, int TOGETHER> struct DropOf<BwdDrop<Base, TOGETHER>> {
    typedef BwdDrop<Base, TOGETHER> Tile;
    static constexpr bool ON = true;
    DropPairs kept;
    PhiloxSeed seed;
    uint32_t row,
        /* the step that is drawn next: its first row, and the warp's first key divided by 8 */
        group;

    __device__ __forceinline__ DropOf(const BwdDropParams &x)
        : seed(x.drop.seed, x.drop.seed_step) {}

    /* Finds the rows and keys of a step. at_s: the step's BwdTileOf; tile: its first member. */
    __device__ __forceinline__ void find(const BwdDropParams &x, const BwdWork &w, smem_addr at_s,
                                         uint32_t tile, int warpgroup) {
        const int i0 = (int)ld_shared_32(at_s + 8), head = (int)x.by_row_tiles.into(tile);
        row = drop_row(x.g.p, w.b, head, w.seq.q0 + i0);
        group = (uint32_t)own_key(w, 64 * warpgroup) / 8;
        opaque(row);
        opaque(group);
    }
    __device__ __forceinline__ void draw(const BwdDropParams &x) {
        kept.template draw_keys<(Tile::BQ + 31) / 32, TOGETHER>(seed, x.drop.most, row,
                                                                (uint32_t)x.g.p.lse.row, group);
        opaque(kept.word[0]);
        opaque(kept.word[1]);
    }

    /* gradients() with dropout. P of a dropped pair becomes 0, and so does its dP. dP of the others
     * is multiplied by factor = 1 / (1 - p). */
    template <class T, int M>
    __device__ __forceinline__ void gradients(const float (&s)[M], const float (&dp)[M],
                                              uint32_t (&p)[M / 2], uint32_t (&ds)[M / 2],
                                              smem_addr delta_s, float factor) const {
#pragma unroll
        for (int n = 0; n < M / 4; ++n) {
            const uint2 delta = ld_shared_64(delta_s + n * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * n + 2 * r;
                float grad[2];
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    grad[e] = fmaf(__uint_as_float(__float_as_uint(dp[i + e]) & kept.one(n, r, e)),
                                   factor, -__uint_as_float(e ? delta.y : delta.x));
                p[2 * n + r] = pack2<T>(s[i], s[i + 1]) & kept.two(n, r);
                ds[2 * n + r] = pack2<T>(s[i] * grad[0], s[i + 1] * grad[1]);
            }
        }
    }
};

} // namespace

#endif
