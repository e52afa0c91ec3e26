/* SPDX-License-Identifier: BSD-3-Clause */
/* blocks.h: every tuned size of the CPU kernels, each with the measurement that chose it. */
#ifndef GPUKERN_CPU_BLOCKS_H
#define GPUKERN_CPU_BLOCKS_H

#include <stdint.h>

#define TABLE static const __attribute__((unused))

/* ---- gemm ------------------------------------------------------------------------------------
 * mb x kb of a stays in L2, kb x 2 W of b in L1; kb may be a quarter longer. A block is split
 * further until every thread has tasks_per_thread of them or a task falls under min_task
 * multiply-adds, where packing would cost more than the balance gains. */
typedef struct gk_gemm_block {
    int64_t mb, nb, kb;
} gk_gemm_block;
typedef struct gk_gemm_blocks {
    /* where a task packs b itself, and where all tasks share what is packed */
    gk_gemm_block own, shared;
    int64_t tasks_per_thread, min_task;
} gk_gemm_blocks;

/* The buffer of shared b, a quarter of the L3 here, and the multiply-adds of a phase that are worth
 * two barriers: at 512 cubed, 2^27, sharing gains 1 to 2 %, at 768 3 to 5 %; smaller ones not
 * tried. */
#define GK_GEMM_SHARED_BYTES (INT64_C(8) << 20)
#define GK_GEMM_SHARED_MIN 0x1p26
/* What a worker may keep of packed a, twice the L2 here: bf16 64 x 4096 x 4096 of torch 1.11x kept,
 * 1.08x packed by each task. */
#define GK_GEMM_ONCE_BYTES (INT64_C(2) << 20)

/* Up to so many rows K is cut into so many blocks, none of which is shorter than so much.
 * bf16 64 x 1024 x 1024 of torch: one block 1.02x, two 1.04x, four 1.07x; 32 rows 1.03x 1.09x
 * 1.15x */
#define GK_GEMM_SMALL_M 128
#define GK_GEMM_FEW_BLOCKS 4
#define GK_GEMM_FEW_KB 256

/* f32 1024 cubed: shared 96 x 1024 60 GFLOP/s, 192 x 512 53; own by size, not measured */
TABLE gk_gemm_blocks gk_gemm_blocks_base = {{192, 256, 256}, {96, 2048, 1024}, 2, 1 << 21};
/* f32 1024 cubed, of torch: shared kb 256 0.99x, 512 1.03x, 1024 with 120 rows 1.01x; own by size,
 * not measured */
TABLE gk_gemm_blocks gk_gemm_blocks_avx2 = {{192, 256, 256}, {192, 2048, 512}, 2, 1 << 21};
/* f32 512 / 1024 / 2048 / 1025, of torch: own alone 1.04x 1.03x 1.02x 1.09x; shared kb 512 1.00x
 * 1.03x 1.09x 1.13x, kb 1024 with 224 rows 1.00x 1.07x 1.10x 1.14x, with 280 the same. Own, 64
 * rows: nb 256 kb 256 1.21x, nb 128 kb 1024 1.31x */
TABLE gk_gemm_blocks gk_gemm_blocks_avx512 = {{336, 128, 1024}, {280, 2048, 1024}, 2, 1 << 21};
/* the same: own alone 0.92x 0.93x 0.96x 0.93x; shared kb 512 0.96x 0.97x 0.94x 0.86x, kb 1024 with
 * 224 rows 0.96x 1.01x 0.99x 0.88x, with 280 0.97x 1.01x 1.00x 0.92x. Own, 64 rows: nb 512 kb 512
 * 1.01x, nb 128 kb 1024 1.07x */
TABLE gk_gemm_blocks gk_gemm_blocks_avx512bf16 = {{336, 128, 1024}, {280, 2048, 1024}, 2, 1 << 22};

/* kb x 32 of b is 32 KiB of an L1 of 48; what a task reads besides must stay in an L2 of 2 MiB, 1
 * of which random frames fill. Xeon of model 207, one thread, alternately, bf16 1024, 2048, 1024
 * NT: shared 512 x 2048 1.00x, 256 x 512 1.11x 1.14x 1.11x, kb 1024 with 256 rows 1.14x 1.00x
 * 1.23x. Own with a kept, of shared 256 x 512, and at 512: 512 x 256 1.06x 0.94x 1.06x 1.00x, 512 x
 * 128 1.07x 0.85x 1.12x 1.09x, 256 x 128 1.08x 1.00x 1.13x 1.05x. The least task has 16 times the
 * multiply-adds of avx512's, which are as much faster. */
TABLE gk_gemm_blocks gk_gemm_blocks_amx = {{256, 128, 512}, {256, 512, 512}, 2, 1 << 24};
/* AMX: where a's 256 rows are not longer, each worker keeps them packed, and b is not shared */
#define GK_GEMM_KEPT_K 2048

/* Rows up to which reading b in place beats packing it: across, bf16 4096 squared 16 rows 1.45x
 * against 1.29x; along, 24 rows 1.10x against 1.03x, 32 rows 1.00x against 1.04x. */
enum {
    GK_SKINNY_ROWS_ACROSS = 16,
    GK_SKINNY_ROWS_ALONG = 24,
    /* Beside AMX, packed for tiles, of read in place, Xeon of model 207, bf16, K x N 4096 x 4096 |
     * 1024 x 1024. Across, rows 3, 4, 5, 8:
     * 0.60x 0.70x 1.47x 1.63x | 4, 5, 8: 1.19x 1.87x 2.45x; along, rows 4, 6, 8: 0.49x 0.79x 0.95x | 8: 1.92x */
    GK_SKINNY_ROWS_AMX_ACROSS = 4,
    GK_SKINNY_ROWS_AMX_ALONG = 6,
    /* int8, by its sums: a row is 24 GOP/s at 12 GB/s of b, VPDPBUSD has 460. */
    GK_SKINNY_ROWS_AMX = 8
};

/* Small M: columns of a task; across where b is packed, rows of b per step (more of them where more
 * than small_m rows of a share the loads and stores of C) and values of b in flight per thread;
 * where it is read in place, rows per step likewise and columns of a task at most; along, chunk of
 * k (x TN columns it stays in L1). Measured at K x N 4096 x 4096, 1024 x 1024, 4097 x 1025: 16 rows
 * want 32 rows of b a step where it is packed (1.9x against 1.4x at 8). */
typedef struct gk_skinny_blocks {
    int64_t nb_min, in_flight, kb_few, kb_many, small_m, place_few, place_many, place_nb, kb_along;
    int64_t tasks_per_thread;
    int64_t place_rows;  /* rows of a up to which 16-bit b is read in place, */
    int64_t long_row;    /* where its rows have so many values or more */
    int64_t short_bytes; /* chunks of columns up to so long are fetched by hand */
} gk_skinny_blocks;

/* in place, bf16, us at 1024 and 4097 values for 632 and 2665 packed: 1 row 358, 1467; NT not
 * fetched 183, 489 for 214, 805; f16 of 8 rows in place 1319 for 1126. The other sizes are
 * avx512's */
TABLE gk_skinny_blocks gk_skinny_blocks_base = {64,   8192, 16, 32, 4, 12, 16,
                                                4096, 1024, 4,  4,  0, 0};
/* Zen 1. In place, bf16, us at 4096 x 4096, 1024 x 1024, 4097 x 1025 for packed: 1 row 2216, 231,
 * 905 for 5561, 357, 1573; 8 rows 6948, 573, 2128 for 10805, 711, 2907; 16 rows at 11008 values
 * 42907 for 38131; place_few 8 or 16 the same, 32 1.5x at 4096 values. NT, 1 row, not fetched 2214,
 * 223, 599 for 3496, 258, 924, at 4 rows 4771 for 6251; f32 the same */
TABLE gk_skinny_blocks gk_skinny_blocks_avx2 = {64,   8192, 16, 32, 4, 12, 16,
                                                4096, 1024, 4,  8,  0, 0};
/* geomean of torch, f32 in place, 1 and 4 rows: kb 6 1.86x, 8 1.97x, 12 1.96x, 16 1.86x; 8 and 16
 * rows: kb 12 1.83x, 16 1.86x, 24 1.67x; with tasks of a fourth of the columns and rows fetched
 * ahead 1.63x, 1.77x */
TABLE gk_skinny_blocks gk_skinny_blocks_avx512 = {64,   8192, 16, 32, 4,    12,  16,
                                                  4096, 1024, 4,  4,  4096, 2048};
/* in place as above; packed, geomean of torch, 1 and 4 rows: kb_few 16 1.40x, 32 1.51x, 64 1.53x;
 * tasks of half the columns 1.45x, not fetched 1.17x; 16-bit b in place, 1 and 4 rows, 4096 values:
 * 1.71x 1.68x packed, 3.02x 2.08x in place with kb 8, 2.51x 1.98x with 16; 1024 values 1.40x 1.48x
 * packed, 1.35x 1.25x in place; short columns fetched, NT, K 1024, 1, 4, 16, 24 rows: 1.51x 1.50x
 * 1.21x 1.12x for 1.18x 1.13x 0.98x 0.92x, at K 4096 1.34x 1.27x 1.16x 1.09x for 1.49x 1.32x 1.19x
 * 1.08x; f32 the same */
TABLE gk_skinny_blocks gk_skinny_blocks_avx512bf16 = {64,   16384, 32, 64, 4,    12,  16,
                                                      4096, 2048,  4,  4,  4096, 2048};

/* ---- attention -------------------------------------------------------------------------------
 * A block of bq query lanes reads tiles of bkv keys; a row serves head dims (the larger one) up to
 * max_head_dim. Fewer blocks than min_tasks halve bq. */
typedef struct gk_attn_blocks {
    int64_t max_head_dim, bq, bkv, min_tasks;
} gk_attn_blocks;

TABLE gk_attn_blocks gk_attn_fwd_blocks[] = {
    /* of torch, full, S 512 to 4096, f32 | bf16: d64 1.19x | 2.28x, d128 1.17x | 2.16x, d256 1.16x | 2.15x, d512 1.15x | 2.18x;
     * 128 lanes: d64 1.15x | 2.27x, d128 1.08x | 2.10x, d256 1.10x | 1.96x, d512 1.11x | 1.93x. 128 keys: the same */
    {512, 256, 64, 32},
};
/* Tiles: O, which the L2 holds, is read and written a fourth as often. Xeon of model 207, one
 * thread, of 256 x 64: 256 x 128 d64 1.12x, d128 1.13x, d256 1.14x; 256 x 256 1.17x 1.21x 1.22x;
 * 128 x 256 1.05x 1.06x 1.22x; of 256 x 256, 256 x 512 1.01x 1.02x 1.04x */
TABLE gk_attn_blocks gk_attn_fwd_blocks_tiled[] = {{512, 256, 256, 32}};

/* ---- flash_attn backward ---------------------------------------------------------------------
 * A pair of tiles is bq queries x bkv keys; scores are made `strip` keys at a time, so that they
 * are
 * near when they become probabilities and gradients; strips of 28, 64, 128 keys differ by 2%.
 * Reasons are GFLOP/s on two cores, full attention, head_dim 64 and S = 2048 where not said. */
typedef struct gk_attn_bwd_blocks {
    int64_t bq, bkv, strip;
} gk_attn_bwd_blocks;

/* 128 x 128 2% below, 256 x 512 2% above in four times the room; head_dim 512: 364, 64 x 64 340 */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx512bf16 = {128, 256, 64};
/* no machine to measure on: the same room, and whole tiles */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_amx = {128, 256, 64};
/* 202; 64 x 128 197, 64 x 256 198, 128 x 128 199; head_dim 512: 206, 64 x 64 188 */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx512 = {128, 256, 64};
/* not timed: a quarter of the tile, as machines without AVX-512 often have 256 to 512 KiB of L2 */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx2 = {64, 128, 64};
/* not timed: as avx2 */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_base = {64, 128, 64};

#define GK_ATTN_BWD_TASKS 16       /* with fewer (sequence, kv head) pairs the keys are split ... */
#define GK_ATTN_BWD_CHUNK_KEYS 512 /* ... into chunks of at least so many keys ... */
#define GK_ATTN_BWD_CHUNK_BYTES \
    (INT64_C(1) << 28) /* ... whose copies of dQ together take at most this */

/* paged: sequences of at most max_lanes lanes (query tokens x heads of the group) read their keys in
 * tiles of `tile` keys, all heads of a tile together. The sums O of a head stay in registers for
 * v_keys keys. The context is split into chunks of `chunk` keys, of more where the batch would have
 * over max_chunks of them. With fewer than tasks_per_thread chunks a thread the heads are split,
 * too. */
typedef struct gk_paged_blocks {
    int64_t max_lanes, tile, v_keys, chunk, max_chunks, tasks_per_thread;
} gk_paged_blocks;

/* Shares of the read loop beside it, geomean of B x context 1 x 4096, 4 x 4096, pages of 16 and 64.
 * Zen 5, f32 | bf16: v_keys 4
 * 0.81 | 0.83, 8 0.79 | 0.77, 16 0.78 | 0.78, 2 under 0.5; tile 16 0.78 | 0.70, 64 0.80 | 0.82; chunk 2048 0.77 | 0.78. Zen 4, before
 * heads went inside keys: tile 16 the same, 64 less; chunk 512 0.75 for 0.785 in bf16, 2048 0.79. 8
 * lanes read about half of what 4 do, GB/s a core. */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx512bf16 = {8, 32, 4, 1024, 4096, 2};
/* no machine to measure on: a tile of keys is one AMX tile of p; more lanes than a CPU's batch of tokens has
 * are blocks, as in prefill */
TABLE gk_paged_blocks gk_paged_attn_blocks_amx = {64, 32, 4, 1024, 4096, 2};
/* f32 | bf16: v_keys 4 0.78 | 0.87, 8 0.77 | 0.81 */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx512 = {8, 32, 4, 1024, 4096, 2};
/* On a Zen 5 f32 | bf16: v_keys 4 0.91 | 0.75, 8 0.85 | 0.80. Zen 3, 1 x 4096: tasks_per_thread 2 0.615, 4 0.58 */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx2 = {8, 32, 8, 1024, 4096, 2};
/* v_keys 4 or 8 0.63 | 0.34 */
TABLE gk_paged_blocks gk_paged_attn_blocks_base = {8, 32, 8, 1024, 4096, 2};

/* AMX's emulation runs what AMX runs. */
#define gk_attn_bwd_blocks_amx_emulated gk_attn_bwd_blocks_amx
#define gk_paged_attn_blocks_amx_emulated gk_paged_attn_blocks_amx

#endif
