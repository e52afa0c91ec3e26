// SPDX-License-Identifier: BSD-3-Clause
// double_buffer: tiles of 1024 floats go through shared memory, with 64 multiply-adds an element
// and one block an SM. The question is what hides the copies.
//
//   one buffer      copy | multiply | copy | multiply: nothing hides them
//   two buffers     The copy of tile j + 1 runs under the products of tile j. A step takes as long
//                   as the longer of the two.
//   four buffers    Copies run three steps ahead, so each step waits for a third of a copy.
//
// Measured on one H100: 836, 1336 and 1436 GB/s.
//
// The ring is the library's (tile/pipeline.cuh). It copies by cp.async, 16 bytes a thread, without
// passing through registers. A thread multiplies elements that other threads copied, so every step
// needs a barrier.
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/pipeline.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    TILE = 4 * THREADS,
    TILE_BYTES = 4 * TILE,
    STEPS = 64
};

// Runs COUNT independent chains of multiply-adds side by side, because a multiply-add waits 4
// clocks for the one before it.
template <int COUNT> static __host__ __device__ void chains(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        for (int c = 0; c < COUNT; ++c) x[c] = fmaf(x[c], 0.5f, 1.0f);
}

// Copies this thread's 16 bytes of a tile. The end of the input is copied float by float.
static __device__ void copy_step(smem_addr to_s, const float *in, int n, int tile) {
    const int i = tile * TILE + threadIdx.x * 4;
    to_s += threadIdx.x * 16;
    if (i + 4 <= n) return cp_async_cg_16(to_s, in + i);
    for (int e = 0; e < 4 && i + e < n; ++e) st_shared_f32(to_s + 4 * e, in[i + e]);
}

static __device__ void multiply_step(const float *tile_s, float *out, int n, int tile) {
    float x[4];
    for (int c = 0; c < 4; ++c) x[c] = tile_s[c * THREADS + threadIdx.x];
    chains(x);
    for (int c = 0; c < 4; ++c) {
        const int i = tile * TILE + c * THREADS + threadIdx.x;
        if (i < n) out[i] = x[c];
    }
}

__global__ void __launch_bounds__(THREADS)
    one_kernel(const float *in, float *out, int n, int tiles) {
    __shared__ __align__(16) float tile_s[TILE];
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        copy_step(cvta_to_shared(tile_s), in, n, tile);
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads(); // the copies of all threads have arrived
        multiply_step(tile_s, out, n, tile);
        __syncthreads(); // every thread has read them
    }
}

template <int STAGES>
__global__ void __launch_bounds__(THREADS)
    ring_kernel(const float *in, float *out, int n, int tiles) {
    __shared__ __align__(16) float stages_s[STAGES][TILE];
    const int steps = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    const auto copy = [&](int step, int stage) {
        if (step < steps)
            copy_step(cvta_to_shared(stages_s[stage]), in, n, blockIdx.x + step * gridDim.x);
    };
    cp_ring<STAGES> ring;
    for (int j = 0; j < STAGES - 1; ++j) {
        copy(j, j);
        ring.commit();
    }
    for (int j = 0; j < steps; ++j) {
        ring.wait(); // step j has arrived, and every warp has read the previous step
        copy(j + STAGES - 1, ring.write);
        ring.commit();
        multiply_step(stages_s[ring.read], out, n, blockIdx.x + j * gridDim.x);
        ring.advance();
    }
}

template <void (*KERNEL)(const float *, float *, int, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    const int tiles = (rows * cols + TILE - 1) / TILE, blocks = fmin(tiles, FIGURES.sms);
    KERNEL<<<blocks, THREADS>>>(in, out, rows * cols, tiles);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    float want[13]; // the result for each value of small_integer
    for (int v = -6; v <= 6; ++v) want[v + 6] = (float)v;
    chains(want);
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != want[(int)in[i] + 6]) return false;
    }
    return true;
}

int main(void) {
    const pattern p = {"double buffer",   same_size,    good, 8192, 8192,
                       8.0 * 8192 * 8192, small_integer};
    // us of a step: the latency of a copy from memory, and products at 128 a clock and SM
    const double copy_us = 0.8, multiply_us = TILE * STEPS / 128 / FIGURES.ghz / 1e3;
    const auto gbs = [&](double step_us) {
        return capped(FIGURES.sms * 2.0 * TILE_BYTES / step_us / 1e3);
    };
    const char *const waits =
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio";
    const variant variants[] = {
        {"one buffer", launch<one_kernel>, gbs(copy_us + multiply_us), "copy + products", waits},
        {"two buffers", launch<ring_kernel<2>>, gbs(fmax(copy_us, multiply_us)), "the copy", waits},
        {"four buffers", launch<ring_kernel<4>>, gbs(fmax(copy_us / 3, multiply_us)),
         "copy, products", "smsp__inst_executed_pipe_fma.sum"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
