// SPDX-License-Identifier: BSD-3-Clause
// divergence: 256 multiply-adds an element, one of two chains, as the element's sign says: a warp
// executes both where its lanes differ.
//
//   branch     if / else: nearly every warp has both signs, so runs both chains, each with some lanes off
//   vote       asks first: __any_sync skips a chain that no lane wants. Warps of one sign are rare here, so nothing is saved
//   select     one chain whose numbers are selected by the sign: no lane is ever off
//   sorted     a block puts its elements into shared memory, one sign from the left, the other from the right, at places that
//              __ballot_sync counts out; then all warps but one run one chain
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
        __syncthreads(); // every warp's count is there
        int before = __popc(left & ((1u << lane) - 1));
        for (int w = 0; w < warp; ++w) before += warps_s[w];
        const int at = x > 0 ? before : THREADS - 1 - (threadIdx.x - before);
        x_s[at] = x;
        from_s[at] = threadIdx.x;
        __syncthreads(); // the elements are in order
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
    float want[13]; // of each value of small_integer
    for (int v = -6; v <= 6; ++v) want[v + 6] = v > 0 ? up((float)v) : down((float)v);
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != want[(int)in[i] + 6]) return false;
    }
    return true;
}

int main(void) {
    const pattern p = {"divergence", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const double chain = STEPS / 4.0; // clocks: an SM has 128 multiply-adds, 4 warps' worth
    const char *const lanes = "smsp__thread_inst_executed_per_inst_executed.ratio",
                      *const fma = "multiply-adds";
    const variant variants[] = {
        {"branch", launch<element_kernel<Branch>>, sm_gbs(2 * chain, 256), fma, lanes},
        {"vote", launch<element_kernel<Vote>>, sm_gbs(2 * chain, 256), fma, lanes},
        {"select", launch<element_kernel<Select>>, sm_gbs(chain, 256), fma,
         "smsp__inst_executed_pipe_fma.sum"},
        // one warp of 8 runs both
        {"sorted", launch<sorted_kernel>, sm_gbs(chain * 9 / 8, 256), fma, lanes},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
