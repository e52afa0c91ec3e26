/* tf32.cuh: what gemm_sm90a does with float32 operands alone. tma rounds them to tf32 while it copies.
 *
 * wgmma reads tf32 from shared memory along k only. So an operand b [K, N] dense along n becomes wgmma's A, in registers,
 * and the product is turned (out^T = b^T a^T); any other operand that is not dense along k is copied first (realign.cuh).
 *
 * Pipeline of a turned step, 8 of k after the other; two sets of fragments, one read by the products under way:
 *   loads       f0 f1 |    f0'   f1'
 *   products         0    1    0'    ..       fragments are loaded once the products before the last have ended */
#ifndef GPUKERN_CUDA_GEMM_TF32_CUH
#define GPUKERN_CUDA_GEMM_TF32_CUH

#include "../ptx/smem.cuh"
#include "../ptx/tma.cuh"
#include "../tile/wgmma.cuh"
#include "epilogue.cuh"

/* ---- fragments ----------------------------------------------------------------------------------------------- */
constexpr GK_HD int tf32_load_ways(int k) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = tf32_offset(lane, lane % 4 + k);
    return ways(bytes, 16);
}
static_assert(tf32_load_ways(0) == 1 && tf32_load_ways(4) == 1, "the lanes' loads fall into 32 banks");

/* A of two products, 8 of k from 8 kk on. at_s: tf32_offset(lane, lane % 4) in the warp's panel. */
__device__ __forceinline__ void load_tf32(uint32_t (&a)[2][4], smem_addr at_s, int kk) {
    /* 4 of k further on the swizzle has changed bit 2 of the chunk */
    const uint4 x = ld_shared_128(at_s + kk * WGMMA_BLOCK_BYTES),
                y = ld_shared_128((at_s ^ 64) + WGMMA_BLOCK_BYTES / 2 + kk * WGMMA_BLOCK_BYTES);
    a[0][0] = x.x, a[0][1] = x.y, a[0][2] = y.x, a[0][3] = y.y;
    a[1][0] = x.z, a[1][1] = x.w, a[1][2] = y.z, a[1][3] = y.w;
}
static_assert(tf32_offset(0, 4) == (tf32_offset(0, 0) ^ 64) + 512 &&
                  tf32_offset(31, 7) == (tf32_offset(31, 3) ^ 64) + 512 &&
                  tf32_offset(13, 25) == tf32_offset(13, 1) + 3 * WGMMA_BLOCK_BYTES,
              "the steps of load_tf32");

/* ---- results ------------------------------------------------------------------------------------------------- */
/* Four columns of row 8 j + 2 (lane % 4) + e of the result, from column 4 tf32_chunk(lane) of the warp's 32 on. */
template <int N> __device__ __forceinline__ void tf32_four(const float (&sum)[2][N], int j, int e, float (&v)[4]) {
    v[0] = sum[0][4 * j + e], v[1] = sum[0][4 * j + 2 + e], v[2] = sum[1][4 * j + e], v[3] = sum[1][4 * j + 2 + e];
}

template <class Panel> constexpr GK_HD int tf32_store_ways(int e) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = Panel::offset(lane % 4 * 2 + e, tf32_chunk(lane));
    return ways(bytes, 16);
}

/* 16 rows of the warp's 32 columns to a panel, from which they leave by tma. at: their first column and row. */
template <class Panel, int PANELS>
__device__ __forceinline__ void store_panel_turned(const CUtensorMap *map, const float (&v)[4][4], smem_addr panel_s,
                                                   const tma_at &at, int lane) {
    static_assert(tf32_store_ways<Panel>(0) == 1 && tf32_store_ways<Panel>(1) == 1, "stores without conflict");
    if (lane == 0) tma_store_wait_group_read<PANELS - 1>();
    __syncwarp(); /* the panel's last contents have been read */
#pragma unroll
    for (int i = 0; i < 4; ++i)
        st_shared_128(panel_s + Panel::offset(i / 2 * 8 + lane % 4 * 2 + i % 2, tf32_chunk(lane)),
                      make_float4(v[i][0], v[i][1], v[i][2], v[i][3]));
    fence_proxy_async();
    __syncwarp(); /* all of the panel is written */
    if (lane == 0) {
        tma_store_5d(map, at, panel_s);
        tma_store_commit_group();
    }
}

/* A warp's 32 columns of BN rows without c, activation none or relu. panel: the one written longest ago. */
template <class Panel, int BN, int PANELS, class Params>
__device__ __forceinline__ void store_plain_turned(const Params &x, const float (&sum)[2][BN / 2], smem_addr panels_s,
                                                   int &panel, tma_at at, int lane) {
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    const int64_t col = at.c[0] + 4 * tf32_chunk(lane);
    const int valid = (int)max((int64_t)0, min((int64_t)4, x.p.m - col));
    float bias[4] = {};
    if (e.bias) read_any<float, 4>(e.bias, GK_F32, col * e.bias_col, e.bias_col, e.bias_vectors, valid, bias);
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
        float v[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tf32_four(sum, j + i / 2, i % 2, v[i]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                v[i][c] *= alpha;
                if (e.bias) v[i][c] += bias[c]; /* not + 0: -0 stays */
            }
        }
        if (e.preact) {
            store_panel_turned<Panel, PANELS>(&x.preact, v, panels_s + panel * Panel::bytes, at, lane);
            panel = panel + 1 == PANELS ? 0 : panel + 1;
        }
        if (e.activation == GK_ACT_RELU) {
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i / 4][i % 4] = v[i / 4][i % 4] <= 0 ? 0.f : v[i / 4][i % 4];
        }
        store_panel_turned<Panel, PANELS>(&x.out, v, panels_s + panel * Panel::bytes, at, lane);
        panel = panel + 1 == PANELS ? 0 : panel + 1;
        at.c[1] += 16;
    }
}

/* Everything else, from the registers: eight lanes store 128 bytes of a row. One body, past which the sums move. */
template <int BN>
__device__ __forceinline__ void store_any_turned(const GemmProblem &p, const GemmPlace &at, float (&sum)[2][BN / 2],
                                                 int64_t row0, int64_t col0, int lane) {
    const int64_t col = col0 + 4 * tf32_chunk(lane);
    const int valid = (int)min((int64_t)4, p.m - col);
#pragma unroll 1
    for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int64_t row = row0 + 8 * j + lane % 4 * 2 + e;
            float v[4];
            tf32_four(sum, 0, e, v);
            if (row < p.n && valid > 0) epilogue_cols<float, 4>(p.epilogue, at, row, col, valid, v);
        }
#pragma unroll
        for (int i = 0; i + 4 < BN / 2; ++i) sum[0][i] = sum[0][i + 4], sum[1][i] = sum[1][i + 4];
    }
}

#endif
