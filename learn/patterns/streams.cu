// SPDX-License-Identifier: BSD-3-Clause
// streams: data in host memory goes to the GPU, through 256 multiply-adds, and back. Copies in both
// directions and the kernel can run at the same time.
//
//   one stream      copy in | compute | copy out, one after the other
//   four streams    Chunks of 1 MiB, each on the next of four streams: while one computes, others
//                   copy in and out.
//
// Measured on one H100: 51 and 76 GB/s.
//
// Events express the order: every stream waits for the beginning, and the end waits for every
// stream. The host waits for nothing. Memory is pinned, because the copy engine cannot read
// pageable memory directly.
#include "measure.cuh"

enum {
    THREADS = 256,
    STEPS = 256,
    STREAMS = 4,
    CHUNK = 1 << 18,
    MOST = 1 << 24 // floats
};

static __host__ __device__ float chain(float x) {
    for (int i = 0; i < STEPS; ++i) x = fmaf(x, 0.5f, 1.0f);
    return x;
}
__global__ void __launch_bounds__(THREADS) chain_kernel(float *x, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = chain(x[i]);
}

static float *buffer_g() {
    static float *buffer = make(MOST, false);
    return buffer;
}
static void steps(const float *in, float *out, int begin, int n, cudaStream_t stream) {
    float *const x = buffer_g() + begin;
    MUST(cudaMemcpyAsync(x, in + begin, n * sizeof *x, cudaMemcpyHostToDevice, stream));
    chain_kernel<<<(n + THREADS - 1) / THREADS, THREADS, 0, stream>>>(x, n);
    MUST(cudaMemcpyAsync(out + begin, x, n * sizeof *x, cudaMemcpyDeviceToHost, stream));
}

static void one_stream(const float *in, float *out, int rows, int cols) {
    steps(in, out, 0, rows * cols, 0);
}

static void four_streams(const float *in, float *out, int rows, int cols) {
    static cudaStream_t streams[STREAMS];
    static cudaEvent_t begun, done[STREAMS];
    if (!begun) {
        MUST(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
        for (int s = 0; s < STREAMS; ++s) {
            MUST(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
            MUST(cudaEventCreateWithFlags(&done[s], cudaEventDisableTiming));
        }
    }
    const int n = rows * cols;
    MUST(cudaEventRecord(begun));
    for (int s = 0; s < STREAMS; ++s) MUST(cudaStreamWaitEvent(streams[s], begun));
    for (int begin = 0, s = 0; begin < n; begin += CHUNK, s = (s + 1) % STREAMS)
        steps(in, out, begin, n - begin < CHUNK ? n - begin : CHUNK, streams[s]);
    for (int s = 0; s < STREAMS; ++s) {
        MUST(cudaEventRecord(done[s], streams[s]));
        MUST(cudaStreamWaitEvent(0, done[s]));
    }
}

static bool good(const float *in, const float *out, int rows, int cols) {
    float want[13]; // the result for each value of small_integer
    for (int v = -6; v <= 6; ++v) want[v + 6] = chain((float)v);
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != want[(int)in[i] + 6]) return false;
    }
    return true;
}

int main(void) {
    // PCIe 5.0 x16 gives 55 GB/s each way, and the kernel takes next to no time. Only the first
    // copy and the last overlap with nothing.
    const pattern p = {"streams", same_size, good, 4096, 4096, 8.0 * MOST, small_integer, true};
    const double chunks = (double)MOST / CHUNK;
    const variant variants[] = {
        {"one stream", one_stream, 55, "PCIe, one way", "nsys: the timeline's copies"},
        {"four streams", four_streams, 2 * 55 * chunks / (chunks + 2), "PCIe, both ways",
         "nsys: the timeline's copies"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}, {1025, 1024}};
    return run(p, variants, sizes);
}
