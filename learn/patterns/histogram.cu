// SPDX-License-Identifier: BSD-3-Clause
// histogram: counts how many inputs fall into each of 256 bins, in three ways. Counts are integers,
// so the order of additions does not matter.
//
//   global              one atomic addition in L2 for each input. The bins lie in 8 lines, so in
//                       few slices of L2.
//   shared              each block has its own bins in shared memory and adds them to the result at
//                       its end
//   shared, 8 copies    each warp has its own bins, so warps do not conflict; lanes of a warp still
//                       do
//
// Measured on one H100: 13, 2692 and 2678 GB/s.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    BINS = 256
};

static __device__ int bin_of(float x) { return (int)x & BINS - 1; }

__global__ void __launch_bounds__(THREADS) global_kernel(const float *in, unsigned *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        atomicAdd(&out[bin_of(in[i])], 1);
}

template <int COPIES>
__global__ void __launch_bounds__(THREADS) shared_kernel(const float *in, unsigned *out, int n) {
    __shared__ unsigned bins[COPIES][BINS];
    for (int i = threadIdx.x; i < COPIES * BINS; i += THREADS) bins[0][i] = 0;
    __syncthreads(); // all bins are empty
    unsigned *const mine = bins[threadIdx.x / 32 % COPIES];
    const int first = blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 2
    for (int i = first; i < n / 4; i += gridDim.x * THREADS) {
        const float4 x = ((const float4 *)in)[i];
        atomicAdd(&mine[bin_of(x.x)], 1);
        atomicAdd(&mine[bin_of(x.y)], 1);
        atomicAdd(&mine[bin_of(x.z)], 1);
        atomicAdd(&mine[bin_of(x.w)], 1);
    }
    if (first < n % 4) atomicAdd(&mine[bin_of(in[n - 1 - first])], 1);
    __syncthreads(); // every input is counted
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        unsigned sum = 0;
        for (int c = 0; c < COPIES; ++c) sum += bins[c][i];
        if (sum > 0) atomicAdd(&out[i], sum);
    }
}

template <void (*KERNEL)(const float *, unsigned *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    MUST(cudaMemsetAsync(out, 0, BINS * sizeof *out));
    KERNEL<<<BLOCKS, THREADS>>>(in, (unsigned *)out, rows * cols);
}

static int out_size(int, int) { return BINS; }
static float scattered(int i) { return (float)((unsigned)i * 2654435761u >> 24); }
static bool good(const float *in, const float *out, int rows, int cols) {
    unsigned want[BINS] = {};
    for (int i = 0; i < rows * cols; ++i) ++want[(int)in[i]];
    return memcmp(want, out, sizeof want) == 0;
}

int main(void) {
    // The 32 lanes of a warp hit 20 of the bins' 32 sectors, and 8 slices of L2 take one a clock
    // each. In shared memory, the fullest of 32 random banks serves 3.5 lanes.
    const pattern p = {"histogram", out_size, good, 8192, 8192, 4.0 * 8192 * 8192, scattered};
    const char *const conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum";
    const variant variants[] = {
        {"global", launch<global_kernel>, FIGURES.ghz * 8 * 128 / 20, "L2's atomics",
         "lts__t_sectors_op_red.sum"},
        {"shared", launch<shared_kernel<1>>, sm_gbs(3.5, 128), "memory", conflicts},
        {"shared, 8 copies", launch<shared_kernel<8>>, sm_gbs(3.5, 128), "memory", conflicts},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
