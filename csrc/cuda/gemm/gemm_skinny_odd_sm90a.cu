/* gemm_skinny_odd_sm90a: out = activation(alpha a b + beta c + bias) for few rows of a and weights b, or rows of a,
 * that do not begin at multiples of 16 bytes: bfloat16, float16. The weights are read once.
 *
 * a [batch, M <= 64, K] tokens, dense along k    b [batch, K, N] weights, dense along k or along n   out [batch, M, N]
 * any alignment, any other strides. With few columns of b the transposed product, out^T = b^T a^T.
 * Grid: at most one block an SM, all with equally many tiles of R <= ROWS weights and all of k (R: `plan`). A step is
 * 256 of k, 32 a warp; the warps' sums meet in shared memory and are added in their order. In mma.m16n8k16 weights take
 * the 16 rows, tokens the 8 columns.
 *
 * Shared memory, a ring of SLOTS steps (skew.cuh):
 *   weights  along k: [ROWS] streams; along n: [SLOTS][256 k] pieces of ROWS
 *   tokens   [TOKENS] streams
 *   sums     [WARPS][8 tokens][ROWS + 4] float
 *
 * Copies are aligned, 16 bytes each; the skew is taken out on the way to the fragments:
 *   along k  a lane reads the chunk of its row that holds its first k and the next one, and shifts them: two selects
 *            and a funnel shift a word. Its 8 neighbouring k serve as any 8 of a step's, of weights and tokens alike.
 *   along n  a lane reads 16-bit elements: the two of a register lie in rows with skews of their own.
 * Pipeline: a step is copied AHEAD steps early and computed one step after it has come, since the next one holds the
 * ends of its streams; a tile takes one step more than its k, and the copies run on into the block's next tile:
 *   copy      k0 k1 .. | k2      k3   end   k0' k1' ..
 *   compute            | (wait)  k0   k1    k2  ..  [sums]  (wait)  k0'
 * Nothing outside of the tensors is read: a chunk that begins before the first element is copied by elements.
 *
 * What bounds it: all warps wait at one barrier a step, so that its copies, loads, shifts and products come one after
 * the other. A step of 32 weights along k takes 0.66 us with one token and 0.84 with 16, one of 64 weights 1.0 and
 * 1.24, where memory needs 0.5 and 1.0.
 * Not here: tokens dense along m, weights with two strides (gemm_sm80), float32 and float64 (gemm_plain). */
#include "../ptx/cp_async.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../tile/fragment.cuh"
#include "skew.cuh"
#include "skinny.cuh"
#include "split.cuh"
#include "tiles.h"

namespace {

constexpr int WARPS = SKINNY_WARPS, THREADS = WARPS * 32;
constexpr int STEP = 32, K16 = STEP / 16, BLOCK_STEP = WARPS * STEP; /* k of a warp's and of the block's step */
static_assert(BLOCK_STEP == SKEW_STEP * SKEW_EACH, "a step of all warps is a step of the streams");

/* ---- 1 shared memory ----------------------------------------------------------------------------------------- */
template <int ROWS, int SLOTS, bool ALONG_N> struct WeightTile { /* a slot's rows of k, as pieces */
    typedef skew_tile<BLOCK_STEP, ROWS> type;
    static constexpr int bytes = SLOTS * type::bytes;
};
template <int ROWS, int SLOTS> struct WeightTile<ROWS, SLOTS, false> {
    typedef skew_stream<ROWS, SLOTS> type;
    static constexpr int bytes = type::bytes;
};

template <int TOKENS, int ROWS, bool ALONG_N> struct Smem {
    static constexpr int SUM_LD = ROWS + 4, WARP_SUMS = 8 * SUM_LD, SUMS = WARPS * WARP_SUMS * 4; /* floats; bytes */
    static constexpr int SLOT = (TOKENS + ROWS) * BLOCK_STEP * 2 + (ALONG_N ? BLOCK_STEP * 16 : 0);
    static constexpr int SLOTS = hopper_slots(SLOT, SUMS + (TOKENS + ROWS) * 16, SKINNY_ODD_SLOTS);
    static constexpr int AHEAD = SLOTS - 2; /* one is read, the next holds the end of its rows */
    typedef WeightTile<ROWS, SLOTS, ALONG_N> Tile;
    typedef typename Tile::type Weights;
    typedef skew_stream<TOKENS, SLOTS> Tokens;
    static constexpr int TOKENS_AT = Tile::bytes, SUMS_AT = TOKENS_AT + Tokens::bytes, BYTES = SUMS_AT + SUMS;
    static_assert(AHEAD >= 1, "a step is copied while another is computed");
    static_assert(skew_row_ways(Tokens::row_bytes) == 1, "lanes read chunks of streams without bank conflicts");
    static_assert(!ALONG_N || skew_element_ways(ROWS / 8 + 1, 0, 7, 1) == 1, "and elements of pieces");
};

struct Params {
    GemmProblem p;              /* group: R, weights of a tile */
    uintptr_t first_w, first_x; /* the lowest address of weights and tokens */
};

/* ---- 2 copies ------------------------------------------------------------------------------------------------ */
/* The first `bytes` of a chunk, or those of them that lie in the tensor; zeros behind. */
__device__ __forceinline__ void copy_chunk(smem_addr to_s, const char *at_g, int bytes, uintptr_t first) {
    if ((uintptr_t)at_g < first && bytes > 0) { /* the tensor's first chunk */
#pragma unroll 1
        for (int b = 0; b < 16; b += 2)
            st_shared_16(to_s + b,
                         (uintptr_t)at_g + b >= first && b < bytes ? *(const uint16_t *)(at_g + b) : (uint16_t)0);
    } else {
        cp_async_cg_16_l2_128b(to_s, at_g, bytes);
    }
}

/* A thread's part of rows that become streams: every EACHth chunk of one row, or of rows 32 apart. */
template <class T, class Tile> struct StreamFeed {
    static constexpr int AT_ONCE = Tile::rows < 32 ? Tile::rows : 32, PASSES = Tile::rows / AT_ONCE;
    static constexpr int EACH = THREADS / AT_ONCE, COUNT = SKEW_STEP / EACH;
    static_assert(THREADS % AT_ONCE == 0 && EACH % SKEW_LINE == 0 && SKEW_STEP % EACH == 0, "whole lines");

    const char *at_g[PASSES]; /* the thread's first chunk of the next step */
    int chunk[PASSES], skew[PASSES];

    __device__ __forceinline__ void enter(const T *row0_g, int64_t row_stride) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const uintptr_t row_g = (uintptr_t)(row0_g + ((int)threadIdx.x / EACH + i * AT_ONCE) * row_stride);
            skew[i] = skew_of(row_g), chunk[i] = (int)threadIdx.x % EACH - skew_early(row_g);
            at_g[i] = (const char *)(row_g - skew[i] * 2) + chunk[i] * 16;
        }
    }
    /* Step `step` of a row of cols elements into a slot. INSIDE: all of the step's chunks are whole. */
    template <bool INSIDE>
    __device__ __forceinline__ void copy(smem_addr tile_s, int slot, unsigned step, int rows_valid, int64_t cols,
                                         uintptr_t first) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int row = (int)threadIdx.x / EACH + i * AT_ONCE;
            if (row < rows_valid) {
                const smem_addr row_s = tile_s + row * Tile::row_bytes;
                const smem_addr to_s = row_s + skew_position(Tile::chunks, slot * SKEW_STEP, chunk[i]) * 16;
                const smem_addr rest_s = row_s + (slot * SKEW_STEP + chunk[i]) * 16; /* of the chunks that never wrap */
#pragma unroll
                for (int c = 0; c < COUNT; ++c) {
                    const smem_addr at_s = c == 0 ? to_s : rest_s + c * EACH * 16;
                    const int64_t index = (int64_t)step * SKEW_STEP + chunk[i] + c * EACH;
                    const bool again = c == 0 && slot == 0 && chunk[i] == 0; /* the ring's first chunk */
                    if (INSIDE) {
                        cp_async_cg_16_l2_128b(at_s, at_g[i] + c * EACH * 16);
                        if (again) cp_async_cg_16_l2_128b(row_s + Tile::chunks * 16, at_g[i]);
                    } else if (index >= 0) {
                        const int bytes = skew_bytes(index, skew[i], cols);
                        copy_chunk(at_s, at_g[i] + c * EACH * 16, bytes, first);
                        if (again) copy_chunk(row_s + Tile::chunks * 16, at_g[i], bytes, first);
                    }
                }
            }
            at_g[i] += SKEW_STEP * 16;
        }
    }
};

/* A thread's part of a step's rows of k, as pieces: chunks of them all one behind the other, THREADS apart. */
template <class T, class Tile> struct PieceFeed {
    static constexpr int ALL = Tile::rows * Tile::chunks, PASSES = (ALL + THREADS - 1) / THREADS;
    const char *at_g[PASSES];
    int bytes[PASSES];

    static __device__ __forceinline__ int row(int i) { return (threadIdx.x + i * THREADS) / Tile::chunks; }
    __device__ __forceinline__ void enter(const T *row0_g, int64_t row_stride, int cols) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const uintptr_t row_g = (uintptr_t)(row0_g + row(i) * row_stride);
            const int chunk = (threadIdx.x + i * THREADS) % Tile::chunks, skew = skew_of(row_g);
            at_g[i] = (const char *)(row_g - skew * 2) + chunk * 16;
            /* without skew the last chunk holds nothing of the piece */
            bytes[i] = skew == 0 && chunk == Tile::chunks - 1 ? 0 : skew_bytes(chunk, skew, cols);
        }
    }
    /* INSIDE: all rows are there, and none holds the tensor's first chunk. */
    template <bool INSIDE>
    __device__ __forceinline__ void copy(smem_addr slot_s, int64_t row_stride, int rows_valid, uintptr_t first) {
        const smem_addr to_s = slot_s + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            if ((i + 1) * THREADS > ALL && row(i) >= Tile::rows) break;
            if (INSIDE)
                cp_async_cg_16_l2_128b(to_s + i * THREADS * 16, at_g[i], bytes[i]);
            else
                copy_chunk(to_s + i * THREADS * 16, at_g[i], row(i) < rows_valid ? bytes[i] : 0, first);
            at_g[i] += Tile::rows * 2 * row_stride;
        }
    }
};

template <class T, class S, bool ALONG_N> struct WeightFeed;
template <class T, class S> struct WeightFeed<T, S, false> {
    StreamFeed<T, typename S::Weights> w;
    __device__ __forceinline__ void enter(const GemmProblem &p, const T *w_g, int) { w.enter(w_g, p.b_n); }
    template <bool INSIDE>
    __device__ __forceinline__ void copy(const Params &x, smem_addr smem_s, int slot, unsigned step, int n_valid) {
        w.template copy<INSIDE>(smem_s, slot, step, n_valid, x.p.k, x.first_w);
    }
};
template <class T, class S> struct WeightFeed<T, S, true> {
    PieceFeed<T, typename S::Weights> w;
    __device__ __forceinline__ void enter(const GemmProblem &p, const T *w_g, int n_left) {
        w.enter(w_g, p.b_k, n_left);
    }
    template <bool INSIDE>
    __device__ __forceinline__ void copy(const Params &x, smem_addr smem_s, int slot, unsigned step, int) {
        const int rows = (int)max((int64_t)0, min((int64_t)BLOCK_STEP, x.p.k - (int64_t)step * BLOCK_STEP));
        w.template copy<INSIDE>(smem_s + slot * S::Weights::bytes, x.p.b_k, rows, x.first_w);
    }
};

/* Where the block copies from next: it walks the steps of a tile, of which the last holds the ends of its streams, then
 * those of its next tile. */
template <class T, class S, bool ALONG_N> struct Copies {
    WeightFeed<T, S, ALONG_N> w;
    StreamFeed<T, typename S::Tokens> x;
    unsigned tile, step; /* step: of the tile */
    int n_valid, slot;

    __device__ __forceinline__ void enter(const GemmProblem &p, unsigned tile_) {
        tile = tile_, step = 0, n_valid = 0;
        if (tile >= (unsigned)p.tiles_n * (unsigned)p.batch) return; /* nothing more is read */
        const int64_t n0 = (int64_t)(tile % (unsigned)p.tiles_n) * p.group;
        const GemmPlace at = gemm_place(p, tile / (unsigned)p.tiles_n);
        n_valid = (int)min((int64_t)p.group, p.n - n0);
        /* columns past a piece and its skew do not matter */
        w.enter(p, (const T *)p.b + at.b + n0 * p.b_n, (int)min((int64_t)2 * S::SUM_LD, p.n - n0));
        x.enter((const T *)p.a + at.a, p.a_m);
    }
    __device__ __forceinline__ void copy(const Params &params, smem_addr smem_s, unsigned steps) {
        const GemmProblem &p = params.p;
        if (n_valid > 0) {
            if (step > 0 && (int64_t)(step + 1) * BLOCK_STEP <= p.k) {
                w.template copy<true>(params, smem_s, slot, step, n_valid);
                x.template copy<true>(smem_s + S::TOKENS_AT, slot, step, (int)p.m, p.k, 0);
            } else {
                w.template copy<false>(params, smem_s, slot, step, n_valid);
                x.template copy<false>(smem_s + S::TOKENS_AT, slot, step, (int)p.m, p.k, params.first_x);
            }
        }
        slot = slot + 1 == S::SLOTS ? 0 : slot + 1;
        if (++step == steps) enter(p, tile + gridDim.x);
    }
};

/* ---- 3 fragments --------------------------------------------------------------------------------------------- */
/* A lane's 8 neighbouring k of a row, from the chunk at at_s and the next one. */
__device__ __forceinline__ void load_share(uint32_t (&words)[4], smem_addr at_s, int skew) {
    const uint4 x = ld_shared_128(at_s), y = ld_shared_128(at_s + 16);
    uint32_t raw[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    skew_shift(raw, skew);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = raw[i];
}

__device__ __forceinline__ uint32_t load_pair(smem_addr low_s, smem_addr high_s) {
    return ld_shared_16(low_s) | (uint32_t)ld_shared_16(high_s) << 16;
}

/* ---- 4 the kernel -------------------------------------------------------------------------------------------- */
template <class T, int TOKENS, int ROWS, bool ALONG_N>
__global__ void __launch_bounds__(THREADS, 1) gemm_skinny_odd_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<TOKENS, ROWS, ALONG_N> S;
    typedef typename S::Weights W;
    typedef typename S::Tokens X;
    constexpr int MT = ROWS / 16, NT = TOKENS / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, q = lane % 4;
    const unsigned tiles = (unsigned)p.tiles_n * (unsigned)p.batch;
    const unsigned steps = (unsigned)((p.k + BLOCK_STEP - 1) / BLOCK_STEP) + 1;
    const smem_addr smem_s = cvta_to_shared(smem);
    float *sums = (float *)(smem + S::SUMS_AT);
    /* of 8 weights and 8 tokens, the one that a lane loads */
    const int row = ALONG_N ? lane / 4 : skew_row(lane / 4), token = row;
    const smem_addr w_base =
        smem_s + (ALONG_N ? warp * STEP * W::row_bytes : row * W::row_bytes + warp * STEP * 2 + q * 16);
    const smem_addr x_base =
        smem_s + S::TOKENS_AT + token * X::row_bytes + warp * STEP * 2 + (ALONG_N ? q * 4 : q * 16);

    Copies<T, S, ALONG_N> next;
    next.slot = 0;
    next.enter(p, blockIdx.x);
    griddepcontrol_wait(); /* what the kernel before wrote is there, and what it reads may be overwritten */
    griddepcontrol_launch_dependents();
    for (int j = 0; j < S::AHEAD; ++j) {
        next.copy(x, smem_s, steps);
        cp_async_commit_group();
    }
    int slot = S::SLOTS - 1; /* of the step before */
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t n0 = (int64_t)(tile % (unsigned)p.tiles_n) * p.group;
        const GemmPlace at = gemm_place(p, tile / (unsigned)p.tiles_n);
        const T *w_g = (const T *)p.b + at.b + n0 * p.b_n;
        const int x_skew = skew_of((uintptr_t)((const T *)p.a + at.a + token * p.a_m));
        const int w_skew = skew_of((uintptr_t)(w_g + (ALONG_N ? 2 * q * p.b_k : row * p.b_n)));
        const int odd_skew = skew_of((uintptr_t)(w_g + (2 * q + 1) * p.b_k));
        float sum[MT][NT][4] = {};
        for (unsigned step = 0; step < steps; ++step) {
            cp_async_wait_group<S::AHEAD - 1>();
            __syncthreads(); /* the step is in, for all threads; all have read the slot that is filled next */
            next.copy(x, smem_s, steps);
            cp_async_commit_group();
            if (step == 0) {
                slot = slot + 1 == S::SLOTS ? 0 : slot + 1;
                continue; /* its rows' ends come with the next one */
            }
            const smem_addr x_s = x_base + slot * (SKEW_STEP * 16);
            if constexpr (ALONG_N) {
                const smem_addr even_s = w_base + slot * W::bytes + skew_element(W::chunks, lane, 0, w_skew),
                                odd_s = w_base + slot * W::bytes + skew_element(W::chunks, lane, 1, odd_skew);
#pragma unroll
                for (int kk = 0; kk < K16; ++kk) {
                    uint32_t b[NT][2];
#pragma unroll
                    for (int t = 0; t < NT; ++t)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const smem_addr pair_s = x_s + x_skew * 2 + t * 8 * X::row_bytes + (kk * 16 + h * 8) * 2;
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
                const smem_addr w_s = w_base + slot * (SKEW_STEP * 16);
                uint32_t b[NT][2 * K16];
#pragma unroll
                for (int t = 0; t < NT; ++t) load_share(b[t], x_s + t * 8 * X::row_bytes, x_skew);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    uint32_t low[2 * K16], high[2 * K16]; /* rows 0 to 7 and 8 to 15 of the sixteen */
                    load_share(low, w_s + i * 16 * W::row_bytes, w_skew);
                    load_share(high, w_s + (i * 16 + 8) * W::row_bytes, w_skew);
#pragma unroll
                    for (int kk = 0; kk < K16; ++kk) {
                        const uint32_t a[4] = {low[2 * kk], high[2 * kk], low[2 * kk + 1], high[2 * kk + 1]};
#pragma unroll
                        for (int t = 0; t < NT; ++t) mma_add<T>(sum[i][t], a, b[t] + 2 * kk);
                    }
                }
            }
            slot = slot + 1 == S::SLOTS ? 0 : slot + 1;
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
                    sums[warp * S::WARP_SUMS + (ALONG_N ? column : skew_row(column)) * S::SUM_LD + i * 16 + e / 2 * 8 +
                         row] = sum[i][t][e];
                }
            __syncthreads(); /* all sums are in */
            const int tokens = min(8, (int)p.m - t * 8);
#pragma unroll 1
            for (int i = thread; i < tokens * ROWS; i += THREADS) {
                const int of_token = i / ROWS, of_row = i % ROWS;
                float total = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total += sums[w * S::WARP_SUMS + of_token * S::SUM_LD + of_row];
                if (of_row < p.group && n0 + of_row < p.n)
                    epilogue_cols<T, 1>(p.epilogue, at, t * 8 + of_token, n0 + of_row, 1, &total);
            }
        }
    }
    cp_async_wait_group<0>();
}

/* ---- 6 the launch -------------------------------------------------------------------------------------------- */
bool fits(const GemmProblem &p) {
    if (p.m > SKINNY_ODD_MAX_TOKENS || p.m == 0 || p.k < SKINNY_ODD_MIN_K) return false;
    /* rows of k that do not come one after the other: any step might hold the tensor's first chunk */
    return p.a_k == 1 && (p.b_k == 1 || (p.b_n == 1 && p.b_k > 0));
}

/* R: as many weights a tile as give every SM equally many tiles. */
bool plan(const gk_context *ctx, const void *arguments, GemmProblem *p) {
    if (!skinny_problem((const gk_gemm_args *)arguments, SKINNY_ODD_MAX_TOKENS, fits, p)) return false;
    const int64_t sms = gk_gpu_of(ctx->index)->num_sms, rows = gk_max_i64(1, p->n * p->batch);
    const int64_t most = p->m > SKINNY_MAX_TOKENS || rows <= SKINNY_ODD_ROWS * sms ? SKINNY_ODD_ROWS : SKINNY_ROWS;
    const int64_t rounds = gk_ceil_div(rows, most * sms);
    p->group = (int)gk_round_up(gk_ceil_div(rows, rounds * sms), 8);
    p->tiles_m = 1, p->tiles_n = (int)gk_ceil_div(p->n, p->group), p->splits = 1;
    return (double)p->tiles_n * (double)p->batch < INT32_MAX && p->k < INT32_MAX;
}

extern const gk_cuda_row *const odd_rows;
extern const int num_odd_rows;

const gk_cuda_row *choose(const gk_context *ctx, const void *args) {
    const gk_dtype dtype = ((const gk_gemm_args *)args)->a.dtype;
    GemmProblem p;
    if ((dtype != GK_BF16 && dtype != GK_F16) || !plan(ctx, args, &p)) return NULL;
    if (p.n * p.batch < (p.m > SKINNY_MAX_TOKENS ? SKINNY_ODD_LEAST_64 : SKINNY_ODD_LEAST_16)) return NULL;
    return skinny_row(odd_rows, num_odd_rows, ctx, dtype, p);
}

bool takes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    GemmProblem p;
    return plan(ctx, args, &p) && skinny_serves(row, ctx, p);
}

/* The lowest address of a [batch][x][k] operand. */
uintptr_t lowest(const void *data, int64_t x, int64_t k, int64_t x_stride, int64_t k_stride, const GemmProblem &p,
                 const int64_t *batch) {
    int64_t at = gk_min_i64(0, (x - 1) * x_stride) + gk_min_i64(0, (k - 1) * k_stride);
    for (int d = 0; d < p.ndim; ++d) at += gk_min_i64(0, (p.shape[d] - 1) * batch[d]);
    return (uintptr_t)data + (uintptr_t)(at * 2);
}

template <class T, int TOKENS, int ROWS, bool ALONG_N> gk_status start(const gk_context *ctx, Params *x) {
    typedef Smem<TOKENS, ROWS, ALONG_N> S;
    GemmProblem &p = x->p;
    x->first_w = lowest(p.b, p.n, p.k, p.b_n, p.b_k, p, p.b_batch);
    x->first_x = lowest(p.a, p.m, p.k, p.a_m, p.a_k, p, p.a_batch);
    return launch<gemm_skinny_odd_sm90a_kernel<T, TOKENS, ROWS, ALONG_N>>(
        "gk_gemm", ctx, dim3((unsigned)skinny_blocks(ctx, p)), THREADS, S::BYTES, *x, true);
}

template <class T, int TOKENS, int ROWS> gk_status run(const gk_cuda_row *, const gk_context *ctx, const void *args) {
    Params x;
    if (!plan(ctx, args, &x.p) || x.p.n == 0 || x.p.batch == 0) return GK_OK;
    return x.p.b_k == 1 ? start<T, TOKENS, ROWS, false>(ctx, &x) : start<T, TOKENS, ROWS, true>(ctx, &x);
}

void explain(const gk_cuda_row *row, const gk_context *ctx, const void *args, gk_explanation *out) {
    GemmProblem p;
    if (plan(ctx, args, &p)) skinny_explain(row, ctx, p, BLOCK_STEP, out);
}

template <int TOKENS, int ROWS> constexpr int smem_of() {
    return Smem<TOKENS, ROWS, false>::BYTES > Smem<TOKENS, ROWS, true>::BYTES ? Smem<TOKENS, ROWS, false>::BYTES
                                                                              : Smem<TOKENS, ROWS, true>::BYTES;
}

#define ROW(name, T, tokens, rows)                                                                                 \
    {                                                                                                              \
        "gemm_skinny_odd_sm90a_" name "_" #tokens "x" #rows, element<T>::dtype, takes, NULL, run<T, tokens, rows>, \
            explain, {                                                                                             \
            tokens, rows, smem_of<tokens, rows>()                                                                  \
        }                                                                                                          \
    }
#define ROWS_16(name, T)                                                                                        \
    ROW(name, T, 8, 32), ROW(name, T, 8, 64), ROW(name, T, 16, 32), ROW(name, T, 16, 64), ROW(name, T, 32, 32), \
        ROW(name, T, 64, 32)

const gk_cuda_row rows[] = {ROWS_16("bf16", __nv_bfloat16), ROWS_16("f16", __half)};
const gk_cuda_row *const odd_rows = rows;
const int num_odd_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_skinny_odd_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, choose};
