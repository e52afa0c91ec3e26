/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm on Hopper: WGMMA of 8-bit operands, sums in two levels.
 *
 *   out = activation(sum over blocks of k of scale_a scale_b (A B) + beta c + bias)
 *
 * a [M, K], b [K, N]; operands that are not K-major with rows of whole 16 bytes are laid so first,
 * in the workspace. A block of 3 warpgroups takes tiles of 128 MS x 128: one producer warp fills a
 * ring of 128 k by TMA, two warpgroups multiply 64 MS rows each. How they sum (Sums):
 *   ALL      one sum over all of k: int8, whose sums are exact, and the fast mode of 8-bit floats
 *   PARTS    four instructions, 128 of k, into fresh registers, which then join the sums: what the instruction adds up keeps 13 bits
 *   BLOCKS   the same, of int8 too, and a part joins times the scale of its row, and one scale of the tile's columns
 * Scales along k are read by the producer's other warps, in any order and stride, and meet in
 * shared memory; those of the tile's columns that do not change along k are read by all threads
 * once a tile.
 * FFMA beside WGMMA costs more than FADD: scales that do not change along k wait for the epilogue.
 * DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2. Workspace: operands that are laid anew. Not
 * here: K = 0, scales of each column along k, blocks of 32, powers of two in a byte along k, mixed
 * floats with scales along k. */
#include "../gemm/order.cuh"
#include "../../ptx/bar.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma_8bit.cuh"
#include "../../tile/codes_sm90a.cuh"
#include "../../tile/tma_ring.cuh"
#include "product.cuh"
#include "scaled_operands.cuh"
#include "tiles.h"

namespace {

enum Sums {
    ALL,
    PARTS,
    BLOCKS
};

template <bool FIRST, class A, class B> struct Either {
    typedef A type;
};
template <class A, class B> struct Either<false, A, B> {
    typedef B type;
};

template <class A_, class B_, class D_, int MS_, Sums SUMS_> struct Kind {
    typedef A_ A;
    typedef B_ B;
    typedef D_ D; /* of the instruction's sums */
    static constexpr int MS = MS_, BM = 128 * MS, BN = 128, BK = 128;
    static constexpr Sums SUMS = SUMS_;
    typedef wgmma_tile<BM, false, BK> TileA;
    typedef wgmma_tile<BN, false, BK> TileB;
    static constexpr int STAGE_BYTES = TileA::bytes + TileB::bytes,
                         STAGES = MS == 2 ? SCALED_STAGES_256 : SCALED_STAGES_128;
    /* of a tile's columns, and of the next */
    static constexpr int SCALES = 2 * BN * 4;
    static constexpr int BLOCKS_AT = STAGES * STAGE_BYTES, /* scales of each stage's rows */
        BARRIERS_AT = BLOCKS_AT + (SUMS == BLOCKS ? STAGES * BM * 4 : 0);
    static constexpr int SMEM = BARRIERS_AT + tma_ring<STAGES>::bytes + SCALES + WGMMA_BLOCK_BYTES;
    static constexpr int THREADS = 384;
};

struct Params {
    CUtensorMap a, b; /* [rows][k] bytes, boxes of BM and BN rows x 128 */
    gk_scales sa, sb;
    Finish f;
    int64_t m, n, k, step_a, step_b; /* steps: of scales, from one block of k to the next */
    int tiles_m, tiles_n, group;
    bool fours; /* BLOCKS: four scales of a row side by side, aligned */
    bool plain; /* nothing but scales and rounding to 16 bits, 16 bytes of a row at a time */
};

/* ---- 1. the epilogue ------------------------------------------------------------------------- */
/* Four words of each of a quad's lanes are transposed: lane t gets word t of all four. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int t) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const bool high = t & bit;
            const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + bit], bit);
            (high ? w[i] : w[i + bit]) = got;
        }
}

/* 64 x 128 sums of a warpgroup; row: of the thread's first, col0: the tile's, scales: of its
 * columns. */
template <class K, class V>
__device__ __forceinline__ void store_sums(const Params &p, V (&v)[64], int64_t row, int64_t col0,
                                           const float *scales) {
    const bool along_k = K::SUMS == BLOCKS;
    const int t = threadIdx.x % 4;
    const float sa[2] = {along_k ? 1.f : scale_of(p.sa, min(row, p.m - 1), 0),
                         along_k ? 1.f : scale_of(p.sa, min(row + 8, p.m - 1), 0)};
    if (p.plain) {
#pragma unroll
        for (int jj = 0; jj < 4; ++jj)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t w[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = 4 * (4 * jj + j) + 2 * h, c = 8 * (4 * jj + j) + 2 * t;
                    float x = (float)v[at], y = (float)v[at + 1];
                    if (!along_k) {
                        const float2 sb = *(const float2 *)(scales + c);
                        x *= sa[h] * sb.x;
                        y *= sa[h] * sb.y;
                    }
                    w[j] =
                        p.f.out_dtype == GK_BF16 ? pack2<__nv_bfloat16>(x, y) : pack2<__half>(x, y);
                }
                transpose_quad(w, t);
                const int64_t r = row + 8 * h, c = col0 + 8 * (4 * jj + t);
                if (r < p.m && c < p.n)
                    *(uint4 *)((uint16_t *)p.f.out + r * p.f.out_row + c) =
                        make_uint4(w[0], w[1], w[2], w[3]);
            }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 32;
         /* one body, past which the values move: pairs at columns 8 (i / 2), rows 8 (i % 2) */
         ++i) {
        const float two[2] = {(float)v[0], (float)v[1]};
        const int64_t r = row + 8 * (i % 2);
        const int c = 8 * (i / 2) + 2 * t;
#pragma unroll
        for (int j = 0; j < 62; ++j) v[j] = v[j + 2];
#pragma unroll 1
        for (int e = 0; e < 2; ++e) {
            if (r >= p.m || col0 + c + e >= p.n) continue;
            float x = e ? two[1] : two[0];
            if (!along_k) x *= (i % 2 ? sa[1] : sa[0]) * scales[c + e];
            store_value<CodesByHardware>(p.f, r, col0 + c + e, finish(p.f, r, col0 + c + e, x));
        }
    }
}

/* ---- 2. products ----------------------------------------------------------------------------- */
/* 64 rows times 128 columns of one stage, 128 of k, into d. */
template <class K, class D>
__device__ __forceinline__ void multiply(D (&d)[64], uint64_t a, uint64_t b, bool fresh) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
        wgmma_8bit_ss<typename K::A, typename K::B, 128>(
            d, wgmma_descriptor_add(a, 32 * s), wgmma_descriptor_add(b, 32 * s), !fresh || s > 0);
}

/* A part's element as a float. Of int8 exact up to 2^22, where 128 products reach 2^21: they are
 * the low bits of 1.5 2^23, which is taken away. An addition and a subtraction take less than the
 * instruction that converts. */
__device__ __forceinline__ float part_value(float x) { return x; }
__device__ __forceinline__ float part_value(int32_t x) {
    return __uint_as_float((uint32_t)x + 0x4b400000u) - 12582912.f;
}

/* BLOCKS: by each warp, which has read scales of the stage. */
template <class K> __device__ __forceinline__ void release(const tma_ring<K::STAGES> &ring) {
    if (K::SUMS == BLOCKS) __syncwarp();
    if (threadIdx.x % (K::SUMS == BLOCKS ? 32 : 128) == 0) mbarrier_arrive(ring.empty());
}

template <class K>
__device__ __forceinline__ void consume(const Params &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s, float *scales_s) {
    typedef typename K::D D;
    const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    const int steps = (int)((p.k + K::BK - 1) / K::BK);
    int turn = 0;
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x, turn ^= 1) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        const int64_t col0 = (int64_t)at.col * K::BN;
        const int64_t row = (int64_t)at.row * K::BM + warpgroup * 64 * K::MS + 16 * warp + lane / 4;
        float *scales = scales_s + turn * K::BN;
        if (K::SUMS != BLOCKS) { /* who is a tile ahead writes the other half */
            if (warpgroup == 0)
                scales[threadIdx.x - 128] =
                    scale_of(p.sb, 0, min(col0 + threadIdx.x - 128, p.n - 1));
            bar_sync(1, 256);
        }
        typedef typename Either<K::SUMS == ALL, D, float>::type Sum;
        Sum sum[K::MS][64];
        D part[64];
#pragma unroll
        for (int m = 0; m < K::MS; ++m)
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[m][i] = 0;
        for (int step = 0; step < steps; ++step) {
            ring.wait_full();
            const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
            const uint64_t a =
                K::TileA::descriptor(stage_s + K::TileA::offset(warpgroup * 64 * K::MS));
            const uint64_t b = K::TileB::descriptor(stage_s + K::TileA::bytes);
            if constexpr (K::SUMS == ALL) {
                wgmma_fence();
#pragma unroll
                for (int m = 0; m < K::MS; ++m)
                    multiply<K>(sum[m], wgmma_descriptor_add(a, K::TileA::offset(64 * m)), b,
                                step == 0);
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the step before has read its stage */
                if (step > 0 && threadIdx.x % 128 == 0) mbarrier_arrive(ring.before());
            } else {
                /* BLOCKS: of the thread's rows, times that of the tile's columns */
                float by[K::MS][2];
                if (K::SUMS == BLOCKS)
#pragma unroll
                    for (int m = 0; m < K::MS; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            by[m][h] = ld_shared_f32(
                                ring_s + K::BLOCKS_AT + ring.stage * K::BM * 4 +
                                4 * (64 * (warpgroup * K::MS + m) + 16 * warp + lane / 4 + 8 * h));
#pragma unroll
                for (int m = 0; m < K::MS; ++m) {
                    wgmma_fence();
                    multiply<K>(part, wgmma_descriptor_add(a, K::TileA::offset(64 * m)), b, true);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    wgmma_pin(part);
                    if (m == K::MS - 1) release<K>(ring);
#pragma unroll
                    for (int i = 0; i < 64; ++i) {
                        if (K::SUMS == BLOCKS)
                            sum[m][i] = fmaf(part_value(part[i]), by[m][i % 4 / 2], sum[m][i]);
                        else
                            sum[m][i] += part_value(part[i]);
                    }
                }
            }
            ring.advance();
        }
        if constexpr (K::SUMS == ALL) {
            wgmma_wait_group<0>();
            if (threadIdx.x % 128 == 0) mbarrier_arrive(ring.before());
        }
#pragma unroll
        for (int m = 0; m < K::MS; ++m) {
            if constexpr (K::SUMS == ALL) wgmma_pin(sum[m]);
            store_sums<K>(p, sum[m], row + 64 * m, col0, scales);
        }
    }
}

/* BLOCKS: a warp brings the scales of a few steps together, then the next warp those of the
 * next. */
template <class K>
__device__ __forceinline__ void load_scales(const Params &p, tma_ring<K::STAGES> &ring,
                                            smem_addr ring_s) {
    constexpr int EACH = K::BM / 32, FEW = 16 / EACH; /* rows of a lane; steps */
    static_assert(FEW == 2 || FEW == 4, "one load brings a row's");
    const int lane = threadIdx.x % 32, steps = (int)((p.k + K::BK - 1) / K::BK);
    int turn = threadIdx.x / 32; /* turns until this warp's */
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        const float *const from_b =
            (const float *)p.sb.data + ((int64_t)at.col * K::BN >> p.sb.col_log2) * p.sb.col;
        const auto from_a = [&](int i) {
            const int64_t row = min((int64_t)at.row * K::BM + lane + 32 * i, p.m - 1);
            return (const float *)p.sa.data + (row >> p.sa.row_log2) * p.sa.row;
        };
        for (int first = 0; first < steps; first += FEW) {
            const int count = min(FEW, steps - first);
            if (--turn >
                /* a warp that did not wait could be two rounds of the ring ahead, where parities
                 * say nothing */
                0) {
                for (int s = 0; s < count; ++s) {
                    ring.wait_empty();
                    ring.advance();
                }
                continue;
            }
            turn = 3;
            float a[EACH][FEW], b[FEW];
#pragma unroll
            for (int s = 0; s < FEW; ++s)
                b[s] = __ldg(from_b + min(first + s, steps - 1) * p.step_b);
            if (p.fours && count == FEW) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    if constexpr (FEW == 4) {
                        const float4 x = __ldg((const float4 *)(from_a(i) + first));
                        a[i][0] = x.x;
                        a[i][1] = x.y;
                        a[i][2] = x.z;
                        a[i][3] = x.w;
                    } else {
                        const float2 x = __ldg((const float2 *)(from_a(i) + first));
                        a[i][0] = x.x;
                        a[i][1] = x.y;
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int s = 0; s < FEW; ++s)
                        a[i][s] = __ldg(from_a(i) + min(first + s, steps - 1) * p.step_a);
            }
#pragma unroll
            for (int s = 0; s < FEW; ++s) {
                if (s >= count) break;
                ring.wait_empty();
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    st_shared_f32(ring_s + K::BLOCKS_AT + ring.stage * K::BM * 4 +
                                      4 * (lane + 32 * i),
                                  a[i][s] * b[s]);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(ring.full());
                ring.advance();
            }
        }
    }
}

template <class K>
__device__ __forceinline__ void produce(const Params &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s) {
    if (K::SUMS == BLOCKS && threadIdx.x >= 32) return load_scales<K>(p, ring, ring_s);
    if (threadIdx.x >= 32 || !elect_one()) return;
    prefetch_tensormap(&p.a);
    prefetch_tensormap(&p.b);
    const int steps = (int)((p.k + K::BK - 1) / K::BK);
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        for (int step = 0; step < steps; ++step) {
            ring.wait_empty();
            const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
            mbarrier_arrive_expect_tx(ring.full(), K::STAGE_BYTES);
            tma_load_5d(stage_s, &p.a, {{step * K::BK, at.row * K::BM}}, ring.full());
            tma_load_5d(stage_s + K::TileA::bytes, &p.b, {{step * K::BK, at.col * K::BN}},
                        ring.full());
            ring.advance();
        }
    }
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    scaled_gemm_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(ring_s + K::BARRIERS_AT);
    if (threadIdx.x == 0) {
        ring.init(K::SUMS == BLOCKS ? 8 : 2, K::SUMS == BLOCKS ? 2 : 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<K::SUMS == BLOCKS ? 56 : 40>();
        produce<K>(p, ring, ring_s);
    } else {
        setmaxnreg_inc<K::SUMS == BLOCKS ? 224 : 232>();
        consume<K>(p, ring, ring_s,
                   (float *)(smem + (ring_s - cvta_to_shared(smem)) + K::BARRIERS_AT +
                             tma_ring<K::STAGES>::bytes));
    }
}

/* ---- 3. plan and run ------------------------------------------------------------------------- */
struct Plan {
    ScaledOperands operands;
};

Sums sums_of(const gk_scaled_gemm_args *g) {
    if (scales_along_k(g) > 0) return BLOCKS;
    return g->a.dtype == GK_I8 || g->accumulate == GK_FAST ? ALL : PARTS;
}

/* What a row of the table is for: key = {sums, MS, dtype of b}. */
bool plan_scaled(const gk_cuda_instance *row, const gk_context *, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    Sums sums = sums_of(g);
    const bool mixed = g->a.dtype != g->b.dtype || g->a.dtype == GK_E5M2;
    if (mixed && sums == ALL) sums = PARTS;
    if (sums == BLOCKS && (mixed || !scales_in_tiles(g))) return false;
    if (row->key[0] != sums || row->key[2] != g->b.dtype) return false;
    const int64_t tiles = gk_ceil_div(m, 128 * row->key[1]) * gk_ceil_div(n, 128);
    Plan *x = &gk_own<Plan>(plan);
    size_t bytes = 0;
    x->operands = scaled_operands_plan(g, &bytes);
    plan->workspace_bytes = bytes;
    plan->tile[0] = 128 * row->key[1];
    plan->tile[1] = 128;
    plan->tile[2] = 128;
    plan->tasks = tiles;
    plan->kernel = row;
    return true;
}

template <class K>
gk_status run_scaled(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const Plan &x = gk_own<Plan>(plan);
    Params p;
    const gk_status status =
        scaled_operands_run(ctx, x.operands, g, workspace, K::BM, K::BN, &p.a, &p.b);
    if (status != GK_OK) return status;
    p.m = g->a.shape[0];
    p.n = g->b.shape[1];
    p.k = g->a.shape[1];
    p.sa = gk_scales_of(&g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(&g->scale_b, p.k, p.n, true);
    p.step_a = p.sa.col_log2 == 7 ? p.sa.col : 0;
    p.step_b = p.sb.row_log2 == 7 ? p.sb.row : 0;
    p.fours = p.step_a == 1 && p.sa.row % 4 == 0 && (uintptr_t)p.sa.data % 16 == 0;
    p.f = finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
    p.plain = !p.f.bias && !p.f.c && !p.f.out_scale && p.f.activation == GK_ACT_NONE &&
              p.n % 8 == 0 && (p.f.out_dtype == GK_BF16 || p.f.out_dtype == GK_F16) &&
              p.f.out_row % 8 == 0 && (uintptr_t)p.f.out % 16 == 0;
    p.tiles_m = (int)gk_ceil_div(p.m, K::BM);
    p.tiles_n = (int)gk_ceil_div(p.n, K::BN);
    p.group = SCALED_GROUP;
    const int64_t blocks =
        gk_min_i64((int64_t)p.tiles_m * p.tiles_n, gk_gpu_of(ctx->index)->num_sms);
    return launch<scaled_gemm_kernel<K>>("scaled_gemm", ctx, dim3((unsigned)blocks), K::THREADS,
                                         K::SMEM, p);
}

#define ROW(name, dtype, A, B, D, MS, sums, b_dtype)                                     \
    {"scaled_gemm_sm90a_" name, dtype, plan_scaled, run_scaled<Kind<A, B, D, MS, sums>>, \
     {sums, MS, b_dtype},       NULL}

const gk_cuda_instance instances[] = {
    ROW("e4m3_fast_256x128", GK_E4M3, e4m3, e4m3, float, 2, ALL, GK_E4M3),
    ROW("e4m3_fast_128x128", GK_E4M3, e4m3, e4m3, float, 1, ALL, GK_E4M3),
    ROW("e4m3_256x128", GK_E4M3, e4m3, e4m3, float, 2, PARTS, GK_E4M3),
    ROW("e4m3_128x128", GK_E4M3, e4m3, e4m3, float, 1, PARTS, GK_E4M3),
    ROW("e4m3_block_256x128", GK_E4M3, e4m3, e4m3, float, 2, BLOCKS, GK_E4M3),
    ROW("e4m3_block_128x128", GK_E4M3, e4m3, e4m3, float, 1, BLOCKS, GK_E4M3),
    ROW("e4m3_e5m2_128x128", GK_E4M3, e4m3, e5m2, float, 1, PARTS, GK_E5M2),
    ROW("e5m2_e4m3_128x128", GK_E5M2, e5m2, e4m3, float, 1, PARTS, GK_E4M3),
    ROW("e5m2_128x128", GK_E5M2, e5m2, e5m2, float, 1, PARTS, GK_E5M2),
    ROW("i8_256x128", GK_I8, int8_t, int8_t, int32_t, 2, ALL, GK_I8),
    ROW("i8_128x128", GK_I8, int8_t, int8_t, int32_t, 1, ALL, GK_I8),
    ROW("i8_block_256x128", GK_I8, int8_t, int8_t, int32_t, 2, BLOCKS, GK_I8),
    ROW("i8_block_128x128", GK_I8, int8_t, int8_t, int32_t, 1, BLOCKS, GK_I8),
};

/* The first that serves the call; large tiles only where there is one for each SM. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    for (const gk_cuda_instance &row : instances) {
        if (row.dtype != ((const gk_scaled_gemm_args *)args)->a.dtype ||
            !plan_scaled(&row, ctx, args, plan))
            continue;
        if (row.key[1] == 1 || plan->tasks >= gk_gpu_of(ctx->index)->num_sms) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
