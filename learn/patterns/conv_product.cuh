// SPDX-License-Identifier: BSD-3-Clause
// conv_product: the product of conv_gemm.cu. out [pixels][128] is the im2col matrix [pixels][9 x
// 128] times the transpose of the weights [128][9 x 128]. `From` loads the tiles of the matrix.
#ifndef CONV_PRODUCT_CUH
#define CONV_PRODUCT_CUH

#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/tma_ring.cuh"

enum {
    C = 128, // channels of the picture, and filters
    PART = 64,
    ROW = 9 * C, // a row of the im2col matrix
    STEPS = ROW / PART,
    PIXELS = 128,
    THREADS = 256,
    STAGES = 3
};
typedef __nv_bfloat16 bf16;
typedef smem_tile<PIXELS, PART * 2> Tile; // a tile of pixels or of filters

template <class From>
__global__ void __launch_bounds__(THREADS, 2)
    product_kernel(const __grid_constant__ From from, const bf16 *weights, float *out, int pixels) {
    extern __shared__ __align__(
        1024) char memory[]; // STAGES tiles of pixels, then STAGES of filters
    __shared__ __align__(8) unsigned long long full[STAGES];
    const smem_addr pixels_s = cvta_to_shared(memory), filters_s = pixels_s + STAGES * Tile::bytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pixel0 = blockIdx.x * PIXELS;
    const int row0 = warp / 4 * 64, col0 = warp % 4 * 32; // a warp computes 64 pixels x 32 filters
    float sum[4][4][4] = {};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(cvta_to_shared(&full[s]), 1);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are initialised
    const auto load = [&](int j) {
        const int s = j % STAGES;
        if (j < STEPS) {
            from.load(j, pixel0, pixels_s + s * Tile::bytes, cvta_to_shared(&full[s]));
            copy_tile_async<Tile, THREADS>(filters_s + s * Tile::bytes, weights + j * PART, ROW, C,
                                           threadIdx.x);
        }
        cp_async_commit_group();
    };
    for (int j = 0; j < STAGES - 1; ++j) load(j);
    for (int j = 0; j < STEPS; ++j) {
        const int s = j % STAGES;
        from.wait(cvta_to_shared(&full[s]), j / STAGES & 1);
        cp_async_wait_group<STAGES - 2>();
        __syncthreads(); // this step has arrived, and every warp has read the previous one
        load(j + STAGES - 1);
        const smem_addr a_s = frag_a_base<Tile>(pixels_s + s * Tile::bytes, lane, row0);
        const smem_addr b_s = frag_b_base<Tile>(filters_s + s * Tile::bytes, lane, col0);
#pragma unroll
        for (int kk = 0; kk < PART / 16; ++kk) {
            uint32_t a[4][4], b[2][4];
            for (int m = 0; m < 4; ++m)
                load_frag_a(a[m], Tile::down(Tile::along(a_s, 2 * kk), 16 * m));
            for (int n = 0; n < 2; ++n)
                load_frag_b(b[n], Tile::down(Tile::along(b_s, 2 * kk), 16 * n));
            for (int m = 0; m < 4; ++m)
                for (int n = 0; n < 4; ++n) mma_add<bf16>(sum[m][n], a[m], &b[n / 2][n % 2 * 2]);
        }
    }
    for (int i = 0; i < 64; i += 2) {
        const int m = i / 16, n = i / 4 % 4, r = i % 4,
                  pixel = pixel0 + row0 + m * 16 + frag_row(lane, r);
        float *to = out + (size_t)pixel * C + col0 + n * 8 + frag_col(lane, r);
        if (pixel < pixels) *(float2 *)to = make_float2(sum[m][n][r], sum[m][n][r + 1]);
    }
}

#endif
