/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_sm80: out = activation(alpha a b + beta c + bias) on the tensor cores by mma.sync, for
 * bfloat16, float16 and tf32.
 *
 * a [batch, M, K], b [batch, K, N]: each K-major or MN-major (NN, NT, TN, TT), or in the "any"
 * instances with any strides. bias [N], c broadcasts, out [batch, M, N], preact like out. Sums
 * are float32 and rounded once.
 *
 * Grid: a block for each tile BM x BN of one split of k of one batch entry, in the order of
 * order.cuh. A warp owns WM x WN. With few tiles, k is split (split.cuh). `plan_of` estimates
 * each instance's time, and the fastest is used.
 *
 * Shared memory: the ring of mainloop_sm80.cuh. After the last step the same bytes hold the
 * sums:
 *   sums  [warp][WM][WN + 8] float
 *
 * Refuses: float32 in full precision, float64, misaligned tf32 (gemm_plain). */
#include "mainloop_sm80.cuh"
#include "order.cuh"
#include "split.cuh"
#include "tiles.h"

namespace {

/* ---- 1 the kernel ---------------------------------------------------------------------------- */
template <class T, class Tile, int MODE> struct Smem {
    static constexpr int SUM_LD = Tile::WN + 8, WARP_SUMS = Tile::WM * SUM_LD * 4;
    static constexpr int RING = Ring<T, Tile, MODE>::BYTES, SUMS = Tile::THREADS / 32 * WARP_SUMS;
    static constexpr int BYTES = RING > SUMS ? RING : SUMS;

    /* Byte offsets that the lanes access: a pair of sums on the way in, 8 columns on the way
     * out. The 8 columns are two 16-byte halves, of which every second group of four lanes reads
     * the later half first. */
    static constexpr GK_HD int pair_at(int lane) { return (lane / 4 * SUM_LD + lane % 4 * 2) * 4; }
    static constexpr GK_HD int octet_at(int lane) {
        return (lane / (Tile::WN / 8) * SUM_LD + lane % (Tile::WN / 8) * 8) * 4;
    }
    static constexpr GK_HD int half_at(int lane) { return octet_at(lane) + lane / 4 % 2 * 16; }
    static constexpr GK_HD int sum_ways(bool halves) {
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane) bytes[lane] = halves ? half_at(lane) : pair_at(lane);
        return ways(bytes, halves ? 16 : 8);
    }
    static_assert(sum_ways(false) == 1 && sum_ways(true) == 1,
                  "sums go through shared memory without conflicts");
};

template <class T, class Tile, int MODE>
__global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) gemm_sm80_kernel(GemmProblem p) {
    typedef Smem<T, Tile, MODE> S;
    constexpr int BM = Tile::BM, BN = Tile::BN, WM = Tile::WM, WN = Tile::WN, MT = WM / 16,
                  NT = WN / 16;
    extern __shared__ __align__(128) unsigned char smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % (BM / WM) * WM, warp_n = warp / (BM / WM) * WN;

    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n;
    const TilePlace tile = tile_place(blockIdx.x % tiles, p.tiles_m, p.tiles_n, p.group);
    const int split = blockIdx.x / tiles % p.splits;
    const int64_t batch = blockIdx.x / tiles / p.splits;
    const int64_t row0 = (int64_t)tile.row * BM, col0 = (int64_t)tile.col * BN;
    const int64_t k0 = split * p.split_k, k_end = min(p.k, k0 + p.split_k);
    const int m_valid = (int)min((int64_t)BM, p.m - row0),
              n_valid = (int)min((int64_t)BN, p.n - col0);

    const GemmPlace at = gemm_place(p, batch);
    const Operand<T> a = {(const T *)p.a + at.a + row0 * p.a_m + k0 * p.a_k, p.a_m, p.a_k, m_valid};
    const Operand<T> b = {(const T *)p.b + at.b + col0 * p.b_n + k0 * p.b_k, p.b_n, p.b_k, n_valid};
    float sum[MT][2 * NT][4] = {};
    MmaProduct<T> product;
    multiply_sm80<T, Tile, MODE>(product, sum, a, b, k_end - k0, cvta_to_shared(smem), warp_m,
                                 warp_n);

    /* ---- 2 the results: a warp's sums go through shared memory, then a lane takes 8 columns
     * ---- */
    cp_async_wait_group<0>();
    /* No thread reads the ring any more and no copy writes it, so the sums may overwrite it. */
    __syncthreads();
    float *sums = (float *)(smem + warp * S::WARP_SUMS);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *(float2 *)((char *)(sums + (i * 16 + h * 8) * S::SUM_LD + n * 8) +
                            S::pair_at(lane)) = make_float2(sum[i][n][2 * h], sum[i][n][2 * h + 1]);
    __syncwarp(); /* lanes read what other lanes wrote */

    constexpr int OCTETS = WN / 8, ROWS = 32 / OCTETS; /* lanes a row; rows a pass */
    const int64_t col = col0 + warp_n + lane % OCTETS * 8;
    const int valid = (int)min((int64_t)8, p.n - col);
    if (valid <= 0) return;
    float bias[8];
    if (p.splits == 1) epilogue_bias<T, 8>(p.epilogue, 0, col, valid, bias);
#pragma unroll 1
    for (int r = 0; r < WM; r += ROWS) {
        const int64_t row = row0 + warp_m + r + lane / OCTETS;
        if (row >= p.m) break;
        const float *from_s =
            (const float *)((const char *)(sums + r * S::SUM_LD) + S::octet_at(lane));
        const bool late = lane / 4 % 2;
        const float4 x = *(const float4 *)(from_s + (late ? 4 : 0)),
                     y = *(const float4 *)(from_s + (late ? 0 : 4));
        float v[8] = {late ? y.x : x.x, late ? y.y : x.y, late ? y.z : x.z, late ? y.w : x.w,
                      late ? x.x : y.x, late ? x.y : y.y, late ? x.z : y.z, late ? x.w : y.w};
        if (p.splits > 1)
            write_partials<8>(p, split, batch, row, col, v);
        else
            epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v, bias);
    }
}

/* ---- 3 the plan ------------------------------------------------------------------------------ */
/* The layout of both operands. ANY if the rows of either are not whole 16-byte chunks. */
int mode_of(const GemmProblem &p, gk_dtype dtype) {
    const bool a_k = p.a_k == 1 && gemm_aligned(p.a, dtype, p.a_m, p.a_batch, p.ndim);
    const bool a_m = p.a_m == 1 && gemm_aligned(p.a, dtype, p.a_k, p.a_batch, p.ndim);
    const bool b_k = p.b_k == 1 && gemm_aligned(p.b, dtype, p.b_n, p.b_batch, p.ndim);
    const bool b_n = p.b_n == 1 && gemm_aligned(p.b, dtype, p.b_k, p.b_batch, p.ndim);
    if ((a_k || a_m) && (b_k || b_n)) return (a_k ? 0 : A_ALONG_M) | (b_k ? 0 : B_ALONG_N);
    return ANY | (llabs(p.a_m) < llabs(p.a_k) && p.m > 1 ? A_ALONG_M : 0) |
           (llabs(p.b_n) < llabs(p.b_k) && p.n > 1 ? B_ALONG_N : 0);
}

enum Key { /* of an instance */
    KEY_BM,
    KEY_BN,
    KEY_BK,
    KEY_PER_SM,
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,    /* bytes of a block, in the mode that needs most */
    KEY_ANY      /* ANY in the instances that serve every alignment, else 0 */
};

struct Plan {
    int splits;
    int64_t split_k;
    double us;
};
constexpr double FOREVER_US = 1e30;

/* Estimates the time of an instance over all numbers of splits: the blocks of the busiest SM,
 * one after the other or PER_SM at once, and the second kernel of split-K. It stops early if no
 * time below `below` is possible; us is then `below`. */
Plan plan_of(const gk_cuda_instance *row, const gk_gpu *gpu, const GemmProblem &p, double below) {
    const int32_t *key = row->key;
    const int64_t bm = key[KEY_BM], bn = key[KEY_BN], bk = key[KEY_BK], per_sm = key[KEY_PER_SM];
    const int64_t tiles = gk_ceil_div(p.m, bm) * gk_ceil_div(p.n, bn) * p.batch;
    const int64_t steps = gk_max_i64(1, gk_ceil_div(p.k, bk));
    const double peak = (gpu->arch == 90 ? 4096 : 2048) / (row->dtype == GK_F32 ? 2.0 : 1.0) *
                        gpu->clock_khz * 1e-3;
    const double step_us = 2.0 * (double)(bm * bn * bk) / (peak * key[KEY_PERCENT] * 0.01);
    Plan best = {1, steps * bk, below};
    const int64_t most = gk_clamp_i64(steps / 4, 1, MAX_SPLITS);
    int64_t each = 0;
    for (int64_t s = 1; s <= most; ++s) {
        const int64_t before = each;
        each = gk_ceil_div(steps, s);
        if (each == before) continue; /* the same splits as before */
        const int64_t parts = gk_ceil_div(steps, each);
        const double reduce = reduce_us(p, parts);
        if (parts > 1 && BLOCK_US + reduce >= best.us) break; /* reduce only grows with s */
        const int64_t busiest = gk_ceil_div(tiles * parts, gpu->num_sms);
        /* Nothing hides a lone block's waits. */
        const double alone = busiest < per_sm ? PERCENT_ALONE * 0.01 : 1;
        const double us = (double)(busiest * each) * step_us * alone +
                          BLOCK_US * (double)gk_ceil_div(busiest, per_sm) + reduce;
        if (us < best.us) best = {(int)parts, each * bk, us};
    }
    return best;
}

extern const gk_cuda_instance *const sm80_instances;
extern const int num_sm80_instances;

/* Whether any instance serves the call. */
bool serves(const gk_gemm_args *args, const GemmProblem &p) {
    if (args->a.dtype == GK_F64) return false;
    if (args->a.dtype != GK_F32) return true;
    /* A matrix times a vector is bound by memory. gemm_plain computes it in full float32 at the
     * same speed. */
    return args->fp32_precision == GK_TF32 && p.m > 1 && p.n > 1 && !(mode_of(p, GK_F32) & ANY);
}

bool plan_instance(const gk_cuda_instance *row, const GemmProblem &problem, const Plan &best,
                   gk_plan *to) {
    GemmProblem &p = gk_own<GemmProblem>(to) = problem;
    p.tiles_m = (int)gk_ceil_div(p.m, row->key[KEY_BM]);
    p.tiles_n = (int)gk_ceil_div(p.n, row->key[KEY_BN]);
    p.group = GROUP_ROWS;
    p.splits = best.splits;
    p.split_k = best.split_k;
    to->kernel = row;
    to->us = best.us;
    to->tile[0] = row->key[KEY_BM];
    to->tile[1] = row->key[KEY_BN];
    to->tile[2] = row->key[KEY_BK];
    to->tasks = (int64_t)p.tiles_m * p.tiles_n * p.splits * p.batch;
    to->chunks = p.splits;
    to->workspace_bytes = partials_bytes(p, p.splits, sizeof(float));
    return true;
}

bool plan(const gk_cuda_instance *row, const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const GemmProblem p = gemm_problem_of(args);
    if (!serves(args, p) || row->key[KEY_ANY] != (mode_of(p, row->dtype) & ANY) ||
        !smem_fits(ctx, row->key[KEY_SMEM]))
        return false;
    return plan_instance(row, p, plan_of(row, gk_gpu_of(ctx->index), p, FOREVER_US), to);
}

/* Plans the call with the fastest instance among those that fit the GPU and serve the mode. */
bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const GemmProblem p = gemm_problem_of(args);
    if (!serves(args, p)) return false;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int any = mode_of(p, args->a.dtype) & ANY;
    const gk_cuda_instance *best = NULL;
    Plan best_plan = {1, 0, FOREVER_US};
    for (int i = 0; i < num_sm80_instances; ++i) {
        const gk_cuda_instance *r = &sm80_instances[i];
        if (r->dtype != args->a.dtype || r->key[KEY_ANY] != any ||
            r->key[KEY_SMEM] > gpu->smem_per_block)
            continue;
        const Plan plan = plan_of(r, gpu, p, best_plan.us);
        if (!best || plan.us < best_plan.us) {
            best = r;
            best_plan = plan;
        }
    }
    return best && plan_instance(best, p, best_plan, to);
}

/* ---- 4 the launch ---------------------------------------------------------------------------- */
template <class T, class Tile, int MODE>
gk_status start(const gk_context *ctx, const GemmProblem &p) {
    const dim3 grid((unsigned)((int64_t)p.tiles_m * p.tiles_n * p.splits * p.batch));
    return launch<gemm_sm80_kernel<T, Tile, MODE>>("gk_gemm", ctx, grid, Tile::THREADS,
                                                   Smem<T, Tile, MODE>::BYTES, p);
}

/* FIRST: 0, or ANY for the instances that serve every alignment. */
template <class T, class Tile, int FIRST>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    GemmProblem p = gk_own<GemmProblem>(plan);
    if (p.m == 0 || p.n == 0 || p.batch == 0) return GK_OK;
    p.partials = workspace;
    gk_status status;
    switch (mode_of(p, element<T>::dtype) & 3) {
    case 0: status = start<T, Tile, FIRST>(ctx, p); break;
    case 1: status = start<T, Tile, FIRST + 1>(ctx, p); break;
    case 2: status = start<T, Tile, FIRST + 2>(ctx, p); break;
    default: status = start<T, Tile, FIRST + 3>(ctx, p); break;
    }
    return status == GK_OK && p.splits > 1 ? launch_reduce<T>(ctx, p) : status;
}

template <class T, class Tile, int FIRST> int blocks_an_sm() {
    return blocks_per_sm<gemm_sm80_kernel<T, Tile, FIRST>>(Tile::THREADS,
                                                           Smem<T, Tile, FIRST>::BYTES);
}

#define ROW(name, T, Tile, first, percent)                                                  \
    {name,                                                                                  \
     element<T>::dtype,                                                                     \
     plan,                                                                                  \
     run<T, Tile, first>,                                                                   \
     {Tile::BM, Tile::BN, Tile::BK, Tile::PER_SM, percent, Smem<T, Tile, first + 3>::BYTES, \
      first},                                                                               \
     blocks_an_sm<T, Tile, first>}
#define ROWS_16(name, T)                                                             \
    ROW("gemm_sm80_" name "_256x128x64", T, Tile16_256x128, 0, PERCENT_256x128),     \
        ROW("gemm_sm80_" name "_128x128x64", T, Tile16_128x128, 0, PERCENT_128x128), \
        ROW("gemm_sm80_" name "_64x128x64", T, Tile16_64x128, 0, PERCENT_64x128),    \
        ROW("gemm_sm80_" name "_64x64x64", T, Tile16_64x64, 0, PERCENT_64x64),       \
        ROW("gemm_sm80_any_" name "_128x128x32", T, Tile16_any, ANY, PERCENT_ANY)

const gk_cuda_instance instances[] = {
    ROWS_16("bf16", __nv_bfloat16),
    ROWS_16("f16", __half),
    ROW("gemm_sm80_tf32_128x128x32", float, Tile32_128x128, 0, PERCENT_TF32),
    ROW("gemm_sm80_tf32_64x64x32", float, Tile32_64x64, 0, PERCENT_TF32_64x64),
};
const gk_cuda_instance *const sm80_instances = instances;
const int num_sm80_instances = sizeof instances / sizeof instances[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, plan_best};
