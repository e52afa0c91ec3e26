// SPDX-License-Identifier: BSD-3-Clause
// constant: 256 multiply-adds an element with the numbers of one table. The four variants read the
// table from different places.
//
//   constant, one address     All lanes want the same entry. The multiply-add takes it from
//                             constant memory as an operand, without a load.
//   constant, 32 addresses    Lane l wants entry l + i. Constant memory serves one address at a
//                             time.
//   global, 32 addresses      The same entries through L1, which serves the one or two lines that
//                             hold them.
//   shared, 32 addresses      The same entries from 32 banks of shared memory: one wavefront.
//
// Measured on one H100: 615, 4, 234 and 249 GB/s.
//
// All four variants add the same small integers, so the order of the sum does not matter.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    ENTRIES = 256,
    AGAIN = 32 // the first entries are repeated behind the last, so l + i needs no remainder
};

struct Table {
    float x[ENTRIES + AGAIN];
    constexpr Table() : x() {
        for (int i = 0; i < ENTRIES + AGAIN; ++i) x[i] = (float)(i % ENTRIES * 5 % 11 - 4);
    }
};
__constant__ Table table_c = Table();
__device__ Table table_g = Table();

struct OneAddress {
    static constexpr int AHEAD = ENTRIES; // unrolled fully, so that every address is a constant
    static __device__ float entry(const float *, int, int i) { return table_c.x[i]; }
};
struct Constant {
    static constexpr int AHEAD = 32;
    static __device__ float entry(const float *, int lane, int i) { return table_c.x[lane + i]; }
};
struct Global {
    static constexpr int AHEAD = 32;
    static __device__ float entry(const float *, int lane, int i) { return table_g.x[lane + i]; }
};
struct Shared {
    static constexpr int AHEAD = 32;
    static __device__ float entry(const float *table_s, int lane, int i) {
        return table_s[lane + i];
    }
};

template <class From>
__global__ void __launch_bounds__(THREADS)
    table_kernel(const float *__restrict__ in, float *__restrict__ out, int n) {
    __shared__ float table_s[ENTRIES + AGAIN];
    for (int i = threadIdx.x; i < ENTRIES + AGAIN; i += THREADS) table_s[i] = table_g.x[i];
    __syncthreads(); // the table is complete
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        const float x = in[i];
        float sum = 0;
#pragma unroll From::AHEAD
        for (int j = 0; j < ENTRIES; ++j)
            sum = fmaf(x, From::entry(table_s, threadIdx.x % 32, j), sum);
        out[i] = sum;
    }
}

template <class From> static void launch(const float *in, float *out, int rows, int cols) {
    table_kernel<From><<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    const Table table;
    float sum = 0;
    for (int j = 0; j < ENTRIES; ++j) sum += table.x[j];
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != in[i] * sum) return false;
    }
    return true;
}

int main(void) {
    // Clocks of an SM for one entry of a warp: 1/4 for a multiply-add, 1 for an address of constant
    // memory, at least 2 for a load through L1, 1 for a wavefront of shared memory.
    const pattern p = {"constant", same_size, good, 4096, 4096, 8.0 * 4096 * 4096, small_integer};
    const char *const l1 = "l1tex__data_pipe_lsu_wavefronts.sum";
    const variant variants[] = {
        {"constant, one address", launch<OneAddress>, sm_gbs(ENTRIES / 4.0, 256), "multiply-adds",
         "smsp__inst_executed_pipe_fma.sum"},
        {"constant, 32 addresses", launch<Constant>, sm_gbs(ENTRIES * 32, 256), "constant cache",
         "idc__requests.sum"},
        {"global, 32 addresses", launch<Global>, sm_gbs(ENTRIES * 2, 256), "L1", l1},
        {"shared, 32 addresses", launch<Shared>, sm_gbs(ENTRIES, 256), "shared memory", l1},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
