/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tiles.h: the tuned numbers of paged_attn_sm90a, each with its reason; tiles.h has those of
 * the other attention kernels. */
#ifndef GPUKERN_CUDA_PAGED_TILES_H
#define GPUKERN_CUDA_PAGED_TILES_H

/* Tokens of a sequence from which the products are the bound: 16 fill the one instruction that
 * paged_attn_sm90a has for them. */
constexpr int PREFILL_TOKENS = 17;

/* paged_attn_sm90a. Both forms of a call: a flat list, one block an SM, rings that run on across
 * sequences; and clusters, one for each sequence and kv head. */
struct paged_hopper {
    /* Of a warp of the list, 2 stages: 128 KiB in flight an SM. 3 stages are 1 to 2 % slower on an
     * H100, in e4m3 5 to 14 %. */
    static constexpr int ring_bytes = 16384;
    /* of a warp of a cluster of two, one block an SM */
    static constexpr int pair_ring_bytes = 24576;
    /* of a cluster of 4 or 8: two blocks an SM, so that the next call's begin */
    static constexpr int few_warps = 6;
    static constexpr int most_ranks = 8; /* the largest cluster that every device launches */
    /* Heads side by side read whole lines together, but make fewer tiles: of codes and up to 8 rows
     * from this batch on 5 % faster (256 x 1k), with fewer sequences up to 30 % slower (16 x 2k);
     * of 16 bits never faster. */
    static constexpr int side_by_side_batch = 32;
    /* 256 x 1k: paged_attn_sm80 0.7 % faster; 64 x 4k: the same */
    static constexpr int wide_batch = 64;
    /* head_dim 64: 16 x 2k 0.86 of its time, 32 x 2k the same, 64 x 4k 1.03 */
    static constexpr int narrow_batch = 32;
    /* What one SM of a cluster reads: at 1 x 128k 43 of 16 bits, where clusters and the list take
     * the same, and 30 of codes, where the list is 1.18 times as fast. */
    static constexpr float sm_bytes_per_ns = 60, sm_code_bytes_per_ns = 30;
    static constexpr float device_bytes_per_ns = 3000; /* an H100's */
    /* of its splits, beside a merge in a cluster */
    static constexpr float list_costs_ns = 4000;
    /* of one sequence: the list is never faster up to here */
    static constexpr int cluster_keys = 16384;
    /* A row of the table that holds up to so many keys, of a cluster so many a block, is read in 9
     * us by whoever has it, and the list's merge takes half of that: lengths are not asked for. */
    static constexpr int tile_keys = 1152;
    /* 8 warps 0 to 6 % slower, 3 stages 0 to 2 */
    static constexpr int tile_warps = 4, tile_stages = 2;
};

#endif
