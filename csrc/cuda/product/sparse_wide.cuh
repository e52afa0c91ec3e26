/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_wide.cuh: sparse_gemm on Hopper by sparse WGMMA, which skips the zeros of a 2:4 weight.
 * Mishra et al. 2021, arXiv:2104.08378.
 *
 *   out^T [N, M] = activation(scale_b scale_a (W A^T) + bias)
 *
 * This file is a policy of shell.cuh, which runs the persistent loop. sparse_gemm_sm90a.cu has the
 * instances and the plan.
 *
 * a [M, K] is K-major; its rows are called tokens. values [N, K / 2] and meta [N, K / 8] come from
 * sparse_pack. Only WGMMA's first operand may be sparse. So the product is transposed: the rows of
 * WGMMA's tile are rows of the weight, and its columns are tokens.
 *
 * A tile has BT tokens and, for each block of its cluster, BW = 64 MS CONSUMERS weight rows. The
 * two blocks of a cluster share the tokens: each block loads half of them for both, by multicast. A
 * stage is 128 bytes of a's k: tokens [BT][128], values [BW][64], meta [BW][16]. With 16-bit
 * elements the 16 bytes of meta cover the k of two stages, and both stages load them.
 *
 * ALL and PARTS are ways of summing over k (scaled_params.cuh). A part is the 256 of k of two
 * stages here, because they are 128 products.
 *
 * A warp owns 16 of every 64 weight rows. 16-bit results in rows of whole 16-byte chunks are
 * transposed by stmatrix, 64 tokens at a time, and stored by TMA. Other results are stored one by
 * one.
 *
 * Shared memory: stages | panels, one for each warp | scales of the tile's tokens, one set for each
 * warpgroup | barriers. */
#ifndef GPUKERN_CUDA_PRODUCT_SPARSE_WIDE_CUH
#define GPUKERN_CUDA_PRODUCT_SPARSE_WIDE_CUH

#include "../ptx/bar.cuh"
#include "../ptx/wgmma_sparse.cuh"
#include "quant/tiles.h"
#include "finish.cuh"
#include "scaled_params.cuh"
#include "shell.cuh"

struct SparseParams {
    TileScheduler scheduler;  /* rows: tiles of tokens; columns: a cluster's weights */
    CUtensorMap a, a_end;     /* [tokens][k]. Boxes of half a tile, and of the last rows. */
    CUtensorMap values, meta; /* [weights][k / 2] and [weights][bytes], boxes of BW rows */
    CUtensorMap out;          /* if `panels`: the result */
    gk_scales sa, sb;         /* scales of 8-bit operands */
    Finish f;
    int m, n;
    int pair;    /* blocks of a cluster, 1 or 2 */
    bool panels; /* results are stored by TMA */
};

template <class T> struct SparseSum {
    typedef float type;
};
template <> struct SparseSum<int8_t> {
    typedef int32_t type;
};

template <class T_, int MS_, int CONSUMERS_, int BT_, Sums SUMS_> struct SparseWide : OneResult {
    typedef T_ T;
    typedef typename SparseSum<T>::type D; /* type of WGMMA's sums */
    static constexpr Sums SUMS = SUMS_;
    static constexpr int BYTES = sizeof(T), MS = MS_, CONSUMERS = CONSUMERS_;
    /* N: accumulators of a thread for 64 weight rows. */
    static constexpr int BW = 64 * MS * CONSUMERS, BT = BT_, BK = 128 / BYTES, N = BT / 2;
    typedef SparseParams Params;
    typedef Shell<SparseWide> Block;
    typedef wgmma_tile<BT, false, BK> Tokens;
    static_assert(SUMS == ALL || BYTES == 1, "sums of 16-bit products are float32");
    static_assert(SUMS == PARTS || MS == 1, "one sum");

    static constexpr int PRODUCER_WARPS = 4, PER_SM = 1;
    static constexpr int CONSUMER_REGS = 232, PRODUCER_REGS = 40;
    /* Every warp reads meta, so every warp releases a stage. */
    static constexpr int EMPTY_ARRIVALS = 4 * CONSUMERS;
    static constexpr bool SHARES = true;
    static GK_HD int cluster(const Params &p) { return p.pair; }
    static __device__ __forceinline__ unsigned stride(const Params &p) {
        return gridDim.x / p.pair;
    }

    static constexpr int VALUES = BW * 64, META_ROW = 16, META = BW * META_ROW;
    static constexpr int TOKENS_AT = VALUES, META_AT = TOKENS_AT + Tokens::bytes;
    static constexpr int STAGE_BYTES = META_AT + META;
    /* A warp's panel holds 64 tokens x 16 weight rows of 16 bits. */
    static constexpr int PANEL_ROW = 32, PANEL = 64 * PANEL_ROW;
    static constexpr int AFTER_STAGES =
        4 * CONSUMERS * PANEL + CONSUMERS * BT * 4 + WGMMA_BLOCK_BYTES;
    static constexpr int MOST = (SPARSE_SMEM - AFTER_STAGES) / (STAGE_BYTES + 16);
    static constexpr int STAGES = MOST < SPARSE_STAGES ? MOST : SPARSE_STAGES;
    static constexpr int PANELS_AT = STAGES * STAGE_BYTES;
    static constexpr int SCALES_AT = PANELS_AT + 4 * CONSUMERS * PANEL;
    static constexpr int BARRIERS_AT = SCALES_AT + CONSUMERS * BT * 4;

    static __device__ __forceinline__ void begin(const Params &p, smem_addr) {
        prefetch_tensormap(&p.a);
        prefetch_tensormap(&p.values);
        prefetch_tensormap(&p.meta);
    }

    /* First weight row of this block's part of a tile. */
    static __device__ __forceinline__ int weight_of(const Block &shell, TilePlace tile) {
        return (int)(tile.col * shell.p.pair + shell.rank) * BW;
    }

    /* ---- 1. copies --------------------------------------------------------------------------- */
    struct Source {
        int token, rows, weight, rank; /* rows: tokens of the tile, at most BT */

        __device__ __forceinline__ Source(const Params &p, const Block &shell, TilePlace tile)
            : token(tile.row * BT), rows(min(BT, p.m - tile.row * BT)),
              weight(weight_of(shell, tile)), rank((int)shell.rank) {}

        /* Copies half h of the tile's tokens. Rows after the last token are not copied: TMA fills
         * rows outside a tensor slowly, and their sums are not stored. */
        __device__ __forceinline__ void fill_half(const Params &p, const ProductStage &s,
                                                  smem_addr tokens_s, int h) const {
            const int here = rows - h * (BT / 2);
            if (here <= 0) return;
            const CUtensorMap *const map = here < BT / 2 ? &p.a_end : &p.a;
            const smem_addr to_s = tokens_s + h * (Tokens::bytes / 2);
            const tma_at at = {{s.step * BK, token + h * (BT / 2)}};
            if (p.pair == 2)
                tma_load_5d_multicast(to_s, map, at, s.full_s, 3);
            else
                tma_load_5d(to_s, map, at, s.full_s);
        }

        __device__ __forceinline__ void fill(const Params &p, const ProductStage &s) const {
            const smem_addr to_s = s.base_s + s.stage * STAGE_BYTES;
            mbarrier_arrive_expect_tx(s.full_s, VALUES + META + rows * 128);
            tma_load_5d(to_s, &p.values, {{s.step * (BK / 2), weight}}, s.full_s);
            tma_load_5d(to_s + META_AT, &p.meta, {{s.step / BYTES * META_ROW, weight}}, s.full_s);
            fill_half(p, s, to_s + TOKENS_AT, rank);
            if (p.pair == 1) fill_half(p, s, to_s + TOKENS_AT, 1);
        }
    };

    /* ---- 2. products ------------------------------------------------------------------------- */
    /* WGMMA's descriptor of values. Rows have 64 bytes. Eight rows form a block of 512 bytes, which
     * is swizzled as in smem_tile<.., 64>. */
    static __device__ __forceinline__ uint64_t values_descriptor(smem_addr at_s) {
        return (uint64_t)((at_s & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(512 >> 4) << 32 |
               (uint64_t)2 << 62;
    }

    /* Meta of a lane's rows for the two instructions of a stage. With 16-bit elements both
     * instructions use the same word. */
    struct Places {
        uint32_t word[2];
    };

    static __device__ __forceinline__ void multiply(D (&d)[N], uint64_t a, uint64_t b,
                                                    const Places &places, bool add) {
        wgmma_sp_ss<T, BT, 0>(d, a, b, places.word[0], add);
        wgmma_sp_ss<T, BT, BYTES == 2>(d, wgmma_descriptor_add(a, 32), wgmma_descriptor_add(b, 64),
                                       places.word[1], true);
    }

    struct Consumer {
        smem_addr places_s; /* this lane's meta in stage 0 */
        unsigned releases;  /* This lane releases stages to block `releases` - 1. 0: to none. */

        __device__ __forceinline__ explicit Consumer(const Block &shell) {
            const int lane = threadIdx.x % 32,
                      row = shell.warp / 4 * 64 * MS + shell.warp % 4 * 16 + lane / 4;
            places_s = shell.base_s + META_AT +
                       (BYTES == 1 ? (row + 8 * (lane % 2)) * META_ROW + lane / 2 % 2 * 4
                                   : row * META_ROW + lane % 4 * 2);
            releases = lane < shell.p.pair ? lane + 1 : 0;
            opaque(places_s);
            opaque(releases);
        }

        __device__ __forceinline__ Places places(const Block &shell, const tma_ring<STAGES> &ring,
                                                 int m, int step) const {
            const smem_addr at_s = places_s + ring.stage * STAGE_BYTES + m * 64 * META_ROW;
            if constexpr (BYTES == 1) {
                return {{ld_shared_32(at_s), ld_shared_32(at_s + 8)}};
            } else {
                const smem_addr here_s = at_s + step % 2 * 8;
                const uint32_t x =
                    ld_shared_16(here_s) | (uint32_t)ld_shared_16(here_s + 8 * META_ROW) << 16;
                return {{x, x}};
            }
        }

        /* Releases a stage after all lanes of the warp have read it. */
        __device__ __forceinline__ void release(const Block &shell, smem_addr empty_s) const {
            __syncwarp();
            if (releases) mbarrier_arrive_cluster(empty_s, releases - 1);
        }

        __device__ __forceinline__ void multiply_tile(Block &shell, D (&sum)[MS][N]) const {
            const int warpgroup = shell.warp / 4, steps = shell.p.scheduler.steps;
            tma_ring<STAGES> &ring = shell.ring;
            uint64_t a, b;
            const auto descriptors = [&](const tma_ring<STAGES> &r, int m) {
                const smem_addr stage_s = shell.base_s + r.stage * STAGE_BYTES;
                a = values_descriptor(stage_s + (warpgroup * MS + m) * 64 * 64);
                b = Tokens::descriptor(stage_s + TOKENS_AT);
            };
#pragma unroll
            for (int m = 0; m < MS; ++m)
#pragma unroll
                for (int i = 0; i < N; ++i) sum[m][i] = 0;
            if constexpr (SUMS == ALL) {
                /* WGMMA reads meta from registers. They must not change until their products have
                 * ended, which is one step later, so two sets alternate. */
                Places even = {}, odd = {};
                const auto follow = [&](Places &now, Places &before, int step) {
                    ring.wait_full();
                    now = places(shell, ring, 0, step);
                    descriptors(ring, 0);
                    wgmma_fence();
                    multiply(sum[0], a, b, now, true);
                    wgmma_commit_group();
                    wgmma_wait_group<1>();
                    wgmma_pin_meta(before.word);
                    if (step > 0) release(shell, ring.before());
                    ring.advance();
                };
#pragma unroll 1
                for (int step = 0; step < steps; step += 2) {
                    follow(even, odd, step);
                    if (BYTES == 1 || step + 1 < steps) follow(odd, even, step + 1);
                }
                wgmma_wait_group<0>();
                wgmma_pin_meta(even.word);
                wgmma_pin_meta(odd.word);
                wgmma_pin(sum[0]);
                release(shell, ring.before());
            } else {
                /* Two stages form a part. The number of steps is even. */
#pragma unroll 1
                for (int step = 0; step < steps; step += 2) {
                    tma_ring<STAGES> next = ring;
                    next.advance();
                    ring.wait_full();
                    next.wait_full();
#pragma unroll
                    for (int m = 0; m < MS; ++m) {
                        D part[N];
                        Places first = places(shell, ring, m, 0),
                               second = places(shell, next, m, 1);
                        wgmma_fence();
                        descriptors(ring, m);
                        multiply(part, a, b, first, false);
                        descriptors(next, m);
                        multiply(part, a, b, second, true);
                        wgmma_commit_group();
                        wgmma_wait_group<0>();
                        wgmma_pin_meta(first.word);
                        wgmma_pin_meta(second.word);
                        if (m == MS - 1) { /* release before the additions: the producer waits */
                            release(shell, ring.empty());
                            release(shell, next.empty());
                        }
                        wgmma_pin(part);
#pragma unroll
                        for (int i = 0; i < N; ++i) sum[m][i] += part[i];
                    }
                    ring = next;
                    ring.advance();
                }
            }
        }

        /* ---- 3. results ---------------------------------------------------------------------- */
        __device__ __forceinline__ void take(Block &shell, TilePlace tile, int) {
            const Params &p = shell.p;
            const int warpgroup = shell.warp / 4, lane = threadIdx.x % 32,
                      thread = threadIdx.x % 128;
            const int token0 = tile.row * BT,
                      weight0 = weight_of(shell, tile) + warpgroup * 64 * MS + shell.warp % 4 * 16;
            const smem_addr scales_s = shell.base_s + SCALES_AT + warpgroup * BT * 4;
            const auto weight = [&](int i) { /* index of the thread's weight row i */
                                             return min(weight0 + lane / 4 + i / 2 * 64 + i % 2 * 8,
                                                        p.n - 1);
            };
            constexpr int TOKENS_EACH = (BT + 127) / 128;
            uint32_t sa[TOKENS_EACH], sb[2 * MS];
            if constexpr (BYTES == 1) {
                load_scale_bits(sa, p.sa, [&](int i) {
                    return scale_at(p.sa, min(token0 + thread + 128 * i, p.m - 1), 0);
                });
                load_scale_bits(sb, p.sb, [&](int i) { return scale_at(p.sb, 0, weight(i)); });
            }
            float bias[2 * MS];
            load_bias(bias, p.f, weight);
            D sum[MS][N];
            multiply_tile(shell, sum);
            if constexpr (BYTES == 1) {
                bar_sync(1 + warpgroup, 128); /* the previous tile has been stored */
#pragma unroll
                for (int i = 0; i < TOKENS_EACH; ++i)
                    if (thread + 128 * i < BT)
                        st_shared_f32(scales_s + (thread + 128 * i) * 4, scale_from(p.sa, sa[i]));
                bar_sync(1 + warpgroup, 128);
            }
            const smem_addr panel_s = shell.base_s + PANELS_AT + shell.warp * PANEL;
#pragma unroll
            for (int m = 0; m < MS; ++m) {
                const float by[2] = {BYTES == 1 ? scale_from(p.sb, sb[2 * m]) : 1.f,
                                     BYTES == 1 ? scale_from(p.sb, sb[2 * m + 1]) : 1.f};
                store(p, sum[m], by, &bias[2 * m], scales_s, panel_s, token0, weight0 + 64 * m);
            }
        }

        /* Computes the results of 32 tokens from their sums. Value i belongs to token 8 (i / 4) +
         * 2 (lane % 4) + i % 2 and to the thread's weight row i / 2 % 2. */
        static __device__ __forceinline__ void scale(float (&v)[16], const D *sum,
                                                     const float (&by)[2], const float *bias,
                                                     smem_addr pairs_s) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint2 pair = {};
                if constexpr (BYTES == 1) pair = ld_shared_64(pairs_s + 32 * j);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float x = (float)sum[4 * j + e];
                    if constexpr (BYTES == 1)
                        x = times_scales(x, __uint_as_float(e % 2 ? pair.y : pair.x), by[e / 2]);
                    v[4 * j + e] = x + bias[e / 2];
                }
            }
        }

        /* Writes half h of a panel: 32 tokens x 16 weight rows. Every two values of a lane belong
         * to one matrix of 8 tokens x 8 weight rows. */
        static __device__ __forceinline__ void put(gk_dtype dtype, smem_addr panel_s, int h,
                                                   const float (&v)[16]) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t r[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = v[4 * j + 2 * i], y = v[4 * j + 2 * i + 1];
                    r[i] = dtype == GK_BF16 ? cvt_rn_bf16x2(x, y) : cvt_rn_f16x2(x, y);
                }
                stmatrix_x4_trans(panel_s +
                                      (32 * h + 8 * j + lane / 16 * 8 + lane % 8) * PANEL_ROW +
                                      lane / 8 % 2 * 16,
                                  r);
            }
        }

        /* Stores the values of 32 tokens one by one. */
        static __device__ __forceinline__ void scatter(const Params &p, const float (&v)[16],
                                                       int token, int weight) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int row = token + 8 * (i / 4) + 2 * (lane % 4) + i % 2,
                          col = weight + lane / 4 + i / 2 % 2 * 8;
                if (row >= p.m || col >= p.n) continue;
                const int64_t at = row * p.f.out_row + col;
                if (p.f.out_dtype == GK_F32)
                    ((float *)p.f.out)[at] = v[i];
                else if (p.f.out_dtype == GK_BF16)
                    ((__nv_bfloat16 *)p.f.out)[at] = from_f32<__nv_bfloat16>(v[i]);
                else
                    ((__half *)p.f.out)[at] = from_f32<__half>(v[i]);
            }
        }

        static __device__ __forceinline__ void send(const Params &p, smem_addr panel_s, int token,
                                                    int weight) {
            fence_proxy_async();
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                tma_store_5d(&p.out, {{weight, token}}, panel_s);
                tma_store_commit_group();
            }
        }

        /* Applies the epilogue to a warp's 16 weight rows x BT tokens and stores them. Without an
         * activation the code is unrolled. Otherwise one copy of it runs in a loop that shifts the
         * sums down. */
        static __device__ __forceinline__ void store(const Params &p, D (&sum)[N],
                                                     const float (&by)[2], const float *bias,
                                                     smem_addr scales_s, smem_addr panel_s,
                                                     int token, int weight) {
            const smem_addr pairs_s = scales_s + threadIdx.x % 4 * 8;
            if (p.panels && p.f.activation == GK_ACT_NONE) {
#pragma unroll
                for (int part = 0; part < BT / 32; ++part) {
                    float v[16];
                    if (part % 2 == 0) Panel::reuse();
                    scale(v, sum + 16 * part, by, bias, pairs_s + 128 * part);
                    put(p.f.out_dtype, panel_s, part % 2, v);
                    if (part % 2 == 1) send(p, panel_s, token + 32 * (part - 1), weight);
                }
                return;
            }
#pragma unroll 1
            for (int part = 0; part < BT / 32; ++part) {
                float v[16];
                scale(v, sum, by, bias, pairs_s + 128 * part);
#pragma unroll
                for (int i = 0; i + 16 < N; ++i) sum[i] = sum[i + 16];
                if (p.f.out_dtype == GK_F32)
                    activate_in_place<16>(p.f.activation, v);
                else
                    activate_16<16>(p.f.activation, v);
                if (!p.panels) {
                    scatter(p, v, token + 32 * part, weight);
                    continue;
                }
                if (part % 2 == 0) Panel::reuse();
                put(p.f.out_dtype, panel_s, part % 2, v);
                if (part % 2 == 1) send(p, panel_s, token + 32 * (part - 1), weight);
            }
        }

        __device__ __forceinline__ void end(const Block &) const { Panel::end(); }
    };
};

#endif
