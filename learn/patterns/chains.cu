// SPDX-License-Identifier: BSD-3-Clause
// chains: the time of one instruction if the next one needs its result. One warp computes a long
// chain of each, so nothing hides the latency.
//
//   multiply-add    x = 1 x + 0, both factors in registers
//   shuffle         each lane takes the value of its neighbour
//
// A warp scheduler hides a latency of 4 clocks with 4 warps, or with 4 independent instructions of
// one warp.
#include "measure.cuh"

enum {
    STEPS = 1 << 16,
    LANES = 32
};

// one is 1 and zero is 0. They are arguments, so that the compiler cannot leave the chain out.
__global__ void multiply_add_kernel(const float *in, float *out, float one, float zero, int steps) {
    float x = *in;
#pragma unroll 16
    for (int i = 0; i < steps; ++i) x = fmaf(x, one, zero);
    if (threadIdx.x == 0) *out = x;
}
static void multiply_add(const float *in, float *out, int, int steps) {
    multiply_add_kernel<<<1, LANES>>>(in, out, 1, 0, steps);
}

// After an even number of steps each lane has its own value again. After an odd one lane 0 has that
// of lane 1.
__global__ void shuffle_kernel(const float *in, float *out, int steps) {
    const float mine = *in + (float)threadIdx.x;
    float x = mine;
#pragma unroll 16
    for (int i = 0; i < steps; ++i) x = __shfl_xor_sync(0xffffffffu, x, 1);
    if (threadIdx.x == 0) *out = x - (float)(steps & 1);
}
static void shuffle(const float *in, float *out, int, int steps) {
    shuffle_kernel<<<1, LANES>>>(in, out, steps);
}

static int out_size(int, int) { return 1; }
static bool good(const float *in, const float *out, int, int) { return *out == *in; }
static double clocks(double count) { return count / FIGURES.ghz; }

int main(void) {
    const char *const waits = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio";
    const char *const short_stalls =
        "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio";
    const pattern p = {"chains", out_size, good, 1, STEPS, 0, small_integer, false, "ns", STEPS};
    const variant variants[] = {
        {"multiply-add", multiply_add, clocks(4), "4 clocks", waits},
        {"shuffle", shuffle, clocks(23), "23 clocks", short_stalls},
    };
    const int sizes[][2] = {{1, 1}, {1, 17}, {1, 1000}, {1, STEPS}};
    return run(p, variants, sizes);
}
