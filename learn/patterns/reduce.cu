// SPDX-License-Identifier: BSD-3-Clause
// reduce: the sum of rows x cols floats, in five ways. Every block sums a part of them in a
// grid-stride loop.
//
//   atomics    every element is an atomic addition to one address
//   shared     a tree in shared memory, then one atomic a block
//   shuffle    sums in registers, shuffled within warps, one word a warp in shared memory, one
//              atomic a block
//   block      the same, reading 16 bytes a thread at a time
//   cluster    The same, but 8 blocks send their sums to the shared memory of the first (DSMEM):
//              one atomic a cluster.
//
// Measured on one H100: 2, 2162, 2157, 2873 and 2404 GB/s.
//
// The hardware decides the order of the sum, so bits may differ between runs for inputs whose sums
// are not exact.
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8, // fills an H200
    CLUSTER = 8
};

__global__ void __launch_bounds__(THREADS) atomics_kernel(const float *in, float *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        atomicAdd(out, in[i]);
}

static __device__ float sum_of(const float *in, int n) {
    float sum = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) sum += in[i];
    return sum;
}

static __device__ float wide_sum_of(const float *in, int n) {
    const int first = blockIdx.x * THREADS + threadIdx.x;
    float4 sum = make_float4(first < n % 4 ? in[n - 1 - first] : 0, 0, 0, 0);
#pragma unroll 4
    for (int i = first; i < n / 4; i += gridDim.x * THREADS) {
        const float4 x = ((const float4 *)in)[i];
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

__global__ void __launch_bounds__(THREADS) shared_kernel(const float *in, float *out, int n) {
    __shared__ float part[THREADS];
    part[threadIdx.x] = sum_of(in, n);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); // the sums of the previous step are complete
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(out, part[0]);
}

// The sum over the block, in the lanes of the first warp.
static __device__ float block_sum(float sum) {
    __shared__ float part[THREADS / 32];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads(); // the sums of all warps are in shared memory
    return threadIdx.x < 32 ? warp_sum(threadIdx.x < THREADS / 32 ? part[threadIdx.x] : 0) : 0;
}

template <float (*SUM)(const float *, int)>
__global__ void __launch_bounds__(THREADS) shuffle_kernel(const float *in, float *out, int n) {
    const float sum = block_sum(SUM(in, n));
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    cluster_kernel(const float *in, float *out, int n) {
    __shared__ __align__(16) float4 parts[CLUSTER];
    __shared__ __align__(8) unsigned long long barrier;
    const smem_addr parts_s = cvta_to_shared(parts), barrier_s = cvta_to_shared(&barrier);
    const unsigned rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_s, 1);
        fence_mbarrier_init();
        if (rank == 0) mbarrier_arrive_expect_tx(barrier_s, sizeof parts);
    }
    barrier_cluster(); // the first block's barrier is initialised before sums reach it
    const float sum = block_sum(wide_sum_of(in, n));
    if (threadIdx.x == 0)
        st_async_128(mapa(parts_s + 16 * rank, 0), sum, 0, 0, 0, mapa(barrier_s, 0));
    if (rank == 0 && threadIdx.x < 32) {
        mbarrier_wait(barrier_s, 0); // all eight sums have arrived
        const float all = warp_sum(threadIdx.x < CLUSTER ? parts[threadIdx.x].x : 0);
        if (threadIdx.x == 0) atomicAdd(out, all);
    }
}

template <void (*KERNEL)(const float *, float *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    MUST(cudaMemsetAsync(out, 0, sizeof *out));
    KERNEL<<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static int out_size(int, int) { return 1; }
static bool good(const float *in, const float *out, int rows, int cols) {
    double sum = 0;
    for (int i = 0; i < rows * cols; ++i) sum += in[i];
    return *out == (float)sum;
}

int main(void) {
    const pattern p = {"reduce", out_size, good, 8192, 8192, 4.0 * 8192 * 8192, small_integer};
    const char *const read = "dram__bytes_read.sum";
    const variant variants[] = {
        // one address belongs to one slice of L2, which adds one float a clock
        {"atomics", launch<atomics_kernel>, FIGURES.ghz * 4, "L2's atomics",
         "lts__t_sectors_op_red.sum"},
        {"shared", launch<shared_kernel>, memory_gbs(), "memory", read},
        {"shuffle", launch<shuffle_kernel<sum_of>>, memory_gbs(), "memory", read},
        {"block", launch<shuffle_kernel<wide_sum_of>>, memory_gbs(), "memory", read},
        {"cluster", launch<cluster_kernel>, memory_gbs(), "memory", "lts__t_sectors_op_red.sum"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
