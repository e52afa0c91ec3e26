// SPDX-License-Identifier: BSD-3-Clause
// blelloch: an exclusive scan of each row, out[i] = in[0] + .. + in[i - 1], as a tree in shared
// memory (Blelloch 1990).
//
//   tree           Sums go up the tree, then prefixes go down. Step s touches words 2^s apart,
//                  which gives 2-way, 4-way, up to 32-way bank conflicts.
//   padded tree    Against tree: one word is left free after every 32, so element i is stored at i
//                  + i / 32.
//   shuffles       A scan in the registers of each warp, then a scan of the warps' sums. It needs
//                  one barrier instead of twenty.
//
// Measured on one H100: 885, 950 and 2192 GB/s. Padding removes the conflicts but gains only 7 %,
// because the barriers and the instructions of the steps remain.
//
// As it is usually printed, the tree halves the row's length and rounds down, which is right for
// powers of two and wrong for 17 or 1000. Here the tree has the size of the next power of two, and
// elements past the end of the row are 0. Each element takes one addition up and one down: n in
// all, not n log n.
#include "measure.cuh"

enum {
    MOST = 1024, // the longest row, in elements
    THREADS = MOST / 2
};

template <bool PADDED> static __host__ __device__ int place(int i) {
    return PADDED ? i + i / 32 : i;
}

template <bool PADDED>
__global__ void __launch_bounds__(THREADS)
    tree_kernel(const float *in, float *out, int cols, int power) {
    __shared__ float tree[MOST + MOST / 32];
    const float *row = in + (size_t)blockIdx.x * cols;
    for (int i = threadIdx.x; i < power; i += THREADS)
        tree[place<PADDED>(i)] = i < cols ? row[i] : 0;
    for (int apart = 1; apart < power; apart *= 2) {
        __syncthreads(); // the previous step is complete
        const int right = 2 * apart * (threadIdx.x + 1) - 1;
        if (right < power) tree[place<PADDED>(right)] += tree[place<PADDED>(right - apart)];
    }
    __syncthreads(); // the last element holds the sum of all
    if (threadIdx.x == 0) tree[place<PADDED>(power - 1)] = 0;
    for (int apart = power / 2; apart > 0; apart /= 2) {
        __syncthreads();
        const int right = 2 * apart * (threadIdx.x + 1) - 1;
        if (right >= power) continue;
        const float left = tree[place<PADDED>(right - apart)], above = tree[place<PADDED>(right)];
        tree[place<PADDED>(right - apart)] = above;
        tree[place<PADDED>(right)] = above + left;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < cols; i += THREADS)
        out[(size_t)blockIdx.x * cols + i] = tree[place<PADDED>(i)];
}

static __device__ float warp_scan(float x) {
    for (int step = 1; step < 32; step *= 2) {
        const float below = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
}
__global__ void __launch_bounds__(THREADS) shuffle_kernel(const float *in, float *out, int cols) {
    __shared__ float warps[THREADS / 32];
    const size_t at = (size_t)blockIdx.x * cols;
    const int i = threadIdx.x * 2, warp = threadIdx.x / 32;
    const float a = i < cols ? in[at + i] : 0, b = i + 1 < cols ? in[at + i + 1] : 0;
    const float up_to = warp_scan(a + b);
    if (threadIdx.x % 32 == 31) warps[warp] = up_to;
    __syncthreads(); // the sums of all warps are in shared memory
    float before = up_to - (a + b);
    for (int w = 0; w < warp; ++w) before += warps[w];
    if (i < cols) out[at + i] = before;
    if (i + 1 < cols) out[at + i + 1] = before + a;
}

template <bool PADDED> static void tree(const float *in, float *out, int rows, int cols) {
    int power = 1;
    while (power < cols) power *= 2;
    tree_kernel<PADDED><<<rows, THREADS>>>(in, out, cols, power);
}
static void shuffles(const float *in, float *out, int rows, int cols) {
    shuffle_kernel<<<rows, THREADS>>>(in, out, cols);
}

// GB/s if shared memory is the limit, from the model's clocks for the loads and stores of a row in
// all steps.
template <bool PADDED> static double tree_gbs() {
    double clocks = 4 * MOST / 32; // loading the row and storing the result
    for (int apart = 1; apart < MOST; apart *= 2) {
        for (int first = 0; first < MOST / 2 / apart; first += 32) {
            int left[32], right[32], lanes = 0;
            for (; lanes < 32 && first + lanes < MOST / 2 / apart; ++lanes) {
                const int i = 2 * apart * (first + lanes + 1) - 1;
                left[lanes] = 4 * place<PADDED>(i - apart);
                right[lanes] = 4 * place<PADDED>(i);
            }
            // accesses of the step up and of the step down
            clocks += 3 * ways_of_phase(left, 0, lanes, 4) + 4 * ways_of_phase(right, 0, lanes, 4);
        }
    }
    return capped(FIGURES.sms * FIGURES.ghz * 8 * MOST / clocks);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        float sum = 0;
        for (int c = 0; c < cols; ++c) {
            if (out[(size_t)r * cols + c] != sum) return false;
            sum += in[(size_t)r * cols + c];
        }
    }
    return true;
}

int main(void) {
    const pattern p = {"blelloch",   same_size, good, 1 << 15, MOST, 8.0 * MOST * (1 << 15),
                       small_integer};
    const char *const conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum";
    const variant variants[] = {
        {"tree", tree<false>, tree_gbs<false>(), "shared memory", conflicts},
        {"padded tree", tree<true>, tree_gbs<true>(), "shared memory", conflicts},
        {"shuffles", shuffles, memory_gbs(), "memory", conflicts},
    };
    const int sizes[][2] = {{1, 1}, {3, 17}, {2, 255}, {5, 1000}, {7, 1024}, {1000, 1023}};
    return run(p, variants, sizes);
}
