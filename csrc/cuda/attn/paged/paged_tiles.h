/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tiles.h: the tuned numbers of paged_attn_sm90a, each with its reason. tiles.h has those
 * of the other paged kernels. */
#ifndef GPUKERN_CUDA_PAGED_TILES_H
#define GPUKERN_CUDA_PAGED_TILES_H

/* From this many query tokens a sequence on, the products are the bound, and paged_prefill_sm90a
 * serves. Up to 16 tokens fill the one mma that paged_attn_sm90a issues for them. */
constexpr int PREFILL_TOKENS = 17;

/* Rows of a kv head (tokens times heads of a group) from which paged_prefill_sm90a also serves, if
 * all sequences have equally many tokens. paged_attn_sm90a reads the keys once for every 16 rows,
 * prefill once for 128. With 64 x 4096 keys of 8 heads, 32 rows take 457 us by paged_attn_sm90a and
 * 262 by prefill, and 64 rows take 972 and 264. With 1 x 32768 keys, 32 rows take 75 and 53 us
 * (H200). */
constexpr int PREFILL_ROWS = 32;

/* paged_attn_sm90a. Its three forms (list, clusters, tiles) are described in its own file. */
struct paged_hopper {
    /* Ring bytes of a warp of the list: 2 stages, so that 128 KiB are in flight on an SM. 3 stages
     * are 1 to 2 % slower on an H100, and 5 to 14 % with e4m3. */
    static constexpr int ring_bytes = 16384;
    /* ring bytes of a warp in a cluster of two, one block an SM */
    static constexpr int pair_ring_bytes = 24576;
    /* Warps of a block in a cluster of 4 or 8. Two such blocks fit on an SM, so that the next call
     * can start early. Few sequences take clusters of 4 or 8 only if these fill at most half of the
     * SMs: 2 x 6k takes 17.6 us with clusters of 4 and 21.2 us with 8 (H200). */
    static constexpr int few_warps = 6;
    /* the largest cluster size that every device can launch */
    static constexpr int most_ranks = 8;
    /* blocks of a cluster in a batch-invariant call, whatever the batch and the lengths */
    static constexpr int fixed_ranks = 8;
    /* From this batch on, a block of the list takes neighbouring kv heads, if pages are 8-bit codes
     * and a tile has up to 8 rows. Such blocks read whole cache lines, but there are fewer tiles.
     * It is 5 % faster at 256 x 1k and up to 30 % slower with fewer sequences (16 x 2k). It is
     * never faster for 16-bit pages. */
    static constexpr int side_by_side_batch = 32;
    /* Above this batch paged_attn_sm80 serves instead of the list: 0.7 % faster at 256 x 1k, equal
     * at 64 x 4k. */
    static constexpr int wide_batch = 64;
    /* From this batch on, paged_attn_sm80 serves head_dim 64 instead of the list. The list's time
     * relative to it is 0.86 at 16 x 2k, 1.00 at 32 x 2k, and 1.03 at 64 x 4k. */
    static constexpr int narrow_batch = 32;
    /* Bytes a ns that one SM of a cluster reads while the device's memory is not saturated.
     * Measured on an H200 with one sequence of 6k to 128k keys: 64 with 16-bit pages, 40 with
     * codes, 48 with 16-bit pages and 16 rows in the six warps of a cluster of 4 or 8. */
    static constexpr float sm_bytes_per_ns = 64, sm_code_bytes_per_ns = 40,
                           sm_bytes_per_ns_16_rows = 48;
    /* Share of the memory's peak that all SMs together reach in the list: 4.4 of 4.9 TB/s on an
     * H200, 3.0 of 3.35 TB/s on an H100. */
    static constexpr float share_of_peak = 0.9f;
    /* Blocks of 4 warps (tiles) that an SM holds at a time. With more than this number, the next
     * blocks keep the device busy while others begin and end. */
    static constexpr int tiles_an_sm = 3;
    /* Splits that a thread of the list loads at once. One kv head of a single sequence has up to 17
     * splits on 132 SMs. */
    static constexpr int join_splits = 18;
    /* Cost of the list's splits, compared with a merge inside a cluster: 17.5 us instead of 11.5 us
     * at 1 x 6k, 43.0 instead of 38.4 at 1 x 32k. With 16 rows: 35.6 us instead of 29.5 at 1 x 16k,
     * 53.1 instead of 53.6 at 1 x 32k (H200). */
    static constexpr float list_costs_ns = 6500, list_costs_ns_16_rows = 12500;
    /* Time that clusters or tiles may lose to the list in the worst case, where one sequence is as
     * long as the block table allows and all others are empty. With this limit, tiles serve tables
     * of up to 2100 keys (8 heads of 128). Measured with tables of 1.2k keys: tiles 223 us,
     * clusters of four 237, the list 236. Measured at 48 x 5k: clusters of four 236, the list 242.
     * With codes the list is closer, so tiles serve up to 1900 keys. */
    static constexpr float slack_ns = 32000, code_slack_ns = 24000;
    /* A block of the form tiles. 8 warps are 0 to 6 % slower, 3 stages 0 to 2 %. */
    static constexpr int tile_warps = 4, tile_stages = 2;
};

#endif
