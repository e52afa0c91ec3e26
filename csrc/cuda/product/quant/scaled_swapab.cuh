/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_swapab.cuh: scaled_gemm on Hopper with swapped operands: up to 64 rows of a, bound by
 * reading b, and scales along k that the wide tiles of scaled_gemm_sm90a do not take.
 *
 *   out^T [N, M] = activation(sum over blocks of k of scale_a scale_b (B^T A^T) + beta c^T + bias)
 *
 * a [M, K], b [K, N]; operands that are not K-major with rows of whole 16 bytes are laid so first,
 * in the workspace. swap-AB: b's columns fill WGMMA's 64 rows, the rows of a (tokens) its BN
 * columns. A block of one producer warpgroup and WGS consumers takes BW = 64 WGS columns of b and
 * BN tokens; the blocks of a cluster take a split of k each.
 * Warp 0 of the producer fills a ring of 256 k by TMA. Where scales change along k its other warps
 * bring those of a stage, a stage each in turn. Each BLOCK of k, 128 or 32, has a sum of its own,
 * so that precise and fast are the same kernel; it joins the others times the scale of its token
 * and that of its column of b. Of up to 64 tokens the products hide behind the loads. Of more, with
 * blocks of 32, a multiplication and a multiply-add for each of 32 products bound the kernel at two
 * fifths of the tensor cores' rate. Sums meet in shared memory, transposed, where each block of the
 * cluster finishes a share of the tokens from what all blocks left, in the order of k.
 * Workspace: operands that are laid anew. Not here: K = 0, e5m2, blocks of 32 of int8. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_SWAPAB_CUH
#define GPUKERN_CUDA_QUANT_SCALED_SWAPAB_CUH

#include "../gemm/order.cuh"
#include "../../ptx/bar.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/cluster_reads.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma_prefetch.cuh"
#include "../../ptx/wgmma_8bit.cuh"
#include "../../tile/codes_sm90a.cuh"
#include "../../tile/tma_ring.cuh"
#include "load_bits.cuh"
#include "scaled_operands.cuh"
#include "tiles.h"

template <class X, class Y> struct swapab_same {
    static constexpr bool value = false;
};
template <class X> struct swapab_same<X, X> {
    static constexpr bool value = true;
};

/* E: of both operands; D, Sum: of the instruction's sums and of those they join; BLOCK: of k that
 * have a sum of their own, and scales; AT_ONCE: such sums that are begun together. */
template <class E_, class D_, class Sum_, int WGS_, int BN_, int BLOCK_, int AT_ONCE_>
struct SwapabKind {
    typedef E_ E;
    typedef D_ D;
    typedef Sum_ Sum;
    static constexpr int WGS = WGS_, BN = BN_, BW = 64 * WGS, PANELS = 2, BK = 128 * PANELS;
    /* PARTS: of a stage */
    static constexpr int BLOCK = BLOCK_, AT_ONCE = AT_ONCE_, PARTS = BK / BLOCK;
    static_assert(PARTS % AT_ONCE == 0, "a stage has no rest");
    typedef wgmma_tile<BW, false, 128> Weights; /* of a panel: 128 of k */
    typedef wgmma_tile<BN, false, 128> Tokens;
    static constexpr int TOKENS_AT = PANELS * Weights::bytes,
                         STAGE_BYTES = TOKENS_AT + PANELS * Tokens::bytes;
    /* of a stage: of tokens, of weights */
    static constexpr int ENTRIES = BN + BW, SCALES = PARTS * ENTRIES * 4;
    static constexpr int BLOCKS = WGS == 1 ? 2 : 1, THREADS = 128 * (WGS + 1); /* blocks an SM */
    static constexpr int MOST = SCALED_SMEM / BLOCKS - 2 * WGMMA_BLOCK_BYTES;
    static constexpr int STAGES = MOST / (STAGE_BYTES + SCALES + 16);
    static constexpr int SCALES_AT = STAGES * STAGE_BYTES,
                         BARRIERS_AT = SCALES_AT + STAGES * SCALES;
    static constexpr int SMEM = BARRIERS_AT + tma_ring<STAGES>::bytes + WGMMA_BLOCK_BYTES;
    /* values of a token's row of sums, which lie where stages lay */
    static constexpr int LD = BW + 4;
    /* a part joins the sums while those begun after it are multiplied */
    static constexpr bool STEPWISE = BLOCK < 128;
    /* else the call says */
    static constexpr bool ALONG_K = BLOCK < 128 || !swapab_same<D, Sum>::value;
    static_assert(wgmma_transposed_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    static_assert(BN * LD * 4 <= STAGES * STAGE_BYTES, "sums lie where stages lay");
    static_assert(
        STAGES >= 3,
        "a warp that brings every third stage's scales is never two rounds of the ring ahead");
};

struct SwapabParams {
    CUtensorMap a, b; /* [rows][k] bytes, boxes of BN and BW rows x 128 */
    gk_scales sa, sb;
    Finish f;
    int m, n, k, steps, splits;  /* steps: of BK */
    int tiles_m, tiles_n, group; /* of tokens, of weights */
    bool along_k;                /* scales change along k */
    bool eights_a,
        eights_b; /* the eight scales of a row in a stage are eight bytes side by side, aligned */
    bool vectors; /* rows of the result begin at whole chunks of 16 bytes, and end there */
};

/* The steps of this block. */
struct SwapabRange {
    int first, last;
};
__device__ __forceinline__ SwapabRange swapab_range(const SwapabParams &p, int rank) {
    return {(int)((int64_t)p.steps * rank / p.splits),
            (int)((int64_t)p.steps * (rank + 1) / p.splits)};
}

/* ---- 1. the producer's warps ----------------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce(const SwapabParams &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s, int token0, int row0,
                                        const SwapabRange &steps) {
    const uint64_t once = l2_first_out();
    for (int step = steps.first; step < steps.last; ++step) {
        ring.wait_empty();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
        mbarrier_arrive_expect_tx(ring.full(), K::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < K::PANELS; ++i) {
            const int k = step * K::BK + 128 * i;
            if (p.tiles_m == 1)
                tma_load_5d_by(stage_s + i * K::Weights::bytes, &p.b, {{k, row0}}, ring.full(),
                               once);
            else
                tma_load_5d(stage_s + i * K::Weights::bytes, &p.b, {{k, row0}}, ring.full());
            tma_load_5d(stage_s + K::TOKENS_AT + i * K::Tokens::bytes, &p.a, {{k, token0}},
                        ring.full());
        }
        ring.advance();
    }
}

/* A lane's scales of R rows, first to last, in the blocks of a stage: entries lane + 32 i of
 * [block][row], or where `eights` says so the eight bytes of rows lane + 32 i. at(row, k): where a
 * scale lies. */
template <class K, int R, class At>
__device__ __forceinline__ void read_scales(uint32_t (&bits)[K::PARTS * R / 32], const gk_scales &s,
                                            bool eights, int first, int last, int k0, int k,
                                            const At &at) {
    const int lane = threadIdx.x % 32;
    if constexpr (K::PARTS == 8)
        if (eights) {
#pragma unroll
            for (int i = 0; i < (R + 31) / 32; ++i) {
                const int row = first + lane + 32 * i;
                uint2 x = make_uint2(0, 0);
                if (lane + 32 * i < R && row < last)
                    x = __ldg((const uint2 *)((const uint8_t *)s.data + at(row, k0)));
                bits[2 * i] = x.x;
                bits[2 * i + 1] = x.y;
            }
            return;
        }
    load_scale_bits(bits, s, [&](int i) {
        const int e = lane + 32 * i, row = first + e % R, to = k0 + e / R * K::BLOCK;
        return e < K::PARTS * R && row < last && to < k ? at(row, to) : INT64_C(-1);
    });
}
template <class K, int R>
__device__ __forceinline__ void write_scales(const uint32_t (&bits)[K::PARTS * R / 32],
                                             const gk_scales &s, bool eights, smem_addr to_s) {
    const int lane = threadIdx.x % 32;
    if constexpr (K::PARTS == 8)
        if (eights) {
#pragma unroll
            for (int i = 0; i < (R + 31) / 32; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (lane + 32 * i < R)
                        st_shared_f32(to_s + 4 * (j * K::ENTRIES + lane + 32 * i),
                                      e8m0_to_f32(bits[2 * i + j / 4] >> 8 * (j % 4) & 0xff));
            return;
        }
#pragma unroll
    for (int i = 0; i < K::PARTS * R / 32; ++i) {
        const int e = lane + 32 * i;
        if (e < K::PARTS * R)
            st_shared_f32(to_s + 4 * (e / R * K::ENTRIES + e % R), scale_from(s, bits[i]));
    }
}

/* The scales of every third stage, [block][tokens, weights]; behind the ends of both anything but
 * NaN, for codes of 0. */
template <class K>
__device__ __forceinline__ void load_scales(const SwapabParams &p, tma_ring<K::STAGES> &ring,
                                            smem_addr ring_s, int token0, int row0,
                                            const SwapabRange &steps) {
    int turn = threadIdx.x / 32; /* stages until this warp's */
    for (int step = steps.first; step < steps.last; ++step, ring.advance()) {
        if (--turn > 0) continue;
        turn = 3;
        uint32_t tokens[K::PARTS * K::BN / 32], weights[K::PARTS * K::BW / 32];
        const int k0 = step * K::BK;
        read_scales<K, K::BN>(tokens, p.sa, p.eights_a, token0, p.m, k0, p.k,
                              [&](int row, int k) { return scale_at(p.sa, row, k); });
        read_scales<K, K::BW>(weights, p.sb, p.eights_b, row0, p.n, k0, p.k,
                              [&](int row, int k) { return scale_at(p.sb, k, row); });
        ring.wait_empty();
        const smem_addr to_s = ring_s + K::SCALES_AT + ring.stage * K::SCALES;
        write_scales<K, K::BN>(tokens, p.sa, p.eights_a, to_s);
        write_scales<K, K::BW>(weights, p.sb, p.eights_b, to_s + 4 * K::BN);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full());
    }
}

/* ---- 2. products ----------------------------------------------------------------------------- */
/* sum += part scale_a scale_b; at_s: scales of the block's tokens, row_s: of the thread's first
 * weight. */
template <class K>
__device__ __forceinline__ void join_scaled(typename K::Sum (&sum)[K::BN / 2],
                                            const typename K::D (&part)[K::BN / 2], smem_addr at_s,
                                            smem_addr row_s) {
    const float sb[2] = {ld_shared_f32(row_s), ld_shared_f32(row_s + 32)};
#pragma unroll
    for (int j = 0; j < K::BN / 8; ++j) {
        const uint2 two = ld_shared_64(at_s + 4 * (8 * j + 2 * (threadIdx.x % 4)));
        const float sa[2] = {__uint_as_float(two.x), __uint_as_float(two.y)};
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sum[4 * j + e] = (typename K::Sum)fmaf((float)part[4 * j + e], sa[e % 2] * sb[e / 2],
                                                   (float)sum[4 * j + e]);
    }
}

/* Until at most `later` groups that were begun are under way. */
template <int MOST> __device__ __forceinline__ void wait_until(int later) {
    if constexpr (MOST > 0) {
        if (later < MOST) return wait_until<MOST - 1>(later);
    }
    wgmma_wait_group<MOST>();
}

template <class K>
__device__ __forceinline__ void consume(const SwapabParams &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s, const SwapabRange &steps,
                                        typename K::Sum *sums) {
    typedef typename K::D D;
    const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    typename K::Sum sum[K::BN / 2];
#pragma unroll
    for (int i = 0; i < K::BN / 2; ++i) sum[i] = 0;
    for (int step = steps.first; step < steps.last; ++step) {
        D part[K::AT_ONCE][K::BN / 2];
        ring.wait_full();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES,
                        scales_s = ring_s + K::SCALES_AT + ring.stage * K::SCALES;
#pragma unroll
        for (int first = 0; first < K::PARTS; first += K::AT_ONCE) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < K::AT_ONCE; ++i) {
                const int k = (first + i) * K::BLOCK, panel = k / 128;
                const uint64_t a = K::Weights::descriptor(stage_s + panel * K::Weights::bytes +
                                                          K::Weights::offset(64 * warpgroup)),
                               b = K::Tokens::descriptor(stage_s + K::TOKENS_AT +
                                                         panel * K::Tokens::bytes);
#pragma unroll
                for (int s = 0; s < K::BLOCK / 32; ++s)
                    wgmma_8bit_ss<typename K::E, typename K::E, K::BN>(
                        part[i], wgmma_descriptor_add(a, k % 128 + 32 * s),
                        wgmma_descriptor_add(b, k % 128 + 32 * s), s > 0);
                if (K::STEPWISE || i == K::AT_ONCE - 1) wgmma_commit_group();
            }
            if (!K::STEPWISE) wgmma_wait_group<0>();
#pragma unroll
            for (int i = 0; i < K::AT_ONCE; ++i) {
                if (K::STEPWISE) wait_until<K::AT_ONCE - 1>(K::AT_ONCE - 1 - i);
                wgmma_pin(part[i]);
                if (K::ALONG_K || p.along_k) {
                    const smem_addr at_s = scales_s + 4 * (first + i) * K::ENTRIES;
                    join_scaled<K>(sum, part[i], at_s,
                                   at_s + 4 * (K::BN + 64 * warpgroup + 16 * warp + lane / 4));
                } else {
#pragma unroll
                    for (int j = 0; j < K::BN / 2; ++j) sum[j] += (typename K::Sum)part[i][j];
                }
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

/* ---- 3. results ------------------------------------------------------------------------------ */
__device__ __forceinline__ void add_words(float (&v)[4], const uint4 &x) {
    v[0] += __uint_as_float(x.x);
    v[1] += __uint_as_float(x.y);
    v[2] += __uint_as_float(x.z);
    v[3] += __uint_as_float(x.w);
}
__device__ __forceinline__ void add_words(int32_t (&v)[4], const uint4 &x) {
    v[0] += (int)x.x;
    v[1] += (int)x.y;
    v[2] += (int)x.z;
    v[3] += (int)x.w;
}

/* Four neighbours of a token's row. */
__device__ __forceinline__ void store_four(const SwapabParams &p, int token, int col, float (&v)[4],
                                           const float (&bias)[4]) {
    const Finish &f = p.f;
    if (f.c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (col + i < p.n)
                v[i] = fmaf(f.beta, load_any(f.c, f.c_dtype, token * f.c_row + (col + i) * f.c_col),
                            v[i]);
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
            v[0] = v[1];
            v[1] = v[2];
            v[2] = v[3];
        }
    } else if (f.out_dtype == GK_F32) {
        *(float4 *)((float *)f.out + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (f.out_dtype == GK_BF16) {
        *(uint2 *)((uint16_t *)f.out + at) =
            make_uint2(pack2<__nv_bfloat16>(v[0], v[1]), pack2<__nv_bfloat16>(v[2], v[3]));
    } else if (f.out_dtype == GK_F16) {
        *(uint2 *)((uint16_t *)f.out + at) =
            make_uint2(pack2<__half>(v[0], v[1]), pack2<__half>(v[2], v[3]));
    } else {
        *(uint32_t *)((uint8_t *)f.out + at) = codes_x4<CodesByHardware>(f.out_dtype, v);
    }
}

/* This block's share of the tokens, from the sums of all blocks of the cluster. */
template <class K>
__device__ __forceinline__ void finish_tokens(const SwapabParams &p, smem_addr sums_s, int token0,
                                              int row0, int rank) {
    constexpr int COLS = K::BW / 4, STEP = K::THREADS / COLS,
                  MOST = (K::BN + STEP - 1) / STEP; /* tokens side by side; of a thread */
    const int tokens = K::BN / p.splits, col = threadIdx.x % COLS * 4, first = threadIdx.x / COLS;
    uint32_t sa[MOST], sb[4];
    float bias[4];
    load_scale_bits(sb, p.sb,
                    [&](int i) { return scale_at(p.sb, 0, min(row0 + col + i, p.n - 1)); });
    load_scale_bits(sa, p.sa, [&](int i) {
        const int at = first + i * STEP;
        return at < tokens ? scale_at(p.sa, min(token0 + rank * tokens + at, p.m - 1), 0)
                           : INT64_C(-1);
    });
    load_bias(bias, p.f, [&](int i) { return min(row0 + col + i, p.n - 1); });
    if (p.splits > 1)
        barrier_cluster_ordered();
    else
        __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int at = first + i * STEP, token = token0 + rank * tokens + at;
        if (at >= tokens || token >= p.m || row0 + col >= p.n) break;
        const smem_addr at_s = sums_s + 4 * ((token - token0) * K::LD + col);
        typename K::Sum all[4] = {0, 0, 0, 0};
        if (p.splits == 1) {
            add_words(all, ld_shared_128(at_s));
        } else if (p.splits == 2) {
            const uint4 x = ld_cluster_128(mapa(at_s, 0)), y = ld_cluster_128(mapa(at_s, 1));
            add_words(all, x);
            add_words(all, y);
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
            const float by =
                K::ALONG_K || p.along_k ? 1.f : scale_from(p.sa, sa[i]) * scale_from(p.sb, sb[e]);
            v[e] = (float)all[e] * by;
        }
        store_four(p, token, row0 + col, v, bias);
    }
    if (p.splits > 1) barrier_cluster_ordered(); /* no block leaves while others read its sums */
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::BLOCKS)
    scaled_gemm_swapab_kernel(const __grid_constant__ SwapabParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(ring_s + K::BARRIERS_AT);
    const int rank = p.splits == 1 ? 0 : (int)cluster_ctarank(), tile = (int)blockIdx.x / p.splits;
    int token0 = 0, row0 = tile * K::BW;
    if (p.tiles_m > 1) {
        const TilePlace at = tile_place(tile, p.tiles_m, p.tiles_n, p.group);
        token0 = at.row * K::BN;
        row0 = at.col * K::BW;
    }
    const SwapabRange steps = swapab_range(p, rank);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.b);
        prefetch_tensormap(&p.a);
        for (int i = steps.first; i < min(steps.last, steps.first + K::STAGES); ++i)
            for (int panel = 0; panel < K::PANELS; ++panel)
                tma_prefetch_5d(&p.b, {{i * K::BK + 128 * panel, row0}});
        ring.init(4 * K::WGS, K::ALONG_K || p.along_k ? 2 : 1);
        fence_mbarrier_init();
    }
    griddepcontrol_wait();
    __syncthreads();
    griddepcontrol_launch_dependents();
    if (threadIdx.x >= 128) {
        consume<K>(p, ring, ring_s, steps,
                   (typename K::Sum *)(smem + (ring_s - cvta_to_shared(smem))));
    } else if (threadIdx.x < 32) {
        if (elect_one()) produce<K>(p, ring, ring_s, token0, row0, steps);
    } else if (K::ALONG_K || p.along_k) {
        load_scales<K>(p, ring, ring_s, token0, row0, steps);
    }
    __syncwarp();
    finish_tokens<K>(p, ring_s, token0, row0, rank);
}

/* ---- 4. plan and run ------------------------------------------------------------------------- */
enum {
    KEY_WGS,
    KEY_BN,
    KEY_BLOCK,
    KEY_FLOATS /* int8: sums are floats, for scales along k */
};

struct SwapabPlan {
    ScaledOperands operands;
    int splits;
};

inline int64_t swapab_tiles(const gk_cuda_instance *row, const gk_scaled_gemm_args *g) {
    return gk_ceil_div(g->b.shape[1], 64 * row->key[KEY_WGS]) *
           gk_ceil_div(g->a.shape[0], row->key[KEY_BN]);
}

inline bool swapab_plan_row(const gk_cuda_instance *row, const gk_context *ctx, const void *args,
                            gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (m > row->key[KEY_BN] && row->key[KEY_BN] < 32) return false;
    if (g->a.dtype != row->dtype || g->b.dtype != row->dtype) return false;
    const int block = scales_along_k(g);
    if ((row->key[KEY_BLOCK] == 32) != (block == 32)) return false;
    if (g->a.dtype == GK_I8 && row->key[KEY_FLOATS] != (block > 0)) return false;
    SwapabPlan *x = &gk_own<SwapabPlan>(plan);
    size_t bytes = 0;
    x->operands = scaled_operands_plan(g, &bytes);
    const int64_t tiles = swapab_tiles(row, g), steps = gk_ceil_div(k, 256);
    const int64_t blocks =
        (int64_t)gk_gpu_of(ctx->index)->num_sms * (row->key[KEY_WGS] == 1 ? 2 : 1);
    x->splits = 1;
    const auto fits = [&](int splits) {
        return splits * tiles <= (splits > 2 ? blocks * 3 / 4 : blocks) &&
               splits * (row->key[KEY_BN] < 64 ? SCALED_SPLIT_16 : SCALED_SPLIT_64) <= steps;
    };
    while (x->splits < SCALED_SPLITS && fits(2 * x->splits)) x->splits *= 2;
    plan->workspace_bytes = bytes;
    plan->tile[0] = 64 * row->key[KEY_WGS];
    plan->tile[1] = row->key[KEY_BN];
    plan->tile[2] = 256;
    plan->tasks = tiles * x->splits;
    plan->chunks = x->splits;
    plan->kernel = row;
    return tiles * x->splits <= INT32_MAX;
}

/* Of MXFP8 as quantize leaves it. */
inline bool eight_bytes(const gk_scales &s, int k_log2, int64_t along_k, int64_t along_rows,
                        int64_t k) {
    return s.dtype == GK_E8M0 && k_log2 == 5 && along_k == 1 && along_rows % 8 == 0 &&
           k % 256 == 0 && (uintptr_t)s.data % 8 == 0;
}

template <class K>
gk_status swapab_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const SwapabPlan &x = gk_own<SwapabPlan>(plan);
    SwapabParams p;
    const gk_status status =
        scaled_operands_run(ctx, x.operands, g, workspace, K::BN, K::BW, &p.a, &p.b);
    if (status != GK_OK) return status;
    p.m = (int)g->a.shape[0];
    p.n = (int)g->b.shape[1];
    p.k = (int)g->a.shape[1];
    p.steps = (int)gk_ceil_div(p.k, K::BK);
    p.splits = x.splits;
    p.tiles_m = (int)gk_ceil_div(p.m, K::BN);
    p.tiles_n = (int)gk_ceil_div(p.n, K::BW);
    p.group = SCALED_GROUP;
    p.sa = gk_scales_of(&g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(&g->scale_b, p.k, p.n, true);
    p.along_k = scales_along_k(g) > 0;
    p.eights_a = p.sa.row_log2 == 0 && eight_bytes(p.sa, p.sa.col_log2, p.sa.col, p.sa.row, p.k);
    p.eights_b = p.sb.col_log2 == 0 && eight_bytes(p.sb, p.sb.row_log2, p.sb.row, p.sb.col, p.k);
    p.f = finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
    const int64_t chunk = 16 / gk_dtype_bytes(g->out.dtype);
    p.vectors = p.n % chunk == 0 && p.f.out_row % chunk == 0 && (uintptr_t)p.f.out % 16 == 0;
    return launch<scaled_gemm_swapab_kernel<K>>("scaled_gemm", ctx, dim3((unsigned)plan->tasks),
                                                K::THREADS, K::SMEM, p, true, x.splits);
}

#define SWAPAB_ROW(name, dtype, E, D, Sum, WGS, BN, BLOCK, AT_ONCE)   \
    {name,                                                            \
     dtype,                                                           \
     swapab_plan_row,                                                 \
     swapab_run<SwapabKind<E, D, Sum, WGS, BN, BLOCK, AT_ONCE>>,      \
     {WGS, BN, BLOCK, dtype == GK_I8 && !swapab_same<D, Sum>::value}, \
     NULL}

#endif
