// SPDX-License-Identifier: BSD-3-Clause
// clusters: how large a cluster may be, which launches fail, and what the cluster's barrier costs.
//
//   barrier of N     1,000 barriers of a cluster of N blocks, one after the other. For N = 1 it is
//                    the block's own barrier.
//   of 8, relaxed    The same without .release and .acquire. It is enough if the blocks share no
//                    data, or order their data by mbarriers.
//
// Measured on one H100, 1,000 barriers: 22 us for a block, 57 us for 8 blocks relaxed, 446 to 560
// us for 2 to 16 blocks ordered. An ordered barrier first fences all memory.
//
// Before that, the program asks for launches that should fail. Clusters of up to 8 blocks may be
// asked for by any kernel, 16 only by a kernel that has opted in, 32 by none. A launch also fails
// if its shared memory exceeds that of an SM. A failed launch has no fallback: a caller that
// ignores the error reads an output that nobody wrote.
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cluster_reads.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BARRIERS = 1000,
    MOST = 16
};

// Runs the barriers, then writes out = in.
enum Kind {
    OF_BLOCK,
    ORDERED,
    RELAXED
};
template <Kind KIND>
__global__ void __launch_bounds__(THREADS) barrier_kernel(const float *in, float *out, int n) {
    for (int i = 0; i < BARRIERS; ++i) {
        if (KIND == OF_BLOCK) __syncthreads();
        if (KIND == ORDERED) barrier_cluster_ordered();
        if (KIND == RELAXED) barrier_cluster();
    }
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        out[i] = in[i];
}
// A copy kernel that never opts in to clusters of 16.
__global__ void shy_kernel(const float *in, float *out, int n) {
    if (threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x];
}
typedef void (*Kernel)(const float *, float *, int);

struct Launch {
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    Launch(int size, int blocks, size_t shared = 0) {
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = size;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.gridDim = dim3(blocks);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
};

template <int SIZE, Kind KIND>
static void barriers(const float *in, float *out, int rows, int cols) {
    const Kernel kernel = barrier_kernel<KIND>;
    const Launch launch(SIZE, MOST);
    if (SIZE > 8)
        MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    MUST(cudaLaunchKernelEx(&launch.config, kernel, in, out, rows * cols));
}

static bool good(const float *in, const float *out, int rows, int cols) {
    return memcmp(in, out, sizeof *in * rows * cols) == 0;
}

// Launches a cluster of `size` blocks and prints the result. `fails` says whether it should fail.
static int refuse(const char *what, bool fails, Kernel kernel, int size, size_t shared) {
    Launch launch(size, size, shared);
    int clusters = 0;
    const cudaError_t counted = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
    (void)cudaGetLastError();
    const cudaError_t error =
        cudaLaunchKernelEx(&launch.config, kernel, (const float *)NULL, (float *)NULL, 0);
    (void)cudaGetLastError();
    MUST(cudaDeviceSynchronize());
    fprintf(stderr, "  %-34s at once: %3d clusters, %3d of %d SMs; %s\n", what,
            counted ? 0 : clusters, counted ? 0 : clusters * size, FIGURES.sms,
            cudaGetErrorName(error));
    if ((error != cudaSuccess) == fails) return 0;
    return printf("WRONG  %s: %s\n", what, cudaGetErrorName(error)), 1;
}
static int refusals() {
    const size_t all = 227 * 1024; // bytes of shared memory: one block takes a whole SM
    const Kernel kernel = barrier_kernel<ORDERED>;
    int wrong = refuse("16 blocks, not opted in", true, shy_kernel, 16, 0);
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)all));
    wrong += refuse("16 blocks", false, kernel, 16, 0);
    wrong += refuse("32 blocks", true, kernel, 32, 0);
    wrong += refuse("16 blocks, each an SM", false, kernel, 16, all);
    wrong += refuse("8 blocks, each an SM", false, kernel, 8, all);
    wrong += refuse("4 blocks, each an SM", false, kernel, 4, all);
    wrong += refuse("2 blocks, each an SM", false, kernel, 2, all);
    return wrong + refuse("16 blocks of more than an SM", true, kernel, 16, all + 1024);
}

int main(void) {
    // Predictions: some 20 clocks for a barrier of a block, 180 for one of a cluster, which is a
    // trip between SMs (the pattern latency)
    const auto us = [](double clocks) { return BARRIERS * clocks / FIGURES.ghz / 1e3; };
    const char *const stall = "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio";
    const pattern p = {"clusters", same_size, good, MOST, THREADS, 0, small_integer};
    const variant variants[] = {
        {"barrier of 1", barriers<1, OF_BLOCK>, us(20), "the block's barrier", stall},
        {"barrier of 8, relaxed", barriers<8, RELAXED>, us(180), "a trip between SMs", stall},
        {"barrier of 2", barriers<2, ORDERED>, us(180), "a trip between SMs", stall},
        {"barrier of 8", barriers<8, ORDERED>, us(180), "a trip between SMs", stall},
        {"barrier of 16", barriers<16, ORDERED>, us(180), "a trip between SMs", stall},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}};
    const int wrong = FIGURES.gpu ? refusals() : 0;
    return run(p, variants, sizes) + wrong != 0;
}
