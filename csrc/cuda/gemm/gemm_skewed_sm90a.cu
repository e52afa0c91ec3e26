/* gemm_skewed_sm90a: out = activation(alpha a b + beta c + bias) for few rows of a and weights b that tma cannot read as they
 * lie: rows that do not begin at multiples of 16 bytes. bfloat16, float16; by mma, the weights by tma, read once.
 *
 * a [M <= 16, K] tokens, dense along k    b [K, N] weights, dense along k or along n    out [M, N]
 * no batch, any alignment, any other strides. With few columns of b the transposed product, out^T = b^T a^T.
 *
 * Lines of b (its rows along k or along n) C apart, 1, 2, 4 or 8, begin at one skew, whatever the stride: C classes, each a
 * matrix that tma reads from the 16 bytes around its first element on, `skew` elements early:
 *   along k  a tile has ROWS lines of one class. Position q of a line is k = q - skew, for all of them. What lies before a
 *            line, anything, is made zero in its fragments.
 *   along n  a tile has ROWS neighbouring n of all lines; a step's lie class after class. Position q of a line is
 *            n = q - skew: the sums of a class are the tile's from `skew` rows further up on, and but the last 8 rows are
 *            whole.
 * Tokens are copied in chunks of 16 bytes with what is around the step's k; the lanes read each k of their fragments where it
 * stands, and zeros for those outside.
 *
 * Grid: clusters of up to 4 blocks, each a part of a tile's steps of 128 of k, if there are fewer tiles than SMs; else blocks
 * that take tiles in turn. Block: 8 warps that multiply, each 16 of a step's k, which are of one class, with all of the tile's
 * weights as rows and the tokens as columns; four that copy.
 *
 * Shared memory: a ring of slots, each
 *   weights [2][ROWS][64 k] or [ROWS / 64][128 k][64 n]      swizzled by 128 bytes (layout.cuh)
 * as many windows of the tokens [16][SKEWED_WINDOW], as they lie; sums [8 warps][16][ROWS + 4] float, each class's where its
 * rows belong; totals [slot][ROWS] of all parts for the tokens whose results the block stores; the barriers.
 * Pipeline (slots full and empty: tma_ring.cuh):
 *   copies     x0 w0 x1 w1 x2 w2 | x3 w3 ..
 *   products            0     1     2 ..            a tile's last: [sums] [totals] [results]
 * What comes before the first copy and after the last product is half the time of 4096 squared, and all of its code is new to
 * the SM: it is short, and divisions are the host's.
 * Not here: batches, weights with two strides (gemm_skinny_odd_sm90a, gemm_sm80), float32 and float64 (gemm_plain). */
#include "../host/tensormap.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/tma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/tma_ring.cuh"
#include "epilogue.cuh"
#include "skewed.cuh"
#include "skinny.cuh"
#include "tiles.h"

namespace {

constexpr int TOKENS = SKEWED_MAX_TOKENS;
constexpr int SLOT_ALIGN = 1024;                             /* where tma's swizzle repeats */
constexpr int WARPS = SKEWED_STEP / 16, ADDERS = WARPS * 32; /* that multiply */
/* threads that copy, a token's window and a box of weights each; a warp's copies take it some 90 clocks each, one by one */
constexpr int COPY_WARPS = 4, COPIERS = SKEWED_COPIERS;
static_assert(COPIERS >= TOKENS && COPIERS >= LINE_CLASSES * 2, "all windows and all boxes");
constexpr int THREADS = ADDERS + COPY_WARPS * 32;
enum {
    ADDERS_BARRIER = 1
};

/* ---- 1 the call ---------------------------------------------------------------------------------------------- */
struct Params {
    CUtensorMap w[LINE_CLASSES]; /* [lines of a class][positions] */
    SkewedPlan plan;
    bool bare; /* nothing but the sums times alpha, in the operands' dtype */
    GemmProblem p;
};

template <int ROWS, bool ALONG_N> struct Smem {
    /* along k a tile [ROWS][64 k] for each 64 of a step's k, along n one [128 k][64 n] for each 64 of n */
    typedef smem_tile<ALONG_N ? SKEWED_STEP : ROWS, SKEWED_PANEL * 2> W;
    static constexpr int TILES = ALONG_N ? ROWS / SKEWED_PANEL : SKEWED_STEP / SKEWED_PANEL, SLOT = TILES * W::bytes;
    static constexpr int RAW_ROW = SKEWED_WINDOW * 2, RAW = TOKENS * RAW_ROW;
    static constexpr int WARP_SUMS = skewed_sums_bytes(ROWS, ALONG_N);
    static constexpr int TOTALS_BYTES = (TOKENS + 2) * ROWS * 4; /* of three parts 6 tokens each */
    static constexpr int ALL_TOTALS = 8;                         /* the barrier that counts them */
    static constexpr int OTHER =
        TOTALS_BYTES + WARPS * WARP_SUMS + tma_ring<SKEWED_SLOTS>::bytes + ALL_TOTALS + SLOT_ALIGN;
    static constexpr int SLOTS = hopper_slots(SLOT + RAW, OTHER, SKEWED_SLOTS);
    static constexpr int RAWS = SLOTS * SLOT, SUMS = RAWS + SLOTS * RAW, TOTALS = SUMS + WARPS * WARP_SUMS;
    static constexpr int BARRIERS = TOTALS + TOTALS_BYTES, TOTALS_BARRIER = BARRIERS + tma_ring<SLOTS>::bytes;
    static constexpr int BYTES = TOTALS_BARRIER + ALL_TOTALS + SLOT_ALIGN;
    static_assert(BYTES <= 232448 && SLOT % SLOT_ALIGN == 0 && SLOTS >= 3, "shared memory of a block");

    /* byte of element (row, token) of a warp's sums */
    static constexpr GK_HD int sum_at(coord c) { return skewed_sum_at(ROWS, ALONG_N, c.row, c.col); }
    static constexpr GK_HD int sum_ways(bool added) { /* stored by a lane one by one, added up by four */
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes[lane] = sum_at(added ? coord{lane * 4 % ROWS, lane * 4 / ROWS} : frag_c(lane, 0));
        return ways(bytes, added ? 16 : 4);
    }
    static_assert(sum_ways(false) == 1 && sum_ways(true) == 1, "no bank conflicts");
    static_assert(sum_at({0, 0}) % 16 == 0 && sum_at({0, 1}) % 16 == 0 && WARP_SUMS % 16 == 0, "four rows at a time");
};

/* ---- 2 tokens ------------------------------------------------------------------------------------------------ */
/* Bank conflicts of the lanes that read an element each of their warp's fragment. */
constexpr GK_HD int token_ways(int classes_log2) {
    SkewedPlan plan = {};
    plan.along_n = true, plan.classes_log2 = classes_log2;
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const coord c = frag_b16(lane, 0);
        bytes[lane] = (c.col * SKEWED_WINDOW + c.row * skewed_k_step(plan)) * 2;
    }
    return ways(bytes, 2);
}
static_assert(token_ways(0) == 1 && token_ways(1) <= 2 && token_ways(2) <= 4 && token_ways(3) <= 4,
              "windows begin at multiples of 16 bytes: every eighth element falls into 8 banks at best");

/* A lane's fragments of its warp's 16 k of a step: B of the products with tokens 0 .. 7 and 8 .. 15. */
struct TokenLane {
    int window[2]; /* byte in a slot's window of the first element of either */
    int k, step;   /* its k in step 0; from one to the next */

    __device__ __forceinline__ TokenLane(const SkewedPlan &plan, int tile, int warp, int lane, int row_bytes) {
        k = skewed_k(plan, tile, 0, warp * 16 + frag_b16(lane, 0).row);
        step = skewed_k_step(plan);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int m = frag_b16(lane, 0).col + 8 * j;
            window[j] = m * row_bytes + (k - skewed_window(plan, tile, 0) + skewed_token(plan, m)) * 2;
        }
    }
    /* of the step that begins at k0; those outside 0 .. k_end - 1 are zeros, whatever lies there */
    __device__ __forceinline__ void load(uint32_t *x, smem_addr raw_s, int k0, int k_end) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int away = frag_b16(0, e).row * step, at = k0 + k + away;
                const smem_addr at_s = raw_s + window[j] + away * 2;
                const uint16_t low = ld_shared_16(at_s), high = ld_shared_16(at_s + step * 2);
                x[2 * j + e / 2] = ((unsigned)at < (unsigned)k_end ? low : 0u) |
                                   ((unsigned)(at + step) < (unsigned)k_end ? (uint32_t)high << 16 : 0u);
            }
        }
    }
};

/* ---- 3 the kernel -------------------------------------------------------------------------------------------- */
template <class T, int ROWS, bool ALONG_N>
__global__ void __launch_bounds__(THREADS, 1) gemm_skewed_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<ROWS, ALONG_N> S;
    typedef typename S::W W;
    constexpr int BLOCKS = ROWS / 16;
    extern __shared__ __align__(1024) unsigned char smem[];
    const GemmProblem &p = x.p;
    const SkewedPlan &plan = x.plan;
    const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const smem_addr ring_s = (cvta_to_shared(smem) + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    const smem_addr sums_s = ring_s + S::SUMS, totals_s = ring_s + S::TOTALS;
    const smem_addr all_totals_s = ring_s + S::TOTALS_BARRIER; /* a phase: all parts' totals of the block's tokens */
    tma_ring<S::SLOTS> ring(ring_s + S::BARRIERS);
    const bool in_parts = plan.parts > 1;
    const int part = blockIdx.x, first_tile = blockIdx.y, tile_step = gridDim.y;
    const int step0 = plan.first_step[part], step1 = plan.first_step[part + 1];

    if (thread == 0) {
        ring.init(WARPS, COPIERS);
        mbarrier_init(all_totals_s, 1);
        fence_mbarrier_init();
        const int tokens = plan.first_token[part + 1] - plan.first_token[part];
        mbarrier_arrive_expect_tx(all_totals_s, tokens * plan.parts * ROWS * 4);
    }
    if (in_parts) barrier_cluster_arrive(); /* this block runs: others may write to it */
    __syncthreads();
    griddepcontrol_launch_dependents();

    if (warp >= WARPS) {
        /* ---- 3.1 copies ---- */
        const int m = lane * COPY_WARPS + warp - WARPS; /* a token, and a box */
        if (lane < COPIERS / COPY_WARPS) {
            const int before = skewed_token(plan, m), end = m < p.m ? ((int)p.k + before + 7) / 8 * 8 : 0;
            const char *const token_g = (const char *)((const uint16_t *)p.a + m * p.a_m - before);
            const bool has_box = m < skewed_boxes(plan, S::TILES);
            const int lines = skewed_box_lines(plan), panel = m % S::TILES, line = ALONG_N ? m / S::TILES * lines : 0;
            const int box_bytes = has_box ? lines * SKEWED_PANEL * 2 : 0;
            const smem_addr box_s = ring_s + panel * W::bytes + line * W::row_bytes;
            const smem_addr window_s = ring_s + S::RAWS + m * S::RAW_ROW;
            const CUtensorMap *map = &x.w[ALONG_N && has_box ? skewed_class(plan, line) : 0];
            const int line0 = ALONG_N ? skewed_line(plan, 0, line) : 0;
            const uint64_t once = l2_first_out();
            prefetch_tensormap(ALONG_N ? map : &x.w[skewed_class_of(plan, first_tile)]);
            griddepcontrol_wait(); /* what the kernel before wrote is there */
            for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
                const int first = skewed_first(plan, tile), window0 = skewed_window(plan, tile, 0);
                if (!ALONG_N) map = &x.w[skewed_class_of(plan, tile)];
                for (int step = step0; step < step1; ++step, ring.advance()) {
                    const int window = window0 + step * SKEWED_STEP, from = max(window, 0);
                    const int bytes = max(min(window + SKEWED_WINDOW, end) - from, 0) * 2;
                    ring.wait_empty();
                    mbarrier_arrive_expect_tx(ring.full(), bytes + box_bytes);
                    if (bytes > 0)
                        bulk_load(window_s + ring.slot * S::RAW + (from - window) * 2, token_g + (int64_t)from * 2,
                                  bytes, ring.full());
                    if (has_box)
                        tma_load_5d_by(
                            box_s + ring.slot * S::SLOT, map,
                            {{ALONG_N ? first + panel * SKEWED_PANEL : step * SKEWED_STEP + panel * SKEWED_PANEL,
                              ALONG_N ? line0 + step * lines : first}},
                            ring.full(), once);
                }
            }
        }
        __syncwarp();
        if (in_parts) barrier_cluster_wait(); /* no thread leaves before all blocks run */
        return;
    }

    /* ---- 3.2 results: each block has its tokens', the totals of all parts in their order ---- */
    const GemmEpilogue &epilogue = p.epilogue;
    const int row = thread % ROWS;
    const int token0 = plan.first_token[part] + thread / ROWS, token1 = plan.first_token[part + 1];
    const smem_addr own_s = totals_s + thread * 4;
    int n = 0;
    T *out_g = NULL; /* of the thread's first token */
    const auto place = [&](int tile) {
        n = skewed_n(plan, tile, row);
        out_g = (T *)epilogue.out + token0 * epilogue.out_row + n * epilogue.out_col;
    };
    const auto store = [&]() {
        if (row >= plan.rows || n < 0 || n >= p.n) return;
        T *to_g = out_g;
        smem_addr at_s = own_s;
#pragma unroll 1
        for (int token = token0; token < token1; token += ADDERS / ROWS) {
            float total[1] = {};
#pragma unroll
            for (int j = 0; j < SKEWED_PARTS; ++j)
                if (j < plan.parts) total[0] += ld_shared_f32(at_s + j * plan.most_tokens * ROWS * 4);
            if (x.bare)
                *to_g = from_acc<T>(total[0] * (float)epilogue.alpha);
            else
                epilogue_cols<T, 1>(epilogue, GemmPlace{}, token, n, 1, total);
            at_s += ADDERS * 4, to_g += ADDERS / ROWS * epilogue.out_row;
        }
    };

    /* ---- 3.3 products ---- */
    have(epilogue.alpha), have(epilogue.out), have(epilogue.out_row), have(epilogue.out_col);
    /* the warp's k of the first 16 rows, in slot 0 */
    const smem_addr w_s = ALONG_N ? frag_a_trans_base<W>(ring_s, lane, warp * 16, 0)
                                  : frag_a_base<W>(ring_s + warp / 4 * W::bytes, lane, 0, warp % 4 * 2);
    /* its sums, each class's as many rows up as its lines begin late */
    const int up = ALONG_N ? skewed_shift(plan, skewed_class(plan, warp * 16)) : 0;
    const coord first_sum = frag_c(lane, 0);
    const smem_addr mine_s = sums_s + warp * S::WARP_SUMS + S::sum_at({first_sum.row - up, first_sum.col});
    for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
        place(tile);
        const TokenLane tokens(plan, tile, warp, lane, S::RAW_ROW);
        const uint32_t head = ALONG_N || warp > 0 ? ~0u : skewed_keep(lane, plan.skew[skewed_class_of(plan, tile)]);
        float sum[BLOCKS][2][4] = {};
        for (int step = step0; step < step1; ++step, ring.advance()) {
            const smem_addr at_s = w_s + ring.slot * S::SLOT;
            uint32_t a[BLOCKS][4], b[4];
            ring.wait_full();
            tokens.load(b, ring_s + S::RAWS + ring.slot * S::RAW, step * SKEWED_STEP, (int)p.k);
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                if constexpr (ALONG_N)
                    load_frag_a_trans(a[i], W::along(at_s, i % 4 * 2) + i / 4 * W::bytes);
                else
                    load_frag_a(a[i], W::down(at_s, i * 16));
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty());
            const uint32_t keep = step == 0 ? head : ~0u;
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                if (!ALONG_N) a[i][0] &= keep, a[i][1] &= keep; /* what lies before the lines */
                mma_add<T>(sum[i][0], a[i], b), mma_add<T>(sum[i][1], a[i], b + 2);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (p.m > j * 8) {
#pragma unroll
                for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const coord c = frag_c(0, e);
                        const int away = S::sum_at({c.row + i * 16, c.col + j * 8}) - S::sum_at({0, 0});
                        st_shared_f32(mine_s + away, sum[i][j][e]);
                    }
            }
        bar_sync(ADDERS_BARRIER, ADDERS);     /* the sums are there, and the totals of the tile before are read */
        if (in_parts) barrier_cluster_wait(); /* all blocks run, and their barriers are made */
        /* their totals, four rows of a token a thread, to the block that stores them */
        constexpr int QUADS = ROWS / 4, EACH = ADDERS / QUADS;
        const int quad = thread % QUADS;
#pragma unroll
        for (int i = 0; i < TOKENS; i += EACH) {
            const int token = thread / QUADS + i;
            if (token >= p.m) break;
            float4 total = {};
#pragma unroll
            for (int j = 0; j < WARPS; ++j) {
                const uint4 x = ld_shared_128(sums_s + S::sum_at({quad * 4, token}) + j * S::WARP_SUMS);
                total.x += __uint_as_float(x.x), total.y += __uint_as_float(x.y);
                total.z += __uint_as_float(x.z), total.w += __uint_as_float(x.w);
            }
            const int owner = skewed_owner(plan, token);
            const int slot = part * plan.most_tokens + token - plan.first_token[owner];
            const smem_addr to_s = totals_s + (slot * ROWS + quad * 4) * 4;
            if (in_parts)
                st_async_128(mapa(to_s, owner), total.x, total.y, total.z, total.w, mapa(all_totals_s, owner));
            else
                st_shared_128(to_s, total);
        }
        if (in_parts) /* each cluster has one tile; once they have come nobody writes here any more */
            mbarrier_wait(all_totals_s, 0);
        else
            bar_sync(ADDERS_BARRIER, ADDERS); /* the totals are there, and the sums are read */
        griddepcontrol_wait();                /* for the bias and c, and to write what the kernel before may read */
        store();
    }
}

/* ---- 4 the launch -------------------------------------------------------------------------------------------- */
/* Without batches, lines that lie one behind the other. */
bool fits(const GemmProblem &p) {
    if (p.m < 1 || p.m > SKEWED_MAX_TOKENS || p.ndim > 0 || p.n < SKEWED_MIN_N || p.k < SKEWED_MIN_K) return false;
    if (p.k > INT32_MAX / 2 || p.n > INT32_MAX / 2 || p.a_k != 1) return false;
    const int64_t line = p.b_k == 1 ? p.b_n : p.b_k;
    return (p.b_k == 1 || p.b_n == 1) && line >= (p.b_k == 1 ? p.k : p.n) && line < (int64_t)1 << 32;
}

/* The problem and its plan, if the row serves it. */
bool plan_of(const gk_cuda_row *row, const gk_context *ctx, const void *args, GemmProblem *p, SkewedPlan *plan) {
    if (!skinny_problem((const gk_gemm_args *)args, SKEWED_MAX_TOKENS, fits, p)) return false;
    *plan = skewed_plan(*p, row->key[SKINNY_KEY_ROWS], gk_gpu_of(ctx->index)->num_sms);
    return smem_fits(ctx, row->key[SKINNY_KEY_SMEM]);
}

bool takes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    GemmProblem p;
    SkewedPlan plan;
    return plan_of(row, ctx, args, &p, &plan);
}

size_t workspace_bytes(const gk_cuda_row *, const gk_context *, const void *) { return 0; }

extern const gk_cuda_row *const skewed_rows;
extern const int num_skewed_rows;

/* The row whose blocks read the least; large tiles only where that is worth while. */
const gk_cuda_row *choose(const gk_context *ctx, const void *args) {
    const gk_cuda_row *best = NULL;
    int64_t least = INT64_MAX;
    for (const gk_cuda_row *row = skewed_rows; row < skewed_rows + num_skewed_rows; ++row) {
        GemmProblem p;
        SkewedPlan plan;
        if (row->dtype != ((const gk_gemm_args *)args)->a.dtype || !plan_of(row, ctx, args, &p, &plan)) continue;
        if (p.n * p.k < SKEWED_LEAST) continue;
        const bool twice = plan.along_n && plan.classes_log2 > 0; /* small tiles read an eighth of the weights twice */
        if (plan.cost < least - (best && !twice ? least / SKEWED_LARGE_GAIN : 0)) best = row, least = plan.cost;
    }
    return best;
}

template <class T, int ROWS, bool ALONG_N> gk_status start(const gk_context *ctx, Params *x) {
    typedef Smem<ROWS, ALONG_N> S;
    const GemmProblem &p = x->p;
    const SkewedPlan &plan = x->plan;
    const int64_t lines = ALONG_N ? p.k : p.n, line = ALONG_N ? p.b_k : p.b_n, inner = ALONG_N ? p.n : p.k;
    for (int j = 0; j < skewed_classes(plan); ++j) {
        const TensorShape w = {(const uint16_t *)p.b + j * line - plan.skew[j],
                               element<T>::dtype,
                               {inner + plan.skew[j], lines_of_class(lines, plan.classes_log2, j), 1, 1, 1},
                               {1, line << plan.classes_log2, 0, 0, 0},
                               false};
        const gk_status status = make_tensor_map("gk_gemm", w, SKEWED_PANEL, skewed_box_lines(plan), &x->w[j]);
        if (status != GK_OK) return status;
    }
    const int64_t most = gk_gpu_of(ctx->index)->num_sms;
    const dim3 grid(plan.parts, (unsigned)(plan.parts > 1 ? plan.tiles : gk_min_i64(plan.tiles, most)));
    return launch<gemm_skewed_sm90a_kernel<T, ROWS, ALONG_N>>("gk_gemm", ctx, grid, THREADS, S::BYTES, *x, true,
                                                              plan.parts);
}

template <class T, int ROWS> gk_status run(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    Params x;
    if (!plan_of(row, ctx, args, &x.p, &x.plan))
        return gk_fail(GK_ERR_UNSUPPORTED, "gk_gemm: %s does not take this call", row->name);
    const GemmEpilogue &e = x.p.epilogue;
    x.bare = !e.c && !e.bias && !e.preact && e.activation == GK_ACT_NONE && e.out_dtype == row->dtype;
    return x.plan.along_n ? start<T, ROWS, true>(ctx, &x) : start<T, ROWS, false>(ctx, &x);
}

void explain(const gk_cuda_row *row, const gk_context *ctx, const void *args, gk_explanation *out) {
    GemmProblem p;
    SkewedPlan plan;
    if (!plan_of(row, ctx, args, &p, &plan)) return;
    out->tile[0] = row->key[SKINNY_KEY_TOKENS], out->tile[1] = plan.rows, out->tile[2] = SKEWED_STEP;
    out->tasks = plan.tiles * plan.parts;
    out->waves =
        plan.parts > 1 ? 1.0 : (double)gk_ceil_div(plan.tiles, gk_gpu_of(ctx->index)->num_sms); /* tiles in turn */
}

template <int ROWS> constexpr int smem_of() {
    return Smem<ROWS, false>::BYTES > Smem<ROWS, true>::BYTES ? Smem<ROWS, false>::BYTES : Smem<ROWS, true>::BYTES;
}

#define ROW(name, T, rows)                                                                                          \
    {                                                                                                               \
        "gemm_skewed_sm90a_" name "_16x" #rows, element<T>::dtype, takes, workspace_bytes, run<T, rows>, explain, { \
            TOKENS, rows, smem_of<rows>()                                                                           \
        }                                                                                                           \
    }

const gk_cuda_row rows[] = {
    ROW("bf16", __nv_bfloat16, 64),
    ROW("bf16", __nv_bfloat16, 128),
    ROW("f16", __half, 64),
    ROW("f16", __half, 128),
};
const gk_cuda_row *const skewed_rows = rows;
const int num_skewed_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_skewed_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, choose};
