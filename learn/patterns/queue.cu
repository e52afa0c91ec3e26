// SPDX-License-Identifier: BSD-3-Clause
// queue: tiles of unequal cost, assigned to blocks in advance or taken from a queue. A tile is 64
// floats that go through cost(t) steps.
//
//   contiguous        Block b has the b-th part of the tiles. If the cost grows with t, the last
//                     part is the slowest.
//   strided           Every gridDim-th tile. It evens out slow growth, but not random differences.
//   queue             A free block takes the next tile. It costs one atomic addition a tile, and
//                     barriers that share the number with all threads.
//   queue, longest    The same, largest tiles first, so that no long tile starts when the others
//                     are nearly done.
//
// Measured on one H100: 356, 298, 297 and 211 us.
//
// The costs resemble attention with a causal mask or sequences of mixed lengths. 4 tiles in 64 cost
// 32 times the others, which grow from 1 to 2. The prediction simulates the schedule on the host: a
// step takes a fixed number of clocks, and the block that is free first takes the next tile.
#include "measure.cuh"

enum {
    THREADS = 64,
    BLOCKS = 132, // one an SM
    STEP = 64,    // dependent multiply-adds of a step
};
// clocks of a step: a multiply-add waits 4 clocks for the one before it
static constexpr double CLOCKS = 4.25 * STEP;

__device__ unsigned queue_head;

static __host__ __device__ int cost(int t, int tiles) {
    const unsigned chance = (unsigned)t * 2654435761u >> 26; // 0 .. 63
    const int usual = 16 + (int)(16ll * t / tiles);
    return chance < 4 ? 32 * usual : usual;
}

enum Order {
    CONTIGUOUS,
    STRIDED,
    QUEUE,
    LONGEST
};
static __host__ __device__ int last_tile(int block, int tiles) {
    return (int)((long long)(block + 1) * tiles / BLOCKS);
}

__global__ void __launch_bounds__(THREADS)
    tiles_kernel(const float *in, float *out, int n, int tiles, Order order, const int *sorted,
                 float one) {
    __shared__ int next;
    const int block = blockIdx.x;
    for (int j = 0;; ++j) {
        int t = order == CONTIGUOUS ? last_tile(block - 1, tiles) + j : block + j * BLOCKS;
        if (order >= QUEUE) {
            __syncthreads(); // every thread has read the last number
            if (threadIdx.x == 0) next = atomicAdd(&queue_head, 1);
            __syncthreads(); // the next number is in shared memory
            t = next;
        }
        if (t >= (order == CONTIGUOUS ? last_tile(block, tiles) : tiles)) return;
        if (order == LONGEST) t = sorted[t];
        const int i = t * THREADS + threadIdx.x;
        const float by = (float)(threadIdx.x % 2);
        float x = i < n ? in[i] : 0;
        for (int step = cost(t, tiles); step > 0; --step) {
#pragma unroll
            for (int k = 0; k < STEP; ++k) x = fmaf(x, one, k % 2 ? by : -by);
        }
        if (i < n) out[i] = x;
    }
}

static int *sorted_tiles(int tiles) { // numbers of the tiles on the host, largest first
    int *t = (int *)malloc(tiles * sizeof *t), at = 0;
    for (int c = 32 * 32; c > 0; --c)
        for (int i = 0; i < tiles; ++i)
            if (cost(i, tiles) == c) t[at++] = i;
    return t;
}

template <Order ORDER> static void launch(const float *in, float *out, int rows, int cols) {
    static int *sorted, sorted_for;
    const int n = rows * cols, tiles = (n + THREADS - 1) / THREADS;
    if (ORDER == LONGEST && sorted_for != tiles) {
        int *on_host = sorted_tiles(tiles);
        if (sorted) MUST(cudaFree(sorted));
        MUST(cudaMalloc((void **)&sorted, tiles * sizeof(int)));
        MUST(cudaMemcpy(sorted, on_host, tiles * sizeof(int), cudaMemcpyDefault));
        free(on_host);
        sorted_for = tiles;
    }
    void *head = NULL;
    MUST(cudaGetSymbolAddress(&head, queue_head));
    MUST(cudaMemsetAsync(head, 0, sizeof(unsigned)));
    tiles_kernel<<<BLOCKS, THREADS>>>(in, out, n, tiles, ORDER, sorted, 1);
}

// Simulates a schedule: us until the last block ends.
static double play(Order order, int tiles) {
    double busy[BLOCKS] = {}, most = 0;
    int *sorted = sorted_tiles(tiles);
    for (int t = 0; t < tiles; ++t) {
        int block = 0, tile = order == LONGEST ? sorted[t] : t;
        if (order == CONTIGUOUS)
            while (t >= last_tile(block, tiles)) ++block;
        if (order == STRIDED) block = t % BLOCKS;
        for (int b = 0; order >= QUEUE && b < BLOCKS; ++b)
            if (busy[b] < busy[block]) block = b;
        // taking from the queue adds a trip to L2
        busy[block] += cost(tile, tiles) * CLOCKS + (order >= QUEUE ? 900 : 600);
        most = fmax(most, busy[block]);
    }
    free(sorted);
    return most / FIGURES.ghz / 1e3;
}

// every step adds and subtracts the same, so out equals in
static bool good(const float *in, const float *out, int rows, int cols) {
    for (int i = 0; i < rows * cols; ++i) {
        if (in[i] != out[i]) return false;
    }
    return true;
}

int main(void) {
    const int tiles = 132 * 20;
    const char *const active = "sm__cycles_active.min";
    const pattern p = {"queue", same_size, good, tiles, THREADS, 0, small_integer};
    const variant variants[] = {
        {"contiguous", launch<CONTIGUOUS>, play(CONTIGUOUS, tiles), "the slowest block", active},
        {"strided", launch<STRIDED>, play(STRIDED, tiles), "the slowest block", active},
        {"queue", launch<QUEUE>, play(QUEUE, tiles), "the last tile", active},
        {"queue, longest first", launch<LONGEST>, play(LONGEST, tiles), "the mean", active},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {512, 1024}};
    return run(p, variants, sizes);
}
