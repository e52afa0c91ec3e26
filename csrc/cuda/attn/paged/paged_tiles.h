/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tiles.h: the tuned numbers of paged_attn_sm90a, each with its reason. tiles.h has those
 * of the other paged kernels. */
#ifndef GPUKERN_CUDA_PAGED_TILES_H
#define GPUKERN_CUDA_PAGED_TILES_H

/* From this many query tokens a sequence on, the products are the bound, and paged_prefill_sm90a
 * serves. Up to 16 tokens fill the one mma that paged_attn_sm90a issues for them. */
constexpr int PREFILL_TOKENS = 17;

/* paged_attn_sm90a. It has two main forms. The flat list has one block an SM, whose rings run on
 * across sequences. Clusters serve one sequence and kv head each. */
struct paged_hopper {
    /* Ring bytes of a warp of the list; 2 stages, 128 KiB in flight on an SM. 3 stages are 1 to
     * 2 % slower on an H100, 5 to 14 % with e4m3. */
    static constexpr int ring_bytes = 16384;
    /* ring bytes of a warp in a cluster of two, one block an SM */
    static constexpr int pair_ring_bytes = 24576;
    /* warps of a block in a cluster of 4 or 8: two blocks fit on an SM, so that the next call's
     * can start */
    static constexpr int few_warps = 6;
    /* the largest cluster size that every device can launch */
    static constexpr int most_ranks = 8;
    /* From this batch on, blocks of the list take neighbouring kv heads, for codes and up to 8
     * rows. These blocks read whole cache lines, but there are fewer tiles: 5 % faster at 256 x
     * 1k, up to 30 % slower with fewer sequences (16 x 2k). It is never faster for 16-bit pages. */
    static constexpr int side_by_side_batch = 32;
    /* above this batch paged_attn_sm80 serves: 0.7 % faster at 256 x 1k, equal at 64 x 4k */
    static constexpr int wide_batch = 64;
    /* from this batch on paged_attn_sm80 serves head_dim 64: time over paged_attn_sm80's 0.86 at
     * 16 x 2k, 1.00 at 32 x 2k, 1.03 at 64 x 4k */
    static constexpr int narrow_batch = 32;
    /* The rate at which one SM of a cluster reads. Measured at 1 x 128k: 43 bytes a ns with
     * 16-bit pages, where clusters and the list take the same time; 30 with codes, where the
     * list is 1.18 times as fast. */
    static constexpr float sm_bytes_per_ns = 60, sm_code_bytes_per_ns = 30;
    static constexpr float device_bytes_per_ns = 3000; /* an H100 */
    /* cost of the list's splits, compared with a merge inside a cluster */
    static constexpr float list_costs_ns = 4000;
    /* for one sequence: up to this many keys the list is never faster */
    static constexpr int cluster_keys = 16384;
    /* One block reads this many keys in 9 us, and the list's merge would take half of that. So
     * if a row of the block table holds at most this many keys for each block of a cluster,
     * clusters serve the call, whatever the lengths are. */
    static constexpr int tile_keys = 1152;
    /* 8 warps are 0 to 6 % slower, 3 stages 0 to 2 % */
    static constexpr int tile_warps = 4, tile_stages = 2;
};

#endif
