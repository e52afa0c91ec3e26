// SPDX-License-Identifier: BSD-3-Clause
// vector_add: out = a + b, the first kernel of every course. in is [2][n]; its rows are a and b.
//
//   4 bytes             one float a thread and pass
//   4 bytes, 4 ahead    the same with four loads of each operand in flight
//   16 bytes            Four consecutive floats with one instruction, which needs addresses that
//                       are multiples of 16. If b does not start at one, floats are added one by
//                       one.
//
// Measured on one H100: 2725, 2733 and 2832 GB/s.
//
// Neither additions nor instructions are the limit: each result moves 12 bytes. The wide access
// saves instructions.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8 // fills an H200
};

template <int AHEAD>
__global__ void __launch_bounds__(THREADS)
    narrow_kernel(const float *__restrict__ a, float *__restrict__ out, int n) {
    const float *b = a + n;
#pragma unroll AHEAD
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        out[i] = a[i] + b[i];
}

__global__ void __launch_bounds__(THREADS)
    wide_kernel(const float *__restrict__ a, float *__restrict__ out, int n) {
    const float4 *a4 = (const float4 *)a, *b4 = (const float4 *)(a + n);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n / 4; i += gridDim.x * THREADS) {
        const float4 x = a4[i], y = b4[i];
        ((float4 *)out)[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
}

template <int AHEAD> static void narrow(const float *in, float *out, int, int n) {
    narrow_kernel<AHEAD><<<BLOCKS, THREADS>>>(in, out, n);
}
static void wide(const float *in, float *out, int, int n) {
    if (n % 4 == 0) // otherwise b is misaligned
        wide_kernel<<<BLOCKS, THREADS>>>(in, out, n);
    else
        narrow<1>(in, out, 2, n);
}

static int out_size(int, int n) { return n; }
static bool good(const float *in, const float *out, int, int n) {
    for (int i = 0; i < n; ++i) {
        if (out[i] != in[i] + in[n + i]) return false;
    }
    return true;
}

int main(void) {
    const pattern p = {"vector add", out_size, good, 2, 1 << 26, 12.0 * (1 << 26), small_integer};
    const variant variants[] = {
        {"4 bytes", narrow<1>, memory_gbs(), "memory", "dram__bytes_read.sum"},
        {"4 bytes, 4 ahead", narrow<4>, memory_gbs(), "memory", "smsp__inst_executed.sum"},
        {"16 bytes", wide, memory_gbs(), "memory", "smsp__inst_executed.sum"},
    };
    const int sizes[][2] = {{2, 1}, {2, 17}, {2, 255}, {2, 4097}, {2, 4100}, {2, 1 << 20}};
    return run(p, variants, sizes);
}
