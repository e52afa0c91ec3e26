// SPDX-License-Identifier: BSD-3-Clause
// groups: the sum of each row, by a warp's own shuffles and by cooperative groups of 8 or 32 lanes,
// of a block and of a cluster.
//
//   shuffles        one warp a row: five shuffles and additions written by hand
//   tile of 32      the same by tiled_partition<32> and cg::reduce, which compile to the same
//                   instructions for floats
//   tile of 8       four rows a warp: three shuffles a row, and a warp reads 128 bytes of each of 4
//                   rows at once
//   block           256 threads a row; the sums of the tiles go through shared memory
//   cluster of 4    1,024 threads a row. map_shared_rank gives a pointer into another block's
//                   shared memory. cluster.sync() is needed before it is read, and again before its
//                   owner exits.
//
// Measured on one H100: 2835, 2841, 2807, 2911 and 1291 GB/s. The cluster pays for two memory
// fences a row.
//
// A group names the threads that take part, so a function that takes one states what it needs of
// its caller. It costs nothing if its size is a compile-time constant.
#include "measure.cuh"

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

enum {
    THREADS = 256
};

// The part of a row's sum that lane `lane` of `lanes` lanes adds up. It reads 16 bytes at a time if
// the row's length allows it.
static __device__ float part_of(const float *row, int cols, int lane, int lanes) {
    float sum = 0;
    if (cols % 4 == 0) {
#pragma unroll 4
        for (int i = lane; i < cols / 4; i += lanes) {
            const float4 x = ((const float4 *)row)[i];
            sum += (x.x + x.y) + (x.z + x.w);
        }
    } else {
        for (int i = lane; i < cols; i += lanes) sum += row[i];
    }
    return sum;
}

__global__ void __launch_bounds__(THREADS)
    shuffle_kernel(const float *in, float *out, int rows, int cols) {
    const int row = (blockIdx.x * THREADS + threadIdx.x) / 32;
    if (row >= rows) return;
    float sum = part_of(in + (size_t)row * cols, cols, threadIdx.x % 32, 32);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (threadIdx.x % 32 == 0) out[row] = sum;
}

template <int LANES>
__global__ void __launch_bounds__(THREADS)
    tile_kernel(const float *in, float *out, int rows, int cols) {
    const auto tile = cg::tiled_partition<LANES>(cg::this_thread_block());
    const int row = blockIdx.x * tile.meta_group_size() + tile.meta_group_rank();
    if (row >= rows) return; // the whole tile returns
    const float sum = part_of(in + (size_t)row * cols, cols, tile.thread_rank(), LANES);
    const float all = cg::reduce(tile, sum, cg::plus<float>());
    if (tile.thread_rank() == 0) out[row] = all;
}

// The sum over the block; thread 0 uses it.
static __device__ float block_sum(const cg::thread_block &block, float sum, float *parts) {
    const auto tile = cg::tiled_partition<32>(block);
    const float of_tile = cg::reduce(tile, sum, cg::plus<float>());
    if (tile.thread_rank() == 0) parts[tile.meta_group_rank()] = of_tile;
    block.sync(); // the sums of all tiles are in shared memory
    float all = 0;
    for (int i = 0; i < THREADS / 32; ++i) all += parts[i];
    return all;
}
__global__ void __launch_bounds__(THREADS)
    block_kernel(const float *in, float *out, int, int cols) {
    __shared__ float parts[THREADS / 32];
    const float sum = part_of(in + (size_t)blockIdx.x * cols, cols, threadIdx.x, THREADS);
    const float all = block_sum(cg::this_thread_block(), sum, parts);
    if (threadIdx.x == 0) out[blockIdx.x] = all;
}

__global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(THREADS)
    cluster_kernel(const float *in, float *out, int, int cols) {
    __shared__ float parts[THREADS / 32], mine;
    const cg::cluster_group cluster = cg::this_cluster();
    const int row = blockIdx.x / cluster.num_blocks();
    const float sum =
        part_of(in + (size_t)row * cols, cols, cluster.thread_rank(), cluster.num_threads());
    const float of_block = block_sum(cg::this_thread_block(), sum, parts);
    if (threadIdx.x == 0) mine = of_block;
    cluster.sync(); // the sums of all blocks are complete
    if (cluster.thread_rank() == 0) {
        float all = 0;
        for (unsigned b = 0; b < cluster.num_blocks(); ++b)
            all += *cluster.map_shared_rank(&mine, b);
        out[row] = all;
    }
    cluster.sync(); // no block exits while its sum is read
}

template <void (*KERNEL)(const float *, float *, int, int), int LANES>
static void launch(const float *in, float *out, int rows, int cols) {
    const int blocks =
        LANES >= THREADS ? rows * (LANES / THREADS) : (rows * LANES + THREADS - 1) / THREADS;
    KERNEL<<<blocks, THREADS>>>(in, out, rows, cols);
}

static int out_size(int rows, int) { return rows; }
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        float sum = 0;
        for (int c = 0; c < cols; ++c) sum += in[(size_t)r * cols + c];
        if (out[r] != sum) return false;
    }
    return true;
}

int main(void) {
    const pattern p = {"groups", out_size, good, 16384, 4096, 4.0 * 16384 * 4096, small_integer};
    const char *const read = "dram__bytes_read.sum", *const instructions =
                                                         "smsp__inst_executed.sum";
    const variant variants[] = {
        {"shuffles", launch<shuffle_kernel, 32>, memory_gbs(), "memory", instructions},
        {"tile of 32", launch<tile_kernel<32>, 32>, memory_gbs(), "memory", instructions},
        {"tile of 8", launch<tile_kernel<8>, 8>, memory_gbs(), "memory", instructions},
        {"block", launch<block_kernel, THREADS>, memory_gbs(), "memory", read},
        {"cluster of 4", launch<cluster_kernel, 4 * THREADS>, memory_gbs(), "memory", read},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {5, 4097}, {1024, 1024}};
    return run(p, variants, sizes);
}
