// scan: out[i] = in[0] + .. + in[i], two ways. A block scans a tile of 4096; a warp 512 of it, 4 neighbours a lane and pass.
//
//   three kernels   sums of tiles; their scan, by one block; then every tile again, on top of what came before it: 12 bytes each
//   look-back       one kernel (Merrill and Garland 2016): a tile says its own sum as soon as it has it, and its whole prefix
//                   when it knows that; who comes later adds up sums until it meets a prefix. 8 bytes each
// A tile's number is the order in which its block began, so what it waits for is running. Flag and value are one 64-bit word:
// no fence is needed between them.
#include "cuda/tile/reduce.cuh"
#include "measure.cuh"

typedef unsigned long long word;
constexpr int THREADS = 256, WARPS = THREADS / 32, PASSES = 4, WARP_TILE = PASSES * 128, TILE = WARPS * WARP_TILE;
constexpr int MAX_TILES = 1 << 14, SUM = 1, PREFIX = 2; // flags of a state: 0 says nothing yet
__device__ struct {
    word states[MAX_TILES];
    unsigned ticket;
} shared_by_tiles;
static __device__ float *sums() { return (float *)shared_by_tiles.states; }

static __device__ float warp_scan(float x) {
    for (int step = 1; step < 32; step *= 2) {
        const float below = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
}

// The lane's numbers of a tile, each with the sum of what precedes it in the tile; returns the tile's sum.
static __device__ float tile_scan(const float *in, int n, int begin, float (&x)[PASSES][4]) {
    __shared__ float warps[WARPS];
    const int warp = threadIdx.x / 32, at = begin + warp * WARP_TILE + threadIdx.x % 32 * 4;
    float before = 0;
    for (int p = 0; p < PASSES; ++p) {
        const int i = at + p * 128;
        if (i + 4 <= n) *(float4 *)x[p] = *(const float4 *)(in + i);
        for (int e = 0; e < 4; ++e)
            if (i + 4 > n) x[p][e] = i + e < n ? in[i + e] : 0;
    }
    for (int p = 0; p < PASSES; ++p) {
        for (int e = 1; e < 4; ++e) x[p][e] += x[p][e - 1];
        const float up_to = warp_scan(x[p][3]), mine = before + up_to - x[p][3];
        for (int e = 0; e < 4; ++e) x[p][e] += mine;
        before += __shfl_sync(~0u, up_to, 31);
    }
    if (threadIdx.x % 32 == 0) warps[warp] = before;
    __syncthreads(); // every warp's sum is there
    float below = 0, all = 0;
    for (int w = 0; w < WARPS; ++w) below += w < warp ? warps[w] : 0, all += warps[w];
    for (int p = 0; p < PASSES; ++p)
        for (int e = 0; e < 4; ++e) x[p][e] += below;
    return all;
}

static __device__ void store(float *out, int n, int begin, const float (&x)[PASSES][4], float prefix) {
    const int at = begin + threadIdx.x / 32 * WARP_TILE + threadIdx.x % 32 * 4;
    for (int p = 0; p < PASSES; ++p) {
        const float4 y = {x[p][0] + prefix, x[p][1] + prefix, x[p][2] + prefix, x[p][3] + prefix};
        const int i = at + p * 128;
        if (i + 4 <= n) *(float4 *)(out + i) = y;
        for (int e = 0; e < 4; ++e)
            if (i + 4 > n && i + e < n) out[i + e] = x[p][e] + prefix;
    }
}

static __device__ void say(int tile, int flag, float x) {
    *(volatile word *)&shared_by_tiles.states[tile] = (word)flag << 32 | __float_as_uint(x);
}

// One warp: the sum of all tiles before this one; lane 0 asks the nearest.
static __device__ float look_back(int tile) {
    float prefix = 0;
    for (int last = tile - 1;; last -= 32) {
        const int at = last - threadIdx.x % 32;
        word state = (word)PREFIX << 32; // of what lies before the first tile: 0
        do {
            if (at >= 0) state = *(volatile word *)&shared_by_tiles.states[at];
        } while (__any_sync(~0u, state >> 32 == 0));
        const int met = __ffs(__ballot_sync(~0u, state >> 32 == PREFIX));
        const bool counts = met == 0 || threadIdx.x % 32 < met;
        prefix += warp_sum(counts ? __uint_as_float((unsigned)state) : 0);
        if (met) return prefix;
    }
}

__global__ void __launch_bounds__(THREADS) look_back_kernel(const float *in, float *out, int n) {
    __shared__ int tile_s;
    __shared__ float prefix_s;
    if (threadIdx.x == 0) tile_s = (int)atomicAdd(&shared_by_tiles.ticket, 1);
    __syncthreads(); // the tile's number is there
    const int tile = tile_s;
    float x[PASSES][4];
    const float sum = tile_scan(in, n, tile * TILE, x);
    if (threadIdx.x == 0 && tile > 0) say(tile, SUM, sum);
    if (threadIdx.x < 32) {
        const float prefix = tile == 0 ? 0 : look_back(tile);
        if (threadIdx.x == 0) say(tile, PREFIX, prefix + sum), prefix_s = prefix;
    }
    __syncthreads(); // the prefix is there
    store(out, n, tile * TILE, x, prefix_s);
}

// ADDS: what comes before a tile lies in sums; else the tile's own sum goes there.
template <bool ADDS> __global__ void __launch_bounds__(THREADS) tile_kernel(const float *in, float *out, int n) {
    float x[PASSES][4];
    const float sum = tile_scan(in, n, blockIdx.x * TILE, x);
    if (ADDS) return store(out, n, blockIdx.x * TILE, x, blockIdx.x ? sums()[blockIdx.x - 1] : 0);
    if (threadIdx.x == 0) sums()[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(THREADS) sums_kernel(int tiles) {
    float x[PASSES][4], before = 0;
    for (int begin = 0; begin < tiles; begin += TILE) {
        const float sum = tile_scan(sums(), tiles, begin, x);
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
    void *shared;
    MUST(cudaGetSymbolAddress(&shared, shared_by_tiles));
    MUST(cudaMemsetAsync(shared, 0, sizeof shared_by_tiles));
    look_back_kernel<<<(rows * cols + TILE - 1) / TILE, THREADS>>>(in, out, rows * cols);
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
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
