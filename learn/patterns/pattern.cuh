// SPDX-License-Identifier: BSD-3-Clause
// pattern: what every example of this folder shares: a table of variants, the bounds that they are
// predicted by, and small helpers. measure.cuh runs them.
//
// Every variant states its bound before it runs. The bound follows from the bank model of
// csrc/cuda/layout/banks.cuh and a few figures of the device. On a GPU each variant is checked on
// awkward sizes, timed, and printed in one line. Without a GPU only the predictions are printed.
//
// PATTERN_CHECK=N checks the sizes of at most N elements and measures nothing, which suits the
// sanitizers.
#ifndef PATTERN_CUH
#define PATTERN_CUH

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/layout/banks.cuh"

#define MUST(call)                                                        \
    do {                                                                  \
        cudaError_t error_ = (call);                                      \
        if (error_ != cudaSuccess) {                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                    cudaGetErrorString(error_));                          \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

// The device figures behind the predictions. Without a GPU they are those of an H200.
struct figures {
    bool gpu;
    int sms;
    double ghz;
    double
        // 0.865 of the nominal rate: what reading reaches on an H200
        // (benchmarks/results/nvidia-h200.csv)
        memory_gbs;
    // to and from all SMs, in whole sectors of 32 bytes (learn/benchmarks/ladder_model.py)
    double l2_gbs;
};

static inline figures find_figures() {
    figures f = {false, 132, 1.98, 4250, 8000};
    int devices = 0, khz = 0, memory_khz = 0, bits = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return f;
    f.gpu = true;
    MUST(cudaDeviceGetAttribute(&f.sms, cudaDevAttrMultiProcessorCount, 0));
    MUST(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    MUST(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0));
    MUST(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    f.ghz = khz * 1e-6;
    f.memory_gbs = 0.865 * 2 * memory_khz * 1e3 * bits / 8 * 1e-9;
    return f;
}
static const figures FIGURES = find_figures();

struct variant {
    const char *name;
    void (*launch)(const float *in, float *out, int rows, int cols);
    double predicted;    // in the pattern's unit
    const char *limiter; // the unit that it waits for
    const char *counter; // the profiler's counter to look at
    bool (*good)(const float *in, const float *out, int rows,
                 int cols);                              // NULL: that of the pattern
    void (*before)(const float *in, int rows, int cols); // called before each launch, untimed
};

struct pattern {
    const char *title;
    int (*out_size)(int rows, int cols);
    bool (*good)(const float *in, const float *out, int rows, int cols); // the check, on the host
    int rows, cols;                                                      // the measured size
    double bytes;          // bytes (or FLOPs) that the result needs; 0: report us
    float (*value)(int i); // element i of the input
    bool host;             // in and out are pinned host memory
    const char *unit;      // of the predictions; NULL: GB/s or us
    // Dependent steps in one launch. If it is set, figures are the time of one step in ns.
    double steps;
};

// The unit of a pattern's figures, and the figure of a launch that took `us`.
static inline const char *unit_of(const pattern &p) {
    return p.unit ? p.unit : p.bytes > 0 ? "GB/s" : "us";
}
static inline double figure(const pattern &p, double us) {
    return p.bytes > 0 ? p.bytes / 1e3 / us : p.steps > 0 ? us * 1e3 / p.steps : us;
}

// Checks that allow for rounding record the error of the worst element here. It is printed in the
// line of the variant.
static double worst_error;
static inline bool within(double error, double most) {
    worst_error = fmax(worst_error, error);
    return error <= most; // NaN is not
}

static inline float small_integer(int i) {
    return (float)(i % 13 * 7 % 13 - 6);
} // sums of these are exact in any order
static inline int same_size(int rows, int cols) { return rows * cols; }

// ---- bounds, in GB/s: at most what memory gives -------------------------------------------------

static inline double memory_gbs() { return FIGURES.memory_gbs; }
static inline double capped(double gbs) { return fmin(gbs, FIGURES.memory_gbs); }
// GB/s if an access of a warp to 32 elements, of which `bytes` are useful, takes so many clocks of
// an SM, or so many sectors of L2.
static inline double sm_gbs(double clocks, double bytes) {
    return capped(FIGURES.sms * FIGURES.ghz * bytes / clocks);
}
static inline double l2_gbs(double sectors, double bytes) {
    return capped(FIGURES.l2_gbs * bytes / (32 * sectors));
}

#endif
