// SPDX-License-Identifier: BSD-3-Clause
// dsmem: reads of shared memory, 16 bytes a lane, from the block itself and from other blocks of
// its cluster (DSMEM).
//
//   own               128 bytes a clock and SM, 33 TB/s in all
//   the next of N     Every block reads the next block of its cluster, so every SM sends as much as
//                     it receives. The network between SMs is no wider than the path to L2, so at
//                     most 32 bytes a clock and SM are expected.
//   the first of 8    Eight blocks read one, so one SM sends for all.
//
// Measured on one H100: own 32.9 TB/s; the next of 2, 4, 8 and 16 blocks 3.9, 2.9, 2.8 and 2.7
// TB/s; the first of 8 0.7 TB/s.
//
// Clusters of 16 need cudaFuncAttributeNonPortableClusterSizeAllowed. A cluster runs in one GPC of
// 16 or 18 SMs, and left-over SMs are idle.
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cluster_reads.cuh"
#include "cuda/ptx/smem.cuh"
#include "measure.cuh"

enum {
    THREADS = 512,
    BLOCKS = 132 * 16, // a multiple of every cluster size
    ROUNDS = 2048,     // reads of 16 bytes by each thread
};

// Writes out = in if every read returned the expected value, else NaN. `step` is 0, which the
// compiler cannot know, so it keeps every read. FIRST: every block reads block 0 of its cluster;
// otherwise the next block.
template <bool OWN, bool FIRST>
__global__ void __launch_bounds__(THREADS)
    read_kernel(const float *in, float *out, int n, unsigned size, int step) {
    __shared__ __align__(16) uint4 table[THREADS];
    const unsigned rank = cluster_ctarank();
    table[threadIdx.x] = make_uint4(threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x);
    barrier_cluster_ordered(); // the tables of all blocks are complete
    const smem_addr own_s = cvta_to_shared(&table[threadIdx.x]);
    smem_addr at_s = OWN ? own_s : mapa(own_s, FIRST ? 0 : (rank + 1) % size);
    unsigned sum = 0;
#pragma unroll 8
    for (int i = 0; i < ROUNDS; ++i, at_s += step) {
        const uint4 x = OWN ? ld_shared_128(at_s) : ld_cluster_128(at_s);
        sum += x.x + x.y + x.z + x.w;
    }
    barrier_cluster_ordered(); // no block exits while its table is read
    const unsigned there = 4 * ROUNDS * threadIdx.x;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        out[i] = sum == there ? in[i] : NAN;
}

template <int CLUSTER, bool FIRST>
static void reads(const float *in, float *out, int rows, int cols) {
    const auto kernel = read_kernel<CLUSTER == 1, FIRST>;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CLUSTER;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(BLOCKS);
    config.blockDim = dim3(THREADS);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (CLUSTER > 8)
        MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    MUST(cudaLaunchKernelEx(&config, kernel, in, out, rows * cols, (unsigned)CLUSTER, 0));
}

static bool good(const float *in, const float *out, int rows, int cols) {
    return memcmp(in, out, sizeof *in * rows * cols) == 0;
}

int main(void) {
    const double bytes = 16.0 * ROUNDS * BLOCKS * THREADS;
    const auto gbs = [](double bytes_a_clock) { return FIGURES.sms * FIGURES.ghz * bytes_a_clock; };
    const char *const own = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum";
    const char *const dsmem = "l1tex__m_xbar2l1tex_read_bytes_mem_dshared_op_ld.sum";
    const pattern p = {"DSMEM", same_size, good, 132, THREADS, bytes, small_integer};
    const variant variants[] = {
        {"own", reads<1, false>, gbs(128), "shared memory", own},
        {"the next of 2", reads<2, false>, gbs(32), "the network", dsmem},
        {"the next of 4", reads<4, false>, gbs(32), "the network", dsmem},
        {"the next of 8", reads<8, false>, gbs(32), "the network", dsmem},
        {"the next of 16", reads<16, false>, gbs(32) * 112 / 132, "SMs that idle", dsmem},
        {"the first of 8", reads<8, true>, gbs(32) / 8, "one SM's port", dsmem},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
