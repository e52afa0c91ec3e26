/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_sm80: scaled_gemm by mma.sync, on GPUs without WGMMA and for calls that Hopper's
 * kernels do not take. int8 has its own instruction. 8-bit floats are converted to float16,
 * which holds all of them (codes_mma.cuh).
 *
 *   out = activation(sum_k a scale_a b scale_b + beta c + bias)
 *
 * a [M, K] and b [K, N] are read K-major in rows of whole 16 bytes. Other layouts are first copied
 * (k_major_copy.cuh).
 *
 * A block computes a tile of the result, in the order of order.cuh. There are three kinds of tiles:
 *   LARGE    multiplies the final sums by the scales of rows and columns
 *   BLOCKS   multiplies sums of 128 or 32 of k by scales along k
 *   SMALL    has 16 rows and does either
 * int8 sums are exact within a block of k that has one scale. Other sums are float32, so
 * `accumulate` makes no difference.
 *
 * Workspace: the copies. */
#include "../../../core/invariant.h"
#include "../gemm/order.cuh"
#include "codes_mma.cuh"
#include "k_major_copy.cuh"
#include "store_octets.cuh"
#include "tiles.h"
#include "tiles_sm80.h"

namespace {

struct Params {
    const uint8_t *a, *b; /* [m][k] and [n][k] */
    int64_t a_row, b_row, m, n, k;
    gk_scales sa, sb;
    Blocks blocks;
    Finish f;
    Vectors vectors;
    TwoCodeBits bits;
    float up; /* factor for the sums, which undoes the scaling of decoded codes (down_of) */
    int tiles_m, tiles_n;
};

/* ---- 1 the kernel ---------------------------------------------------------------------------- */
enum Kind {
    LARGE,
    BLOCKS,
    SMALL
};
template <Kind> struct TileOf;
template <> struct TileOf<LARGE> {
    typedef Tile8_128x128 type;
};
template <> struct TileOf<BLOCKS> {
    typedef Tile8_blocks type;
};
template <> struct TileOf<SMALL> {
    typedef Tile8_16x64 type;
};

template <class Tile> struct Smem {
    static constexpr int RING = Ring<uint8_t, Tile, 0>::BYTES, SUMS = SumStage<Tile>::BYTES;
    static constexpr int EDGE = RING > SUMS ? RING : SUMS; /* scales of rows and columns */
    static constexpr int BLOCKS = EDGE + (Tile::BM + Tile::BN) * 4;
    static constexpr int bytes(Kind kind) {
        return kind == LARGE ? BLOCKS : BLOCKS + 3 * (Tile::BK / 32) * (Tile::BM + Tile::BN) * 4;
    }
};

template <class Tile, class Sum>
__device__ __forceinline__ void
store_tile(const Params &p, unsigned char *smem, Sum (&sum)[Tile::WM / 16][Tile::WN / 8][4],
           int64_t row0, int64_t col0, int warp_m, int warp_n, const float *edge) {
    constexpr int OCTETS = SumStage<Tile>::OCTETS;
    const int at = warp_n + threadIdx.x % 32 % OCTETS * 8;
    const int64_t col = col0 + at;
    const int valid = (int)min((int64_t)8, p.n - col);
    float bias[8] = {}, by[8];
    if (p.f.bias && valid > 0)
        read_octet(p.f.bias, p.f.bias_dtype, col * p.f.bias_step, p.f.bias_step, false, valid,
                   bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) by[i] = p.blocks.along_k ? 1 : edge[Tile::BM + at + i];
    take_octets<Tile>(smem, sum, [&](int r, float (&v)[8]) {
        const int64_t row = row0 + warp_m + r;
        if (row >= p.m || valid <= 0) return;
        const float sa = p.blocks.along_k ? 1 : edge[warp_m + r];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * p.up * sa * by[i];
        finish_octet(p.f, p.vectors, row, col, valid, v, bias);
    });
}

template <class Product, Kind KIND>
__global__ void __launch_bounds__(TileOf<KIND>::type::THREADS, TileOf<KIND>::type::PER_SM)
    scaled_gemm_sm80_kernel(Params p) {
    typedef typename TileOf<KIND>::type Tile;
    typedef Smem<Tile> S;
    constexpr int BM = Tile::BM, BN = Tile::BN, WM = Tile::WM, WN = Tile::WN;
    extern __shared__ __align__(128) unsigned char smem[];
    const int warp = threadIdx.x / 32, warp_m = warp % (BM / WM) * WM,
              warp_n = warp / (BM / WM) * WN;
    const TilePlace tile = tile_place(blockIdx.x, p.tiles_m, p.tiles_n, SCALED_GROUP);
    const int64_t row0 = (int64_t)tile.row * BM, col0 = (int64_t)tile.col * BN;
    const Operand<uint8_t> a = {p.a + row0 * p.a_row, p.a_row, 1,
                                (int)min((int64_t)BM, p.m - row0)};
    const Operand<uint8_t> b = {p.b + col0 * p.b_row, p.b_row, 1,
                                (int)min((int64_t)BN, p.n - col0)};
    float *const edge = (float *)(smem + S::EDGE);
    if (!p.blocks.along_k) /* written before the barriers of the loop, read after them */
        for (int i = threadIdx.x; i < BM + BN; i += Tile::THREADS)
            edge[i] = i < BM ? scale_of(p.sa, min(row0 + i, p.m - 1), 0)
                             : scale_of(p.sb, 0, min(col0 + i - BM, p.n - 1));

    typename Product::Sum sum[WM / 16][WN / 8][4] = {};
    Product product(p.bits);
    const smem_addr ring_s = cvta_to_shared(smem);
    if constexpr (KIND == LARGE) {
        multiply_sm80<uint8_t, Tile, 0>(product, sum, a, b, p.k, ring_s, warp_m, warp_n);
        cp_async_wait_group<0>();
        /* No thread reads the ring any more and no copy writes it, so the sums may overwrite it. */
        __syncthreads();
        store_tile<Tile>(p, smem, sum, row0, col0, warp_m, warp_n, edge);
    } else {
        BlockProduct<Product, Tile> blocks(product, p.blocks, ring_s + S::BLOCKS, (int)row0,
                                           (int)col0, warp_m, warp_n);
        multiply_sm80<uint8_t, Tile, 0>(blocks, sum, a, b, p.k, ring_s, warp_m, warp_n);
        cp_async_wait_group<0>();
        __syncthreads();
        store_tile<Tile>(p, smem, blocks.total, row0, col0, warp_m, warp_n, edge);
    }
}

/* ---- 2 plan and run -------------------------------------------------------------------------- */
struct Plan {
    KMajorCopy a, b;
};

enum Key { /* of an instance */
    KEY_KIND,
    KEY_B, /* dtype of b, or NO_DTYPE */
    KEY_BM,
    KEY_BN,
    KEY_BK,
    KEY_SMEM
};
constexpr int NO_DTYPE = -1; /* any dtype that may be multiplied with a's */

bool along_k(const gk_scales &a, const gk_scales &b) {
    return a.col_log2 < GK_WHOLE_LOG2 || b.row_log2 < GK_WHOLE_LOG2;
}

bool plan_scaled(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int32_t *key = instance->key;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (key[KEY_B] != NO_DTYPE && key[KEY_B] != (int32_t)g->b.dtype) return false;
    if (!smem_fits(ctx, key[KEY_SMEM])) return false;
    if (key[KEY_KIND] == LARGE &&
        along_k(gk_scales_of(&g->scale_a, m, k, false), gk_scales_of(&g->scale_b, k, n, true)))
        return false;
    const int64_t tiles = gk_ceil_div(m, key[KEY_BM]) * gk_ceil_div(n, key[KEY_BN]);
    if (!gk_grid_fits(tiles)) return false;
    Plan &x = gk_own<Plan>(plan);
    size_t bytes = 0;
    x.a = plan_k_major(g->a, &bytes);
    x.b = plan_k_major(rows_of_n(g->b), &bytes);
    plan->workspace_bytes = bytes;
    plan->tile[0] = key[KEY_BM];
    plan->tile[1] = key[KEY_BN];
    plan->tile[2] = key[KEY_BK];
    plan->tasks = tiles;
    plan->kernel = instance;
    return true;
}

template <class Product, Kind KIND>
gk_status run_scaled(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    typedef typename TileOf<KIND>::type Tile;
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const Plan &x = gk_own<Plan>(plan);
    TensorShape a, b;
    gk_status status = copy_k_major("scaled_gemm", ctx, x.a, g->a, workspace, &a);
    if (status == GK_OK)
        status = copy_k_major("scaled_gemm", ctx, x.b, rows_of_n(g->b), workspace, &b);
    if (status != GK_OK) return status;
    Params p = {};
    p.a = (const uint8_t *)a.data;
    p.b = (const uint8_t *)b.data;
    p.a_row = x.a.ld;
    p.b_row = x.b.ld;
    p.m = g->a.shape[0];
    p.n = g->b.shape[1];
    p.k = g->a.shape[1];
    p.sa = gk_scales_of(&g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(&g->scale_b, p.k, p.n, true);
    p.blocks = {{p.sa.data, p.sa.dtype, p.sa.row_log2, p.sa.col_log2, p.sa.row, p.sa.col},
                {p.sb.data, p.sb.dtype, p.sb.col_log2, p.sb.row_log2, p.sb.col, p.sb.row},
                p.m,
                p.n,
                p.k,
                p.sa.col_log2 == 5 || p.sb.row_log2 == 5 ? 0 : 3,
                along_k(p.sa, p.sb)};
    p.f = finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
    p.vectors = vectors_of(p.f);
    p.bits = {code_bits_of(g->a.dtype), code_bits_of(g->b.dtype)};
    p.up = (float)(1 << (down_of(g->a.dtype) + down_of(g->b.dtype)));
    p.tiles_m = (int)gk_ceil_div(p.m, Tile::BM);
    p.tiles_n = (int)gk_ceil_div(p.n, Tile::BN);
    return launch<scaled_gemm_sm80_kernel<Product, KIND>>(
        "scaled_gemm", ctx, dim3((unsigned)plan->tasks), Tile::THREADS, Smem<Tile>::bytes(KIND), p);
}

#define INSTANCE(name, dtype, Product, kind, b_dtype)                                        \
    {"scaled_gemm_sm80_" name,                                                               \
     dtype,                                                                                  \
     plan_scaled,                                                                            \
     run_scaled<Product, kind>,                                                              \
     {kind, b_dtype, TileOf<kind>::type::BM, TileOf<kind>::type::BN, TileOf<kind>::type::BK, \
      Smem<TileOf<kind>::type>::bytes(kind)},                                                \
     NULL}

typedef FloatProduct<GK_E4M3, GK_E4M3> E4m3;
typedef FloatProduct<GK_E4M3, GK_E5M2> E4m3E5m2;
typedef FloatProduct<GK_E5M2, GK_E4M3> E5m2E4m3;
typedef FloatProduct<GK_E5M2, GK_E5M2> E5m2;
typedef FloatProduct<GK_U8, GK_U8> Any;

const gk_cuda_instance instances[] = {
    INSTANCE("e4m3_128x128", GK_E4M3, E4m3, LARGE, GK_E4M3),
    INSTANCE("e4m3_e5m2_128x128", GK_E4M3, E4m3E5m2, LARGE, GK_E5M2),
    INSTANCE("e4m3_block_128x128", GK_E4M3, E4m3, BLOCKS, GK_E4M3),
    INSTANCE("e4m3_e5m2_block_128x128", GK_E4M3, Any, BLOCKS, GK_E5M2),
    INSTANCE("e4m3_16x64", GK_E4M3, Any, SMALL, NO_DTYPE),
    INSTANCE("e5m2_e4m3_128x128", GK_E5M2, E5m2E4m3, LARGE, GK_E4M3),
    INSTANCE("e5m2_128x128", GK_E5M2, E5m2, LARGE, GK_E5M2),
    INSTANCE("e5m2_block_128x128", GK_E5M2, Any, BLOCKS, NO_DTYPE),
    INSTANCE("e5m2_16x64", GK_E5M2, Any, SMALL, NO_DTYPE),
    INSTANCE("i8_128x128", GK_I8, Int8Product, LARGE, GK_I8),
    INSTANCE("i8_block_128x128", GK_I8, Int8Product, BLOCKS, GK_I8),
    INSTANCE("i8_16x64", GK_I8, Int8Product, SMALL, GK_I8),
};

/* Chooses the first LARGE or BLOCKS instance that serves the call. SMALL tiles are preferred for
 * small M, and if large tiles would leave most SMs idle, but not in a batch-invariant call. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t large = gk_ceil_div(g->a.shape[0], 128) * gk_ceil_div(g->b.shape[1], 128);
    const bool small = !gk_batch_invariant() && (g->a.shape[0] <= SCALED_SMALL_M ||
                                                 2 * large <= gk_gpu_of(ctx->index)->num_sms);
    for (int other = 0; other < 2; ++other)
        for (const gk_cuda_instance &instance : instances)
            if (instance.dtype == g->a.dtype &&
                (instance.key[KEY_KIND] == SMALL) == (small != (other == 1)) &&
                plan_scaled(&instance, ctx, args, plan))
                return true;
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, plan_best};
