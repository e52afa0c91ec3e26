// SPDX-License-Identifier: BSD-3-Clause
// vote: the sum of a block's 256 numbers of 4 bits. The numbers are in registers, and a warp adds
// them up in five ways.
//
//   shuffle    five steps of shuffle and addition, for any type
//   redux      __reduce_add_sync: one instruction, only for 32-bit integers
//   ballot     one vote for each of the 4 bits gives the bits of 32 lanes as one word, whose ones
//              are counted
//   match      __match_any_sync finds the lanes with the same number. One lane for each number adds
//              it as often as it occurs, which suits sums by key.
//   count      __syncthreads_count for each of the 4 bits: the vote of the whole block, one barrier
//              each
//
// Measured on one H100: 51, 25, 80, 302 and 158 us, 8 us of which are the launch.
//
// A vote gives a set of lanes as a word. If lanes append to a list, counting the lanes below gives
// each its place and saves a scan, too.
#include "cuda/tile/reduce.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BITS = 4,
    ROUNDS = 256,
    BLOCKS = 132 * 8
};
static const unsigned ALL = 0xffffffffu;

// The sum over the warp, at least in lane 0. Count returns the sum over the block, in the first
// warp.
struct Shuffle {
    static __device__ unsigned sum(unsigned x) { return warp_sum(x); }
};
struct Redux {
    static __device__ unsigned sum(unsigned x) { return __reduce_add_sync(ALL, x); }
};
struct Ballot {
    static __device__ unsigned sum(unsigned x) {
        unsigned all = 0;
        for (int b = 0; b < BITS; ++b) all += __popc(__ballot_sync(ALL, x >> b & 1)) << b;
        return all;
    }
};
struct Match {
    // the first lane of each number adds it times the count of its lanes, by redux
    static __device__ unsigned sum(unsigned x) {
        const unsigned same = __match_any_sync(ALL, x);
        const bool first = __ffs(same) - 1 == (int)(threadIdx.x % 32);
        return __reduce_add_sync(ALL, first ? x * __popc(same) : 0);
    }
};
struct Count {
    static __device__ unsigned sum(unsigned x) {
        unsigned all = 0;
        for (int b = 0; b < BITS; ++b) all += __syncthreads_count(x >> b & 1) << b;
        return threadIdx.x < 32 ? all : 0;
    }
};

// `step` is 0, which the compiler cannot know, so it keeps every round. Inputs are 0 .. 15.
template <class How>
__global__ void __launch_bounds__(THREADS)
    vote_kernel(const float *in, float *out, int n, unsigned step) {
    __shared__ unsigned block_sum;
    if (threadIdx.x == 0) block_sum = 0;
    const int i = blockIdx.x * THREADS + threadIdx.x;
    const unsigned x = i < n ? (unsigned)in[i] : 0;
    unsigned sum = 0;
#pragma unroll 4
    for (unsigned r = 0; r < ROUNDS; ++r) sum += How::sum(x + r * step);
    __syncthreads(); // block_sum is 0
    if (threadIdx.x % 32 == 0) atomicAdd(&block_sum, sum);
    __syncthreads(); // the sums of all warps are added
    if (threadIdx.x == 0) out[blockIdx.x] = (float)(block_sum / ROUNDS);
}

static int out_size(int rows, int cols) { return (rows * cols + THREADS - 1) / THREADS; }
template <class How> static void launch(const float *in, float *out, int rows, int cols) {
    vote_kernel<How><<<out_size(rows, cols), THREADS>>>(in, out, rows * cols, 0);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int b = 0; b < out_size(rows, cols); ++b) {
        float sum = 0;
        for (int i = b * THREADS; i < (b + 1) * THREADS && i < rows * cols; ++i) sum += in[i];
        if (out[b] != sum) return false;
    }
    return true;
}
static float nibble(int i) { return (float)((unsigned)i * 2654435761u >> 28); }

int main(void) {
    // Clocks of an SM for one round of a warp: a shuffle 1, a redux 2, a count of ones 2 (as a
    // special function). A match of 16 different numbers takes 16, and needs a redux and two
    // counts. The vote of a block takes 30 for each bit.
    const auto us = [](double clocks) { return 64.0 * ROUNDS * clocks / FIGURES.ghz / 1e3; };
    const pattern p = {"vote", out_size, good, BLOCKS, THREADS, 0, nibble};
    const char *const all = "smsp__inst_executed.sum",
                      *const barrier =
                          "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio";
    const variant variants[] = {
        {"shuffle", launch<Shuffle>, us(5), "shuffles", "l1tex__data_pipe_lsu_wavefronts.sum"},
        {"redux", launch<Redux>, us(2), "redux", all},
        {"ballot", launch<Ballot>, us(2.0 * BITS), "counts of ones",
         "smsp__inst_executed_pipe_xu.sum"},
        {"match", launch<Match>, us(16 + 2 + 4), "match", all},
        {"count", launch<Count>, us(30.0 * BITS / 8), "barriers", barrier},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
