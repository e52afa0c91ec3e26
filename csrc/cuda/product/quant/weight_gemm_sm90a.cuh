/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_sm90a.cuh: weight_gemm by WGMMA, from some 32 tokens on.
 *
 *   out^T [N, M] = (scale (codes - zero)) a^T, each weight rounded to a's dtype
 *
 * The weight is WGMMA's first operand, from registers: a packed tile holds the fragments of 64
 * rows, which a warpgroup reads as they lie, decodes and scales while the other warpgroup
 * multiplies. Tokens are the second operand, BT of them, by TMA.
 * A persistent block of 3 warpgroups takes tiles of BW x BT results. One producer thread fills a
 * ring of stages, 128 weights x 64 of k, or where KS is 2, 64 weights x 128 of k; two warpgroups
 * take a packed tile of each. KS 2: their sums meet in the epilogue. The producer's other three
 * warps bring scales and zero points of any strides, a stage each in turn, twice in a word as the
 * decoder takes them: read by those who multiply, a step ahead, their latency was most of a step
 * (scales in registers: 436 us, 2048 x 8192 x 8192). The epilogue transposes 32 tokens at a time
 * through shared memory.
 *
 * Workspace: none. Not here: e8m0 scales beside float16, rows of a that are not whole chunks of 16
 * bytes, 8-bit a (weight_gemm_sm80, product_plain). */
#ifndef GPUKERN_CUDA_QUANT_WEIGHT_GEMM_SM90A_CUH
#define GPUKERN_CUDA_QUANT_WEIGHT_GEMM_SM90A_CUH

#include "../gemm/order.cuh"
#include "../../host/tensormap.cuh"
#include "../../layout/wgmma.cuh"
#include "../../ptx/bar.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/tma_ring.cuh"
#include "tiles.h"
#include "weight_decode.cuh"

template <class T_, Code C_, int BT_, int KS_> struct WeightKind {
    typedef T_ T;
    static constexpr Code C = C_;
    static constexpr int BT = BT_, KS = KS_, BW = 128 / KS, BK = 64 * KS, THREADS = 384;
    /* of a thread's codes in a packed tile */
    static constexpr int WORDS = C == NIBBLES || C == E2M1 ? 4 : 8;
    static constexpr int TILE_BYTES = 512 * WORDS; /* a packed tile */
    typedef wgmma_tile<BT, false> Tokens;          /* of 64 of k */
    /* a scale, and what codes are less */
    static constexpr int ENTRY = C == NIBBLES ? 8 : 4;
    /* of a stage, by groups of 16 */
    static constexpr int SCALES = GK_TILE / 16 * 128 * ENTRY;
    static constexpr int CODES_AT = KS * Tokens::bytes, SCALES_AT = CODES_AT + 2 * TILE_BYTES;
    /* tokens, codes, scales */
    static constexpr int COPIED = SCALES_AT, STAGE_BYTES = SCALES_AT + SCALES;
    /* tokens that go through shared memory at once; floats of one's row */
    static constexpr int PART = 32, LD = 68;
    static constexpr int STAGING = 2 * PART * LD * 4;
    static constexpr int MOST = WEIGHT_SMEM - STAGING - 2 * WGMMA_BLOCK_BYTES;
    static constexpr int STAGES = MOST / STAGE_BYTES < 8 ? MOST / STAGE_BYTES : 8;
    static constexpr int SMEM =
        STAGES * STAGE_BYTES + tma_ring<STAGES>::bytes + STAGING + WGMMA_BLOCK_BYTES;
    static_assert(STAGE_BYTES % WGMMA_BLOCK_BYTES == 0, "stages begin at whole blocks");
    static_assert(wgmma_transposed_ways(LD) == 1, "the lanes' sums fall into 32 banks");
};

struct WeightWgmmaParams {
    CUtensorMap a; /* [tokens][k], boxes of BT x 64 */
    Weight w;
    Finish f;
    int m, n, k, groups, log2, scale_log2;
    int tiles_m, tiles_n, group; /* of tokens, of weights */
    uint32_t whole;              /* decode_nibbles */
    bool vectors;                /* rows of the result are whole chunks of 16 bytes */
};

/* ---- 1 scales -------------------------------------------------------------------------------- */
/* Twice in a word: a scale of a's dtype as it stands, or a code of a byte, which is a number of
 * that dtype too. float32 as it stands. */
template <class T> __device__ __forceinline__ uint32_t two_scales(gk_dtype dtype, uint32_t x) {
    if (dtype == GK_F32) return x;
    if (dtype == GK_E8M0) {
        x = x == 255 ? Two<T>::NANS : x ? x << 7 : 0x40u; /* bfloat16: 0x40 is 2^-127 */
    } else if (dtype == GK_E4M3) {
        const uint32_t size = x & 0x7f;
        x = mul_two<T>(size << Two<T>::E4M3_AT | (x & 0x80) << 8, Two<T>::E4M3_UP);
        if (size == 0x7f) x = Two<T>::NANS;
    }
    return prmt(x, x, 0x1010);
}

/* bits[g ROWS + i]: of row i of a lane in group g, `groups` of them; 0 where there is none. A
 * choice of the width beside each load would make several loads into one register, which wait for
 * each other: it stands around all. */
template <int ROWS, class U, int N, class There>
__device__ __forceinline__ void load_rows_as(uint32_t (&bits)[N], const U *from, int groups,
                                             int64_t along_k, int64_t along_n, const There &there) {
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = 0;
#pragma unroll
    for (int g = 0; g < N / ROWS; ++g) {
        if (g >= groups) break;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (there(i)) bits[g * ROWS + i] = __ldg(from + g * along_k + i * along_n);
    }
}
template <int ROWS, int N, class There>
__device__ __forceinline__ void load_rows(uint32_t (&bits)[N], const void *data, int log2,
                                          int groups, int64_t first, int64_t along_k,
                                          int64_t along_n, const There &there) {
    if (log2 == 2)
        load_rows_as<ROWS>(bits, (const uint32_t *)data + first, groups, along_k, along_n, there);
    else if (log2 == 1)
        load_rows_as<ROWS>(bits, (const uint16_t *)data + first, groups, along_k, along_n, there);
    else
        load_rows_as<ROWS>(bits, (const uint8_t *)data + first, groups, along_k, along_n, there);
}

/* A warp brings those of every third stage, [group][row]; row0: of the tile. Past the weight's end
 * 0. */
template <class K>
__device__ __forceinline__ void load_scales(const WeightWgmmaParams &p, tma_ring<K::STAGES> &ring,
                                            smem_addr ring_s) {
    typedef typename K::T T;
    constexpr int ROWS = K::BW / 32,
                  AT_ONCE =
                      K::C == NIBBLES ? 1 : 2; /* rows of a lane, and groups that are under way */
    const int lane = threadIdx.x % 32, steps = (p.k + K::BK - 1) / K::BK,
              count = max(1, K::BK >> p.log2);
    int turn = 4 - threadIdx.x / 32; /* stages until this warp's */
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x) {
        const int row0 = tile_place(t, p.tiles_m, p.tiles_n, p.group).col * K::BW + lane;
        for (int step = 0; step < steps; ++step, ring.advance()) {
            if (--turn > 0) continue;
            turn = 3;
            const smem_addr to_s = ring_s + ring.stage * K::STAGE_BYTES + K::SCALES_AT;
            const int group0 = step * K::BK >> p.log2;
#pragma unroll 1
            for (int first = 0; first < count; first += AT_ONCE) {
                uint32_t bits[AT_ONCE * ROWS], zero[AT_ONCE * ROWS];
                const int groups = min(AT_ONCE, min(count, p.groups - group0) - first);
                const auto row_of = [&](int i) { return row0 + 32 * i < p.n; };
                load_rows<ROWS>(bits, p.w.scale, p.scale_log2, groups,
                                (group0 + first) * p.w.scale_k + row0 * p.w.scale_n, p.w.scale_k,
                                32 * p.w.scale_n, row_of);
                if constexpr (K::C == NIBBLES) {
                    if (p.w.zero)
                        load_rows<ROWS>(zero, p.w.zero, 0, groups,
                                        (group0 + first) * p.w.zero_k + row0 * p.w.zero_n,
                                        p.w.zero_k, 32 * p.w.zero_n, row_of);
                    else
#pragma unroll
                        for (int i = 0; i < AT_ONCE * ROWS; ++i) zero[i] = 8;
                }
                if (first == 0) ring.wait_empty();
#pragma unroll
                for (int i = 0; i < AT_ONCE * ROWS; ++i) {
                    if (first + i / ROWS >= count) break;
                    const int e = (first + i / ROWS) * K::BW + i % ROWS * 32 + lane;
                    const uint32_t scale = two_scales<T>(p.w.scale_dtype, bits[i]);
                    if constexpr (K::C == NIBBLES)
                        st_shared_64(to_s + 8 * e, make_uint2(scale, zero_bits<T>(zero[i])));
                    else
                        st_shared_32(to_s + 4 * e, scale);
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.full());
        }
    }
}

/* ---- 2 the two sides ------------------------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce_weight(const WeightWgmmaParams &p,
                                               tma_ring<K::STAGES> &ring, smem_addr ring_s) {
    if (threadIdx.x >= 32) return load_scales<K>(p, ring, ring_s);
    if (!elect_one()) return;
    prefetch_tensormap(&p.a);
    const int steps = (p.k + K::BK - 1) / K::BK, packed_n = (p.n + GK_TILE - 1) / GK_TILE,
              packed_k = (p.k + GK_TILE - 1) / GK_TILE;
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        for (int step = 0; step < steps; ++step) {
            ring.wait_empty();
            const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
            mbarrier_arrive_expect_tx(ring.full(), K::COPIED);
#pragma unroll
            for (int i = 0; i < K::KS; ++i)
                tma_load_5d(stage_s + i * K::Tokens::bytes, &p.a,
                            {{step * K::BK + 64 * i, at.row * K::BT}}, ring.full());
#pragma unroll
            for (int i = 0; i < 2;
                 /* past the end the last once more: k there is zeros of a, rows are not stored */
                 ++i) {
                const int row = min(K::KS == 2 ? at.col : 2 * at.col + i, packed_n - 1);
                const int col = min(K::KS == 2 ? 2 * step + i : step, packed_k - 1);
                bulk_load(stage_s + K::CODES_AT + i * K::TILE_BYTES,
                          p.w.packed + row * p.w.tile_row + col * p.w.tile_col, K::TILE_BYTES,
                          ring.full());
            }
            ring.advance();
        }
    }
}

/* A packed tile's fragments, scaled. scales_s: of the thread's first row in the stage's first
 * group; k: of the tile in the stage. */
template <class K>
__device__ __forceinline__ void decode_tile(uint32_t (&a)[4][4], const WeightWgmmaParams &p,
                                            const uint32_t (&words)[K::WORDS], smem_addr scales_s,
                                            int k) {
    uint32_t scale[2], less[2];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s == 0 || p.log2 < 6) {
            const smem_addr at_s = scales_s + ((k + 16 * s) >> p.log2) * (K::BW * K::ENTRY);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if constexpr (K::C == NIBBLES) {
                    const uint2 x = ld_shared_64(at_s + 8 * h * K::ENTRY);
                    scale[h] = x.x;
                    less[h] = x.y;
                } else {
                    scale[h] = ld_shared_32(at_s + 8 * h * K::ENTRY);
                }
        }
        decode_step<typename K::T, K::C>(a[s], words, s, p.whole, less);
        if (p.scale_log2 == 2) { /* float32 */
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const float2 two = unpack2<typename K::T>(a[s][q]);
                const float by = __uint_as_float(scale[q % 2]);
                a[s][q] = pack2<typename K::T>(two.x * by, two.y * by);
            }
        } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) a[s][q] = mul_two<typename K::T>(a[s][q], scale[q % 2]);
        }
    }
}

/* ---- 3 the epilogue -------------------------------------------------------------------------- */
/* Eight neighbours of a token's row. */
template <class T>
__device__ __forceinline__ void store_octet(const WeightWgmmaParams &p, int token, int col,
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

/* row0, token0: of the tile. staging: two of [PART][LD]. */
template <class K>
__device__ __forceinline__ void store_weight(const WeightWgmmaParams &p, float (&sum)[K::BT / 2],
                                             float *staging, int row0, int token0) {
    constexpr int THREADS = K::KS == 2 ? 256 : 128;
    const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    const int thread = K::KS == 2 ? threadIdx.x - 128 : threadIdx.x % 128,
              barrier = K::KS == 2 ? 1 : 1 + warpgroup;
    const int col = row0 + (K::KS == 2 ? 0 : 64 * warpgroup) + thread % 8 * 8;
    float *const mine = staging + warpgroup * K::PART * K::LD;
    float bias[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        bias[i] = p.f.bias && col + i < p.n
                      ? load_any(p.f.bias, p.f.bias_dtype, (col + i) * p.f.bias_step)
                      : 0.f;
    const float alpha = p.f.alpha ? *p.f.alpha : 1.f;
#pragma unroll 1
    for (int part = 0; part < K::BT; part += K::PART) { /* one body, past which the values move */
#pragma unroll
        for (int i = 0; i < K::PART / 2; ++i) {
            const coord d = wgmma_d(warp, lane, i);
            mine[d.col * K::LD + d.row] = sum[i];
        }
#pragma unroll
        for (int i = 0; i + K::PART / 2 < K::BT / 2; ++i) sum[i] = sum[i + K::PART / 2];
        bar_sync(barrier, THREADS);
#pragma unroll 1
        for (int i = thread; i < K::PART * 8; i += THREADS) {
            const int token = token0 + part + i / 8;
            const float *from = (K::KS == 2 ? staging : mine) + i / 8 * K::LD + i % 8 * 8;
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; ++e)
                v[e] = from[e] + (K::KS == 2 ? from[K::PART * K::LD + e] : 0.f);
            if (token < p.m && col < p.n) store_octet<typename K::T>(p, token, col, v, bias, alpha);
        }
        bar_sync(barrier, THREADS);
    }
}

/* What a warpgroup multiplies next: fragments, the descriptor of the tokens, and whom to tell that
 * both have been read. */
struct WeightStep {
    uint32_t a[4][4];
    uint64_t b;
    smem_addr empty;
};

template <class K>
__device__ __forceinline__ void consume_weight(const WeightWgmmaParams &p,
                                               tma_ring<K::STAGES> &ring, smem_addr ring_s,
                                               float *staging) {
    const int warpgroup = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const int steps = (p.k + K::BK - 1) / K::BK, k_of_mine = K::KS == 2 ? 64 * warpgroup : 0;
    /* in the tile */
    const int row = (K::KS == 2 ? 0 : 64 * warpgroup) + thread / 32 * 16 + thread % 32 / 4;
    const smem_addr codes_at = K::CODES_AT + warpgroup * K::TILE_BYTES + thread * 16,
                    scales_at = K::SCALES_AT + row * K::ENTRY;
    const auto fetch = [&](WeightStep &next) {
        ring.wait_full();
        const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES;
        uint32_t words[K::WORDS];
#pragma unroll
        for (int i = 0; i < K::WORDS / 4; ++i) {
            const uint4 q = ld_shared_128(stage_s + codes_at + i * 2048);
            words[4 * i] = q.x;
            words[4 * i + 1] = q.y;
            words[4 * i + 2] = q.z;
            words[4 * i + 3] = q.w;
        }
        decode_tile<K>(next.a, p, words, stage_s + scales_at, k_of_mine);
        next.b = K::Tokens::descriptor(stage_s + (K::KS == 2 ? warpgroup * K::Tokens::bytes : 0));
        next.empty = ring.empty();
        ring.advance();
    };
    /* The warpgroups multiply one after the other: an instruction whose operand is in registers
     * holds its warp until it has read them, so that two that began together would decode together,
     * and the tensor cores wait. */
    constexpr int ORDER = 3; /* named barriers */
    if (warpgroup == 1) bar_arrive(ORDER, 256);
    for (int t = blockIdx.x; t < p.tiles_m * p.tiles_n; t += gridDim.x) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        float sum[K::BT / 2];
        WeightStep even, odd;
        const auto multiply = [&](const WeightStep &now, bool add) {
            bar_sync(ORDER + warpgroup, 256);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s)
                wgmma_rs<typename K::T, K::BT, 0>(
                    sum, now.a[s], wgmma_descriptor_add(now.b, s * K::Tokens::step_bytes),
                    add || s > 0);
            wgmma_commit_group();
            bar_arrive(ORDER + (warpgroup ^ 1), 256);
        };
        /* step j is multiplied; when step j - 1 has been, its registers take step j + 1 */
        const auto follow = [&](const WeightStep &now, WeightStep &before, int step) {
            multiply(now, true);
            wgmma_wait_group<1>();
            if (thread == 0) mbarrier_arrive(before.empty);
            if (step + 1 < steps) fetch(before);
        };
        fetch(even);
        multiply(even, false);
        if (steps > 1) fetch(odd);
        for (int step = 1; step < steps; step += 2) {
            follow(odd, even, step);
            if (step + 1 < steps) follow(even, odd, step + 1);
        }
        wgmma_wait_group<0>();
        if (thread == 0) mbarrier_arrive(steps % 2 ? even.empty : odd.empty);
        wgmma_pin(sum);
        store_weight<K>(p, sum, staging, at.col * K::BW, at.row * K::BT);
    }
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    weight_gemm_sm90a_kernel(const __grid_constant__ WeightWgmmaParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(ring_s + K::STAGES * K::STAGE_BYTES);
    if (threadIdx.x == 0) {
        ring.init(2, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<56>();
        produce_weight<K>(p, ring, ring_s);
    } else {
        setmaxnreg_inc<224>();
        consume_weight<K>(p, ring, ring_s,
                          (float *)(smem + (ring_s - cvta_to_shared(smem)) +
                                    K::STAGES * K::STAGE_BYTES + tma_ring<K::STAGES>::bytes));
    }
}

/* ---- 4 plan and run -------------------------------------------------------------------------- */
enum {
    WEIGHT_KEY_CODE,
    WEIGHT_KEY_BT,
    WEIGHT_KEY_BW,
    WEIGHT_KEY_PERCENT
};

inline bool weight_wgmma_serves(const gk_weight_gemm_args *g) {
    const int64_t m = weight_rows(g->a), k = g->a.shape[g->a.ndim - 1], n = g->n, most = 1 << 30;
    const gk_dtype s = g->scale.dtype;
    if (m == 0 || n == 0 || k == 0 || m > most || n > most || k > most || g->a.dtype == GK_E4M3)
        return false;
    if (s == GK_E8M0 && g->a.dtype == GK_F16) return false; /* its powers of two reach further */
    if ((uintptr_t)g->packed.data % 16 || g->packed.stride[0] % 16 || g->packed.stride[1] % 16)
        return false;
    const int64_t step_m = g->a.stride[g->a.ndim - 2], step_k = g->a.stride[g->a.ndim - 1];
    return (step_k == 1 || k == 1) && (uintptr_t)g->a.data % 16 == 0 &&
           (m == 1 || (step_m > 0 && step_m % 8 == 0));
}

/* Time of a row of the table, in steps of a whole SM's 128 x 256 x 64: waves of tiles, each of its
 * share of the peak. */
inline double weight_waves(const gk_cuda_instance *row, const gk_gpu *gpu, int64_t m, int64_t n) {
    const int64_t tiles =
        gk_ceil_div(m, row->key[WEIGHT_KEY_BT]) * gk_ceil_div(n, row->key[WEIGHT_KEY_BW]);
    return (double)gk_ceil_div(tiles, gpu->num_sms) * row->key[WEIGHT_KEY_BT] *
           row->key[WEIGHT_KEY_BW] * 100.0 / row->key[WEIGHT_KEY_PERCENT];
}

inline bool plan_weight_row(const gk_cuda_instance *row, const gk_context *ctx, const void *args,
                            gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (row->key[WEIGHT_KEY_CODE] != code_of(g->format) || !weight_wgmma_serves(g)) return false;
    (void)ctx;
    plan->tile[0] = row->key[WEIGHT_KEY_BT];
    plan->tile[1] = row->key[WEIGHT_KEY_BW];
    plan->tile[2] = 64;
    plan->tasks = gk_ceil_div(weight_rows(g->a), plan->tile[0]) * gk_ceil_div(g->n, plan->tile[1]);
    plan->kernel = row;
    return plan->tasks < INT32_MAX;
}

inline bool plan_weight_best(const gk_cuda_instance *rows, int count, const gk_context *ctx,
                             const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const int64_t m = weight_rows(g->a);
    if (m < WEIGHT_WGMMA_TOKENS) return false;
    const gk_cuda_instance *best = NULL;
    double least = 0;
    for (int i = 0; i < count; ++i) {
        if (rows[i].dtype != g->a.dtype || rows[i].key[WEIGHT_KEY_CODE] != code_of(g->format))
            continue;
        const double waves = weight_waves(&rows[i], gk_gpu_of(ctx->index), m, g->n);
        if (!best || waves < least) {
            best = &rows[i];
            least = waves;
        }
    }
    return best && plan_weight_row(best, ctx, args, plan);
}

template <class K>
gk_status run_weight_wgmma(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const int nd = g->a.ndim;
    WeightWgmmaParams p;
    p.m = (int)weight_rows(g->a);
    p.n = (int)g->n;
    p.k = (int)g->a.shape[nd - 1];
    const int64_t ld = p.m == 1 ? gk_round_up(p.k, 8) : g->a.stride[nd - 2];
    const TensorShape a = {g->a.data, g->a.dtype, {p.k, p.m, 1, 1, 1}, {1, ld, 0, 0, 0}, false};
    const gk_status status = make_tensor_map("weight_gemm", a, wgmma_box(2, K::BT), &p.a);
    if (status != GK_OK) return status;
    p.w = weight_of(g);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = g->n;
    p.f.alpha = p.w.global_scale;
    p.groups = (int)g->scale.shape[0];
    p.log2 = (int)gk_min_i64(p.w.group_log2, 30);
    p.scale_log2 = p.w.scale_dtype == GK_F32 ? 2 : p.w.scale_dtype == g->a.dtype ? 1 : 0;
    p.tiles_m = (int)gk_ceil_div(p.m, K::BT);
    p.tiles_n = (int)gk_ceil_div(p.n, K::BW);
    p.group = WEIGHT_GROUP;
    p.whole = Two<typename K::T>::WHOLE ^ (g->format == GK_INT4 ? 0x00080008u : 0);
    p.vectors = p.n % 8 == 0 && (uintptr_t)p.f.out % 16 == 0;
    const int64_t blocks = gk_min_i64(plan->tasks, gk_gpu_of(ctx->index)->num_sms);
    return launch<weight_gemm_sm90a_kernel<K>>("weight_gemm", ctx, dim3((unsigned)blocks),
                                               K::THREADS, K::SMEM, p);
}

#define WGMMA_ROW(name, T, C, BT, KS, percent)   \
    {"weight_gemm_sm90a_" name,                  \
     element<T>::dtype,                          \
     plan_weight_row,                            \
     run_weight_wgmma<WeightKind<T, C, BT, KS>>, \
     {C, BT, 128 / KS, percent},                 \
     NULL}
#define WGMMA_ROWS(name, T, C)                                        \
    WGMMA_ROW(name "_256x128", T, C, 256, 1, 100),                    \
        WGMMA_ROW(name "_128x128", T, C, 128, 1, WEIGHT_PERCENT_128), \
        WGMMA_ROW(name "_64x64_k2", T, C, 64, 2, WEIGHT_PERCENT_64)

#endif
