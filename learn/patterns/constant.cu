// SPDX-License-Identifier: BSD-3-Clause
// constant: 256 multiply-adds an element with the numbers of one table, from four places.
//
//   constant, one address     all lanes want the same entry: a multiply-add takes it from constant memory as an operand, free
//   constant, 32 addresses    lane l wants entry l + i: constant memory serves an address at a time
//   global, 32 addresses      the same entries through L1, which serves the one or two lines that they lie in
//   shared, 32 addresses      the same from 32 banks: one wavefront
// All add up the same numbers, small integers, so the order does not show.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    ENTRIES = 256,
    AGAIN = 32 // the first entries stand behind the last, so that l + i needs no remainder
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
    static constexpr int AHEAD = ENTRIES; // the entry's address is known to the compiler
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
    __syncthreads(); // the table is there
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
    // Clocks of an SM for a warp's entry: a multiply-add 1/4, an address of constant memory 1, a
    // load through L1 at least 2, a wavefront of shared memory 1.
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
