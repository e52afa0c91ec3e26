// SPDX-License-Identifier: BSD-3-Clause
// clusters: how large one may be, what of the GPU it leaves idle, and what its barrier costs.
//
//   barrier of N      1,000 barriers of a cluster of N blocks, one after the other; N = 1 is the block's own barrier
//   of 8, relaxed     the same without .release and .acquire: for those who have nothing to show each other, or show it by mbarriers
// Before: what the GPU refuses. Up to 8 blocks may be asked for anywhere; 16 only by a kernel that
// has opted in; 17 never; and shared memory that 16 SMs of a GPC have not stops the launch, too. A
// launch that does not fit fails: nothing falls back, and a caller who does not look at the error
// sees an output that nobody wrote.
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cluster_reads.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BARRIERS = 1000,
    MOST = 16
};

// out = in, behind the barriers.
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
// The same, which has not opted in.
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

// What a launch of so many blocks a cluster says; `fails` is what it should.
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
    const size_t all = 227 * 1024; // bytes of shared memory: a block an SM
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
    // A barrier of a block some 20 clocks, of a cluster a trip between SMs: 180 (the pattern
    // latency)
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
