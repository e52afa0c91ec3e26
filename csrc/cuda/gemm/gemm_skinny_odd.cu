/* gemm_skinny_odd: out = activation(alpha a b + beta c + bias) for few rows of a and weights b, or rows of a, that do not
 * begin at multiples of 16 bytes: bfloat16, float16. The weights are read once, as fast as memory gives them.
 *
 * a [batch, M, K] tokens, dense along k    b [batch, K, N] weights, dense along k or along n   out [batch, M, N]
 * any alignment, any other strides. With few columns of b the transposed product, out^T = b^T a^T.
 * Grid and split of the work: gemm_skinny's. A block an SM at most, all with equally many tiles of R <= ROWS weights and
 * all of k; the warps split k, STEP at a time in turn; their sums meet in shared memory and are added in the order of
 * the warps. In mma.m16n8k16 weights take the 16 rows, tokens the 8 columns.
 *
 * Shared memory:
 *   ring  [warp][STAGES] of weights [ROWS][STEP], or [STEP][ROWS] where they are dense along n, and tokens [TOKENS][STEP],
 *         each as the aligned chunks around its pieces of rows (skew.cuh)
 *   sums  [WARPS][8 tokens][ROWS + 4] float
 *
 * The copies are aligned, 16 bytes each; the skew is taken out on the way to the fragments:
 *   along k  a lane reads whole chunks of its row, one more than it needs, and shifts them: two selects and a funnel shift a
 *            word. The order of k inside a step is the lanes': each has neighbouring k, of weights and of tokens.
 *   along n  a lane reads 16-bit elements: the two of a register lie in rows with skews of their own. Memory gives an SM 512
 *            bytes in 27 clocks; the eight loads of a fragment of 512 bytes take 8.
 * Pipeline: gemm_skinny's: every warp has a ring of its own, waits for no other and runs on into the block's next tile.
 * Nothing outside of the tensors is read: a chunk that begins before the first element is copied by elements.
 *
 * Not here: tokens dense along m, weights with two strides (gemm_sm80), float32 and float64 (gemm_plain). */
#include "../ptx/cp_async.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "skew.cuh"
#include "split.cuh"
#include "tiles.h"
#include <stdlib.h>

namespace {

constexpr int WARPS_OF_K = SKINNY_WARPS, THREADS = WARPS_OF_K * 32;

/* ---- 1 shared memory ----------------------------------------------------------------------------------------- */
template <int TOKENS, int ROWS, bool ALONG_N> struct Smem {
    static constexpr int STEP = skinny_odd_step(TOKENS, ROWS, ALONG_N), BLOCK_STEP = WARPS_OF_K * STEP;
    typedef skew_tile<ALONG_N ? STEP : ROWS, ALONG_N ? ROWS : STEP> Weights;
    typedef skew_tile<TOKENS, STEP> Tokens;
    static constexpr int SUM_LD = ROWS + 4, WARP_SUMS = 8 * SUM_LD; /* floats */
    static constexpr int STAGE = Weights::bytes + Tokens::bytes, SUMS = WARPS_OF_K * WARP_SUMS * 4;
    static constexpr int STAGES = skinny_odd_stages(STAGE * WARPS_OF_K, SUMS), RING = WARPS_OF_K * STAGES * STAGE;
    static constexpr int BYTES = RING + SUMS;
    static_assert(STAGES >= 2, "a step is copied while another is computed");
    static_assert(ALONG_N || skew_share_ways(Weights::chunks) == 1, "lanes read their chunks without bank conflicts");
    static_assert(!ALONG_N || skew_element_ways(Weights::chunks, 0, 7, 1) == 1, "and their elements");
};

struct Params {
    GemmProblem p;               /* group: R, weights of a tile; split_k: k rounded up to BLOCK_STEP */
    uintptr_t first_w, first_x; /* the lowest address of weights and tokens */
};

/* ---- 2 copies of one warp ------------------------------------------------------------------------------------ */
/* A lane's part of a tile: one chunk of the pieces of rows RP apart, and the last chunk of the pieces of rows 32 apart. Rows 8
 * apart have one skew, so that a lane has to do with two of the former and one of the latter at most. */
template <class T, class Tile> struct Feed {
    static constexpr int CHUNKS = Tile::chunks - 1, RP = 32 / CHUNKS, SKEWS = 8 / RP;
    static constexpr int PASSES = Tile::rows / RP, LASTS = (Tile::rows + 31) / 32;
    static_assert(32 % CHUNKS == 0 && 8 % RP == 0 && Tile::rows % 8 == 0 && PASSES * RP == Tile::rows, "whole passes");

    const char *at_g[SKEWS], *last_g; /* aligned */
    int skew[SKEWS], last_skew;

    __device__ __forceinline__ void enter(const T *piece_g, int64_t row_stride, int lane) {
#pragma unroll
        for (int s = 0; s < SKEWS; ++s) {
            const T *row_g = piece_g + (lane / CHUNKS + s * RP) * row_stride;
            skew[s] = skew_of((uintptr_t)row_g), at_g[s] = (const char *)(row_g - skew[s]) + lane % CHUNKS * 16;
        }
        const T *row_g = piece_g + lane * row_stride;
        last_skew = skew_of((uintptr_t)row_g), last_g = (const char *)(row_g - last_skew) + CHUNKS * 16;
    }
    __device__ __forceinline__ void advance(int64_t elements) {
#pragma unroll
        for (int s = 0; s < SKEWS; ++s) at_g[s] += elements * 2;
        last_g += elements * 2;
    }
    static __device__ __forceinline__ void chunk(smem_addr to_s, const char *at_g, int bytes, uintptr_t first) {
        if ((uintptr_t)at_g < first && bytes > 0) { /* the tensor's first chunk */
#pragma unroll 1
            for (int b = 0; b < 16; b += 2)
                st_shared_16(to_s + b, (uintptr_t)at_g + b >= first && b < bytes ? *(const uint16_t *)(at_g + b)
                                                                                 : (uint16_t)0);
        } else {
            cp_async_cg_16_l2_128b(to_s, at_g, bytes);
        }
    }
    /* INSIDE: every chunk of the first rows_valid rows is whole, and the tile keeps what it had of the others. Else they
     * become zeros, and so does what lies past cols_left, of every row from its piece on. */
    template <bool INSIDE>
    __device__ __forceinline__ void copy(smem_addr tile_s, int64_t row_stride, int rows_valid, int cols_left,
                                         uintptr_t first, int lane) const {
        const smem_addr to_s = tile_s + lane / CHUNKS * Tile::row_bytes + lane % CHUNKS * 16;
        const char *from_g[SKEWS];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const char *&from = from_g[p % SKEWS];
            from = p < SKEWS ? at_g[p] : from + 16 * row_stride;
            const bool valid = lane / CHUNKS + p * RP < rows_valid;
            if (!INSIDE)
                chunk(to_s + p * RP * Tile::row_bytes, from,
                      valid ? skew_bytes(lane % CHUNKS, Tile::chunks, skew[p % SKEWS], cols_left) : 0, first);
            else if (valid)
                cp_async_cg_16_l2_128b(to_s + p * RP * Tile::row_bytes, from);
        }
#pragma unroll
        for (int p = 0; p < LASTS; ++p) {
            const char *from = last_g + p * 64 * row_stride;
            const smem_addr last_s = tile_s + (lane + p * 32) * Tile::row_bytes + CHUNKS * 16;
            const bool valid = lane + p * 32 < rows_valid && last_skew > 0;
            if (p * 32 + 32 > Tile::rows && lane + p * 32 >= Tile::rows) break;
            if (!INSIDE)
                chunk(last_s, from, valid ? skew_bytes(CHUNKS, Tile::chunks, last_skew, cols_left) : 0, first);
            else if (valid)
                cp_async_cg_16_l2_128b(last_s, from);
        }
    }
};

/* Where a warp copies from next: it walks the steps of a tile, then those of the block's next tile. */
template <class T, class S, bool ALONG_N> struct Cursor {
    Feed<T, typename S::Weights> w;
    Feed<T, typename S::Tokens> x;
    int64_t tile, k;                /* k: of the warp's next step */
    int steps_left;                 /* of the tile */
    int n_valid, n_left;            /* weights of the tile; of the matrix from its first on, no more than matters */
    static constexpr int MOST = 256; /* columns past a piece and its skew that do not matter */

    /* Along k, blocks start at different steps and wrap around: all at the same tokens would wait for one part of L2.
     * Along n, neighbours read the same pages of memory, and so do better side by side. */
    __device__ __forceinline__ void enter(const GemmProblem &p, int64_t tile_, int warp, int lane) {
        const unsigned steps = (unsigned)(p.split_k / S::BLOCK_STEP), first = ALONG_N ? 0 : blockIdx.x % steps;
        tile = tile_, k = warp * S::STEP + (int64_t)first * S::BLOCK_STEP, steps_left = (int)steps;
        n_valid = n_left = 0; /* past the last tile nothing is read */
        if (tile >= (int64_t)p.tiles_n * p.batch) return;
        const int64_t n0 = tile % p.tiles_n * p.group;
        const GemmPlace at = gemm_place(p, tile / p.tiles_n);
        n_left = (int)min((int64_t)MOST, p.n - n0), n_valid = min(p.group, n_left);
        w.enter((const T *)p.b + at.b + n0 * p.b_n + k * p.b_k, ALONG_N ? p.b_k : p.b_n, lane);
        x.enter((const T *)p.a + at.a + k, p.a_m, lane);
    }
    template <class Params>
    __device__ __forceinline__ void copy(const Params &params, smem_addr stage_s, int warp, int lane) {
        const GemmProblem &p = params.p;
        const smem_addr x_s = stage_s + S::Weights::bytes;
        const int64_t w_rows = ALONG_N ? p.b_k : p.b_n;
        const int k_left = n_valid > 0 ? (int)max((int64_t)0, min((int64_t)MOST, p.k - k)) : 0;
        /* the first row's first chunk may begin before the tensor */
        const bool inside = k > 0 && k_left >= S::STEP + SKEW_EACH && (!ALONG_N || n_left >= S::Weights::cols + SKEW_EACH);
        if (inside) {
            w.template copy<true>(stage_s, w_rows, ALONG_N ? S::STEP : n_valid, 0, 0, lane);
            x.template copy<true>(x_s, p.a_m, (int)p.m, 0, 0, lane);
        } else {
            w.template copy<false>(stage_s, w_rows, ALONG_N ? k_left : k_left > 0 ? n_valid : 0, ALONG_N ? n_left : k_left,
                          params.first_w, lane);
            x.template copy<false>(x_s, p.a_m, k_left > 0 ? (int)p.m : 0, k_left, params.first_x, lane);
        }
        w.advance(S::BLOCK_STEP * p.b_k), x.advance(S::BLOCK_STEP), k += S::BLOCK_STEP;
        if (k >= p.split_k) w.advance(-p.split_k * p.b_k), x.advance(-p.split_k), k -= p.split_k;
        if (--steps_left == 0) enter(p, tile + gridDim.x, warp, lane);
    }
};

/* ---- 3 fragments --------------------------------------------------------------------------------------------- */
/* A lane's share of a row, from the chunk at at_s on. */
template <int WORDS>
__device__ __forceinline__ void load_share(uint32_t (&words)[WORDS], smem_addr at_s, int skew) {
    uint32_t raw[WORDS + 4];
#pragma unroll
    for (int i = 0; i < WORDS + 4; i += 4) {
        const uint4 x = ld_shared_128(at_s + i * 4);
        raw[i] = x.x, raw[i + 1] = x.y, raw[i + 2] = x.z, raw[i + 3] = x.w;
    }
    skew_shift(raw, skew);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = raw[i];
}

__device__ __forceinline__ uint32_t load_pair(smem_addr low_s, smem_addr high_s) {
    return ld_shared_16(low_s) | (uint32_t)ld_shared_16(high_s) << 16;
}

/* ---- 4 the kernel -------------------------------------------------------------------------------------------- */
template <class T, int TOKENS, int ROWS, bool ALONG_N>
__global__ void __launch_bounds__(THREADS, 1) gemm_skinny_odd_kernel(const __grid_constant__ Params x) {
    typedef Smem<TOKENS, ROWS, ALONG_N> S;
    typedef typename S::Weights W;
    typedef typename S::Tokens X;
    constexpr int MT = ROWS / 16, NT = TOKENS / 8, K16 = S::STEP / 16;
    extern __shared__ __align__(128) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, slot = lane / 4, q = lane % 4;
    const int64_t tiles = (int64_t)p.tiles_n * p.batch;
    const smem_addr ring_s = cvta_to_shared(smem) + warp * (S::STAGES * S::STAGE);
    float *sums = (float *)(smem + S::RING);
    /* of 8 weights and 8 tokens, the ones whose products a lane loads for */
    const int row = ALONG_N ? slot : skew_row(W::chunks, slot), token = ALONG_N ? slot : skew_row(X::chunks, slot);

    cp_ring<S::STAGES> ring;
    Cursor<T, S, ALONG_N> next;
    next.enter(p, blockIdx.x, warp, lane);
    for (int j = 0; j < S::STAGES - 1; ++j) {
        next.copy(x, ring_s + j * S::STAGE, warp, lane);
        ring.commit();
    }
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t n0 = tile % p.tiles_n * p.group;
        const GemmPlace at = gemm_place(p, tile / p.tiles_n);
        const T *w_g = (const T *)p.b + at.b + n0 * p.b_n, *x_g = (const T *)p.a + at.a;
        const int x_skew = skew_of((uintptr_t)(x_g + token * p.a_m));
        const int w_skew = skew_of((uintptr_t)(w_g + (ALONG_N ? 2 * q * p.b_k : row * p.b_n)));
        const int odd_skew = skew_of((uintptr_t)(w_g + (2 * q + 1) * p.b_k));
        float sum[MT][NT][4] = {};
        for (int64_t k = 0; k < p.split_k; k += S::BLOCK_STEP) {
            ring.wait_warp(); /* the step is in; the slot that is filled next has been read by all lanes */
            next.copy(x, ring_s + ring.write * S::STAGE, warp, lane);
            ring.commit();
            const smem_addr stage_s = ring_s + ring.read * S::STAGE, x_s = stage_s + W::bytes + token * X::row_bytes;
            if constexpr (ALONG_N) {
                const smem_addr even_s = stage_s + skew_element(W::chunks, lane, 0, w_skew),
                                odd_s = stage_s + skew_element(W::chunks, lane, 1, odd_skew),
                                x_at = x_s + (2 * q + x_skew) * 2;
#pragma unroll
                for (int kk = 0; kk < K16; ++kk) {
                    uint32_t b[NT][2];
#pragma unroll
                    for (int t = 0; t < NT; ++t)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const smem_addr pair_s = x_at + t * 8 * X::row_bytes + (kk * 16 + h * 8) * 2;
                            b[t][h] = load_pair(pair_s, pair_s + 2);
                        }
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        uint32_t a[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int away = (kk * 16 + e / 2 * 8) * W::row_bytes + (i * 16 + e % 2 * 8) * 2;
                            a[e] = load_pair(even_s + away, odd_s + away);
                        }
#pragma unroll
                        for (int t = 0; t < NT; ++t) mma_add<T>(sum[i][t], a, b[t]);
                    }
                }
            } else {
                const smem_addr w_at = stage_s + row * W::row_bytes + skew_share(W::chunks, q) * 16,
                                x_at = x_s + skew_share(X::chunks, q) * 16;
                uint32_t b[NT][2 * K16];
#pragma unroll
                for (int t = 0; t < NT; ++t) load_share(b[t], x_at + t * 8 * X::row_bytes, x_skew);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    uint32_t low[2 * K16], high[2 * K16]; /* rows 0 to 7 and 8 to 15 of the sixteen */
                    load_share(low, w_at + i * 16 * W::row_bytes, w_skew);
                    load_share(high, w_at + (i * 16 + 8) * W::row_bytes, w_skew);
#pragma unroll
                    for (int kk = 0; kk < K16; ++kk) {
                        const uint32_t a[4] = {low[2 * kk], high[2 * kk], low[2 * kk + 1], high[2 * kk + 1]};
#pragma unroll
                        for (int t = 0; t < NT; ++t) mma_add<T>(sum[i][t], a, b[t] + 2 * kk);
                    }
                }
            }
            ring.advance();
        }

        /* ---- 5 the sums of the warps, in their order, 8 tokens at a time ---- */
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            if (t * 8 >= p.m) break;
            __syncthreads(); /* the sums before these have been read */
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = frag_col(lane, e);
                    sums[warp * S::WARP_SUMS + (ALONG_N ? column : skew_row(X::chunks, column)) * S::SUM_LD + i * 16 +
                         e / 2 * 8 + row] = sum[i][t][e];
                }
            __syncthreads(); /* all sums are in */
            const int tokens = min(8, (int)p.m - t * 8);
#pragma unroll 1
            for (int i = thread; i < tokens * ROWS; i += THREADS) {
                const int of_token = i / ROWS, of_row = i % ROWS;
                float total = 0;
#pragma unroll
                for (int w = 0; w < WARPS_OF_K; ++w) total += sums[w * S::WARP_SUMS + of_token * S::SUM_LD + of_row];
                if (of_row < p.group && n0 + of_row < p.n)
                    epilogue_cols<T, 1>(p.epilogue, at, t * 8 + of_token, n0 + of_row, 1, &total);
            }
        }
    }
    cp_async_wait_group<0>();
}

/* ---- 6 the launch -------------------------------------------------------------------------------------------- */
/* p or its transposed product, where the kernel serves it. */
bool fits(const GemmProblem &p) {
    if (p.m > SKINNY_ODD_MAX_TOKENS || p.m == 0 || p.k < SKINNY_ODD_MIN_K) return false;
    /* one row for every k: any step may hold the tensor's first chunk */
    return p.a_k == 1 && (p.b_k == 1 || (p.b_n == 1 && p.b_k != 0));
}

/* R: as many weights a tile as give every SM equally many tiles. */
bool plan(const gk_context *ctx, const void *arguments, GemmProblem *p) {
    *p = gemm_problem_of((const gk_gemm_args *)arguments);
    bool good = fits(*p);
    if (p->n <= SKINNY_ODD_MAX_TOKENS && (!good || p->n < p->m)) {
        const GemmProblem swapped = gemm_swapped(*p);
        if (fits(swapped)) *p = swapped, good = true;
    }
    if (!good) return false;
    const int64_t sms = gk_gpu_of(ctx->index)->num_sms, rows = gk_max_i64(1, p->n * p->batch);
    const int64_t most = getenv("ODD_ROWS") ? atoi(getenv("ODD_ROWS")) : SKINNY_ODD_ROWS;
    const int64_t rounds = gk_ceil_div(rows, most * sms);
    p->group = (int)gk_round_up(gk_ceil_div(rows, rounds * sms), 8);
    p->tiles_m = 1, p->tiles_n = (int)gk_ceil_div(p->n, p->group), p->splits = 1;
    return true;
}

/* Blocks: equally many tiles each, at most one block an SM. */
int64_t blocks_of(const gk_context *ctx, const GemmProblem &p) {
    const int64_t tiles = (int64_t)p.tiles_n * p.batch;
    return gk_max_i64(1, gk_ceil_div(tiles, gk_max_i64(1, gk_ceil_div(tiles, gk_gpu_of(ctx->index)->num_sms))));
}

enum Key { /* of a row: the most tokens, the most weights a tile, bytes of shared memory */
    KEY_TOKENS,
    KEY_ROWS,
    KEY_SMEM
};

extern const gk_cuda_row *const odd_rows;
extern const int num_odd_rows;

bool serves(const gk_cuda_row *row, const gk_context *ctx, const GemmProblem &p) {
    return p.m <= row->key[KEY_TOKENS] && p.group <= row->key[KEY_ROWS] && smem_fits(ctx, row->key[KEY_SMEM]);
}

const gk_cuda_row *choose(const gk_context *ctx, const void *args) {
    const gk_dtype dtype = ((const gk_gemm_args *)args)->a.dtype;
    GemmProblem p;
    if ((dtype != GK_BF16 && dtype != GK_F16) || !plan(ctx, args, &p)) return NULL;
    for (const gk_cuda_row *row = odd_rows; row < odd_rows + num_odd_rows; ++row)
        if (row->dtype == dtype && serves(row, ctx, p)) return row;
    return NULL;
}

bool takes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    GemmProblem p;
    return plan(ctx, args, &p) && serves(row, ctx, p);
}

/* The lowest address of a [batch][x][k] operand. */
uintptr_t lowest(const void *data, int64_t x, int64_t k, int64_t x_stride, int64_t k_stride, const GemmProblem &p,
                 const int64_t *batch) {
    int64_t at = gk_min_i64(0, (x - 1) * x_stride) + gk_min_i64(0, (k - 1) * k_stride);
    for (int d = 0; d < p.ndim; ++d) at += gk_min_i64(0, (p.shape[d] - 1) * batch[d]);
    return (uintptr_t)data + (uintptr_t)(at * 2);
}

template <class T, int TOKENS, int ROWS, bool ALONG_N>
gk_status start(const gk_context *ctx, Params *x) {
    typedef Smem<TOKENS, ROWS, ALONG_N> S;
    GemmProblem &p = x->p;
    p.split_k = gk_round_up(p.k, S::BLOCK_STEP);
    x->first_w = lowest(p.b, p.n, p.k, p.b_n, p.b_k, p, p.b_batch);
    x->first_x = lowest(p.a, p.m, p.k, p.a_m, p.a_k, p, p.a_batch);
    return launch<gemm_skinny_odd_kernel<T, TOKENS, ROWS, ALONG_N>>("gk_gemm", ctx, dim3((unsigned)blocks_of(ctx, p)),
                                                                    THREADS, S::BYTES, *x);
}

template <class T, int TOKENS, int ROWS> gk_status run(const gk_cuda_row *, const gk_context *ctx, const void *args) {
    Params x;
    if (!plan(ctx, args, &x.p) || x.p.n == 0 || x.p.batch == 0) return GK_OK;
    return x.p.b_k == 1 ? start<T, TOKENS, ROWS, false>(ctx, &x) : start<T, TOKENS, ROWS, true>(ctx, &x);
}

void explain(const gk_cuda_row *row, const gk_context *ctx, const void *args, gk_explanation *out) {
    GemmProblem p;
    if (!plan(ctx, args, &p)) return;
    out->tile[0] = row->key[KEY_TOKENS], out->tile[1] = p.group;
    out->tile[2] = WARPS_OF_K * skinny_odd_step(row->key[KEY_TOKENS], row->key[KEY_ROWS], p.b_k != 1);
    out->tasks = (int64_t)p.tiles_n * p.batch;
    out->waves = (double)gk_ceil_div(out->tasks, blocks_of(ctx, p)); /* tiles that a block takes in turn */
}

template <int TOKENS, int ROWS> constexpr int smem_of() {
    return Smem<TOKENS, ROWS, false>::BYTES > Smem<TOKENS, ROWS, true>::BYTES ? Smem<TOKENS, ROWS, false>::BYTES
                                                                             : Smem<TOKENS, ROWS, true>::BYTES;
}

#define ROW(name, T, tokens, rows)                                                                                      \
    {                                                                                                                   \
        "gemm_skinny_odd_" name "_" #tokens "x" #rows, element<T>::dtype, takes, NULL, run<T, tokens, rows>, explain, { \
            tokens, rows, smem_of<tokens, rows>()                                                                       \
        }                                                                                                               \
    }
#define ROWS_16(name, T) ROW(name, T, 8, 32), ROW(name, T, 8, 64), ROW(name, T, 16, 32), ROW(name, T, 16, 64), ROW(name, T, 32, 32), ROW(name, T, 64, 32)

const gk_cuda_row rows[] = {ROWS_16("bf16", __nv_bfloat16)};
const gk_cuda_row *const odd_rows = rows;
const int num_odd_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_skinny_odd_table = {rows, sizeof rows / sizeof rows[0], 80, choose};
