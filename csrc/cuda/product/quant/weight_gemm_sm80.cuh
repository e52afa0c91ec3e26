/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_sm80.cuh: weight_gemm by mma.sync: decode-shaped calls on every GPU, and all calls
 * on GPUs without WGMMA.
 *
 *   out^T [N, M] = sum over groups of k of scale (codes - zero) a^T
 *
 * The weight is the instruction's first operand, in the order of its packed tiles. A thread
 * copies the 16 bytes that hold its own codes of a tile by cp.async, into a ring that no other
 * thread reads, and decodes them in registers. Tokens are the second operand, 8 NT of them.
 *
 * A block of 8 warps takes 16 RW rows of the weight and all of k. Warp w takes rows 16 (w % RW)
 * on, and in each stage every 8 / RW-th tile. A stage is CHUNK of k. At the end the warps' sums
 * are added in shared memory, in the order of the warps.
 *
 * A group's sum of exact codes is multiplied by the group's scale in float32, so no weight is
 * rounded. Scales may have any dtype and strides. All threads read them two stages ahead and
 * store them in shared memory as floats, beside their zero points.
 *
 * Groups of rows: a block takes one group's rows and at most 8 NT of its tokens. It finds its task
 * (weight_groups.cuh) in a list that lies where the first stage will.
 *
 * Workspace: none. Refuses: 8-bit a, more than WEIGHT_MOST_GROUPS groups, packed tiles that do not
 * begin at multiples of 16 bytes (product_plain). */
#ifndef GPUKERN_CUDA_QUANT_WEIGHT_GEMM_SM80_CUH
#define GPUKERN_CUDA_QUANT_WEIGHT_GEMM_SM80_CUH

#include "../../layout/banks.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../tile/fragment.cuh"
#include "tiles.h"
#include "weight_decode.cuh"
#include "weight_groups.cuh"

struct WeightParams {
    Weight w;
    Finish f;
    const void *a;
    int64_t a_m, a_k, m, n;
    int k, groups;
    int rw, rw_log2, tiles_m;     /* weight rows of a block / 16; blocks along M */
    int log2, scales, scale_log2; /* of a group's length; scales of a stage; of a scale's bytes */
    int rows;                     /* rows of a in a stage */
    uint32_t whole;               /* decode_nibbles */
    bool vectors;                 /* rows of a are whole chunks of 16 bytes */
};

template <Code C, int NT> struct WeightStage {
    static constexpr int CHUNK = WEIGHT_CHUNK / NT, CHUNK_TILES = CHUNK / GK_TILE,
                         STAGES = WEIGHT_STAGES;
    /* Words of a thread's codes in a tile. */
    static constexpr int WORDS = C == NIBBLES || C == E2M1 ? 4 : 8;
    static constexpr int WARPS = WEIGHT_WARPS, THREADS = 32 * WARPS;
    static constexpr int SCALE_BYTES = C == NIBBLES ? 8 : 4; /* NIBBLES: with the zero point */
    static constexpr int MOST_RW = NT == 1 ? 2 : 4;
    /* Scales that a thread reads for a stage, with groups of 16. */
    static constexpr int SCALES = CHUNK / 16 * 16 * MOST_RW / THREADS;
    typedef smem_tile<8 * NT, 2 * CHUNK> Tokens;

    /* Rows of a in a stage: only those that exist, or all, so that their addresses are constants
     * apart. */
    static constexpr GK_HD int rows(int64_t m) { return NT <= 2 && m < 8 * NT ? (int)m : 8 * NT; }
    static constexpr GK_HD int token_bytes(int rows) {
        return (rows * 2 * CHUNK + 127) / 128 * 128;
    }
    static constexpr GK_HD int stage_bytes(int rw, int rows) {
        return token_bytes(rows) + 16 * rw * CHUNK * WORDS / 8;
    }
    static constexpr GK_HD int groups(int log2) { return CHUNK >> log2 == 0 ? 1 : CHUNK >> log2; }
    static constexpr GK_HD int scales(int rw, int log2) { return groups(log2) * 16 * rw; }
    static constexpr GK_HD int smem(int rw, int rows, int log2) {
        const int ring = STAGES * stage_bytes(rw, rows),
                  sums = WARPS / rw * 8 * NT * (16 * rw + 4) * 4;
        return (ring > sums ? ring : sums) + 2 * scales(rw, log2) * SCALE_BYTES;
    }
};

/* ---- 1 copies of a stage --------------------------------------------------------------------- */
template <class T, class S>
__device__ __forceinline__ void copy_tokens(const WeightParams &p, smem_addr to_s, int row0,
                                            int k0) {
    constexpr unsigned CHUNKS = S::Tokens::chunks;
    for (unsigned i = threadIdx.x; i < p.rows * CHUNKS; i += S::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, k = k0 + 8 * chunk;
        const int valid = max(0, min(8, p.k - k));
        const bool is_row = row0 + row < p.m;
        const T *from_g = (const T *)p.a + (row0 + row) * p.a_m + k * p.a_k;
        const smem_addr at_s = to_s + S::Tokens::offset(row, chunk);
        if (p.vectors) {
            cp_async_cg_16(at_s, from_g, is_row ? 2 * valid : 0);
        } else {
            union {
                uint4 quad;
                uint16_t halves[8];
            } u;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                u.halves[e] =
                    is_row && e < valid ? ((const uint16_t *)from_g)[e * p.a_k] : (uint16_t)0;
            st_shared_128(at_s, u.quad);
        }
    }
}

/* A thread copies its own codes of its warp's tiles. codes_g: this thread's codes of the first
 * tile along k; NULL if the rows are beyond N. */
template <class S>
__device__ __forceinline__ void copy_codes(const WeightParams &p, smem_addr to_s,
                                           const uint8_t *codes_g, int tile, int tiles_k,
                                           int warps_k) {
    for (int at = 0; at < S::CHUNK_TILES;
         at += warps_k, tile += warps_k, to_s += S::THREADS * S::WORDS * 4) {
        const int bytes = codes_g && tile < tiles_k ? 16 : 0;
        const uint8_t *from_g = bytes ? codes_g + tile * p.w.tile_col : p.w.packed;
        cp_async_cg_16_l2_128b(to_s, from_g, bytes);
        if constexpr (S::WORDS == 8)
            cp_async_cg_16_l2_128b(to_s + S::THREADS * 16, from_g + (bytes ? 2048 : 0), bytes);
    }
}

/* ---- 2 scales -------------------------------------------------------------------------------- */
/* A stage's scales, as raw bits on their way to shared memory, where they become floats. Scales
 * beyond the weight's end are 0. */
template <class T, Code C, class S> struct StageScales {
    uint32_t bits[S::SCALES], zero[C == NIBBLES ? S::SCALES : 1];

    /* Reads the scales of stage j. row0: first row of the weight. */
    __device__ __forceinline__ void read(const WeightParams &p, int j, int row0) {
        const int rows_log2 = 4 + p.rw_log2, group0 = j * S::CHUNK >> p.log2;
#pragma unroll
        for (int i = 0; i < S::SCALES; ++i) {
            if (i * S::THREADS >= p.scales) break;
            const int at = i * S::THREADS + threadIdx.x;
            const int n = row0 + (at & ((1 << rows_log2) - 1)), group = group0 + (at >> rows_log2);
            bits[i] = 0;
            if constexpr (C == NIBBLES) zero[i] = 8;
            if (at >= p.scales || n >= p.n || group >= p.groups) continue;
            const int64_t from = group * p.w.scale_k + n * p.w.scale_n;
            if (p.scale_log2 == 1)
                bits[i] = __ldg((const uint16_t *)p.w.scale + from);
            else if (p.scale_log2 == 0)
                bits[i] = __ldg((const uint8_t *)p.w.scale + from);
            else
                bits[i] = __ldg((const uint32_t *)p.w.scale + from);
            if constexpr (C == NIBBLES)
                if (p.w.zero) zero[i] = __ldg(p.w.zero + group * p.w.zero_k + n * p.w.zero_n);
        }
    }
    __device__ __forceinline__ void write(const WeightParams &p, smem_addr to_s) const {
#pragma unroll
        for (int i = 0; i < S::SCALES; ++i) {
            if (i * S::THREADS >= p.scales) break;
            const int at = i * S::THREADS + threadIdx.x;
            if (at >= p.scales) continue;
            if constexpr (C == NIBBLES)
                st_shared_64(to_s + 8 * at, make_uint2(bits[i], zero_bits<T>(zero[i])));
            else
                st_shared_32(to_s + 4 * at, bits[i]);
        }
        const gk_dtype dtype = p.w.scale_dtype;
        if (dtype == GK_F32) return;
#pragma unroll 1
        /* Each thread converts its own scales; one copy of the code serves all dtypes. */
        for (int at = threadIdx.x; at < p.scales; at += S::THREADS) {
            const smem_addr at_s = to_s + at * S::SCALE_BYTES;
            const uint32_t x = ld_shared_32(at_s);
            const float f = dtype == GK_BF16  ? __uint_as_float(x << 16)
                            : dtype == GK_F16 ? to_f32(__ushort_as_half((unsigned short)x))
                                              : code_value(dtype, x);
            st_shared_32(at_s, __float_as_uint(f));
        }
    }
};

/* ---- 3 a tile times the tokens --------------------------------------------------------------- */
/* STEPS: k16 steps of a tile that share a group's scale; 4 for groups of at least 64; 0: 1 or 2,
 * from p.log2. */
template <class T, Code C, int NT, int STEPS, class S>
__device__ __forceinline__ void multiply_tile(float (&sum)[NT][4], const WeightParams &p,
                                              smem_addr codes_s, const smem_addr (&tokens_s)[NT],
                                              smem_addr scales_s, int tile) {
    uint32_t w[S::WORDS];
#pragma unroll
    for (int i = 0; i < S::WORDS / 4; ++i) {
        const uint4 q = ld_shared_128(codes_s + i * S::THREADS * 16);
        w[4 * i] = q.x;
        w[4 * i + 1] = q.y;
        w[4 * i + 2] = q.z;
        w[4 * i + 3] = q.w;
    }
    const int steps = STEPS ? STEPS : p.log2 == 5 ? 2 : 1;
    float part[NT][4] = {}, scale[2][2];
    uint32_t zero[2] = {Two<T>::NOTHING, Two<T>::NOTHING};
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
        uint32_t a[2][4];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (((s + e) & (steps - 1)) == 0) {
                const int group = (GK_TILE * tile + 16 * (s + e)) >> p.log2;
                const smem_addr at_s = scales_s + group * 16 * p.rw * S::SCALE_BYTES;
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if constexpr (C == NIBBLES) {
                        const uint2 x = ld_shared_64(at_s + 8 * h * S::SCALE_BYTES);
                        scale[e][h] = __uint_as_float(x.x);
                        zero[h] = x.y;
                    } else {
                        scale[e][h] = ld_shared_f32(at_s + 8 * h * S::SCALE_BYTES);
                    }
            } else if (e) {
                scale[1][0] = scale[0][0];
                scale[1][1] = scale[0][1];
            }
            decode_step<T, C>(a[e], w, s + e, p.whole, zero);
        }
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            uint32_t b[4];
            ldmatrix_x4(b, S::Tokens::along(tokens_s[i], 8 * tile + 2 * s));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                mma_add<T>(part[i], a[e], b + 2 * e);
                if (((s + e + 1) & (steps - 1)) == 0)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        sum[i][c] = fmaf(scale[e][c / 2], part[i][c], sum[i][c]);
                        part[i][c] = 0;
                    }
            }
        }
    }
}

/* Multiplies a warp's tiles of a stage. */
template <class T, Code C, int NT, int STEPS, class S>
__device__ __forceinline__ void multiply_stage(float (&sum)[NT][4], const WeightParams &p,
                                               smem_addr codes_s, const smem_addr (&tokens_s)[NT],
                                               smem_addr scales_s, int my_k, int warps_k) {
#pragma unroll(STEPS &&NT <= 2 ? 2 : 1)
    for (int tile = my_k; tile < S::CHUNK_TILES;
         tile += warps_k, codes_s += S::THREADS * S::WORDS * 4)
        multiply_tile<T, C, NT, STEPS, S>(sum, p, codes_s, tokens_s, scales_s, tile);
}

/* ---- 4 the kernel ---------------------------------------------------------------------------- */
/* Computes the block's tile: tokens from `token` on, up to p.m, and weight rows from `row` on.
 * Without groups of rows the tile follows from the block. */
template <class T, Code C, int NT, bool GROUPED>
__device__ __forceinline__ void weight_tile_sm80(const WeightParams &p, int token = 0,
                                                 int row = 0) {
    typedef WeightStage<C, NT> S;
    extern __shared__ __align__(128) unsigned char smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = 16 * p.rw;
    const int my_rows = warp & (p.rw - 1), my_k = warp >> p.rw_log2,
              warps_k = S::WARPS >> p.rw_log2;
    const int token0 = GROUPED ? token : blockIdx.x % p.tiles_m * 8 * NT,
              row0 = GROUPED ? row : blockIdx.x / p.tiles_m * rows;
    const int chunks = (p.k + S::CHUNK - 1) / S::CHUNK, tiles_k = (p.k + GK_TILE - 1) / GK_TILE;
    const int my_row0 = row0 + 16 * my_rows;
    const uint8_t *codes_g = my_row0 < p.n ? p.w.packed + my_row0 / GK_TILE * p.w.tile_row +
                                                 (my_row0 % GK_TILE / 16 * 32 + lane) * 16
                                           : nullptr;
    const int stage_bytes = S::stage_bytes(p.rw, p.rows), token_bytes = S::token_bytes(p.rows);
    const smem_addr ring_s = cvta_to_shared(smem);
    const int scale_bytes = p.scales * S::SCALE_BYTES;
    const smem_addr scales_s = ring_s + S::smem(p.rw, p.rows, p.log2) - 2 * scale_bytes;

    const auto copy = [&](int j) {
        if (j < chunks) {
            const smem_addr to_s = ring_s + j % S::STAGES * stage_bytes;
            copy_codes<S>(p, to_s + token_bytes + threadIdx.x * 16, codes_g,
                          j * S::CHUNK_TILES + my_k, tiles_k, warps_k);
            copy_tokens<T, S>(p, to_s, token0, j * S::CHUNK);
        }
        cp_async_commit_group();
    };
    StageScales<T, C, S> scales;

    int token_at[NT]; /* rows beyond the last repeat it; their results are not stored */
#pragma unroll
    for (int i = 0; i < NT; ++i)
        token_at[i] = NT <= 2 ? S::Tokens::offset(min(8 * i + lane % 8, p.rows - 1), lane / 8)
                              : S::Tokens::down(S::Tokens::offset(lane % 8, lane / 8), 8 * i);
    float sum[NT][4] = {};
    for (int j = 1 - S::STAGES; j < chunks; ++j) { /* steps below 0 only copy ahead */
        if (j >= 0) {
            cp_async_wait_group<S::STAGES - 2>();
            __syncthreads(); /* stage j has arrived; all have read the stage that is written next */
        }
        copy(j + S::STAGES - 1);
        if (j >= -1) scales.write(p, scales_s + (j + 1) % 2 * scale_bytes);
        if (j >= -2) scales.read(p, j + 2, row0);
        if (j < 0) continue;
        const smem_addr stage_s = ring_s + j % S::STAGES * stage_bytes;
        smem_addr tokens_s[NT];
#pragma unroll
        for (int i = 0; i < NT; ++i) tokens_s[i] = stage_s + token_at[i];
        const smem_addr codes_s = stage_s + token_bytes + threadIdx.x * 16;
        const smem_addr at_s =
            scales_s + j % 2 * scale_bytes + (16 * my_rows + lane / 4) * S::SCALE_BYTES;
        if (p.log2 >= 6)
            multiply_stage<T, C, NT, 4, S>(sum, p, codes_s, tokens_s, at_s, my_k, warps_k);
        else
            multiply_stage<T, C, NT, 0, S>(sum, p, codes_s, tokens_s, at_s, my_k, warps_k);
    }

    /* the warps' sums [my_k][token][row] */
    cp_async_wait_group<0>();
    __syncthreads();
    float *sums = (float *)smem;
    const int ld = rows + 4;
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sums[(my_k * 8 * NT + 8 * i + frag_col(lane, e)) * ld + 16 * my_rows +
                 frag_row(lane, e)] = sum[i][e];
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * NT * rows; i += S::THREADS) {
        const int token = i >> (4 + p.rw_log2), row = i & (rows - 1);
        if (token0 + token >= p.m) break;
        if (row0 + row >= p.n) continue;
        float x = 0;
        for (int w = 0; w < warps_k; ++w) x += sums[(w * 8 * NT + token) * ld + row];
        store_value<CodesBySoftware>(p.f, token0 + token, row0 + row,
                                     finish(p.f, token0 + token, row0 + row, x));
    }
}

template <class T, Code C, int NT>
__global__ void __launch_bounds__(256, NT == 1 ? 3 : 2) weight_gemm_sm80_kernel(WeightParams p) {
    weight_tile_sm80<T, C, NT, false>(p);
}

/* ---- 5 groups of rows ------------------------------------------------------------------------ */
struct WeightGroupedSm80Params {
    WeightParams p;
    Groups groups;
    int64_t bias_group; /* bytes from group to group */
};

/* Nibbles with 32 tokens would spill if two blocks shared an SM's registers. */
template <class T, Code C, int NT>
__global__ void __launch_bounds__(256, NT == 1        ? 3
                                       : C == NIBBLES ? 1
                                                      : 2)
    weight_grouped_sm80_kernel(WeightGroupedSm80Params x) {
    extern __shared__ __align__(128) unsigned char smem[];
    struct Found {
        WeightGroupList list;
        WeightTask task;
    };
    Found &found = *(Found *)smem;
    if (threadIdx.x < 32) {
        list_groups<false, 8 * NT>(x.groups, found.list, threadIdx.x);
        __syncwarp();
        if (threadIdx.x == 0)
            found.task = weight_task<8 * NT>(x.groups, found.list, (int)blockIdx.x);
    }
    __syncthreads();
    const WeightTask at = found.task;
    __syncthreads(); /* stages overwrite the list */
    if (at.group < 0) return;
    WeightParams p = x.p;
    const int row0 = at.col * 16 * p.rw;
    if (at.group == x.groups.count) {
        p.f.bias = nullptr;
        const int rows = 16 * p.rw;
        for (int i = threadIdx.x; i < (at.end - at.row) * rows; i += 256)
            if (row0 + i % rows < p.n)
                store_value<CodesBySoftware>(p.f, at.row + i / rows, row0 + i % rows, 0);
        return;
    }
    const int64_t first = at.group * ((p.n + GK_TILE - 1) / GK_TILE);
    p.w.packed += first * p.w.tile_row;
    p.w.scale = (const char *)p.w.scale + (first * GK_TILE * p.w.scale_n << p.scale_log2);
    if (p.w.zero) p.w.zero += first * GK_TILE * p.w.zero_n;
    if (p.f.bias) p.f.bias = (const char *)p.f.bias + at.group * x.bias_group;
    p.m = at.end;
    weight_tile_sm80<T, C, NT, true>(p, at.row, row0);
}

/* ---- 6 plan and run -------------------------------------------------------------------------- */
enum {
    WEIGHT_KEY_CODE,
    WEIGHT_KEY_NT
};

/* Weight rows of a block / 16: as many as possible while every SM still gets enough blocks,
 * because each block reads all tokens. */
template <Code C, int NT>
int weight_rw(const gk_gpu *gpu, int64_t tiles_m, int rows, int64_t n, int log2) {
    typedef WeightStage<C, NT> S;
    const int least = S::CHUNK_TILES < S::WARPS ? S::WARPS / S::CHUNK_TILES : 1;
    for (int rw = S::MOST_RW; rw > least; rw /= 2) {
        if (S::smem(rw, rows, log2) > gpu->smem_per_block) continue;
        if (gk_ceil_div(n, 16 * rw) * tiles_m * 2 >= WEIGHT_BLOCKS_PER_2_SMS * gpu->num_sms)
            return rw;
    }
    return least;
}

template <Code C, int NT>
bool plan_weight_sm80(const gk_cuda_instance *, const gk_context *ctx, const void *args,
                      gk_plan *plan) {
    typedef WeightStage<C, NT> S;
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const int64_t m = weight_rows(g->a), k = g->a.shape[g->a.ndim - 1], n = g->n;
    if (code_of(g->format) != C || m == 0 || n == 0 || k == 0 || k > 1 << 30 || n > 1 << 30 ||
        m > 1 << 30)
        return false;
    const int64_t groups = g->offs ? g->offs->shape[0] : 1;
    if (groups < 1 || groups > WEIGHT_MOST_GROUPS) return false;
    /* Groups that have some 4 rows on average have at most 8, but for few. */
    if (g->offs ? NT == 2 || (NT == 1 && m > 4 * groups) : NT < 4 && m > 8 * NT) return false;
    if ((uintptr_t)g->packed.data % 16 || g->packed.stride[0] % 16 || g->packed.stride[1] % 16)
        return false;
    const int log2 = (int)gk_min_i64(gk_group_log2(k, g->scale.shape[0]), 30);
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int64_t tiles_m = g->offs ? gk_min_i64(groups, m) : gk_ceil_div(m, 8 * NT);
    const int rows = S::rows(m), rw = weight_rw<C, NT>(gpu, tiles_m, rows, n, log2);
    if (S::smem(rw, rows, log2) > gpu->smem_per_block) return false;
    plan->tile[0] = 8 * NT;
    plan->tile[1] = 16 * rw;
    plan->tile[2] = S::CHUNK;
    plan->tasks = (g->offs ? token_tiles(g, 8 * NT) : tiles_m) * gk_ceil_div(n, 16 * rw);
    return gk_grid_fits(plan->tasks);
}

template <class T, Code C, int NT>
gk_status run_weight_sm80(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    typedef WeightStage<C, NT> S;
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    const int nd = g->a.ndim;
    WeightParams p = {};
    p.w = weight_of(g);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = g->n;
    p.f.alpha = p.w.global_scale;
    p.a = g->a.data;
    p.m = weight_rows(g->a);
    p.n = g->n;
    p.k = (int)g->a.shape[nd - 1];
    p.a_m = g->a.stride[nd - 2];
    p.a_k = g->a.stride[nd - 1];
    p.groups = (int)g->scale.shape[0];
    p.log2 = (int)gk_min_i64(p.w.group_log2, 30);
    p.rw = (int)plan->tile[1] / 16;
    p.rw_log2 = p.rw / 2;
    p.scales = S::scales(p.rw, p.log2);
    p.scale_log2 = p.w.scale_dtype == GK_F32                                 ? 2
                   : p.w.scale_dtype == GK_BF16 || p.w.scale_dtype == GK_F16 ? 1
                                                                             : 0;
    p.tiles_m = (int)gk_ceil_div(p.m, 8 * NT);
    p.rows = S::rows(p.m);
    p.whole = Two<T>::WHOLE ^ (g->format == GK_INT4 ? 0x00080008u : 0);
    p.vectors =
        (p.a_k == 1 || p.k == 1) && (uintptr_t)p.a % 16 == 0 && (p.m == 1 || p.a_m % 8 == 0);
    if constexpr (NT != 2)
        if (g->offs) {
            WeightGroupedSm80Params x = {};
            x.groups = weight_groups(ctx, g, 16 * p.rw);
            x.bias_group = bias_of_groups(g, &p.f);
            if (g->bias) x.bias_group *= (int64_t)gk_dtype_bytes(g->bias->dtype);
            x.p = p;
            return launch<weight_grouped_sm80_kernel<T, C, NT>>(
                "weight_gemm", ctx, dim3((unsigned)plan->tasks), S::THREADS,
                S::smem(p.rw, p.rows, p.log2), x);
        }
    return launch<weight_gemm_sm80_kernel<T, C, NT>>("weight_gemm", ctx,
                                                     dim3((unsigned)plan->tasks), S::THREADS,
                                                     S::smem(p.rw, p.rows, p.log2), p);
}

#define WEIGHT_INSTANCE(name, T, C, NT)                                     \
    {"weight_gemm_sm80_" name,  element<T>::dtype, plan_weight_sm80<C, NT>, \
     run_weight_sm80<T, C, NT>, {C, NT},           NULL}
#define WEIGHT_INSTANCES(name, T, C)                                           \
    WEIGHT_INSTANCE(name "_8", T, C, 1), WEIGHT_INSTANCE(name "_16", T, C, 2), \
        WEIGHT_INSTANCE(name "_32", T, C, 4)

#endif
