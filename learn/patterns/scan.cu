// SPDX-License-Identifier: BSD-3-Clause
// scan: out[i] = in[0] + .. + in[i], in two ways. A block scans a tile of 8192. A warp scans 512 of
// it, 4 consecutive numbers a lane and pass.
//
//   three kernels    The first sums the tiles, the second scans those sums in one block, the third
//                    scans every tile again and adds the prefix: 12 bytes an element.
//   look-back        One kernel: a block publishes the sum of its tile as soon as it has it, then
//                    looks back at the sums of others: 8 bytes an element.
//
// Measured on one H100: 1931 and 2754 GB/s.
//
// Merrill and Garland (2016) look back until they find a block that has published a whole prefix,
// so every prefix waits for an earlier one. Here blocks are persistent and all run at once. A block
// knows the prefix of its own last tile and looks back at most one round. It waits only for sums,
// which were published one round earlier, and adds them in a fixed order. Flag and value share one
// 64-bit word, so no fence is needed.
#include "cuda/tile/reduce.cuh"
#include "measure.cuh"

typedef unsigned long long word;
constexpr int THREADS = 512, WARPS = THREADS / 32, PASSES = 4, WARP_TILE = PASSES * 128,
              TILE = WARPS * WARP_TILE;
constexpr int BLOCKS = 2, MAX_TILES = 1 << 14; // BLOCKS an SM; in all at most THREADS
constexpr word SAID = 1ull << 32;              // the flag, above the 32 bits of the sum
__device__ word states[MAX_TILES];
static __device__ float *sums() { return (float *)states; }
static __device__ float warp_scan(float x) {
    for (int step = 1; step < 32; step *= 2) {
        const float below = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
}

static __device__ void load(const float *in, int n, int begin, float (&x)[PASSES][4]) {
    const int at = begin + threadIdx.x / 32 * WARP_TILE + threadIdx.x % 32 * 4;
    for (int p = 0; p < PASSES; ++p) {
        const int i = at + p * 128;
        if (i + 4 <= n) *(float4 *)x[p] = *(const float4 *)(in + i);
        for (int e = 0; e < 4; ++e)
            if (i + 4 > n) x[p][e] = i + e < n ? in[i + e] : 0;
    }
}

// Scans a tile: adds to each of the lane's numbers the sum of all that precede it in the tile.
// Returns the tile's sum.
static __device__ float tile_scan(float (&x)[PASSES][4]) {
    __shared__ __align__(16) float warps[WARPS];
    const int warp = threadIdx.x / 32;
    float before = 0;
    for (int p = 0; p < PASSES; ++p) {
        for (int e = 1; e < 4; ++e) x[p][e] += x[p][e - 1];
        const float up_to = warp_scan(x[p][3]), mine = before + up_to - x[p][3];
        for (int e = 0; e < 4; ++e) x[p][e] += mine;
        before += __shfl_sync(~0u, up_to, 31);
    }
    if (threadIdx.x % 32 == 0) warps[warp] = before;
    __syncthreads(); // the sums of all warps are in shared memory
    float below = 0, all = 0;
    for (int w = 0; w < WARPS; ++w) below += w < warp ? warps[w] : 0, all += warps[w];
    for (int i = 0; i < PASSES * 4; ++i) x[i / 4][i % 4] += below;
    return all;
}

static __device__ void store(float *out, int n, int begin, const float (&x)[PASSES][4],
                             float prefix) {
    const int at = begin + threadIdx.x / 32 * WARP_TILE + threadIdx.x % 32 * 4;
    for (int p = 0; p < PASSES; ++p) {
        const float4 y = {x[p][0] + prefix, x[p][1] + prefix, x[p][2] + prefix, x[p][3] + prefix};
        const int i = at + p * 128;
        if (i + 4 <= n) *(float4 *)(out + i) = y;
        for (int e = 0; e < 4; ++e)
            if (i + 4 > n && i + e < n) out[i + e] = x[p][e] + prefix;
    }
}
static __device__ void say(int tile, float x) {
    *(volatile word *)&states[tile] = SAID | __float_as_uint(x);
}

// The sum of the tiles between this block's last tile and this one. Every thread waits for the sum
// of one of them.
static __device__ float since_last(int tile) {
    __shared__ float parts[WARPS];
    const int back = threadIdx.x + 1;
    word said = SAID; // published, with a sum of 0
    do {
        if (back < gridDim.x && back <= tile) said = *(volatile word *)&states[tile - back];
    } while (said < SAID);
    const float part = warp_sum(__uint_as_float((unsigned)said));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
    __syncthreads(); // the parts of all warps are in shared memory
    float sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += parts[w];
    return sum;
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    look_back_kernel(const float *in, float *out, int n, int tiles) {
    float x[PASSES][4], next[PASSES][4], before = 0;
    load(in, n, blockIdx.x * TILE, next);
    float sum = tile_scan(next);
    if (threadIdx.x == 0) say(blockIdx.x, sum);
    __syncthreads(); // every thread has read the sums of the warps
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int later = tile + gridDim.x;
        const float own = sum;
        memcpy(x, next, sizeof x);
        load(in, n, later * TILE, next);
        sum = tile_scan(next);
        if (threadIdx.x == 0 && later < tiles) say(later, sum);
        before += since_last(tile);
        store(out, n, tile * TILE, x, before);
        before += own;
    }
}

// ADDS: scans a tile and adds the prefix in `sums`. Otherwise only stores the tile's own sum there.
template <bool ADDS>
__global__ void __launch_bounds__(THREADS) tile_kernel(const float *in, float *out, int n) {
    float x[PASSES][4];
    load(in, n, blockIdx.x * TILE, x);
    const float sum = tile_scan(x);
    if (ADDS) return store(out, n, blockIdx.x * TILE, x, blockIdx.x ? sums()[blockIdx.x - 1] : 0);
    if (threadIdx.x == 0) sums()[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(THREADS) sums_kernel(int tiles) {
    float x[PASSES][4], before = 0;
    for (int begin = 0; begin < tiles; begin += TILE) {
        load(sums(), tiles, begin, x);
        const float sum = tile_scan(x);
        store(sums(), tiles, begin, x, before);
        before += sum;
        __syncthreads(); // the warps' sums may be overwritten
    }
}

static void three_kernels(const float *in, float *out, int rows, int cols) {
    const int tiles = (rows * cols + TILE - 1) / TILE;
    tile_kernel<false><<<tiles, THREADS>>>(in, out, rows * cols);
    sums_kernel<<<1, THREADS>>>(tiles);
    tile_kernel<true><<<tiles, THREADS>>>(in, out, rows * cols);
}
static void looked_back(const float *in, float *out, int rows, int cols) {
    int n = rows * cols, tiles = (n + TILE - 1) / TILE;
    const int blocks = (int)fmin(tiles, fmin(BLOCKS * FIGURES.sms, THREADS));
    void *said, *args[] = {&in, &out, &n, &tiles};
    MUST(cudaGetSymbolAddress(&said, states));
    MUST(cudaMemsetAsync(said, 0, tiles * sizeof(word)));
    MUST(cudaLaunchCooperativeKernel((const void *)look_back_kernel, blocks, THREADS, args, 0, 0));
}

static bool good(const float *in, const float *out, int rows, int cols) {
    double sum = 0;
    for (int i = 0; i < rows * cols; ++i)
        if (out[i] != (float)(sum += in[i])) return false;
    return true;
}

int main(void) {
    const pattern p = {"scan", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const variant variants[] = {
        {"three kernels", three_kernels, memory_gbs() * 8 / 12, "memory", "dram__bytes_read.sum"},
        {"look-back", looked_back, memory_gbs(), "memory", "dram__bytes_read.sum"},
    };
    // the last: some rounds
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}, {2311, 2003}};
    return run(p, variants, sizes);
}
