/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_wide.cuh: scaled_gemm for large M on Hopper: WGMMA with 8-bit operands, and sums in two
 * levels.
 *
 *   out = activation(sum over blocks of k of scale_a scale_b (A B) + beta c + bias) / out_scale
 *
 * DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2. This file is a policy of shell.cuh, which runs
 * the persistent loop. scaled_gemm_sm90a.cu has the instances and the plan.
 *
 * a [M, K] and b [K, N] are both K-major in memory (scaled_operands.cuh). A block takes tiles of
 * 128 MS x BN. Each of two consumer warpgroups multiplies 64 MS rows. A stage holds 128 of k.
 *
 * A template parameter selects how a tile sums over k:
 *   ALL      One sum over all of k, for int8, whose sums are exact, and for the fast mode of 8-bit
 *            floats.
 *   PARTS    Sums of 128 of k in fresh accumulators, which are then added in float32. WGMMA's own
 *            sums of 8-bit floats keep only 13 bits.
 *   BLOCKS   As PARTS, also for int8. Each sum of 128 of k is multiplied by a scale of its row and
 *            a scale of the tile's columns.
 *
 * Scales that are constant along k are read before a tile's products and applied in its epilogue.
 * Applying them in the loop would replace its FADD by FFMA, which costs more beside WGMMA. A sum is
 * multiplied by one scale and then by the other. So a sum of 0 gives 0 even if the product of both
 * scales overflows.
 *
 * ANY false: float32 scales, a bfloat16 result with no other epilogue, and scales along k that TMA
 * can read (block_scales_of_both). ANY true: every other form. Helper warps then read the scales
 * along k.
 *
 * Shared memory: stages of a [BM][128] and b [BN][128] | panels, one for each warp | scales along
 * k | scales of the tile's columns, one set for each warpgroup | barriers. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_WIDE_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_WIDE_CUH

#include "../ptx/bar.cuh"
#include "../ptx/wgmma_8bit.cuh"
#include "quant/tiles.h"
#include "../tile/codes_sm90a.cuh"
#include "finish.cuh"
#include "scaled_params.cuh"
#include "shell.cuh"

struct ScaledParams {
    TileScheduler scheduler;
    CUtensorMap a, b;         /* [rows][k] bytes, boxes of BM and BN rows x 128 */
    CUtensorMap a_end, b_end; /* boxes for the rows of the last tile, if these are fewer */
    CUtensorMap out;          /* if `panels`: the result, in boxes of a Panel */
    /* BLOCKS, not ANY: the scales. Boxes of 4 steps x BM rows, and of 4 steps x 1 block of
     * columns. */
    CUtensorMap block_a, block_b;
    gk_scales sa, sb;
    Finish f;
    int m, n;
    bool panels; /* results are stored by TMA; always if not ANY */
    bool pairs;  /* ANY: results are float32, and two neighbours are 8 aligned bytes */
    bool k_inner_a, k_inner_b; /* BLOCKS, not ANY: the 4 steps of a row are contiguous */
    int sb_bytes;              /* BLOCKS, not ANY: bytes of a copy of b's scales */
    int64_t step_a, step_b; /* BLOCKS, ANY: stride of the scales from one block of k to the next */
    bool fours;             /* BLOCKS, ANY: 4 scales of a row can be read as 16 bytes */
    /* BLOCKS, set in batch-invariant calls: always apply both scales one after the other. Whether
     * they may be multiplied into one factor depends on the scales of other rows, which must not
     * change a row's bits. */
    bool apart;
};

template <class A_, class B_, class D_, int MS_, int BN_, Sums SUMS_, bool ANY_>
struct ScaledWide : OneResult {
    typedef A_ A;
    typedef B_ B;
    typedef D_ D; /* type of WGMMA's sums */
    typedef typename SumOf<SUMS_, D_>::type Sum;
    static constexpr Sums SUMS = SUMS_;
    static constexpr bool ANY = ANY_, ALONG_K = SUMS == BLOCKS;
    /* N: accumulators of a thread for 64 rows. */
    static constexpr int MS = MS_, BM = 128 * MS, BN = BN_, BK = 128, N = BN / 2;
    typedef ScaledParams Params;
    typedef Shell<ScaledWide> Block;
    typedef wgmma_tile<BM, false, BK> TileA;
    typedef wgmma_tile<BN, false, BK> TileB;

    static constexpr int CONSUMERS = 2, PRODUCER_WARPS = 4, PER_SM = 1;
    static constexpr bool HELPERS = ALONG_K && ANY;
    static constexpr int CONSUMER_REGS = HELPERS ? 224 : 232, PRODUCER_REGS = HELPERS ? 56 : 40;
    static constexpr int FULL_ARRIVALS = HELPERS ? 2 : 1;
    /* With scales along k, every warp reads scales of a stage, so every warp releases it. */
    static constexpr int RELEASERS = ALONG_K ? 32 : 128, EMPTY_ARRIVALS = 256 / RELEASERS;

    static constexpr int STAGE_BYTES = TileA::bytes + TileB::bytes;
    static constexpr int STAGES = SCALED_RING / STAGE_BYTES;
    static constexpr int PANELS_AT = STAGES * STAGE_BYTES;
    static constexpr int BLOCKS_AT = PANELS_AT + 8 * Panel::bytes;
    /* ALONG_K, not ANY: a buffer holds the scales of a group of BLOCK_STEPS steps. There are enough
     * buffers that none is overwritten while it is read. The producer fills a buffer only after
     * the stage of STAGES steps earlier has been released. The BUFFERS - 1 groups since the
     * buffer's last use have at least 2 (BUFFERS - 1) steps if K > 128. */
    static constexpr int BUFFERS = STAGES / 2 + 1,
                         BUFFER_BYTES = BM * 4 * BLOCK_STEPS + BLOCK_SB_BYTES;
    static_assert(2 * (BUFFERS - 1) >= STAGES - 1, "no buffer is overwritten while it is read");
    /* ALONG_K, ANY: bytes of a stage's factors: one for each row of the tile, then one that applies
     * to all rows. */
    static constexpr int ROWS_BYTES = BM * 4 + 16;
    static constexpr int BLOCK_BYTES = !ALONG_K ? 0
                                       : ANY    ? STAGES * ROWS_BYTES
                                                : BUFFERS * BUFFER_BYTES;
    static constexpr int COLUMNS_AT = BLOCKS_AT + BLOCK_BYTES;
    static constexpr int BARRIERS_AT = COLUMNS_AT + (ALONG_K ? 0 : 2 * BN * 4);

    static __device__ __forceinline__ void begin(const Params &p, smem_addr) {
        prefetch_tensormap(&p.a);
        prefetch_tensormap(&p.b);
    }

    /* ---- 1. copies --------------------------------------------------------------------------- */
    static __device__ __forceinline__ int groups_of(int steps) {
        return (steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
    }

    struct Source {
        int row, col, bytes;
        const CUtensorMap *a, *b;

        __device__ __forceinline__ Source(const Params &p, const Block &, TilePlace tile)
            : row(tile.row * BM), col(tile.col * BN) {
            const int rows = min(BM, p.m - row), cols = min(BN, p.n - col);
            a = rows < BM ? &p.a_end : &p.a;
            b = cols < BN ? &p.b_end : &p.b;
            bytes = (rows + cols) * BK;
        }

        __device__ __forceinline__ void fill(const Params &p, const ProductStage &s) const {
            const smem_addr to_s = s.base_s + s.stage * STAGE_BYTES;
            if (ALONG_K && !ANY && s.tile_step % BLOCK_STEPS == 0) {
                const unsigned group =
                    (unsigned)s.turn * groups_of(p.scheduler.steps) + s.tile_step / BLOCK_STEPS;
                const smem_addr buffer_s = s.base_s + BLOCKS_AT + group % BUFFERS * BUFFER_BYTES;
                mbarrier_arrive_expect_tx(s.full_s, bytes + BM * 4 * BLOCK_STEPS + p.sb_bytes);
                const tma_at of_a = {{p.k_inner_a ? s.step : row, p.k_inner_a ? row : s.step}};
                const int block = col / 128;
                const tma_at of_b = {
                    {p.k_inner_b ? s.step : block / 4 * 4, p.k_inner_b ? block : s.step}};
                tma_load_5d(buffer_s, &p.block_a, of_a, s.full_s);
                tma_load_5d(buffer_s + BM * 4 * BLOCK_STEPS, &p.block_b, of_b, s.full_s);
            } else {
                mbarrier_arrive_expect_tx(s.full_s, bytes);
            }
            tma_load_5d(to_s, a, {{s.step * BK, row}}, s.full_s);
            tma_load_5d(to_s + TileA::bytes, b, {{s.step * BK, col}}, s.full_s);
        }
    };

    /* The loop of the three helper warps (ANY, scales along k). They take groups of FEW steps in
     * rotation. A warp loads the scales of its steps, which may have any strides, and writes the
     * factors of the rows' sums to shared memory. */
    static __device__ __forceinline__ void help(Block &shell) {
        constexpr int EACH = BM / 32, FEW = 16 / EACH; /* rows of a lane; steps of a group */
        static_assert(FEW == 2 || FEW == 4, "one load reads a row's");
        const Params &p = shell.p;
        const int lane = threadIdx.x % 32, steps = p.scheduler.steps;
        int turn = shell.warp - Block::CONSUMER_WARPS; /* groups until this warp's next one */
        for (unsigned t = shell.first(); t < p.scheduler.tiles; t += shell.stride()) {
            const TilePlace tile = OneResult::tile(shell, t);
            const float *const from_b =
                (const float *)p.sb.data + ((int64_t)tile.col * BN >> p.sb.col_log2) * p.sb.col;
            const auto from_a = [&](int i) {
                const int64_t row = min(tile.row * BM + lane + 32 * i, p.m - 1);
                return (const float *)p.sa.data + (row >> p.sa.row_log2) * p.sa.row;
            };
            for (int first = 0; first < steps; first += FEW) {
                const int count = min(FEW, steps - first);
                if (--turn > 0) {
                    /* Wait for the steps of other warps, too. Otherwise this warp's ring state
                     * could get two rounds ahead of the ring, where barrier parities repeat, and
                     * its next wait would end too early. */
                    for (int s = 0; s < count; ++s) {
                        shell.ring.wait_empty();
                        shell.ring.advance();
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
                    shell.ring.wait_empty();
                    const smem_addr to_s =
                        shell.base_s + BLOCKS_AT + shell.ring.stage * ROWS_BYTES + 4 * lane;
                    float by[EACH];
#pragma unroll
                    for (int i = 0; i < EACH; ++i) by[i] = a[i][s];
                    const float second = join_scales(by, b[s]);
                    /* The second factor is stored once for all rows of the tile. If one lane needs
                     * it, all lanes of the warp must use it. */
                    const bool far = __any_sync(~0u, second != 1) || shell.p.apart;
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
                        st_shared_f32(to_s + 128 * i, far ? a[i][s] : by[i]);
                    if (lane == 0) st_shared_f32(to_s + BM * 4, far ? b[s] : 1.f);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(shell.ring.full());
                    shell.ring.advance();
                }
            }
        }
    }

    /* ---- 2. products ------------------------------------------------------------------------- */
    /* d (+)= 64 M rows x BN columns over the 128 of k of one stage. fresh: overwrite d. */
    template <int M>
    static __device__ __forceinline__ void multiply(D (&d)[M][N], uint64_t a, uint64_t b,
                                                    bool fresh) {
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int m = 0; m < M; ++m)
                wgmma_8bit_ss<A, B, BN>(d[m],
                                        wgmma_descriptor_add(a, TileA::offset(64 * m) + 32 * s),
                                        wgmma_descriptor_add(b, 32 * s), !fresh || s > 0);
    }

    struct Consumer {
        /* 1 if this thread releases stages. It is computed once and made opaque. Otherwise the
         * compiler would read and compare threadIdx.x in every step. */
        uint32_t releases;
        unsigned buffer; /* index of the buffer of scales along k */
        /* ALONG_K: address of the scale of the thread's first row in buffer or stage 0. */
        smem_addr my_a;

        __device__ __forceinline__ explicit Consumer(const Block &shell)
            : releases(threadIdx.x % RELEASERS == 0), buffer(BUFFERS - 1), my_a(0) {
            opaque(releases);
            const int row =
                threadIdx.x / 128 * 64 * MS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
            if constexpr (ALONG_K)
                my_a = shell.base_s + BLOCKS_AT + row * (!ANY && shell.p.k_inner_a ? 16 : 4);
            opaque(my_a);
        }

        /* ALONG_K: reads the two factors of the thread's sums for the ring's current stage.
         * by[2 m + h] is the factor of row 64 m + 8 h. The returned factor applies to all rows. It
         * is nearly always 1 (join_scales). */
        __device__ __forceinline__ float read_scales(const Block &shell, int step, smem_addr b_at,
                                                     float (&by)[2 * MS]) {
            if constexpr (ANY) {
                const unsigned at = shell.ring.stage * ROWS_BYTES;
#pragma unroll
                for (int i = 0; i < 2 * MS; ++i)
                    by[i] = ld_shared_f32(my_a + at + 4 * (64 * (i / 2) + 8 * (i % 2)));
                return ld_shared_f32(shell.base_s + BLOCKS_AT + at + BM * 4);
            } else {
                if (step % BLOCK_STEPS == 0) buffer = buffer == BUFFERS - 1 ? 0 : buffer + 1;
                const smem_addr buffer_at = buffer * BUFFER_BYTES;
                const int in_group = step % BLOCK_STEPS;
                const smem_addr a_s =
                    my_a + buffer_at + in_group * (shell.p.k_inner_a ? 4 : BM * 4);
                const int row_bytes = shell.p.k_inner_a ? 16 : 4;
                const float b =
                    ld_shared_f32(b_at + buffer_at + in_group * (shell.p.k_inner_b ? 4 : 16));
#pragma unroll
                for (int i = 0; i < 2 * MS; ++i)
                    by[i] = ld_shared_f32(a_s + (64 * (i / 2) + 8 * (i % 2)) * row_bytes);
                return shell.p.apart ? b : join_scales(by, b);
            }
        }

        __device__ __forceinline__ void multiply_tile(Block &shell, int col, Sum (&sum)[MS][N]) {
            const int warpgroup = shell.warp / 4, steps = shell.p.scheduler.steps;
            tma_ring<STAGES> &ring = shell.ring;
            smem_addr b_at = 0;
            if constexpr (ALONG_K && !ANY)
                b_at = shell.base_s + BLOCKS_AT + BM * 4 * BLOCK_STEPS +
                       (shell.p.k_inner_b ? 0 : col / 128 % 4 * 4);
            D part[1][N];
#pragma unroll
            for (int m = 0; m < MS; ++m)
#pragma unroll
                for (int i = 0; i < N; ++i) sum[m][i] = 0;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                ring.wait_full();
                const smem_addr stage_s = shell.base_s + ring.stage * STAGE_BYTES;
                const uint64_t a = TileA::descriptor(stage_s + TileA::offset(warpgroup * 64 * MS));
                const uint64_t b = TileB::descriptor(stage_s + TileA::bytes);
                if constexpr (SUMS == ALL) {
                    wgmma_fence();
                    multiply(sum, a, b, step == 0);
                    wgmma_commit_group();
                    wgmma_wait_group<1>(); /* the previous step has finished reading its stage */
                    if (step > 0 && releases) mbarrier_arrive(ring.before());
                } else {
                    float by[2 * MS], second = 1;
#pragma unroll
                    for (int m = 0; m < MS; ++m) {
                        wgmma_pin(part[0]);
                        wgmma_fence();
                        multiply(part, wgmma_descriptor_add(a, TileA::offset(64 * m)), b, true);
                        wgmma_commit_group();
                        /* Read the scales while WGMMA runs. */
                        if (ALONG_K && m == 0) second = read_scales(shell, step, b_at, by);
                        const smem_addr empty_s = ring.empty();
                        wgmma_wait_group<0>();
                        if (m == MS - 1) { /* release before the additions: the producer waits */
                            if (ALONG_K) __syncwarp();
                            if (releases) mbarrier_arrive(empty_s);
                        }
                        wgmma_pin(part[0]);
                        if (ALONG_K && second != 1) {
#pragma unroll
                            for (int i = 0; i < N; ++i)
                                sum[m][i] = fmaf(part_value(part[0][i]) * by[2 * m + i % 4 / 2],
                                                 second, sum[m][i]);
                        } else {
#pragma unroll
                            for (int i = 0; i < N; ++i) {
                                if constexpr (ALONG_K)
                                    sum[m][i] = fmaf(part_value(part[0][i]), by[2 * m + i % 4 / 2],
                                                     sum[m][i]);
                                else
                                    sum[m][i] += part_value(part[0][i]);
                            }
                        }
                    }
                }
                ring.advance();
            }
            if constexpr (SUMS == ALL) {
                wgmma_wait_group<0>();
                if (releases) mbarrier_arrive(ring.before());
#pragma unroll
                for (int m = 0; m < MS; ++m) wgmma_pin(sum[m]);
            }
        }

        /* ---- 3. results ---------------------------------------------------------------------- */
        static __device__ __forceinline__ float read_scale(const gk_scales &s, int row, int col) {
            const int64_t at = scale_at(s, row, col);
            if constexpr (ANY) return s.data ? scale_value(s.data, s.dtype, at) : 1.f;
            return __ldg((const float *)s.data + at);
        }

        __device__ __forceinline__ void take(Block &shell, TilePlace tile, int) {
            const Params &p = shell.p;
            const int warpgroup = shell.warp / 4, warp = shell.warp % 4, lane = threadIdx.x % 32;
            const int col0 = tile.col * BN, row0 = tile.row * BM + warpgroup * 64 * MS + 16 * warp;
            const smem_addr columns_s = shell.base_s + COLUMNS_AT + warpgroup * BN * 4;
            float column = 1, sa[MS][2];
            if constexpr (!ALONG_K) {
                column = read_scale(p.sb, 0, min(col0 + (int)threadIdx.x % BN, p.n - 1));
#pragma unroll
                for (int m = 0; m < MS; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        sa[m][h] =
                            read_scale(p.sa, min(row0 + lane / 4 + 64 * m + 8 * h, p.m - 1), 0);
            }
            Sum sum[MS][N];
            multiply_tile(shell, col0, sum);
            if constexpr (!ALONG_K) {
                bar_sync(1 + warpgroup, 128); /* the previous tile has been stored */
                st_shared_f32(columns_s + threadIdx.x % BN * 4, column);
                bar_sync(1 + warpgroup, 128);
            }
            const smem_addr panel_s = shell.base_s + PANELS_AT + shell.warp * Panel::bytes;
            const smem_addr pair_s = columns_s + lane % 4 * 8;
#pragma unroll
            for (int m = 0; m < MS; ++m) {
                if constexpr (ANY)
                    store_any(p, sum[m], sa[m], pair_s, panel_s, row0 + 64 * m, col0);
                else
                    store(p, sum[m], sa[m], pair_s, panel_s, row0 + 64 * m, col0);
            }
        }

        /* Multiplies values of a warp's 16 rows by the scales of their row and column. Value i
         * belongs to row lane / 4 + 8 (i / 2 % 2) and column 8 (i / 4) + 2 (lane % 4) + i % 2. */
        template <int COUNT>
        static __device__ __forceinline__ void
        scale_columns(float (&v)[COUNT], const float (&sa)[2], smem_addr pairs_s) {
#pragma unroll
            for (int j = 0; j < COUNT / 4; ++j) {
                const uint2 pair = ld_shared_64(pairs_s + 32 * j);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    v[4 * j + e] = times_scales(v[4 * j + e], sa[e / 2],
                                                __uint_as_float(e % 2 ? pair.y : pair.x));
            }
        }

        /* Stores 64 rows of a warpgroup as bfloat16, through the warp's panel and TMA. */
        static __device__ __forceinline__ void store(const Params &p, const Sum (&sum)[N],
                                                     const float (&sa)[2], smem_addr pair_s,
                                                     smem_addr panel_s, int row, int col) {
#pragma unroll
            for (int i64 = 0; i64 < BN / 64; ++i64) {
                Panel::reuse();
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float v[8];
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[i] = (float)sum[32 * i64 + 8 * c + i];
                    if constexpr (!ALONG_K) scale_columns(v, sa, pair_s + 4 * (64 * i64 + 16 * c));
                    const uint32_t words[4] = {cvt_rn_bf16x2(v[0], v[1]), cvt_rn_bf16x2(v[2], v[3]),
                                               cvt_rn_bf16x2(v[4], v[5]),
                                               cvt_rn_bf16x2(v[6], v[7])};
                    Panel::put(panel_s, c, words);
                }
                Panel::send(&p.out, panel_s, col + 64 * i64, row);
            }
        }

        /* Stores 64 rows of a warpgroup with any epilogue, 32 columns at a time. The loop is not
         * unrolled, so that its code exists once: each pass takes the first 16 sums and shifts the
         * others down. */
        static __device__ __forceinline__ void store_any(const Params &p, Sum (&sum)[N],
                                                         const float (&sa)[2], smem_addr pair_s,
                                                         smem_addr panel_s, int row, int col) {
            const int lane = threadIdx.x % 32, at_row = row + lane / 4,
                      at_col = col + 2 * (lane % 4);
#pragma unroll 1
            for (int c = 0; c < BN / 32; ++c) {
                float v[16];
#pragma unroll
                for (int i = 0; i < 16; ++i) v[i] = (float)sum[i];
#pragma unroll
                for (int i = 0; i < N - 16; ++i) sum[i] = sum[i + 16];
                if constexpr (!ALONG_K) scale_columns(v, sa, pair_s + 128 * c);
                const auto row_of = [&](int i) { return min(at_row + 8 * (i / 2 % 2), p.m - 1); };
                const auto col_of = [&](int i) {
                    return min(at_col + 32 * c + 8 * (i / 4) + i % 2, p.n - 1);
                };
                finish_values(p.f, v, row_of, col_of);
                if (p.panels) {
                    if (c % 2 == 0) Panel::reuse();
                    uint32_t words[2][4];
                    if (p.f.out_dtype == GK_BF16) {
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            words[i / 4][i % 4] = cvt_rn_bf16x2(v[2 * i], v[2 * i + 1]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            words[i / 4][i % 4] = cvt_rn_f16x2(v[2 * i], v[2 * i + 1]);
                    }
                    Panel::put(panel_s, c % 2 * 2, words[0]);
                    Panel::put(panel_s, c % 2 * 2 + 1, words[1]);
                    if (c % 2 == 1) Panel::send(&p.out, panel_s, col + 32 * (c - 1), row);
                } else if (p.pairs) {
#pragma unroll
                    for (int i = 0; i < 16; i += 2) {
                        const int to_row = at_row + 8 * (i / 2 % 2),
                                  to_col = at_col + 32 * c + 8 * (i / 4);
                        if (to_row < p.m && to_col < p.n)
                            *(float2 *)((float *)p.f.out + to_row * p.f.out_row + to_col) =
                                make_float2(v[i], v[i + 1]);
                    }
                } else {
#pragma unroll 1
                    for (int i = 0; i < 16; ++i) {
                        const int to_row = at_row + 8 * (i / 2 % 2),
                                  to_col = at_col + 32 * c + 8 * (i / 4) + i % 2;
                        if (to_row < p.m && to_col < p.n)
                            store_value<CodesByHardware>(p.f, to_row, to_col, v[0]);
#pragma unroll
                        for (int j = 0; j < 15; ++j) v[j] = v[j + 1];
                    }
                }
            }
        }

        __device__ __forceinline__ void end(const Block &) const { Panel::end(); }
    };
};

#endif
