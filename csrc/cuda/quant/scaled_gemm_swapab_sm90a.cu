/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_swapab_sm90a: scaled_gemm on Hopper for up to 64 rows of a, bound by reading b.
 *
 *   out^T [N, M] = activation(sum over blocks of k of scale_a scale_b (B^T A^T) + beta c^T + bias)
 *
 * a [M, K], b [K, N]; operands that are not K-major with rows of whole 16 bytes are laid so first, in the workspace.
 * swap-AB: b's columns fill WGMMA's 64 rows, the rows of a (tokens) its BN columns. A block of one producer warpgroup and WGS consumers
 * takes BW = 64 WGS columns of b; the blocks of a cluster take a split of k each.
 * Warp 0 of the producer fills a ring of 256 k by TMA. Where scales change along k its other warps bring those of a stage, a stage each in
 * turn. Each 128 of k have a sum of their own, so that precise and fast are the same kernel: the products hide behind the loads.
 * Sums meet in shared memory, transposed, where each block of the cluster finishes a share of the tokens from what all blocks left, in the
 * order of k.
 * Workspace: operands that are laid anew. Not here: K = 0, blocks of 32, int8 with scales along k, e5m2. */
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cluster_reads.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/tma_prefetch.cuh"
#include "../ptx/wgmma_8bit.cuh"
#include "../tile/codes_sm90a.cuh"
#include "../tile/tma_ring.cuh"
#include "load_bits.cuh"
#include "scaled_operands.cuh"
#include "tiles.h"

namespace {

/* E: of both operands; D: of the instruction's sums. */
template <class E_, class D_, int WGS_, int BN_> struct Kind {
    typedef E_ E;
    typedef D_ D;
    static constexpr int WGS = WGS_, BN = BN_, BW = 64 * WGS, PANELS = 2, BK = 128 * PANELS;
    typedef wgmma_tile<BW, false, 128> Weights; /* of a panel: 128 of k */
    typedef wgmma_tile<BN, false, 128> Tokens;
    static constexpr int TOKENS_AT = PANELS * Weights::bytes, STAGE_BYTES = TOKENS_AT + PANELS * Tokens::bytes;
    static constexpr int ENTRIES = BN + BW, SCALES = PANELS * ENTRIES * 4;     /* of a stage: of tokens, of weights */
    static constexpr int BLOCKS = WGS == 1 ? 2 : 1, THREADS = 128 * (WGS + 1); /* blocks an SM */
    static constexpr int MOST = SCALED_SMEM / BLOCKS - 2 * WGMMA_BLOCK_BYTES;
    static constexpr int STAGES = MOST / (STAGE_BYTES + SCALES + 16);
    static constexpr int SCALES_AT = STAGES * STAGE_BYTES, BARRIERS_AT = SCALES_AT + STAGES * SCALES;
    static constexpr int SMEM = BARRIERS_AT + tma_ring<STAGES>::bytes + WGMMA_BLOCK_BYTES;
    static constexpr int LD = BW + 4; /* values of a token's row of sums, which lie where stages lay */
    static_assert(wgmma_transposed_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    static_assert(BN * LD * 4 <= STAGES * STAGE_BYTES, "sums lie where stages lay");
};

struct Params {
    CUtensorMap a, b; /* [rows][k] bytes, boxes of BN and BW rows x 128 */
    gk_scales sa, sb;
    Finish f;
    int m, n, k, steps, splits; /* steps: of BK */
    bool along_k;               /* scales change along k */
    bool vectors;               /* rows of the result begin at whole chunks of 16 bytes, and end there */
};

/* The steps of this block. */
struct Range {
    int first, last;
};
__device__ __forceinline__ Range range_of(const Params &p, int rank) {
    return {(int)((int64_t)p.steps * rank / p.splits), (int)((int64_t)p.steps * (rank + 1) / p.splits)};
}

/* ---- 1. the producer's warps ---------------------------------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce(const Params &p, tma_ring<K::STAGES> &ring, smem_addr ring_s, int row0,
                                        const Range &steps) {
    const uint64_t once = l2_first_out();
    for (int step = steps.first; step < steps.last; ++step) {
        ring.wait_empty();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
        mbarrier_arrive_expect_tx(ring.full(), K::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < K::PANELS; ++i) {
            const int k = step * K::BK + 128 * i;
            tma_load_5d_by(stage_s + i * K::Weights::bytes, &p.b, {{k, row0}}, ring.full(), once);
            tma_load_5d(stage_s + K::TOKENS_AT + i * K::Tokens::bytes, &p.a, {{k, 0}}, ring.full());
        }
        ring.advance();
    }
}

/* The scales of every third stage, [panel][tokens, weights]; 0 behind the ends of both. */
template <class K>
__device__ __forceinline__ void load_scales(const Params &p, tma_ring<K::STAGES> &ring, smem_addr ring_s, int row0,
                                            const Range &steps) {
    constexpr int EACH_A = K::PANELS * K::BN / 32, EACH_B = K::PANELS * K::BW / 32;
    const int lane = threadIdx.x % 32;
    int turn = threadIdx.x / 32; /* stages until this warp's */
    for (int step = steps.first; step < steps.last; ++step, ring.advance()) {
        if (--turn > 0) continue;
        turn = 3;
        uint32_t tokens[EACH_A], weights[EACH_B];
        load_scale_bits(tokens, p.sa, [&](int i) {
            const int e = lane + 32 * i, token = e % K::BN, k = step * K::BK + e / K::BN * 128;
            return e < K::PANELS * K::BN && token < p.m && k < p.k ? scale_at(p.sa, token, k) : INT64_C(-1);
        });
        load_scale_bits(weights, p.sb, [&](int i) {
            const int e = lane + 32 * i, n = row0 + e % K::BW, k = step * K::BK + e / K::BW * 128;
            return n < p.n && k < p.k ? scale_at(p.sb, k, n) : INT64_C(-1);
        });
        ring.wait_empty();
        const smem_addr to_s = ring_s + K::SCALES_AT + ring.stage * K::SCALES;
#pragma unroll
        for (int i = 0; i < EACH_A; ++i) {
            const int e = lane + 32 * i;
            if (e < K::PANELS * K::BN)
                st_shared_f32(to_s + 4 * (e / K::BN * K::ENTRIES + e % K::BN), scale_from(p.sa, tokens[i]));
        }
#pragma unroll
        for (int i = 0; i < EACH_B; ++i) {
            const int e = lane + 32 * i;
            st_shared_f32(to_s + 4 * (e / K::BW * K::ENTRIES + K::BN + e % K::BW), scale_from(p.sb, weights[i]));
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.full());
    }
}

/* ---- 2. products ------------------------------------------------------------------------------------------------ */
template <class K>
__device__ __forceinline__ void consume(const Params &p, tma_ring<K::STAGES> &ring, smem_addr ring_s,
                                        const Range &steps, typename K::D *sums) {
    typedef typename K::D D;
    const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    D sum[K::BN / 2];
#pragma unroll
    for (int i = 0; i < K::BN / 2; ++i) sum[i] = 0;
    for (int step = steps.first; step < steps.last; ++step) {
        D part[K::PANELS][K::BN / 2];
        ring.wait_full();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES,
                        scales_s = ring_s + K::SCALES_AT + ring.stage * K::SCALES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < K::PANELS; ++i) {
            const uint64_t a = K::Weights::descriptor(stage_s + i * K::Weights::bytes +
                                                      K::Weights::offset(64 * warpgroup)),
                           b = K::Tokens::descriptor(stage_s + K::TOKENS_AT + i * K::Tokens::bytes);
#pragma unroll
            for (int s = 0; s < 4; ++s)
                wgmma_8bit_ss<typename K::E, typename K::E, K::BN>(part[i], wgmma_descriptor_add(a, 32 * s),
                                                                   wgmma_descriptor_add(b, 32 * s), s > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < K::PANELS; ++i) {
            wgmma_pin(part[i]);
            if (p.along_k) {
                const smem_addr at_s = scales_s + 4 * i * K::ENTRIES,
                                row_s = at_s + 4 * (K::BN + 64 * warpgroup + 16 * warp + lane / 4);
                const float sb[2] = {ld_shared_f32(row_s), ld_shared_f32(row_s + 32)};
#pragma unroll
                for (int j = 0; j < K::BN / 8; ++j) {
                    const uint2 two = ld_shared_64(at_s + 4 * (8 * j + 2 * (lane % 4)));
                    const float sa[2] = {__uint_as_float(two.x), __uint_as_float(two.y)};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        sum[4 * j + e] =
                            (D)fmaf((float)part[i][4 * j + e], sa[e % 2] * sb[e / 2], (float)sum[4 * j + e]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < K::BN / 2; ++j) sum[j] += part[i][j];
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.empty());
        ring.advance();
    }
    bar_sync(1, 128 * K::WGS); /* all stages have been read */
#pragma unroll
    for (int i = 0; i < K::BN / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        sums[d.col * K::LD + 64 * warpgroup + d.row] = sum[i];
    }
}

/* ---- 3. results ---------------------------------------------------------------------------------------------------- */
__device__ __forceinline__ void add_words(float (&v)[4], const uint4 &x) {
    v[0] += __uint_as_float(x.x), v[1] += __uint_as_float(x.y), v[2] += __uint_as_float(x.z),
        v[3] += __uint_as_float(x.w);
}
__device__ __forceinline__ void add_words(int32_t (&v)[4], const uint4 &x) {
    v[0] += (int)x.x, v[1] += (int)x.y, v[2] += (int)x.z, v[3] += (int)x.w;
}

/* Four neighbours of a token's row. */
__device__ __forceinline__ void store_four(const Params &p, int token, int col, float (&v)[4], const float (&bias)[4]) {
    const Finish &f = p.f;
    if (f.c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (col + i < p.n)
                v[i] = fmaf(f.beta, load_any(f.c, f.c_dtype, token * f.c_row + (col + i) * f.c_col), v[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += bias[i];
    if (f.activation != GK_ACT_NONE) activate_in_place<4>(f.activation, v);
    if (f.out_scale) {
        const float by = *f.out_scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fdiv_rn(v[i], by);
    }
    const int64_t at = token * f.out_row + col;
    if (!p.vectors) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            if (col + i < p.n) store_value<CodesByHardware>(f, token, col + i, v[0]);
            v[0] = v[1], v[1] = v[2], v[2] = v[3];
        }
    } else if (f.out_dtype == GK_F32) {
        *(float4 *)((float *)f.out + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (f.out_dtype == GK_BF16) {
        *(uint2 *)((uint16_t *)f.out + at) =
            make_uint2(pack2<__nv_bfloat16>(v[0], v[1]), pack2<__nv_bfloat16>(v[2], v[3]));
    } else if (f.out_dtype == GK_F16) {
        *(uint2 *)((uint16_t *)f.out + at) = make_uint2(pack2<__half>(v[0], v[1]), pack2<__half>(v[2], v[3]));
    } else {
        *(uint32_t *)((uint8_t *)f.out + at) = codes_x4<CodesByHardware>(f.out_dtype, v);
    }
}

/* This block's share of the tokens, from the sums of all blocks of the cluster. */
template <class K>
__device__ __forceinline__ void finish_tokens(const Params &p, smem_addr sums_s, int row0, int rank) {
    constexpr int COLS = K::BW / 4, STEP = K::THREADS / COLS,
                  MOST = (K::BN + STEP - 1) / STEP; /* tokens side by side; of a thread */
    const int tokens = K::BN / p.splits, col = threadIdx.x % COLS * 4, first = threadIdx.x / COLS;
    uint32_t sa[MOST], sb[4];
    float bias[4];
    load_scale_bits(sb, p.sb, [&](int i) { return scale_at(p.sb, 0, min(row0 + col + i, p.n - 1)); });
    load_scale_bits(sa, p.sa, [&](int i) {
        const int at = first + i * STEP;
        return at < tokens ? scale_at(p.sa, min(rank * tokens + at, p.m - 1), 0) : INT64_C(-1);
    });
    load_bias(bias, p.f, [&](int i) { return min(row0 + col + i, p.n - 1); });
    if (p.splits > 1)
        barrier_cluster_ordered();
    else
        __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int at = first + i * STEP, token = rank * tokens + at;
        if (at >= tokens || token >= p.m || row0 + col >= p.n) break;
        const smem_addr at_s = sums_s + 4 * (token * K::LD + col);
        typename K::D all[4] = {0, 0, 0, 0};
        if (p.splits == 1) {
            add_words(all, ld_shared_128(at_s));
        } else if (p.splits == 2) {
            const uint4 x = ld_cluster_128(mapa(at_s, 0)), y = ld_cluster_128(mapa(at_s, 1));
            add_words(all, x), add_words(all, y);
        } else {
#pragma unroll 1
            for (int s = 0; s < p.splits; s += 4) {
                uint4 x[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j] = ld_cluster_128(mapa(at_s, s + j));
#pragma unroll
                for (int j = 0; j < 4; ++j) add_words(all, x[j]);
            }
        }
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float by = p.along_k ? 1.f : scale_from(p.sa, sa[i]) * scale_from(p.sb, sb[e]);
            v[e] = (float)all[e] * by;
        }
        store_four(p, token, row0 + col, v, bias);
    }
    if (p.splits > 1) barrier_cluster_ordered(); /* no block leaves while others read its sums */
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::BLOCKS) scaled_gemm_swapab_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s = (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(ring_s + K::BARRIERS_AT);
    const int rank = p.splits == 1 ? 0 : (int)cluster_ctarank(), row0 = (int)blockIdx.x / p.splits * K::BW;
    const Range steps = range_of(p, rank);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.b);
        prefetch_tensormap(&p.a);
        for (int i = steps.first; i < min(steps.last, steps.first + K::STAGES); ++i)
            for (int panel = 0; panel < K::PANELS; ++panel) tma_prefetch_5d(&p.b, {{i * K::BK + 128 * panel, row0}});
        ring.init(4 * K::WGS, p.along_k ? 2 : 1);
        fence_mbarrier_init();
    }
    griddepcontrol_wait();
    __syncthreads();
    griddepcontrol_launch_dependents();
    if (threadIdx.x >= 128) {
        consume<K>(p, ring, ring_s, steps, (typename K::D *)(smem + (ring_s - cvta_to_shared(smem))));
    } else if (threadIdx.x < 32) {
        if (elect_one()) produce<K>(p, ring, ring_s, row0, steps);
    } else if (p.along_k) {
        load_scales<K>(p, ring, ring_s, row0, steps);
    }
    __syncwarp();
    finish_tokens<K>(p, ring_s, row0, rank);
}

/* ---- 4. plan and run ------------------------------------------------------------------------------------------ */
enum {
    KEY_WGS,
    KEY_BN
};

struct Plan {
    ScaledOperands operands;
    int splits;
};

bool plan_row(const gk_cuda_instance *row, const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > row->key[KEY_BN] || n > 1 << 30 || k > 1 << 30) return false;
    if (g->a.dtype != row->dtype || g->b.dtype != row->dtype) return false;
    const gk_scales sa = gk_scales_of(&g->scale_a, m, k, false), sb = gk_scales_of(&g->scale_b, k, n, true);
    if (sa.col_log2 < 7 || sb.row_log2 < 7) return false;
    if (g->a.dtype == GK_I8 && (sa.col_log2 == 7 || sb.row_log2 == 7)) return false;
    Plan *x = &gk_own<Plan>(plan);
    size_t bytes = 0;
    x->operands = scaled_operands_plan(g, &bytes);
    const int64_t tiles = gk_ceil_div(n, 64 * row->key[KEY_WGS]), steps = gk_ceil_div(k, 256);
    const int64_t blocks = (int64_t)gk_gpu_of(ctx->index)->num_sms * (row->key[KEY_WGS] == 1 ? 2 : 1);
    x->splits = 1;
    const auto fits = [&](int splits) {
        return splits * tiles <= (splits > 2 ? blocks * 3 / 4 : blocks) &&
               splits * (row->key[KEY_BN] < 64 ? SCALED_SPLIT_16 : SCALED_SPLIT_64) <= steps;
    };
    while (x->splits < SCALED_SPLITS && fits(2 * x->splits)) x->splits *= 2;
    plan->workspace_bytes = bytes;
    plan->tile[0] = 64 * row->key[KEY_WGS], plan->tile[1] = row->key[KEY_BN], plan->tile[2] = 256;
    plan->tasks = tiles * x->splits, plan->chunks = x->splits;
    plan->kernel = row;
    return tiles * x->splits <= INT32_MAX;
}

template <class K> gk_status run_row(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const Plan &x = gk_own<Plan>(plan);
    Params p;
    const gk_status status = scaled_operands_run(ctx, x.operands, g, workspace, K::BN, K::BW, &p.a, &p.b);
    if (status != GK_OK) return status;
    p.m = (int)g->a.shape[0], p.n = (int)g->b.shape[1], p.k = (int)g->a.shape[1];
    p.steps = (int)gk_ceil_div(p.k, K::BK), p.splits = x.splits;
    p.sa = gk_scales_of(&g->scale_a, p.m, p.k, false), p.sb = gk_scales_of(&g->scale_b, p.k, p.n, true);
    p.along_k = p.sa.col_log2 == 7 || p.sb.row_log2 == 7;
    p.f = finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
    const int64_t chunk = 16 / gk_dtype_bytes(g->out.dtype);
    p.vectors = p.n % chunk == 0 && p.f.out_row % chunk == 0 && (uintptr_t)p.f.out % 16 == 0;
    return launch<scaled_gemm_swapab_kernel<K>>("scaled_gemm", ctx, dim3((unsigned)plan->tasks), K::THREADS, K::SMEM, p,
                                                true, x.splits);
}

#define ROW(name, dtype, E, D, WGS, BN) \
    {"scaled_gemm_swapab_sm90a_" name, dtype, plan_row, run_row<Kind<E, D, WGS, BN>>, {WGS, BN}, NULL}

const gk_cuda_instance instances[] = {
    ROW("e4m3_64x16", GK_E4M3, e4m3, float, 1, 16),  ROW("e4m3_64x32", GK_E4M3, e4m3, float, 1, 32),
    ROW("e4m3_128x64", GK_E4M3, e4m3, float, 2, 64), ROW("e4m3_64x64", GK_E4M3, e4m3, float, 1, 64),
    ROW("i8_64x16", GK_I8, int8_t, int32_t, 1, 16),  ROW("i8_64x64", GK_I8, int8_t, int32_t, 1, 64),
};

/* The narrowest that holds the tokens; of two, the one of more weights where it has tiles for all SMs. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    for (const gk_cuda_instance &row : instances) {
        const bool wide = row.key[KEY_WGS] == 2;
        if (wide && gk_ceil_div(g->b.shape[1], 128) < gk_gpu_of(ctx->index)->num_sms) continue;
        if (g->a.dtype == row.dtype && plan_row(&row, ctx, args, plan)) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_swapab_sm90a_table = {instances, sizeof instances / sizeof instances[0],
                                                                    90, plan_best};
