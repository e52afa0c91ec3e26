// SPDX-License-Identifier: BSD-3-Clause
// graph: 100 short steps, each of which needs all results of the step before. A step replaces x[i]
// by the mean of x[i] and its right neighbour (cyclic).
//
//   stream             one kernel a step; the host launches as fast as it can
//   graph              the same 100 kernels captured once and launched as one, so the host is out
//                      of the loop
//   persistent grid    one kernel whose blocks meet at a barrier in global memory after each step
//                      (ptx/flag.cuh)
//
// Measured on one H100, 100 steps: 466, 127 and 157 us.
//
// At this size the work of a step takes a few hundred ns. The time is spent between the steps.
#include "cuda/ptx/flag.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    STEPS = 100,
    MOST = 1 << 20
};
__device__ float odd_steps[MOST];
__device__ unsigned arrived;

static __host__ __device__ float mean(float a, float b) { return 0.5f * (a + b); }
static __device__ void step_of(const float *from, float *to,
                               int n) { // __ldcg, because L1 may hold the values of two steps ago
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
        to[i] = mean(__ldcg(from + i), __ldcg(from + (i + 1 < n ? i + 1 : 0)));
}

__global__ void __launch_bounds__(THREADS)
    step_kernel(const float *in, float *out, int n, int step) {
    step_of(step == 0 ? in : step % 2 ? odd_steps : out, step % 2 ? out : odd_steps, n);
}
__global__ void __launch_bounds__(THREADS) persistent_kernel(const float *in, float *out, int n) {
    for (int step = 0; step < STEPS; ++step) {
        step_of(step == 0 ? in : step % 2 ? odd_steps : out, step % 2 ? out : odd_steps, n);
        __syncthreads(); // all stores of the block come before its arrival
        if (threadIdx.x == 0) {
            red_add_release(&arrived);
            wait_count(&arrived, (step + 1) * gridDim.x);
        }
        __syncthreads(); // every block has arrived
    }
}
static_assert(STEPS % 2 == 0, "the last step writes out");

static int blocks_of(int n, int most) {
    const int blocks = (n + THREADS - 1) / THREADS;
    return blocks < most ? blocks : most;
}
static void launch_all(const float *in, float *out, int n, cudaStream_t stream) {
    for (int s = 0; s < STEPS; ++s)
        step_kernel<<<blocks_of(n, MOST), THREADS, 0, stream>>>(in, out, n, s);
}

static void stream(const float *in, float *out, int rows, int cols) {
    launch_all(in, out, rows * cols, 0);
}

static void graph(const float *in, float *out, int rows, int cols) {
    static const float *in_then, *out_then;
    static int n_then;
    static cudaGraphExec_t ready;
    const int n = rows * cols;
    if (!ready || in != in_then || out != out_then || n != n_then) {
        cudaStream_t captured;
        cudaGraph_t recorded;
        if (ready) MUST(cudaGraphExecDestroy(ready));
        MUST(cudaStreamCreate(&captured)); // the legacy stream cannot be captured
        MUST(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
        launch_all(in, out, n, captured);
        MUST(cudaStreamEndCapture(captured, &recorded));
        MUST(cudaGraphInstantiate(&ready, recorded, 0));
        MUST(cudaGraphDestroy(recorded));
        MUST(cudaStreamDestroy(captured));
        in_then = in;
        out_then = out;
        n_then = n;
    }
    MUST(cudaGraphLaunch(ready, 0));
}

static void persistent(const float *in, float *out, int rows, int cols) {
    void *counter = NULL;
    int n = rows * cols;
    MUST(cudaGetSymbolAddress(&counter, arrived));
    MUST(cudaMemsetAsync(counter, 0, sizeof(unsigned)));
    // A cooperative launch guarantees that all blocks run at once; otherwise one could wait for
    // ever.
    void *args[] = {&in, &out, &n};
    MUST(cudaLaunchCooperativeKernel((const void *)persistent_kernel, blocks_of(n, FIGURES.sms),
                                     THREADS, args, 0, 0));
}

static bool good(const float *in, const float *out, int rows, int cols) {
    const int n = rows * cols;
    float *x = (float *)malloc(n * sizeof *x);
    memcpy(x, in, n * sizeof *x);
    for (int s = 0; s < STEPS; ++s) {
        const float first = x[0];
        for (int i = 0; i < n; ++i) x[i] = mean(x[i], i + 1 < n ? x[i + 1] : first);
    }
    const bool same = memcmp(x, out, n * sizeof *x) == 0;
    free(x);
    return same;
}

int main(void) {
    // us a step: 2.3 for a launch by the host; 1.4 from the end of a kernel to the start of the
    // next in a graph; four trips to L2 of 0.3
    const pattern p = {"graph", same_size, good, 256, 256, 0, small_integer};
    const variant variants[] = {
        {"stream", stream, STEPS * 2.3, "launches", "nsys: gaps between kernels"},
        {"graph", graph, STEPS * 1.4, "kernels' ends", "nsys: gaps between kernels"},
        {"persistent grid", persistent, STEPS * 1.2, "L2's latency", "lts__t_sectors_op_red.sum"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
