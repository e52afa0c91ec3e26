/* SPDX-License-Identifier: BSD-3-Clause */
/* tf32.cuh: the products and the store of gemm_tf32_sm90a with swap-AB: out^T = b^T a^T for float32
 * operands. TMA rounds the operands to tf32 while it copies.
 *
 * WGMMA reads tf32 from shared memory only if it is K-major. So an MN-major b [K, N] becomes
 * WGMMA's first operand A, which comes from registers. Any other operand that is not K-major is
 * copied first (realign.cuh).
 *
 * Pipeline: a product is 8 of k. There are four sets of fragments, and each is loaded two products
 * before it is used.
 *   loads      f0 f1 f2 |   f3 |    f0'  |  f1'        of the next step from product 1 on
 *   products            0      1    2       3    0'    one is in flight while the next is issued
 *
 * With two sets, products waited for the latency of loads: 128 x 128 tiles of one warpgroup
 * took 1.6 times as long. */
#ifndef GPUKERN_CUDA_GEMM_TF32_CUH
#define GPUKERN_CUDA_GEMM_TF32_CUH

#include "../../ptx/smem.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/tma_ring.cuh"
#include "../../layout/wgmma.cuh"
#include "epilogue.cuh"

/* ---- fragments ------------------------------------------------------------------------------- */
constexpr GK_HD int tf32_load_ways(int k) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = tf32_offset(lane, lane % 4 + k);
    return ways(bytes, 16);
}
static_assert(tf32_load_ways(0) == 1 && tf32_load_ways(4) == 1,
              "the lanes' loads fall into 32 banks");

/* Loads A of two products (two times 64 rows), for the 8 of k from 8 kk on. at_s: address of
 * tf32_offset(lane, lane % 4) in the warp's panel. */
__device__ __forceinline__ void load_tf32(uint32_t (&a)[2][4], smem_addr at_s, int kk) {
    /* 4 of k further on, the swizzle flips bit 2 of the chunk. */
    const uint4 x = ld_shared_128(at_s + kk * WGMMA_BLOCK_BYTES),
                y = ld_shared_128((at_s ^ 64) + WGMMA_BLOCK_BYTES / 2 + kk * WGMMA_BLOCK_BYTES);
    a[0][0] = x.x;
    a[0][1] = x.y;
    a[0][2] = y.x;
    a[0][3] = y.y;
    a[1][0] = x.z;
    a[1][1] = x.w;
    a[1][2] = y.z;
    a[1][3] = y.w;
}
static_assert(tf32_offset(0, 4) == (tf32_offset(0, 0) ^ 64) + 512 &&
                  tf32_offset(31, 7) == (tf32_offset(31, 3) ^ 64) + 512 &&
                  tf32_offset(13, 25) == tf32_offset(13, 1) + 3 * WGMMA_BLOCK_BYTES,
              "the steps of load_tf32");

/* Sums a tile's products over `steps` stages. panel_s and b_s: addresses of the warp's panel and of
 * B in stage 0. release(barrier) releases a stage. */
template <class B, int STAGE_BYTES, int N, int STAGES, class Release>
__device__ __forceinline__ void multiply_swapab(float (&sum)[2][N], tma_ring<STAGES> &ring,
                                                smem_addr panel_s, smem_addr b_s, int steps,
                                                int lane, const Release &release) {
    constexpr int SETS = 4; /* one for each product of a step */
    const smem_addr lane_s = panel_s + tf32_offset(lane, lane % 4);
    uint32_t a[SETS][2][4];
    if (steps == 0) return; /* an empty split of k */
    ring.wait_full();
    load_tf32(a[0], lane_s + ring.stage * STAGE_BYTES, 0);
    load_tf32(a[1], lane_s + ring.stage * STAGE_BYTES, 1);
    for (int k = 0; k < steps; ++k) {
        const smem_addr stage_b_s = b_s + ring.stage * STAGE_BYTES;
        const smem_addr before = ring.empty() + (ring.stage == 0 ? 8 * (STAGES - 1) : -8);
#pragma unroll
        for (int kk = 0; kk < SETS; ++kk) {
            wgmma_pin(sum);
            wgmma_fence(); /* a was loaded, and other code may have written the sums */
#pragma unroll
            for (int m = 0; m < 2; ++m)
                wgmma_tf32_rs<2 * N>(sum[m], a[kk][m],
                                     B::descriptor(stage_b_s + kk * B::step_bytes), k + kk > 0);
            wgmma_commit_group();
            /* All but the last two products are done, so the registers of the one before them
             * can be reloaded. */
            wgmma_wait_group<2>();
            if (kk == 1 && k > 0) release(before); /* all products of the step before are done */
            if (kk == 2) {
                ring.advance();
                /* After the last step, load_tf32 reads a stage whose values are not used.
                 * Branching around it would put the load's latency between products. */
                if (k + 1 < steps) ring.wait_full();
            }
            load_tf32(a[(kk + 2) % SETS], lane_s + ring.stage * STAGE_BYTES, (kk + 2) % SETS);
        }
    }
}

/* ---- results --------------------------------------------------------------------------------- */
/* v becomes four neighbouring results: row 8 j + 2 (lane % 4) + e, and columns from 4
 * tf32_chunk(lane) of the warp's 32 on. */
template <int N>
__device__ __forceinline__ void tf32_four(const float (&sum)[2][N], int j, int e, float *v) {
    v[0] = sum[0][4 * j + e];
    v[1] = sum[0][4 * j + 2 + e];
    v[2] = sum[1][4 * j + e];
    v[3] = sum[1][4 * j + 2 + e];
}

template <class Panel> constexpr GK_HD int tf32_store_ways(int e) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        bytes[lane] = Panel::offset(lane % 4 * 2 + e, tf32_chunk(lane));
    return ways(bytes, 16);
}

/* The Where of epilogue.cuh that stores 16 rows of the warp's 32 columns through a panel and TMA.
 * It has no c, and no activation but relu. */
template <class Panel, int PANELS, class Params> struct TransposedPanel : EveryEpilogue {
    static constexpr bool C = false, OWN_BIAS = true;
    static_assert(tf32_store_ways<Panel>(0) == 1 && tf32_store_ways<Panel>(1) == 1,
                  "stores without conflict");
    const Params &x;
    const smem_addr panels_s;
    int &panel; /* the panel written longest ago */
    const tma_at &at;
    const float (&biases)[4];
    const int lane;

    __device__ __forceinline__ TransposedPanel(const Params &call, smem_addr panels, int &oldest,
                                               const tma_at &place, const float (&of_cols)[4],
                                               int of_warp)
        : x(call), panels_s(panels), panel(oldest), at(place), biases(of_cols), lane(of_warp) {}
    __device__ __forceinline__ void alpha_and_bias(float alpha, float *v) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            v[i] *= alpha;
            if (x.p.epilogue.bias) v[i] += biases[i % 4]; /* a branch: adding 0 turns -0 into +0 */
        }
    }
    __device__ __forceinline__ void activate(float *v) const {
        if (x.p.epilogue.activation == GK_ACT_RELU) activate_16<16>(GK_ACT_RELU, v);
    }
    __device__ __forceinline__ void write(bool to_preact, const float *v) const {
        const smem_addr panel_s = panels_s + panel * Panel::bytes;
        if (lane == 0) tma_store_wait_group_read<PANELS - 1>();
        __syncwarp(); /* the panel's last contents have been read */
#pragma unroll
        for (int i = 0; i < 4; ++i)
            st_shared_128(panel_s +
                              Panel::offset(i / 2 * 8 + lane % 4 * 2 + i % 2, tf32_chunk(lane)),
                          make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]));
        fence_proxy_async();
        __syncwarp(); /* all lanes have written the panel */
        if (lane == 0) {
            tma_store_5d(to_preact ? &x.preact : &x.out, at, panel_s);
            tma_store_commit_group();
        }
        panel = panel + 1 == PANELS ? 0 : panel + 1;
    }
};

/* Stores a warp's 32 columns x 2 N rows. at: first column and row. */
template <class Panel, int PANELS, class Params, int N>
__device__ __forceinline__ void store_plain_transposed(const Params &x, const float (&sum)[2][N],
                                                       smem_addr panels_s, int &panel, tma_at at,
                                                       int lane) {
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    const int64_t col = at.c[0] + 4 * tf32_chunk(lane);
    const int valid = (int)max((int64_t)0, min((int64_t)4, x.p.m - col));
    float bias[4] = {};
    if (e.bias)
        read_any<float, 4>(e.bias, GK_F32, col * e.bias_col, e.bias_col, e.bias_vectors, valid,
                           bias);
    TransposedPanel<Panel, PANELS, Params> where(x, panels_s, panel, at, bias, lane);
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) {
        float v[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) tf32_four(sum, j + i / 2, i % 2, v + 4 * i);
        finish<16>(e, alpha, where, v);
        at.c[1] += 16;
    }
}

/* Stores results with any epilogue and strides from registers. Eight lanes write 128 bytes of a
 * row. The loop is not unrolled, so that its code exists once: each pass shifts the sums down. */
template <int N>
__device__ __forceinline__ void store_any_transposed(const GemmProblem &p, const GemmPlace &at,
                                                     float (&sum)[2][N], int64_t row0, int64_t col0,
                                                     int lane) {
    const int64_t col = col0 + 4 * tf32_chunk(lane);
    const int valid = (int)min((int64_t)4, p.m - col);
#pragma unroll 1
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int64_t row = row0 + 8 * j + lane % 4 * 2 + e;
            float v[4];
            tf32_four(sum, 0, e, v);
            if (row < p.n && valid > 0) epilogue_row<float, 4>(p.epilogue, at, row, col, valid, v);
        }
#pragma unroll
        for (int i = 0; i + 4 < N; ++i) {
            sum[0][i] = sum[0][i + 4];
            sum[1][i] = sum[1][i + 4];
        }
    }
}

#endif
