/* SPDX-License-Identifier: BSD-3-Clause */
/* sm90_plan.c: the tables of Hopper's gemm, and their plan.
 *
 * Dispatch calls plan_best through gk_gemm_sm90a_table. It chooses an instance among the kernels of
 * four .cu files (gemm_sm90a, gemm_pingpong_sm90a, gemm_swapab_sm90a, gemm_tf32_sm90a). It also
 * chooses the shape of the clusters, and whether each operand is read in place or copied first. The
 * choice has the least estimated time. The estimate's constants are in prices.h and instances.def.
 *
 * A batch-invariant call must give a row of a the same bits for every M. Its candidates are the
 * instances that do not split k. Each result is then one chain of WGMMAs over k, so all tiles give
 * the same bits (tests/ops/test_batch_invariant.py). 16-bit swap-AB has the same sums but is left
 * out, because its activations round differently. In tf32 the layout of b alone decides whether
 * swap-AB is used, so M makes no difference.
 *
 * Refuses, so that another table serves the call: dtypes other than bfloat16, float16 and tf32;
 * operands that TMA can read neither in place nor as a copy; and calls for which gemm_skinny or
 * gemm_sm80 is expected to be faster. */
#include "sm90_plan.h"
#include "../../../core/invariant.h"
#include "tables.h"

GK_PLAN_HOLDS(HopperPlan);

/* ---- tiles ----------------------------------------------------------------------------------- */
/* The problem as the instance computes it. Swap-AB exchanges a and b, but its epilogue writes the
 * original result, so the epilogue's strides stay those of the original problem. */
static GemmProblem problem_of(const GemmProblem *p, bool swapab) {
    if (!swapab) return *p;
    GemmProblem t = gemm_swapped(p);
    t.epilogue = p->epilogue;
    return t;
}

/* Clusters that run at once. Clusters of four or eight blocks find fewer free neighbouring SMs
 * than pairs do. */
static int64_t most_clusters(const gk_cuda_instance *instance, const gk_gpu *gpu) {
    const int blocks = cluster_of(instance);
    const int64_t most = gpu->num_sms / blocks, found = blocks > 4   ? most - 1
                                                        : blocks > 2 ? most - most / 11
                                                                     : most;
    return found > 1 ? found : 1; /* at least one, even on a part of a GPU */
}

/* How clusters cover the result. */
typedef struct Clusters {
    bool in_row;
    int tiles_m, tiles_n; /* clusters along m and n */
} Clusters;

/* Picks the cluster shape that needs fewer waves. On a tie, clusters of four are 4 x 1. Pairs
 * are 1 x 2 if that saves 30 % of the clusters; for small tiles also if it costs no cluster more
 * and M >= 0.3 N. (Measured, docs/worklog/gemm.md.) Pairs of tf32 are 1 x 2 for swap-AB only.
 * Consecutive clusters read the same part of b from L2, so a cluster should rather share a. */
static Clusters clusters_of(const gk_cuda_instance *instance, const gk_gpu *gpu,
                            const GemmProblem *p) {
    const int64_t tiles_m = gk_ceil_div(p->m, instance->key[KEY_BM]),
                  tiles_n = gk_ceil_div(p->n, instance->key[KEY_BN]);
    const int64_t tiles = instance->key[KEY_TILES];
    const Clusters alone = {false, (int)tiles_m, (int)tiles_n};
    if (tiles == 1) return alone;
    const Clusters grid = {true, (int)gk_ceil_div(tiles_m, tiles / 2),
                           (int)gk_ceil_div(tiles_n, 2)};
    if (is(instance, GRID)) return grid;
    const int64_t in_m = gk_ceil_div(tiles_m, tiles), in_n = gk_ceil_div(tiles_n, tiles),
                  most = most_clusters(instance, gpu);
    const int64_t in_row = tiles_m * in_n, in_column = in_m * tiles_n;
    const int64_t row_waves = gk_ceil_div(in_row * p->batch, most),
                  column_waves = gk_ceil_div(in_column * p->batch, most);
    const bool small = instance->key[KEY_BM] * instance->key[KEY_BN] <= 128 * 128;
    bool across = row_waves < column_waves;
    if (row_waves == column_waves && tiles == 2)
        across = instance->dtype == GK_F32
                     ? is(instance, SWAPAB)
                     : 10 * in_row <= 7 * in_column ||
                           (small && in_row <= in_column && 10 * p->m >= 3 * p->n);
    const Clusters rows = {true, (int)tiles_m, (int)in_n};
    const Clusters columns = {false, (int)in_m, (int)tiles_n};
    return across ? rows : columns;
}

/* True if no block of a cluster of two columns of tiles (GRID) can run ahead of the others.
 *
 * The blocks wait for each other only through the multicast copies that they receive. At a corner
 * of the result, a block's tile may lie outside the matrix. Its neighbours in the row then send it
 * nothing, and most neighbours in the column do not either. That block would run ahead and release
 * a stage a second time while a third block still reads the stage. This cannot happen if, along
 * one of the two edges, the last tile needs some part of every multicast copy. */
static bool keeps_step(const gk_cuda_instance *instance, const GemmProblem *p) {
    if (!is(instance, GRID)) return true;
    const int64_t bm = instance->key[KEY_BM], bn = instance->key[KEY_BN],
                  down = instance->key[KEY_TILES] / 2;
    return gk_round_up(p->m, bm * down) - p->m < bm / 2 ||
           gk_round_up(p->n, bn * 2) - p->n < bn / down;
}

/* Estimated time of an instance. */
typedef struct Estimate {
    double us;
    int64_t halved; /* tiles of the last wave that are halved along k, counted in clusters */
} Estimate;

/* Time of one tile in us: about the maximum of the time of its products, of its copies into the
 * SM, and of the copies of all `blocks` blocks out of L2. It is the fourth-power norm of the three
 * rather than their maximum, because two that take equally long slow each other. */
static double tile_us(double products_us, double bytes, double l2_bytes, double blocks) {
    const double copies_us = bytes / SM_BYTES_PER_US, l2_us = l2_bytes * blocks / L2_BYTES_PER_US;
    const double a = products_us * products_us, b = copies_us * copies_us, c = l2_us * l2_us;
    return sqrt(sqrt(a * a + b * b + c * c));
}

/* Estimates the time of the call with this instance: the sum over waves of clusters. The last wave
 * may have fewer clusters, which then share L2's bandwidth among fewer blocks. mode: layout of the
 * operands (Mode). */
static Estimate estimate_of(const gk_cuda_instance *instance, const gk_gpu *gpu,
                            const GemmProblem *p, int mode) {
    const int64_t bm = instance->key[KEY_BM], bn = instance->key[KEY_BN],
                  splits = instance->key[KEY_SPLITS];
    const Clusters clusters = clusters_of(instance, gpu, p);
    const int64_t all = (int64_t)clusters.tiles_m * clusters.tiles_n * p->batch,
                  most = most_clusters(instance, gpu);
    const int64_t last = all % most, waves = all / most;
    const double element = (double)gk_bits_of(instance->dtype) / 8,
                 size = (double)(bm * bn) / (128 * 256);
    const double peak = 8192 / element * gpu->clock_khz * 1e-3 * instance->key[KEY_PERCENT] * 0.01;
    const double k = (double)gk_round_up(p->k, SM90_ROW_BYTES / (int64_t)element) / (double)splits;
    const double products_us = 2.0 * (double)(bm * bn) * k / peak;
    /* Bytes of each operand for a tile. An MN-major operand is copied in boxes of 64 rows. */
    const double a = k * element * (double)(mode & A_ALONG_M ? gk_round_up(bm, 64) : bm),
                 b = k * element * (double)(mode & B_ALONG_N ? gk_round_up(bn, 64) : bn);
    const double sharers = instance->key[KEY_TILES], l2_bytes = is(instance, GRID)
                                                                    ? a / 2 + 2 * b / sharers
                                                                : clusters.in_row ? a / sharers + b
                                                                                  : a + b / sharers;
    const double blocks = cluster_of(instance);
    const double launch_us = LAUNCH_US + LAST_US * size,
                 full_us = tile_us(products_us, a + b, l2_bytes, (double)most * blocks),
                 last_us = last > 0 ? tile_us(products_us, a + b, l2_bytes, (double)last * blocks)
                                    : full_us;
    /* Ping-pong hides the store of results behind the next tile's products, if these take at least
     * as long. */
    if (is(instance, PING_PONG)) {
        const Estimate stored_under = {(double)(last > 0 ? waves : waves - 1) *
                                               (fmax(full_us, PING_PONG_US) + TILE_US) +
                                           last_us + ALONE_US + launch_us,
                                       0};
        return stored_under;
    }
    const double store_us = TILE_US + size * (STORE_US + (splits > 2   ? EXCHANGE4_US
                                                          : splits > 1 ? EXCHANGE_US
                                                                       : 0));
    const double results = (double)p->m * (double)p->n * (double)p->batch;
    const double curve_us =
        p->epilogue.activation > GK_ACT_RELU ? CURVE_US * results / (128 * 256 * gpu->num_sms) : 0;
    const double before_us = (double)waves * (full_us + store_us) + launch_us + curve_us;
    Estimate found = {before_us, 0};
    if (last == 0) return found;
    found.us = before_us + last_us + store_us;
    if (is(instance, HALVES) && !gk_batch_invariant() &&
        may_halve((int)bm, (int)bn, mode == (A_ALONG_M | B_ALONG_N)) && 2 * last <= most) {
        const double halves_us =
            tile_us(products_us / 2, (a + b) / 2, (a + b) / 2, (double)(4 * last)) + HALVES_US +
            HALVES_SUM_US * size;
        if (halves_us < last_us) {
            found.us = before_us + halves_us + store_us;
            found.halved = last;
        }
    }
    return found;
}

/* ---- operands -------------------------------------------------------------------------------- */
/* Estimated time of a product of small M or small N, which is bound by reading its operands. */
static double stream_us(const GemmProblem *p) {
    return SWAPAB_US +
           2.0 * (double)(p->m + p->n) * (double)p->k * (double)p->batch / SWAPAB_BYTES_PER_US;
}

/* Rows, columns and k of gemm_sm80's tiles: Tile16_any_BM and so on. */
#define SM80_16(type, name, BM, BN, BK, ...) \
    enum {                                   \
        type##_BM = BM,                      \
        type##_BN = BN,                      \
        type##_BK = BK                       \
    };
#include "instances.def"

/* Estimated time of a product by the kernels that read operands in place: gemm_sm80 with a tile of
 * 128 x 128 and with k split so that every SM has work. chunks: the operands are aligned, so that
 * its aligned tile serves. */
static double in_place_us(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem *p, bool chunks) {
    const bool tf32 = dtype == GK_F32;
    const int64_t tiles =
        gk_ceil_div(p->m, Tile16_any_BM) * gk_ceil_div(p->n, Tile16_any_BN) * p->batch;
    const int64_t steps = gk_ceil_div(p->k, Tile16_any_BK);
    const int64_t splits =
        gk_clamp_i64(gpu->num_sms / tiles, 1, gk_clamp_i64(steps / 4, 1, MAX_SPLITS));
    const int64_t busiest = gk_ceil_div(tiles * splits, gpu->num_sms);
    const int percent = chunks ? (tf32 ? PERCENT_TF32 : PERCENT_128x128)
                        : tf32 ? PERCENT_PLAIN
                               : PERCENT_ANY;
    const double peak = (tf32 ? 2048 : 4096) * gpu->clock_khz * 1e-3 * percent * 0.01;
    const double step_us = 2.0 * Tile16_any_BM * Tile16_any_BN * Tile16_any_BK / peak;
    return (double)(busiest * gk_ceil_div(steps, splits)) * step_us + BLOCK_US +
           (splits > 1 ? REDUCE_US : 0);
}

/* True if the operand consists of aligned chunks of 16 bytes along its rows or along k, as kernels
 * with cp.async need it. */
static bool in_chunks(const void *data, gk_dtype dtype, int64_t x_stride, int64_t k_stride,
                      const int64_t *batch, int ndim) {
    return (k_stride == 1 && gemm_aligned(data, dtype, x_stride, batch, ndim)) ||
           (x_stride == 1 && gemm_aligned(data, dtype, k_stride, batch, ndim));
}

static double copies_us(const Operands *o) {
    const double bytes = 2.0 * (double)o->bytes, many = bytes - REALIGN_FAST_BYTES;
    return o->bytes > 0 ? REALIGN_US + bytes / REALIGN_BYTES_PER_US +
                              (many > 0 ? many / REALIGN_MANY_PER_US : 0)
                        : 0;
}

/* True if a ping-pong instance can store the results, which it does by TMA only. */
static bool ping_pong_fits(const GemmProblem *p, gk_dtype dtype) {
    return !p->epilogue.c && whole_chunks(p, dtype, false) &&
           tensor_map_fits(result_of(p, false, false)) &&
           (!p->epilogue.preact || tensor_map_fits(result_of(p, false, true)));
}

/* ---- instances ------------------------------------------------------------------------------- */
/* Fills in the plan for this instance. own->operands has been filled in by operands_of. */
static bool plan_instance(const gk_cuda_instance *instance, const gk_gpu *gpu, int64_t halved,
                          gk_plan *to) {
    HopperPlan *const own = GK_OWN(HopperPlan, to);
    GemmProblem *const p = &own->operands.p;
    const Clusters clusters = clusters_of(instance, gpu, p);
    p->tiles_m = clusters.tiles_m;
    p->tiles_n = clusters.tiles_n;
    own->in_row = clusters.in_row;
    p->group =
        GROUP_HEIGHT_SM90 / (instance->key[KEY_BM] * (own->in_row ? 1 : instance->key[KEY_TILES]));
    p->splits = 1;
    const int64_t tiles = (int64_t)p->tiles_m * p->tiles_n * p->batch,
                  most = most_clusters(instance, gpu);
    own->whole = (unsigned)(tiles - halved);
    const int64_t tasks = tiles + halved;
    own->clusters = (unsigned)(tasks * LEAST_IDLE < most ? tasks : most);
    to->kernel = instance;
    to->tile[0] = instance->key[KEY_BM];
    to->tile[1] = instance->key[KEY_BN];
    to->tile[2] = instance->key[KEY_BK];
    to->tasks = tasks * cluster_of(instance);
    to->waves = (double)to->tasks / (double)(most * cluster_of(instance));
    to->workspace_bytes = (size_t)own->operands.bytes;
    return true;
}

/* Plans the call with this instance, if it serves the call. */
static bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *arguments,
                 gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const bool tf32 = instance->dtype == GK_F32, swapab = is(instance, SWAPAB);
    if ((tf32 && args->fp32_precision != GK_TF32) || gpu->smem_per_block < instance->key[KEY_SMEM])
        return false;
    Operands *const o = &GK_OWN(HopperPlan, to)->operands;
    const GemmProblem p = gemm_problem_of(args);
    o->p = problem_of(&p, swapab);
    if (!operands_of(instance->dtype, swapab, o) ||
        (is(instance, PING_PONG) && !ping_pong_fits(&o->p, instance->dtype)))
        return false;
    return (tf32 || !swapab || instance->key[KEY_SPLITS] == 1 || o->p.n <= instance->key[KEY_BN]) &&
           keeps_step(instance, &o->p) &&
           plan_instance(instance, gpu, estimate_of(instance, gpu, &o->p, o->mode).halved, to);
}

/* ---- the choice ------------------------------------------------------------------------------ */
/* How Hopper's kernels compute a product. If M or N is small, the time is bound by reading the long
 * operand, which is streamed past the short one. */
typedef enum Way {
    BY_TILES, /* tiles of the result */
    SMALL_M,  /* swap-AB for a small M: b is streamed */
    SMALL_N   /* narrow tiles for a small N: a is streamed */
} Way;

static Way way_of(const GemmProblem *p, gk_dtype dtype) {
    if (dtype == GK_F32 || p->k < SM90_SWAPAB_K || gk_batch_invariant()) return BY_TILES;
    if (p->m <= SM90_SWAPAB_ROWS && p->n >= 2 * SM90_SWAPAB_ROWS) return SMALL_M;
    if (p->n <= SM90_SWAPAB_ROWS && p->m >= 2 * SM90_SWAPAB_ROWS) return SMALL_N;
    return BY_TILES;
}

/* The key of a cached choice. It has everything that the choice depends on. */
typedef struct Question {
    const gk_gpu *gpu;
    int64_t m, n, k, batch;
    int32_t mode;
    int16_t dtype, way;
    bool swapab, ping_pong, curve, invariant;
    bool rest[4]; /* padding, so that every byte is set */
} Question;
_Static_assert(sizeof(Question) == 56, "questions are compared byte by byte");

typedef struct Choice {
    Question question; /* m = 0: empty */
    const gk_cuda_instance *instance;
    Estimate estimate; /* without the time of copies */
} Choice;

static const gk_cuda_table *const schedules[] = {
    &gk_gemm_sm90a_table, &gk_gemm_pingpong_sm90a_table, &gk_gemm_swapab_sm90a_table,
    &gk_gemm_tf32_sm90a_table};

enum {
    NUM_SCHEDULES = sizeof schedules / sizeof *schedules
};

/* Whether an instance may be chosen. p: the problem as it is computed. With swap-AB its columns
 * are the rows of a. */
static bool is_candidate(const gk_cuda_instance *instance, const Question *q,
                         const GemmProblem *p) {
    if ((int)instance->dtype != q->dtype || instance->key[KEY_SMEM] > q->gpu->smem_per_block)
        return false;
    if (q->invariant && instance->key[KEY_SPLITS] > 1) return false;
    if (is(instance, SWAPAB) != q->swapab || is(instance, NARROW) != (q->way == SMALL_N))
        return false;
    /* A tile must hold the short side. */
    if (q->way != BY_TILES) return p->n <= instance->key[KEY_BN];
    /* Swap-AB of 16 bits with split-K serves small M only. */
    if (q->swapab && q->dtype != GK_F32 && instance->key[KEY_SPLITS] > 1) return false;
    return (q->ping_pong || !is(instance, PING_PONG)) && keeps_step(instance, p);
}

/* Chooses the instance of the least estimated time. For small M or N, all instances that hold the
 * short side get the same estimate, so the first one wins. It has the smallest tile. */
static void choose(const GemmProblem *p, Choice *to) {
    const Question *const q = &to->question;
    const Estimate streamed = {stream_us(p), 0};
    to->instance = NULL;
    to->estimate.us = 1e31;
    to->estimate.halved = 0;
    for (int s = 0; s < NUM_SCHEDULES; ++s)
        for (int i = 0; i < schedules[s]->num_instances; ++i) {
            const gk_cuda_instance *const instance = &schedules[s]->instances[i];
            if (!is_candidate(instance, q, p)) continue;
            const Estimate found =
                q->way == BY_TILES ? estimate_of(instance, q->gpu, p, q->mode) : streamed;
            if (found.us < to->estimate.us) {
                to->instance = instance;
                to->estimate = found;
            }
        }
}

/* A cache of this thread's last choices. A model repeats a few dozen shapes, and estimating all
 * instances takes 0.4 us. */
enum {
    KEPT_CHOICES = 64
};

static Choice *kept_choice(const Question *q) {
    static _Thread_local Choice kept[KEPT_CHOICES];
    const uint64_t mixed = (uint64_t)(q->m * 31 + q->n) * 0x9e3779b97f4a7c15u +
                           (uint64_t)(q->k * 31 + q->mode + q->batch) * 0xc2b2ae3d27d4eb4fu;
    return &kept[mixed >> 32 & (KEPT_CHOICES - 1)];
}

/* Looks the choice up in the cache, or makes it. o: the operands, filled in by operands_of. */
static Choice choice_of(const gk_gpu *gpu, gk_dtype dtype, const Operands *o, bool swapab,
                        Way way) {
    const GemmProblem *const p = &o->p;
    const Question question = {.gpu = gpu,
                               .m = p->m,
                               .n = p->n,
                               .k = p->k,
                               .batch = p->batch,
                               .mode = o->mode,
                               .dtype = (int16_t)dtype,
                               .way = (int16_t)way,
                               .swapab = swapab,
                               .ping_pong = ping_pong_fits(p, dtype),
                               .curve = p->epilogue.activation > GK_ACT_RELU,
                               .invariant = gk_batch_invariant()};
    Choice *const choice = kept_choice(&question);
    if (memcmp(&choice->question, &question, sizeof question) != 0) {
        choice->question = question;
        choose(p, choice);
    }
    return *choice;
}

/* Replaces the operands and the choice by swap-AB if its estimate is shorter. This is for 16-bit
 * calls beyond small M, because M may fit WGMMA's column counts better than N does.
 *
 * It is limited to M < N and long k. The estimate alone gave such a tile to 47 measured products,
 * and those with M > N or short k took up to 23 % longer than with the best other instance
 * (docs/worklog/gemm.md). */
static void consider_swapped(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem *p, Operands *o,
                             Choice *best) {
    if (dtype == GK_F32 || p->k < SM90_SWAPAB_K || gk_batch_invariant()) return;
    if (p->m >= p->n || p->m * p->n > SM90_SWAPPED_RESULTS) return;
    Operands swapped;
    swapped.p = problem_of(p, true);
    if (!operands_of(dtype, true, &swapped) || swapped.bytes != o->bytes) return;
    const Choice other = choice_of(gpu, dtype, &swapped, true, BY_TILES);
    if (other.instance && other.estimate.us < best->estimate.us) {
        *best = other;
        *o = swapped;
    }
}

/* True if a kernel that reads the operands in place is expected to be faster than copies and
 * Hopper's kernel together, which take `us`. p: the problem before the copies. */
static bool better_in_place(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem *p,
                            const Operands *o, Way way, double us) {
    if (o->bytes == 0 || gk_batch_invariant()) return false;
    /* Small N: a is nearly all that is read, so a copy would double the time. */
    if (way == SMALL_N && o->copied[0]) return true;
    const bool chunks = in_chunks(p->a, dtype, p->a_m, p->a_k, p->a_batch, p->ndim) &&
                        in_chunks(p->b, dtype, p->b_n, p->b_k, p->b_batch, p->ndim);
    /* Small M: for up to 16 rows, gemm_skinny streams the weights in less time than a copy takes.
     * It needs weights with a dimension of stride 1. Broadcast weights are never copied, since a
     * copy would expand them. */
    const bool streamed =
        p->b_k == 0 || p->b_n == 0 || (p->m <= SKINNY_MAX_TOKENS && (p->b_k == 1 || p->b_n == 1));
    if (way == SMALL_M && o->copied[0] && (chunks || streamed || o->bytes > REALIGN_FEW_BYTES))
        return true;
    return us >= in_place_us(gpu, dtype, p, chunks);
}

/* True if gemm_sm80 is expected to be faster. This happens for tf32 with few tiles, because
 * gemm_sm80 splits k over all SMs. */
static bool sm80_is_faster(const gk_context *ctx, const gk_gemm_args *args, double us) {
    gk_plan other;
    return args->a.dtype == GK_F32 && us < FEW_TILES_US && !gk_batch_invariant() &&
           gk_gemm_sm80_table.plan(ctx, args, &other) && other.us + SM80_US < us;
}

static bool serves(const gk_gemm_args *args) {
    const gk_dtype dtype = args->a.dtype;
    return dtype == GK_F32 ? args->fp32_precision == GK_TF32 : dtype == GK_BF16 || dtype == GK_F16;
}

/* Plans the call with the chosen instance, unless a kernel of another table is expected to be
 * faster. */
static bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const gk_dtype dtype = args->a.dtype;
    if (!serves(args)) return false;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const GemmProblem p = gemm_problem_of(args);
    const Way way = way_of(&p, dtype);
    /* With up to 16 rows or columns, gemm_skinny is faster than tiles. */
    const bool skinny = p.m <= SKINNY_MAX_TOKENS || p.n <= SKINNY_MAX_TOKENS;
    if (way == BY_TILES && skinny && !gk_batch_invariant()) return false;
    /* tf32 uses swap-AB if b is MN-major. */
    const bool swapab = dtype == GK_F32 ? copy_along(p.n, p.k, p.b_n, p.b_k) : way == SMALL_M;
    Operands *const o = &GK_OWN(HopperPlan, to)->operands;
    o->p = problem_of(&p, swapab);
    if (!operands_of(dtype, swapab, o)) return false;
    Choice best = choice_of(gpu, dtype, o, swapab, way);
    if (way == BY_TILES) consider_swapped(gpu, dtype, &p, o, &best);
    if (!best.instance) return false;
    const double us = best.estimate.us + copies_us(o);
    if (better_in_place(gpu, dtype, &p, o, way, us) || sm80_is_faster(ctx, args, us)) return false;
    to->us = us;
    return plan_instance(best.instance, gpu, best.estimate.halved, to);
}

/* ---- the tables ------------------------------------------------------------------------------ */
#define SM90_COOP(type, ...) GK_DECLARE_LAUNCH_16(gemm_sm90a, type)
#define SM90_NARROW SM90_COOP
#define SM90_PING_PONG(type, ...) GK_DECLARE_LAUNCH_16(gemm_pingpong_sm90a, type)
#define SM90_SWAP_AB(type, ...) GK_DECLARE_LAUNCH_16(gemm_swapab_sm90a, type)
#define SM90_TF32(type, ...) GK_DECLARE_LAUNCH(gemm_tf32_sm90a_##type)
#define SM90_TF32_SWAP_AB SM90_TF32
#include "instances.def"

/* A build for sm_80 alone has no code of the _sm90a.cu files. Launch functions are then NULL, and
 * tables.c leaves these tables out. */
#ifdef GPUKERN_HAS_SM90A
#define GK_LAUNCH_SM90A(id) GK_LAUNCH(id)
#else
#define GK_LAUNCH_SM90A(id) NULL
#endif
#define INSTANCE(name, id, dtype, bm, bn, tiles, splits, bk, percent, bytes, traits)              \
    {name, dtype, plan, GK_LAUNCH_SM90A(id), {bm, bn, tiles, percent, bytes, splits, traits, bk}, \
     NULL}
#define OF_16(file, short, dtype, traits, type, name, bm, bn, stages, wgs, panels, tiles, splits, \
              k64, percent, bytes)                                                                \
    INSTANCE(#file "_" #short "_" #name, file##_##short##_##type, dtype, bm, bn, tiles, splits,   \
             64 * k64, percent, bytes, traits),
#define COOP(short, dtype, type, name, bm, bn, stages, wgs, panels, tiles, ...)               \
    OF_16(gemm_sm90a, short, dtype, COOP_TRAITS(wgs, tiles), type, name, bm, bn, stages, wgs, \
          panels, tiles, __VA_ARGS__)
#define OF_TF32(label, traits, type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, \
                percent, bytes)                                                             \
    INSTANCE("gemm_tf32_sm90a_" label #name, gemm_tf32_sm90a_##type, GK_F32, bm, bn, tiles, \
             splits, 32 * k64, percent, bytes, traits),

static const gk_cuda_instance coop[] = {
#define SM90_COOP(...) COOP(bf16, GK_BF16, __VA_ARGS__)
#define SM90_NARROW(...) OF_16(gemm_sm90a, bf16, GK_BF16, NARROW, __VA_ARGS__)
#include "instances.def"
#define SM90_COOP(...) COOP(f16, GK_F16, __VA_ARGS__)
#define SM90_NARROW(...) OF_16(gemm_sm90a, f16, GK_F16, NARROW, __VA_ARGS__)
#include "instances.def"
};
static const gk_cuda_instance ping_pong[] = {
#define SM90_PING_PONG(...) OF_16(gemm_pingpong_sm90a, bf16, GK_BF16, PING_PONG, __VA_ARGS__)
#include "instances.def"
#define SM90_PING_PONG(...) OF_16(gemm_pingpong_sm90a, f16, GK_F16, PING_PONG, __VA_ARGS__)
#include "instances.def"
};
static const gk_cuda_instance swap_ab[] = {
#define SM90_SWAP_AB(...) OF_16(gemm_swapab_sm90a, bf16, GK_BF16, SWAPAB, __VA_ARGS__)
#include "instances.def"
#define SM90_SWAP_AB(...) OF_16(gemm_swapab_sm90a, f16, GK_F16, SWAPAB, __VA_ARGS__)
#include "instances.def"
};
static const gk_cuda_instance tf32[] = {
#define SM90_TF32(...) OF_TF32("", 0, __VA_ARGS__)
#define SM90_TF32_SWAP_AB(...) OF_TF32("swapab_", SWAPAB, __VA_ARGS__)
#include "instances.def"
};

static bool planned_by_sm90a(const gk_context *ctx, const void *args, gk_plan *to) {
    (void)ctx, (void)args, (void)to;
    return false;
}

const gk_cuda_table gk_gemm_sm90a_table = {coop, sizeof coop / sizeof *coop, 90, plan_best};
const gk_cuda_table gk_gemm_pingpong_sm90a_table = {ping_pong, sizeof ping_pong / sizeof *ping_pong,
                                                    90, planned_by_sm90a};
const gk_cuda_table gk_gemm_swapab_sm90a_table = {swap_ab, sizeof swap_ab / sizeof *swap_ab, 90,
                                                  planned_by_sm90a};
const gk_cuda_table gk_gemm_tf32_sm90a_table = {tf32, sizeof tf32 / sizeof *tf32, 90,
                                                planned_by_sm90a};
