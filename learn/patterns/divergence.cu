// SPDX-License-Identifier: BSD-3-Clause
// divergence: 256 multiply-adds an element in one of two chains, chosen by the element's sign. If
// the lanes of a warp differ, the warp executes both chains.
//
//   branch    if / else. Nearly every warp has both signs, so it runs both chains with some lanes
//             off.
//   vote      __any_sync asks first and skips a chain that no lane wants. Warps of one sign are
//             rare here, so nothing is saved.
//   select    One chain whose coefficients are selected by the sign. No lane is ever off.
//   sorted    A block sorts its elements by sign in shared memory, one sign from the left and the
//             other from the right. __ballot_sync counts the places. Then all warps but one run a
//             single chain.
//
// Measured on one H100: 374, 363, 445 and 488 GB/s.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    STEPS = 256
};

static __host__ __device__ float up(float x) {
#pragma unroll 16
    for (int i = 0; i < STEPS; ++i) x = fmaf(x, 0.5f, 1.0f);
    return x;
}
static __host__ __device__ float down(float x) {
#pragma unroll 16
    for (int i = 0; i < STEPS; ++i) x = fmaf(x, -0.25f, -3.0f);
    return x;
}

struct Branch {
    static __device__ float of(float x) { return x > 0 ? up(x) : down(x); }
};
struct Vote {
    static __device__ float of(float x) {
        float y = 0;
        if (__any_sync(__activemask(), x > 0)) y = x > 0 ? up(x) : y;
        if (__any_sync(__activemask(), !(x > 0))) y = x > 0 ? y : down(x);
        return y;
    }
};
struct Select {
    static __device__ float of(float x) {
        const float a = x > 0 ? 0.5f : -0.25f, b = x > 0 ? 1.0f : -3.0f;
#pragma unroll 16
        for (int i = 0; i < STEPS; ++i) x = fmaf(x, a, b);
        return x;
    }
};

template <class How>
__global__ void __launch_bounds__(THREADS) element_kernel(const float *in, float *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        out[i] = How::of(in[i]);
}

__global__ void __launch_bounds__(THREADS) sorted_kernel(const float *in, float *out, int n) {
    __shared__ float x_s[THREADS];
    __shared__ int from_s[THREADS], warps_s[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int begin = blockIdx.x * THREADS; begin < n; begin += gridDim.x * THREADS) {
        const float x = begin + threadIdx.x < n ? in[begin + threadIdx.x] : -1;
        const unsigned left = __ballot_sync(~0u, x > 0);
        if (lane == 0) warps_s[warp] = __popc(left);
        __syncthreads(); // the counts of all warps are in shared memory
        int before = __popc(left & ((1u << lane) - 1));
        for (int w = 0; w < warp; ++w) before += warps_s[w];
        const int at = x > 0 ? before : THREADS - 1 - (threadIdx.x - before);
        x_s[at] = x;
        from_s[at] = threadIdx.x;
        __syncthreads(); // the elements are sorted
        const int from = begin + from_s[threadIdx.x];
        const float y = Branch::of(x_s[threadIdx.x]);
        if (from < n) out[from] = y;
    }
}

template <void (*KERNEL)(const float *, float *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    KERNEL<<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    float want[13]; // the result for each value of small_integer
    for (int v = -6; v <= 6; ++v) want[v + 6] = v > 0 ? up((float)v) : down((float)v);
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != want[(int)in[i] + 6]) return false;
    }
    return true;
}

int main(void) {
    const pattern p = {"divergence", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const double chain =
        STEPS / 4.0; // clocks of a warp: an SM makes 128 multiply-adds a clock, those of 4 warps
    const char *const lanes = "smsp__thread_inst_executed_per_inst_executed.ratio",
                      *const fma = "multiply-adds";
    const variant variants[] = {
        {"branch", launch<element_kernel<Branch>>, sm_gbs(2 * chain, 256), fma, lanes},
        {"vote", launch<element_kernel<Vote>>, sm_gbs(2 * chain, 256), fma, lanes},
        {"select", launch<element_kernel<Select>>, sm_gbs(chain, 256), fma,
         "smsp__inst_executed_pipe_fma.sum"},
        // one warp of 8 runs both chains
        {"sorted", launch<sorted_kernel>, sm_gbs(chain * 9 / 8, 256), fma, lanes},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
