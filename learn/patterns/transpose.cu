// SPDX-License-Identifier: BSD-3-Clause
// transpose: out[cols][rows] = in[rows][cols]^T, in five ways. Blocks have 32 x 8 threads and a 32
// x 32 tile (tma: four).
//
//   naive       Reads are along rows. The stores of a warp lie in 32 rows, so in 32 sectors, of
//               which each uses 4 of 32 bytes.
//   shared      The tile is transposed in shared memory. Both global accesses are along rows, but a
//               column of the tile lies in one bank.
//   padded      Against shared: rows of 33 floats, so that a column lies in 32 banks.
//   swizzled    Against padded: rows of 32 floats, with column c of row r at c ^ r. It is as free
//               of conflicts and wastes no byte.
//   tma         Boxes of 128 rows x 32 floats come by TMA in its 128-byte swizzle. Threads
//               transpose blocks of 4 x 4 in registers by 16-byte accesses along diagonals. Four
//               boxes of 32 x 32 leave by TMA. Rows must be multiples of 16 bytes.
//
// Measured on one H100: 419, 1683, 2653, 2599 and 2747 GB/s.
#include "cuda/tile/tma_ring.cuh"
#include "tensor_map.cuh"

enum {
    SIDE = 32,
    STEP = 8, // rows of threads of a block
    BOXES = 4 // boxes of a block, by TMA
};

struct Plain {
    static constexpr int bytes = SIDE * SIDE * 4;
    static constexpr GK_HD int at(int row, int col) { return row * SIDE + col; }
};
struct Padded {
    static constexpr int bytes = SIDE * (SIDE + 1) * 4;
    static constexpr GK_HD int at(int row, int col) { return row * (SIDE + 1) + col; }
};
struct Swizzled {
    static constexpr int bytes = SIDE * SIDE * 4;
    static constexpr GK_HD int at(int row, int col) {
        return swizzle<5, 0, 5>::apply(row * SIDE + col);
    }
};

// Conflict degree if a warp reads column 3 of the tile or writes row 3. Other columns are alike.
template <class Tile> constexpr int ways_of(bool column) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        bytes[lane] = 4 * (column ? Tile::at(lane, 3) : Tile::at(3, lane));
    return ways(bytes, 4);
}
static_assert(ways_of<Plain>(true) == 32 && ways_of<Plain>(false) == 1,
              "the mistake that this example shows");
static_assert(ways_of<Padded>(true) == 1 && ways_of<Padded>(false) == 1, "free of conflicts");
static_assert(ways_of<Swizzled>(true) == 1 && ways_of<Swizzled>(false) == 1, "free of conflicts");

__global__ void __launch_bounds__(SIDE *STEP)
    naive_kernel(const float *in, float *out, int rows, int cols) {
    const int col = blockIdx.x * SIDE + threadIdx.x;
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        const int row = blockIdx.y * SIDE + i;
        if (row < rows && col < cols) out[(size_t)col * rows + row] = in[(size_t)row * cols + col];
    }
}

template <class Tile>
__global__ void __launch_bounds__(SIDE *STEP)
    tile_kernel(const float *in, float *out, int rows, int cols) {
    __shared__ float tile[Tile::bytes / 4];
    const int row0 = blockIdx.y * SIDE, col0 = blockIdx.x * SIDE, x = threadIdx.x;
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        if (row0 + i < rows && col0 + x < cols)
            tile[Tile::at(i, x)] = in[(size_t)(row0 + i) * cols + col0 + x];
    }
    __syncthreads(); // the tile is complete before its columns are read
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        if (col0 + i < cols && row0 + x < rows)
            out[(size_t)(col0 + i) * rows + row0 + x] = tile[Tile::at(x, i)];
    }
}

// ---- by TMA: thread t of a box takes 4 rows and a 16-byte chunk ---------------------------------

typedef smem_tile<SIDE, SIDE * 4> Box; // the layout of a box of 32 x 32 floats that TMA writes
// Reads 4 rows from 4 * across on at chunk `down`. Writes them as rows from 4 * down on at chunk
// `across`.
static constexpr GK_HD int down_of(int thread) { return thread % 8; }
static constexpr GK_HD int across_of(int thread) { return (thread % 8 + thread / 8) % 8; }

constexpr int diagonal_ways() {
    int most = 0;
    for (int i = 0; i < 4; ++i) {
        int in[32] = {}, out[32] = {};
        for (int lane = 0; lane < 32; ++lane) {
            in[lane] = Box::offset(4 * across_of(lane) + i, down_of(lane));
            out[lane] = Box::offset(4 * down_of(lane) + i, across_of(lane));
        }
        most = ways(in, 16) > most ? ways(in, 16) : most;
        most = ways(out, 16) > most ? ways(out, 16) : most;
    }
    return most;
}
static_assert(diagonal_ways() == 1, "free of conflicts");

__global__ void __launch_bounds__(64 * BOXES)
    tma_kernel(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out) {
    __shared__ __align__(1024) unsigned char from[BOXES * Box::bytes], to[BOXES * Box::bytes];
    __shared__ __align__(8) unsigned long long barrier;
    const smem_addr barrier_s = cvta_to_shared(&barrier);
    const int row0 = blockIdx.y * BOXES * SIDE, col0 = blockIdx.x * SIDE, box = threadIdx.x / 64,
              t = threadIdx.x % 64;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_s, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier_s, sizeof from);
        tma_load_5d(cvta_to_shared(from), &in, {{col0, row0}}, barrier_s);
    }
    __syncthreads(); // the barrier is initialised
    mbarrier_wait(barrier_s, 0);
    const smem_addr from_s = cvta_to_shared(from) + box * Box::bytes,
                    to_s = cvta_to_shared(to) + box * Box::bytes;
    uint4 x[4];
    for (int i = 0; i < 4; ++i)
        x[i] = ld_shared_128(from_s + Box::offset(4 * across_of(t) + i, down_of(t)));
    const uint4 columns[4] = {
        make_uint4(x[0].x, x[1].x, x[2].x, x[3].x), make_uint4(x[0].y, x[1].y, x[2].y, x[3].y),
        make_uint4(x[0].z, x[1].z, x[2].z, x[3].z), make_uint4(x[0].w, x[1].w, x[2].w, x[3].w)};
    for (int i = 0; i < 4; ++i)
        st_shared_128(to_s + Box::offset(4 * down_of(t) + i, across_of(t)), columns[i]);
    fence_proxy_async();
    __syncthreads(); // all stores into the boxes come before TMA reads them
    if (t == 0) {
        tma_store_5d(&out, {{row0 + box * SIDE, col0}}, to_s);
        tma_store_commit_group();
        tma_store_wait_group_read<0>(); // shared memory must stay until TMA has read it
    }
}

static dim3 grid_of(int rows, int cols) {
    return dim3((cols + SIDE - 1) / SIDE, (rows + SIDE - 1) / SIDE);
}

static void naive(const float *in, float *out, int rows, int cols) {
    naive_kernel<<<grid_of(rows, cols), dim3(SIDE, STEP)>>>(in, out, rows, cols);
}
template <class Tile> static void tiled(const float *in, float *out, int rows, int cols) {
    tile_kernel<Tile><<<grid_of(rows, cols), dim3(SIDE, STEP)>>>(in, out, rows, cols);
}

static void tma(const float *in, float *out, int rows, int cols) {
    if (rows % 4 != 0 || cols % 4 != 0) return tiled<Swizzled>(in, out, rows, cols);
    const dim3 grid((cols + SIDE - 1) / SIDE, (rows + BOXES * SIDE - 1) / (BOXES * SIDE));
    tma_kernel<<<grid, 64 * BOXES>>>(map_of(in, rows, cols, BOXES * SIDE, SIDE),
                                     map_of(out, cols, rows, SIDE, SIDE));
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            if (out[(size_t)c * rows + r] != in[(size_t)r * cols + c]) return false;
        }
    }
    return true;
}

int main(void) {
    // L2 takes 4 sectors for a row of 32 floats and 32 for a column. Shared memory takes one clock
    // a wavefront, for a row in and a column out.
    const pattern p = {"transpose", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const char *const conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum";
    const variant variants[] = {
        {"naive", naive, l2_gbs(4 + 32, 256), "sectors of L2", "lts__t_sectors_srcunit_tex.sum"},
        {"shared", tiled<Plain>, sm_gbs(ways_of<Plain>(false) + ways_of<Plain>(true), 256),
         "shared memory", conflicts},
        {"padded", tiled<Padded>, sm_gbs(2, 256), "memory", conflicts},
        {"swizzled", tiled<Swizzled>, sm_gbs(2, 256), "memory", conflicts},
        {"tma", tma, memory_gbs(), "memory", "smsp__inst_executed.sum"},
    };
    const int sizes[][2] = {{1, 1},   {17, 1},   {1, 255},    {4097, 1},
                            {31, 33}, {132, 36}, {1024, 1024}};
    return run(p, variants, sizes);
}
