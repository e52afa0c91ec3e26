// SPDX-License-Identifier: BSD-3-Clause
// tma_tiles: the same tiles of a matrix copied to shared memory by cp.async and by TMA. Each row of
// a tile is then summed.
//
//   4 bytes a copy     cp.async: every thread computes 16 addresses a tile and issues 16 copies,
//                      some 8 instructions each
//   16 bytes a copy    cp.async: 4 addresses a thread and tile. Each copy is told whether it lies
//                      inside the matrix.
//   TMA                One thread names the corner of the tile. The map knows pitch and edges, and
//                      no other thread computes anything.
//
// Measured on one H100: 2482, 2706 and 2716 GB/s, with 72, 35 and 14 M instructions.
//
// The ring is the same for all: four stages of 8 KiB, three in flight, one barrier a tile. If rows
// are not multiples of 16 bytes, neither 16-byte copies nor a tensor map are possible, and 4-byte
// copies are used.
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "tensor_map.cuh"

enum {
    THREADS = 128,
    ROWS = 32,
    COLS = 64,
    TILE = ROWS * COLS, // floats
    STAGES = 4,
    BLOCKS = 132 * 6 // 6 blocks an SM, 32 KiB of shared memory each
};

struct Matrix {
    const float *in;
    int rows, cols, across; // across: tiles side by side
    __device__ int row(int tile) const { return tile / across * ROWS; }
    __device__ int col(int tile) const { return tile % across * COLS; }
};

template <int WIDTH> struct Copies {
    Matrix m;
    __device__ void load(int tile, smem_addr stage_s, smem_addr) const {
        constexpr int floats = WIDTH / 4;
        for (int i = threadIdx.x; i < TILE / floats; i += THREADS) {
            const int r = i * floats / COLS, c = i * floats % COLS, row = m.row(tile) + r,
                      col = m.col(tile) + c;
            const bool inside =
                row < m.rows &&
                col < m.cols; // cols is a multiple of a copy, so a copy is inside or outside
            const float *from = inside ? m.in + (size_t)row * m.cols + col : m.in;
            if (WIDTH == 16) cp_async_cg_16(stage_s + i * 16, from, inside ? 16 : 0);
            if (WIDTH == 4) cp_async_ca<4>(stage_s + i * 4, from, inside ? 4 : 0);
        }
    }
    __device__ void commit() const { cp_async_commit_group(); }
    __device__ void wait(smem_addr, unsigned) const { cp_async_wait_group<STAGES - 2>(); }
};
struct Boxes {
    Matrix m;
    CUtensorMap map;
    __device__ void load(int tile, smem_addr stage_s, smem_addr full_s) const {
        if (threadIdx.x > 0) return;
        mbarrier_arrive_expect_tx(full_s, TILE * 4); // zeros outside the matrix count as bytes, too
        tma_load_5d(stage_s, &map, {{m.col(tile), m.row(tile)}}, full_s);
    }
    __device__ void commit() const {}
    __device__ void wait(smem_addr full_s, unsigned parity) const { mbarrier_wait(full_s, parity); }
};

template <class How>
__global__ void __launch_bounds__(THREADS)
    tiles_kernel(const __grid_constant__ How how, float *out, int tiles) {
    __shared__ __align__(128) float stages[STAGES][TILE];
    __shared__ __align__(8) unsigned long long full[STAGES];
    const int count = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(cvta_to_shared(&full[s]), 1);
        fence_mbarrier_init();
    }
    __syncthreads(); // the barriers are initialised
    const auto load = [&](int j) {
        const int s = j % STAGES;
        if (j < count)
            how.load(blockIdx.x + j * gridDim.x, cvta_to_shared(stages[s]),
                     cvta_to_shared(&full[s]));
        how.commit();
    };
    for (int j = 0; j < STAGES - 1; ++j) load(j);
    for (int j = 0; j < count; ++j) {
        how.wait(cvta_to_shared(&full[j % STAGES]), j / STAGES & 1);
        __syncthreads(); // this tile has arrived, and every thread has read the previous tile
        load(j + STAGES - 1);
        const int tile = blockIdx.x + j * gridDim.x, r = threadIdx.x / 4, row = how.m.row(tile) + r;
        const float4 *from = (const float4 *)&stages[j % STAGES][r * COLS] + threadIdx.x % 4;
        float sum = 0;
        for (int i = 0; i < COLS / 16; ++i)
            sum += (from[4 * i].x + from[4 * i].y) + (from[4 * i].z + from[4 * i].w);
        sum = quad_sum(sum);
        if (threadIdx.x % 4 == 0 && row < how.m.rows)
            out[(size_t)row * how.m.across + tile % how.m.across] = sum;
    }
}

template <class How> static void start(const How &how, float *out) {
    const int tiles = how.m.across * ((how.m.rows + ROWS - 1) / ROWS);
    tiles_kernel<<<min(tiles, BLOCKS), THREADS>>>(how, out, tiles);
}
static int across(int cols) { return (cols + COLS - 1) / COLS; }
static void narrow(const float *in, float *out, int rows, int cols) {
    start(Copies<4>{{in, rows, cols, across(cols)}}, out);
}
static void wide(const float *in, float *out, int rows, int cols) {
    if (cols % 4 != 0) return narrow(in, out, rows, cols);
    start(Copies<16>{{in, rows, cols, across(cols)}}, out);
}
static void boxes(const float *in, float *out, int rows, int cols) {
    if (cols % 4 != 0) return narrow(in, out, rows, cols);
    start(Boxes{{in, rows, cols, across(cols)}, map_of(in, rows, cols, ROWS, COLS)}, out);
}

static int out_size(int rows, int cols) { return rows * across(cols); }
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int t = 0; t < across(cols); ++t) {
            float sum = 0;
            for (int c = t * COLS; c < min(cols, (t + 1) * COLS); ++c)
                sum += in[(size_t)r * cols + c];
            if (out[(size_t)r * across(cols) + t] != sum) return false;
        }
    }
    return true;
}

int main(void) {
    const pattern p = {"TMA tiles",  out_size, good, 8192, 8192, 4.0 * 8192 * 8192 * 65 / 64,
                       small_integer};
    const char *const instructions = "smsp__inst_executed.sum";
    const variant variants[] = {
        {"4 bytes a copy", narrow, memory_gbs(), "memory", instructions},
        {"16 bytes a copy", wide, memory_gbs(), "memory", instructions},
        {"TMA", boxes, memory_gbs(), "memory", instructions},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {13, 260}, {1024, 1024}};
    return run(p, variants, sizes);
}
