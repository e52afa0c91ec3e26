// transpose: out[cols][rows] = in[rows][cols]^T, four ways. Blocks of 32 x 8 threads, a 32 x 32 tile each.
//
//   naive      reads along rows; a warp's stores lie in 32 rows, so in 32 sectors of which each uses 4 bytes of 32
//   shared     the tile turns in shared memory; both global accesses are along rows, but a column of it lies in one bank
//   padded     rows of 33 floats: a column lies in 32 banks
//   swizzled   rows of 32 floats, column c of row r at c ^ r: as free of conflicts, and no byte is lost
#include "pattern.cuh"

enum {
    SIDE = 32,
    STEP = 8 // rows of threads
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
    static constexpr GK_HD int at(int row, int col) { return swizzle<5, 0, 5>::apply(row * SIDE + col); }
};

// Conflict degree of a warp that reads column 3 of the tile (any column is alike), or writes row 3.
template <class Tile> constexpr int ways_of(bool column) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = 4 * (column ? Tile::at(lane, 3) : Tile::at(3, lane));
    return ways(bytes, 4);
}
static_assert(ways_of<Plain>(true) == 32 && ways_of<Plain>(false) == 1, "the mistake that this example shows");
static_assert(ways_of<Padded>(true) == 1 && ways_of<Padded>(false) == 1, "free of conflicts");
static_assert(ways_of<Swizzled>(true) == 1 && ways_of<Swizzled>(false) == 1, "free of conflicts");

__global__ void __launch_bounds__(SIDE *STEP) naive_kernel(const float *in, float *out, int rows, int cols) {
    const int col = blockIdx.x * SIDE + threadIdx.x;
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        const int row = blockIdx.y * SIDE + i;
        if (row < rows && col < cols) out[(size_t)col * rows + row] = in[(size_t)row * cols + col];
    }
}

template <class Tile>
__global__ void __launch_bounds__(SIDE *STEP) tile_kernel(const float *in, float *out, int rows, int cols) {
    __shared__ float tile[Tile::bytes / 4];
    const int row0 = blockIdx.y * SIDE, col0 = blockIdx.x * SIDE, x = threadIdx.x;
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        if (row0 + i < rows && col0 + x < cols) tile[Tile::at(i, x)] = in[(size_t)(row0 + i) * cols + col0 + x];
    }
    __syncthreads(); // the tile is whole before columns of it are read
    for (int i = threadIdx.y; i < SIDE; i += STEP) {
        if (col0 + i < cols && row0 + x < rows) out[(size_t)(col0 + i) * rows + row0 + x] = tile[Tile::at(x, i)];
    }
}

static dim3 grid_of(int rows, int cols) { return dim3((cols + SIDE - 1) / SIDE, (rows + SIDE - 1) / SIDE); }

static void naive(const float *in, float *out, int rows, int cols) {
    naive_kernel<<<grid_of(rows, cols), dim3(SIDE, STEP)>>>(in, out, rows, cols);
}
template <class Tile> static void tiled(const float *in, float *out, int rows, int cols) {
    tile_kernel<Tile><<<grid_of(rows, cols), dim3(SIDE, STEP)>>>(in, out, rows, cols);
}

static int out_size(int rows, int cols) { return rows * cols; }
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            if (out[(size_t)c * rows + r] != in[(size_t)r * cols + c]) return false;
        }
    }
    return true;
}

int main(void) {
    // An SM and L2 exchange two sectors a clock: 2 clocks for a row of 32 floats, 16 for 32 sectors. Shared memory: a clock a
    // wavefront, for a row in and a column out.
    const variant variants[] = {
        {"naive", naive, bound_gbs(2 + 16, 8), "L1 to L2", "lts__t_sectors_srcunit_tex.sum"},
        {"shared", tiled<Plain>, bound_gbs(ways_of<Plain>(false) + ways_of<Plain>(true), 8), "shared memory",
         "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"},
        {"padded", tiled<Padded>, bound_gbs(2 + 2, 8), "memory", "dram__bytes_read.sum"},
        {"swizzled", tiled<Swizzled>, bound_gbs(2 + 2, 8), "memory", "dram__bytes_read.sum"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 3}, {31, 33}, {1024, 1024}};
    return run("transpose", variants, 4, sizes, 6, out_size, good, 8192, 8192, 2.0 * 4 * 8192 * 8192);
}
