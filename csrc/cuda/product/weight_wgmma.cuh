/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_wgmma.cuh: weight_gemm for more than 16 tokens on Hopper, by WGMMA.
 *
 *   out^T [N, M] = (scale (codes - zero)) a^T, each weight rounded to a's dtype
 *
 * weight_wgmma_{4,8}bit_sm90a.cu instantiate it.
 *
 * The weight is WGMMA's first operand and comes from registers. A packed tile holds the fragments
 * of 64 rows. NT tokens are the second operand, copied to shared memory by TMA. A block has a
 * producer warpgroup and two consumer warpgroups, which divide a stage as RT says:
 *
 *   RT 2   128 rows of the weight. A warpgroup takes 64 rows and all of the stage's k.
 *   RT 1   64 rows of the weight. A warpgroup takes half of the stage's k.
 *
 * A warpgroup has two sets of fragment registers. It decodes one tile while WGMMA multiplies the
 * previous one. The warpgroups are not synchronised with each other: ordering them by named
 * barriers gained nothing (H200).
 *
 * A block computes one tile of ROWS x NT. If tiles are few, a cluster of two blocks splits k. The
 * sums are exchanged through the shared memory of the ring, and each block stores half of the
 * tokens.
 *
 * Workspace: none. Refused forms and operands: weight_form.cuh. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_WGMMA_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_WGMMA_CUH

#include "gemm/order.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cluster_reads.cuh"
#include "../ptx/opaque.cuh"
#include "quant/tiles.h"
#include "weight_form.cuh"
#include "weight_price.cuh"

template <class F_, int NT_, int RT_> struct WeightWgmma {
    typedef F_ F;
    static constexpr int NT = NT_, RT = RT_, KW = 2 / RT, ROWS = RT * GK_TILE, THREADS = 384;
    /* TILES: packed tiles of a stage along k. EACH: how many of them one warpgroup multiplies. */
    static constexpr int TILES = NT == 32 || (NT == 64 && RT == 1)       ? 4
                                 : NT == 256 && F::WORDS == 8 && RT == 2 ? 1
                                                                         : 2;
    static constexpr int EACH = TILES / KW;
    static_assert(EACH == 1 || EACH % 2 == 0, "two sets of fragments alternate");
    /* True if a tile's codes and scales are read before the wait that frees the fragments'
     * registers. This hides the latency of the reads, but a stage is released later. Measured for
     * 8192 x 8192, H200: it gains for 32 tokens (15.8 us instead of 16.4) and for 128 (31.7
     * instead of 32.3). It loses for 64 (23.2 instead of 22.1), and 5 to 8 % with RT 1 and 32 or
     * 64 tokens. */
    static constexpr bool READ_FIRST = RT == 2 && NT != 64;
    typedef WeightStage90<F, ROWS, TILES, NT> Stage;
    static constexpr int LD = ROWS + 4; /* stride of a token's sums in shared memory, in floats */
    static constexpr int SUMS = KW * NT * LD * 4;
    static constexpr int ROOM = 227 * 1024 - WGMMA_BLOCK_BYTES - 1024;
    static constexpr int FIT = ROOM / (Stage::BYTES + Stage::SIDE);
    static constexpr int STAGES = FIT < 8 ? FIT : 8;
    static constexpr int SIDE_AT = STAGES * Stage::BYTES;
    static constexpr int RING_AT = SIDE_AT + STAGES * Stage::SIDE;
    static constexpr int SMEM = RING_AT + tma_ring<STAGES>::bytes + WGMMA_BLOCK_BYTES;
    static_assert(SUMS <= SIDE_AT, "sums lie where stages lay");
    static_assert(TILES % KW == 0 && STAGES >= 2, "what a stage is made of");
};

/* Tiles of tokens that are scheduled together, so that they read the same weight rows from L2 (not
 * measured). */
constexpr int TOKEN_TILES_TOGETHER = 8;
/* Blocks of a cluster. Clusters of 3 and 4 fill fewer SMs and gained nowhere. */
constexpr int MOST_SPLITS = 2;

struct WeightWgmma90Params {
    WeightOperands w;
    Finish f;
    TileOrder order;
    int m, n, tiles_m, tiles_n;
    /* splits: blocks of a cluster. steps: stages of each block; the first `more` blocks have one
     * more. */
    int splits, steps, more;
    bool vectors; /* rows of the result are whole chunks of 16 bytes */
    bool plain;   /* the result needs no epilogue (is_plain) */
};

/* ---- 1 producer ------------------------------------------------------------------------------ */
template <class K>
__device__ __forceinline__ void produce_weight_wgmma(const WeightWgmma90Params &p,
                                                     tma_ring<K::STAGES> &ring, smem_addr smem_s,
                                                     TilePlace at, int step0, int steps) {
    typedef typename K::F F;
    typedef typename K::Stage S;
    const int token0 = at.row * K::NT, tokens = box_tokens<K::NT>(p.m, token0);
    const CUtensorMap *const a = p.m - token0 < K::NT ? &p.w.a_end : &p.w.a;
    prefetch_maps<F>(p.w, a);
    const uint64_t again = l2_last_out(), once = l2_first_out();
    /* Prefetch the first stages' codes into L2 while the previous kernel runs. In decoding that
     * kernel is a norm or an activation, which leaves most SMs idle. */
    for (int step = step0; step < step0 + min(K::STAGES, steps); ++step)
        prefetch_codes<F, K::ROWS, K::TILES>(p.w, at.col * K::RT, step * K::TILES);
    griddepcontrol_wait();
#pragma unroll 1
    for (int step = step0; step < step0 + steps; ++step, ring.advance()) {
        const smem_addr stage_s = smem_s + ring.stage * S::BYTES;
        ring.wait_empty();
        mbarrier_arrive_expect_tx(ring.full(), S::copied(tokens));
        produce_codes<F, S, K::ROWS, K::TILES>(p.w, stage_s, ring.full(), at.col * K::RT,
                                               step * K::TILES, p.w.keep ? again : once);
        produce_rest<F, S, K::ROWS, K::TILES>(
            p.w, a, stage_s, smem_s + K::SIDE_AT + ring.stage * S::SIDE, ring.full(),
            at.col * K::ROWS, step * K::TILES, token0, again, once);
    }
}

/* ---- 2 consumers ----------------------------------------------------------------------------- */
/* A lane's codes of a tile, with their scales and zero points. */
template <class K> struct WeightTile {
    typedef typename K::F F;
    typedef typename F::T T;
    static constexpr int GROUPS = F::GROUP < 64 ? 64 / F::GROUP : 1;
    uint32_t words[F::WORDS], scale[GROUPS][2], zero[GROUPS][2];

    /* scales_s, zeros_s: addresses of the scale and zero point of this lane's first row, in the
     * stage's first group. k0: offset of the tile in the stage, in elements of k. */
    __device__ __forceinline__ void load(smem_addr codes_s, smem_addr scales_s, smem_addr zeros_s,
                                         int k0) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = (k0 / F::GROUP + g) * K::ROWS + 8 * h;
                scale[g][h] = load_two_scales<F>(scales_s + at * F::SCALE_BYTES);
                zero[g][h] = F::ZERO ? load_zero<F>(zeros_s + at) : Two<T>::NOTHING;
            }
        load_words<F>(words, codes_s);
    }
    __device__ __forceinline__ void decode(uint32_t (&a)[4][4], uint32_t whole) const {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const int g = 16 * s / F::GROUP;
            decode_fragment<F>(a[s], words, s, whole, zero[g]);
#pragma unroll
            for (int q = 0; q < 4; ++q) a[s][q] = mul_two<T>(a[s][q], scale[g][q % 2]);
        }
    }
};

/* Emits no instruction. It keeps the compiler from moving or reusing the fragments' registers
 * while WGMMA reads them. */
__device__ __forceinline__ void pin_fragments(uint32_t (&a)[4][4]) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int q = 0; q < 4; ++q) opaque(a[s][q]);
}

template <class K>
__device__ __forceinline__ void
consume_weight_wgmma(const WeightWgmma90Params &p, tma_ring<K::STAGES> &ring, smem_addr smem_s,
                     float (&sum)[K::NT / 2], int panel_bytes, int steps) {
    typedef typename K::F F;
    typedef typename K::Stage S;
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    /* part: index of this warpgroup's 64 rows. share: index of its half of the stage's k. */
    const int part = K::RT == 2 ? warpgroup : 0, share = K::RT == 2 ? 0 : warpgroup;
    const int row = part * 64 + thread / 32 * 16 + lane / 4;
    const smem_addr codes_at =
        S::CODES_AT + (part * K::TILES + share * K::EACH) * F::TILE_BYTES + thread * 16;
    NanRows<F> nan;
    uint32_t a[2][4][4];
    /* Empty barriers of stages to release. `last` is the barrier of the stage whose reads the last
     * product completes, and `before` the same for the product before it. 0: that product does not
     * complete a stage. */
    smem_addr before = 0, last = 0;
#pragma unroll
    for (int i = 0; i < K::NT / 2; ++i) sum[i] = 0;
    wgmma_pin(sum);
    /* Issues the product of this warpgroup's tile `tile` of the stage. set: the fragment registers
     * to decode into. The product before the last one read them. */
    const auto multiply = [&](uint32_t (&set)[4][4], int tile) {
        WeightTile<K> next;
        const int k0 = (share * K::EACH + tile) * GK_TILE;
        const auto load = [&] {
            if (tile == 0) ring.wait_full();
            const smem_addr stage_s = smem_s + ring.stage * S::BYTES;
            const smem_addr side_s = smem_s + K::SIDE_AT + ring.stage * S::SIDE;
            next.load(stage_s + codes_at + tile * F::TILE_BYTES, side_s + row * F::SCALE_BYTES,
                      side_s + S::SCALES + row, k0);
        };
        if (K::READ_FIRST) load();
        wgmma_wait_group<1>();
        pin_fragments(set);
        if (before && lane == 0) mbarrier_arrive(before);
        before = last;
        if (!K::READ_FIRST) load();
        const smem_addr stage_s = smem_s + ring.stage * S::BYTES;
        last = tile == K::EACH - 1 ? ring.empty() : 0;
        nan.look(next.words);
        next.decode(set, p.w.whole);
        const uint64_t tokens = wgmma_descriptor_add(
            wgmma_descriptor(stage_s, 16, WGMMA_BLOCK_BYTES), k0 / GK_TILE * panel_bytes);
        pin_fragments(set);
        wgmma_pin(sum);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s)
            wgmma_rs_add<typename F::T, K::NT>(sum, set[s], wgmma_descriptor_add(tokens, 32 * s));
        wgmma_commit_group();
        if (tile == K::EACH - 1) ring.advance();
    };
    if constexpr (K::EACH == 1) {
#pragma unroll 1
        for (int step = 0; step + 1 < steps; step += 2) {
            multiply(a[0], 0);
            multiply(a[1], 0);
        }
        if (steps % 2) multiply(a[0], 0);
    } else {
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
#pragma unroll
            for (int tile = 0; tile < K::EACH; ++tile) multiply(a[tile % 2], tile);
    }
    wgmma_wait_group<0>();
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_pin(sum);
    nan.set_nan(sum);
}

/* ---- 3 epilogue ------------------------------------------------------------------------------ */
/* Applies the epilogue to eight neighbouring results of a token and stores them. */
template <class T>
__device__ __forceinline__ void store_eight(const WeightWgmma90Params &p, int token, int col,
                                            float (&v)[8], const float (&bias)[8], float alpha) {
    const Finish &f = p.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i], alpha, bias[i]);
    const int64_t at = token * f.out_row + col;
    if (f.out_dtype == GK_F32) {
        activate_in_place<8>(f.activation, v);
        if (p.vectors) {
            *(float4 *)((float *)f.out + at) = make_float4(v[0], v[1], v[2], v[3]);
            *(float4 *)((float *)f.out + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (col + i < p.n) ((float *)f.out)[at + i] = v[i];
        }
        return;
    }
    activate_16<8>(f.activation, v);
    if (p.vectors) {
        *(uint4 *)((T *)f.out + at) = make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]),
                                                 pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (col + i < p.n) ((T *)f.out)[at + i] = from_f32<T>(v[i]);
    }
}

/* Writes the warpgroups' sums to this block's shared memory, [share of k][token][row]. */
template <class K>
__device__ __forceinline__ void stage_sums(smem_addr smem_s, const float (&sum)[K::NT / 2]) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int part = K::RT == 2 ? warpgroup : 0, share = K::RT == 2 ? 0 : warpgroup;
#pragma unroll
    for (int i = 0; i < K::NT / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        st_shared_f32(smem_s + ((share * K::NT + d.col) * K::LD + part * 64 + d.row) * 4, sum[i]);
    }
}

/* Block `rank` adds and stores its share of the tokens. */
template <class K>
__device__ __forceinline__ void store_sums(const WeightWgmma90Params &p, smem_addr smem_s,
                                           TilePlace at, int rank) {
    typedef typename K::F::T T;
    constexpr int EIGHTS = K::ROWS / 8;
    const int col_at = threadIdx.x % EIGHTS * 8, col = at.col * K::ROWS + col_at;
    float bias[8] = {}, alpha = 1;
    if (col >= p.n) return;
    if (!p.plain) {
        if (p.f.alpha) alpha = *p.f.alpha;
        if (p.f.bias)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (col + i < p.n)
                    bias[i] = load_any(p.f.bias, p.f.bias_dtype, (col + i) * p.f.bias_step);
    }
    const int share = (K::NT + p.splits - 1) / p.splits, token0 = at.row * K::NT,
              end = min((rank + 1) * share, K::NT);
#pragma unroll 1
    for (int token = rank * share + threadIdx.x / EIGHTS; token < end; token += 256 / EIGHTS) {
        if (token0 + token >= p.m) break;
        const smem_addr from_s = smem_s + (token * K::LD + col_at) * 4;
        float v[8] = {};
#pragma unroll
        for (int block = 0; block < MOST_SPLITS; ++block) {
            if (block == p.splits) break;
            const uint32_t from = mapa(from_s, block);
#pragma unroll
            for (int share = 0; share < K::KW; ++share)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float4 x = ld_cluster_f32x4(from + share * K::NT * K::LD * 4 + half * 16);
                    v[4 * half] += x.x;
                    v[4 * half + 1] += x.y;
                    v[4 * half + 2] += x.z;
                    v[4 * half + 3] += x.w;
                }
        }
        if (p.plain && p.vectors)
            *(uint4 *)((T *)p.f.out + (token0 + token) * p.f.out_row + col) =
                make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                           pack2<T>(v[6], v[7]));
        else
            store_eight<T>(p, token0 + token, col, v, bias, alpha);
    }
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    weight_wgmma_kernel(const __grid_constant__ WeightWgmma90Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(smem_s + K::RING_AT);
    if (threadIdx.x == 0) {
        ring.init(8);
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    const int rank = (int)cluster_ctarank();
    const int step0 = rank * p.steps + min(rank, p.more), steps = p.steps + (rank < p.more);
    const TilePlace at = tile_place(clusterid_x(), p.order);
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        if (threadIdx.x < 288 && elect_one())
            produce_weight_wgmma<K>(p, ring, smem_s, at, step0, steps);
        __syncwarp();
        if (p.splits > 1) {
            barrier_cluster_ordered();
            barrier_cluster_ordered();
        }
    } else {
        setmaxnreg_inc<232>();
        griddepcontrol_wait();
        float sum[K::NT / 2];
        consume_weight_wgmma<K>(p, ring, smem_s, sum,
                                box_tokens<K::NT>(p.m, at.row * K::NT) * WGMMA_ROW_BYTES, steps);
        bar_sync(1, 256); /* both warpgroups have finished reading the stages */
        stage_sums<K>(smem_s, sum);
        if (p.splits > 1) {
            barrier_cluster_ordered();
            store_sums<K>(p, smem_s, at, rank);
            __syncwarp();
            barrier_cluster_ordered(); /* the other block has read this block's sums */
        } else {
            bar_sync(1, 256);
            store_sums<K>(p, smem_s, at, rank);
        }
    }
}

/* ---- 4 plan and run -------------------------------------------------------------------------- */
template <class K>
bool plan_weight_wgmma(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                       gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!weight_form_serves<typename K::F>(g) || gpu->smem_per_block < K::SMEM) return false;
    const int64_t m = weight_rows(g->a), tiles = gk_ceil_div(m, K::NT) * gk_ceil_div(g->n, K::ROWS);
    if (!gk_grid_fits(tiles * MOST_SPLITS)) return false;
    plan->kernel = instance;
    plan->tile[0] = K::NT;
    plan->tile[1] = K::ROWS;
    plan->tile[2] = GK_TILE * K::TILES;
    plan->us = 0;
    for (int splits = 1; splits <= MOST_SPLITS; ++splits) {
        const double us =
            weight_wgmma_us(K::NT, K::RT, K::F::C, tiles, splits, weight_k(g), gpu->num_sms);
        if (plan->us > 0 && us >= plan->us) continue;
        plan->us = us;
        plan->chunks = splits;
    }
    plan->tasks = tiles * plan->chunks;
    plan->waves = (double)plan->tasks / gpu->num_sms;
    return true;
}

template <class K>
gk_status run_weight_wgmma90(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    WeightWgmma90Params p = {};
    const gk_status status =
        weight_operands<typename K::F, typename K::Stage, K::ROWS, K::TILES, K::NT>(g, &p.w);
    if (status != GK_OK) return status;
    p.f = weight_finish(g);
    p.plain = is_plain(p.f, g->a.dtype);
    p.m = (int)weight_rows(g->a);
    p.n = (int)g->n;
    p.tiles_m = (int)gk_ceil_div(p.m, K::NT);
    p.tiles_n = (int)gk_ceil_div(p.n, K::ROWS);
    p.order = tile_order(p.tiles_m, p.tiles_n, TOKEN_TILES_TOGETHER);
    p.splits = (int)plan->chunks;
    p.steps = (int)gk_ceil_div(p.w.cols, K::TILES) / p.splits;
    p.more = (int)gk_ceil_div(p.w.cols, K::TILES) % p.splits;
    p.w.keep = p.tiles_m > 1;
    p.vectors = p.n % 8 == 0 && (uintptr_t)p.f.out % 16 == 0;
    return launch<weight_wgmma_kernel<K>>("weight_gemm", ctx,
                                          dim3((unsigned)(p.tiles_m * p.tiles_n * p.splits)),
                                          K::THREADS, K::SMEM, p, true, p.splits);
}

#define WGMMA90(name, T, C, GROUP, ZERO, NT, RT)                             \
    {"weight_gemm_wgmma_" name,                                              \
     element<T>::dtype,                                                      \
     plan_weight_wgmma<WeightWgmma<WeightForm<T, C, GROUP, ZERO>, NT, RT>>,  \
     run_weight_wgmma90<WeightWgmma<WeightForm<T, C, GROUP, ZERO>, NT, RT>>, \
     {},                                                                     \
     NULL}
#define WGMMA90_ALL(name, T, C, GROUP, ZERO)                 \
    WGMMA90(name "_32x128", T, C, GROUP, ZERO, 32, 2),       \
        WGMMA90(name "_64x128", T, C, GROUP, ZERO, 64, 2),   \
        WGMMA90(name "_128x128", T, C, GROUP, ZERO, 128, 2), \
        WGMMA90(name "_256x128", T, C, GROUP, ZERO, 256, 2), \
        WGMMA90(name "_32x64", T, C, GROUP, ZERO, 32, 1),    \
        WGMMA90(name "_64x64", T, C, GROUP, ZERO, 64, 1),    \
        WGMMA90(name "_128x64", T, C, GROUP, ZERO, 128, 1)

#endif
