/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_swapped.cuh: scaled_gemm for small M on Hopper. Its time is bound by reading b (the
 * weights). Rows of a are called tokens.
 *
 *   out^T = activation(sum over blocks of k of scale_b (B^T A^T) scale_a + beta c^T + bias)
 *           / out_scale
 *
 * This file is a policy of shell.cuh, which runs the persistent loop. scaled_swapped_plan.cuh plans
 * and launches it. scaled_gemm_swapab_sm90a.cu and scaled_gemm_mx_sm90a.cu have the instances.
 *
 * It computes the transposed product (swap-AB). The rows of WGMMA's tile are 64 columns of b for
 * each of WGS warpgroups, and its columns are NT tokens. The two blocks of a cluster take half of k
 * each and exchange half of their sums through mailboxes (mailbox.cuh).
 *
 * A template parameter selects how a tile sums over k (Sums, scaled_params.cuh):
 *   ALL      One sum over all of k.
 *   PARTS    Sums of 128 of k in fresh accumulators, which are then added in float32.
 *   BLOCKS   Sums of BLOCK of k, 128 or 32, in fresh accumulators. Each is multiplied by a scale of
 *            the token and a scale of the column of b, then added.
 *
 * ANY false: float32 scales and a bfloat16 result with no other epilogue. TMA then reads the scales
 * of BLOCKS (block_scales_of). ANY true: every other form. BLOCKS then has three helper warps,
 * which read scales of any dtype and strides. They take the stages in rotation.
 *
 * A sum is multiplied by one scale and then by the other. So a sum of 0 gives 0 even if the
 * product of both scales overflows.
 *
 * Shared memory: stages, each KS tiles b [64 WGS][128] and then KS tiles a [NT][128] | scales along
 * k of each stage | a mailbox for each warpgroup | barriers. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_SWAPPED_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_SWAPPED_CUH

#include "../ptx/wgmma_8bit.cuh"
#include "../tile/codes_sm90a.cuh"
#include "../tile/release_reads.cuh"
#include "finish.cuh"
#include "mailbox.cuh"
#include "scaled_params.cuh"
#include "shell.cuh"

struct SwappedParams {
    TileScheduler scheduler;
    CUtensorMap weights, tokens; /* [rows][k] bytes, boxes of 64 WGS and of min(NT, m) rows x 128 */
    /* BLOCKS, not ANY: the scales. Boxes of 4 steps x NT tokens, and of 4 steps x 1 block of
     * columns. */
    CUtensorMap block_a, block_b;
    gk_scales sa, sb;
    Finish f;
    int m, n, k;
    int stage_bytes;           /* bytes that the copies of a stage bring */
    bool once;                 /* there is one tile of tokens, so the weights are read once */
    bool k_inner_a, k_inner_b; /* BLOCKS, not ANY: the 4 steps of a row are contiguous */
    /* BLOCK 32: the eight scales of a row in a stage are eight aligned bytes. */
    bool eights_a, eights_b;
};

template <class E_, class D_, int WGS_, int NT_, int KS_, int STAGES_, Sums SUMS_, bool ANY_,
          int BLOCK_ = 128>
struct ScaledSwapped : OneResult {
    typedef E_ E;
    typedef D_ D;
    typedef typename SumOf<SUMS_, D_>::type Sum;
    typedef SwappedParams Params;
    typedef Shell<ScaledSwapped> Block;
    static constexpr Sums SUMS = SUMS_;
    static constexpr bool ANY = ANY_, ALONG_K = SUMS == BLOCKS;
    static constexpr int WGS = WGS_, NT = NT_, KS = KS_, BK = 128 * KS, BW = 64 * WGS,
                         BLOCK = BLOCK_;
    typedef wgmma_tile<BW, false, 128> Weights; /* 128 of k */
    typedef wgmma_tile<NT, false, 128> Tokens;
    typedef Mailbox<Sum, NT / 2> Mail;
    static_assert(ANY || !ALONG_K || (KS == BLOCK_STEPS && BLOCK == 128),
                  "a stage is a group of scales");
    static_assert(BLOCK == 128 || (BLOCK == 32 && ANY && ALONG_K),
                  "blocks of 32 are read by helper warps");

    static constexpr int CONSUMERS = WGS, PER_SM = 1, STAGES = STAGES_;
    static constexpr bool SPLITS_K = true;
    static GK_HD int cluster(const Params &) { return 2; }
    static __device__ __forceinline__ unsigned stride(const Params &) { return gridDim.x / 2; }
    static constexpr bool HELPERS = ALONG_K && ANY;
    static constexpr int PRODUCER_WARPS = HELPERS ? 4 : 1;
    static constexpr int FULL_ARRIVALS = HELPERS ? 2 : 1;
    /* With scales along k, every warp reads scales of a stage, so every warp releases it. */
    static constexpr int RELEASERS = ALONG_K ? 32 : 128, EMPTY_ARRIVALS = 128 * WGS / RELEASERS;

    static constexpr int PARTS = BK / BLOCK; /* parts of a stage that are summed separately */
    /* Number of parts whose products are issued together. */
    static constexpr int AT_ONCE = PARTS <= 4 ? PARTS : NT < 64 ? 4 : 2;
    static constexpr int TOKENS_AT = KS * Weights::bytes,
                         STAGE_BYTES = TOKENS_AT + KS * Tokens::bytes;
    static constexpr int ENTRIES = NT + BW; /* scales of a part: the tokens', then the weights' */
    static constexpr int BUFFER_BYTES = !ALONG_K ? 0
                                        : ANY    ? PARTS * ENTRIES * 4
                                                 : NT * 4 * BLOCK_STEPS + BLOCK_SB_BYTES;
    static constexpr int SCALES_AT = STAGES * STAGE_BYTES,
                         MAIL_AT = SCALES_AT + STAGES * BUFFER_BYTES;
    static constexpr int BARRIERS_AT = MAIL_AT + WGS * Mail::bytes, MORE_BARRIERS = 2 * WGS;
    static_assert(!HELPERS || STAGES >= 3,
                  "a warp that takes every third stage is never two rounds ahead");

    static __device__ __forceinline__ void begin(const Params &p, smem_addr base_s) {
        prefetch_tensormap(&p.weights);
        prefetch_tensormap(&p.tokens);
#pragma unroll
        for (int i = 0; i < WGS; ++i) Mail::begin(base_s + Block::MORE_BARRIERS_AT + 16 * i);
    }

    /* Prefetches the weights of the first stages into L2 while the previous kernel runs. In
     * decoding that kernel is a norm or an activation, which leaves most SMs idle. */
    static __device__ __forceinline__ void before_previous_ends(const Block &shell) {
        if (shell.first() >= shell.p.scheduler.tiles) return;
        const int row = OneResult::tile(shell, shell.first()).col * BW;
        for (int step = 0; step < min(STAGES, shell.part_steps); ++step)
#pragma unroll
            for (int i = 0; i < KS; ++i)
                tma_prefetch_5d(&shell.p.weights,
                                {{(shell.first_step + step) * BK + 128 * i, row}});
    }

    /* ---- 1. copies --------------------------------------------------------------------------- */
    struct Source {
        int token, row;
        uint64_t weights_by, tokens_by; /* L2 policies. Tokens stay in L2: every tile reads them. */

        __device__ __forceinline__ Source(const Params &p, const Block &, TilePlace tile)
            : token(tile.row * NT), row(tile.col * BW),
              weights_by(p.once ? l2_first_out() : l2_last_out()), tokens_by(l2_last_out()) {}

        __device__ __forceinline__ void fill(const Params &p, const ProductStage &s) const {
            const smem_addr to_s = s.base_s + s.stage * STAGE_BYTES;
            mbarrier_arrive_expect_tx(s.full_s, p.stage_bytes);
            if constexpr (ALONG_K && !ANY) {
                const smem_addr buffer_s = s.base_s + SCALES_AT + s.stage * BUFFER_BYTES;
                const int step = s.step * BLOCK_STEPS, block = row / 128;
                const tma_at a = {{p.k_inner_a ? step : token, p.k_inner_a ? token : step}};
                const tma_at b = {{p.k_inner_b ? step : block / 4 * 4, p.k_inner_b ? block : step}};
                tma_load_5d(buffer_s, &p.block_a, a, s.full_s);
                tma_load_5d(buffer_s + NT * 4 * BLOCK_STEPS, &p.block_b, b, s.full_s);
            }
#pragma unroll
            for (int i = 0; i < KS; ++i)
                tma_load_5d_by(to_s + i * Weights::bytes, &p.weights,
                               {{s.step * BK + 128 * i, row}}, s.full_s, weights_by);
#pragma unroll
            for (int i = 0; i < KS; ++i)
                tma_load_5d_by(to_s + TOKENS_AT + i * Tokens::bytes, &p.tokens,
                               {{s.step * BK + 128 * i, token}}, s.full_s, tokens_by);
        }
    };

    /* Loads this lane's scales of the rows `first` to `first` + R - 1 (below `last`) for all parts
     * of a stage. The lane takes entries lane + 32 i of the array [part][row]. With `eights`, it
     * takes the eight bytes of rows lane + 32 i instead. at(row, k): offset of a scale. */
    template <int R, class At>
    static __device__ __forceinline__ void read_scales(uint32_t (&bits)[PARTS * R / 32],
                                                       const gk_scales &s, bool eights, int first,
                                                       int last, int k0, int k, const At &at) {
        const int lane = threadIdx.x % 32;
        if constexpr (PARTS == 8) {
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
        }
        load_scale_bits(bits, s, [&](int i) {
            const int e = lane + 32 * i, row = first + e % R, to = k0 + e / R * BLOCK;
            return e < PARTS * R && row < last && to < k ? at(row, to) : INT64_C(-1);
        });
    }
    /* Writes these scales to shared memory as float32, [part][row]. */
    template <int R>
    static __device__ __forceinline__ void write_scales(const uint32_t (&bits)[PARTS * R / 32],
                                                        const gk_scales &s, bool eights,
                                                        smem_addr to_s) {
        const int lane = threadIdx.x % 32;
        if constexpr (PARTS == 8) {
            if (eights) {
#pragma unroll
                for (int i = 0; i < (R + 31) / 32; ++i)
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        if (lane + 32 * i < R)
                            st_shared_f32(to_s + 4 * (j * ENTRIES + lane + 32 * i),
                                          e8m0_to_f32(bits[2 * i + j / 4] >> 8 * (j % 4) & 0xff));
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < PARTS * R / 32; ++i) {
            const int e = lane + 32 * i;
            if (e < PARTS * R)
                st_shared_f32(to_s + 4 * (e / R * ENTRIES + e % R), scale_from(s, bits[i]));
        }
    }

    /* The loop of the three helper warps (ANY, scales along k). Each writes the scales of every
     * third stage, [part][tokens, weights]. Scales outside a and b are read as zero bits. Codes
     * outside a and b are 0, and a scale of zero bits is no NaN, so their products are 0. */
    static __device__ __forceinline__ void help(Block &shell) {
        const Params &p = shell.p;
        int turn = shell.warp - Block::CONSUMER_WARPS; /* stages until this warp's next one */
        for (unsigned t = shell.first(); t < p.scheduler.tiles; t += shell.stride()) {
            const TilePlace tile = OneResult::tile(shell, t);
            const int token0 = tile.row * NT, row0 = tile.col * BW;
            for (int step = 0; step < shell.part_steps; ++step, shell.ring.advance()) {
                if (--turn > 0) continue;
                turn = 3;
                uint32_t tokens[PARTS * NT / 32], weights[PARTS * BW / 32];
                const int k0 = (shell.first_step + step) * BK;
                read_scales<NT>(tokens, p.sa, p.eights_a, token0, p.m, k0, p.k,
                                [&](int row, int k) { return scale_at(p.sa, row, k); });
                read_scales<BW>(weights, p.sb, p.eights_b, row0, p.n, k0, p.k,
                                [&](int row, int k) { return scale_at(p.sb, k, row); });
                shell.ring.wait_empty();
                const smem_addr to_s = shell.base_s + SCALES_AT + shell.ring.stage * BUFFER_BYTES;
                write_scales<NT>(tokens, p.sa, p.eights_a, to_s);
                write_scales<BW>(weights, p.sb, p.eights_b, to_s + 4 * NT);
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(shell.ring.full());
            }
        }
    }

    struct Consumer {
        Mail mail;
        uint32_t releases;
        float sa[NT / 4]; /* not ALONG_K: scales of the thread's tokens */

        __device__ __forceinline__ explicit Consumer(const Block &shell)
            : mail(shell.base_s + MAIL_AT + shell.warp / 4 * Mail::bytes,
                   shell.base_s + Block::MORE_BARRIERS_AT + shell.warp / 4 * 16),
              releases(threadIdx.x % RELEASERS == 0) {
            opaque(releases);
            if constexpr (!ALONG_K) read_token_scales(shell, 0);
        }

        static __device__ __forceinline__ float read_scale(const gk_scales &s, int row, int col) {
            const int64_t at = scale_at(s, row, col);
            if constexpr (ANY) return s.data ? scale_value(s.data, s.dtype, at) : 1.f;
            return __ldg((const float *)s.data + at);
        }
        static __device__ __forceinline__ int token_of(int i) {
            return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        }
        __device__ __forceinline__ void read_token_scales(const Block &shell, int token0) {
#pragma unroll
            for (int i = 0; i < NT / 4; ++i)
                sa[i] = read_scale(shell.p.sa, min(token0 + token_of(i), shell.p.m - 1), 0);
        }

        /* ---- 2. products --------------------------------------------------------------------- */
        /* Waits until at most `later` of the committed WGMMA groups are in flight. `later` is at
         * most MOST. */
        template <int MOST> static __device__ __forceinline__ void wait_until(int later) {
            if constexpr (MOST > 0) {
                if (later < MOST) return wait_until<MOST - 1>(later);
            }
            wgmma_wait_group<MOST>();
        }

        /* ALONG_K: sum += x scale_a scale_b. part: index of x in the stage. block: index of the
         * tile's block of 128 columns of b. */
        static __device__ __forceinline__ void join_scaled(const Block &shell, int part, int block,
                                                           const D (&x)[NT / 2],
                                                           Sum (&sum)[NT / 2]) {
            const smem_addr buffer_s = shell.base_s + SCALES_AT + shell.ring.stage * BUFFER_BYTES;
            float sb[2];
            smem_addr tokens_s;
            int token_bytes = 4;
            if constexpr (ANY) {
                tokens_s = buffer_s + 4 * part * ENTRIES;
                const smem_addr row_s =
                    tokens_s + 4 * (NT + shell.warp * 16 + threadIdx.x % 32 / 4);
                sb[0] = ld_shared_f32(row_s);
                sb[1] = ld_shared_f32(row_s + 32);
            } else {
                const smem_addr block_s = buffer_s + NT * 4 * BLOCK_STEPS;
                sb[0] = sb[1] = ld_shared_f32(
                    block_s + (shell.p.k_inner_b ? 4 * part : 16 * part + block % 4 * 4));
                tokens_s = buffer_s + part * (shell.p.k_inner_a ? 4 : NT * 4);
                token_bytes = shell.p.k_inner_a ? 16 : 4;
            }
#pragma unroll
            for (int j = 0; j < NT / 8; ++j) {
                const smem_addr at_s = tokens_s + (8 * j + 2 * (threadIdx.x % 4)) * token_bytes;
                const float of_tokens[2] = {ld_shared_f32(at_s), ld_shared_f32(at_s + token_bytes)};
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sum[4 * j + e] = fmaf(part_value(x[4 * j + e]) * of_tokens[e % 2], sb[e / 2],
                                          sum[4 * j + e]);
            }
        }

        /* Releases the ring's current stage. Scales along k have been read by ordinary loads,
         * which must be ordered before the release (release_reads). */
        __device__ __forceinline__ void release(Block &shell) {
            if constexpr (ALONG_K)
                release_reads(shell.ring.empty(), releases);
            else if (releases)
                mbarrier_arrive(shell.ring.empty());
        }

        __device__ __forceinline__ void take(Block &shell, TilePlace tile, int) {
            const Params &p = shell.p;
            const int warpgroup = shell.warp / 4, lane = threadIdx.x % 32;
            /* col: the column of b whose results this thread finishes. token0: the tile's first
             * token. */
            const int col = tile.col * BW + shell.warp * 16 + (int)shell.rank * 8 + lane / 4,
                      token0 = tile.row * NT;
            float sb = 1;
            if constexpr (!ALONG_K) sb = read_scale(p.sb, 0, min(col, p.n - 1));
            if (!ALONG_K && !p.once) read_token_scales(shell, token0);
            Sum sum[NT / 2];
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) sum[i] = 0;
#pragma unroll 1
            for (int step = 0; step < shell.part_steps; ++step) {
                shell.ring.wait_full();
                const smem_addr stage_s = shell.base_s + shell.ring.stage * STAGE_BYTES;
                const uint64_t a = Weights::descriptor(stage_s + Weights::offset(64 * warpgroup));
                const uint64_t b = Tokens::descriptor(stage_s + TOKENS_AT);
                const auto multiply = [&](D(&d)[NT / 2], int k, int count, bool fresh) {
#pragma unroll
                    for (int s = 0; s < BK / 32; ++s) {
                        if (s >= count) break;
                        const int at = k / 32 + s;
                        wgmma_8bit_ss<E, E, NT>(
                            d, wgmma_descriptor_add(a, at / 4 * Weights::bytes + at % 4 * 32),
                            wgmma_descriptor_add(b, at / 4 * Tokens::bytes + at % 4 * 32),
                            !fresh || s > 0);
                    }
                };
                if constexpr (SUMS == ALL) {
                    wgmma_pin(sum);
                    wgmma_fence();
                    multiply(sum, 0, BK / 32, false);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    wgmma_pin(sum);
                    release(shell);
                } else {
#pragma unroll
                    for (int first = 0; first < PARTS; first += AT_ONCE) {
                        D part[AT_ONCE][NT / 2];
#pragma unroll
                        for (int i = 0; i < AT_ONCE; ++i) wgmma_pin(part[i]);
                        wgmma_fence();
#pragma unroll
                        for (int i = 0; i < AT_ONCE; ++i) {
                            multiply(part[i], (first + i) * BLOCK, BLOCK / 32, true);
                            if (ALONG_K || i == AT_ONCE - 1) wgmma_commit_group();
                        }
#pragma unroll
                        for (int i = 0; i < AT_ONCE; ++i) {
                            if (ALONG_K || i == 0)
                                wait_until<AT_ONCE - 1>(ALONG_K ? AT_ONCE - 1 - i : 0);
                            wgmma_pin(part[i]);
                            if (!ALONG_K && i == 0) release(shell);
                            if constexpr (ALONG_K) {
                                join_scaled(shell, first + i, tile.col * BW / 128, part[i], sum);
                            } else {
#pragma unroll
                                for (int j = 0; j < NT / 2; ++j) sum[j] += part[i][j];
                            }
                        }
                    }
                    if (ALONG_K) release(shell);
                }
                shell.ring.advance();
            }
            Sum mine[NT / 4];
            mail.exchange(sum, mine, shell.rank);
            store(p, mine, sb, col, token0);
        }

        /* ---- 3. results ---------------------------------------------------------------------- */
        __device__ __forceinline__ float scaled(const Sum &x, float sb, int i) const {
            if constexpr (ALONG_K) return x;
            return times_scales((float)x, sb, sa[i]);
        }
        template <class R>
        static __device__ __forceinline__ void store_as(const Params &p, const float (&v)[NT / 4],
                                                        int col, int token0) {
            if (col >= p.n) return;
            R *const out = (R *)p.f.out + col;
#pragma unroll
            for (int i = 0; i < NT / 4; ++i) {
                const int token = token0 + token_of(i);
                if (token < p.m) out[token * p.f.out_row] = from_f32<R>(v[i]);
            }
        }
        __device__ __forceinline__ void store(const Params &p, const Sum (&mine)[NT / 4], float sb,
                                              int col, int token0) {
            float v[NT / 4];
#pragma unroll
            for (int i = 0; i < NT / 4; ++i) v[i] = scaled(mine[i], sb, i);
            if constexpr (!ANY) return store_as<__nv_bfloat16>(p, v, col, token0);
            const auto row_of = [&](int i) { return min(token0 + token_of(i), p.m - 1); };
            finish_values(p.f, v, row_of, [&](int) { return min(col, p.n - 1); });
            if (p.f.out_dtype == GK_BF16) return store_as<__nv_bfloat16>(p, v, col, token0);
            if (p.f.out_dtype == GK_F16) return store_as<__half>(p, v, col, token0);
            if (p.f.out_dtype == GK_F32) return store_as<float>(p, v, col, token0);
#pragma unroll 1
            for (int i = 0; i < NT / 4; ++i) {
                const int token = token0 + token_of(i);
                if (token < p.m && col < p.n) store_value<CodesByHardware>(p.f, token, col, v[0]);
#pragma unroll
                for (int j = 0; j + 1 < NT / 4; ++j) v[j] = v[j + 1];
            }
        }

        __device__ __forceinline__ void end(const Block &) const { mail.end(); }
    };
};

#endif
