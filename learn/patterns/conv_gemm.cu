// SPDX-License-Identifier: BSD-3-Clause
// conv_gemm: a 3 x 3 convolution of a picture from 128 to 128 channels, computed as a product on
// tensor cores. Operands are bfloat16, sums float32, and the picture is surrounded by zeros.
//
// The left operand is the im2col matrix: one row for each pixel, with the channels of its 9
// neighbours next to each other. The right operand is the weights [128][9 x 128]. The variants
// differ in where the matrix comes from:
//
//   im2col + gemm         One kernel writes the matrix, nine times the size of the picture. Then
//                         the product reads it.
//   implicit, cp.async    The product gathers its tiles out of the picture. For each 16 bytes a
//                         thread computes the pixel, and whether it is inside.
//   implicit, TMA         A tensor map of kind im2col. One thread names the first pixel and the
//                         neighbour. TMA walks the rows, fills zeros at the edges, and writes 128
//                         pixels of 64 channels, swizzled.
//
// Measured on one H100: 153, 244 and 381 TFLOP/s.
//
// All three share the product in conv_product.cuh: 128 pixels x 128 filters a block, 18 steps of
// 64. conv_cudnn.py times cuDNN on the same convolution.
#include "conv_product.cuh"
#include "measure.cuh"

#include <cuda.h>

static __host__ __device__ int weight(int filter, int tap, int c) {
    return (filter * 7 + tap * 5 + c * 3) % 5 - 2;
}

struct Picture {
    const bf16 *x;
    int height, width;
    // Address of 8 elements, from element `at` on, of a pixel's row of the im2col matrix. NULL if
    // they lie outside the picture, or if there is no such pixel.
    __device__ const bf16 *chunk(int pixel, int at) const {
        const int tap = at / C, y = pixel / width + tap / 3 - 1, x0 = pixel % width + tap % 3 - 1;
        const bool inside = pixel < height * width && y >= 0 && y < height && x0 >= 0 && x0 < width;
        return inside ? x + ((size_t)y * width + x0) * C + at % C : NULL;
    }
};

// The three sources of a step's tile of pixels: the written matrix, a gather, a tensor map.
struct Rows {
    const bf16 *matrix;
    int pixels;
    __device__ void load(int step, int pixel0, smem_addr to_s, smem_addr) const {
        copy_tile_async<Tile, THREADS>(to_s, matrix + (size_t)pixel0 * ROW + step * PART, ROW,
                                       pixels - pixel0, threadIdx.x);
    }
    __device__ void wait(smem_addr, unsigned) const {}
};
struct Gather {
    Picture picture;
    __device__ void load(int step, int pixel0, smem_addr to_s, smem_addr) const {
        for (int i = threadIdx.x; i < PIXELS * Tile::chunks; i += THREADS) {
            const int r = i / Tile::chunks, chunk = i % Tile::chunks;
            const bf16 *from = picture.chunk(pixel0 + r, step * PART + chunk * 8);
            cp_async_cg_16(to_s + Tile::offset(r, chunk), from ? from : picture.x, from ? 16 : 0);
        }
    }
    __device__ void wait(smem_addr, unsigned) const {}
};
struct Im2col {
    CUtensorMap map;
    int width;
    __device__ void load(int step, int pixel0, smem_addr to_s, smem_addr full_s) const {
        const int tap = step * PART /
                        C; // a box starts at the pixel's upper left neighbour, so taps count from 0
        if (threadIdx.x > 0) return;
        mbarrier_arrive_expect_tx(full_s, Tile::bytes);
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to_s),
            "l"(&map), "r"(full_s), "r"(step * PART % C), "r"(pixel0 % width - 1),
            "r"(pixel0 / width - 1), "r"(0), "h"((uint16_t)(tap % 3)), "h"((uint16_t)(tap / 3))
            : "memory");
    }
    __device__ void wait(smem_addr full_s, unsigned parity) const { mbarrier_wait(full_s, parity); }
};

static bf16 *picture, *weights, *matrix; // the last input as bfloat16, and its im2col matrix
__global__ void prepare_kernel(const float *in, int n, bf16 *to, bf16 *weights) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) to[i] = __float2bfloat16_rn(in[i]);
    if (i < C * ROW) weights[i] = __float2bfloat16_rn((float)weight(i / ROW, i % ROW / C, i % C));
}
static void prepare(const float *in, int rows, int cols) {
    static int room;
    const int n = rows * cols, most = n > C * ROW ? n : C * ROW;
    if (n > room) {
        if (room) MUST(cudaFree(picture)); // one allocation for the three
        room = n;
        MUST(cudaMalloc((void **)&picture, sizeof(bf16) * (10ull * n + C * ROW)));
        matrix = picture + n;
        weights = matrix + 9ull * n;
    }
    prepare_kernel<<<(most + THREADS - 1) / THREADS, THREADS>>>(in, n, picture, weights);
}

__global__ void im2col_kernel(Picture of, bf16 *to, int chunks) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= chunks) return;
    const bf16 *from = of.chunk(i / (ROW / 8), i % (ROW / 8) * 8);
    ((uint4 *)to)[i] = from ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
}
template <class From> static void start(const From &from, float *out, int pixels) {
    const int bytes = 2 * STAGES * Tile::bytes;
    MUST(cudaFuncSetAttribute(product_kernel<From>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes));
    product_kernel<<<(pixels + PIXELS - 1) / PIXELS, THREADS, bytes>>>(from, weights, out, pixels);
}
static void by_matrix(const float *, float *out, int height, int cols) {
    const int pixels = height * cols / C, chunks = pixels * (ROW / 8);
    im2col_kernel<<<(chunks + THREADS - 1) / THREADS, THREADS>>>({picture, height, cols / C},
                                                                 matrix, chunks);
    start(Rows{matrix, pixels}, out, pixels);
}
static void gathered(const float *, float *out, int height, int cols) {
    start(Gather{{picture, height, cols / C}}, out, height * cols / C);
}
static void by_tma(const float *, float *out, int height, int cols) {
    static void *encode;
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &encode, 12000,
                                              cudaEnableDefault, &found));
    const cuuint64_t width = cols / C, size[4] = {C, width, (cuuint64_t)height, 1},
                     pitch[3] = {C * 2, width * C * 2, width * height * C * 2};
    // the box of start pixels: those of the picture, moved to their upper left neighbours
    const int lower[2] = {-1, -1}, upper[2] = {-1, -1};
    const cuuint32_t step[4] = {1, 1, 1, 1};
    Im2col from = {{}, (int)width};
    const CUresult made = ((decltype(&cuTensorMapEncodeIm2col))encode)(
        &from.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, picture, size, pitch, lower, upper, PART,
        PIXELS, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (made != CUDA_SUCCESS) exit((fprintf(stderr, "no tensor map: %d\n", (int)made), 1));
    start(from, out, height * cols / C);
}

static bool good(const float *in, const float *out, int height, int cols) {
    for (int i = 0; i < height * cols; ++i) {
        float sum = 0;
        for (int tap = 0; tap < 9; ++tap) {
            const int y = i / cols + tap / 3 - 1, x = i / C % (cols / C) + tap % 3 - 1;
            for (int c = 0; y >= 0 && y < height && x >= 0 && x < cols / C && c < C; ++c)
                sum += in[y * cols + x * C + c] * (float)weight(i % C, tap, c);
        }
        if (out[i] != sum) return false;
    }
    return true;
}

int main(void) {
    const int height = 512, cols = 512 * C;
    const double flops = 2.0 * height * cols * ROW, matrix_bytes = 2.0 * height * cols * 9;
    pattern p = {"convolution as a product", same_size, good, height, cols, flops, small_integer};
    p.unit = "GFLOP/s";
    // mma.sync with such tiles: 408 TFLOP/s (predicted for rung 6 of the gemm ladder). im2col also
    // writes the matrix first, and its product reads it.
    const double mma = 408e3, write_s = matrix_bytes / (memory_gbs() * 1e9),
                 product_s = fmax(write_s, flops / (mma * 1e9));
    const variant variants[] = {
        {"im2col + gemm", by_matrix, flops * 1e-9 / (write_s + product_s), "memory, then memory",
         "smsp__inst_executed.sum", NULL, prepare},
        {"implicit, cp.async", gathered, mma, "mma.sync", "smsp__inst_executed.sum", NULL, prepare},
        {"implicit, TMA", by_tma, mma, "mma.sync", "smsp__inst_executed.sum", NULL, prepare},
    };
    const int sizes[][2] = {{1, C}, {17, C}, {1, 130 * C}, {3, 5 * C}, {20, 33 * C}};
    return run(p, variants, sizes);
}
