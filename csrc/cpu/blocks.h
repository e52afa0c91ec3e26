/* SPDX-License-Identifier: BSD-3-Clause */
/* blocks.h: the tuned sizes of the CPU kernels, each with the measurement that chose it. "1.05x
 * of torch" means 1.05 times the speed of PyTorch. Figures after "own" and "shared" belong to
 * the tables of that name. */
#ifndef GPUKERN_CPU_BLOCKS_H
#define GPUKERN_CPU_BLOCKS_H

#include <stdint.h>

#define TABLE static const __attribute__((unused))

/* ---- gemm ------------------------------------------------------------------------------------
 * A block of mb x kb of a stays in the L2, and kb x 2 W of b in the L1 (W: floats of a vector).
 * kb may be exceeded by a quarter. Blocks are split further until every thread has
 * tasks_per_thread of them, or until a task falls below min_task multiply-adds: packing would
 * then cost more than the better balance gains. */
typedef struct gk_gemm_block {
    int64_t mb, nb, kb;
} gk_gemm_block;
typedef struct gk_gemm_blocks {
    /* own: each task packs its own b. shared: all tasks use one packed b. */
    gk_gemm_block own, shared;
    int64_t tasks_per_thread, min_task;
} gk_gemm_blocks;

/* The buffer of shared b, a quarter of the L3 on the machine measured, and the multiply-adds of
 * a phase that are worth two barriers. Sharing gains 1 to 2 % at 512 cubed (2^27) and 3 to 5 %
 * at 768 cubed. Smaller products were not measured. */
#define GK_GEMM_SHARED_BYTES (INT64_C(8) << 20)
#define GK_GEMM_SHARED_MIN 0x1p26
/* The most packed a that a worker keeps, twice the L2 of the machine measured. bf16, 64 x 4096 x
 * 4096, of torch: 1.11x if a is kept, 1.08x if each task packs it. */
#define GK_GEMM_ONCE_BYTES (INT64_C(2) << 20)

/* If M is at most GK_GEMM_SMALL_M, K is cut into up to GK_GEMM_FEW_BLOCKS blocks of at least
 * GK_GEMM_FEW_KB. bf16, N = K = 1024, of torch, with one, two and four blocks: 64 rows 1.02x,
 * 1.04x, 1.07x; 32 rows 1.03x, 1.09x, 1.15x. */
#define GK_GEMM_SMALL_M 128
#define GK_GEMM_FEW_BLOCKS 4
#define GK_GEMM_FEW_KB 256

/* shared, f32 1024 cubed: 96 x 1024 60 GFLOP/s, 192 x 512 53. own follows the cache sizes, not
 * measured. */
TABLE gk_gemm_blocks gk_gemm_blocks_base = {{192, 256, 256}, {96, 2048, 1024}, 2, 1 << 21};
/* shared, f32 1024 cubed, of torch: kb 256 0.99x, 512 1.03x, 1024 with 120 rows 1.01x. own
 * follows the cache sizes, not measured. */
TABLE gk_gemm_blocks gk_gemm_blocks_avx2 = {{192, 256, 256}, {192, 2048, 512}, 2, 1 << 21};
/* f32, of torch, at 512 | 1024 | 2048 | 1025 cubed:
 *  own only                       1.04x | 1.03x | 1.02x | 1.09x
 *  shared, kb 512                 1.00x | 1.03x | 1.09x | 1.13x
 *  shared, kb 1024, 224 rows      1.00x | 1.07x | 1.10x | 1.14x, with 280 rows the same
 * own with 64 rows: nb 256, kb 256 1.21x; nb 128, kb 1024 1.31x. */
TABLE gk_gemm_blocks gk_gemm_blocks_avx512 = {{336, 128, 1024}, {280, 2048, 1024}, 2, 1 << 21};
/* bf16, of torch, at 512 | 1024 | 2048 | 1025 cubed:
 *  own only                       0.92x | 0.93x | 0.96x | 0.93x
 *  shared, kb 512                 0.96x | 0.97x | 0.94x | 0.86x
 *  shared, kb 1024, 224 rows      0.96x | 1.01x | 0.99x | 0.88x
 *  shared, kb 1024, 280 rows      0.97x | 1.01x | 1.00x | 0.92x
 * own with 64 rows: nb 512, kb 512 1.01x; nb 128, kb 1024 1.07x. */
TABLE gk_gemm_blocks gk_gemm_blocks_avx512bf16 = {{336, 128, 1024}, {280, 2048, 1024}, 2, 1 << 22};

/* A panel of b, kb x 32, takes 32 KiB of an L1 of 48 KiB. Everything else that a task reads must
 * stay in an L2 of 2 MiB, of which only about 1 MiB is usable because page frames are random.
 *
 * Measured on a Xeon of model 207, one thread, alternating runs, bf16, at 1024 | 2048 cubed |
 * 1024 NT. shared, relative to 512 x 2048: 256 x 512 1.11x | 1.14x | 1.11x; 256 rows with kb
 * 1024 1.14x | 1.00x | 1.23x. own with a kept, relative to shared 256 x 512, and also at 512:
 * 512 x 256 1.06x | 0.94x | 1.06x | 1.00x; 512 x 128 1.07x | 0.85x | 1.12x | 1.09x; 256 x 128
 * 1.08x | 1.00x | 1.13x | 1.05x.
 *
 * min_task is 8 times avx512's, because tiles multiply that much faster. */
TABLE gk_gemm_blocks gk_gemm_blocks_amx = {{256, 128, 512}, {256, 512, 512}, 2, 1 << 24};
/* AMX: if K is at most this, each worker keeps its 256 rows of a packed and b is not shared. */
#define GK_GEMM_KEPT_K 2048

/* The largest M for which b is read in place instead of packed. ACROSS: b is contiguous along n
 * (bf16, 4096 squared, 16 rows: 1.45x in place, 1.29x packed). ALONG: b is contiguous along k
 * (24 rows 1.10x against 1.03x, 32 rows 1.00x against 1.04x). */
enum {
    GK_SKINNY_ROWS_ACROSS = 16,
    GK_SKINNY_ROWS_ALONG = 24,
    /* Beside AMX. Speed packed for tiles relative to read in place, Xeon of model 207, bf16:
     *  across, K x N 4096 x 4096: rows 3, 4, 5, 8: 0.60x, 0.70x, 1.47x, 1.63x
     *  across, K x N 1024 x 1024: rows 4, 5, 8:    1.19x, 1.87x, 2.45x
     *  along,  K x N 4096 x 4096: rows 4, 6, 8:    0.49x, 0.79x, 0.95x
     *  along,  K x N 1024 x 1024: row 8:           1.92x */
    GK_SKINNY_ROWS_AMX_ACROSS = 4,
    GK_SKINNY_ROWS_AMX_ALONG = 6,
    /* int8. Computed, not measured: each row of a needs 24 GOP/s at 12 GB/s of b, and VPDPBUSD
     * gives 460 GOP/s. */
    GK_SKINNY_ROWS_AMX = 8
};

/* Sizes for small M. If b is packed across: rows of b in a step (kb_few; kb_many if more than
 * small_m rows of a share the loads and stores of C), and values of b in flight per thread. If b
 * is read in place: rows of b in a step (place_few, place_many) and the most columns of a task
 * (place_nb). Along k: the chunk of k (kb_along; with TN columns it stays in the L1). nb_min is
 * the least number of columns of a task. Measured at K x N 4096 x 4096, 1024 x 1024 and 4097 x
 * 1025. With 16 rows a packed b wants 32 rows of b in a step (1.9x, with 8 rows 1.4x). */
typedef struct gk_skinny_blocks {
    int64_t nb_min, in_flight, kb_few, kb_many, small_m, place_few, place_many, place_nb, kb_along;
    int64_t tasks_per_thread;
    int64_t place_rows;  /* largest M for which a 16-bit b is read in place ... */
    int64_t long_row;    /* ... if its rows have at least this many values */
    int64_t short_bytes; /* chunks of columns up to this long are prefetched by software */
} gk_skinny_blocks;

/* us for bf16 in place at N 1024 and 4097: 1 row 358, 1467, where packed takes 632, 2665. NT
 * without prefetch 183, 489, with it 214, 805. f16, 8 rows: in place 1319, packed 1126. The
 * other sizes are avx512's. */
TABLE gk_skinny_blocks gk_skinny_blocks_base = {64,   8192, 16, 32, 4, 12, 16,
                                                4096, 1024, 4,  4,  0, 0};
/* Zen 1, us for bf16 in place at K x N 4096 x 4096, 1024 x 1024, 4097 x 1025: 1 row 2216, 231,
 * 905 (packed 5561, 357, 1573); 8 rows 6948, 573, 2128 (packed 10805, 711, 2907); 16 rows at N
 * 11008 42907 (packed 38131). place_few of 8 or 16 takes the same time; 32 takes 1.5 times as
 * long at N 4096. NT, 1 row, without prefetch 2214, 223, 599 (with it 3496, 258, 924); 4 rows
 * 4771 (6251). f32 behaves the same. */
TABLE gk_skinny_blocks gk_skinny_blocks_avx2 = {64,   8192, 16, 32, 4, 12, 16,
                                                4096, 1024, 4,  8,  0, 0};
/* Geometric mean, of torch, f32 in place. 1 and 4 rows: kb 6 1.86x, 8 1.97x, 12 1.96x, 16 1.86x.
 * 8 and 16 rows: kb 12 1.83x, 16 1.86x, 24 1.67x. With tasks of a quarter of the columns and
 * prefetched rows 1.63x and 1.77x. */
TABLE gk_skinny_blocks gk_skinny_blocks_avx512 = {64,   8192, 16, 32, 4,    12,  16,
                                                  4096, 1024, 4,  4,  4096, 2048};
/* In place as above. Geometric means, of torch. Packed, 1 and 4 rows: kb_few 16 1.40x, 32 1.51x,
 * 64 1.53x; with tasks of half the columns 1.45x; without prefetch 1.17x. 16-bit b, 1 and 4
 * rows: at N 4096 packed 1.71x, 1.68x, in place with kb 8 3.02x, 2.08x, with kb 16 2.51x, 1.98x;
 * at N 1024 packed 1.40x, 1.48x, in place 1.35x, 1.25x. NT with prefetched short columns, 1, 4,
 * 16, 24 rows: at K 1024 1.51x, 1.50x, 1.21x, 1.12x (without 1.18x, 1.13x, 0.98x, 0.92x); at K
 * 4096 1.34x, 1.27x, 1.16x, 1.09x (without 1.49x, 1.32x, 1.19x, 1.08x). f32 behaves the same. */
TABLE gk_skinny_blocks gk_skinny_blocks_avx512bf16 = {64,   16384, 32, 64, 4,    12,  16,
                                                      4096, 2048,  4,  4,  4096, 2048};

/* ---- attention -------------------------------------------------------------------------------
 * A block of bq query lanes reads tiles of bkv keys. An entry serves head_dims up to
 * max_head_dim (the larger of D and Dv; the last entry serves GK_CACHE_HEAD_DIM). If there are
 * fewer than min_tasks blocks, bq is halved. */
typedef struct gk_attn_blocks {
    int64_t max_head_dim, bq, bkv, min_tasks;
} gk_attn_blocks;

TABLE gk_attn_blocks gk_attn_fwd_blocks[] = {
    /* of torch, full attention, S 512 to 4096, f32 | bf16:
     *  256 lanes: d64 1.19x | 2.28x, d128 1.17x | 2.16x, d256 1.16x | 2.15x, d512 1.15x | 2.18x
     *  128 lanes: d64 1.15x | 2.27x, d128 1.08x | 2.10x, d256 1.10x | 1.96x, d512 1.11x | 1.93x
     * Tiles of 128 keys give the same. */
    {576, 256, 64, 32},
};
/* AMX. With more keys in a tile, O is read from the L2 and written back less often: with 256
 * keys a fourth as often as with 64. Xeon of model 207, one thread, d64 | d128 | d256, relative
 * to 256 x 64: 256 x 128 1.12x | 1.13x | 1.14x; 256 x 256 1.17x | 1.21x | 1.22x; 128 x 256 1.05x
 * | 1.06x | 1.22x. Relative to 256 x 256: 256 x 512 1.01x | 1.02x | 1.04x. */
TABLE gk_attn_blocks gk_attn_fwd_blocks_tiled[] = {{576, 256, 256, 32}};

/* ---- flash_attn backward ---------------------------------------------------------------------
 * A pair of tiles is bq queries x bkv keys. Scores are computed `strip` keys at a time, so that
 * they are still in the L1 when they become probabilities and gradients; strips of 28, 64 and
 * 128 keys differ by 2 %. The figures are GFLOP/s on two cores, full attention, head_dim 64 and
 * S = 2048 unless noted. */
typedef struct gk_attn_bwd_blocks {
    int64_t bq, bkv, strip;
} gk_attn_bwd_blocks;

/* 128 x 128 is 2 % slower; 256 x 512 is 2 % faster with four times the memory. head_dim 512:
 * 364, with 64 x 64 340. */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx512bf16 = {128, 256, 64};
/* not measured: the memory of avx512bf16 in whole AMX tiles */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_amx = {128, 256, 64};
/* 202; 64 x 128 197, 64 x 256 198, 128 x 128 199. head_dim 512: 206, with 64 x 64 188. */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx512 = {128, 256, 64};
/* not measured: a quarter of avx512's, because machines without AVX-512 often have an L2 of 256
 * to 512 KiB */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_avx2 = {64, 128, 64};
/* not measured: as avx2 */
TABLE gk_attn_bwd_blocks gk_attn_bwd_blocks_base = {64, 128, 64};

/* with fewer (sequence, kv head) pairs than this the keys are split ... */
#define GK_ATTN_BWD_TASKS 16
#define GK_ATTN_BWD_CHUNK_KEYS 512 /* ... into chunks of at least this many keys ... */
#define GK_ATTN_BWD_CHUNK_BYTES \
    (INT64_C(1) << 28) /* ... whose copies of dQ together take at most this many bytes */

/* Paged attention. Sequences of at most max_lanes lanes (query tokens x heads of the group) are
 * read key by key. `unit` keys of all heads are processed at a time; the sums O of a head stay
 * in registers for v_keys keys. The context is split into chunks of `chunk` keys, longer ones if
 * the batch would have more than max_chunks. If there are fewer than tasks_per_thread chunks per
 * thread, heads are split, too. */
typedef struct gk_paged_blocks {
    int64_t max_lanes, tile, v_keys, chunk, max_chunks, tasks_per_thread;
} gk_paged_blocks;

/* Bandwidth as a share of a loop that only reads the cache. Geometric mean of B x context 1 x
 * 4096 and 4 x 4096, pages of 16 and 64 tokens, f32 | bf16.
 *  Zen 5: v_keys 4 0.81 | 0.83, 8 0.79 | 0.77, 16 0.78 | 0.78, 2 below 0.5
 *         unit 16 0.78 | 0.70, 64 0.80 | 0.82; chunk 2048 0.77 | 0.78
 *  Zen 4 (with the loop over heads outside that over keys): unit 16 the same, 64 less;
 *         bf16: chunk 512 0.75, 1024 0.785, 2048 0.79
 * With 8 lanes a core reads about half the GB/s of 4 lanes. */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx512bf16 = {8, 32, 4, 1024, 4096, 2};
/* Not measured. 32 keys are one tile of p. Up to 64 lanes are read key by key; more are blocks,
 * as in prefill. */
TABLE gk_paged_blocks gk_paged_attn_blocks_amx = {64, 32, 4, 1024, 4096, 2};
/* f32 | bf16: v_keys 4 0.78 | 0.87, 8 0.77 | 0.81 */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx512 = {8, 32, 4, 1024, 4096, 2};
/* f32 | bf16. Zen 5: v_keys 4 0.91 | 0.75, 8 0.85 | 0.80. Zen 3, 1 x 4096: tasks_per_thread 2
 * 0.615, 4 0.58. */
TABLE gk_paged_blocks gk_paged_attn_blocks_avx2 = {8, 32, 8, 1024, 4096, 2};
/* f32 | bf16: v_keys 4 or 8 0.63 | 0.34 */
TABLE gk_paged_blocks gk_paged_attn_blocks_base = {8, 32, 8, 1024, 4096, 2};

/* AMX's emulation uses AMX's sizes. */
#define gk_attn_bwd_blocks_amx_emulated gk_attn_bwd_blocks_amx
#define gk_paged_attn_blocks_amx_emulated gk_paged_attn_blocks_amx

#endif
