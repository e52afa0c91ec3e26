// SPDX-License-Identifier: BSD-3-Clause
// softmax: e^(x - max) of each row divided by its sum, in three ways. They use the library's online
// softmax (attn/softmax.cuh).
//
//   three kernels    maxima, sums, results: the matrix is read three times and written once, 16
//                    bytes an element
//   online           One block a row. One pass finds maximum and sum together (Milakov and
//                    Gimelshein 2018), a second writes the results: 12 bytes an element, and the
//                    second read may still hit L1 or L2.
//   registers        One block a row, whose elements stay in registers between the two passes: 8
//                    bytes an element. Rows have at most 8192 elements.
//
// Measured on one H100: 1312, 1859 and 2864 GB/s.
#include "cuda/attn/softmax.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    EACH = 32, // elements of a row in the registers of a thread
    MAX_ROWS = 8192
};
typedef RowSoftmax<ExpByTwo> Softmax;
__device__ float maxima[MAX_ROWS], totals[MAX_ROWS];

// Joins the partial softmax x of all threads of the block.
static __device__ Softmax over_block(Softmax x) {
    __shared__ float peaks[THREADS / 32], sums[THREADS / 32];
    const float peak = warp_max(x.peak);
    x.sum *= x.raise(peak);
    x.sum = warp_sum(x.sum);
    if (threadIdx.x % 32 == 0) {
        peaks[threadIdx.x / 32] = x.peak;
        sums[threadIdx.x / 32] = x.sum;
    }
    __syncthreads(); // the values of all warps are in shared memory
    Softmax all = {-INFINITY, 0};
    for (int w = 0; w < THREADS / 32; ++w) all.raise(peaks[w]);
    for (int w = 0; w < THREADS / 32; ++w) all.join(peaks[w], sums[w]);
    return all;
}

__global__ void __launch_bounds__(THREADS) max_kernel(const float *in, int cols) {
    Softmax row = {-INFINITY, 0};
    for (int c = threadIdx.x; c < cols; c += THREADS) row.raise(in[(size_t)blockIdx.x * cols + c]);
    row = over_block(row);
    if (threadIdx.x == 0) maxima[blockIdx.x] = row.peak;
}
__global__ void __launch_bounds__(THREADS) sum_kernel(const float *in, int cols) {
    Softmax row = {maxima[blockIdx.x], 0};
    for (int c = threadIdx.x; c < cols; c += THREADS)
        row.sum += row.weight(in[(size_t)blockIdx.x * cols + c]);
    row = over_block(row);
    if (threadIdx.x == 0) totals[blockIdx.x] = row.sum;
}
__global__ void __launch_bounds__(THREADS)
    divide_kernel(const float *__restrict__ in, float *__restrict__ out, int cols) {
    const Softmax row = {maxima[blockIdx.x], totals[blockIdx.x]};
    const size_t begin = (size_t)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += THREADS)
        out[begin + c] = row.weight(in[begin + c]) / row.sum;
}

__global__ void __launch_bounds__(THREADS)
    online_kernel(const float *__restrict__ in, float *__restrict__ out, int cols) {
    const size_t begin = (size_t)blockIdx.x * cols;
    Softmax row = {-INFINITY, 0};
#pragma unroll 4
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        const float x = in[begin + c];
        row.sum *= row.raise(x);
        row.sum += row.weight(x);
    }
    row = over_block(row);
    for (int c = threadIdx.x; c < cols; c += THREADS)
        out[begin + c] = row.weight(in[begin + c]) / row.sum;
}

__global__ void __launch_bounds__(THREADS)
    registers_kernel(const float *__restrict__ in, float *__restrict__ out, int cols) {
    const size_t begin = (size_t)blockIdx.x * cols;
    Softmax row = {-INFINITY, 0};
    float x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = i * THREADS + threadIdx.x;
        x[i] = c < cols ? in[begin + c] : -INFINITY;
        row.raise(x[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) row.sum += x[i] = row.weight(x[i]);
    const float peak = row.peak;
    row = over_block(row);
    const float factor = row.weight(peak) / row.sum; // a thread without elements multiplies nothing
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = i * THREADS + threadIdx.x;
        if (c < cols) out[begin + c] = x[i] * factor;
    }
}

static void three_kernels(const float *in, float *out, int rows, int cols) {
    max_kernel<<<rows, THREADS>>>(in, cols);
    sum_kernel<<<rows, THREADS>>>(in, cols);
    divide_kernel<<<rows, THREADS>>>(in, out, cols);
}
static void online(const float *in, float *out, int rows, int cols) {
    online_kernel<<<rows, THREADS>>>(in, out, cols);
}
static void registers(const float *in, float *out, int rows, int cols) {
    registers_kernel<<<rows, THREADS>>>(in, out, cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r, in += cols, out += cols) {
        double highest = -INFINITY, sum = 0;
        for (int c = 0; c < cols; ++c) highest = fmax(highest, in[c]);
        for (int c = 0; c < cols; ++c) sum += exp(in[c] - highest);
        for (int c = 0; c < cols; ++c) {
            const double want = exp(in[c] - highest) / sum;
            if (!(fabs(out[c] - want) <= 4e-6 * want)) return false;
        }
    }
    return true;
}

int main(void) {
    const pattern p = {"softmax",    same_size,      good,
                       MAX_ROWS,     THREADS * EACH, 8.0 * MAX_ROWS * THREADS * EACH,
                       small_integer};
    const char *const read = "dram__bytes_read.sum";
    const variant variants[] = {
        {"three kernels", three_kernels, memory_gbs() / 2, "memory", read},
        {"online", online, memory_gbs(), "memory", read},
        {"registers", registers, memory_gbs(), "memory", read},
    };
    const int sizes[][2] = {{1, 1}, {1, 17}, {3, 255}, {1, 4097}, {7, 8192}, {1024, 1024}};
    return run(p, variants, sizes);
}
