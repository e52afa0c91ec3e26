// SPDX-License-Identifier: BSD-3-Clause
// tma_copy: copies that one thread starts and that pass through no register.
//
//   threads       for comparison: 16 bytes a thread and pass
//   bulk          cp.async.bulk: contiguous bytes to shared memory, and from there to out. A block
//                 is one warp, and one lane starts all copies.
//   tensor map    cp.async.bulk.tensor: boxes of 8 rows x 256 columns. The map knows where the
//                 matrix ends.
//
// Measured on one H100: 2694, 2751 and 2698 GB/s, with 3.8 M, 2.3 M and 3.9 M instructions.
//
// Four stages: two for copies in, two for copies out. TMA moves multiples of 16 bytes. bulk leaves
// up to 3 last floats to threads. If rows are not multiples of 16 bytes, no tensor map exists, and
// bulk is used instead.
#include "cuda/tile/tma_ring.cuh"
#include "tensor_map.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 6,
    BOX_ROWS = 8,
    BOX_COLS = 256,
    TILE = BOX_ROWS * BOX_COLS, // floats of a stage: 8 KiB
    STAGES = 4,
    AHEAD = STAGES / 2
};

__global__ void __launch_bounds__(THREADS) threads_kernel(const float *in, float *out, int n) {
    const int first = blockIdx.x * THREADS + threadIdx.x;
    for (int i = first; i < n / 4; i += gridDim.x * THREADS)
        ((float4 *)out)[i] = ((const float4 *)in)[i];
    if (first < n % 4) out[n - 1 - first] = in[n - 1 - first];
}

// How tile number `tile` is loaded and stored. n: floats in all. across: boxes side by side.
struct Bulk {
    const float *in;
    float *out;
    int n;

    __device__ unsigned bytes(int tile) const { return min(n - tile * TILE, TILE) / 4 * 16; }
    __device__ void load(int tile, smem_addr to_s, smem_addr full_s) const {
        mbarrier_arrive_expect_tx(full_s, bytes(tile));
        if (bytes(tile) > 0) bulk_load(to_s, in + tile * TILE, bytes(tile), full_s);
    }
    __device__ void store(int tile, smem_addr from_s) const {
        if (bytes(tile) > 0) bulk_store(out + tile * TILE, from_s, bytes(tile));
    }
    __device__ void rest(int lane) const {
        if (lane < n % 4) out[n - 1 - lane] = in[n - 1 - lane];
    }
};
struct Boxes {
    CUtensorMap in, out;
    int across;

    __device__ tma_at at(int tile) const {
        return {{tile % across * BOX_COLS, tile / across * BOX_ROWS}};
    }
    __device__ void load(int tile, smem_addr to_s, smem_addr full_s) const {
        mbarrier_arrive_expect_tx(full_s, TILE * 4); // zeros outside the matrix count as bytes, too
        tma_load_5d(to_s, &in, at(tile), full_s);
    }
    __device__ void store(int tile, smem_addr from_s) const {
        tma_store_5d(&out, at(tile), from_s);
    }
    __device__ void rest(int) const {}
};

template <class How>
__global__ void __launch_bounds__(32) tma_kernel(const __grid_constant__ How how, int tiles) {
    __shared__ __align__(128) float stages[STAGES][TILE];
    __shared__ __align__(8) unsigned long long full[STAGES];
    const int count = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (blockIdx.x == 0) how.rest(threadIdx.x);
    if (threadIdx.x > 0) return;
    for (int s = 0; s < STAGES; ++s) mbarrier_init(cvta_to_shared(&full[s]), 1);
    fence_mbarrier_init();
    const auto load = [&](int j) {
        const smem_addr stage_s = cvta_to_shared(stages[j % STAGES]),
                        full_s = cvta_to_shared(&full[j % STAGES]);
        if (j < count) how.load(blockIdx.x + j * gridDim.x, stage_s, full_s);
    };
    for (int j = 0; j < AHEAD; ++j) load(j);
    for (int j = 0; j < count; ++j) {
        // the stage to be filled next is free: its store is AHEAD groups old
        tma_store_wait_group_read<AHEAD - 1>();
        load(j + AHEAD);
        mbarrier_wait(cvta_to_shared(&full[j % STAGES]), j / STAGES & 1);
        how.store(blockIdx.x + j * gridDim.x, cvta_to_shared(stages[j % STAGES]));
        tma_store_commit_group();
    }
    tma_store_wait_group_read<0>(); // shared memory must stay until TMA has read it
}

static void threads(const float *in, float *out, int rows, int cols) {
    threads_kernel<<<BLOCKS, THREADS>>>(in, out, rows * cols);
}
static void bulk(const float *in, float *out, int rows, int cols) {
    const Bulk how = {in, out, rows * cols};
    const int tiles = (how.n + TILE - 1) / TILE;
    tma_kernel<<<min(tiles, BLOCKS), 32>>>(how, tiles);
}
static void boxes(const float *in, float *out, int rows, int cols) {
    if (cols % 4 != 0) return bulk(in, out, rows, cols);
    const Boxes how = {map_of(in, rows, cols, BOX_ROWS, BOX_COLS),
                       map_of(out, rows, cols, BOX_ROWS, BOX_COLS),
                       (cols + BOX_COLS - 1) / BOX_COLS};
    const int tiles = how.across * ((rows + BOX_ROWS - 1) / BOX_ROWS);
    tma_kernel<<<min(tiles, BLOCKS), 32>>>(how, tiles);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    return memcmp(in, out, sizeof *in * rows * cols) == 0;
}

int main(void) {
    const pattern p = {"TMA copy", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const char *const instructions = "smsp__inst_executed.sum";
    const variant variants[] = {
        {"threads", threads, memory_gbs(), "memory", instructions},
        {"bulk", bulk, memory_gbs(), "memory", instructions},
        {"tensor map", boxes, memory_gbs(), "memory", instructions},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {13, 260}, {1024, 1024}};
    return run(p, variants, sizes);
}
