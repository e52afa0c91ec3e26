// SPDX-License-Identifier: BSD-3-Clause
// tma_reduce: the sums of a matrix's columns, added by threads or by the copy itself.
//
//   atomics        a thread adds 64 rows of a column, then makes one atomic addition
//   bulk reduce    A row comes to shared memory by cp.async.bulk and leaves by
//                  cp.reduce.async.bulk, which adds every float to out in L2. One lane starts all
//                  copies, and L2 makes all additions.
//
// Measured on one H100: 2769 and 1533 GB/s.
//
// TMA moves multiples of 16 bytes. If rows are not multiples of 16 bytes, atomics are used instead.
#include "cuda/ptx/bulk_reduce.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    ROWS = 64, // rows that a thread adds
    BLOCKS = 132 * 6,
    TILE = 2048, // floats of a stage
    STAGES = 4,
    AHEAD = STAGES / 2
};

__global__ void __launch_bounds__(THREADS)
    atomics_kernel(const float *in, float *out, int rows, int cols) {
    const int col = blockIdx.x * THREADS + threadIdx.x, row0 = blockIdx.y * ROWS;
    if (col >= cols) return;
    float sum = 0;
#pragma unroll 8
    for (int r = row0; r < min(row0 + ROWS, rows); ++r) sum += in[(size_t)r * cols + col];
    atomicAdd(&out[col], sum);
}

// A tile is up to 2048 floats of one row. across: tiles of a row.
__global__ void __launch_bounds__(32)
    bulk_kernel(const float *in, float *out, int rows, int cols, int across) {
    __shared__ __align__(128) float stages[STAGES][TILE];
    __shared__ __align__(8) unsigned long long full[STAGES];
    const int count = (rows * across - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (threadIdx.x > 0) return;
    for (int s = 0; s < STAGES; ++s) mbarrier_init(cvta_to_shared(&full[s]), 1);
    fence_mbarrier_init();
    const auto load = [&](int j) {
        const int tile = blockIdx.x + j * gridDim.x, col = tile % across * TILE,
                  bytes = min(cols - col, TILE) * 4;
        const smem_addr full_s = cvta_to_shared(&full[j % STAGES]);
        if (j >= count) return;
        mbarrier_arrive_expect_tx(full_s, bytes);
        bulk_load(cvta_to_shared(stages[j % STAGES]), in + (size_t)(tile / across) * cols + col,
                  bytes, full_s);
    };
    for (int j = 0; j < AHEAD; ++j) load(j);
    for (int j = 0; j < count; ++j) {
        const int col = (blockIdx.x + j * gridDim.x) % across * TILE;
        // the stage to be filled next is free: its copy out is AHEAD groups old
        tma_store_wait_group_read<AHEAD - 1>();
        load(j + AHEAD);
        mbarrier_wait(cvta_to_shared(&full[j % STAGES]), j / STAGES & 1);
        bulk_reduce_add_f32(out + col, cvta_to_shared(stages[j % STAGES]),
                            min(cols - col, TILE) * 4);
        tma_store_commit_group();
    }
    tma_store_wait_group_read<0>(); // shared memory must stay until TMA has read it
}

static void atomics(const float *in, float *out, int rows, int cols) {
    MUST(cudaMemsetAsync(out, 0, cols * sizeof *out));
    const dim3 grid((cols + THREADS - 1) / THREADS, (rows + ROWS - 1) / ROWS);
    atomics_kernel<<<grid, THREADS>>>(in, out, rows, cols);
}
static void bulk(const float *in, float *out, int rows, int cols) {
    if (cols % 4 != 0) return atomics(in, out, rows, cols);
    MUST(cudaMemsetAsync(out, 0, cols * sizeof *out));
    const int across = (cols + TILE - 1) / TILE;
    bulk_kernel<<<min(rows * across, BLOCKS), 32>>>(in, out, rows, cols, across);
}

static int out_size(int, int cols) { return cols; }
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int c = 0; c < cols; ++c) {
        double sum = 0;
        for (int r = 0; r < rows; ++r) sum += in[(size_t)r * cols + c];
        if (out[c] != (float)sum) return false;
    }
    return true;
}

int main(void) {
    // For each element L2 delivers 4 bytes and adds 4. It adds at half the rate if an addition is a
    // read and a write.
    const pattern p = {"TMA reduce", out_size, good, 8192, 8192, 4.0 * 8192 * 8192, small_integer};
    const char *const counter = "lts__t_sectors_op_red.sum";
    const variant variants[] = {
        {"atomics", atomics, memory_gbs(), "memory", counter},
        {"bulk reduce", bulk, l2_gbs(4 + 2 * 4, 128), "L2's atomics", counter},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {67, 4100}, {1024, 1024}};
    return run(p, variants, sizes);
}
