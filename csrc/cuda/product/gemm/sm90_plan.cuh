/* SPDX-License-Identifier: BSD-3-Clause */
/* sm90_plan.cuh: plans a gemm on Hopper. It chooses the instance among Hopper's four files, the
 * shape of its clusters, and how it reads the operands. The choice minimises an estimated time,
 * whose constants are in tiles.h. Host only. */
#ifndef GPUKERN_CUDA_GEMM_SM90_PLAN_CUH
#define GPUKERN_CUDA_GEMM_SM90_PLAN_CUH

#include "../../layout/wgmma.cuh"
#include "operands.cuh"
#include "tiles.h"

extern "C" const gk_cuda_table gk_gemm_sm80_table;

enum Key {  /* of an instance */
    KEY_BM, /* rows and columns of a tile */
    KEY_BN,
    KEY_TILES,   /* of a cluster */
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,    /* bytes of shared memory */
    KEY_SPLITS,  /* of k */
    KEY_TRAITS,
    KEY_BK
};
enum Trait {
    SWAPAB = 1,
    PING_PONG = 2,
    NARROW = 4, /* for small N */
    HALVES = 8, /* the tiles of the last wave may be halved along k */
    GRID = 16   /* a cluster has two columns of tiles and shares both operands */
};
inline bool is(const gk_cuda_instance *row, Trait trait) { return row->key[KEY_TRAITS] & trait; }

/* ---- tiles ----------------------------------------------------------------------------------- */
/* The problem as the instance computes it. Swap-AB exchanges a and b; the epilogue, with the
 * result's strides, stays. */
inline GemmProblem problem_of(const GemmProblem &p, bool swapab) {
    if (!swapab) return p;
    GemmProblem t = gemm_swapped(p);
    t.epilogue = p.epilogue;
    return t;
}

/* Blocks of one cluster of an instance. */
inline int cluster_of(const gk_cuda_instance *row) {
    return row->key[KEY_TILES] * row->key[KEY_SPLITS];
}

/* Clusters that run at once. Clusters of four or eight blocks find fewer free neighbouring SMs
 * than pairs do. */
inline int64_t most_clusters(const gk_cuda_instance *row, const gk_gpu *gpu) {
    const int blocks = cluster_of(row);
    const int64_t most = gpu->num_sms / blocks, found = blocks > 4   ? most - 1
                                                        : blocks > 2 ? most - most / 11
                                                                     : most;
    return found > 1 ? found : 1; /* at least one, even on a part of a GPU */
}

/* How clusters cover the result. */
struct Clusters {
    bool in_row;
    int tiles_m, tiles_n; /* clusters along m and n */
};

/* Picks the cluster shape that needs fewer waves. On a tie, clusters of four are 4 x 1. Pairs
 * are 1 x 2 if that saves 30 % of the clusters; for small tiles also if it costs no cluster more
 * and M >= 0.3 N. (Measured, docs/worklog/gemm.md.) Pairs of tf32 are 1 x 2 for swap-AB only.
 * Consecutive clusters read the same part of b from L2, so a cluster should rather share a. */
inline Clusters clusters_of(const gk_cuda_instance *row, const gk_gpu *gpu, const GemmProblem &p) {
    const int64_t tiles_m = gk_ceil_div(p.m, row->key[KEY_BM]),
                  tiles_n = gk_ceil_div(p.n, row->key[KEY_BN]);
    const int64_t tiles = row->key[KEY_TILES], in_m = gk_ceil_div(tiles_m, tiles),
                  in_n = gk_ceil_div(tiles_n, tiles);
    if (tiles == 1) return {false, (int)tiles_m, (int)tiles_n};
    if (is(row, GRID))
        return {true, (int)gk_ceil_div(tiles_m, tiles / 2), (int)gk_ceil_div(tiles_n, 2)};
    const int64_t most = most_clusters(row, gpu),
                  row_waves = gk_ceil_div(tiles_m * in_n * p.batch, most),
                  column_waves = gk_ceil_div(in_m * tiles_n * p.batch, most);
    const int64_t in_row = tiles_m * in_n, in_column = in_m * tiles_n;
    const bool small = row->key[KEY_BM] * row->key[KEY_BN] <= 128 * 128;
    bool across = row_waves < column_waves;
    if (row_waves == column_waves && tiles == 2)
        across = row->dtype == GK_F32 ? is(row, SWAPAB)
                                      : 10 * in_row <= 7 * in_column ||
                                            (small && in_row <= in_column && 10 * p.m >= 3 * p.n);
    if (across) return {true, (int)tiles_m, (int)in_n};
    return {false, (int)in_m, (int)tiles_n};
}

/* Whether a cluster of two columns of tiles stays in step. Its blocks keep in step only by the
 * parts that they copy for each other. If the result ends early along both edges, a block may
 * receive nothing from its row and nothing from most of its column. It would run ahead and
 * release a stage a second time while a third block still reads it. So along one edge the last
 * tile must need some of every part that is copied. */
inline bool keeps_step(const gk_cuda_instance *row, const GemmProblem &p) {
    if (!is(row, GRID)) return true;
    const int64_t bm = row->key[KEY_BM], bn = row->key[KEY_BN], down = row->key[KEY_TILES] / 2;
    return gk_round_up(p.m, bm * down) - p.m < bm / 2 || gk_round_up(p.n, bn * 2) - p.n < bn / down;
}

/* Estimated time of an instance. */
struct Estimate {
    double us;
    int64_t halved; /* tiles of the last wave that are halved along k, counted in clusters */
};

/* Time of a tile: about the longest of its products, its copies into the SM, and the copies of
 * all `blocks` blocks out of L2. The fourth-power norm accounts for two that take equally long
 * and slow each other. */
inline double tile_us(double products_us, double bytes, double l2_bytes, double blocks) {
    const double copies_us = bytes / SM_BYTES_PER_US, l2_us = l2_bytes * blocks / L2_BYTES_PER_US;
    const double a = products_us * products_us, b = copies_us * copies_us, c = l2_us * l2_us;
    return sqrt(sqrt(a * a + b * b + c * c));
}

/* Adds up waves of clusters. The last wave has fewer clusters, which find L2 less busy. mode:
 * layout of the operands (Mode). */
inline Estimate estimate_of(const gk_cuda_instance *row, const gk_gpu *gpu, const GemmProblem &p,
                            int mode) {
    const int64_t bm = row->key[KEY_BM], bn = row->key[KEY_BN], splits = row->key[KEY_SPLITS];
    const Clusters clusters = clusters_of(row, gpu, p);
    const int64_t all = (int64_t)clusters.tiles_m * clusters.tiles_n * p.batch,
                  most = most_clusters(row, gpu);
    const int64_t last = all % most, waves = all / most;
    const double element = (double)gk_bits_of(row->dtype) / 8,
                 size = (double)(bm * bn) / (128 * 256);
    const double peak = 8192 / element * gpu->clock_khz * 1e-3 * row->key[KEY_PERCENT] * 0.01;
    const double k = (double)gk_round_up(p.k, WGMMA_ROW_BYTES / (int64_t)element) / (double)splits;
    const double products_us = 2.0 * (double)(bm * bn) * k / peak;
    /* An MN-major operand is copied in boxes of 64. */
    const double a = k * element * (double)(mode & A_ALONG_M ? gk_round_up(bm, 64) : bm),
                 b = k * element * (double)(mode & B_ALONG_N ? gk_round_up(bn, 64) : bn);
    const double sharers = row->key[KEY_TILES], l2_bytes = is(row, GRID) ? a / 2 + 2 * b / sharers
                                                           : clusters.in_row ? a / sharers + b
                                                                             : a + b / sharers;
    const auto wave_us = [&](int64_t count) {
        return tile_us(products_us, a + b, l2_bytes, (double)(count * cluster_of(row)));
    };
    const double launch_us = LAUNCH_US + LAST_US * size, full_us = wave_us(most),
                 last_us = last > 0 ? wave_us(last) : full_us;
    /* Ping-pong stores results under the next tile's products, if these take at least as long. */
    if (is(row, PING_PONG))
        return {(double)(last > 0 ? waves : waves - 1) *
                        ((full_us > PING_PONG_US ? full_us : PING_PONG_US) + TILE_US) +
                    last_us + ALONE_US + launch_us,
                0};
    const double store_us = TILE_US + size * (STORE_US + (splits > 2   ? EXCHANGE4_US
                                                          : splits > 1 ? EXCHANGE_US
                                                                       : 0));
    const double results = (double)p.m * (double)p.n * (double)p.batch;
    const double curve_us =
        p.epilogue.activation > GK_ACT_RELU ? CURVE_US * results / (128 * 256 * gpu->num_sms) : 0;
    const double before_us = (double)waves * (full_us + store_us) + launch_us + curve_us;
    if (last == 0) return {before_us, 0};
    if (is(row, HALVES) && may_halve((int)bm, (int)bn, mode == (A_ALONG_M | B_ALONG_N)) &&
        2 * last <= most) {
        const double halves_us =
            tile_us(products_us / 2, (a + b) / 2, (a + b) / 2, (double)(4 * last)) + HALVES_US +
            HALVES_SUM_US * size;
        if (halves_us < last_us) return {before_us + halves_us + store_us, last};
    }
    return {before_us + last_us + store_us, 0};
}

/* ---- operands -------------------------------------------------------------------------------- */
/* Estimated time of a product of small M or small N, which is bound by reading its operands. */
inline double swapab_us(const GemmProblem &p) {
    return SWAPAB_US +
           2.0 * (double)(p.m + p.n) * (double)p.k * (double)p.batch / SWAPAB_BYTES_PER_US;
}

/* Estimated time of the fastest gemm_sm80 instance, with k split so that every SM has work. */
inline double other_us(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem &p, bool chunks) {
    typedef Tile16_any Any;
    const bool tf32 = dtype == GK_F32;
    const int64_t tiles = gk_ceil_div(p.m, Any::BM) * gk_ceil_div(p.n, Any::BN) * p.batch;
    const int64_t steps = gk_ceil_div(p.k, Any::BK);
    const int64_t splits =
        gk_clamp_i64(gpu->num_sms / tiles, 1, gk_clamp_i64(steps / 4, 1, MAX_SPLITS));
    const int64_t busiest = gk_ceil_div(tiles * splits, gpu->num_sms);
    const int percent = chunks ? (tf32 ? PERCENT_TF32 : PERCENT_128x128)
                        : tf32 ? PERCENT_PLAIN
                               : PERCENT_ANY;
    const double peak = (tf32 ? 2048 : 4096) * gpu->clock_khz * 1e-3 * percent * 0.01;
    const double step_us = 2.0 * Any::BM * Any::BN * Any::BK / peak;
    return (double)(busiest * gk_ceil_div(steps, splits)) * step_us + BLOCK_US +
           (splits > 1 ? REDUCE_US : 0);
}

/* True if rows or k lie in chunks of 16 bytes, which the kernels with cp.async need. */
inline bool in_chunks(const void *data, gk_dtype dtype, int64_t x_stride, int64_t k_stride,
                      const int64_t *batch, int ndim) {
    return (k_stride == 1 && gemm_aligned(data, dtype, x_stride, batch, ndim)) ||
           (x_stride == 1 && gemm_aligned(data, dtype, k_stride, batch, ndim));
}

inline double copies_us(const Operands &o) {
    const double bytes = 2.0 * (double)o.bytes, many = bytes - REALIGN_FAST_BYTES;
    return o.bytes > 0 ? REALIGN_US + bytes / REALIGN_BYTES_PER_US +
                             (many > 0 ? many / REALIGN_MANY_PER_US : 0)
                       : 0;
}

/* True if realigning copies and a product, `us` together, beat the kernels that need no copy. p:
 * the problem before the copies. o: the operands if everything is copied that needs it. */
inline bool worth_while(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem &p, const Operands &o,
                        bool few, double us) {
    const bool chunks = in_chunks(p.a, dtype, p.a_m, p.a_k, p.a_batch, p.ndim) &&
                        in_chunks(p.b, dtype, p.b_n, p.b_k, p.b_batch, p.ndim);
    /* Small M: gemm_skinny streams the weights of up to 16 rows faster than they are copied. It
     * cannot stream weights without a dimension of stride 1, and copies would expand broadcast
     * ones. */
    const bool streamed =
        p.b_k == 0 || p.b_n == 0 || (p.m <= SKINNY_MAX_TOKENS && (p.b_k == 1 || p.b_n == 1));
    if (few && o.copied[0] && (chunks || streamed || o.bytes > REALIGN_FEW_BYTES)) return false;
    return us < other_us(gpu, dtype, p, chunks);
}

/* The result, or preact, as a tensor that TMA writes. */
inline TensorShape result_of(const GemmProblem &p, bool swapab, bool preact) {
    const GemmEpilogue &e = p.epilogue;
    return operand_of(preact ? e.preact : e.out, e.out_dtype, swapab ? p.n : p.m,
                      swapab ? p.m : p.n, preact ? e.preact_row : e.out_row, 1, p,
                      preact ? p.preact_batch : p.out_batch, false);
}

/* True if results have the operands' dtype and rows of whole chunks of 16 bytes. TMA would write
 * beyond a last column that ends within a chunk. */
inline bool whole_chunks(const GemmProblem &p, gk_dtype dtype, bool swapab) {
    const GemmEpilogue &e = p.epilogue;
    return e.out_dtype == dtype && e.out_vectors && gk_whole_chunks(dtype, swapab ? p.m : p.n);
}

/* True if a ping-pong instance can store the results, which it does by TMA only. */
inline bool ping_pong_fits(const GemmProblem &p, gk_dtype dtype) {
    return !p.epilogue.c && whole_chunks(p, dtype, false) &&
           tensor_map_fits(result_of(p, false, false)) &&
           (!p.epilogue.preact || tensor_map_fits(result_of(p, false, true)));
}

/* ---- instances ------------------------------------------------------------------------------- */
/* This file's part of a plan. */
struct HopperPlan {
    Operands operands; /* its p has the number of tiles */
    unsigned clusters; /* to launch */
    unsigned
        whole; /* tiles of clusters that are one task; each of the others is two, halved along k */
    bool in_row; /* the tiles of a cluster form a row */
};

/* Fills in the plan for this instance; its operands have been found. */
inline bool plan_instance(const gk_cuda_instance *row, const gk_gpu *gpu, int64_t halved,
                          gk_plan *to) {
    HopperPlan &own = gk_own<HopperPlan>(to);
    GemmProblem &p = own.operands.p;
    const Clusters clusters = clusters_of(row, gpu, p);
    p.tiles_m = clusters.tiles_m;
    p.tiles_n = clusters.tiles_n;
    own.in_row = clusters.in_row;
    p.group = GROUP_HEIGHT_SM90 / (row->key[KEY_BM] * (own.in_row ? 1 : row->key[KEY_TILES]));
    p.splits = 1;
    const int64_t tiles = (int64_t)p.tiles_m * p.tiles_n * p.batch, most = most_clusters(row, gpu);
    own.whole = (unsigned)(tiles - halved);
    const int64_t tasks = tiles + halved;
    own.clusters = (unsigned)(tasks * LEAST_IDLE < most ? tasks : most);
    to->kernel = row;
    to->tile[0] = row->key[KEY_BM];
    to->tile[1] = row->key[KEY_BN];
    to->tile[2] = row->key[KEY_BK];
    to->tasks = tasks * cluster_of(row);
    to->waves = (double)to->tasks / (double)(most * cluster_of(row));
    to->workspace_bytes = (size_t)own.operands.bytes;
    return true;
}

/* Plans the call with this instance, if it serves the call. */
inline bool plan_hopper_instance(const gk_cuda_instance *row, const gk_context *ctx,
                                 const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const bool tf32 = row->dtype == GK_F32, swapab = is(row, SWAPAB);
    if ((tf32 && args->fp32_precision != GK_TF32) || gpu->smem_per_block < row->key[KEY_SMEM])
        return false;
    Operands &o = gk_own<HopperPlan>(to).operands;
    o.p = problem_of(gemm_problem_of(args), swapab);
    if (!operands_of(row->dtype, swapab, &o) ||
        (is(row, PING_PONG) && !ping_pong_fits(o.p, row->dtype)))
        return false;
    return (tf32 || !swapab || row->key[KEY_SPLITS] == 1 || o.p.n <= row->key[KEY_BN]) &&
           keeps_step(row, o.p) &&
           plan_instance(row, gpu, estimate_of(row, gpu, o.p, o.mode).halved, to);
}

/* ---- the choice ------------------------------------------------------------------------------ */
/* The key of a cached choice: all that the choice depends on. */
struct Question {
    const gk_gpu *gpu;
    int64_t m, n, k, batch;
    int32_t mode, dtype;
    bool swapab, few, narrow, ping_pong, curve,
        rest[3]; /* rest: padding, so that every byte is set */
};
static_assert(sizeof(Question) == 56, "questions are compared byte by byte");

struct Choice {
    Question question; /* m = 0: empty */
    const gk_cuda_instance *row;
    Estimate estimate;
};

/* Chooses the instance of the least estimated time among those that fit the GPU. For small M or
 * N it chooses the smallest swap-AB or narrow tile that holds the short side. p: the problem as
 * it is computed, with tokens as its columns. */
inline void choose(const gk_cuda_table *const *schedules, int num_schedules, const GemmProblem &p,
                   Choice *to) {
    const Question &q = to->question;
    to->row = NULL;
    to->estimate = {1e31, 0};
    for (int s = 0; s < num_schedules; ++s)
        for (const gk_cuda_instance *r = schedules[s]->instances;
             r < schedules[s]->instances + schedules[s]->num_instances; ++r) {
            if ((int)r->dtype != q.dtype || r->key[KEY_SMEM] > q.gpu->smem_per_block) continue;
            if (is(r, SWAPAB) != q.swapab || (q.few && p.n > r->key[KEY_BN])) continue;
            /* Swap-AB with split-K serves small M only. */
            if (q.swapab && !q.few && q.dtype != GK_F32 && r->key[KEY_SPLITS] > 1) continue;
            if (is(r, NARROW) != q.narrow || (q.narrow && p.n > r->key[KEY_BN])) continue;
            if (is(r, PING_PONG) && !q.ping_pong) continue;
            if (!keeps_step(r, p)) continue;
            const Estimate found = q.few || q.narrow ? Estimate{(double)r->key[KEY_BN], 0}
                                                     : estimate_of(r, q.gpu, p, q.mode);
            if (found.us < to->estimate.us) {
                to->row = r;
                to->estimate = found;
            }
        }
}

/* This thread's choices for its last calls. A model repeats a few dozen shapes, and estimating
 * all instances takes 0.4 us. */
constexpr unsigned KEPT_CHOICES = 64;

inline Choice &kept_choice(const Question &q) {
    static thread_local Choice kept[KEPT_CHOICES];
    const uint64_t mixed = (uint64_t)(q.m * 31 + q.n) * 0x9e3779b97f4a7c15u +
                           (uint64_t)(q.k * 31 + q.mode + q.batch) * 0xc2b2ae3d27d4eb4fu;
    return kept[mixed >> 32 & (KEPT_CHOICES - 1)];
}

/* Looks the choice up in the cache, or makes it. The operands have been found. */
inline Choice choice_of(const gk_cuda_table *const *schedules, int num_schedules, const gk_gpu *gpu,
                        gk_dtype dtype, const Operands &o, bool swapab, bool few, bool narrow) {
    const Question question = {gpu,
                               o.p.m,
                               o.p.n,
                               o.p.k,
                               o.p.batch,
                               o.mode,
                               (int32_t)dtype,
                               swapab,
                               few,
                               narrow,
                               ping_pong_fits(o.p, dtype),
                               o.p.epilogue.activation > GK_ACT_RELU,
                               {}};
    Choice &choice = kept_choice(question);
    if (memcmp(&choice.question, &question, sizeof question) != 0) {
        choice.question = question;
        choose(schedules, num_schedules, o.p, &choice);
    }
    return choice;
}

/* Plans the call with the chosen instance. tf32 uses a swap-AB instance if b is MN-major. */
inline bool plan_hopper(const gk_cuda_table *const *schedules, int num_schedules,
                        const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const bool tf32 = args->a.dtype == GK_F32;
    if (tf32 ? args->fp32_precision != GK_TF32
             : args->a.dtype != GK_BF16 && args->a.dtype != GK_F16)
        return false;
    const GemmProblem p = gemm_problem_of(args);
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    /* few: small M beside a long b, swap-AB. narrow: small N beside a long a. Everything else is
     * cut into tiles, which need at least 17 rows and columns. */
    const bool long_k = !tf32 && p.k >= SM90_SWAPAB_K;
    const bool few = long_k && p.m <= SM90_SWAPAB_ROWS && p.n >= 2 * SM90_SWAPAB_ROWS;
    const bool narrow = long_k && p.n <= SM90_SWAPAB_ROWS && p.m >= 2 * SM90_SWAPAB_ROWS;
    if (!few && !narrow && (p.m <= SKINNY_MAX_TOKENS || p.n <= SKINNY_MAX_TOKENS)) return false;
    const bool swapab = tf32 ? copy_along(p.n, p.k, p.b_n, p.b_k) : few;
    Operands &o = gk_own<HopperPlan>(to).operands;
    o.p = problem_of(p, swapab);
    if (!operands_of(args->a.dtype, swapab, &o)) return false;
    Choice best = choice_of(schedules, num_schedules, gpu, args->a.dtype, o, swapab, few, narrow);
    /* Consider swap-AB for larger M, too: M may fit the column counts of WGMMA better than N
     * does. It is limited to M < N and long k: of 47 products that the estimate gave to such a
     * tile, those with M > N or short k took up to 23 % longer than with the best other instance
     * (docs/worklog/gemm.md). */
    if (long_k && !few && !narrow && p.m < p.n && p.m * p.n <= SM90_SWAPPED_RESULTS) {
        Operands swapped;
        swapped.p = problem_of(p, true);
        if (operands_of(args->a.dtype, true, &swapped) && swapped.bytes == o.bytes) {
            const Choice other = choice_of(schedules, num_schedules, gpu, args->a.dtype, swapped,
                                           true, false, false);
            if (other.row && other.estimate.us < best.estimate.us) {
                best = other;
                o = swapped;
            }
        }
    }
    if (!best.row) return false;
    const double us = (few || narrow ? swapab_us(p) : best.estimate.us) + copies_us(o);
    if (narrow && o.copied[0])
        /* a is nearly all that is read. A kernel that reads it in place is faster than a copy. */
        return false;
    if (o.bytes > 0 && !worth_while(gpu, args->a.dtype, p, o, few, us)) return false;
    /* Few tiles of tf32: gemm_sm80 splits k over all SMs and may be faster. */
    gk_plan other;
    if (tf32 && us < FEW_TILES_US && gk_gemm_sm80_table.plan(ctx, arguments, &other) &&
        other.us + SM80_US < us)
        return false;
    to->us = us;
    return plan_instance(best.row, gpu, best.estimate.halved, to);
}

/* The plan function of the tables whose instances gemm_sm90a's plan chooses. */
inline bool planned_elsewhere(const gk_context *, const void *, gk_plan *) { return false; }

#endif
