// SPDX-License-Identifier: BSD-3-Clause
// syrk: a rank-k update, out = in in^T. The product is symmetric, so a triangle of its tiles is
// enough.
//
//   all tiles                a gemm that does not use the symmetry
//   triangle                 blocks only for the tiles on and below the diagonal. An element is
//                            stored at (r, c) and (c, r).
//   triangle, loaded once    Against triangle: on the diagonal both operands are the same tile,
//                            which is loaded once. That is 32 of 528 tiles.
//
// Measured on one H100: 4546, 2454 and 2363 us.
//
// A square root turns the block's number into a tile of the triangle. Covariances, normal equations
// and k k^T of a kernel machine are such products. Tiles are 128 x 128 with 8 x 8 sums a thread, in
// float32.
#include "measure.cuh"

enum {
    TILE = 128,
    STEP = 8,       // k of a step
    ROW = TILE + 4, // padded: a warp stores 8 of k and 4 rows, which fall into 32 banks
    EACH = 8,       // rows and columns of a thread: two runs of 4, 64 apart
    THREADS = TILE / EACH * TILE / EACH
};

static __device__ void load(const float *in, int row0, int k0, int rows, int cols,
                            float (*tile)[ROW]) {
    for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
        const int r = i / STEP, k = i % STEP;
        tile[k][r] = row0 + r < rows && k0 + k < cols ? in[(size_t)(row0 + r) * cols + k0 + k] : 0;
    }
}
static __device__ int element(int from, int i) { return from * 4 + i % 4 + i / 4 * TILE / 2; }

template <bool TRIANGLE, bool ONCE>
__global__ void __launch_bounds__(THREADS, 2)
    syrk_kernel(const float *in, float *out, int rows, int cols, int across) {
    __shared__ __align__(16) float left[STEP][ROW], right[STEP][ROW];
    int down = blockIdx.x / across, over = blockIdx.x % across;
    if (TRIANGLE) { // down (down + 1) / 2 tiles lie in the rows above
        down = (int)((sqrtf(8.0f * blockIdx.x + 1) - 1) / 2);
        while ((down + 1) * (down + 2) / 2 <= blockIdx.x) ++down; // corrects a rounded root
        while (down * (down + 1) / 2 > blockIdx.x) --down;
        over = blockIdx.x - down * (down + 1) / 2;
    }
    const bool one = ONCE && down == over;
    const float (*const second)[ROW] = one ? left : right;
    const int r0 = threadIdx.x / (TILE / EACH), c0 = threadIdx.x % (TILE / EACH);
    float sum[EACH][EACH] = {};
    for (int k0 = 0; k0 < cols; k0 += STEP) {
        __syncthreads(); // every thread has read the previous step
        load(in, down * TILE, k0, rows, cols, left);
        if (!one) load(in, over * TILE, k0, rows, cols, right);
        __syncthreads(); // both tiles are complete
#pragma unroll
        for (int k = 0; k < STEP; ++k) {
            float a[EACH], b[EACH];
            for (int h = 0; h < 2; ++h) {
                *(float4 *)&a[4 * h] = *(const float4 *)&left[k][element(r0, 4 * h)];
                *(float4 *)&b[4 * h] = *(const float4 *)&second[k][element(c0, 4 * h)];
            }
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < EACH; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int r = down * TILE + element(r0, i);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int c = over * TILE + element(c0, j);
            if (r >= rows || c >= rows) continue;
            out[(size_t)r * rows + c] = sum[i][j];
            if (TRIANGLE && down != over) out[(size_t)c * rows + r] = sum[i][j];
        }
    }
}
template <bool TRIANGLE, bool ONCE>
static void launch(const float *in, float *out, int rows, int cols) {
    const int across = (rows + TILE - 1) / TILE,
              tiles = TRIANGLE ? across * (across + 1) / 2 : across * across;
    syrk_kernel<TRIANGLE, ONCE><<<tiles, THREADS>>>(in, out, rows, cols, across);
}

static int out_size(int rows, int) { return rows * rows; }
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < rows; ++c) {
            float sum = 0;
            for (int k = 0; k < cols; ++k)
                sum += in[(size_t)r * cols + k] * in[(size_t)c * cols + k];
            if (out[(size_t)r * rows + c] != sum) return false;
        }
    }
    return true;
}

int main(void) {
    // An SM makes 128 multiply-adds a clock; rung 5 of the gemm ladder, which has the same tile,
    // reaches 0.64 of that. Blocks run in waves of 2 an SM.
    const int rows = 4096, cols = 4096, across = rows / TILE;
    const auto us = [&](int tiles) {
        const double waves = ceil(tiles / (2.0 * FIGURES.sms)),
                     clocks = (double)TILE * TILE * cols / 128 / 0.64;
        return waves * 2 * clocks / FIGURES.ghz / 1e3;
    };
    const pattern p = {"syrk", out_size, good, rows, cols, 0, small_integer};
    const char *const fma = "smsp__inst_executed_pipe_fma.sum";
    const variant variants[] = {
        {"all tiles", launch<false, false>, us(across * across), "multiply-adds", fma},
        {"triangle", launch<true, false>, us(across * (across + 1) / 2), "multiply-adds", fma},
        {"triangle, loaded once", launch<true, true>, us(across * (across + 1) / 2),
         "multiply-adds", fma},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {130, 17}, {300, 129}};
    return run(p, variants, sizes);
}
