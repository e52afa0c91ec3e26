// pattern: what every example here shares: a table of variants, their check on awkward sizes, their time, one line each.
//
// A variant states its bound before it runs: the share of memory's bandwidth that its slowest unit allows, by the model of
// csrc/cuda/tile/layout.cuh. Without a GPU the predictions are printed alone.
#ifndef PATTERN_CUH
#define PATTERN_CUH

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda/tile/layout.cuh"

// H200: SMs, clock in GHz, and bytes a second that reading reaches (benchmarks/results/nvidia-h200.json), in GB/s.
static const double SMS = 132, GHZ = 1.755, READ_GBS = 4250;

struct variant {
    const char *name;
    void (*launch)(const float *in, float *out, int rows, int cols);
    double gbs;          // predicted, at most READ_GBS
    const char *limiter; // the unit that this waits for
    const char *counter; // the one to look at
};

#define MUST(call)                                                                                     \
    do {                                                                                               \
        cudaError_t error_ = (call);                                                                   \
        if (error_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

// What an SM moves at so many clocks for a warp's 32 floats, read and written once, in GB/s of all SMs; memory is the ceiling.
static inline double bound_gbs(double clocks, double bytes_an_element) {
    const double gbs = SMS * GHZ * 32 * bytes_an_element / clocks;
    return gbs < READ_GBS ? gbs : READ_GBS;
}

// Runs every variant on each size, its result poisoned before; returns how many were wrong. `good` checks on the host.
static inline int check(const variant *v, int num, const int (*sizes)[2], int num_sizes, int (*out_size)(int, int),
                        bool (*good)(const float *in, const float *out, int rows, int cols)) {
    int wrong = 0;
    for (int s = 0; s < num_sizes; ++s) {
        const int rows = sizes[s][0], cols = sizes[s][1], n = rows * cols, m = out_size(rows, cols);
        float *in = (float *)malloc(n * sizeof *in), *out = (float *)malloc(m * sizeof *out), *in_g, *out_g;
        for (int i = 0; i < n; ++i) in[i] = (float)(i * 7 % 13 - 6); // sums of integers are exact in any order
        MUST(cudaMalloc(&in_g, n * sizeof *in));
        MUST(cudaMalloc(&out_g, m * sizeof *out));
        MUST(cudaMemcpy(in_g, in, n * sizeof *in, cudaMemcpyHostToDevice));
        for (int i = 0; i < num; ++i) {
            MUST(cudaMemset(out_g, 0xff, m * sizeof *out)); // NaN
            v[i].launch(in_g, out_g, rows, cols);
            MUST(cudaGetLastError());
            MUST(cudaMemcpy(out, out_g, m * sizeof *out, cudaMemcpyDeviceToHost));
            if (good(in, out, rows, cols)) continue;
            printf("WRONG  %s, %d x %d\n", v[i].name, rows, cols);
            ++wrong;
        }
        MUST(cudaFree(in_g));
        MUST(cudaFree(out_g));
        free(in);
        free(out);
    }
    return wrong;
}

// The median of 21 launches on rows x cols, in us.
static inline float median_us(const variant *v, const float *in, float *out, int rows, int cols) {
    float us[21];
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -3; i < 21; ++i) {
        MUST(cudaEventRecord(begin));
        v->launch(in, out, rows, cols);
        MUST(cudaEventRecord(end));
        MUST(cudaEventSynchronize(end));
        float ms;
        MUST(cudaEventElapsedTime(&ms, begin, end));
        int at = i < 0 ? 0 : i;
        for (; i > 0 && at > 0 && us[at - 1] > ms * 1000; --at) us[at] = us[at - 1];
        us[at] = ms * 1000;
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    return us[10];
}

static inline int run(const char *title, const variant *v, int num, const int (*sizes)[2], int num_sizes,
                      int (*out_size)(int, int), bool (*good)(const float *, const float *, int, int), int rows,
                      int cols, double bytes) {
    int devices = 0, wrong = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    float *in = NULL, *out = NULL;
    if (devices > 0) {
        wrong = check(v, num, sizes, num_sizes, out_size, good);
        MUST(cudaMalloc(&in, (size_t)rows * cols * sizeof *in));
        MUST(cudaMalloc(&out, (size_t)out_size(rows, cols) * sizeof *out));
        MUST(cudaMemset(in, 0, (size_t)rows * cols * sizeof *in));
    }
    printf("%s, %d x %d floats%s\n", title, rows, cols, devices ? "" : "; no GPU: predictions for an H200 alone");
    for (int i = 0; i < num; ++i) {
        printf("  %-22s predicted %5.0f GB/s, by %-14s", v[i].name, v[i].gbs, v[i].limiter);
        if (devices > 0) {
            const double gbs = bytes / 1e3 / median_us(&v[i], in, out, rows, cols);
            printf("  measured %5.0f, %.2f of it", gbs, gbs / v[i].gbs);
        }
        printf("  see %s\n", v[i].counter);
    }
    if (devices > 0) {
        MUST(cudaFree(in));
        MUST(cudaFree(out));
    }
    return wrong != 0;
}

#endif
