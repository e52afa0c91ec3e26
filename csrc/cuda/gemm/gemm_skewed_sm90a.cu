/* gemm_skewed_sm90a: out = activation(alpha a b + beta c + bias) for few rows of a and weights b that tma cannot read as they
 * lie: rows that do not begin at multiples of 16 bytes. bfloat16, float16; by wgmma, the weights by tma, read once.
 *
 * a [M <= 16, K] tokens, dense along k    b [K, N] weights, dense along k or along n    out [M, N]
 * no batch, any alignment, any other strides. With few columns of b the transposed product, out^T = b^T a^T.
 *
 * Lines of b (its rows along k or along n) C apart, 1, 2, 4 or 8, begin at one skew, whatever the stride: C classes, each a
 * matrix that tma reads from the 16 bytes around its first element on, `skew` elements early:
 *   along k  a tile has ROWS lines of one class. Position q of a line is k = q - skew, for all of them. What lies before a
 *            line, anything, is made zero in shared memory.
 *   along n  a tile has ROWS neighbouring n of all lines; a step's lie class after class, with sums of their own. Position q
 *            of a line is n = q - skew: the sums of a class go to the tile's `skew` rows further up, and but the last 8 rows
 *            are whole.
 * Tokens are copied with what is around the step's k, all by one box where tma can read them, else in chunks of 16 bytes, and
 * put where each k stands by the lanes.
 *
 * Grid: clusters of up to 4 blocks, each a part of a tile's steps of 128 of k, if there are fewer tiles than SMs; else blocks
 * that take tiles in turn. Block: warpgroups that multiply, 64 weights each as wgmma's rows, tokens its columns; 4 warps that
 * put tokens in place; three that copy.
 *
 * Shared memory: a ring of slots, each STEP_BLOCKS times
 *   weights [ROWS][64 k] or [ROWS / 64][64 k][64 n], tokens [16][64 k]      swizzled by 128 bytes (wgmma.cuh)
 * as many windows of the tokens [16][SKEWED_WINDOW], as they lie; sums [16][ROWS + 4] float, the barriers.
 * Pipeline (slots full and empty: tma_ring.cuh): full, when a slot's weights have come and its tokens are in place.
 *   copies     x0 w0 x1 w1 x2 w2 | x3 w3 ..
 *   tokens        0     1     2  ..
 *   products         0     1     2 ..            a tile's last: [sums] [results]
 * Not here: batches, weights with two strides (gemm_skinny_odd_sm90a, gemm_sm80), float32 and float64 (gemm_plain). */
#include "../host/tensormap.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/tma_ring.cuh"
#include "../tile/wgmma.cuh"
#include "epilogue.cuh"
#include "skewed.cuh"
#include "skinny.cuh"
#include "tiles.h"

namespace {

constexpr int TOKENS = SKEWED_MAX_TOKENS, K64 = 64, STEP_BLOCKS = SKEWED_STEP / K64, STEP_K16 = SKEWED_STEP / 16;
constexpr int EACH_MAKES = SKEWED_STEP; /* threads of a group that puts tokens in place, one for each k of a step */
constexpr int WINDOW_WARPS = 2;         /* that copy them; a copy takes a lane's instruction some 50 clocks */
enum {
    ALL_BARRIER = 1, /* of the warps that multiply; one warpgroup's: + 1 + warpgroup */
};

/* ---- 1 the call ---------------------------------------------------------------------------------------------- */
struct Params {
    CUtensorMap w[SKEWED_CLASSES]; /* [lines of a class][positions] */
    SkewedPlan plan;
    CUtensorMap tokens; /* if `boxed`: [m][k] */
    bool boxed;         /* tma reads the tokens as they lie: one copy for all windows of a step */
    bool bare;          /* nothing but the sums times alpha, in the operands' dtype */
    GemmProblem p;
};

/* Bank conflicts: of 32 of a step's k where they are put, and where their class has them in a window. */
constexpr GK_HD int put_ways() {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = wgmma_tile<TOKENS, false>::offset_of(0, lane);
    return ways(bytes, 2);
}
constexpr GK_HD int window_ways(int classes_log2) {
    SkewedPlan plan = {};
    plan.along_n = true, plan.classes_log2 = classes_log2;
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = 2 * skewed_k(plan, 0, 0, lane);
    return ways(bytes, 2);
}
static_assert(put_ways() == 1 && window_ways(0) == 1 && window_ways(1) == 1, "tokens are read and put in one pass;");
static_assert(window_ways(2) <= 2 && window_ways(3) <= 2, "every fourth and eighth element in two");

template <int ROWS, bool ALONG_N> struct Smem {
    typedef wgmma_tile<ROWS, ALONG_N> W;
    typedef wgmma_tile<TOKENS, false> X;
    /* tiles of 64 rows have short steps, for which two groups put tokens in place in turns. Each comes to slots of its own,
     * or it could take an older phase of a barrier for its step's: tests/test_pipeline_few_rows.py */
    static constexpr int ADDERS = ROWS * 2, GROUPS = ROWS < 128 ? 2 : 1, MAKERS = GROUPS * EACH_MAKES;
    static constexpr int THREADS = ADDERS + MAKERS + 32 + WINDOW_WARPS * 32;
    static constexpr int BLOCK = W::bytes + X::bytes, SLOT = STEP_BLOCKS * BLOCK;
    static constexpr int RAW_ROW = SKEWED_WINDOW * 2, RAW = TOKENS * RAW_ROW;
    static constexpr int LD = ROWS + 4, SUMS_BYTES = TOKENS * LD * 4;
    static constexpr int SLOTS = skewed_slots(SLOT + RAW, SUMS_BYTES + WGMMA_BLOCK_BYTES) / GROUPS * GROUPS;
    static constexpr int RAWS = SLOTS * SLOT, SUMS = RAWS + SLOTS * RAW, BARRIERS = SUMS + SUMS_BYTES;
    static constexpr int COPIED = BARRIERS + tma_ring<SLOTS>::bytes;     /* barriers of the tokens' copies */
    static constexpr int BYTES = COPIED + SLOTS * 8 + WGMMA_BLOCK_BYTES; /* to align the ring */
    static_assert(BYTES <= 232448 && BLOCK % WGMMA_BLOCK_BYTES == 0 && SLOTS >= 3, "shared memory of a block");
    static_assert(wgmma_turned_ways(LD) == 1, "lanes store their sums to 32 banks");
};

/* ---- 2 sums along n ------------------------------------------------------------------------------------------ */
/* Of a lane's sums the i-th in its warp's first 8 rows; that 8 rows below it is 2 further on. */
constexpr GK_HD int low_of(int i) { return i / 2 * 4 + i % 2; }
static_assert(wgmma_d(0, 0, low_of(1)).row == 0 && wgmma_d(0, 0, low_of(3) + 2).row == 8, "8 rows apart");

/* All classes' sums of the warp's 16 rows, each class's moved up by its own number of rows, and of 8 rows above: what row j of
 * 8 has goes to row j - shift of the same 8, or of the 8 above. all may be the first of sum. */
__device__ __forceinline__ void move_up(const SkewedPlan &plan, float (&sum)[STEP_K16][TOKENS / 2],
                                        float (&all)[TOKENS / 2], float (&up)[TOKENS / 4], int lane) {
    float moved[TOKENS / 2] = {};
#pragma unroll
    for (int kk = 0; kk < STEP_K16; ++kk) {
        const int cls = skewed_class(plan, kk * 16), shift = skewed_shift(plan, cls);
        if (kk + 1 < STEP_K16 && skewed_class(plan, kk * 16 + 16) == cls) {
#pragma unroll
            for (int e = 0; e < TOKENS / 2; ++e) sum[(kk + 1) % STEP_K16][e] += sum[kk][e];
            continue;
        }
        const int row = lane / 4, from = (row + shift) % 8 * 4 + lane % 4;
        const bool gives_up = row < shift, takes_up = row + shift >= 8;
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const float low = sum[kk][low_of(i)], high = sum[kk][low_of(i) + 2];
            const float x = __shfl_sync(0xffffffff, gives_up ? high : low, from);
            const float y = __shfl_sync(0xffffffff, gives_up ? low : high, from);
            moved[low_of(i)] += x, moved[low_of(i) + 2] += takes_up ? 0.f : y, up[i] += takes_up ? y : 0.f;
        }
    }
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) all[e] = moved[e];
}

/* ---- 3 the kernel -------------------------------------------------------------------------------------------- */
template <class T, int ROWS, bool ALONG_N>
__global__ void __launch_bounds__(Smem<ROWS, ALONG_N>::THREADS, 1)
    gemm_skewed_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<ROWS, ALONG_N> S;
    typedef typename S::W W;
    typedef typename S::X X;
    constexpr int ADDERS = S::ADDERS, MAKERS = S::MAKERS, WARPGROUPS = ADDERS / 128;
    extern __shared__ __align__(1024) unsigned char smem[];
    const GemmProblem &p = x.p;
    const SkewedPlan &plan = x.plan;
    const int thread = threadIdx.x, lane = thread % 32, block_warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const int warpgroup = block_warp / 4, warp = block_warp % 4;
    const smem_addr ring_s = (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    const smem_addr sums_s = ring_s + S::SUMS;
    tma_ring<S::SLOTS> ring(ring_s + S::BARRIERS);
    const int part = plan.parts > 1 ? (int)cluster_ctarank() : 0;
    const int first_tile = blockIdx.x / plan.parts, tile_step = gridDim.x / plan.parts;
    const int step0 = plan.steps * part / plan.parts, step1 = plan.steps * (part + 1) / plan.parts;

    if (thread == 0) {
        ring.init(WARPGROUPS, 1 + EACH_MAKES / 32);
        for (int i = 0; i < S::SLOTS; ++i) mbarrier_init(ring_s + S::COPIED + 8 * i, WINDOW_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_launch_dependents();

    if (block_warp == (ADDERS + MAKERS) / 32) {
        /* ---- 3.1 weights ---- */
        if (elect_one()) {
            const int bytes = STEP_BLOCKS * (ALONG_N ? ROWS : plan.rows) * WGMMA_ROW_BYTES, box = skewed_box(plan);
            const uint64_t once = l2_first_out();
            griddepcontrol_wait(); /* what the kernel before wrote is there */
            for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
                const int first = skewed_first(plan, tile);
                for (int step = step0; step < step1; ++step, ring.advance()) {
                    const smem_addr slot_s = ring_s + ring.slot * S::SLOT;
                    ring.wait_empty();
                    mbarrier_arrive_expect_tx(ring.full(), bytes);
                    if (ALONG_N) {
                        for (int line = 0; line < SKEWED_STEP; line += box) {
                            const CUtensorMap *const map = &x.w[skewed_class(plan, line)];
                            const smem_addr to_s = slot_s + line / K64 * S::BLOCK + line % K64 * WGMMA_ROW_BYTES;
#pragma unroll
                            for (int j = 0; j < W::panels; ++j)
                                tma_load_5d_by(to_s + j * W::panel_bytes, map,
                                               {{first + j * 64, skewed_line(plan, step, line)}}, ring.full(), once);
                        }
                    } else {
#pragma unroll
                        for (int i = 0; i < STEP_BLOCKS; ++i)
                            tma_load_5d_by(slot_s + i * S::BLOCK, &x.w[skewed_class_of(plan, tile)],
                                           {{step * SKEWED_STEP + i * K64, first}}, ring.full(), once);
                    }
                }
            }
        }
        __syncwarp();
    } else if (block_warp > (ADDERS + MAKERS) / 32) {
        /* ---- 3.2 windows of the tokens, a lane for each ---- */
        const int m = lane * WINDOW_WARPS + block_warp - (ADDERS + MAKERS) / 32 - 1, before = skewed_token(plan, m);
        const int end = m < p.m ? ((int)p.k + before + 7) / 8 * 8 : 0;
        const char *const token_g = (const char *)((const uint16_t *)p.a + m * p.a_m - before);
        griddepcontrol_wait();
        for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
            for (int step = step0; step < step1; ++step, ring.advance()) {
                const int window = skewed_window(plan, tile, step), from = max(window, 0);
                const unsigned bytes = x.boxed ? (m == 0 ? (int)p.m * S::RAW_ROW : 0)
                                               : max(min(window + SKEWED_WINDOW, end) - from, 0) * 2;
                const unsigned all = __reduce_add_sync(0xffffffff, bytes);
                const smem_addr to_s = ring_s + S::RAWS + ring.slot * S::RAW + m * S::RAW_ROW;
                const smem_addr copied_s = ring_s + S::COPIED + 8 * ring.slot;
                ring.wait_empty();
                if (lane == 0) mbarrier_arrive_expect_tx(copied_s, all);
                __syncwarp();
                if (x.boxed && m == 0)
                    tma_load_5d(to_s, &x.tokens, {{window}}, copied_s);
                else if (bytes > 0)
                    bulk_load(to_s + (from - window) * 2, token_g + from * 2, bytes, copied_s);
            }
        }
    } else if (block_warp >= ADDERS / 32) {
        /* ---- 3.3 tokens ---- */
        const int i = thread % EACH_MAKES;
        int group = (thread - ADDERS) / EACH_MAKES; /* steps until its turn */
        for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
            for (int step = step0; step < step1; ++step, ring.advance()) {
                if (group-- > 0) continue;
                group = S::GROUPS - 1;
                const int k = skewed_k(plan, tile, step, i);
                const bool inside = k >= 0 && k < p.k;
                const smem_addr from_s =
                    ring_s + S::RAWS + ring.slot * S::RAW + (k - skewed_window(plan, tile, step)) * 2;
                const smem_addr to_s = ring_s + ring.slot * S::SLOT + i / K64 * S::BLOCK + W::bytes;
                mbarrier_wait(ring_s + S::COPIED + 8 * ring.slot, ring.parity);
#pragma unroll 1
                for (int m0 = 0; m0 < (int)p.m; m0 += 4) { /* what lies past the last token goes to sums of none */
                    uint16_t x[4];
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        x[m] = ld_shared_16(from_s + (m0 + m) * S::RAW_ROW + skewed_token(plan, m0 + m) * 2);
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        st_shared_16(to_s + X::offset_of(m0 + m, i % K64), inside ? x[m] : (uint16_t)0);
                }
                fence_proxy_async();
                __syncwarp(); /* the warp's tokens are there */
                if (lane == 0) mbarrier_arrive(ring.full());
            }
        }
    }

    /* ---- 3.4 results: the sums of all parts, in their order ---- */
    const GemmEpilogue &epilogue = p.epilogue;
    const auto store = [&](int tile) {
        const int quads = (plan.rows + 3) / 4, all = (int)p.m * quads;
        for (int i = part * ADDERS + thread; i < all; i += plan.parts * ADDERS) {
            const int token = i / quads, row = (i - token * quads) * 4;
            const smem_addr at_s = sums_s + (token * S::LD + row) * 4;
            float4 of_part[SKEWED_PARTS] = {};
#pragma unroll
            for (int j = 0; j < SKEWED_PARTS; ++j)
                if (j < plan.parts) of_part[j] = plan.parts > 1 ? ld_cluster_128(mapa(at_s, j)) : ld_shared_f128(at_s);
            float total[4] = {};
#pragma unroll
            for (int j = 0; j < SKEWED_PARTS; ++j)
                total[0] += of_part[j].x, total[1] += of_part[j].y, total[2] += of_part[j].z, total[3] += of_part[j].w;
            /* one body for all results: in a launch's only tile all code is new */
#pragma unroll 1
            for (int e = 0; e < 4; ++e) {
                const int n = skewed_n(plan, tile, row + e);
                if (row + e < plan.rows && n >= 0 && n < p.n) {
                    if (x.bare)
                        ((T *)epilogue.out)[token * epilogue.out_row + n * epilogue.out_col] =
                            from_acc<T>(total[0] * (float)epilogue.alpha);
                    else
                        epilogue_cols<T, 1>(epilogue, GemmPlace{}, token, n, 1, total);
                }
                total[0] = total[1], total[1] = total[2], total[2] = total[3];
            }
        }
    };

    if (block_warp < ADDERS / 32) {
        /* ---- 3.5 products ---- */
        have(epilogue.alpha), have(epilogue.out), have(epilogue.out_row), have(epilogue.out_col);
        const int row0 = warpgroup * 64;
        float sum[ALONG_N ? STEP_K16 : 1][TOKENS / 2]; /* along n of each 16 of a step's k */
        for (int tile = first_tile; tile < plan.tiles; tile += tile_step) {
            const int skew = ALONG_N ? 0 : plan.skew[skewed_class_of(plan, tile)];
            for (int step = step0; step < step1; ++step) {
                const smem_addr slot_s = ring_s + ring.slot * S::SLOT;
                const smem_addr before = ring.empty() + (ring.slot == 0 ? 8 * (S::SLOTS - 1) : -8);
                ring.wait_full();
                if (!ALONG_N && step == 0 && skew > 0) { /* what lies before the lines */
                    if (thread % 128 < 64) {
                        const smem_addr head_s = slot_s + W::offset_of(row0 + thread % 128, 0);
                        st_shared_128(head_s, skewed_head(ld_shared_128(head_s), skew));
                        fence_proxy_async();
                    }
                    bar_sync(ALL_BARRIER + 1 + warpgroup, 128); /* wgmma sees zeros */
                }
                wgmma_pin(sum);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < STEP_K16; ++kk) {
                    const smem_addr block_s = slot_s + kk / 4 * S::BLOCK;
                    const smem_addr w_s = block_s + W::offset(row0) + kk % 4 * W::step_bytes;
                    const smem_addr x_s = block_s + W::bytes + kk % 4 * X::step_bytes;
                    wgmma_ss<T, TOKENS, ALONG_N, 0>(sum[ALONG_N ? kk : 0], W::descriptor(w_s), X::descriptor(x_s),
                                                    step > step0 || (!ALONG_N && kk > 0));
                }
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the step before is done: its slot may be overwritten */
                if (step > step0 && thread % 128 == 0) mbarrier_arrive(before);
                ring.advance();
            }
            const smem_addr last = ring.empty() + (ring.slot == 0 ? 8 * (S::SLOTS - 1) : -8);
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            if (thread % 128 == 0) mbarrier_arrive(last);
            bar_sync(ALL_BARRIER, ADDERS);                              /* the sums of the tile before are read */
            float (&of_tile)[TOKENS / 2] = sum[0], up[TOKENS / 4] = {}; /* up: of the 8 rows above the warp's */
            if constexpr (ALONG_N) move_up(plan, sum, of_tile, up, lane);
            const coord d = wgmma_d(warp, lane, 0);
            const smem_addr at_s = sums_s + (d.col * S::LD + row0 + d.row) * 4;
            const auto away = [](int e) { return (wgmma_d(0, 0, e).col * S::LD + wgmma_d(0, 0, e).row) * 4; };
#pragma unroll
            for (int e = 0; e < TOKENS / 2; ++e) st_shared_f32(at_s + away(e), of_tile[e]);
            bar_sync(ALL_BARRIER, ADDERS); /* they are there */
            if (ALONG_N && plan.classes_log2 > 0) {
                if (row0 + warp > 0) { /* above the tile's first row all is another's */
                    const smem_addr up_s = at_s - 8 * 4;
#pragma unroll
                    for (int i = 0; i < TOKENS / 4; ++i)
                        st_shared_f32(up_s + away(low_of(i)), ld_shared_f32(up_s + away(low_of(i))) + up[i]);
                }
                bar_sync(ALL_BARRIER, ADDERS); /* and all is there */
            }
            if (plan.parts == 1) {
                griddepcontrol_wait(); /* for the bias and c, and to write what the kernel before may read */
                store(tile);
            }
        }
    }
    __syncwarp();
    if (plan.parts > 1) { /* each cluster has one tile */
        griddepcontrol_wait();
        barrier_cluster_arrive_release();
        barrier_cluster_wait_acquire(); /* all parts' sums are in */
        if (block_warp < ADDERS / 32) store(first_tile);
        barrier_cluster(); /* no block leaves while another reads its sums: they have been added before */
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
        if (plan.cost < least - (best ? least / SKEWED_LARGE_GAIN : 0)) best = row, least = plan.cost;
    }
    return best;
}

template <class T, int ROWS, bool ALONG_N> gk_status start(const gk_context *ctx, Params *x) {
    typedef Smem<ROWS, ALONG_N> S;
    const GemmProblem &p = x->p;
    const SkewedPlan &plan = x->plan;
    const int64_t lines = ALONG_N ? p.k : p.n, line = ALONG_N ? p.b_k : p.b_n, inner = ALONG_N ? p.n : p.k;
    for (int j = 0; j < skewed_classes(plan); ++j) {
        const TensorShape w = {
            (const uint16_t *)p.b + j * line - plan.skew[j],
            element<T>::dtype,
            {inner + plan.skew[j], (lines - j + skewed_classes(plan) - 1) >> plan.classes_log2, 1, 1, 1},
            {1, line << plan.classes_log2, 0, 0, 0},
            false};
        const gk_status status = make_tensor_map("gk_gemm", w, K64, ALONG_N ? skewed_box(plan) : plan.rows, &x->w[j]);
        if (status != GK_OK) return status;
    }
    const TensorShape tokens = {p.a, element<T>::dtype, {p.k, p.m, 1, 1, 1}, {1, p.a_m, 0, 0, 0}, false};
    x->boxed = p.m > 1 && p.a_m >= p.k && tensor_map_fits(tokens) &&
               make_tensor_map("gk_gemm", tokens, SKEWED_WINDOW, (int)p.m, &x->tokens) == GK_OK;
    const int64_t most = gk_gpu_of(ctx->index)->num_sms;
    const unsigned grid = (unsigned)(plan.parts > 1 ? plan.tiles * plan.parts : gk_min_i64(plan.tiles, most));
    return launch<gemm_skewed_sm90a_kernel<T, ROWS, ALONG_N>>("gk_gemm", ctx, dim3(grid), S::THREADS, S::BYTES, *x,
                                                              true, plan.parts);
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
