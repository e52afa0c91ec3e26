// SPDX-License-Identifier: BSD-3-Clause
// convolution: a 5 x 5 filter over a picture that is surrounded by zeros. It makes 25 multiply-adds
// a pixel; the variants differ in where the operands come from.
//
//   weights by loads        25 loads of pixels and 25 of weights. All lanes load the same weight.
//   weights by constants    Against the first: the multiply-add takes the weight from constant
//                           memory as an operand, so 25 loads fewer.
//   shared                  Against the second: a block first copies its part of the picture, with
//                           a rim, to shared memory.
//   shared, 8 rows          Against the third: a thread computes 8 pixels of a column. 12 x 5 loads
//                           serve all 8, which is 7.5 a pixel.
//
// Measured on one H100: 992, 1283, 1003 and 1537 GB/s. "shared" loses to "constants": it compares
// every copied element with the edges.
//
// All weights are small integers, so the order of the sum does not matter.
#include "measure.cuh"

enum {
    SIDE = 5,
    RIM = SIDE / 2,
    COLS = 32, // of a block: a warp computes one row
    WARPS = 8,
};

struct Weights {
    float w[SIDE][SIDE];
    constexpr Weights() : w() {
        for (int i = 0; i < SIDE * SIDE; ++i) w[i / SIDE][i % SIDE] = (float)(i * 7 % 11 - 5);
    }
};
__constant__ Weights weights_c = Weights();
__device__ Weights weights_g = Weights();

struct ByConstant {
    static __device__ float at(int i, int j) { return weights_c.w[i][j]; }
};
struct ByLoad {
    static __device__ float at(int i, int j) { return weights_g.w[i][j]; }
};

static __device__ float pixel(const float *in, int row, int col, int rows, int cols) {
    return row >= 0 && row < rows && col >= 0 && col < cols ? in[(size_t)row * cols + col] : 0;
}

template <class Weight>
__global__ void __launch_bounds__(COLS *WARPS)
    direct_kernel(const float *in, float *out, int rows, int cols) {
    const int row = blockIdx.y * WARPS + threadIdx.y, col = blockIdx.x * COLS + threadIdx.x;
    float sum = 0;
    if (row >= rows || col >= cols) return;
    // near the edge: every tap is compared with the picture's size
    if (row < RIM || row >= rows - RIM || col < RIM || col >= cols - RIM) {
        for (int i = 0; i < SIDE * SIDE; ++i)
            sum += Weight::at(i / SIDE, i % SIDE) *
                   pixel(in, row + i / SIDE - RIM, col + i % SIDE - RIM, rows, cols);
        out[(size_t)row * cols + col] = sum;
        return;
    }
    const float *from = in + (size_t)(row - RIM) * cols + col - RIM;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j)
            sum = fmaf(from[(size_t)i * cols + j], Weight::at(i, j), sum);
    }
    out[(size_t)row * cols + col] = sum;
}

// A thread computes EACH rows of a column.
template <int EACH>
__global__ void __launch_bounds__(COLS *WARPS)
    shared_kernel(const float *in, float *out, int rows, int cols) {
    constexpr int tile_rows = WARPS * EACH + 2 * RIM, tile_cols = COLS + 2 * RIM;
    __shared__ float tile[tile_rows][tile_cols];
    const int row0 = blockIdx.y * WARPS * EACH, col0 = blockIdx.x * COLS;
    for (int r = threadIdx.y; r < tile_rows; r += WARPS)
        for (int c = threadIdx.x; c < tile_cols; c += COLS)
            tile[r][c] = pixel(in, row0 + r - RIM, col0 + c - RIM, rows, cols);
    __syncthreads(); // the tile and its rim are complete
    float sum[EACH] = {};
#pragma unroll
    for (int r = 0; r < EACH + 2 * RIM; ++r) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
            const float x = tile[threadIdx.y * EACH + r][threadIdx.x + j];
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (r - e >= 0 && r - e < SIDE) sum[e] = fmaf(x, ByConstant::at(r - e, j), sum[e]);
        }
    }
    for (int e = 0; e < EACH; ++e) {
        const int row = row0 + threadIdx.y * EACH + e, col = col0 + threadIdx.x;
        if (row < rows && col < cols) out[(size_t)row * cols + col] = sum[e];
    }
}

template <void (*KERNEL)(const float *, float *, int, int), int EACH>
static void launch(const float *in, float *out, int rows, int cols) {
    const dim3 grid((cols + COLS - 1) / COLS, (rows + WARPS * EACH - 1) / (WARPS * EACH));
    KERNEL<<<grid, dim3(COLS, WARPS)>>>(in, out, rows, cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    const Weights weights;
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            float sum = 0;
            for (int i = -RIM; i <= RIM; ++i)
                for (int j = -RIM; j <= RIM; ++j)
                    if (r + i >= 0 && r + i < rows && c + j >= 0 && c + j < cols)
                        sum += weights.w[i + RIM][j + RIM] * in[(size_t)(r + i) * cols + c + j];
            if (out[(size_t)r * cols + c] != sum) return false;
        }
    }
    return true;
}

int main(void) {
    // Clocks of an SM for a row of pixels of a warp: a load through L1 takes 1.1 on average,
    // because it may lie in two lines, and a shared weight takes 1; a load from shared memory takes
    // 1
    const pattern p = {"convolution", same_size,         good,         8192,
                       8192,          8.0 * 8192 * 8192, small_integer};
    const char *const l1 = "l1tex__data_pipe_lsu_wavefronts.sum";
    const variant variants[] = {
        {"weights by loads", launch<direct_kernel<ByLoad>, 1>, sm_gbs(25 * 1.1 + 25, 256), "L1",
         l1},
        {"weights by constants", launch<direct_kernel<ByConstant>, 1>, sm_gbs(25 * 1.1, 256), "L1",
         l1},
        {"shared", launch<shared_kernel<1>, 1>, sm_gbs(25 + 3 * 1.5, 256), "shared memory", l1},
        {"shared, 8 rows", launch<shared_kernel<8>, 8>, memory_gbs(), "memory", l1},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {37, 131}, {1024, 1024}};
    return run(p, variants, sizes);
}
