/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_skinny: out = activation(alpha a b + beta c + bias) for at most 16 rows of a, in bfloat16
 * and float16. It reads the weights b once. The time is bound by the bandwidth of memory. If b has
 * at most 16 columns instead, it computes out^T = b^T a^T.
 *
 * a [batch, M <= 16, K] tokens, K-major; b [batch, K, N] weights, K-major or MN-major; out
 * [batch, M, N] with any strides. Aligned instances need rows of 16-byte chunks and K a multiple
 * of 8. Misaligned instances take other rows and any K (misaligned.cuh).
 *
 * Grid: at most one block an SM. All blocks take equally many tiles of R <= ROWS weights
 * (skinny_plan.c chooses R), over all of k. The warps split k: warp w takes every
 * SKINNY_WARPS-th 32 of k. The warps write their sums to shared memory, where they are added in the
 * order of the warps. In mma.m16n8k16, weights are the 16 rows and tokens the 8 columns.
 *
 * Shared memory:
 *   ring  [warp][STAGES] of weights [ROWS][32] (MN-major: [32][ROWS]) and tokens [TOKENS][32]
 *   sums  [WARPS][8 tokens][ROWS + 4] float
 * In misaligned instances the ring holds the rows' raw chunks, and a warp shifts each step into
 * one pair of such tiles.
 *
 * Pipeline: every warp has its own ring and waits for no other warp. It already copies steps of the
 * block's next tile while a tile's sums are added, so that memory stays busy. With 4 stages and
 * tiles of 3 steps:
 *   copy     s0 s1 s2 | s0' s1' s2'        s0'' ..
 *   mma               | s0  s1  s2  [sums] s0'  ..
 *
 * Refuses: more rows (gemm_sm80, gemm_sm90a), MN-major tokens, float32 and float64 (gemm_plain). */
#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "../../tile/pipeline.cuh"
#include "../../host/launch.cuh"
#include "misaligned.cuh"
#include "skinny_plan.h"
#include "split.cuh"
#include "tiles.h"

namespace {

constexpr int THREADS = SKINNY_WARPS * 32, STEP = 32, BLOCK_STEP = SKINNY_BLOCK_STEP;
static_assert(BLOCK_STEP == SKINNY_WARPS * STEP, "each warp has a step");

/* ---- 1 shared memory ------------------------------------------------------------------------- */
template <int TOKENS, int ROWS, bool ALONG_N, bool MISALIGNED> struct Smem {
    typedef smem_tile<ALONG_N ? STEP : ROWS, (ALONG_N ? ROWS : STEP) * 2> Weights;
    typedef smem_tile<TOKENS, STEP * 2> Tokens;
    /* Bytes of a step, in the layout that fragments are read from. */
    static constexpr int TILES = Weights::bytes + Tokens::bytes;
    static constexpr int RAW_WEIGHTS = raw_rows<Weights>::bytes,
                         RAW = RAW_WEIGHTS + raw_rows<Tokens>::bytes;
    static constexpr int STAGE = MISALIGNED ? RAW : TILES,
                         SHIFTED = MISALIGNED ? SKINNY_WARPS * TILES : 0;
    static constexpr int STAGES = skinny_stages(STAGE * SKINNY_WARPS, SHIFTED);
    static constexpr int SUM_LD = ROWS + 4, WARP_SUMS = 8 * SUM_LD; /* floats */
    static constexpr int RING = SKINNY_WARPS * STAGES * STAGE, SUMS = RING + SHIFTED;
    static constexpr int BYTES = SUMS + SKINNY_WARPS * WARP_SUMS * 4;
    /* In a store, lanes of one quad hold tokens two apart, which lie 8 banks apart. */
    static constexpr GK_HD int sums_ways() {
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes[lane] = (frag_c(lane, 0).col * SUM_LD + frag_c(lane, 0).row) * 4;
        return ways(bytes, 4);
    }
    static_assert(sums_ways() == 1, "sums are stored without bank conflicts");
    static_assert(Weights::bytes % 128 == 0 && Tokens::bytes % 128 == 0 && STAGE % 128 == 0,
                  "every tile starts on a multiple of 128");
    static_assert(STAGES >= 3, "a step is copied while another is computed");
};

typedef SkinnyPlan Params;

/* ---- 2 copies of one warp -------------------------------------------------------------------- */
/* A warp copies a tile; a lane takes one chunk of every ROWS-th row. Invalid rows and columns
 * become zeros. */
template <class T, class Tile>
__device__ __forceinline__ void copy_rows(smem_addr tile_s, const T *from_g, int64_t row_stride,
                                          int rows_valid, int cols_valid, int lane) {
    constexpr int ROWS = 32 / Tile::chunks, PASSES = Tile::rows / ROWS;
    static_assert(32 % Tile::chunks == 0 && Tile::rows % ROWS == 0 && 8 % ROWS == 0,
                  "whole passes");
    const int row = lane / Tile::chunks, chunk = lane % Tile::chunks,
              bytes = chunk_bytes<T>(chunk, cols_valid);
    const T *at_g = from_g + row * row_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < PASSES; ++i, at_g += ROWS * row_stride)
        cp_async_cg_16_l2_128b(tile_s + Tile::offset(row + i * ROWS, chunk), at_g,
                               row + i * ROWS < rows_valid ? bytes : 0);
}

/* The position of a warp's next copy. It runs through the warp's steps of a tile, and then through
 * those of the block's next tile. */
template <class T, bool ALONG_N, bool MISALIGNED> struct Cursor {
    const T *w_g, *x_g; /* first weight and token of the step */
    int64_t tile, k;    /* k: where the warp's next step begins */
    int64_t steps_left; /* steps of the tile that are not copied yet */
    int rows_valid;

    /* Begins a tile. With K-major weights, blocks start at different steps and wrap around.
     * Otherwise all blocks would read the same tokens from one part of L2 at once. With MN-major
     * weights, neighbouring blocks read the same pages of memory, and are faster if they start
     * together. */
    __device__ __forceinline__ void enter(const GemmProblem &p, int64_t tile_, int warp) {
        const unsigned steps = (unsigned)(p.split_k / BLOCK_STEP);
        const unsigned first = ALONG_N ? 0 : blockIdx.x % steps;
        tile = tile_;
        k = warp * STEP + (int64_t)first * BLOCK_STEP;
        steps_left = steps;
        if (tile >= (int64_t)p.tiles_n * p.batch) {
            rows_valid = 0; /* after the last tile, nothing is read */
            return;
        }
        const int64_t n0 = tile % p.tiles_n * p.group;
        const GemmPlace at = gemm_place(p, tile / p.tiles_n);
        rows_valid = (int)min((int64_t)p.group, p.n - n0);
        w_g = (const T *)p.b + at.b + n0 * p.b_n + k * p.b_k;
        x_g = (const T *)p.a + at.a + k;
    }
    template <class S>
    __device__ __forceinline__ void copy(const Params &x, smem_addr stage_s, int warp, int lane) {
        const GemmProblem &p = x.p;
        const int k_valid = rows_valid > 0 ? (int)max((int64_t)0, min((int64_t)STEP, p.k - k)) : 0;
        if constexpr (MISALIGNED) {
            copy_raw_rows<typename S::Weights>(stage_s, w_g, ALONG_N ? p.b_k : p.b_n,
                                               ALONG_N ? k_valid : rows_valid,
                                               ALONG_N ? rows_valid : k_valid, x.first_w, lane);
            copy_raw_rows<typename S::Tokens>(stage_s + S::RAW_WEIGHTS, x_g, p.a_m, (int)p.m,
                                              k_valid, x.first_x, lane);
        } else {
            if constexpr (ALONG_N)
                copy_rows<T, typename S::Weights>(stage_s, w_g, p.b_k, k_valid, rows_valid, lane);
            else
                copy_rows<T, typename S::Weights>(stage_s, w_g, p.b_n, rows_valid, k_valid, lane);
            copy_rows<T, typename S::Tokens>(stage_s + S::Weights::bytes, x_g, p.a_m, (int)p.m,
                                             k_valid, lane);
        }
        w_g += BLOCK_STEP * p.b_k;
        x_g += BLOCK_STEP;
        k += BLOCK_STEP;
        if (k >= p.split_k) {
            w_g -= p.split_k * p.b_k;
            x_g -= p.split_k;
            k -= p.split_k;
        }
        if (--steps_left == 0) enter(p, tile + gridDim.x, warp);
    }
};

/* ---- 3 the kernel ---------------------------------------------------------------------------- */
/* p.group: R, weights of a tile. p.split_k: k rounded up to BLOCK_STEP. */
template <class T, int TOKENS, int ROWS, bool ALONG_N, bool MISALIGNED>
__global__ void __launch_bounds__(THREADS, 1) gemm_skinny_kernel(const __grid_constant__ Params x) {
    typedef Smem<TOKENS, ROWS, ALONG_N, MISALIGNED> S;
    typedef typename S::Weights Weights;
    typedef typename S::Tokens Tokens;
    constexpr int MT = ROWS / 16, NT = TOKENS / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t tiles = (int64_t)p.tiles_n * p.batch;
    const smem_addr ring_s = cvta_to_shared(smem) + warp * (S::STAGES * S::STAGE);
    float *sums = (float *)(smem + S::SUMS);
    const smem_addr tiles_s = MISALIGNED ? cvta_to_shared(smem) + S::RING + warp * S::TILES
                                         : ring_s; /* the tiles of the first step */
    const smem_addr w_base =
        ALONG_N ? frag_a_trans_base<Weights>(tiles_s, lane) : frag_a_base<Weights>(tiles_s, lane);
    /* One ldmatrix loads 8 tokens x 32 of k; matrix i is chunk i. */
    const smem_addr x_base =
        tiles_s + Weights::bytes + Tokens::offset(ldmatrix_row(lane), ldmatrix_matrix(lane));

    cp_ring<S::STAGES> ring;
    Cursor<T, ALONG_N, MISALIGNED> next;
    next.enter(p, blockIdx.x, warp);
    for (int j = 0; j < S::STAGES - 1; ++j) {
        next.template copy<S>(x, ring_s + j * S::STAGE, warp, lane);
        ring.commit();
    }
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[MT][NT][4] = {};
        for (int64_t k = 0; k < p.split_k; k += BLOCK_STEP) {
            /* The step has arrived, and all lanes have read the stage that is filled next. */
            ring.wait_warp();
            next.template copy<S>(x, ring_s + ring.write * S::STAGE, warp, lane);
            ring.commit();
            /* A warp's steps are multiples of 16 bytes apart, so every step of a row has the
             * same shift. */
            if constexpr (MISALIGNED) {
                const GemmPlace at = gemm_place(p, tile / p.tiles_n);
                const smem_addr raw_s = ring_s + ring.read * S::STAGE;
                const T *w_g = (const T *)p.b + at.b + tile % p.tiles_n * p.group * p.b_n;
                shift_rows<Weights>(tiles_s, raw_s, w_g, ALONG_N ? p.b_k : p.b_n, lane);
                shift_rows<Tokens>(tiles_s + Weights::bytes, raw_s + S::RAW_WEIGHTS,
                                   (const T *)p.a + at.a, p.a_m, lane);
                /* The step's tiles are complete. All lanes had read the last step's tiles at
                 * ring.wait_warp. */
                __syncwarp();
            }
            const int step_at = MISALIGNED ? 0 : ring.read * S::STAGE;
            uint32_t b[NT][4];
#pragma unroll
            for (int t = 0; t < NT; ++t) ldmatrix_x4(b[t], Tokens::down(x_base + step_at, t * 8));
#pragma unroll
            for (int kk = 0; kk < STEP / 16; ++kk)
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    uint32_t a[4];
                    const smem_addr at_s = w_base + step_at;
                    if constexpr (ALONG_N)
                        load_frag_a_trans(a, Weights::along(Weights::down(at_s, 16 * kk), 2 * i));
                    else
                        load_frag_a(a, Weights::down(Weights::along(at_s, 2 * kk), 16 * i));
#pragma unroll
                    for (int t = 0; t < NT; ++t) mma_add<T>(sum[i][t], a, b[t] + 2 * kk);
                }
            ring.advance();
        }

        /* ---- 4 the sums of the warps, in their order, 8 tokens at a time ---- */
        const int64_t n0 = tile % p.tiles_n * p.group;
        const GemmPlace at = gemm_place(p, tile / p.tiles_n);
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            if (t * 8 >= p.m) break;
            __syncthreads(); /* the previous sums have been read */
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[warp * S::WARP_SUMS + frag_col(lane, e) * S::SUM_LD + i * 16 +
                         frag_row(lane, e)] = sum[i][t][e];
            __syncthreads(); /* all sums have been written */
            const int tokens = min(8, (int)p.m - t * 8);
#pragma unroll 1
            for (int i = thread; i < tokens * ROWS; i += THREADS) {
                const int token = i / ROWS, place = i % ROWS;
                float total = 0;
#pragma unroll
                for (int w = 0; w < SKINNY_WARPS; ++w)
                    total += sums[w * S::WARP_SUMS + token * S::SUM_LD + place];
                if (place < p.group && n0 + place < p.n)
                    epilogue_row<T, 1>(p.epilogue, at, t * 8 + token, n0 + place, 1, &total);
            }
        }
    }
    cp_async_wait_group<0>();
}

/* ---- 5 the launch ---------------------------------------------------------------------------- */
template <class T, int TOKENS, int ROWS, bool ALONG_N, bool MISALIGNED>
gk_status start(const gk_context *ctx, const Params &x) {
    return launch<gemm_skinny_kernel<T, TOKENS, ROWS, ALONG_N, MISALIGNED>>(
        "gk_gemm", ctx, dim3((unsigned)skinny_blocks(ctx, &x.p)), THREADS,
        Smem<TOKENS, ROWS, ALONG_N, MISALIGNED>::BYTES, x);
}

template <class T, int TOKENS, int ROWS, bool MISALIGNED>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *) {
    const Params &x = gk_own<Params>(plan);
    if (x.p.n == 0 || x.p.batch == 0) return GK_OK;
    return x.p.b_k == 1 ? start<T, TOKENS, ROWS, false, MISALIGNED>(ctx, x)
                        : start<T, TOKENS, ROWS, true, MISALIGNED>(ctx, x);
}

template <int TOKENS, int ROWS, bool MISALIGNED> constexpr int smem_of() {
    constexpr int along_k = Smem<TOKENS, ROWS, false, MISALIGNED>::BYTES,
                  along_n = Smem<TOKENS, ROWS, true, MISALIGNED>::BYTES;
    return along_k > along_n ? along_k : along_n;
}

} // namespace

#define INSTANCE(short, T, name, tokens, rows, misaligned) \
    GK_DEFINE_LAUNCH(gemm_skinny_##short##_##name##_##misaligned, run<T, tokens, rows, misaligned>)
#define SKINNY(name, tokens, rows, misaligned, bytes)                                      \
    static_assert(smem_of<tokens, rows, misaligned>() == (bytes), "instances.def: BYTES"); \
    INSTANCE(bf16, __nv_bfloat16, name, tokens, rows, misaligned)                          \
    INSTANCE(f16, __half, name, tokens, rows, misaligned)
#include "instances.def"
