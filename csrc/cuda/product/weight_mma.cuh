/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_mma.cuh: weight_gemm for up to 16 tokens on Hopper, by mma.sync.
 *
 *   out^T [N, M] = sum over groups of k of scale (codes - zero) a^T
 *
 * weight_mma_{4,8}bit_sm90a.cu instantiate it. Groups of rows use the same kernel
 * (WeightMmaGrouped, weight_grouped_mma_sm90a.cu).
 *
 * The weight is the instruction's first operand. A packed tile holds the fragments of 64 rows, 16
 * rows for each warp, and a lane decodes its own 16 bytes. NT tokens are the second operand, read
 * by ldmatrix. WGMMA is 4 to 10 % slower here (8 and 16 tokens, H200), because reading its first
 * operand from registers bounds it. Codes are exact in the products. A group's sum is multiplied by
 * the group's scale in float32, so no weight is rounded.
 *
 * A cluster of two blocks computes 64 rows of the weight. Each block takes half of k. A block has a
 * producer warp and two consumer warpgroups, which take the stages of the ring alternately. A stage
 * is 256 to 1024 of k. The warpgroups add their sums in shared memory. Then each block sends half
 * of its sums to the other block by st.async and finishes the other half. Clusters are persistent:
 * each takes every gridDim.x / 2-th tile, and the ring is not drained between tiles.
 *
 * Either two blocks share an SM (OCC 2), or one block has the SM to itself and longer stages
 * (OCC 1, instances named "wide").
 *
 * 4-bit integer codes are copied before griddepcontrol.wait. This is safe, because no kernel that
 * lets its successor start early writes packed weights. It saves time (8.1 us instead of 8.6,
 * 16 x 5120 x 5120, OCC 2, H200): if the previous kernel is a norm or an activation, most SMs are
 * idle, and the ring fills while that kernel runs. Other codes are only prefetched into L2 then.
 *
 * In WeightMmaGrouped a tile is a task of quant/weight_groups.cuh: NT tokens of one group. Every
 * block lists the tasks first, so it copies no codes before griddepcontrol.wait. A cluster may have
 * no task. Rows behind the last group's end form tasks without steps, whose results are zeros.
 *
 * Workspace: none. Refused forms and operands: weight_form.cuh. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_MMA_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_MMA_CUH

#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../tile/fragment.cuh"
#include "weight_form.cuh"
#include "weight_grouped.cuh"
#include "weight_price.cuh"

struct WeightMmaParams {
    WeightOperands w;
    Finish f;
    int m, n, tiles; /* tiles: number of tiles of 64 weight rows, in one group */
    bool plain;      /* the result needs no epilogue (is_plain) */
};
struct WeightMmaGroupedParams : WeightMmaParams {
    Groups groups;
    int64_t bias_group; /* bytes from the bias of one group to the next */
    int box;            /* rows of the box of tokens */
};

/* An instance: form F of the weight, NT tokens, OCC blocks on an SM. */
template <class F_, int NT_, int OCC_> struct WeightMma {
    typedef F_ F;
    typedef WeightMmaParams Params;
    static constexpr bool GROUPED = false;
    static constexpr int NT = NT_, OCC = OCC_, ROWS = GK_TILE, WARPGROUPS = 2,
                         THREADS = 128 * WARPGROUPS + 32;
    /* Packed tiles of a stage, 64 of k each. */
    static constexpr int TILES = (NT == 8 && F::WORDS == 4 ? 16 : 8) / OCC;
    static constexpr int STAGES = NT == 16 && F::WORDS == 4 ? 6 : 4;
    /* True if codes are copied before griddepcontrol.wait. With 8-bit codes and e2m1 this cost up
     * to 0.9 us when one product follows another. */
    static constexpr bool EARLY = F::C == NIBBLES;
    static_assert(STAGES % WARPGROUPS == 0,
                  "a stage belongs to one warpgroup: its phases are one waiter's");
    typedef WeightStage90<F, ROWS, TILES, NT> Stage;
    static constexpr int SUMS = NT / 2; /* accumulators of a thread: 2 rows x NT / 4 tokens */
    /* Two independent chains of mma. With 8 tokens, the products of a single chain would wait for
     * each other. */
    static constexpr bool DUAL = NT == 8;
    static constexpr int SIDE_AT = STAGES * Stage::BYTES;
    static constexpr int SUMS_AT = SIDE_AT + STAGES * Stage::SIDE;
    static constexpr int MAIL_AT = SUMS_AT + (WARPGROUPS - 1) * 128 * SUMS * 4;
    static constexpr int RING_AT = MAIL_AT + 128 * SUMS * 2;
    static constexpr int MAIL_BARS_AT = RING_AT + tma_ring<STAGES>::bytes; /* full, empty */
    static constexpr int SMEM = MAIL_BARS_AT + 16 + WGMMA_BLOCK_BYTES;
    static_assert(OCC * (SMEM + 1024) <= 228 * 1024, "OCC blocks fit an SM");
};

template <class F, int NT, int OCC> struct WeightMmaGrouped : WeightMma<F, NT, OCC> {
    typedef WeightMmaGroupedParams Params;
    static constexpr bool GROUPED = true, EARLY = false;
    static constexpr int LIST_AT = WeightMma<F, NT, OCC>::MAIL_BARS_AT + 16;
    static constexpr int SMEM = LIST_AT + (int)sizeof(WeightGroupList) + WGMMA_BLOCK_BYTES;
    static_assert(OCC * (SMEM + 1024) <= 228 * 1024, "OCC blocks fit an SM");
};

/* The tile of 64 weight rows that a cluster takes. */
struct WeightMmaTile {
    int row, n0;          /* index of the packed row of tiles; first column of the result */
    int token0;           /* first row of a in the stages */
    int group, from, end; /* GROUPED: rows of a whose results are stored */
    bool empty;           /* GROUPED: the rows belong to no group, and their results are zeros */
};
template <class K>
__device__ __forceinline__ int mma_tiles(const typename K::Params &p, const WeightGroupList *list) {
    if constexpr (K::GROUPED)
        return tasks_in(p.groups, *list);
    else
        return p.tiles;
}
template <class K>
__device__ __forceinline__ WeightMmaTile mma_tile(const typename K::Params &p,
                                                  const WeightGroupList *list, int tile) {
    if constexpr (K::GROUPED) {
        const WeightTask at = weight_task<K::NT>(p.groups, *list, tile);
        const bool empty = at.group == p.groups.count;
        return {at.group * p.tiles + at.col,
                at.col * K::ROWS,
                box_row(at.row, p.box, p.m),
                at.group,
                at.row,
                at.end,
                empty};
    } else {
        return {tile, tile * K::ROWS, 0, 0, 0, p.m, false};
    }
}

/* ---- 1 a stage ------------------------------------------------------------------------------- */
/* Adds the products of one stage to sum. Addresses in shared memory: codes_s of this thread's codes
 * in the stage's first tile, tokens_s of this lane's row for ldmatrix, scales_s and zeros_s of the
 * scale and zero point of this lane's first row. */
template <class K>
__device__ __forceinline__ void
multiply_stage(float (&sum)[K::SUMS], NanRows<typename K::F> &nan, uint32_t whole,
               smem_addr codes_s, smem_addr tokens_s, smem_addr scales_s, smem_addr zeros_s) {
    typedef typename K::F F;
    typedef typename F::T T;
    typedef typename K::Stage::Tokens Tokens;
    constexpr int CHAINS = K::DUAL && F::GROUP >= 64 ? 2 : 1;
    float part[CHAINS][K::SUMS], scale[2] = {};
    uint32_t zero[2] = {Two<T>::NOTHING, Two<T>::NOTHING}, b[K::NT / 8][4];
#pragma unroll
    for (int tile = 0; tile < K::TILES; ++tile) {
        uint32_t words[F::WORDS];
        load_words<F>(words, codes_s + tile * F::TILE_BYTES);
        nan.look(words);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const int k = 64 * tile + 16 * s, group = k / F::GROUP;
            if (k % F::GROUP == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    scale[h] = load_scale<F>(scales_s + (group * K::ROWS + 8 * h) * F::SCALE_BYTES);
                    if constexpr (F::ZERO)
                        zero[h] = load_zero<F>(zeros_s + group * K::ROWS + 8 * h);
                }
#pragma unroll
                for (int c = 0; c < CHAINS; ++c)
#pragma unroll
                    for (int i = 0; i < K::SUMS; ++i) part[c][i] = 0;
            }
            uint32_t a[4];
            decode_fragment<F>(a, words, s, whole, zero);
            if constexpr (K::NT == 8) { /* b holds two steps of 8 tokens */
                if (s % 2 == 0) ldmatrix_x4(b[0], Tokens::along(tokens_s, 8 * tile + 2 * s));
                mma_add<T>(part[s % CHAINS], a, b[0] + s % 2 * 2);
            } else { /* b holds one step of 16 tokens */
#pragma unroll
                for (int j = 0; j < K::NT / 16; ++j) {
                    ldmatrix_x4(b[j], Tokens::along(tokens_s, 8 * tile + 2 * s) +
                                          j * 16 * WGMMA_ROW_BYTES);
                    mma_add<T>(part[s % CHAINS] + 8 * j, a, b[j]);
                    mma_add<T>(part[s % CHAINS] + 8 * j + 4, a, b[j] + 2);
                }
            }
            if ((k + 16) % F::GROUP == 0)
#pragma unroll
                for (int i = 0; i < K::SUMS; ++i) {
                    const float all = CHAINS == 2 ? part[0][i] + part[CHAINS - 1][i] : part[0][i];
                    sum[i] = fmaf(all, scale[i / 2 % 2], sum[i]);
                }
        }
    }
}

/* ---- 2 producer and consumers ---------------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce_weight_mma(const typename K::Params &p,
                                                   const WeightGroupList *list,
                                                   tma_ring<K::STAGES> &ring, smem_addr smem_s,
                                                   int step0, int steps, int first, int stride) {
    typedef typename K::F F;
    const CUtensorMap *const a = !K::GROUPED && p.m < K::NT ? &p.w.a_end : &p.w.a;
    prefetch_maps<F>(p.w, a);
    const uint64_t once = l2_first_out(), again = l2_last_out();
    const auto codes = [&](int tile, int step) {
        int tokens;
        if constexpr (K::GROUPED)
            tokens = p.box;
        else
            tokens = box_tokens<K::NT>(p.m, 0);
        mbarrier_arrive_expect_tx(ring.full(), K::Stage::copied(tokens));
        produce_codes<F, typename K::Stage, K::ROWS, K::TILES>(
            p.w, smem_s + ring.stage * K::Stage::BYTES, ring.full(), tile,
            (step0 + step) * K::TILES, once);
    };
    for (int step = 0; !K::EARLY && !K::GROUPED && step < min(K::STAGES, steps); ++step)
        prefetch_codes<F, K::ROWS, K::TILES>(p.w, first, (step0 + step) * K::TILES);
    int ahead = 0;
    for (; K::EARLY && ahead < K::STAGES && ahead < steps; ++ahead) {
        codes(first, ahead);
        ring.advance();
    }
    griddepcontrol_wait();
    ring.stage = 0;
    ring.parity = 0;
    for (int tile = first; tile < mma_tiles<K>(p, list); tile += stride) {
        const WeightMmaTile at = mma_tile<K>(p, list, tile);
        if (K::GROUPED && at.empty) continue;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, --ahead) {
            if (ahead <= 0) {
                ring.wait_empty();
                codes(at.row, step);
            }
            produce_rest<F, typename K::Stage, K::ROWS, K::TILES>(
                p.w, a, smem_s + ring.stage * K::Stage::BYTES,
                smem_s + K::SIDE_AT + ring.stage * K::Stage::SIDE, ring.full(), at.row * K::ROWS,
                (step0 + step) * K::TILES, at.token0, again, once);
            ring.advance();
        }
    }
}

template <class K>
__device__ __forceinline__ void
consume_weight_mma(const typename K::Params &p, const WeightGroupList *list,
                   tma_ring<K::STAGES> &ring, smem_addr smem_s, unsigned rank, int all_steps,
                   int first, int stride) {
    typedef typename K::F F;
    typedef typename K::Stage S;
    /* Named barriers. MEET: the second warpgroup's sums are in shared memory. FREE: they have
     * been read. */
    constexpr int MEET = 1, FREE = 2;
    constexpr int SENT = K::SUMS / 2; /* sums of a thread that the other block finishes */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = warp / 4,
              thread = threadIdx.x % 128;
    const int row = warp % 4 * 16 + lane / 4;
    const int token_at = K::NT == 8
                             ? S::Tokens::offset_of(lane % 8, lane / 8 * 8)
                             : S::Tokens::offset_of(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    const smem_addr mail_full = smem_s + K::MAIL_BARS_AT, mail_empty = mail_full + 8;
    int turn = 0;
    unsigned mail_parity = 0;
    griddepcontrol_wait();
    for (int tile = first; tile < mma_tiles<K>(p, list); tile += stride) {
        const WeightMmaTile at = mma_tile<K>(p, list, tile);
        const int steps = K::GROUPED && at.empty ? 0 : all_steps;
        float sum[K::SUMS];
        NanRows<F> nan;
#pragma unroll
        for (int i = 0; i < K::SUMS; ++i) sum[i] = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.advance(), turn ^= 1) {
            if (turn != warpgroup) continue;
            ring.wait_full();
            const smem_addr stage_s = smem_s + ring.stage * S::BYTES;
            const smem_addr side_s = smem_s + K::SIDE_AT + ring.stage * S::SIDE;
            multiply_stage<K>(sum, nan, p.w.whole, stage_s + S::CODES_AT + thread * 16,
                              stage_s + token_at, side_s + row * F::SCALE_BYTES,
                              side_s + S::SCALES + row);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty());
        }
        nan.set_nan(sum);

        /* Add the second warpgroup's sums to the first's. */
        const smem_addr sums_s = smem_s + K::SUMS_AT + thread * 16;
        if (warpgroup == 1) {
            if (tile != first) bar_sync(FREE, 256);
#pragma unroll
            for (int i = 0; i < K::SUMS; i += 4)
                st_shared_128(sums_s + i * 512,
                              make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
            bar_arrive(MEET, 256);
            continue;
        }
        bar_sync(MEET, 256);
#pragma unroll
        for (int i = 0; i < K::SUMS; ++i)
            sum[i] += ld_shared_f32(sums_s + i / 4 * 2048 + i % 4 * 4);
        if (tile + stride < mma_tiles<K>(p, list)) bar_arrive(FREE, 256);

        /* Block `rank` finishes rows 8 rank + lane / 4 of each warp's 16 and sends the others. */
        const smem_addr mail_s = smem_s + K::MAIL_AT + thread * (SENT == 2 ? 8 : 16);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(mail_full, 128 * SENT * 4);
        if (tile == first)
            barrier_cluster_wait(); /* the other block has initialised its barriers */
        else
            mbarrier_wait(mail_empty, mail_parity ^ 1);
        const uint32_t there = mapa(mail_s, rank ^ 1), bar = mapa(mail_full, rank ^ 1);
        float mine[SENT], theirs[SENT];
#pragma unroll
        for (int i = 0; i < SENT; ++i) {
            const float low = sum[i / 2 * 4 + i % 2], high = sum[i / 2 * 4 + i % 2 + 2];
            mine[i] = rank ? high : low;
            theirs[i] = rank ? low : high;
        }
        if constexpr (SENT == 2)
            st_async_64(there, theirs[0], theirs[1], bar);
        else
#pragma unroll
            for (int i = 0; i < SENT; i += 4)
                st_async_128(there + i * 512, theirs[i], theirs[i + 1], theirs[i + 2],
                             theirs[i + 3], bar);
        mbarrier_wait(mail_full, mail_parity);
#pragma unroll
        for (int i = 0; i < SENT; ++i)
            mine[i] += ld_shared_f32(mail_s + (SENT == 2 ? i * 4 : i / 4 * 2048 + i % 4 * 4));
        mbarrier_arrive_cluster(mail_empty, rank ^ 1);
        mail_parity ^= 1;

        const int n = at.n0 + warp * 16 + rank * 8 + lane / 4;
        if (n >= p.n) continue;
        typename F::T *const to = (typename F::T *)p.f.out + n;
        if (p.plain) {
#pragma unroll
            for (int i = 0; i < SENT; ++i) {
                const int m = at.token0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
                if ((!K::GROUPED || m >= at.from) && m < at.end)
                    to[m * p.f.out_row] = from_f32<typename F::T>(mine[i]);
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < SENT; ++i) {
            const int m = at.token0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if ((K::GROUPED && m < at.from) || m >= at.end) continue;
            float x;
            if constexpr (K::GROUPED) {
                Finish f = p.f;
                if (f.bias) f.bias = (const char *)f.bias + at.group * p.bias_group;
                x = at.empty ? 0.f : finish(f, m, n, mine[i]);
            } else {
                x = finish(p.f, m, n, mine[i]);
            }
            if (p.f.out_dtype == GK_F32)
                ((float *)p.f.out)[m * p.f.out_row + n] = x;
            else
                to[m * p.f.out_row] = from_f32<typename F::T>(x);
        }
    }
    if (K::GROUPED && first >= mma_tiles<K>(p, list))
        barrier_cluster_wait();
    else if (warpgroup == 0) /* the other block's last arrival must precede this block's exit */
        mbarrier_wait(mail_empty, mail_parity ^ 1);
    else
        barrier_cluster_wait();
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::OCC)
    weight_mma_kernel(const __grid_constant__ typename K::Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(smem_s + K::RING_AT);
    const unsigned rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        ring.init(4);
        mbarrier_init(smem_s + K::MAIL_BARS_AT, 1);
        mbarrier_init(smem_s + K::MAIL_BARS_AT + 8, 128);
        fence_mbarrier_init();
    }
    __syncthreads();
    /* The matching wait comes before a block accesses the other's shared memory or exits. */
    barrier_cluster_arrive();
    griddepcontrol_launch_dependents();
    const int all = (p.w.cols + K::TILES - 1) / K::TILES, half = (all + 1) / 2;
    const int step0 = rank * half, steps = rank ? all - half : half;
    const int first = blockIdx.x / 2, stride = gridDim.x / 2;
    const WeightGroupList *list = nullptr;
    if constexpr (K::GROUPED) {
        WeightGroupList &made =
            *(WeightGroupList *)(smem + (smem_s - cvta_to_shared(smem)) + K::LIST_AT);
        griddepcontrol_wait();
        if (threadIdx.x < 32) list_groups<false, K::NT>(p.groups, made, threadIdx.x);
        __syncthreads();
        list = &made;
    }
    if (threadIdx.x >= 128 * K::WARPGROUPS) {
        if (elect_one()) produce_weight_mma<K>(p, list, ring, smem_s, step0, steps, first, stride);
        __syncwarp();
        barrier_cluster_wait();
    } else {
        consume_weight_mma<K>(p, list, ring, smem_s, rank, steps, first, stride);
    }
    barrier_cluster();
}

/* ---- 3 plan and run -------------------------------------------------------------------------- */
template <class K> int64_t weight_mma_clusters(const gk_context *ctx, int64_t tiles) {
    const int64_t most = gk_gpu_of(ctx->index)->num_sms * K::OCC / 2;
    return gk_min_i64(tiles, gk_max_i64(1, most));
}

template <class K>
bool plan_weight_mma(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                     gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int64_t m = weight_rows(g->a);
    if (m > K::NT || m <= K::NT - 8 || !weight_form_serves<typename K::F>(g)) return false;
    if (gpu->smem_per_block < K::SMEM) return false;
    const int64_t tiles = gk_ceil_div(g->n, K::ROWS), clusters = weight_mma_clusters<K>(ctx, tiles);
    plan->kernel = instance;
    plan->tile[0] = K::NT;
    plan->tile[1] = K::ROWS;
    plan->tile[2] = GK_TILE * K::TILES;
    plan->tasks = 2 * tiles;
    plan->chunks = 2;
    plan->waves = (double)tiles / clusters;
    plan->us = weight_mma_us(K::NT, K::OCC, K::F::C, gk_ceil_div(tiles, clusters), weight_k(g));
    return true;
}

template <class K>
gk_status run_weight_mma(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    WeightMmaParams p = {};
    const gk_status status =
        weight_operands<typename K::F, typename K::Stage, K::ROWS, K::TILES, K::NT>(g, &p.w);
    if (status != GK_OK) return status;
    p.f = weight_finish(g);
    p.plain = is_plain(p.f, g->a.dtype);
    p.m = (int)weight_rows(g->a);
    p.n = (int)g->n;
    p.tiles = p.w.rows;
    return launch<weight_mma_kernel<K>>("weight_gemm", ctx,
                                        dim3((unsigned)(2 * weight_mma_clusters<K>(ctx, p.tiles))),
                                        K::THREADS, K::SMEM, p, true, 2);
}

#define MMA90(name, T, C, GROUP, ZERO, NT, OCC)                          \
    {"weight_gemm_mma_" name,                                            \
     element<T>::dtype,                                                  \
     plan_weight_mma<WeightMma<WeightForm<T, C, GROUP, ZERO>, NT, OCC>>, \
     run_weight_mma<WeightMma<WeightForm<T, C, GROUP, ZERO>, NT, OCC>>,  \
     {},                                                                 \
     NULL}
#define MMA90_ALL(name, T, C, GROUP, ZERO)                                                     \
    MMA90(name "_8", T, C, GROUP, ZERO, 8, 2), MMA90(name "_8_wide", T, C, GROUP, ZERO, 8, 1), \
        MMA90(name "_16", T, C, GROUP, ZERO, 16, 2),                                           \
        MMA90(name "_16_wide", T, C, GROUP, ZERO, 16, 1)

#endif
